//! Tests of quantized NHWC convolution against sums in `i64`, on every instruction set.

use super::bytes_tests::{Case, PLAIN, Quantized, expect_quantized, random_bytes};
use super::nhwc::{FilterShape, NhwcConv, Requantize, nhwc_conv_workspace_len, unsigned_zero};
use ort_cpu_gemm::Cpu;
use ort_cpu_vector::simd::Isa;

/// Converts NCHW to NHWC: `[batch, channels, places]` becomes `[batch, places, channels]`.
fn channels_last<T: Copy>(planes: &[T], channels: usize, places: usize) -> Vec<T> {
    let image = channels * places;
    let place = |at: usize| at / image * image + at % channels * places + at % image / channels;
    (0..planes.len()).map(|at| planes[place(at)]).collect()
}

fn check(case: &Case, signed: [bool; 2], image_zero: i32, factor: f32) {
    let ([batch, groups, channels, of_group], window) = (case.counts, case.window());
    let (filters, positions) = (groups * of_group, window.kernel_len());
    let image = random_bytes(batch * groups * channels * window.input_len(), 5);
    let weights = random_bytes(filters * channels * positions, 99);
    let bias: Vec<i32> = (0..filters as i32).map(|filter| filter * 1001 - 700).collect();
    let filter_zero = [if signed[1] { 0 } else { 128 }];
    let of_image = Quantized { values: &image, signed: signed[0], zeros: &[image_zero] };
    let of_filters = Quantized { values: &weights, signed: signed[1], zeros: &filter_zero };
    let sums = case.sums(of_image, of_filters, &bias);
    let sums = channels_last(&sums, filters, window.output_len());
    let image = channels_last(&image, groups * channels, window.input_len());
    let shape = FilterShape { filters, channels, groups, kernel: window.kernel };
    for isa in Isa::available() {
        for threads in [1, 2] {
            let cpu = Cpu { isa, ..Cpu::with_threads(threads) };
            let what = format!("{isa:?} {threads} {window:?} {:?} {signed:?} {image_zero}", case.counts);
            let mut packed = vec![0x5A5A_5A5A_u32; shape.packed_len(cpu).div_ceil(4)];
            let packed: &mut [u8] = bytemuck::cast_slice_mut(&mut packed);
            shape.pack(cpu, (&weights, !signed[1]), packed).unwrap();
            let len = nhwc_conv_workspace_len(cpu, window, shape, signed[0]).unwrap();
            let mut workspace = vec![0xA5A5_A5A5_u32; len.div_ceil(4)];
            let workspace: &mut [u8] = bytemuck::cast_slice_mut(&mut workspace);
            let factor = |filter: usize| factor / (1 + filter) as f32;
            let mut terms = vec![0x5A5A_5A5A_u32; shape.requantization_len(cpu).div_ceil(4)];
            let terms: &mut [u8] = bytemuck::cast_slice_mut(&mut terms);
            let by =
                Requantize { image_zero: unsigned_zero(image_zero, signed[0]), bias: &bias, factor: &factor };
            shape.requantize(cpu, packed, &by, terms).unwrap();
            for (zero, of_result) in [(7, false), (0, false), (-3, true)] {
                let conv = NhwcConv {
                    image: (&image, signed[0]),
                    image_zero,
                    batch,
                    window,
                    shape,
                    filters: packed,
                    requantization: terms,
                    zero,
                    signed: of_result,
                };
                let mut found = vec![1; sums.len()];
                conv.run(cpu, &mut found, workspace).unwrap();
                expect_quantized(&found, (&sums, |at: usize| factor(at % filters)), (zero, of_result), &what);
            }
        }
    }
}

#[test]
fn convolutions_of_many_shapes() {
    for case in [
        PLAIN,
        // Each number of vectors in a panel, and rows that leave a remainder.
        Case { counts: [2, 1, 7, 9], input: [7, 7], ..PLAIN },
        Case { counts: [1, 1, 8, 32], input: [7, 7], ..PLAIN },
        Case { counts: [1, 1, 12, 48], input: [5, 7], ..PLAIN },
        Case { counts: [1, 1, 16, 70], input: [3, 11], ..PLAIN },
        Case { counts: [1, 1, 16, 129], input: [14, 15], kernel: [3, 3], pad: [1, 1], ..PLAIN },
        // Padding on only one side of what windows reach, and windows that do not reach the last
        // pixels.
        Case { counts: [1, 1, 3, 5], input: [23, 20], kernel: [7, 7], stride: [2, 2], pad: [3, 3], ..PLAIN },
        Case { counts: [1, 1, 8, 12], input: [9, 12], stride: [2, 2], ..PLAIN },
        Case { counts: [1, 1, 8, 12], input: [9, 12], kernel: [2, 3], stride: [1, 3], ..PLAIN },
        Case {
            counts: [2, 1, 4, 3],
            input: [13, 14],
            kernel: [3, 3],
            dilation: [2, 3],
            pad: [2, 1],
            ..PLAIN
        },
        // One channel per group.
        Case { counts: [2, 5, 1, 1], input: [9, 20], kernel: [3, 3], pad: [1, 1], ..PLAIN },
        Case { counts: [1, 70, 1, 1], input: [7, 5], kernel: [3, 3], pad: [1, 1], ..PLAIN },
        Case { counts: [1, 64, 1, 1], input: [6, 6], kernel: [4, 3], pad: [2, 0], ..PLAIN },
        Case { counts: [1, 97, 1, 1], input: [15, 9], kernel: [3, 3], stride: [2, 2], pad: [1, 1], ..PLAIN },
        Case { counts: [1, 33, 1, 1], input: [10, 11], kernel: [5, 5], stride: [2, 1], pad: [2, 2], ..PLAIN },
        Case { counts: [2, 70, 1, 1], input: [6, 9], kernel: [5, 5], pad: [2, 2], ..PLAIN },
        Case { counts: [1, 64, 1, 1], input: [1, 2], kernel: [5, 5], pad: [2, 2], ..PLAIN },
        Case { counts: [1, 4, 1, 1], input: [8, 8], kernel: [3, 3], dilation: [2, 2], pad: [2, 2], ..PLAIN },
        Case { counts: [1, 4, 1, 1], input: [9, 16], kernel: [2, 6], stride: [1, 3], pad: [1, 2], ..PLAIN },
    ] {
        for signed in [[false, false], [false, true], [true, false], [true, true]] {
            let first = if signed[0] { -128 } else { 0 };
            for zero in [0, 77, 255] {
                check(&case, signed, first + zero, 0.002);
            }
            // Scaled sums beyond 32 bits.
            check(&case, signed, first + 3, 4e6);
        }
    }
}
