//! Attention: `O = softmax(f(scale · Q·Kᵀ)) · V`, one operation for prefill, decode and ragged batches.
//!
//! For query row `i` of a sequence with `q_len` rows and `kv_len` keys, head `h`, KV head `h / (heads / kv_heads)`:
//!
//! - Row `i` stands at key position `p = i + start`; `start` is `kv_len − q_len` ([`Start::BottomRight`]) unless chosen.
//!   Causal: key `j` is visible when `j ≤ p`. Window: `p − left ≤ j ≤ p + right`, both ends included.
//! - The score is `scale · q·k`, then softcap `c · tanh(s / c)`, then additive bias, then ALiBi `− slope · |p − j|`,
//!   then masks. A bias of −∞ is a mask; a finite one is not, however low. A score below −3.4028e38 is taken for
//!   −3.4028e38, which is visible; one above 3.4028e38 makes its row NaN.
//! - A row that sees no key gives `O = 0` and `LSE = −∞`; with a sink, `LSE = sink`.
//! - LSE is the natural logarithm of the sum of `exp(score)` (and of `exp(sink)`), f32.
//! - Nothing that a row does not see influences it, whatever bytes are there. NaN and ∞ in what it sees propagate as in ordinary
//!   arithmetic, and never into another row.
//! - Arithmetic is f32 whatever the storage; the same plan, inputs and adapter give the same bits.
//!
//! [`Attention`] holds what is fixed by a model, [`Schedule`] what is fixed by a batch; [`Attention::record`] appends the
//! dispatches to a caller's encoder. Methods: Dao, *FlashAttention-2* (2023) for tiling and online softmax; Ye et al.,
//! *FlashInfer* (2025) for packed rows, work items and the plan/run split; Xiao et al. (2023) for sinks; Press et al.
//! (2021) for ALiBi.

mod batch;
mod plan;
mod rows;
mod schedule;

pub use batch::{Batch, Cascade, Lengths, Start};
pub use rows::{links, variants};
pub(crate) use schedule::Buffers;
pub use schedule::Schedule;
#[doc(hidden)]
pub use {plan::PlannedItem, schedule::STRUCTS};

use crate::error::{Error, Result};
use crate::host::{HostInput, HostMask};
use crate::kernel::{Variant, is_named};
use crate::runtime::{Runtime, Verdict};
use crate::shader::shader_struct;
use crate::view::{DType, ScoreLayout, View, Width, bind_view, check_apart, check_input};
use rows::{Access, Dest, Form, MAX_DECODE_ROWS, form_of, link_of};

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
    /// Scores become `c · tanh(score / c)`; 1e-30 to 1e30.
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
    /// Use only these variants: the name of a row, or pieces of names between dots (`portable`, `tall.subgroup8`).
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
pub const MAX_LEN: u32 = 1 << 29;
/// From here on a side of a window is unlimited: no key is farther from a row.
const MAX_WINDOW: u32 = 1 << 30;

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
        Error::unless_in("heads", self.heads, MAX_HEADS)?;
        Error::unless_in("kv_heads", self.kv_heads, MAX_HEADS)?;
        Error::unless_in("head_dim", self.head_dim, MAX_HEAD_DIM)?;
        Error::unless_in("v_head_dim", self.v_dim(), MAX_V_HEAD_DIM)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::shape("kv_heads", format!("a divisor of {} heads", self.heads), self.kv_heads));
        }
        if !self.scale().is_finite() {
            return Err(Error::shape("scale", "a finite number", self.scale()));
        }
        if let Some(cap) = self.softcap
            && !(1e-30..=1e30).contains(&cap)
        {
            return Err(Error::shape("softcap", "a number from 1e-30 to 1e30", cap));
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

shader_struct! {
    pub(crate) struct Params {
        scale: f32,
        softcap: f32,
        left: i32,
        right: i32,
        flags: u32,
        group: u32,
        qk_dim: u32,
        v_dim: u32,
    }
}

const LEFT_UNLIMITED: u32 = 1;
const RIGHT_UNLIMITED: u32 = 2;
const ALIBI: u32 = 4;
pub(crate) const SINKS: u32 = 8;

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
    /// At most one of each form, lowest first.
    rows: Vec<Variant<AttentionDesc>>,
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
        let first = |form: Form| rows.iter().find(|row| form_of(row) == form).cloned();
        Self::with_rows(runtime, desc, Form::ALL.into_iter().filter_map(first).collect())
    }

    fn with_rows(runtime: &Runtime, desc: &AttentionDesc, rows: Vec<Variant<AttentionDesc>>) -> Result<Self> {
        if rows.is_empty() {
            let reasons: Vec<_> =
                explain(runtime, desc).into_iter().filter(|(name, _)| name.contains("portable")).collect();
            let reason = reasons.into_iter().rev().find_map(|(name, reason)| Some(format!("{name}: {}", reason?)));
            let lacking = reason.unwrap_or_else(|| "no variant suits".into());
            return Err(Error::unsupported("attention", format!("no variant can run; {lacking}")));
        }
        let window = desc.effective_window();
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let bound = |distance: Option<u32>| distance.unwrap_or(0).min(MAX_WINDOW) as i32;
        let params = Params {
            scale: desc.scale(),
            softcap: desc.softcap.unwrap_or(0.0),
            left: bound(window.left),
            right: bound(window.right),
            flags: flag(window.left.is_none_or(|left| left >= MAX_WINDOW), LEFT_UNLIMITED)
                | flag(window.right.is_none_or(|right| right >= MAX_WINDOW), RIGHT_UNLIMITED)
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
            rows,
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

    /// Names of the chosen rows, at most one of each form: for very few packed rows, for few, for many.
    pub fn variants(&self) -> Vec<&'static str> {
        self.rows.iter().map(|row| row.name).collect()
    }
}

