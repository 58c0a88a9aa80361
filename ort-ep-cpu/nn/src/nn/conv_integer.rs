//! Quantized convolution: `ConvInteger` and `QLinearConv`.
//!
//! 8-bit values less their zero points are multiplied and accumulated in 32 bits.

use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::Windows;
use ort_core::tensor::{Shape, TensorView, element_count};
use ort_core::{Result, ensure, error};

use super::conv::groups_of;
use super::conv_reference::{convolve_plane, volume};
use super::window_of;
use ort_cpu_conv::bytes::{
    ConvTarget, PackedFilters, QuantizedConv, pack_filters, packed_filters_len, quantized_conv_workspace_len,
};
use ort_cpu_gemm::{Cpu, Window};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::packed::Packed;
use ort_cpu_kernel::quantized_convert::{range, read_floats};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::refused;
use ort_cpu_threads::interrupt::{self, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![
    KernelDef { op: "ConvInteger", unaligned: &[1], when: is_plane, make: make_integer, ..KernelDef::BASE },
    KernelDef { op: "QLinearConv", unaligned: &[3], when: is_plane, make: make_qlinear, ..KernelDef::BASE },
    // Fallback for images of three spatial axes, by reference loops.
    KernelDef { op: "ConvInteger", rank: -1, make: make_reference_integer, ..KernelDef::BASE },
    KernelDef { op: "QLinearConv", rank: -1, make: make_reference_qlinear, ..KernelDef::BASE },
];

/// Returns whether the image has one or two spatial axes.
pub(super) fn is_plane(node: &NodeView<'_>) -> bool {
    // The output has the same rank, if the image's is not known.
    matches!(node.rank(0).or(node.output_type(0).shape().map(<[_]>::len)), Some(3 | 4))
}

/// A convolution over planes. Constant filters are packed once, others in each run.
pub(super) struct Planes {
    attrs: Attributes,
    groups: usize,
    /// The index of the input that holds the filters.
    place: usize,
    /// The packed filters, whether they are unsigned, and their shape. None if they are not
    /// constant.
    packed: Option<(Packed<u8>, bool, Shape)>,
}

/// The sizes of one run.
struct ConvSizes {
    window: Window,
    batch: usize,
    /// The number of filters, the channels of a group, and the number of taps.
    shape: [usize; 3],
}

fn packed_shape(weight: &[usize]) -> Result<[usize; 3]> {
    match weight {
        [filters, channels, kernel @ ..] if !kernel.is_empty() => {
            Ok([*filters, *channels, element_count(kernel)?])
        }
        _ => Err(error!(InvalidArgument, "a weight of shape {weight:?}")),
    }
}

impl Planes {
    /// Packs the filters at input `place`, if they are constant.
    pub(super) fn new(cx: &mut CompileCx<'_>, place: usize) -> Result<Planes> {
        let (attrs, groups) = (cx.attrs().clone(), groups_of(cx)?);
        let Some(weight) = cx.constant(place) else {
            return Ok(Planes { attrs, groups, place, packed: None });
        };
        let (shape, unsigned) = (packed_shape(weight.shape())?, is_unsigned(weight));
        let packed = Packed::new(cx, packed_filters_len(shape), |packed| {
            pack_filters((weight.bytes()?, unsigned), shape, packed).map_err(refused)
        })?;
        cx.consume(place);
        let shape = Shape::from_slice(weight.shape());
        Ok(Planes { attrs, groups, place, packed: Some((packed, unsigned, shape)) })
    }

    fn sizes(&self, image: &[usize], weight: &[usize]) -> Result<ConvSizes> {
        // A packed weight may no longer be an input, so we kept its shape.
        let weight = self.packed.as_ref().map_or(weight, |(_, _, shape)| shape);
        let ([batch, channels, spatial @ ..], [filters, group_channels, kernel @ ..]) = (image, weight)
        else {
            return Err(error!(InvalidArgument, "a convolution of shapes {image:?} and {weight:?}"));
        };
        ensure!(
            group_channels.checked_mul(self.groups) == Some(*channels)
                && filters.is_multiple_of(self.groups)
                && spatial.len() == kernel.len(),
            InvalidArgument,
            "shapes {image:?} and {weight:?} do not match {} groups",
            self.groups
        );
        let kernel: Vec<Dim> = kernel.iter().map(|&size| Dim::constant(size as i64)).collect();
        let window = window_of(&Windows::new(&self.attrs, &kernel)?.on(spatial)?)?;
        Ok(ConvSizes { window, batch: *batch, shape: packed_shape(weight)? })
    }

    /// Returns the bytes for filters that are packed in each run; 0 if they are constant.
    fn packed_len(&self, shape: [usize; 3]) -> usize {
        if self.packed.is_some() { 0 } else { packed_filters_len(shape).next_multiple_of(64) }
    }

    /// Returns the bytes of workspace.
    pub(super) fn workspace_len(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let sizes = self.sizes(shapes.input(0), shapes.input(self.place))?;
        let cpu = Cpu::with_threads(shapes.threads);
        let conv = quantized_conv_workspace_len(cpu, sizes.window, sizes.shape).map_err(refused)?;
        Ok(conv.saturating_add(self.packed_len(sizes.shape)))
    }

    /// Runs the convolution with these zero points of the image and the filters.
    pub(super) fn run(
        &self,
        cx: &RunCx<'_>,
        zeros: [Option<TensorView<'_>>; 2],
        bias: &[i32],
        target: ConvTarget<'_>,
        mut workspace: &mut [u8],
    ) -> Result<()> {
        let (image, weight) = (cx.input(0)?, cx.find_input(self.place));
        let sizes = self.sizes(image.shape(), weight.map_or(&[], |weight| weight.shape()))?;
        // The standard allows one zero point per filter, but only one for the image.
        let [image_zero, filter_zeros] = zeros.map(Side::zeros);
        let filters = match (&self.packed, weight) {
            (Some((packed, unsigned, _)), _) => PackedFilters::new((packed.values(), *unsigned), sizes.shape),
            (None, Some(weight)) => {
                // Filters that are not constant are packed in each run; that is little next to the
                // convolution.
                let packed = take(&mut workspace, self.packed_len(sizes.shape))?;
                let unsigned = is_unsigned(weight);
                pack_filters((weight.bytes()?, unsigned), sizes.shape, packed).map_err(refused)?;
                PackedFilters::new((packed, unsigned), sizes.shape)
            }
            (None, None) => return Err(error!(Fail, "there are no filters")),
        };
        let conv = QuantizedConv {
            image: (image.bytes()?, !is_unsigned(image)),
            image_zero: image_zero?.first().copied().unwrap_or(0),
            batch: sizes.batch,
            groups: self.groups,
            window: sizes.window,
            filters: filters.map_err(refused)?,
            filter_zeros: &filter_zeros?,
            bias,
        };
        conv.run(Cpu::with_threads(cx.threads()), target, workspace).map_err(refused)
    }
}

fn is_unsigned(view: TensorView<'_>) -> bool {
    view.dtype() == DType::U8
}

fn make_integer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(IntegerPlanes(Planes::new(cx, 1)?)))
}

