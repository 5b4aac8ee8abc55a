//! Attention for [wgpu](https://docs.rs/wgpu): WGSL compute kernels that run inside your own device, buffers and encoder,
//! on Vulkan, Metal, Direct3D 12 and WebGPU, on any adapter that wgpu has, with no feature needed.
//!
//! One operation serves prefill, decode, padded and ragged batches, dense and paged keys, shared prefixes: causal and windowed
//! masks, soft-capping, ALiBi, sinks, additive biases, boolean and bit masks, any grouped-query ratio, f32, f16 and bf16 storage,
//! log-sum-exp.
//!
//! ```
//! use wgpu_attention::{Attention, AttentionDesc, Batch, HostInput, HostMask, Lengths, Runtime, RuntimeOptions, adapters};
//!
//! # fn main() -> wgpu_attention::Result<()> { pollster::block_on(async {
//! # let Some(adapter) = adapters().await.into_iter().next() else { return Ok(()) };
//! // Probes the adapter and tests the kernels on it, once.
//! let runtime = Runtime::open(&adapter, RuntimeOptions::default()).await?;
//! // What a model fixes, and what a batch fixes: 2 query heads on 1 KV head of 4, one row on three keys.
//! let desc = AttentionDesc { heads: 2, kv_heads: 1, head_dim: 4, causal: true, ..AttentionDesc::default() };
//! let batch = Batch::new(&desc, Lengths::Uniform { batch: 1, len: 1 }, Lengths::Uniform { batch: 1, len: 3 });
//! // Equal scores: the output is the mean of V.
//! let v = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0];
//! let input = HostInput { q: &[0.0; 8], k: &[1.0; 12], v: &v, bias: None, mask: HostMask::None };
//! let output = Attention::new(&runtime, &desc)?.run(&batch, &input).await?;
//! assert_eq!(output.out, [1.0; 8]);
//! # Ok(()) }) }
//! ```
//!
//! With buffers of your own: [`Attention::schedule`] plans a batch and puts its lists on the device,
//! [`Attention::record`] appends the dispatches to your encoder. The library never submits, polls or blocks, except in
//! [`Runtime::new`], in what returns host data and in [`PagedCache::swap_in`]. See `examples/own_encoder.rs`.
//!
//! For serving: [`Pages`] says which sequence has which page, [`PagedCache`] holds the pages of K and V, [`Append`] writes new
//! tokens to them with rotary embedding, [`Gather`] copies them to dense tensors and back. See `examples/paged_decode.rs`.
//!
//! - What is computed, edge cases included: [`ops::attention`].
//! - How kernels are chosen: by [`Caps`], by a numeric self-test on the adapter at hand, in the order of the table of
//!   [`Variant`] rows.
//! - How shaders are put together: [`shader`].
#![warn(missing_docs)]

pub mod cache;
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

pub use cache::{
    PageCopy, PageOrder, PageStats, PageTable, PagedCache, PagedCacheDesc, Pages, SequenceId, TableBuffer,
};
pub use caps::{Caps, CapsMask, Needs};
pub use error::{Error, Result};
pub use host::{HostBuffers, HostInput, HostMask, HostOutput};
pub use kernel::{Variant, is_named};
pub use ops::append::{Append, AppendBatch, AppendDesc, AppendIo, AppendPlan, NewToken};
pub use ops::attention::{
    Attention, AttentionDesc, AttentionIo, Batch, Cascade, Lengths, MaskKind, Schedule, Start, Window,
};
pub use ops::gather::{Direction, Gather, GatherBatch, GatherDesc, GatherIo, GatherPlan};
pub use ops::merge::{Merge, MergeDesc, MergeIo, MergeLayout};
pub use ops::rope::{Rope, RopePairs, RopeScaling};
pub use runtime::{Runtime, RuntimeOptions, SelfTest, Verdict, adapters};
pub use view::{DType, Layout, ScoreLayout, View};
pub use wgpu;
