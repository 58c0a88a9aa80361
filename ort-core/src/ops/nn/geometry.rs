//! Window geometry of convolutions and pools.
//!
//! Output sizes and padding, computed in one place for both shape inference and the kernels.

use crate::dim::Dim;
use crate::ir::Attributes;
use crate::spec::{InferCx, Requirement};
use crate::{Result, ensure, error};

/// How the padding is chosen (`auto_pad`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoPad {
    /// As the attribute `pads` says.
    NotSet,
    /// As the output size requires; an odd remainder goes to the end.
    SameUpper,
    /// As the output size requires; an odd remainder goes to the beginning.
    SameLower,
    /// No padding.
    Valid,
}

/// The windows along one spatial axis, for an image of any size.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Axis {
    kernel: Dim,
    stride: i64,
    dilation: i64,
    pads: [i64; 2],
}

/// The windows of a convolution or pool as its attributes describe them, for images of any size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    axes: Vec<Axis>,
    auto_pad: AutoPad,
    ceil: bool,
}

/// The windows along one spatial axis of an image of known size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowAxis {
    /// The size of the image.
    pub input: usize,
    /// The number of windows.
    pub output: usize,
    /// The size of the kernel, without dilation.
    pub kernel: usize,
    /// The distance between windows, at least 1.
    pub stride: usize,
    /// The distance between positions of the kernel, at least 1.
    pub dilation: usize,
    /// The padding before and after the image.
    pub pads: [usize; 2],
}

/// The exclusive upper bound of sizes, strides, dilations and padding: sums of a few products of
/// two such numbers fit in 64 bits.
const LIMIT: i64 = 1 << 31;

impl Windows {
    /// Reads `auto_pad`, `ceil_mode`, `dilations`, `pads` and `strides`, if the operator has them.
    ///
    /// `kernel` is the size along each spatial axis of the image. The attribute `kernel_shape`, if
    /// given, must agree with it.
    ///
    /// # Errors
    ///
    /// If an attribute does not have a value for each axis, or has one out of range.
    pub fn new(attrs: &Attributes, kernel: &[Dim]) -> Result<Windows> {
        let rank = kernel.len();
        let list = |name: &str, len: usize, default: i64, least: i64| -> Result<Vec<i64>> {
            let values = match attrs.find_ints(name) {
                None | Some([]) => return Ok(vec![default; len]),
                Some(values) => values,
            };
            ensure!(
                values.len() == len,
                InvalidGraph,
                help = "one for each spatial axis, and for pads two",
                "{name} has {} values, expected {len}",
                values.len()
            );
            let wrong = values.iter().find(|value| !(least..LIMIT).contains(value));
            ensure!(
                wrong.is_none(),
                InvalidGraph,
                help = format!("each is {least} to {}", LIMIT - 1),
                "{name} {values:?} has a value out of range"
            );
            Ok(values.to_vec())
        };
        if attrs.find_ints("kernel_shape").is_some_and(|shape| !shape.is_empty()) {
            let given = list("kernel_shape", rank, 1, 1)?;
            let agrees = |(given, dim): (&i64, &Dim)| dim.as_constant().is_none_or(|size| size == *given);
            ensure!(
                given.iter().zip(kernel).all(agrees),
                InvalidGraph,
                "kernel_shape is {given:?}, but the weight has {kernel:?}"
            );
        }
        let (strides, dilations) = (list("strides", rank, 1, 1)?, list("dilations", rank, 1, 1)?);
        let pads = list("pads", rank * 2, 0, 0)?;
        let (begins, ends) = pads.split_at_checked(rank).unwrap_or((&pads, &[]));
        let lists = strides.into_iter().zip(dilations).zip(begins.iter().zip(ends));
        let mut axes = Vec::with_capacity(rank);
        for (kernel, ((stride, dilation), (&begin, &end))) in kernel.iter().zip(lists) {
            let fits = kernel.as_constant().is_none_or(|size| (1..LIMIT).contains(&size));
            ensure!(fits, InvalidGraph, "a kernel of size {kernel} is out of range");
            axes.push(Axis { kernel: kernel.clone(), stride, dilation, pads: [begin, end] });
        }
        let auto_pad = auto_pad(attrs)?;
        Ok(Windows { axes, auto_pad, ceil: attrs.find_int("ceil_mode").unwrap_or(0) != 0 })
    }

