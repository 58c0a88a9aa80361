//! Pipeline cache: compiles each program once, in the background if possible.
//!
//! Background threads compile the programs that shapes foretell, or that an earlier process used.
//!
//! A compiler panic becomes an error of the run that uses the program. No thread waits for a thread
//! that panicked, because destructors restore all counts.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use ort_core::{Result, error};
use parking_lot::{Condvar, Mutex, ReentrantMutexGuard};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::bindings::BindGroups;
use crate::gpu::Gpu;
use crate::pipeline_cache::PipelineCache;
use crate::program::Program;

/// The most pipelines in the cache.
const MOST_PIPELINES: usize = 4096;

/// A compiler of programs. Tests substitute their own.
pub(crate) trait Compile: Send + Sync + 'static {
    type Pipeline: Clone + Send + Sync + 'static;

    fn compile(&self, program: &Program, cache: Option<&PipelineCache>) -> Result<Self::Pipeline>;

    /// Counts a program that was compiled.
    fn count(&self, when: CompileTime);

    /// Locks the device for a thread that compiles, if only one thread may use it.
    fn exclusive(&self) -> Option<ReentrantMutexGuard<'_, ()>> {
        None
    }
}

/// The compiler of one device: wgpu's, and the driver's behind it.
pub(crate) struct DeviceCompiler {
    gpu: Arc<Gpu>,
    groups: Arc<BindGroups>,
}

impl DeviceCompiler {
    pub(crate) fn new(gpu: Arc<Gpu>, groups: Arc<BindGroups>) -> DeviceCompiler {
        DeviceCompiler { gpu, groups }
    }
}

impl Compile for DeviceCompiler {
    type Pipeline = wgpu::ComputePipeline;

    fn compile(&self, program: &Program, cache: Option<&PipelineCache>) -> Result<wgpu::ComputePipeline> {
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
                // `Shader` renders every program with an entry of this name.
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    // Kernels write workgroup memory before they read it.
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: cache.and_then(PipelineCache::driver),
            })
        })
    }

    fn count(&self, when: CompileTime) {
        let counters = &self.gpu.made;
        counters.pipelines.fetch_add(1, Ordering::Relaxed);
        // Listed programs count as compiled ahead as well.
        if when != CompileTime::Run {
            counters.pipelines_ahead.fetch_add(1, Ordering::Relaxed);
        }
        if when == CompileTime::Listed {
            counters.pipelines_listed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn exclusive(&self) -> Option<ReentrantMutexGuard<'_, ()>> {
        self.gpu.exclusive()
    }
}

/// A pipeline, or the error of its compilation. One thread compiles while others wait.
type Slot<P> = Arc<OnceLock<Result<P, String>>>;

/// The pipelines of one device.
pub(crate) struct Pipelines<C: Compile = DeviceCompiler> {
    compiler: C,
    slots: Mutex<FxHashMap<Arc<str>, Slot<C::Pipeline>>>,
    ahead: Mutex<AheadQueue>,
    /// Signals that a compile thread ended, or that a listed program is done.
    ended: Condvar,
}

/// The queue of background compilation, and the number of its threads.
#[derive(Default)]
struct AheadQueue {
    /// Programs that an earlier process used. They are compiled first, and a build waits for them.
    listed: VecDeque<Job>,
    /// Programs of foreseen shapes. No one waits for them.
    foreseen: VecDeque<Job>,
    /// The listed programs that are not compiled yet, including those in progress.
    listed_left: usize,
    /// All programs listed so far.
    all_listed: FxHashSet<Arc<str>>,
    threads: usize,
}

/// A program to compile, and the cache folder that it belongs to.
struct Job {
    program: Program,
    cache: Option<Arc<PipelineCache>>,
}

/// When a program is compiled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompileTime {
    /// In the run that uses it.
    Run,
    /// Ahead of the run, because its shapes were foreseen.
    Foreseen,
    /// Ahead of the run, because an earlier process used it.
    Listed,
}

impl<C: Compile> Pipelines<C> {
    pub(crate) fn new(compiler: C) -> Pipelines<C> {
        Pipelines { compiler, slots: Mutex::default(), ahead: Mutex::default(), ended: Condvar::new() }
    }

    /// Returns the pipeline of a program, and compiles it if it is new. `cache` provides the
    /// driver's cache.
    pub(crate) fn get(&self, program: &Program, cache: Option<&PipelineCache>) -> Result<C::Pipeline> {
        self.compiled(program, cache, CompileTime::Run).map_err(|problem| error!(EpFail, "{problem}"))
    }

