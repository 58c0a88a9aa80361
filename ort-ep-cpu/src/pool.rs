//! The process-wide thread pool.
//!
//! There is one pool for all sessions: two sessions that run at once share its workers and never
//! start more threads than the process may use. The calling thread always takes part and can finish
//! its region alone, so no combination of callers can wait on each other for ever. A region opened
//! inside a region runs inline on the thread that opens it.
//!
//! Every thread begins with its own share of the tasks, the same one each time: what an operator
//! left in the cache of a core is then found there by the next, which cuts the same channels the
//! same way. Who has finished takes tasks from the others.
//!
//! Idle workers spin for some tens of microseconds, which covers the gap between two kernels of a
//! model, and then park in the operating system.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr};

use crate::interrupt;
use crate::processors::Processors;
use crate::sync::{self, AtomicUsize, Condvar, Mutex, Ordering, thread, thread_local};

thread_local! {
    static INSIDE_REGION: Cell<bool> = const { Cell::new(false) };
}

/// Tasks that several takers share out among them, each once.
#[derive(Debug)]
pub struct Shares {
    tasks: usize,
    count: usize,
    next: [Next; MOST_SHARES],
}

/// The most shares that tasks are cut into; more takers than that begin with the same ones.
const MOST_SHARES: usize = 16;

/// How many tasks of a share are taken. On a cache line of its own: takers of different shares do
/// not wait for each other.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Next(AtomicUsize);

impl Shares {
    /// Tasks `0..tasks` in a share of consecutive ones for each of `takers`.
    pub fn new(takers: usize, tasks: usize) -> Shares {
        let count = takers.clamp(1, MOST_SHARES);
        Shares { tasks, count, next: Default::default() }
    }

    /// What a taker gets: its own share in order, then what is left of the others.
    pub fn of(&self, taker: usize) -> impl Iterator<Item = usize> + '_ {
        let shares = (0..self.count).map(move |turn| (taker + turn) % self.count);
        shares.flat_map(|share| {
            let bound = |share: usize| (self.tasks as u128 * share as u128 / self.count as u128) as usize;
            let (start, end) = (bound(share), bound(share + 1));
            let taken = self.next.get(share).map(|next| &next.0);
            std::iter::from_fn(move || {
                let task = start + taken?.fetch_add(1, Ordering::Relaxed);
                (task < end).then_some(task)
            })
        })
    }
}

/// A set of worker threads that run tasks for whoever calls [`Pool::run`].
pub struct Pool {
    shared: &'static Shared,
    capacity: usize,
    started: Mutex<usize>,
}

/// The pool of this process, once somebody has wanted it.
static GLOBAL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());

/// In the child of a `fork`: the pool is the parent's, whose threads are not here. It is left as it
/// is.
#[cfg(unix)]
extern "C" fn forget_pool() {
    GLOBAL.store(std::ptr::null_mut(), std::sync::atomic::Ordering::Release);
}

/// What the workers see of the pool.
struct Shared {
    queue: Mutex<VecDeque<Invitation>>,
    wake: Condvar,
    /// Open places in `queue`, readable without its lock.
    open: AtomicUsize,
    /// Workers parked on `wake`, changed under the lock of `queue`.
    parked: AtomicUsize,
    processors: Processors,
}

/// A region that still wants `places` more workers.
struct Invitation {
    region: RegionPointer,
    places: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct RegionPointer(*const Region);

// SAFETY: a `Region` holds only types that may be shared between threads (atomics, a mutex, a task
// that is `Sync`), and `Pool::run` keeps it alive while any thread can hold the pointer.
unsafe impl Send for RegionPointer {}

/// One call of [`Pool::run`]. It lives on the stack of the caller.
struct Region {
    task: *const (dyn Fn(usize) + Sync),
    shares: Shares,
    /// Workers inside this region, the caller not counted. It only grows under the lock of the
    /// queue.
    active: AtomicUsize,
    caller: thread::Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The run that the region is of.
    watch: Option<interrupt::Watch>,
    /// The run is over, and what is left of its tasks is not begun. An advice that orders nothing,
    /// so loom need not know it.
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
            // SAFETY: `Pool::run` borrows the task for as long as it waits for this region.
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
    /// The pool of this process. Its threads start when they are first wanted.
    pub fn global() -> &'static Pool {
        let pool = GLOBAL.load(std::sync::atomic::Ordering::Acquire);
        // SAFETY: what `GLOBAL` points to was leaked by `make_global` and never goes.
        unsafe { pool.as_ref() }.unwrap_or_else(Pool::make_global)
    }

