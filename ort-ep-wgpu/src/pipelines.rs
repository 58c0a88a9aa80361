//! Programs compiled to pipelines, once for each text.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ort_core::{Result, error};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::bindings::BindGroups;
use crate::gpu::Gpu;

/// The most pipelines that are kept.
const MOST_PIPELINES: usize = 4096;

/// The text of a program, and how many storage buffers it binds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Program {
    pub(crate) text: Arc<str>,
    pub(crate) bindings: usize,
}

/// The pipelines of one device.
pub(crate) struct Pipelines {
    gpu: Arc<Gpu>,
    groups: Arc<BindGroups>,
    compiled: Mutex<FxHashMap<Arc<str>, wgpu::ComputePipeline>>,
}

impl Pipelines {
    pub(crate) fn new(gpu: Arc<Gpu>, groups: Arc<BindGroups>) -> Pipelines {
        Pipelines { gpu, groups, compiled: Mutex::default() }
    }

    /// The pipeline of a program, compiled where it is new.
    pub(crate) fn get(&self, program: &Program) -> Result<wgpu::ComputePipeline> {
        if let Some(pipeline) = self.compiled.lock().get(&program.text) {
            return Ok(pipeline.clone());
        }
        self.gpu.check()?;
        let layout = self.groups.layout(program.bindings).ok_or_else(|| {
            error!(NotImplemented, "it binds {} buffers, more than the device takes", program.bindings)
                .help("leave the node to another provider")
        })?;
        let pipeline = self.gpu.validated(|| {
            let module = self.gpu.device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: None,
                source: wgpu::ShaderSource::Wgsl(std::borrow::Cow::Borrowed(&program.text)),
            });
            self.gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: None,
                layout: Some(layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: None,
            })
        })?;
        self.gpu.made.pipelines.fetch_add(1, Ordering::Relaxed);
        let mut compiled = self.compiled.lock();
        if compiled.len() >= MOST_PIPELINES {
            compiled.clear();
        }
        compiled.insert(program.text.clone(), pipeline.clone());
        Ok(pipeline)
    }
}