    /// The windows of an operator whose kernel is the attribute `kernel_shape`, for an image of
    /// `rank` dimensions, including batch and channels.
    ///
    /// # Errors
    ///
    /// As [`Windows::new`], and if the attribute does not have a value for each spatial axis.
    pub fn of_pool(attrs: &Attributes, rank: usize) -> Result<Windows> {
        let kernel: Vec<Dim> = attrs.ints("kernel_shape")?.iter().map(|&size| Dim::constant(size)).collect();
        ensure!(
            rank >= 3 && kernel.len() == rank - 2,
            InvalidGraph,
            "kernel_shape {kernel:?} does not fit an image of rank {rank}"
        );
        Windows::new(attrs, &kernel)
    }

    /// Returns the number of windows along each axis of an image of these spatial dimensions.
    pub fn outputs(&self, input: &[Dim]) -> Vec<Dim> {
        self.axes.iter().zip(input).map(|(axis, input)| self.output(axis, input)).collect()
    }

    fn output(&self, axis: &Axis, input: &Dim) -> Dim {
        let stride = Dim::constant(axis.stride);
        match self.auto_pad {
            AutoPad::SameUpper | AutoPad::SameLower => input.ceil_div(&stride),
            // The standard writes ceil((size - extent + 1) / stride), which is the same number.
            AutoPad::Valid => (input - axis.extent()).floor_div(&stride) + 1,
            AutoPad::NotSet => {
                let room = input + (axis.pads[0] + axis.pads[1]) - axis.extent();
                if !self.ceil {
                    return room.floor_div(&stride) + 1;
                }
                // `ceil_mode` drops a last window that would start in the padding after the image.
                let started = (input + axis.pads[0]).ceil_div(&stride);
                (room.ceil_div(&stride) + 1).min(&started)
            }
        }
    }

    /// Requires that a convolution's kernel fits in the padded image. ONNX Runtime refuses other
    /// convolutions, but not pools: it rounds the division by the stride towards 0, so there is one
    /// window if less than the stride is missing. We follow the standard, which rounds down.
    pub(super) fn require_fit(&self, cx: &InferCx<'_>, image: &[Dim]) {
        for (axis, size) in self.axes.iter().zip(image) {
            let padded = match self.auto_pad {
                AutoPad::SameUpper | AutoPad::SameLower => continue,
                AutoPad::Valid => size.clone(),
                AutoPad::NotSet => size + (axis.pads[0] + axis.pads[1]),
            };
            let what = "the extent of the kernel along an axis of the padded image";
            cx.require_in_run(Requirement::at_most(what, &axis.extent(), &padded));
        }
    }

    /// Returns the padding before and after each axis of an image of these spatial dimensions, or
    /// `None` if it depends on a symbolic one. At stride 1, `SAME` padding is the same for every
    /// size.
    pub fn paddings(&self, input: &[Dim]) -> Option<Vec<[i64; 2]>> {
        self.axes.iter().zip(input).map(|(axis, input)| self.padding(axis, input)).collect()
    }

    fn padding(&self, axis: &Axis, input: &Dim) -> Option<[i64; 2]> {
        let total = match self.auto_pad {
            AutoPad::NotSet => return Some(axis.pads),
            AutoPad::Valid => return Some([0, 0]),
            _ => (self.output(axis, input) - 1) * axis.stride + axis.extent() - input,
        };
        let total = total.as_constant()?.max(0);
        let (less, more) = (total / 2, total - total / 2);
        Some(if self.auto_pad == AutoPad::SameLower { [more, less] } else { [less, more] })
    }

    /// The windows on an image of these spatial sizes.
    ///
    /// # Errors
    ///
    /// If the kernel has a symbolic size, or is larger than the padded image.
    pub fn on(&self, input: &[usize]) -> Result<Vec<WindowAxis>> {
        ensure!(
            input.len() == self.axes.len(),
            InvalidArgument,
            "an image has {} spatial axes, expected {}",
            input.len(),
            self.axes.len()
        );
        self.axes.iter().zip(input).map(|(axis, &input)| self.axis_on(axis, input)).collect()
    }

