//! Bindings of finished runs, for the next runs with given outputs.
//!
//! A client that passes the same memory in every run pays for names, types and the plan once. Only
//! memory that the caller lends is remembered, by its address: a binding keeps nothing alive that
//! the caller has released, and reads it in no run but one that gets the memory again.

use ort_runtime::{DType, IoBinding, Session as Engine};
use parking_lot::Mutex;

use crate::entry::In;
use crate::status::Outcome;
use crate::value::{Dims, Numbers, Value};

/// Ports, and the value that the caller gives for each.
#[derive(Clone, Copy)]
pub(crate) struct PortValues<'a> {
    pub(crate) ports: &'a [usize],
    pub(crate) values: &'a [In<Value>],
}

impl PortValues<'_> {
    /// The ports with their tensors; null and what is no numbers is `None`.
    fn pairs(&self) -> impl Iterator<Item = Outcome<(usize, Option<&Numbers>)>> {
        self.ports.iter().zip(self.values).map(|(port, value)| match value.optional()? {
            Some(Value::Numbers(numbers)) => Ok((*port, Some(numbers))),
            _ => Ok((*port, None)),
        })
    }
}

/// The memory of an input or output.
struct Lent {
    port: usize,
    address: usize,
    dtype: DType,
    dims: Dims,
}

impl Lent {
    /// The memory of tensors; `None` if some of it is not the caller's.
    fn all(given: PortValues<'_>) -> Outcome<Option<Vec<Lent>>> {
        let mut all = Vec::with_capacity(given.ports.len());
        for pair in given.pairs() {
            let (port, numbers) = pair?;
            // A binding copies what is not aligned, and would not see the next run's elements.
            let Some(numbers) = numbers.filter(|numbers| numbers.is_lent() && numbers.tensor().is_aligned())
            else {
                return Ok(None);
            };
            let (dtype, dims) = (numbers.tensor().dtype(), Dims::from_slice(numbers.dims()));
            all.push(Lent { port, address: numbers.address(), dtype, dims });
        }
        Ok(Some(all))
    }

    fn is_of(&self, port: usize, numbers: &Numbers) -> bool {
        self.port == port
            && self.address == numbers.address()
            && self.dtype == numbers.tensor().dtype()
            && *self.dims == *numbers.dims()
    }
}

/// Whether the values are in this memory.
fn are_in(memory: &[Lent], given: PortValues<'_>) -> bool {
    let is_of = |(lent, pair): (&Lent, Outcome<(usize, Option<&Numbers>)>)| {
        pair.is_ok_and(|(port, numbers)| numbers.is_some_and(|numbers| lent.is_of(port, numbers)))
    };
    memory.len() == given.ports.len() && memory.iter().zip(given.pairs()).all(is_of)
}

/// The memory that a run reads and writes, all of it the caller's.
pub(crate) struct LentMemory {
    inputs: Vec<Lent>,
    outputs: Vec<Lent>,
}

impl LentMemory {
    /// The memory of a run; `None` if some of it is not lent.
    pub(crate) fn of(inputs: PortValues<'_>, outputs: PortValues<'_>) -> Outcome<Option<LentMemory>> {
        let (Some(inputs), Some(outputs)) = (Lent::all(inputs)?, Lent::all(outputs)?) else {
            return Ok(None);
        };
        Ok(Some(LentMemory { inputs, outputs }))
    }
}

/// A binding, and the memory that it is bound to.
pub(crate) struct Kept {
    /// It is large, and moves with each run.
    pub(crate) binding: Box<IoBinding>,
    pub(crate) memory: Option<LentMemory>,
}

impl Kept {
    /// Unbinds everything, unless all of it is lent.
    pub(crate) fn set_memory(&mut self, memory: Option<LentMemory>) {
        if memory.is_none() {
            self.clear();
        }
        self.memory = memory;
    }

    fn clear(&mut self) {
        self.binding.clear_binding_inputs();
        self.binding.clear_binding_outputs();
    }
}

/// The bindings that no run uses at the moment.
#[derive(Default)]
pub(crate) struct Bindings(Mutex<Vec<Kept>>);

impl Bindings {
    /// Takes the binding to the memory of these values, if there is one.
    pub(crate) fn take_bound(&self, inputs: PortValues<'_>, outputs: PortValues<'_>) -> Option<Kept> {
        let mut all = self.0.lock();
        let is_bound =
            |memory: &LentMemory| are_in(&memory.inputs, inputs) && are_in(&memory.outputs, outputs);
        let place = all.iter().position(|kept| kept.memory.as_ref().is_some_and(is_bound))?;
        Some(all.swap_remove(place))
    }

    /// Takes a binding in which nothing is bound.
    pub(crate) fn take(&self, engine: &Engine) -> Kept {
        let kept = self.0.lock().pop();
        match kept {
            Some(mut kept) => {
                kept.clear();
                kept
            }
            None => Kept { binding: Box::new(engine.io_binding()), memory: None },
        }
    }

    pub(crate) fn put(&self, kept: Kept) {
        self.0.lock().push(kept);
    }
}
