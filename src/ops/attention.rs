//! Attention: `O = softmax(f(scale · Q·Kᵀ)) · V`, one operation for prefill, decode and ragged batches.
//!
//! For query row `i` of a sequence with `q_len` rows and `kv_len` keys, head `h`, KV head `h / (heads / kv_heads)`:
//!
//! - Row `i` stands at key position `p = i + start`; `start` is `kv_len − q_len` ([`Start::BottomRight`]) unless chosen.
//!   Causal: key `j` is visible when `j ≤ p`. Window: `p − left ≤ j ≤ p + right`, both ends included.
//! - The score is `scale · q·k`, then softcap `c · tanh(s / c)`, then additive bias, then ALiBi `− slope · |p − j|`,
//!   then masks. A bias of −∞ is a mask; a finite one is not, however low. Sums below −3.4028e38 count as that.
//! - A row that sees no key gives `O = 0` and `LSE = −∞`; with a sink, `LSE = sink`.
//! - LSE is the natural logarithm of the sum of `exp(score)` (and of `exp(sink)`), f32.
//! - Nothing that a row does not see influences it, whatever bytes are there. A visible NaN stays in its own row.
//! - Arithmetic is f32 whatever the storage; the same plan, inputs and adapter give the same bits.
//!
//! [`Attention`] holds what is fixed by a model, [`Schedule`] what is fixed by a batch; [`Attention::record`] appends the
//! dispatches to a caller's encoder. Methods: Dao, *FlashAttention-2* (2023) for tiling and online softmax; Ye et al.,
//! *FlashInfer* (2025) for packed rows, work items and the plan/run split; Xiao et al. (2023) for sinks; Press et al.
//! (2021) for ALiBi.

use std::sync::Arc;

use crate::caps::Needs;
use crate::error::{Error, Result};
use crate::host::{HostInput, HostMask};
use crate::kernel::{Pipeline, Variant};
use crate::runtime::{Runtime, Verdict};
use crate::shader::Link;
use crate::view::{DType, Layout, ScoreLayout, View};

/// Keys a row sees around its position, both ends included; `None` is unlimited.
///
/// A model's "window of W tokens", which counts the token itself, is `left: Some(W − 1), right: Some(0)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Window {
    /// Keys before the position.
    pub left: Option<u32>,
    /// Keys after it.
    pub right: Option<u32>,
}

/// How a mask is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskKind {
    /// One byte an element, anything but 0 is visible.
    Bool,
    /// One bit a key, 1 is visible, lowest bit first; rows of keys start at whole 32-bit words.
    Bits,
}

/// What a model fixes: sizes, types, options of the score.
///
/// ```
/// use wgpu_attention::AttentionDesc;
/// let desc = AttentionDesc { heads: 32, kv_heads: 8, head_dim: 128, causal: true, ..AttentionDesc::default() };
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionDesc {
    /// Query heads, 1 to 2048.
    pub heads: u32,
    /// Key/value heads, a divisor of `heads`.
    pub kv_heads: u32,
    /// Dim of Q and K heads, 1 to 576.
    pub head_dim: u32,
    /// Dim of V and O heads, 1 to 512; that of Q and K if `None`.
    pub v_head_dim: Option<u32>,
    /// Type of Q.
    pub q_dtype: DType,
    /// Type of K and V.
    pub kv_dtype: DType,
    /// Type of O.
    pub out_dtype: DType,
    /// Factor of q·k; 1/√head_dim if `None`.
    pub scale: Option<f32>,
    /// A row sees no key after its position. Combines with `window`.
    pub causal: bool,
    /// A row sees only keys around its position.
    pub window: Window,
    /// Scores become `c · tanh(score / c)`; positive.
    pub softcap: Option<f32>,
    /// ALiBi slopes, one a head; see [`alibi_slopes`].
    pub alibi: Option<Vec<f32>>,
    /// Attention sinks, one logit a head; −∞ is none for that head.
    pub sinks: Option<Vec<f32>>,
    /// An additive bias of this type is given with every call.
    pub bias: Option<DType>,
    /// A mask of this kind is given with every call.
    pub mask: Option<MaskKind>,
    /// The log-sum-exp is wanted.
    pub lse: bool,
    /// Use only these variants: the name of a row, or a part of names between dots (`portable`, `subgroup8`).
    pub variant: Option<String>,
}

impl Default for AttentionDesc {
    fn default() -> Self {
        AttentionDesc {
            heads: 1,
            kv_heads: 1,
            head_dim: 64,
            v_head_dim: None,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
            out_dtype: DType::F32,
            scale: None,
            causal: false,
            window: Window::default(),
            softcap: None,
            alibi: None,
            sinks: None,
            bias: None,
            mask: None,
            lse: false,
            variant: None,
        }
    }
}

/// Most query heads: their slopes and sinks lie in a uniform of 16 KiB.
pub const MAX_HEADS: u32 = 2048;
/// Largest dim of Q and K.
pub const MAX_HEAD_DIM: u32 = 576;
/// Largest dim of V.
pub const MAX_V_HEAD_DIM: u32 = 512;
/// Most rows or keys of a sequence, and farthest start, so that positions fit in i32.
pub const MAX_LEN: u32 = 1 << 30;

impl AttentionDesc {
    /// Dim of V and O heads.
    pub fn v_dim(&self) -> u32 {
        self.v_head_dim.unwrap_or(self.head_dim)
    }

    /// Query heads a KV head.
    pub fn group(&self) -> u32 {
        self.heads / self.kv_heads.max(1)
    }

    /// The factor of q·k.
    pub fn scale(&self) -> f32 {
        self.scale.unwrap_or(1.0 / (self.head_dim as f32).sqrt())
    }

    /// The window with `causal` worked in.
    pub fn effective_window(&self) -> Window {
        match self.causal {
            true => Window { right: Some(0), ..self.window },
            false => self.window,
        }
    }

    /// Whether the numbers make sense together.
    pub fn validate(&self) -> Result<()> {
        let range = |what: &str, value: u32, max: u32| match value {
            0 => Err(Error::shape(what, format!("1 to {max}"), 0)),
            value if value > max => Err(Error::limit(what, max.into(), value.into(), "this library goes no further")),
            _ => Ok(()),
        };
        range("heads", self.heads, MAX_HEADS)?;
        range("kv_heads", self.kv_heads, MAX_HEADS)?;
        range("head_dim", self.head_dim, MAX_HEAD_DIM)?;
        range("v_head_dim", self.v_dim(), MAX_V_HEAD_DIM)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::shape("kv_heads", format!("a divisor of {} heads", self.heads), self.kv_heads));
        }
        if !self.scale().is_finite() {
            return Err(Error::shape("scale", "a finite number", self.scale()));
        }
        if let Some(cap) = self.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            return Err(Error::shape("softcap", "a positive, finite number", cap));
        }
        for (what, values) in [("alibi slopes", &self.alibi), ("sinks", &self.sinks)] {
            let Some(values) = values else { continue };
            if values.len() != self.heads as usize {
                return Err(Error::shape(what, format!("one for each of {} heads", self.heads), values.len()));
            }
            let fits = |x: &f32| x.is_finite() || (what == "sinks" && *x == f32::NEG_INFINITY);
            if let Some(bad) = values.iter().find(|x| !fits(x)) {
                return Err(Error::shape(what, "finite numbers", bad));
            }
        }
        Ok(())
    }
}

