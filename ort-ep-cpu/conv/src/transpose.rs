//! Transposed convolution by GEMM and col2im.
//!
//! The GEMM computes the contribution of each image value at every kernel position. col2im then
//! sums the contributions to each output element. If kernels do not overlap, each contribution is
//! stored directly.

use super::ConvGeometry;
use super::input::{Input, part};
use ort_cpu_gemm::{
    Cpu, Gemm, GemmError, LhsOperand, Origin, PackedLhs, RhsOperand, RhsSource, Strided, Weight, Window,
    apply_steps, pack_lhs,
};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::{WORTH_A_THREAD, for_each_chunk_mut, for_each_row_chunk_mut};

/// Returns the rows of the GEMM: output channels of a group times kernel positions.
fn rows(geometry: &ConvGeometry) -> usize {
    geometry.group_filters() * geometry.window.kernel_len()
}

fn group_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    PackedLhs::len(cpu, rows(geometry), geometry.group_channels())
}

/// Returns the length of packed weights.
pub fn packed_transposed_weights_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    geometry.groups * group_len(cpu, geometry)
}

/// Packs `weights` (C, M/group, k1, ...) into `packed`.
///
/// # Errors
///
/// If either slice is too short.
pub fn pack_transposed_weights<T: Weight>(
    cpu: Cpu,
    geometry: &ConvGeometry,
    weights: &[T],
    packed: &mut [f32],
) -> Result<(), GemmError> {
    let (rows, channels) = (rows(geometry), geometry.group_channels());
    let needed = geometry.channels * rows;
    if weights.len() < needed {
        return Err(GemmError::TooShort { what: "a convolution's weights", needed, len: weights.len() });
    }
    let (needed, len) = (packed_transposed_weights_len(cpu, geometry), packed.len());
    let packed =
        packed.get_mut(..needed).ok_or(GemmError::TooShort { what: "packed weights", needed, len })?;
    if needed == 0 {
        return Ok(());
    }
    let groups = weights.chunks(channels * rows).zip(packed.chunks_mut(group_len(cpu, geometry)));
    for (weights, packed) in groups {
        // ONNX stores them as channels by (filters and positions). The GEMM needs the transpose,
        // which packing does for free.
        pack_lhs(cpu, weights, [rows, channels], [1, rows], packed)?;
    }
    Ok(())
}

/// Returns the `f32` elements of workspace that [`transposed`] needs: the contributions of one
/// group of one image, and the workspace of the GEMM.
pub fn transposed_workspace_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    let (rows, columns) = (rows(geometry), geometry.window.output_len());
    let shape = [rows, columns, geometry.group_channels()];
    rows * columns + ort_cpu_gemm::workspace_len(cpu, 1, shape, RhsSource::Rows)
}

/// Computes the transposed convolution into `output` (N, M, D1, ...). The weights come from
/// [`pack_transposed_weights`].
///
/// # Errors
///
/// If a slice is too short.
pub fn transposed(
    cpu: Cpu,
    geometry: &ConvGeometry,
    input: Input,
    output: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    let window = &geometry.window;
    let (channels, filters) = (geometry.group_channels(), geometry.group_filters());
    let (columns, plane) = (window.output_len(), window.input_len());
    let count = geometry.batch * geometry.groups;
    let (needed, len) = (count * filters * plane, output.len());
    let output = output.get_mut(..needed).ok_or(GemmError::TooShort { what: "a result", needed, len })?;
    let (needed, len) = (transposed_workspace_len(cpu, geometry), workspace.len());
    if len < needed {
        return Err(GemmError::TooShort { what: "a convolution's workspace", needed, len });
    }
    let (contributions, workspace) = workspace.split_at_mut(rows(geometry) * columns);
    check_epilogue(geometry, &input)?;
    if needed == 0 || output.is_empty() {
        return Ok(());
    }
    for (index, output) in output.chunks_mut(filters * plane).enumerate() {
        let (image, group) = (index / geometry.groups, index % geometry.groups);
        let pixels = part("an image", input.image, index * channels * columns, channels * columns)?;
        let weights_len = group_len(cpu, geometry);
        let weights = part("packed weights", input.weights, group * weights_len, weights_len)?;
        let lhs = PackedLhs::new(cpu, weights, rows(geometry), channels)?;
        let rhs = Strided::row_major(pixels, channels, columns)?;
        let gemm = Gemm::new(LhsOperand::Packed(lhs), RhsOperand::Plain(rhs));
        // The GEMM runs without the epilogue: an element is complete only after col2im has added
        // all contributions to it.
        gemm.run(cpu, contributions, columns, workspace)?;
        let bias_row = group * filters;
        let origin = Origin { bias_row, residual_row: image * geometry.filters + bias_row };
        let contributions = &*contributions;
        // Rows of the output are independent here, so threads split rows instead of planes.
        if lies_side_by_side(window) {
            let rows = window.input[0] * window.input[1];
            let least = WORTH_A_THREAD.div_ceil(window.input[2]);
            for_each_row_chunk_mut(cpu.threads, output, window.input[2], least, |first, chunk| {
                for (row, to) in chunk.chunks_exact_mut(window.input[2]).enumerate() {
                    let (filter, row) = ((first + row) / rows, (first + row) % rows);
                    let len = window.kernel_len() * columns;
                    place_row(window, &contributions[filter * len..][..len], row, to);
                    apply_steps(input.epilogue, origin, [filter, row * window.input[2]], to);
                }
            });
            continue;
        }
        // Contributions overlap within a plane, so a plane belongs to one thread. This also fixes
        // the order of the additions.
        for_each_chunk_mut(cpu.threads, output, plane, |filter, plane| {
            plane.fill(0.0);
            let len = window.kernel_len() * columns;
            add_contributions(window, &contributions[filter * len..][..len], plane);
            apply_steps(input.epilogue, origin, [filter, 0], plane);
        });
    }
    Ok(())
}

