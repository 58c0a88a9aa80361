//! Gradients of a convolution with respect to its image and its weights, as GEMMs.
//!
//! Weights are read and written in place: they change with each step of a training run, so packing
//! would not pay off for small images. im2col writes out a few rows of windows at a time. Their
//! number depends on the sizes alone, so sums have the same order on any number of threads.

use super::ConvGeometry;
use super::input::{Input, WeightSide, part};
use super::transpose::{
    pack_transposed_weights, packed_transposed_weights_len, transposed, transposed_workspace_len,
};
use super::windows::{OutputRows, add_windows, take_rows, take_windows};
use ort_cpu_gemm::{
    Batch, Cpu, Gemm, GemmError, LhsOperand, RhsOperand, RhsSource, Strided, run_batch, workspace_len,
};

/// Output pixels of an image that fill vectors well without those of other images.
pub(super) const LARGE: usize = 64;

/// Whether each image is a GEMM of its own.
fn is_by_images(geometry: &ConvGeometry) -> bool {
    geometry.window.is_pointwise() && geometry.window.output_len() >= LARGE
}

/// Checks the lengths of image, weights and output.
pub(super) fn check(geometry: &ConvGeometry, lens: [usize; 3]) -> Result<(), GemmError> {
    let ConvGeometry { batch, channels, filters, window, .. } = geometry;
    let steps = geometry.group_channels() * window.kernel_len();
    let needed =
        [batch * channels * window.input_len(), filters * steps, batch * filters * window.output_len()];
    for ((what, needed), len) in ["an image", "weights", "a result"].into_iter().zip(needed).zip(lens) {
        if len != needed {
            return Err(GemmError::TooShort { what, needed, len });
        }
    }
    Ok(())
}

/// Returns the `f32` elements of workspace that [`weights_gradient`] needs.
pub fn weights_gradient_workspace_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    let (filters, output_rows) = (geometry.group_filters(), OutputRows::of(geometry));
    if is_by_images(geometry) {
        let shape = [filters, geometry.group_channels(), geometry.window.output_len()];
        return workspace_len(cpu, 1, shape, RhsSource::Strided);
    }
    let gemm_workspace =
        output_rows.most(|rows| workspace_len(cpu, 1, [filters, output_rows.steps, rows], RhsSource::Rows));
    output_rows.lens(filters).iter().sum::<usize>() + gemm_workspace
}

/// Computes the gradient with respect to the weights (M, C/group, k1, ...), from the image (N, C,
/// D1, ...) and the upstream gradient (N, M, d1, ...).
///
/// # Errors
///
/// If a slice has another length than the geometry requires.
pub fn weights_gradient(
    cpu: Cpu,
    geometry: &ConvGeometry,
    [image, upstream]: [&[f32]; 2],
    gradient: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    check(geometry, [image.len(), gradient.len(), upstream.len()])?;
    let (filters, output_rows) = (geometry.group_filters(), OutputRows::of(geometry));
    if upstream.is_empty() || gradient.is_empty() {
        gradient.fill(0.0);
        return Ok(());
    }
    for (group, gradient) in gradient.chunks_mut(filters * output_rows.steps).enumerate() {
        if is_by_images(geometry) {
            // A large pointwise image is its own im2col matrix, so nothing is copied.
            weights_by_images(cpu, geometry, group, [image, upstream], gradient, workspace)?;
            continue;
        }
        let [windows_len, turned_len] = output_rows.lens(filters);
        let (windows, rest) = workspace.split_at_mut(windows_len);
        let (turned, gemm_workspace) = rest.split_at_mut(turned_len);
        // k is the pixels of the whole batch. The pieces depend on sizes alone and are added in
        // order, so the bits do not depend on the threads.
        for (index, piece) in output_rows.pieces().enumerate() {
            let rows = piece.len() * output_rows.len;
            let (windows, turned) = (&mut windows[..rows * output_rows.steps], &mut turned[..rows * filters]);
            take_windows(cpu, geometry, (group, piece.start), image, windows);
            take_rows(cpu, geometry, (group, piece.start * output_rows.len), upstream, turned);
            let a = LhsOperand::Plain(Strided::row_major(turned, filters, rows)?);
            let b = RhsOperand::Plain(Strided::row_major(windows, rows, output_rows.steps)?);
            // The first piece overwrites the gradient, and the others accumulate.
            let beta = if index == 0 { 0.0 } else { 1.0 };
            Gemm { beta, ..Gemm::new(a, b) }.run(cpu, gradient, output_rows.steps, gemm_workspace)?;
        }
    }
    Ok(())
}

fn weights_by_images(
    cpu: Cpu,
    geometry: &ConvGeometry,
    group: usize,
    [image, upstream]: [&[f32]; 2],
    gradient: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    let (channels, filters) = (geometry.group_channels(), geometry.group_filters());
    let places = geometry.window.output_len();
    for index in 0..geometry.batch {
        let block = index * geometry.groups + group;
        // One GEMM after another, because all of them add to the same gradient. The threads split
        // each GEMM.
        let upstream = part("a gradient", upstream, block * filters * places, filters * places)?;
        let image = part("an image", image, block * channels * places, channels * places)?;
        let a = LhsOperand::Plain(Strided::row_major(upstream, filters, places)?);
        let b = RhsOperand::Plain(Strided::row_major(image, channels, places)?.transposed());
        // The first image overwrites the gradient, and the others accumulate.
        let beta = if index == 0 { 0.0 } else { 1.0 };
        Gemm { beta, ..Gemm::new(a, b) }.run(cpu, gradient, channels, workspace)?;
    }
    Ok(())
}

