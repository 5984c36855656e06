//! What is known of each tool.

/// May a call be made again? (contract section 5)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetryClass {
    /// It only reads.
    Safe,
    /// It is idempotent, and its server honours the key.
    Conditional,
    /// Any other, and any tool never seen in a listing.
    Unsafe,
}
