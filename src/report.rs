//! Measurements and their JSON: what `bench --json` writes, and what compares or draws it reads.

#[cfg(feature = "cli")]
use serde::{Deserialize, Serialize};

use crate::runtime::Runtime;

/// One run of the benchmarks on one adapter. It holds no date, so that equal measurements are equal files.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "cli", derive(Serialize, Deserialize))]
pub struct Report {
    /// Version of this crate.
    pub version: String,
    /// What was measured on.
    pub adapter: AdapterReport,
    /// How times were taken.
    pub method: Method,
    /// The small cases were measured, with small time budgets.
    pub quick: bool,
    /// The cases measured, in the order of [`crate::cases::all`].
    pub cases: Vec<CaseReport>,
    /// Cases left out, and why.
    pub skipped: Vec<Skipped>,
}

/// An adapter, its driver, and what it can do as far as kernels care.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "cli", derive(Serialize, Deserialize))]
pub struct AdapterReport {
    /// Its name.
    pub name: String,
    /// `vulkan`, `metal`, `dx12`, `webgpu`.
    pub backend: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub kind: String,
    /// PCI vendor and device, hexadecimal.
    pub id: String,
    /// The driver and its version.
    pub driver: String,
    /// Smallest and largest subgroup, if subgroup operations are there.
    pub subgroup: Option<(u32, u32)>,
    /// Native f16 arithmetic.
    pub shader_f16: bool,
    /// Most bytes of workgroup memory.
    pub workgroup_bytes: u32,
    /// Most invocations of a workgroup.
    pub invocations: u32,
    /// Most bytes of a storage binding.
    pub binding_bytes: u64,
    /// Iterations after which loops silently stop, if they do.
    pub loop_limit: Option<u32>,
}

/// How times were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(Serialize, Deserialize), serde(rename_all = "kebab-case"))]
pub enum Method {
    /// By the GPU's own clock, at the beginning and the end of a compute pass of many runs.
    GpuTimestamps,
    /// By the CPU, from the submission of many runs until a wait for them returns.
    WallTime,
}

/// One case.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "cli", derive(Serialize, Deserialize))]
pub struct CaseReport {
    /// Its name, see [`crate::cases`].
    pub name: String,
    /// Floating-point operations of one run: visible pairs only.
    pub flops: f64,
    /// Bytes that one run must move at least.
    pub bytes: f64,
    /// What was measured.
    pub variants: Vec<VariantReport>,
    /// Variants left out, and why.
    pub skipped: Vec<Skipped>,
}

/// One variant on one case.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "cli", derive(Serialize, Deserialize))]
pub struct VariantReport {
    /// `default` for what the library chooses by itself, `portable` for its choice among portable rows, `unfused` for the
    /// three passes, `flat` and `cascade` for the default with shared keys read for each sequence and once for all, otherwise
    /// the name of one row that served all tiles.
    pub name: String,
    /// The rows behind it.
    pub rows: Vec<String>,
    /// Times; none if the output was wrong, so that a wrong kernel has no speed.
    pub times: Option<Times>,
    /// What was wrong, if something was.
    pub failure: Option<String>,
}

/// Times of one run in seconds, and what follows from them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "cli", derive(Serialize, Deserialize))]
pub struct Times {
    /// Middle of the samples.
    pub median: f64,
    /// Fastest sample.
    pub min: f64,
    /// Nine in ten samples are at most this.
    pub p90: f64,
    /// Samples.
    pub samples: usize,
    /// Runs in each sample.
    pub repeats: usize,
    /// 10¹² floating-point operations a second, from the median.
    pub tflops: f64,
    /// 10⁹ bytes a second, from the median and the bytes that must move at least.
    pub gb_per_s: f64,
    /// Largest error found against the f64 oracle.
    pub error: f64,
}

/// Something left out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(Serialize, Deserialize))]
pub struct Skipped {
    /// The case or variant.
    pub name: String,
    /// Why.
    pub reason: String,
}

impl AdapterReport {
    /// Of the adapter behind `runtime`.
    pub fn of(runtime: &Runtime) -> Self {
        let caps = runtime.caps();
        let kind = match caps.info.device_type {
            wgpu::DeviceType::DiscreteGpu => "discrete",
            wgpu::DeviceType::IntegratedGpu => "integrated",
            wgpu::DeviceType::VirtualGpu => "virtual",
            wgpu::DeviceType::Cpu => "software",
            wgpu::DeviceType::Other => "other",
        };
        AdapterReport {
            name: caps.info.name.clone(),
            backend: caps.info.backend.to_string(),
            kind: kind.into(),
            id: format!("{:04x}:{:04x}", caps.info.vendor, caps.info.device),
            driver: format!("{} {}", caps.info.driver, caps.info.driver_info).trim().into(),
            subgroup: caps.subgroup,
            shader_f16: caps.features.contains(wgpu::Features::SHADER_F16),
            workgroup_bytes: caps.limits.max_compute_workgroup_storage_size,
            invocations: caps.limits.max_compute_invocations_per_workgroup,
            binding_bytes: caps.limits.max_storage_buffer_binding_size,
            loop_limit: caps.loop_limit,
        }
    }
}

