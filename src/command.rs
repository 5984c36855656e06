//! one file per subcommand
