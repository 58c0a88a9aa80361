//! Fork safety: critical sections that a `fork` does not interrupt.
//!
//! A child of `fork` has only the thread that forked. A lock that another thread held at that
//! moment stays locked in the child for ever, and what it guards may be half changed. So a fork
//! waits until no thread is inside a critical section, as it does for the C library's heap, and
//! until it is done no thread enters one. Both take well below a microsecond.
//!
//! A lock that is held for long, such as for a whole run, would hold up forks. It is
//! [`PerProcess`]: the child has another one.
//!
//! The locks are those of `std`. `parking_lot` queues all waiting threads of the process in one
//! table, and a child would find queued there the threads that it lacks.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{OnceLock, PoisonError};
use std::time::Duration;
#[cfg(unix)]
use std::time::Instant;

/// How long a fork waits for critical sections to end. One that takes longer waits for something
/// that the forking thread holds, such as the lock of an interpreter.
#[cfg(unix)]
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a thread that waits for a fork, or for the end of critical sections, sleeps at a time.
const PAUSE: Duration = Duration::from_micros(20);

/// A counter on a cache line of its own.
#[repr(align(64))]
struct Counter(AtomicUsize);

/// The threads inside critical sections. There are several counters, so that threads which run at
/// the same time rarely write the same cache line.
static INSIDE: [Counter; 16] = [const { Counter(AtomicUsize::new(0)) }; 16];

/// The forks that wait or are under way.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// How many forks lie between this process and the one that the library was loaded in.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

/// What a thread knows of itself. It has no destructor, so it is usable until the thread ends.
struct Thread {
    /// Its counter in `INSIDE`; none before its first critical section.
    counter: Cell<Option<&'static AtomicUsize>>,
    /// The critical sections that it is in, nested.
    depth: Cell<usize>,
    is_forking: Cell<bool>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread { counter: Cell::new(None), depth: Cell::new(0), is_forking: Cell::new(false) }
    };
}

impl Thread {
    fn enter(&self) {
        let depth = self.depth.get();
        // A nested section belongs to the outer one: waiting for a fork here would be a deadlock.
        if depth == 0 {
            let counter = self.counter.get().unwrap_or_else(|| self.first_counter());
            // Sequentially consistent, like the steps of `before_fork`: either the fork sees this
            // thread inside, or this thread sees the fork.
            counter.fetch_add(1, Ordering::SeqCst);
            while FORKS.load(Ordering::SeqCst) > 0 && !self.is_forking.get() {
                counter.fetch_sub(1, Ordering::SeqCst);
                std::thread::sleep(PAUSE);
                counter.fetch_add(1, Ordering::SeqCst);
            }
        }
        self.depth.set(depth + 1);
    }

    fn leave(&self) {
        let depth = self.depth.get().saturating_sub(1);
        self.depth.set(depth);
        if depth == 0
            && let Some(counter) = self.counter.get()
        {
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[cold]
    fn first_counter(&self) -> &'static AtomicUsize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        watch_forks();
        let place = NEXT.fetch_add(1, Ordering::Relaxed) % INSIDE.len();
        let [first, ..] = &INSIDE;
        let counter = &INSIDE.get(place).unwrap_or(first).0;
        self.counter.set(Some(counter));
        counter
    }
}

/// Installs the handlers of forks, once.
fn watch_forks() {
    static IS_WATCHING: AtomicBool = AtomicBool::new(false);
    if !IS_WATCHING.load(Ordering::Relaxed) && !IS_WATCHING.swap(true, Ordering::AcqRel) {
        // If it fails for lack of memory, forks are as unsafe as without it.
        #[cfg(unix)]
        // SAFETY: the handlers are functions of this library, which is never unloaded. That of the
        // child only stores to atomics and cells, which is allowed between `fork` and `exec`.
        unsafe {
            libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child))
        };
    }
}

#[cfg(unix)]
extern "C" fn before_fork() {
    THREAD.with(|thread| {
        thread.is_forking.set(true);
        FORKS.fetch_add(1, Ordering::SeqCst);
        // The thread may fork from within a critical section of its own.
        let own = usize::from(thread.depth.get() > 0);
        let inside = || INSIDE.iter().map(|counter| counter.0.load(Ordering::SeqCst)).sum::<usize>();
        let start = Instant::now();
        while inside() > own && start.elapsed() < PATIENCE {
            std::thread::sleep(PAUSE);
        }
    });
}

