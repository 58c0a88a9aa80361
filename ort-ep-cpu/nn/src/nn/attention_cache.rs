//! The KV cache of `Attention`: past and new rows joined, in their own type.

use ort_core::dtype::DType;
use ort_core::ops::nn::attention::problem::HeadLayout;
use ort_core::{Result, ensure, error};

use ort_cpu_attention::{Compute, Elements};
use ort_cpu_threads::interrupt::{self, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

/// The fewest bytes that are worth copying in a task of their own.
const WORTH_A_TASK: usize = 1 << 14;

/// Views bytes as elements of the compute type, or of half precision.
pub(super) fn elements<T: Compute>(dtype: DType, bytes: &[u8]) -> Result<Elements<'_, T>> {
    fn cast<T: bytemuck::Pod>(bytes: &[u8]) -> Result<&[T]> {
        if bytes.is_empty() {
            return Ok(&[]);
        }
        bytemuck::try_cast_slice(bytes).map_err(|_| error!(Fail, "keys or values are not aligned"))
    }
    match dtype {
        DType::F16 => Ok(Elements::F16(cast(bytes)?)),
        DType::BF16 => Ok(Elements::BF16(cast(bytes)?)),
        dtype if dtype == T::DTYPE => Ok(Elements::Full(cast(bytes)?)),
        other => Err(error!(InvalidArgument, "attention of type {other}")),
    }
}

/// Joins past and new rows of each head. `layout` is that of the new rows, in bytes.
pub(super) fn join_cache(
    threads: usize,
    (past, past_rows): (&[u8], usize),
    (new, layout): (&[u8], HeadLayout),
    to: &mut [u8],
) -> Result<()> {
    let HeadLayout { heads, rows, size, .. } = layout;
    ensure!(
        past.len() + new.len() == to.len(),
        InvalidArgument,
        "past_key or past_value does not fit the new rows"
    );
    let head_len = (past_rows + rows) * size;
    if head_len == 0 {
        return Ok(());
    }
    let [batches, head_stride, row_stride] = layout.rows_of(size).strides;
    for_each_row_chunk_mut(threads, to, head_len, (WORTH_A_TASK / head_len).max(1), |first, to| {
        for (index, to) in to.chunks_mut(head_len).enumerate() {
            let index = first + index;
            let (old, fresh) = to.split_at_mut(past_rows * size);
            interrupt::copy(&past[index * past_rows * size..][..past_rows * size], old);
            let start = index / heads * batches + index % heads * head_stride;
            for (row, fresh) in spending(4 + size / 4, fresh.chunks_exact_mut(size)).enumerate() {
                fresh.copy_from_slice(&new[start + row * row_stride..][..size]);
            }
        }
    });
    Ok(())
}
