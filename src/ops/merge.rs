//! Merges attention states over disjoint sets of keys: shared prefixes, context parallelism, keys in several pools.
//!
//! `O = Σ exp(LSEᵢ − M)·Oᵢ / Σ exp(LSEᵢ − M)`, `LSE = M + ln Σ exp(LSEᵢ − M)`. A state whose LSE is −∞ (or +∞, which some
//! libraries write) is empty and is left out whatever its O; no state at all gives 0 and −∞. A sink, if any, enters here,
//! once: the states must be without. States are taken in ascending order, so the same inputs give the same bits.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernel::Pipeline;
use crate::ops::attention::{MAX_HEADS, MAX_V_HEAD_DIM, Params, SINKS, heads_bytes};
use crate::runtime::Runtime;
use crate::shader::{Link, shader_struct};
use crate::view::{DType, Layout, View, Width, bind_view, check_apart, check_input, check_strides, reach_of};

/// What a merge is made for.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeDesc {
    /// Heads, 1 to 2048.
    pub heads: u32,
    /// Dim of O heads, 1 to 512.
    pub v_head_dim: u32,
    /// Type of the states' O. LSEs are f32.
    pub state_dtype: DType,
    /// Type of the result's O.
    pub out_dtype: DType,
    /// Attention sinks, one logit a head; −∞ is none for that head.
    pub sinks: Option<Vec<f32>>,
}

/// Number of states and rows, and where they lie. The LSEs are `[state, head, row]`, the result's `[head, row]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeLayout {
    /// States of each row.
    pub states: u32,
    /// Rows of each state.
    pub rows: u32,
    /// Of the states' O; [`Layout::batch`] is the distance between states.
    pub state_layout: Layout,
    /// Of the result's O; `batch` is not used.
    pub out_layout: Layout,
}

/// The buffers of one merge; outputs lie in other buffers than inputs.
#[derive(Clone, Copy, Debug)]
pub struct MergeIo<'a> {
    /// O of all states.
    pub states: View<'a>,
    /// LSE of all states, f32 `[state, head, row]`.
    pub lse: View<'a>,
    /// O of the result.
    pub out: View<'a>,
    /// LSE of the result, f32 `[head, row]`.
    pub out_lse: View<'a>,
}

shader_struct! {
    struct Strides {
        state: u32,
        seq: u32,
        head: u32,
        lse_state: u32,
        lse_head: u32,
        out_seq: u32,
        out_head: u32,
        out_lse_head: u32,
        tokens: u32,
        states: u32,
        first: u32,
        out_first: u32,
    }
}

#[doc(hidden)]
pub const STRUCTS: &[(&str, &str, &[&str])] = &[("parts/states_user", "Strides", Strides::FIELDS)];

/// A merge with its parameters on the device. Immutable; record it any number of times.
#[derive(Debug)]
pub struct Merge {
    runtime: Runtime,
    pipeline: Option<Arc<Pipeline>>,
    params: wgpu::Buffer,
    strides: wgpu::Buffer,
    heads: wgpu::Buffer,
    grid: [u32; 3],
    reach: [u64; 4],
}

/// Every module that merges can make, for the tests that compile them for other platforms.
#[doc(hidden)]
pub fn links() -> Vec<(String, crate::Needs, Link)> {
    let mut out = Vec::new();
    for dtype in DType::ALL {
        for width in [Width::One, Width::Four] {
            let name = format!("merge.{dtype}.{}", width.name());
            out.push((name, crate::Needs::NONE, link_of(dtype, width, dtype, width)));
        }
    }
    out
}

fn link_of(state: DType, state_width: Width, out: DType, out_width: Width) -> Link {
    let swaps = vec![
        ("states_partial".to_string(), "states_user".to_string()),
        ("lse_none".to_string(), "lse".to_string()),
        ("states=load_f32".to_string(), state.part("load", state_width)),
        ("out=store_f32".to_string(), out.part("store", out_width)),
    ];
    Link { file: "merge", swaps, values: Vec::new(), subgroups: false }
}

