//! Rotary position embedding (Su et al., *RoFormer*, 2021): which dims make pairs, and how fast each pair turns.
//!
//! Pair `i` of a row at position `n` is turned by the angle `n·fᵢ`: `(x, y) → a·(x·cos − y·sin, y·cos + x·sin)`, with
//! `fᵢ = theta^(−2i/dim)` before scaling and the attention factor `a`, 1 but for YaRN. Frequencies are those of Hugging Face
//! *transformers* (`modeling_rope_utils`), computed in f64. Shaders get them as fractions of a turn in 64 bits, and multiply
//! by the position in integers, so that angles are as exact at position 2³¹ as at 1.

use std::f64::consts::TAU;

use crate::error::{Error, Result};

/// Which dims of the rotated ones make a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RopePairs {
    /// `(i, i + dim/2)`, as Llama, Qwen and GPT-NeoX have it.
    #[default]
    HalfSplit,
    /// `(2i, 2i + 1)`, as the paper, GPT-J and most DeepSeek code have it.
    Interleaved,
}

/// How frequencies differ from `theta^(−2i/dim)`, to serve more positions than a model was trained on.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// They do not.
    #[default]
    None,
    /// All divided by `factor` (Chen et al., *Position Interpolation*, 2023).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Slow pairs divided by `factor`, fast ones not, those between blended (Llama 3.1 and later).
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Pairs that turn less often than this in `original_max_position` positions are slow.
        low_freq_factor: f64,
        /// Pairs that turn more often than this are fast; more than `low_freq_factor`.
        high_freq_factor: f64,
        /// Positions that the model was trained on.
        original_max_position: u32,
    },
    /// The same with a ramp over the pairs, and a factor on what is turned (Peng et al., *YaRN*, 2023).
    Yarn {
        /// At least 1.
        factor: f64,
        /// Turns from which on pairs are fast, 32 in the paper.
        beta_fast: f64,
        /// Turns up to which pairs are slow, 1 in the paper; less than `beta_fast`.
        beta_slow: f64,
        /// Positions that the model was trained on.
        original_max_position: u32,
        /// `0.1·ln(factor) + 1` if `None`.
        attention_factor: Option<f64>,
        /// Whether the ramp begins and ends at whole pairs, as in most models; not in gpt-oss.
        truncate: bool,
    },
    /// Any others, such as LongRoPE's.
    Frequencies {
        /// Radians a position, one for each pair.
        radians: Vec<f64>,
        /// On what is turned.
        attention_factor: f64,
    },
}

/// Rotary position embedding.
///
/// ```
/// use wgpu_attention::{Rope, RopeScaling};
/// let plain = Rope::default();
/// assert_eq!(plain.frequencies(4).unwrap(), [1.0, 0.01]);
/// let scaling = RopeScaling::Llama3 {
///     factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192,
/// };
/// let llama = Rope { theta: 500_000.0, scaling, ..Rope::default() };
/// let frequencies = llama.frequencies(128).unwrap();
/// assert_eq!(frequencies[0], 1.0); // fast
/// assert_eq!(frequencies[63], 500_000f64.powf(-126.0 / 128.0) / 8.0); // slow
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// How many dims are turned, the first ones of a head; even; all if `None`. The others are copied.
    pub dim: Option<u32>,
    /// The base, above 1.
    pub theta: f64,
    /// Which dims make a pair.
    pub pairs: RopePairs,
    /// How frequencies are scaled.
    pub scaling: RopeScaling,
}

impl Default for Rope {
    /// All dims, half-split, base 10,000, no scaling.
    fn default() -> Self {
        Rope { dim: None, theta: 10_000.0, pairs: RopePairs::HalfSplit, scaling: RopeScaling::None }
    }
}

/// 2π is this much more than [`TAU`].
const TAU_REST: f64 = 2.449_293_598_294_706_4e-16;

fn check(what: &str, expected: &str, value: f64, good: bool) -> Result<()> {
    if good && value.is_finite() { Ok(()) } else { Err(Error::shape(what, expected, value)) }
}

impl Rope {
    /// Dims that are turned in heads of `head_dim`.
    pub fn dim_of(&self, head_dim: u32) -> Result<u32> {
        let dim = self.dim.unwrap_or(head_dim);
        match dim.is_multiple_of(2) && dim <= head_dim {
            true => Ok(dim),
            false => Err(Error::shape("rope dim", format!("an even number up to the head dim, {head_dim}"), dim)),
        }
    }