/// The slopes of the ALiBi paper for any number of heads: 2^(−8i/n) for a power of two, otherwise those of the next
/// smaller power followed by every other one of the next larger.
///
/// ```
/// assert_eq!(wgpu_attention::ops::attention::alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
/// ```
pub fn alibi_slopes(heads: u32) -> Vec<f32> {
    let power = |n: u32| (1..=n).map(move |i| (-8.0 * i as f32 / n as f32).exp2());
    let whole = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    power(whole).chain(power(2 * whole).step_by(2)).take(heads as usize).collect()
}

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
            Lengths::Ragged { offsets } => offsets[b + 1] - offsets[b],
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

    /// Rows of the LSE of one head: of one sequence, or of all if ragged.
    fn lse_rows(&self) -> u64 {
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

    fn validate(&self, what: &str) -> Result<()> {
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

/// What a batch fixes: lengths, alignment and strides.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Rows of each sequence.
    pub q: Lengths<'a>,
    /// Keys of each sequence; as many sequences.
    pub kv: Lengths<'a>,
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
    /// Of the bias, if there is one.
    pub bias_layout: ScoreLayout,
    /// Of the mask, if there is one.
    pub mask_layout: ScoreLayout,
}

impl<'a> Batch<'a> {
    /// Contiguous tensors: `[batch, len, heads, dim]` or, ragged, `[total, heads, dim]`. Bias and mask, if any, have a
    /// layout of their own to fill in with [`ScoreLayout::broadcast`].
    ///
    /// ```
    /// use wgpu_attention::{AttentionDesc, Batch, Lengths};
    /// let desc = AttentionDesc { heads: 8, kv_heads: 2, head_dim: 64, ..AttentionDesc::default() };
    /// let dense = Batch::new(&desc, Lengths::Uniform { batch: 2, len: 100 }, Lengths::Uniform { batch: 2, len: 100 });
    /// let ragged = Batch::new(&desc, Lengths::Ragged { offsets: &[0, 3, 7] }, Lengths::Ragged { offsets: &[0, 90, 100] });
    /// ```
    pub fn new(desc: &AttentionDesc, q: Lengths<'a>, kv: Lengths<'a>) -> Self {
        let room = |lengths: &Lengths| match lengths {
            Lengths::Uniform { len, .. } => *len,
            Lengths::Padded { max_len, .. } => *max_len,
            Lengths::Ragged { .. } => 0,
        };
        Batch {
            start: Start::BottomRight,
            q_layout: Layout::bshd(room(&q), desc.heads, desc.head_dim),
            k_layout: Layout::bshd(room(&kv), desc.kv_heads, desc.head_dim),
            v_layout: Layout::bshd(room(&kv), desc.kv_heads, desc.v_dim()),
            out_layout: Layout::bshd(room(&q), desc.heads, desc.v_dim()),
            bias_layout: ScoreLayout::default(),
            mask_layout: ScoreLayout::default(),
            q,
            kv,
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

    /// Whether the numbers make sense together.
    pub fn validate(&self) -> Result<()> {
        self.q.validate("q")?;
        self.kv.validate("kv")?;
        if self.q.batch() != self.kv.batch() {
            return Err(Error::shape("kv", format!("{} sequences, as many as q", self.q.batch()), self.kv.batch()));
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

/// The buffers of one call; inputs may be ranges of one buffer, outputs lie in other buffers than inputs.
#[derive(Clone, Copy, Debug)]
pub struct AttentionIo<'a> {
    /// Q.
    pub q: View<'a>,
    /// K.
    pub k: View<'a>,
    /// V.
    pub v: View<'a>,
    /// O.
    pub out: View<'a>,
    /// LSE, f32 `[batch, head, row]` (ragged: `[head, total rows]`), if [`AttentionDesc::lse`].
    pub lse: Option<View<'a>>,
    /// The bias, if [`AttentionDesc::bias`].
    pub bias: Option<View<'a>>,
    /// The mask, if [`AttentionDesc::mask`].
    pub mask: Option<View<'a>>,
}

/// A row: name, needs, largest V dim, then WORKGROUP, TEAM, KEY_VECS, DIM_STEP, KEY_STEP of `attention.wgsl`.
macro_rules! variant {
    ($name:literal, $needs:expr, $v_dim:literal, $workgroup:literal, $team:literal, $key_vecs:literal, $dims:literal, $keys:literal) => {
        Variant {
            name: $name,
            needs: $needs,
            swaps: if $needs.subgroup_min > 0 { &[("reduce", "reduce_subgroup")] } else { &[] },
            values: &[
                ("WORKGROUP", $workgroup),
                ("TEAM", $team),
                ("KEY_VECS", $key_vecs),
                ("DIM_STEP", $dims),
                ("KEY_STEP", $keys),
            ],
            suits: |desc| desc.v_dim() <= $v_dim,
            // Teams of 4 win where subgroups are that small (lavapipe: 20 %), and spill registers on GPUs.
            rank: |caps| match caps.subgroup {
                Some((_, max)) if $team == 4 && max > 8 => 1,
                _ if $team == 4 => 0,
                _ => 1,
            },
        }
    };
}

/// The rows, best first within each form; `short` serves up to 16 packed rows, `tall` more. A lane accumulates
/// 4·V_VECS dims of V, V_VECS ≤ 8, so a team of TEAM lanes serves 32·TEAM at most.
pub fn variants() -> Vec<Variant<AttentionDesc>> {
    // Measured on the H200, f16, d 128: 23 TFLOP/s with 16 dims a stage, 20 with 8; 16 with 64 keys a step.
    vec![
        variant!("attention.tall.subgroup8.q64k32", Needs::subgroup(8), 128, 128, 8, 1, 16, 8),
        variant!("attention.tall.subgroup16.q32k64", Needs::subgroup(16), 256, 128, 16, 1, 16, 4),
        variant!("attention.tall.subgroup4.q64k32", Needs::subgroup(4), 128, 64, 4, 2, 8, 8),
        variant!("attention.tall.portable.q64k32", Needs::NONE, 128, 128, 8, 1, 8, 8),
        variant!("attention.tall.portable.q32k64", Needs::NONE, 256, 128, 16, 1, 8, 4),
        variant!("attention.tall.portable.q16k64", Needs::NONE, 512, 64, 16, 1, 8, 4),
        variant!("attention.short.subgroup16.q16k64", Needs::subgroup(16), 512, 64, 16, 1, 8, 4),
        variant!("attention.short.subgroup8.q16k64", Needs::subgroup(8), 256, 32, 8, 2, 8, 4),
        variant!("attention.short.subgroup4.q16k64", Needs::subgroup(4), 128, 16, 4, 4, 8, 4),
        variant!("attention.short.portable.q16k64", Needs::NONE, 512, 64, 16, 1, 8, 4),
    ]
}

fn is_short(variant: &Variant<AttentionDesc>) -> bool {
    variant.name.contains(".short.")
}

/// Packed rows of a tile.
fn tile_q(variant: &Variant<AttentionDesc>) -> u32 {
    4 * variant.value("WORKGROUP") / variant.value("TEAM")
}

/// Keys of a step.
fn tile_k(variant: &Variant<AttentionDesc>) -> u32 {
    4 * variant.value("KEY_VECS") * variant.value("TEAM")
}

/// What a kernel does with its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Dest {
    Out,
    Partial,
}

/// Which tensors can be read and written four elements at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ByFours {
    q: bool,
    k: bool,
    v: bool,
    out: bool,
}

impl ByFours {
    const ALL: ByFours = ByFours { q: true, k: true, v: true, out: true };
}

fn part(what: &str, dtype: DType, by_fours: bool) -> String {
    format!("{what}_{dtype}{}", if by_fours { "" } else { "_scalar" })
}

fn link_of(desc: &AttentionDesc, variant: &Variant<AttentionDesc>, dest: Dest, by_fours: ByFours) -> Link {
    let mut swaps: Vec<(String, String)> = variant.swaps.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
    let mut swap = |from: &str, to: String| swaps.push((from.into(), to));
    swap("q=load_f32", part("load", desc.q_dtype, by_fours.q));
    swap("k=load_f32", part("load", desc.kv_dtype, by_fours.k));
    swap("v=load_f32", part("load", desc.kv_dtype, by_fours.v));
    if let Some(dtype) = desc.bias {
        swap("bias_none", "bias".into());
        swap("bias=load_f32_scalar", part("load", dtype, false));
    }
    match desc.mask {
        Some(MaskKind::Bool) => swap("mask_none", "mask_bool".into()),
        Some(MaskKind::Bits) => swap("mask_none", "mask_bits".into()),
        None => {}
    }
    match dest {
        Dest::Partial => swap("dest_out", "dest_partial".into()),
        Dest::Out => {
            swap("out=store_f32", part("store", desc.out_dtype, by_fours.out));
            if desc.lse {
                swap("lse_none", "lse".into());
            }
        }
    }
    let mut values: Vec<(String, u32)> = variant.values.iter().map(|(a, b)| (a.to_string(), *b)).collect();
    values.push(("V_VECS".into(), desc.v_dim().div_ceil(4 * variant.value("TEAM")).next_power_of_two()));
    Link { file: "attention", swaps, values, subgroups: variant.needs.subgroup_min > 0 }
}

fn merge_link(desc: &AttentionDesc, by_fours: ByFours) -> Link {
    let mut swaps = vec![("out=store_f32".to_string(), part("store", desc.out_dtype, by_fours.out))];
    if desc.lse {
        swaps.push(("lse_none".into(), "lse".into()));
    }
    Link { file: "merge", swaps, values: Vec::new(), subgroups: false }
}

/// Every module that the rows can make, for the tests that compile them for other platforms: each row with each of its
/// widths of V, and each option with one row.
#[doc(hidden)]
pub fn links() -> Vec<(String, Needs, Link)> {
    let mut out = Vec::new();
    let base = AttentionDesc::default();
    for variant in variants() {
        for v_dim in [32, 64, 128, 256, 512] {
            let desc = AttentionDesc { v_head_dim: Some(v_dim), ..base.clone() };
            if (variant.suits)(&desc) {
                for dest in [Dest::Out, Dest::Partial] {
                    let name = format!("{}.v{v_dim}.{dest:?}", variant.name).to_lowercase();
                    out.push((name, variant.needs, link_of(&desc, &variant, dest, ByFours::ALL)));
                }
            }
        }
    }
    let portable = variants().into_iter().rfind(Variant::is_portable).into_iter();
    for variant in portable {
        for dtype in DType::ALL {
            for aligned in [true, false] {
                for mask in [None, Some(MaskKind::Bool), Some(MaskKind::Bits)] {
                    let by_fours = ByFours { q: aligned, k: aligned, v: aligned, out: aligned };
                    let bias = (mask != Some(MaskKind::Bits)).then_some(dtype);
                    let desc = AttentionDesc {
                        q_dtype: dtype,
                        kv_dtype: dtype,
                        out_dtype: dtype,
                        lse: true,
                        mask,
                        bias,
                        ..base.clone()
                    };
                    let name = format!("{}.{dtype}.fours-{aligned}.{mask:?}", variant.name);
                    out.push((name, variant.needs, link_of(&desc, &variant, Dest::Out, by_fours)));
                    let name = format!("attention.merge.{dtype}.fours-{aligned}.{mask:?}");
                    out.push((name, Needs::NONE, merge_link(&desc, by_fours)));
                }
            }
        }
    }
    out
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) left: i32,
    pub(crate) right: i32,
    pub(crate) flags: u32,
    pub(crate) group: u32,
    pub(crate) qk_dim: u32,
    pub(crate) v_dim: u32,
}

const LEFT_UNLIMITED: u32 = 1;
const RIGHT_UNLIMITED: u32 = 2;
const ALIBI: u32 = 4;
pub(crate) const SINKS: u32 = 8;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Strides {
    q_seq: u32,
    q_head: u32,
    k_seq: u32,
    k_head: u32,
    v_seq: u32,
    v_head: u32,
    out_seq: u32,
    out_head: u32,
    lse_head: u32,
    bias_head: u32,
    bias_row: u32,
    bias_key: u32,
    mask_head: u32,
    mask_row: u32,
    mask_key: u32,
    kv_heads: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Item {
    q: u32,
    k: u32,
    v: u32,
    out: u32,
    lse: u32,
    bias: u32,
    mask: u32,
    row_begin: u32,
    row_count: u32,
    kv_begin: u32,
    kv_end: u32,
    q_pos: i32,
    slot: u32,
    pad: [u32; 3],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct MergeItem {
    out: u32,
    lse: u32,
    row_begin: u32,
    row_count: u32,
    slot: u32,
    states: u32,
    pad: [u32; 2],
}

/// Slopes and sinks as the shaders read them, for [`MAX_HEADS`].
pub(crate) fn heads_bytes(slopes: Option<&[f32]>, sinks: Option<&[f32]>) -> Vec<u8> {
    let at = |values: Option<&[f32]>, head: usize| values.and_then(|values| values.get(head).copied()).unwrap_or(0.0);
    let floats: Vec<f32> = (0..MAX_HEADS as usize).flat_map(|head| [at(slopes, head), at(sinks, head)]).collect();
    bytemuck::cast_slice(&floats).to_vec()
}

/// Attention with everything a model fixes: checked, variants chosen, parameters on the device. Pipelines are compiled
/// when a schedule first needs them, and shared by all of a [`Runtime`].
#[derive(Clone, Debug)]
pub struct Attention {
    runtime: Runtime,
    desc: AttentionDesc,
    short: Option<Variant<AttentionDesc>>,
    tall: Option<Variant<AttentionDesc>>,
    params: wgpu::Buffer,
    heads: wgpu::Buffer,
}

impl Attention {
    /// Checks `desc` and chooses variants: of the rows that suit, that the device can run and that passed the self-test,
    /// the first of each form.
    pub fn new(runtime: &Runtime, desc: &AttentionDesc) -> Result<Self> {
        desc.validate()?;
        let usable = |row: &Variant<AttentionDesc>| out_reason(runtime, desc, row).is_none();
        let mut rows: Vec<_> = match &desc.variant {
            None => runtime.attention_variants().iter().filter(|row| usable(row)).cloned().collect(),
            Some(wanted) => forced(runtime, desc, wanted)?,
        };
        rows.sort_by_key(|row| (row.rank)(runtime.caps()));
        let first = |short: bool| rows.iter().find(|row| is_short(row) == short).cloned();
        Self::with_rows(runtime, desc, first(true), first(false))
    }

    fn with_rows(
        runtime: &Runtime,
        desc: &AttentionDesc,
        short: Option<Variant<AttentionDesc>>,
        tall: Option<Variant<AttentionDesc>>,
    ) -> Result<Self> {
        if short.is_none() && tall.is_none() {
            let lacking =
                "no variant is left that suits the sizes, that the device can run and that passed the self-test";
            return Err(Error::unsupported("attention", lacking));
        }
        let window = desc.effective_window();
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let bound = |distance: Option<u32>| distance.unwrap_or(0).min(MAX_LEN) as i32;
        let params = Params {
            scale: desc.scale(),
            softcap: desc.softcap.unwrap_or(0.0),
            left: bound(window.left),
            right: bound(window.right),
            flags: flag(window.left.is_none_or(|left| left >= MAX_LEN), LEFT_UNLIMITED)
                | flag(window.right.is_none_or(|right| right >= MAX_LEN), RIGHT_UNLIMITED)
                | flag(desc.alibi.is_some(), ALIBI)
                | flag(desc.sinks.is_some(), SINKS),
            group: desc.group(),
            qk_dim: desc.head_dim,
            v_dim: desc.v_dim(),
        };
        let heads = heads_bytes(desc.alibi.as_deref(), desc.sinks.as_deref());
        Ok(Attention {
            params: runtime.upload("attention params", bytemuck::bytes_of(&params), wgpu::BufferUsages::UNIFORM)?,
            heads: runtime.upload("attention heads", &heads, wgpu::BufferUsages::UNIFORM)?,
            runtime: runtime.clone(),
            desc: desc.clone(),
            short,
            tall,
        })
    }

    /// What it was made of.
    pub fn desc(&self) -> &AttentionDesc {
        &self.desc
    }

    /// The runtime it runs on.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Names of the chosen rows: for few packed rows and for many, or one for all.
    pub fn variants(&self) -> Vec<&'static str> {
        self.short.iter().chain(&self.tall).map(|row| row.name).collect()
    }
}

/// Why a row is not used for `desc`, if it is not: for `info`, and for choosing.
pub fn out_reason(runtime: &Runtime, desc: &AttentionDesc, row: &Variant<AttentionDesc>) -> Option<String> {
    if !(row.suits)(desc) {
        return Some(format!("does not serve a V dim of {}", desc.v_dim()));
    }
    if let Some(lacking) = runtime.lacking(&row.needs, row.name, &link_of(desc, row, Dest::Out, ByFours::ALL)) {
        return Some(lacking);
    }
    match runtime.verdict(row.name) {
        Some(Verdict::Failed(reason)) => Some(format!("failed the self-test: {reason}")),
        None if !row.is_portable() => Some("not tested on this adapter and driver".into()),
        _ => None,
    }
}

/// Every row of `runtime`, and why it is not used for `desc` where it is not.
pub fn explain(runtime: &Runtime, desc: &AttentionDesc) -> Vec<(&'static str, Option<String>)> {
    runtime.attention_variants().iter().map(|row| (row.name, out_reason(runtime, desc, row))).collect()
}

fn forced(runtime: &Runtime, desc: &AttentionDesc, wanted: &str) -> Result<Vec<Variant<AttentionDesc>>> {
    let all = runtime.attention_variants();
    let named: Vec<_> =
        all.iter().filter(|row| row.name == wanted || row.name.split('.').any(|piece| piece == wanted)).collect();
    if named.is_empty() {
        let names: Vec<_> = all.iter().map(|row| row.name).collect();
        return Err(Error::shape("variant", format!("one of {}, or a piece of one", names.join(", ")), wanted));
    }
    let mut reason = String::new();
    let mut usable = Vec::new();
    for row in named {
        match out_reason(runtime, desc, row) {
            None => usable.push(row.clone()),
            Some(why) => reason = format!("{}: {why}", row.name),
        }
    }
    if usable.is_empty() { Err(Error::unsupported(format!("variant `{wanted}`"), reason)) } else { Ok(usable) }
}

/// Elements of workspace and dispatch sizes that a schedule may use.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Keys of one item, from the adapter's loop limit and so that no workgroup runs for long.
    keys: u32,
    /// Workgroups to fill the device.
    workgroups: u64,
    /// Bytes of partial states at a time.
    workspace: u64,
    /// Workgroups of a dispatch in one dimension.
    dispatch: usize,
    /// Multiply-adds of a dispatch, so that none runs into a watchdog.
    work: u64,
}

/// One workgroup of a GPU without matrix units does some 2³⁴ multiply-adds a second.
const ITEM_KEYS: u32 = 1 << 16;
/// 0.1 s on a GPU of 2.5 TFLOP/s; the H200 needs 15 ms, against which a dispatch more is nothing.
const DISPATCH_WORK: u64 = 1 << 37;
/// Beyond this, split work is done in rounds that share the workspace.
const WORKSPACE: u64 = 128 << 20;
/// A chunk of keys shorter than this is not worth a partial state.
const MIN_CHUNK: u32 = 128;

/// A tile of rows before keys are split.
#[derive(Clone, Copy, Debug)]
struct Tile {
    item: Item,
    short: bool,
}

impl Tile {
    fn keys(&self) -> u32 {
        self.item.kv_end - self.item.kv_begin
    }
}

/// One dispatch.
#[derive(Debug)]
struct Step {
    pipeline: Arc<Pipeline>,
    items: std::ops::Range<u64>, // bytes in the items buffer
    grid: [u32; 3],
}

/// Bytes that a schedule reaches in each buffer of the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reach {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    lse: u64,
    bias: u64,
    mask: u64,
}

/// The work of a batch, balanced over workgroups, with its lists on the device. Immutable: it can be recorded any number
/// of times, into any encoders, with other buffers each time, and lives as long as the commands that use it need it.
#[derive(Debug)]
pub struct Schedule {
    made_for: AttentionDesc,
    steps: Vec<Step>,
    items: Option<wgpu::Buffer>,
    partials: Option<wgpu::Buffer>,
    strides: wgpu::Buffer,
    reach: Reach,
    workspace: u64,
    splits: usize,
}

impl Schedule {
    /// Dispatches that recording appends.
    pub fn dispatches(&self) -> usize {
        self.steps.len()
    }

    /// Tiles of rows whose keys are split over workgroups and merged.
    pub fn split_tiles(&self) -> usize {
        self.splits
    }

    /// Elements of O that it reaches.
    pub(crate) fn out_len(&self) -> u64 {
        self.reach.out / self.made_for.out_dtype.size()
    }

    /// Bytes of partial states it holds on the device.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace
    }
}

