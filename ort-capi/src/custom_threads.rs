//! Threads that a client makes: `OrtCustomCreateThreadFn` and `OrtCustomJoinThreadFn`.
//!
//! ONNX Runtime makes the threads of its pools with them. Here they are workers of the pool of the
//! process for as long as the session or the environment lives that has the functions. There are as
//! many as ONNX Runtime makes.

use std::ffi::c_void;
use std::sync::atomic::AtomicBool;

use ort_cpu_threads::parallel::Pool;

use crate::status::{Outcome, code, fail};

type Worker = unsafe extern "C" fn(*mut c_void);
pub(crate) type CreateFn = unsafe extern "C" fn(*mut c_void, Worker, *mut c_void) -> *const c_void;
pub(crate) type JoinFn = unsafe extern "C" fn(*const c_void);

/// The functions of a client, and the data that it gives the first one.
#[derive(Clone, Copy)]
pub(crate) struct ThreadFunctions {
    pub(crate) create: Option<CreateFn>,
    pub(crate) join: Option<JoinFn>,
    pub(crate) settings: *mut c_void,
}

// SAFETY: the header demands that functions and data stay valid for the life of what has them. They
// are called by one thread at a time, that which makes or releases it.
unsafe impl Send for ThreadFunctions {}
// SAFETY: as above.
unsafe impl Sync for ThreadFunctions {}

impl Default for ThreadFunctions {
    fn default() -> ThreadFunctions {
        ThreadFunctions { create: None, join: None, settings: std::ptr::null_mut() }
    }
}

/// The sizes of ONNX Runtime's pools, with the caller's thread.
#[derive(Clone, Copy)]
pub(crate) struct PoolSizes {
    /// Threads of one operator; 0 stands for all processors.
    pub(crate) intra: usize,
    /// Threads for operators side by side; 0 as above, and 1 for none.
    pub(crate) inter: usize,
}

impl PoolSizes {
    /// How many threads both pools make.
    fn threads(self) -> usize {
        let made = |size: usize| match size {
            0 => Pool::global().capacity() - 1,
            size => size - 1,
        };
        made(self.intra) + made(self.inter)
    }
}

/// Threads that a client made, which work for the pool until this is dropped.
pub(crate) struct ClientThreads {
    join: JoinFn,
    handles: Vec<*const c_void>,
    /// Each thread reads it. It has an address of its own, as the threads hold that.
    is_over: Box<AtomicBool>,
}

// SAFETY: a handle is only given back to the client, which made it for any thread.
unsafe impl Send for ClientThreads {}
// SAFETY: as above; shared access reads nothing.
unsafe impl Sync for ClientThreads {}

impl ThreadFunctions {
    /// Makes the threads. `None` if there is no function for it, or nothing to make.
    pub(crate) fn start(&self, sizes: PoolSizes) -> Outcome<Option<ClientThreads>> {
        let Some(create) = self.create else { return Ok(None) };
        let Some(join) = self.join else {
            return fail(code::RUNTIME_EXCEPTION, "custom join thread function not set".to_owned());
        };
        let mut threads =
            ClientThreads { join, handles: Vec::new(), is_over: Box::new(AtomicBool::new(false)) };
        let flag = (&raw const *threads.is_over).cast_mut().cast();
        for _ in 0..sizes.threads() {
            // SAFETY: the client's function gets the client's data. The flag lives until the client
            // has joined the thread, in `drop`.
            let handle = unsafe { create(self.settings, work, flag) };
            if handle.is_null() {
                let text = "custom_create_thread_fn returned invalid handle.";
                return fail(code::RUNTIME_EXCEPTION, text.to_owned());
            }
            threads.handles.push(handle);
        }
        Ok((!threads.handles.is_empty()).then_some(threads))
    }
}

/// What a thread of the client does.
extern "C" fn work(is_over: *mut c_void) {
    // SAFETY: `start` gave the client the address of its flag.
    let is_over = unsafe { &*is_over.cast::<AtomicBool>() };
    crate::entry::guarded_value(|| Pool::global().serve_until(is_over), ());
}

impl Drop for ClientThreads {
    fn drop(&mut self) {
        Pool::global().dismiss(&self.is_over);
        for handle in &self.handles {
            // SAFETY: the client made the thread, and joins it once.
            unsafe { (self.join)(*handle) };
        }
    }
}
