//! Block and sequence rearrangements: `DepthToSpace`, `SpaceToDepth` and `ReverseSequence`.

use ort_core::ep::CompileCx;
use ort_core::ops::tensor::geometry::Strided;
use ort_core::{Result, ensure, error};

use ort_cpu_threads::interrupt::{self, spending};

use super::strided::copy_strided;
use super::{Cell, Io, Movement, movement, only, operand};

movement!["DepthToSpace", |cx: &mut CompileCx<'_>| Blocks::new(cx, true), unaligned: &[0]];
movement!["SpaceToDepth", |cx: &mut CompileCx<'_>| Blocks::new(cx, false), unaligned: &[0]];
movement!["ReverseSequence", make_reverse, unaligned: &[0]];

struct Blocks {
    to_space: bool,
    /// Whether the channel dimension comes before the dimensions of the block (mode `CRD`).
    channels_first: bool,
    size: usize,
}

impl Blocks {
    fn new(cx: &CompileCx<'_>, to_space: bool) -> Result<Blocks> {
        let size = usize::try_from(cx.attrs().int("blocksize")?).ok().filter(|&size| size > 0);
        let size = size.ok_or_else(|| error!(InvalidGraph, "the block size is not positive"))?;
        Ok(Blocks { to_space, channels_first: cx.attrs().string("mode")? == "CRD", size })
    }
}

impl Movement for Blocks {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        let &[batch, channels, height, width] = shape else {
            return Err(error!(InvalidArgument, "the input has shape {shape:?}, expected rank 4"));
        };
        let (size, from) = (self.size, operand(from, 0, shape)?);
        // Each mode is a transpose of a rank-6 view.
        let order = match (self.to_space, self.channels_first) {
            (true, false) => {
                let parts = [batch, size, size, channels / (size * size), height, width];
                Strided::transpose(&parts, &[0, 3, 4, 1, 5, 2])
            }
            (true, true) => {
                let parts = [batch, channels / (size * size), size, size, height, width];
                Strided::transpose(&parts, &[0, 1, 4, 2, 5, 3])
            }
            (false, channels_first) => {
                let parts = [batch, channels, height / size, size, width / size, size];
                let permutation = if channels_first { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
                Strided::transpose(&parts, &permutation)
            }
        };
        copy_strided(&order, from, only(to)?, io.threads)
    }
}

struct ReverseSequence {
    /// Whether the layout is (time, batch, ...) instead of (batch, time, ...).
    time_first: bool,
}

fn make_reverse(cx: &mut CompileCx<'_>) -> Result<ReverseSequence> {
    Ok(ReverseSequence { time_first: cx.attrs().int("time_axis")? == 0 })
}

impl Movement for ReverseSequence {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        ensure!(shape.len() >= 2, InvalidArgument, "ReverseSequence needs rank 2 or more, got {shape:?}");
        let (batch, time) = if self.time_first { (shape[1], shape[0]) } else { (shape[0], shape[1]) };
        let lengths = io.input(1)?.to_ints()?;
        ensure!(
            lengths.len() == batch,
            InvalidArgument,
            "got {} lengths, expected one for each of the {batch} sequences",
            lengths.len()
        );
        let run: usize = shape[2..].iter().product();
        let (from, to) = (operand(from, 0, shape)?, only(to)?);
        ensure!(from.len() == to.len(), Fail, "the output does not have the shape {shape:?}");
        let place = |sequence: usize, step: usize| {
            let index = if self.time_first { step * batch + sequence } else { sequence * time + step };
            index * run
        };
        for (sequence, &length) in lengths.iter().enumerate() {
            let fits = usize::try_from(length).ok().filter(|&length| length <= time);
            let length = fits.ok_or_else(|| {
                error!(InvalidArgument, "sequence {sequence} has length {length}, there are {time} steps")
                    .help(format!(
                        "the lengths are 0 to {time}; batch_axis and time_axis say which axis is which"
                    ))
            })?;
            for step in spending(4 + run / 4, 0..time) {
                // Steps beyond a sequence's length keep their position.
                let source = if step < length { length - 1 - step } else { step };
                let (start, source) = (place(sequence, step), place(sequence, source));
                interrupt::copy(&from[source..source + run], &mut to[start..start + run]);
            }
        }
        Ok(())
    }
}
