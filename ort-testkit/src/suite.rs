//! Suites as data: cases that run on any target, and a report of what failed.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use ort_core::ep::{Device, provider};
use ort_core::ir::{Graph, ValueType};
use ort_core::onnx::value_from_bytes;
use ort_core::rewrite::Level;
use ort_core::session::{Model, Session};
use ort_core::spec::OpSpec;
use ort_core::tensor::{Tolerance, Value, compare};
use ort_core::{Result, Within, ensure, error};

use crate::{DecomposingDevice, OpaqueDevice};

/// What a suite runs on: devices in order of preference.
#[derive(Clone)]
pub struct Target {
    /// Its name in reports.
    pub name: &'static str,
    /// The devices, the preferred one first.
    pub devices: Vec<Arc<dyn Device>>,
    /// The optimization level.
    pub level: Level,
}

impl Target {
    /// The CPU alone.
    pub fn cpu() -> Result<Target> {
        let devices = vec![provider("cpu")?.open(0, &Default::default())?];
        Ok(Target { name: "cpu", devices, level: Level::All })
    }

    /// An opaque device alone.
    pub fn opaque(device: &Arc<OpaqueDevice>) -> Target {
        Target { name: "opaque", devices: vec![device.clone()], level: Level::All }
    }

    /// An opaque device with the CPU as fallback.
    pub fn mixed(device: &Arc<OpaqueDevice>) -> Result<Target> {
        let mut devices = Target::cpu()?.devices;
        devices.insert(0, device.clone());
        Ok(Target { name: "opaque and cpu", devices, level: Level::All })
    }

    /// The same devices without the kernels of some operators, which are decomposed. Rewrites are
    /// off, because a rule could replace such an operator first.
    pub fn without(&self, operators: &[&'static OpSpec]) -> Target {
        let without = |device: &Arc<dyn Device>| -> Arc<dyn Device> {
            DecomposingDevice::new(device.clone(), operators)
        };
        let devices = self.devices.iter().map(without).collect();
        Target { name: "decomposed", devices, level: Level::Disabled }
    }

    /// Builds a session on a model.
    pub fn session(&self, model: &Model) -> Result<Session> {
        let builder = Session::builder(model).threads(1).opt_level(self.level);
        self.devices.iter().fold(builder, |builder, device| builder.device(device.clone())).build()
    }
}

/// A model with inputs, and the outputs that a reference computed.
#[derive(Clone)]
pub struct Case {
    /// Its name, unique in its suite.
    pub name: String,
    /// The model.
    pub model: Model,
    /// The inputs by name.
    pub inputs: Vec<(String, Value)>,
    /// The outputs in the model's order.
    pub expected: Vec<Value>,
    /// The tolerance of the comparison.
    pub tolerance: Tolerance,
}

impl Case {
    /// Builds a case from a graph; the inputs are in the graph's order.
    pub fn of_graph(name: &str, graph: Graph, inputs: Vec<Value>, expected: Vec<Value>) -> Case {
        let names = graph.inputs.iter().map(|&id| graph.value(id).name.to_string());
        let inputs = names.zip(inputs).collect();
        let model = Model::from_graph(graph);
        Case { name: name.to_string(), model, inputs, expected, tolerance: Tolerance::default() }
    }

    /// Runs the case on a session of its model and compares the outputs.
    pub fn check(&self, session: &Session) -> Result<()> {
        let inputs: Vec<(&str, Value)> =
            self.inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let outputs = session.run(&inputs)?;
        let (got, expected) = (outputs.len(), self.expected.len());
        ensure!(got == expected, Fail, "{got} outputs, expected {expected}");
        for ((name, actual), expected) in outputs.iter().zip(&self.expected) {
            compare(actual, expected, self.tolerance).within(|| format!("output '{name}'"))?;
        }
        Ok(())
    }
}

/// Reads a case in the layout of the onnx package: `model.onnx`, and `input_N.pb` and `output_N.pb`
/// in `test_data_set_0`. The optional file `tol` holds the relative and the absolute tolerance.
pub fn read_case(folder: &Path) -> Result<Case> {
    let model = Model::load(folder.join("model.onnx"))?;
    let data = folder.join("test_data_set_0");
    let graph = model.graph();
    let read = |file: String, ty: &ValueType| -> Result<Value> {
        let path = data.join(file);
        let bytes =
            std::fs::read(&path).map_err(|problem| error!(NoSuchFile, "{}: {problem}", path.display()))?;
        // The messages of tensors, sequences and optionals do not name their kind, so the declared
        // type decides.
        value_from_bytes(bytes.into(), ty).within(|| path.display().to_string())
    };
    let mut inputs = Vec::with_capacity(graph.inputs.len());
    for (index, &id) in graph.inputs.iter().enumerate() {
        let info = graph.value(id);
        inputs.push((info.name.to_string(), read(format!("input_{index}.pb"), &info.ty)?));
    }
    let mut expected = Vec::with_capacity(graph.outputs.len());
    for (index, &id) in graph.outputs.iter().enumerate() {
        expected.push(read(format!("output_{index}.pb"), &graph.value(id).ty)?);
    }
    let name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Ok(Case { name, model, inputs, expected, tolerance: read_tolerance(&folder.join("tol"))? })
}

fn read_tolerance(path: &Path) -> Result<Tolerance> {
    let Ok(text) = std::fs::read_to_string(path) else { return Ok(Tolerance::default()) };
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [relative, absolute] => Ok(Tolerance { relative, absolute }),
        _ => Err(error!(InvalidArgument, "{} holds '{text}', expected two numbers", path.display())),
    }
}

/// Cases, with a list of those known to fail.
#[derive(Clone, Default)]
pub struct Suite {
    /// The cases.
    pub cases: Vec<Case>,
    /// Names of cases that must fail, each with the reason. One that passes fails the suite.
    pub ignored: Vec<(&'static str, &'static str)>,
}

/// The outcome of a suite on a target.
#[derive(Debug, Default)]
pub struct Report {
    /// The target's name.
    pub target: &'static str,
    /// How many cases passed.
    pub passed: usize,
    /// How many failed as listed.
    pub ignored: usize,
    /// Unexpected outcomes: a case and the reason.
    pub problems: Vec<(String, String)>,
}

impl Suite {
    /// Runs every case.
    pub fn run(&self, target: &Target) -> Report {
        let mut report = Report { target: target.name, ..Report::default() };
        for case in &self.cases {
            let ignored = self.ignored.iter().any(|(name, _)| *name == case.name);
            let outcome = target.session(&case.model).and_then(|session| case.check(&session));
            match (outcome, ignored) {
                (Ok(()), false) => report.passed += 1,
                (Err(_), true) => report.ignored += 1,
                (Ok(()), true) => {
                    report.problems.push((case.name.clone(), "it is ignored, but it passes".to_string()));
                }
                (Err(problem), false) => report.problems.push((case.name.clone(), problem.to_string())),
            }
        }
        // A case that was renamed or removed must leave the list.
        for (name, _) in &self.ignored {
            if !self.cases.iter().any(|case| case.name == *name) {
                report
                    .problems
                    .push((name.to_string(), "it is ignored, but there is no such case".to_string()));
            }
        }
        report
    }
}

impl Report {
    /// Whether all outcomes are as expected.
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} passed, {} ignored", self.target, self.passed, self.ignored)?;
        self.problems.iter().try_for_each(|(case, problem)| writeln!(f, "  {case}: {problem}"))
    }
}
