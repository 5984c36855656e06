//! failure to response
