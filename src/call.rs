//! A call's identity, and the idempotency key that is made of it.
//!
//! Words: an *identity* is what the node says of a call in `params._meta["oz0/call"]` or the `Oz0-*` headers. A *key* names
//! the call toward its upstream. Pure: no store, no clock; what must be counted is said as a [`key::Derivation`].

pub mod identity;
pub mod key;
