//! Programs compiled to pipelines, once for each text, by several threads ahead of the first run where their texts are foreseen.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use ort_core::{Result, error};
use parking_lot::{Condvar, Mutex};
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

/// A pipeline that one thread compiles while the others wait for it, or why there is none.
type Slot = Arc<OnceLock<Result<wgpu::ComputePipeline, String>>>;

/// The pipelines of one device.
pub(crate) struct Pipelines {
    gpu: Arc<Gpu>,
    groups: Arc<BindGroups>,
    slots: Mutex<FxHashMap<Arc<str>, Slot>>,
    ahead: Mutex<Ahead>,
    /// Tells that a thread has ended.
    ended: Condvar,
}

/// Programs that threads compile ahead, and how many threads do.
#[derive(Default)]
struct Ahead {
    waiting: VecDeque<Program>,
    threads: usize,
}

impl Pipelines {
    pub(crate) fn new(gpu: Arc<Gpu>, groups: Arc<BindGroups>) -> Pipelines {
        Pipelines { gpu, groups, slots: Mutex::default(), ahead: Mutex::default(), ended: Condvar::new() }
    }

    /// The pipeline of a program, compiled where it is new.
    pub(crate) fn get(&self, program: &Program) -> Result<wgpu::ComputePipeline> {
        self.gpu.check()?;
        let slot = self.slot(program);
        let compiled = slot.get_or_init(|| self.compile(program).map_err(|problem| problem.to_string()));
        compiled.clone().map_err(|problem| error!(EpFail, "{problem}"))
    }

    /// Compiles programs that are new on up to so many threads, without waiting for them. What is wrong with one shows when it is asked for.
    pub(crate) fn prefetch(self: &Arc<Self>, programs: Vec<Program>, most_threads: usize) {
        let mut ahead = self.ahead.lock();
        let is_new = |program: &Program| !self.slots.lock().contains_key(&program.text);
        for program in programs.into_iter().filter(is_new) {
            self.slot(&program);
            ahead.waiting.push_back(program);
        }
        while ahead.threads < most_threads.min(ahead.waiting.len()) {
            let own = Arc::clone(self);
            let thread = std::thread::Builder::new().name("ort-wgpu-compile".to_owned());
            // Without another thread the first run compiles.
            if thread.spawn(move || own.compile_ahead()).is_err() {
                break;
            }
            ahead.threads += 1;
        }
    }

    /// Compiles nothing more ahead, and waits for what is being compiled: a process must not end in the middle of the driver's compiler.
    pub(crate) fn stop(&self) {
        let mut ahead = self.ahead.lock();
        ahead.waiting.clear();
        while ahead.threads > 0 {
            self.ended.wait(&mut ahead);
        }
    }

    fn compile_ahead(&self) {
        loop {
            let mut ahead = self.ahead.lock();
            let Some(program) = ahead.waiting.pop_front() else {
                ahead.threads -= 1;
                self.ended.notify_all();
                return;
            };
            drop(ahead);
            let slot = self.slot(&program);
            slot.get_or_init(|| self.compile(&program).map_err(|problem| problem.to_string()));
        }
    }

    fn slot(&self, program: &Program) -> Slot {
        let mut slots = self.slots.lock();
        if slots.len() >= MOST_PIPELINES {
            slots.clear();
        }
        slots.entry(program.text.clone()).or_default().clone()
    }

    fn compile(&self, program: &Program) -> Result<wgpu::ComputePipeline> {
        let layout = self.groups.layout(program.bindings).ok_or_else(|| {
            error!(NotImplemented, "it binds {} buffers, more than the device takes", program.bindings)
        })?;
        let device = &self.gpu.device;
        let pipeline = self.gpu.validated(|| {
            let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: None,
                source: wgpu::ShaderSource::Wgsl(std::borrow::Cow::Borrowed(&program.text)),
            });
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
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
        Ok(pipeline)
    }
}
