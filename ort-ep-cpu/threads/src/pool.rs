//! The process-wide thread pool.
//!
//! All sessions share one pool. Two sessions that run at once share its workers and never start
//! more threads than the process may use. The calling thread always takes part and can finish its
//! region alone, so callers cannot deadlock on each other. A region opened inside a region runs
//! inline on the thread that opens it.
//!
//! Each thread starts with its own share of the tasks, the same share in every region. The next
//! operator splits the same channels the same way, so it finds the data in its core's cache. A
//! thread that has finished its share steals tasks from the others.
//!
//! Idle workers spin for some tens of microseconds, which covers the gap between two kernels of a
//! model. Then they park in the operating system.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr};

use crate::affinity::Affinity;
use crate::interrupt;
use crate::sync::{self, AtomicUsize, Condvar, Mutex, Ordering, thread, thread_local};

thread_local! {
    static INSIDE_REGION: Cell<bool> = const { Cell::new(false) };
}

/// Tasks distributed over several takers, each task exactly once.
#[derive(Debug)]
pub struct Shares {
    tasks: usize,
    count: usize,
    next: [Next; MOST_SHARES],
}

/// The maximum number of shares. Further takers start in the same shares as earlier ones.
const MOST_SHARES: usize = 16;

/// How many tasks of a share are taken. Padded to a cache line, so that takers of different shares
/// do not contend (false sharing).
#[derive(Debug, Default)]
#[repr(align(64))]
struct Next(AtomicUsize);

impl Shares {
    /// Splits tasks `0..tasks` into consecutive shares, one for each of `takers`.
    pub fn new(takers: usize, tasks: usize) -> Shares {
        let count = takers.clamp(1, MOST_SHARES);
        Shares { tasks, count, next: Default::default() }
    }

    /// Returns the tasks of a taker: its own share in order, then what is left of the others.
    pub fn of(&self, taker: usize) -> impl Iterator<Item = usize> + '_ {
        let shares = (0..self.count).map(move |turn| (taker + turn) % self.count);
        shares.flat_map(|share| {
            let bound = |share: usize| (self.tasks as u128 * share as u128 / self.count as u128) as usize;
            let (start, end) = (bound(share), bound(share + 1));
            let taken = self.next.get(share).map(|next| &next.0);
            std::iter::from_fn(move || {
                // Relaxed is enough: the counter only hands out indices. The region's queue lock
                // and `active` counter order the data.
                let task = start + taken?.fetch_add(1, Ordering::Relaxed);
                (task < end).then_some(task)
            })
        })
    }
}

/// A set of worker threads that run tasks for the callers of [`Pool::run`].
pub struct Pool {
    shared: &'static Shared,
    capacity: usize,
    started: Mutex<usize>,
}

/// The pool of this process, null until it is first used. It is a pointer and not a `OnceLock`,
/// because a forked child must reset it.
static GLOBAL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());

/// Drops the pool in the child of a `fork`: it is the parent's, and its threads do not exist here.
/// The memory is leaked.
#[cfg(unix)]
extern "C" fn forget_pool() {
    GLOBAL.store(std::ptr::null_mut(), std::sync::atomic::Ordering::Release);
}

/// The state that the workers share.
struct Shared {
    queue: Mutex<VecDeque<Invitation>>,
    wake: Condvar,
    /// Open places in `queue`, readable without its lock.
    open: AtomicUsize,
    /// Workers parked on `wake`. Changes only under the lock of `queue`.
    parked: AtomicUsize,
    affinity: Affinity,
}

/// A region that still wants `places` more workers.
struct Invitation {
    region: RegionPointer,
    places: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct RegionPointer(*const Region);

// SAFETY: a `Region` holds only types that threads may share (atomics, a mutex, a `Sync` task), and
// `Pool::run` keeps it alive while any thread can hold the pointer.
unsafe impl Send for RegionPointer {}

/// One call of [`Pool::run`], on the stack of the caller.
struct Region {
    task: *const (dyn Fn(usize) + Sync),
    shares: Shares,
    /// Workers inside this region, not counting the caller. Grows only under the lock of the queue.
    active: AtomicUsize,
    caller: thread::Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The deadline and cancellation state of the run that opened the region.
    watch: Option<interrupt::Watch>,
    /// Set once the run is cancelled, so that the remaining tasks are skipped. It is only a hint
    /// and orders no memory, so the loom models need not know it.
    is_over: AtomicBool,
}

impl Region {
    /// Claims and runs tasks until none is left, those of the share `own` first.
    fn work(&self, own: usize) {
        let outer = INSIDE_REGION.with(|inside| inside.replace(true));
        for index in self.shares.of(own) {
            if self.is_over.load(Ordering::Relaxed) {
                break;
            }
            // SAFETY: `Pool::run` borrows the task until it has waited for this region.
            let task = unsafe { &*self.task };
            let work = || {
                interrupt::spend(interrupt::TASK_UNITS);
                task(index);
            };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(work)) {
                if interrupt::Interrupted::is(&*payload) {
                    self.is_over.store(true, Ordering::Relaxed);
                }
                self.panic.lock().get_or_insert(payload);
            }
        }
        INSIDE_REGION.with(|inside| inside.set(outer));
    }
}

