//! `bench`: every case on every variant the adapter can run, checked first, then timed in turns.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use comfy_table::{Attribute, Cell, CellAlignment, Table};
use indicatif::{ProgressBar, ProgressStyle};
use pollster::block_on;
use wgpu_attention::cases::{self, Case, Check};
use wgpu_attention::measure::{CaseBuffers, Timer, Work};
use wgpu_attention::ops::attention;
use wgpu_attention::report::{AdapterReport, CaseReport, Method, Report, Skipped, Times, VariantReport};
use wgpu_attention::{Error, Runtime};

use crate::{Global, device, terminal};

#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    /// Only cases with this in their name
    #[arg(long, value_name = "SUBSTR")]
    filter: Option<String>,
    /// Small cases and little time for each: seconds even on a software adapter
    #[arg(long)]
    quick: bool,
    /// Also write the measurements to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Name the cases and measure nothing
    #[arg(long)]
    list: bool,
}

/// How long to measure.
struct Effort {
    /// Seconds of one sample, so that clocks and launches do not matter.
    sample: f64,
    /// Most samples.
    samples: usize,
    /// Seconds of one variant on one case.
    budget: f64,
}

const QUICK: Effort = Effort { sample: 0.005, samples: 15, budget: 0.5 };
const FULL: Effort = Effort { sample: 0.01, samples: 50, budget: 3.0 };
/// Fewer only where one sample takes longer than the whole budget allows.
const MIN_SAMPLES: usize = 5;
const MAX_REPEATS: f64 = 1000.0;
/// A case is left out where one run would take longer.
const MAX_RUN: f64 = 10.0;

pub fn run(args: &BenchArgs, global: &Global) -> Result<()> {
    let cases = chosen(args)?;
    if args.list {
        return list(&cases);
    }
    let (_, runtime) = device::open(global)?;
    let timer = Timer::new(&runtime)?;
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION").into(),
        adapter: AdapterReport::of(&runtime),
        method: if timer.is_gpu_clock() { Method::GpuTimestamps } else { Method::WallTime },
        quick: args.quick,
        cases: Vec::new(),
        skipped: Vec::new(),
    };
    let mut bench = Bench {
        runtime: &runtime,
        timer: &timer,
        effort: if args.quick { &QUICK } else { &FULL },
        variant: global.variant.as_deref(),
        flops_a_second: 0.0,
        progress: progress(cases.len())?,
    };
    for case in &cases {
        match bench.case(case)? {
            Ok(measured) => report.cases.push(measured),
            Err(reason) => report.skipped.push(Skipped { name: case.name.clone(), reason }),
        }
        bench.progress.inc(1);
    }
    bench.progress.finish_and_clear();
    device::keep(&runtime);
    if let Some(path) = &args.json {
        write(path, &report.to_json())?;
    }
    terminal::print(show(&report))?;
    let failed = failures(&report).len();
    if failed > 0 {
        bail!("{failed} outputs were wrong; they have no times");
    }
    Ok(())
}

fn chosen(args: &BenchArgs) -> Result<Vec<Case>> {
    let filter = args.filter.as_deref().unwrap_or_default();
    let (ours, others): (Vec<Case>, Vec<Case>) =
        cases::all().into_iter().filter(|case| case.name.contains(filter)).partition(|case| case.quick == args.quick);
    if ours.is_empty() {
        let hint = match (others.is_empty(), args.quick) {
            (true, _) => "`bench --list` shows them",
            (false, true) => "there is one without --quick",
            (false, false) => "there is one with --quick",
        };
        bail!("no case has `{filter}` in its name; {hint}");
    }
    Ok(ours)
}

fn list(cases: &[Case]) -> Result<()> {
    let mut table = table(&["case", "GFLOP", "MB"]);
    for case in cases {
        let (flops, bytes) = (terminal::digits(case.flops() * 1e-9), terminal::digits(case.bytes() * 1e-6));
        table.add_row([case.name.as_str(), &flops, &bytes]);
    }
    terminal::print(format!("{table}\n"))
}

fn progress(cases: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:20} {pos}/{len} {wide_msg}")?;
    Ok(ProgressBar::new(cases as u64).with_style(style))
}

