//! What optimizer steps share: in-place tensors, gradients of any float type, a loop over blocks.
//!
//! Blocks stay in the L1 cache. The boundaries of parts and blocks do not depend on the number of
//! threads, so sums over them do not either.

use std::ops::Range;

use bytemuck::Pod;
use half::{bf16, f16};
use num_traits::Float;
use ort_core::dtype::{DType, Element};
use ort_core::ep::{CompileCx, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use ort_cpu_threads::interrupt;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::convert::{convert, f32_from_bf16, f32_from_f16};
use ort_cpu_vector::simd::Isa;

/// Elements that are converted, copied and updated at a time.
pub(super) const BLOCK: usize = 1 << 10;
/// Elements in a task.
pub(super) const PART: usize = 16 << 10;

/// The type of a parameter and of its states.
pub(super) trait Parameter: Element + Float + Pod + Into<f64> {
    /// Returns the nearest number of this type.
    fn of(number: f64) -> Self;
    /// Returns the values if they already have this type.
    fn own<'a>(floats: &Floats<'a>) -> Option<&'a [Self]>;
    /// Converts the values at `range` to this type.
    fn convert(isa: Isa, floats: &Floats<'_>, range: Range<usize>, to: &mut [Self]);
}

impl Parameter for f32 {
    fn of(number: f64) -> f32 {
        number as f32
    }
    fn own<'a>(floats: &Floats<'a>) -> Option<&'a [f32]> {
        if let Floats::F32(values) = floats { Some(values) } else { None }
    }
    fn convert(isa: Isa, floats: &Floats<'_>, range: Range<usize>, to: &mut [f32]) {
        match floats {
            Floats::F32(from) => to.copy_from_slice(&from[range]),
            Floats::F64(from) => convert(
                isa,
                &from[range],
                to,
                #[inline(always)]
                |x| x as f32,
            ),
            Floats::F16(from) => f32_from_f16(isa, &from[range], to),
            Floats::BF16(from) => f32_from_bf16(isa, &from[range], to),
        }
    }
}

impl Parameter for f64 {
    fn of(number: f64) -> f64 {
        number
    }
    fn own<'a>(floats: &Floats<'a>) -> Option<&'a [f64]> {
        if let Floats::F64(values) = floats { Some(values) } else { None }
    }
    fn convert(isa: Isa, floats: &Floats<'_>, range: Range<usize>, to: &mut [f64]) {
        match floats {
            Floats::F32(from) => convert(isa, &from[range], to, f64::from),
            Floats::F64(from) => to.copy_from_slice(&from[range]),
            Floats::F16(from) => convert(isa, &from[range], to, f64::from),
            Floats::BF16(from) => convert(isa, &from[range], to, f64::from),
        }
    }
}

/// The elements of a tensor of any float type.
pub(super) enum Floats<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Floats<'a> {
    pub(super) fn of(view: TensorView<'a>) -> Result<Floats<'a>> {
        Ok(match view.dtype() {
            DType::F32 => Floats::F32(view.as_slice()?),
            DType::F64 => Floats::F64(view.as_slice()?),
            DType::F16 => Floats::F16(view.as_slice()?),
            DType::BF16 => Floats::BF16(view.as_slice()?),
            other => {
                return Err(error!(NotImplemented, "a gradient of type {} is not supported", other.name()));
            }
        })
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Floats::F32(values) => values.len(),
            Floats::F64(values) => values.len(),
            Floats::F16(values) => values.len(),
            Floats::BF16(values) => values.len(),
        }
    }

    /// Returns the values at `range` in the parameter's type. Values of another type are converted
    /// into `scratch`, which must be as long.
    pub(super) fn block<'s, T: Parameter>(
        &self,
        isa: Isa,
        range: Range<usize>,
        scratch: &'s mut [T],
    ) -> &'s [T]
    where
        'a: 's,
    {
        if let Some(own) = T::own(self) {
            return &own[range];
        }
        // Narrower types are widened exactly; only doubles for an `f32` parameter are rounded.
        let scratch = &mut scratch[..range.len()];
        T::convert(isa, self, range, scratch);
        scratch
    }
}