    fn axis_on(&self, axis: &Axis, input: usize) -> Result<WindowAxis> {
        // Below 2^62 the sum with pads and a dilated kernel stays in 64 bits.
        let size = i64::try_from(input).ok().filter(|size| *size < LIMIT * LIMIT);
        let size = size.ok_or_else(|| error!(InvalidArgument, "an image of size {input} is too large"))?;
        let number = |dim: &Dim| {
            let number = dim.as_constant().and_then(|number| usize::try_from(number).ok());
            number.ok_or_else(|| error!(InvalidArgument, "a window does not fit in an image of size {input}"))
        };
        let size = Dim::constant(size);
        let output = self.output(axis, &size);
        // Only a symbolic kernel has no padding here, and such a kernel fails below.
        let pads = self.padding(axis, &size).unwrap_or_default();
        Ok(WindowAxis {
            input,
            output: number(&output)?,
            kernel: number(&axis.kernel)?,
            stride: number(&Dim::constant(axis.stride))?,
            dilation: number(&Dim::constant(axis.dilation))?,
            pads: [number(&Dim::constant(pads[0]))?, number(&Dim::constant(pads[1]))?],
        })
    }

    /// Requires that the padding leaves something of a transposed convolution's output.
    ///
    /// # Errors
    ///
    /// As [`Windows::transposed_outputs`].
    pub(super) fn require_output(&self, cx: &InferCx<'_>, image: &[Dim]) -> Result<()> {
        if self.auto_pad != AutoPad::NotSet || self.output_shape(cx.attrs)?.is_some() {
            return Ok(());
        }
        for ((axis, size), extra) in self.axes.iter().zip(image).zip(self.extra(cx.attrs)?) {
            let pads = Dim::constant(axis.pads[0] + axis.pads[1]);
            let whole = (size - 1) * axis.stride + extra + axis.extent();
            let what = "the padding along a spatial axis";
            cx.require_in_run(Requirement::at_most(what, &pads, &(whole - 1)));
        }
        Ok(())
    }

    /// Returns the spatial dimensions of a transposed convolution's output, which is what its
    /// windows slide over.
    ///
    /// # Errors
    ///
    /// If `output_padding` or `output_shape` does not have a value for each axis.
    pub fn transposed_outputs(&self, attrs: &Attributes, input: &[Dim]) -> Result<Vec<Dim>> {
        let (extra, shape) = (self.extra(attrs)?, self.output_shape(attrs)?);
        // An explicit shape wins over `auto_pad` and `pads`; the padding follows from it.
        if let Some(shape) = shape {
            return Ok(shape.into_iter().map(Dim::constant).collect());
        }
        let outputs = self.axes.iter().zip(input).zip(extra).map(|((axis, input), extra)| {
            // The standard: stride * (size - 1) + output_padding + (kernel - 1) * dilation + 1,
            // less the pads.
            let whole = (input - 1) * axis.stride + extra + axis.extent();
            // `SAME` makes the output `stride` times the image, whatever the kernel.
            match self.auto_pad {
                AutoPad::SameUpper | AutoPad::SameLower => input * axis.stride,
                AutoPad::Valid => whole,
                AutoPad::NotSet => whole - (axis.pads[0] + axis.pads[1]),
            }
        });
        Ok(outputs.collect())
    }

    /// The windows of a transposed convolution of an image of these spatial sizes.
    ///
    /// Input and output swap roles: `input` is the output's size, `output` that of the image. If
    /// `output_shape` is given, the padding follows from it instead of `pads`.
    ///
    /// # Errors
    ///
    /// As [`Windows::transposed_outputs`] and [`Windows::on`].
    pub fn transposed_on(&self, attrs: &Attributes, image: &[usize]) -> Result<Vec<WindowAxis>> {
        ensure!(
            image.len() == self.axes.len(),
            InvalidArgument,
            "the image and the weight have different ranks"
        );
        let sizes: Option<Vec<Dim>> =
            image.iter().map(|&size| i64::try_from(size).ok().map(Dim::constant)).collect();
        let sizes = sizes.ok_or_else(|| error!(InvalidArgument, "an image is too large"))?;
        let outputs = self.transposed_outputs(attrs, &sizes)?;
        let pads = self.transposed_paddings(attrs, &sizes)?;
        // Only a symbolic kernel leaves the padding open, and `number` refuses that below.
        let pads = pads.unwrap_or_else(|| vec![[0, 0]; image.len()]);
        let mut result = Vec::with_capacity(image.len());
        let sizes = image.iter().zip(outputs.iter().zip(pads));
        for (axis, (&image, (output, pads))) in self.axes.iter().zip(sizes) {
            let number = |dim: &Dim| {
                let number = dim.as_constant().and_then(|number| usize::try_from(number).ok());
                number.ok_or_else(|| error!(InvalidArgument, "the result's size {dim} is no size"))
            };
            result.push(WindowAxis {
                input: number(output)?,
                output: image,
                kernel: number(&axis.kernel)?,
                stride: number(&Dim::constant(axis.stride))?,
                dilation: number(&Dim::constant(axis.dilation))?,
                pads: [number(&Dim::constant(pads[0]))?, number(&Dim::constant(pads[1]))?],
            });
        }
        Ok(result)
    }

