//! The forward convolution.

use super::{ConvGeometry, part};
use crate::gemm::{
    AOperand, BOperand, BSource, Batch, Cpu, Gemm, GemmError, Im2col, Origin, PackedA, Step, Strided, Weight,
    pack_a, run_batch,
};

/// Values that packed weights take.
pub fn packed_weights_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    geometry.groups * group_len(cpu, geometry)
}

fn group_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    PackedA::len(cpu, geometry.group_filters(), steps(geometry))
}

/// Length of the sums: channels of a group times kernel positions.
fn steps(geometry: &ConvGeometry) -> usize {
    geometry.group_channels() * geometry.window.kernel_len()
}

/// Packs `weights` (M, C/group, k1, ...) into `packed`.
///
/// # Errors
///
/// When either slice is too short.
pub fn pack_weights<T: Weight>(
    cpu: Cpu,
    geometry: &ConvGeometry,
    weights: &[T],
    packed: &mut [f32],
) -> Result<(), GemmError> {
    let (filters, steps) = (geometry.group_filters(), steps(geometry));
    let needed = geometry.filters * steps;
    if weights.len() < needed {
        return Err(GemmError::TooShort { what: "a convolution's weights", needed, len: weights.len() });
    }
    let (needed, len) = (packed_weights_len(cpu, geometry), packed.len());
    let packed =
        packed.get_mut(..needed).ok_or(GemmError::TooShort { what: "packed weights", needed, len })?;
    if needed == 0 {
        return Ok(());
    }
    let groups = weights.chunks(filters * steps).zip(packed.chunks_mut(group_len(cpu, geometry)));
    for (weights, packed) in groups {
        pack_a(cpu, weights, [filters, steps], [steps, 1], packed)?;
    }
    Ok(())
}

/// Values of workspace that [`forward`] needs.
pub fn workspace_len(cpu: Cpu, geometry: &ConvGeometry) -> usize {
    let shape = [geometry.group_filters(), geometry.window.output_len(), steps(geometry)];
    let source = if geometry.window.is_pointwise() { BSource::Rows } else { BSource::Im2col };
    crate::gemm::workspace_len(cpu, geometry.batch * geometry.groups, shape, source)
}

/// What a convolution reads.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The images (N, C, D1, ...).
    pub image: &'a [f32],
    /// Weights from [`pack_weights`] for the same `Cpu` and geometry.
    pub weights: &'a [f32],
    /// The epilogue. A row is a channel: [`Step::RowBias`] holds a value for each of M channels, and
    /// [`Step::Residual`] an array of the size of the output with a row stride of its spatial size.
    pub epilogue: &'a [Step<'a>],
}

/// Computes the convolution into `output` (N, M, D1, ...).
///
/// # Errors
///
/// When a slice is too short.
pub fn forward(
    cpu: Cpu,
    geometry: &ConvGeometry,
    input: Input,
    output: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    let window = &geometry.window;
    let (channels, filters, steps) = (geometry.group_channels(), geometry.group_filters(), steps(geometry));
    let (image_len, columns) = (channels * window.input_len(), window.output_len());
    let weights_len = group_len(cpu, geometry);
    let problem = |index: usize| {
        let (image, group) = (index / geometry.groups, index % geometry.groups);
        let pixels = part("a convolution's image", input.image, index * image_len, image_len)?;
        let weights = part("packed weights", input.weights, group * weights_len, weights_len)?;
        let b = match window.is_pointwise() {
            true => BOperand::Plain(Strided::row_major(pixels, channels, columns)?),
            false => BOperand::Im2col(Im2col::new(pixels, channels, *window)?),
        };
        let bias_row = group * filters;
        Ok(Gemm {
            epilogue: input.epilogue,
            origin: Origin { bias_row, residual_row: image * geometry.filters + bias_row },
            ..Gemm::new(AOperand::Packed(PackedA::new(cpu, weights, filters, steps)?), b)
        })
    };
    let results = Batch {
        values: output,
        count: geometry.batch * geometry.groups,
        row_stride: columns,
        batch_stride: filters * columns,
    };
    run_batch(cpu, &problem, results, workspace)
}
