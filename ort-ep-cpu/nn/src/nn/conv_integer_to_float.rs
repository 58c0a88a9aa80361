//! `ConvIntegerToFloat`: quantized convolution with a float result.
//!
//! Accumulators are those of `ConvInteger`. The epilogue scales them and adds the bias and the
//! residual, before the activation.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::spec::RUNTIME;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use super::conv_integer::{Planes, ReferenceConv, Side, accumulate, is_plane, reference};
use ort_cpu_conv::bytes::ConvTarget;
use ort_cpu_gemm::integer::Addend;
use ort_cpu_kernel::activation::activation_of;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::elementwise::{Binary, Operand, Unary, binary_in_place, unary_in_place};
use ort_cpu_vector::simd::Isa;

const PLANES: KernelDef = KernelDef {
    domain: RUNTIME,
    op: "ConvIntegerToFloat",
    unaligned: &[W],
    when: is_plane,
    make: make_planes,
    ..KernelDef::BASE
};

cpu_kernels![
    PLANES,
    KernelDef { rank: 1, in_place: &[(RESIDUAL, 0)], when: adds_in_place, ..PLANES },
    // Fallback for images of three spatial axes, by reference loops.
    KernelDef {
        domain: RUNTIME,
        op: "ConvIntegerToFloat",
        rank: -1,
        make: make_reference,
        ..KernelDef::BASE
    },
];

/// The places of the inputs.
const W: usize = 1;
const X_SCALE: usize = 2;
const W_SCALE: usize = 3;
const X_ZERO: usize = 4;
const W_ZERO: usize = 5;
const BIAS: usize = 6;
const RESIDUAL: usize = 7;

/// Returns whether the result may be computed in place of the residual. A GEMM finishes each
/// accumulator in one pass. The loop over planes of depthwise convolutions does not.
fn adds_in_place(node: &NodeView<'_>) -> bool {
    let channels = node.constant(W).and_then(|weight| weight.shape().get(1).copied());
    is_plane(node) && channels.is_some_and(|channels| channels > 1)
}

fn make_planes(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(FloatPlanes { planes: Planes::new(cx, W)?, activation: activation_of(cx)? }))
}

struct FloatPlanes {
    planes: Planes,
    activation: Option<Unary>,
}

impl Executable for FloatPlanes {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let filters = shapes.output(0).get(1).copied().unwrap_or(0);
        let factors = bytes_of::<f32>(filters.next_multiple_of(16))?;
        Ok(self.planes.workspace_len(shapes)?.saturating_add(factors))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let is_old = cx.in_place(0).is_some();
        let (mut workspace, output) = (cx.workspace()?, cx.output(0)?);
        let filters = output.shape().get(1).copied().unwrap_or(0);
        let factors = take(&mut workspace, bytes_of::<f32>(filters.next_multiple_of(16))?)?;
        let factors = &mut scratch::<f32>(factors)?[..filters];
        write_factors([cx.input(X_SCALE)?, cx.input(W_SCALE)?], factors)?;
        let addend = match (is_old, floats(cx.find_input(RESIDUAL))?) {
            (true, _) => Addend::Old,
            (false, []) => Addend::None,
            (false, residual) => Addend::Matrix(residual),
        };
        let target = ConvTarget::Numbers {
            values: output.as_mut_slice::<f32>()?,
            factors,
            bias: floats(cx.find_input(BIAS))?,
            addend,
            activation: self.activation,
        };
        let zeros = [cx.find_input(X_ZERO), cx.find_input(W_ZERO)];
        self.planes.run(cx, zeros, &[], target, workspace)
    }
}

/// Returns the floats of an input; none if it is missing.
fn floats(view: Option<TensorView<'_>>) -> Result<&[f32]> {
    Ok(view.map(|view| view.as_slice::<f32>()).transpose()?.unwrap_or(&[]))
}

/// Writes the factor of each filter: the scale of the image times that of the filter.
fn write_factors([x, w]: [TensorView<'_>; 2], to: &mut [f32]) -> Result<()> {
    let (x, w) = (x.as_slice::<f32>()?, w.as_slice::<f32>()?);
    let [x] = x else {
        return Err(error!(InvalidArgument, "x_scale has {} elements, expected 1", x.len()));
    };
    ensure!(
        w.len() == 1 || w.len() == to.len(),
        InvalidArgument,
        "w_scale has {} values, expected one for each of the {} filters",
        w.len(),
        to.len()
    );
    to.iter_mut().zip(w.iter().cycle()).for_each(|(to, w)| *to = x * w);
    Ok(())
}

fn make_reference(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(FloatReference { conv: reference(cx)?, activation: activation_of(cx)? }))
}

struct FloatReference {
    conv: ReferenceConv,
    activation: Option<Unary>,
}

impl Executable for FloatReference {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let x = Side::new(cx.input(0)?, cx.find_input(X_ZERO))?;
        let w = Side::new(cx.input(W)?, cx.find_input(W_ZERO))?;
        let (threads, output) = (cx.threads(), cx.output(0)?);
        let filters = output.shape().get(1).copied().unwrap_or(0);
        let plane: usize = output.shape().iter().skip(2).product();
        let mut factors = vec![0.0; filters];
        write_factors([cx.input(X_SCALE)?, cx.input(W_SCALE)?], &mut factors)?;
        let (bias, residual) = (floats(cx.find_input(BIAS))?, floats(cx.find_input(RESIDUAL))?);
        let values = output.as_mut_slice::<f32>()?;
        // Accumulators have the size of floats, so the result's memory holds them first.
        accumulate(threads, &self.conv, [&x, &w], &[], bytemuck::cast_slice_mut(values))?;
        for_each_chunk_mut(threads, values, plane, |unit, values| {
            let (isa, filter) = (Isa::current(), unit % filters);
            let bias = bias.get(filter).copied().unwrap_or(0.0);
            for value in &mut *values {
                *value = value.to_bits() as i32 as f32 * factors[filter] + bias;
            }
            if let Some(residual) = residual.get(unit * plane..(unit + 1) * plane) {
                binary_in_place(isa, Binary::Add, values, Operand::Slice(residual));
            }
            if let Some(function) = self.activation {
                unary_in_place(isa, function, values);
            }
        });
        Ok(())
    }
}
