//! The state of a device that its nodes share: memory, pipelines and the recorder.

use std::sync::Arc;

use crate::bindings::BindGroups;
use crate::gpu::Gpu;
use crate::memory::Memory;
use crate::pipelines::Pipelines;
use crate::recorder::Recorder;

/// The state that a device shares with its compiled nodes.
pub(crate) struct DeviceState {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) memory: Memory,
    pub(crate) groups: Arc<BindGroups>,
    pub(crate) pipelines: Arc<Pipelines>,
    pub(crate) recorder: Recorder,
    /// A placeholder that is bound for tensors without elements.
    pub(crate) nothing: wgpu::Buffer,
}
