//! `TopK`: one pass with a sorted list for few results, else selection and sorting.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::layout::around_axis;
use ort_cpu_kernel::number::Number;
use ort_cpu_threads::interrupt::{Pace, pieces, spend, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 13;
/// Elements between two calls of `spend`.
const LOOKS: usize = 1 << 12;
/// Up to this many results are kept sorted while the lane is read once.
const FEW: usize = 24;

cpu_kernels![KernelDef { op: "TopK", make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    // Sorted results are also valid if the order does not matter, so we do not read `sorted`.
    let (axis, largest) = (cx.attrs().int("axis")?, cx.attrs().flag("largest")?);
    let bound = move |shapes: &IoShapes<'_>| {
        let (input, output) = (shapes.input(0), shapes.output(0));
        let [outer, len, _] = around_axis(input, axis).unwrap_or_default();
        // Space for the indices if they are not an output, and for each thread a lane with its
        // order.
        let is_unwanted = shapes.outputs.get(1).is_none_or(Option::is_none);
        let places = if is_unwanted { elements(output).saturating_mul(size_of::<i64>()) } else { 0 };
        places.saturating_add(
            len.saturating_mul(2 * size_of::<u64>()).saturating_mul(shapes.threads.min(outer)),
        )
    };
    Ok(Box::new(WithHeap { bound, run: move |cx: &mut RunCx<'_>| run(cx, axis, largest) }))
}

fn run(cx: &mut RunCx<'_>, axis: i64, largest: bool) -> Result<()> {
    let (input, threads) = (cx.input(0)?, cx.threads());
    let [outer, len, inner] = around_axis(input.shape(), axis)?;
    let count = match cx.input(1)?.to_ints()?.as_slice() {
        &[count] => usize::try_from(count).ok().filter(|&count| count <= len),
        _ => None,
    };
    let count = count
        .ok_or_else(|| error!(InvalidArgument, "K must be one number from 0 to the axis' size {len}"))?;
    let total = outer * count * inner;
    let mut owned = Vec::new();
    let places = match cx.wants(1) {
        true => cx.output(1)?.as_mut_slice::<i64>()?,
        false => {
            owned.resize(total, 0);
            owned.as_mut_slice()
        }
    };
    ensure!(places.len() == total, Fail, "{} places for {total} results", places.len());
    let dtype = input.dtype();
    for_each_type!(dtype in NUMERIC, T => {
        let from = input.as_slice::<T>()?;
        let search = Search { from, sizes: [len, inner, count], largest };
        search.places(threads, places);
        if cx.wants(0) {
            search.values(places, cx.output(0)?.as_mut_slice()?);
        }
        Ok(())
    }, else => Err(error!(NotImplemented, "sorting {}", dtype.name())))
}

struct Search<'a, T> {
    from: &'a [T],
    /// The size of the axis, the stride of its elements, and the number of results.
    sizes: [usize; 3],
    largest: bool,
}

impl<T: Number> Search<'_, T> {
    fn places(&self, threads: usize, to: &mut [i64]) {
        let [len, inner, count] = self.sizes;
        let rows = (GRAIN / (len * inner).max(1)).max(1);
        for_each_row_chunk_mut(threads, to, count * inner, rows, |first, blocks| {
            let (mut keys, mut order) = (Vec::with_capacity(len), Vec::new());
            for (index, to) in blocks.chunks_exact_mut(count * inner).enumerate() {
                let block = &self.from[(first + index) * len * inner..][..len * inner];
                for column in 0..inner {
                    spend(2 * len);
                    keys.clear();
                    match inner {
                        1 => pieces(block).for_each(|piece| keys.extend(piece.iter().map(|&x| self.key(x)))),
                        _ => {
                            let lane = block[column..].iter().step_by(inner);
                            keys.extend(spending(1, lane).map(|&x| self.key(x)));
                        }
                    }
                    find_least(&keys, count, &mut order);
                    for (to, &place) in spending(1, to[column..].iter_mut().step_by(inner).zip(&order)) {
                        *to = place as i64;
                    }
                }
            }
        });
    }

    fn values(&self, places: &[i64], to: &mut [T]) {
        let [len, inner, count] = self.sizes;
        for (index, (to, &place)) in spending(4, to.iter_mut().zip(places)).enumerate() {
            let block = index / (count * inner) * len * inner;
            *to = self.from[block + place as usize * inner + index % inner];
        }
    }

    /// Returns a key that is less for an earlier result. NaN is above every number.
    #[inline(always)]
    fn key(&self, value: T) -> u64 {
        let key = value.sort_key();
        if self.largest { !key } else { key }
    }
}

/// Finds the positions of the `count` least keys, in the order of keys and, if these are equal, of
/// positions.
fn find_least(keys: &[u64], count: usize, order: &mut Vec<usize>) {
    order.clear();
    if count > FEW {
        order.extend(spending(1, 0..keys.len()));
        let pace = Pace::default();
        let compare = |a: &usize, b: &usize| {
            pace.step(2);
            (keys[*a], *a).cmp(&(keys[*b], *b))
        };
        if count < keys.len() {
            // Selection is linear in the lane, so only the results are sorted.
            order.select_nth_unstable_by(count, compare);
            order.truncate(count);
        }
        order.sort_unstable_by(compare);
        return;
    }
    for (place, &key) in keys.iter().enumerate() {
        if place % LOOKS == LOOKS - 1 {
            spend(LOOKS);
        }
        if order.len() == count {
            // Of equal keys, the one that was kept is earlier.
            match order.last() {
                Some(&last) if key < keys[last] => order.pop(),
                _ => continue,
            };
        }
        // The comparison above rejects most elements of a lane before this search.
        let at = order.partition_point(|&kept| keys[kept] <= key);
        order.insert(at, place);
    }
}
