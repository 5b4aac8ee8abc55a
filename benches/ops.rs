//! The quick cases under criterion, for regressions on one machine: `cargo bench`, `cargo bench -- decode`.
//!
//! Wall time of recording, submitting and waiting, on the best adapter or the one whose name holds
//! `WGPU_ATTENTION_ADAPTER`. What the CLI's `bench` measures is the device's own time, of every variant.

mod common;

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pollster::block_on;
use wgpu_attention::Runtime;
use wgpu_attention::cases::{self, Case, Check};
use wgpu_attention::measure::{CaseBuffers, Work};

/// Runs of one submission.
const TOGETHER: u64 = 16;

fn time(runtime: &Runtime, work: &Work, buffers: &CaseBuffers, runs: u64) -> Duration {
    let start = Instant::now();
    for first in (0..runs).step_by(TOGETHER as usize) {
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for run in first..runs.min(first + TOGETHER) {
            work.record_in(&mut pass, buffers, run as usize).unwrap();
        }
        drop(pass);
        runtime.queue().submit([encoder.finish()]);
        runtime.wait().unwrap();
    }
    start.elapsed()
}

fn bench_case(criterion: &mut Criterion, runtime: &Runtime, case: &Case) {
    let data = case.data();
    let buffers = CaseBuffers::new(runtime, case, &data).unwrap();
    let check = Check::new(case, &data).unwrap();
    let mut works = vec![("default", Work::fused(runtime, case, None).unwrap())];
    works.extend(Work::twins(runtime, case).into_iter().map(|(name, work)| (name, work.unwrap())));
    let mut group = criterion.benchmark_group(&case.name);
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(case.flops() as u64));
    for (name, work) in &works {
        let bytes = block_on(work.output(runtime, &buffers)).unwrap();
        let out = case.desc.out_dtype.decode(&bytes, case.elements()[3] as usize);
        check.against_oracle(&out).unwrap_or_else(|wrong| panic!("{} {name}: {wrong}", case.name));
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            bencher.iter_custom(|runs| time(runtime, work, &buffers, runs));
        });
    }
    group.finish();
}

fn ops(criterion: &mut Criterion) {
    let runtime = common::open();
    for case in cases::all().iter().filter(|case| case.quick) {
        bench_case(criterion, &runtime, case);
    }
}

criterion_group!(benches, ops);
criterion_main!(benches);
