//! `info`: what the adapters can do, and which kernels run on them.

use anyhow::{Result, bail};
use clap::Args;
use comfy_table::ColumnConstraint;
use serde::Serialize;
use wgpu_attention::{Attention, AttentionDesc, Caps, Runtime, SelfTest, Verdict, ops};

use crate::{Global, device, terminal};

/// Show the adapters, what they can do, and which kernels are chosen on them
///
/// With --json one object: `version` is that of this format, and grows when something is removed or changes its meaning.
/// `adapters` lists, the best first: `name`, `type` ("discrete GPU", "integrated GPU", "virtual GPU", "software", "other"),
/// `backend`, `driver`, `driver_info`, `pci`, `vendor`, `device`, and either `error` or `caps` and `operations`.
/// In `caps`, sizes are in bytes, `subgroup` is null without subgroup operations, and `loop_limit` is the number of
/// iterations after which loops silently stop, or null. An operation has a `name` and `variants`, best first:
/// `name`, `subgroup_min` (lanes that it needs, 0 for none), `verdict` ("passed", "failed", "untested"), and `uses`: for
/// several dims of V heads (`v_head_dim`) the `state` ("chosen", "available", "out"), and the `reason` if it is out.
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub struct InfoArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const JSON_VERSION: u32 = 1;
/// Widest output, for a terminal or a report.
const WIDTH: usize = 100;
const LEGEND: &str =
    "\n   chosen: for V of that dim; ready: passed its self-test, --variant selects it; –: not made for it\n";
/// Heads of V whose choice is shown.
const V_HEAD_DIMS: [u32; 4] = [64, 128, 256, 512];

#[derive(Serialize)]
struct Info {
    version: u32,
    crate_version: &'static str,
    adapters: Vec<Adapter>,
}

