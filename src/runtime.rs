//! A device with what was found out about it.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use crate::caps::{Caps, CapsMask};
use crate::error::{Error, Result};
use crate::kernel::{Pipeline, Pipelines, Variant};
use crate::ops::attention::{self, AttentionDesc};
use crate::ops::retired::Retired;
use crate::ops::runs;
use crate::shader::{self, Link};

/// What a self-test found about a variant on this adapter and driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Right.
    Passed,
    /// Wrong or refused, and why: the variant is not used.
    Failed(String),
}

/// Which variants [`Runtime::new`] tests on the device, if they have no verdict yet. Others are not used, except the
/// portable ones, which serve without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SelfTest {
    /// Those that would be chosen, and where one fails, those that would be chosen instead.
    #[default]
    Chosen,
    /// All that the device can run: to compare them, or to force one by name.
    All,
    /// None.
    Skip,
}

/// How to set up a [`Runtime`].
#[derive(Clone, Debug, Default)]
pub struct RuntimeOptions {
    /// Verdicts from [`Runtime::verdicts`] of an earlier run. They count only for the same adapter, driver and crate
    /// version; anything else, damaged bytes included, is ignored.
    pub verdicts: Option<Vec<u8>>,
    /// What to test.
    pub self_test: SelfTest,
    /// Compiled pipelines from [`Runtime::pipeline_cache`] of an earlier run, for devices with
    /// [`wgpu::Features::PIPELINE_CACHE`]; data of another adapter or driver is ignored.
    pub pipeline_cache: Option<Vec<u8>>,
    /// Cooperative-matrix shapes, which only the adapter can tell
    /// ([`wgpu::Adapter::cooperative_matrix_properties`]).
    pub cooperative_matrix: Vec<wgpu::CooperativeMatrixProperties>,
    /// A lesser adapter to pretend, for tests.
    pub mask: CapsMask,
    /// Other rows than the crate's own, for tests of the self-test.
    #[doc(hidden)]
    pub attention_variants: Option<Vec<Variant<AttentionDesc>>>,
}

/// A caller's device and queue, what the device can do, which variants proved right on it, and compiled pipelines.
/// Cheap to clone.
///
/// Only [`Runtime::new`] (probe and self-test) and the conveniences that return host data submit work or wait for it.
#[derive(Clone, Debug)]
pub struct Runtime {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    caps: Caps,
    verdicts: BTreeMap<String, Verdict>,
    pipelines: Pipelines,
    pipeline_cache: Option<wgpu::PipelineCache>,
    retired_schedules: Retired<attention::Buffers>,
    retired_moves: Retired<runs::Buffers>,
    attention_variants: Vec<Variant<AttentionDesc>>,
    lost: Arc<Mutex<Option<String>>>,
}

/// The adapters of this machine. Natively all of them, in a browser the one that the browser gives.
pub async fn adapters() -> Vec<wgpu::Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends =
        wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12 | wgpu::Backends::BROWSER_WEBGPU;
    let instance = wgpu::Instance::new(descriptor);
    #[cfg(not(target_arch = "wasm32"))]
    return instance.enumerate_adapters(wgpu::Backends::all()).await;
    #[cfg(target_arch = "wasm32")]
    return instance.request_adapter(&wgpu::RequestAdapterOptions::default()).await.into_iter().collect();
}

impl Runtime {
    /// Probes the device and tests the variants that would be chosen on it: some seconds where their pipelines are
    /// compiled for the first time, nothing if `options` brings verdicts.
    ///
    /// ```no_run
    /// # async fn f(device: wgpu::Device, queue: wgpu::Queue) -> wgpu_attention::Result<()> {
    /// use wgpu_attention::{Runtime, RuntimeOptions};
    /// let runtime = Runtime::new(device, queue, RuntimeOptions::default()).await?;
    /// println!("{}", runtime.caps().info.name);
    /// # Ok(()) }
    /// ```
    pub async fn new(device: wgpu::Device, queue: wgpu::Queue, options: RuntimeOptions) -> Result<Self> {
        Self::with_lost_flag(device, queue, options, Arc::default()).await
    }

