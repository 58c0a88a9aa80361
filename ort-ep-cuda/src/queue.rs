//! The command queue of a device. Launches and device copies go to the compute stream, in call
//! order. Host-device copies go there too, or to their own streams if the options say so. Repeated
//! sequences become CUDA graphs.

use std::sync::Arc;

use ort_core::{Error, Result};
use parking_lot::Mutex;

use crate::driver::{Call, Context, Counters, Counts, Event, Pool, Stream};
use crate::graphs::Graphs;
use crate::hazards::Hazards;
use crate::options::Options;
use crate::staging::Staging;
use crate::stopwatch::Stopwatch;
use crate::uploads::Uploads;

/// The most calls recorded for one graph.
const MOST_RECORDED: usize = 8192;

/// The streams of one device.
pub(crate) struct Queue {
    order: Mutex<Order>,
    staging: Staging,
    /// `None` if copies go through the compute stream.
    copies: Option<Copies>,
    compute: Stream,
    context: Arc<Context>,
}

/// The copy streams, and the event by which they wait for the compute stream.
struct Copies {
    up: Stream,
    down: Stream,
    computed: Event,
}

/// The state that the lock protects while the order of calls is decided.
struct Order {
    /// With graphs, calls wait in `recorded` until someone waits for them or the host writes to
    /// their memory.
    graphs: Option<Graphs>,
    recorded: Vec<Call>,
    /// Uploads that the compute stream does not wait for yet.
    uploads: Uploads<Event>,
    hazards: Hazards,
    /// An error not reported yet.
    failed: Option<Error>,
}

impl Queue {
    pub(crate) fn open(context: &Arc<Context>, options: &Options) -> Result<Queue> {
        let compute = match options.user_stream {
            Some(address) => Stream::of_user(context, address)?,
            None => Stream::new(context)?,
        };
        let copies = match options.separate_copies {
            true => Some(Copies {
                up: Stream::new(context)?,
                down: Stream::new(context)?,
                computed: Event::new(context)?,
            }),
            false => None,
        };
        let order = Order {
            graphs: options.graphs.then(|| Graphs::new(context)).transpose()?,
            recorded: Vec::new(),
            uploads: Uploads::default(),
            hazards: Hazards::default(),
            failed: None,
        };
        let (context, staging) = (context.clone(), Staging::new(context.clone()));
        Ok(Queue { order: Mutex::new(order), staging, copies, compute, context })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn counters(&self) -> Counters {
        self.context.counters()
    }

    /// Submits a call after all earlier ones.
    pub(crate) fn ask(&self, call: Call) -> Result<()> {
        let mut order = self.order.lock();
        if self.copies.is_some() {
            // Only copies on other streams can conflict with this call.
            order.hazards.call(&call.memory());
        }
        if order.graphs.is_none() {
            self.compute_after_uploads(&mut order, |address, bytes| call.touches(address, bytes))?;
            return self.issue(&call);
        }
        // A recorded call does not reach the driver now, so a broken context must be reported here.
        self.context.check_present()?;
        order.recorded.push(call);
        if order.recorded.len() >= MOST_RECORDED { self.flush(&mut order) } else { Ok(()) }
    }

    /// Times several equivalent call sequences, in milliseconds, after all earlier work; `None` for
    /// one that the device cannot run. Each runs many times.
    pub(crate) fn time(&self, ways: &[Vec<Call>]) -> Result<Vec<Option<f32>>> {
        // The lock is held throughout, so that no other call runs in between and distorts the
        // times.
        let mut order = self.order.lock();
        self.flush(&mut order)?;
        self.compute_after_uploads(&mut order, |_, _| true)?;
        if self.copies.is_some() {
            ways.iter().flatten().for_each(|call| order.hazards.call(&call.memory()));
        }
        let graphs = order.graphs.as_ref().map(Graphs::stream);
        let stopwatch = Stopwatch::new(&self.context, &self.compute, graphs)?;
        let mut least = f32::INFINITY;
        let mut time = |way: &Vec<Call>| match stopwatch.time(way, least) {
            Ok(time) => {
                least = least.min(time);
                Ok(Some(time))
            }
            Err(problem) => {
                tracing::debug!("not taken: {problem}");
                // A sequence that fails is only dropped, unless it broke the context.
                self.context.check_present().map(|()| None)
            }
        };
        ways.iter().map(&mut time).collect()
    }

    /// Copies bytes to the device after all earlier work. The caller may overwrite them when it
    /// returns.
    pub(crate) fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        let stream = self.stream_for_upload(to, from.len())?;
        // An error is returned only at the end: parts that were enqueued before it still need an
        // event.
        let sent = self.staging.upload(from, to, stream);
        let Some(copies) = &self.copies else { return sent };
        let mut order = self.order.lock();
        // The event list is full: make the compute stream wait for all of it, which frees its
        // events.
        if order.uploads.is_full() {
            self.compute_after_uploads(&mut order, |_, _| true)?;
        }
        let done = order.uploads.free_event().map_or_else(|| Event::new(&self.context), Ok)?;
        done.record(&copies.up)?;
        order.uploads.add(to, from.len() as u64, done);
        sent
    }

