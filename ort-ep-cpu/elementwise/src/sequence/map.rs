//! `SequenceMap`: runs a subgraph on each element of sequences.

use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::ir::ValueType;
use ort_core::tensor::{Value, ValueView};
use ort_core::{Result, ensure, error};

use super::{sequence, sequence_value};
use ort_cpu_kernel::cpu_kernels;

cpu_kernels![KernelDef { op: "SequenceMap", outputs: OutputsFrom::Kernel, make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let body = cx.node.node.subgraph("body");
    let (index, body) = body.ok_or_else(|| error!(InvalidGraph, "attribute 'body' is missing"))?;
    let outputs = &body.graph.outputs;
    let types = outputs.iter().map(|&output| match body.graph.value(output).ty.dtype() {
        Some(dtype) => ValueType::tensor(dtype, None),
        None => ValueType::Unknown,
    });
    let types: Vec<ValueType> = types.collect();
    Ok(Box::new(move |cx: &mut RunCx<'_>| map(cx, index, &types)))
}

fn map(cx: &mut RunCx<'_>, body: usize, types: &[ValueType]) -> Result<()> {
    let count = sequence(cx, 0)?.elements.len();
    let given: Vec<ValueView<'_>> =
        (0..cx.input_count()).map(|index| cx.input_value(index)).collect::<Result<_>>()?;
    let mut results: Vec<Vec<Value>> = types.iter().map(|_| Vec::with_capacity(count)).collect();
    for place in 0..count {
        // Deadlines and cancellation are checked in each iteration.
        cx.check()?;
        let mut inputs = Vec::with_capacity(given.len());
        for value in &given {
            inputs.push(match value {
                ValueView::Value(Value::Sequence(sequence)) => {
                    let element = sequence.elements.get(place);
                    ensure!(
                        sequence.elements.len() == count,
                        InvalidArgument,
                        "the sequences have {count} and {} elements",
                        sequence.elements.len()
                    );
                    element.ok_or_else(|| error!(Fail, "an element is missing"))?.view()
                }
                // Other inputs go to every iteration.
                other => *other,
            });
        }
        let outputs = cx.run_subgraph(body, &inputs)?;
        for (result, value) in results.iter_mut().zip(outputs) {
            result.push(value);
        }
    }
    for (index, (elements, ty)) in results.into_iter().zip(types).enumerate() {
        cx.set(index, sequence_value(ty.clone(), elements))?;
    }
    Ok(())
}
