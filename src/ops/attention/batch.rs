//! Lengths and strides of a batch.

use crate::cache::PageTable;
use crate::error::{Error, Result};
use crate::ops::attention::{AttentionDesc, MAX_LEN, MaskKind};
use crate::view::{Layout, ScoreLayout};

/// Lengths of the sequences of a batch, for Q or for K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths<'a> {
    /// `batch` sequences of `len` each, [`Layout::batch`] apart.
    Uniform {
        /// Sequences.
        batch: u32,
        /// Rows or keys of each.
        len: u32,
    },
    /// Sequences of at most `max_len`, [`Layout::batch`] apart, the first `lens[b]` rows or keys of which count.
    /// Output rows past a sequence's length are left as they are.
    Padded {
        /// Rows or keys there is room for.
        max_len: u32,
        /// Rows or keys that count, one a sequence.
        lens: &'a [u32],
    },
    /// Sequences one after the other: sequence `b` has rows `offsets[b]..offsets[b + 1]` of one tensor.
    Ragged {
        /// From 0, ascending; one more than there are sequences.
        offsets: &'a [u32],
    },
}

impl Lengths<'_> {
    /// Sequences.
    pub fn batch(&self) -> usize {
        match self {
            Lengths::Uniform { batch, .. } => *batch as usize,
            Lengths::Padded { lens, .. } => lens.len(),
            Lengths::Ragged { offsets } => offsets.len().saturating_sub(1),
        }
    }

    /// Rows or keys of sequence `b`.
    pub fn len(&self, b: usize) -> u32 {
        match self {
            Lengths::Uniform { len, .. } => *len,
            Lengths::Padded { lens, .. } => lens[b],
            Lengths::Ragged { offsets } => offsets[b + 1].saturating_sub(offsets[b]),
        }
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.batch() == 0
    }

    /// Offset in elements of the first row or key of sequence `b`.
    pub fn start(&self, b: usize, layout: &Layout) -> u64 {
        match self {
            Lengths::Ragged { offsets } => {
                layout.offset.saturating_add(u64::from(offsets[b]).saturating_mul(layout.seq))
            }
            _ => layout.offset.saturating_add((b as u64).saturating_mul(layout.batch)),
        }
    }

    /// Rows or keys that a contiguous tensor has room for in each sequence; 0 if ragged.
    pub(crate) fn room(&self) -> u32 {
        match self {
            Lengths::Uniform { len, .. } => *len,
            Lengths::Padded { max_len, .. } => *max_len,
            Lengths::Ragged { .. } => 0,
        }
    }

    /// Rows of the LSE of one head: of one sequence, or of all if ragged.
    pub(super) fn lse_rows(&self) -> u64 {
        match self {
            Lengths::Uniform { len, .. } => u64::from(*len),
            Lengths::Padded { max_len, .. } => u64::from(*max_len),
            Lengths::Ragged { offsets } => u64::from(offsets.last().copied().unwrap_or(0)),
        }
    }

    /// Index of row 0 of sequence `b` and head 0 in the LSE `[batch, head, row]` (ragged: `[head, total rows]`),
    /// and the distance between heads.
    pub fn lse_place(&self, b: usize, heads: u32) -> (u64, u64) {
        match self {
            Lengths::Ragged { offsets } => (u64::from(offsets[b]), self.lse_rows()),
            _ => ((b as u64).saturating_mul(u64::from(heads)).saturating_mul(self.lse_rows()), self.lse_rows()),
        }
    }

    /// Elements of the LSE.
    pub fn lse_len(&self, heads: u32) -> u64 {
        let sequences = if matches!(self, Lengths::Ragged { .. }) { 1 } else { self.batch() as u64 };
        sequences.saturating_mul(u64::from(heads)).saturating_mul(self.lse_rows())
    }

    pub(crate) fn validate(&self, what: &str) -> Result<()> {
        match self {
            Lengths::Ragged { offsets } => {
                if offsets.first() != Some(&0) {
                    let given = offsets.first().map_or("none".into(), u32::to_string);
                    return Err(Error::shape(format!("{what} offsets"), "a first offset of 0", given));
                }
                if let Some(at) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
                    let given = format!("{} after {}", offsets[at + 1], offsets[at]);
                    return Err(Error::shape(format!("{what} offsets"), "ascending offsets", given));
                }
            }
            Lengths::Padded { max_len, lens } => {
                if let Some(len) = lens.iter().find(|len| *len > max_len) {
                    return Err(Error::shape(format!("{what} lengths"), format!("at most {max_len}"), len));
                }
            }
            Lengths::Uniform { .. } => {}
        }
        let longest = (0..self.batch().min(if matches!(self, Lengths::Uniform { .. }) { 1 } else { usize::MAX }))
            .map(|b| self.len(b))
            .max()
            .unwrap_or(0);
        if longest > MAX_LEN {
            let hint = "positions must fit in 31 bits";
            return Err(Error::limit(format!("{what} length"), MAX_LEN.into(), longest.into(), hint));
        }
        Ok(())
    }
}