    fn stream_for_upload(&self, to: u64, bytes: usize) -> Result<&Stream> {
        let mut order = self.order.lock();
        // If no recorded call touches the memory, the upload may run ahead of them, and the
        // sequence stays whole for graph capture.
        if order.recorded.iter().any(|call| call.touches(to, bytes as u64)) {
            self.flush(&mut order)?;
        }
        let Some(copies) = &self.copies else { return Ok(&self.compute) };
        // Write-after-read and write-after-write hazards: only a pending call on this memory makes
        // the upload wait for the compute stream.
        if order.hazards.is_busy(to, bytes as u64) {
            copies.computed.record(&self.compute)?;
            copies.up.wait_for(&copies.computed)?;
        }
        Ok(&copies.up)
    }

    /// Copies bytes from the device after all earlier work.
    pub(crate) fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        let (stream, last) = self.stream_for_download()?;
        self.staging.download(from, to, stream)?;
        self.order.lock().hazards.end(last);
        Ok(())
    }

    fn stream_for_download(&self) -> Result<(&Stream, u64)> {
        let mut order = self.order.lock();
        // A download sees the results of all earlier calls, so it flushes everything and waits for
        // the compute stream.
        self.flush(&mut order)?;
        self.compute_after_uploads(&mut order, |_, _| true)?;
        let last = order.hazards.last();
        let Some(copies) = &self.copies else { return Ok((&self.compute, last)) };
        copies.computed.record(&self.compute)?;
        copies.down.wait_for(&copies.computed)?;
        Ok((&copies.down, last))
    }

    /// Waits for all submitted work.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let last = {
            let mut order = self.order.lock();
            self.flush(&mut order)?;
            self.compute_after_uploads(&mut order, |_, _| true)?;
            order.hazards.last()
        };
        self.compute.synchronize()?;
        self.order.lock().hazards.end(last);
        Ok(())
    }

    /// Submits all recorded work to the device. The next call reports an error.
    pub(crate) fn end_of_run(&self) {
        let mut order = self.order.lock();
        if let Err(problem) = self.submit(&mut order) {
            order.failed.get_or_insert(problem);
        }
    }

    /// Waits for all submitted work. The next call reports an error.
    pub(crate) fn settle(&self) {
        self.end_of_run();
        if let Err(problem) = self.synchronize() {
            self.order.lock().failed.get_or_insert(problem);
        }
    }

    /// Submits the recorded calls and drops the graphs, so that only work already on the device
    /// refers to modules.
    pub(crate) fn close(&self) {
        self.end_of_run();
        self.order.lock().graphs.iter_mut().for_each(Graphs::clear);
    }

    /// Allocates memory from the driver, and returns its address.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        let address = self.context.allocate(bytes)?;
        if self.copies.is_some() {
            self.order.lock().hazards.add(address, bytes);
        }
        Ok(address)
    }

    /// Frees memory once the work that uses it is done.
    pub(crate) fn free(&self, address: u64) {
        // A recorded call may use the memory, so it goes to the device first; freeing then waits
        // for it.
        self.end_of_run();
        self.order.lock().hazards.remove(address);
        self.context.free(address);
    }

    /// Allocates stream-ordered memory from a pool, for work submitted from here on.
    pub(crate) fn allocate_in(&self, pool: &Pool, bytes: usize) -> Result<u64> {
        let mut order = self.order.lock();
        let address = pool.allocate(bytes, &self.compute)?;
        if self.copies.is_some() {
            // The memory exists only once the compute stream reaches the allocation. We count it as
            // a call, so that an upload on another stream waits for it.
            order.hazards.add(address, bytes);
            order.hazards.call(&[(address, bytes as u64)]);
        }
        Ok(address)
    }

    /// Frees pool memory after all work submitted so far.
    pub(crate) fn free_in(&self, pool: &Pool, address: u64, bytes: usize) {
        self.end_of_run();
        let mut order = self.order.lock();
        let is_its = |start: u64, len: u64| start < address + bytes as u64 && address < start + len;
        if let Err(problem) = self.compute_after_uploads(&mut order, is_its) {
            order.failed.get_or_insert(problem);
        }
        order.hazards.remove(address);
        pool.free(address, &self.compute);
    }

    /// Submits the recorded calls, unless an earlier error is still to be reported.
    fn flush(&self, order: &mut Order) -> Result<()> {
        order.failed.take().map_or(Ok(()), Err)?;
        self.submit(order)
    }

    /// Submits the recorded calls to the compute stream, as a graph if there is one.
    fn submit(&self, order: &mut Order) -> Result<()> {
        if order.recorded.is_empty() {
            return Ok(());
        }
        let mut calls = std::mem::take(&mut order.recorded);
        let touched = |address, bytes| calls.iter().any(|call| call.touches(address, bytes));
        let done = self.compute_after_uploads(order, touched).and_then(|()| {
            match order.graphs.as_mut().and_then(|graphs| graphs.find(&calls)) {
                Some(graph) => graph.launch(&self.compute),
                None => calls.iter().try_for_each(|call| self.issue(call)),
            }
        });
        // Keep the vector's allocation for the next sequence.
        calls.clear();
        order.recorded = calls;
        done
    }

    fn issue(&self, call: &Call) -> Result<()> {
        match call {
            Call::Launch(_) => Counts::add(&self.context.counts.launches),
            Call::Routine(_) => Counts::add(&self.context.counts.routines),
            Call::Copy { .. } => {}
        }
        self.compute.ask(call)
    }

    /// Makes the compute stream wait for pending uploads to the selected memory, but not for later
    /// ones.
    fn compute_after_uploads(&self, order: &mut Order, of: impl Fn(u64, u64) -> bool) -> Result<()> {
        order.uploads.take(of, |event| self.compute.wait_for(event))
    }
}
