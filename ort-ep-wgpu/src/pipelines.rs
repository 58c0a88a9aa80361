//! Pipeline cache: each program is compiled once. Threads compile ahead of the first run what is
//! foreseen, or what an earlier process took.
//!
//! A compiler that panics is an error of the run that takes the program. No thread waits for one
//! that has panicked: all counts are given back by destructors.

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
use crate::kept::Kept;

/// The most pipelines that are kept.
const MOST_PIPELINES: usize = 4096;

/// The text of a program, and how many storage buffers it binds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Program {
    pub(crate) text: Arc<str>,
    pub(crate) bindings: usize,
}

/// What compiles programs.
pub(crate) trait Compile: Send + Sync + 'static {
    type Pipeline: Clone + Send + Sync + 'static;

    fn compile(&self, program: &Program, kept: Option<&Kept>) -> Result<Self::Pipeline>;

    /// Called once for each program that was compiled.
    fn count(&self, when: When);

    /// What a thread holds while it compiles, if one alone may use the device.
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

    fn count(&self, when: When) {
        let counters = &self.gpu.made;
        counters.pipelines.fetch_add(1, Ordering::Relaxed);
        if when != When::Run {
            counters.pipelines_ahead.fetch_add(1, Ordering::Relaxed);
        }
        if when == When::Listed {
            counters.pipelines_listed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn exclusive(&self) -> Option<ReentrantMutexGuard<'_, ()>> {
        self.gpu.exclusive()
    }
}

/// A pipeline that one thread compiles while the others wait for it, or why there is none.
type Slot<P> = Arc<OnceLock<Result<P, String>>>;

/// The pipelines of one device.
pub(crate) struct Pipelines<C: Compile = DeviceCompiler> {
    compiler: C,
    slots: Mutex<FxHashMap<Arc<str>, Slot<C::Pipeline>>>,
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

impl<C: Compile> Pipelines<C> {
    pub(crate) fn new(compiler: C) -> Pipelines<C> {
        Pipelines { compiler, slots: Mutex::default(), ahead: Mutex::default(), ended: Condvar::new() }
    }

    /// The pipeline of a program, compiled if it is new. `kept` has the driver's part of it.
    pub(crate) fn get(&self, program: &Program, kept: Option<&Kept>) -> Result<C::Pipeline> {
        self.compiled(program, kept, When::Run).map_err(|problem| error!(EpFail, "{problem}"))
    }

    /// Compiles programs that are new on up to so many threads, without waiting for them. What is
    /// wrong with one shows when it is asked for.
    pub(crate) fn prefetch(
        self: &Arc<Self>,
        programs: Vec<Program>,
        when: When,
        kept: Option<&Arc<Kept>>,
        most_threads: usize,
    ) {
        let _exclusive = self.compiler.exclusive();
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

    /// Compiles nothing more ahead, and waits for what is being compiled: a process must not end in
    /// the middle of the driver's compiler.
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
        let counted = Counted { pipelines: self, has_left: false };
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
                // Under the same lock, so that what is added from now on starts another thread.
                counted.leave(&mut ahead);
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
    fn compiled(&self, program: &Program, kept: Option<&Kept>, when: When) -> Result<C::Pipeline, String> {
        let make = || {
            let made = catch_unwind(AssertUnwindSafe(|| self.compiler.compile(program, kept)));
            let made = made.unwrap_or_else(|payload| Err(panicked(&*payload)));
            if made.is_ok() {
                self.compiler.count(when);
            }
            made.map_err(|problem| problem.to_string())
        };
        // Before the slot: who waits for a slot may hold the device, which the thread that fills
        // the slot needs.
        let _exclusive = self.compiler.exclusive();
        self.slot(program).get_or_init(make).clone()
    }

    fn slot(&self, program: &Program) -> Slot<C::Pipeline> {
        let mut slots = self.slots.lock();
        if slots.len() >= MOST_PIPELINES {
            slots.clear();
        }
        slots.entry(program.text.clone()).or_default().clone()
    }
}

fn panicked(payload: &(dyn Any + Send)) -> ort_core::Error {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    error!(EpFail, "compiling a program panicked: {text}")
        .help("the fault is the driver's or the compiler's; update the driver, or run the model on another provider")
}

/// One thread less that compiles ahead, even if it panicked: who stops the device waits for all.
struct Counted<'a, C: Compile> {
    pipelines: &'a Pipelines<C>,
    has_left: bool,
}

impl<C: Compile> Counted<'_, C> {
    fn leave(mut self, ahead: &mut Ahead) {
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

/// One of the listed programs less to wait for, even if compiling it panicked.
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

    /// Makes the length of a text of it; panics as its text says.
    #[derive(Default)]
    struct Compiler {
        compiled: AtomicUsize,
        /// Panics outside of the compiler, too: where its work is counted.
        panics_later: bool,
    }

    impl Compile for Compiler {
        type Pipeline = usize;

        fn compile(&self, program: &Program, _: Option<&Kept>) -> Result<usize> {
            // Long enough for the others to wait.
            sleep(Duration::from_millis(5));
            match &*program.text {
                "panics" => panic!("the driver has a bug"),
                "panics with a number" => std::panic::panic_any(7),
                "is refused" => Err(error!(EpFail, "it is refused")),
                text => Ok(text.len()),
            }
        }

        fn count(&self, _: When) {
            assert!(!self.panics_later, "counting panics");
            self.compiled.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn program(text: &str) -> Program {
        Program { text: text.into(), bindings: 0 }
    }

    /// Fails instead of waiting without end.
    fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, receiver) = channel();
        std::thread::spawn(move || sender.send(work()));
        receiver.recv_timeout(Duration::from_secs(60)).expect("it ends")
    }

    const TEXTS: [&str; 6] = ["panics", "one", "panics with a number", "is refused", "three", "fourth"];

    #[test]
    fn a_compiler_that_panics_is_an_error_of_who_takes_the_program() {
        for (when, threads) in [(When::Listed, 1), (When::Listed, 3), (When::Foreseen, 2), (When::Run, 0)] {
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
        for when in [When::Listed, When::Foreseen] {
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
            pipelines.prefetch(vec![program(text)], When::Listed, None, 1);
            sleep(Duration::from_millis(text.len() as u64 % 7));
        }
        let own = pipelines.clone();
        in_time(move || own.finish_listed());
        assert_eq!(pipelines.compiler.compiled.load(Ordering::Relaxed), texts.len());
        in_time(move || pipelines.stop());
    }
}