/// The lists of a schedule before they go to the device.
#[derive(Debug, Default)]
struct Lists {
    bytes: Vec<u8>,
    planned: Vec<Planned>,
    slots: u64, // most at a time
    splits: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kernel {
    Attend { short: bool, dest: Dest },
    Merge,
}

#[derive(Clone, Debug)]
struct Planned {
    kernel: Kernel,
    items: std::ops::Range<u64>,
    grid: [u32; 3],
}

impl Attention {
    /// Plans a batch: cuts it into items, splits keys over workgroups where rows are few, and writes the lists to the
    /// device. No command is recorded; a batch without rows gives a schedule without dispatches.
    pub fn schedule(&self, batch: &Batch) -> Result<Schedule> {
        batch.validate()?;
        let desc = &self.desc;
        let reach = self.reach(batch)?;
        let lists = self.plan(batch)?;
        let by_fours = ByFours {
            q: batch.q_layout.by_fours(desc.head_dim),
            k: batch.k_layout.by_fours(desc.head_dim),
            v: batch.v_layout.by_fours(desc.v_dim()),
            out: batch.out_layout.by_fours(desc.v_dim()),
        };
        let strides = Strides {
            q_seq: batch.q_layout.seq as u32,
            q_head: batch.q_layout.head as u32,
            k_seq: batch.k_layout.seq as u32,
            k_head: batch.k_layout.head as u32,
            v_seq: batch.v_layout.seq as u32,
            v_head: batch.v_layout.head as u32,
            out_seq: batch.out_layout.seq as u32,
            out_head: batch.out_layout.head as u32,
            lse_head: batch.q.lse_rows() as u32,
            bias_head: batch.bias_layout.head as u32,
            bias_row: batch.bias_layout.row as u32,
            bias_key: batch.bias_layout.key as u32,
            mask_head: batch.mask_layout.head as u32,
            mask_row: batch.mask_layout.row as u32,
            mask_key: batch.mask_layout.key as u32,
            kv_heads: desc.kv_heads,
        };
        let mut steps = Vec::with_capacity(lists.planned.len());
        for planned in &lists.planned {
            let pipeline = match planned.kernel {
                Kernel::Merge => self.runtime.pipeline("attention.merge", &merge_link(desc, by_fours))?,
                Kernel::Attend { short, dest } => {
                    let row = self.row(short);
                    self.runtime.pipeline(row.name, &link_of(desc, row, dest, by_fours))?
                }
            };
            steps.push(Step { pipeline, items: planned.items.clone(), grid: planned.grid });
        }
        let workspace = lists.slots * u64::from(desc.kv_heads) * slot_bytes(desc.v_dim());
        let storage = wgpu::BufferUsages::STORAGE;
        Ok(Schedule {
            made_for: desc.clone(),
            items: (!lists.bytes.is_empty())
                .then(|| self.runtime.upload("attention items", &lists.bytes, storage))
                .transpose()?,
            partials: (workspace > 0)
                .then(|| self.runtime.buffer("attention partials", workspace, storage))
                .transpose()?,
            strides: self.runtime.upload(
                "attention strides",
                bytemuck::bytes_of(&strides),
                wgpu::BufferUsages::UNIFORM,
            )?,
            steps,
            reach,
            workspace,
            splits: lists.splits,
        })
    }

