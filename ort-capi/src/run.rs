//! `Run` and `RunAsync`.

use std::ffi::c_void;
use std::sync::Arc;

use ort_runtime::ep::CancelToken;
use ort_runtime::ir::ValueType;
use ort_runtime::onnxruntime::{TERMINATED, fit, of_tensor};
use ort_runtime::tensor::OptionalValue;
use ort_runtime::{DeviceId, Error, ErrorKind, IoBinding, RunOptions as EngineOptions, Value as EngineValue};
use ort_sys::OrtStatusPtr;
use smallvec::SmallVec;

use crate::bindings::{LentMemory, PortValues};
use crate::entry::{Array, ArrayMut, In, Object, Text, entries, guarded};
use crate::log::warn;
use crate::lora::Parameter;
use crate::profile::Profiling;
use crate::run_options::RunOptions;
use crate::session::{Port, Ports, Session};
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::value::{Numbers, Value};

/// The values of a run by the names of inputs.
type Inputs<'a> = SmallVec<[(&'a str, EngineValue); 4]>;

/// The places of the outputs asked for, with the value that the caller gives for each.
type Wanted<'a> = SmallVec<[(usize, Option<&'a Value>); 4]>;

/// What ends a run, and what it collects.
pub(crate) struct Control<'a> {
    options: Option<&'a RunOptions>,
    pub(crate) engine: EngineOptions<'a>,
}

impl<'a> Control<'a> {
    /// `own` collects the profile of this run alone.
    pub(crate) fn of(
        session: &'a Session,
        options: Option<&'a RunOptions>,
        own: Option<&'a Profiling>,
    ) -> Control<'a> {
        let cancel: CancelToken = match options {
            Some(options) => options.token(),
            None => session.idle_token.clone(),
        };
        let profile = own.or(session.profiling.as_ref()).and_then(|profiling| profiling.profile());
        let shrink_arenas = options.map(RunOptions::shrink_arenas).unwrap_or_default();
        Control {
            options,
            // All fields: the default token would be an allocation for each run.
            engine: EngineOptions { cancel, deadline: None, profile, observer: None, shrink_arenas },
        }
    }

    /// The failure of a run.
    pub(crate) fn failure(&self, error: Error) -> Failure {
        let is_terminated = self.options.is_some_and(RunOptions::is_terminated);
        match error.kind() {
            ErrorKind::Cancelled if is_terminated => Failure::new(code::FAIL, TERMINATED),
            _ => error.into(),
        }
    }
}

/// Reads what a caller gives for an input, and says what does not fit.
pub(crate) fn input_value(port: &Port, value: &Value) -> Outcome<EngineValue> {
    fit(&port.spec.name, &port.spec.ty, value.engine()?).map_err(Failure::invalid)
}

/// Says why a value cannot hold an output; `None` if it can.
pub(crate) fn target_problem(port: &Port, value: &Value) -> Outcome<Option<String>> {
    Ok(match value.engine()? {
        EngineValue::Tensor(tensor) => {
            of_tensor("output", &port.spec.name, &port.spec.ty, tensor.dtype(), tensor.shape())
        }
        other => Some(format!("the value given for output '{}' is {}", port.spec.name, other.kind_name())),
    })
}

/// The places of named ports.
type Places = SmallVec<[usize; 4]>;

/// Finds ports by name.
fn places(ports: &Ports, names: &[Text], kind: &str) -> Outcome<Places> {
    let place = |name: &Text| {
        let name = name.bytes("the name of a port")?;
        let unknown = || Failure::invalid(format!("Invalid {kind} name: {}", String::from_utf8_lossy(name)));
        ports.find(name).ok_or_else(unknown)
    };
    names.iter().map(place).collect()
}

/// Returns the inputs with the parameters of adapters, which replace what is given.
fn adapted(
    session: &Session,
    places: &mut Places,
    inputs: &[In<Value>],
    adapters: &[Arc<Vec<Parameter>>],
) -> Outcome<Vec<In<Value>>> {
    let mut inputs = inputs.to_vec();
    for Parameter { name, value } in adapters.iter().flat_map(|adapter| adapter.iter()) {
        let Some(place) = session.inputs.find(name.as_bytes()) else {
            return invalid(format!("Invalid input name: {name}"));
        };
        let value = In::of(value.address());
        match places.iter().position(|known| *known == place).and_then(|at| inputs.get_mut(at)) {
            Some(input) => *input = value,
            None => {
                places.push(place);
                inputs.push(value);
            }
        }
    }
    Ok(inputs)
}

