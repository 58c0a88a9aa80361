//! Tests of convolution against a plain sum over windows in `f64`.

use ort_testkit::random_values;
use proptest::prelude::*;

use super::WeightSide::{Lhs, Rhs, Transformed};
use super::*;
use ort_cpu_gemm::{Activation, Cpu, Precision, STEPS, Step, Window};
use ort_cpu_vector::simd::isa::Isa;

const ISAS: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

/// Visits every pair of an image element and an output element that a kernel position connects.
/// Calls `visit` with the indices of the windowed side, of the other side, and of the kernel
/// position.
fn meet(window: &Window, mut visit: impl FnMut(usize, usize, usize)) {
    let [depth, height, width] = window.output;
    for index in 0..depth * height * width {
        let output = [index / (height * width), index / width % height, index % width];
        for position in 0..window.kernel_len() {
            let [_, rows, columns] = window.kernel;
            let at = [position / (rows * columns), position / columns % rows, position % columns];
            let place = |axis: usize| {
                let place = (output[axis] * window.stride[axis] + at[axis] * window.dilation[axis]) as isize
                    - window.pad[axis] as isize;
                (0..window.input[axis] as isize).contains(&place).then_some(place as usize)
            };
            if let (Some(z), Some(y), Some(x)) = (place(0), place(1), place(2)) {
                visit((z * window.input[1] + y) * window.input[2] + x, index, position);
            }
        }
    }
}

fn reference(geometry: &ConvGeometry, image: &[f32], weights: &[f32], transposed: bool) -> Vec<f64> {
    let window = &geometry.window;
    let (channels, filters) = (geometry.group_channels(), geometry.group_filters());
    let (mut read, mut written) = (window.input_len(), window.output_len());
    if transposed {
        std::mem::swap(&mut read, &mut written);
    }
    let kernel = window.kernel_len();
    let mut output = vec![0.0; geometry.batch * geometry.filters * written];
    for index in 0..geometry.batch * geometry.groups {
        let group = index % geometry.groups;
        for filter in 0..filters {
            for channel in 0..channels {
                let weight = match transposed {
                    true => ((group * channels + channel) * filters + filter) * kernel,
                    false => ((group * filters + filter) * channels + channel) * kernel,
                };
                let (from, to) = ((index * channels + channel) * read, (index * filters + filter) * written);
                meet(window, |windowed, other, position| {
                    let (x, y) = if transposed { (other, windowed) } else { (windowed, other) };
                    output[to + y] += f64::from(image[from + x]) * f64::from(weights[weight + position]);
                });
            }
        }
    }
    output
}

/// Values that a precision represents exactly, as it does sums of a few of them and quarters of
/// those. Only the accumulation of products then rounds.
fn exact(precision: Precision, values: Vec<f32>) -> Vec<f32> {
    match precision {
        Precision::Fp32 => values,
        Precision::Bf16 => values.into_iter().map(|value| (4.0 * value).round() / 4.0).collect(),
    }
}

/// A convolution: image, weight, strides, dilations, pads, output padding, groups.
#[derive(Debug)]
struct Case {
    image: Vec<usize>,
    weight: Vec<usize>,
    strides: Vec<usize>,
    dilations: Vec<usize>,
    pads: Vec<usize>,
    output_padding: Vec<usize>,
    groups: usize,
}

fn check(case: &Case, transpose: bool) {
    Cpu::precisions().for_each(|precision| check_in(precision, case, transpose));
}

