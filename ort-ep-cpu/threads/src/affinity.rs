//! Worker affinity: keeps the pool's workers off the core of the caller that wakes them, in virtual
//! machines.
//!
//! In a VM, Linux may place a woken thread on the waker's core although another core is idle. A
//! halted vCPU counts as one that the host has preempted (`vcpu_is_preempted` in the kernel's
//! `available_idle_cpu`). The two threads then share one core for milliseconds. So before we wake
//! workers, we set their affinity to the caller's own without the caller's core.
//!
//! We do so only if `/proc/cpuinfo` reports a hypervisor and there are few workers. Among many
//! workers, the one beside the caller hardly matters, because the others steal its tasks.
//! `ORT_CPU_AFFINITY=off` leaves affinities alone; `on` is the default.

#[cfg(target_os = "linux")]
mod linux {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use ort_alloc::fork::{Mutex, get_or_init};
    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

    use crate::environment::{AFFINITIES, AFFINITY, choice};

    /// With more workers than this, changing affinities costs more than it gains.
    const MOST_WORKERS: usize = 7;
    /// The minimum time between two changes. Without it, callers on different cores would keep
    /// undoing each other's.
    const PAUSE: Duration = Duration::from_millis(10);
    /// Marks that no core is avoided.
    const NONE: usize = usize::MAX;

    /// The affinity state of the workers.
    #[derive(Debug)]
    pub(crate) struct Affinity {
        workers: Mutex<Workers>,
        /// The core that workers keep off.
        avoided: AtomicUsize,
    }

    #[derive(Debug)]
    struct Workers {
        threads: Vec<Pid>,
        /// The process that owns `threads`. After a fork the child has none of them.
        process: u32,
        changed: Option<Instant>,
    }

    impl Affinity {
        pub(crate) fn new() -> Affinity {
            let workers = Workers { threads: Vec::new(), process: std::process::id(), changed: None };
            Affinity { workers: Mutex::new(workers), avoided: AtomicUsize::new(NONE) }
        }

        /// Registers the calling thread as a worker.
        pub(crate) fn add_this_worker(&self) {
            let mut workers = self.workers.lock();
            workers.threads.push(gettid());
            // The new worker inherited its creator's affinity, so the next wake must set it.
            workers.changed = None;
            self.avoided.store(NONE, Ordering::Relaxed);
        }

        /// Keeps the workers off the core that the calling thread runs on. Costs a few nanoseconds
        /// while that core stays the same.
        pub(crate) fn leave_this_one_to_the_caller(&self) {
            if is_wanted() {
                self.keep_off(sched_getcpu());
            }
        }

        fn keep_off(&self, processor: usize) {
            // The fast path: nothing changes while the caller stays on its core.
            if self.avoided.load(Ordering::Relaxed) == processor || processor >= CpuSet::MAX_CPU {
                return;
            }
            // Someone else is changing affinities or adding a worker just now. Skipping is fine,
            // because this is only an optimisation.
            let Some(mut workers) = self.workers.try_lock() else { return };
            let is_soon = workers.changed.is_some_and(|changed| changed.elapsed() < PAUSE);
            if is_soon || workers.threads.len() > MOST_WORKERS || workers.process != std::process::id() {
                return;
            }
            let Ok(mut processors) = sched_getaffinity(None) else { return };
            processors.unset(processor);
            // The caller may be pinned to this one core.
            if processors.count() == 0 {
                return;
            }
            for &thread in &workers.threads {
                if let Err(problem) = sched_setaffinity(Some(thread), &processors) {
                    tracing::debug!("a worker stays where it may be: {problem}");
                }
            }
            workers.changed = Some(Instant::now());
            self.avoided.store(processor, Ordering::Relaxed);
        }
    }

    /// Returns whether this is a virtual machine and `ORT_CPU_AFFINITY` is not `off`.
    fn is_wanted() -> bool {
        static WANTED: OnceLock<bool> = OnceLock::new();
        *get_or_init(&WANTED, || {
            let is_off = choice(AFFINITY, &AFFINITIES) == Ok(Some("off"));
            let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            !is_off && flags.split_whitespace().any(|flag| flag == "hypervisor")
        })
    }

    #[cfg(test)]
    #[allow(clippy::expect_used)]
    mod tests {
        use std::sync::mpsc::channel;

        use super::*;

        /// Pins the calling thread to these cores.
        fn stay_on(processors: &[usize]) {
            let mut only = CpuSet::new();
            processors.iter().for_each(|&processor| only.set(processor));
            sched_setaffinity(None, &only).expect("allowed processors");
        }

        #[test]
        fn workers_keep_off_the_callers_processor_and_have_the_callers_others() {
            let all = sched_getaffinity(None).expect("an affinity");
            let allowed: Vec<usize> =
                (0..CpuSet::MAX_CPU).filter(|&processor| all.is_set(processor)).collect();
            let processors = Affinity::new();
            let (tell, told) = channel();
            let (end, ended) = channel::<()>();
            let processors = &processors;
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    processors.add_this_worker();
                    tell.send(gettid()).expect("the test listens");
                    // Blocks until the test ends.
                    assert!(ended.recv().is_err());
                });
                let worker = told.recv().expect("the worker tells");
                let places = || sched_getaffinity(Some(worker)).expect("an affinity");
                for &processor in &allowed {
                    processors.keep_off(processor);
                    // With a single core there is no other to move to.
                    let expected = if allowed.len() > 1 { allowed.len() - 1 } else { 1 };
                    assert_eq!(places().count() as usize, expected);
                    assert_eq!(places().is_set(processor), allowed.len() == 1);
                    std::thread::sleep(PAUSE);
                }
                // A caller that is pinned to one core tells nothing about the others.
                let before = places();
                stay_on(&allowed[..1]);
                processors.keep_off(allowed[0]);
                assert_eq!(places(), before);
                stay_on(&allowed);
                drop(end);
            });
        }
    }
}

#[cfg(target_os = "linux")]
pub(crate) use linux::Affinity;

/// Affinity state on other systems, which place threads themselves.
#[cfg(not(target_os = "linux"))]
#[derive(Debug)]
pub(crate) struct Affinity;

#[cfg(not(target_os = "linux"))]
impl Affinity {
    pub(crate) fn new() -> Affinity {
        Affinity
    }

    pub(crate) fn add_this_worker(&self) {}

    pub(crate) fn leave_this_one_to_the_caller(&self) {}
}