fn cannot_run(runtime: &Runtime, desc: &AttentionDesc, row: &Variant<AttentionDesc>) -> Option<String> {
    if !(row.suits)(desc) {
        let (dim, v_dim, group) = (desc.head_dim, desc.v_dim(), desc.group());
        return Some(format!("does not serve a QK dim of {dim}, a V dim of {v_dim} and {group} query heads a KV head"));
    }
    runtime.lacking(&row.needs, row.name, &link_of(desc, row, Dest::Out, Access::dense(Width::Four)))
}

/// Why a row is not used for `desc`, if it is not: for `info`, and for choosing.
pub fn out_reason(runtime: &Runtime, desc: &AttentionDesc, row: &Variant<AttentionDesc>) -> Option<String> {
    if let Some(reason) = cannot_run(runtime, desc, row) {
        return Some(reason);
    }
    match runtime.verdict(row.name) {
        Some(Verdict::Failed(reason)) => Some(format!("failed the self-test: {reason}")),
        None if !row.is_portable() => Some("not tested on this adapter and driver".into()),
        _ => None,
    }
}

/// The rows that would be chosen for some V dim if those without a verdict passed.
pub(crate) fn first_choices(runtime: &Runtime) -> Vec<Variant<AttentionDesc>> {
    let mut rows: Vec<_> = runtime.attention_variants().to_vec();
    rows.sort_by_key(|row| (row.rank)(runtime.caps()));
    let mut chosen: Vec<Variant<AttentionDesc>> = Vec::new();
    let shapes = [32, 64, 128, 256, MAX_V_HEAD_DIM].into_iter().flat_map(|dim| [(dim, 1), (dim, MAX_DECODE_ROWS)]);
    for (head_dim, heads) in shapes {
        let desc = AttentionDesc { heads, head_dim, ..AttentionDesc::default() };
        for form in Form::ALL {
            let serves = |row: &&Variant<AttentionDesc>| {
                form_of(row) == form
                    && !matches!(runtime.verdict(row.name), Some(Verdict::Failed(_)))
                    && cannot_run(runtime, &desc, row).is_none()
            };
            let Some(row) = rows.iter().find(serves) else { continue };
            if chosen.iter().all(|other| other.name != row.name) {
                chosen.push(row.clone());
            }
        }
    }
    chosen
}

/// Every row of `runtime`, and why it is not used for `desc` where it is not.
pub fn explain(runtime: &Runtime, desc: &AttentionDesc) -> Vec<(&'static str, Option<String>)> {
    runtime.attention_variants().iter().map(|row| (row.name, out_reason(runtime, desc, row))).collect()
}

