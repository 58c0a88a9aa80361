//! What streams were asked for and have not done yet.
//!
//! A stream other than the default one does nothing until something orders it: a call that waits
//! for it, another stream that waits for an event of it, memory that is freed. What a program
//! forgets to wait for is therefore missing in its results, whatever the timing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use super::launch::{Job, execute};
use super::routine::{Routine, perform as perform_routine};
use super::{DRIVER, Done, Driver, Guard, Handle, copy, setting};
use crate::{Fault, code};

/// A stream of the program's.
pub(super) struct Stream {
    pub(super) context: u64,
    /// Whether it and the default stream wait for each other.
    pub(super) blocking: bool,
    pub(super) queue: VecDeque<Op>,
    pub(super) capture: Option<Capture>,
}

/// What is captured instead of being done.
pub(super) struct Capture {
    pub(super) thread: ThreadId,
    pub(super) mode: u32,
    pub(super) ops: Vec<Op>,
    /// Whether something was called that a capture does not outlive.
    pub(super) broken: bool,
}

/// An event, also one that is destroyed and somebody waits for still.
pub(super) struct Event {
    pub(super) alive: bool,
    /// The stream in which it was last recorded, how often it was, and what of that is done.
    pub(super) stream: u64,
    pub(super) recorded: u64,
    pub(super) done: u64,
    /// The [time](NOW) at which it was.
    pub(super) at: Option<u64>,
}

/// What a copy reads.
#[derive(Clone)]
pub(super) enum From {
    /// Memory of the device, or pinned memory of the host: as it is when the copy is done.
    Address(u64),
    /// Other memory of the host: as it was when the copy was asked for.
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
    /// A call of a library over the driver.
    Routine(Arc<Routine>),
    /// The stream comes to where a piece of a pool begins to be there, or ends.
    Reach {
        address: u64,
        live: bool,
    },
}

/// The microseconds that all that was done took, as events tell it: what a kernel and a library's
/// call take is laid down, so that a program that chooses by time chooses the same each time.
static NOW: AtomicU64 = AtomicU64::new(0);

/// One thing is done at a time.
static TURN: Mutex<()> = Mutex::new(());

impl Driver {
    /// A live event.
    pub(super) fn event(&mut self, event: Handle) -> Result<&mut Event, u32> {
        self.events.get_mut(&(event as u64)).filter(|event| event.alive).ok_or(code::INVALID_HANDLE)
    }

    /// Refuses what nothing may be called that captures: with a capture of this thread, or one that
    /// all threads must heed.
    pub(super) fn uncaptured(&mut self) -> Done {
        let own = thread::current().id();
        let captures = self.streams.values_mut().filter_map(|stream| stream.capture.as_mut());
        let heeded = captures.filter(|capture| match capture.mode {
            0 => true,
            1 => capture.thread == own,
            _ => false,
        });
        let broken = heeded.map(|capture| capture.broken = true).count();
        if broken == 0 { Ok(()) } else { Err(code::STREAM_CAPTURE_UNSUPPORTED) }
    }

    /// Refuses what cannot be asked of a stream that captures.
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

    /// Whether something that is not done yet reads or writes a piece.
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

/// Asks a stream for something, which the default ones do at once.
pub(super) fn ask(mut driver: Guard, stream: Handle, op: Op) -> Done {
    driver.stream(stream)?;
    let Some(stream) = driver.streams.get_mut(&(stream as u64)) else {
        driver.uncaptured()?;
        drop(driver);
        finish_streams(|stream| stream.blocking)?;
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

/// Does all that a stream was asked for.
pub(super) fn finish(stream: u64) -> Done {
    let _turn = TURN.lock();
    drain(stream, None)
}

/// Does all that some streams were asked for.
pub(super) fn finish_streams(which: impl Fn(&Stream) -> bool) -> Done {
    let all = DRIVER.lock();
    let found: Vec<u64> =
        all.streams.iter().filter(|(_, stream)| which(stream)).map(|(key, _)| *key).collect();
    drop(all);
    found.into_iter().try_for_each(finish)
}

/// Does what an event stands for.
pub(super) fn finish_event(stream: u64, event: u64, turn: u64) -> Done {
    let _turn = TURN.lock();
    drain(stream, Some((event, turn)))
}

/// Does what a stream was asked for, until an event was recorded so often.
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
        drop(driver);
        perform(op)?;
    }
}

/// A fault unless so much memory is there.
pub(super) fn held(address: u64, size: usize, what: &str) -> Done {
    let mut driver = DRIVER.lock();
    if size == 0 || driver.memory.is_live(address, size as u64) {
        return Ok(());
    }
    let fault = Fault::new(code::ILLEGAL_ADDRESS, format!("{what} of {size} bytes at {address:#x}"));
    Err(driver.fails(&fault))
}

/// Breaks the context with a fault.
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
            // SAFETY: the place was looked up.
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
