//! Shared parts of optimizer steps: tensors with their new values, scalar parameters, and launches
//! over all elements.

use ort_core::dtype::DType;
use ort_core::{Result, ensure, error};
use ort_gpu::Arg;

use crate::launch::{Launch, OpCx, Operand, THREADS};

/// The input that holds the number of the update, starting at 1.
pub(super) const STEP: usize = 5;
/// Blocks per multiprocessor. Blocks loop over any further elements, so the factors of a step are
/// not computed more often.
const BLOCKS_OF_PROCESSOR: usize = 8;
/// The most blocks that reduce a sum. It is the same on all devices, so results are too.
const MOST_SUMS: usize = 512;
/// The least elements of a reducing block, unless there are fewer.
const LEAST_OF_SUM: usize = 2048;

/// Returns an element type's suffix in entry names.
pub(super) fn suffix(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        other => {
            return Err(error!(
                NotImplemented,
                "a step of an optimizer on elements of {other} is not supported"
            ));
        }
    })
}

/// A tensor, and the output for its new value if it is used.
#[derive(Clone, Copy)]
pub(super) struct Stream<'a> {
    pub(super) from: &'a Operand,
    pub(super) to: Option<&'a Operand>,
}

impl<'a> Stream<'a> {
    pub(super) fn of(cx: &'a OpCx<'_>, input: usize, output: usize) -> Result<Stream<'a>> {
        Ok(Stream { from: cx.input(input)?, to: cx.find_output(output) })
    }

    /// Whether unchanged elements need no copy: the output aliases the input or is unused.
    fn stays(&self) -> bool {
        self.to.is_none_or(|to| to.arg == self.from.arg)
    }

    /// Rejects a state whose length does not match.
    pub(super) fn check_len(&self, expected: usize) -> Result<()> {
        let own = self.from.count();
        ensure!(
            own == expected,
            InvalidArgument,
            help = "each node updates one parameter: check that the tensors belong together",
            "a state has {own} elements, expected {expected}"
        );
        Ok(())
    }
}

/// A node that updates one parameter, or some rows of it.
pub(super) struct Call<'a, 'c> {
    cx: &'a OpCx<'c>,
    pub(super) gradient: &'a Operand,
    /// The first element the gradient applies to, if it covers only some rows.
    first: Option<usize>,
}

impl<'a, 'c> Call<'a, 'c> {
    pub(super) fn of(cx: &'a OpCx<'c>) -> Result<Call<'a, 'c>> {
        let (parameter, gradient) = (&cx.input(0)?.shape, cx.input(1)?);
        let first = cx.attrs.find_int("first_row").map(usize::try_from).transpose();
        let first = first.map_err(|_| error!(InvalidGraph, "attribute 'first_row' is negative"))?;
        let fits = match (first, parameter.as_slice(), gradient.shape.as_slice()) {
            (Some(first), [all, rest @ ..], [rows, of_gradient @ ..]) => {
                first.checked_add(*rows).is_some_and(|end| end <= *all) && rest == of_gradient
            }
            (Some(_), ..) => false,
            (None, parameter, gradient) => parameter == gradient,
        };
        ensure!(
            fits,
            InvalidArgument,
            help = "each node updates one parameter, or rows of one: check that the tensors belong together",
            "the gradient has shape {:?}, expected that of the parameter, {parameter:?}, or of its rows",
            gradient.shape
        );
        // `first_row` counts rows, and kernels count elements.
        let row: usize = gradient.shape.iter().skip(1).product();
        Ok(Call { cx, gradient, first: first.map(|first| first * row) })
    }

    /// Returns a launch of a family's entry for the types of the parameter and its gradient.
    pub(super) fn launch(&self, family: &str, entry: &str) -> Result<Launch> {
        let [own, gradient] = [suffix(self.cx.input(0)?.dtype)?, suffix(self.gradient.dtype)?];
        Launch::of_type(family, own, format!("{entry}_{own}_{gradient}"))
    }

    /// Appends the learning rate.
    pub(super) fn rate(&self, launch: Launch) -> Launch {
        launch.find_tensor(self.cx.find_input(2))
    }

    /// Appends the scale of the gradients.
    pub(super) fn scale(&self, launch: Launch) -> Launch {
        launch.find_tensor(self.cx.find_input(3))
    }