/// Where row 0 of a sequence stands among its keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start<'a> {
    /// The last row stands at the last key: `kv_len − q_len`, as FlashAttention and every decoder have it.
    #[default]
    BottomRight,
    /// Row 0 stands at key 0, as PyTorch's `is_causal`, ONNX and JAX have it.
    TopLeft,
    /// One position a sequence, which may be negative.
    Explicit(&'a [i32]),
}

/// Shared prefixes (Ye et al., *Cascade Inference*, 2024): pages that neighbouring sequences have in common at their beginning
/// can be attended to once for all of them, in tiles of all their rows, level by level, and the states merged. The result is
/// the same up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cascade {
    /// Where it is expected to be faster: where reading keys again would cost more than the higher tiles do.
    #[default]
    Auto,
    /// Wherever at least 256 keys are shared and masks, biases and ALiBi do not forbid it.
    Always,
    /// Nowhere.
    Never,
}

/// What a batch fixes: lengths, alignment and strides.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Rows of each sequence.
    pub q: Lengths<'a>,
    /// Keys of each sequence; as many sequences.
    pub kv: Lengths<'a>,
    /// K and V lie in pages of a pool: key `j` of sequence `b` in slot `j % page_len` of the page that the table names.
    /// Then `kv` says how many keys there are, and the layouts of K and V where a slot is: [`Layout::batch`] is the distance
    /// between pages, [`Layout::seq`] that between slots. Pages without keys that some row sees are not looked at.
    pub pages: Option<PageTable<'a>>,
    /// Whether keys that neighbouring sequences share, the same pages at their beginning, are read once for all of them.
    pub cascade: Cascade,
    /// Alignment of rows to keys.
    pub start: Start<'a>,
    /// Of Q.
    pub q_layout: Layout,
    /// Of K.
    pub k_layout: Layout,
    /// Of V.
    pub v_layout: Layout,
    /// Of O; no two elements at one place.
    pub out_layout: Layout,
    /// Of the bias; needed if there is one.
    pub bias_layout: Option<ScoreLayout>,
    /// Of the mask; needed if there is one, unless `mask_offsets` are given.
    pub mask_layout: Option<ScoreLayout>,
    /// Ragged masks, one a sequence, such as the trees of speculative decoding: where each begins, in words for
    /// [`MaskKind::Bits`] and bytes for [`MaskKind::Bool`]. Sequence `b` has `[q_len, kv_len]` elements of its own lengths for
    /// all heads, rows of bits at whole words.
    pub mask_offsets: Option<&'a [u64]>,
}

