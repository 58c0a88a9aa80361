//! `Where` over elements of any type, and `Clip`.

use bytemuck::Pod;
use ort_core::dtype::{DType, Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::spec::broadcast::shapes;
use ort_core::tensor::element_count;
use ort_core::{Result, error, for_each_type};

use super::blocks::{elements, operand, operand_block, output_elements, output_shape, run_in_place, select};
use ort_cpu_kernel::broadcast::{BLOCK, Broadcast};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spending;
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::Isa;

const STRINGS: TypeSet = TypeSet::of(&[DType::String]);

cpu_kernels![
    KernelDef {
        op: "Where",
        types: &[("T", TypeSet::ALL.difference(STRINGS))],
        in_place: &[(1, 0), (2, 0)],
        make: make_where,
        ..KernelDef::BASE
    },
    KernelDef {
        op: "Where",
        rank: 1,
        types: &[("T", STRINGS)],
        outputs: OutputsFrom::Kernel,
        make: |_| Ok(Box::new(where_strings)),
        ..KernelDef::BASE
    },
    KernelDef { op: "Clip", in_place: &[(0, 0)], make: make_clip, ..KernelDef::BASE },
];

fn make_where(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    // Only the size of an element matters, not its type.
    let size = cx.node.dtype(1).and_then(DType::byte_size);
    Ok(match size {
        Some(1) => Box::new(run_where::<u8>),
        Some(2) => Box::new(run_where::<u16>),
        Some(4) => Box::new(run_where::<u32>),
        Some(8) => Box::new(run_where::<u64>),
        // Complex numbers have the alignment of their halves.
        Some(16) => Box::new(run_where::<[u64; 2]>),
        _ => return Err(error!(NotImplemented, "Where of elements that are not whole bytes")),
    })
}

fn run_where<T: Pod + Send + Sync>(cx: &mut RunCx<'_>) -> Result<()> {
    let condition = cx.input(0)?;
    let conditions: &[u8] = elements(&condition)?;
    let ((a, a_shape), (b, b_shape)) = (operand::<T>(cx, 1)?, operand::<T>(cx, 2)?);
    let walk = Broadcast::new(output_shape(cx, 0)?, &[condition.shape(), a_shape, b_shape])?;
    let threads = cx.threads();
    let out = output_elements::<T>(cx, 0)?;
    // Without buffers, blocks may be of any length.
    let limit = if !walk.needs_buffers() && a.is_some() && b.is_some() { usize::MAX } else { BLOCK };
    walk.for_each_block(threads, limit, out, |scratch: &mut (Vec<u8>, Vec<T>, Vec<T>), start, block| {
        let (first, second, third) = scratch;
        let condition = walk.block(0, conditions, start, block.len(), first);
        let a = operand_block(&walk, (1, a), start, block, second);
        let b = operand_block(&walk, (2, b), start, block, third);
        select(condition, a, b, block);
    });
    Ok(())
}

fn where_strings(cx: &mut RunCx<'_>) -> Result<()> {
    let (condition, a, b) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let shape = shapes(&[condition.shape(), a.shape(), b.shape()])?;
    let walk = Broadcast::new(&shape, &[condition.shape(), a.shape(), b.shape()])?;
    let conditions: &[u8] = elements(&condition)?;
    let (a, b) = (a.strings()?, b.strings()?);
    let places = a.len().saturating_add(b.len()).saturating_add(element_count(&shape)?);
    let _tables = cx.reserve(places.saturating_mul(size_of::<usize>()))?;
    // Blocks hold indices instead of strings. Those of `b` follow those of `a`.
    let a_places: Vec<usize> = spending(1, 0..a.len()).collect();
    let b_places: Vec<usize> = spending(1, a.len()..a.len() + b.len()).collect();
    let mut chosen = vec![0usize; element_count(&shape)?];
    type Scratch = (Vec<u8>, Vec<usize>, Vec<usize>);
    walk.for_each_block(1, BLOCK, &mut chosen, |(first, second, third): &mut Scratch, start, block| {
        let condition = walk.block(0, conditions, start, block.len(), first);
        let a = walk.block(1, &a_places, start, block.len(), second);
        let b = walk.block(2, &b_places, start, block.len(), third);
        select(condition, a, b, block);
    });
    // The first strings are those of `a`.
    let text = |place: usize| a.get(place).or_else(|| b.get(place - a.len())).cloned().unwrap_or_default();
    let chosen = cx.strings(&shape, chosen.into_iter().map(text))?;
    cx.set(0, chosen)
}

fn make_clip(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let unknown = || error!(Fail, "Clip has no type");
    let dtype = cx.node.dtype(0).ok_or_else(unknown)?;
    if dtype == DType::F32 {
        return Ok(Box::new(clip_floats));
    }
    for_each_type!(dtype in NUMERIC, T => Ok(Box::new(clip::<T>)), else => Err(unknown()))
}

/// Reads a bound, which the node may leave out.
fn bound<T: Element>(cx: &RunCx<'_>, index: usize) -> Result<Option<T>> {
    cx.find_input(index).map(|view| view.to_scalar::<T>()).transpose()
}

fn clip_floats(cx: &mut RunCx<'_>) -> Result<()> {
    let min = bound(cx, 1)?.unwrap_or(f32::NEG_INFINITY);
    let max = bound(cx, 2)?.unwrap_or(f32::INFINITY);
    let isa = Isa::current();
    run_in_place::<f32>(cx, |block| unary_in_place(isa, Unary::Clip { min, max }, block))
}

/// Computes `min(max, max(min, x))`. If the bounds cross, the upper one wins.
fn clip<T: Element + Pod + PartialOrd>(cx: &mut RunCx<'_>) -> Result<()> {
    let (min, max) = (bound::<T>(cx, 1)?, bound::<T>(cx, 2)?);
    run_in_place::<T>(cx, |block| {
        if let Some(min) = min {
            // Comparisons with NaN are false, so NaN stays.
            block.iter_mut().for_each(|x| *x = if *x < min { min } else { *x });
        }
        if let Some(max) = max {
            block.iter_mut().for_each(|x| *x = if *x > max { max } else { *x });
        }
    })
}
