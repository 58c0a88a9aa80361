//! Text generation from tokens to tokens. Tokenizers and chat templates are Python's, in
//! `ort_runtime/generate`.

use std::cell::RefCell;
use std::path::PathBuf;

use ort_runtime::generate::{
    Constraint, ContextPlan, Decoder, DecoderOptions, EndReason, Event, GenerateOptions, ModelFolder,
    RequestId, Sampling, Scheduler, SchedulerOptions,
};
use ort_runtime::{Error, ErrorKind, Result as EngineResult};
use parking_lot::ReentrantMutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cancel::{attached, detached, with_interpreter};
use crate::error::{OrRaise, raised};

/// Options of a [`TextGenerator`], which Python writes as JSON.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenDecoder {
    model_file: Option<PathBuf>,
    memory_limit: Option<usize>,
    threads: Option<usize>,
    prefill_chunk: Option<usize>,
    cache: Option<PathBuf>,
    max_requests: Option<usize>,
    max_waiting: Option<usize>,
    kept_texts: usize,
}

/// Options of a request.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenRequest {
    max_tokens: usize,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    seed: u64,
    ignore_end: bool,
    context: Option<usize>,
}

impl GivenRequest {
    fn options(&self) -> GenerateOptions {
        GenerateOptions {
            max_tokens: self.max_tokens,
            sampling: Sampling {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                repetition_penalty: self.repetition_penalty,
            },
            seed: self.seed,
            ignore_end: self.ignore_end,
            context: self.context,
        }
    }
}

/// A token of a request, why it ended, or its error.
type Step = (u64, Option<u32>, Option<&'static str>, Option<PyErr>);

/// Runs requests of tokens together.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct TextGenerator {
    /// Constraints and finalizers run Python's code while a thread has the lock. If that code calls
    /// the generator, the cell is borrowed.
    scheduler: ReentrantMutex<RefCell<Scheduler>>,
    #[pyo3(get)]
    context_length: Option<usize>,
    #[pyo3(get)]
    end_tokens: Vec<u32>,
    #[pyo3(get)]
    vocabulary: usize,
}

impl TextGenerator {
    /// Calls the scheduler without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Scheduler) -> EngineResult<T> + Send,
    ) -> PyResult<T> {
        let called = detached(py, || {
            let scheduler = self.scheduler.lock();
            let mut scheduler = scheduler.try_borrow_mut().map_err(|_| {
                Error::new(ErrorKind::Fail, "a constraint calls the model whose answer it limits")
                    .help("compute the mask from the tokens that it accepted")
            })?;
            call(&mut scheduler)
        });
        called.or_raise(py)
    }
}

#[pymethods]
impl TextGenerator {
    #[new]
    fn new(py: Python<'_>, folder: PathBuf, options: &str) -> PyResult<TextGenerator> {
        let given: GivenDecoder = parse(options).or_raise(py)?;
        let made = detached(py, || -> EngineResult<TextGenerator> {
            let folder = ModelFolder::open(folder, given.model_file.as_deref())?;
            let decoder = Decoder::open(
                &folder,
                &DecoderOptions {
                    memory_limit: given.memory_limit,
                    threads: given.threads,
                    prefill_chunk: given.prefill_chunk,
                    cache: given.cache,
                },
            )?;
            let options = SchedulerOptions {
                max_requests: given.max_requests,
                max_waiting: given.max_waiting,
                kept_texts: given.kept_texts,
            };
            Ok(TextGenerator {
                context_length: decoder.longest_context(),
                end_tokens: decoder.end_tokens().to_vec(),
                vocabulary: decoder.vocabulary(),
                scheduler: ReentrantMutex::new(RefCell::new(Scheduler::new(decoder, options))),
            })
        });
        made.or_raise(py)
    }

    /// Adds a request and returns its number.
    fn submit(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        options: &str,
        constraint: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let options = parse::<GivenRequest>(options).or_raise(py)?.options();
        let constraint =
            constraint.map(|object| -> Box<dyn Constraint> { Box::new(PythonConstraint(Some(object))) });
        self.with(py, |scheduler| Ok(scheduler.submit(prompt, &options, constraint)?.0))
    }

    /// Runs one step of all requests.
    fn step(&self, py: Python<'_>) -> PyResult<Vec<Step>> {
        let events = self.with(py, Scheduler::step)?;
        let step = |event: Event| match event {
            Event::Token { request, token } => (request.0, Some(token), None, None),
            Event::End { request, reason } => {
                let reason = match reason {
                    EndReason::MaxTokens => "length",
                    EndReason::EndToken | EndReason::Stopped => "stop",
                };
                (request.0, None, Some(reason), None)
            }
            Event::Failed { request, problem } => (request.0, None, None, Some(raised(py, &problem))),
        };
        Ok(events.into_iter().map(step).collect())
    }

