//! Idle memory: memory that finished runs keep for later runs, and when it is freed.
//!
//! There is no background thread. When a run ends, its session frees idle memory above
//! [`IdleMemory::most_bytes`]. It also frees all idle memory of other sessions of the process that
//! have had no run for their [`IdleMemory::after`].

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ort_alloc::fork::Mutex;
use ort_alloc::{Allocator, Buffer, Recycler};

use super::tables::Tables;
use crate::ep::dynamic::DynamicMemory;
use crate::interrupt;

/// How much idle memory a session keeps, and for how long.
///
/// ```
/// use std::time::Duration;
/// use ort_core::session::{IdleMemory, Model, Session, SessionBuilder};
///
/// fn modest(model: &Model) -> SessionBuilder {
///     let idle = IdleMemory { most_bytes: 16 << 20, after: Some(Duration::from_secs(5)) };
///     Session::builder(model).idle_memory(idle)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleMemory {
    /// The most bytes that a session keeps between runs: slabs, free arena regions and dropped
    /// outputs. Unbounded by default.
    pub most_bytes: usize,
    /// How long a session without runs keeps idle memory. After that time, the end of another
    /// session's run or [`release_idle_memory`] frees it. A minute by default; `None` keeps it
    /// forever.
    pub after: Option<Duration>,
}

impl Default for IdleMemory {
    fn default() -> IdleMemory {
        IdleMemory { most_bytes: usize::MAX, after: Some(Duration::from_secs(60)) }
    }
}

/// The idle memory of one session.
pub(crate) struct SessionIdleMemory {
    /// Slabs of finished runs, roughly oldest first.
    pub(crate) slabs: Mutex<Vec<Buffer>>,
    /// Tables of finished runs, which hold no values.
    tables: Mutex<Vec<Tables>>,
    /// Arenas for values whose size is known only at run time.
    pub(crate) dynamic: DynamicMemory,
    /// Recycles the memory of outputs that callers have dropped. `None` under a memory limit, which
    /// counts every byte.
    pub(crate) outputs: Option<Arc<Recycler>>,
    /// Bytes of packed weights that runs have evicted for values of unknown size. Later runs with
    /// such values leave as many bytes unpacked.
    pub(crate) evicted: AtomicUsize,
    policy: IdleMemory,
    /// When the last run ended; see [`uptime`].
    last_run: AtomicU64,
}

/// The sessions of the process that free idle memory after some time.
static ALL: Mutex<All> = Mutex::new(All { sessions: Vec::new(), shortest: Duration::MAX });

/// When a run looks next for sessions that are due. Looking takes time proportional to the number
/// of sessions, so runs look only once per eighth of the shortest time. So memory may be freed
/// late, by at most an eighth of that time.
static NEXT_LOOK: AtomicU64 = AtomicU64::new(0);

struct All {
    sessions: Vec<Weak<SessionIdleMemory>>,
    /// The shortest [`IdleMemory::after`] of these sessions.
    shortest: Duration,
}

