//! Writes K and V of new tokens to their slots, with rotary embedding of K and Q on the way.

use crate::cache::{PageTable, PagedCache};
use crate::error::{Error, Result};
use crate::ops::attention::{Lengths, MAX_HEAD_DIM, MAX_HEADS, MAX_LEN, MAX_V_HEAD_DIM};
use crate::ops::gather;
use crate::ops::rope::{Rope, RopePairs};
use crate::ops::runs::{Moves, Part, Place, Runs, Tensor, Turn, Unit, unit_of};
use crate::runtime::Runtime;
use crate::shader::Link;
use crate::view::{DType, Layout, View, Width};

/// What an append is made for.
#[derive(Clone, Debug, PartialEq)]
pub struct AppendDesc {
    /// Query heads, up to 2048; 0 if Q is not to be written.
    pub heads: u32,
    /// Key/value heads, 1 to 2048.
    pub kv_heads: u32,
    /// Dim of Q and K heads, 1 to 576.
    pub head_dim: u32,
    /// Dim of V heads, 1 to 512; that of K if `None`.
    pub v_head_dim: Option<u32>,
    /// Type of the new Q, K and V, and of the Q that is written.
    pub dtype: DType,
    /// Type of K and V in the cache.
    pub cache_dtype: DType,
    /// Rotary embedding of Q and K.
    pub rope: Option<Rope>,
}

impl AppendDesc {
    /// Dim of V heads.
    pub fn v_dim(&self) -> u32 {
        self.v_head_dim.unwrap_or(self.head_dim)
    }
}

/// Where a new token belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NewToken {
    /// Which sequence of the table.
    pub sequence: u32,
    /// Which token of the sequence, from 0: its slot follows from the pages.
    pub index: u32,
    /// For rotary embedding, below 2³¹; mostly the same as `index`.
    pub position: u32,
}

impl NewToken {
    /// New rows that are the last tokens of their sequences, `kv_lens` with them, in the order of the rows of `new`; padding is
    /// `None`.
    ///
    /// ```
    /// use wgpu_attention::{Lengths, NewToken};
    /// // Two tokens of a sequence that has 7 then, one of a sequence that has 1.
    /// let tokens = NewToken::last(Lengths::Padded { max_len: 2, lens: &[2, 1] }, &[7, 1]).unwrap();
    /// let token = |sequence, index| Some(NewToken { sequence, index, position: index });
    /// assert_eq!(tokens, [token(0, 5), token(0, 6), token(1, 0), None]);
    /// ```
    pub fn last(new: Lengths, kv_lens: &[u32]) -> Result<Vec<Option<NewToken>>> {
        new.validate("new tokens")?;
        if kv_lens.len() != new.batch() {
            return Err(Error::shape("kv_lens", format!("one for each of {} sequences", new.batch()), kv_lens.len()));
        }
        let rows = new.lse_len(1); // with padding
        if rows > MAX_LEN.into() {
            return Err(Error::limit("rows of new tokens", MAX_LEN.into(), rows, "split the batch"));
        }
        let mut tokens = Vec::new();
        let room = tokens.try_reserve_exact(rows as usize);
        room.map_err(|error| Error::OutOfMemory(format!("a list of {rows} new tokens: {error}")))?;
        for (b, kv_len) in kv_lens.iter().enumerate() {
            let len = new.len(b);
            let Some(first) = kv_len.checked_sub(len) else {
                return Err(Error::shape("kv_lens", format!("at least the {len} new tokens of sequence {b}"), kv_len));
            };
            let token = |index| Some(NewToken { sequence: b as u32, index, position: index });
            tokens.extend((first..*kv_len).map(token));
            if let Lengths::Padded { max_len, .. } = new {
                tokens.extend((len..max_len).map(|_| None));
            }
        }
        Ok(tokens)
    }
}

/// New tokens and where they go.
#[derive(Clone, Copy, Debug)]
pub struct AppendBatch<'a> {
    /// One for each row of the new Q, K and V; `None` is padding: it is not read, and nothing is written for it.
    pub tokens: &'a [Option<NewToken>],
    /// Pages of the sequences, with room for the new tokens. A dense cache `[batch, max_len, …]` is one page of `max_len` a
    /// sequence.
    pub table: PageTable<'a>,
    /// Of Q; [`Layout::batch`] is not used in these four.
    pub q_layout: Layout,
    /// Of Q as it is written, the same rows.
    pub q_out_layout: Layout,
    /// Of the new K.
    pub k_layout: Layout,
    /// Of the new V.
    pub v_layout: Layout,
    /// Of K in the cache: [`Layout::batch`] is the distance between pages, [`Layout::seq`] that between slots.
    pub k_cache_layout: Layout,
    /// Of V in the cache.
    pub v_cache_layout: Layout,
}