impl Pool {
    /// Returns the pool of this process. Its threads start on first use.
    pub fn global() -> &'static Pool {
        let pool = GLOBAL.load(std::sync::atomic::Ordering::Acquire);
        // SAFETY: `make_global` leaked what `GLOBAL` points to, so it lives for ever.
        unsafe { pool.as_ref() }.unwrap_or_else(Pool::make_global)
    }

    /// Creates the pool of this process. A child of `fork` creates its own, because it has none of
    /// the parent's threads and may find the parent pool's locks held.
    #[cold]
    fn make_global() -> &'static Pool {
        use std::sync::atomic::Ordering::{AcqRel, Acquire};
        static WATCHES_FORKS: AtomicBool = AtomicBool::new(false);
        #[cfg(unix)]
        if !WATCHES_FORKS.load(Acquire) {
            // The handler must be installed before anyone can fork with a pool; installing it twice
            // is harmless.
            // SAFETY: the handler only stores a null pointer, which is allowed between `fork` and
            // `exec`.
            unsafe { libc::pthread_atfork(None, None, Some(forget_pool)) };
            WATCHES_FORKS.store(true, std::sync::atomic::Ordering::Release);
        }
        let made: &'static Pool =
            Box::leak(Box::new(Pool::new(std::thread::available_parallelism().map_or(1, usize::from))));
        // Two threads may race to create the pool. The loser leaks only some bytes, because a pool
        // starts no threads before its first use.
        let pool = std::ptr::from_ref(made).cast_mut();
        match GLOBAL.compare_exchange(std::ptr::null_mut(), pool, AcqRel, Acquire) {
            Ok(_) => made,
            // SAFETY: as in `global`. The exchange failed, so the pointer is not null.
            Err(first) => unsafe { &*first },
        }
    }

    /// Creates a pool for regions of up to `capacity` threads. Its workers never exit.
    pub(crate) fn new(capacity: usize) -> Pool {
        let shared = Shared {
            queue: Mutex::new(VecDeque::new()),
            wake: Condvar::new(),
            open: AtomicUsize::new(0),
            parked: AtomicUsize::new(0),
            affinity: Affinity::new(),
        };
        Pool { shared: Box::leak(Box::new(shared)), capacity, started: Mutex::new(0) }
    }

    /// Returns the most threads that a region can use, including the caller. It is what CPU
    /// affinity and the cgroup quota leave to this process.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Calls `task` once with each index below `tasks`, on at most `threads` threads including the
    /// caller. The order is unspecified.
    ///
    /// # Panics
    ///
    /// If a task panics, the caller resumes the first panic after all tasks have ended. If the run
    /// is cancelled, the caller unwinds with [`interrupt::Interrupted`] after the tasks that have
    /// begun have seen it. The others never begin.
    pub fn run(&self, threads: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let helpers = threads.min(self.capacity).min(tasks).saturating_sub(1);
        // A nested region runs inline: its thread is already at work in a region.
        if helpers == 0 || INSIDE_REGION.with(Cell::get) {
            interrupt::spending(interrupt::TASK_UNITS, 0..tasks).for_each(task);
            return;
        }
        self.start(helpers);
        // SAFETY: only the lifetime changes. `run` returns only after `withdraw` and `wait`, when
        // no worker can call the task any more.
        let task: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
        let region = Region {
            task,
            shares: Shares::new(helpers + 1, tasks),
            active: AtomicUsize::new(0),
            caller: thread::current(),
            panic: Mutex::new(None),
            watch: interrupt::current(),
            is_over: AtomicBool::new(false),
        };
        self.shared.invite(&region, helpers);
        region.work(0);
        self.shared.withdraw(&region);
        // The invitation is gone, so no worker can enter and `active` only falls.
        region.wait();
        if let Some(payload) = region.panic.into_inner() {
            resume_unwind(payload);
        }
    }

    /// Makes the calling thread a worker, until [`Pool::dismiss`] is called with the same flag.
    /// While it is one, the pool makes one thread less of its own.
    pub fn serve_until(&self, is_over: &AtomicBool) {
        let number = {
            let mut started = self.started.lock();
            *started += 1;
            *started - 1
        };
        while !is_over.load(Ordering::Relaxed) {
            self.shared.turn(number, Some(is_over));
        }
        *self.started.lock() -= 1;
    }

    /// Lets the threads return that are in [`Pool::serve_until`] with this flag. Those in a region
    /// return after it.
    pub fn dismiss(&self, is_over: &AtomicBool) {
        // Under the lock, so that no worker reads the flag before it is set and parks after the
        // wake-up.
        let queue = self.shared.queue.lock();
        is_over.store(true, Ordering::Relaxed);
        drop(queue);
        self.shared.wake.notify_all();
    }

    /// Makes sure that `helpers` workers exist. If the system refuses a thread, the pool has
    /// fewer.
    fn start(&self, helpers: usize) {
        let mut started = self.started.lock();
        while *started < helpers {
            let (shared, number) = (self.shared, *started);
            let name = format!("ort-cpu-{}", number + 1);
            if thread::Builder::new().name(name).spawn(move || shared.serve(number)).is_err() {
                return;
            }
            *started += 1;
        }
    }
}