impl<'a> Batch<'a> {
    /// Contiguous tensors: `[batch, len, heads, dim]` or, ragged, `[total, heads, dim]`. A bias or a mask needs
    /// a layout of its own: fill in what [`ScoreLayout::broadcast`] gives.
    ///
    /// ```
    /// use wgpu_attention::{AttentionDesc, Batch, Lengths};
    /// let desc = AttentionDesc { heads: 8, kv_heads: 2, head_dim: 64, ..AttentionDesc::default() };
    /// let dense = Batch::new(&desc, Lengths::Uniform { batch: 2, len: 100 }, Lengths::Uniform { batch: 2, len: 100 });
    /// let ragged = Batch::new(&desc, Lengths::Ragged { offsets: &[0, 3, 7] }, Lengths::Ragged { offsets: &[0, 90, 100] });
    /// ```
    pub fn new(desc: &AttentionDesc, q: Lengths<'a>, kv: Lengths<'a>) -> Self {
        Batch {
            start: Start::BottomRight,
            q_layout: Layout::bshd(q.room(), desc.heads, desc.head_dim),
            k_layout: Layout::bshd(kv.room(), desc.kv_heads, desc.head_dim),
            v_layout: Layout::bshd(kv.room(), desc.kv_heads, desc.v_dim()),
            out_layout: Layout::bshd(q.room(), desc.heads, desc.v_dim()),
            bias_layout: None,
            mask_layout: None,
            mask_offsets: None,
            pages: None,
            cascade: Cascade::Auto,
            q,
            kv,
        }
    }

    /// Rows `[total, heads, dim]` or `[batch, len, heads, dim]` against keys in pages: `kv_lens[b]` keys of sequence `b`, pools
    /// `[page, kv_head, slot, dim]`. For pools `[page, slot, kv_head, dim]` set the layouts of K and V to
    /// [`Layout::bshd`]`(page_len, kv_heads, dim)`.
    ///
    /// ```
    /// use wgpu_attention::{AttentionDesc, Batch, Lengths, PageTable};
    /// let desc = AttentionDesc { heads: 8, kv_heads: 2, head_dim: 64, causal: true, ..AttentionDesc::default() };
    /// // Two sequences decode one token each; they share page 7.
    /// let table = PageTable { page_len: 16, offsets: &[0, 2, 4], pages: &[7, 0, 7, 3] };
    /// let batch = Batch::paged(&desc, Lengths::Uniform { batch: 2, len: 1 }, &[20, 32], table);
    /// batch.validate().unwrap();
    /// ```
    pub fn paged(desc: &AttentionDesc, q: Lengths<'a>, kv_lens: &'a [u32], pages: PageTable<'a>) -> Self {
        let kv = Lengths::Padded { max_len: kv_lens.iter().copied().max().unwrap_or(0), lens: kv_lens };
        Batch {
            k_layout: Layout::bhsd(pages.page_len, desc.kv_heads, desc.head_dim),
            v_layout: Layout::bhsd(pages.page_len, desc.kv_heads, desc.v_dim()),
            pages: Some(pages),
            ..Batch::new(desc, q, kv)
        }
    }

    /// Offset in elements of key `key` of sequence `b`, head 0, in K or V with this layout.
    pub(crate) fn key_at(&self, layout: &Layout, b: usize, key: u32) -> u64 {
        match &self.pages {
            None => self.kv.start(b, layout).saturating_add(u64::from(key).saturating_mul(layout.seq)),
            Some(table) => {
                let page = u64::from(table.of(b)[(key / table.page_len) as usize]);
                let slot = u64::from(key % table.page_len);
                let in_page = slot.saturating_mul(layout.seq);
                layout.offset.saturating_add(page.saturating_mul(layout.batch)).saturating_add(in_page)
            }
        }
    }

    /// The bias of sequence `b` ([`ScoreLayout::batch`] is worked in).
    pub(crate) fn bias_of(&self, desc: &AttentionDesc, b: usize) -> ScoreLayout {
        self.bias_layout.filter(|_| desc.bias.is_some()).unwrap_or_default().of_sequence(b)
    }

    /// The mask of sequence `b`.
    pub(crate) fn mask_of(&self, desc: &AttentionDesc, b: usize) -> ScoreLayout {
        match (desc.mask, self.mask_offsets) {
            (None, _) => ScoreLayout::default(),
            (Some(_), None) => self.mask_layout.unwrap_or_default().of_sequence(b),
            (Some(kind), Some(offsets)) => {
                let keys = self.kv.len(b);
                let row = if kind == MaskKind::Bits { keys.div_ceil(32) } else { keys };
                ScoreLayout { offset: offsets[b], batch: 0, head: 0, row: row.into(), key: 1 }
            }
        }
    }