    /// Compiles new programs on up to `most_threads` background threads, and returns at once. A
    /// program's error surfaces when a run gets it.
    pub(crate) fn prefetch(
        self: &Arc<Self>,
        programs: Vec<Program>,
        when: CompileTime,
        cache: Option<&Arc<PipelineCache>>,
        most_threads: usize,
    ) {
        let _exclusive = self.compiler.exclusive();
        let mut ahead = self.ahead.lock();
        for program in programs {
            // A program in `slots` may be only foreseen. Listed again, it must be awaited, too.
            let is_known = match when {
                CompileTime::Listed => !ahead.all_listed.insert(program.text.clone()),
                CompileTime::Foreseen | CompileTime::Run => self.slots.lock().contains_key(&program.text),
            };
            if is_known {
                continue;
            }
            // Reserve the slot, so that the next prefetch sees the program as known.
            self.slot(&program);
            let job = Job { program, cache: cache.cloned() };
            match when {
                CompileTime::Listed => {
                    ahead.listed.push_back(job);
                    ahead.listed_left += 1;
                }
                CompileTime::Foreseen | CompileTime::Run => ahead.foreseen.push_back(job),
            }
        }
        // Threads exit once the queue is empty, so start new ones, at most one for each job.
        while ahead.threads < most_threads.min(ahead.listed.len() + ahead.foreseen.len()) {
            let own = Arc::clone(self);
            let thread = std::thread::Builder::new().name("ort-wgpu-compile".to_owned());
            // If no thread can start, the first run compiles.
            if thread.spawn(move || own.compile_ahead()).is_err() {
                break;
            }
            ahead.threads += 1;
        }
    }

    /// Waits until all listed programs are compiled; the calling thread helps.
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

    /// Drops the queue and waits for compilations in progress: a process must not exit in the
    /// middle of the driver's compiler.
    pub(crate) fn stop(&self) {
        let mut ahead = self.ahead.lock();
        ahead.listed_left -= ahead.listed.len();
        ahead.listed.clear();
        ahead.foreseen.clear();
        while ahead.threads > 0 {
            self.ended.wait(&mut ahead);
        }
    }

    /// The loop of a background thread: listed programs first, then foreseen ones.
    fn compile_ahead(&self) {
        let counted = Counted { pipelines: self, has_left: false };
        loop {
            let mut ahead = self.ahead.lock();
            let listed = ahead.listed.pop_front();
            if let Some(job) = listed {
                drop(ahead);
                self.compile_listed(&job);
            } else if let Some(Job { program, cache }) = ahead.foreseen.pop_front() {
                drop(ahead);
                // The slot keeps an error, for the run that gets it.
                let _ = self.compiled(&program, cache.as_deref(), CompileTime::Foreseen);
            } else {
                // Under the same lock that saw the queue empty, so that a later `prefetch` starts a
                // new thread.
                counted.leave(&mut ahead);
                return;
            }
        }
    }

    fn compile_listed(&self, Job { program, cache }: &Job) {
        let _done = ListedDone(self);
        // The slot keeps an error, for the run that gets it.
        let _ = self.compiled(program, cache.as_deref(), CompileTime::Listed);
    }

    /// Returns the pipeline or its error. The first caller compiles, the others wait.
    fn compiled(
        &self,
        program: &Program,
        cache: Option<&PipelineCache>,
        when: CompileTime,
    ) -> Result<C::Pipeline, String> {
        let make = || {
            let made = catch_unwind(AssertUnwindSafe(|| self.compiler.compile(program, cache)));
            let made = made.unwrap_or_else(|payload| Err(panicked(&*payload)));
            if made.is_ok() {
                self.compiler.count(when);
            }
            made.map_err(|problem| problem.to_string())
        };
        // Locked before the slot: a thread that waits for a slot may hold the device, which the
        // thread that fills the slot needs.
        let _exclusive = self.compiler.exclusive();
        self.slot(program).get_or_init(make).clone()
    }

    /// Returns the slot of a program, and creates it if it is new.
    fn slot(&self, program: &Program) -> Slot<C::Pipeline> {
        let mut slots = self.slots.lock();
        // No eviction order: nodes keep the pipelines of their recent shapes themselves.
        if slots.len() >= MOST_PIPELINES {
            slots.clear();
        }
        slots.entry(program.text.clone()).or_default().clone()
    }
}

/// The error for a compiler panic.
fn panicked(payload: &(dyn Any + Send)) -> ort_core::Error {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    error!(EpFail, "compiling a program panicked: {text}")
        .help("the fault is the driver's or the compiler's; update the driver, or run the model on another provider")
}

