//! The operations, one file each.

pub mod attention;
pub mod merge;
#[doc(hidden)]
pub mod unfused;
