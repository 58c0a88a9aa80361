//! Workspaces as typed slices.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::{Result, error};

/// Views scratch memory as values. Planned memory is aligned to 64 bytes.
pub fn scratch<T: bytemuck::Pod>(bytes: &mut [u8]) -> Result<&mut [T]> {
    let len = bytes.len() - bytes.len() % size_of::<T>();
    bytemuck::try_cast_slice_mut(&mut bytes[..len]).map_err(|_| error!(Fail, "the workspace is not aligned"))
}

/// Splits the first `len` values off a piece of scratch memory.
pub fn take<'a, T>(rest: &mut &'a mut [T], len: usize) -> Result<&'a mut [T]> {
    let all = std::mem::take(rest);
    let (first, others) =
        all.split_at_mut_checked(len).ok_or_else(|| error!(Fail, "the workspace is too small"))?;
    *rest = others;
    Ok(first)
}

/// Rounds a number of values up to whole cache lines. It saturates, so that [`bytes_of`] refuses
/// what overflows.
pub fn whole_lines(count: usize) -> usize {
    count.checked_next_multiple_of(16).unwrap_or(usize::MAX)
}

/// Returns the bytes of `count` values of type `T`, or an error if that overflows.
pub fn bytes_of<T>(count: usize) -> Result<usize> {
    count.checked_mul(size_of::<T>()).ok_or_else(|| error!(OutOfMemory, "a workspace of {count} values"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_overflow_are_refused() {
        assert_eq!([0, 1, 16, 17].map(whole_lines), [0, 16, 16, 32]);
        assert!(bytes_of::<f32>(whole_lines(usize::MAX)).is_err());
    }
}