    fn row(&self, short: bool) -> &Variant<AttentionDesc> {
        let (first, second) = if short { (&self.short, &self.tall) } else { (&self.tall, &self.short) };
        first.as_ref().or(second.as_ref()).expect("`with_rows` demands one")
    }

    fn bounds(&self) -> Bounds {
        let caps = self.runtime.caps();
        // A step of keys costs about this many iterations of nested loops at most.
        let steps = |row: &Variant<AttentionDesc>| {
            let tile = tile_k(row);
            let dims = self.desc.head_dim.next_multiple_of(row.value("DIM_STEP"));
            let stages = dims / row.value("DIM_STEP") * 4 + tile / row.value("KEY_STEP") * 4;
            (dims * (1 + row.value("KEY_VECS")) + tile * 9 + stages + 64, tile)
        };
        let keys = match caps.loop_limit {
            None => ITEM_KEYS,
            Some(limit) => {
                let most = |row: &Variant<AttentionDesc>| (limit / steps(row).0).max(1) * steps(row).1;
                most(self.row(true)).min(most(self.row(false))).min(ITEM_KEYS)
            }
        };
        let limits = &caps.limits;
        Bounds {
            keys,
            workgroups: u64::from(2 * caps.resident_workgroups()),
            workspace: WORKSPACE.min(limits.max_storage_buffer_binding_size),
            dispatch: limits.max_compute_workgroups_per_dimension as usize,
            work: DISPATCH_WORK,
        }
    }