    /// Radians a position of each pair, in heads of `head_dim`.
    pub fn frequencies(&self, head_dim: u32) -> Result<Vec<f64>> {
        let dim = self.dim_of(head_dim)?;
        let pairs = dim as usize / 2;
        check("rope theta", "a number above 1", self.theta, self.theta > 1.0)?;
        let factor_of = |factor: f64| check("rope factor", "a number from 1 up", factor, factor >= 1.0);
        let positions_of = |positions: u32| match positions {
            0 => Err(Error::shape("rope original_max_position", "at least 1", 0)),
            _ => Ok(()),
        };
        let plain = (0..pairs).map(|i| self.theta.powf(-2.0 * i as f64 / f64::from(dim)));
        Ok(match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => {
                factor_of(*factor)?;
                plain.map(|f| f / factor).collect()
            }
            RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_max_position } => {
                factor_of(*factor)?;
                check("rope low_freq_factor", "a number above 0", *low, *low > 0.0)?;
                check("rope high_freq_factor", "a number above low_freq_factor", *high, high > low)?;
                positions_of(*original_max_position)?;
                let turns = |f: f64| f64::from(*original_max_position) * f / TAU;
                plain
                    .map(|f| {
                        let fast = ((turns(f) - low) / (high - low)).clamp(0.0, 1.0);
                        (1.0 - fast) * f / factor + fast * f
                    })
                    .collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, .. } => {
                factor_of(*factor)?;
                check("rope beta_slow", "a number above 0", *beta_slow, *beta_slow > 0.0)?;
                check("rope beta_fast", "a number above beta_slow", *beta_fast, beta_fast > beta_slow)?;
                positions_of(*original_max_position)?;
                // The pair, not rounded, that turns so often in all positions trained on.
                let pair_of = |turns: f64| {
                    let positions = f64::from(*original_max_position);
                    f64::from(dim) * (positions / (turns * TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (low, high) = (pair_of(*beta_fast), pair_of(*beta_slow));
                let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(f64::from(dim) - 1.0));
                let high = if low == high { high + 0.001 } else { high };
                plain
                    .enumerate()
                    .map(|(i, f)| {
                        let slow = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        f / factor * slow + f * (1.0 - slow)
                    })
                    .collect()
            }
            RopeScaling::Frequencies { radians, .. } => {
                if radians.len() != pairs {
                    return Err(Error::shape(
                        "rope frequencies",
                        format!("one for each of {pairs} pairs"),
                        radians.len(),
                    ));
                }
                let finite = |f: &f64| check("rope frequency", "a number up to 2π", *f, f.abs() <= TAU);
                radians.iter().try_for_each(finite)?;
                radians.clone()
            }
        })
    }

    /// What turned pairs are multiplied with.
    pub fn attention_factor(&self) -> Result<f32> {
        let factor = match &self.scaling {
            RopeScaling::Yarn { factor, attention_factor, .. } => attention_factor.unwrap_or(0.1 * factor.ln() + 1.0),
            RopeScaling::Frequencies { attention_factor, .. } => *attention_factor,
            _ => 1.0,
        };
        check("rope attention_factor", "a number that f32 holds", factor, (factor as f32).is_finite())?;
        Ok(factor as f32)
    }

    /// The frequencies as fractions of a turn, times 2⁶⁴, modulo whole turns: the upper words of four pairs, the lower words of
    /// the same, and so on; zeros for pairs that fill up the last four.
    pub(crate) fn turns(&self, head_dim: u32) -> Result<Vec<u32>> {
        let frequencies = self.frequencies(head_dim)?;
        let words = |four: &[f64]| {
            let turns = [0, 1, 2, 3].map(|i| four.get(i).map_or(0, |radians| turns_of(*radians)));
            [turns.map(|turns| (turns >> 32) as u32), turns.map(|turns| turns as u32)].concat()
        };
        Ok(frequencies.chunks(4).flat_map(words).collect())
    }