    /// Appends the flag whether anything is updated.
    pub(super) fn update(&self, launch: Launch) -> Launch {
        launch.find_tensor(self.cx.find_input(4))
    }

    /// Appends the step number.
    pub(super) fn step(&self, launch: Launch) -> Launch {
        launch.find_tensor(self.cx.find_input(STEP))
    }

    /// Sets the grid to the elements that change or are copied, and appends the structure `Range`.
    /// Returns `None` if there are none.
    pub(super) fn over(&self, launch: Launch, streams: &[Stream<'_>]) -> Result<Option<Launch>> {
        let (count, rows) = (self.cx.input(0)?.count(), self.gradient.count());
        streams.iter().try_for_each(|stream| stream.check_len(count))?;
        // In place, only the updated rows are visited; otherwise all others are copied too.
        let first = self.first.unwrap_or(0);
        let (begin, count) = if streams.iter().all(Stream::stays) { (first, rows) } else { (0, count) };
        if count == 0 {
            return Ok(None);
        }
        Ok(Some(spread(self.cx, launch, count.div_ceil(4))?.uints::<4>(&[begin, count, first, rows])?))
    }
}

/// Appends the outputs for new values.
pub(super) fn targets(launch: Launch, streams: &[Stream<'_>]) -> Launch {
    streams.iter().fold(launch, |launch, stream| launch.find_tensor(stream.to))
}

/// Appends the tensors with old values.
pub(super) fn sources(launch: Launch, streams: &[Stream<'_>]) -> Launch {
    streams.iter().fold(launch, |launch, stream| launch.tensor(stream.from))
}

/// Sets the grid to `threads` threads, or to as many as keep the device busy.
pub(super) fn spread(cx: &OpCx<'_>, launch: Launch, threads: usize) -> Result<Launch> {
    let most = (cx.limits.processors as usize).saturating_mul(BLOCKS_OF_PROCESSOR).max(1);
    launch.grid([threads.div_ceil(THREADS as usize).clamp(1, most), 1, 1])
}

/// Returns the number of blocks that reduce this many elements.
pub(super) fn sums_of(count: usize) -> usize {
    count.div_ceil(LEAST_OF_SUM).clamp(1, MOST_SUMS)
}

/// Returns the copies for an update with an empty gradient: one per tensor that is not updated in
/// place.
pub(super) fn kept(cx: &OpCx<'_>, streams: &[Stream<'_>]) -> Result<Vec<Launch>> {
    let mut launches = Vec::new();
    for stream in streams.iter().filter(|stream| !stream.stays() && stream.from.count() > 0) {
        let (count, suffix) = (stream.from.count(), suffix(stream.from.dtype)?);
        let launch = Launch::of_type("accumulate", suffix, format!("keep_{suffix}"))?;
        let launch = launch.tensor(stream.from).find_tensor(stream.to);
        launches.push(spread(cx, launch, count)?.uint(count)?);
    }
    Ok(launches)
}

/// Returns where a new value goes: its output, or the workspace if only later kernels read it.
pub(super) fn kept_or_spare(cx: &OpCx<'_>, stream: Stream<'_>, taken: &mut usize) -> Operand {
    let spare = || cx.workspace(taken, stream.from.dtype, &stream.from.shape);
    stream.to.cloned().unwrap_or_else(spare)
}

/// Reserves partial sums of blocks, as doubles.
pub(super) fn sums(cx: &OpCx<'_>, taken: &mut usize, shape: &[usize]) -> Operand {
    cx.workspace(taken, DType::F64, shape)
}

/// Packs doubles and 32-bit integers like a structure of the kernels.
pub(super) fn rule(doubles: &[f64], ints: &[i32]) -> Vec<u8> {
    let doubles = doubles.iter().flat_map(|number| number.to_ne_bytes());
    doubles.chain(ints.iter().flat_map(|number| number.to_ne_bytes())).collect()
}

/// Returns a part of a workspace tensor.
pub(super) fn part_of(whole: &Operand, first: usize, count: usize) -> Result<Operand> {
    let Arg::Workspace { offset, .. } = whole.arg else {
        return Err(error!(Fail, "sums that are not in the workspace"));
    };
    let size = whole.dtype.byte_len(1).unwrap_or(1);
    let arg = Arg::Workspace { offset: offset + first * size, bytes: count * size };
    Ok(Operand { arg, dtype: whole.dtype, shape: [count][..].into() })
}
