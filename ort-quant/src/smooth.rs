//! SmoothQuant: outliers of the inputs of products move into the weights.
//!
//! Channel j of the input is divided by `s_j`, and row j of the weight multiplied by it, so that
//! the product stays the same. See "SmoothQuant: Accurate and Efficient Post-Training Quantization
//! for Large Language Models", arXiv:2211.10438.

/// How much of the outliers moves into the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Smooth {
    /// What gives the least noise, as estimated from the statistics of inputs and weights. An input
    /// that gains little stays as it is.
    Auto,
    /// This share, from 0 to 1; 0.5 is that of the paper.
    Alpha(f32),
}

/// The shares that [`Smooth::Auto`] tries.
const GRID: [f32; 7] = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];

/// The noise power, relative to that without smoothing, from which an input stays as it is: the
/// division takes time in each run.
const WORTH_A_NODE: f64 = 0.8;

/// The bounds of a scale.
const SCALES: (f64, f64) = (1e-5, 1e5);

/// The codes of an input and of a symmetric weight.
const INPUT_STEPS: f64 = 255.0;
const WEIGHT_STEPS: f32 = 254.0;

/// A weight of `rows` x `columns` elements in row-major order.
pub(crate) struct Matrix<'m> {
    pub(crate) elements: &'m dyn Fn(usize, &mut [f32]),
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Whether the channels of the input are its columns, not its rows.
    pub(crate) is_transposed: bool,
}

impl Matrix<'_> {
    /// Calls a function with each element: the channel of the input, that of the output, and the
    /// element.
    fn each(&self, mut look: impl FnMut(usize, usize, f32)) {
        let mut values = vec![0.0; self.columns];
        for row in 0..self.rows {
            (self.elements)(row * self.columns, &mut values);
            for (column, value) in values.iter().enumerate() {
                let (input, output) = if self.is_transposed { (column, row) } else { (row, column) };
                look(input, output, *value);
            }
        }
    }

    fn outputs(&self) -> usize {
        if self.is_transposed { self.rows } else { self.columns }
    }
}

/// The rows of all weights that read an input.
pub(crate) struct Rows {
    /// The largest magnitude of each.
    maxima: Vec<f32>,
    /// The sum of the squares of each.
    squares: Vec<f64>,
}

impl Rows {
    pub(crate) fn new(channels: usize) -> Rows {
        Rows { maxima: vec![0.0; channels], squares: vec![0.0; channels] }
    }

    pub(crate) fn add(&mut self, matrix: &Matrix<'_>) {
        matrix.each(|input, _, value| {
            if let (Some(most), Some(squares)) = (self.maxima.get_mut(input), self.squares.get_mut(input)) {
                *most = most.max(value.abs());
                *squares += f64::from(value) * f64::from(value);
            }
        });
    }
}

/// What is known of an input.
pub(crate) struct Input {
    pub(crate) ranges: Vec<(f32, f32)>,
    pub(crate) mean_squares: Vec<f64>,
}

/// The scales that one input may have, and the noise of each.
pub(crate) struct Candidates {
    /// The first has all scales 1.
    scales: Vec<Vec<f32>>,
    noises: Vec<f64>,
    input: Input,
    is_fixed: bool,
}

impl Candidates {
    pub(crate) fn new(smooth: Smooth, input: Input, rows: &Rows) -> Candidates {
        let (shares, is_fixed) = match &smooth {
            Smooth::Auto => (&GRID[..], false),
            Smooth::Alpha(alpha) => (std::slice::from_ref(alpha), true),
        };
        let mut scales = vec![vec![1.0; input.ranges.len()]];
        scales.extend(shares.iter().map(|alpha| scales_of(f64::from(*alpha), &input.ranges, &rows.maxima)));
        let noises = scales.iter().map(|scales| input_noise(&input, scales, &rows.squares)).collect();
        Candidates { scales, noises, input, is_fixed }
    }

    /// Adds the noise of the codes of a weight. `per_tensor` if it has one scale.
    pub(crate) fn add(&mut self, matrix: &Matrix<'_>, per_tensor: bool) {
        if self.is_fixed {
            return;
        }
        let mut maxima = vec![vec![0.0_f32; matrix.outputs()]; self.scales.len()];
        matrix.each(|input, output, value| {
            for (scales, maxima) in self.scales.iter().zip(&mut maxima) {
                if let (Some(scale), Some(most)) = (scales.get(input), maxima.get_mut(output)) {
                    *most = most.max((value * scale).abs());
                }
            }
        });
        for ((noise, scales), maxima) in self.noises.iter_mut().zip(&self.scales).zip(maxima) {
            let greatest = maxima.iter().copied().fold(0.0, f32::max);
            let of = |most: f32| if per_tensor { greatest } else { most };
            let steps: Vec<f32> = maxima.iter().map(|most| 2.0 * of(*most) / WEIGHT_STEPS).collect();
            let pairs = self.input.mean_squares.iter().zip(scales);
            let powers: Vec<f64> = pairs.map(|(square, scale)| square / f64::from(*scale).powi(2)).collect();
            // The rounding itself: of large scales, most elements are below a step.
            matrix.each(|input, output, value| {
                if let (Some(scale), Some(power), Some(step)) =
                    (scales.get(input), powers.get(input), steps.get(output))
                    && *step > 0.0
                {
                    let error = f64::from(value * scale - nearest(value * scale / step) * step);
                    *noise += power * error * error;
                }
            });
        }
    }