impl Merge {
    /// Checks the sizes and writes the parameters to the device. No rows is valid and records nothing.
    pub fn new(runtime: &Runtime, desc: &MergeDesc, layout: &MergeLayout) -> Result<Self> {
        Error::unless_in("heads", desc.heads, MAX_HEADS)?;
        Error::unless_in("v_head_dim", desc.v_head_dim, MAX_V_HEAD_DIM)?;
        if let Some(sinks) = &desc.sinks {
            if sinks.len() != desc.heads as usize {
                return Err(Error::shape("sinks", format!("one for each of {} heads", desc.heads), sinks.len()));
            }
            if let Some(bad) = sinks.iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
                return Err(Error::shape("sinks", "finite numbers", bad));
            }
        }
        let limits = &runtime.caps().limits;
        // Some software adapters stop loops early; the kernel goes over the states in up to four.
        let most = runtime.caps().loop_limit.map_or(u32::MAX, |limit| limit / 5);
        if layout.states > most {
            return Err(Error::limit("states", most.into(), layout.states.into(), "merge in parts"));
        }
        let extent = |what: &str, at: &Layout, states: u32, dtype: DType| {
            reach_of(what, at, [states, layout.rows, desc.heads, desc.v_head_dim], dtype, limits)
        };
        let lse_layout = |states: u32| {
            let bytes =
                [u64::from(states), desc.heads.into(), layout.rows.into(), 4].into_iter().fold(1, u64::saturating_mul);
            let most = limits.max_storage_buffer_binding_size;
            if bytes > most { Err(Error::limit("bytes of lse", most, bytes, "merge in parts")) } else { Ok(bytes) }
        };
        let reach = [
            extent("states", &layout.state_layout, layout.states, desc.state_dtype)?,
            lse_layout(layout.states)?,
            extent("out", &layout.out_layout, 1, desc.out_dtype)?,
            lse_layout(1)?,
        ];
        let mut dims =
            vec![(layout.out_layout.head, u64::from(desc.heads)), (layout.out_layout.seq, layout.rows.into())];
        check_strides("out_layout", &mut dims, desc.v_head_dim.into())?;
        let strides = Strides {
            state: layout.state_layout.batch as u32,
            seq: layout.state_layout.seq as u32,
            head: layout.state_layout.head as u32,
            lse_state: desc.heads * layout.rows,
            lse_head: layout.rows,
            out_seq: layout.out_layout.seq as u32,
            out_head: layout.out_layout.head as u32,
            out_lse_head: layout.rows,
            tokens: layout.rows,
            states: layout.states,
            first: layout.state_layout.offset as u32,
            out_first: layout.out_layout.offset as u32,
        };
        let params =
            Params { flags: if desc.sinks.is_some() { SINKS } else { 0 }, v_dim: desc.v_head_dim, ..Params::default() };
        let width = |layout: &Layout| layout.width(desc.v_head_dim).narrow();
        let link = link_of(desc.state_dtype, width(&layout.state_layout), desc.out_dtype, width(&layout.out_layout));
        let uniform = wgpu::BufferUsages::UNIFORM;
        Ok(Merge {
            pipeline: (layout.rows > 0).then(|| runtime.pipeline("merge", &link)).transpose()?,
            params: runtime.upload("merge params", bytemuck::bytes_of(&params), uniform)?,
            strides: runtime.upload("merge strides", bytemuck::bytes_of(&strides), uniform)?,
            heads: runtime.upload("merge heads", &heads_bytes(None, desc.sinks.as_deref()), uniform)?,
            grid: [layout.rows.min(65_535), desc.heads, layout.rows.div_ceil(65_535)],
            reach,
            runtime: runtime.clone(),
        })
    }

    /// Appends the merge to `encoder`; nothing is submitted.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, io: &MergeIo) -> Result<()> {
        self.runtime.check_lost()?;
        let Some(pipeline) = &self.pipeline else { return Ok(()) };
        let limits = &self.runtime.caps().limits;
        let views = [("states", io.states), ("lse", io.lse), ("out", io.out), ("out_lse", io.out_lse)];
        let mut bound = Vec::with_capacity(views.len());
        for ((what, view), reach) in views.into_iter().zip(self.reach) {
            bound.push(bind_view(what, Some(view), reach, limits)?);
        }
        check_apart("out_lse", (io.out, self.reach[2]), (io.out_lse, self.reach[3]))?;
        for (what, input) in [("states", io.states), ("lse", io.lse)] {
            check_input(what, input, &[io.out, io.out_lse])?;
        }
        let group = pipeline.bind(self.runtime.device(), |name| match name {
            "params" => Some(self.params.as_entire_buffer_binding()),
            "strides" => Some(self.strides.as_entire_buffer_binding()),
            "heads" => Some(self.heads.as_entire_buffer_binding()),
            "states_data" => bound[0].clone(),
            "state_lse" => bound[1].clone(),
            "out_data" => bound[2].clone(),
            "lse" => bound[3].clone(),
            _ => None,
        })?;
        let mut pass =
            encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some("merge"), timestamp_writes: None });
        pass.set_pipeline(&pipeline.pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(self.grid[0], self.grid[1], self.grid[2]);
        Ok(())
    }
}
