//! `ConvInteger` and `QLinearConv`: sums of products of 8-bit codes less their zero points, in 32 bits.

use ort_core::dim::Dim;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::Windows;
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};

use super::conv::groups_of;
use super::conv_plain::convolve_plane;
use crate::cpu_kernels;
use crate::kernels::linalg::{bytes_of, scratch};
use crate::kernels::quant::codes::{range, read_floats};
use crate::parallel::for_each_chunk_mut;

cpu_kernels![
    KernelDef { op: "ConvInteger", make: make_integer, ..KernelDef::BASE },
    KernelDef { op: "QLinearConv", make: make_qlinear, ..KernelDef::BASE },
];

struct Plain {
    attrs: Attributes,
    groups: usize,
}

fn plain(cx: &CompileCx<'_>) -> Result<Plain> {
    Ok(Plain { attrs: cx.attrs().clone(), groups: groups_of(cx)? })
}

/// An operand with its zero points: one for all, or one for each filter.
struct Side<'a> {
    codes: TensorView<'a>,
    zeros: Vec<i32>,
}

impl<'a> Side<'a> {
    fn new(codes: TensorView<'a>, zeros: Option<TensorView<'a>>) -> Result<Side<'a>> {
        let zeros = zeros.map(|zeros| zeros.to_ints()).transpose()?.unwrap_or_else(|| vec![0]);
        Ok(Side { codes, zeros: zeros.into_iter().map(|zero| zero as i32).collect() })
    }

    fn zero(&self, filter: usize) -> i32 {
        self.zeros.get(filter).or(self.zeros.first()).copied().unwrap_or(0)
    }

    /// The code as a number: the byte, with a sign where the type has one.
    fn reader(&self) -> Result<(&'a [u8], bool)> {
        Ok((self.codes.bytes()?, self.codes.dtype().is_signed()))
    }
}

fn number(byte: u8, signed: bool) -> i32 {
    if signed { i32::from(byte as i8) } else { i32::from(byte) }
}

/// The convolution's sums, plane by plane; `finish` gets each with its filter.
fn sums(
    threads: usize,
    plain: &Plain,
    [x, w]: [&Side<'_>; 2],
    bias: &[i32],
    result: &mut [i32],
) -> Result<()> {
    let (image, weight) = (x.codes.shape(), w.codes.shape());
    let ([_, channels, spatial @ ..], [filters, group_channels, kernel @ ..]) = (image, weight) else {
        return Err(error!(InvalidArgument, "a convolution of shapes {image:?} and {weight:?}"));
    };
    let kernel: Vec<Dim> = kernel.iter().map(|&size| Dim::constant(size as i64)).collect();
    let axes = Windows::new(&plain.attrs, &kernel)?.on(spatial)?;
    ensure!(
        group_channels * plain.groups == *channels
            && filters.is_multiple_of(plain.groups)
            && (bias.is_empty() || bias.len() == *filters),
        InvalidArgument,
        "shapes {image:?} and {weight:?} do not fit {} groups",
        plain.groups
    );
    let ((image, image_signed), (weight, weight_signed)) = (x.reader()?, w.reader()?);
    let input: usize = axes.iter().map(|axis| axis.input).product();
    let output: usize = axes.iter().map(|axis| axis.output).product();
    let (image_len, weight_len) = (group_channels * input, weight.len() / (*filters).max(1));
    for_each_chunk_mut(threads, result, output, |unit, plane| {
        let (batch, filter) = (unit / filters, unit % filters);
        let group = batch * plain.groups + filter / (filters / plain.groups);
        let sides = (&image[group * image_len..][..image_len], &weight[filter * weight_len..][..weight_len]);
        let (x_zero, w_zero) = (x.zero(0), w.zero(filter));
        plane.fill(bias.get(filter).copied().unwrap_or(0));
        convolve_plane(&axes, sides, plane, |sum: i32, x, w| {
            let product = (number(x, image_signed) - x_zero).wrapping_mul(number(w, weight_signed) - w_zero);
            sum.wrapping_add(product)
        });
    });
    Ok(())
}

fn make_integer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let plain = plain(cx)?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let x = Side::new(cx.input(0)?, cx.find_input(2))?;
        let w = Side::new(cx.input(1)?, cx.find_input(3))?;
        let (threads, result) = (cx.threads(), cx.output(0)?.as_mut_slice::<i32>()?);
        sums(threads, &plain, [&x, &w], &[], result)
    }))
}

fn make_qlinear(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(QLinear(plain(cx)?)))
}

struct QLinear(Plain);

impl Executable for QLinear {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        bytes_of::<i32>(element_count(shapes.output(0))?)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let ints = scratch::<i32>(cx.workspace()?)?;
        let x = Side::new(cx.input(0)?, Some(cx.input(2)?))?;
        let w = Side::new(cx.input(3)?, Some(cx.input(5)?))?;
        let bias = cx.find_input(8).map(|bias| bias.to_cow::<i32>()).transpose()?;
        let x_scale = cx.input(1)?.to_scalar::<f32>()?;
        let w_scales = cx.input(4)?.to_cow::<f32>()?;
        let y_scale = cx.input(6)?.to_scalar::<f32>()?;
        let y_zero = read_floats(cx.input(7)?)?.first().copied().unwrap_or(0.0);
        let filters = w.codes.shape().first().copied().unwrap_or(0);
        ensure!(
            w_scales.len() == 1 || w_scales.len() == filters,
            InvalidArgument,
            "w_scale has {} values for {filters} filters",
            w_scales.len()
        );
        let (threads, output) = (cx.threads(), cx.output(0)?);
        let (count, dtype) = (output.element_count(), output.dtype());
        let plane: usize = output.shape().iter().skip(2).product();
        let ints = &mut ints[..count];
        sums(threads, &self.0, [&x, &w], bias.as_deref().unwrap_or(&[]), ints)?;
        let (least, greatest) = range(dtype).ok_or_else(|| error!(Fail, "codes of type {dtype}"))?;
        let signed = dtype.is_signed();
        for_each_chunk_mut(threads, output.bytes_mut()?, plane, |unit, codes| {
            let scale = w_scales.get(unit % filters).or(w_scales.first()).copied().unwrap_or(1.0);
            let factor = x_scale * scale / y_scale;
            for (code, sum) in codes.iter_mut().zip(&ints[unit * plane..]) {
                let value = (*sum as f32 * factor).round_ties_even() + y_zero;
                let value = value.clamp(least, greatest);
                *code = if signed { (value as i8) as u8 } else { value as u8 };
            }
        });
        Ok(())
    }
}
