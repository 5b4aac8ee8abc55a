//! Attention for wgpu: WGSL kernels that run inside your own device and encoder, on any adapter.
#![warn(missing_docs)]

mod caps;
#[doc(hidden)]
pub mod cases;
mod error;
mod host;
mod kernel;
#[doc(hidden)]
pub mod measure;
pub mod ops;
#[doc(hidden)]
pub mod reference;
#[doc(hidden)]
pub mod report;
mod runtime;
pub mod shader;
mod view;

pub use caps::{Caps, CapsMask, Needs};
pub use error::{Error, Result};
pub use host::{HostInput, HostMask, HostOutput};
pub use kernel::Variant;
pub use ops::attention::{Attention, AttentionDesc, AttentionIo, Batch, Lengths, MaskKind, Schedule, Start, Window};
pub use ops::merge::{Merge, MergeDesc, MergeIo, MergeLayout};
pub use runtime::{Runtime, RuntimeOptions, Verdict, adapters};
pub use view::{DType, Layout, ScoreLayout, View};
