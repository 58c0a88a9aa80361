//! Cell equations of `LSTM`, `GRU` and `RNN`, and the activations that their attributes name.

use std::fmt::Write as _;

use ort_core::ir::Attributes;
use ort_core::ops::nn::problem::{CellActivation, CellFunction, Recurrent, activations};
use ort_core::{Result, ensure};

/// One dispatch of a step: recurrent products for some gates, and the cell equation on them.
pub(super) struct Phase {
    /// The first gate, and the number of gates.
    pub(super) gates: (usize, usize),
    /// The state slots that a step multiplies and writes.
    pub(super) slots: fn(step: usize) -> (usize, usize),
    /// The WGSL of `fn cell(place: Place, sums: sums_t)`.
    pub(super) code: &'static str,
    /// Whether it ends the step.
    pub(super) ends: bool,
}

/// Double-buffers the hidden states in slots 0 and 1.
fn in_turn(step: usize) -> (usize, usize) {
    (step % 2, (step + 1) % 2)
}

/// Returns the phases of a step.
pub(super) fn phases(op: &str, linear_before_reset: bool) -> &'static [Phase] {
    match (op, linear_before_reset) {
        ("LSTM", _) => &[Phase { gates: (0, 4), slots: in_turn, code: LSTM, ends: true }],
        ("GRU", true) => &[Phase { gates: (0, 3), slots: in_turn, code: GRU_LINEAR, ends: true }],
        // The candidate multiplies the reset state, which needs all units first: two dispatches.
        ("GRU", false) => &[
            Phase { gates: (0, 2), slots: |_| (0, 0), code: GRU_GATES, ends: false },
            Phase { gates: (2, 1), slots: |_| (2, 0), code: GRU_CANDIDATE, ends: true },
        ],
        _ => &[Phase { gates: (0, 1), slots: in_turn, code: RNN, ends: true }],
    }
}

/// The gates are input, output, forget and cell. Slot 2 holds the cell states.
const LSTM: &str = "
fn cell(place: Place, sums: sums_t) {
    let at = place.state;
    if (!place.goes_on) {
        finish(place, state(p.multiplied + at), 0.0);
        return;
    }
    let d = place.direction;
    let c = state(2u * p.size + at);
    let i = f(d, clip(sums.x + input_of(place, 0u) + peephole(place, 0u) * c));
    var forget = f(d, clip(sums.z + input_of(place, 2u) + peephole(place, 2u) * c));
    if (INPUT_FORGET == 1u) { forget = 1.0 - i; }
    let now = forget * c + i * g(d, clip(sums.w + input_of(place, 3u)));
    let o = f(d, clip(sums.y + input_of(place, 1u) + peephole(place, 1u) * now));
    set_state(2u * p.size + at, now);
    let h = o * h_(d, now);
    finish(place, h, h);
}
";

/// The gates are update, reset and candidate. The reset gate applies after the linear transform.
const GRU_LINEAR: &str = "
fn cell(place: Place, sums: sums_t) {
    let h = state(p.multiplied + place.state);
    if (!place.goes_on) {
        finish(place, h, 0.0);
        return;
    }
    let d = place.direction;
    let update = f(d, clip(sums.x + input_of(place, 0u)));
    let reset = f(d, clip(sums.y + input_of(place, 1u)));
    let candidate = g(d, clip(input_of(place, 2u) + reset * (sums.z + last_bias(place))));
    let now = (1.0 - update) * candidate + update * h;
    finish(place, now, now);
}
";

/// The first phase of the standard GRU. Slot 1 receives the update gates, slot 2 the reset state
/// that the candidate multiplies.
const GRU_GATES: &str = "
fn cell(place: Place, sums: sums_t) {
    let at = place.state;
    let d = place.direction;
    set_state(p.size + at, f(d, clip(sums.x + input_of(place, 0u))));
    let reset = f(d, clip(sums.y + input_of(place, 1u)));
    set_state(2u * p.size + at, reset * state(at));
}
";

const GRU_CANDIDATE: &str = "
fn cell(place: Place, sums: sums_t) {
    let h = state(place.state);
    if (!place.goes_on) {
        finish(place, h, 0.0);
        return;
    }
    let update = state(p.size + place.state);
    let candidate = g(place.direction, clip(sums + input_of(place, 2u)));
    let now = (1.0 - update) * candidate + update * h;
    finish(place, now, now);
}
";

const RNN: &str = "
fn cell(place: Place, sums: sums_t) {
    if (!place.goes_on) {
        finish(place, state(p.multiplied + place.state), 0.0);
        return;
    }
    let now = f(place.direction, clip(sums + input_of(place, 0u)));
    finish(place, now, now);
}
";

/// Generates `f(direction, v)`, `g` and `h_` (the activations that the operator has) and `clip(v)`.
pub(super) fn functions(op: &str, attrs: &Attributes, layer: &Recurrent) -> Result<String> {
    let mut cells = Vec::with_capacity(layer.directions);
    for cell in activations(op, attrs, layer.directions)? {
        cells.push(cell.iter().map(expression).collect::<Result<Vec<String>>>()?);
    }
    let count = cells.first().map_or(0, Vec::len);
    let mut code = String::new();
    for (at, function) in ["f", "g", "h_"].iter().take(count).enumerate() {
        let value =
            |direction: usize| cells.get(direction).and_then(|cell| cell.get(at)).map_or("v", String::as_str);
        // Writing to a string does not fail.
        let _ = writeln!(code, "fn {function}(direction: u32, v: f32) -> f32 {{");
        if layer.directions > 1 && value(0) != value(1) {
            let _ = writeln!(code, "if (direction == 1u) {{ return {}; }}", value(1));
        }
        let _ = writeln!(code, "return {};\n}}", value(0));
    }
    // An infinite bound clips nothing, and WGSL rejects it as a constant.
    let clipped = match layer.clip.filter(|bound| bound.is_finite()) {
        Some(bound) => format!("clamp(v, {}, {})", number(-bound)?, number(bound)?),
        None => "v".to_owned(),
    };
    let _ = writeln!(code, "fn clip(v: f32) -> f32 {{ return {clipped}; }}");
    Ok(code)
}

/// Renders a finite number.
fn number(value: f32) -> Result<String> {
    ensure!(value.is_finite(), NotImplemented, "an activation with the parameter {value}");
    Ok(format!("f32({value:?})"))
}

/// Renders an activation of `v`.
fn expression(activation: &CellActivation) -> Result<String> {
    let (alpha, beta) = (number(activation.alpha)?, number(activation.beta)?);
    Ok(match activation.function {
        CellFunction::Relu => "max(v, 0.0)".to_owned(),
        CellFunction::Tanh => "tanh_(v)".to_owned(),
        CellFunction::Sigmoid => "sigmoid_(v)".to_owned(),
        CellFunction::Affine => format!("({alpha} * v + {beta})"),
        CellFunction::LeakyRelu => format!("select(v, {alpha} * v, v < 0.0)"),
        CellFunction::ThresholdedRelu => format!("select(0.0, v, v > {alpha})"),
        CellFunction::ScaledTanh => format!("({alpha} * tanh_({beta} * v))"),
        CellFunction::HardSigmoid => format!("clamp({alpha} * v + {beta}, 0.0, 1.0)"),
        CellFunction::Elu => format!("select({alpha} * expm1_(v), v, v >= 0.0)"),
        CellFunction::Softsign => "(v / (1.0 + abs(v)))".to_owned(),
        CellFunction::Softplus => "(log1p_(exp_(-abs(v))) + max(v, 0.0))".to_owned(),
    })
}
