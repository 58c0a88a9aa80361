//! Streams, what is asked of them, and the events by which one waits for another.

use std::ffi::c_void;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use ort_core::{Result, error};
use smallvec::SmallVec;

use super::context::Counts;
use super::{Context, Function};

/// A launch with its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Launched {
    function: Function,
    grid: [u32; 3],
    block: [u32; 3],
    /// Bytes of a block's memory beside those that the function declares.
    shared: u32,
    /// All parameters; each begins with a word.
    words: SmallVec<[u64; 20]>,
    /// Where each begins.
    starts: SmallVec<[u32; 12]>,
    /// Address and length of each tensor.
    tensors: SmallVec<[(u64, u64); 4]>,
}

impl Launched {
    /// A launch of a function that is of a loaded module, without parameters yet.
    pub(crate) fn new(function: Function, [grid, block]: [[u32; 3]; 2], shared: u32) -> Launched {
        let (words, starts, tensors) = (SmallVec::new(), SmallVec::new(), SmallVec::new());
        Launched { function, grid, block, shared, words, starts, tensors }
    }

    /// With the address of a tensor of so many bytes as the next parameter.
    pub(crate) fn tensor(&mut self, address: u64, bytes: usize) {
        self.tensors.push((address, bytes as u64));
        self.bytes(&address.to_ne_bytes());
    }

    /// With the map of a tensor as the next parameter: its address, its bytes.
    pub(crate) fn map(&mut self, map: [u64; 16], address: u64, bytes: usize) {
        self.tensors.push((address, bytes as u64));
        self.starts.push(self.words.len() as u32);
        self.words.extend(map);
    }

    /// With some bytes as the next parameter.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.starts.push(self.words.len() as u32);
        // In words, so that whatever is in it begins where the device expects it.
        self.words.extend(bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            u64::from_ne_bytes(word)
        }));
    }
}

/// A stream as NVIDIA's libraries take it.
pub(crate) type RawStream = *mut c_void;

/// Something that a library over the driver does with tensors on the device.
pub(crate) trait Routine: Send + Sync {
    /// What it is called in profiles.
    fn name(&self) -> String;

    /// Whether there are other ways to do the same, of which the fastest is to be found by trying.
    fn has_rivals(&self) -> bool {
        false
    }

    /// Asks a stream for it, whose context is current, with the address and the bytes of each of
    /// its tensors; zeros for one that is left out.
    fn ask(&self, stream: RawStream, tensors: &[(u64, u64)]) -> Result<()>;
}

impl fmt::Debug for dyn Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// A routine with its tensors.
#[derive(Clone, Debug)]
pub(crate) struct Routed {
    pub(crate) routine: Arc<dyn Routine>,
    pub(crate) tensors: SmallVec<[(u64, u64); 6]>,
}

impl Routed {
    /// What tells routines apart: each is made for one node and its shapes, and kept as long as
    /// somebody compares with it.
    fn identity(&self) -> *const () {
        Arc::as_ptr(&self.routine).cast()
    }
}

impl PartialEq for Routed {
    fn eq(&self, other: &Routed) -> bool {
        self.identity() == other.identity() && self.tensors == other.tensors
    }
}

impl Eq for Routed {}

impl Hash for Routed {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
        self.tensors.hash(state);
    }
}

/// What is asked of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    /// A kernel is launched.
    Launch(Box<Launched>),
    /// A library is called.
    Routine(Box<Routed>),
    /// Bytes are copied within the device's memory.
    Copy { from: u64, to: u64, bytes: u64 },
}

impl Call {
    /// Address and length of all memory that it reads or writes.
    pub(crate) fn memory(&self) -> SmallVec<[(u64, u64); 4]> {
        match self {
            Call::Launch(launched) => launched.tensors.clone(),
            Call::Routine(routed) => routed.tensors.iter().copied().collect(),
            Call::Copy { from, to, bytes } => SmallVec::from_slice(&[(*from, *bytes), (*to, *bytes)]),
        }
    }

    /// Whether it reads or writes some of so many bytes.
    pub(crate) fn touches(&self, address: u64, bytes: u64) -> bool {
        self.memory().iter().any(|(from, len)| address < from + len && *from < address + bytes)
    }
}

/// A stream: what is asked of it is done in the order of the calls.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) stream: sys::CUstream,
    is_own: bool,
}