/// Reads the inputs, and adds the optional ones that are left out.
fn given<'a>(session: &'a Session, places: &Places, values: &[In<Value>]) -> Outcome<Inputs<'a>> {
    let mut given = Inputs::new();
    for (place, value) in places.iter().zip(values) {
        let Some(port) = session.inputs.ports.get(*place) else { continue };
        if value.is_null() {
            return invalid(format!("NULL input supplied for input {}", port.spec.name));
        }
        given.push((&port.spec.name, input_value(port, value.get()?)?));
    }
    for place in session.needed().filter(|place| !places.contains(place)) {
        let Some(port) = session.inputs.ports.get(place) else { continue };
        return invalid(format!("Missing Input: {}", port.spec.name));
    }
    for (place, spec) in session.optional() {
        let ValueType::Optional(element) = &spec.ty else { continue };
        if !places.contains(&place) {
            let absent = OptionalValue { element_type: (**element).clone(), element: None };
            given.push((&spec.name, EngineValue::Optional(absent)));
        }
    }
    Ok(given)
}

/// Checks the values that the caller gives for outputs.
fn wanted<'a>(session: &Session, places: &Places, values: &'a [In<Value>]) -> Outcome<Wanted<'a>> {
    let mut wanted = Wanted::new();
    for (place, value) in places.iter().zip(values) {
        let value = value.optional()?;
        if let (Some(value), Some(port)) = (value, session.outputs.ports.get(*place))
            && let Some(problem) = target_problem(port, value)?
        {
            return invalid(problem);
        }
        wanted.push((*place, value));
    }
    Ok(wanted)
}

/// Whether a run can write into the memory that the caller gives: aligned numbers that overlap with
/// no input and with no other output.
fn fits_in_place(wanted: &Wanted<'_>, inputs: &[In<Value>]) -> Outcome<bool> {
    let mut targets: SmallVec<[&Numbers; 4]> = SmallVec::new();
    for (index, (place, value)) in wanted.iter().enumerate() {
        if wanted.iter().take(index).any(|(other, _)| other == place) {
            return Ok(false);
        }
        match value {
            Some(Value::Numbers(numbers)) if numbers.tensor().is_aligned() => targets.push(numbers),
            Some(_) => return Ok(false),
            None => {}
        }
    }
    for input in inputs {
        let Value::Numbers(input) = input.get()? else { continue };
        if targets.iter().any(|target| target.overlaps(input)) {
            return Ok(false);
        }
    }
    let overlaps_another =
        |(index, target): (usize, &&Numbers)| targets.iter().take(index).any(|other| other.overlaps(target));
    Ok(!targets.iter().enumerate().any(overlaps_another))
}

/// Runs, and copies results into the values that the caller gives. Returns the others.
fn run_apart(
    session: &Session,
    given: &Inputs<'_>,
    wanted: &Wanted<'_>,
    control: &Control<'_>,
) -> Outcome<SmallVec<[Option<Value>; 4]>> {
    let results =
        session.engine.run_values(given, &control.engine).map_err(|error| control.failure(error))?;
    let mut results: SmallVec<[Option<EngineValue>; 4]> = results.into_iter().map(Some).collect();
    let missing = || Failure::new(code::RUNTIME_EXCEPTION, "the run has fewer outputs than the model");
    let mut made = SmallVec::new();
    for (index, (place, target)) in wanted.iter().enumerate() {
        let is_last = !wanted.iter().skip(index + 1).any(|(later, _)| later == place);
        let result = results.get_mut(*place).ok_or_else(missing)?;
        let result = if is_last { result.take() } else { result.clone() };
        let result = result.ok_or_else(missing)?;
        made.push(match target {
            None => Some(Value::of_result(result)?),
            Some(target) => {
                fill(target, &result)?;
                None
            }
        });
    }
    Ok(made)
}