    /// Returns the padding before and after each axis of a transposed convolution's output, or
    /// `None` if it depends on a symbolic dimension.
    ///
    /// `SAME` padding never does: the output is `stride` times the image, so the part cut off is
    /// the same for every size.
    ///
    /// # Errors
    ///
    /// As [`Windows::transposed_outputs`].
    pub fn transposed_paddings(&self, attrs: &Attributes, image: &[Dim]) -> Result<Option<Vec<[i64; 2]>>> {
        let is_explicit = self.output_shape(attrs)?.is_some();
        let (outputs, extra) = (self.transposed_outputs(attrs, image)?, self.extra(attrs)?);
        let sizes = image.iter().zip(outputs.iter().zip(extra));
        let pads = self.axes.iter().zip(sizes).map(|(axis, (size, (output, extra)))| {
            if !is_explicit && self.auto_pad == AutoPad::NotSet {
                return Some(axis.pads);
            }
            let whole = (size - 1) * axis.stride + extra + axis.extent();
            // The standard's `total_padding`. It is negative if `output_shape` exceeds the whole.
            let total = (whole - output).as_constant()?.max(0);
            // The standard: every mode but SAME_UPPER puts the odd remainder at the beginning.
            let (less, more) = (total / 2, total - total / 2);
            Some(if self.auto_pad == AutoPad::SameUpper { [less, more] } else { [more, less] })
        });
        Ok(pads.collect())
    }

    fn extra(&self, attrs: &Attributes) -> Result<Vec<i64>> {
        self.spatial(attrs, "output_padding").map(|list| list.unwrap_or_else(|| vec![0; self.axes.len()]))
    }

    /// The attribute `output_shape`, without the batch and channels that some exporters include.
    fn output_shape(&self, attrs: &Attributes) -> Result<Option<Vec<i64>>> {
        match attrs.find_ints("output_shape") {
            Some(shape) if shape.len() == self.axes.len() + 2 => {
                Ok(Some(shape.iter().skip(2).copied().collect()))
            }
            _ => self.spatial(attrs, "output_shape"),
        }
    }

    fn spatial(&self, attrs: &Attributes, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(values) = attrs.find_ints(name).filter(|values| !values.is_empty()) else { return Ok(None) };
        let fits = values.len() == self.axes.len() && values.iter().all(|value| (0..LIMIT).contains(value));
        ensure!(fits, InvalidGraph, "{name} {values:?} does not fit {} spatial axes", self.axes.len());
        Ok(Some(values.to_vec()))
    }
}

impl Axis {
    /// The span of the dilated kernel.
    fn extent(&self) -> Dim {
        (&self.kernel - 1) * self.dilation + 1
    }
}

fn auto_pad(attrs: &Attributes) -> Result<AutoPad> {
    match attrs.find_string("auto_pad").unwrap_or("NOTSET") {
        "NOTSET" | "" => Ok(AutoPad::NotSet),
        "SAME_UPPER" => Ok(AutoPad::SameUpper),
        "SAME_LOWER" => Ok(AutoPad::SameLower),
        "VALID" => Ok(AutoPad::Valid),
        other => Err(error!(
            InvalidGraph,
            "auto_pad is '{other}', expected NOTSET, VALID, SAME_UPPER or SAME_LOWER"
        )),
    }
}