impl Region {
    /// Returns once no worker is inside.
    fn wait(&self) {
        let is_over = || self.active.load(Ordering::Acquire) == 0;
        if !sync::spin_until(is_over) {
            while !is_over() {
                thread::park();
            }
        }
    }
}

impl Shared {
    fn invite(&self, region: &Region, places: usize) {
        let mut queue = self.queue.lock();
        queue.push_back(Invitation { region: RegionPointer(region), places });
        self.open.fetch_add(places, Ordering::Release);
        let parked = self.parked.load(Ordering::Relaxed);
        drop(queue);
        if parked > 0 {
            // A woken worker should not land on the caller's core; spinning workers already have
            // theirs.
            self.affinity.leave_this_one_to_the_caller();
        }
        // Spinning workers see `open` by themselves; only parked ones need a wake-up.
        for _ in 0..places.min(parked) {
            self.wake.notify_one();
        }
    }

    fn withdraw(&self, region: &Region) {
        let mut queue = self.queue.lock();
        if let Some(at) = queue.iter().position(|entry| entry.region == RegionPointer(region))
            && let Some(entry) = queue.remove(at)
        {
            self.open.fetch_sub(entry.places, Ordering::Release);
        }
    }

    /// Takes a place in the oldest region. Returns `None` if no region has an open place.
    fn accept(queue: &mut VecDeque<Invitation>, open: &AtomicUsize) -> Option<RegionPointer> {
        let entry = queue.front_mut()?;
        let region = entry.region;
        entry.places -= 1;
        if entry.places == 0 {
            queue.pop_front();
        }
        open.fetch_sub(1, Ordering::Release);
        // SAFETY: the invitation is still queued and the queue's lock is held, so the caller has
        // not withdrawn it and the region is alive. `active` keeps it alive from now on.
        unsafe { &*region.0 }.active.fetch_add(1, Ordering::AcqRel);
        Some(region)
    }

    /// The main loop of a worker.
    fn serve(&self, number: usize) {
        self.affinity.add_this_worker();
        while sync::worker_goes_on() {
            self.turn(number, None);
        }
    }

    /// Works in a region, or waits for one. The caller of a region has share 0, so worker `number`
    /// gets one of the shares after it. Once `is_over` is set, it does neither.
    fn turn(&self, number: usize, is_over: Option<&AtomicBool>) {
        let is_over = || is_over.is_some_and(|flag| flag.load(Ordering::Relaxed));
        sync::spin_until(|| self.open.load(Ordering::Acquire) != 0 || is_over());
        let region = {
            let mut queue = self.queue.lock();
            if is_over() {
                return;
            }
            let Some(region) = Shared::accept(&mut queue, &self.open) else {
                self.parked.fetch_add(1, Ordering::Relaxed);
                self.wake.wait(&mut queue);
                self.parked.fetch_sub(1, Ordering::Relaxed);
                // A short region may be over before this thread is awake. The next one is likely
                // near, so the thread returns and spins again.
                return;
            };
            region
        };
        // SAFETY: `active` counts this worker, and the caller waits until `active` is zero.
        let region = unsafe { &*region.0 };
        interrupt::follow(&region.watch);
        region.work(1 + number % (region.shares.count - 1).max(1));
        let caller = region.caller.clone();
        // The region may be gone once `active` is zero, so nothing below may touch it.
        if region.active.fetch_sub(1, Ordering::AcqRel) == 1 {
            caller.unpark();
        }
    }
}
