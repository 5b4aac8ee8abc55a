//! `bench`: every case on every variant the adapter can run, checked first, then timed in turns.

mod append;
mod serve;
mod table;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use pollster::block_on;
use wgpu_attention::cases::{self, AppendCase, Case, Check};
use wgpu_attention::measure::{CaseBuffers, Timer, Work};
use wgpu_attention::ops::attention;
use wgpu_attention::report::{AdapterReport, CaseReport, Method, Report, Skipped, Times, VariantReport};
use wgpu_attention::{Error, Runtime, SelfTest, is_named};

use crate::{Global, device, terminal};

/// Measure every kernel on named cases; an output is checked before its time counts
#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    /// Only cases with this in their name
    #[arg(long, value_name = "SUBSTR")]
    filter: Option<String>,
    /// Small cases and little time for each: a second on a GPU, a minute or two on a software adapter
    #[arg(long)]
    quick: bool,
    /// Also write the measurements to this file; without a file, print them instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = STDOUT)]
    json: Option<PathBuf>,
    /// Simulate a server instead: requests arrive, are answered token by token and leave, over a paged cache and over a
    /// contiguous one in the same memory
    #[arg(long, conflicts_with_all = ["filter", "list"])]
    serve: bool,
    /// Name the cases and measure nothing
    #[arg(long)]
    list: bool,
}

/// The value of `--json` without a file.
const STDOUT: &str = "-";

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

impl BenchArgs {
    /// The file of `--json`, if there is one.
    fn file(&self) -> Option<&Path> {
        self.json.as_deref().filter(|path| *path != Path::new(STDOUT))
    }

    /// Whether it can be written: rather now than after minutes of measuring.
    fn check_file(&self) -> Result<()> {
        self.file().map_or(Ok(()), |path| open_beside(path).map(drop))
    }

    /// Prints what people or machines asked for, and writes the file.
    fn deliver(&self, json: &str, text: &str) -> Result<()> {
        match self.file() {
            None if self.json.is_some() => terminal::print(json),
            None => terminal::print(text),
            Some(path) => {
                terminal::print(text)?;
                write(path, json)
            }
        }
    }
}

pub fn run(args: &BenchArgs, global: &Global) -> Result<()> {
    if args.serve {
        return serve(args, global);
    }
    let (cases, appends) = chosen(args)?;
    if args.list {
        return list(&cases, &appends);
    }
    if let Some(wanted) = &global.variant {
        let names: Vec<_> = attention::variants().iter().map(|row| row.name).collect();
        if !names.iter().any(|name| is_named(name, wanted)) {
            bail!("no variant is named `{wanted}`; there are {}, and parts of them like `portable`", names.join(", "));
        }
    }
    args.check_file()?;
    let (_, runtime) = device::open(global, SelfTest::All)?;
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
        progress: progress(cases.len() + appends.len())?,
    };
    for case in &cases {
        match bench.case(case)? {
            Ok(measured) => report.cases.push(measured),
            Err(reason) => report.skipped.push(Skipped { name: case.name.clone(), reason }),
        }
        bench.progress.inc(1);
    }
    for case in &appends {
        bench.progress.set_message(case.name.clone());
        match append::measure(&runtime, &timer, bench.effort, case) {
            Ok(measured) => report.cases.push(measured),
            Err(error) => report.skipped.push(Skipped { name: case.name.clone(), reason: does_not_fit(error)? }),
        }
        bench.progress.inc(1);
    }
    bench.progress.finish_and_clear();
    device::keep(&runtime);
    args.deliver(&report.to_json(), &table::show(&report))?;
    let failed = table::failures(&report).len();
    if failed > 0 {
        bail!("{failed} outputs were wrong; they have no times");
    }
    Ok(())
}

fn serve(args: &BenchArgs, global: &Global) -> Result<()> {
    if global.variant.is_some() {
        bail!("--serve measures what the library chooses; leave --variant out");
    }
    args.check_file()?;
    let (_, runtime) = device::open(global, SelfTest::Chosen)?;
    let outcome = serve::run(&runtime, args.quick)?;
    device::keep(&runtime);
    args.deliver(&outcome.to_json()?, &outcome.show())
}