fn check_in(precision: Precision, case: &Case, transpose: bool) {
    let attributes = ConvAttributes {
        strides: &case.strides,
        dilations: &case.dilations,
        pads: &case.pads,
        output_padding: &case.output_padding,
        groups: case.groups,
    };
    let geometry = match transpose {
        true => ConvGeometry::transposed(&case.image, &case.weight, &attributes).unwrap(),
        false => ConvGeometry::new(&case.image, &case.weight, &attributes).unwrap(),
    };
    let image = exact(precision, random_values(case.image.iter().product(), 1));
    let weights = exact(precision, random_values(case.weight.iter().product(), 2));
    let product = reference(&geometry, &image, &weights, transpose);
    let plane = product.len() / (geometry.batch * geometry.filters).max(1);
    let (bias, residual) = (random_values(geometry.filters, 3), random_values(product.len(), 4));
    let steps = [
        Step::RowBias(&bias),
        Step::Residual { values: &residual, row_stride: plane },
        Step::Activate(Activation::LeakyRelu { alpha: 0.5 }),
    ];
    for isa in ISAS {
        let mut alone = vec![0.0; 0];
        let mut sides = vec![Lhs];
        if !transpose {
            sides.push(Rhs);
            let square = case.weight.len() == 4 && case.weight[2..] == [3, 3];
            let plain =
                [&case.strides, &case.dilations].iter().all(|sizes| sizes.iter().all(|size| *size == 1));
            if square && plain {
                sides.extend([Transformed(Tile::Two), Transformed(Tile::Four)]);
            }
        }
        for (side, threads) in sides.into_iter().flat_map(|side| [1, 2, 3].map(|threads| (side, threads))) {
            let cpu = Cpu { isa, precision, ..Cpu::with_threads(threads) };
            let mut output = vec![f32::NAN; product.len()];
            let (packed_len, workspace_len) = match transpose {
                true => {
                    (packed_transposed_weights_len(cpu, &geometry), transposed_workspace_len(cpu, &geometry))
                }
                false => (packed_weights_len(cpu, &geometry, side), workspace_len(cpu, &geometry, side)),
            };
            let (mut packed, mut workspace) = (vec![f32::NAN; packed_len], vec![f32::NAN; workspace_len]);
            match transpose {
                true => pack_transposed_weights(cpu, &geometry, &weights, &mut packed).unwrap(),
                false => pack_weights(cpu, &geometry, side, &weights, &mut packed).unwrap(),
            }
            let input = Input { image: &image, weights: &packed, side, epilogue: &steps };
            match transpose {
                true => transposed(cpu, &geometry, input, &mut output, &mut workspace).unwrap(),
                false => forward(cpu, &geometry, input, &mut output, &mut workspace).unwrap(),
            }
            if !transpose && side == Lhs {
                let steps = [steps[0], Step::Held, steps[2]];
                let input = Input { epilogue: &steps, ..input };
                let (mut held, mut workspace) = (residual.clone(), vec![f32::NAN; workspace_len]);
                let run = forward(cpu, &geometry, input, &mut held, &mut workspace);
                let sums = geometry.group_channels() * geometry.window.kernel_len();
                match sums <= STEPS {
                    true => assert!(run.is_ok() && held == output, "{isa:?} {case:?} differs in place"),
                    false => {
                        assert!(run.is_ok() || held == residual, "{isa:?} {case:?} spoils what it refuses")
                    }
                }
            }
            match threads {
                1 => alone.clone_from(&output),
                _ => assert!(alone == output, "{isa:?} {precision:?} {case:?} differs on {threads} threads"),
            }
            let bound = if side == Transformed(Tile::Four) { 1e-4 } else { 2e-5 };
            for (index, found) in output.iter().enumerate() {
                let filter = index / plane % geometry.filters;
                let sum = product[index] + f64::from(bias[filter]) + f64::from(residual[index]);
                let expected = if sum < 0.0 { 0.5 * sum } else { sum };
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error < bound * (1.0 + expected.abs()),
                    "{isa:?} {precision:?} {side:?} {case:?} at {index}: {found} is not {expected}"
                );
            }
        }
    }
}

fn case(image: &[usize], weight: &[usize], [strides, dilations, pads]: [&[usize]; 3], groups: usize) -> Case {
    let list = |values: &[usize]| values.to_vec();
    Case {
        image: list(image),
        weight: list(weight),
        strides: list(strides),
        dilations: list(dilations),
        pads: list(pads),
        output_padding: Vec::new(),
        groups,
    }
}

#[test]
fn forward_shapes() {
    for case in [
        case(&[2, 3, 20], &[5, 3, 4], [&[2], &[1], &[1, 2]], 1),
        case(&[1, 3, 30, 31], &[8, 3, 7, 7], [&[2, 2], &[], &[3, 3, 3, 3]], 1),
        case(&[2, 8, 14, 14], &[16, 8, 3, 3], [&[], &[], &[1, 1, 1, 1]], 1),
        case(&[1, 20, 61, 47], &[18, 20, 3, 3], [&[], &[], &[1, 1, 1, 1]], 1),
        case(&[2, 8, 53, 19], &[6, 4, 3, 3], [&[], &[], &[0, 1, 1, 0]], 2),
        case(&[1, 70, 7, 7], &[66, 70, 3, 3], [&[], &[2, 2], &[2, 2, 2, 2]], 1),
        case(&[2, 60, 9, 11], &[70, 60, 1, 1], [&[], &[], &[]], 1),
        case(&[1, 12, 9, 11], &[8, 12, 1, 1], [&[2, 3], &[], &[]], 1),
        case(&[2, 12, 13, 10], &[18, 2, 3, 2], [&[1, 2], &[], &[1, 0, 1, 1]], 6),
        case(&[1, 6, 13, 10], &[6, 1, 5, 5], [&[], &[], &[2, 2, 2, 2]], 6),
        case(&[1, 2, 5, 6, 7], &[3, 2, 2, 3, 3], [&[1, 2, 1], &[2, 1, 1], &[1, 1, 1, 0, 1, 1]], 1),
        case(&[1, 4, 3, 3], &[4, 4, 3, 3], [&[], &[], &[5, 5, 5, 5]], 1),
        case(&[3, 40, 9, 21], &[50, 40, 3, 3], [&[], &[], &[1, 0, 0, 2]], 1),
        case(&[2, 34, 8, 83], &[66, 17, 3, 3], [&[], &[], &[1, 1, 1, 1]], 2),
        case(&[1, 130, 30, 31], &[100, 130, 3, 3], [&[1, 1], &[1, 1], &[0, 1, 2, 3]], 1),
        case(&[1, 3, 3, 3], &[5, 3, 3, 3], [&[], &[], &[]], 1),
    ] {
        check(&case, false);
    }
}

