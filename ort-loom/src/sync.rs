//! Loom's counterparts of the `sync.rs` of `ort-alloc` and `ort-ep-cpu`.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};

pub(crate) use loom::sync::atomic::Ordering;

/// An atomic whose drop checks that every thread's last use happened before.
#[derive(Debug, Default)]
pub(crate) struct AtomicUsize(loom::sync::atomic::AtomicUsize);

impl AtomicUsize {
    pub(crate) fn new(value: usize) -> Self {
        Self(loom::sync::atomic::AtomicUsize::new(value))
    }
}

impl Deref for AtomicUsize {
    type Target = loom::sync::atomic::AtomicUsize;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Drop for AtomicUsize {
    fn drop(&mut self) {
        // `with_mut` fails unless all accesses of other threads happened before.
        // A second panic during unwinding would abort the process and hide the first.
        if !std::thread::panicking() {
            self.0.with_mut(|_| ());
        }
    }
}

/// Loom's mutex with the signatures of `parking_lot`.
#[derive(Debug)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

/// The guard is `None` only during a wait.
pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap()))
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner().unwrap()
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap()
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap()
    }
}

pub(crate) struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(loom::sync::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        // Loom's `wait` takes the guard by value, so it leaves its place meanwhile.
        let held = guard.0.take().unwrap();
        guard.0 = Some(self.0.wait(held).unwrap());
    }

    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

pub(crate) mod thread {
    //! Loom's threads, with our own parking: loom's `unpark` synchronises more strongly than the
    //! standard library guarantees.

    use std::sync::Arc;

    pub(crate) use loom::thread::Builder;

    use super::{Condvar, Mutex};

    /// The token that a thread waits for in [`park`].
    #[derive(Clone)]
    pub(crate) struct Thread(Arc<Token>);

    struct Token {
        is_there: Mutex<bool>,
        given: Condvar,
    }

    loom::thread_local! {
        static CURRENT: Thread = Thread(Arc::new(Token { is_there: Mutex::new(false), given: Condvar::new() }));
    }

    impl Thread {
        pub(crate) fn unpark(&self) {
            *self.0.is_there.lock() = true;
            self.0.given.notify_one();
        }
    }

    pub(crate) fn current() -> Thread {
        CURRENT.with(Thread::clone)
    }

    pub(crate) fn park() {
        let Thread(token) = current();
        let mut is_there = token.is_there.lock();
        // A token that was given before is not lost: the thread does not wait then.
        while !*is_there {
            token.given.wait(&mut is_there);
        }
        *is_there = false;
    }
}

/// Loom's thread-local, in the form with a constant initializer.
macro_rules! loom_thread_local {
    (static $name:ident: $ty:ty = const { $value:expr };) => {
        loom::thread_local! { static $name: $ty = $value; }
    };
}
pub(crate) use loom_thread_local as thread_local;

/// Checks only once, because spinning observes nothing that waiting does not.
pub(crate) fn spin_until(is: impl Fn() -> bool) -> bool {
    is()
}

loom_thread_local! {
    static ENDED: Cell<bool> = const { Cell::new(false) };
}

/// Makes the calling worker end after its region.
pub(crate) fn end_worker() {
    ENDED.with(|ended| ended.set(true));
}

pub(crate) fn worker_goes_on() -> bool {
    !ENDED.with(Cell::get)
}
