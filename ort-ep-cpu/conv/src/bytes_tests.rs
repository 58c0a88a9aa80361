//! Tests of quantized convolution against sums in `i64`, on every instruction set.

use super::bytes::{
    ConvTarget, PackedFilters, QuantizedConv, pack_filters, packed_filters_len, quantized_conv_workspace_len,
};
use ort_cpu_gemm::integer::Addend;
use ort_cpu_gemm::{Activation, Cpu, Window};
use ort_cpu_vector::simd::Isa;

pub(super) fn random_bytes(count: usize, seed: usize) -> Vec<u8> {
    (0..count).map(|at| ((at + seed).wrapping_mul(2_654_435_761) >> 7) as u8).collect()
}

fn number(value: u8, signed: bool) -> i64 {
    if signed { i64::from(value as i8) } else { i64::from(value) }
}

/// Checks quantized values against the sums that they were made from, each times a factor.
pub(super) fn expect_quantized(
    found: &[u8],
    (sums, factor): (&[i32], impl Fn(usize) -> f32),
    (zero, signed): (i32, bool),
    what: &str,
) {
    let (least, greatest) = if signed { (-128.0, 127.0) } else { (0.0, 255.0) };
    for (at, value) in found.iter().enumerate() {
        let whole = f64::from(sums[at] as f32 * factor(at)).round_ties_even();
        let expected = (whole + f64::from(zero)).clamp(least, greatest) as i64;
        assert_eq!(number(*value, signed), expected, "{what} at {at}");
    }
}

/// Quantized values and their zero points: one for an image, one or one per filter for filters.
#[derive(Clone, Copy)]
pub(super) struct Quantized<'a> {
    pub(super) values: &'a [u8],
    pub(super) signed: bool,
    pub(super) zeros: &'a [i32],
}

/// A convolution: batch, groups, channels and filters of a group, and sizes along both axes.
pub(super) struct Case {
    pub(super) counts: [usize; 4],
    pub(super) input: [usize; 2],
    pub(super) kernel: [usize; 2],
    pub(super) stride: [usize; 2],
    pub(super) dilation: [usize; 2],
    pub(super) pad: [usize; 2],
}

pub(super) const PLAIN: Case = Case {
    counts: [1, 1, 4, 8],
    input: [5, 6],
    kernel: [1, 1],
    stride: [1, 1],
    dilation: [1, 1],
    pad: [0, 0],
};

impl Case {
    pub(super) fn window(&self) -> Window {
        let output = [0, 1].map(|axis| {
            let reach = (self.kernel[axis] - 1) * self.dilation[axis] + 1;
            (self.input[axis] + 2 * self.pad[axis] - reach) / self.stride[axis] + 1
        });
        let along = |first: usize, [y, x]: [usize; 2]| [first, y, x];
        Window {
            input: along(1, self.input),
            kernel: along(1, self.kernel),
            stride: along(1, self.stride),
            dilation: along(1, self.dilation),
            pad: along(0, self.pad),
            output: along(1, output),
        }
    }

    /// All sums, with a zero point for the image and one per filter.
    pub(super) fn sums(&self, image: Quantized<'_>, filters: Quantized<'_>, bias: &[i32]) -> Vec<i32> {
        let ([batch, groups, channels, of_group], window) = (self.counts, self.window());
        let ([height, width], [out_height, out_width]) = (self.input, [window.output[1], window.output[2]]);
        let positions = window.kernel_len();
        let mut sums = Vec::new();
        for unit in 0..batch * groups * of_group {
            let filter = unit % (groups * of_group);
            let group = unit / of_group;
            for place in 0..out_height * out_width {
                let mut sum = i64::from(bias[filter]);
                for tap in 0..channels * positions {
                    let (channel, position) = (tap / positions, tap % positions);
                    let at = |axis: usize, out: usize, position: usize| {
                        (out * self.stride[axis] + position * self.dilation[axis]).checked_sub(self.pad[axis])
                    };
                    let y = at(0, place / out_width, position / self.kernel[1]).filter(|y| *y < height);
                    let x = at(1, place % out_width, position % self.kernel[1]).filter(|x| *x < width);
                    if let (Some(y), Some(x)) = (y, x) {
                        let value = image.values[((group * channels + channel) * height + y) * width + x];
                        let weight = filters.values[filter * channels * positions + tap];
                        let zero = filters.zeros.get(filter).unwrap_or(&filters.zeros[0]);
                        sum += (number(value, image.signed) - i64::from(image.zeros[0]))
                            * (number(weight, filters.signed) - i64::from(*zero));
                    }
                }
                sums.push(sum as i32);
            }
        }
        sums
    }

