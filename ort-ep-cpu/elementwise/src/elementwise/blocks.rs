//! Loops over blocks of operands, and the drivers that split tensors into blocks.

use bytemuck::Pod;
use ort_core::ep::RunCx;
use ort_core::tensor::TensorView;
use ort_core::{Result, error};

use ort_cpu_kernel::broadcast::{BLOCK, Block, Broadcast, chunk_len};
use ort_cpu_threads::interrupt::{PIECE, pieces_mut};
use ort_cpu_threads::parallel::for_each_chunk_mut;

/// A function of two operands over a block.
pub(super) type ZipBlock<A, B, O> = fn(Block<'_, A>, Block<'_, B>, &mut [O]);

/// Computes `out[i] = function(a[i], b[i])`.
#[inline(always)]
pub(super) fn zip<A: Copy, B: Copy, O>(
    a: Block<'_, A>,
    b: Block<'_, B>,
    out: &mut [O],
    function: impl Fn(A, B) -> O,
) {
    match (a, b) {
        (Block::Slice(a), Block::Slice(b)) => {
            for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                *out = function(a, b);
            }
        }
        // A loop for each combination, so that each vectorizes without a test per element.
        (Block::Slice(a), Block::Scalar(b)) => {
            for (out, &a) in out.iter_mut().zip(a) {
                *out = function(a, b);
            }
        }
        (Block::Scalar(a), Block::Slice(b)) => {
            for (out, &b) in out.iter_mut().zip(b) {
                *out = function(a, b);
            }
        }
        (Block::Scalar(a), Block::Scalar(b)) => out.iter_mut().for_each(|out| *out = function(a, b)),
    }
}

/// Writes `a[i]` to `out[i]` if `condition[i]` is not zero, else `b[i]`.
pub(super) fn select<C: Copy + Default + PartialEq, T: Copy>(
    condition: Block<'_, C>,
    a: Block<'_, T>,
    b: Block<'_, T>,
    out: &mut [T],
) {
    let zero = C::default();
    match condition {
        Block::Scalar(condition) => match if condition != zero { a } else { b } {
            Block::Slice(from) => out.copy_from_slice(from),
            Block::Scalar(value) => out.fill(value),
        },
        Block::Slice(conditions) => match (a, b) {
            (Block::Slice(a), Block::Slice(b)) => {
                for (((out, &condition), &a), &b) in out.iter_mut().zip(conditions).zip(a).zip(b) {
                    *out = if condition != zero { a } else { b };
                }
            }
            (Block::Slice(a), Block::Scalar(b)) => {
                for ((out, &condition), &a) in out.iter_mut().zip(conditions).zip(a) {
                    *out = if condition != zero { a } else { b };
                }
            }
            (Block::Scalar(a), b) => {
                zip(Block::Slice(conditions), b, out, |condition, b| if condition != zero { a } else { b });
            }
        },
    }
}

/// Views the elements of a tensor as `T`, which only needs the same size: booleans are bytes.
pub(super) fn elements<'a, T: Pod>(view: &TensorView<'a>) -> Result<&'a [T]> {
    bytemuck::try_cast_slice(view.bytes()?)
        .map_err(|_| error!(Fail, "a {} tensor is not aligned in memory", view.dtype().name()))
}

/// Views the elements of an output as `T`.
pub(super) fn output_elements<'a, T: Pod>(cx: &mut RunCx<'a>, index: usize) -> Result<&'a mut [T]> {
    bytemuck::try_cast_slice_mut(cx.output(index)?.bytes_mut()?)
        .map_err(|_| error!(Fail, "output {index} is not aligned in memory"))
}

/// Returns the shape of an output that is ready.
pub(super) fn output_shape<'a>(cx: &RunCx<'a>, index: usize) -> Result<&'a [usize]> {
    cx.output_shape(index).ok_or_else(|| error!(Fail, "output {index} has no memory ready"))
}

/// An operand's elements and shape. The elements are none if the output's memory holds them.
pub(super) type Operand<'a, T> = (Option<&'a [T]>, &'a [usize]);

