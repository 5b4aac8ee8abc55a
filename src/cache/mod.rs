//! Paged KV (Kwon et al., *PagedAttention*, 2023): keys and values lie in pages of a pool, and a table says which pages
//! hold the tokens of each sequence.

mod pages;
mod pool;
mod table;

pub use pages::{PageCopy, PageStats, Pages, SequenceId, TableBuffer};
pub use pool::{PageOrder, PagedCache, PagedCacheDesc};
#[doc(hidden)]
pub use pool::{STRUCTS, links};
pub use table::PageTable;
