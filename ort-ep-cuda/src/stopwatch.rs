//! Device timing of call sequences, for autotuning.

use std::sync::Arc;

use ort_core::Result;

use crate::driver::{Call, Context, Event, Graph, Stream};

/// The target length of a burst in milliseconds. Timing a single kernel of a few microseconds would
/// measure the launch overhead.
const BURST: f32 = 0.5;
/// The most repetitions of a sequence in a burst.
const MOST_REPEATS: usize = 16;
/// The number of bursts, of which the shortest counts: clocks ramp up, and others use the device.
const BURSTS: usize = 3;
/// A candidate that takes more than this multiple of the best time, plus [`LATE`], is timed only
/// once.
const HOPELESS: f32 = 4.0;
/// Milliseconds of host delay that a first measurement may contain.
const LATE: f32 = 0.2;

/// Times sequences on the compute stream the way runs submit them: in a graph if runs replay
/// graphs.
pub(crate) struct Stopwatch<'a> {
    compute: &'a Stream,
    captures: Option<&'a Stream>,
    start: Event,
    end: Event,
}

impl<'a> Stopwatch<'a> {
    /// Creates a stopwatch; `captures` is the capture stream if runs replay graphs.
    pub(crate) fn new(
        context: &Arc<Context>,
        compute: &'a Stream,
        captures: Option<&'a Stream>,
    ) -> Result<Stopwatch<'a>> {
        Ok(Stopwatch { compute, captures, start: Event::timed(context)?, end: Event::timed(context)? })
    }

    /// Returns the milliseconds of a sequence; `least` is the best time so far.
    pub(crate) fn time(&self, calls: &[Call], least: f32) -> Result<f32> {
        let ask = |calls: &[Call]| calls.iter().try_for_each(|call| self.compute.ask(call));
        // A warm-up run: the driver loads code on the first call.
        self.measure(&|| ask(calls))?;
        let once = self.measure(&|| ask(calls))?;
        if once > HOPELESS * least + LATE {
            return Ok(once);
        }
        // Repeat short sequences until a burst is long enough to time.
        let repeats = ((BURST / once) as usize).clamp(1, MOST_REPEATS);
        let burst: Vec<Call> = std::iter::repeat_n(calls, repeats).flatten().cloned().collect();
        let graph = self.captures.map(|stream| Graph::capture(stream, &burst)).transpose()?;
        let mut shortest = f32::INFINITY;
        for _ in 0..BURSTS {
            let time = self.measure(&|| match &graph {
                Some(graph) => graph.launch(self.compute),
                None => ask(&burst),
            })?;
            shortest = shortest.min(time / repeats as f32);
        }
        Ok(shortest)
    }

    /// Returns the device time of the submitted work in milliseconds.
    fn measure(&self, ask: &dyn Fn() -> Result<()>) -> Result<f32> {
        self.start.record(self.compute)?;
        ask()?;
        self.end.record(self.compute)?;
        self.end.wait()?;
        self.end.since(&self.start)
    }
}
