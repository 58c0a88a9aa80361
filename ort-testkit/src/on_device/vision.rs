//! Image resizing, sampling at given coordinates, and pooling of regions.

use std::slice::from_ref;
use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::Attribute;
use ort_core::tensor::Tensor;

use super::typed::{Case, Given, case, check_all, floats, ints, list, run, text};

const HALVES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// One type of each size.
const SIZES: [DType; 4] = [DType::U8, DType::F16, DType::I32, DType::F64];

fn resize(dtype: DType, shape: &[usize], scales: &[f32], attrs: &[(&'static str, Attribute)]) -> Case {
    case("Resize", vec![run(dtype, shape), Given::None, floats(scales)], attrs)
}

fn resize_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let transforms = [
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_half_pixel_for_nn",
    ];
    for transform in transforms.map(|name| ("coordinate_transformation_mode", text(name))) {
        for scales in [[1.0, 1.0, 2.0, 1.7], [1.0, 1.0, 0.6, 3.0], [1.0, 1.0, 0.09, 0.45]] {
            for rounding in ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"] {
                let attrs = [transform.clone(), ("nearest_mode", text(rounding))];
                cases.push(resize(DType::F32, &[2, 3, 13, 9], &scales, &attrs));
            }
            for mode in ["linear", "cubic"].map(|mode| ("mode", text(mode))) {
                for flag in ["antialias", "exclude_outside"] {
                    let attrs = [transform.clone(), mode.clone(), (flag, Attribute::Int(1))];
                    cases.push(resize(DType::F32, &[2, 3, 13, 9], &scales, &attrs));
                }
                cases.push(resize(DType::F32, &[2, 3, 13, 9], &scales, &[transform.clone(), mode]));
            }
        }
    }
    for dtype in SIZES {
        cases.push(resize(dtype, &[1, 3, 5, 7], &[1.0, 1.0, 2.0, 2.0], &[]));
        // Contiguous elements, several of which are copied at once.
        for channels in [3, 4, 34, 64] {
            cases.push(resize(dtype, &[2, 3, 5, channels], &[1.0, 2.0, 1.5, 1.0], &[]));
        }
    }
    for dtype in HALVES {
        for mode in ["linear", "cubic"].map(|mode| ("mode", text(mode))) {
            cases.push(resize(dtype, &[2, 3, 7, 9], &[1.0, 1.0, 2.5, 0.5], from_ref(&mode)));
            // One, three and four resized axes; those between them keep their size.
            cases.push(resize(dtype, &[3, 9], &[1.0, 1.5], from_ref(&mode)));
            cases.push(resize(dtype, &[9, 3, 5], &[0.5, 1.0, 2.0], from_ref(&mode)));
            cases.push(resize(dtype, &[2, 5, 6, 7, 2], &[1.0, 1.5, 2.0, 0.7, 1.0], from_ref(&mode)));
            cases.push(resize(dtype, &[3, 4, 5, 6], &[2.0, 0.7, 1.5, 0.5], &[mode]));
        }
    }
    // Enough results that a thread processes several planes, and does not divide their number.
    for mode in ["nearest", "linear"].map(|mode| ("mode", text(mode))) {
        cases.push(resize(DType::F32, &[1, 31, 60, 60], &[1.0, 1.0, 2.0, 2.0], &[mode]));
    }
    cases.extend(crop_cases());
    cases
}

fn crop_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let transform = ("coordinate_transformation_mode", text("tf_crop_and_resize"));
    for mode in ["nearest", "linear", "cubic"].map(|mode| ("mode", text(mode))) {
        // All starts, then all ends: inside, beyond the image and without width, and mirrored.
        for roi in [[0.1, 0.2, 0.7, 0.9], [-0.5, 0.4, 1.5, 0.4], [0.9, 0.0, 0.1, 1.0]] {
            let inputs = vec![run(DType::F32, &[2, 3, 9, 11]), floats(&roi), Given::None, ints(&[6, 5])];
            let outside = ("extrapolation_value", Attribute::Float(7.5));
            let attrs = [transform.clone(), mode.clone(), outside, ("axes", list(&[2, 3]))];
            cases.push(case("Resize", inputs, &attrs));
        }
    }
    for policy in ["stretch", "not_larger", "not_smaller"] {
        let inputs = vec![run(DType::F32, &[1, 2, 9, 11]), Given::None, Given::None, ints(&[20, 13])];
        let attrs =
            [("keep_aspect_ratio_policy", text(policy)), ("axes", list(&[3, 2])), ("mode", text("linear"))];
        cases.push(case("Resize", inputs, &attrs));
    }
    cases
}

