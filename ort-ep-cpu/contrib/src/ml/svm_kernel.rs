//! SVM kernel functions, each of a row of features and many support vectors.

use ort_core::ir::Attributes;
use ort_core::{Result, ensure, error};

use ort_cpu_threads::interrupt::spend;

/// A kernel function and its parameters.
enum SvmKernel {
    Linear,
    Poly { gamma: f64, coef0: f64, degree: f64 },
    Rbf { gamma: f64 },
    Sigmoid { gamma: f64, coef0: f64 },
}

/// Vectors and the kernel function that compares rows with them.
pub(super) struct Vectors {
    kernel: SvmKernel,
    /// The vectors, row-major.
    elements: Vec<f32>,
    pub(super) count: usize,
    pub(super) features: usize,
}

impl Vectors {
    /// Reads `count` support vectors and their kernel function from the attributes.
    pub(super) fn support(attrs: &Attributes, count: usize) -> Result<Vectors> {
        let [gamma, coef0, degree] = match *attrs.find_floats("kernel_params").unwrap_or(&[]) {
            [] => [0.0; 3],
            [gamma, coef0, degree] => [gamma, coef0, degree].map(f64::from),
            ref others => {
                return Err(error!(
                    InvalidGraph,
                    "'kernel_params' has {} elements, expected gamma, coef0 and degree",
                    others.len()
                ));
            }
        };
        let kernel = match attrs.string("kernel_type")? {
            "LINEAR" => SvmKernel::Linear,
            "POLY" => SvmKernel::Poly { gamma, coef0, degree },
            "RBF" => SvmKernel::Rbf { gamma },
            "SIGMOID" => SvmKernel::Sigmoid { gamma, coef0 },
            other => {
                return Err(error!(
                    InvalidGraph,
                    "kernel_type is '{other}', expected LINEAR, POLY, RBF or SIGMOID"
                ));
            }
        };
        Vectors::new(kernel, attrs.find_floats("support_vectors").unwrap_or(&[]), count, "support_vectors")
    }

    /// Wraps the coefficients of `count` linear functions.
    pub(super) fn linear(coefficients: &[f32], count: usize) -> Result<Vectors> {
        Vectors::new(SvmKernel::Linear, coefficients, count, "coefficients")
    }

    fn new(kernel: SvmKernel, elements: &[f32], count: usize, name: &str) -> Result<Vectors> {
        let given = elements.len();
        ensure!(
            // `checked_rem` is none for a count of 0, so the division below is safe.
            given > 0 && given.checked_rem(count) == Some(0),
            InvalidGraph,
            "the {given} elements of '{name}' do not make {count} vectors of equal length"
        );
        Ok(Vectors { kernel, elements: elements.to_vec(), count, features: given / count })
    }

    /// Returns the number of elements of all vectors.
    pub(super) fn len(&self) -> usize {
        self.elements.len()
    }

    /// Returns the `f64` elements of scratch for one row's features and kernel values.
    pub(super) fn scratch_len(&self) -> usize {
        self.features.saturating_add(self.count)
    }

    /// Evaluates the kernel function on a row and each vector.
    pub(super) fn kernels(&self, row: &[f64], kernels: &mut [f64]) {
        // `with_rows` checked that the rows are as long as the vectors.
        for (vector, to) in self.elements.chunks_exact(self.features).zip(kernels) {
            spend(8 + self.features);
            *to = match self.kernel {
                SvmKernel::Linear => product(row, vector),
                SvmKernel::Poly { gamma, coef0, degree } => {
                    power(gamma * product(row, vector) + coef0, degree)
                }
                SvmKernel::Sigmoid { gamma, coef0 } => (gamma * product(row, vector) + coef0).tanh(),
                // libsvm's `exp(-gamma * |a - b|^2)`, by differences, because the expanded form
                // cancels.
                SvmKernel::Rbf { gamma } => (-gamma * sum(row, vector, |a, b| (a - b) * (a - b))).exp(),
            };
        }
    }
}

fn product(row: &[f64], vector: &[f32]) -> f64 {
    sum(row, vector, |a, b| a * b)
}

/// Raises to a power. Exponents are mostly small integers, which `powi` handles faster.
fn power(base: f64, exponent: f64) -> f64 {
    // The cast saturates and maps NaN to 0. Neither result equals the exponent, so `powf` takes
    // both.
    let whole = exponent as i32;
    if f64::from(whole) == exponent { base.powi(whole) } else { base.powf(exponent) }
}

/// Sums a term over the features, in eight independent accumulators.
fn sum(row: &[f64], vector: &[f32], term: impl Fn(f64, f64) -> f64) -> f64 {
    // A fixed number of accumulators, so that the bits are the same on every CPU.
    let (row, last) = row.as_chunks::<8>();
    let (vector, last_of_vector) = vector.as_chunks::<8>();
    let mut accumulators = [0.0; 8];
    for (row, vector) in row.iter().zip(vector) {
        for (sum, (a, b)) in accumulators.iter_mut().zip(row.iter().zip(vector)) {
            *sum += term(*a, f64::from(*b));
        }
    }
    let rest: f64 = last.iter().zip(last_of_vector).map(|(a, b)| term(*a, f64::from(*b))).sum();
    accumulators.iter().sum::<f64>() + rest
}