    /// Makes the pool of this process: of a child of `fork` as well, which has none of the parent's
    /// threads, and may find its pool's locks held by them.
    #[cold]
    fn make_global() -> &'static Pool {
        use std::sync::atomic::Ordering::{AcqRel, Acquire};
        static WATCHES_FORKS: AtomicBool = AtomicBool::new(false);
        #[cfg(unix)]
        if !WATCHES_FORKS.load(Acquire) {
            // Before anybody can fork with a pool. Twice does no harm. SAFETY: the handler stores a
            // null pointer, which is all right between `fork` and `exec`.
            unsafe { libc::pthread_atfork(None, None, Some(forget_pool)) };
            WATCHES_FORKS.store(true, std::sync::atomic::Ordering::Release);
        }
        let made: &'static Pool =
            Box::leak(Box::new(Pool::new(std::thread::available_parallelism().map_or(1, usize::from))));
        // Two threads may both make one; threads start when they are wanted, so that the other is
        // only some bytes.
        let pool = std::ptr::from_ref(made).cast_mut();
        match GLOBAL.compare_exchange(std::ptr::null_mut(), pool, AcqRel, Acquire) {
            Ok(_) => made,
            // SAFETY: as in `global`; it is not null.
            Err(first) => unsafe { &*first },
        }
    }

    /// A pool for regions of up to `capacity` threads. Its workers never end.
    pub(crate) fn new(capacity: usize) -> Pool {
        let shared = Shared {
            queue: Mutex::new(VecDeque::new()),
            wake: Condvar::new(),
            open: AtomicUsize::new(0),
            parked: AtomicUsize::new(0),
            processors: Processors::new(),
        };
        Pool { shared: Box::leak(Box::new(shared)), capacity, started: Mutex::new(0) }
    }

    /// The most threads a region can use, the caller included: what affinity and the control
    /// group's quota leave to this process.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Calls `task` once with each index below `tasks`, on at most `threads` threads of which the
    /// caller is one. The order is not defined.
    ///
    /// # Panics
    ///
    /// When a task panics, the first panic goes on in the caller after all tasks have ended. When
    /// the run is over, the caller unwinds with [`interrupt::Interrupted`] once the tasks that have
    /// begun have seen it; the others never begin.
    pub fn run(&self, threads: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let helpers = threads.min(self.capacity).min(tasks).saturating_sub(1);
        if helpers == 0 || INSIDE_REGION.with(Cell::get) {
            interrupt::spending(interrupt::TASK_UNITS, 0..tasks).for_each(task);
            return;
        }
        self.start(helpers);
        // SAFETY: only the lifetime changes. The region is left only after every worker that could
        // call the task has gone, see below.
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
        // From here on no worker can enter, so `active` only falls.
        region.wait();
        if let Some(payload) = region.panic.into_inner() {
            resume_unwind(payload);
        }
    }

    /// Makes sure that `helpers` workers exist. A thread that the system refuses is done without.
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
            self.processors.leave_this_one_to_the_caller();
        }
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

    /// Takes a place in the oldest region that has one, or `None`.
    fn accept(queue: &mut VecDeque<Invitation>, open: &AtomicUsize) -> Option<RegionPointer> {
        let entry = queue.front_mut()?;
        let region = entry.region;
        entry.places -= 1;
        if entry.places == 0 {
            queue.pop_front();
        }
        open.fetch_sub(1, Ordering::Release);
        // SAFETY: the invitation was still queued and its lock is held, so the caller has not
        // withdrawn it and the region is alive; `active` keeps it alive from now on.
        unsafe { &*region.0 }.active.fetch_add(1, Ordering::AcqRel);
        Some(region)
    }

    /// The life of a worker.
    fn serve(&self, number: usize) {
        self.processors.add_this_worker();
        while sync::worker_goes_on() {
            self.turn(number);
        }
    }

    /// Works in a region, or waits for one. The caller of a region has the first share, so the
    /// `number`-th worker has the next but `number`.
    fn turn(&self, number: usize) {
        sync::spin_until(|| self.open.load(Ordering::Acquire) != 0);
        let region = {
            let mut queue = self.queue.lock();
            let Some(region) = Shared::accept(&mut queue, &self.open) else {
                self.parked.fetch_add(1, Ordering::Relaxed);
                self.wake.wait(&mut queue);
                self.parked.fetch_sub(1, Ordering::Relaxed);
                // A short region may be over before this thread is awake, but where there was one
                // the next is near.
                return;
            };
            region
        };
        // SAFETY: `active` counts this worker, and the caller waits until it is zero.
        let region = unsafe { &*region.0 };
        interrupt::follow(&region.watch);
        region.work(1 + number % (region.shares.count - 1).max(1));
        let caller = region.caller.clone();
        // After this the region may be gone.
        if region.active.fetch_sub(1, Ordering::AcqRel) == 1 {
            caller.unpark();
        }
    }
}