    /// Cuts a batch into tiles of rows with the range of keys that any of them sees.
    fn tiles(&self, batch: &Batch) -> Vec<Tile> {
        let desc = &self.desc;
        let (group, window) = (desc.group(), desc.effective_window());
        let (short_rows, tall_rows) = (tile_q(self.row(true)), tile_q(self.row(false)));
        let mut tiles = Vec::new();
        for b in 0..batch.q.batch() {
            let (q_len, kv_len, start) = (batch.q.len(b), batch.kv.len(b), batch.start_of(b));
            let rows = u64::from(q_len) * u64::from(group);
            let item = Item {
                q: batch.q.start(b, &batch.q_layout) as u32,
                k: batch.kv.start(b, &batch.k_layout) as u32,
                v: batch.kv.start(b, &batch.v_layout) as u32,
                out: batch.q.start(b, &batch.out_layout) as u32,
                lse: batch.q.lse_place(b, desc.heads).0 as u32,
                bias: (batch.bias_layout.offset + b as u64 * batch.bias_layout.batch) as u32,
                mask: (batch.mask_layout.offset + b as u64 * batch.mask_layout.batch) as u32,
                q_pos: start as i32,
                ..Item::default()
            };
            let mut row = 0;
            while row < rows {
                let short = self.tall.is_none() || (self.short.is_some() && rows - row <= u64::from(short_rows));
                let count = (rows - row).min(u64::from(if short { short_rows } else { tall_rows }));
                let first = start + (row / u64::from(group)) as i64;
                let last = start + ((row + count - 1) / u64::from(group)) as i64;
                let low = window.left.map_or(0, |left| (first - i64::from(left)).max(0));
                let high =
                    window.right.map_or(i64::from(kv_len), |right| (last + i64::from(right) + 1).min(kv_len.into()));
                let (kv_begin, kv_end) = if low < high { (low as u32, high as u32) } else { (0, 0) };
                let item = Item { row_begin: row as u32, row_count: count as u32, kv_begin, kv_end, ..item };
                tiles.push(Tile { item, short });
                row += count;
            }
        }
        tiles
    }

