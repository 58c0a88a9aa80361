//! Programs compiled to pipelines, once for each text, by several threads ahead of the first run where their texts are foreseen or an earlier process
//! took them.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use ort_core::{Result, error};
use parking_lot::{Condvar, Mutex};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::bindings::BindGroups;
use crate::gpu::Gpu;
use crate::kept::Kept;

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
    /// Those that an earlier process took: they come first, and are waited for.
    listed: VecDeque<Job>,
    foreseen: VecDeque<Job>,
    /// How many of the listed ones are not compiled yet, those that are being compiled included.
    listed_left: usize,
    /// All that were listed so far.
    all_listed: FxHashSet<Arc<str>>,
    threads: usize,
}

/// A program to compile, and what keeps the driver's part of it.
struct Job {
    program: Program,
    kept: Option<Arc<Kept>>,
}

/// Who compiles a program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// The run that takes it.
    Run,
    /// A thread ahead of it: its shapes were foreseen.
    Foreseen,
    /// A thread ahead of it: an earlier process took it.
    Listed,
}

impl Pipelines {
    pub(crate) fn new(gpu: Arc<Gpu>, groups: Arc<BindGroups>) -> Pipelines {
        Pipelines { gpu, groups, slots: Mutex::default(), ahead: Mutex::default(), ended: Condvar::new() }
    }

    /// The pipeline of a program, compiled where it is new. `kept` has the driver's part of it.
    pub(crate) fn get(&self, program: &Program, kept: Option<&Kept>) -> Result<wgpu::ComputePipeline> {
        self.gpu.check()?;
        self.compiled(program, kept, When::Run).map_err(|problem| error!(EpFail, "{problem}"))
    }

    /// Compiles programs that are new on up to so many threads, without waiting for them. What is wrong with one shows when it is asked for.
    pub(crate) fn prefetch(
        self: &Arc<Self>,
        programs: Vec<Program>,
        when: When,
        kept: Option<&Arc<Kept>>,
        most_threads: usize,
    ) {
        let mut ahead = self.ahead.lock();
        for program in programs {
            // What is only foreseen so far is waited for once it is listed.
            let is_known = match when {
                When::Listed => !ahead.all_listed.insert(program.text.clone()),
                When::Foreseen | When::Run => self.slots.lock().contains_key(&program.text),
            };
            if is_known {
                continue;
            }
            self.slot(&program);
            let job = Job { program, kept: kept.cloned() };
            match when {
                When::Listed => {
                    ahead.listed.push_back(job);
                    ahead.listed_left += 1;
                }
                When::Foreseen | When::Run => ahead.foreseen.push_back(job),
            }
        }
        while ahead.threads < most_threads.min(ahead.listed.len() + ahead.foreseen.len()) {
            let own = Arc::clone(self);
            let thread = std::thread::Builder::new().name("ort-wgpu-compile".to_owned());
            // Without another thread the first run compiles.
            if thread.spawn(move || own.compile_ahead()).is_err() {
                break;
            }
            ahead.threads += 1;
        }
    }

    /// Returns once all that an earlier process took is compiled; this thread does its part.
    pub(crate) fn finish_listed(&self) {
        let mut ahead = self.ahead.lock();
        while ahead.listed_left > 0 {
            match ahead.listed.pop_front() {
                None => self.ended.wait(&mut ahead),
                Some(job) => {
                    drop(ahead);
                    self.compile_listed(&job);
                    ahead = self.ahead.lock();
                }
            }
        }
    }

    /// Compiles nothing more ahead, and waits for what is being compiled: a process must not end in the middle of the driver's compiler.
    pub(crate) fn stop(&self) {
        let mut ahead = self.ahead.lock();
        ahead.listed_left -= ahead.listed.len();
        ahead.listed.clear();
        ahead.foreseen.clear();
        while ahead.threads > 0 {
            self.ended.wait(&mut ahead);
        }
    }

    fn compile_ahead(&self) {
        loop {
            let mut ahead = self.ahead.lock();
            let listed = ahead.listed.pop_front();
            if let Some(job) = listed {
                drop(ahead);
                self.compile_listed(&job);
            } else if let Some(Job { program, kept }) = ahead.foreseen.pop_front() {
                drop(ahead);
                // What is wrong shows when it is asked for.
                let _ = self.compiled(&program, kept.as_deref(), When::Foreseen);
            } else {
                ahead.threads -= 1;
                self.ended.notify_all();
                return;
            }
        }
    }

    fn compile_listed(&self, Job { program, kept }: &Job) {
        let _done = ListedDone(self);
        // What is wrong shows when it is asked for.
        let _ = self.compiled(program, kept.as_deref(), When::Listed);
    }

    /// The pipeline, or why there is none: whoever asks first compiles, and others wait for it.
    fn compiled(
        &self,
        program: &Program,
        kept: Option<&Kept>,
        when: When,
    ) -> Result<wgpu::ComputePipeline, String> {
        let make = || {
            let made = self.compile(program, kept).map_err(|problem| problem.to_string())?;
            let counters = &self.gpu.made;
            counters.pipelines.fetch_add(1, Ordering::Relaxed);
            if when != When::Run {
                counters.pipelines_ahead.fetch_add(1, Ordering::Relaxed);
            }
            if when == When::Listed {
                counters.pipelines_listed.fetch_add(1, Ordering::Relaxed);
            }
            Ok(made)
        };
        self.slot(program).get_or_init(make).clone()
    }

    fn slot(&self, program: &Program) -> Slot {
        let mut slots = self.slots.lock();
        if slots.len() >= MOST_PIPELINES {
            slots.clear();
        }
        slots.entry(program.text.clone()).or_default().clone()
    }

    fn compile(&self, program: &Program, kept: Option<&Kept>) -> Result<wgpu::ComputePipeline> {
        let layout = self.groups.layout(program.bindings).ok_or_else(|| {
            error!(NotImplemented, "it binds {} buffers, more than the device takes", program.bindings)
        })?;
        let device = &self.gpu.device;
        self.gpu.validated(|| {
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
                cache: kept.and_then(Kept::driver),
            })
        })
    }
}

/// One of the listed programs less to wait for, even where compiling it panicked.
struct ListedDone<'a>(&'a Pipelines);

impl Drop for ListedDone<'_> {
    fn drop(&mut self) {
        self.0.ahead.lock().listed_left -= 1;
        self.0.ended.notify_all();
    }
}