struct IntegerPlanes(Planes);

impl Executable for IntegerPlanes {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        self.0.workspace_len(shapes)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (workspace, accumulators) = (cx.workspace()?, cx.output(0)?.as_mut_slice::<i32>()?);
        let zeros = [cx.find_input(2), cx.find_input(3)];
        self.0.run(cx, zeros, &[], ConvTarget::Accumulators(accumulators), workspace)
    }
}

fn make_qlinear(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(QLinearPlanes(Planes::new(cx, 3)?)))
}

struct QLinearPlanes(Planes);

impl Executable for QLinearPlanes {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let filters = shapes.output(0).get(1).copied().unwrap_or(0);
        let factors = bytes_of::<f32>(filters.next_multiple_of(16))?;
        Ok(self.0.workspace_len(shapes)?.saturating_add(factors))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (mut workspace, output) = (cx.workspace()?, cx.output(0)?);
        let filters = output.shape().get(1).copied().unwrap_or(0);
        let factors = take(&mut workspace, bytes_of::<f32>(filters.next_multiple_of(16))?)?;
        let factors = &mut scratch::<f32>(factors)?[..filters];
        let zero = read_floats(cx.input(7)?)?.first().copied().unwrap_or(0.0) as i32;
        let bias = cx.find_input(8).map(|bias| bias.to_cow::<i32>()).transpose()?.unwrap_or_default();
        ConvScales::new([cx.input(1)?, cx.input(4)?, cx.input(6)?], filters)?.factors(factors);
        let (signed, zeros) = (output.dtype().is_signed(), [cx.find_input(2), cx.find_input(5)]);
        let target = ConvTarget::Quantized { values: output.bytes_mut()?, factors, zero, signed };
        self.0.run(cx, zeros, &bias, target, workspace)
    }
}

