//! Chooses an adapter, and keeps in the user's cache folder what was found out about it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use wgpu_attention::{Runtime, RuntimeOptions, SelfTest};

use crate::{Global, terminal};

const NO_ADAPTER: &str = "no graphics adapter was found. Linux needs a Vulkan driver: on Debian and Ubuntu run \
     `apt install mesa-vulkan-drivers`, or start the program with ./dev. `--adapter oracle` computes on the CPU";

/// Whether `--adapter oracle` was given: the f64 oracle on the CPU, without any driver.
pub fn is_oracle(global: &Global) -> bool {
    global.adapter.as_deref().is_some_and(|name| name.eq_ignore_ascii_case("oracle"))
}

/// Opens the adapter that `--adapter` names, or the best. Kernels are tested on it when it is first met.
pub fn open(global: &Global, test: SelfTest) -> Result<(wgpu::Adapter, Runtime)> {
    if is_oracle(global) {
        bail!("the oracle is no adapter, and only `attend` and `demo` compute with it");
    }
    let adapter = matching(global)?.remove(0);
    let runtime = open_adapter(&adapter, test)?;
    Ok((adapter, runtime))
}

/// The adapters that `--adapter` matches, or all; the best first and never none.
pub fn matching(global: &Global) -> Result<Vec<wgpu::Adapter>> {
    let mut adapters = all();
    if adapters.is_empty() {
        bail!(NO_ADAPTER);
    }
    if let Some(wanted) = &global.adapter {
        let labels: Vec<_> = adapters.iter().map(|adapter| label(&adapter.get_info())).collect();
        let wanted_lower = wanted.to_lowercase();
        adapters.retain(|adapter| label(&adapter.get_info()).to_lowercase().contains(&wanted_lower));
        if adapters.is_empty() {
            bail!("no adapter matches `{wanted}`; there are: {}; oracle (the CPU)", labels.join("; "));
        }
    }
    Ok(adapters)
}

/// Every adapter once, the best first.
fn all() -> Vec<wgpu::Adapter> {
    let rank = |info: &wgpu::AdapterInfo| match info.device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    };
    let mut adapters: Vec<wgpu::Adapter> = Vec::new();
    for adapter in pollster::block_on(wgpu_attention::adapters()) {
        // A driver that is registered twice shows its adapters twice.
        if !adapters.iter().any(|known| identity(&known.get_info()) == identity(&adapter.get_info())) {
            adapters.push(adapter);
        }
    }
    adapters.sort_by_key(|adapter| {
        let info = adapter.get_info();
        (rank(&info), std::cmp::Reverse(info.subgroup_max_size)) // wider is faster, among software adapters tenfold
    });
    adapters
}

/// Name, kind, backend and driver in one line; `--adapter` matches any part of it.
pub fn label(info: &wgpu::AdapterInfo) -> String {
    let driver = format!("{} {}", info.driver, info.driver_info);
    let place = if info.device_pci_bus_id.is_empty() { String::new() } else { format!(", {}", info.device_pci_bus_id) };
    format!("{} ({}, {}, {}{place})", info.name, kind(info), info.backend, driver.trim())
}

pub fn kind(info: &wgpu::AdapterInfo) -> &'static str {
    match info.device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete GPU",
        wgpu::DeviceType::IntegratedGpu => "integrated GPU",
        wgpu::DeviceType::VirtualGpu => "virtual GPU",
        wgpu::DeviceType::Cpu => "software",
        wgpu::DeviceType::Other => "other",
    }
}

/// What tells adapters and their drivers apart.
fn identity(info: &wgpu::AdapterInfo) -> String {
    format!("{} {:x}:{:x}", label(info), info.vendor, info.device)
}

/// Makes a device, with the verdicts and compiled pipelines of earlier runs.
pub fn open_adapter(adapter: &wgpu::Adapter, test: SelfTest) -> Result<Runtime> {
    let info = adapter.get_info();
    let verdicts = read(&info, "verdicts");
    let message = format!("testing the kernels on {}, once", info.name);
    let spinner = match verdicts {
        Some(_) => ProgressBar::hidden(),
        None => terminal::spinner(message),
    };
    let options = RuntimeOptions {
        verdicts,
        pipeline_cache: read(&info, "pipelines"),
        self_test: test,
        ..RuntimeOptions::default()
    };
    let runtime = pollster::block_on(Runtime::open(adapter, options));
    spinner.finish_and_clear();
    let runtime = runtime.with_context(|| format!("cannot use {}", info.name))?;
    keep(&runtime);
    Ok(runtime)
}

/// Stores verdicts and compiled pipelines for the next run. A folder that cannot be written to costs time, nothing else.
pub fn keep(runtime: &Runtime) {
    let info = &runtime.caps().info;
    let stored = write(info, "verdicts", &runtime.verdicts())
        .and_then(|()| runtime.pipeline_cache().map_or(Ok(()), |bytes| write(info, "pipelines", &bytes)));
    if let Err(error) = stored {
        log::info!("nothing is kept for the next run: {error:#}");
    }
}

/// The file for one adapter, driver and version of this program and its shaders.
fn path(info: &wgpu::AdapterInfo, what: &str) -> Option<PathBuf> {
    let key = checksum(&(identity(info), env!("CARGO_PKG_VERSION"), wgpu_attention::shader::FILES));
    Some(dirs::cache_dir()?.join("wgpu-attention").join(format!("{key:016x}.{what}")))
}

fn checksum(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// What [`write`] stored; `None` if there is nothing, or if it is damaged.
fn read(info: &wgpu::AdapterInfo, what: &str) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path(info, what)?).ok()?;
    let (content, sum) = bytes.split_last_chunk::<8>()?;
    if u64::from_le_bytes(*sum) != checksum(content) {
        return None;
    }
    bytes.truncate(bytes.len() - 8);
    Some(bytes)
}

/// Replaces the file in one step, since other runs may read it meanwhile.
fn write(info: &wgpu::AdapterInfo, what: &str, bytes: &[u8]) -> Result<()> {
    if read(info, what).is_some_and(|old| old == bytes) {
        return Ok(());
    }
    let path = path(info, what).context("this user has no cache folder")?;
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.write_all(&checksum(bytes).to_le_bytes())?;
    file.persist(path)?;
    Ok(())
}