/// The time since some moment, in microseconds.
fn uptime() -> u64 {
    microseconds(interrupt::uptime())
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl SessionIdleMemory {
    pub(crate) fn new(
        dynamic: DynamicMemory,
        outputs: Option<Arc<Recycler>>,
        policy: IdleMemory,
    ) -> Arc<SessionIdleMemory> {
        let (slabs, tables, last_run) = (Mutex::default(), Mutex::default(), AtomicU64::new(uptime()));
        let kept = Arc::new(SessionIdleMemory {
            slabs,
            tables,
            dynamic,
            outputs,
            evicted: AtomicUsize::new(0),
            policy,
            last_run,
        });
        if let Some(after) = policy.after {
            let mut all = ALL.lock();
            // Nothing else removes sessions that were dropped.
            all.sessions.retain(|kept| kept.strong_count() > 0);
            all.sessions.push(Arc::downgrade(&kept));
            all.shortest = all.shortest.min(after);
            NEXT_LOOK.store(0, Ordering::Relaxed);
        }
        kept
    }

    /// All bytes kept for the next run.
    pub(crate) fn idle_bytes(&self) -> usize {
        self.slab_bytes() + self.dynamic.idle_bytes() + self.waiting_outputs()
    }

    /// The bytes of idle slabs.
    pub(crate) fn slab_bytes(&self) -> usize {
        self.slabs.lock().iter().map(Buffer::len).sum()
    }

    /// The bytes of dropped outputs that wait for reuse.
    pub(crate) fn waiting_outputs(&self) -> usize {
        self.outputs.as_ref().map_or(0, |recycler| recycler.waiting_bytes())
    }

    /// Returns tables for a run.
    pub(crate) fn take_tables(&self) -> Tables {
        self.tables.lock().pop().unwrap_or_default()
    }

    /// Keeps the tables of a run for the next one.
    pub(crate) fn keep_tables(&self, mut tables: Tables) {
        if tables.may_wait() {
            tables.clear();
            self.tables.lock().push(tables);
        }
    }

    /// Keeps the slab of a run that has ended, and frees memory that has been idle too long. `slab`
    /// is `None` if it must not be reused.
    pub(crate) fn run_ended(&self, slab: Option<Buffer>) {
        self.slabs.lock().extend(slab);
        self.outputs.iter().for_each(|recycler| recycler.sweep());
        self.dynamic.sweep();
        if self.policy.most_bytes < usize::MAX {
            self.keep_within(self.policy.most_bytes);
        }
        let now = uptime();
        self.last_run.store(now, Ordering::Relaxed);
        // If the lock is taken, another run is looking already.
        if now >= NEXT_LOOK.load(Ordering::Relaxed)
            && let Some(all) = ALL.try_lock()
        {
            NEXT_LOOK.store(now.saturating_add(microseconds(all.shortest / 8)), Ordering::Relaxed);
            release(&all.sessions, now);
        }
    }

    /// Frees idle memory until at most `most` bytes are kept: arena regions and dropped outputs
    /// first, then the oldest slabs. Outputs that the caller drops later are kept only within the
    /// remaining bytes.
    fn keep_within(&self, most: usize) {
        if self.idle_bytes() > most {
            self.dynamic.trim();
            self.trim_outputs();
        }
        let mut slabs = self.slabs.lock();
        while !slabs.is_empty() && slabs.iter().map(Buffer::len).sum::<usize>() > most {
            slabs.remove(0);
        }
        let held = slabs.iter().map(Buffer::len).sum::<usize>() + self.dynamic.idle_bytes();
        if let Some(recycler) = &self.outputs {
            recycler.set_most_waiting(most.saturating_sub(held));
        }
    }

    /// Frees all idle memory; returns its bytes.
    pub(crate) fn release(&self) -> usize {
        let bytes = self.idle_bytes();
        self.slabs.lock().clear();
        self.tables.lock().clear();
        self.dynamic.trim();
        self.trim_outputs();
        bytes
    }

    fn trim_outputs(&self) {
        if let Some(recycler) = &self.outputs {
            recycler.trim();
        }
    }

    /// Whether the session has been idle for as long as its policy allows.
    fn is_due(&self, now: u64) -> bool {
        let waited = now.saturating_sub(self.last_run.load(Ordering::Relaxed));
        self.policy.after.is_some_and(|after| waited >= microseconds(after))
    }
}

/// Frees the idle memory of every session that is due; returns its bytes.
fn release(all: &[Weak<SessionIdleMemory>], now: u64) -> usize {
    let due = all.iter().filter_map(Weak::upgrade).filter(|kept| kept.is_due(now));
    due.map(|kept| kept.release()).sum()
}

/// Frees the idle memory of the sessions of this process that have had no run for their
/// [`IdleMemory::after`]. Returns the bytes freed. Runs do the same when they end, so only a
/// process that may go long without a run needs to call this function.
pub fn release_idle_memory() -> usize {
    release(&ALL.lock().sessions, uptime())
}
