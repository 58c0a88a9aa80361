//! Block and sequence rearrangements: `DepthToSpace`, `SpaceToDepth` and `ReverseSequence`.

use ort_core::ep::CompileCx;
use ort_core::ops::tensor::problem::{BlockRearrangement, ReverseSequence};
use ort_core::{Result, ensure, error};

use ort_cpu_threads::interrupt::{self, spending};

use super::strided::copy_strided;
use super::{Cell, Io, Movement, movement, only, operand};

movement!["DepthToSpace", |cx: &mut CompileCx<'_>| make_blocks(cx, true), unaligned: &[0]];
movement!["SpaceToDepth", |cx: &mut CompileCx<'_>| make_blocks(cx, false), unaligned: &[0]];
movement!["ReverseSequence", make_reverse, unaligned: &[0]];

struct Blocks(BlockRearrangement);

fn make_blocks(cx: &CompileCx<'_>, to_space: bool) -> Result<Blocks> {
    BlockRearrangement::new(cx.attrs(), to_space).map(Blocks)
}

impl Movement for Blocks {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        copy_strided(&self.0.order(shape)?, operand(from, 0, shape)?, only(to)?, io.threads)
    }
}

struct Reverse {
    /// Whether the layout is (time, batch, ...) instead of (batch, time, ...).
    time_first: bool,
}

fn make_reverse(cx: &mut CompileCx<'_>) -> Result<Reverse> {
    Ok(Reverse { time_first: cx.attrs().int("time_axis")? == 0 })
}

impl Movement for Reverse {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        let lengths = io.input(1)?.to_ints()?;
        let sequences = ReverseSequence::new(self.time_first, shape, lengths.len())?;
        let ReverseSequence { time_first, batch, time, run } = sequences;
        let (from, to) = (operand(from, 0, shape)?, only(to)?);
        ensure!(from.len() == to.len(), Fail, "the output does not have the shape {shape:?}");
        let place = |sequence: usize, step: usize| {
            let index = if time_first { step * batch + sequence } else { sequence * time + step };
            index * run
        };
        for (sequence, &length) in lengths.iter().enumerate() {
            // Lengths are an input, and no inference has seen them.
            let fits = usize::try_from(length).ok().filter(|&length| length <= time);
            let length = fits.ok_or_else(|| {
                error!(Fail, "sequence {sequence} has length {length}, there are {time} steps").help(format!(
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
