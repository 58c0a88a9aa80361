//! Deduplication (`Unique`) of elements, or of slices along an axis.

use std::cmp::Ordering;

use half::{bf16, f16};
use num_complex::Complex;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, OutputsFrom, RunCx};
use ort_core::ops::tensor::geometry::normalize_axis;
use ort_core::tensor::{CompactString, Tensor, TensorView};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{elements, tables};
use ort_cpu_threads::interrupt::{self, PIECE, Pace, pieces, spend, spend_text, spending};

cpu_kernels![KernelDef { op: "Unique", make, outputs: OutputsFrom::Kernel, ..KernelDef::BASE }];

struct Unique {
    axis: Option<i64>,
    sorted: bool,
    are_texts: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let are_texts = cx.node.dtype(0) == Some(DType::String);
    Ok(Box::new(Unique { axis: cx.attrs().find_int("axis"), sorted: cx.attrs().flag("sorted")?, are_texts }))
}

/// Maps an element to an integer with the same order.
trait Key: Copy {
    fn key(self) -> u128;
}

macro_rules! keys {
    ($($integer:ty)*) => {
        $(impl Key for $integer {
            fn key(self) -> u128 {
                // Flipping the sign bit orders signed integers as unsigned ones.
                (self as i128 as u128) ^ (1 << 127)
            }
        })*
    };
}

keys!(u8 i8 u16 i16 u32 i32 u64 i64);

impl Key for f64 {
    /// Both zeros are equal, and so are all NaNs, which come last.
    fn key(self) -> u128 {
        if self.is_nan() {
            return u128::from(u64::MAX);
        }
        // Adding 0 makes a negative zero positive (IEEE 754, round to nearest).
        let bits = (self + 0.0).to_bits();
        // Negative floats order in reverse by their bits, so all bits flip.
        u128::from(if bits >> 63 == 1 { !bits } else { bits | 1 << 63 })
    }
}

impl Key for f32 {
    fn key(self) -> u128 {
        f64::from(self).key()
    }
}

impl Key for f16 {
    fn key(self) -> u128 {
        self.to_f64().key()
    }
}

impl Key for bf16 {
    fn key(self) -> u128 {
        self.to_f64().key()
    }
}

impl Key for Complex<f32> {
    fn key(self) -> u128 {
        self.re.key() << 64 | self.im.key()
    }
}

impl Key for Complex<f64> {
    fn key(self) -> u128 {
        self.re.key() << 64 | self.im.key()
    }
}

/// Returns the keys of all elements. Strings get their ranks as keys.
fn keys_of(view: &TensorView<'_>) -> Result<Vec<u128>> {
    let dtype = view.dtype();
    if dtype == DType::String {
        let strings = view.strings()?;
        let compare = |a: &CompactString, b: &CompactString| {
            spend_text(if a.len() < b.len() { a } else { b });
            a.cmp(b)
        };
        let mut sorted: Vec<&CompactString> = spending(1, strings).collect();
        // Ranks compare like the strings, and fit the same tables as numbers.
        sorted.sort_unstable_by(|a, b| compare(a, b));
        sorted.dedup_by(|a, b| compare(a, b).is_eq());
        let rank = |text: &CompactString| sorted.partition_point(|other| compare(other, text).is_lt());
        return Ok(strings.iter().map(|text| rank(text) as u128).collect());
    }
    if dtype == DType::Bool {
        // Any byte but 0 is true: callers view bytes of other libraries as booleans.
        return Ok(spending(2, view.bytes()?).map(|&byte| u128::from(byte != 0)).collect());
    }
    for_each_type!(
        dtype in [F32, F64, F16, BF16, U8, I8, U16, I16, U32, I32, U64, I64, C64, C128],
        T => Ok(spending(2, view.as_slice::<T>()?).map(|&element| element.key()).collect()),
        else => Err(error!(NotImplemented, "unique elements of {} are not supported", dtype.name()))
    )
}

/// The bytes per item of the tables below: its place in the order, the start and length of its
/// group, and its group.
const ROW_BYTES: usize = 4 * size_of::<usize>();

/// Groups of equal items, in output order.
struct Groups {
    /// For each group, its first item and its length.
    groups: Vec<(usize, usize)>,
    /// The group of each item.
    inverse: Vec<usize>,
}

/// Compares two runs of keys of equal length.
fn order_of(a: &[u128], b: &[u128], pace: &Pace) -> Ordering {
    pace.step(a.len().min(PIECE) / 4);
    if a.len() <= PIECE {
        return a.cmp(b);
    }
    let mut orders = pieces(a).zip(b.chunks(PIECE)).map(|(a, b)| a.cmp(b));
    // The first piece that differs decides, as in a comparison of whole slices.
    orders.find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
}