/// Checks `Resize`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn resizes(device: &Arc<dyn Device>) {
    check_all(device, &resize_cases());
}

/// Grid coordinates that reach beyond the image.
fn grid(shape: &[usize]) -> Given {
    let values: Vec<f32> =
        super::numbers(shape.iter().product(), 5).iter().map(|value| value * 1.6).collect();
    Given::Is(Tensor::from_slice(shape, &values).unwrap())
}

fn grid_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let images: [(&[usize], &[usize]); 3] =
        [(&[2, 3, 9], &[2, 13, 1]), (&[2, 5, 6, 7], &[2, 5, 4, 2]), (&[1, 2, 4, 5, 3], &[1, 3, 4, 5, 3])];
    for padding in ["zeros", "border", "reflection"].map(|name| ("padding_mode", text(name))) {
        for mode in ["nearest", "linear", "cubic"].map(|name| ("mode", text(name))) {
            for corners in [0, 1].map(|flag| ("align_corners", Attribute::Int(flag))) {
                for (image, points) in images {
                    let attrs = [padding.clone(), mode.clone(), corners.clone()];
                    cases.push(case("GridSample", vec![run(DType::F32, image), grid(points)], &attrs));
                }
            }
        }
    }
    for dtype in SIZES {
        let inputs = vec![run(dtype, &[2, 3, 6, 7]), grid(&[2, 5, 4, 2])];
        cases.push(case("GridSample", inputs, &[("mode", text("nearest"))]));
    }
    for (dtype, of_grid) in [(DType::F16, DType::F16), (DType::BF16, DType::F32), (DType::F32, DType::BF16)] {
        let inputs = vec![run(dtype, &[2, 9, 6, 7]), run(of_grid, &[2, 5, 4, 2])];
        cases.push(case("GridSample", inputs, &[]));
    }
    // Enough results that a thread processes several planes.
    cases.push(case("GridSample", vec![run(DType::F32, &[1, 13, 20, 30]), grid(&[1, 150, 150, 2])], &[]));
    for dtype in HALVES {
        for corners in [0, 1].map(|flag| [("align_corners", Attribute::Int(flag))]) {
            let [plane, volume] = [ints(&[2, 3, 5, 1]), ints(&[1, 1, 4, 3, 6])];
            cases.push(case("AffineGrid", vec![run(dtype, &[2, 2, 3]), plane], &corners));
            cases.push(case("AffineGrid", vec![run(dtype, &[1, 3, 4]), volume], &corners));
        }
    }
    cases
}

/// Checks `GridSample` and `AffineGrid`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn grids(device: &Arc<dyn Device>) {
    check_all(device, &grid_cases());
}

/// Corners of regions, some of which reach beyond the feature map, preceded by a batch index if
/// there are five numbers.
fn corners(count: usize, numbers: usize) -> Vec<f32> {
    let mix = |at: usize| (at * 7919 % 97) as f32 / 6.0 - 3.0;
    let region = |at: usize| {
        let (x, y) = (mix(4 * at), mix(4 * at + 1));
        let all = [(at % 2) as f32, x, y, x + mix(4 * at + 2).abs(), y + mix(4 * at + 3)];
        all[5 - numbers..].to_vec()
    };
    (0..count).flat_map(region).collect()
}

fn region_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let images: Vec<i64> = (0..9).map(|at| at % 2).collect();
    let size = |samples: i64| {
        [("output_height", 3), ("output_width", 2), ("sampling_ratio", samples)]
            .map(|(name, value)| (name, Attribute::Int(value)))
    };
    for mode in ["avg", "max"] {
        for transform in ["half_pixel", "output_half_pixel"] {
            for samples in [0, 1, 3] {
                let rois = Tensor::from_slice(&[9, 4], &corners(9, 4)).unwrap();
                let inputs = vec![run(DType::F32, &[2, 3, 9, 8]), Given::Is(rois), ints(&images)];
                let mut attrs = size(samples).to_vec();
                attrs.push(("coordinate_transformation_mode", text(transform)));
                attrs.extend([("mode", text(mode)), ("spatial_scale", Attribute::Float(0.6))]);
                cases.push(case("RoiAlign", inputs, &attrs));
            }
        }
    }
    for dtype in HALVES {
        let inputs = vec![run(dtype, &[1, 3, 9, 8]), run(dtype, &[5, 4]), ints(&[0; 5])];
        let scale = ("spatial_scale", Attribute::Float(6.0));
        cases.push(case("RoiAlign", inputs, &[&size(2)[..], &[scale]].concat()));
    }
    for pooled in [[2, 2], [3, 5]] {
        let rois = Tensor::from_slice(&[12, 5], &corners(12, 5)).unwrap();
        let inputs = vec![run(DType::F32, &[2, 3, 9, 8]), Given::Is(rois)];
        cases.push(case("MaxRoiPool", inputs, &[("pooled_shape", list(&pooled))]));
    }
    cases
}

