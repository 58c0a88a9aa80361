//! Forward convolution by im2col and GEMM.
//!
//! Usually filters are the rows of the GEMM and pixels its columns, so the result is NCHW, as ONNX
//! has it. If an image has too few pixels to fill the vectors of its last panel (10 by 10 is 100,
//! four more than six vectors of 16), the operands swap. The result is then transposed at the end,
//! which is cheap because such layers have a long k.

use smallvec::SmallVec;

use super::input::{Input, WeightSide, operands, origin, part};
use super::{ConvGeometry, winograd};
use ort_cpu_gemm::{
    Batch, Cpu, Gemm, GemmError, Im2col, LhsOperand, PackedLhs, PackedRhs, Pairing, RhsOperand, RhsSource,
    Step, Strided, Weight, apply_steps, check_steps, pack_lhs, pack_lhs_by, pack_rhs, pair_rows, run_batch,
    transpose, unfold, unfolded_len, vectors, workspace_len_beside_ready,
};
use ort_cpu_threads::parallel::{WORTH_A_THREAD, for_each_chunk_mut};

impl WeightSide {
    /// Returns the fastest variant for a geometry. Each variant is correct for any image, so one
    /// packing can serve several image sizes.
    pub fn preferred(cpu: Cpu, geometry: &ConvGeometry) -> Self {
        // Winograd comes first: if it applies, it saves multiply-adds, while the others only differ
        // in how well they fill vectors.
        if let Some(tile) = winograd::preferred(cpu, geometry) {
            return WeightSide::Transformed(tile);
        }
        /// Larger images fill their vectors well, and their results would need much workspace.
        const MOST_PIXELS: usize = 128;
        let (pixels, filters) = (geometry.window.output_len(), geometry.group_filters());
        let lhs = vectors(cpu, [filters, pixels], true);
        let rhs = vectors(cpu, [pixels, filters], false);
        // The swapped variant must save a tenth of the vectors.
        match pixels <= MOST_PIXELS && 10 * rhs < 9 * lhs {
            true => WeightSide::Rhs,
            false => WeightSide::Lhs,
        }
    }
}

/// Returns the length of packed weights.
pub fn packed_weights_len(cpu: Cpu, geometry: &ConvGeometry, side: WeightSide) -> usize {
    geometry.groups * group_len(cpu, geometry, side)
}

fn group_len(cpu: Cpu, geometry: &ConvGeometry, side: WeightSide) -> usize {
    match side {
        WeightSide::Lhs => PackedLhs::len(cpu, geometry.group_filters(), steps(geometry)),
        WeightSide::Rhs => PackedRhs::len(cpu, steps(geometry), geometry.group_filters()),
        WeightSide::Transformed(tile) => {
            winograd::group_len(winograd::gemm_cpu(cpu, geometry, tile), geometry, tile)
        }
    }
}

/// Whether the image is converted to bf16 pairs of channels before im2col. Values that several
/// windows share are then converted only once, and im2col copies half as much.
fn pairs_channels(cpu: Cpu, geometry: &ConvGeometry) -> bool {
    let (positions, stride) = (geometry.window.kernel_len(), geometry.window.stride.iter().product());
    Pairing::of(cpu).is_some()
        // An odd channel has no partner, and a pair must not mix two groups.
        && geometry.group_channels().is_multiple_of(2)
        && positions > 1
        // If the kernel is smaller than its stride, windows share nothing, and the conversion would
        // include values that no window reads.
        && positions >= stride
}

/// Returns the elements of the images as pairs of channels, 0 if they are not converted.
fn paired_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    match pairs_channels(cpu, geometry) {
        true => geometry.batch * geometry.channels / 2 * geometry.window.input_len(),
        false => 0,
    }
}

/// Returns k: channels of a group times kernel positions.
fn steps(geometry: &ConvGeometry) -> usize {
    geometry.group_channels() * geometry.window.kernel_len()
}