fn forced(runtime: &Runtime, desc: &AttentionDesc, wanted: &str) -> Result<Vec<Variant<AttentionDesc>>> {
    let all = runtime.attention_variants();
    let named: Vec<_> = all.iter().filter(|row| is_named(row.name, wanted)).collect();
    if named.is_empty() {
        let names: Vec<_> = all.iter().map(|row| row.name).collect();
        return Err(Error::shape("variant", format!("one of {}, or pieces of one", names.join(", ")), wanted));
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

impl Attention {
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
        if let Some(buffers) = &schedule.buffers {
            let in_use = buffers.in_use.clone();
            pass.on_submitted_work_done(move || drop(in_use));
        }
        for (step, group) in schedule.steps.iter().zip(groups) {
            pass.set_pipeline(&step.pipeline.pipeline);
            pass.set_bind_group(0, group, &[]);
            let [x, y, z] = step.grid;
            pass.dispatch_workgroups(x, y, z);
        }
    }

    fn bind<'a>(&self, schedule: &'a Schedule, io: &AttentionIo<'a>) -> Result<Vec<wgpu::BindGroup>> {
        self.runtime.check_lost()?;
        self.check_schedule(schedule)?;
        let limits = &self.runtime.caps().limits;
        if let Some(lse) = io.lse {
            check_apart("lse", (io.out, schedule.reach.out), (lse, schedule.reach.lse))?;
        }
        let lse = wanted("lse", self.desc.lse, io.lse)?;
        let bias = wanted("bias", self.desc.bias.is_some(), io.bias)?;
        let mask = wanted("mask", self.desc.mask.is_some(), io.mask)?;
        for (what, input) in
            [("q", Some(io.q)), ("k", Some(io.k)), ("v", Some(io.v)), ("bias", io.bias), ("mask", io.mask)]
        {
            if let Some(input) = input {
                check_input(what, input, &[io.out, io.lse.unwrap_or(io.out)])?;
            }
        }
        let Some(buffers) = &schedule.buffers else { return Ok(Vec::new()) }; // no rows, nothing to do
        // What is never read, such as K of sequences without keys, may be empty; something must be bound all the same.
        let input = |what: &str, view: Option<View<'a>>, reach: u64| match reach {
            0 => Ok(view.map(|_| buffers.plan.as_entire_buffer_binding())),
            reach => bind_view(what, view, reach, limits),
        };
        let reach = &schedule.reach;
        let q = input("q", Some(io.q), reach.q)?;
        let k = input("k", Some(io.k), reach.k)?;
        let v = input("v", Some(io.v), reach.v)?;
        let bias = input("bias", bias, reach.bias)?;
        let mask = input("mask", mask, reach.mask)?;
        let out = bind_view("out", Some(io.out), reach.out, limits)?;
        let lse = bind_view("lse", lse, reach.lse, limits)?;
        let mut groups = Vec::with_capacity(schedule.steps.len());
        for step in &schedule.steps {
            let plan = wgpu::BufferBinding {
                buffer: &buffers.plan,
                offset: step.plan.start,
                size: wgpu::BufferSize::new(step.plan.end - step.plan.start),
            };
            groups.push(step.pipeline.bind(self.runtime.device(), |name| match name {
                "params" => Some(self.params.as_entire_buffer_binding()),
                "strides" => Some(buffers.strides.as_entire_buffer_binding()),
                "heads" => Some(self.heads.as_entire_buffer_binding()),
                "plan" => Some(plan.clone()),
                "partials" => buffers.partials.as_ref().map(|buffer| buffer.as_entire_buffer_binding()),
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
        if !self.runtime.is(&schedule.runtime) {
            return Err(Error::shape("schedule", "one made on the same Runtime", "another Runtime's"));
        }
        if plain(&self.desc) != plain(&schedule.made_for) {
            let expected = "a schedule made with the same sizes, types, window, bias, mask and variant";
            return Err(Error::shape("schedule", expected, "another one's"));
        }
        if schedule.cascades && self.desc.alibi.is_some() {
            let expected = "one made for an attention with ALiBi, or with `Cascade::Never`";
            return Err(Error::shape("schedule", expected, "one whose sequences share tiles"));
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

/// Runs one row at its largest V dim on two small cases, against the f64 oracle: one with rows that see no key, tails and
/// every flag, one split over workgroups and merged, with a bias and a mask as well.
pub(crate) async fn self_test(runtime: &Runtime, variant: &Variant<AttentionDesc>) -> Result<Verdict> {
    let binding = runtime.caps().limits.max_storage_buffer_binding_size;
    let serves = |v_dim: &u32| {
        let desc = AttentionDesc { v_head_dim: Some(*v_dim), ..AttentionDesc::default() };
        u64::from(500 * 2 * 4 * v_dim) <= binding && cannot_run(runtime, &desc, variant).is_none()
    };
    let widest = [MAX_V_HEAD_DIM, 256, 128, 64, 32].into_iter().find(serves).unwrap_or(16);
    let desc = AttentionDesc {
        heads: 6,
        kv_heads: 2,
        head_dim: 12,
        v_head_dim: Some(widest - 4),
        causal: true,
        window: Window { left: Some(150), right: None },
        softcap: Some(20.0),
        alibi: Some(alibi_slopes(6)),
        sinks: Some(vec![0.5, -1.0, 2.0, f32::NEG_INFINITY, 0.0, 1.0]),
        lse: true,
        ..AttentionDesc::default()
    };
    let plain = self_test_on(runtime, variant, &desc, 70, 67).await?;
    if plain != Verdict::Passed {
        return Ok(plain);
    }
    let wide = Window { left: Some(490), right: None };
    let desc = AttentionDesc { window: wide, bias: Some(DType::F32), mask: Some(MaskKind::Bits), ..desc };
    self_test_on(runtime, variant, &desc, 3, 500).await
}

async fn self_test_on(
    runtime: &Runtime,
    variant: &Variant<AttentionDesc>,
    desc: &AttentionDesc,
    q_len: u32,
    kv_len: u32,
) -> Result<Verdict> {
    let attention = Attention::with_rows(runtime, desc, vec![variant.clone()])?;
    let mut batch =
        Batch::new(desc, Lengths::Uniform { batch: 1, len: q_len }, Lengths::Uniform { batch: 1, len: kv_len });
    let scores = [1, desc.heads, q_len, kv_len];
    let wave = |n: u32, step: f32| (0..n).map(|i| (i as f32 * step).sin() * 2.0).collect::<Vec<f32>>();
    let (q, k) = (wave(q_len * desc.heads * desc.head_dim, 0.37), wave(kv_len * desc.kv_heads * desc.head_dim, 0.73));
    let v = wave(kv_len * desc.kv_heads * desc.v_dim(), 1.31);
    let bias = wave(desc.heads * kv_len, 0.91);
    let mask: Vec<u32> = (0..kv_len.div_ceil(32)).map(|i| 0x9e37_79b9u32.rotate_left(i)).collect();
    let mut input = HostInput { q: &q, k: &k, v: &v, bias: None, mask: HostMask::None };
    if desc.bias.is_some() {
        batch.bias_layout = ScoreLayout::broadcast(&[desc.heads, 1, kv_len], scores);
        batch.mask_layout = ScoreLayout::broadcast_bits(&[kv_len], scores);
        input = HostInput { bias: Some(&bias), mask: HostMask::Bits(&mask), ..input };
    }
    let got = match attention.run(&batch, &input).await {
        Ok(got) => got,
        Err(error @ (Error::DeviceLost(_) | Error::OutOfMemory(_))) => return Err(error),
        Err(error) => return Ok(Verdict::Failed(error.to_string())),
    };
    if runtime.caps().info.backend == wgpu::Backend::Noop {
        return Ok(Verdict::Passed); // computes nothing
    }
    let (out, lse) = crate::reference::attention::<f64>(desc, &batch, &input)?;
    for (what, got, want) in [("output", &got.out, &out), ("LSE", &got.lse, &lse)] {
        let far = |(got, want): (&f32, &f64)| {
            let distance = (f64::from(*got) - want).abs();
            f64::from(*got) != *want && (distance.is_nan() || distance > 2e-5)
        };
        if let Some(at) = got.iter().zip(want).position(far) {
            return Ok(Verdict::Failed(format!("{what} {at} is {}, not {:.6}", got[at], want[at])));
        }
    }
    Ok(Verdict::Passed)
}
