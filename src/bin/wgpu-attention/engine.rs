//! Computes attention on an adapter, or with the oracle on the CPU, and takes the time.

use std::time::Instant;

use anyhow::{Result, bail};
use wgpu::BufferUsages as Usage;
use wgpu_attention::{
    Attention, AttentionDesc, AttentionIo, Batch, DType, HostInput, HostMask, Lengths, Runtime, SelfTest, View,
    reference,
};

use crate::{Global, device, terminal};

/// What computes.
pub enum Engine {
    Oracle,
    Gpu { runtime: Box<Runtime>, variant: Option<String> },
}

/// A result and how it came about.
pub struct Answer {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    /// Rows of the variant table, none for the oracle.
    pub variants: Vec<&'static str>,
    /// None if there was nothing to compute.
    pub time: Option<Time>,
}

/// How long one run takes.
pub struct Time {
    pub seconds: f64,
    /// What was measured, in words.
    pub method: String,
}

impl Engine {
    pub fn open(global: &Global) -> Result<Engine> {
        if !device::is_oracle(global) {
            let test = if global.variant.is_some() { SelfTest::All } else { SelfTest::Chosen };
            let (_, runtime) = device::open(global, test)?;
            return Ok(Engine::Gpu { runtime: Box::new(runtime), variant: global.variant.clone() });
        }
        if global.variant.is_some() {
            bail!("--variant chooses among kernels, but the oracle has none; leave it out");
        }
        Ok(Engine::Oracle)
    }

    /// What computes, in a line.
    pub fn label(&self) -> String {
        match self {
            Engine::Oracle => "oracle (f64 on the CPU)".into(),
            Engine::Gpu { runtime, .. } => device::label(&runtime.caps().info),
        }
    }

    /// The same without the driver.
    pub fn short_label(&self) -> String {
        match self {
            Engine::Oracle => self.label(),
            Engine::Gpu { runtime, .. } => {
                let info = &runtime.caps().info;
                format!("{} ({}, {})", info.name, device::kind(info), info.backend)
            }
        }
    }

    /// Computes O and LSE. The values of `input` must be such that the types of `desc` hold them.
    pub fn attend(&self, desc: &AttentionDesc, batch: &Batch, input: &HostInput) -> Result<Answer> {
        match self {
            Engine::Oracle => oracle(desc, batch, input),
            Engine::Gpu { runtime, variant, .. } => {
                gpu(runtime, &AttentionDesc { variant: variant.clone(), ..desc.clone() }, batch, input)
            }
        }
    }

    /// Keeps for the next run what this one compiled.
    pub fn keep(&self) {
        if let Engine::Gpu { runtime, .. } = self {
            device::keep(runtime);
        }
    }
}

/// Elements of O, which is contiguous.
fn out_len(desc: &AttentionDesc, batch: &Batch) -> usize {
    let rows = match batch.q {
        Lengths::Uniform { batch, len } => batch as usize * len as usize,
        Lengths::Padded { max_len, lens } => max_len as usize * lens.len(),
        Lengths::Ragged { offsets } => offsets.last().map_or(0, |total| *total as usize),
    };
    rows * desc.heads as usize * desc.v_dim() as usize
}

fn oracle(desc: &AttentionDesc, batch: &Batch, input: &HostInput) -> Result<Answer> {
    let spinner = terminal::spinner("computing in f64 on the CPU".into());
    let start = Instant::now();
    let result = reference::attention::<f64>(desc, batch, input);
    let time = Time { seconds: start.elapsed().as_secs_f64(), method: "one run, one thread".into() };
    spinner.finish_and_clear();
    let (out, lse) = result?;
    let narrow = |values: Vec<f64>| values.into_iter().map(|x| x as f32).collect::<Vec<f32>>();
    let mut out = narrow(out);
    out.resize(out_len(desc, batch), 0.0);
    Ok(Answer { time: (!out.is_empty()).then_some(time), out, lse: narrow(lse), variants: Vec::new() })
}

fn gpu(runtime: &Runtime, desc: &AttentionDesc, batch: &Batch, input: &HostInput) -> Result<Answer> {
    let attention = Attention::new(runtime, desc)?;
    let schedule = attention.schedule(batch)?;
    let (out_len, lse_len) = (out_len(desc, batch), batch.q.lse_len(desc.heads) as usize);
    let variants = attention.variants();
    if schedule.dispatches() == 0 {
        return Ok(Answer { out: vec![0.0; out_len], lse: vec![0.0; lse_len], variants, time: None });
    }
    let tensor = |what: &str, values: &[f32], dtype: DType| runtime.upload(what, &dtype.encode(values), Usage::STORAGE);
    let q = tensor("q", input.q, desc.q_dtype)?;
    let k = tensor("k", input.k, desc.kv_dtype)?;
    let v = tensor("v", input.v, desc.kv_dtype)?;
    let bias = input.bias.map(|values| tensor("bias", values, desc.bias.unwrap_or_default())).transpose()?;
    let mask = match input.mask {
        HostMask::None => None,
        HostMask::Bool(bytes) => Some(runtime.upload("mask", bytes, Usage::STORAGE)?),
        HostMask::Bits(words) => Some(runtime.upload("mask", bytemuck::cast_slice(words), Usage::STORAGE)?),
    };
    let (out_size, lse_size) = (out_len as u64 * desc.out_dtype.size(), lse_len as u64 * 4);
    let out = runtime.buffer("out", out_size, Usage::STORAGE | Usage::COPY_SRC)?;
    let lse = runtime.buffer("lse", lse_size, Usage::STORAGE | Usage::COPY_SRC)?;
    let io = AttentionIo {
        q: (&q).into(),
        k: (&k).into(),
        v: (&v).into(),
        out: (&out).into(),
        lse: desc.lse.then_some(View::from(&lse)),
        bias: bias.as_ref().map(View::from),
        mask: mask.as_ref().map(View::from),
    };
    let clock = Clock::new(runtime)?;
    let run = || clock.time(runtime, |pass| attention.record_in(pass, &schedule, &io));
    let first = run()?;
    let out = desc.out_dtype.decode(&pollster::block_on(runtime.read(&out, out_size))?, out_len);
    let lse = DType::F32.decode(&pollster::block_on(runtime.read(&lse, lse_size))?, lse_len);
    Ok(Answer { out, lse, variants, time: Some(median(first, run, clock.name())?) })
}

