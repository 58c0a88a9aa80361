//! `Conv` and `FusedConv` as a GEMM with packed weights.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ops::nn::geometry::Windows;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use super::{window_of, windows_of};
use ort_cpu_conv::{
    ConvAttributes, ConvGeometry, Input, WeightSide, batched_workspace_len, forward, forward_batched,
    is_batched, pack_weights, packed_weights_len, workspace_len,
};
use ort_cpu_gemm::{Cpu, STEPS, Step};
use ort_cpu_kernel::activation::activation_of;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::packed::{PackedFloats, is_weight};
use ort_cpu_kernel::with_weight;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take, whole_lines};
use ort_cpu_matmul::refused;
use ort_cpu_vector::elementwise::Unary;

const SINGLE: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

/// For constant weights, which are packed once.
const PACKED: KernelDef = KernelDef {
    op: "Conv",
    types: &[("T", SINGLE)],
    rank: 1,
    // Packing reads the weight at any alignment.
    unaligned: &[1],
    when: |node: &NodeView<'_>| {
        let constant = node.constant(1).is_some_and(|weight| matches!(weight.shape().len(), 3..=5));
        constant && is_weight(node.dtype(1))
    },
    make: |cx| via_f32(cx, make_packed),
    ..KernelDef::BASE
};

/// For weights that only the run knows.
const UNPACKED: KernelDef = KernelDef {
    op: "Conv",
    types: &[("T", SINGLE)],
    when: |node: &NodeView<'_>| matches!(node.rank(0).or(node.rank(1)), None | Some(3..=5)),
    make: |cx| via_f32(cx, make_unpacked),
    ..KernelDef::BASE
};

cpu_kernels![
    PACKED,
    UNPACKED,
    KernelDef { domain: MICROSOFT, op: "FusedConv", ..PACKED },
    KernelDef {
        domain: MICROSOFT,
        op: "FusedConv",
        rank: 2,
        in_place: &[(3, 0)],
        when: adds_in_place,
        ..PACKED
    },
    KernelDef { domain: MICROSOFT, op: "FusedConv", ..UNPACKED },
];

/// Returns whether the result may be computed in place of the addend. With at most `STEPS` terms,
/// each accumulator is finished in one pass, so nothing overwrites an addend before it is read.
fn adds_in_place(node: &NodeView<'_>) -> bool {
    let pointwise = node.constant(1).is_some_and(|weight| match weight.shape() {
        [_, channels, kernel @ ..] => *channels <= STEPS && kernel.iter().all(|size| *size == 1),
        _ => false,
    });
    let whole = node.attrs().int("group").is_ok_and(|group| group == 1);
    (PACKED.when)(node) && pointwise && whole && node.dtype(0) == Some(DType::F32)
}

/// The assumed size of an image along an axis whose size is not known ahead.
const MEDIUM: usize = 64;

/// A convolution with constant weights.
struct Packed {
    windows: Windows,
    weight: Shape,
    groups: usize,
    side: WeightSide,
    packed: PackedFloats,
    activation: Option<Unary>,
    precision: Precision,
    /// Whether to copy an addend that shares memory with the result.
    copies_addend: bool,
}

/// Returns the CPU configuration for a session that asks for `precision`. If few filters share a
/// window, or windows are small, converting the windows costs more than a float32 GEMM. We then
/// stay in float32.
pub(super) fn cpu_of(threads: usize, precision: Precision, weight: &[usize], groups: usize) -> Cpu {
    const FEWEST: usize = 16;
    let (filters, steps) = (weight[0] / groups, weight[1..].iter().product::<usize>());
    let pays = filters.min(steps) >= FEWEST;
    Cpu::with_threads(threads).in_precision(if pays { precision } else { Precision::Fp32 })
}

/// Returns the number of groups of a node.
pub(super) fn groups_of(cx: &CompileCx<'_>) -> Result<usize> {
    let group = cx.attrs().int("group")?;
    let group = usize::try_from(group).ok().filter(|group| *group > 0);
    group.ok_or_else(|| error!(InvalidGraph, "a convolution's group is not positive"))
}

