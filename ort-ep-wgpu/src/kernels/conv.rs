//! `Conv`, `FusedConv` and `ConvTranspose` as implicit GEMM: windows are never unfolded to memory.

use std::ops::Deref;

use ort_core::ep::KernelDef;
use ort_core::ir::Attributes;
use ort_core::ops::fused::activation::Activation;
use ort_core::ops::nn::problem::{ConvShape, PixelLayout, volume};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure};
use ort_gpu::read::{self, has_up_to_three_axes};

use super::elementwise::FLOATS;
use super::windows::{WINDOWS, with_windows};
use super::{WgpuKernel, activation, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

const CONV: KernelDef =
    KernelDef { op: "Conv", types: &[("T", FLOATS)], when: has_up_to_three_axes, ..KernelDef::BASE };

wgpu_kernels![
    WgpuKernel::new(CONV, conv),
    WgpuKernel::new(KernelDef { domain: MICROSOFT, op: "FusedConv", in_place: &[(3, 0)], ..CONV }, conv),
    WgpuKernel::new(KernelDef { op: "ConvTranspose", ..CONV }, conv_transpose),
];

/// A convolution, by its sizes.
pub(super) struct Conv(ConvShape);

impl Deref for Conv {
    type Target = ConvShape;

    fn deref(&self) -> &ConvShape {
        &self.0
    }
}

const TILES: &str = include_str!("conv_tiles.wgsl");
const DOTS: &str = include_str!("conv_dots.wgsl");
const PLANES: &str = include_str!("conv_planes.wgsl");
/// The lanes of a workgroup, or of each slice of one.
const LANES: usize = 64;
/// The reduction steps whose filter values are in workgroup memory at a time.
const STEPS: usize = 32;
/// The number of workgroups that keeps a device busy. While there are fewer, each gets a smaller
/// tile.
const ENOUGH: usize = 96;
/// The reduction length from which on a split into [`SLICES`] pays off, if workgroups are few.
const MANY: usize = 256;
/// The slices of a split reduction.
const SLICES: usize = 4;
/// The most positions for which a workgroup computes one result, its lanes splitting the reduction.
const FEW: usize = 8;

impl Conv {
    /// Returns the convolution of an image and filters of these shapes.
    pub(super) fn new(attrs: &Attributes, image: &[usize], weight: &[usize]) -> Result<Conv> {
        ConvShape::new(attrs, image, weight, PixelLayout::ChannelsFirst).map(Conv)
    }

    /// As [`Conv::new`] for filters of one tap, ignoring the windows of the attributes.
    pub(super) fn pointwise(attrs: &Attributes, image: &[usize], weight: &[usize]) -> Result<Conv> {
        ConvShape::pointwise(attrs, image, weight).map(Conv)
    }

    /// The output positions of a filter, for one phase of a transposed convolution.
    fn positions(&self) -> usize {
        let of_image = match self.transposed {
            false => volume(&self.axes, |axis| axis.output),
            true => volume(&self.axes, |axis| axis.output.div_ceil(axis.stride)),
        };
        self.batch.saturating_mul(of_image)
    }

    /// Finishes a dispatch for a shader that has its tensors. `code` declares the accumulator type
    /// `num`, `pixel(i)` and `weight(i, m)`, which return an element as one, and
    /// `finish(i, m, sum)`, which writes a result of filter `m`.
    pub(super) fn dispatch(&self, shader: Shader, code: &str) -> Result<Dispatch> {
        let shader = with_windows(shader, &self.axes)
            .number("groups", self.groups)
            .number("channels", self.channels)
            .number("filters", self.filters);
        let products = self.depth();
        let all_filters = self.groups.saturating_mul(self.filters);
        // Few positions do not fill a tile: a workgroup per result, and lanes split the reduction.
        if !self.transposed && self.positions() <= FEW && products >= 2 * LANES {
            let shader = shader.number("positions", self.positions());
            let count = self.positions().saturating_mul(all_filters);
            return shader.groups(count, LANES, &[WINDOWS, code, DOTS].concat());
        }
        // A tile has at least four filters, most of which would be idle, as in a depthwise
        // convolution.
        if !self.transposed && self.filters <= 2 {
            let chunks = volume(&self.axes, |axis| axis.output).div_ceil(LANES);
            let count = self.batch.saturating_mul(all_filters).saturating_mul(chunks);
            return shader.groups(count, LANES, &[WINDOWS, code, PLANES].concat());
        }
        self.tiles(shader, code)
    }

    /// The implicit GEMM by tiles of positions and filters.
    fn tiles(&self, shader: Shader, code: &str) -> Result<Dispatch> {
        // A transposed convolution has a phase for each offset within a stride; a phase's positions
        // share their taps.
        let phases = if self.transposed { volume(&self.axes, |axis| axis.stride) } else { 1 };
        let units = phases.saturating_mul(self.groups);
        let workgroups = |places: usize, fours: usize| {
            let tiles = self.positions().div_ceil(LANES * places);
            units.saturating_mul(tiles).saturating_mul(self.filters.div_ceil(4 * fours))
        };
        // A lane computes 16 filters at most.
        let most = if self.filters > 8 { 4 } else { self.filters.div_ceil(4).max(1) };
        // From the largest tile down: positions, and fours of filters, per lane.
        let choices = [(4, most), (2, most), (1, most), (1, most.min(2))];
        // A software adapter needs few workgroups, and its idle lanes cost as much as busy ones.
        let enough = if shader.is_software() { 2 } else { ENOUGH };
        let fits = |(places, fours): &(usize, usize)| {
            // A tile of several positions per lane must be more than half full.
            let idles = *places > 1 && self.positions() <= LANES * places / 2;
            !idles && workgroups(*places, *fours) >= enough
        };
        // `None` means that even the smallest tiles are too few to keep the device busy.
        let busy = choices.into_iter().find(fits);
        let (places, fours) = busy.unwrap_or((1, most.min(2)));
        // Each phase has its share of the taps.
        let products = self.depth() / phases.max(1);
        let slices = if busy.is_none() && products >= MANY { SLICES } else { 1 };
        // The taps of a phase are stride / gcd(stride, dilation) apart. The others miss the
        // image's grid.
        let steps = self.axes.each_ref().map(|axis| axis.stride / common_divisor(axis.stride, axis.dilation));
        let shader = shader
            .sizes("steps", &steps)
            .number("positions", self.positions())
            .number("position_tiles", self.positions().div_ceil(LANES * places))
            .constant("TRANSPOSED", usize::from(self.transposed))
            .constant("STEPS", STEPS)
            .constant("SLICES", slices)
            .constant("PLACES", places)
            .constant("FOURS", fours);
        // Unrolling must not cross a tap, so its factor divides the channels.
        let abreast = [4, 2].into_iter().find(|count| self.channels.is_multiple_of(*count)).unwrap_or(1);
        let shader = shader.constant("ABREAST", abreast);
        let tiles = unrolled(TILES, &[("#p", places), ("#f", fours), ("#k", abreast)]);
        shader.groups(workgroups(places, fours), LANES * slices, &[WINDOWS, code, &tiles].concat())
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    // Never 0, because strides are divided by it.
    if b == 0 { a.max(1) } else { common_divisor(b, a % b) }
}

/// Unrolls marked lines: one that contains a name is repeated for every number below the name's
/// count, with the number in its place.
fn unrolled(code: &str, counts: &[(&str, usize)]) -> String {
    counts.iter().fold(code.to_owned(), |code, (name, count)| {
        let mut text = String::new();
        for line in code.lines() {
            let times = if line.contains(name) { *count } else { 1 };
            for number in 0..times {
                text += &line.replace(name, &number.to_string());
                text.push('\n');
            }
        }
        text
    })
}

/// Begins the shader of a float convolution, with bias, addend and activation in its epilogue.
pub(super) fn of_floats(
    cx: &OpCx<'_>,
    (x, w): (&Operand, &Operand),
    [bias, addend]: [Option<&Operand>; 2],
) -> Result<(Shader, String)> {
    let y = cx.output(0)?;
    let fits = bias.is_none_or(|bias| bias.count() == y.size(1))
        && addend.is_none_or(|addend| addend.shape == y.shape);
    ensure!(fits, InvalidArgument, "bias or addend does not broadcast to the output of shape {:?}", y.shape);
    let mut shader = Shader::new(cx).read("x", x).read("w", w).write("y", y);
    let mut sum = "sum".to_owned();
    if let Some(bias) = bias {
        shader = shader.read("b", bias);
        sum += " + b(m)";
    }
    if let Some(addend) = addend {
        shader = shader.read("z", addend);
        sum += " + z(i)";
    }
    let result = match Activation::of_attributes(cx.attrs)? {
        Some(activation) => activation::expression(&activation, "v")?,
        None => "v".to_owned(),
    };
    let code = format!(
        "alias num = f32;\n\
         fn pixel(i: u32) -> num {{ return x(i); }}\n\
         fn weight(i: u32, m: u32) -> num {{ return w(i); }}\n\
         fn finish(i: u32, m: u32, sum: num) {{\nlet v = {sum};\nset_y(i, {result});\n}}\n"
    );
    Ok((shader, code))
}

fn conv(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let conv = Conv::new(cx.attrs, &cx.input(0)?.shape, &cx.input(1)?.shape)?;
    let (shader, code) = of_floats(cx, (cx.input(0)?, cx.input(1)?), [cx.find_input(2), cx.find_input(3)])?;
    Ok(vec![conv.dispatch(shader, &code)?])
}

fn conv_transpose(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let conv = Conv(read::conv_transpose(cx)?);
    let (shader, code) = of_floats(cx, (cx.input(0)?, cx.input(1)?), [cx.find_input(2), None])?;
    Ok(vec![conv.dispatch(shader, &code)?])
}
