//! the embedded demo upstream
