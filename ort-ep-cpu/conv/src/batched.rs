//! Forward convolution of small images with unpacked weights: all images of the batch form one
//! GEMM.

use super::ConvGeometry;
use super::gradient::{LARGE, check};
use super::input::part;
use super::windows::{OutputRows, give_rows, take_windows};
use ort_cpu_gemm::{
    Cpu, Gemm, GemmError, LhsOperand, Origin, Pairing, RhsOperand, RhsSource, Step, Strided, apply_steps,
    check_steps, workspace_len,
};
use ort_cpu_threads::parallel::{WORTH_A_THREAD, for_each_row_chunk_mut};

/// Whether images are too small for a GEMM of their own, and there are several.
pub fn is_batched(cpu: Cpu, geometry: &ConvGeometry) -> bool {
    Pairing::of(cpu).is_none() && geometry.batch > 1 && geometry.window.output_len() < LARGE
}

/// Returns the `f32` elements of workspace that [`forward_batched`] needs.
pub fn batched_workspace_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    let (filters, output_rows) = (geometry.group_filters(), OutputRows::of(geometry));
    let gemm_workspace = output_rows
        .most(|rows| workspace_len(cpu, 1, [filters, rows, output_rows.steps], RhsSource::Strided));
    output_rows.lens(filters).iter().sum::<usize>() + gemm_workspace
}

/// Computes the convolution of `image` (N, C, D1, ...) with `weights` (M, C/group, k1, ...) into
/// `output` (N, M, D1, ...). The epilogue is as in [`super::forward`].
///
/// # Errors
///
/// If a slice has another length than the geometry requires.
pub fn forward_batched(
    cpu: Cpu,
    geometry: &ConvGeometry,
    [image, weights]: [&[f32]; 2],
    epilogue: &[Step<'_>],
    output: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    check(geometry, [image.len(), weights.len(), output.len()])?;
    let (filters, output_rows, places) =
        (geometry.group_filters(), OutputRows::of(geometry), geometry.window.output_len());
    check_steps(epilogue, [geometry.filters, geometry.batch * geometry.filters, places])?;
    if output.is_empty() {
        return Ok(());
    }
    let [windows_len, turned_len] = output_rows.lens(filters);
    let (windows, rest) = workspace.split_at_mut(windows_len);
    let (turned, gemm_workspace) = rest.split_at_mut(turned_len);
    for group in 0..geometry.groups {
        let weights =
            part("weights", weights, group * filters * output_rows.steps, filters * output_rows.steps)?;
        for piece in output_rows.pieces() {
            let rows = piece.len() * output_rows.len;
            let (windows, turned) = (&mut windows[..rows * output_rows.steps], &mut turned[..rows * filters]);
            // Windows are rows, which are contiguous to write. The GEMM reads them as a transposed
            // B, which it packs anyway.
            take_windows(cpu, geometry, (group, piece.start), image, windows);
            let a = LhsOperand::Plain(Strided::row_major(weights, filters, output_rows.steps)?);
            let b = RhsOperand::Plain(Strided::row_major(windows, rows, output_rows.steps)?.transposed());
            // The columns of the result belong to several images, so they are scattered to NCHW
            // afterwards.
            Gemm::new(a, b).run(cpu, turned, rows, gemm_workspace)?;
            give_rows(geometry, (group, piece.start * output_rows.len), turned, output);
        }
    }
    if epilogue.is_empty() {
        return Ok(());
    }
    // The epilogue runs on whole planes, because a column of the GEMM belongs to no fixed image.
    let least = WORTH_A_THREAD.div_ceil(places);
    for_each_row_chunk_mut(cpu.threads, output, places, least, |first, planes| {
        for (index, plane) in planes.chunks_exact_mut(places).enumerate() {
            let (image, filter) = ((first + index) / geometry.filters, (first + index) % geometry.filters);
            let origin = Origin { bias_row: 0, residual_row: image * geometry.filters };
            apply_steps(epilogue, origin, [filter, 0], plane);
        }
    });
    Ok(())
}
