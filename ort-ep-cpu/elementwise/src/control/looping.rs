//! `Loop`: runs a subgraph repeatedly, with loop-carried values and scan outputs.

use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::ir::{Graph, ValueId};
use ort_core::tensor::{Shape, Tensor, TensorView, Value, ValueView};
use ort_core::{Result, ensure, error};

use super::stack::Stack;
use super::{Item, item_of_run, item_type, subgraph};
use ort_cpu_kernel::cpu_kernels;

cpu_kernels![KernelDef {
    op: "Loop",
    host_inputs: &[0, 1],
    outputs: OutputsFrom::Kernel,
    make,
    ..KernelDef::BASE
}];

struct Loop {
    body: usize,
    /// The number of loop-carried values.
    carried: usize,
    /// The shape in which the body takes the iteration number.
    number_shape: Shape,
    /// The shape in which the body takes the condition.
    condition_shape: Shape,
    /// The type of each scan output in one iteration.
    scans: Vec<Item>,
    /// Whether the loop always runs its trip count. Its scan outputs then have a planned leading
    /// dimension.
    exact: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (body, graph) = subgraph(cx, "body")?;
    let carried = cx.node.node.inputs.len().saturating_sub(2);
    let wanted = cx.node.node.outputs.len();
    // The body's outputs: condition, carried values, scan outputs.
    let scans = graph.outputs.iter().take(wanted + 1).skip(carried + 1);
    let leading = (carried < wanted).then(|| cx.node.output_type(carried));
    let exact = leading
        .as_ref()
        .and_then(|ty| ty.shape().and_then(|shape| shape.first()))
        .is_some_and(|size| !size.has_unknown());
    Ok(Box::new(Loop {
        body,
        carried,
        number_shape: counter_shape(graph, graph.inputs.first()),
        condition_shape: counter_shape(graph, graph.inputs.get(1)),
        scans: scans.map(|&output| item_type(graph, output)).collect::<Result<_>>()?,
        exact,
    }))
}

fn counter_shape(graph: &Graph, input: Option<&ValueId>) -> Shape {
    let rank = input.and_then(|&input| graph.value(input).ty.shape().map(<[_]>::len));
    // Bodies take the number and the condition as a scalar or as one element of rank 1.
    if rank == Some(1) { [1].as_slice().into() } else { Shape::new() }
}

fn condition(tensor: &TensorView<'_>) -> Result<bool> {
    let bytes = tensor.bytes()?;
    ensure!(
        bytes.len() == 1,
        InvalidArgument,
        "a condition has shape {:?}, expected one element",
        tensor.shape()
    );
    Ok(bytes[0] != 0)
}

impl Executable for Loop {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let trips = cx.find_input(0).map(|count| count.to_scalar::<i64>()).transpose()?;
        let mut holds = cx.find_input(1).map(|tensor| condition(&tensor)).transpose()?.unwrap_or(true);
        // Without a trip count, only the condition ends the loop.
        let trips = trips.unwrap_or(i64::MAX);
        // A trip count that is not exact may be hostile, so nothing is allocated for it.
        let expected = if self.exact { usize::try_from(trips).ok() } else { None };
        let mut stacks: Vec<Stack> = self.scans.iter().map(|_| Stack::new(expected)).collect();
        // The loop-carried values of the last iteration. The first one reads the node's inputs in
        // place.
        let mut carried: Option<Vec<Value>> = None;
        let mut number = 0;
        while number < trips && holds {
            cx.check()?;
            let mut outputs = self.iterate(cx, number, holds, carried.as_deref())?.into_iter();
            let next = outputs.next().ok_or_else(|| error!(Fail, "the body has no condition"))?;
            holds = condition(&next.tensor()?.view())?;
            carried = Some(outputs.by_ref().take(self.carried).collect());
            for (stack, value) in stacks.iter_mut().zip(outputs) {
                stack.push(cx, &value.tensor()?.view())?;
            }
            number += 1;
        }
        let last: Vec<Value> = match carried {
            Some(values) => values,
            // No iteration: the initial values are the results.
            None => (0..self.carried).map(|index| cx.own_input(index + 2)).collect::<Result<_>>()?,
        };
        for (index, value) in last.into_iter().enumerate() {
            cx.set(index, value)?;
        }
        // Only a loop without iterations needs the shapes, for its empty scan outputs.
        let shapes = if number == 0 && !stacks.is_empty() { self.input_shapes(cx) } else { Vec::new() };
        for (index, (stack, item)) in stacks.into_iter().zip(&self.scans).enumerate() {
            let output = 1 + self.carried + index;
            let empty = || item_of_run(cx, self.body, &shapes, output, item);
            let joined = stack.finish(cx, empty)?;
            cx.set(self.carried + index, joined)?;
        }
        Ok(())
    }
}

impl Loop {
    /// Returns the shapes of the body's inputs in the first iteration.
    fn input_shapes(&self, cx: &RunCx<'_>) -> Vec<Option<Shape>> {
        let own = [&self.number_shape, &self.condition_shape].map(|shape| Some(shape.clone()));
        let carried = (0..self.carried).map(|index| cx.find_input(index + 2).map(|view| view.shape().into()));
        own.into_iter().chain(carried).collect()
    }

    fn iterate(
        &self,
        cx: &mut RunCx<'_>,
        number: i64,
        holds: bool,
        carried: Option<&[Value]>,
    ) -> Result<Vec<Value>> {
        let number = Tensor::from_slice(&self.number_shape, &[number])?;
        let holds = Tensor::from_bools(&self.condition_shape, &[holds])?;
        let mut inputs: Vec<ValueView<'_>> = Vec::with_capacity(self.carried + 2);
        inputs.push(ValueView::Tensor(number.view()));
        inputs.push(ValueView::Tensor(holds.view()));
        match carried {
            Some(values) => inputs.extend(values.iter().map(Value::view)),
            None => {
                for index in 0..self.carried {
                    inputs.push(cx.input_value(index + 2)?);
                }
            }
        }
        cx.run_subgraph(self.body, &inputs)
    }
}