    fn cancel(&self, py: Python<'_>, request: u64) -> PyResult<()> {
        self.with(py, |scheduler| {
            scheduler.cancel(RequestId(request));
            Ok(())
        })
    }

    fn contains(&self, py: Python<'_>, request: u64) -> PyResult<bool> {
        self.with(py, |scheduler| Ok(scheduler.contains(RequestId(request))))
    }

    fn is_idle(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |scheduler| Ok(scheduler.is_idle()))
    }

    /// The requests that run, and those that wait.
    fn counts(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        self.with(py, |scheduler| Ok(scheduler.counts()))
    }

    fn most_requests(&self, py: Python<'_>, context: usize, most: usize) -> PyResult<usize> {
        self.with(py, |scheduler| scheduler.decoder().most_requests(context, most))
    }

    fn peak_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |scheduler| Ok(scheduler.decoder().peak_bytes()))
    }

    /// Prompt tokens and new tokens, the seconds for both, and the most requests of a step.
    fn timing(&self, py: Python<'_>) -> PyResult<(usize, usize, f64, f64, usize)> {
        let timing = self.with(py, |scheduler| Ok(scheduler.timing()))?;
        let seconds = (timing.prompt_time.as_secs_f64(), timing.new_time.as_secs_f64());
        Ok((timing.prompt_tokens, timing.new_tokens, seconds.0, seconds.1, timing.most_requests))
    }

    fn plan<'py>(&self, py: Python<'py>, context: usize, requests: usize) -> PyResult<Bound<'py, PyDict>> {
        let plan = self.with(py, |scheduler| scheduler.decoder().plan(context, requests))?;
        dict_of(py, &plan)
    }
}

fn dict_of<'py>(py: Python<'py>, plan: &ContextPlan) -> PyResult<Bound<'py, PyDict>> {
    let memory = plan.memory;
    let dict = PyDict::new(py);
    for (name, value) in [
        ("context", memory.context),
        ("requests", memory.requests),
        ("prefill_chunk", memory.chunk),
        ("cache_bytes", memory.caches),
        ("run_bytes", memory.run),
        ("input_bytes", memory.inputs),
        ("sampler_bytes", memory.sampler),
        ("total_bytes", memory.total()),
        ("room_bytes", plan.room),
        ("weights_mapped", plan.weights_mapped),
        ("weights_in_memory", plan.weights_in_memory),
    ] {
        dict.set_item(name, value)?;
    }
    dict.set_item("is_exact", memory.is_exact)?;
    dict.set_item("fits", plan.fits())?;
    dict.set_item("largest_context", plan.largest)?;
    dict.set_item("memory_limit", plan.limit)?;
    Ok(dict)
}

fn parse<'o, T: serde::Deserialize<'o>>(options: &'o str) -> EngineResult<T> {
    serde_json::from_str(options)
        .map_err(|problem| Error::new(ErrorKind::InvalidArgument, format!("{options}: {problem}")))
}

/// A constraint whose bit masks come from Python; `None` once it is dropped.
struct PythonConstraint(Option<Py<PyAny>>);

impl PythonConstraint {
    /// Calls the object, from a thread that gave the interpreter's lock away.
    fn call<T>(&self, call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> EngineResult<T> {
        let done = self.0.as_ref().and_then(|object| {
            // An exception is read and dropped with the lock.
            attached(|py| call(object.bind(py)).map_err(|problem| problem.to_string()))
        });
        match done {
            Some(Ok(result)) => Ok(result),
            Some(Err(problem)) => Err(Error::new(ErrorKind::Fail, format!("the constraint: {problem}"))),
            None => Err(Error::new(ErrorKind::Cancelled, "the interpreter has ended")),
        }
    }
}

impl Drop for PythonConstraint {
    fn drop(&mut self) {
        // A step drops it without the interpreter's lock, and the end of the generator with it.
        if let Some(object) = self.0.take() {
            with_interpreter(|py| object.drop_ref(py));
        }
    }
}

impl Constraint for PythonConstraint {
    fn mask(&mut self, logits: &mut [f32]) -> EngineResult<()> {
        let mask: Vec<u8> = self.call(|object| object.call_method0("mask")?.extract())?;
        for (index, logit) in logits.iter_mut().enumerate() {
            let is_allowed = mask.get(index / 8).is_some_and(|byte| (byte >> (index % 8)) & 1 == 1);
            if !is_allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> EngineResult<()> {
        self.call(|object| object.call_method1("accept", (token,)).map(drop))
    }
}