/// Runs on after the first until there is something to take a median of.
fn median(first: f64, run: impl Fn() -> Result<f64>, clock: &str) -> Result<Time> {
    const ENOUGH: f64 = 0.3;
    const MOST: usize = 20;
    // It ran long enough for its cold start not to matter.
    if first > 5.0 {
        return Ok(Time { seconds: first, method: format!("one run, {clock}") });
    }
    let start = Instant::now();
    let mut times = vec![run()?];
    while times.len() < MOST && start.elapsed().as_secs_f64() < ENOUGH {
        times.push(run()?);
    }
    times.sort_by(f64::total_cmp);
    let method = match times.len() {
        1 => format!("second run, {clock}"),
        count => format!("median of {count} runs, {clock}"),
    };
    Ok(Time { seconds: times[times.len() / 2], method })
}

/// GPU timestamps where there are any, otherwise the time until the device has finished.
struct Clock {
    timestamps: Option<(wgpu::QuerySet, wgpu::Buffer)>,
}

impl Clock {
    fn new(runtime: &Runtime) -> Result<Clock> {
        if !runtime.caps().features.contains(wgpu::Features::TIMESTAMP_QUERY) {
            return Ok(Clock { timestamps: None });
        }
        let descriptor = wgpu::QuerySetDescriptor { label: Some("time"), ty: wgpu::QueryType::Timestamp, count: 2 };
        let buffer = runtime.buffer("time", 16, Usage::QUERY_RESOLVE | Usage::COPY_SRC)?;
        Ok(Clock { timestamps: Some((runtime.device().create_query_set(&descriptor), buffer)) })
    }

    fn name(&self) -> &'static str {
        if self.timestamps.is_some() { "GPU timestamps" } else { "wall time with submission" }
    }

    /// Submits one compute pass, waits for it, and returns its seconds.
    fn time(
        &self,
        runtime: &Runtime,
        record: impl Fn(&mut wgpu::ComputePass) -> wgpu_attention::Result<()>,
    ) -> Result<f64> {
        let scope = runtime.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let start = Instant::now();
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        let timestamp_writes = self.timestamps.as_ref().map(|(query_set, _)| wgpu::ComputePassTimestampWrites {
            query_set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        });
        let mut pass =
            encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some("attend"), timestamp_writes });
        record(&mut pass)?;
        drop(pass);
        if let Some((query_set, buffer)) = &self.timestamps {
            encoder.resolve_query_set(query_set, 0..2, buffer, 0);
        }
        runtime.queue().submit([encoder.finish()]);
        runtime.wait()?;
        let wall = start.elapsed().as_secs_f64();
        if let Some(error) = pollster::block_on(scope.pop()) {
            return Err(wgpu_attention::Error::from(error).into());
        }
        let Some((_, buffer)) = &self.timestamps else { return Ok(wall) };
        let bytes = pollster::block_on(runtime.read(buffer, 16))?;
        let ticks: Vec<u64> = bytes.as_chunks().0.iter().map(|tick| u64::from_le_bytes(*tick)).collect();
        // A coarse clock may not advance during a short run.
        let ticks = ticks[1].checked_sub(ticks[0]).filter(|ticks| *ticks > 0);
        Ok(ticks.map_or(wall, |ticks| ticks as f64 * f64::from(runtime.queue().get_timestamp_period()) * 1e-9))
    }
}

/// Operations of a batch, a multiply-add counted as two: pairs of a row and a key that causal and window leave visible,
/// times heads, times the dims of QK and V. Masks do not lower it.
pub fn flops(desc: &AttentionDesc, batch: &Batch) -> f64 {
    let window = desc.effective_window();
    let mut pairs = 0;
    for b in 0..batch.q.batch() {
        let (start, kv_len) = (batch.start_of(b), i64::from(batch.kv.len(b)));
        for position in start..start + i64::from(batch.q.len(b)) {
            let low = window.left.map_or(0, |left| (position - i64::from(left)).max(0));
            let high = window.right.map_or(kv_len, |right| (position + i64::from(right) + 1).min(kv_len));
            pairs += (high - low).max(0);
        }
    }
    pairs as f64 * f64::from(desc.heads) * 2.0 * f64::from(desc.head_dim + desc.v_dim())
}