impl Times {
    /// From samples of seconds a run; at least one.
    pub fn of(samples: &[f64], repeats: usize, flops: f64, bytes: f64, error: f64) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let median = (sorted[last / 2] + sorted[last.div_ceil(2)]) / 2.0;
        Some(Times {
            median,
            min: sorted[0],
            p90: sorted[(last as f64 * 0.9).ceil() as usize],
            samples: samples.len(),
            repeats,
            tflops: flops / median * 1e-12,
            gb_per_s: bytes / median * 1e-9,
            error,
        })
    }
}

impl CaseReport {
    /// The times of a variant by its name.
    pub fn times(&self, variant: &str) -> Option<&Times> {
        self.variants.iter().find(|found| found.name == variant)?.times.as_ref()
    }

    /// The fastest fused variant, with or without a cascade, that beats the default by more than a tenth, in the median and in
    /// the fastest sample (one of them alone is noise).
    pub fn better_than_default(&self) -> Option<&VariantReport> {
        let default = self.times("default")?;
        let better = |times: &Times| times.median * 1.1 < default.median && times.min * 1.1 < default.min;
        let fused = self.variants.iter().filter(|variant| !matches!(variant.name.as_str(), "default" | "unfused"));
        let better = fused.filter_map(|variant| variant.times.filter(better).map(|times| (variant, times.median)));
        better.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(variant, _)| variant)
    }
}

#[cfg(feature = "cli")]
impl Report {
    /// As JSON, indented.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report has only string keys") + "\n"
    }

    /// Reads what [`Report::to_json`] wrote.
    pub fn from_json(text: &str) -> std::result::Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(name: &str, samples: &[f64]) -> VariantReport {
        let times = Times::of(samples, 3, 1e9, 1e6, 1e-6);
        VariantReport { name: name.into(), rows: vec![name.into()], times, failure: None }
    }

    #[test]
    fn statistics() {
        let times = Times::of(&[5.0, 1.0, 2.0, 4.0, 3.0], 1, 6e12, 3e9, 0.0).unwrap();
        assert_eq!((times.median, times.min, times.p90, times.tflops, times.gb_per_s), (3.0, 1.0, 5.0, 2.0, 1.0));
        assert_eq!(Times::of(&[1.0, 2.0], 1, 0.0, 0.0, 0.0).unwrap().median, 1.5);
        assert_eq!(Times::of(&[], 1, 0.0, 0.0, 0.0), None);
    }

    #[test]
    fn a_default_loses_only_beyond_noise() {
        let case = |samples: &[f64]| CaseReport {
            name: "attention/x".into(),
            flops: 1e9,
            bytes: 1e6,
            variants: vec![variant("default", &[1.0, 1.2]), variant("unfused", &[0.1]), variant("a.row", samples)],
            skipped: Vec::new(),
        };
        assert_eq!(case(&[0.95, 1.1]).better_than_default(), None);
        assert_eq!(case(&[0.5, 1.6]).better_than_default(), None);
        assert_eq!(case(&[0.5, 0.6]).better_than_default().unwrap().name, "a.row");
    }

    #[cfg(feature = "cli")]
    #[test]
    fn json_comes_back() {
        let report = Report {
            version: "0.1.0".into(),
            adapter: AdapterReport {
                name: "a \"quoted\" name".into(),
                backend: "vulkan".into(),
                kind: "software".into(),
                id: "10005:0000".into(),
                driver: "d".into(),
                subgroup: Some((4, 8)),
                shader_f16: false,
                workgroup_bytes: 1 << 14,
                invocations: 256,
                binding_bytes: 1 << 27,
                loop_limit: None,
            },
            method: Method::GpuTimestamps,
            quick: true,
            cases: vec![CaseReport {
                name: "attention/x".into(),
                flops: 1e9,
                bytes: 1e6,
                variants: vec![VariantReport { failure: Some("wrong".into()), ..variant("default", &[0.5]) }],
                skipped: vec![Skipped { name: "a.row".into(), reason: "no subgroup operations".into() }],
            }],
            skipped: Vec::new(),
        };
        assert_eq!(Report::from_json(&report.to_json()).unwrap(), report);
        assert!(Report::from_json("{}").is_err());
    }
}
