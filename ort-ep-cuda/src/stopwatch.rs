//! What sequences of calls take on the device, to choose between ways to do the same.

use std::sync::Arc;

use ort_core::Result;

use crate::driver::{Call, Context, Event, Graph, Stream};

/// Milliseconds of a burst: single calls of a few microseconds take as long as it takes to ask for
/// them.
const BURST: f32 = 0.5;
/// How often a sequence is done in a burst at most.
const MOST_REPEATS: usize = 16;
/// Bursts, of which the shortest counts: clocks rise, and others use the device.
const BURSTS: usize = 3;
/// How many times as long as another one a sequence may take, and the milliseconds that it may have
/// waited for the host, before it is timed only once.
const HOPELESS: f32 = 4.0;
const LATE: f32 = 0.2;

/// Times sequences on the stream that computes, as runs ask for them: where they replay graphs, in
/// a graph.
pub(crate) struct Stopwatch<'a> {
    compute: &'a Stream,
    captures: Option<&'a Stream>,
    start: Event,
    end: Event,
}

impl<'a> Stopwatch<'a> {
    /// With the stream that captures, where runs replay graphs.
    pub(crate) fn new(
        context: &Arc<Context>,
        compute: &'a Stream,
        captures: Option<&'a Stream>,
    ) -> Result<Stopwatch<'a>> {
        Ok(Stopwatch { compute, captures, start: Event::timed(context)?, end: Event::timed(context)? })
    }

    /// Milliseconds of a sequence, where another one takes `least`.
    pub(crate) fn time(&self, calls: &[Call], least: f32) -> Result<f32> {
        let ask = |calls: &[Call]| calls.iter().try_for_each(|call| self.compute.ask(call));
        // The driver loads code when it is first called.
        self.measure(&|| ask(calls))?;
        let once = self.measure(&|| ask(calls))?;
        if once > HOPELESS * least + LATE {
            return Ok(once);
        }
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

    /// Milliseconds of what is asked for.
    fn measure(&self, ask: &dyn Fn() -> Result<()>) -> Result<f32> {
        self.start.record(self.compute)?;
        ask()?;
        self.end.record(self.compute)?;
        self.end.wait()?;
        self.end.since(&self.start)
    }
}