    /// Keys of one item: all of a tile's if the tiles fill the device, otherwise the smallest multiple of the key step
    /// with which the items number at most `bounds.workgroups`.
    fn chunk(&self, tiles: &[Tile], bounds: &Bounds) -> u32 {
        let heads = u64::from(self.desc.kv_heads);
        let step = tile_k(self.row(true)).max(tile_k(self.row(false)));
        let most = (bounds.keys / step).max(1); // in steps
        let items = |steps: u32| -> u64 {
            tiles.iter().map(|tile| u64::from(tile.keys().div_ceil(steps * step).max(1))).sum::<u64>() * heads
        };
        if tiles.len() as u64 * heads >= bounds.workgroups / 2 {
            return most * step;
        }
        let (mut low, mut high) = (MIN_CHUNK.div_ceil(step).min(most), most);
        while low < high {
            let middle = low + (high - low) / 2;
            if items(middle) <= bounds.workgroups { high = middle } else { low = middle + 1 }
        }
        low * step
    }

    fn plan(&self, batch: &Batch) -> Result<Lists> {
        let bounds = self.bounds();
        let desc = &self.desc;
        let max_heads = bounds.dispatch as u64;
        if u64::from(desc.kv_heads) > max_heads {
            return Err(Error::limit("kv_heads", max_heads, desc.kv_heads.into(), "a dispatch has no more workgroups"));
        }
        let tiles = self.tiles(batch);
        let chunk = self.chunk(&tiles, &bounds);
        let alignment = self.runtime.caps().limits.min_storage_buffer_offset_alignment;
        let mut writer = Writer { lists: Lists::default(), desc, bounds, alignment: alignment.into() };

        let (mut whole, split): (Vec<Tile>, Vec<Tile>) = tiles.into_iter().partition(|tile| tile.keys() <= chunk);
        whole.sort_by_key(|tile| std::cmp::Reverse(tile.keys())); // longest first, so that the end is even
        for short in [false, true] {
            let items: Vec<Item> = whole.iter().filter(|tile| tile.short == short).map(|tile| tile.item).collect();
            writer.attend(short, Dest::Out, &items);
        }
        writer.lists.splits = split.len();
        let mut rest = split.as_slice();
        while !rest.is_empty() {
            rest = writer.round(rest, chunk)?;
        }
        Ok(writer.lists)
    }

    /// Bytes that the batch reaches in each tensor; offsets and sizes checked against what u32 and a binding can carry.
    fn reach(&self, batch: &Batch) -> Result<Reach> {
        let desc = &self.desc;
        let limit = self.runtime.caps().limits.max_storage_buffer_binding_size;
        let bytes = |what: &str, elements: u64, numerator: u64| -> Result<u64> {
            let given = elements.saturating_mul(numerator);
            if elements > u64::from(u32::MAX) {
                let hint = "offsets must fit in 32 bits; split the batch";
                return Err(Error::limit(format!("elements of {what}"), u32::MAX.into(), elements, hint));
            }
            if given > limit {
                let hint = "the device binds no more; split the batch, or request the device with the adapter's limits";
                return Err(Error::limit(format!("bytes of {what}"), limit, given, hint));
            }
            Ok(given)
        };
        let rows = |what: &str, lengths: &Lengths, layout: &Layout, heads: u32, dim: u32, dtype: DType| {
            let last = (0..lengths.batch())
                .filter(|b| lengths.len(*b) > 0)
                .map(|b| {
                    let seq = u64::from(lengths.len(b) - 1).saturating_mul(layout.seq);
                    lengths.start(b, layout).saturating_add(seq)
                })
                .max();
            let heads = u64::from(heads - 1).saturating_mul(layout.head);
            let elements = last.map_or(0, |last| last.saturating_add(heads).saturating_add(dim.into()));
            bytes(what, elements, dtype.size())
        };
        let scores = |what: &str, layout: &ScoreLayout, size: u64, keys: fn(u32) -> u32| {
            let last = (0..batch.q.batch())
                .filter(|b| batch.q.len(*b) > 0 && batch.kv.len(*b) > 0)
                .map(|b| {
                    let key = u64::from(keys(batch.kv.len(b)) - 1).saturating_mul(layout.key);
                    let row = u64::from(batch.q.len(b) - 1).saturating_mul(layout.row);
                    let batch = (b as u64).saturating_mul(layout.batch);
                    layout.offset.saturating_add(batch).saturating_add(row).saturating_add(key)
                })
                .max();
            let heads = u64::from(desc.heads - 1).saturating_mul(layout.head);
            bytes(what, last.map_or(0, |last| last.saturating_add(heads).saturating_add(1)), size)
        };
        let (dim, v_dim) = (desc.head_dim, desc.v_dim());
        check_distinct(batch, desc)?;
        Ok(Reach {
            q: rows("q", &batch.q, &batch.q_layout, desc.heads, dim, desc.q_dtype)?,
            k: rows("k", &batch.kv, &batch.k_layout, desc.kv_heads, dim, desc.kv_dtype)?,
            v: rows("v", &batch.kv, &batch.v_layout, desc.kv_heads, v_dim, desc.kv_dtype)?,
            out: rows("out", &batch.q, &batch.out_layout, desc.heads, v_dim, desc.out_dtype)?,
            lse: if desc.lse { bytes("lse", batch.q.lse_len(desc.heads), 4)? } else { 0 },
            bias: desc.bias.map_or(Ok(0), |dtype| scores("bias", &batch.bias_layout, dtype.size(), |keys| keys))?,
            mask: match desc.mask {
                Some(MaskKind::Bool) => scores("mask", &batch.mask_layout, 1, |keys| keys)?,
                Some(MaskKind::Bits) => scores("mask", &batch.mask_layout, 4, |keys| keys.div_ceil(32))?,
                None => 0,
            },
        })
    }

