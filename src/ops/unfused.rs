//! The classic three passes, as a baseline to measure [`Attention`](crate::Attention) against: scores to memory, softmax of
//! their rows, weights times V. The products are tiled in registers with the same means as the fused kernel.
//!
//! It takes the same descriptor and batch where they ask for nothing but sizes, types, scale and `causal` on sequences of
//! one length. Scores that the device cannot bind at once are computed for some KV heads after the other; those of a single
//! KV head must fit. Unlike in the fused operation, a NaN in V reaches every row of its tile.

use std::sync::Arc;

use crate::caps::Needs;
use crate::error::{Error, Result};
use crate::kernel::Pipeline;
use crate::ops::attention::{AttentionDesc, Batch, Lengths, Window};
use crate::runtime::Runtime;
use crate::shader::{Link, shader_struct};
use crate::view::{DType, Layout, View, Width, bind_view, check_input, check_strides, reach_of};

/// The name of its only variant.
pub const NAME: &str = "unfused.portable.q64k64";

/// The buffers of one call; the output lies in another buffer than the inputs.
#[derive(Clone, Copy, Debug)]
pub struct UnfusedIo<'a> {
    /// Q.
    pub q: View<'a>,
    /// K.
    pub k: View<'a>,
    /// V.
    pub v: View<'a>,
    /// O.
    pub out: View<'a>,
}

shader_struct! {
    struct Params {
        scale: f32,
        group: u32,
        rows: u32,
        kv_len: u32,
        kv_heads: u32,
        first_plane: u32,
        start: i32,
        causal: u32,
        qk_dim: u32,
        v_dim: u32,
        pitch: u32,
        q_first: u32,
        q_batch: u32,
        q_seq: u32,
        q_head: u32,
        k_first: u32,
        k_batch: u32,
        k_seq: u32,
        k_head: u32,
        v_first: u32,
        v_batch: u32,
        v_seq: u32,
        v_head: u32,
        out_first: u32,
        out_batch: u32,
        out_seq: u32,
        out_head: u32,
        pad: u32,
    }
}

#[doc(hidden)]
pub const STRUCTS: &[(&str, &str, &[&str])] = &[("parts/unfused", "Params", Params::FIELDS)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Scores,
    Softmax,
    Output,
}

const PASSES: [Pass; 3] = [Pass::Scores, Pass::Softmax, Pass::Output];

/// The planes (KV heads of sequences) whose scores are in memory at a time.
#[derive(Debug)]
struct Chunk {
    params: wgpu::Buffer,
    planes: u32,
}

/// Unfused attention for one shape, with its parameters and its scores buffer on the device.
#[derive(Debug)]
pub struct Unfused {
    runtime: Runtime,
    pipelines: Vec<Arc<Pipeline>>,
    chunks: Vec<Chunk>,
    grids: [[u32; 2]; 3],
    scores: Option<wgpu::Buffer>,
    reach: [u64; 4],
}

/// Every module it can make, for the tests that compile them for other platforms.
#[doc(hidden)]
pub fn links() -> Vec<(String, Needs, Link)> {
    let mut out = Vec::new();
    for dtype in DType::ALL {
        for width in [Width::One, Width::Four] {
            let desc = AttentionDesc { q_dtype: dtype, kv_dtype: dtype, out_dtype: dtype, ..AttentionDesc::default() };
            for pass in PASSES {
                let name = format!("{NAME}.{pass:?}.{dtype}.{}", width.name()).to_lowercase();
                if pass != Pass::Softmax || (dtype == DType::F32 && width == Width::Four) {
                    out.push((name, Needs::NONE, link_of(&desc, pass, [width; 4])));
                }
            }
        }
    }
    out
}

fn link_of(desc: &AttentionDesc, pass: Pass, [q, k, v, out]: [Width; 4]) -> Link {
    let (file, swaps) = match pass {
        Pass::Scores => (
            "unfused_scores",
            vec![
                ("q=load_f32".to_string(), desc.q_dtype.part("load", q)),
                ("k=load_f32".to_string(), desc.kv_dtype.part("load", k)),
            ],
        ),
        Pass::Softmax => ("unfused_softmax", Vec::new()),
        Pass::Output => (
            "unfused_output",
            vec![
                ("v=load_f32".to_string(), desc.kv_dtype.part("load", v)),
                ("out=store_f32".to_string(), desc.out_dtype.part("store", out)),
            ],
        ),
    };
    Link { file, swaps, values: Vec::new(), subgroups: false }
}

