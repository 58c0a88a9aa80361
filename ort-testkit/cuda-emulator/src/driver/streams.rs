//! Streams, stream-ordered copies, events and graphs.

use std::ffi::c_void;
use std::sync::Arc;
use std::thread;

use super::pools::waited;
use super::queue::{Capture, Event, From, Op, Stream, ask, finish, finish_event};
use super::{CONTEXTS, Done, Driver, Handle, copy, current, put};
use crate::code;

api! {
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, size: usize, stream: Handle) {
        let driver = current()?;
        driver.within(to, size)?;
        let from = source(&driver, from as u64, size)?;
        ask(driver, stream, Op::Copy { to, from, size, pageable: false })
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size: usize, stream: Handle) {
        let mut driver = current()?;
        driver.within(from, size)?;
        // Host memory that the driver did not allocate is pageable.
        let pageable = driver.within(to as u64, size).is_err();
        if pageable {
            driver.uncaptured_stream(stream)?;
        }
        ask(driver, stream, Op::Copy { to: to as u64, from: From::Address(from), size, pageable })?;
        // The driver cannot write pageable memory asynchronously, so the call waits.
        if pageable { finish(stream as u64) } else { Ok(()) }
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: Handle) {
        let driver = current()?;
        driver.within(from, size)?;
        driver.within(to, size)?;
        ask(driver, stream, Op::Copy { to, from: From::Address(from), size, pageable: false })
    }
    fn cuMemsetD8Async(to: u64, value: u8, size: usize, stream: Handle) {
        let driver = current()?;
        driver.within(to, size)?;
        ask(driver, stream, Op::Fill { to, value, size })
    }
    fn cuStreamCreate(stream: *mut Handle, flags: u32) {
        let mut driver = current()?;
        let handle = driver.handle();
        let context = CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(0));
        // Bit 0 is `CU_STREAM_NON_BLOCKING`.
        let made = Stream { context, blocking: flags & 1 == 0, queue: Default::default(), capture: None };
        driver.streams.insert(handle, made);
        put(stream, handle as Handle)
    }
    fn cuStreamDestroy_v2(stream: Handle) {
        let mut driver = current()?;
        if !driver.streams.contains_key(&(stream as u64)) {
            return Err(code::INVALID_HANDLE);
        }
        driver.uncaptured_stream(stream)?;
        drop(driver);
        finish(stream as u64)?;
        current()?.streams.remove(&(stream as u64)).map(drop).ok_or(code::INVALID_HANDLE)
    }
    fn cuStreamGetCtx(stream: Handle, context: *mut Handle) {
        let driver = current()?;
        driver.stream(stream)?;
        let own = CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(0));
        put(context, driver.streams.get(&(stream as u64)).map_or(own, |stream| stream.context) as Handle)
    }
    fn cuStreamSynchronize(stream: Handle) {
        current()?.uncaptured_stream(stream)?;
        waited(finish(stream as u64))
    }
    fn cuStreamQuery(stream: Handle) {
        // A query makes progress: it executes the queue and reports completion.
        current()?.uncaptured_stream(stream)?;
        finish(stream as u64)
    }
    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: u32) {
        let mut driver = current()?;
        let Event { recorded, stream: of, .. } = *driver.event(event)?;
        // We support neither captured events, nor a capture that depends on uncaptured work.
        driver.uncaptured_stream(stream).map_err(|_| code::STREAM_CAPTURE_ISOLATION)?;
        ask(driver, stream, Op::Wait { event: event as u64, turn: recorded, stream: of })
    }
    fn cuStreamBeginCapture_v2(stream: Handle, mode: u32) {
        let mut driver = current()?;
        driver.stream(stream)?;
        let captured = driver.streams.get_mut(&(stream as u64)).ok_or(code::STREAM_CAPTURE_UNSUPPORTED)?;
        if captured.capture.is_some() {
            return Err(code::ILLEGAL_STATE);
        }
        let thread = thread::current().id();
        captured.capture = Some(Capture { thread, mode, ops: Vec::new(), broken: false });
        Ok(())
    }
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) {
        let mut driver = current()?;
        put(graph, std::ptr::null_mut())?;
        let captured = driver.streams.get_mut(&(stream as u64)).ok_or(code::INVALID_HANDLE)?;
        let capture = captured.capture.as_ref().ok_or(code::ILLEGAL_STATE)?;
        if capture.mode != 2 && capture.thread != thread::current().id() {
            return Err(code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let Some(Capture { ops, broken: false, .. }) = captured.capture.take() else {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        };
        let handle = driver.handle();
        driver.graphs.insert(handle, Arc::new(ops));
        put(graph, handle as Handle)
    }
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, _flags: u64) {
        let mut driver = current()?;
        let ops = driver.graphs.get(&(graph as u64)).cloned().ok_or(code::INVALID_HANDLE)?;
        let handle = driver.handle();
        driver.executables.insert(handle, ops);
        put(executable, handle as Handle)
    }
    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        let driver = current()?;
        let ops = driver.executables.get(&(executable as u64)).cloned().ok_or(code::INVALID_HANDLE)?;
        ask(driver, stream, Op::Graph(ops))
    }
    fn cuGraphDestroy(graph: Handle) {
        current()?.graphs.remove(&(graph as u64)).map(drop).ok_or(code::INVALID_HANDLE)
    }
    fn cuGraphExecDestroy(executable: Handle) {
        current()?.executables.remove(&(executable as u64)).map(drop).ok_or(code::INVALID_HANDLE)
    }
    fn cuEventCreate(event: *mut Handle, _flags: u32) {
        let mut driver = current()?;
        let handle = driver.handle();
        driver.events.insert(handle, Event { alive: true, stream: 0, recorded: 0, done: 0, at: None });
        put(event, handle as Handle)
    }
    fn cuEventDestroy_v2(event: Handle) {
        current()?.event(event)?.alive = false;
        Ok(())
    }
    fn cuEventRecord(event: Handle, stream: Handle) {
        let mut driver = current()?;
        driver.event(event)?;
        driver.uncaptured_stream(stream)?;
        let known = driver.event(event)?;
        (known.stream, known.recorded) = (stream as u64, known.recorded + 1);
        let turn = known.recorded;
        ask(driver, stream, Op::Record { event: event as u64, turn })
    }
    fn cuEventSynchronize(event: Handle) {
        let Event { stream, recorded, .. } = *current()?.event(event)?;
        waited(finish_event(stream, event as u64, recorded))
    }
    fn cuEventQuery(event: Handle) {
        // A query makes progress: it executes the queue and reports completion.
        let Event { stream, recorded, .. } = *current()?.event(event)?;
        finish_event(stream, event as u64, recorded)
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        let mut driver = current()?;
        let start = driver.event(start)?.at.ok_or(code::INVALID_HANDLE)?;
        let end = driver.event(end)?.at.ok_or(code::INVALID_HANDLE)?;
        put(milliseconds, end.saturating_sub(start) as f32 / 1e3)
    }
}

/// The source of a copy from the host: pinned memory is read on execution, pageable memory now.
fn source(driver: &Driver, from: u64, size: usize) -> Result<From, u32> {
    if driver.within(from, size).is_ok() {
        return Ok(From::Address(from));
    }
    let mut bytes = vec![0u8; size];
    copy(bytes.as_mut_ptr() as u64, from, size)?;
    Ok(From::Bytes(bytes.into()))
}
