//! The ledger: what is known of each keyed call, so that a second attempt is answered, resumed, held back or refused as
//! contract section 7 says.

pub mod entry;
