//! Runs cases on a device: their buffers, their commands, their times.

use std::time::Instant;

use crate::cases::{Case, CaseData, Twin};
use crate::error::Result;
use crate::ops::attention::{Attention, AttentionDesc, AttentionIo, Batch, Cascade, Schedule};
use crate::ops::unfused::{self, Unfused, UnfusedIo};
use crate::runtime::Runtime;

/// One way to compute a case, planned and compiled.
#[derive(Debug)]
pub enum Work {
    /// In one pass over the keys.
    Fused(Box<Attention>, Box<Schedule>),
    /// In three passes.
    Unfused(Unfused),
}

impl Work {
    /// The fused operation with the rows that `variant` names, or those it chooses itself.
    pub fn fused(runtime: &Runtime, case: &Case, variant: Option<&str>) -> Result<Work> {
        Self::fused_on(runtime, case, variant, &case.batch())
    }

    fn fused_on(runtime: &Runtime, case: &Case, variant: Option<&str>, batch: &Batch) -> Result<Work> {
        let desc = AttentionDesc { variant: variant.map(String::from), ..case.desc.clone() };
        let attention = Attention::new(runtime, &desc)?;
        let schedule = attention.schedule(batch)?;
        Ok(Work::Fused(Box::new(attention), Box::new(schedule)))
    }

    /// What a case is compared with, and its names.
    pub fn twins(runtime: &Runtime, case: &Case) -> Vec<(&'static str, Result<Work>)> {
        let cascade = |cascade| Self::fused_on(runtime, case, None, &Batch { cascade, ..case.batch() });
        match case.twin {
            None => Vec::new(),
            Some(Twin::Unfused) => {
                vec![("unfused", Unfused::new(runtime, &case.desc, &case.batch()).map(Work::Unfused))]
            }
            Some(Twin::Cascade) => vec![("flat", cascade(Cascade::Never)), ("cascade", cascade(Cascade::Always))],
        }
    }

    /// Names of the rows it uses.
    pub fn rows(&self) -> Vec<&'static str> {
        match self {
            Work::Fused(_, schedule) => schedule.variants().to_vec(),
            Work::Unfused(_) => vec![unfused::NAME],
        }
    }

    /// Appends `repeats` runs, one after the other, each on the next K and V.
    pub fn repeat_in(&self, pass: &mut wgpu::ComputePass, buffers: &CaseBuffers, repeats: usize) -> Result<()> {
        (0..repeats).try_for_each(|copy| self.record_in(pass, buffers, copy))
    }

    /// Appends one run on the `copy`-th K and V, counted around.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass, buffers: &CaseBuffers, copy: usize) -> Result<()> {
        let (k, v) = &buffers.kv[copy % buffers.kv.len()];
        let (q, k, v, out) = ((&buffers.q).into(), k.into(), v.into(), (&buffers.out).into());
        match self {
            Work::Fused(attention, schedule) => {
                let io = AttentionIo { q, k, v, out, lse: None, bias: None, mask: None };
                attention.record_in(pass, schedule, &io)
            }
            Work::Unfused(unfused) => unfused.record_in(pass, &UnfusedIo { q, k, v, out }),
        }
    }

    /// One run; the bytes of O, which held zeros before.
    pub async fn output(&self, runtime: &Runtime, buffers: &CaseBuffers) -> Result<Vec<u8>> {
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        encoder.clear_buffer(&buffers.out, 0, None);
        self.record_in(&mut encoder.begin_compute_pass(&Default::default()), buffers, 0)?;
        runtime.queue().submit([encoder.finish()]);
        buffers.read_out(runtime).await
    }
}

/// The tensors of a case on the device.
#[derive(Debug)]
pub struct CaseBuffers {
    q: wgpu::Buffer,
    kv: Vec<(wgpu::Buffer, wgpu::Buffer)>,
    out: wgpu::Buffer,
    out_bytes: u64,
}

/// More than the caches of any GPU hold.
const UNCACHED: u64 = 256 << 20;

