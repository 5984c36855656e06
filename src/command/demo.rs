//! demo

pub(crate) mod client;
