//! Depthwise convolution of several channels at once, one in each lane of a vector.
//!
//! The planes are interleaved, so a vector holds one position of all channels. Every load is
//! aligned and no lane is idle, whatever the width. Large kernels and small planes repay the cost
//! of interleaving and of splitting the result.

use crate::planes::{HardSwish, Silu};
use crate::simd::stencil::{ChannelTaps, channel_taps};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_vector::activation::Activation;
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::slices::UnaryOp;
use ort_cpu_vector::simd::{Isa, MAX_LANES, Simd, SimdOp, dispatch};
use ort_cpu_vector::transpose::{Strided, strided};
use ort_cpu_vector::window::Window;

/// The plan for blocks of channels of one convolution.
#[derive(Debug, Clone)]
pub struct DepthwiseBlockPlan {
    window: Window,
    isa: Isa,
    lanes: usize,
    /// Rows and columns of the padded plane.
    padded: [usize; 2],
    /// The offset of each tap from the position of output 0.
    offsets: Vec<usize>,
}

/// The operands of a block of channels.
#[derive(Debug, Clone, Copy)]
pub struct ChannelBlock<'a> {
    /// The input planes, one after another.
    pub planes: &'a [f32],
    /// The kernels, one after another.
    pub weights: &'a [f32],
    /// One value for each channel; none for no bias.
    pub bias: Option<&'a [f32]>,
}

/// The parts of the scratch.
struct Areas<'a> {
    dense: &'a mut [f32],
    padded: &'a mut [f32],
    results: &'a mut [f32],
    weights: &'a mut [f32],
    bias: &'a mut [f32],
}

impl DepthwiseBlockPlan {
    /// Plans a convolution for an instruction set.
    pub fn new(isa: Isa, window: Window) -> DepthwiseBlockPlan {
        let isa = isa.min(Isa::widest());
        let lanes = match isa {
            Isa::Avx512 => 16,
            Isa::Avx2 => 8,
            _ => 4,
        };
        let Window { input, kernel, dilations, pads, .. } = window;
        let padded = [0, 1].map(|axis| window.extent(axis).max(pads[axis] + input[axis]));
        let taps = (0..kernel[0]).flat_map(|ky| (0..kernel[1]).map(move |kx| (ky, kx)));
        let offsets = taps.map(|(ky, kx)| ky * dilations[0] * padded[1] + kx * dilations[1]).collect();
        DepthwiseBlockPlan { window, isa, lanes, padded, offsets }
    }

    /// Returns whether this plan is faster for a window, by measurement, if a block has enough
    /// channels. Otherwise use [`DepthwisePlan`](crate::planes::DepthwisePlan).
    pub fn pays(window: &Window) -> bool {
        window.kernel[0] * window.kernel[1] >= 16 || window.output[1] < 24
    }

    /// Returns the most channels of a block. A block with fewer costs as much.
    pub fn channels(&self) -> usize {
        self.lanes
    }

    /// Returns how many f32 of scratch a block needs.
    pub fn scratch_len(&self) -> usize {
        // The slack leaves room to align the first area.
        self.area_lens().iter().sum::<usize>() + MAX_LANES
    }

    fn area_lens(&self) -> [usize; 5] {
        let Window { input, output, .. } = self.window;
        let places = [
            input[0] * input[1],
            self.padded[0] * self.padded[1],
            output[0] * output[1],
            self.offsets.len(),
            1,
        ];
        places.map(|count| count * self.lanes)
    }

