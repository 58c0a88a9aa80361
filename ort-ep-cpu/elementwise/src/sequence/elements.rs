//! Sequence construction, access and element-wise updates. Elements share their memory with the
//! sequences that they come from.

use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, OutputsFrom, RunCx};
use ort_core::ir::ValueType;
use ort_core::tensor::Value;
use ort_core::{Result, error};

use super::{reserve_headers, sequence, sequence_value};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spending;

const HANDED: KernelDef = KernelDef { outputs: OutputsFrom::Kernel, ..KernelDef::BASE };

cpu_kernels![
    KernelDef { op: "SequenceConstruct", make: |_| Ok(Box::new(construct)), ..HANDED },
    KernelDef {
        op: "SequenceEmpty",
        make: |cx| {
            // The standard's default is `float`, which has the code 1.
            let code = cx.attrs().find_int("dtype").unwrap_or(1);
            let dtype = i32::try_from(code).ok().and_then(DType::from_onnx);
            let dtype = dtype.ok_or_else(|| error!(InvalidGraph, "dtype {code} is not an element type"))?;
            Ok(Box::new(move |cx: &mut RunCx<'_>| {
                cx.set(0, sequence_value(ValueType::tensor(dtype, None), Vec::new()))
            }))
        },
        ..HANDED
    },
    KernelDef { op: "SequenceAt", make: |_| Ok(Box::new(at)), ..HANDED },
    KernelDef { op: "SequenceInsert", make: |_| Ok(Box::new(insert)), ..HANDED },
    KernelDef { op: "SequenceErase", make: |_| Ok(Box::new(erase)), ..HANDED },
    KernelDef { op: "SequenceLength", make: |_| Ok(Box::new(length)), ..KernelDef::BASE },
];

fn construct(cx: &mut RunCx<'_>) -> Result<()> {
    let count = cx.input_count();
    let elements = (0..count).map(|index| cx.own_input(index)).collect::<Result<Vec<_>>>()?;
    let element_type = ValueType::tensor(cx.input(0)?.dtype(), None);
    cx.set(0, sequence_value(element_type, elements))
}

/// Returns the index that the position at an input names among `count` elements; `None` if the
/// input is absent.
fn position(cx: &RunCx<'_>, input: usize, count: usize) -> Result<Option<usize>> {
    let Some(given) = cx.find_input(input) else { return Ok(None) };
    let given = given.to_ints()?;
    let &[given] = given.as_slice() else {
        return Err(error!(InvalidArgument, "a position has {} elements, expected one", given.len()));
    };
    let counted = if given < 0 { given.checked_add(count as i64) } else { Some(given) };
    let place = counted.and_then(|place| usize::try_from(place).ok()).filter(|&place| place < count);
    place.map(Some).ok_or_else(|| {
        error!(InvalidArgument, "position {given} is out of range for {count} elements").help(match count {
            0 => "the sequence is empty".to_string(),
            _ => format!("positions go from {} to {}", -(count as i64), count - 1),
        })
    })
}

fn at(cx: &mut RunCx<'_>) -> Result<()> {
    let from = sequence(cx, 0)?;
    let place = position(cx, 1, from.elements.len())?;
    let element = place.and_then(|place| from.elements.get(place));
    let element = element.ok_or_else(|| error!(InvalidArgument, "the position is missing"))?;
    cx.set(0, element.clone())
}

/// Clones the elements. Tensors share their memory with the originals.
fn copies(elements: &[Value]) -> impl Iterator<Item = Value> {
    spending(16, elements).cloned()
}

fn insert(cx: &mut RunCx<'_>) -> Result<()> {
    let from = sequence(cx, 0)?;
    // The old sequence stays alive while the new one is built.
    let _headers = reserve_headers(cx, from.elements.len())?;
    let count = from.elements.len();
    // Insertion has one more index than there are elements, namely the end. Negative positions
    // count only the elements.
    let negative = cx.find_input(2).is_some_and(|given| given.to_ints().is_ok_and(|ints| ints < vec![0]));
    let place = position(cx, 2, count + usize::from(!negative))?.unwrap_or(count);
    let (before, behind) = from.elements.split_at(place);
    let mut elements = Vec::with_capacity(count + 1);
    elements.extend(copies(before));
    elements.push(cx.own_input(1)?);
    elements.extend(copies(behind));
    cx.set(0, sequence_value(from.element_type.clone(), elements))
}

fn erase(cx: &mut RunCx<'_>) -> Result<()> {
    let from = sequence(cx, 0)?;
    let count = from.elements.len();
    // The standard: without a position, the last element is erased.
    let place = position(cx, 1, count)?.or(count.checked_sub(1));
    let place = place.ok_or_else(|| error!(InvalidArgument, "the sequence is empty"))?;
    let mut elements = Vec::with_capacity(count - 1);
    elements.extend(copies(&from.elements[..place]));
    elements.extend(copies(&from.elements[place + 1..]));
    cx.set(0, sequence_value(from.element_type.clone(), elements))
}

fn length(cx: &mut RunCx<'_>) -> Result<()> {
    let count = sequence(cx, 0)?.elements.len();
    cx.output(0)?.as_mut_slice::<i64>()?.fill(count as i64);
    Ok(())
}
