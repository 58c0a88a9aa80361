//! Cooperative interruption of kernels: cancellation and deadlines inside long loops.
//!
//! A run [enters](enter) its [`Watch`], which then is the thread's current one. Loops call
//! [`spend`] once per block of work. Every [`UNITS_PER_LOOK`] units it checks the cancel token and
//! the clock. If the run is over, it unwinds with [`Interrupted`], without printing a panic
//! message. The step catches that and returns the error of [`RunControl::check`]. So kernels need
//! no error path for partial results, and no partial result is ever read.
//!
//! A block costs one subtraction, and now and then a read of the clock. A program that aborts on
//! panics cannot unwind: there a run only ends between nodes.
//!
//! [`RunControl::check`]: crate::ep::RunControl::check

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::limits::Raise;
use crate::{Result, ensure, error};

/// Units of work between two checks. A unit is one element of a cheap loop: a few nanoseconds at
/// most.
pub const UNITS_PER_LOOK: usize = 1 << 16;

/// The units charged for each task of a parallel loop, on top of what the task itself spends. A
/// task takes a few microseconds at least.
pub const TASK_UNITS: usize = UNITS_PER_LOOK / 16;

/// The units charged for each string that is copied, read or written.
pub const UNITS_OF_A_TEXT: usize = 32;

thread_local! {
    // Separate from the watch, because that one has a destructor: this is a plain thread-local
    // word.
    static LEFT: Cell<usize> = const { Cell::new(UNITS_PER_LOOK) };
    static CURRENT: RefCell<Option<Watch>> = const { RefCell::new(None) };
}

/// Cancels a run from another thread, or by a function that the run asks now and then.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<Cancelling>);

/// What the clones of a token share.
#[derive(Debug, Default)]
struct Cancelling {
    is_cancelled: AtomicBool,
    poll: Option<Poll>,
}

/// A function that a run asks whether it is over. Only the thread that asks may get the answer, so
/// it is noted in `is_cancelled` for the others.
#[derive(Debug)]
struct Poll {
    ask: fn() -> bool,
    /// The token without the function. Cancelling one cancels both.
    of: CancelToken,
}

impl CancelToken {
    /// Creates a token that is not cancelled.
    pub fn new() -> CancelToken {
        CancelToken::default()
    }

    /// Ends every run that holds this token, even inside a kernel.
    pub fn cancel(&self) {
        match &self.0.poll {
            Some(poll) => poll.of.cancel(),
            None => self.0.is_cancelled.store(true, Ordering::Relaxed),
        }
    }

    /// Returns the same token with a function that ends the run once it returns true on one of its
    /// threads. Steps and long kernels ask often and on all threads of a run, so that the function
    /// has to be cheap, and must not panic. It may run another session. It suits hosts that handle
    /// signals on the calling thread, such as an interpreter.
    ///
    /// ```
    /// use ort_core::ep::CancelToken;
    ///
    /// let token = CancelToken::new().polling(|| false);
    /// token.cancel(); // still cancels the run, and those of the first token
    /// ```
    #[must_use]
    pub fn polling(self, poll: fn() -> bool) -> CancelToken {
        let poll = Some(Poll { ask: poll, of: self });
        CancelToken(Arc::new(Cancelling { is_cancelled: AtomicBool::new(false), poll }))
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        let Cancelling { is_cancelled, poll } = &*self.0;
        if is_cancelled.load(Ordering::Relaxed) {
            return true;
        }
        let is_over = poll.as_ref().is_some_and(|poll| poll.of.is_cancelled() || (poll.ask)());
        if is_over {
            is_cancelled.store(true, Ordering::Relaxed);
        }
        is_over
    }