    /// The best scales; `None` if the input is better left as it is. `is_free` says that the
    /// division takes no node.
    pub(crate) fn best(self, is_free: bool) -> Option<Vec<f32>> {
        let Candidates { scales, noises, is_fixed, .. } = self;
        let unscaled = noises.first().copied().unwrap_or_default();
        let smoothed = scales.into_iter().zip(noises).skip(1);
        let (scales, noise) = smoothed.reduce(|best, next| if next.1 < best.1 { next } else { best })?;
        let bound = if is_free { unscaled } else { WORTH_A_NODE * unscaled };
        (is_fixed || noise < bound).then_some(scales)
    }
}

/// `max|x_j|^alpha / max|W_j|^(1 - alpha)`. A channel or row of zeros has scale 1.
fn scales_of(alpha: f64, ranges: &[(f32, f32)], maxima: &[f32]) -> Vec<f32> {
    let scale = |((low, high), row): (&(f32, f32), &f32)| {
        let most = f64::from(high.max(-low));
        if most == 0.0 || *row == 0.0 {
            return 1.0;
        }
        (most.powf(alpha) / f64::from(*row).powf(1.0 - alpha)).clamp(SCALES.0, SCALES.1) as f32
    };
    ranges.iter().zip(maxima).map(scale).collect()
}

/// The noise that the codes of the input bring to the products.
fn input_noise(input: &Input, scales: &[f32], squares: &[f64]) -> f64 {
    let (mut low, mut high, mut power) = (0.0_f64, 0.0_f64, 0.0);
    for ((channel_low, channel_high), scale) in input.ranges.iter().zip(scales) {
        low = low.min(f64::from(*channel_low) / f64::from(*scale));
        high = high.max(f64::from(*channel_high) / f64::from(*scale));
    }
    let rounding = uniform_noise((high - low) / INPUT_STEPS);
    for ((square, scale), squares) in input.mean_squares.iter().zip(scales).zip(squares) {
        let scale = f64::from(*scale).powi(2);
        // A channel that becomes zero loses no more than what it is.
        power += squares * scale * rounding.min(square / scale);
    }
    power
}

/// The nearest integer of a number below 2^22, by what an addition rounds away.
fn nearest(value: f32) -> f32 {
    const PLACES: f32 = 12_582_912.0;
    (value + PLACES) - PLACES
}

/// The mean square of the rounding to multiples of a step.
fn uniform_noise(step: f64) -> f64 {
    step * step / 12.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix<'m>(elements: &'m dyn Fn(usize, &mut [f32]), rows: usize, columns: usize) -> Matrix<'m> {
        Matrix { elements, rows, columns, is_transposed: false }
    }

    /// The values of the definition, by NumPy:
    /// `np.abs(x).max(0) ** a / np.abs(w).max(1) ** (1 - a)`.
    #[test]
    fn scales_are_those_of_the_definition() {
        let ranges = [(-1.0, 0.5), (-20.0, 100.0), (0.0, 0.0), (0.0, 4.0)];
        let cases = [
            (0.5, [0.707_106_77, 14.142_136, 1.0, 2.828_427]),
            (0.8, [0.870_550_6, 45.730_505, 1.0, 3.482_202_3]),
            (1.0, [1.0, 100.0, 1.0, 4.0]),
            (0.0, [0.5, 2.0, 1.0, 2.0]),
        ];
        let weights = [2.0_f32, -0.5, 3.0, 0.5];
        let mut rows = Rows::new(4);
        let read = |start: usize, to: &mut [f32]| to.copy_from_slice(&weights[start..start + to.len()]);
        rows.add(&matrix(&read, 4, 1));
        assert_eq!(rows.maxima, [2.0, 0.5, 3.0, 0.5]);
        for (alpha, expected) in cases {
            for (found, expected) in scales_of(alpha, &ranges, &rows.maxima).iter().zip(expected) {
                assert!((found - expected).abs() < 1e-5 * expected, "{alpha}: {found} {expected}");
            }
        }
    }

    #[test]
    fn an_outlier_is_smoothed_and_even_channels_are_not() {
        let weights: Vec<f32> = (0..64_u16).map(|step| f32::from(step * 37 % 64) / 32.0 - 1.0).collect();
        let read = |start: usize, to: &mut [f32]| to.copy_from_slice(&weights[start..start + to.len()]);
        let best = |ranges: Vec<(f32, f32)>, is_free: bool| {
            let mut rows = Rows::new(8);
            rows.add(&matrix(&read, 8, 8));
            let mean_squares = ranges.iter().map(|(_, high)| f64::from(*high).powi(2) / 3.0).collect();
            let mut candidates = Candidates::new(Smooth::Auto, Input { ranges, mean_squares }, &rows);
            candidates.add(&matrix(&read, 8, 8), false);
            candidates.best(is_free)
        };
        assert_eq!(best(vec![(-1.0, 1.0); 8], false), None);
        let mut ranges = vec![(-1.0, 1.0); 8];
        ranges[3] = (-60.0, 60.0);
        let scales = best(ranges, false).unwrap();
        let others = scales.iter().enumerate().filter(|(channel, _)| *channel != 3).map(|(_, scale)| *scale);
        assert!(scales[3] > 4.0 * others.fold(0.0, f32::max), "{scales:?}");
    }

    #[test]
    fn a_transposed_weight_has_the_same_rows() {
        let weights = [1.0_f32, -2.0, 3.0, 4.0, 5.0, -6.0];
        let read = |start: usize, to: &mut [f32]| to.copy_from_slice(&weights[start..start + to.len()]);
        let mut rows = Rows::new(3);
        rows.add(&Matrix { is_transposed: true, ..matrix(&read, 2, 3) });
        assert_eq!((rows.maxima, rows.squares), (vec![4.0, 5.0, 6.0], vec![17.0, 29.0, 45.0]));
    }
}