/// Decrements the thread count on drop, even after a panic: [`Pipelines::stop`] waits for it to
/// reach zero.
struct Counted<'a, C: Compile> {
    pipelines: &'a Pipelines<C>,
    has_left: bool,
}

impl<C: Compile> Counted<'_, C> {
    fn leave(mut self, ahead: &mut AheadQueue) {
        self.has_left = true;
        ahead.threads -= 1;
        self.pipelines.ended.notify_all();
    }
}

impl<C: Compile> Drop for Counted<'_, C> {
    fn drop(&mut self) {
        if !self.has_left {
            self.pipelines.ahead.lock().threads -= 1;
            self.pipelines.ended.notify_all();
        }
    }
}

/// Decrements the count of pending listed programs on drop, even after a panic.
struct ListedDone<'a, C: Compile>(&'a Pipelines<C>);

impl<C: Compile> Drop for ListedDone<'_, C> {
    fn drop(&mut self) {
        self.0.ahead.lock().listed_left -= 1;
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    /// Compiles a text to its length, and panics if the text says so.
    #[derive(Default)]
    struct Compiler {
        compiled: AtomicUsize,
        /// Whether `count` panics, too, outside of the compiler's `catch_unwind`.
        panics_later: bool,
    }

    impl Compile for Compiler {
        type Pipeline = usize;

        fn compile(&self, program: &Program, _: Option<&PipelineCache>) -> Result<usize> {
            // Long enough that other threads wait for the slot.
            sleep(Duration::from_millis(5));
            match &*program.text {
                "panics" => panic!("the driver has a bug"),
                "panics with a number" => std::panic::panic_any(7),
                "is refused" => Err(error!(EpFail, "it is refused")),
                text => Ok(text.len()),
            }
        }

        fn count(&self, _: CompileTime) {
            assert!(!self.panics_later, "counting panics");
            self.compiled.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn program(text: &str) -> Program {
        Program { text: text.into(), bindings: 0 }
    }

    /// Runs `work` on a thread, and fails instead of hanging.
    fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, receiver) = channel();
        std::thread::spawn(move || sender.send(work()));
        receiver.recv_timeout(Duration::from_secs(60)).expect("it ends")
    }

    const TEXTS: [&str; 6] = ["panics", "one", "panics with a number", "is refused", "three", "fourth"];

    #[test]
    fn a_compiler_that_panics_is_an_error_of_who_takes_the_program() {
        for (when, threads) in [
            (CompileTime::Listed, 1),
            (CompileTime::Listed, 3),
            (CompileTime::Foreseen, 2),
            (CompileTime::Run, 0),
        ] {
            let pipelines = Arc::new(Pipelines::new(Compiler::default()));
            pipelines.prefetch(TEXTS.map(program).into(), when, None, threads);
            let own = pipelines.clone();
            in_time(move || own.finish_listed());
            for text in TEXTS {
                let own = pipelines.clone();
                let found =
                    in_time(move || own.get(&program(text), None)).map_err(|problem| problem.to_string());
                match text {
                    "panics" => assert!(found.unwrap_err().contains("panicked: the driver has a bug")),
                    "panics with a number" => assert!(found.unwrap_err().contains("panicked: no message")),
                    "is refused" => assert!(found.unwrap_err().contains("it is refused")),
                    _ => assert_eq!(found, Ok(text.len())),
                }
            }
            let own = pipelines.clone();
            in_time(move || own.stop());
            assert_eq!(pipelines.compiler.compiled.load(Ordering::Relaxed), 3, "each once");
        }
    }

    #[test]
    fn a_thread_that_panics_is_not_waited_for() {
        for when in [CompileTime::Listed, CompileTime::Foreseen] {
            for threads in [1, 4] {
                let compiler = Compiler { panics_later: true, ..Compiler::default() };
                let pipelines = Arc::new(Pipelines::new(compiler));
                pipelines.prefetch(TEXTS.map(program).into(), when, None, threads);
                in_time(move || pipelines.stop());
            }
        }
    }

    #[test]
    fn what_is_added_while_threads_end_is_compiled() {
        let pipelines = Arc::new(Pipelines::new(Compiler::default()));
        let texts: Vec<String> = (0..40).map(|index| "x".repeat(index)).collect();
        for text in &texts {
            pipelines.prefetch(vec![program(text)], CompileTime::Listed, None, 1);
            sleep(Duration::from_millis(text.len() as u64 % 7));
        }
        let own = pipelines.clone();
        in_time(move || own.finish_listed());
        assert_eq!(pipelines.compiler.compiled.load(Ordering::Relaxed), texts.len());
        in_time(move || pipelines.stop());
    }
}