    /// Appends the work to `encoder` as one compute pass. Nothing is submitted; `schedule` and the buffers may be dropped
    /// once the encoder is finished.
    ///
    /// Errors leave the encoder as it was.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, schedule: &Schedule, io: &AttentionIo) -> Result<()> {
        let groups = self.bind(schedule, io)?;
        let mut pass = encoder
            .begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some("attention"), timestamp_writes: None });
        Self::dispatch(&mut pass, schedule, &groups);
        Ok(())
    }

    /// The same into a compute pass of the caller.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass, schedule: &Schedule, io: &AttentionIo) -> Result<()> {
        let groups = self.bind(schedule, io)?;
        Self::dispatch(pass, schedule, &groups);
        Ok(())
    }

    fn dispatch(pass: &mut wgpu::ComputePass, schedule: &Schedule, groups: &[wgpu::BindGroup]) {
        for (step, group) in schedule.steps.iter().zip(groups) {
            pass.set_pipeline(&step.pipeline.pipeline);
            pass.set_bind_group(0, group, &[]);
            let [x, y, z] = step.grid;
            pass.dispatch_workgroups(x, y, z);
        }
    }

    fn bind(&self, schedule: &Schedule, io: &AttentionIo) -> Result<Vec<wgpu::BindGroup>> {
        self.runtime.check_lost()?;
        self.check_schedule(schedule)?;
        let alignment = self.runtime.caps().limits.min_storage_buffer_offset_alignment.into();
        let reach = &schedule.reach;
        let q = bind_view("q", Some(io.q), reach.q, alignment)?;
        let k = bind_view("k", Some(io.k), reach.k, alignment)?;
        let v = bind_view("v", Some(io.v), reach.v, alignment)?;
        let out = bind_view("out", Some(io.out), reach.out, alignment)?;
        let lse = bind_view("lse", wanted("lse", self.desc.lse, io.lse)?, reach.lse, alignment)?;
        let bias = bind_view("bias", wanted("bias", self.desc.bias.is_some(), io.bias)?, reach.bias, alignment)?;
        let mask = bind_view("mask", wanted("mask", self.desc.mask.is_some(), io.mask)?, reach.mask, alignment)?;
        for (what, input) in
            [("q", Some(io.q)), ("k", Some(io.k)), ("v", Some(io.v)), ("bias", io.bias), ("mask", io.mask)]
        {
            let same = |output: View| input.is_some_and(|input| input.buffer == output.buffer);
            if same(io.out) || io.lse.is_some_and(same) {
                return Err(Error::shape(
                    what,
                    "a buffer other than the outputs' (WebGPU demands it)",
                    "the same buffer",
                ));
            }
        }
        let whole = |buffer: &'static str| Error::Gpu(format!("the schedule has no {buffer}"));
        let mut groups = Vec::with_capacity(schedule.steps.len());
        for step in &schedule.steps {
            let items = schedule.items.as_ref().ok_or_else(|| whole("items"))?;
            let items = wgpu::BufferBinding {
                buffer: items,
                offset: step.items.start,
                size: wgpu::BufferSize::new(step.items.end - step.items.start),
            };
            groups.push(step.pipeline.bind(self.runtime.device(), |name| match name {
                "params" => Some(self.params.as_entire_buffer_binding()),
                "strides" => Some(schedule.strides.as_entire_buffer_binding()),
                "heads" => Some(self.heads.as_entire_buffer_binding()),
                "items" => Some(items.clone()),
                "partials" => schedule.partials.as_ref().map(|buffer| buffer.as_entire_buffer_binding()),
                "q_data" => q.clone(),
                "k_data" => k.clone(),
                "v_data" => v.clone(),
                "out_data" => out.clone(),
                "lse" => lse.clone(),
                "bias_data" => bias.clone(),
                "mask" => mask.clone(),
                _ => None,
            })?);
        }
        Ok(groups)
    }

    /// A schedule serves every attention with the same sizes, types, window and variants: the layers of a model.
    fn check_schedule(&self, schedule: &Schedule) -> Result<()> {
        let plain = |desc: &AttentionDesc| AttentionDesc {
            scale: None,
            softcap: None,
            alibi: None,
            sinks: None,
            causal: false,
            window: desc.effective_window(),
            v_head_dim: Some(desc.v_dim()),
            ..desc.clone()
        };
        if plain(&self.desc) != plain(&schedule.made_for) {
            let expected = "a schedule made with the same sizes, types, window, bias, mask and variant";
            return Err(Error::shape("schedule", expected, "another one's"));
        }
        Ok(())
    }
}

fn wanted<'a>(what: &str, wanted: bool, given: Option<View<'a>>) -> Result<Option<View<'a>>> {
    match (wanted, given) {
        (true, None) => Err(Error::shape(what, "a buffer, as the descriptor says", "none")),
        (false, Some(_)) => Err(Error::shape(what, "none, as the descriptor says", "a buffer")),
        (_, given) => Ok(given),
    }
}

/// A caller's range as a binding of just what is used, in whole vec4s where the buffer reaches so far.
pub(crate) fn bind_view<'a>(
    what: &str,
    view: Option<View<'a>>,
    reach: u64,
    alignment: u64,
) -> Result<Option<wgpu::BufferBinding<'a>>> {
    let Some(View { buffer, offset }) = view else { return Ok(None) };
    if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
        return Err(Error::shape(what, "a buffer with usage STORAGE", format!("{:?}", buffer.usage())));
    }
    if !offset.is_multiple_of(alignment) {
        let expected = format!("an offset that is a multiple of {alignment} bytes (Layout::offset is finer)");
        return Err(Error::shape(what, expected, offset));
    }
    let room = buffer.size().saturating_sub(offset) / 4 * 4;
    let need = reach.max(4).next_multiple_of(4);
    if need > room {
        let given = format!("{room} from byte {offset} on");
        return Err(Error::shape(what, format!("at least {need} bytes (whole 32-bit words)"), given));
    }
    let size = need.next_multiple_of(16).min(room);
    Ok(Some(wgpu::BufferBinding { buffer, offset, size: wgpu::BufferSize::new(size) }))
}

/// No two elements of O may lie at one place: two workgroups would race for it.
fn check_distinct(batch: &Batch, desc: &AttentionDesc) -> Result<()> {
    let layout = &batch.out_layout;
    let longest = (0..batch.q.batch()).map(|b| batch.q.len(b)).max().unwrap_or(0);
    let mut dims = vec![(layout.head, u64::from(desc.heads))];
    match batch.q {
        Lengths::Ragged { .. } => dims.push((layout.seq, batch.q.lse_rows())),
        _ => dims.extend([(layout.seq, u64::from(longest)), (layout.batch, batch.q.batch() as u64)]),
    }
    check_strides("out_layout", &mut dims, desc.v_dim().into())
}

/// Refuses (stride, count) pairs under which two runs of `extent` elements overlap.
pub(crate) fn check_strides(what: &str, dims: &mut Vec<(u64, u64)>, mut extent: u64) -> Result<()> {
    dims.retain(|(_, count)| *count > 1);
    dims.sort_unstable();
    for (stride, count) in dims {
        if *stride < extent {
            let expected = format!("strides under which no two elements coincide (here at least {extent})");
            return Err(Error::shape(what, expected, stride));
        }
        extent = stride.saturating_mul(*count - 1).saturating_add(extent);
    }
    Ok(())
}