/// Returns the operand at an input of a node with one output.
pub(super) fn operand<'a, T: Pod>(cx: &RunCx<'a>, index: usize) -> Result<Operand<'a, T>> {
    if cx.in_place(0) == Some(index) {
        return Ok((None, output_shape(cx, 0)?));
    }
    let view = cx.input(index)?;
    Ok((Some(elements(&view)?), view.shape()))
}

/// Returns the block of an operand. If the output's memory holds it, it is copied before it is
/// overwritten.
pub(super) fn operand_block<'b, T: Pod, O: Pod>(
    walk: &Broadcast,
    (index, data): (usize, Option<&'b [T]>),
    start: usize,
    output: &[O],
    buffer: &'b mut Vec<T>,
) -> Block<'b, T> {
    match data {
        Some(data) => walk.block(index, data, start, output.len(), buffer),
        None => {
            buffer.clear();
            // Only an input of the output's own type may share its memory, so the cast keeps the
            // elements.
            buffer.extend_from_slice(bytemuck::cast_slice(output));
            Block::Slice(buffer)
        }
    }
}

/// Runs a function of two broadcast tensors. The output may share memory only with an input of its
/// own type.
pub(super) fn run_zip<A: Pod + Send + Sync, B: Pod + Send + Sync, O: Pod + Send>(
    cx: &mut RunCx<'_>,
    function: ZipBlock<A, B, O>,
) -> Result<()> {
    let ((a, a_shape), (b, b_shape)) = (operand::<A>(cx, 0)?, operand::<B>(cx, 1)?);
    let walk = Broadcast::new(output_shape(cx, 0)?, &[a_shape, b_shape])?;
    let threads = cx.threads();
    // Without buffers, blocks may be of any length.
    let limit = if !walk.needs_buffers() && a.is_some() && b.is_some() { usize::MAX } else { BLOCK };
    let out = output_elements::<O>(cx, 0)?;
    walk.for_each_block(threads, limit, out, |(left, right): &mut (Vec<A>, Vec<B>), start, block| {
        let a = operand_block(&walk, (0, a), start, block, left);
        let b = operand_block(&walk, (1, b), start, block, right);
        function(a, b, block);
    });
    Ok(())
}

/// Runs a function from one tensor to another of the same shape.
pub(super) fn run_map<A: Pod + Sync, O: Pod + Send>(
    cx: &mut RunCx<'_>,
    function: impl Fn(A) -> O + Sync,
) -> Result<()> {
    let from = elements::<A>(&cx.input(0)?)?;
    let threads = cx.threads();
    let out = output_elements::<O>(cx, 0)?;
    let chunk = chunk_len(threads, out.len());
    for_each_chunk_mut(threads, out, chunk, |index, piece| {
        // Input and output have the same shape, so equal indices meet.
        let from = from.get(index * chunk..).unwrap_or(&[]);
        for (out, from) in pieces_mut(piece).zip(from.chunks(PIECE)) {
            out.iter_mut().zip(from).for_each(|(out, &x)| *out = function(x));
        }
    });
    Ok(())
}

/// Runs a function that updates elements in place. Input 0 may share the output's memory.
pub(super) fn run_in_place<T: Pod + Send + Sync>(
    cx: &mut RunCx<'_>,
    function: impl Fn(&mut [T]) + Sync,
) -> Result<()> {
    let (from, _) = operand::<T>(cx, 0)?;
    let threads = cx.threads();
    let out = output_elements::<T>(cx, 0)?;
    let chunk = chunk_len(threads, out.len());
    for_each_chunk_mut(threads, out, chunk, |index, piece| {
        // Blocks stay in the cache between the copy and the function.
        let blocks = pieces_mut(piece).flat_map(|piece| piece.chunks_mut(BLOCK));
        for (at, block) in blocks.enumerate() {
            let start = index * chunk + at * BLOCK;
            // If the output holds the input already, there is nothing to copy.
            if let Some(from) = from.and_then(|from| from.get(start..start + block.len())) {
                block.copy_from_slice(from);
            }
            function(block);
        }
    });
    Ok(())
}
