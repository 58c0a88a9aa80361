//! Streams, the calls submitted to them, and the events by which one stream waits for another.

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

/// A kernel launch with its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Launched {
    function: Function,
    grid: [u32; 3],
    block: [u32; 3],
    /// Bytes of dynamic shared memory.
    shared: u32,
    /// All parameters, each starting at a word boundary.
    words: SmallVec<[u64; 20]>,
    /// The word at which each parameter starts.
    starts: SmallVec<[u32; 12]>,
    /// Address and length of each tensor, for hazard tracking.
    tensors: SmallVec<[(u64, u64); 4]>,
}

impl Launched {
    /// Creates a launch of a function of a loaded module, without parameters yet.
    pub(crate) fn new(function: Function, [grid, block]: [[u32; 3]; 2], shared: u32) -> Launched {
        let (words, starts, tensors) = (SmallVec::new(), SmallVec::new(), SmallVec::new());
        Launched { function, grid, block, shared, words, starts, tensors }
    }

    /// Appends a tensor's address as a parameter.
    pub(crate) fn tensor(&mut self, address: u64, bytes: usize) {
        self.tensors.push((address, bytes as u64));
        self.bytes(&address.to_ne_bytes());
    }

    /// Appends a tensor map as a parameter, for the tensor at this address.
    pub(crate) fn map(&mut self, map: [u64; 16], address: u64, bytes: usize) {
        self.tensors.push((address, bytes as u64));
        self.starts.push(self.words.len() as u32);
        self.words.extend(map);
    }

    /// Appends raw bytes as a parameter.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.starts.push(self.words.len() as u32);
        // Stored as words, so that each parameter is aligned for any type the kernel declares.
        self.words.extend(bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            u64::from_ne_bytes(word)
        }));
    }
}

/// A stream handle as NVIDIA's libraries take it.
pub(crate) type RawStream = *mut c_void;

/// A library's operation on device tensors.
pub(crate) trait Routine: Send + Sync {
    /// The name shown in profiles.
    fn name(&self) -> String;

    /// Whether there are other implementations to time against this one.
    fn has_rivals(&self) -> bool {
        false
    }

    /// Enqueues the operation on a stream. The context is current, and `tensors` holds the address
    /// and bytes of each tensor, or zeros for one that is left out.
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
    /// The routine's identity: each is made for one node and its shapes. Comparing addresses is
    /// sound, because the `Arc` keeps the routine alive.
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

/// A call submitted to a stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    /// A kernel launch.
    Launch(Box<Launched>),
    /// A library call.
    Routine(Box<Routed>),
    /// A copy within the device's memory.
    Copy { from: u64, to: u64, bytes: u64 },
}

impl Call {
    /// Returns address and length of all memory that the call reads or writes.
    pub(crate) fn memory(&self) -> SmallVec<[(u64, u64); 4]> {
        match self {
            Call::Launch(launched) => launched.tensors.clone(),
            Call::Routine(routed) => routed.tensors.iter().copied().collect(),
            Call::Copy { from, to, bytes } => SmallVec::from_slice(&[(*from, *bytes), (*to, *bytes)]),
        }
    }

    /// Whether the call may read or write any byte of a range.
    pub(crate) fn touches(&self, address: u64, bytes: u64) -> bool {
        self.memory().iter().any(|(from, len)| address < from + len && *from < address + bytes)
    }
}

/// A stream: it executes its calls in submission order.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) stream: sys::CUstream,
    is_own: bool,
}

// SAFETY: driver handles may be used from any thread, as for `Context`.
unsafe impl Send for Stream {}
// SAFETY: as for `Context`.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream that does not synchronize implicitly with the default stream.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Stream> {
        context.enter()?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes one handle, which `Drop` destroys.
        context.check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "cuStreamCreate")?;
        Ok(Stream { context: context.clone(), stream, is_own: true })
    }

    /// Wraps the caller's stream at this address; `Drop` does not destroy it.
    pub(crate) fn of_user(context: &Arc<Context>, address: usize) -> Result<Stream> {
        context.enter()?;
        let stream: sys::CUstream = ptr::with_exposed_provenance_mut(address);
        let mut own = ptr::null_mut();
        // SAFETY: whoever sets `user_compute_stream` guarantees that the address is a live stream.
        context.check(unsafe { sys::cuStreamGetCtx(stream, &mut own) }, "cuStreamGetCtx")?;
        if !context.is(own) {
            return Err(error!(InvalidArgument, "user_compute_stream {address:#x} is of another context")
                .help("create the stream in the primary context of the device that device_id names"));
        }
        Ok(Stream { context: context.clone(), stream, is_own: false })
    }

    /// Submits a call. The module of its function must stay loaded until it is done.
    pub(crate) fn ask(&self, call: &Call) -> Result<()> {
        match call {
            Call::Launch(launched) => self.launch(launched),
            Call::Routine(routed) => {
                self.context.enter()?;
                routed.routine.ask(self.stream.cast(), &routed.tensors)
            }
            Call::Copy { from, to, bytes } => {
                self.context.enter()?;
                // SAFETY: source and target are live memory of this context, which the driver
                // checks.
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
        // SAFETY: `ask` requires its caller to keep the function's module loaded. The kernel takes
        // these parameters, which the driver copies before it returns, and its code keeps within
        // its tensors.
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

    /// Makes later calls of this stream wait for an event.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        self.context.enter()?;
        // SAFETY: stream and event are live; there are no flags.
        self.context
            .check(unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) }, "cuStreamWaitEvent")
    }

    /// Waits for all calls submitted so far.
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
            // SAFETY: the stream is live, and its only owner is being dropped.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// A point in a stream: the work submitted before the event was last recorded.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread, as for `Context`.
unsafe impl Send for Event {}
// SAFETY: as for `Context`.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event that was not recorded yet: waiting for it returns at once.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event that also takes the device time.
    pub(crate) fn timed(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags_enum::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Arc<Context>, flags: sys::CUevent_flags_enum) -> Result<Event> {
        context.enter()?;
        let (mut event, flags) = (ptr::null_mut(), flags as u32);
        // SAFETY: the driver writes one handle, which `Drop` destroys.
        context.check(unsafe { sys::cuEventCreate(&mut event, flags) }, "cuEventCreate")?;
        Ok(Event { context: context.clone(), event })
    }

    /// Records the event after all work submitted to a stream so far. Streams that already wait for
    /// it keep waiting for the earlier point.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        self.context.enter()?;
        // SAFETY: event and stream are live and belong to one context.
        self.context.check(unsafe { sys::cuEventRecord(self.event, stream.stream) }, "cuEventRecord")
    }

    /// Waits until the device has reached the event.
    pub(crate) fn wait(&self) -> Result<()> {
        self.context.enter()?;
        Counts::add(&self.context.counts.waits);
        // SAFETY: the event is live.
        self.context.check(unsafe { sys::cuEventSynchronize(self.event) }, "cuEventSynchronize")
    }

    /// Returns the milliseconds from an earlier event to this one; both are [timed](Self::timed)
    /// and waited for.
    pub(crate) fn since(&self, start: &Event) -> Result<f32> {
        self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; the driver writes one number.
        let code = unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.event, self.event) };
        self.context.check(code, "cuEventElapsedTime").map(|()| milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the event is live, and its only owner is being dropped; streams that wait for
            // it are unaffected.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
