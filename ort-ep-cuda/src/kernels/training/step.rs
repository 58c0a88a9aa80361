//! What the steps of optimizers share: tensors with their new values, what a node is told, and
//! launches over all elements.

use ort_core::dtype::DType;
use ort_core::ep::operand::Arg;
use ort_core::{Result, ensure, error};

use crate::launch::{Launch, OpCx, Operand, THREADS};

/// The input with the number of the update, from 1 on.
pub(super) const STEP: usize = 5;
/// Blocks for each processor: what they have more to do they do in turns, so that the factors of a
/// step are not computed more often.
const BLOCKS_OF_PROCESSOR: usize = 8;
/// The most blocks whose sums are added up; the same on all devices, and so are the bits.
const MOST_SUMS: usize = 512;
/// Elements that a block of sums has at least, where there are as many.
const LEAST_OF_SUM: usize = 2048;

/// What kernels of an element type are called.
pub(super) fn suffix(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        other => return Err(error!(NotImplemented, "a step of an optimizer on elements of {other}")),
    })
}

/// A tensor and where its new value goes, if anybody wants it.
#[derive(Clone, Copy)]
pub(super) struct Stream<'a> {
    pub(super) from: &'a Operand,
    pub(super) to: Option<&'a Operand>,
}

impl<'a> Stream<'a> {
    pub(super) fn of(cx: &'a OpCx<'_>, input: usize, output: usize) -> Result<Stream<'a>> {
        Ok(Stream { from: cx.input(input)?, to: cx.find_output(output) })
    }

    /// Whether what stays as it is needs no copy.
    fn stays(&self) -> bool {
        self.to.is_none_or(|to| to.arg == self.from.arg)
    }

    /// Refuses a state of another length than it has in this run.
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

/// A node that updates one parameter, or rows of it.
pub(super) struct Call<'a, 'c> {
    cx: &'a OpCx<'c>,
    pub(super) gradient: &'a Operand,
    /// The first element that the gradient is of, where it is not of all.
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
        let row: usize = gradient.shape.iter().skip(1).product();
        Ok(Call { cx, gradient, first: first.map(|first| first * row) })
    }

    /// A launch of a family's entry for these types of a parameter and of its gradient.
    pub(super) fn launch(&self, family: &str, entry: &str) -> Result<Launch> {
        let [own, gradient] = [suffix(self.cx.input(0)?.dtype)?, suffix(self.gradient.dtype)?];
        Launch::of_type(family, own, format!("{entry}_{own}_{gradient}"))
    }

    /// With the learning rate as the next parameter.
    pub(super) fn rate(&self, launch: Launch) -> Launch {
        launch.find_tensor(self.cx.find_input(2))
    }

    /// With what gradients are multiplied by as the next parameter.
    pub(super) fn scale(&self, launch: Launch) -> Launch {
        launch.find_tensor(self.cx.find_input(3))
    }

    /// With whether anything changes as the next parameter.
    pub(super) fn update(&self, launch: Launch) -> Launch {
        launch.find_tensor(self.cx.find_input(4))
    }

    /// With the number of the step as the next parameter.
    pub(super) fn step(&self, launch: Launch) -> Launch {
        launch.find_tensor(self.cx.find_input(STEP))
    }

    /// The launch over all elements that change or are copied, with the structure `Range` as the
    /// next parameter; none where there are none.
    pub(super) fn over(&self, launch: Launch, streams: &[Stream<'_>]) -> Result<Option<Launch>> {
        let (count, rows) = (self.cx.input(0)?.count(), self.gradient.count());
        streams.iter().try_for_each(|stream| stream.check_len(count))?;
        let first = self.first.unwrap_or(0);
        let (begin, count) = if streams.iter().all(Stream::stays) { (first, rows) } else { (0, count) };
        if count == 0 {
            return Ok(None);
        }
        Ok(Some(spread(self.cx, launch, count.div_ceil(4))?.uints::<4>(&[begin, count, first, rows])?))
    }
}

/// With the new values of tensors as the next parameters.
pub(super) fn targets(launch: Launch, streams: &[Stream<'_>]) -> Launch {
    streams.iter().fold(launch, |launch, stream| launch.find_tensor(stream.to))
}

/// With the old values of tensors as the next parameters.
pub(super) fn sources(launch: Launch, streams: &[Stream<'_>]) -> Launch {
    streams.iter().fold(launch, |launch, stream| launch.tensor(stream.from))
}

/// With so many threads, or as many as keep the device busy.
pub(super) fn spread(cx: &OpCx<'_>, launch: Launch, threads: usize) -> Result<Launch> {
    let most = (cx.limits.processors as usize).saturating_mul(BLOCKS_OF_PROCESSOR).max(1);
    launch.grid([threads.div_ceil(THREADS as usize).clamp(1, most), 1, 1])
}

/// The blocks that have sums of so many elements.
pub(super) fn sums_of(count: usize) -> usize {
    count.div_ceil(LEAST_OF_SUM).clamp(1, MOST_SUMS)
}

/// What elements an update leaves alone without a gradient: copies of what is not in place.
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

/// Where the new value of a tensor goes: its output, or memory of the workspace where nobody wants
/// it but the kernels that come after.
pub(super) fn kept_or_spare(cx: &OpCx<'_>, stream: Stream<'_>, taken: &mut usize) -> Operand {
    let spare = || cx.workspace(taken, stream.from.dtype, &stream.from.shape);
    stream.to.cloned().unwrap_or_else(spare)
}

/// Sums of blocks in the workspace, of doubles.
pub(super) fn sums(cx: &OpCx<'_>, taken: &mut usize, shape: &[usize]) -> Operand {
    cx.workspace(taken, DType::F64, shape)
}

/// Numbers of 64 bits and of 32 bits, one behind the other, as a structure of the kernels has them.
pub(super) fn rule(doubles: &[f64], ints: &[i32]) -> Vec<u8> {
    let doubles = doubles.iter().flat_map(|number| number.to_ne_bytes());
    doubles.chain(ints.iter().flat_map(|number| number.to_ne_bytes())).collect()
}

/// Part of a tensor in the workspace.
pub(super) fn part_of(whole: &Operand, first: usize, count: usize) -> Result<Operand> {
    let Arg::Workspace { offset, .. } = whole.arg else {
        return Err(error!(Fail, "sums that are not in the workspace"));
    };
    let size = whole.dtype.byte_len(1).unwrap_or(1);
    let arg = Arg::Workspace { offset: offset + first * size, bytes: count * size };
    Ok(Operand { arg, dtype: whole.dtype, shape: [count][..].into() })
}
