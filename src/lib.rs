//! A sidecar between an agent node (an MCP client) and the remote MCP servers it calls.
//!
//! # The flow
//!
//! One direction, one value per stage; nothing reaches back.
//!
//! ```text
//! accept → classify → prepare → forward → relay → account
//! server   message    proxy     upstream  relay    account
//! ```
//!
//! [`server`] accepts connections and hands each request to [`proxy`], which is the table above as
//! code: it reads the body under a limit, has [`message`] say what it is, checks [`headers`], sends
//! it once through [`upstream`], and gives the answer to [`relay`]. Every exchange carries an
//! [`account::Account`] that becomes exactly one access-log line when the exchange ends.
//!
//! # The cancellation contract
//!
//! Owning is cancelling. Whatever an exchange holds upstream hangs on the future or the response
//! body that the node's connection owns. Dropping it closes the upstream's stream. [`inflight`]
//! knows what runs, so that a notification, a policy or a drain can end it too.
//!
//! # Limits
//!
//! Every queue, map, buffer and wait has a bound: see [`proxy::Limits`] and [`relay::Settings`].

pub mod account;
pub mod admin;
pub mod busy;
pub mod call;
pub mod cancel;
pub mod certificate;
pub mod client;
pub mod clock;
pub mod command;
pub mod config;
pub mod demo;
pub mod error;
pub mod exchange;
pub mod headers;
pub mod inflight;
pub mod ledger;
pub mod limits;
pub mod lines;
pub mod listing;
pub mod message;
pub mod policy;
pub mod proxy;
pub mod relay;
pub mod secret;
pub mod server;
pub mod session;
pub mod store;
pub mod upstream;
mod waits;
