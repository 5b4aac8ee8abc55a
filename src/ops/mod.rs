//! The operations, one file each.

pub mod append;
pub mod attention;
pub mod gather;
pub mod merge;
pub(crate) mod retired;
pub mod rope;
#[doc(hidden)]
pub mod runs;
#[doc(hidden)]
pub mod unfused;

/// Every module that the operations can make, with what it needs: for tools and for the tests that compile them for other
/// platforms.
#[doc(hidden)]
pub fn links() -> Vec<(String, crate::Needs, crate::shader::Link)> {
    [append::links(), attention::links(), gather::links(), merge::links(), unfused::links(), crate::cache::links()]
        .concat()
}
