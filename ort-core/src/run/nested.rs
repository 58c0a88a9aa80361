//! Subgraph execution inside a run.
//!
//! Each run of a subgraph has a frame of its own. The host slab of the frame is the workspace of
//! the subgraph's node.

use std::sync::Arc;

use ort_alloc::{Category, DeviceId};

use super::frame::{Frame, FrameMemory, RunEnv, Slabs, device_slabs};
use super::inputs::{Given, bind, fits};
use super::streaming::WindowCursor;
use super::tables::Tables;
use crate::dim::{Bindings, Dim, unify};
use crate::ep::NestedRun;
use crate::ep::dynamic::{Source, ValueMemory};
use crate::ir::{SymShape, ValueType};
use crate::plan::{BoundValues, Known, RunPlan, SlabLimits, resolve_bound, specialize};
use crate::program::{Nested, Program};
use crate::tensor::{DeviceRange, Shape, Value, ValueView};
use crate::{Result, ensure, error};

/// Runs the subgraphs of one step.
pub(crate) struct NestedFrames<'a> {
    /// The plans that were made together with the node's own plan.
    pub(crate) plans: &'a [Arc<RunPlan>],
    pub(crate) nested: &'a [Nested],
    /// The captured values, one subgraph after the other.
    pub(crate) captures: Vec<Option<ValueView<'a>>>,
    pub(crate) bindings: &'a Bindings,
    pub(crate) env: RunEnv<'a>,
    /// The host slab: the workspace of the node.
    pub(crate) workspace: Option<&'a mut [u8]>,
    /// The device slabs.
    pub(crate) slabs: Vec<(DeviceId, DeviceRange<'a>)>,
}

impl NestedFrames<'_> {
    /// Returns the plan that was made together with the node's own plan if the inputs fit it.
    /// Otherwise returns a plan for the inputs' shapes. Returns the bindings of the plan, too.
    fn plan(
        &self,
        index: usize,
        program: &Program,
        given: &[ValueView<'_>],
    ) -> Result<(Bindings, Arc<RunPlan>)> {
        let (threads, plans) = (self.env.control.threads, self.env.plans);
        // The enclosing plan does not include the memory of these plans. Under a limit, their
        // kernels get the smallest workspaces that they can run with.
        let is_limited = self.env.control.budget.limit().is_some();
        let room = if is_limited { SlabLimits::LEAST } else { SlabLimits::ANY };
        let unbound = BoundValues { room, ..BoundValues::unbound(self.env.planning) };
        let resolve = |program: &Program, bindings: &Bindings, threads| {
            resolve_bound(program, bindings, threads, &unbound)
        };
        let mut bindings = self.bindings.clone();
        let known = matches!(bind(program, given, &mut bindings), Ok(None));
        // The plan that was made with the node's is preferred, because the enclosing plan includes
        // its memory.
        if let Some(plan) = self.plans.get(index).filter(|plan| fits(program, plan, given)) {
            return Ok((bindings, plan.clone()));
        }
        if known {
            let plan = plans.get(program, &bindings, &unbound, || resolve(program, &bindings, threads))?;
            if fits(program, &plan, given) {
                return Ok((bindings, plan));
            }
        }
        // The shapes contradict shape inference, so plan without known sizes.
        bindings = Bindings::new();
        let plan = plans.get(program, &bindings, &unbound, || resolve(program, &bindings, threads))?;
        Ok((bindings, plan))
    }
}

