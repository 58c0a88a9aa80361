//! `NonZero` and `Compress`: stream compaction. Blocks count their selected elements, a prefix sum
//! gives each block its offset, and a second pass writes the results.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::geometry::around_axis;
use ort_core::tensor::Shape;
use ort_core::{Result, error};
use smallvec::smallvec;

use super::elements::{MOVED, by_bytes, element_bytes, few_axes};
use super::gather::picked;
use super::{Counted, CudaKernel, MOST_AXES, count, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

/// Elements of a block, as in `cu/select.cu`.
const BLOCK: usize = 2048;
/// Threads of a block.
const THREADS: u32 = 256;
/// The most threads of the block that computes the prefix sum.
const MOST_THREADS: usize = 1024;

/// The types of `NonZero`; a complex number is two floats.
const COUNTED: TypeSet = TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool, DType::C64]));

cuda_kernels![
    CudaKernel::counting(
        KernelDef { op: "NonZero", types: &[("T", COUNTED)], when: few_axes, ..KernelDef::BASE },
        count_non_zero,
        non_zero_bytes,
        Counted { shapes: non_zero_shapes, write: write_non_zero },
    ),
    CudaKernel::counting(
        KernelDef { op: "Compress", types: &[("T", MOVED)], ..KernelDef::BASE },
        count_kept,
        compress_bytes,
        Counted { shapes: kept_shapes, write: write_kept },
    ),
];

/// Elements to select: those that are neither zero nor false.
pub(super) struct Flags {
    x: Operand,
    count: usize,
    /// For each block, the number of selected elements before it, once they are counted.
    before: Operand,
}

impl Flags {
    /// Selects from the first `count` elements of a tensor, and reserves the block counts in the
    /// workspace.
    pub(super) fn new(cx: &OpCx<'_>, taken: &mut usize, x: &Operand, count: usize) -> Flags {
        let before = cx.workspace(taken, DType::U32, &[count.div_ceil(BLOCK)]);
        Flags { x: x.clone(), count, before }
    }

    /// Returns the bits of an element that make it nonzero: all but the sign of a float.
    fn mask(&self) -> [u8; 8] {
        let mask: u64 = match self.x.dtype {
            DType::F16 | DType::BF16 => 0x7fff,
            DType::F32 => 0x7fff_ffff,
            DType::F64 => u64::MAX >> 1,
            DType::C64 => 0x7fff_ffff_7fff_ffff,
            _ => u64::MAX,
        };
        mask.to_ne_bytes()
    }

    fn blocks(&self, launch: Launch) -> Result<Launch> {
        Ok(launch.grid([self.before.count(), 1, 1])?.block([THREADS, 1, 1]))
    }

    /// Returns the launches that count, with the sum in `total`; none if there are no elements.
    pub(super) fn counted(&self, total: &Operand) -> Result<Vec<Launch>> {
        let blocks = self.before.count();
        if blocks == 0 {
            return Ok(Vec::new());
        }
        let count = self.blocks(by_bytes("select", "count_set", element_bytes(self.x.dtype)?))?;
        let count = count.tensor(&self.x).tensor(&self.before).bytes(&self.mask()).uint(self.count)?;
        // One block sums up all counts, in whole warps.
        let threads = blocks.min(MOST_THREADS).next_multiple_of(32);
        let add = Launch::new("select", "add_up").block([threads as u32, 1, 1]);
        Ok(vec![count, add.tensor(&self.before).tensor(total).uint(blocks)?])
    }

    /// Returns the launch that writes the positions of the selected elements, which are bytes.
    pub(super) fn places(&self, places: &Operand) -> Result<Launch> {
        let launch = self.blocks(Launch::new("select", "places"))?.tensor(&self.x).tensor(&self.before);
        launch.tensor(places).uint(self.count)
    }
}

/// The input of `NonZero`, after the count in the workspace.
fn elements(cx: &OpCx<'_>, taken: &mut usize) -> Result<(Operand, Flags)> {
    let x = cx.input(0)?;
    Ok((count(cx, taken), Flags::new(cx, taken, x, x.count())))
}

fn non_zero_bytes(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    elements(cx, &mut taken)?;
    Ok(taken)
}

fn count_non_zero(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (total, flags) = elements(cx, &mut 0)?;
    flags.counted(&total)
}

fn non_zero_shapes(cx: &OpCx<'_>, count: usize) -> Result<Vec<Shape>> {
    Ok(vec![smallvec![cx.input(0)?.rank(), count]])
}

fn write_non_zero(cx: &OpCx<'_>, count: usize) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    // A scalar has no axis to write an index for.
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let (_, flags) = elements(cx, &mut 0)?;
    let launch = flags.blocks(by_bytes("select", "indices", element_bytes(x.dtype)?))?;
    let launch = launch.tensor(x).tensor(&flags.before).tensor(y).bytes(&flags.mask()).uint(x.count())?;
    Ok(vec![launch.uint(count)?.uint(x.rank())?.uints::<MOST_AXES>(&x.shape)?])
}

/// Returns the extents of `Compress`: elements outside the axis, its size, and elements inside.
fn extents(cx: &OpCx<'_>) -> Result<[usize; 3]> {
    let x = cx.input(0)?;
    match cx.attrs.find_int("axis") {
        None => Ok([1, x.count(), 1]),
        Some(axis) => Ok(around_axis(&x.shape, cx.axis(axis, x.rank())?)),
    }
}

/// The conditions of `Compress`, after the count in the workspace. Conditions beyond the axis
/// select nothing.
fn conditions(cx: &OpCx<'_>, taken: &mut usize) -> Result<(Operand, Flags, Operand)> {
    let (condition, [_, size, _]) = (cx.input(1)?, extents(cx)?);
    let count = size.min(condition.count());
    let total = super::count(cx, taken);
    let flags = Flags::new(cx, taken, condition, count);
    Ok((total, flags, cx.workspace(taken, DType::I64, &[count])))
}

fn compress_bytes(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    conditions(cx, &mut taken)?;
    Ok(taken)
}

fn count_kept(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (total, flags, _) = conditions(cx, &mut 0)?;
    flags.counted(&total)
}

fn kept_shapes(cx: &OpCx<'_>, count: usize) -> Result<Vec<Shape>> {
    let x = cx.input(0)?;
    let Some(axis) = cx.attrs.find_int("axis") else { return Ok(vec![smallvec![count]]) };
    let axis = cx.axis(axis, x.rank())?;
    let mut shape = x.shape.clone();
    let size = shape.get_mut(axis).ok_or_else(|| error!(InvalidArgument, "a scalar has no axis"))?;
    *size = count;
    Ok(vec![shape])
}

fn write_kept(cx: &OpCx<'_>, count: usize) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let (_, flags, places) = conditions(cx, &mut 0)?;
    let places = places.with_shape(&[count]);
    Ok(vec![flags.places(&places)?, picked(x, extents(cx)?, &places, y)?])
}
