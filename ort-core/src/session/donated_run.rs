//! Runs that take over inputs: the plan reuses the memory of donated inputs once they are dead, and
//! the run frees it after its last use.

use ort_alloc::DeviceId;
use rustc_hash::FxHashMap;

use super::{RunOptions, Session};
use crate::Result;
use crate::dim::Bindings;
use crate::ir::ValueId;
use crate::plan::{BoundValues, GivenMemory};
use crate::run::grant::RunWork;
use crate::run::inputs::{Given, bind};
use crate::tensor::{TensorBuffer, Value};

/// Donated memory that begins at another address is read, but not reused: no value may be in it.
const ALIGNMENT: usize = 64;

impl Session {
    /// Runs the model as [`Session::run_values`] does, and takes over the memory of some inputs.
    /// Their buffers may be overwritten, and each is freed as soon as the run no longer needs it.
    /// The plan does not count them.
    ///
    /// # Errors
    ///
    /// Those of [`Session::run_values`]. An input that is donated must not be among `inputs`, too.
    /// The buffers are dropped in any case.
    pub fn run_donating(
        &self,
        inputs: &[(&str, Value)],
        donated: Vec<(&str, TensorBuffer)>,
        options: &RunOptions<'_>,
    ) -> Result<Vec<Value>> {
        self.check_updates()?;
        let readable = self.readable(inputs)?;
        // Tensors over the donated buffers, as all inputs are checked and bound together.
        let mut all = readable.unwrap_or_else(|| inputs.to_vec());
        for (name, buffer) in &donated {
            all.push((name, Value::Tensor(buffer.tensor()?)));
        }
        let given = self.arrange(&all)?;
        let mut bindings = Bindings::new();
        if let Some(conflict) = bind(&self.executor.compiled.program, &given, &mut bindings)? {
            drop(given);
            drop(all);
            return self.independent(conflict)?.run_donating(inputs, donated, options);
        }
        let names = self.model.inputs();
        let place_of = |name: &str| names.iter().position(|spec| spec.name == name);
        let mut memories: Vec<GivenMemory> =
            given.iter().map(|value| GivenMemory::of(Some(*value))).collect();
        for (name, buffer) in &donated {
            let memory = place_of(name).and_then(|place| memories.get_mut(place));
            memory.into_iter().for_each(|memory| *memory = memory_of(buffer));
        }
        let bound = BoundValues { inputs: memories, ..BoundValues::unbound(self.executor.planning) };
        let (plan, bindings) = self.executor.plan_fitting(bindings, &given, &bound)?;
        drop(given);
        let mut values = self.values_in_order(&all);
        // The tensors over the buffers go, so that nothing shares the buffers.
        drop(all);
        let mut buffers: Vec<Option<TensorBuffer>> = values.iter().map(|_| None).collect();
        for (name, buffer) in donated {
            let Some(place) = place_of(name) else { continue };
            if let (Some(value), Some(free)) = (values.get_mut(place), buffers.get_mut(place)) {
                (*value, *free) = (None, Some(buffer));
            }
        }
        let work = RunWork { plan: &plan, bindings: &bindings, given: Given::Values(&values) };
        let mut tables = self.executor.kept.take_tables();
        let outputs =
            self.executor
                .execute(work, (&mut buffers, &mut tables), options, |frame, tables| frame.run(tables))?;
        self.executor.kept.keep_tables(tables);
        Ok(outputs)
    }

    /// Returns the values of named inputs and the defaults of omitted ones in the model's order.
    fn values_in_order(&self, inputs: &[(&str, Value)]) -> Vec<Option<Value>> {
        let graph = &self.executor.compiled.program.graph;
        let by_name: FxHashMap<&str, &Value> = inputs.iter().map(|(name, value)| (*name, value)).collect();
        let value = |id: &ValueId| {
            let default = || graph.input_defaults.get(id).map(|tensor| Value::Tensor(tensor.clone()));
            by_name.get(&*graph.value(*id).name).map(|value| (*value).clone()).or_else(default)
        };
        graph.inputs.iter().map(value).collect()
    }
}

/// Returns how the plan may use a donated buffer.
fn memory_of(buffer: &TensorBuffer) -> GivenMemory {
    let bytes = buffer.view().bytes().ok();
    let is_aligned = bytes.is_some_and(|bytes| (bytes.as_ptr() as usize).is_multiple_of(ALIGNMENT));
    match is_aligned && buffer.memory() == DeviceId::HOST {
        true => GivenMemory::DONATED,
        false => GivenMemory::buffer(buffer.memory()),
    }
}