    /// Returns whether both are the same token.
    pub(crate) fn is(&self, other: &CancelToken) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Returns an error once a run is cancelled or past its deadline.
pub(crate) fn check(what: &str, cancel: &CancelToken, deadline: Option<Instant>) -> Result<()> {
    ensure!(!cancel.is_cancelled(), Cancelled, "{what} was cancelled");
    match deadline.is_some_and(|deadline| Instant::now() >= deadline) {
        true => Err(error!(Cancelled, "{what} passed its deadline").raise("deadline")),
        false => Ok(()),
    }
}

/// Returns the time since some moment. On Linux it is exact to a few milliseconds, and takes a few
/// nanoseconds to read, a fifth of what [`Instant::now`] takes: runs ask between all steps.
pub fn uptime() -> Duration {
    #[cfg(target_os = "linux")]
    {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        Duration::try_from(now).unwrap_or_default()
    }
    #[cfg(not(target_os = "linux"))]
    {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        ort_alloc::fork::get_or_init(&START, Instant::now).elapsed()
    }
}

/// A deadline as an [`uptime`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoarseDeadline(Option<Duration>);

impl CoarseDeadline {
    pub(crate) fn new(deadline: Option<Instant>) -> CoarseDeadline {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        CoarseDeadline(left.map(|left| uptime().saturating_add(left)))
    }

    /// Returns whether it has passed, a few milliseconds late at most.
    pub(crate) fn is_past(self) -> bool {
        self.0.is_some_and(|deadline| uptime() >= deadline)
    }
}

/// The conditions that end a run early.
#[derive(Clone, Debug)]
pub struct Watch {
    /// What is ended, for messages: "the run".
    pub what: &'static str,
    /// The token that the caller may cancel.
    pub cancel: CancelToken,
    /// When the run gives up.
    pub deadline: Option<Instant>,
}

impl Watch {
    /// Returns whether the run is cancelled or past its deadline.
    pub fn is_over(&self) -> bool {
        self.cancel.is_cancelled() || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Returns an error once the run is over.
    pub fn check(&self) -> Result<()> {
        check(self.what, &self.cancel, self.deadline)
    }

    fn is(&self, other: &Watch) -> bool {
        self.deadline == other.deadline && self.cancel.is(&other.cancel)
    }
}

/// The payload that a thread unwinds with when its run is over.
#[derive(Debug)]
pub struct Interrupted;

impl Interrupted {
    /// Returns whether the payload of a caught panic is an interruption.
    pub fn is(payload: &(dyn Any + Send)) -> bool {
        payload.is::<Interrupted>()
    }
}

/// Counts a block of `units` of work, and checks now and then whether the run is over.
///
/// Inside a parallel loop each thread counts the blocks that it executes itself.
#[inline]
pub fn spend(units: usize) {
    LEFT.with(|left| match left.get().checked_sub(units) {
        Some(rest) => left.set(rest),
        None => look(),
    });
}

/// Checks at once whether the run is over. Call it before a long operation that cannot be divided.
#[cold]
#[inline(never)]
pub fn look() {
    LEFT.set(UNITS_PER_LOOK);
    // A copy, because what the watch asks may enter a watch of its own.
    let is_over = CURRENT.with_borrow(Clone::clone).is_some_and(|watch| watch.is_over());
    // A destructor that works while the thread unwinds must not unwind again.
    if is_over && cfg!(panic = "unwind") && !std::thread::panicking() {
        resume_unwind(Box::new(Interrupted));
    }
}

/// Passes on the elements of an iterator and charges `units` of work for each.
pub fn spending<I: IntoIterator>(units: usize, items: I) -> impl Iterator<Item = I::Item> {
    let pace = Pace::default();
    items.into_iter().inspect(move |_| pace.step(units))
}

/// Batches steps that are too cheap to call [`spend`] for each, such as the comparisons of a sort.
/// A full block is [spent](spend) at once. `Drop` spends the remainder, so that many short loops
/// count as much as one long loop.
#[derive(Debug, Default)]
pub struct Pace(Cell<usize>);

impl Drop for Pace {
    #[inline]
    fn drop(&mut self) {
        if self.0.get() > 0 {
            spend(self.0.get());
        }
    }
}

impl Pace {
    /// Counts one step of `units` of work.
    #[inline]
    pub fn step(&self, units: usize) {
        let steps = self.0.get() + units;
        if steps < TASK_UNITS {
            self.0.set(steps);
        } else {
            self.0.set(0);
            spend(steps);
        }
    }
}

/// The bytes copied or filled between two calls of [`look`]: large enough for libc's fast path for
/// large copies.
const COPIED: usize = 4 << 20;

/// `copy_from_slice` with a [`look`] before each chunk of a long slice.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub fn copy<T: Copy>(from: &[T], to: &mut [T]) {
    assert_eq!(from.len(), to.len(), "a copy keeps the length");
    if size_of_val(to) <= COPIED {
        return to.copy_from_slice(from);
    }
    let step = COPIED / size_of::<T>().max(1);
    for (from, to) in from.chunks(step).zip(to.chunks_mut(step)) {
        look();
        to.copy_from_slice(from);
    }
}

/// `fill` with a [`look`] before each chunk of a long slice.
#[inline]
pub fn fill<T: Copy>(to: &mut [T], value: T) {
    if size_of_val(to) <= COPIED {
        return to.fill(value);
    }
    for to in to.chunks_mut(COPIED / size_of::<T>().max(1)) {
        look();
        to.fill(value);
    }
}

/// Returns the watch of this thread, to hand to threads that work for it.
pub fn current() -> Option<Watch> {
    CURRENT.with_borrow(Clone::clone)
}

/// Makes `watch` the current one of this thread until it is replaced: workers do so for each
/// parallel region. An equal watch is kept, which saves the clone.
pub fn follow(watch: &Option<Watch>) {
    CURRENT.with_borrow_mut(|current| match (&*current, watch) {
        (None, None) => {}
        (Some(current), Some(watch)) if current.is(watch) => {}
        _ => current.clone_from(watch),
    });
}

/// Makes `watch` the current one of this thread until the guard is dropped.
#[must_use]
pub fn enter(watch: Watch) -> Entered {
    Entered { outer: CURRENT.replace(Some(watch)) }
}

/// Guard of [`enter`]: restores the thread's previous watch when dropped.
#[derive(Debug)]
pub struct Entered {
    outer: Option<Watch>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.replace(self.outer.take());
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    fn ends(watch: Watch) -> bool {
        let _entered = enter(watch);
        catch_unwind(|| (0..4).for_each(|_| spend(UNITS_PER_LOOK / 2)))
            .is_err_and(|payload| Interrupted::is(&*payload))
    }