    fn areas<'a>(&self, scratch: &'a mut [f32]) -> Areas<'a> {
        // All areas are whole vectors, so aligning the first one aligns them all.
        let skipped = scratch.as_ptr().align_offset(MAX_LANES * size_of::<f32>()).min(MAX_LANES);
        let [dense, padded, results, weights, bias] = self.area_lens();
        let (dense, rest) = scratch[skipped..].split_at_mut(dense);
        let (padded, rest) = rest.split_at_mut(padded);
        let (results, rest) = rest.split_at_mut(results);
        let (weights, rest) = rest.split_at_mut(weights);
        Areas { dense, padded, results, weights, bias: &mut rest[..bias] }
    }

    /// Convolves up to [`channels`](Self::channels) planes. `scratch` holds at least
    /// [`scratch_len`](Self::scratch_len) values of any content.
    ///
    /// # Panics
    /// If a slice's length does not match the window and the number of channels, which `to`
    /// determines.
    pub fn run(&self, block: ChannelBlock<'_>, activation: Activation, to: &mut [f32], scratch: &mut [f32]) {
        let Window { input, output, .. } = self.window;
        let (plane, result, taps) = (input[0] * input[1], output[0] * output[1], self.offsets.len());
        if to.is_empty() || taps == 0 {
            return;
        }
        let channels = to.len() / result;
        assert!(channels <= self.lanes && to.len() == channels * result, "the output planes");
        assert_eq!(block.planes.len(), channels * plane, "the input planes");
        assert_eq!(block.weights.len(), channels * taps, "the kernels");
        let areas = self.areas(scratch);
        self.interleave(channels, plane, block.planes, areas.dense);
        // Weights are interleaved in each call: a block has few, and a packed copy would have to be
        // kept for each lane count.
        self.interleave(channels, taps, block.weights, areas.weights);
        areas.bias.fill(0.0);
        if let Some(bias) = block.bias {
            areas.bias[..channels].copy_from_slice(bias);
        }
        self.pad(areas.dense, areas.padded);
        let Areas { padded, results, weights, bias, .. } = areas;
        // Functions of a few instructions run in registers. Others take a pass over the results
        // while they are in cache.
        let (clamp, rest) = activation.split();
        let values = (&*padded, &*weights, &*bias);
        match rest {
            Some(Unary::HardSwish) => self.convolve(HardSwish, values, results),
            Some(Unary::Silu) => self.convolve(Silu, values, results),
            rest => {
                self.convolve(clamp, values, results);
                if let Some(function) = rest {
                    unary_in_place(self.isa, function, results);
                }
            }
        }
        // Only lanes with a channel are transposed back.
        let back = Strided { rows: result, columns: channels, from_stride: self.lanes, to_stride: result };
        strided(self.isa, &back, results, to);
    }

    /// Computes `to[place][channel] = from[channel][place]`. Lanes without a channel become 0.
    fn interleave(&self, channels: usize, places: usize, from: &[f32], to: &mut [f32]) {
        if channels < self.lanes {
            to.fill(0.0);
        }
        let matrix = Strided { rows: channels, columns: places, from_stride: places, to_stride: self.lanes };
        strided(self.isa, &matrix, from, to);
    }

    /// Copies the interleaved plane, surrounded by zeros.
    fn pad(&self, dense: &[f32], padded: &mut [f32]) {
        let Window { input: [height, width], pads: [top, left], .. } = self.window;
        let (row_len, start) = (self.padded[1] * self.lanes, left * self.lanes);
        let width = width * self.lanes;
        for (y, row) in padded.chunks_exact_mut(row_len).enumerate() {
            match y.checked_sub(top) {
                Some(y) if y < height => {
                    // The padding is written on each call, because scratch may hold anything.
                    row[..start].fill(0.0);
                    row[start..start + width].copy_from_slice(&dense[y * width..][..width]);
                    row[start + width..].fill(0.0);
                }
                _ => row.fill(0.0),
            }
        }
    }

    fn convolve<E: UnaryOp>(
        &self,
        epilogue: E,
        (padded, weights, bias): (&[f32], &[f32], &[f32]),
        results: &mut [f32],
    ) {
        dispatch(self.isa, Convolve { plan: self, epilogue, padded, weights, bias, results });
    }
}

struct Convolve<'a, E> {
    plan: &'a DepthwiseBlockPlan,
    epilogue: E,
    padded: &'a [f32],
    weights: &'a [f32],
    bias: &'a [f32],
    results: &'a mut [f32],
}

