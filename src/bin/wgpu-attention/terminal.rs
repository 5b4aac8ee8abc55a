//! What the terminal can show, and how numbers look on it.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::Result;
use comfy_table::{ContentArrangement, LineStyle, Table, presets};
use indicatif::ProgressBar;

use crate::heatmap;
use crate::weights::Weights;

/// Writes to stdout. A reader that has gone, like `head`, is no error.
pub fn print(text: impl AsRef<[u8]>) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Whether 24-bit colours are wanted and understood.
pub fn colour() -> bool {
    let is = |name: &str, value: &str| std::env::var_os(name).is_some_and(|found| found == value);
    let set = |name: &str| std::env::var_os(name).is_some_and(|found| !found.is_empty());
    let no = set("NO_COLOR") || is("TERM", "dumb") || is("TERM_PROGRAM", "Apple_Terminal");
    let old_console = cfg!(windows) && !set("WT_SESSION") && !set("TERM_PROGRAM");
    io::stdout().is_terminal() && !no && !old_console
}

/// Characters in a line: those of the terminal, otherwise 80.
pub fn width() -> usize {
    Table::new().width().map_or(80, usize::from)
}

/// A table without borders, as wide as `width` allows.
pub fn table(width: usize, header: Vec<String>) -> Table {
    let mut table = Table::new();
    let line = LineStyle::none().fill('─').junction('─');
    table
        .load_style(presets::NOTHING.header_separator(line))
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(width.min(usize::from(u16::MAX)) as u16)
        .set_header(header);
    table
}

/// A picture of attention weights.
pub fn map(weights: &Weights, width: usize) -> String {
    let text = heatmap::draw(&weights.values, weights.rows, weights.keys, width, colour());
    text.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// Shown on stderr if that is a terminal, until it is cleared.
pub fn spinner(message: String) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

/// Three significant digits with a unit.
pub fn seconds(value: f64) -> String {
    match value {
        value if value < 1e-3 => format!("{} µs", digits(value * 1e6)),
        value if value < 1.0 => format!("{} ms", digits(value * 1e3)),
        value => format!("{} s", digits(value)),
    }
}

/// Three significant digits.
pub fn digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    if !(1e-4..1e6).contains(&value.abs()) {
        return format!("{value:.2e}");
    }
    let decimals = (2.0 - value.abs().log10().floor()).max(0.0) as usize;
    format!("{value:.decimals$}")
}