/// Returns the geometry of a convolution.
pub(super) fn geometry(
    windows: &Windows,
    image: &[usize],
    weight: &[usize],
    groups: usize,
) -> Result<ConvGeometry> {
    ensure!(
        image.len() >= 3 && image.len() == weight.len(),
        InvalidArgument,
        "an image of shape {image:?} does not match a weight of shape {weight:?}"
    );
    let window = window_of(&windows.on(&image[2..])?)?;
    // The library checks channels and groups. We computed the windows from the node's attributes.
    let attributes = ConvAttributes { groups, ..ConvAttributes::default() };
    let geometry = ConvGeometry::new(image, weight, &attributes);
    let mut geometry = geometry.map_err(|problem| error!(Fail, "{problem}"))?;
    geometry.window = window;
    Ok(geometry)
}

fn make_packed(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let weight = cx.constant(1).ok_or_else(|| error!(Fail, "the weight is not constant"))?;
    let shape = Shape::from_slice(weight.shape());
    let (windows, groups) = (windows_of(cx, &shape)?, groups_of(cx)?);
    let cpu = cpu_of(cx.threads, cx.precision, &shape, groups);
    // Packing depends on the image's size only through the choice of side. For what is not known of
    // it we assume one image of medium size, if these weights fit one.
    // At least as large as the kernel, so that the windows fit.
    let mut image = shape.iter().map(|size| (*size).max(MEDIUM)).collect::<Vec<_>>();
    image[0] = 1;
    image[1] = shape[1].saturating_mul(groups);
    for (size, known) in image.iter_mut().zip(cx.node.shape(0).unwrap_or_default()) {
        *size = known.as_constant().and_then(|known| usize::try_from(known).ok()).unwrap_or(*size);
    }
    let (geometry, side) = match geometry(&windows, &image, &shape, groups) {
        Ok(geometry) => (geometry, WeightSide::preferred(cpu, &geometry)),
        // Otherwise, an image of the kernel's size yields the geometry.
        Err(_) => {
            let mut image = shape.clone();
            image[0] = 1;
            image[1] = shape[1].saturating_mul(groups);
            let attributes = ConvAttributes { groups, ..ConvAttributes::default() };
            (ConvGeometry::new(&image, &shape, &attributes).map_err(refused)?, WeightSide::Lhs)
        }
    };
    let packed = PackedFloats::new(
        cx,
        packed_weights_len(cpu, &geometry, side),
        |packed| with_weight!(weight, weights => pack_weights(cpu, &geometry, side, weights, packed).map_err(refused)),
    )?;
    cx.consume(1);
    let activation = activation_of(cx)?;
    let precision = cx.precision;
    // The GEMM can read the addend from the result's memory only with the weights on the left.
    let copies_addend = side != WeightSide::Lhs && adds_in_place(&cx.node);
    Ok(Box::new(Packed {
        windows,
        weight: shape,
        groups,
        side,
        packed,
        activation,
        precision,
        copies_addend,
    }))
}

