//! `Identity` and `BitCast`: the bytes stay the same.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView, OutputsFrom, RunCx};
use ort_core::ir::ValueType;
use ort_core::{Result, ensure};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt;

cpu_kernels![
    KernelDef {
        op: "Identity",
        rank: 1,
        in_place: &[(0, 0)],
        unaligned: &[0],
        when: is_numeric_tensor,
        make: |_| Ok(Box::new(copy)),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "Identity",
        outputs: OutputsFrom::Kernel,
        make: |_| Ok(Box::new(hand_over)),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "BitCast",
        types: &[("T1", TypeSet::ALL.difference(TypeSet::of(&[DType::String])))],
        in_place: &[(0, 0)],
        unaligned: &[0],
        make: |_| Ok(Box::new(copy)),
        ..KernelDef::BASE
    },
];

fn is_numeric_tensor(node: &NodeView<'_>) -> bool {
    matches!(node.input_type(0), ValueType::Tensor(tensor) if tensor.dtype != DType::String)
}

/// Copies the bytes, unless the output shares the input's memory.
pub(super) fn copy(cx: &mut RunCx<'_>) -> Result<()> {
    if cx.in_place(0).is_some() {
        return Ok(());
    }
    let from = cx.input(0)?.bytes()?;
    let to = cx.output(0)?.bytes_mut()?;
    ensure!(from.len() == to.len(), Fail, "{} bytes copied to {}", from.len(), to.len());
    interrupt::copy(from, to);
    Ok(())
}

/// Copies a value of any kind.
fn hand_over(cx: &mut RunCx<'_>) -> Result<()> {
    let value = cx.own_input(0)?;
    cx.set(0, value)
}
