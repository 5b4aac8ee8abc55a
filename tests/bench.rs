//! `bench` from the command line: it measures, its JSON comes back, wrong arguments are one line.
#![cfg(feature = "cli")]

use std::process::{Command, Output};

use pollster::block_on;
use wgpu_attention::measure::{CaseBuffers, Timer, Work};
use wgpu_attention::report::Report;
use wgpu_attention::{Runtime, RuntimeOptions, SelfTest, adapters, cases};

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_wgpu-attention")).arg("bench").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_case_is_measured_and_its_report_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let json = path.to_str().unwrap();
    let output = bench(&["--quick", "--filter", "sweep/f16/b1-h2-s128", "--variant", "portable", "--json", json]);
    let (table, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{table}{errors}");
    assert!(table.contains("unfused") && table.contains("tall.portable"), "{table}");
    assert!(table.lines().take_while(|line| !line.starts_with("Left out")).all(|line| line.chars().count() <= 120));

    let report = Report::from_json(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((report.quick, report.cases.len(), report.skipped.len()), (true, 1, 0));
    let case = &report.cases[0];
    for variant in &case.variants {
        let times = variant.times.unwrap_or_else(|| panic!("{variant:?}"));
        assert!(0.0 < times.min && times.min <= times.median && times.median <= times.p90 && times.samples > 0);
        assert!(times.error < 1e-2 && (times.tflops * times.median * 1e12 / case.flops - 1.0).abs() < 1e-9);
    }
    assert!(case.times("unfused").is_some() && case.times("portable").is_some() && case.times("default").is_none());
    let files = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 1, "no half-written file beside the report");
}

#[test]
fn appends_are_measured() {
    let output = bench(&["--quick", "--filter", "append/decode", "--json"]);
    let (json, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{json}{errors}");
    let report = Report::from_json(&json).unwrap();
    let times = report.cases[0].times("default").unwrap_or_else(|| panic!("{report:?}"));
    assert!(report.cases.len() == 1 && times.gb_per_s > 0.0 && times.error < 5e-3, "{times:?}");
}

#[test]
fn a_paged_cache_serves_more_in_the_same_memory() {
    let output = bench(&["--quick", "--serve", "--json"]);
    let (json, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{json}{errors}");
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    let number = |cache: usize, what: &str| report["caches"][cache][what].as_f64().unwrap();
    let (paged, contiguous) = (0, 1);
    assert!(number(paged, "waste") < 0.04 && number(contiguous, "waste") > 0.3, "{json}");
    assert!(number(paged, "mean_running") > 2.0 * number(contiguous, "mean_running"), "{json}");
    assert!(number(paged, "preempted") > 0.0 && number(contiguous, "preempted") == 0.0, "{json}");
    for cache in [paged, contiguous] {
        assert!(number(cache, "checked") == 4.0 && number(cache, "error") < 2e-3, "{json}");
        // Every request is answered in full: as many tokens, and those of who lost its pages are not answered twice.
        assert_eq!(number(cache, "tokens"), number(contiguous, "tokens"));
    }
    let output = bench(&["--serve", "--filter", "decode"]);
    assert!(!output.status.success() && text(&output.stderr).contains("cannot be used with"));
}

#[test]
fn cases_are_listed_without_an_adapter() {
    let output = bench(&["--list", "--filter", "decode", "--adapter", "none such"]);
    assert!(output.status.success());
    let table = text(&output.stdout);
    assert!(table.contains("attention/decode/f16/b1-h32x8-kv32768-d128") && !table.contains("prefill"), "{table}");
}

#[test]
fn wrong_arguments_are_one_line_and_a_failure() {
    for (arguments, expected) in [
        (&["--filter", "nothing"][..], "bench --list"),
        (&["--quick", "--filter", "kv32768"], "without --quick"),
        (&["--quick", "--filter", "decode", "--variant", "nonsense"], "attention.tall.portable"),
        (&["--quick", "--filter", "decode", "--adapter", "none such"], "none such"),
    ] {
        let output = bench(arguments);
        let errors = text(&output.stderr);
        assert!(!output.status.success() && errors.contains(expected), "{arguments:?}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
}

#[test]
fn without_timestamps_wall_time_is_taken() {
    let adapter = block_on(adapters()).remove(0);
    let (device, queue) = block_on(adapter.request_device(&wgpu::DeviceDescriptor::default())).unwrap();
    let options = RuntimeOptions { self_test: SelfTest::Skip, ..Default::default() };
    let runtime = block_on(Runtime::new(device, queue, options)).unwrap();
    let timer = Timer::new(&runtime).unwrap();
    assert!(!timer.is_gpu_clock());
    let case = &cases::all()[0];
    let buffers = CaseBuffers::new(&runtime, case, &case.data()).unwrap();
    let work = Work::fused(&runtime, case, None).unwrap();
    let mut times: Vec<f64> =
        [1, 1, 20].map(|runs| block_on(timer.time(|pass| work.repeat_in(pass, &buffers, runs))).unwrap()).into();
    let many = times.pop().unwrap();
    assert!(0.0 < times[1] && 3.0 * times[1] < many, "{times:?} {many}");
}
