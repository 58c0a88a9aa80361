//! What a device is asked for, in the order of the calls: launches and copies on the compute
//! stream, copies between host and device on streams of their own where the options say so, and
//! sequences that come again as CUDA graphs.

use std::sync::Arc;

use ort_core::{Error, Result};
use parking_lot::Mutex;

use crate::driver::{Call, Context, Counters, Counts, Event, Pool, Stream};
use crate::graphs::Graphs;
use crate::provider::Options;
use crate::staging::Staging;
use crate::stopwatch::Stopwatch;
use crate::uploads::Uploads;
use crate::uses::Uses;

/// Calls that one graph has at most.
const MOST_RECORDED: usize = 8192;

/// The streams of one device.
pub(crate) struct Queue {
    order: Mutex<Order>,
    staging: Staging,
    /// None where copies go through the compute stream.
    copies: Option<Copies>,
    compute: Stream,
    context: Arc<Context>,
}

/// The streams of copies between host and device, and what they wait for.
struct Copies {
    up: Stream,
    down: Stream,
    computed: Event,
}

/// What is changed while the order of calls is decided.
struct Order {
    /// Where they are asked for: calls wait in `recorded` then, until somebody waits for them or
    /// the host writes to their memory.
    graphs: Option<Graphs>,
    recorded: Vec<Call>,
    /// What the compute stream does not wait for yet.
    uploads: Uploads<Event>,
    uses: Uses,
    /// What nobody was told yet.
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
            uses: Uses::default(),
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

    /// Asks for a call after all that was asked for before.
    pub(crate) fn ask(&self, call: Call) -> Result<()> {
        let mut order = self.order.lock();
        if self.copies.is_some() {
            order.uses.call(&call.memory());
        }
        if order.graphs.is_none() {
            self.compute_after_uploads(&mut order, |address, bytes| call.touches(address, bytes))?;
            return self.issue(&call);
        }
        self.context.check_present()?;
        order.recorded.push(call);
        if order.recorded.len() >= MOST_RECORDED { self.flush(&mut order) } else { Ok(()) }
    }

    /// Milliseconds of each of several sequences of calls that do the same, after all that was
    /// asked for before; none of one that the device cannot do. They are done over and over.
    pub(crate) fn time(&self, ways: &[Vec<Call>]) -> Result<Vec<Option<f32>>> {
        let mut order = self.order.lock();
        self.flush(&mut order)?;
        self.compute_after_uploads(&mut order, |_, _| true)?;
        if self.copies.is_some() {
            ways.iter().flatten().for_each(|call| order.uses.call(&call.memory()));
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
                self.context.check_present().map(|()| None)
            }
        };
        ways.iter().map(&mut time).collect()
    }

    /// Copies bytes to the device after all that was asked for before. They may be changed when it
    /// returns.
    pub(crate) fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        let stream = self.stream_for_upload(to, from.len())?;
        let sent = self.staging.upload(from, to, stream);
        let Some(copies) = &self.copies else { return sent };
        let mut order = self.order.lock();
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
        // Before recorded calls that have nothing to do with the memory it is as good as after
        // them, and they stay together.
        if order.recorded.iter().any(|call| call.touches(to, bytes as u64)) {
            self.flush(&mut order)?;
        }
        let Some(copies) = &self.copies else { return Ok(&self.compute) };
        if order.uses.is_busy(to, bytes as u64) {
            copies.computed.record(&self.compute)?;
            copies.up.wait_for(&copies.computed)?;
        }
        Ok(&copies.up)
    }

    /// Copies bytes from the device, after all that was asked for before.
    pub(crate) fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        let (stream, last) = self.stream_for_download()?;
        self.staging.download(from, to, stream)?;
        self.order.lock().uses.end(last);
        Ok(())
    }

    fn stream_for_download(&self) -> Result<(&Stream, u64)> {
        let mut order = self.order.lock();
        self.flush(&mut order)?;
        self.compute_after_uploads(&mut order, |_, _| true)?;
        let last = order.uses.last();
        let Some(copies) = &self.copies else { return Ok((&self.compute, last)) };
        copies.computed.record(&self.compute)?;
        copies.down.wait_for(&copies.computed)?;
        Ok((&copies.down, last))
    }

    /// Waits for all that was asked for.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let last = {
            let mut order = self.order.lock();
            self.flush(&mut order)?;
            self.compute_after_uploads(&mut order, |_, _| true)?;
            order.uses.last()
        };
        self.compute.synchronize()?;
        self.order.lock().uses.end(last);
        Ok(())
    }

    /// Sees to it that all that was asked for gets to the device. The next call tells what went
    /// wrong.
    pub(crate) fn end_of_run(&self) {
        let mut order = self.order.lock();
        if let Err(problem) = self.submit(&mut order) {
            order.failed.get_or_insert(problem);
        }
    }

    /// Waits for all that was asked for. The next call tells what went wrong.
    pub(crate) fn settle(&self) {
        self.end_of_run();
        if let Err(problem) = self.synchronize() {
            self.order.lock().failed.get_or_insert(problem);
        }
    }

    /// Sees to it that nothing refers to modules any more but what the device was given already.
    pub(crate) fn close(&self) {
        self.end_of_run();
        self.order.lock().graphs.iter_mut().for_each(Graphs::clear);
    }

    /// The address of new memory.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        let address = self.context.allocate(bytes)?;
        if self.copies.is_some() {
            self.order.lock().uses.add(address, bytes);
        }
        Ok(address)
    }

    /// Gives memory back, once what uses it is done.
    pub(crate) fn free(&self, address: u64) {
        self.end_of_run();
        self.order.lock().uses.remove(address);
        self.context.free(address);
    }

    /// The address of new memory of a pool, which is there for what is asked for from here on.
    pub(crate) fn allocate_in(&self, pool: &Pool, bytes: usize) -> Result<u64> {
        let mut order = self.order.lock();
        let address = pool.allocate(bytes, &self.compute)?;
        if self.copies.is_some() {
            // An upload on a stream of its own waits until the compute stream has got there.
            order.uses.add(address, bytes);
            order.uses.call(&[(address, bytes as u64)]);
        }
        Ok(address)
    }

    /// Gives memory of a pool back, after all that was asked for.
    pub(crate) fn free_in(&self, pool: &Pool, address: u64, bytes: usize) {
        self.end_of_run();
        let mut order = self.order.lock();
        let is_its = |start: u64, len: u64| start < address + bytes as u64 && address < start + len;
        if let Err(problem) = self.compute_after_uploads(&mut order, is_its) {
            order.failed.get_or_insert(problem);
        }
        order.uses.remove(address);
        pool.free(address, &self.compute);
    }

    /// Gives the recorded calls to the compute stream, unless there is something to tell.
    fn flush(&self, order: &mut Order) -> Result<()> {
        order.failed.take().map_or(Ok(()), Err)?;
        self.submit(order)
    }

    /// Gives the recorded calls to the compute stream, as a graph where there is one.
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
        // The vector serves the next ones.
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

    /// Lets the compute stream wait for the uploads to the memory that is told, and for no later
    /// ones.
    fn compute_after_uploads(&self, order: &mut Order, of: impl Fn(u64, u64) -> bool) -> Result<()> {
        order.uploads.take(of, |event| self.compute.wait_for(event))
    }
}