/// Refuses tensors that contradict the types that the subgraph was built for: element type, rank
/// and constant sizes. Symbolic sizes are bound again in each run.
fn check_types(program: &Program, given: &[ValueView<'_>]) -> Result<()> {
    for (slot, value) in program.given.iter().zip(given) {
        let Some(slot) = program.slots.get(slot.index()) else { continue };
        let info = program.graph.value(slot.value);
        let (ValueType::Tensor(formal), Ok(tensor)) = (&info.ty, value.tensor()) else { continue };
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let fits = |sizes: &SymShape| {
            let agree = |(dim, &size): (&Dim, &usize)| dim.as_constant().is_none_or(|n| n == size as i64);
            sizes.len() == shape.len() && sizes.iter().zip(shape).all(agree)
        };
        ensure!(
            dtype == formal.dtype && formal.shape.as_ref().is_none_or(fits),
            InvalidArgument,
            help = "declare for the subgraph's input what it is given",
            "input '{}' of the subgraph is {dtype} of shape {shape:?}, expected {}",
            info.name,
            info.ty
        );
    }
    Ok(())
}

impl NestedRun for NestedFrames<'_> {
    fn run(&mut self, index: usize, inputs: &[ValueView<'_>]) -> Result<Vec<Value>> {
        let nested = self.nested.get(index).ok_or_else(|| error!(Fail, "there is no subgraph {index}"))?;
        let program = &nested.program;
        // A subgraph that inference rejected is an error only if it runs.
        if let Some(problem) = &program.graph.broken {
            return Err(problem.clone());
        }
        let formal = program.graph.inputs.len();
        ensure!(
            inputs.len() == formal,
            InvalidGraph,
            "the subgraph has {formal} inputs, but {} are given",
            inputs.len()
        );
        let start: usize = self.nested.iter().take(index).map(|nested| nested.captures.len()).sum();
        let captured = self.captures.iter().skip(start).take(nested.captures.len());
        let mut given: Vec<ValueView<'_>> = inputs.to_vec();
        for capture in captured {
            given.push(capture.ok_or_else(|| error!(Fail, "a captured value was not computed"))?);
        }
        check_types(program, &given)?;
        let (bindings, plan) = self.plan(index, program, &given)?;
        let bytes = plan.host_slab();
        // The node's workspace is too short if its plan did not know the sizes of the subgraph.
        let mut extra;
        let host: &mut [u8] = match self.workspace.as_deref_mut() {
            Some(workspace) if workspace.len() >= bytes => workspace,
            _ => {
                let memory = ValueMemory { memory: self.env.memory, source: Source::Arena };
                extra = memory.allocate(DeviceId::HOST, Category::Dynamic, bytes)?;
                extra.bytes_mut().ok_or_else(|| error!(Fail, "host memory is not the host's"))?
            }
        };
        let devices = device_slabs(&plan, &self.env, Some(&self.slabs))?;
        let slabs = Slabs { host, devices: &devices };
        let windows = WindowCursor::default();
        let mut tables = Tables::default();
        let memory = FrameMemory { slabs, windows, bound: &mut [], owned: &mut tables.owned };
        let mut frame = Frame::new((program, &plan, &bindings), &self.env, Given::Views(&given), memory);
        frame.run(&mut tables.step)
    }

    fn output_shape(&self, index: usize, inputs: &[Option<Shape>], output: usize) -> Option<Shape> {
        let program = &self.nested.get(index)?.program;
        let start: usize = self.nested.iter().take(index).map(|nested| nested.captures.len()).sum();
        let captured = self.captures.iter().skip(start);
        let captured =
            captured.map(|value| value.as_ref()?.tensor().ok().map(|tensor| tensor.shape().into()));
        let mut bindings = self.bindings.clone();
        let mut known: Vec<Known> = Vec::with_capacity(program.given.len());
        for (slot, shape) in program.given.iter().zip(inputs.iter().cloned().chain(captured)) {
            let info = program.graph.value(program.slots.get(slot.index())?.value);
            for (dim, &size) in info.ty.shape().unwrap_or(&[]).iter().zip(shape.iter().flatten()) {
                // On a conflict the first binding stays, as in a run of a model.
                unify(dim, size as i64, &mut bindings).ok();
            }
            let ty = match (info.ty.as_tensor(), shape) {
                (Some(tensor), Some(shape)) => {
                    let sizes = shape.iter().map(|&size| Dim::constant(size as i64));
                    ValueType::tensor(tensor.dtype, Some(sizes.collect()))
                }
                _ => info.ty.clone(),
            };
            known.push((ty, info.symbolic.clone()));
        }
        let graph = specialize(program, &bindings, &known);
        let graph = graph.as_ref().unwrap_or(&program.graph);
        let shape = graph.value(*graph.outputs.get(output)?).ty.shape()?;
        let size = |dim: &Dim| usize::try_from(dim.evaluate(&bindings).ok()?).ok();
        Some(shape.iter().map(|dim| size(dim).unwrap_or(0)).collect())
    }
}
