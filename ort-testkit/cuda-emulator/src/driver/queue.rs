//! Stream queues with lazy execution.
//!
//! A stream other than a default one executes nothing until something forces it: a call that waits
//! for it, another stream that waits for one of its events, or a free. If a program forgets to
//! synchronise, the results are therefore missing deterministically, not only under unlucky timing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use super::launch::{Job, execute};
use super::routine::{Routine, perform as perform_routine};
use super::{DRIVER, Done, Driver, Guard, Handle, copy, setting};
use crate::{Fault, code};

/// A stream that the program created.
pub(super) struct Stream {
    pub(super) context: u64,
    /// Whether it synchronises with the default stream.
    pub(super) blocking: bool,
    pub(super) queue: VecDeque<Op>,
    pub(super) capture: Option<Capture>,
}

/// The operations that a stream captures instead of executing.
pub(super) struct Capture {
    pub(super) thread: ThreadId,
    pub(super) mode: u32,
    pub(super) ops: Vec<Op>,
    /// Whether a call invalidated the capture.
    pub(super) broken: bool,
}

/// An event, also one that is destroyed but still waited for.
pub(super) struct Event {
    pub(super) alive: bool,
    /// The stream that recorded it last, the number of records, and how many of them have executed.
    pub(super) stream: u64,
    pub(super) recorded: u64,
    pub(super) done: u64,
    /// The [time](NOW) at which the last record executed.
    pub(super) at: Option<u64>,
}

/// The source of a copy.
#[derive(Clone)]
pub(super) enum From {
    /// Device memory or pinned host memory, read when the copy executes.
    Address(u64),
    /// Pageable host memory, copied when the call was made.
    Bytes(Arc<[u8]>),
}

#[derive(Clone)]
pub(super) enum Op {
    Copy {
        to: u64,
        from: From,
        size: usize,
        pageable: bool,
    },
    Fill {
        to: u64,
        value: u8,
        size: usize,
    },
    Launch(Arc<Job>),
    Record {
        event: u64,
        turn: u64,
    },
    Wait {
        event: u64,
        turn: u64,
        stream: u64,
    },
    Graph(Arc<Vec<Op>>),
    /// A call of a library on top of the driver.
    Routine(Arc<Routine>),
    /// The stream reaches the allocation or the free of pool memory.
    Reach {
        address: u64,
        live: bool,
    },
}

/// The simulated time in microseconds, as events report it. Kernels and library calls take fixed
/// times, so that a program which chooses by timing makes the same choice each time.
static NOW: AtomicU64 = AtomicU64::new(0);

/// Serialises execution: one operation at a time, over all streams.
static TURN: Mutex<()> = Mutex::new(());

impl Driver {
    /// Looks up an event that is not destroyed.
    pub(super) fn event(&mut self, event: Handle) -> Result<&mut Event, u32> {
        self.events.get_mut(&(event as u64)).filter(|event| event.alive).ok_or(code::INVALID_HANDLE)
    }

    /// Refuses a call that is illegal during a capture, if this thread captures or another thread
    /// captures in global mode. Invalidates those captures.
    pub(super) fn uncaptured(&mut self) -> Done {
        let own = thread::current().id();
        let captures = self.streams.values_mut().filter_map(|stream| stream.capture.as_mut());
        // 0 is global mode, 1 is thread-local, 2 is relaxed.
        let heeded = captures.filter(|capture| match capture.mode {
            0 => true,
            1 => capture.thread == own,
            _ => false,
        });
        let broken = heeded.map(|capture| capture.broken = true).count();
        if broken == 0 { Ok(()) } else { Err(code::STREAM_CAPTURE_UNSUPPORTED) }
    }

