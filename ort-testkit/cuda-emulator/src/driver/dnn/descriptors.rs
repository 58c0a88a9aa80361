//! The descriptors of convolutions, and the check that they are consistent.

use std::ffi::c_int;

use super::super::routine::Element;
use super::{BAD_PARAM, NOT_SUPPORTED};

/// A tensor: sizes and strides of each axis, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) element: Element,
    pub(super) sizes: Vec<usize>,
    pub(super) steps: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Filter {
    element: Element,
    sizes: Vec<usize>,
    channels_last: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Convolution {
    pub(super) pads: Vec<usize>,
    pub(super) strides: Vec<usize>,
    pub(super) dilations: Vec<usize>,
    pub(super) groups: usize,
    pub(super) math: c_int,
}

/// A spatial axis of the image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub(super) input: usize,
    pub(super) output: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) dilation: usize,
    pub(super) pad: usize,
}

/// A convolution whose descriptors are consistent. Its tensors are dense and all in the same
/// layout, NCHW or NHWC.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub(super) element: Element,
    pub(super) math: c_int,
    pub(super) channels_last: bool,
    pub(super) batch: usize,
    pub(super) groups: usize,
    /// Channels and filters of one group.
    pub(super) channels: usize,
    pub(super) filters: usize,
    pub(super) axes: Vec<Axis>,
}

fn element(number: c_int) -> Result<Element, c_int> {
    match number {
        0 => Ok(Element::F32),
        2 => Ok(Element::F16),
        9 => Ok(Element::Bf16),
        _ => Err(NOT_SUPPORTED),
    }
}

fn positive(sizes: &[c_int]) -> Result<Vec<usize>, c_int> {
    let size = |size: &c_int| usize::try_from(*size).ok().filter(|size| *size > 0).ok_or(BAD_PARAM);
    sizes.iter().map(size).collect()
}

/// Returns the strides of a dense tensor. The channels are the second axis, and the innermost one
/// in memory if `channels_last`.
fn dense(sizes: &[usize], channels_last: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    if channels_last {
        order[1..].rotate_left(1);
    }
    let (mut steps, mut step) = (vec![1; sizes.len()], 1);
    for axis in order.into_iter().rev() {
        steps[axis] = step;
        step *= sizes[axis];
    }
    steps
}

impl Tensor {
    pub(super) fn new(ty: c_int, sizes: &[c_int], steps: &[c_int]) -> Result<Tensor, c_int> {
        // Fewer than four axes are legal to describe, but no supported function takes them.
        if sizes.len() < 4 {
            return Err(NOT_SUPPORTED);
        }
        Ok(Tensor { element: element(ty)?, sizes: positive(sizes)?, steps: positive(steps)? })
    }

    /// Returns the bytes up to and including the last element.
    pub(super) fn bytes(&self) -> usize {
        let last: usize = self.sizes.iter().zip(&self.steps).map(|(size, step)| (size - 1) * step).sum();
        (last + 1) * self.element.bytes()
    }

    /// Whether it holds one number for each channel of `of`.
    pub(super) fn is_vector(&self, of: &Tensor) -> bool {
        let is_one = |(axis, size): (usize, &usize)| *size == if axis == 1 { of.sizes[1] } else { 1 };
        self.sizes.len() == of.sizes.len()
            && self.sizes.iter().enumerate().all(is_one)
            && self.element == of.element
    }

    fn is_dense(&self, channels_last: bool) -> bool {
        self.steps == dense(&self.sizes, channels_last)
    }
}

impl Filter {
    /// Reads the formats `CUDNN_TENSOR_NCHW` and `CUDNN_TENSOR_NHWC`; both list the sizes in NCHW
    /// order.
    pub(super) fn new(ty: c_int, format: c_int, sizes: &[c_int]) -> Result<Filter, c_int> {
        let channels_last = match format {
            0 => false,
            1 => true,
            _ => return Err(NOT_SUPPORTED),
        };
        Ok(Filter { element: element(ty)?, sizes: positive(sizes)?, channels_last })
    }
}

impl Convolution {
    pub(super) fn new(lists: [Vec<c_int>; 3], mode: c_int, compute: c_int) -> Result<Convolution, c_int> {
        let [pads, strides, dilations] = lists;
        // All supported types accumulate in float32. Mode 0, a convolution with a flipped filter,
        // is another operator.
        if compute != 0 || mode != 1 {
            return Err(NOT_SUPPORTED);
        }
        let pads =
            pads.iter().map(|pad| usize::try_from(*pad).map_err(|_| BAD_PARAM)).collect::<Result<_, _>>()?;
        Ok(Convolution {
            pads,
            strides: positive(&strides)?,
            dilations: positive(&dilations)?,
            groups: 1,
            math: 0,
        })
    }
}

/// Returns the sizes of a convolution with these descriptors, if they are consistent.
pub(super) fn check(x: Tensor, w: Filter, conv: Convolution, y: Tensor) -> Result<Sizes, c_int> {
    let rank = x.sizes.len();
    let same = w.sizes.len() == rank && y.sizes.len() == rank && conv.pads.len() + 2 == rank;
    if !same || x.element != w.element || x.element != y.element || x.sizes[0] != y.sizes[0] {
        return Err(BAD_PARAM);
    }
    let channels = w.sizes[1];
    if channels * conv.groups != x.sizes[1]
        || !w.sizes[0].is_multiple_of(conv.groups)
        || w.sizes[0] != y.sizes[1]
    {
        return Err(BAD_PARAM);
    }
    let channels_last = w.channels_last;
    if !x.is_dense(channels_last) || !y.is_dense(channels_last) || rank > 5 {
        return Err(NOT_SUPPORTED);
    }
    let mut axes = Vec::new();
    for at in 0..rank - 2 {
        let (input, kernel) = (x.sizes[at + 2], w.sizes[at + 2]);
        let (stride, dilation, pad) = (conv.strides[at], conv.dilations[at], conv.pads[at]);
        let extent = (kernel - 1) * dilation + 1;
        let room = (input + 2 * pad).checked_sub(extent).ok_or(BAD_PARAM)?;
        let output = room / stride + 1;
        if output != y.sizes[at + 2] {
            return Err(BAD_PARAM);
        }
        axes.push(Axis { input, output, kernel, stride, dilation, pad });
    }
    let (batch, groups, filters) = (x.sizes[0], conv.groups, w.sizes[0] / conv.groups);
    Ok(Sizes { element: x.element, math: conv.math, channels_last, batch, groups, channels, filters, axes })
}

impl Sizes {
    /// Address and bytes of image, filter and result.
    pub(super) fn memory(&self, x: u64, w: u64, y: u64) -> [(u64, usize); 3] {
        let volume =
            |of: fn(&Axis) -> usize| self.axes.iter().map(of).product::<usize>() * self.element.bytes();
        let (channels, filters) = (self.channels * self.groups, self.filters * self.groups);
        [
            (x, self.batch * channels * volume(|axis| axis.input)),
            (w, filters * self.channels * volume(|axis| axis.kernel)),
            (y, self.batch * filters * volume(|axis| axis.output)),
        ]
    }
}
