//! `OrtIoBinding`: inputs and outputs bound to memory once, for many runs.

use std::collections::BTreeMap;
use std::ffi::c_char;

use ort_runtime::{DeviceId, IoBinding as EngineBinding, Value as EngineValue};
use parking_lot::Mutex;

use crate::allocator::Allocator;
use crate::entry::{In, Object, Out, Released, Text, entries, kinds};
use crate::memory_info::MemoryInfo;
use crate::run::{Control, fill, finish_profile, input_value, target_problem};
use crate::run_options::RunOptions;
use crate::session::{Port, Session};
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::value::{Numbers, Value};

/// The memory that the runs of one session read and write. The session outlives it.
pub(crate) struct IoBinding {
    session: In<Session>,
    state: Mutex<State>,
}

// SAFETY: the header demands that the session outlives the binding; it may be used from any thread.
unsafe impl Send for IoBinding {}
// SAFETY: as above.
unsafe impl Sync for IoBinding {}

struct State {
    engine: EngineBinding,
    /// The caller's tensors that are bound to inputs, by name.
    inputs: BTreeMap<String, Value>,
    /// Bound outputs in the order of binding.
    outputs: Vec<BoundOutput>,
    /// What is bound and does not fit, by name. The next run says so, as in ONNX Runtime.
    misfits: BTreeMap<String, String>,
    has_run: bool,
}

struct BoundOutput {
    name: String,
    /// The value that the caller gave.
    target: Option<Value>,
    /// Whether the result is computed apart and copied to the target: its memory is not aligned, is
    /// that of an input, or has strings.
    is_copied: bool,
}

kinds! {
    IoBinding => "OrtIoBinding", b"OrtIoBin";
}

/// The port of a name.
fn port<'a>(session: &'a Session, name: &[u8], is_input: bool) -> Outcome<&'a Port> {
    let ports = if is_input { &session.inputs } else { &session.outputs };
    let found = ports.find(name).and_then(|place| ports.ports.get(place));
    let kind = if is_input { "input" } else { "output" };
    found.ok_or_else(|| {
        let name = String::from_utf8_lossy(name);
        Failure::new(code::FAIL, format!("Failed to find {kind} name in the mapping: {name}"))
    })
}

impl State {
    fn bind_input(&mut self, port: &Port, value: &Value) -> Outcome {
        let name = &port.spec.name;
        self.misfits.remove(name);
        self.inputs.insert(name.clone(), value.clone());
        match input_value(port, value) {
            Ok(value) => self.engine.bind_input(name, value)?,
            Err(problem) => {
                self.misfits.insert(name.clone(), problem.message);
            }
        }
        Ok(())
    }

    fn bind_output(&mut self, port: &Port, target: Option<Value>) -> Outcome {
        let name = &port.spec.name;
        self.has_run = false;
        self.misfits.remove(name);
        self.engine.unbind_output(name)?;
        self.outputs.retain(|output| output.name != *name);
        let problem = match &target {
            Some(target) => target_problem(port, target)?,
            None => None,
        };
        if let Some(problem) = problem {
            self.misfits.insert(name.clone(), problem);
        }
        self.outputs.push(BoundOutput { name: name.clone(), target, is_copied: false });
        Ok(())
    }

    /// Gives the engine the memory of outputs that were bound since the last run.
    fn provide(&mut self) -> Outcome {
        let inputs: Vec<&Numbers> = self.inputs.values().filter_map(|value| value.numbers().ok()).collect();
        for output in &mut self.outputs {
            let buffer = match &output.target {
                Some(Value::Numbers(numbers)) if !inputs.iter().any(|input| input.overlaps(numbers)) => {
                    numbers.buffer()?
                }
                _ => None,
            };
            output.is_copied = output.target.is_some() && buffer.is_none();
            self.engine.unbind_output(&output.name)?;
            match buffer {
                Some(buffer) => self.engine.bind_output(&output.name, buffer)?,
                None => self.engine.bind_output(&output.name, DeviceId::HOST)?,
            }
        }
        Ok(())
    }

    fn run(&mut self, session: &Session, control: &Control<'_>) -> Outcome {
        if self.outputs.is_empty() {
            return invalid("At least one output should be requested.");
        }
        if let Some(problem) = self.misfits.values().next() {
            return invalid(problem.clone());
        }
        let is_bound = |port: &Port| self.inputs.contains_key(&port.spec.name);
        let missing = session.needed().filter_map(|place| session.inputs.ports.get(place));
        if let Some(port) = missing.into_iter().find(|port| !is_bound(port)) {
            return invalid(format!("Missing Input: {}", port.spec.name));
        }
        if !self.has_run {
            self.provide()?;
        }
        self.has_run = false;
        let done = session.engine.run_with_binding(&mut self.engine, &control.engine);
        done.map_err(|error| control.failure(error))?;
        self.has_run = true;
        for output in self.outputs.iter().filter(|output| output.is_copied) {
            if let Some(target) = &output.target {
                fill(target, &self.engine.shared_output(&output.name)?)?;
            }
        }
        Ok(())
    }

    fn output(&self, output: &BoundOutput) -> Outcome<Value> {
        match &output.target {
            Some(target) => Ok(target.clone()),
            None if !self.has_run => {
                fail(code::FAIL, "the outputs are not computed: run the binding first".to_owned())
            }
            None => Value::of_result(self.shared(&output.name)?),
        }
    }