/// Rows of scores of one plane that a folded dispatch counts in its second dimension.
const FOLD: u32 = 65_535;
/// Loop iterations a key costs the longest-running pass, rounded up.
const ITERATIONS_A_KEY: u64 = 8;

impl Unfused {
    /// Checks the sizes, compiles, and makes the scores buffer. No rows is valid and records nothing.
    pub fn new(runtime: &Runtime, desc: &AttentionDesc, batch: &Batch) -> Result<Self> {
        desc.validate()?;
        batch.validate()?;
        let (sequences, q_len, kv_len) = uniform(desc, batch)?;
        let limits = &runtime.caps().limits;
        if let Some(limit) = runtime.caps().loop_limit
            && u64::from(kv_len) * ITERATIONS_A_KEY > limit.into()
        {
            let most = u64::from(limit) / ITERATIONS_A_KEY;
            let hint = "this adapter stops loops that run longer; the fused attention splits them";
            return Err(Error::limit("keys of unfused attention", most, kv_len.into(), hint));
        }
        let rows = u64::from(q_len) * u64::from(desc.group());
        if rows > 64 * u64::from(FOLD) {
            return Err(Error::limit("packed query rows", 64 * u64::from(FOLD), rows, "use the fused attention"));
        }
        let reach = |what: &str, layout: Layout, len: u32, heads: u32, dim: u32, dtype: DType| {
            reach_of(what, &layout, [sequences, len, heads, dim], dtype, limits)
        };
        let (dim, v_dim) = (desc.head_dim, desc.v_dim());
        let reach = [
            reach("q", batch.q_layout, q_len, desc.heads, dim, desc.q_dtype)?,
            reach("k", batch.k_layout, kv_len, desc.kv_heads, dim, desc.kv_dtype)?,
            reach("v", batch.v_layout, kv_len, desc.kv_heads, v_dim, desc.kv_dtype)?,
            reach("out", batch.out_layout, q_len, desc.heads, v_dim, desc.out_dtype)?,
        ];
        let layout = batch.out_layout;
        let mut dims = vec![(layout.batch, u64::from(sequences)), (layout.seq, u64::from(q_len))];
        dims.push((layout.head, u64::from(desc.heads)));
        if rows > 0 {
            check_strides("out_layout", &mut dims, v_dim.into())?;
        }

        let mut unfused = Unfused {
            runtime: runtime.clone(),
            pipelines: Vec::new(),
            chunks: Vec::new(),
            grids: [
                [kv_len.div_ceil(64), rows.div_ceil(64) as u32],
                [(rows as u32).min(FOLD), (rows as u32).div_ceil(FOLD)],
                [v_dim.div_ceil(64), rows.div_ceil(64) as u32],
            ],
            scores: None,
            reach,
        };
        let columns = kv_len.div_ceil(64);
        if columns > FOLD {
            return Err(Error::limit(
                "tiles of keys",
                FOLD.into(),
                columns.into(),
                "a dispatch has no more workgroups",
            ));
        }
        let planes = sequences.saturating_mul(desc.kv_heads);
        if rows == 0 || planes == 0 {
            return Ok(unfused);
        }
        let pitch = kv_len.div_ceil(4) + 1;
        let plane_bytes = rows * u64::from(pitch) * 16;
        let limit = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let at_a_time = (limit / plane_bytes).min(FOLD.into()).min(planes.into()) as u32;
        if at_a_time == 0 {
            let hint = "the scores of one KV head must fit in a binding; use the fused attention";
            return Err(Error::limit("bytes of scores of one KV head", limit, plane_bytes, hint));
        }
        unfused.scores =
            Some(runtime.buffer("unfused scores", u64::from(at_a_time) * plane_bytes, wgpu::BufferUsages::STORAGE)?);
        let widths = [
            batch.q_layout.width(dim),
            batch.k_layout.width(dim),
            batch.v_layout.width(v_dim),
            batch.out_layout.width(v_dim),
        ]
        .map(Width::narrow);
        for pass in PASSES {
            unfused.pipelines.push(runtime.pipeline(NAME, &link_of(desc, pass, widths))?);
        }
        let (q, k, v, out) = (batch.q_layout, batch.k_layout, batch.v_layout, batch.out_layout);
        for first_plane in (0..planes).step_by(at_a_time as usize) {
            let params = Params {
                scale: desc.scale(),
                group: desc.group(),
                rows: rows as u32,
                kv_len,
                kv_heads: desc.kv_heads,
                first_plane,
                start: batch.start_of(0) as i32,
                causal: desc.causal.into(),
                qk_dim: dim,
                v_dim,
                pitch,
                q_first: q.offset as u32,
                q_batch: q.batch as u32,
                q_seq: q.seq as u32,
                q_head: q.head as u32,
                k_first: k.offset as u32,
                k_batch: k.batch as u32,
                k_seq: k.seq as u32,
                k_head: k.head as u32,
                v_first: v.offset as u32,
                v_batch: v.batch as u32,
                v_seq: v.seq as u32,
                v_head: v.head as u32,
                out_first: out.offset as u32,
                out_batch: out.batch as u32,
                out_seq: out.seq as u32,
                out_head: out.head as u32,
                pad: 0,
            };
            let uniform = wgpu::BufferUsages::UNIFORM;
            let params = runtime.upload("unfused params", bytemuck::bytes_of(&params), uniform)?;
            unfused.chunks.push(Chunk { params, planes: at_a_time.min(planes - first_plane) });
        }
        Ok(unfused)
    }