/// A tensor and its new value.
pub(super) struct Stream<'a, T> {
    /// The elements; none if `to` holds them.
    from: Option<&'a [T]>,
    /// The destination of the new elements; none if they are not an output.
    to: Option<&'a mut [T]>,
}

impl<'a, T: Element> Stream<'a, T> {
    pub(super) fn of(cx: &mut RunCx<'a>, input: usize, output: usize) -> Result<Stream<'a, T>> {
        // In place, the input is not passed; the output's memory holds its elements.
        if cx.in_place(output) == Some(input) {
            return Ok(Stream { from: None, to: Some(cx.output(output)?.as_mut_slice()?) });
        }
        let from = cx.input(input)?.as_slice()?;
        let to = if cx.wants(output) { Some(cx.output(output)?.as_mut_slice()?) } else { None };
        Ok(Stream { from: Some(from), to })
    }

    pub(super) fn len(&self) -> usize {
        let own = self.to.as_deref().map_or(0, <[T]>::len);
        self.from.map_or(own, <[T]>::len)
    }

    /// Returns the destination of the new elements at `range`. It is `scratch`, which must be as
    /// long, if they are not an output.
    pub(super) fn target<'s>(&'s mut self, range: Range<usize>, scratch: &'s mut [T]) -> &'s mut [T] {
        match &mut self.to {
            Some(to) => &mut to[range],
            None => &mut scratch[..range.len()],
        }
    }

    /// Returns the elements before anything is written.
    pub(super) fn elements(&self) -> &[T] {
        // In place there is no `from`, and `to` still holds the old elements.
        self.from.or(self.to.as_deref()).unwrap_or(&[])
    }

    /// Writes the new elements, if they are an output.
    pub(super) fn write(self, new: &[T]) {
        if let Some(to) = self.to {
            interrupt::copy(new, to);
        }
    }

    /// Returns an error if a state does not have the length that this run expects.
    pub(super) fn check_len(&self, expected: usize) -> Result<()> {
        ensure!(
            self.len() == expected,
            InvalidArgument,
            help = "each node updates one parameter: check that the tensors belong together",
            "a state has {} elements, expected {expected}",
            self.len()
        );
        Ok(())
    }

    /// Makes the written elements the current ones.
    pub(super) fn settle(&mut self) {
        if self.to.is_some() {
            self.from = None;
        }
    }

    /// Returns whether the new elements are stored anywhere.
    pub(super) fn is_wanted(&self) -> bool {
        self.to.is_some()
    }

    /// Leaves the tensor as it is.
    pub(super) fn keep(self) {
        if let (Some(from), Some(to)) = (self.from, self.to) {
            interrupt::copy(from, to);
        }
    }

    /// Splits off the first elements.
    pub(super) fn take(&mut self, count: usize) -> Stream<'a, T> {
        let from = self.from.as_mut().and_then(|from| from.split_off(..count));
        let to = self.to.as_mut().and_then(|to| to.split_off_mut(..count));
        Stream { from, to }
    }

    /// Returns the elements at `range`, to be updated in place. They are copied to `scratch`, which
    /// must be as long, if they are not an output.
    pub(super) fn block<'s>(&'s mut self, range: Range<usize>, scratch: &'s mut [T]) -> &'s mut [T] {
        let from = self.from;
        let block = self.target(range.clone(), scratch);
        // In place, the block already holds the elements.
        if let Some(from) = from {
            block.copy_from_slice(&from[range]);
        }
        block
    }
}

impl<'a, T: Parameter> Stream<'a, T> {
    /// Like [`Stream::of`], for a tensor whose new value is read again. It is stored in `spare` if
    /// it is not an output.
    pub(super) fn kept(
        cx: &mut RunCx<'a>,
        (input, output): (usize, usize),
        spare: &mut &'a mut [u8],
    ) -> Result<Stream<'a, T>> {
        let mut stream = Stream::of(cx, input, output)?;
        if stream.to.is_none() {
            let bytes = spare.split_off_mut(..spare_bytes::<T>(stream.len()));
            let bytes = bytes.and_then(|bytes| bytes.get_mut(..stream.len() * size_of::<T>()));
            let bytes = bytes.ok_or_else(|| error!(Fail, "the workspace is too short"))?;
            stream.to = Some(bytemuck::cast_slice_mut(bytes));
        }
        Ok(stream)
    }
}