    fn shared(&self, name: &str) -> Outcome<EngineValue> {
        Ok(self.engine.shared_output(name)?)
    }
}

entries! {
    /// 134
    fn CreateIoBinding(session: In<Session>, out: Out<*mut Object<IoBinding>>) {
        let out = out.place()?;
        let state = State {
            engine: session.get()?.engine.io_binding(),
            inputs: BTreeMap::new(),
            outputs: Vec::new(),
            misfits: BTreeMap::new(),
            has_run: false,
        };
        out.put(Object::give(IoBinding { session, state: Mutex::new(state) }));
        Ok(())
    }

    /// 135
    fn ReleaseIoBinding(binding: Released<IoBinding>) -> (), else (), {
        binding.release();
    }

    /// 133
    fn RunWithBinding(session: In<Session>, options: In<RunOptions>, binding: In<IoBinding>) {
        let (session, binding) = (session.get()?, binding.get()?);
        if !std::ptr::eq(session, binding.session.get()?) {
            return invalid("the binding is of another session");
        }
        let options = options.optional()?;
        let _scope = session.log_scope(options);
        if let Some(options) = options {
            options.ignore_adapters("RunWithBinding");
        }
        let own = options.and_then(RunOptions::start_profile);
        let done = binding.state.lock().run(session, &Control::of(session, options, own.as_ref()));
        finish_profile(own);
        done
    }

    /// 136
    fn BindInput(binding: In<IoBinding>, name: Text, value: In<Value>) {
        let binding = binding.get()?;
        let port = port(binding.session.get()?, name.bytes("the name of the input")?, true)?;
        let mut state = binding.state.lock();
        // The memory of an output may be that of another input from now on.
        state.has_run = false;
        state.bind_input(port, value.get()?)
    }

    /// 137
    fn BindOutput(binding: In<IoBinding>, name: Text, value: In<Value>) {
        let binding = binding.get()?;
        let port = port(binding.session.get()?, name.bytes("the name of the output")?, false)?;
        binding.state.lock().bind_output(port, Some(value.get()?.clone()))
    }

    /// 138
    fn BindOutputToDevice(binding: In<IoBinding>, name: Text, info: In<MemoryInfo>) {
        let binding = binding.get()?;
        info.get()?.require_host()?;
        let port = port(binding.session.get()?, name.bytes("the name of the output")?, false)?;
        binding.state.lock().bind_output(port, None)
    }

    /// 139
    fn GetBoundOutputNames(binding: In<IoBinding>, allocator: Allocator, buffer: Out<*mut c_char>, lengths: Out<*mut usize>, count: Out<usize>) {
        let (buffer, lengths, count) = (buffer.place()?, lengths.place()?, count.place()?);
        let state = binding.get()?.state.lock();
        let names: String = state.outputs.iter().map(|output| output.name.as_str()).collect();
        let sizes: Vec<usize> = state.outputs.iter().map(|output| output.name.len()).collect();
        buffer.put(allocator.array(names.as_bytes())?.cast());
        lengths.put(allocator.array(&sizes)?);
        count.put(sizes.len());
        Ok(())
    }

    /// 140
    fn GetBoundOutputValues(binding: In<IoBinding>, allocator: Allocator, values: Out<*mut *mut Object<Value>>, count: Out<usize>) {
        let (values, count) = (values.place()?, count.place()?);
        let state = binding.get()?.state.lock();
        let outputs: Vec<Value> = state.outputs.iter().map(|output| state.output(output)).collect::<Outcome<_>>()?;
        // Reserved first: nothing fails once the handles are made.
        let array = allocator.array(&vec![std::ptr::null_mut::<Object<Value>>(); outputs.len()])?;
        count.put(outputs.len());
        for (place, output) in outputs.into_iter().enumerate() {
            // SAFETY: the array has a place for each output.
            unsafe { array.add(place).write_unaligned(Object::give(output)) };
        }
        values.put(array);
        Ok(())
    }

    /// 141
    fn ClearBoundInputs(binding: In<IoBinding>) -> (), else (), {
        if let Ok(binding) = binding.get() {
            let mut state = binding.state.lock();
            let State { engine, inputs, misfits, has_run, .. } = &mut *state;
            engine.clear_binding_inputs();
            inputs.keys().for_each(|name| drop(misfits.remove(name)));
            inputs.clear();
            *has_run = false;
        }
    }

    /// 142
    fn ClearBoundOutputs(binding: In<IoBinding>) -> (), else (), {
        if let Ok(binding) = binding.get() {
            let mut state = binding.state.lock();
            let State { engine, outputs, misfits, has_run, .. } = &mut *state;
            engine.clear_binding_outputs();
            outputs.drain(..).for_each(|output| drop(misfits.remove(&output.name)));
            *has_run = false;
        }
    }

    /// 202. Work on the host is done when a run returns.
    fn SynchronizeBoundInputs(binding: In<IoBinding>) {
        Ok(binding.get()?.state.lock().engine.synchronize_inputs()?)
    }

    /// 203
    fn SynchronizeBoundOutputs(binding: In<IoBinding>) {
        Ok(binding.get()?.state.lock().engine.synchronize_outputs()?)
    }
}