impl<'a> AppendBatch<'a> {
    /// Contiguous `[token, head, dim]`, and pools `[page, kv_head, slot, dim]`.
    pub fn new(desc: &AppendDesc, tokens: &'a [Option<NewToken>], table: PageTable<'a>) -> Self {
        let rows = |heads: u32, dim: u32| Layout { batch: 0, ..Layout::bshd(0, heads, dim) };
        AppendBatch {
            tokens,
            table,
            q_layout: rows(desc.heads, desc.head_dim),
            q_out_layout: rows(desc.heads, desc.head_dim),
            k_layout: rows(desc.kv_heads, desc.head_dim),
            v_layout: rows(desc.kv_heads, desc.v_dim()),
            k_cache_layout: Layout::bhsd(table.page_len, desc.kv_heads, desc.head_dim),
            v_cache_layout: Layout::bhsd(table.page_len, desc.kv_heads, desc.v_dim()),
        }
    }

    /// The same with the layouts of `cache`, which must be one of these heads, dims and type.
    pub fn on(
        cache: &PagedCache,
        desc: &AppendDesc,
        tokens: &'a [Option<NewToken>],
        table: PageTable<'a>,
    ) -> Result<Self> {
        let cached = cache.desc();
        cached.check(desc.kv_heads, desc.head_dim, desc.v_dim(), desc.cache_dtype, &table)?;
        let (k_cache_layout, v_cache_layout) = (cached.k_layout(), cached.v_layout());
        Ok(AppendBatch { k_cache_layout, v_cache_layout, ..Self::new(desc, tokens, table) })
    }
}

/// The buffers of one append. What is read and what is written lie in different buffers; what is written may lie in one, K and
/// V of a page or token beside each other too.
#[derive(Clone, Copy, Debug)]
pub struct AppendIo<'a> {
    /// New Q, and where it is written; just if the descriptor has heads.
    pub q: Option<(View<'a>, View<'a>)>,
    /// New K.
    pub k: View<'a>,
    /// New V.
    pub v: View<'a>,
    /// K of the cache.
    pub k_cache: View<'a>,
    /// V of the cache.
    pub v_cache: View<'a>,
}

/// Writes new tokens to a cache.
///
/// What is neither turned nor of another type in the cache is copied bit by bit.
///
/// ```no_run
/// # fn f(
/// #     runtime: &wgpu_attention::Runtime, cache: &wgpu_attention::PagedCache, pages: &wgpu_attention::Pages,
/// #     ids: &[wgpu_attention::SequenceId], [q, k, v, turned]: [&wgpu::Buffer; 4], encoder: &mut wgpu::CommandEncoder,
/// # ) -> wgpu_attention::Result<()> {
/// use wgpu_attention::{Append, AppendBatch, AppendDesc, AppendIo, DType, Lengths, NewToken, Rope, TableBuffer};
/// let desc = AppendDesc {
///     heads: 32, kv_heads: 8, head_dim: 128, v_head_dim: None, dtype: DType::F16, cache_dtype: DType::F16,
///     rope: Some(Rope { theta: 500_000.0, ..Rope::default() }),
/// };
/// let append = Append::new(runtime, &desc)?; // once
/// // Each step: `pages.append` has made room for one token of each sequence.
/// let mut buffer = TableBuffer::default();
/// let (table, lens) = pages.table(ids, &mut buffer)?;
/// let tokens = NewToken::last(Lengths::Uniform { batch: ids.len() as u32, len: 1 }, lens)?;
/// let plan = append.plan(&AppendBatch::on(cache, &desc, &tokens, table)?)?;
/// let q = Some((q.into(), turned.into()));
/// append.record(encoder, &plan, &AppendIo { q, k: k.into(), v: v.into(), k_cache: cache.k(), v_cache: cache.v() })?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Append {
    runtime: Runtime,
    desc: AppendDesc,
    turn: Turn,
    frequencies: wgpu::Buffer,
}

