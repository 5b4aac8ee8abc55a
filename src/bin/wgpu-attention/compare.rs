//! Compares results with expected values.

use std::fmt;

use crate::tensor::FileType;
use crate::terminal::digits;

/// How far results are from expected values.
pub struct Comparison {
    /// Largest difference; infinite where only one of two values is a number.
    pub error: f64,
    /// Largest allowed difference.
    pub tolerance: f64,
    wrong: usize,
    count: usize,
    worst: Option<(usize, f32, f32)>,
}

/// Compares element by element: NaN belongs to NaN, and an infinity to the same infinity.
pub fn compare(got: &[f32], want: &[f32], tolerance: f64) -> Comparison {
    let mut comparison = Comparison { error: 0.0, tolerance, wrong: 0, count: want.len(), worst: None };
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = match (f64::from(got) - f64::from(want)).abs() {
            _ if got == want || (got.is_nan() && want.is_nan()) => 0.0,
            error if error.is_nan() => f64::INFINITY,
            error => error,
        };
        comparison.wrong += usize::from(error > tolerance);
        if error > comparison.error {
            comparison.error = error;
            comparison.worst = Some((i, got, want));
        }
    }
    comparison
}

/// The default tolerance for values as large as `largest`, when the least precise type that takes part is `file_type`:
/// four units in the last place of 16-bit types; for f32, what exponentials of large scores lose.
pub fn tolerance(file_type: FileType, largest: f64) -> f64 {
    let relative = match file_type {
        FileType::BF16 => 4.0 / 128.0,
        FileType::F16 => 4.0 / 1024.0,
        _ => 1e-4,
    };
    relative * largest
}

/// The largest finite magnitude.
pub fn largest(values: &[f32]) -> f64 {
    values.iter().filter(|x| x.is_finite()).fold(0.0, |most, x| x.abs().max(most)).into()
}

impl Comparison {
    pub fn passed(&self) -> bool {
        self.wrong == 0
    }

    /// Which values are off, in words; empty if none is.
    pub fn details(&self) -> String {
        match self.worst {
            Some((at, got, want)) if !self.passed() => {
                let (wrong, count) = (self.wrong, self.count);
                format!("; {wrong} of {count} values are off, the worst is number {at}: {got}, expected {want}")
            }
            _ => String::new(),
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (error, tolerance) = (digits(self.error), digits(self.tolerance));
        write!(f, "largest error {error}, tolerance {tolerance}")
    }
}