/// The scales of a `QLinearConv`.
pub(super) struct ConvScales<'a> {
    x: f32,
    w: std::borrow::Cow<'a, [f32]>,
    y: f32,
}

impl<'a> ConvScales<'a> {
    /// Takes the scales of the image, the filters and the result.
    pub(super) fn new([x, w, y]: [TensorView<'a>; 3], filters: usize) -> Result<ConvScales<'a>> {
        let w = w.to_cow::<f32>()?;
        ensure!(
            w.len() == 1 || w.len() == filters,
            InvalidArgument,
            "w_scale has {} values, expected one for each of the {filters} filters",
            w.len()
        );
        Ok(ConvScales { x: x.to_scalar()?, w, y: y.to_scalar()? })
    }

    /// Returns the factor that requantizes the accumulators of a filter.
    pub(super) fn factor(&self, filter: usize) -> f32 {
        let scale = self.w.get(filter).or(self.w.first()).copied().unwrap_or(1.0);
        self.x * scale / self.y
    }

    /// Writes the factor of each filter.
    fn factors(&self, to: &mut [f32]) {
        to.iter_mut().enumerate().for_each(|(filter, to)| *to = self.factor(filter));
    }
}

pub(super) struct ReferenceConv {
    attrs: Attributes,
    groups: usize,
}

/// Returns the reference convolution of a node.
pub(super) fn reference(cx: &CompileCx<'_>) -> Result<ReferenceConv> {
    Ok(ReferenceConv { attrs: cx.attrs().clone(), groups: groups_of(cx)? })
}

/// An operand with its zero points: one for all, or one for each filter.
pub(super) struct Side<'a> {
    quantized: TensorView<'a>,
    zeros: Vec<i32>,
}

impl<'a> Side<'a> {
    pub(super) fn new(quantized: TensorView<'a>, zeros: Option<TensorView<'a>>) -> Result<Side<'a>> {
        Ok(Side { quantized, zeros: Side::zeros(zeros)? })
    }

    fn zeros(zeros: Option<TensorView<'_>>) -> Result<Vec<i32>> {
        // A missing zero point is 0.
        let zeros = zeros.map(|zeros| zeros.to_ints()).transpose()?.unwrap_or_else(|| vec![0]);
        Ok(zeros.into_iter().map(|zero| zero as i32).collect())
    }

    fn zero(&self, filter: usize) -> i32 {
        self.zeros.get(filter).or(self.zeros.first()).copied().unwrap_or(0)
    }

    /// Returns the bytes, and whether they are signed.
    fn reader(&self) -> Result<(&'a [u8], bool)> {
        Ok((self.quantized.bytes()?, self.quantized.dtype().is_signed()))
    }
}

fn number(byte: u8, signed: bool) -> i32 {
    if signed { i32::from(byte as i8) } else { i32::from(byte) }
}

