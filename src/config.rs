//! text to settings