    /// Makes a device of its own on `adapter`, with the adapter's limits and every feature that some variant can use.
    ///
    /// ```no_run
    /// # async fn f() -> wgpu_attention::Result<()> {
    /// use wgpu_attention::{Runtime, RuntimeOptions, adapters};
    /// for adapter in adapters().await {
    ///     let runtime = Runtime::open(&adapter, RuntimeOptions::default()).await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn open(adapter: &wgpu::Adapter, mut options: RuntimeOptions) -> Result<Self> {
        let wanted = wgpu::Features::SUBGROUP
            | wgpu::Features::SHADER_F16
            | wgpu::Features::TIMESTAMP_QUERY
            | wgpu::Features::PIPELINE_CACHE;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("wgpu-attention"),
            required_features: adapter.features() & wanted,
            required_limits: adapter.limits(),
            ..Default::default()
        };
        let (device, queue) = adapter.request_device(&descriptor).await.map_err(|error| {
            Error::unsupported(format!("a device on {}", adapter.get_info().name), error.to_string())
        })?;
        let lost = Arc::new(Mutex::new(None));
        let flag = lost.clone();
        device.set_device_lost_callback(move |reason, message| {
            *flag.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{reason:?} {message}"));
        });
        // The device is ours, so errors that nobody asked for are logged instead of ending the program.
        device.on_uncaptured_error(Arc::new(|error| log::error!("uncaptured GPU error: {error}")));
        options.cooperative_matrix = adapter.cooperative_matrix_properties();
        Self::with_lost_flag(device, queue, options, lost).await
    }

    async fn with_lost_flag(
        device: wgpu::Device,
        queue: wgpu::Queue,
        options: RuntimeOptions,
        lost: Arc<Mutex<Option<String>>>,
    ) -> Result<Self> {
        let mut caps = Caps::of(&device);
        caps.check_minimum()?;
        caps.cooperative_matrix = options.cooperative_matrix.clone();
        let rows = options.attention_variants.clone().unwrap_or_else(attention::variants);
        let key = key_of(&caps.info, &rows);
        let stored = options.verdicts.as_deref().and_then(|bytes| parse_verdicts(bytes, &key)).unwrap_or_default();
        let inner = Inner {
            pipeline_cache: pipeline_cache(&device, &caps.info, options.pipeline_cache.as_deref()),
            caps,
            device,
            queue,
            verdicts: stored,
            pipelines: Pipelines::default(),
            retired_schedules: Retired::default(),
            retired_moves: Retired::default(),
            attention_variants: rows,
            lost,
        };
        let mut runtime = Runtime { inner: Arc::new(inner) };
        runtime.probe().await?;
        let caps = runtime.caps().clone().masked(&options.mask);
        runtime.own().caps = caps;
        loop {
            let wanted = match options.self_test {
                SelfTest::Skip => Vec::new(),
                SelfTest::Chosen => attention::first_choices(&runtime),
                SelfTest::All => runtime.inner.attention_variants.clone(),
            };
            let untested = |row: &Variant<AttentionDesc>| runtime.verdict(row.name).is_none();
            let Some(row) = wanted.into_iter().find(|row| untested(row) && runtime.caps().has(&row.needs).is_ok())
            else {
                return Ok(runtime);
            };
            let verdict = attention::self_test(&runtime, &row).await?;
            if let Verdict::Failed(reason) = &verdict {
                log::warn!("{} is not used on {}: {reason}", row.name, runtime.caps().info.name);
            }
            runtime.own().verdicts.insert(row.name.to_string(), verdict);
        }
    }

    /// During construction nobody else holds the runtime.
    fn own(&mut self) -> &mut Inner {
        Arc::get_mut(&mut self.inner).expect("only `with_lost_flag` calls this, before the runtime is shared")
    }

    async fn probe(&mut self) -> Result<()> {
        const ITERATIONS: u32 = 200_000; // well past the 65,535 at which some software adapters stop
        let result = self.run_probe("probe", &[f32::NAN.to_bits(), ITERATIONS]).await?;
        let noop = self.caps().info.backend == wgpu::Backend::Noop;
        let seen = match self.caps().subgroup {
            Some(_) => Some(self.run_probe("probe_subgroup", &[0, 0]).await?[0]).filter(|size| *size > 0),
            None => None,
        };
        let caps = &mut self.own().caps;
        caps.subgroup_seen = seen;
        if !noop {
            caps.keeps_nan = f32::from_bits(result[0]).is_nan() && !f32::from_bits(result[3]).is_finite();
            caps.loop_limit = (result[1] < ITERATIONS).then_some(result[1]);
        }
        if let (Some((min, max)), Some(seen)) = (caps.subgroup, seen) {
            caps.subgroup = Some((min.min(seen), max.max(seen)));
        }
        Ok(())
    }

    async fn run_probe(&self, file: &'static str, input: &[u32]) -> Result<Vec<u32>> {
        let link = Link { file, subgroups: file.ends_with("subgroup"), ..Link::default() };
        let pipeline = self.pipeline(file, &link)?;
        let input = self.upload(file, bytemuck::cast_slice(input), wgpu::BufferUsages::STORAGE)?;
        let result = self.buffer(file, 16, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC)?;
        let group = pipeline.bind(self.device(), |name| match name {
            "input" => Some(input.as_entire_buffer_binding()),
            _ => Some(result.as_entire_buffer_binding()),
        })?;
        let mut encoder = self.device().create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline.pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(1, 1, 1);
        drop(pass);
        self.queue().submit([encoder.finish()]);
        let bytes = self.read(&result, 16).await?;
        Ok(bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    /// Its queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    /// What the device can do.
    pub fn caps(&self) -> &Caps {
        &self.inner.caps
    }

    /// What is known about a variant.
    pub fn verdict(&self, variant: &str) -> Option<&Verdict> {
        self.inner.verdicts.get(variant)
    }

    /// All verdicts as bytes to keep for [`RuntimeOptions::verdicts`]: text, a few hundred bytes.
    pub fn verdicts(&self) -> Vec<u8> {
        let mut text = format!("{MAGIC}\n{}\n", key_of(&self.caps().info, &self.inner.attention_variants));
        for (name, verdict) in &self.inner.verdicts {
            match verdict {
                Verdict::Passed => text += &format!("{name}\tpassed\n"),
                Verdict::Failed(reason) => text += &format!("{name}\tfailed\t{}\n", reason.replace(['\n', '\t'], " ")),
            }
        }
        text += END;
        text.into_bytes()
    }

    /// The persistent pipeline cache as bytes to keep for [`RuntimeOptions::pipeline_cache`], where the device has one.
    pub fn pipeline_cache(&self) -> Option<Vec<u8>> {
        let data = self.inner.pipeline_cache.as_ref()?.get_data()?;
        let mut bytes = cache_header(&self.caps().info)?;
        bytes.extend(data);
        Some(bytes)
    }

    /// Number of pipelines compiled so far.
    pub fn pipeline_count(&self) -> usize {
        self.inner.pipelines.count()
    }

    pub(crate) fn retired_schedules(&self) -> &Retired<attention::Buffers> {
        &self.inner.retired_schedules
    }

    pub(crate) fn retired_moves(&self) -> &Retired<runs::Buffers> {
        &self.inner.retired_moves
    }

    pub(crate) fn attention_variants(&self) -> &[Variant<AttentionDesc>] {
        &self.inner.attention_variants
    }

    pub(crate) fn pipeline(&self, label: &str, link: &Link) -> Result<Arc<Pipeline>> {
        self.check_lost()?;
        let cache = self.inner.pipeline_cache.as_ref();
        self.inner.pipelines.get(self.device(), self.caps(), cache, label, link)
    }

    /// Why `variant`, linked as `link`, cannot run here, if it cannot.
    pub(crate) fn lacking(&self, needs: &crate::caps::Needs, label: &str, link: &Link) -> Option<String> {
        if let Err(lacking) = self.caps().has(needs) {
            return Some(lacking);
        }
        let check =
            shader::link(link, crate::kernel::TARGET).and_then(|linked| self.caps().check_module(label, &linked));
        check.err().map(|error| error.to_string())
    }

    /// Tells that the device is lost, from the callback that an application sets with
    /// [`wgpu::Device::set_device_lost_callback`]: from then on everything is [`Error::DeviceLost`]. A device that
    /// [`Runtime::open`] made is watched already. Without this, recording goes on and reading back fails.
    pub fn mark_lost(&self, reason: &str) {
        *self.inner.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.into());
    }

    pub(crate) fn is(&self, other: &Runtime) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn check_lost(&self) -> Result<()> {
        match &*self.inner.lost.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(reason) => Err(Error::DeviceLost(reason.clone())),
            None => Ok(()),
        }
    }

    /// A new buffer; too large or no memory is an error, not a panic.
    pub fn buffer(&self, label: &str, size: u64, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        self.make_buffer(label, size, usage, false)
    }

    fn make_buffer(&self, label: &str, size: u64, usage: wgpu::BufferUsages, mapped: bool) -> Result<wgpu::Buffer> {
        self.check_lost()?;
        let limit = self.caps().limits.max_buffer_size;
        if size > limit {
            return Err(Error::limit(format!("the size of buffer `{label}`"), limit, size, "split the work"));
        }
        let (memory, validation) = (
            self.device().push_error_scope(wgpu::ErrorFilter::OutOfMemory),
            self.device().push_error_scope(wgpu::ErrorFilter::Validation),
        );
        let buffer = self.device().create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: size.max(16).next_multiple_of(16), // whole vec4s; an empty binding is not allowed
            usage,
            mapped_at_creation: mapped,
        });
        use futures::FutureExt;
        for scope in [validation, memory] {
            if let Some(Some(error)) = scope.pop().now_or_never() {
                return Err(error.into());
            }
        }
        Ok(buffer)
    }

    /// A new buffer that holds `bytes`, padded with zeros.
    pub fn upload(&self, label: &str, bytes: &[u8], usage: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        let buffer = self.make_buffer(label, bytes.len() as u64, usage, true)?;
        {
            let mut mapped = buffer
                .get_mapped_range_mut(..)
                .map_err(|error| Error::DeviceLost(format!("cannot fill `{label}`: {error}")))?;
            mapped.slice(..bytes.len()).copy_from_slice(bytes);
        }
        buffer.unmap();
        Ok(buffer)
    }

    /// The first `size` bytes of a buffer with usage `COPY_SRC`, after all work submitted so far.
    pub async fn read(&self, buffer: &wgpu::Buffer, size: u64) -> Result<Vec<u8>> {
        self.check_lost()?;
        if !buffer.usage().contains(wgpu::BufferUsages::COPY_SRC) {
            return Err(Error::shape("buffer", "usage COPY_SRC", format!("{:?}", buffer.usage())));
        }
        if size.next_multiple_of(4) > buffer.size() {
            return Err(Error::shape(
                "size",
                format!("at most the buffer's {} bytes, in whole words", buffer.size()),
                size,
            ));
        }
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let staging = self.buffer("read", size, usage)?;
        let mut encoder = self.device().create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, size.next_multiple_of(4));
        // A lost device answers the mapping with a validation error beside the callback's.
        let scope = self.device().push_error_scope(wgpu::ErrorFilter::Validation);
        self.queue().submit([encoder.finish()]);
        let (sender, receiver) = futures::channel::oneshot::channel();
        staging.map_async(wgpu::MapMode::Read, .., move |result| {
            let _ = sender.send(result); // the receiver is gone when the caller dropped the future
        });
        self.wait()?;
        let error = scope.pop();
        let mapped = receiver.await.map_err(|_| Error::DeviceLost("the mapping was dropped".into()))?;
        self.check_lost()?;
        match (mapped, error.await) {
            (Ok(()), None) => {}
            (Ok(()), Some(error)) => return Err(error.into()),
            (Err(failed), error) => {
                return Err(Error::DeviceLost(error.map_or_else(|| failed.to_string(), |error| error.to_string())));
            }
        }
        let range = staging.get_mapped_range(..).map_err(|error| Error::Gpu(error.to_string()))?;
        Ok(range[..size as usize].to_vec())
    }

    /// Natively blocks until all submitted work is done; in a browser callbacks come by themselves.
    pub fn wait(&self) -> Result<()> {
        let poll = || self.device().poll(wgpu::PollType::wait_indefinitely());
        // wgpu panics inside `poll` when the device is really lost.
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(poll)) {
            Ok(Ok(_)) => self.check_lost(),
            Ok(Err(error)) => Err(Error::Gpu(error.to_string())),
            Err(_) => Err(Error::DeviceLost("waiting for the device failed".into())),
        }
    }
}

