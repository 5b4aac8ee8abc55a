//! What the tests share: adapters, seeded data, the comparison with the oracle.
#![allow(dead_code)] // each test binary uses a part of it

use std::sync::OnceLock;

use rand::{Rng, SeedableRng};
use wgpu_attention::{
    AttentionDesc, Batch, DType, HostInput, HostMask, HostOutput, Lengths, Runtime, RuntimeOptions, SelfTest, reference,
};

/// Runs an async test.
pub fn block<T>(future: impl std::future::Future<Output = T>) -> T {
    pollster::block_on(future)
}

/// A short name of an adapter for messages and for WGPU_ATTENTION_REQUIRE_ADAPTERS.
pub fn short_name(info: &wgpu::AdapterInfo) -> String {
    let name = info.name.to_lowercase();
    match () {
        _ if name.contains("swiftshader") => "swiftshader".into(),
        _ if name.contains("llvmpipe") && info.driver_info.contains("Mesa 26") => "lavapipe26".into(),
        _ if name.contains("llvmpipe") => "lavapipe".into(),
        _ => name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect(),
    }
}

/// Every adapter of this machine with a runtime on it. None at all is a failure, and so is one missing that
/// WGPU_ATTENTION_REQUIRE_ADAPTERS names.
pub fn runtimes() -> &'static [(String, Runtime)] {
    static RUNTIMES: OnceLock<Vec<(String, Runtime)>> = OnceLock::new();
    RUNTIMES.get_or_init(|| {
        let _ = env_logger::builder().is_test(true).try_init();
        let mut found: Vec<(String, Runtime)> = Vec::new();
        for adapter in block(wgpu_attention::adapters()) {
            let name = short_name(&adapter.get_info());
            if found.iter().any(|(other, _)| *other == name) {
                continue; // the same adapter through a second loader entry
            }
            let runtime = block(Runtime::open(
                &adapter,
                RuntimeOptions { self_test: SelfTest::All, ..RuntimeOptions::default() },
            ));
            found.push((name.clone(), runtime.unwrap_or_else(|error| panic!("{name}: {error}"))));
        }
        let names: Vec<_> = found.iter().map(|(name, _)| name.clone()).collect();
        assert!(!found.is_empty(), "no adapter: install a Vulkan driver, or on Linux run ./dev test");
        for required in std::env::var("WGPU_ATTENTION_REQUIRE_ADAPTERS").unwrap_or_default().split(',') {
            assert!(names.iter().any(|name| name.starts_with(required)), "no {required} among {names:?}");
        }
        found
    })
}

/// Seeded random numbers; the seed of a failing test is in its message.
pub struct Data(pub rand_chacha::ChaCha8Rng);

impl Data {
    pub fn new(seed: u64) -> Self {
        Data(rand_chacha::ChaCha8Rng::seed_from_u64(seed))
    }

    pub fn uniform(&mut self) -> f32 {
        (self.0.next_u32() >> 8) as f32 / (1u32 << 24) as f32
    }

    /// A standard normal value.
    pub fn normal(&mut self) -> f32 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
    }

    /// `len` normal values that `dtype` holds exactly.
    pub fn tensor(&mut self, len: usize, dtype: DType) -> Vec<f32> {
        (0..len).map(|_| dtype.round(self.normal())).collect()
    }

    pub fn below(&mut self, n: u32) -> u32 {
        self.0.next_u32() % n
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }
}

/// Host tensors of one case.
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub bool_mask: Option<Vec<u8>>,
    pub bit_mask: Option<Vec<u32>>,
}