/// Packs `weights` (M, C/group, k1, ...) into `packed`.
///
/// # Errors
///
/// If either slice is too short.
pub fn pack_weights<T: Weight>(
    cpu: Cpu,
    geometry: &ConvGeometry,
    side: WeightSide,
    weights: &[T],
    packed: &mut [f32],
) -> Result<(), GemmError> {
    let (filters, steps) = (geometry.group_filters(), steps(geometry));
    if let (WeightSide::Transformed(_), false) = (side, winograd::supports(geometry)) {
        return Err(winograd::refused());
    }
    let needed = geometry.filters * steps;
    if weights.len() < needed {
        return Err(GemmError::TooShort { what: "a convolution's weights", needed, len: weights.len() });
    }
    let (needed, len) = (packed_weights_len(cpu, geometry, side), packed.len());
    let short = GemmError::TooShort { what: "packed weights", needed, len };
    let packed = packed.get_mut(..needed).ok_or(short)?;
    if needed == 0 {
        return Ok(());
    }
    // Each group is packed as a matrix of its own, padded to whole panels.
    let groups = weights.chunks(filters * steps).zip(packed.chunks_mut(group_len(cpu, geometry, side)));
    for (weights, packed) in groups {
        match side {
            WeightSide::Lhs if pairs_channels(cpu, geometry) => {
                let positions = geometry.window.kernel_len();
                let place = |step: usize| {
                    // The order of `Im2col::of_pairs`: pair, kernel position, channel within the
                    // pair.
                    let (pair, position) = (step / 2 / positions, step / 2 % positions);
                    (2 * pair + step % 2) * positions + position
                };
                pack_lhs_by(cpu, weights, [filters, steps], (steps, place), packed)?;
            }
            WeightSide::Lhs => pack_lhs(cpu, weights, [filters, steps], [steps, 1], packed)?,
            WeightSide::Rhs => pack_rhs(cpu, weights, [steps, filters], [1, steps], packed)?,
            WeightSide::Transformed(tile) => {
                let cpu = winograd::gemm_cpu(cpu, geometry, tile);
                winograd::pack(cpu, geometry, tile, weights, packed);
            }
        }
    }
    Ok(())
}

/// Returns the `f32` elements of workspace that [`forward`] needs.
pub fn workspace_len(cpu: Cpu, geometry: &ConvGeometry, side: WeightSide) -> usize {
    let (filters, pixels, steps) = (geometry.group_filters(), geometry.window.output_len(), steps(geometry));
    let pointwise = geometry.window.is_pointwise();
    match side {
        WeightSide::Lhs => {
            let source = if pointwise { RhsSource::Rows } else { RhsSource::Im2col };
            let count = geometry.batch * geometry.groups;
            let gemm_workspace = workspace_len_beside_ready(cpu, count, [filters, pixels, steps], source);
            // Whole cache lines, so that the workspace of the GEMM starts at one.
            paired_len(cpu, geometry).next_multiple_of(16) + gemm_workspace
        }
        WeightSide::Rhs => {
            let gemm_workspace =
                ort_cpu_gemm::workspace_len(cpu, 1, [pixels, filters, steps], RhsSource::Packed);
            filters * pixels + unfolded(geometry) + gemm_workspace
        }
        WeightSide::Transformed(tile) => {
            winograd::workspace_len(winograd::gemm_cpu(cpu, geometry, tile), geometry, tile)
        }
    }
}

/// Returns the elements of a group's im2col matrix, 0 if it need not be written out.
fn unfolded(geometry: &ConvGeometry) -> usize {
    match geometry.window.is_pointwise() {
        true => 0,
        false => unfolded_len(&geometry.window, geometry.group_channels()),
    }
}

/// Computes the convolution into `output` (N, M, D1, ...).
///
/// # Errors
///
/// If a slice is too short.
pub fn forward(
    cpu: Cpu,
    geometry: &ConvGeometry,
    input: Input,
    output: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    match input.side {
        WeightSide::Lhs => {}
        WeightSide::Rhs => return forward_rhs(cpu, geometry, input, output, workspace),
        WeightSide::Transformed(tile) => {
            let cpu = winograd::gemm_cpu(cpu, geometry, tile);
            return winograd::forward(cpu, geometry, tile, input, output, workspace);
        }
    }
    let window = &geometry.window;
    let (channels, filters, steps) = (geometry.group_channels(), geometry.group_filters(), steps(geometry));
    let columns = window.output_len();
    let (paired, needed, len) =
        (paired_len(cpu, geometry), workspace_len(cpu, geometry, input.side), workspace.len());
    if len < needed {
        return Err(GemmError::TooShort { what: "a convolution's workspace", needed, len });
    }
    let (pairs, workspace) = workspace.split_at_mut(paired.next_multiple_of(16));
    let pairs = &mut pairs[..paired];
    if paired > 0 {
        // All images are converted before any GEMM starts, because the threads may share the GEMM
        // of one image.
        pair_rows(cpu, input.image, window.input_len(), pairs)?;
    }
    let (pairs, weights_len) = (&*pairs, group_len(cpu, geometry, input.side));
    let problem = |index: usize| {
        let (pixels, weights) = operands(geometry, &input, weights_len, index)?;
        // The im2col matrix of a pointwise convolution is the image itself.
        let b = if window.is_pointwise() {
            RhsOperand::Plain(Strided::row_major(pixels, channels, columns)?)
        } else if pairs_channels(cpu, geometry) {
            let len = channels / 2 * window.input_len();
            RhsOperand::Im2col(Im2col::of_pairs(
                part("pairs of channels", pairs, index * len, len)?,
                channels,
                *window,
            )?)
        } else {
            RhsOperand::Im2col(Im2col::new(pixels, channels, *window)?)
        };
        let a = LhsOperand::Packed(PackedLhs::new(cpu, weights, filters, steps)?);
        Ok(Gemm { epilogue: input.epilogue, origin: origin(geometry, index), ..Gemm::new(a, b) })
    };
    let results = Batch {
        values: output,
        count: geometry.batch * geometry.groups,
        row_stride: columns,
        batch_stride: filters * columns,
    };
    run_batch(cpu, &problem, results, workspace)
}