fn chosen(args: &BenchArgs) -> Result<(Vec<Case>, Vec<AppendCase>)> {
    let filter = args.filter.as_deref().unwrap_or_default();
    let (ours, others): (Vec<Case>, Vec<Case>) =
        cases::all().into_iter().filter(|case| case.name.contains(filter)).partition(|case| case.quick == args.quick);
    let (our_appends, other_appends): (Vec<AppendCase>, Vec<AppendCase>) = cases::appends()
        .into_iter()
        .filter(|case| case.name.contains(filter))
        .partition(|case| case.quick == args.quick);
    if ours.is_empty() && our_appends.is_empty() {
        let hint = match (others.is_empty() && other_appends.is_empty(), args.quick) {
            (true, false) => "`bench --list` shows them",
            (true, true) => "`bench --quick --list` shows them",
            (false, true) => "there is one without --quick",
            (false, false) => "there is one with --quick",
        };
        bail!("no case has `{filter}` in its name; {hint}");
    }
    Ok((ours, our_appends))
}

fn list(cases: &[Case], appends: &[AppendCase]) -> Result<()> {
    let mut table = table::table(&["case", "GFLOP", "MB"]);
    for case in cases {
        let (flops, bytes) = (terminal::digits(case.flops() * 1e-9), terminal::digits(case.bytes() * 1e-6));
        table.add_row([case.name.as_str(), &flops, &bytes]);
    }
    for case in appends {
        table.add_row([case.name.as_str(), "", &terminal::digits(case.bytes() * 1e-6)]);
    }
    terminal::print(format!("{table}\n"))
}

fn progress(cases: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:20} {pos}/{len} {wide_msg}")?;
    Ok(ProgressBar::new(cases as u64).with_style(style))
}

/// A new file in the folder of `path`, to become it.
fn open_beside(path: &Path) -> Result<tempfile::NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::NamedTempFile::new_in(folder).map_err(|error| error.kind());
    file.map_err(|kind| anyhow!("cannot write {}: {kind} in {}", path.display(), folder.display()))
}

/// Writes the whole file or nothing.
fn write(path: &Path, text: &str) -> Result<()> {
    let what = || format!("cannot write {}", path.display());
    let mut file = open_beside(path)?;
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
            Err(error) => return Ok(Err(does_not_fit(error.into())?)),
        };
        let data = case.data();
        let buffers = match CaseBuffers::new(self.runtime, case, &data) {
            Ok(buffers) => buffers,
            Err(error) => return Ok(Err(does_not_fit(error.into())?)),
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
        for (name, work) in self.works(case, portable, &mut report.skipped)? {
            self.tell(case, &format!("checking {name}"));
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

    /// The library's own choice, each row by itself, the portable rows and the case's twins.
    fn works(&self, case: &Case, portable: Work, skipped: &mut Vec<Skipped>) -> Result<Vec<(String, Work)>> {
        let fused = |variant| Work::fused(self.runtime, case, variant);
        let mut works = Vec::new();
        if self.variant.is_none() {
            works.push(("default".to_string(), fused(None)));
        }
        for (row, out) in attention::explain(self.runtime, &case.desc) {
            match out {
                _ if self.variant.is_some_and(|wanted| !is_named(row, wanted)) => {}
                Some(reason) => skipped.push(Skipped { name: row.into(), reason }),
                None => works.push((row.to_string(), fused(Some(row)))),
            }
        }
        works.push(("portable".to_string(), Ok(portable)));
        works.extend(Work::twins(self.runtime, case).into_iter().map(|(name, work)| (name.to_string(), work)));
        let mut possible = Vec::new();
        for (name, work) in works {
            match work {
                Ok(work) => possible.push((name, work)),
                Err(error @ Error::DeviceLost(_)) => return Err(error.into()),
                Err(error) => skipped.push(Skipped { name, reason: error.to_string() }),
            }
        }
        Ok(possible)
    }

    /// Takes samples of all in turns, so that a slow moment of the machine does not fall on one alone.
    fn time(&mut self, case: &Case, buffers: &CaseBuffers, contenders: &mut [Contender]) -> Result<()> {
        let effort = self.effort;
        for contender in contenders.iter_mut() {
            self.tell(case, &format!("warming up {}", contender.name));
            // A second time if that was short: clocks rise under the first load.
            for _ in 0..2 {
                let seconds =
                    block_on(self.timer.time(|pass| contender.work.repeat_in(pass, buffers, contender.repeats)))?;
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
                let seconds =
                    block_on(self.timer.time(|pass| contender.work.repeat_in(pass, buffers, contender.repeats)))?;
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
fn does_not_fit(error: anyhow::Error) -> Result<String> {
    match error.downcast_ref() {
        Some(Error::Limit { .. } | Error::OutOfMemory(_)) => Ok(error.to_string()),
        _ => Err(error),
    }
}

/// The rows behind a work.
fn rows(work: &Work) -> Vec<String> {
    work.rows().into_iter().map(String::from).collect()
}

fn hash_of(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}