const MAGIC: &str = "wgpu-attention verdicts 1";
const END: &str = "end\n";

/// Verdicts hold for one adapter, driver and version of this crate, and for the same rows and shaders.
fn key_of(info: &wgpu::AdapterInfo, rows: &[Variant<AttentionDesc>]) -> String {
    let mut hasher = std::hash::DefaultHasher::new();
    shader::FILES.hash(&mut hasher);
    for row in rows {
        (row.name, format!("{:?}", row.needs), row.swaps, row.values).hash(&mut hasher);
    }
    format!(
        "{}|{:x}:{:x}|{}|{}|{:?}|{}|{:016x}",
        info.name,
        info.vendor,
        info.device,
        info.driver,
        info.driver_info,
        info.backend,
        env!("CARGO_PKG_VERSION"),
        hasher.finish(),
    )
    .replace(['\n', '\t'], " ")
}

fn parse_verdicts(bytes: &[u8], key: &str) -> Option<BTreeMap<String, Verdict>> {
    let text = std::str::from_utf8(bytes).ok()?.strip_suffix(END)?;
    let mut lines = text.lines();
    if lines.next()? != MAGIC || lines.next()? != key {
        return None;
    }
    lines
        .map(|line| {
            let mut fields = line.split('\t');
            let name = fields.next()?.to_string();
            match (fields.next()?, fields.next()) {
                ("passed", None) => Some((name, Verdict::Passed)),
                ("failed", Some(reason)) => Some((name, Verdict::Failed(reason.to_string()))),
                _ => None,
            }
        })
        .collect()
}

