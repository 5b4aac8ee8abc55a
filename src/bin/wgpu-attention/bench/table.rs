//! The measurements as a table, and what follows from them in words.

use std::io::IsTerminal;

use comfy_table::{Attribute, Cell, CellAlignment, Table};
use wgpu_attention::cases;
use wgpu_attention::report::{Method, Report, Skipped, VariantReport};

use crate::terminal;

/// A table of at most 120 columns, numbers at the right.
pub fn table(header: &[&str]) -> Table {
    let width = if std::io::stdout().is_terminal() { terminal::width().min(120) } else { 120 };
    let mut table = terminal::table(width, header.iter().map(|title| title.to_string()).collect());
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The table and what follows from it.
pub fn show(report: &Report) -> String {
    let adapter = &report.adapter;
    let method = match report.method {
        Method::GpuTimestamps => "GPU timestamps",
        Method::WallTime => "wall time",
    };
    let mut text = format!("{} ({}, {}), {method}, median of samples\n\n", adapter.name, adapter.kind, adapter.driver);
    let all = report.cases.iter().flat_map(|case| &case.variants);
    let fastest = all.filter_map(|variant| variant.times.map(|times| times.tflops)).fold(0.0, f64::max);
    let (unit, scale) = if fastest < 1.0 { ("GFLOP/s", 1e3) } else { ("TFLOP/s", 1.0) };
    let mut table = table(&["case, variant", "time", unit, "GB/s", "vs portable", "vs twin", "error"]);
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
                if case.flops > 0.0 { terminal::digits(times.tflops * scale) } else { String::new() },
                terminal::digits(times.gb_per_s),
                ratio(median("portable")),
                ratio(median("unfused").or_else(|| median("flat"))),
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
    for line in failures(report)
        .into_iter()
        .chain(left_out(report))
        .chain(default_line(report))
        .chain(fused_line(report))
        .chain(cascade_line(report))
    {
        text += &line;
        text.push('\n');
    }
    text
}

fn short(row: &str) -> &str {
    row.strip_prefix("attention.").unwrap_or(row)
}

/// Short enough for a column: a chosen set of rows without their tiles, a row without the operation.
fn label(variant: &VariantReport) -> String {
    match variant.name.as_str() {
        name @ ("default" | "portable") => {
            let form = |row: &String| short(row).rsplit_once('.').map_or(row.clone(), |(form, _)| form.into());
            format!("{name} ({})", variant.rows.iter().map(form).collect::<Vec<_>>().join(" + "))
        }
        name => short(name).into(),
    }
}

/// Every wrong output.
pub fn failures(report: &Report) -> Vec<String> {
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
        format!("Left out {} on {cases}: {}", short(&skipped.name), skipped.reason)
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
    versus(report, "unfused", |name| long(name) == Some(true))
        .map(|line| format!("From S = {LONG} up one pass {line}."))
}

/// Whether shared keys are read as it is best.
fn cascade_line(report: &Report) -> Option<String> {
    versus(report, "flat", |_| true).map(|line| format!("With shared prefixes the default {line}."))
}

/// How the default compares with a twin on the cases that have it.
fn versus(report: &Report, twin: &str, counts: impl Fn(&str) -> bool) -> Option<String> {
    let mut ratios = Vec::new();
    for case in report.cases.iter().filter(|case| counts(&case.name)) {
        let ours = case.times("default").or_else(|| case.times("portable"));
        if let (Some(ours), Some(other)) = (ours, case.times(twin)) {
            ratios.push((other.median / ours.median, &case.name));
        }
    }
    let (worst, name) = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
    let best = ratios.iter().map(|(ratio, _)| *ratio).fold(0.0, f64::max);
    let verdict = if *worst > 1.0 { "beats" } else { "does not always beat" };
    Some(format!("{verdict} {twin}: {worst:.2}× ({name}) to {best:.2}×"))
}
