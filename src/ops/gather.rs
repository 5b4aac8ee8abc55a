//! Copies tokens from pages to dense tensors, for kernels that want dense K and V, and back; bit by bit, whatever the type.

use crate::cache::PageTable;
use crate::error::{Error, Result};
use crate::ops::attention::{Lengths, MAX_HEAD_DIM, MAX_HEADS, MAX_LEN};
use crate::ops::runs::{Moves, Part, Place, Runs, Tensor, Turn, Unit, unit_of};
use crate::runtime::Runtime;
use crate::shader::Link;
use crate::view::{DType, Layout, View};

/// What a gather is made for: K or V of one cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GatherDesc {
    /// Key/value heads, 1 to 2048.
    pub kv_heads: u32,
    /// Their dim, 1 to 576.
    pub head_dim: u32,
    /// Type of both tensors.
    pub dtype: DType,
}

/// Which way tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From pages to a dense tensor.
    ToDense,
    /// From a dense tensor to pages.
    ToPages,
}

/// Which tokens, and where they lie.
#[derive(Clone, Copy, Debug)]
pub struct GatherBatch<'a> {
    /// Pages of the sequences.
    pub table: PageTable<'a>,
    /// First token of each sequence; 0 if `None`.
    pub first: Option<&'a [u32]>,
    /// Tokens of each sequence from there on, and how the dense tensor holds them.
    pub tokens: Lengths<'a>,
    /// Of the pool: [`Layout::batch`] is the distance between pages, [`Layout::seq`] that between slots.
    pub pages_layout: Layout,
    /// Of the dense tensor.
    pub dense_layout: Layout,
}

impl<'a> GatherBatch<'a> {
    /// The first `tokens` of each sequence, pools `[page, kv_head, slot, dim]`, and a dense tensor
    /// `[batch, len, kv_heads, dim]` or, ragged, `[total, kv_heads, dim]`.
    pub fn new(desc: &GatherDesc, table: PageTable<'a>, tokens: Lengths<'a>) -> Self {
        GatherBatch {
            table,
            first: None,
            tokens,
            pages_layout: Layout::bhsd(table.page_len, desc.kv_heads, desc.head_dim),
            dense_layout: Layout::bshd(tokens.room(), desc.kv_heads, desc.head_dim),
        }
    }
}

/// Copies between pages and dense tensors.
///
/// ```no_run
/// # fn f(
/// #     runtime: &wgpu_attention::Runtime, cache: &wgpu_attention::PagedCache, table: wgpu_attention::PageTable,
/// #     dense: &wgpu::Buffer, encoder: &mut wgpu::CommandEncoder,
/// # ) -> wgpu_attention::Result<()> {
/// use wgpu_attention::{Direction, Gather, GatherBatch, GatherDesc, GatherIo, Lengths};
/// // K of two sequences, 100 and 30 tokens, one after the other.
/// let cached = cache.desc();
/// let desc = GatherDesc { kv_heads: cached.kv_heads, head_dim: cached.head_dim, dtype: cached.dtype };
/// let gather = Gather::new(runtime, &desc)?;
/// let batch = GatherBatch {
///     pages_layout: cached.k_layout(),
///     ..GatherBatch::new(&desc, table, Lengths::Ragged { offsets: &[0, 100, 130] })
/// };
/// let plan = gather.plan(&batch, Direction::ToDense)?;
/// gather.record(encoder, &plan, &GatherIo { pages: cache.k(), dense: dense.into() })?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Gather {
    runtime: Runtime,
    desc: GatherDesc,
}

/// A batch to be copied, with its lists on the device. Immutable: record it any number of times.
#[derive(Debug)]
pub struct GatherPlan {
    desc: GatherDesc,
    moves: Moves,
}

/// The two tensors; one is read and the other one written, so they lie in different buffers.
#[derive(Clone, Copy, Debug)]
pub struct GatherIo<'a> {
    /// The pool.
    pub pages: View<'a>,
    /// The dense tensor.
    pub dense: View<'a>,
}

/// The kernel that copies units of so many bytes.
pub(super) fn link_of(unit: u64) -> Link {
    Link { file: "gather", swaps: vec![("unit16".into(), format!("unit{unit}"))], ..Link::default() }
}

/// Every module that gathers can make, for the tests that compile them for other platforms.
#[doc(hidden)]
pub fn links() -> Vec<(String, crate::Needs, Link)> {
    [16, 4, 2].map(|unit| (format!("gather.unit{unit}"), crate::Needs::NONE, link_of(unit))).into()
}