fn cache_header(info: &wgpu::AdapterInfo) -> Option<Vec<u8>> {
    #[cfg(not(target_arch = "wasm32"))]
    return wgpu::util::pipeline_cache_key(info).map(|key| format!("{key}|{}\n", info.driver_info).into_bytes());
    #[cfg(target_arch = "wasm32")]
    return {
        let _ = info;
        None
    };
}

fn pipeline_cache(
    device: &wgpu::Device,
    info: &wgpu::AdapterInfo,
    bytes: Option<&[u8]>,
) -> Option<wgpu::PipelineCache> {
    if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
        return None;
    }
    let data = bytes.and_then(|bytes| bytes.strip_prefix(cache_header(info)?.as_slice()));
    // SAFETY: the data was returned by `PipelineCache::get_data` on the same adapter and driver, as the header proves for
    // anything but deliberately forged bytes; wgpu checks its own header again and falls back to an empty cache.
    Some(unsafe {
        device.create_pipeline_cache(&wgpu::PipelineCacheDescriptor {
            label: Some("wgpu-attention"),
            data,
            fallback: true,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_survive_and_damage_is_noticed() {
        let text = format!("{MAGIC}\nkey\na\tpassed\nb\tfailed\twrong by 3\n{END}");
        let parsed = parse_verdicts(text.as_bytes(), "key").unwrap();
        assert_eq!(parsed["a"], Verdict::Passed);
        assert_eq!(parsed["b"], Verdict::Failed("wrong by 3".into()));
        assert_eq!(parse_verdicts(text.as_bytes(), "another driver"), None);
        for cut in 0..text.len() {
            assert_eq!(parse_verdicts(&text.as_bytes()[..cut], "key"), None, "cut at {cut}");
        }
        assert_eq!(parse_verdicts(text.replace("passed", "passes").as_bytes(), "key"), None);
        assert_eq!(parse_verdicts(&[0xff; 100], "key"), None);
    }
}