/// Writes the whole file or nothing.
fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let what = || format!("cannot write {}", path.display());
    let mut file = tempfile::NamedTempFile::new_in(folder).with_context(what)?;
    file.write_all(text.as_bytes()).with_context(what)?;
    file.persist(path).with_context(what)?;
    Ok(())
}

/// What measuring has at hand.
struct Bench<'a> {
    runtime: &'a Runtime,
    timer: &'a Timer,
    effort: &'a Effort,
    variant: Option<&'a str>,
    flops_a_second: f64, // of the best variant so far
    progress: ProgressBar,
}

/// A variant whose output was right.
struct Contender {
    name: String,
    work: Work,
    error: f64,
    hash: u64,
    repeats: usize,
    samples: Vec<f64>,
    spent: f64,
    same: bool, // the output after the last sample and the one that was checked
}

impl Contender {
    fn done(&self, effort: &Effort) -> bool {
        let enough = if self.samples.len() < MIN_SAMPLES { 4.0 * effort.budget } else { effort.budget };
        self.samples.len() == effort.samples || self.spent > enough
    }

    fn outcome(self, case: &Case) -> VariantReport {
        let times = Times::of(&self.samples, self.repeats, case.flops(), case.bytes(), self.error);
        VariantReport {
            rows: rows(&self.work),
            name: self.name,
            times: times.filter(|_| self.same),
            failure: (!self.same).then(|| "the same inputs gave other bits after the timing".to_string()),
        }
    }
}

impl Bench<'_> {
    fn tell(&self, case: &Case, what: &str) {
        self.progress.set_message(format!("{}: {what}", case.name));
    }

    /// Measures one case; `Err` inside says why it cannot be measured here.
    fn case(&mut self, case: &Case) -> Result<Result<CaseReport, String>> {
        let expected = case.flops() / self.flops_a_second;
        if self.flops_a_second > 0.0 && expected > MAX_RUN {
            return Ok(Err(format!(
                "a run would take about {}; --quick has smaller cases",
                terminal::seconds(expected)
            )));
        }
        self.tell(case, "computing the oracle's rows");
        // Planned before the data is made, which may be large.
        let portable = match Work::fused(self.runtime, case, Some("portable")) {
            Ok(work) => work,
            Err(error) => return does_not_fit(error),
        };
        let data = case.data();
        let buffers = match CaseBuffers::new(self.runtime, case, &data) {
            Ok(buffers) => buffers,
            Err(error) => return does_not_fit(error),
        };
        let check = Check::new(case, &data)?;
        drop(data);

        let mut report = CaseReport {
            name: case.name.clone(),
            flops: case.flops(),
            bytes: case.bytes(),
            variants: Vec::new(),
            skipped: Vec::new(),
        };
        let decode = |bytes: &[u8]| case.desc.out_dtype.decode(bytes, case.elements()[3] as usize);
        let yardstick = decode(&block_on(portable.output(self.runtime, &buffers))?);
        let mut contenders = Vec::new();
        for (name, work) in self.works(case, portable) {
            self.tell(case, &format!("checking {name}"));
            let work = match work {
                Ok(work) => work,
                Err(error @ Error::DeviceLost(_)) => return Err(error.into()),
                Err(error) => {
                    report.skipped.push(Skipped { name, reason: error.to_string() });
                    continue;
                }
            };
            let bytes = block_on(work.output(self.runtime, &buffers))?;
            let out = decode(&bytes);
            let right =
                check.against_oracle(&out).and_then(|error| check.against_other(&out, &yardstick).map(|()| error));
            match right {
                Ok(error) => contenders.push(Contender {
                    name,
                    work,
                    error,
                    hash: hash_of(&bytes),
                    repeats: 1,
                    samples: Vec::new(),
                    spent: 0.0,
                    same: false,
                }),
                Err(failure) => {
                    report.variants.push(VariantReport { name, rows: rows(&work), times: None, failure: Some(failure) })
                }
            }
        }
        self.time(case, &buffers, &mut contenders)?;
        report.variants.extend(contenders.into_iter().map(|contender| contender.outcome(case)));
        Ok(Ok(report))
    }

    /// The library's own choice, each row by itself, the portable rows and the unfused baseline.
    fn works(&self, case: &Case, portable: Work) -> Vec<(String, wgpu_attention::Result<Work>)> {
        let mut works = Vec::new();
        if self.variant.is_none() {
            works.push(("default".to_string(), Work::fused(self.runtime, case, None)));
        }
        let named =
            |row: &str| self.variant.is_none_or(|wanted| row == wanted || row.split('.').any(|piece| piece == wanted));
        for (row, _) in attention::explain(self.runtime, &case.desc) {
            if named(row) {
                works.push((row.to_string(), Work::fused(self.runtime, case, Some(row))));
            }
        }
        if self.variant.is_some() && works.is_empty() {
            // Says which names there are.
            works.push(("named".to_string(), Work::fused(self.runtime, case, self.variant)));
        }
        works.push(("portable".to_string(), Ok(portable)));
        if case.twin {
            works.push(("unfused".to_string(), Work::unfused(self.runtime, case)));
        }
        works
    }

    /// Takes samples of all in turns, so that a slow moment of the machine does not fall on one alone.
    fn time(&mut self, case: &Case, buffers: &CaseBuffers, contenders: &mut [Contender]) -> Result<()> {
        let effort = self.effort;
        for contender in contenders.iter_mut() {
            self.tell(case, &format!("warming up {}", contender.name));
            // A second time if that was short: clocks rise under the first load.
            for _ in 0..2 {
                let seconds = block_on(self.timer.time(&contender.work, buffers, contender.repeats))?;
                let run = seconds / contender.repeats as f64;
                contender.repeats = (effort.sample / run).ceil().clamp(1.0, MAX_REPEATS) as usize;
                self.flops_a_second = self.flops_a_second.max(case.flops() / run);
                if run > effort.sample {
                    break;
                }
            }
        }
        for round in 0..effort.samples {
            self.tell(case, &format!("sample {}", round + 1));
            for contender in contenders.iter_mut().filter(|contender| !contender.done(effort)) {
                let start = Instant::now();
                let seconds = block_on(self.timer.time(&contender.work, buffers, contender.repeats))?;
                contender.samples.push(seconds / contender.repeats as f64);
                contender.spent += start.elapsed().as_secs_f64();
                if contender.done(effort) {
                    contender.same = hash_of(&block_on(buffers.read_out(self.runtime))?) == contender.hash;
                }
            }
        }
        Ok(())
    }
}