    /// Bytes of scores it holds on the device.
    pub fn workspace_bytes(&self) -> u64 {
        self.scores.as_ref().map_or(0, wgpu::Buffer::size)
    }

    /// Appends the work to `encoder` as one compute pass; nothing is submitted.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, io: &UnfusedIo) -> Result<()> {
        let descriptor = wgpu::ComputePassDescriptor { label: Some("unfused"), timestamp_writes: None };
        self.record_in(&mut encoder.begin_compute_pass(&descriptor), io)
    }

    /// The same into a compute pass of the caller.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass, io: &UnfusedIo) -> Result<()> {
        self.runtime.check_lost()?;
        let Some(scores) = &self.scores else { return Ok(()) };
        let limits = &self.runtime.caps().limits;
        let views = [("q", io.q), ("k", io.k), ("v", io.v), ("out", io.out)];
        let mut bound = Vec::with_capacity(views.len());
        for ((what, view), reach) in views.into_iter().zip(self.reach) {
            if what != "out" {
                check_input(what, view, &[io.out])?;
            }
            bound.push(bind_view(what, Some(view), reach, limits)?);
        }
        for chunk in &self.chunks {
            for (pipeline, [x, y]) in self.pipelines.iter().zip(self.grids) {
                let group = pipeline.bind(self.runtime.device(), |name| match name {
                    "params" => Some(chunk.params.as_entire_buffer_binding()),
                    "scores" => Some(scores.as_entire_buffer_binding()),
                    "q_data" => bound[0].clone(),
                    "k_data" => bound[1].clone(),
                    "v_data" => bound[2].clone(),
                    "out_data" => bound[3].clone(),
                    _ => None,
                })?;
                pass.set_pipeline(&pipeline.pipeline);
                pass.set_bind_group(0, &group, &[]);
                pass.dispatch_workgroups(x, y, chunk.planes);
            }
        }
        Ok(())
    }
}

/// Number of sequences, rows and keys of each; anything that the three passes do not know is refused.
fn uniform(desc: &AttentionDesc, batch: &Batch) -> Result<(u32, u32, u32)> {
    let options = [
        (desc.window != Window::default(), "a window"),
        (desc.softcap.is_some(), "softcap"),
        (desc.alibi.is_some(), "ALiBi"),
        (desc.sinks.is_some(), "sinks"),
        (desc.bias.is_some(), "a bias"),
        (desc.mask.is_some(), "a mask"),
        (desc.lse, "LSE"),
        (matches!(batch.start, crate::Start::Explicit(_)), "explicit starts"),
        (batch.pages.is_some(), "pages"),
    ];
    if let Some((_, what)) = options.iter().find(|(wanted, _)| *wanted) {
        return Err(Error::unsupported("unfused attention", format!("it has no {what}")));
    }
    match (batch.q, batch.kv) {
        (Lengths::Uniform { batch, len }, Lengths::Uniform { len: kv_len, .. }) => Ok((batch, len, kv_len)),
        _ => Err(Error::unsupported("unfused attention", "it has only sequences of one length")),
    }
}