/// Computes the convolution with pixels as rows.
fn forward_rhs(
    cpu: Cpu,
    geometry: &ConvGeometry,
    input: Input,
    output: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    /// Filters that are transposed at a time.
    const FILTERS: usize = 16;
    let window = &geometry.window;
    let (channels, filters, steps) = (geometry.group_channels(), geometry.group_filters(), steps(geometry));
    let (pixels, count) = (window.output_len(), geometry.batch * geometry.groups);
    let (needed, len) = (count * filters * pixels, output.len());
    let output = output.get_mut(..needed).ok_or(GemmError::TooShort { what: "a result", needed, len })?;
    check_steps(input.epilogue, [geometry.filters, geometry.batch * geometry.filters, pixels])?;
    if needed == 0 {
        return Ok(());
    }
    let (needed, len) = (workspace_len(cpu, geometry, input.side), workspace.len());
    if len < needed {
        return Err(GemmError::TooShort { what: "a convolution's workspace", needed, len });
    }
    let weights_len = group_len(cpu, geometry, input.side);
    let (transposed, workspace) = workspace.split_at_mut(filters * pixels);
    let (unfolded, workspace) = workspace.split_at_mut(unfolded(geometry));
    for (index, output) in output.chunks_mut(filters * pixels).enumerate() {
        let (image, weights) = operands(geometry, &input, weights_len, index)?;
        // The windows are the left operand here, which is read in place and cannot be virtual.
        // Writing them out is cheap for images of so few pixels.
        let windows = match window.is_pointwise() {
            true => image,
            false => {
                unfold(cpu, &Im2col::new(image, channels, *window)?, unfolded)?;
                &*unfolded
            }
        };
        let lhs = Strided::row_major(windows, steps, pixels)?.transposed();
        let rhs = PackedRhs::new(cpu, weights, steps, filters)?;
        let origin = origin(geometry, index);
        // Steps that work in both orientations run in the GEMM. A residual is NCHW, so it waits for
        // the transposition.
        let (first_steps, rest) = turned(input.epilogue, origin.bias_row);
        let gemm =
            Gemm { epilogue: &first_steps, ..Gemm::new(LhsOperand::Plain(lhs), RhsOperand::Packed(rhs)) };
        gemm.run(cpu, transposed, filters, workspace)?;
        let transposed = &*transposed;
        // Enough filters per task to be worth a thread.
        let at_once = FILTERS * (WORTH_A_THREAD / (FILTERS * pixels)).max(1);
        for_each_chunk_mut(cpu.threads, output, at_once * pixels, |block, planes| {
            let first = block * at_once;
            let shape = [pixels, planes.len() / pixels];
            // The slices were cut to these sizes above, so this cannot fail.
            if transpose(cpu, &transposed[first..], shape, filters, planes).is_ok() {
                let at_once = if by_planes(rest, pixels) { pixels } else { planes.len() };
                for (run, planes) in planes.chunks_mut(at_once).enumerate() {
                    apply_steps(rest, origin, [first + run, 0], planes);
                }
            }
        });
    }
    Ok(())
}

/// Splits an epilogue into leading steps that also work with pixels as rows, and the rest. The bias
/// of the first filter is at `first`.
fn turned<'a>(steps: &'a [Step<'a>], first: usize) -> (SmallVec<[Step<'a>; 2]>, &'a [Step<'a>]) {
    let (mut turned, mut rest) = (SmallVec::new(), steps);
    while let [step, others @ ..] = rest {
        turned.push(match *step {
            Step::RowBias(bias) => Step::ColumnBias(&bias[first..]),
            Step::Scale(_) | Step::Activate(_) => *step,
            Step::ColumnBias(_) | Step::Residual { .. } | Step::Held => break,
        });
        rest = others;
    }
    (turned, rest)
}

/// Whether steps differ between planes. If not, contiguous planes are processed as one run.
fn by_planes(steps: &[Step<'_>], pixels: usize) -> bool {
    steps.iter().any(|step| match step {
        Step::RowBias(_) | Step::ColumnBias(_) => true,
        Step::Residual { row_stride, .. } => *row_stride != pixels,
        Step::Held | Step::Scale(_) | Step::Activate(_) => false,
    })
}