impl CaseBuffers {
    /// Uploads. Where memory is the bottleneck of a GPU there are several copies of K and V, to be used in turns, so that
    /// they come from memory and not from a cache.
    pub fn new(runtime: &Runtime, case: &Case, data: &CaseData) -> Result<Self> {
        let (desc, storage) = (&case.desc, wgpu::BufferUsages::STORAGE);
        let [_, k_len, v_len, out_len] = case.elements();
        let kv_bytes = (k_len + v_len) * desc.kv_dtype.size();
        let from_memory =
            case.is_decoding() && runtime.caps().info.device_type != wgpu::DeviceType::Cpu && kv_bytes > 0;
        let copies = if from_memory { UNCACHED.div_ceil(kv_bytes).clamp(1, 64) } else { 1 };
        let (k, v) = (desc.kv_dtype.encode(&data.k), desc.kv_dtype.encode(&data.v));
        let pair = |_| Ok((runtime.upload("k", &k, storage)?, runtime.upload("v", &v, storage)?));
        let out_bytes = (out_len * desc.out_dtype.size()).next_multiple_of(4);
        let out_usage = storage | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        Ok(CaseBuffers {
            q: runtime.upload("q", &desc.q_dtype.encode(&data.q), storage)?,
            kv: (0..copies).map(pair).collect::<Result<_>>()?,
            out: runtime.buffer("out", out_bytes, out_usage)?,
            out_bytes,
        })
    }

    /// The bytes of O as the last run left them.
    pub async fn read_out(&self, runtime: &Runtime) -> Result<Vec<u8>> {
        runtime.read(&self.out, self.out_bytes).await
    }
}

/// Takes times by the GPU's own clock where there is one, otherwise from the submission to the end of a wait.
#[derive(Debug)]
pub struct Timer {
    runtime: Runtime,
    clock: Option<Clock>,
}

#[derive(Debug)]
struct Clock {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    seconds_a_tick: f64,
}

impl Timer {
    /// A timer for work on `runtime`.
    pub fn new(runtime: &Runtime) -> Result<Self> {
        let device = runtime.device();
        let clock = match runtime.caps().features.contains(wgpu::Features::TIMESTAMP_QUERY) {
            false => None,
            true => Some(Clock {
                queries: device.create_query_set(&wgpu::QuerySetDescriptor {
                    label: Some("timer"),
                    ty: wgpu::QueryType::Timestamp,
                    count: 2,
                }),
                resolved: runtime.buffer(
                    "timestamps",
                    16,
                    wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                )?,
                seconds_a_tick: f64::from(runtime.queue().get_timestamp_period()) * 1e-9,
            }),
        };
        Ok(Timer { runtime: runtime.clone(), clock })
    }

    /// Whether times are the GPU's own.
    pub fn is_gpu_clock(&self) -> bool {
        self.clock.is_some()
    }

    /// Seconds of what `record` appends to one compute pass. A coarse GPU clock may not advance during a short run; then it
    /// is the time from the submission to the end of a wait.
    pub async fn time(&self, record: impl FnOnce(&mut wgpu::ComputePass) -> Result<()>) -> Result<f64> {
        let mut encoder = self.runtime.device().create_command_encoder(&Default::default());
        let writes = self.clock.as_ref().map(|clock| wgpu::ComputePassTimestampWrites {
            query_set: &clock.queries,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        });
        let mut pass =
            encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some("timed"), timestamp_writes: writes });
        record(&mut pass)?;
        drop(pass);
        if let Some(clock) = &self.clock {
            encoder.resolve_query_set(&clock.queries, 0..2, &clock.resolved, 0);
        }
        let commands = encoder.finish();
        let start = Instant::now();
        self.runtime.queue().submit([commands]);
        self.runtime.wait()?;
        let wall = start.elapsed().as_secs_f64();
        let Some(clock) = &self.clock else { return Ok(wall) };
        let bytes = self.runtime.read(&clock.resolved, 16).await?;
        let ticks: &[u64] = &bytemuck::pod_collect_to_vec(&bytes);
        let ticks = ticks[1].checked_sub(ticks[0]).filter(|ticks| *ticks > 0);
        Ok(ticks.map_or(wall, |ticks| ticks as f64 * clock.seconds_a_tick))
    }
}