#[cfg(unix)]
extern "C" fn after_fork() {
    THREAD.with(|thread| {
        if thread.is_forking.replace(false) {
            FORKS.fetch_sub(1, Ordering::SeqCst);
        }
    });
}

#[cfg(unix)]
extern "C" fn in_child() {
    THREAD.with(|thread| {
        thread.is_forking.set(false);
        // Whoever is counted here, this thread excepted, does not exist in the child.
        INSIDE.iter().for_each(|counter| counter.0.store(0, Ordering::SeqCst));
        if let (true, Some(counter)) = (thread.depth.get() > 0, thread.counter.get()) {
            counter.store(1, Ordering::SeqCst);
        }
        FORKS.store(0, Ordering::SeqCst);
        GENERATION.fetch_add(1, Ordering::SeqCst);
    });
}

/// A critical section. It ends when this is dropped, on the thread that entered it.
#[must_use]
pub struct Section {
    /// What that thread knows of itself. A second look at a thread-local would cost as much as the
    /// rest. As a pointer, it keeps the section on its thread.
    thread: *const Thread,
}

/// How many forks lie between this process and the one that first used this crate: a number that a
/// process and its children do not share.
pub fn generation() -> usize {
    watch_forks();
    GENERATION.load(Ordering::Relaxed)
}

/// Enters a critical section. Keep it short, and wait in it for no other thread, unless that thread
/// is in one too.
pub fn section() -> Section {
    THREAD.with(|thread| {
        thread.enter();
        Section { thread }
    })
}

impl Drop for Section {
    fn drop(&mut self) {
        // SAFETY: a section stays on its thread, whose `THREAD` has no destructor and so lives as
        // long as the thread itself.
        unsafe { &*self.thread }.leave();
    }
}

/// A mutex that no other thread holds at a fork. It has the signatures of `parking_lot`.
///
/// ```
/// use ort_alloc::fork::Mutex;
///
/// static COUNT: Mutex<usize> = Mutex::new(0);
/// *COUNT.lock() += 1;
/// assert_eq!(COUNT.try_lock().map(|count| *count), Some(1));
/// ```
#[derive(Debug, Default)]
pub struct Mutex<T>(std::sync::Mutex<T>);

/// A held [`Mutex`].
pub struct MutexGuard<'a, T> {
    // The lock is released first: fields are dropped in their order.
    held: std::sync::MutexGuard<'a, T>,
    _section: Section,
}

impl<T> Mutex<T> {
    /// Creates a mutex that is not locked.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Locks. Poison is ignored, as in `parking_lot`.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let section = section();
        MutexGuard { held: self.0.lock().unwrap_or_else(PoisonError::into_inner), _section: section }
    }

    /// Locks, unless another thread holds the lock.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let section = section();
        let held = match self.0.try_lock() {
            Ok(held) => held,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return None,
        };
        Some(MutexGuard { held, _section: section })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.held
    }
}

/// Returns what is in a cell, which `make` fills if it is empty. A fork waits for `make`: the child
/// would wait for ever for the thread that it lacks.
pub fn get_or_init<T>(cell: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    cell.get().unwrap_or_else(|| {
        let _section = section();
        cell.get_or_init(make)
    })
}

/// A value that each process has for itself. A child of `fork` begins with a default one, whatever
/// the parent's threads did with theirs, which is leaked.
pub struct PerProcess<T> {
    current: AtomicPtr<Entry<T>>,
    _owns: PhantomData<T>,
}

struct Entry<T> {
    generation: usize,
    value: T,
}

impl<T: Default + Send + Sync> PerProcess<T> {
    /// The value of this process.
    pub fn get(&self) -> &T {
        let generation = GENERATION.load(Ordering::Relaxed);
        let current = self.current.load(Ordering::Acquire);
        // SAFETY: the pointer is null or from `replace`, and entries live until `self` is dropped.
        match unsafe { current.as_ref() } {
            Some(entry) if entry.generation == generation => &entry.value,
            _ => self.replace(current, generation),
        }
    }

