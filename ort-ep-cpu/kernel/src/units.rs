//! Parallel loops over units of an output that need scratch memory.

use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::for_each_chunk_mut;

/// The number of parts into which [`for_each_unit`] splits `units`. Each part needs its own
/// scratch.
pub fn part_count(threads: usize, units: usize) -> usize {
    if threads <= 1 { 1 } else { (threads * 2).min(units.max(1)) }
}

/// Calls `task` in parallel for each unit: its index, its `unit_len` values of `output`, and
/// `scratch_len` values of scratch. The units of one part share scratch, so `scratch` holds
/// `scratch_len` values for each part.
pub fn for_each_unit<T: Send, S: Send>(
    threads: usize,
    (output, unit_len): (&mut [T], usize),
    (scratch, scratch_len): (&mut [S], usize),
    task: impl Fn(usize, &mut [T], &mut [S]) + Sync,
) {
    if unit_len == 0 || output.is_empty() {
        return;
    }
    let units = output.len() / unit_len;
    let per_part = units.div_ceil(part_count(threads, units)).max(1);
    let mut empty: Vec<&mut [S]> = Vec::new();
    let scratch: Vec<&mut [S]> = match scratch_len {
        // `chunks_exact_mut` panics on a length of 0.
        0 => {
            empty.resize_with(units.div_ceil(per_part), Default::default);
            empty
        }
        _ => scratch.chunks_exact_mut(scratch_len).collect(),
    };
    let mut parts: Vec<_> = output.chunks_mut(per_part * unit_len).zip(scratch).collect();
    for_each_chunk_mut(threads, &mut parts, 1, |part, pieces| {
        for (values, scratch) in pieces {
            for (at, unit) in values.chunks_exact_mut(unit_len).enumerate() {
                spend(unit_len.max(64));
                task(part * per_part + at, unit, scratch);
            }
        }
    });
}