/// Copies a result into a value of the caller.
pub(crate) fn fill(target: &Value, result: &EngineValue) -> Outcome {
    let tensor = result.tensor()?;
    let (_, dims) = target.described()?;
    if *dims != *crate::value::dims_of(tensor.shape()) {
        return invalid(format!(
            "OrtValue shape verification failed. Current shape:{dims:?} Requested shape:{:?}",
            tensor.shape()
        ));
    }
    match target {
        Value::Numbers(numbers) => numbers.fill(tensor),
        other => {
            other.strings()?.fill(tensor.clone());
            Ok(())
        }
    }
}

/// Runs with the results written where the caller wants them. Returns the others.
fn run_in_place(
    session: &Session,
    given: Inputs<'_>,
    wanted: &Wanted<'_>,
    control: &Control<'_>,
    memory: Option<LentMemory>,
) -> Outcome<SmallVec<[Option<Value>; 4]>> {
    let mut kept = session.bindings.take(&session.engine);
    let made = run_bound(session, &mut kept.binding, given, wanted, control);
    kept.set_memory(memory.filter(|_| made.is_ok()));
    session.bindings.put(kept);
    made
}

fn run_bound(
    session: &Session,
    binding: &mut IoBinding,
    given: Inputs<'_>,
    wanted: &Wanted<'_>,
    control: &Control<'_>,
) -> Outcome<SmallVec<[Option<Value>; 4]>> {
    for (name, value) in given {
        binding.bind_input(name, value)?;
    }
    let name = |place: usize| session.outputs.ports.get(place).map_or("", |port| port.spec.name.as_str());
    for (place, target) in wanted {
        let buffer = match target {
            Some(target) => target.numbers()?.buffer()?,
            None => None,
        };
        match buffer {
            Some(buffer) => binding.bind_output(name(*place), buffer)?,
            None => binding.bind_output(name(*place), DeviceId::HOST)?,
        }
    }
    session.engine.run_with_binding(binding, &control.engine).map_err(|error| control.failure(error))?;
    let made = |(place, target): &(usize, Option<&Value>)| match target {
        Some(_) => Ok(None),
        None => Ok(Some(Value::of_result(binding.shared_output(name(*place))?)?)),
    };
    wanted.iter().map(made).collect()
}

/// What a run reads and writes, as the caller passes it.
pub(crate) struct Request<'a> {
    pub(crate) session: &'a Session,
    pub(crate) options: Option<&'a RunOptions>,
    pub(crate) input_names: &'a [Text],
    pub(crate) inputs: &'a [In<Value>],
    pub(crate) output_names: &'a [Text],
    pub(crate) outputs: &'a mut [*mut Object<Value>],
    pub(crate) kind: RunKind,
}

/// Which function asks for a run.
pub(crate) enum RunKind {
    Plain,
    /// Adapters of the options have no effect, as in ONNX Runtime.
    Async,
    /// A kernel runs an operator: what ends its own run ends this one, too.
    Nested(CancelToken),
}

pub(crate) fn run(request: Request<'_>) -> Outcome {
    let own = request.options.and_then(RunOptions::start_profile);
    let done = run_profiled(request, own.as_ref());
    finish_profile(own);
    done
}

/// Writes the profile of a run. The run itself is done, so a failure is a line of the log.
pub(crate) fn finish_profile(profile: Option<Profiling>) {
    if let Some(Err(failure)) = profile.map(|profile| profile.finish()) {
        warn("run.rs finish_profile", format!("the profile of the run: {}", failure.message));
    }
}