/// Groups the `items` that `compare` finds equal. `compare` counts its own work.
fn group(items: usize, sorted: bool, compare: impl Fn(usize, usize) -> Ordering) -> Groups {
    let mut order: Vec<usize> = spending(1, 0..items).collect();
    // Ties go by index, so the first item of a group is its first occurrence.
    order.sort_unstable_by(|&a, &b| compare(a, b).then(a.cmp(&b)));
    // Until the output order is known, a group holds its start in `order`.
    let mut groups: Vec<(usize, usize)> = Vec::with_capacity(items);
    for (place, &item) in order.iter().enumerate() {
        spend(8);
        match groups.last_mut() {
            Some((start, count)) if compare(order[*start], item).is_eq() => *count += 1,
            _ => groups.push((place, 1)),
        }
    }
    let pace = Pace::default();
    // Unsorted output: groups in the order of their first occurrence.
    if !sorted {
        groups.sort_unstable_by_key(|&(start, _)| {
            pace.step(1);
            order[start]
        });
    }
    let mut inverse = vec![0; items];
    for (index, (start, count)) in groups.iter_mut().enumerate() {
        for &item in &order[*start..][..*count] {
            pace.step(2);
            inverse[item] = index;
        }
        *start = order[*start];
    }
    Groups { groups, inverse }
}

/// Copies the slices at `picks` along the axis.
fn pick(
    cx: &RunCx<'_>,
    view: &TensorView<'_>,
    [outer, size, run]: Extents,
    picks: &[(usize, usize)],
    shape: &[usize],
) -> Result<Tensor> {
    let places =
        (0..outer).flat_map(|outer| picks.iter().map(move |(index, _)| (outer * size + index) * run));
    if view.dtype() == DType::String {
        let strings = view.strings()?;
        return cx.strings(shape, places.flat_map(|place| strings[place..place + run].iter().cloned()));
    }
    let width = view.dtype().byte_size();
    let width = width.ok_or_else(|| {
        error!(NotImplemented, "unique elements of {} are not supported", view.dtype().name())
    })?;
    let from = view.bytes()?;
    let mut result = cx.allocate(view.dtype(), shape)?;
    // Slices without elements have no parts; `chunks_exact_mut` refuses a length of 0.
    if run > 0 {
        let parts = result.bytes_mut()?.chunks_exact_mut(run * width).zip(places);
        for (to, place) in spending(2 + run / 4, parts) {
            interrupt::copy(&from[place * width..(place + run) * width], to);
        }
    }
    result.finish()
}

/// Elements outside of the axis, the size of the axis, and elements inside of it.
type Extents = [usize; 3];

/// Makes a tensor from a list of integers.
fn ints(cx: &RunCx<'_>, list: impl ExactSizeIterator<Item = usize>) -> Result<Tensor> {
    let mut result = cx.allocate(DType::I64, &[list.len()])?;
    for (to, number) in spending(1, result.as_mut_slice::<i64>()?.iter_mut().zip(list)) {
        *to = number as i64;
    }
    result.finish()
}

impl Executable for Unique {
    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let shape = shapes.input(0);
        let items = match self.axis {
            None => elements(shape),
            Some(axis) => normalize_axis(axis, shape.len()).map_or(0, |axis| shape[axis]),
        };
        // One key per element, and for strings also one reference.
        let reference = if self.are_texts { size_of::<&CompactString>() } else { 0 };
        let keys = elements(shape).saturating_mul(size_of::<u128>() + reference);
        Ok(tables(keys.saturating_add(items.saturating_mul(ROW_BYTES))))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let view = cx.input(0)?;
        let shape = view.shape();
        let keys = keys_of(&view)?;
        let (extents, axis) = match self.axis {
            None => ([1, keys.len(), 1], None),
            Some(axis) => {
                let axis = normalize_axis(axis, shape.len())?;
                let (outer, run) = (shape[..axis].iter().product(), shape[axis + 1..].iter().product());
                ([outer, shape[axis], run], Some(axis))
            }
        };
        let [outer, size, run] = extents;
        ensure!(keys.len() == outer * size * run, Fail, "a tensor of shape {shape:?} lacks elements");
        // Slices of an empty tensor have no elements, so all are equal and need no comparison.
        let outer = if keys.is_empty() { 0 } else { outer };
        let extents = [outer, size, run];
        let part = |item: usize, outer: usize| &keys[(outer * size + item) * run..][..run];
        let pace = Pace::default();
        let groups = group(size, self.sorted, |a, b| {
            pace.step(2);
            let mut orders = (0..outer).map(|outer| order_of(part(a, outer), part(b, outer), &pace));
            orders.find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
        });
        // Freed before the outputs are allocated.
        drop(keys);
        let Groups { groups, inverse } = groups;
        let mut result = shape.to_vec();
        match axis {
            Some(axis) => result[axis] = groups.len(),
            None => result = vec![groups.len()],
        }
        let picked = pick(cx, &view, extents, &groups, &result)?;
        cx.set(0, picked)?;
        if cx.wants(1) {
            cx.set(1, ints(cx, groups.iter().map(|(first, _)| *first))?)?;
        }
        if cx.wants(2) {
            cx.set(2, ints(cx, inverse.iter().copied())?)?;
        }
        if cx.wants(3) {
            cx.set(3, ints(cx, groups.iter().map(|(_, count)| *count))?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_the_order() {
        let floats = [f64::NEG_INFINITY, -2.5, -1e-300, 0.0, 1e-300, 7.0, f64::INFINITY, f64::NAN];
        assert!(floats.is_sorted_by(|a, b| a.key() < b.key()));
        assert_eq!((-0.0f64).key(), 0.0f64.key());
        assert_eq!((-f64::NAN).key(), f64::NAN.key());
        assert!([i64::MIN, -1, 0, 1, i64::MAX].is_sorted_by(|a, b| a.key() < b.key()));
        assert!([0, 1, u64::MAX].is_sorted_by(|a, b| a.key() < b.key()));
    }
}