/// Returns the convolution whose transpose is the gradient with respect to the image.
fn turned(geometry: &ConvGeometry) -> ConvGeometry {
    ConvGeometry { channels: geometry.filters, filters: geometry.channels, ..*geometry }
}

/// Returns the `f32` elements of workspace that [`image_gradient`] needs.
pub fn image_gradient_workspace_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    let (filters, output_rows) = (geometry.group_filters(), OutputRows::of(geometry));
    let places = geometry.window.output_len();
    if is_by_images(geometry) {
        let shape = [geometry.group_channels(), places, filters];
        return workspace_len(cpu, geometry.batch, shape, RhsSource::Rows);
    }
    if places >= LARGE {
        let turned = turned(geometry);
        return packed_transposed_weights_len(cpu, &turned).next_multiple_of(16)
            + transposed_workspace_len(cpu, &turned);
    }
    let gemm_workspace =
        output_rows.most(|rows| workspace_len(cpu, 1, [rows, output_rows.steps, filters], RhsSource::Rows));
    output_rows.lens(filters).iter().sum::<usize>() + gemm_workspace
}

/// Computes the gradient with respect to the image (N, C, D1, ...), from the weights (M, C/group,
/// k1, ...) and the upstream gradient (N, M, d1, ...).
///
/// # Errors
///
/// If a slice has another length than the geometry requires.
pub fn image_gradient(
    cpu: Cpu,
    geometry: &ConvGeometry,
    [weights, upstream]: [&[f32]; 2],
    gradient: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    check(geometry, [gradient.len(), weights.len(), upstream.len()])?;
    if upstream.is_empty() || gradient.is_empty() {
        gradient.fill(0.0);
        return Ok(());
    }
    if is_by_images(geometry) {
        return image_by_images(cpu, geometry, [weights, upstream], gradient, workspace);
    }
    // For large images, packing pays off, and the gradient is a transposed convolution.
    if geometry.window.output_len() >= LARGE {
        let turned = turned(geometry);
        let len = packed_transposed_weights_len(cpu, &turned).next_multiple_of(16);
        let (packed, workspace) = workspace.split_at_mut(len);
        pack_transposed_weights(cpu, &turned, weights, packed)?;
        let input = Input { image: upstream, weights: packed, side: WeightSide::Lhs, epilogue: &[] };
        return transposed(cpu, &turned, input, gradient, workspace);
    }
    gradient.fill(0.0);
    let (filters, output_rows) = (geometry.group_filters(), OutputRows::of(geometry));
    let [windows_len, turned_len] = output_rows.lens(filters);
    let (windows, rest) = workspace.split_at_mut(windows_len);
    let (turned, gemm_workspace) = rest.split_at_mut(turned_len);
    for (group, weights) in weights.chunks(filters * output_rows.steps).enumerate() {
        // Windows of neighbouring rows overlap in the image, so pieces are added one after another.
        for piece in output_rows.pieces() {
            let rows = piece.len() * output_rows.len;
            let (windows, turned) = (&mut windows[..rows * output_rows.steps], &mut turned[..rows * filters]);
            take_rows(cpu, geometry, (group, piece.start * output_rows.len), upstream, turned);
            let a = LhsOperand::Plain(Strided::row_major(turned, filters, rows)?.transposed());
            let b = RhsOperand::Plain(Strided::row_major(weights, filters, output_rows.steps)?);
            Gemm::new(a, b).run(cpu, windows, output_rows.steps, gemm_workspace)?;
            add_windows(cpu, geometry, (group, piece), windows, gradient);
        }
    }
    Ok(())
}

fn image_by_images(
    cpu: Cpu,
    geometry: &ConvGeometry,
    [weights, upstream]: [&[f32]; 2],
    gradient: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    let (channels, filters, groups) = (geometry.group_channels(), geometry.group_filters(), geometry.groups);
    let places = geometry.window.output_len();
    for group in 0..groups {
        let weights = part("weights", weights, group * filters * channels, filters * channels)?;
        // The GEMMs of all images write disjoint parts of the gradient, so they are one batch.
        let weights = Strided::row_major(weights, filters, channels)?.transposed();
        let problem = |index: usize| {
            let first = (index * groups + group) * filters * places;
            let upstream =
                Strided::row_major(part("a gradient", upstream, first, filters * places)?, filters, places)?;
            Ok(Gemm::new(LhsOperand::Plain(weights), RhsOperand::Plain(upstream)))
        };
        let values = &mut gradient[group * channels * places..];
        let batch_stride = geometry.channels * places;
        let results = Batch { values, count: geometry.batch, row_stride: places, batch_stride };
        run_batch(cpu, &problem, results, workspace)?;
    }
    Ok(())
}
