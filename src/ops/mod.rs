//! The operations, one file each.

pub mod attention;
pub mod merge;
#[doc(hidden)]
pub mod unfused;

/// Every module that the operations can make, with what it needs: for tools and for the tests that compile them for other
/// platforms.
#[doc(hidden)]
pub fn links() -> Vec<(String, crate::Needs, crate::shader::Link)> {
    [attention::links(), merge::links(), unfused::links(), crate::cache::links()].concat()
}
