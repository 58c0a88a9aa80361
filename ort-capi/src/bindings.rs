//! Bindings of finished runs, for the next runs with given outputs.
//!
//! A client that passes the same memory in every run pays for names, types and the plan once. Only
//! memory that the caller lends is remembered, by its address: a binding keeps nothing alive that
//! the caller has released, and reads it in no run but one that gets the memory again.

use ort_runtime::{DType, IoBinding, Session as Engine};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::entry::In;
use crate::status::Outcome;
use crate::value::{Dims, Numbers, Value};

/// The memory of an input or output.
#[derive(Clone, PartialEq)]
struct Lent {
    port: usize,
    address: usize,
    dtype: DType,
    dims: Dims,
}

/// The memory that a run reads and writes, if all of it is lent.
#[derive(Clone, PartialEq)]
pub(crate) struct LentMemory {
    inputs: SmallVec<[Lent; 4]>,
    outputs: SmallVec<[Lent; 4]>,
}

impl LentMemory {
    /// The memory of a run; `None` if some of it is not lent.
    pub(crate) fn of(inputs: &[Bound], outputs: &[Bound]) -> Outcome<Option<LentMemory>> {
        let (Some(inputs), Some(outputs)) = (lent(inputs)?, lent(outputs)?) else { return Ok(None) };
        Ok(Some(LentMemory { inputs, outputs }))
    }
}

/// A port, and what the caller gives for it.
pub(crate) type Bound = (usize, In<Value>);

fn lent(bound: &[Bound]) -> Outcome<Option<SmallVec<[Lent; 4]>>> {
    let mut all = SmallVec::with_capacity(bound.len());
    for (port, value) in bound {
        let Some(Value::Numbers(numbers)) = value.optional()? else { return Ok(None) };
        // A binding copies what is not aligned, and would not see the next run's elements.
        if !numbers.is_lent() || !numbers.tensor().is_aligned() {
            return Ok(None);
        }
        all.push(Lent { port: *port, ..Lent::of(numbers) });
    }
    Ok(Some(all))
}

impl Lent {
    fn of(numbers: &Numbers) -> Lent {
        let (dtype, dims) = (numbers.tensor().dtype(), Dims::from_slice(numbers.dims()));
        Lent { port: 0, address: numbers.address(), dtype, dims }
    }
}

/// A binding, and the memory that it is bound to.
pub(crate) struct Kept {
    pub(crate) binding: IoBinding,
    pub(crate) memory: Option<LentMemory>,
}

impl Kept {
    /// Unbinds everything, unless all of it is lent.
    pub(crate) fn bound_to(mut self, memory: Option<LentMemory>) -> Kept {
        if memory.is_none() {
            self.clear();
        }
        Kept { memory, ..self }
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
    /// Takes the binding to this memory, if there is one.
    pub(crate) fn take_bound(&self, memory: &LentMemory) -> Option<Kept> {
        let mut all = self.0.lock();
        let place = all.iter().position(|kept| kept.memory.as_ref() == Some(memory))?;
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
            None => Kept { binding: engine.io_binding(), memory: None },
        }
    }

    pub(crate) fn put(&self, kept: Kept) {
        self.0.lock().push(kept);
    }
}