/// Returns the bytes that `len` elements take in a workspace, rounded up so that the next tensor is
/// aligned.
pub(super) fn spare_bytes<T>(len: usize) -> usize {
    (len * size_of::<T>()).next_multiple_of(64)
}

/// The inputs of every step besides the parameter and its states.
pub(super) struct Call<'a> {
    pub(super) gradient: Floats<'a>,
    /// The number of elements before those that the gradient covers; none if it covers all.
    first: Option<usize>,
    pub(super) rate: f64,
    pub(super) scale: f64,
    pub(super) updates: bool,
    pub(super) isa: Isa,
    pub(super) threads: usize,
}

impl<'a> Call<'a> {
    pub(super) fn of(cx: &RunCx<'a>) -> Result<Call<'a>> {
        Call::of_rows(cx, None)
    }

    /// Like [`Call::of`]. `first_row` is the first row that the gradient covers; none if it covers
    /// all.
    pub(super) fn of_rows(cx: &RunCx<'a>, first_row: Option<usize>) -> Result<Call<'a>> {
        // Scale and update flag are optional: 1 and true without them.
        let scale = cx.find_input(3).map(|view| view.to_scalar::<f32>()).transpose()?.unwrap_or(1.0);
        let updates = cx.find_input(4).map(|view| view.to_scalar::<bool>()).transpose()?.unwrap_or(true);
        let gradient = cx.input(1)?;
        // In place, the parameter is not passed as an input, but the output has its shape.
        let parameter = cx.output_shape(0).or_else(|| cx.find_input(0).map(|view| view.shape()));
        let fits = |shape: &[usize]| match (first_row, shape, gradient.shape()) {
            // `first + rows` may overflow in a hostile model.
            (Some(first), [all, rest @ ..], [rows, of_gradient @ ..]) => {
                first.checked_add(*rows).is_some_and(|end| end <= *all) && rest == of_gradient
            }
            (Some(_), ..) => false,
            (None, shape, gradient) => shape == gradient,
        };
        ensure!(
            parameter.is_none_or(fits),
            InvalidArgument,
            help = "each node updates one parameter, or rows of one: check that the tensors belong together",
            "the gradient has shape {:?}, expected that of the parameter, {:?}, or of its rows",
            gradient.shape(),
            parameter.unwrap_or_default()
        );
        let row = gradient.shape().iter().skip(1).product::<usize>();
        Ok(Call {
            gradient: Floats::of(gradient)?,
            first: first_row.map(|first| first * row),
            rate: cx.input(2)?.to_scalar::<f32>()?.into(),
            scale: scale.into(),
            updates,
            isa: Isa::current(),
            threads: cx.threads(),
        })
    }

    /// Returns an error if a tensor's length differs from the gradient's. Unknown sizes are first
    /// seen here.
    pub(super) fn check<T: Element>(&self, streams: &[Stream<'a, T>]) -> Result<()> {
        let expected = self.gradient.len();
        let other = streams.iter().map(Stream::len).find(|&len| len != expected);
        ensure!(
            other.is_none(),
            InvalidArgument,
            help = "each node updates one parameter: check that the tensors belong together",
            "the gradient has {expected} elements, the parameter or a state {}",
            other.unwrap_or(0)
        );
        Ok(())
    }

    /// Calls `step` for each block of the tensors and of the gradient, or keeps all values if
    /// nothing is updated.
    pub(super) fn update<T: Parameter, const N: usize>(
        &self,
        mut streams: [Stream<'a, T>; N],
        step: impl Fn([&mut [T]; N], &[T]) + Sync,
    ) -> Result<()> {
        if let Some(first) = self.first {
            // `of_rows` checked that the rows are inside the parameter, which is the first tensor.
            let whole = streams.first().map_or(0, Stream::len);
            streams.iter().try_for_each(|stream| stream.check_len(whole))?;
            for stream in &mut streams {
                // Rows that the gradient does not cover keep their values.
                stream.take(first).keep();
                let rows = stream.take(self.gradient.len());
                std::mem::replace(stream, rows).keep();
            }
        }
        self.check(&streams)?;
        if self.updates {
            self.for_each_block(&mut self.parts(streams), |tensors, gradient, _, _| step(tensors, gradient));
        } else {
            streams.into_iter().for_each(Stream::keep);
        }
        Ok(())
    }

    /// Splits the tensors into parts, one for each task.
    pub(super) fn parts<T: Parameter, const N: usize>(
        &self,
        mut streams: [Stream<'a, T>; N],
    ) -> Vec<StepPart<'a, T, N>> {
        let len = self.gradient.len();
        // Tasks get disjoint slices of each tensor, in the same ranges as the gradient.
        let part = |start: usize| {
            let len = PART.min(len - start);
            StepPart {
                start,
                len,
                streams: streams.each_mut().map(|stream| stream.take(len)),
                sums: [0.0; 2],
            }
        };
        (0..len).step_by(PART).map(part).collect()
    }

    /// Calls `step` for each block: with the tensors, the gradient, the index of its first element,
    /// and the sums of its part.
    pub(super) fn for_each_block<T: Parameter, const N: usize>(
        &self,
        parts: &mut [StepPart<'_, T, N>],
        step: impl Fn([&mut [T]; N], &[T], usize, &mut [f64; 2]) + Sync,
    ) {
        for_each_chunk_mut(self.threads, parts, 1, |_, parts| {
            parts.iter_mut().for_each(|part| part.for_each_block(self, &step));
        });
    }
}

/// A part of the tensors of a step, and two sums over it.
pub(super) struct StepPart<'a, T, const N: usize> {
    start: usize,
    len: usize,
    pub(super) streams: [Stream<'a, T>; N],
    pub(super) sums: [f64; 2],
}

impl<T: Parameter, const N: usize> StepPart<'_, T, N> {
    fn for_each_block(&mut self, call: &Call<'_>, step: impl Fn([&mut [T]; N], &[T], usize, &mut [f64; 2])) {
        // On the stack: at most three tensors and the gradient, 8 KiB each.
        let (mut spare, mut converted) = ([[T::zero(); BLOCK]; N], [T::zero(); BLOCK]);
        for at in (0..self.len).step_by(BLOCK) {
            let range = at..(at + BLOCK).min(self.len);
            let place = self.start + range.start..self.start + range.end;
            let gradient = call.gradient.block(call.isa, place, &mut converted);
            let mut spare = spare.iter_mut();
            let blocks = self.streams.each_mut().map(|stream| match spare.next() {
                Some(spare) => stream.block(range.clone(), spare),
                None => &mut [],
            });
            step(blocks, gradient, self.start + at, &mut self.sums);
        }
    }
}

/// Returns the sums of all parts, added in order.
pub(super) fn total<T, const N: usize>(parts: &[StepPart<'_, T, N>]) -> [f64; 2] {
    parts.iter().fold([0.0; 2], |[a, b], part| [a + part.sums[0], b + part.sums[1]])
}

/// Returns the number of this update, counted from 1.
pub(super) fn step_number(cx: &RunCx<'_>, input: usize) -> Result<f64> {
    let step = cx.input(input)?.to_scalar::<i64>()?;
    ensure!(
        step >= 1,
        InvalidArgument,
        help = "add 1 before the update, not after it",
        "step is {step}, expected the number of this update, counted from 1"
    );
    Ok(step as f64)
}

/// Returns whether the parameter of the node being compiled is of type double.
pub(super) fn is_double(cx: &CompileCx<'_>) -> bool {
    cx.node.dtype(0) == Some(DType::F64)
}

/// Returns the first row that the gradient of the node being compiled covers; none if it covers
/// all.
pub(super) fn first_row(cx: &CompileCx<'_>) -> Result<Option<usize>> {
    let first = cx.attrs().find_int("first_row").map(usize::try_from).transpose();
    first.map_err(|_| error!(InvalidGraph, "attribute 'first_row' is negative"))
}
