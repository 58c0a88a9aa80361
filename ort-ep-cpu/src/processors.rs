//! Keeps the pool's workers off the processor of the caller that wakes them.
//!
//! Linux may put a woken thread beside the one that woke it although another processor is idle: in a virtual machine a processor that halts
//! counts as one that the host has taken away (`vcpu_is_preempted` in the kernel's `available_idle_cpu`). The two then take turns for milliseconds.
//! So the caller's processor is taken out of the workers' affinity before they are woken; all others that they may use stay in it.

#[cfg(target_os = "linux")]
mod linux {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use parking_lot::Mutex;
    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

    /// Where workers may run.
    #[derive(Debug)]
    pub(crate) struct Processors {
        workers: Mutex<Vec<Worker>>,
        /// The processor that workers keep off.
        avoided: AtomicUsize,
    }

    #[derive(Debug)]
    struct Worker {
        thread: Pid,
        /// What was taken out of its affinity.
        without: Option<usize>,
    }

    /// Instead of a processor: none is avoided.
    const NONE: usize = usize::MAX;

    impl Processors {
        pub(crate) fn new() -> Processors {
            Processors { workers: Mutex::new(Vec::new()), avoided: AtomicUsize::new(NONE) }
        }

        /// Has the calling thread count as a worker.
        pub(crate) fn add_this_worker(&self) {
            let mut workers = self.workers.lock();
            workers.push(Worker { thread: gettid(), without: None });
            self.avoided.store(NONE, Ordering::Relaxed);
        }

        /// Keeps all workers off the processor that the calling thread is on. Costs a few nanoseconds as long as that is the same one.
        pub(crate) fn leave_this_one_to_the_caller(&self) {
            let current = sched_getcpu();
            if self.avoided.load(Ordering::Relaxed) == current || current >= CpuSet::MAX_CPU {
                return;
            }
            let mut workers = self.workers.lock();
            workers.iter_mut().for_each(|worker| worker.keep_off(current));
            self.avoided.store(current, Ordering::Relaxed);
        }
    }

    impl Worker {
        /// Takes a processor out of the affinity, and puts back what was taken out before. Where none would be left, or the system refuses,
        /// the thread stays where it may be: this is about speed alone.
        fn keep_off(&mut self, processor: usize) {
            let Ok(mut processors) = sched_getaffinity(Some(self.thread)) else { return };
            self.without.iter().for_each(|&without| processors.set(without));
            let without = processors.is_set(processor).then_some(processor);
            processors.unset(processor);
            if processors.count() == 0 {
                return;
            }
            match sched_setaffinity(Some(self.thread), &processors) {
                Ok(()) => self.without = without,
                Err(problem) => tracing::debug!("a worker stays where it may be: {problem}"),
            }
        }
    }
}

#[cfg(target_os = "linux")]
pub(crate) use linux::Processors;

/// Where workers may run: other systems decide for themselves.
#[cfg(not(target_os = "linux"))]
#[derive(Debug)]
pub(crate) struct Processors;

#[cfg(not(target_os = "linux"))]
impl Processors {
    pub(crate) fn new() -> Processors {
        Processors
    }

    pub(crate) fn add_this_worker(&self) {}

    pub(crate) fn leave_this_one_to_the_caller(&self) {}
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::expect_used)]
mod tests {
    use std::sync::mpsc::channel;

    use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};

    use super::Processors;

    /// Keeps the calling thread on one processor.
    fn stay_on(processor: usize) {
        let mut only = CpuSet::new();
        only.set(processor);
        sched_setaffinity(None, &only).expect("an allowed processor");
    }

    #[test]
    fn workers_keep_off_the_callers_processor_and_get_the_former_one_back() {
        let all = sched_getaffinity(None).expect("an affinity");
        let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&processor| all.is_set(processor)).collect();
        let processors = Processors::new();
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        std::thread::scope(|scope| {
            let processors = &processors;
            scope.spawn(move || {
                processors.add_this_worker();
                tell.send(gettid()).expect("the test listens");
                // Until the test ends.
                assert!(ended.recv().is_err());
            });
            let worker = told.recv().expect("the worker tells");
            for &processor in &allowed {
                stay_on(processor);
                processors.leave_this_one_to_the_caller();
                let left = sched_getaffinity(Some(worker)).expect("an affinity");
                // With one processor for all there is no other.
                let expected = if allowed.len() > 1 { allowed.len() - 1 } else { 1 };
                assert_eq!(left.count() as usize, expected);
                assert_eq!(left.is_set(processor), allowed.len() == 1);
            }
            drop(end);
        });
    }
}