    /// Refuses a call on a stream that captures, and invalidates the capture.
    pub(super) fn uncaptured_stream(&mut self, stream: Handle) -> Done {
        self.stream(stream)?;
        match self.streams.get_mut(&(stream as u64)).and_then(|stream| stream.capture.as_mut()) {
            None => Ok(()),
            Some(capture) => {
                capture.broken = true;
                Err(code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Whether a queued operation reads or writes an allocation.
    pub(super) fn is_used(&self, start: u64, end: u64) -> bool {
        let within = |address: u64| (start..end).contains(&address);
        let uses = |op: &Op| match op {
            Op::Copy { to, from: From::Address(from), .. } => within(*to) || within(*from),
            Op::Copy { to, .. } => within(*to),
            Op::Routine(routine) => routine.memory.iter().any(|(address, _)| within(*address)),
            _ => false,
        };
        self.streams.values().flat_map(|stream| &stream.queue).any(uses)
    }

    fn fails(&mut self, fault: &Fault) -> u32 {
        eprintln!("CUDA emulator: error {}: {}", fault.code, fault.message);
        self.sticky = fault.code;
        fault.code
    }
}

/// Queues an operation on a stream. The default streams execute it at once.
pub(super) fn ask(mut driver: Guard, stream: Handle, op: Op) -> Done {
    driver.stream(stream)?;
    let Some(stream) = driver.streams.get_mut(&(stream as u64)) else {
        // A default stream first waits for all blocking streams, as CUDA defines it.
        driver.uncaptured()?;
        drop(driver);
        finish_streams(|stream| stream.blocking)?;
        // Only after `finish_streams`, which takes the turn itself.
        let _turn = TURN.lock();
        return perform(op);
    };
    match &mut stream.capture {
        None => stream.queue.push_back(op),
        Some(capture) if capture.broken => return Err(code::STREAM_CAPTURE_INVALIDATED),
        Some(capture) => capture.ops.push(op),
    }
    Ok(())
}

/// Executes all that a stream has queued.
pub(super) fn finish(stream: u64) -> Done {
    let _turn = TURN.lock();
    drain(stream, None)
}

/// Executes all that the selected streams have queued.
pub(super) fn finish_streams(which: impl Fn(&Stream) -> bool) -> Done {
    let all = DRIVER.lock();
    let found: Vec<u64> =
        all.streams.iter().filter(|(_, stream)| which(stream)).map(|(key, _)| *key).collect();
    drop(all);
    found.into_iter().try_for_each(finish)
}

/// Executes what must precede a record of an event.
pub(super) fn finish_event(stream: u64, event: u64, turn: u64) -> Done {
    let _turn = TURN.lock();
    drain(stream, Some((event, turn)))
}

/// Executes a stream's queue, until an event's record number `turn` was executed or the queue is
/// empty.
fn drain(stream: u64, until: Option<(u64, u64)>) -> Done {
    loop {
        let mut driver = DRIVER.lock();
        if driver.sticky != 0 {
            return Err(driver.sticky);
        }
        let reached =
            |(event, turn)| driver.events.get(&event).is_none_or(|event: &Event| event.done >= turn);
        if until.is_some_and(reached) {
            return Ok(());
        }
        let next = driver.streams.get_mut(&stream).and_then(|stream| stream.queue.pop_front());
        let Some(op) = next else { return Ok(()) };
        // Unlocked, because the operation may lock the driver itself and drain other streams.
        drop(driver);
        perform(op)?;
    }
}

/// Raises a fault unless `size` bytes at `address` are live.
pub(super) fn held(address: u64, size: usize, what: &str) -> Done {
    let mut driver = DRIVER.lock();
    if size == 0 || driver.memory.is_live(address, size as u64) {
        return Ok(());
    }
    let fault = Fault::new(code::ILLEGAL_ADDRESS, format!("{what} of {size} bytes at {address:#x}"));
    Err(driver.fails(&fault))
}

/// Puts the context into its error state.
pub(super) fn fails(fault: &Fault) -> u32 {
    DRIVER.lock().fails(fault)
}

fn perform(op: Op) -> Done {
    match op {
        Op::Copy { to, from, size, pageable } => {
            if !pageable {
                held(to, size, "a copy")?;
            }
            match from {
                From::Address(from) => {
                    held(from, size, "a copy")?;
                    copy(to, from, size)
                }
                From::Bytes(bytes) => copy(to, bytes.as_ptr() as u64, size),
            }
        }
        Op::Fill { to, value, size } => {
            held(to, size, "a fill")?;
            // SAFETY: `held` checked that `size` bytes at `to` are live.
            unsafe { (to as *mut u8).write_bytes(value, size) };
            Ok(())
        }
        Op::Launch(job) => {
            let driver = DRIVER.lock();
            let loaded = driver.modules.contains_key(&job.module);
            let table = driver.memory.table();
            drop(driver);
            let unloaded = || Fault::new(code::LAUNCH_FAILED, "a launch of a module that was unloaded");
            let done = if loaded { execute(&job, table) } else { Err(unloaded()) };
            let steps = done.map_err(|fault| DRIVER.lock().fails(&fault))?;
            NOW.fetch_add(steps * setting("ORT_CUDA_EMULATOR_STEP_TIME", 1), Ordering::Relaxed);
            Ok(())
        }
        Op::Record { event, turn } => {
            if let Some(event) = DRIVER.lock().events.get_mut(&event) {
                (event.done, event.at) = (event.done.max(turn), Some(NOW.load(Ordering::Relaxed)));
            }
            Ok(())
        }
        // The turn is taken already, so this drains the other stream without `finish_event`.
        Op::Wait { event, turn, stream } => drain(stream, Some((event, turn))),
        Op::Reach { address, live } => {
            DRIVER.lock().memory.reach(address, live);
            Ok(())
        }
        Op::Graph(ops) => ops.iter().cloned().try_for_each(perform),
        Op::Routine(routine) => {
            NOW.fetch_add(routine.time, Ordering::Relaxed);
            perform_routine(&routine)
        }
    }
}