    /// One head's row turned as at `position`, on the CPU in f64 with the angle reduced exactly: what kernels are tested against.
    ///
    /// ```
    /// use wgpu_attention::Rope;
    /// let turned = Rope::default().apply(&[1.0, 5.0, 0.0, 5.0], 2).unwrap(); // (1, 0) by 2 radians, (5, 5) by 0.02
    /// assert!((turned[0] - 2f64.cos()).abs() < 1e-12 && (turned[2] - 2f64.sin()).abs() < 1e-12);
    /// ```
    pub fn apply(&self, row: &[f32], position: u32) -> Result<Vec<f64>> {
        let mut out: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let frequencies = self.frequencies(row.len() as u32)?;
        let pairs = frequencies.len();
        let factor = f64::from(self.attention_factor()?);
        for (i, f) in frequencies.into_iter().enumerate() {
            let (a, b) = match self.pairs {
                RopePairs::HalfSplit => (i, i + pairs),
                RopePairs::Interleaved => (2 * i, 2 * i + 1),
            };
            // 31 bits of position and 53 of frequency: two products without rounding, each reduced.
            let (high, low) = (f64::from(position >> 16) * 65_536.0, f64::from(position & 0xffff));
            let coarse = f64::from(f as f32);
            let reduced = |x: f64| x.rem_euclid(TAU) - (x / TAU).floor() * TAU_REST;
            let (sin, cos) = [high, low].iter().map(|n| reduced(n * coarse) + n * (f - coarse)).sum::<f64>().sin_cos();
            let (x, y) = (f64::from(row[a]), f64::from(row[b]));
            (out[a], out[b]) = (factor * (x * cos - y * sin), factor * (y * cos + x * sin));
        }
        Ok(out)
    }
}