impl Executable for Packed {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let geometry = geometry(&self.windows, shapes.input(0), &self.weight, self.groups)?;
        let cpu = cpu_of(shapes.threads, self.precision, &self.weight, self.groups);
        let addend = if self.copies_addend { addend_len(&geometry) } else { 0 };
        bytes_of::<f32>(addend.saturating_add(workspace_len(cpu, &geometry, self.side)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut workspace = scratch(cx.workspace()?)?;
        let geometry = geometry(&self.windows, cx.input(0)?.shape(), &self.weight, self.groups)?;
        let cpu = cpu_of(cx.threads(), self.precision, &self.weight, self.groups);
        let in_place = cx.in_place(0).is_some();
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        let addend = match (in_place, self.side) {
            (false, _) => Addend::of_input(cx)?,
            (true, WeightSide::Lhs) => Addend::Held,
            (true, _) => {
                // The first values of the workspace, as `workspace` counted them.
                let copy = take(&mut workspace, addend_len(&geometry))?;
                copy.get_mut(..output.len())
                    .ok_or_else(|| error!(Fail, "the addend is larger than the result"))?
                    .copy_from_slice(output);
                Addend::Apart(copy)
            }
        };
        let image = cx.input(0)?.as_slice::<f32>()?;
        let epilogue = epilogue(cx, &geometry, addend, self.activation)?;
        let input = Input { image, weights: self.packed.values(), side: self.side, epilogue: &epilogue };
        forward(cpu, &geometry, input, output, workspace).map_err(refused)
    }
}

/// Returns the length of the addend in values, in whole cache lines.
fn addend_len(geometry: &ConvGeometry) -> usize {
    let planes = geometry.batch.saturating_mul(geometry.filters);
    whole_lines(planes.saturating_mul(geometry.window.output_len()))
}

/// The addend of the accumulators.
#[derive(Clone, Copy)]
enum Addend<'a> {
    None,
    /// It has memory of its own.
    Apart(&'a [f32]),
    /// The result's memory holds it.
    Held,
}

impl<'a> Addend<'a> {
    fn of_input(cx: &RunCx<'a>) -> Result<Addend<'a>> {
        Ok(match cx.find_input(3) {
            Some(view) => Addend::Apart(view.as_slice()?),
            None => Addend::None,
        })
    }
}

/// Returns the epilogue: bias, the addend of `FusedConv`, and activation.
fn epilogue<'a, 'cx: 'a>(
    cx: &RunCx<'cx>,
    geometry: &ConvGeometry,
    addend: Addend<'a>,
    activation: Option<Unary>,
) -> Result<SmallVec<[Step<'a>; 3]>> {
    let mut epilogue: SmallVec<[Step<'a>; 3]> = SmallVec::new();
    if let Some(bias) = cx.find_input(2) {
        // The rows of the result are filters.
        epilogue.push(Step::RowBias(bias.as_slice()?));
    }
    match addend {
        Addend::None => {}
        Addend::Apart(values) => {
            let row_stride = geometry.output_size().iter().product();
            epilogue.push(Step::Residual { values, row_stride });
        }
        Addend::Held => epilogue.push(Step::Held),
    }
    epilogue.extend(activation.map(Step::Activate));
    Ok(epilogue)
}

/// A convolution with weights that only the run knows. Each run packs them.
struct UnpackedConv {
    attrs: ort_core::ir::Attributes,
    groups: usize,
    activation: Option<Unary>,
    precision: Precision,
}

fn make_unpacked(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (attrs, precision) = (cx.attrs().clone(), cx.precision);
    Ok(Box::new(UnpackedConv { attrs, groups: groups_of(cx)?, activation: activation_of(cx)?, precision }))
}

impl UnpackedConv {
    fn geometry(&self, image: &[usize], weight: &[usize]) -> Result<ConvGeometry> {
        ensure!(weight.len() >= 3, InvalidArgument, "a weight of shape {weight:?}");
        let kernel: Vec<_> =
            weight[2..].iter().map(|&size| ort_core::dim::Dim::constant(size as i64)).collect();
        geometry(&Windows::new(&self.attrs, &kernel)?, image, weight, self.groups)
    }
}

impl Executable for UnpackedConv {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let geometry = self.geometry(shapes.input(0), shapes.input(1))?;
        let cpu = cpu_of(shapes.threads, self.precision, shapes.input(1), self.groups);
        // Images too small for GEMMs of their own share one.
        if is_batched(cpu, &geometry) {
            return bytes_of::<f32>(batched_workspace_len(cpu, &geometry));
        }
        let packed = packed_weights_len(cpu, &geometry, WeightSide::Lhs);
        bytes_of::<f32>(packed.next_multiple_of(16) + workspace_len(cpu, &geometry, WeightSide::Lhs))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        let (image, weight) = (cx.input(0)?, cx.input(1)?);
        let geometry = self.geometry(image.shape(), weight.shape())?;
        let cpu = cpu_of(cx.threads(), self.precision, weight.shape(), self.groups);
        let addend = Addend::of_input(cx)?;
        if is_batched(cpu, &geometry) {
            let given = [image.as_slice()?, weight.as_slice()?];
            let epilogue = epilogue(cx, &geometry, addend, self.activation)?;
            let output = cx.output(0)?.as_mut_slice::<f32>()?;
            return forward_batched(cpu, &geometry, given, &epilogue, output, rest).map_err(refused);
        }
        let side = WeightSide::Lhs;
        // Whole cache lines, so that the rest of the workspace stays aligned.
        let packed = take(&mut rest, packed_weights_len(cpu, &geometry, side).next_multiple_of(16))?;
        pack_weights(cpu, &geometry, side, weight.as_slice::<f32>()?, packed).map_err(refused)?;
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        let epilogue = epilogue(cx, &geometry, addend, self.activation)?;
        let input = Input { image: image.as_slice()?, weights: packed, side, epilogue: &epilogue };
        forward(cpu, &geometry, input, output, rest).map_err(refused)
    }
}