    /// Checks floats against the sums that they were made from.
    fn check_numbers(
        &self,
        (conv, cpu): (&QuantizedConv<'_>, Cpu),
        sums: &[i32],
        factors: &[f32],
        workspace: &mut [u8],
    ) {
        let what = format!("{cpu:?} {:?} {:?}", self.window(), self.counts);
        let bias: Vec<f32> = (0..factors.len()).map(|filter| filter as f32 - 1.5).collect();
        let others: Vec<f32> = (0..sums.len()).map(|at| (at % 17) as f32 * 0.25 - 2.0).collect();
        for (bias, addend, activation) in [
            (&bias[..], Addend::None, Some(Activation::Relu)),
            (&[], Addend::Matrix(&others), None),
            (&bias, Addend::Matrix(&others), Some(Activation::Abs)),
            (&bias, Addend::Old, None),
        ] {
            let is_old = matches!(addend, Addend::Old);
            let mut found = if is_old { others.clone() } else { vec![f32::NAN; sums.len()] };
            let target = ConvTarget::Numbers { values: &mut found, factors, bias, addend, activation };
            let outcome = conv.run(cpu, target, workspace);
            if is_old && self.counts[2] == 1 {
                assert!(outcome.is_err(), "{what}");
                continue;
            }
            outcome.unwrap();
            for (at, number) in found.iter().enumerate() {
                let filter = at / self.window().output_len() % factors.len();
                let value = sums[at] as f32 * factors[filter] + bias.get(filter).copied().unwrap_or(0.0);
                let sum = value + if matches!(addend, Addend::None) { 0.0 } else { others[at] };
                let expected = match activation {
                    None => sum,
                    Some(Activation::Relu) => sum.max(0.0),
                    Some(_) => sum.abs(),
                };
                assert_eq!(*number, expected, "{what} at {at}: {addend:?} {activation:?}");
            }
        }
    }

    fn check(&self, signed: [bool; 2], image_zero: i32, filter_zeros: &[i32]) {
        let ([batch, groups, channels, of_group], window) = (self.counts, self.window());
        let (filters, positions) = (groups * of_group, window.kernel_len());
        let image = random_bytes(batch * groups * channels * window.input_len(), 5);
        let weights = random_bytes(filters * channels * positions, 99);
        let bias: Vec<i32> = (0..filters as i32).map(|filter| filter * 1001 - 700).collect();
        let of_image = Quantized { values: &image, signed: signed[0], zeros: &[image_zero] };
        let of_filters = Quantized { values: &weights, signed: signed[1], zeros: filter_zeros };
        let sums = self.sums(of_image, of_filters, &bias);
        let shape = [filters, channels, positions];
        let mut packed = vec![0_u32; packed_filters_len(shape).div_ceil(4)];
        let packed: &mut [u8] = bytemuck::cast_slice_mut(&mut packed);
        pack_filters((&weights, !signed[1]), shape, packed).unwrap();
        let conv = QuantizedConv {
            image: (&image, signed[0]),
            image_zero,
            batch,
            groups,
            window,
            filters: PackedFilters::new((packed, !signed[1]), shape).unwrap(),
            filter_zeros,
            bias: &bias,
        };
        let factors: Vec<f32> = (0..filters).map(|filter| 0.002 / (1 + filter) as f32).collect();
        for isa in Isa::available() {
            for threads in [1, 2] {
                let cpu = Cpu { isa, ..Cpu::with_threads(threads) };
                let what =
                    format!("{isa:?} {threads} {window:?} {:?} {signed:?} {filter_zeros:?}", self.counts);
                let len = quantized_conv_workspace_len(cpu, window, shape).unwrap();
                let mut workspace = vec![0xA5A5_A5A5_u32; len.div_ceil(4)];
                let workspace: &mut [u8] = bytemuck::cast_slice_mut(&mut workspace);
                let mut found = vec![1; sums.len()];
                conv.run(cpu, ConvTarget::Accumulators(&mut found), workspace).unwrap();
                assert_eq!(found, sums, "{what}");
                self.check_numbers((&conv, cpu), &sums, &factors, workspace);
                for (zero, signed) in [(7, false), (-3, true)] {
                    let mut found = vec![1; sums.len()];
                    let target =
                        ConvTarget::Quantized { values: &mut found, factors: &factors, zero, signed };
                    conv.run(cpu, target, workspace).unwrap();
                    let factor = |at: usize| factors[at / window.output_len() % filters];
                    expect_quantized(&found, (&sums, factor), (zero, signed), &what);
                }
            }
        }
    }
}

#[test]
fn convolutions_of_many_shapes() {
    for case in [
        PLAIN,
        Case { counts: [2, 1, 7, 9], input: [7, 7], ..PLAIN },
        Case { counts: [1, 1, 16, 20], input: [14, 15], kernel: [3, 3], pad: [1, 1], ..PLAIN },
        // The columns end with a single vector, in lines.
        Case { counts: [1, 1, 8, 12], input: [7, 7], kernel: [3, 3], pad: [1, 1], ..PLAIN },
        Case { counts: [1, 1, 3, 5], input: [23, 21], kernel: [7, 7], stride: [2, 2], pad: [3, 3], ..PLAIN },
        Case { counts: [1, 1, 8, 12], input: [9, 11], stride: [2, 2], ..PLAIN },
        Case { counts: [1, 1, 5, 3], input: [12, 40], kernel: [3, 2], stride: [1, 3], pad: [0, 1], ..PLAIN },
        Case {
            counts: [1, 1, 4, 3],
            input: [13, 14],
            kernel: [3, 3],
            dilation: [2, 3],
            pad: [2, 1],
            ..PLAIN
        },
        Case { counts: [2, 3, 2, 4], input: [6, 9], kernel: [2, 3], pad: [1, 1], ..PLAIN },
        Case { counts: [1, 1, 2, 3], input: [1, 50], kernel: [1, 5], pad: [0, 2], ..PLAIN },
        // One channel per group.
        Case { counts: [2, 5, 1, 1], input: [9, 20], kernel: [3, 3], pad: [1, 1], ..PLAIN },
        Case { counts: [1, 5, 1, 2], input: [15, 37], kernel: [3, 3], stride: [2, 2], pad: [1, 1], ..PLAIN },
        Case { counts: [1, 3, 1, 1], input: [10, 18], kernel: [5, 5], stride: [2, 1], pad: [2, 2], ..PLAIN },
        Case {
            counts: [1, 2, 1, 1],
            input: [12, 12],
            kernel: [3, 3],
            dilation: [2, 2],
            pad: [2, 2],
            ..PLAIN
        },
        Case { counts: [1, 2, 1, 1], input: [12, 9], kernel: [3, 1], dilation: [2, 2], pad: [2, 0], ..PLAIN },
        Case { counts: [1, 2, 1, 1], input: [9, 16], kernel: [2, 6], stride: [1, 3], pad: [0, 2], ..PLAIN },
        Case { counts: [1, 2, 1, 1], input: [4, 3], kernel: [3, 3], stride: [1, 2], pad: [2, 2], ..PLAIN },
    ] {
        let filters = case.counts[1] * case.counts[3];
        case.check([false, true], 0, &[0]);
        for signed in [[false, false], [false, true], [true, false], [true, true]] {
            let first = |side: usize| if signed[side] { -128 } else { 0 };
            let of_filters: Vec<i32> = (0..filters as i32).map(|at| first(1) + at * 91 % 256).collect();
            case.check(signed, first(0) + 255, &of_filters);
            case.check(signed, first(0) + 77, &[first(1) + 128]);
        }
    }
}

#[test]
fn workspaces_of_hostile_sizes_saturate() {
    let cpu = Cpu::with_threads(1);
    let window = Window { output: [1, 1 << 40, 1 << 40], ..PLAIN.window() };
    for shape in [[1, 1, 1], [usize::MAX, 1, 1]] {
        assert_eq!(quantized_conv_workspace_len(cpu, window, shape).unwrap(), usize::MAX, "{shape:?}");
    }
}
