//! what runs now