fn slot_bytes(v_dim: u32) -> u64 {
    u64::from(v_dim.next_multiple_of(4) + 4) * 4
}

/// Writes item lists, each at an offset that can be bound, and the dispatches that run them.
struct Writer<'a> {
    lists: Lists,
    desc: &'a AttentionDesc,
    bounds: Bounds,
    alignment: u64,
}

impl Writer<'_> {
    fn list<T: bytemuck::Pod>(&mut self, items: &[T]) -> std::ops::Range<u64> {
        let bytes = &mut self.lists.bytes;
        bytes.resize((bytes.len() as u64).next_multiple_of(self.alignment) as usize, 0);
        let start = bytes.len() as u64;
        bytes.extend_from_slice(bytemuck::cast_slice(items));
        start..bytes.len() as u64
    }

    /// Dispatches over `items`, as many as the limits on workgroups and work demand.
    fn attend(&mut self, short: bool, dest: Dest, items: &[Item]) {
        let dims = u64::from(self.desc.head_dim + self.desc.v_dim()) * u64::from(self.desc.kv_heads);
        let cost = |item: &Item| u64::from(item.row_count) * u64::from(item.kv_end - item.kv_begin) * dims;
        let mut rest = items;
        while !rest.is_empty() {
            let mut work = 0;
            let fits = |item: &&Item| {
                work += cost(item);
                work <= self.bounds.work
            };
            let count = rest.iter().take(self.bounds.dispatch).take_while(fits).count().max(1);
            let (now, later) = rest.split_at(count);
            let items = self.list(now);
            let grid = [count as u32, self.desc.kv_heads, 1];
            self.lists.planned.push(Planned { kernel: Kernel::Attend { short, dest }, items, grid });
            rest = later;
        }
    }

    /// One round over the workspace: as many tiles as it has room for, split into items, then merged. Returns the rest.
    fn round<'t>(&mut self, tiles: &'t [Tile], chunk: u32) -> Result<&'t [Tile]> {
        let slot = slot_bytes(self.desc.v_dim()) * u64::from(self.desc.kv_heads);
        let room = self.bounds.workspace / slot;
        let (mut slots, mut count) = (0u64, 0);
        let (mut short, mut tall, mut merges) = (Vec::new(), Vec::new(), Vec::new());
        for tile in tiles {
            let item = tile.item;
            let states = tile.keys().div_ceil(chunk);
            let more = u64::from(states) * u64::from(item.row_count);
            if slots + more > room || merges.len() == self.bounds.dispatch {
                break;
            }
            for i in 0..states {
                let kv_begin = item.kv_begin + i * chunk;
                let kv_end = item.kv_end.min(kv_begin.saturating_add(chunk));
                let slot = (slots + u64::from(i) * u64::from(item.row_count)) as u32;
                let list = if tile.short { &mut short } else { &mut tall };
                list.push(Item { kv_begin, kv_end, slot, ..item });
            }
            merges.push(MergeItem {
                out: item.out,
                lse: item.lse,
                row_begin: item.row_begin,
                row_count: item.row_count,
                slot: slots as u32,
                states,
                pad: [0; 2],
            });
            slots += more;
            count += 1;
        }
        if count == 0 {
            let need = u64::from(tiles[0].keys().div_ceil(chunk)) * u64::from(tiles[0].item.row_count) * slot;
            let hint = "one tile's partial states do not fit; use fewer keys or a device that binds more";
            return Err(Error::limit("bytes of partial states", self.bounds.workspace, need, hint));
        }
        self.attend(false, Dest::Partial, &tall);
        self.attend(true, Dest::Partial, &short);
        let rows = merges.iter().map(|merge| merge.row_count).max().unwrap_or(0);
        let items = self.list(&merges);
        let grid = [merges.len() as u32, self.desc.kv_heads, rows];
        self.lists.planned.push(Planned { kernel: Kernel::Merge, items, grid });
        self.lists.slots = self.lists.slots.max(slots);
        Ok(&tiles[count..])
    }
}

/// Runs one row on a small case with every kind of score option, empty rows and tails, whole and split, against the
/// f64 oracle.
pub(crate) async fn self_test(runtime: &Runtime, variant: &Variant<AttentionDesc>) -> Result<Verdict> {
    let desc = AttentionDesc {
        heads: 6,
        kv_heads: 2,
        head_dim: 20,
        v_head_dim: Some(12),
        causal: true,
        window: Window { left: Some(150), right: None },
        softcap: Some(20.0),
        alibi: Some(alibi_slopes(6)),
        sinks: Some(vec![0.5, -1.0, 2.0, f32::NEG_INFINITY, 0.0, 1.0]),
        lse: true,
        ..AttentionDesc::default()
    };
    let (short, tall) = if is_short(variant) { (Some(variant.clone()), None) } else { (None, Some(variant.clone())) };
    let attention = Attention::with_rows(runtime, &desc, short, tall)?;
    // 70 rows on 67 keys have rows without keys; 3 rows on 700 keys are split.
    for (q_len, kv_len) in [(70, 67), (3, 700)] {
        let batch =
            Batch::new(&desc, Lengths::Uniform { batch: 1, len: q_len }, Lengths::Uniform { batch: 1, len: kv_len });
        let wave = |n: u32, step: f32| (0..n).map(|i| (i as f32 * step).sin() * 2.0).collect::<Vec<f32>>();
        let (q, k) = (wave(q_len * 6 * 20, 0.37), wave(kv_len * 2 * 20, 0.73));
        let v = wave(kv_len * 2 * 12, 1.31);
        let input = HostInput { q: &q, k: &k, v: &v, bias: None, mask: HostMask::None };
        let got = match attention.run(&batch, &input).await {
            Ok(got) => got,
            Err(error @ (Error::DeviceLost(_) | Error::OutOfMemory(_))) => return Err(error),
            Err(error) => return Ok(Verdict::Failed(error.to_string())),
        };
        if runtime.caps().info.backend == wgpu::Backend::Noop {
            continue; // computes nothing
        }
        let (out, lse) = crate::reference::attention::<f64>(&desc, &batch, &input)?;
        let far = |got: &[f32], want: &[f64], tolerance: f64| {
            got.iter().zip(want).position(|(got, want)| {
                let same = f64::from(*got) == *want;
                !same && !((f64::from(*got) - want).abs() <= tolerance)
            })
        };
        if let Some(at) = far(&got.out, &out, 2e-5) {
            return Ok(Verdict::Failed(format!("output {at} is {}, not {:.6}", got.out[at], out[at])));
        }
        if let Some(at) = far(&got.lse, &lse, 2e-5) {
            return Ok(Verdict::Failed(format!("LSE {at} is {}, not {:.6}", got.lse[at], lse[at])));
        }
    }
    Ok(Verdict::Passed)
}
