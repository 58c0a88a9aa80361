//! The outputs that a stage keeps in buffers of its binding, and the memory that a run then needs.

use std::collections::HashMap;

use ort_alloc::DeviceId;
use ort_core::Result;
use ort_core::session::{BoundPeak, Session, ValueSpec};

/// The outputs of a stage that its binding keeps in buffers of their own.
#[derive(Clone, Copy, Default)]
pub(crate) struct KeptOutputs<'a> {
    pub(crate) replaces: &'a [(String, String)],
    pub(crate) outputs: &'a [String],
}

impl KeptOutputs<'_> {
    /// Returns the memory of a run that keeps these outputs.
    pub(crate) fn peak(&self, session: &Session, dims: &[(&str, i64)]) -> Result<BoundPeak> {
        let inputs = session.inputs();
        let memories = memories_of(session, &inputs);
        let memory_of = |name: &str| memories.get(name).copied().unwrap_or(DeviceId::HOST);
        let replaces = self.replaces.iter().map(|(input, output)| (output.as_str(), memory_of(input).into()));
        let others = self.outputs.iter().map(|output| (output.as_str(), DeviceId::HOST.into()));
        session.bound_peak(dims, &replaces.chain(others).collect::<Vec<_>>())
    }
}

/// Returns the memory in which a session reads each input.
pub(crate) fn memories_of<'a>(session: &Session, inputs: &'a [ValueSpec]) -> HashMap<&'a str, DeviceId> {
    inputs.iter().map(|input| input.name.as_str()).zip(session.input_memories()).collect()
}