fn run_profiled(request: Request<'_>, own: Option<&Profiling>) -> Outcome {
    let Request { session, options, input_names, inputs, output_names, outputs, kind } = request;
    let mut control = Control::of(session, options, own);
    if let RunKind::Nested(cancel) = &kind {
        control.engine.cancel = cancel.clone();
    }
    session.check_finished()?;
    let _scope = session.log_scope(options);
    if options.is_some_and(RunOptions::is_terminated) {
        return fail(code::FAIL, TERMINATED.to_owned());
    }
    let mut input_places = places(&session.inputs, input_names, "input")?;
    let adapters = match (options, kind) {
        (Some(options), RunKind::Async) => options.ignore_adapters("RunAsync"),
        (Some(options), _) => options.adapters(),
        (None, _) => Vec::new(),
    };
    let with_adapters;
    let inputs = match adapters.is_empty() {
        true => inputs,
        false => {
            with_adapters = adapted(session, &mut input_places, inputs, &adapters)?;
            &with_adapters
        }
    };
    if output_names.is_empty() {
        return invalid("At least one output should be requested.");
    }
    let output_places = places(&session.outputs, output_names, "output")?;
    let targets: SmallVec<[In<Value>; 4]> =
        outputs.iter().map(|output| In::of(output.cast_const())).collect();
    let lent = PortValues { ports: &input_places, values: inputs };
    let lent_outputs = PortValues { ports: &output_places, values: &targets };
    if let Some(mut kept) = session.bindings.take_bound(lent, lent_outputs) {
        let done = session.engine.run_with_binding(&mut kept.binding, &control.engine);
        session.bindings.put(kept);
        return done.map_err(|error| control.failure(error));
    }
    let given = given(session, &input_places, inputs)?;
    let wanted = wanted(session, &output_places, &targets)?;
    let has_targets = wanted.iter().any(|(_, target)| target.is_some());
    let made = match has_targets && fits_in_place(&wanted, inputs)? {
        true => run_in_place(session, given, &wanted, &control, LentMemory::of(lent, lent_outputs)?)?,
        false => run_apart(session, &given, &wanted, &control)?,
    };
    for (output, made) in outputs.iter_mut().zip(made) {
        if let Some(made) = made {
            *output = Object::give(made);
        }
    }
    Ok(())
}

/// The arguments of `RunAsync`, which stay the caller's until the callback.
struct Async {
    session: In<Session>,
    options: In<RunOptions>,
    input_names: Array<Text>,
    inputs: Array<In<Value>>,
    input_count: usize,
    output_names: Array<Text>,
    output_count: usize,
    outputs: ArrayMut<*mut Object<Value>>,
    callback: Callback,
    user_data: *mut c_void,
}

type Callback = unsafe extern "C" fn(*mut c_void, *mut *mut Object<Value>, usize, OrtStatusPtr);

// SAFETY: the header demands that all of it stays valid and untouched until the callback.
unsafe impl Send for Async {}

impl Async {
    fn run(mut self) {
        let status = guarded("RunAsync", || {
            run(Request {
                session: self.session.get()?,
                options: self.options.optional()?,
                input_names: self.input_names.get(self.input_count, "the array of input names")?,
                inputs: self.inputs.get(self.input_count, "the array of inputs")?,
                output_names: self.output_names.get(self.output_count, "the array of output names")?,
                outputs: self.outputs.get(self.output_count, "the array of outputs")?,
                kind: RunKind::Async,
            })
        });
        let count = if status.0.is_null() { self.output_count } else { 0 };
        // SAFETY: the callback gets the caller's own data, array and a status that it owns.
        unsafe { (self.callback)(self.user_data, self.outputs.address(), count, status) };
    }
}

entries! {
    /// 9
    fn Run(session: In<Session>, options: In<RunOptions>, input_names: Array<Text>, inputs: Array<In<Value>>, input_count: usize, output_names: Array<Text>, output_count: usize, outputs: ArrayMut<*mut Object<Value>>) {
        run(Request {
            session: session.get()?,
            options: options.optional()?,
            input_names: input_names.get(input_count, "the array of input names")?,
            inputs: inputs.get(input_count, "the array of inputs")?,
            output_names: output_names.get(output_count, "the array of output names")?,
            outputs: outputs.get(output_count, "the array of outputs")?,
            kind: RunKind::Plain,
        })
    }

    /// 260
    fn RunAsync(session: In<Session>, options: In<RunOptions>, input_names: Array<Text>, inputs: Array<In<Value>>, input_count: usize, output_names: Array<Text>, output_count: usize, outputs: ArrayMut<*mut Object<Value>>, callback: Option<Callback>, user_data: *mut c_void) {
        if session.get()?.engine.threads() < 2 {
            return invalid("intra op thread pool must have at least one thread for RunAsync");
        }
        let Some(callback) = callback else { return invalid("the callback is null") };
        let task = Async { session, options, input_names, inputs, input_count, output_names, output_count, outputs, callback, user_data };
        // The run itself uses the pool.
        let spawned = std::thread::Builder::new().name("ort-run-async".to_owned()).spawn(move || task.run());
        spawned.map(drop).map_err(|problem| Failure::new(code::FAIL, format!("no thread for RunAsync: {problem}")))
    }
}