#[test]
fn transposed_shapes() {
    let upsample = Case {
        output_padding: vec![1, 1],
        ..case(&[2, 6, 5, 7], &[6, 4, 3, 3], [&[2, 2], &[], &[1, 1, 1, 1]], 1)
    };
    for case in [
        case(&[1, 3, 9], &[3, 5, 4], [&[2], &[1], &[1, 1]], 1),
        case(&[2, 8, 6, 5], &[8, 3, 2, 2], [&[2, 2], &[], &[]], 1),
        case(&[1, 8, 6, 5], &[8, 3, 3, 3], [&[], &[2, 1], &[0, 1, 2, 0]], 4),
        case(&[1, 2, 3, 4, 5], &[2, 3, 2, 3, 2], [&[1, 2, 3], &[], &[]], 1),
        upsample,
    ] {
        check(&case, true);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]
    #[test]
    fn any_small_convolution(
        counts in (1_usize..6, 1_usize..12, 1_usize..4),
        size in (3_usize..60, 3_usize..60),
        kernel in (1_usize..4, 1_usize..4),
        steps in ((1_usize..4, 1_usize..4), (1_usize..3, 1_usize..3)),
        pads in (0_usize..3, 0_usize..3, 0_usize..3, 0_usize..3),
        transpose in any::<bool>(),
    ) {
        let ((channels, filters, groups), (stride, dilation)) = (counts, steps);
        let size = match transpose {
            true => (size.0 / 4 + 2, size.1 / 4 + 2),
            false => (size.0.max((kernel.0 - 1) * dilation.0 + 1), size.1.max((kernel.1 - 1) * dilation.1 + 1)),
        };
        let (image, weight) = match transpose {
            true => ([1, channels * groups, size.0, size.1], [channels * groups, filters, kernel.0, kernel.1]),
            false => ([1, channels * groups, size.0, size.1], [filters * groups, channels, kernel.0, kernel.1]),
        };
        let attributes = [
            &[stride.0, stride.1][..],
            &[dilation.0, dilation.1],
            &[pads.0, pads.1, pads.2, pads.3],
        ];
        check(&case(&image, &weight, attributes, groups), transpose);
    }
}

#[test]
fn refusals() {
    let geometry = |image: &[usize], weight: &[usize], attributes: &ConvAttributes| {
        ConvGeometry::new(image, weight, attributes).is_err()
    };
    let none = ConvAttributes::default();
    assert!(geometry(&[1, 3], &[1, 3], &none));
    assert!(geometry(&[1, 3, 4, 4], &[1, 2, 3, 3], &none));
    assert!(geometry(&[1, 3, 4, 4], &[1, 3, 0, 3], &none));
    assert!(geometry(&[1, 3, 4, 4], &[1, 3, 3, 3], &ConvAttributes { strides: &[0, 1], ..none }));
    assert!(geometry(&[1, 3, 4, 4], &[1, 3, 3, 3], &ConvAttributes { pads: &[0, 1], ..none }));
    assert!(geometry(&[1, 3, 4, 4], &[1, 3, 3, 3], &ConvAttributes { pads: &[usize::MAX, 0, 0, 0], ..none }));
    assert!(geometry(
        &[1, 3, 4, 4],
        &[1, 3, 3, 3],
        &ConvAttributes { pads: &[1 << 29, 1 << 29, 0, 0], ..none }
    ));
    assert!(geometry(&[1, 4, 4, 4], &[3, 2, 3, 3], &ConvAttributes { groups: 2, ..none }));
}