impl<E: UnaryOp> SimdOp for Convolve<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Convolve { plan, epilogue, padded, weights, bias, results } = self;
        let Window { output: [_, width], strides: [sy, sx], .. } = plan.window;
        let taps = ChannelTaps { offsets: &plan.offsets, weights, bias };
        for (y, row) in results.chunks_exact_mut(width * S::LANES).enumerate() {
            // Work is counted by rows, so that a deadline stops a large plane.
            spend(width * plan.offsets.len());
            let mut x = 0;
            while x < width {
                let start = (y * sy * plan.padded[1] + x * sx) * S::LANES;
                let input = &padded[start..];
                let out = &mut row[x * S::LANES..];
                // Seven divides the widths of most image networks.
                x += match width - x {
                    1 => {
                        channel_taps::<S, E, 1>(s, input, sx, taps, epilogue, out);
                        1
                    }
                    2..=3 => {
                        channel_taps::<S, E, 2>(s, input, sx, taps, epilogue, out);
                        2
                    }
                    4..=6 => {
                        channel_taps::<S, E, 4>(s, input, sx, taps, epilogue, out);
                        4
                    }
                    _ => {
                        channel_taps::<S, E, 7>(s, input, sx, taps, epilogue, out);
                        7
                    }
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planes::{DepthwisePlan, Planes};

    #[test]
    fn blocks_agree_with_single_planes() {
        let activations = [
            Activation::None,
            Activation::Relu,
            Activation::Unary(Unary::HardSwish),
            Activation::Unary(Unary::Silu),
            Activation::Unary(Unary::Tanh),
        ];
        // input, kernel, strides, dilations, padding on both sides
        let mut cases = vec![
            ([1, 50], [1, 5], [1, 3], [1, 2], [0, 4]),
            ([9, 11], [3, 2], [2, 1], [1, 1], [1, 0]),
            ([12, 10], [3, 3], [3, 2], [2, 2], [3, 0]),
        ];
        for size in [1, 7, 14, 29] {
            for kernel in [3, 5, 7] {
                cases.extend(
                    [1, 2].map(|stride| ([size; 2], [kernel; 2], [stride; 2], [1; 2], [kernel / 2; 2])),
                );
            }
        }
        for isa in Isa::available() {
            for (number, (input, kernel, strides, dilations, pads)) in cases.iter().copied().enumerate() {
                let output = [0, 1].map(|axis| {
                    (input[axis] + 2 * pads[axis] - (kernel[axis] - 1) * dilations[axis] - 1) / strides[axis]
                        + 1
                });
                let window = Window { input, output, kernel, strides, dilations, pads };
                let (block, single) = (DepthwiseBlockPlan::new(isa, window), DepthwisePlan::new(isa, window));
                let (plane, result, taps) =
                    (input[0] * input[1], output[0] * output[1], kernel[0] * kernel[1]);
                let activation = activations[number % activations.len()];
                for channels in [1, block.channels() - 1, block.channels()] {
                    let planes: Vec<f32> = (0..channels * plane).map(|i| (i as f32 * 1.7).sin()).collect();
                    let weights: Vec<f32> = (0..channels * taps).map(|i| (i as f32 * 2.3).cos()).collect();
                    let bias: Vec<f32> = (0..channels).map(|i| i as f32 * 0.1).collect();
                    let mut scratch = vec![f32::NAN; block.scratch_len().max(single.scratch_len())];
                    let mut got = vec![f32::NAN; channels * result];
                    let values = ChannelBlock { planes: &planes, weights: &weights, bias: Some(&bias) };
                    block.run(values, activation, &mut got, &mut scratch);
                    let mut want = vec![f32::NAN; result];
                    for channel in 0..channels {
                        let from = &planes[channel * plane..][..plane];
                        let kernel = &weights[channel * taps..][..taps];
                        let from = Planes {
                            values: from,
                            stride: plane,
                            weights: kernel,
                            bias: Some(&bias[channel..]),
                        };
                        single.run(from, activation, &mut want, &mut scratch);
                        for (got, want) in got[channel * result..].iter().zip(&want) {
                            assert!((got - want).abs() < 2e-5, "{isa:?} {window:?}: {got} {want}");
                        }
                    }
                }
            }
        }
    }
}