/// Checks `RoiAlign` and `MaxRoiPool`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn regions(device: &Arc<dyn Device>) {
    check_all(device, &region_cases());
}

fn unpool_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let kernel = [("kernel_shape", list(&[2, 2])), ("strides", list(&[2, 2]))];
    // Two of the values have the same index.
    let places: Vec<i64> = (0..2 * 3 * 4 * 5).map(|at| at * 4 + if at == 7 { -4 } else { at % 3 }).collect();
    let indices = Given::Is(Tensor::from_slice(&[2, 3, 4, 5], &places).unwrap());
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        cases.push(case("MaxUnpool", vec![run(dtype, &[2, 3, 4, 5]), indices.clone()], &kernel));
        let small = Given::Is(Tensor::from_slice(&[1, 1, 2, 2], &[0i64, 3, 9, 14]).unwrap());
        let inputs = vec![run(dtype, &[1, 1, 2, 2]), small, ints(&[1, 1, 5, 6])];
        cases.push(case("MaxUnpool", inputs, &kernel));
    }
    cases
}

fn column_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in HALVES {
        cases.push(case("Col2Im", vec![run(dtype, &[2, 15, 5]), ints(&[5, 5]), ints(&[1, 5])], &[]));
        let attrs = [("strides", list(&[2, 1])), ("pads", list(&[1, 0, 0, 2])), ("dilations", list(&[1, 2]))];
        cases.push(case("Col2Im", vec![run(dtype, &[1, 18, 20]), ints(&[9, 7]), ints(&[3, 3])], &attrs));
        cases.push(case("Col2Im", vec![run(dtype, &[1, 16, 8]), ints(&[3, 3, 3]), ints(&[2, 2, 2])], &[]));
    }
    cases
}

/// A deformable convolution: the image, filters, offset groups, and whether it has a bias and a
/// mask.
fn deform(
    dtype: DType,
    [image, filters]: [&[usize]; 2],
    offset_groups: usize,
    more: bool,
    attrs: &[(&'static str, Attribute)],
) -> Case {
    let (kernel, rank) = (&filters[2..], filters.len() - 2);
    let taps: usize = kernel.iter().product();
    // Filters have the channels of one group.
    let group = image[1] / filters[1];
    // Windows of stride 1 without padding.
    let pixels: Vec<usize> = image[2..].iter().zip(kernel).map(|(size, kernel)| size + 1 - kernel).collect();
    // [batch, offset groups * taps * numbers, positions]: an offset has a number for each axis,
    // the mask has one.
    let moved = |numbers: usize| [&[image[0], offset_groups * taps * numbers], &pixels[..]].concat();
    let mut inputs = vec![run(dtype, image), run(dtype, filters), run(dtype, &moved(rank))];
    if more {
        inputs.extend([run(dtype, &filters[..1]), run(dtype, &moved(1))]);
    }
    let groups = [("group", group), ("offset_group", offset_groups)];
    let groups = groups.map(|(name, value)| (name, Attribute::Int(value as i64)));
    case("DeformConv", inputs, &[&groups[..], attrs].concat())
}

fn deform_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in HALVES {
        cases.push(deform(dtype, [&[2, 3, 7, 6], &[5, 3, 3, 3]], 1, false, &[]));
        cases.push(deform(dtype, [&[2, 4, 7, 6], &[6, 2, 3, 2]], 2, true, &[]));
    }
    cases.push(deform(DType::F32, [&[1, 6, 12], &[4, 6, 3]], 3, true, &[]));
    cases.push(deform(DType::F32, [&[1, 2, 4, 5, 6], &[3, 2, 2, 3, 2]], 1, true, &[]));
    cases
}

/// Checks `MaxUnpool`, `Col2Im` and `DeformConv`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn moved_windows(device: &Arc<dyn Device>) {
    check_all(
        device,
        &[unpool_cases(), column_cases(), deform_cases()].into_iter().flatten().collect::<Vec<_>>(),
    );
}