/// New tokens to be written, with their lists on the device. Immutable: it serves all layers of a model, those of other
/// frequencies too. Once dropped, and once the device is done with all commands that use it, its buffers serve later plans.
#[derive(Debug)]
pub struct AppendPlan {
    desc: AppendDesc,
    turn: Turn,
    moves: Moves,
}

fn link_of(source: DType, source_width: Width, cache: DType, cache_width: Width) -> Link {
    let swaps = vec![
        ("source=load_f32".to_string(), source.part("load", source_width)),
        ("cache=store_f32".to_string(), cache.part("store", cache_width)),
    ];
    Link { file: "append", swaps, ..Link::default() }
}

/// Every module that appends can make, for the tests that compile them for other platforms.
#[doc(hidden)]
pub fn links() -> Vec<(String, crate::Needs, Link)> {
    let mut out = Vec::new();
    for source in DType::ALL {
        for cache in DType::ALL {
            for width in [Width::One, Width::Four] {
                let name = format!("append.{source}.{cache}.{}", width.name());
                out.push((name, crate::Needs::NONE, link_of(source, width, cache, width)));
            }
        }
    }
    out
}

const MAX_POSITION: u32 = i32::MAX as u32;

impl Append {
    /// Checks the sizes and writes the frequencies to the device.
    pub fn new(runtime: &Runtime, desc: &AppendDesc) -> Result<Self> {
        if desc.heads > 0 {
            Error::unless_in("heads", desc.heads, MAX_HEADS)?;
        }
        Error::unless_in("kv_heads", desc.kv_heads, MAX_HEADS)?;
        Error::unless_in("head_dim", desc.head_dim, MAX_HEAD_DIM)?;
        Error::unless_in("v_head_dim", desc.v_dim(), MAX_V_HEAD_DIM)?;
        let (turn, turns) = match &desc.rope {
            None => (Turn::default(), Vec::new()),
            Some(rope) => {
                let turns = rope.turns(desc.head_dim)?;
                let interleaved = rope.pairs == RopePairs::Interleaved;
                (Turn { pairs: rope.dim_of(desc.head_dim)? / 2, interleaved, factor: rope.attention_factor()? }, turns)
            }
        };
        let frequencies = runtime.upload("frequencies", bytemuck::cast_slice(&turns), wgpu::BufferUsages::STORAGE)?;
        Ok(Append { runtime: runtime.clone(), desc: desc.clone(), turn, frequencies })
    }

    /// What it was made of.
    pub fn desc(&self) -> &AppendDesc {
        &self.desc
    }

    /// Lists the writes and puts them on the device. A token past its sequence's pages is an error, and so are two tokens for
    /// one slot.
    pub fn plan(&self, batch: &AppendBatch) -> Result<AppendPlan> {
        let runs = self.runs(batch)?;
        let desc = &self.desc;
        let rows = |what, layout: Layout| Tensor {
            what,
            layout: Layout { batch: 0, ..layout },
            dtype: desc.dtype,
            slots: None,
        };
        let cache = |what, layout| Tensor { what, layout, dtype: desc.cache_dtype, slots: Some(batch.table.page_len) };
        let mut parts = Vec::new();
        if desc.heads > 0 {
            let (q, q_out) = (rows("q", batch.q_layout), rows("q_out", batch.q_out_layout));
            parts.extend(self.parts(q, q_out, desc.heads, desc.head_dim, self.turn, true)?);
        }
        let k = rows("k", batch.k_layout);
        parts.extend(self.parts(
            k,
            cache("k_cache", batch.k_cache_layout),
            desc.kv_heads,
            desc.head_dim,
            self.turn,
            false,
        )?);
        let v = rows("v", batch.v_layout);
        let v_cache = cache("v_cache", batch.v_cache_layout);
        parts.extend(self.parts(v, v_cache, desc.kv_heads, desc.v_dim(), Turn::default(), false)?);
        Ok(AppendPlan { desc: desc.clone(), turn: self.turn, moves: Moves::new(&self.runtime, &runs, parts)? })
    }