    #[test]
    fn work_ends_where_the_run_is_over() {
        let (what, cancel, deadline) = ("the run", CancelToken::new(), None);
        assert!(!ends(Watch { what, cancel: cancel.clone(), deadline }));
        assert!(ends(Watch { what, cancel: cancel.clone(), deadline: Some(Instant::now()) }));
        cancel.cancel();
        assert!(ends(Watch { what, cancel, deadline }));
        assert!(current().is_none(), "the watch left with its guard");
        look();
    }

    #[test]
    fn a_token_that_polls_ends_with_its_function_or_its_first_token() {
        let first = CancelToken::new();
        let (never, always) = (first.clone().polling(|| false), first.clone().polling(|| true));
        assert!(always.is_cancelled() && !never.is_cancelled() && !first.is_cancelled());
        // The answer stays with the call that asked: the next call's token is another one.
        assert!(!always.is(&first.clone().polling(|| false)));
        never.cancel();
        assert!(first.is_cancelled() && never.is_cancelled());
    }

    #[test]
    fn many_short_loops_count_as_much_as_a_long_one() {
        let loops = |count: usize| {
            let cancel = CancelToken::new();
            cancel.cancel();
            let _entered = enter(Watch { what: "the run", cancel, deadline: None });
            LEFT.set(UNITS_PER_LOOK);
            catch_unwind(|| (0..count).for_each(|_| spending(4, 0..16).for_each(drop))).is_err()
        };
        assert!(!loops(UNITS_PER_LOOK / 64));
        assert!(loops(UNITS_PER_LOOK / 64 + 1));
    }

    #[test]
    fn an_inner_watch_gives_way_to_the_outer_one() {
        let (what, cancel, deadline) = ("the run", CancelToken::new(), None);
        cancel.cancel();
        let _outer = enter(Watch { what, cancel: CancelToken::new(), deadline });
        drop(enter(Watch { what, cancel, deadline }));
        look();
        assert!(current().is_some_and(|watch| !watch.is_over()));
    }
}