#[derive(Serialize)]
struct Adapter {
    name: String,
    r#type: &'static str,
    backend: String,
    driver: String,
    driver_info: String,
    pci: String,
    vendor: u32,
    device: u32,
    #[serde(flatten)]
    opened: Opened,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Opened {
    Yes { caps: Capabilities, operations: Vec<Operation> },
    No { error: String },
}

#[derive(Serialize)]
struct Capabilities {
    subgroup: Option<Subgroup>,
    f16: bool,
    timestamps: bool,
    pipeline_cache: bool,
    cooperative_matrix: Vec<Matrix>,
    keeps_nan: bool,
    loop_limit: Option<u32>,
    workgroup_invocations: u32,
    workgroup_memory: u32,
    workgroups_per_dimension: u32,
    storage_buffers: u32,
    storage_binding: u64,
    buffer: u64,
}

#[derive(Serialize)]
struct Subgroup {
    min: u32,
    max: u32,
    seen: Option<u32>,
}

#[derive(Serialize)]
struct Matrix {
    m: u32,
    n: u32,
    k: u32,
    ab: String,
    cr: String,
}

#[derive(Serialize)]
struct Operation {
    name: &'static str,
    variants: Vec<Variant>,
}

#[derive(Serialize)]
struct Variant {
    name: &'static str,
    subgroup_min: u32,
    verdict: &'static str,
    uses: Vec<Use>,
}

#[derive(Serialize)]
struct Use {
    v_head_dim: u32,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Whether the variant is made for such a dim.
    #[serde(skip)]
    suits: bool,
}

pub fn run(args: &InfoArgs, global: &Global) -> Result<()> {
    if device::is_oracle(global) {
        bail!("the oracle is no adapter: it needs none, and has nothing to show");
    }
    let mut info = Info { version: JSON_VERSION, crate_version: env!("CARGO_PKG_VERSION"), adapters: Vec::new() };
    for adapter in device::matching(global)? {
        info.adapters.push(examine(&adapter, global)?);
    }
    if args.json {
        terminal::print(serde_json::to_string_pretty(&info)? + "\n")?;
    } else {
        let texts: Vec<String> = info.adapters.iter().map(describe).collect();
        terminal::print(texts.join("\n"))?;
    }
    if info.adapters.iter().all(|adapter| matches!(adapter.opened, Opened::No { .. })) {
        bail!("no adapter can be used; `--adapter oracle` computes on the CPU");
    }
    Ok(())
}

fn examine(adapter: &wgpu::Adapter, global: &Global) -> Result<Adapter> {
    let info = adapter.get_info();
    let opened = match device::open_adapter(adapter, SelfTest::All) {
        Ok(runtime) => {
            Opened::Yes { caps: capabilities(runtime.caps()), operations: vec![attention(&runtime, global)?] }
        }
        Err(error) => Opened::No { error: format!("{error:#}") },
    };
    Ok(Adapter {
        r#type: device::kind(&info),
        name: info.name,
        backend: info.backend.to_string(),
        driver: info.driver,
        driver_info: info.driver_info,
        pci: info.device_pci_bus_id,
        vendor: info.vendor,
        device: info.device,
        opened,
    })
}

fn capabilities(caps: &Caps) -> Capabilities {
    let has = |feature| caps.features.contains(feature);
    let matrix = |shape: &wgpu::CooperativeMatrixProperties| Matrix {
        m: shape.m_size,
        n: shape.n_size,
        k: shape.k_size,
        ab: format!("{:?}", shape.ab_type).to_lowercase(),
        cr: format!("{:?}", shape.cr_type).to_lowercase(),
    };
    Capabilities {
        subgroup: caps.subgroup.map(|(min, max)| Subgroup { min, max, seen: caps.subgroup_seen }),
        f16: has(wgpu::Features::SHADER_F16),
        timestamps: has(wgpu::Features::TIMESTAMP_QUERY),
        pipeline_cache: has(wgpu::Features::PIPELINE_CACHE),
        cooperative_matrix: caps.cooperative_matrix.iter().map(matrix).collect(),
        keeps_nan: caps.keeps_nan,
        loop_limit: caps.loop_limit,
        workgroup_invocations: caps.limits.max_compute_invocations_per_workgroup,
        workgroup_memory: caps.limits.max_compute_workgroup_storage_size,
        workgroups_per_dimension: caps.limits.max_compute_workgroups_per_dimension,
        storage_buffers: caps.limits.max_storage_buffers_per_shader_stage,
        storage_binding: caps.limits.max_storage_buffer_binding_size,
        buffer: caps.limits.max_buffer_size,
    }
}

fn attention(runtime: &Runtime, global: &Global) -> Result<Operation> {
    let rows = ops::attention::variants();
    let mut variants: Vec<Variant> = rows
        .iter()
        .map(|row| Variant {
            name: row.name,
            subgroup_min: row.needs.subgroup_min,
            verdict: match runtime.verdict(row.name) {
                Some(Verdict::Passed) => "passed",
                Some(Verdict::Failed(_)) => "failed",
                None => "untested",
            },
            uses: Vec::new(),
        })
        .collect();
    for v_head_dim in V_HEAD_DIMS {
        let desc =
            AttentionDesc { v_head_dim: Some(v_head_dim), variant: global.variant.clone(), ..AttentionDesc::default() };
        let chosen = match Attention::new(runtime, &desc) {
            Ok(attention) => attention.variants(),
            Err(wgpu_attention::Error::Unsupported { .. }) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        for (name, reason) in ops::attention::explain(runtime, &desc) {
            let state = match reason {
                Some(_) => "out",
                None if chosen.contains(&name) => "chosen",
                None => "available",
            };
            for (row, variant) in rows.iter().zip(&mut variants).filter(|(row, _)| row.name == name) {
                let reason = reason.clone();
                variant.uses.push(Use { v_head_dim, state, reason, suits: (row.suits)(&desc) });
            }
        }
    }
    Ok(Operation { name: "attention", variants })
}

fn describe(adapter: &Adapter) -> String {
    let driver = format!("{} {}", adapter.driver, adapter.driver_info);
    let mut text = format!("{}\n", adapter.name);
    let mut line = |name: &str, value: String| text += &format!("  {name:17} {value}\n");
    line("kind", format!("{}, {}, driver {}", adapter.r#type, adapter.backend, driver.trim()));
    match &adapter.opened {
        Opened::No { error } => line("not usable", error.replace('\n', " ")),
        Opened::Yes { caps, operations } => {
            line("subgroups", subgroups(caps));
            let names = [("f16", caps.f16), ("timestamps", caps.timestamps), ("pipeline cache", caps.pipeline_cache)];
            let (has, lacks): (Vec<_>, Vec<_>) = names.iter().partition(|(_, has)| *has);
            let list = |names: Vec<&(&str, bool)>| names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            let none = |names: String| if names.is_empty() { "none".into() } else { names };
            line("features", format!("{} (lacks: {})", none(list(has)), none(list(lacks))));
            line("matrix units", none(matrices(&caps.cooperative_matrix)));
            line("NaN", if caps.keeps_nan { "kept" } else { "not kept by its arithmetic" }.into());
            line(
                "loops",
                caps.loop_limit
                    .map_or("run to the end".into(), |limit| format!("stop silently after {limit} iterations")),
            );
            line(
                "workgroup",
                format!(
                    "{} invocations, {} of memory",
                    caps.workgroup_invocations,
                    bytes(caps.workgroup_memory.into())
                ),
            );
            line(
                "buffers",
                format!(
                    "{} in a binding, {} in a buffer, {} bindings",
                    bytes(caps.storage_binding),
                    bytes(caps.buffer),
                    caps.storage_buffers
                ),
            );
            for operation in operations {
                text += &format!("\n{}\n", table(operation));
            }
        }
    }
    text
}

fn subgroups(caps: &Capabilities) -> String {
    let Some(subgroup) = &caps.subgroup else { return "none".into() };
    let range = match (subgroup.min, subgroup.max) {
        (min, max) if min == max => min.to_string(),
        (min, max) => format!("{min} to {max}"),
    };
    format!("of {range} lanes, {} seen", subgroup.seen.map_or("none".into(), |seen| seen.to_string()))
}

fn matrices(shapes: &[Matrix]) -> String {
    let shapes: Vec<_> = shapes.iter().map(|s| format!("{}×{}×{} {}→{}", s.m, s.n, s.k, s.ab, s.cr)).collect();
    match shapes.len() {
        0..=3 => shapes.join(", "),
        count => format!("{}, and {} more (--json lists all)", shapes[..3].join(", "), count - 3),
    }
}

/// A number of bytes in the largest unit that is exact, or nearly.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut value = count as f64;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let decimals = if (value - value.round()).abs() < 0.01 { 0 } else { 1 };
    format!("{value:.decimals$} {}", UNITS[unit])
}

fn table(operation: &Operation) -> String {
    let mut header = vec![operation.name.to_string()];
    header.extend(V_HEAD_DIMS.map(|dim| format!("V {dim}")));
    header.push("why out".into());
    let mut table = terminal::table(WIDTH - 2, header);
    let prefix = format!("{}.", operation.name);
    for variant in &operation.variants {
        let mut row = vec![variant.name.trim_start_matches(&prefix).to_string()];
        row.extend(
            variant
                .uses
                .iter()
                .map(|r#use| if r#use.suits { r#use.state.replace("available", "ready") } else { "–".into() }),
        );
        let mut reasons = variant.uses.iter().filter(|r#use| r#use.suits).filter_map(|r#use| r#use.reason.clone());
        row.push(reasons.next().unwrap_or_default());
        table.add_row(row);
    }
    let whole_names = ColumnConstraint::ContentWidth;
    table.set_constraints(std::iter::repeat_n(whole_names, 1 + V_HEAD_DIMS.len()));
    let lines: String = table.lines().map(|line| format!("  {}\n", line.trim_end())).collect();
    lines + LEGEND
}