    /// Dims that are turned or change their type, and dims that are copied.
    fn parts(
        &self,
        source: Tensor,
        target: Tensor,
        heads: u32,
        dim: u32,
        turn: Turn,
        stays: bool,
    ) -> Result<Vec<Part>> {
        let computed = if source.dtype == target.dtype { 2 * turn.pairs } else { dim };
        let mut parts = Vec::new();
        if computed > 0 {
            // Runs of four dims begin at multiples of four, those behind half-split pairs too.
            let whole = turn.pairs.is_multiple_of(if turn.interleaved { 2 } else { 4 });
            let narrow = |width: Width| if whole { width.narrow() } else { Width::One };
            let (width, to_width) = (narrow(source.layout.width(computed)), narrow(target.layout.width(computed)));
            let link = link_of(source.dtype, width, target.dtype, to_width);
            let pipeline = self.runtime.pipeline("append", &link)?;
            parts.push(Part { pipeline, source, target, heads, dim: computed, unit: Unit::Element, stays, turn });
        }
        if computed < dim {
            let after = |tensor: Tensor| {
                let offset = tensor.layout.offset.saturating_add(computed.into());
                Tensor { layout: Layout { offset, ..tensor.layout }, ..tensor }
            };
            let (source, target) = (after(source), after(target));
            let unit = unit_of(&source.layout, &target.layout, dim - computed, source.dtype);
            let pipeline = self.runtime.pipeline("gather", &gather::link_of(unit))?;
            let turn = Turn::default();
            let unit = Unit::Bytes(unit);
            parts.push(Part { pipeline, source, target, heads, dim: dim - computed, unit, stays, turn });
        }
        Ok(parts)
    }

    fn runs(&self, batch: &AppendBatch) -> Result<Runs> {
        let table = &batch.table;
        table.validate(vec![0; table.batch()].into_iter())?;
        let mut runs = Runs::default();
        for (row, token) in batch.tokens.iter().enumerate() {
            let Some(NewToken { sequence, index, position }) = *token else { continue };
            if sequence as usize >= table.batch() {
                let expected = format!("a sequence below the table's {}", table.batch());
                return Err(Error::shape(format!("token {row}"), expected, sequence));
            }
            let pages = table.of(sequence as usize);
            let Some(page) = pages.get((index / table.page_len) as usize) else {
                let slots = pages.len() as u64 * u64::from(table.page_len);
                let expected = format!("an index below {slots}, the slots of sequence {sequence}'s pages");
                return Err(Error::shape(format!("token {row}"), expected, index));
            };
            if position > MAX_POSITION {
                let what = format!("position of token {row}");
                return Err(Error::limit(what, MAX_POSITION.into(), position.into(), "positions fit in 31 bits"));
            }
            let row = u32::try_from(row)
                .map_err(|_| Error::limit("tokens", u32::MAX.into(), batch.tokens.len() as u64, "split the batch"))?;
            let to = Place { block: *page, slot: index % table.page_len };
            runs.push(Place { block: 0, slot: row }, to, position);
        }
        runs.check_apart("tokens")?;
        Ok(runs)
    }

    /// Appends the writes to `encoder` as one compute pass. Nothing is submitted; `plan` and the buffers may be dropped once the
    /// encoder is finished.
    ///
    /// Errors leave the encoder as it was.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, plan: &AppendPlan, io: &AppendIo) -> Result<()> {
        let groups = self.bind(plan, io)?;
        plan.moves.dispatch("append", encoder, &groups);
        Ok(())
    }

    /// The same into a compute pass of the caller.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass, plan: &AppendPlan, io: &AppendIo) -> Result<()> {
        let groups = self.bind(plan, io)?;
        plan.moves.dispatch_in(pass, &groups);
        Ok(())
    }

    fn bind(&self, plan: &AppendPlan, io: &AppendIo) -> Result<Vec<wgpu::BindGroup>> {
        plan.moves.is_of(&self.runtime)?;
        let sizes = |desc: &AppendDesc| AppendDesc { rope: None, v_head_dim: Some(desc.v_dim()), ..desc.clone() };
        if sizes(&plan.desc) != sizes(&self.desc) || plan.turn != self.turn {
            let expected = "one of the same heads, dims, types, pairs and attention factor";
            return Err(Error::shape("plan", expected, "another one's"));
        }
        if io.q.is_some() != (self.desc.heads > 0) {
            let (expected, given) = if io.q.is_some() {
                ("none, as the descriptor says", "buffers")
            } else {
                ("buffers, as the descriptor says", "none")
            };
            return Err(Error::shape("q", expected, given));
        }
        let mut views = vec![("k", io.k), ("v", io.v), ("k_cache", io.k_cache), ("v_cache", io.v_cache)];
        views.extend(io.q.iter().flat_map(|(q, q_out)| [("q", *q), ("q_out", *q_out)]));
        plan.moves.bind(&views, Some(&self.frequencies))
    }
}