// SAFETY: as for the context.
unsafe impl Send for Stream {}
// SAFETY: as for the context.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream, which waits for no other of itself.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Stream> {
        context.enter()?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle, which is destroyed when the stream is dropped.
        context.check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "cuStreamCreate")?;
        Ok(Stream { context: context.clone(), stream, is_own: true })
    }

    /// The stream of the caller's at this address. It is never destroyed here.
    pub(crate) fn of_user(context: &Arc<Context>, address: usize) -> Result<Stream> {
        context.enter()?;
        let stream: sys::CUstream = ptr::with_exposed_provenance_mut(address);
        let mut own = ptr::null_mut();
        // SAFETY: that this is a stream is what the caller says who gives its address.
        context.check(unsafe { sys::cuStreamGetCtx(stream, &mut own) }, "cuStreamGetCtx")?;
        if !context.is(own) {
            return Err(error!(InvalidArgument, "user_compute_stream {address:#x} is of another context")
                .help("create the stream in the primary context of the device that device_id names"));
        }
        Ok(Stream { context: context.clone(), stream, is_own: false })
    }

    /// Asks for a call. The modules of its function must stay loaded until it is done.
    pub(crate) fn ask(&self, call: &Call) -> Result<()> {
        match call {
            Call::Launch(launched) => self.launch(launched),
            Call::Routine(routed) => {
                self.context.enter()?;
                routed.routine.ask(self.stream.cast(), &routed.tensors)
            }
            Call::Copy { from, to, bytes } => {
                self.context.enter()?;
                // SAFETY: both lie in live memory of this context, which the driver checks.
                let code = unsafe { sys::cuMemcpyDtoDAsync_v2(*to, *from, *bytes as usize, self.stream) };
                self.context.check(code, "cuMemcpyDtoD")
            }
        }
    }

    fn launch(&self, launched: &Launched) -> Result<()> {
        self.context.enter()?;
        let words = launched.words.as_slice();
        let from = |start: &u32| words.get(*start as usize..).filter(|rest| !rest.is_empty());
        let address = |start: &u32| from(start).map(<[u64]>::as_ptr);
        let addresses = launched.starts.iter().map(address);
        let addresses: Option<SmallVec<[*const u64; 16]>> = addresses.collect();
        let mut addresses = addresses.ok_or_else(|| error!(Fail, "a parameter of no bytes"))?;
        let ([gx, gy, gz], [bx, by, bz]) = (launched.grid, launched.block);
        // SAFETY: the function is of a module that its caller keeps loaded, and takes these
        // parameters, which the driver copies before it returns. That the kernel stays within its
        // tensors follows from its code.
        let code = unsafe {
            sys::cuLaunchKernel(
                launched.function.0,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                launched.shared,
                self.stream,
                addresses.as_mut_ptr().cast::<*mut c_void>(),
                ptr::null_mut(),
            )
        };
        self.context.check(code, "cuLaunchKernel")
    }

    /// Lets what is asked of it from here on wait for what an event stands for.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        self.context.enter()?;
        // SAFETY: both are live; there are no flags.
        self.context
            .check(unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) }, "cuStreamWaitEvent")
    }

    /// Waits for all that was asked for.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.context.enter()?;
        Counts::add(&self.context.counts.waits);
        // SAFETY: the stream is live.
        self.context.check(unsafe { sys::cuStreamSynchronize(self.stream) }, "cuStreamSynchronize")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_own && self.context.enter().is_ok() {
            // SAFETY: the stream is live, and nobody uses it any more.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// What a stream had been asked for when the event was last recorded in it.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: as for the context.
unsafe impl Send for Event {}
// SAFETY: as for the context.
unsafe impl Sync for Event {}

impl Event {
    /// An event that stands for nothing yet: nobody waits for it.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    /// An event that also tells when the device got to it.
    pub(crate) fn timed(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags_enum::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Arc<Context>, flags: sys::CUevent_flags_enum) -> Result<Event> {
        context.enter()?;
        let (mut event, flags) = (ptr::null_mut(), flags as u32);
        // SAFETY: writes one handle, which is destroyed when the event is dropped.
        context.check(unsafe { sys::cuEventCreate(&mut event, flags) }, "cuEventCreate")?;
        Ok(Event { context: context.clone(), event })
    }

    /// Lets it stand for all that a stream was asked for so far. Who waits for it already waits for
    /// what it stood for then.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        self.context.enter()?;
        // SAFETY: both are live, and of one context.
        self.context.check(unsafe { sys::cuEventRecord(self.event, stream.stream) }, "cuEventRecord")
    }

    /// Waits until it is done.
    pub(crate) fn wait(&self) -> Result<()> {
        self.context.enter()?;
        Counts::add(&self.context.counts.waits);
        // SAFETY: the event is live.
        self.context.check(unsafe { sys::cuEventSynchronize(self.event) }, "cuEventSynchronize")
    }

    /// Milliseconds from an earlier event to this one, both [timed](Self::timed) and waited for.
    pub(crate) fn since(&self, start: &Event) -> Result<f32> {
        self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are live; writes one number.
        let code = unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.event, self.event) };
        self.context.check(code, "cuEventElapsedTime").map(|()| milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the event is live, and nobody uses it any more; who waits for it still does.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