/// Computes the accumulators of the convolution, plane by plane.
pub(super) fn accumulate(
    threads: usize,
    reference: &ReferenceConv,
    [x, w]: [&Side<'_>; 2],
    bias: &[i32],
    result: &mut [i32],
) -> Result<()> {
    let (image, weight) = (x.quantized.shape(), w.quantized.shape());
    let ([_, channels, spatial @ ..], [filters, group_channels, kernel @ ..]) = (image, weight) else {
        return Err(error!(InvalidArgument, "a convolution of shapes {image:?} and {weight:?}"));
    };
    let kernel: Vec<Dim> = kernel.iter().map(|&size| Dim::constant(size as i64)).collect();
    let axes = Windows::new(&reference.attrs, &kernel)?.on(spatial)?;
    ensure!(
        group_channels.checked_mul(reference.groups) == Some(*channels)
            && filters.is_multiple_of(reference.groups)
            && (bias.is_empty() || bias.len() == *filters),
        InvalidArgument,
        "shapes {image:?} and {weight:?} do not match {} groups",
        reference.groups
    );
    let ((image, image_signed), (weight, weight_signed)) = (x.reader()?, w.reader()?);
    let input = volume(&axes, |axis| axis.input);
    let output = volume(&axes, |axis| axis.output);
    let (image_len, weight_len) = (group_channels.saturating_mul(input), weight.len() / (*filters).max(1));
    for_each_chunk_mut(threads, result, output, |unit, plane| {
        // One unit is a plane of the result, so that no two threads write to the same one.
        let (batch, filter) = (unit / filters, unit % filters);
        let group = batch * reference.groups + filter / (filters / reference.groups);
        let sides = (&image[group * image_len..][..image_len], &weight[filter * weight_len..][..weight_len]);
        // Only filters may have a zero point each; the image has one.
        let (x_zero, w_zero) = (x.zero(0), w.zero(filter));
        // Starting with the bias saves a pass over the plane.
        interrupt::fill(plane, bias.get(filter).copied().unwrap_or(0));
        convolve_plane(&axes, sides, plane, |sum: i32, x, w| {
            // Accumulators have 32 bits and wrap on overflow.
            let product = (number(x, image_signed) - x_zero).wrapping_mul(number(w, weight_signed) - w_zero);
            sum.wrapping_add(product)
        });
    });
    Ok(())
}

fn make_reference_integer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let reference = reference(cx)?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let x = Side::new(cx.input(0)?, cx.find_input(2))?;
        let w = Side::new(cx.input(1)?, cx.find_input(3))?;
        let (threads, result) = (cx.threads(), cx.output(0)?.as_mut_slice::<i32>()?);
        accumulate(threads, &reference, [&x, &w], &[], result)
    }))
}

fn make_reference_qlinear(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(ReferenceQLinear(reference(cx)?)))
}

struct ReferenceQLinear(ReferenceConv);

impl Executable for ReferenceQLinear {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        bytes_of::<i32>(element_count(shapes.output(0))?)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        // Accumulators need 32 bits each, and the quantized output has only 8.
        let ints = scratch::<i32>(cx.workspace()?)?;
        let x = Side::new(cx.input(0)?, Some(cx.input(2)?))?;
        let w = Side::new(cx.input(3)?, Some(cx.input(5)?))?;
        let bias = cx.find_input(8).map(|bias| bias.to_cow::<i32>()).transpose()?;
        let y_zero = read_floats(cx.input(7)?)?.first().copied().unwrap_or(0.0);
        let filters = w.quantized.shape().first().copied().unwrap_or(0);
        let scales = ConvScales::new([cx.input(1)?, cx.input(4)?, cx.input(6)?], filters)?;
        let mut factors = vec![0.0; filters];
        scales.factors(&mut factors);
        let (threads, output) = (cx.threads(), cx.output(0)?);
        let (count, dtype) = (output.element_count(), output.dtype());
        let plane: usize = output.shape().iter().skip(2).product();
        let ints = &mut ints[..count];
        accumulate(threads, &self.0, [&x, &w], bias.as_deref().unwrap_or(&[]), ints)?;
        let (least, greatest) =
            range(dtype).ok_or_else(|| error!(Fail, "quantized values of type {dtype}"))?;
        let signed = dtype.is_signed();
        for_each_chunk_mut(threads, output.bytes_mut()?, plane, |unit, quantized| {
            let factor = factors[unit % filters];
            for (code, sum) in spending(2, quantized.iter_mut().zip(&ints[unit * plane..])) {
                let value = (*sum as f32 * factor).round_ties_even() + y_zero;
                let value = value.clamp(least, greatest);
                *code = if signed { (value as i8) as u8 } else { value as u8 };
            }
        });
        Ok(())
    }
}