/// Radians as turns times 2⁶⁴, modulo whole turns, rounded once: positions multiply an error by up to 2³¹, too much for
/// one of f64.
fn turns_of(radians: f64) -> u64 {
    const INVERSE_TAU: [u64; 2] = [0x28be_60db_9391_054a, 0x7f09_d5f4_7d4d_3770]; // 1/2π times 2⁶⁴, and the next 64 bits
    let bits = radians.abs().to_bits();
    let (exponent, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
    let (mantissa, exponent) = if exponent == 0 { (fraction, -1074) } else { (fraction | 1 << 52, exponent - 1075) };
    let [high, low] = INVERSE_TAU.map(|part| u128::from(mantissa) * u128::from(part));
    let product = high + (low >> 64); // turns times 2^(64 − exponent), under 2¹¹⁵
    let turns = match exponent {
        -127..0 => ((product + (1 << (-exponent - 1))) >> -exponent) as u64,
        _ => 0, // slower than 2⁻¹²⁷; `frequencies` lets none through that is faster than 2⁵²
    };
    if radians < 0.0 { turns.wrapping_neg() } else { turns }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Close to what transformers 4.46 computes in f32.
    #[track_caller]
    fn close(got: &[f64], want: &[(usize, f64)]) {
        for (i, want) in want {
            assert!((got[*i] - want).abs() <= 2e-6 * want.abs(), "pair {i}: {} is not {want}", got[*i]);
        }
    }

    #[test]
    fn frequencies_by_hand() {
        let linear = Rope { scaling: RopeScaling::Linear { factor: 4.0 }, ..Rope::default() };
        close(&linear.frequencies(8).unwrap(), &[(0, 0.25), (1, 0.025), (3, 0.00025)]);

        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        };
        let llama = Rope { theta: 500_000.0, scaling, ..Rope::default() };
        // Pair 16 of 32 turns 8192/(2π·√500000) = 1.8438 times: smoothed by 0.28127.
        let f16 = 500_000f64.powf(-0.5);
        let smooth = (8192.0 * f16 / TAU - 1.0) / 3.0;
        assert!((smooth - 0.281_27).abs() < 1e-4, "{smooth}");
        let all = llama.frequencies(64).unwrap();
        close(
            &all,
            &[(0, 1.0), (16, f16 * (smooth + (1.0 - smooth) / 32.0)), (31, 500_000f64.powf(-62.0 / 64.0) / 32.0)],
        );

        let yarn = |attention_factor| RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 32_768,
            attention_factor,
            truncate: true,
        };
        let qwen = Rope { theta: 1e6, scaling: yarn(None), ..Rope::default() };
        // 128·ln(32768/(32·2π))/(2·ln 10⁶) = 23.59 and 128·ln(32768/2π)/(2·ln 10⁶) = 39.65: a ramp from pair 23 to 40.
        let f = |i: i32| 1e6f64.powf(f64::from(-2 * i) / 128.0);
        let slow = 7.0 / 17.0;
        close(
            &qwen.frequencies(128).unwrap(),
            &[(0, 1.0), (23, f(23)), (30, f(30) * (slow / 4.0 + 1.0 - slow)), (40, f(40) / 4.0), (63, f(63) / 4.0)],
        );
        assert_eq!(qwen.attention_factor().unwrap(), 1.138_629_4);
        assert_eq!(Rope { scaling: yarn(Some(0.5)), ..Rope::default() }.attention_factor().unwrap(), 0.5);
    }

    /// Independently computed in double precision by the formulas of Hugging Face: gpt-oss.
    #[test]
    fn a_ramp_that_is_not_rounded() {
        let scaling = RopeScaling::Yarn {
            factor: 32.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 4096,
            attention_factor: None,
            truncate: false,
        };
        let gpt_oss = Rope { theta: 150_000.0, scaling, ..Rope::default() };
        let frequencies = gpt_oss.frequencies(64).unwrap();
        for (pair, want) in [(8, 0.050813274815461475), (13, 0.0038603593171920685), (18, 3.8308812373753384e-5)] {
            assert!((frequencies[pair] / want - 1.0).abs() < 1e-12, "{pair}: {} is not {want}", frequencies[pair]);
        }
    }

    #[test]
    fn turns_are_right_to_the_last_bit() {
        for (radians, turns) in [
            (1.0, 0x28be_60db_9391_054a), // of 1/2π, whose next bit is 0
            (-1.0, 0xd741_9f24_6c6e_fab6),
            (0.5, 0x145f_306d_c9c8_82a5),
            (6.0, 0xf476_4525_7566_1fbf),
            (2f64.powi(-60), 3), // 2.546
            (-2f64.powi(-60), 3u64.wrapping_neg()),
            (f64::MIN_POSITIVE / 4.0, 0),
            (0.0, 0),
        ] {
            assert_eq!(turns_of(radians), turns, "{radians}");
        }
    }

    #[test]
    fn turns_lie_in_fours() {
        let rope = Rope { theta: 16.0, ..Rope::default() };
        let turns: Vec<u64> = rope.frequencies(12).unwrap().into_iter().map(turns_of).collect();
        let (high, low): (Vec<u32>, Vec<u32>) = turns.iter().map(|turns| ((turns >> 32) as u32, *turns as u32)).unzip();
        let fours = [&high[..4], &low[..4], &high[4..], &[0, 0], &low[4..], &[0, 0]];
        assert_eq!(rope.turns(12).unwrap(), fours.concat());
    }

    #[test]
    fn the_oracle_turns_and_keeps_lengths() {
        let rope = Rope::default();
        assert_eq!(rope.apply(&[1.0, 2.0, 3.0, 4.0], 0).unwrap(), [1.0, 2.0, 3.0, 4.0]);
        let turned = rope.apply(&[1.0, 0.0, 0.0, 0.0], 2).unwrap();
        assert!((turned[0] - 2f64.cos()).abs() < 1e-12 && (turned[2] - 2f64.sin()).abs() < 1e-12, "{turned:?}");
        let interleaved = Rope { pairs: RopePairs::Interleaved, dim: Some(2), ..Rope::default() };
        let turned = interleaved.apply(&[0.0, 1.0, 5.0], 1).unwrap();
        assert!((turned[0] + 1f64.sin()).abs() < 1e-12 && (turned[1] - 1f64.cos()).abs() < 1e-12 && turned[2] == 5.0);
        // (2³¹ − 1) mod 2π, from 40 digits of π.
        let far = rope.apply(&[1.0, 0.0], i32::MAX as u32).unwrap();
        assert!((far[0] - -0.688_836_691_8).abs() < 1e-9, "{far:?}");
    }

    #[test]
    fn bad_ropes_are_refused() {
        let refused = |rope: Rope| rope.frequencies(8).map_err(|error| error.to_string()).unwrap_err();
        let plain = Rope::default;
        for (rope, message) in [
            (Rope { dim: Some(3), ..plain() }, "rope dim: expected an even number up to the head dim, 8, got 3"),
            (Rope { dim: Some(10), ..plain() }, "rope dim: expected an even number up to the head dim, 8, got 10"),
            (Rope { theta: f64::NAN, ..plain() }, "rope theta: expected a number above 1, got NaN"),
            (
                Rope { scaling: RopeScaling::Linear { factor: 0.5 }, ..plain() },
                "rope factor: expected a number from 1 up, got 0.5",
            ),
            (
                Rope { scaling: RopeScaling::Frequencies { radians: vec![1.0], attention_factor: 1.0 }, ..plain() },
                "rope frequencies: expected one for each of 4 pairs, got 1",
            ),
        ] {
            assert_eq!(refused(rope), message);
        }
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 0 };
        assert_eq!(refused(Rope { scaling, ..plain() }), "rope original_max_position: expected at least 1, got 0");
        let scaling = RopeScaling::Frequencies { radians: vec![1.0; 4], attention_factor: 1e39 };
        let error = Rope { scaling, ..plain() }.attention_factor().unwrap_err().to_string();
        assert!(error.starts_with("rope attention_factor: expected a number that f32 holds"), "{error}");
    }
}
