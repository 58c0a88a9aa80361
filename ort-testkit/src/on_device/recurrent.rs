//! Recurrent layers in all directions, layouts, lengths and activations.

use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::Attribute;
use ort_core::tensor::Tensor;

use super::typed::{Case, Given, case, check_all, run, text};

/// The sizes of a layer, and whether it has all optional inputs.
#[derive(Clone, Copy)]
struct Layer {
    op: &'static str,
    dtype: DType,
    steps: usize,
    batch: usize,
    depth: usize,
    hidden: usize,
    direction: &'static str,
    batch_first: bool,
    full: bool,
}

impl Layer {
    fn case(self, attrs: &[(&'static str, Attribute)]) -> Case {
        let Layer { op, dtype, steps, batch, depth, hidden, direction, batch_first, full } = self;
        let directions = if direction == "bidirectional" { 2 } else { 1 };
        let gates = match op {
            "LSTM" => 4,
            "GRU" => 3,
            _ => 1,
        };
        let (x, states) = match batch_first {
            true => ([batch, steps, depth], [batch, directions, hidden]),
            false => ([steps, batch, depth], [directions, batch, hidden]),
        };
        let mut inputs = vec![run(dtype, &x)];
        inputs.push(run(dtype, &[directions, gates * hidden, depth]));
        inputs.push(run(dtype, &[directions, gates * hidden, hidden]));
        if full {
            // From 0 to `steps`, because a sequence may be empty.
            let lengths: Vec<i32> = (0..batch).map(|at| ((at * 5 + 1) % (steps + 1)) as i32).collect();
            // Biases of the input and of the state, for each gate.
            inputs.push(run(dtype, &[directions, 2 * gates * hidden]));
            inputs.push(Given::Is(Tensor::from_slice(&[batch], &lengths).unwrap()));
            inputs.push(run(dtype, &states));
        }
        if full && op == "LSTM" {
            // The initial cell state, and the peephole weights of three gates.
            inputs.extend([run(dtype, &states), run(dtype, &[directions, 3 * hidden])]);
        }
        let mut all = vec![("hidden_size", Attribute::Int(hidden as i64)), ("direction", text(direction))];
        all.push(("layout", Attribute::Int(batch_first.into())));
        all.extend_from_slice(attrs);
        let case = case(op, inputs, &all);
        // Rounding errors accumulate over the steps.
        let tolerance = case.tolerance * if dtype == DType::F32 { 1.0 } else { 4.0 };
        Case { outputs: if op == "LSTM" { 3 } else { 2 }, tolerance, ..case }
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let base = Layer {
        op: "LSTM",
        dtype: DType::F32,
        steps: 5,
        batch: 3,
        depth: 6,
        hidden: 7,
        direction: "forward",
        batch_first: false,
        full: true,
    };
    let flag = |name: &'static str| (name, Attribute::Int(1));
    for op in ["LSTM", "GRU", "RNN"] {
        let base = Layer { op, ..base };
        for direction in ["forward", "reverse", "bidirectional"] {
            for (batch_first, full) in [(false, false), (false, true), (true, true)] {
                cases.push(Layer { direction, batch_first, full, ..base }.case(&[]));
            }
        }
        for dtype in [DType::F16, DType::BF16] {
            cases.push(Layer { dtype, direction: "bidirectional", ..base }.case(&[]));
        }
        for (batch, hidden) in [(1, 40), (1, 130), (8, 33), (19, 5)] {
            let layer = Layer { steps: 3, batch, depth: 4, hidden, ..base };
            cases.push(layer.case(&[("clip", Attribute::Float(0.7))]));
            cases.push(Layer { direction: "reverse", full: false, ..layer }.case(&[]));
        }
    }
    for direction in ["forward", "bidirectional"] {
        let layer = Layer { direction, ..base };
        cases.push(layer.case(&[flag("input_forget")]));
        let gru = Layer { op: "GRU", ..layer };
        cases.push(gru.case(&[flag("linear_before_reset")]));
        cases.push(Layer { batch: 1, dtype: DType::F16, ..gru }.case(&[flag("linear_before_reset")]));
    }
    for name in [
        "Relu",
        "Affine",
        "LeakyRelu",
        "ThresholdedRelu",
        "ScaledTanh",
        "HardSigmoid",
        "Elu",
        "Softsign",
        "Softplus",
    ] {
        // For the gates, for the cell, and for the hidden state.
        let names = Attribute::Strings(vec!["Sigmoid".to_owned(), name.to_owned(), "Tanh".to_owned()]);
        let parameters = [("activation_alpha", 0.4), ("activation_beta", 0.3)];
        let parameters = parameters.map(|(name, value)| (name, Attribute::Floats(vec![value])));
        cases.push(base.case(&[&[("activations", names)], &parameters[..]].concat()));
    }
    cases
}

/// Checks `LSTM`, `GRU` and `RNN`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn recurrent(device: &Arc<dyn Device>) {
    check_all(device, &cases());
}