impl Tensors {
    pub fn input(&self) -> HostInput<'_> {
        HostInput {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            bias: self.bias.as_deref(),
            mask: match (&self.bool_mask, &self.bit_mask) {
                (Some(bytes), _) => HostMask::Bool(bytes),
                (_, Some(words)) => HostMask::Bits(words),
                _ => HostMask::None,
            },
        }
    }

    /// Normal values for contiguous Q, K and V.
    pub fn random(desc: &AttentionDesc, batch: &Batch, data: &mut Data) -> Self {
        let rows = |lengths: &Lengths| match lengths {
            Lengths::Uniform { batch, len } => *batch as usize * *len as usize,
            Lengths::Padded { max_len, lens } => *max_len as usize * lens.len(),
            Lengths::Ragged { offsets } => offsets.last().copied().unwrap_or(0) as usize,
        };
        let (q, kv) = (rows(&batch.q), rows(&batch.kv));
        Tensors {
            q: data.tensor(q * (desc.heads * desc.head_dim) as usize, desc.q_dtype),
            k: data.tensor(kv * (desc.kv_heads * desc.head_dim) as usize, desc.kv_dtype),
            v: data.tensor(kv * (desc.kv_heads * desc.v_dim()) as usize, desc.kv_dtype),
            ..Tensors::default()
        }
    }
}

/// A whole oracle, and the error of the same maths done plainly in f32.
pub struct Expected {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    out_tolerance: f64,
    lse_tolerance: f64,
    out_dtype: DType,
}

/// The unit in the last place of `dtype` at `at`.
fn ulp(dtype: DType, at: f64) -> f64 {
    match dtype {
        DType::F32 => at.abs() * 2f64.powi(-23),
        DType::F16 => (at.abs() * 2f64.powi(-10)).max(2f64.powi(-24)),
        DType::Bf16 => at.abs() * 2f64.powi(-7),
    }
}

impl Expected {
    pub fn of(desc: &AttentionDesc, batch: &Batch, input: &HostInput) -> Self {
        let (out, lse) = reference::attention::<f64>(desc, batch, input).unwrap();
        let (plain_out, plain_lse) = reference::attention::<f32>(desc, batch, input).unwrap();
        // FlashAttention's rule: at most twice the error of the plain computation plus 4 ulp at max|V|, in f32, which is what
        // kernels compute in; a 16-bit output adds its own rounding, 1 ulp of the element itself.
        let error = |exact: &[f64], plain: &[f32]| {
            let differences = exact.iter().zip(plain).map(|(a, b)| (a - f64::from(*b)).abs());
            differences.filter(|x| x.is_finite()).fold(0.0, f64::max)
        };
        let largest =
            |values: &mut dyn Iterator<Item = f64>| values.filter(|x| x.is_finite()).fold(0.0, |a, b| b.abs().max(a));
        let max_v = largest(&mut input.v.iter().map(|x| f64::from(*x)));
        let max_lse = largest(&mut lse.iter().copied()).max(1.0);
        Expected {
            out_tolerance: 2.0 * error(&out, &plain_out) + 4.0 * ulp(DType::F32, max_v),
            lse_tolerance: 2.0 * error(&lse, &plain_lse) + 4.0 * ulp(DType::F32, max_lse),
            out_dtype: desc.out_dtype,
            out,
            lse,
        }
    }

    /// Panics where a result is off: NaN for NaN, infinity for infinity, numbers within tolerance.
    pub fn check(&self, got: &HostOutput, with_lse: bool, what: &str) {
        let rounding = |want: f64| if self.out_dtype == DType::F32 { 0.0 } else { ulp(self.out_dtype, want) };
        compare_by(&got.out, &self.out, |want| self.out_tolerance + rounding(want), &format!("{what}: O"));
        if with_lse {
            compare(&got.lse, &self.lse, self.lse_tolerance, &format!("{what}: LSE"));
        }
    }
}

pub fn compare(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    compare_by(got, want, |_| tolerance, what);
}

/// The same with a tolerance for each expected value.
pub fn compare_by(got: &[f32], want: &[f64], tolerance: impl Fn(f64) -> f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let mut wrong = 0;
    let mut first = String::new();
    let mut worst = 0f64;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let got = f64::from(*got);
        let right = match () {
            _ if want.is_nan() => got.is_nan(),
            _ if want.is_infinite() => got == *want,
            _ => (got - want).abs() <= tolerance(*want),
        };
        if !right {
            wrong += 1;
            worst = worst.max((got - want).abs());
            if first.is_empty() {
                first = format!("element {i} is {got}, not {want} (tolerance {:e})", tolerance(*want));
            }
        }
    }
    assert!(wrong == 0, "{what}: {wrong} of {} wrong, worst by {worst:e}; {first}", want.len());
}