    /// Keys that some row of sequence `b` may see by its position.
    pub(crate) fn visible_to_any(&self, desc: &AttentionDesc, b: usize) -> std::ops::Range<u32> {
        // Ranges of later rows start and end later.
        match self.q.len(b) {
            0 => 0..0,
            rows => {
                let range = self.visible(desc, b, 0).start..self.visible(desc, b, rows - 1).end;
                if range.is_empty() { 0..0 } else { range }
            }
        }
    }

    /// Position of row 0 of sequence `b` among its keys.
    pub fn start_of(&self, b: usize) -> i64 {
        match self.start {
            Start::BottomRight => i64::from(self.kv.len(b)) - i64::from(self.q.len(b)),
            Start::TopLeft => 0,
            Start::Explicit(starts) => i64::from(starts[b]),
        }
    }

    /// Keys that row `row` of sequence `b` may see by its position; a mask or a bias of −∞ may hide some of them.
    pub fn visible(&self, desc: &AttentionDesc, b: usize, row: u32) -> std::ops::Range<u32> {
        let (position, kv_len) = (self.start_of(b) + i64::from(row), i64::from(self.kv.len(b)));
        let window = desc.effective_window();
        let low = window.left.map_or(0, |left| (position - i64::from(left)).clamp(0, kv_len));
        let high = window.right.map_or(kv_len, |right| (position + i64::from(right) + 1).clamp(low, kv_len));
        low as u32..high as u32
    }

    /// Floating-point operations: 2·(QK dim + V dim) for every pair of a query head's row and a key in its
    /// [`visible`](Batch::visible) range.
    pub fn flops(&self, desc: &AttentionDesc) -> f64 {
        let rows = (0..self.q.batch()).flat_map(|b| (0..self.q.len(b)).map(move |row| (b, row)));
        let pairs: u64 = rows.map(|(b, row)| self.visible(desc, b, row).len() as u64).sum();
        pairs as f64 * f64::from(desc.heads) * 2.0 * f64::from(desc.head_dim + desc.v_dim())
    }

    /// Elements of O that the layout spans, rows past a padded sequence's length included.
    pub fn out_len(&self, desc: &AttentionDesc) -> u64 {
        let rows = match self.q {
            Lengths::Uniform { len, .. } => len,
            Lengths::Padded { max_len, .. } => max_len,
            Lengths::Ragged { .. } => self.q.lse_rows() as u32,
        };
        let sequences = if matches!(self.q, Lengths::Ragged { .. }) { 1 } else { self.q.batch() as u64 };
        if rows == 0 || sequences == 0 {
            return 0;
        }
        let far = |count: u64, stride: u64| (count - 1).saturating_mul(stride);
        let layout = &self.out_layout;
        let dims = [far(sequences, layout.batch), far(rows.into(), layout.seq), far(desc.heads.into(), layout.head)];
        dims.into_iter().fold(layout.offset.saturating_add(desc.v_dim().into()), u64::saturating_add)
    }

    /// Whether the numbers make sense together.
    pub fn validate(&self) -> Result<()> {
        self.q.validate("q")?;
        self.kv.validate("kv")?;
        if self.q.batch() != self.kv.batch() {
            return Err(Error::shape("kv", format!("{} sequences, as many as q", self.q.batch()), self.kv.batch()));
        }
        if let Some(pages) = &self.pages {
            pages.validate((0..self.kv.batch()).map(|b| self.kv.len(b)))?;
        }
        if let Some(offsets) = self.mask_offsets
            && offsets.len() != self.q.batch()
        {
            let expected = format!("one for each of {} sequences", self.q.batch());
            return Err(Error::shape("mask_offsets", expected, offsets.len()));
        }
        if let Start::Explicit(starts) = self.start {
            if starts.len() != self.q.batch() {
                return Err(Error::shape(
                    "starts",
                    format!("one for each of {} sequences", self.q.batch()),
                    starts.len(),
                ));
            }
            if let Some(start) = starts.iter().find(|start| start.unsigned_abs() > MAX_LEN) {
                let hint = "positions must fit in 31 bits";
                return Err(Error::limit("the distance of a start", MAX_LEN.into(), start.unsigned_abs().into(), hint));
            }
        }
        Ok(())
    }
}
