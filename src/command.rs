//! One file per subcommand.

pub mod demo;