/// A limit or a lack of memory is a reason to leave a case out, anything else is an error.
fn does_not_fit(error: Error) -> Result<Result<CaseReport, String>> {
    match error {
        Error::Limit { .. } | Error::OutOfMemory(_) => Ok(Err(error.to_string())),
        error => Err(error.into()),
    }
}

fn rows(work: &Work) -> Vec<String> {
    work.rows().into_iter().map(String::from).collect()
}

fn hash_of(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

fn table(header: &[&str]) -> Table {
    let mut table = terminal::table(120, header.iter().map(|title| title.to_string()).collect());
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The table and what follows from it.
fn show(report: &Report) -> String {
    let adapter = &report.adapter;
    let method = match report.method {
        Method::GpuTimestamps => "GPU timestamps",
        Method::WallTime => "wall time",
    };
    let mut text = format!("{} ({}, {}), {method}, median of samples\n\n", adapter.name, adapter.kind, adapter.driver);
    let all = report.cases.iter().flat_map(|case| &case.variants);
    let fastest = all.filter_map(|variant| variant.times.map(|times| times.tflops)).fold(0.0, f64::max);
    let (unit, scale) = if fastest < 1.0 { ("GFLOP/s", 1e3) } else { ("TFLOP/s", 1.0) };
    let mut table = table(&["case, variant", "time", unit, "GB/s", "vs portable", "vs unfused", "error"]);
    for case in &report.cases {
        table.add_row([case.name.as_str()]);
        let median = |name: &str| case.times(name).map(|times| times.median);
        let best = case.variants.iter().filter_map(|v| v.times.map(|t| t.median)).fold(f64::INFINITY, f64::min);
        for variant in &case.variants {
            let label = format!("  {}", label(variant));
            let Some(times) = &variant.times else {
                table.add_row([label.as_str(), "FAILED"]);
                continue;
            };
            let ratio = |other: Option<f64>| other.map_or("".into(), |other| format!("{:.2}×", other / times.median));
            let cells = [
                label,
                terminal::seconds(times.median),
                terminal::digits(times.tflops * scale),
                terminal::digits(times.gb_per_s),
                ratio(median("portable")),
                ratio(median("unfused")),
                format!("{:.0e}", times.error),
            ];
            let bold = times.median == best && terminal::colour();
            table.add_row(cells.map(|cell| match bold {
                true => Cell::new(cell).add_attribute(Attribute::Bold),
                false => Cell::new(cell),
            }));
        }
    }
    if !report.cases.is_empty() {
        text += &format!("{table}\n\n");
    }
    for line in
        failures(report).into_iter().chain(left_out(report)).chain(default_line(report)).chain(fused_line(report))
    {
        text += &line;
        text.push('\n');
    }
    text
}

/// Short enough for a column: a chosen set of rows without their tiles, a row without the operation.
fn label(variant: &VariantReport) -> String {
    let short = |row: &str| row.trim_start_matches("attention.").to_string();
    match variant.name.as_str() {
        name @ ("default" | "portable") => {
            let form = |row: &String| short(row).rsplit_once('.').map_or(row.clone(), |(form, _)| form.to_string());
            format!("{name} ({})", variant.rows.iter().map(form).collect::<Vec<_>>().join(" + "))
        }
        name => short(name),
    }
}

fn failures(report: &Report) -> Vec<String> {
    let all = report.cases.iter().flat_map(|case| case.variants.iter().map(move |variant| (case, variant)));
    all.filter_map(|(case, variant)| {
        variant.failure.as_ref().map(|failure| format!("FAILED {} {}: {failure}", case.name, variant.name))
    })
    .collect()
}

/// What was not measured, each reason once.
fn left_out(report: &Report) -> Vec<String> {
    let mut lines: Vec<String> =
        report.skipped.iter().map(|skipped| format!("Left out {}: {}", skipped.name, skipped.reason)).collect();
    let mut reasons: Vec<(&Skipped, usize)> = Vec::new();
    for skipped in report.cases.iter().flat_map(|case| &case.skipped) {
        match reasons.iter_mut().find(|(known, _)| *known == skipped) {
            Some((_, count)) => *count += 1,
            None => reasons.push((skipped, 1)),
        }
    }
    lines.extend(reasons.into_iter().map(|(skipped, count)| {
        let cases = if count == report.cases.len() { "every case".to_string() } else { format!("{count} cases") };
        format!("Left out {} on {cases}: {}", skipped.name, skipped.reason)
    }));
    lines
}

/// Whether the default is a good choice.
fn default_line(report: &Report) -> Option<String> {
    report.cases.iter().find_map(|case| case.times("default"))?;
    let losses: Vec<String> = report
        .cases
        .iter()
        .filter_map(|case| {
            let (default, better) = (case.times("default")?.median, case.better_than_default()?);
            let factor = default / better.times?.median;
            Some(format!("\n  {}: {} is {factor:.2}× as fast", case.name, label(better)))
        })
        .collect();
    Some(match losses.len() {
        0 => "The default is within 10 % of the best variant on every case.".into(),
        count => format!("The default loses by more than 10 % on {count} cases:{}", losses.concat()),
    })
}

/// Rows from which on the fused operation has to win.
const LONG: u64 = 512;

/// Whether one pass beats three on long sequences.
fn fused_line(report: &Report) -> Option<String> {
    let all = cases::all();
    let long = |name: &str| {
        let case = all.iter().find(|case| case.name == name)?;
        Some((0..case.batch().kv.batch()).all(|b| u64::from(case.batch().kv.len(b)) >= LONG))
    };
    let mut ratios = Vec::new();
    for case in report.cases.iter().filter(|case| long(&case.name) == Some(true)) {
        let fused = case.times("default").or_else(|| case.times("portable"));
        if let (Some(fused), Some(unfused)) = (fused, case.times("unfused")) {
            ratios.push((unfused.median / fused.median, &case.name));
        }
    }
    let (worst, name) = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
    let best = ratios.iter().map(|(ratio, _)| *ratio).fold(0.0, f64::max);
    let verdict = if *worst > 1.0 { "beats" } else { "does not always beat" };
    Some(format!("From S = {LONG} up fused {verdict} unfused: {worst:.2}× ({name}) to {best:.2}×."))
}