impl Gather {
    /// Checks the sizes.
    pub fn new(runtime: &Runtime, desc: &GatherDesc) -> Result<Self> {
        Error::unless_in("kv_heads", desc.kv_heads, MAX_HEADS)?;
        Error::unless_in("head_dim", desc.head_dim, MAX_HEAD_DIM)?;
        Ok(Gather { runtime: runtime.clone(), desc: *desc })
    }

    /// Lists the copies and writes them to the device. Tokens that lie in no page of their sequence are an error, and so are
    /// two tokens for one slot, such as those of a shared page.
    pub fn plan(&self, batch: &GatherBatch, direction: Direction) -> Result<GatherPlan> {
        let runs = self.runs(batch, direction)?;
        let GatherDesc { kv_heads, head_dim, dtype } = self.desc;
        let slots = Some(batch.table.page_len);
        let pages = Tensor { what: "pages", layout: batch.pages_layout, dtype, slots };
        let dense = Tensor { what: "dense", layout: batch.dense_layout, dtype, slots: None };
        let (source, target) = match direction {
            Direction::ToDense => (pages, dense),
            Direction::ToPages => (dense, pages),
        };
        let unit = unit_of(&source.layout, &target.layout, head_dim, dtype);
        let part = Part {
            pipeline: self.runtime.pipeline("gather", &link_of(unit))?,
            source,
            target,
            heads: kv_heads,
            dim: head_dim,
            unit: Unit::Bytes(unit),
            stays: false,
            turn: Turn::default(),
        };
        Ok(GatherPlan { desc: self.desc, moves: Moves::new(&self.runtime, &runs, vec![part])? })
    }

    fn runs(&self, batch: &GatherBatch, direction: Direction) -> Result<Runs> {
        let GatherBatch { table, tokens, .. } = batch;
        tokens.validate("tokens")?;
        let sequences = tokens.batch();
        if sequences != table.batch() {
            return Err(Error::shape("page table", format!("{sequences} sequences"), table.batch()));
        }
        if let Some(first) = batch.first
            && first.len() != sequences
        {
            return Err(Error::shape("first", format!("one for each of {sequences} sequences"), first.len()));
        }
        let first = |b: usize| batch.first.map_or(0, |first| first[b]);
        let ends = (0..sequences).map(|b| u64::from(first(b)) + u64::from(tokens.len(b)));
        if let Some(end) = ends.clone().find(|end| *end > u64::from(MAX_LEN)) {
            return Err(Error::limit("end of the tokens", MAX_LEN.into(), end, "positions must fit in 31 bits"));
        }
        table.validate(ends.map(|end| end as u32))?;
        let mut runs = Runs::default();
        for b in 0..sequences {
            let pages = table.of(b);
            for token in 0..tokens.len(b) {
                let at = first(b) + token;
                let paged = Place { block: pages[(at / table.page_len) as usize], slot: at % table.page_len };
                let dense = match tokens {
                    Lengths::Ragged { offsets } => Place { block: 0, slot: offsets[b] + token },
                    _ => Place { block: b as u32, slot: token },
                };
                match direction {
                    Direction::ToDense => runs.push(paged, dense, 0),
                    Direction::ToPages => runs.push(dense, paged, 0),
                }
            }
        }
        runs.check_apart("pages")?;
        Ok(runs)
    }

    /// Appends the copies to `encoder` as one compute pass. Nothing is submitted; `plan` and the buffers may be dropped once the
    /// encoder is finished.
    ///
    /// Errors leave the encoder as it was.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, plan: &GatherPlan, io: &GatherIo) -> Result<()> {
        let groups = self.bind(plan, io)?;
        plan.moves.dispatch("gather", encoder, &groups);
        Ok(())
    }

    /// The same into a compute pass of the caller.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass, plan: &GatherPlan, io: &GatherIo) -> Result<()> {
        let groups = self.bind(plan, io)?;
        plan.moves.dispatch_in(pass, &groups);
        Ok(())
    }

    fn bind(&self, plan: &GatherPlan, io: &GatherIo) -> Result<Vec<wgpu::BindGroup>> {
        plan.moves.is_of(&self.runtime)?;
        if plan.desc != self.desc {
            return Err(Error::shape("plan", "one of the same heads, dim and type", "another one's"));
        }
        plan.moves.bind(&[("pages", io.pages), ("dense", io.dense)], None)
    }
}