    #[cold]
    fn replace(&self, old: *mut Entry<T>, generation: usize) -> &T {
        // Forks are counted from here on.
        watch_forks();
        let made = Box::into_raw(Box::new(Entry { generation, value: T::default() }));
        match self.current.compare_exchange(old, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as in `get`; `old` is not freed.
            Ok(_) => unsafe { &(*made).value },
            Err(first) => {
                // SAFETY: no one else has seen `made`. Another thread of this process was first, so
                // `first` is an entry as in `get`.
                unsafe {
                    drop(Box::from_raw(made));
                    &(*first).value
                }
            }
        }
    }
}

impl<T> PerProcess<T> {
    /// Creates one that has a default value at its first use.
    pub const fn new() -> PerProcess<T> {
        PerProcess { current: AtomicPtr::new(std::ptr::null_mut()), _owns: PhantomData }
    }
}

impl<T> Default for PerProcess<T> {
    fn default() -> PerProcess<T> {
        PerProcess::new()
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerProcess").finish_non_exhaustive()
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let current = *self.current.get_mut();
        // SAFETY: the pointer is null or from `replace`, and no one borrows from `self` any more.
        let is_own = unsafe { current.as_ref() }
            .is_some_and(|entry| entry.generation == GENERATION.load(Ordering::Relaxed));
        // A value of the parent may be in use by threads that are not here: it stays.
        if is_own {
            // SAFETY: as above, and it is freed once.
            drop(unsafe { Box::from_raw(current) });
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Forks; returns what the child returns, or nothing if it hangs.
    fn in_a_child(child: impl FnOnce() -> i32) -> Option<i32> {
        // SAFETY: the child uses memory of the C library and the locks that this file is about.
        let id = unsafe { libc::fork() };
        assert!(id >= 0, "{}", std::io::Error::last_os_error());
        if id == 0 {
            let code = child();
            // SAFETY: it does not return; nothing of the parent's is run or flushed.
            unsafe { libc::_exit(code) };
        }
        let (start, mut status) = (Instant::now(), 0);
        loop {
            // SAFETY: the child is ours, and the status lives long enough.
            if unsafe { libc::waitpid(id, &mut status, libc::WNOHANG) } == id {
                return libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
            }
            if start.elapsed() > Duration::from_secs(20) {
                // SAFETY: the child is ours and still there.
                unsafe { (libc::kill(id, libc::SIGKILL), libc::waitpid(id, &mut status, 0)) };
                return None;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    #[test]
    fn a_child_finds_no_lock_held_and_nothing_half_changed() {
        let pair = Mutex::new((0_u64, 0_u64));
        let per_process = PerProcess::<std::sync::Mutex<()>>::default();
        let cell = OnceLock::new();
        let is_over = AtomicBool::new(false);
        let outcomes: Vec<Option<i32>> = std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        let mut pair = pair.lock();
                        pair.0 += 1;
                        // A nested section, as of a budget's lock under that of a cache.
                        drop(section());
                        std::hint::black_box((0..50).sum::<u64>());
                        pair.1 += 1;
                    }
                });
            }
            // For as long as the test, as a run would.
            let held = per_process.get().lock();
            scope.spawn(|| get_or_init(&cell, || std::thread::sleep(Duration::from_millis(20))));
            let child = || {
                let pair = *pair.lock();
                get_or_init(&cell, || ());
                let is_free = per_process.get().try_lock().is_ok();
                if pair.0 != pair.1 { 1 } else { i32::from(!is_free) * 2 }
            };
            let outcomes = (0..200).map(|_| in_a_child(child)).collect();
            drop(held);
            is_over.store(true, Ordering::Relaxed);
            outcomes
        });
        assert_eq!(outcomes, vec![Some(0); 200]);
        assert!(per_process.get().try_lock().is_ok(), "the parent has its lock");
    }

    #[test]
    fn a_thread_may_fork_while_it_holds_a_lock() {
        let lock = Arc::new(Mutex::new(1));
        let held = lock.lock();
        let child = || {
            // The child is inside the section, and leaves it.
            drop(section());
            i32::from(lock.try_lock().is_some())
        };
        assert_eq!(in_a_child(child), Some(0));
        drop(held);
        assert_eq!(in_a_child(|| *lock.lock()), Some(1));
    }
}
