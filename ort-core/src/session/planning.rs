//! Plans of a session: the memory that a run needs, known before it runs.

use super::Session;
use super::memory::ConstantBytes;
use crate::dim::{Bindings, Symbol};
use crate::plan::{
    BoundValues, GivenMemory, KindBytes, LiveStep, MemoryKind, PlanReport, RunPlan, live_steps, report,
};
use crate::run::grant::MemoryDemand;
use crate::run::inputs::bind;
use crate::run::microbatch::RunRequest;
use crate::run::streaming::{AvailableMemory, OnDevices};
use crate::tensor::Value;
use crate::{Error, Result, advise, ensure, error};

impl Session {
    /// Plans the memory of a run with these sizes of symbolic dimensions. A dimension that is not
    /// named counts as 1. A name that the model does not have is an error.
    pub fn plan(&self, dims: &[(&str, i64)]) -> Result<PlanReport> {
        let bindings = self.bindings(dims)?;
        let values = self.executor.compiled.program.bound_values(self.executor.planning);
        self.report(&bindings, &values, self.independent.built())
    }

    /// As [`Session::plan`], for a run that takes over the memory of the named inputs
    /// ([`Session::run_donating`]), which counts as the caller's.
    pub fn plan_donating(&self, dims: &[(&str, i64)], donated: &[&str]) -> Result<PlanReport> {
        let bindings = self.bindings(dims)?;
        let mut values = self.executor.compiled.program.bound_values(self.executor.planning);
        let names = self.model.inputs();
        values.inputs.resize(names.len(), GivenMemory::HOST);
        for name in donated {
            let place = names.iter().position(|spec| spec.name == *name);
            let memory = place.and_then(|place| values.inputs.get_mut(place));
            *memory.ok_or_else(|| error!(InvalidArgument, "the model has no input '{name}'"))? =
                GivenMemory::DONATED;
        }
        self.report(&bindings, &values, self.independent.built())
    }

    /// Plans the memory of a run on these inputs.
    pub fn plan_for_inputs(&self, inputs: &[(&str, Value)]) -> Result<PlanReport> {
        self.plan_with_constants_of(self.independent.built(), inputs)
    }

    /// [`Self::plan_for_inputs`], with the constants of `other` added to the report.
    fn plan_with_constants_of(
        &self,
        other: Option<&Session>,
        inputs: &[(&str, Value)],
    ) -> Result<PlanReport> {
        let given = self.arrange(inputs)?;
        let mut bindings = Bindings::new();
        if let Some(conflict) = bind(&self.executor.compiled.program, &given, &mut bindings)? {
            // To the caller both sessions are one, so the report includes the constants of both.
            return self.independent(conflict)?.plan_with_constants_of(Some(self), inputs);
        }
        self.report(&bindings, &self.executor.given_values(&given), other)
    }

    /// Returns what each step of a run allocates and frees, in execution order, with these sizes of
    /// symbolic dimensions. This is for tools that edit the graph to lower the peak.
    pub fn live_steps(&self, dims: &[(&str, i64)]) -> Result<Vec<LiveStep>> {
        Ok(live_steps(&self.executor.compiled.program, &self.bindings(dims)?, self.executor.threads))
    }

    /// The plan's report, completed with weights, constants and available memory.
    fn report(
        &self,
        bindings: &Bindings,
        values: &BoundValues,
        other: Option<&Session>,
    ) -> Result<PlanReport> {
        let plan = self.executor.plan_bound(bindings, values)?;
        let mut report = report(&self.executor.compiled.program, &plan, bindings, self.executor.threads);
        report.weights_bytes = self.model.graph().weight_bytes();
        let available = self.executor.free_bytes();
        (report.batch_split, report.shortage) =
            self.executor.would_split(RunRequest { plan: &plan, bindings }, available);
        report.unsplit = self.executor.why_unsplit(RunRequest { plan: &plan, bindings });
        // Constants get the memory that the peak leaves, and a split run has a lower peak than the
        // whole batch.
        let peak = report.batch_split.as_ref().map_or(plan.peak(), |split| split.planned_bytes);
        report.kinds.extend(self.constant_kinds(&plan, available.saturating_sub(peak), other));
        report.available_bytes = available.saturating_sub(self.executor.compiled.streams.least_bytes());
        Ok(report)
    }

    /// The constants during a run that leaves `bytes` for them, plus those that `other` holds.
    fn constant_kinds(&self, plan: &RunPlan, bytes: usize, other: Option<&Session>) -> [KindBytes; 7] {
        let streams = &self.executor.compiled.streams;
        // The report must not fail if a device's own limit is too small for the run, so such a run
        // is planned without device limits.
        let MemoryDemand { on_devices, is_open_ended, .. } =
            MemoryDemand::of(&self.executor.compiled.program, plan);
        let free = |on_devices| AvailableMemory { bytes, on_devices, eighths: 8, is_open_ended };
        let shares = streams.shares(&free(on_devices)).or_else(|_| streams.shares(&free(OnDevices::new())));
        let (shares, left) = shares.unwrap_or_default();
        let streamed = streams.streamed_bytes(left);
        let parts: Vec<&Session> = std::iter::once(self).chain(other).collect();
        let now = ConstantBytes::of(&parts, Some(plan));
        // Streamable weights count as packed only if they stay packed in this run.
        let resident = streams.resident_bytes(&self.executor.compiled.program);
        let packed = (now.packed + streams.packed_bytes()).saturating_sub(streamed + resident);
        let on_devices = self.fixed_device_constants() + shares.kept_bytes();
        let on_devices_by_other = now.on_devices.saturating_sub(self.device_constants_now());
        [
            (MemoryKind::WeightsMapped, now.mapped),
            (MemoryKind::WeightsPacked, packed),
            (MemoryKind::WeightsCached, now.cached),
            (MemoryKind::WeightsStreamed, streamed),
            (MemoryKind::DeviceConstants, on_devices + on_devices_by_other),
            (MemoryKind::DeviceWindow, shares.window_bytes()),
            (MemoryKind::DeviceStreamed, shares.streamed_bytes()),
        ]
        .map(|(kind, bytes)| KindBytes { kind, bytes, symbolic: None })
    }

    /// Returns sizes for all symbolic dimensions of the inputs: the given ones, and 1 for the
    /// others. A name that the model does not have is an error.
    pub fn bindings(&self, dims: &[(&str, i64)]) -> Result<Bindings> {
        let symbols = self.model.symbols();
        let mut bindings = Bindings::new();
        for symbol in &symbols {
            bindings.insert(symbol.clone(), 1);
        }
        for (name, size) in dims {
            let symbol = symbols.iter().find(|symbol| symbol.to_string() == *name);
            let symbol = symbol.ok_or_else(|| unknown_dim(name, &symbols))?;
            ensure!(*size >= 0, InvalidArgument, "dimension '{name}' is {size}, expected 0 or more");
            bindings.insert(symbol.clone(), *size);
        }
        Ok(bindings)
    }
}

fn unknown_dim(name: &str, symbols: &[Symbol]) -> Error {
    let known: Vec<String> = symbols.iter().map(Symbol::to_string).collect();
    error!(InvalidArgument, "the model has no symbolic dimension '{name}'").help(advise(
        "symbolic dimensions",
        name,
        known.iter().map(String::as_str),
    ))
}
