//! Computes attention on an adapter, or with the oracle on the CPU, and takes the time.

use std::time::Instant;

use anyhow::{Result, bail};
use wgpu_attention::measure::Timer;
use wgpu_attention::{Attention, AttentionDesc, Batch, HostInput, HostOutput, Runtime, SelfTest, reference};

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
    /// Rows of the variant table that were used, none for the oracle.
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

fn oracle(desc: &AttentionDesc, batch: &Batch, input: &HostInput) -> Result<Answer> {
    let spinner = terminal::spinner("computing in f64 on the CPU".into());
    let start = Instant::now();
    let result = reference::attention::<f64>(desc, batch, input);
    let time = Time { seconds: start.elapsed().as_secs_f64(), method: "one run, one thread".into() };
    spinner.finish_and_clear();
    let (out, lse) = result?;
    let narrow = |values: Vec<f64>| values.into_iter().map(|x| x as f32).collect::<Vec<f32>>();
    Ok(Answer { time: (!out.is_empty()).then_some(time), out: narrow(out), lse: narrow(lse), variants: Vec::new() })
}

fn gpu(runtime: &Runtime, desc: &AttentionDesc, batch: &Batch, input: &HostInput) -> Result<Answer> {
    let attention = Attention::new(runtime, desc)?;
    let schedule = attention.schedule(batch)?;
    let variants = schedule.variants().to_vec();
    let buffers = attention.upload(batch, input)?;
    if schedule.dispatches() == 0 {
        let HostOutput { out, lse } = pollster::block_on(attention.download(&buffers))?;
        return Ok(Answer { out, lse, variants, time: None });
    }
    let timer = Timer::new(runtime)?;
    let clock = if timer.is_gpu_clock() { "GPU timestamps" } else { "wall time with submission" };
    let run = || Ok(pollster::block_on(timer.time(|pass| attention.record_in(pass, &schedule, &buffers.io())))?);
    let first = run()?;
    let HostOutput { out, lse } = pollster::block_on(attention.download(&buffers))?;
    Ok(Answer { out, lse, variants, time: Some(median(first, run, clock)?) })
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