/// Checks the lengths of the epilogue's slices.
fn check_epilogue(geometry: &ConvGeometry, input: &Input) -> Result<(), GemmError> {
    let plane = geometry.window.input_len();
    ort_cpu_gemm::check_steps(input.epilogue, [geometry.filters, geometry.batch * geometry.filters, plane])
}

/// Whether kernels tile the output, so that each output element has exactly one contribution.
fn lies_side_by_side(window: &Window) -> bool {
    (0..3).all(|axis| {
        let [kernel, stride, size] = [window.kernel, window.stride, window.output].map(|sizes| sizes[axis]);
        kernel == stride
            && window.pad[axis] == 0
            && (window.dilation[axis] == 1 || kernel == 1)
            && window.input[axis] == size * stride
    })
}

/// Writes one row of an output channel from the contributions of kernels that do not overlap.
fn place_row(window: &Window, contributions: &[f32], row: usize, to: &mut [f32]) {
    let ([_, height, _], [_, rows, len]) = (window.input, window.output);
    let [depths, heights, widths] = window.kernel;
    let (depth, y) = (row / height, row % height);
    let position = (depth % depths * heights + y % heights) * widths;
    let first = (depth / depths * rows + y / heights) * len;
    let values = |across: usize| &contributions[(position + across) * window.output_len() + first..][..len];
    // Interleaves two rows in one pass over the row, instead of two strided passes.
    if widths == 2 {
        let pairs = to.chunks_exact_mut(2).zip(values(0).iter().zip(values(1)));
        pairs.for_each(|(pair, (even, odd))| pair.copy_from_slice(&[*even, *odd]));
        return;
    }
    for across in 0..widths {
        to.iter_mut().skip(across).step_by(widths).zip(values(across)).for_each(|(to, value)| *to = *value);
    }
}

/// col2im: adds the contributions of each kernel position to the plane of one output channel.
fn add_contributions(window: &Window, contributions: &[f32], plane: &mut [f32]) {
    let columns = window.output_len();
    let [_, kernel_height, kernel_width] = window.kernel;
    for (position, values) in contributions.chunks(columns).enumerate() {
        let at = [
            position / (kernel_height * kernel_width),
            position / kernel_width % kernel_height,
            position % kernel_width,
        ];
        let (first_depth, end_depth) = window.inside(0, at[0]);
        let (first_height, end_height) = window.inside(1, at[1]);
        let (first, end) = window.inside(2, at[2]);
        // This kernel position falls into the cropped border everywhere.
        if first >= end {
            continue;
        }
        spend(columns / 4);
        for depth in first_depth..end_depth {
            for height in first_height..end_height {
                let row = (depth * window.output[1] + height) * window.output[2];
                let values = &values[row + first..row + end];
                let row = window.source(0, depth, at[0]) * window.input[1] + window.source(1, height, at[1]);
                let to = &mut plane[row * window.input[2] + window.source(2, first, at[2])..];
                // A stride of 1 has a loop of its own, because the compiler vectorises it.
                match window.stride[2] {
                    1 => to.iter_mut().zip(values).for_each(|(to, value)| *to += value),
                    stride => {
                        to.iter_mut().step_by(stride).zip(values).for_each(|(to, value)| *to += value);
                    }
                }
            }
        }
    }
}
