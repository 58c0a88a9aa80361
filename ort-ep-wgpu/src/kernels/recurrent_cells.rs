//! Cell equations of `LSTM`, `GRU` and `RNN`, and the activations that their attributes name.

use std::fmt::Write as _;

use ort_core::ir::Attributes;
use ort_core::{Result, ensure, error};

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

/// Returns the number of gates.
pub(super) fn gates(op: &str) -> usize {
    match op {
        "LSTM" => 4,
        "GRU" => 3,
        _ => 1,
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
pub(super) fn activations(op: &str, attrs: &Attributes, directions: usize) -> Result<String> {
    let defaults: &[&str] = match op {
        "LSTM" => &["Sigmoid", "Tanh", "Tanh"],
        "GRU" => &["Sigmoid", "Tanh"],
        _ => &["Tanh"],
    };
    let needed = directions * defaults.len();
    let mut names: Vec<&str> =
        attrs.find_strings("activations").unwrap_or(&[]).iter().map(String::as_str).collect();
    if names.is_empty() {
        names = defaults.repeat(directions);
    }
    ensure!(names.len() >= needed, InvalidGraph, "{} activations, expected {needed}", names.len());
    let mut alphas = attrs.find_floats("activation_alpha").unwrap_or(&[]).iter().copied();
    let mut betas = attrs.find_floats("activation_beta").unwrap_or(&[]).iter().copied();
    let mut values = Vec::with_capacity(needed);
    for name in names.into_iter().take(needed) {
        values.push(activation(name, &mut alphas, &mut betas)?);
    }
    let mut code = String::new();
    for (at, function) in ["f", "g", "h_"].iter().take(defaults.len()).enumerate() {
        let value =
            |direction: usize| values.get(direction * defaults.len() + at).map_or("v", String::as_str);
        // Writing to a string does not fail.
        let _ = writeln!(code, "fn {function}(direction: u32, v: f32) -> f32 {{");
        if directions > 1 && value(0) != value(1) {
            let _ = writeln!(code, "if (direction == 1u) {{ return {}; }}", value(1));
        }
        let _ = writeln!(code, "return {};\n}}", value(0));
    }
    let clipped = match attrs.find_float("clip").filter(|bound| *bound > 0.0 && bound.is_finite()) {
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

/// Renders an activation of `v`. It takes its parameters from the front of the lists.
fn activation(
    name: &str,
    alphas: &mut impl Iterator<Item = f32>,
    betas: &mut impl Iterator<Item = f32>,
) -> Result<String> {
    let mut alpha = |default| number(alphas.next().unwrap_or(default));
    let mut beta = |default| number(betas.next().unwrap_or(default));
    Ok(match name.to_ascii_lowercase().as_str() {
        "relu" => "max(v, 0.0)".to_owned(),
        "tanh" => "tanh_(v)".to_owned(),
        "sigmoid" => "sigmoid_(v)".to_owned(),
        "affine" => format!("({} * v + {})", alpha(1.0)?, beta(0.0)?),
        "leakyrelu" => format!("select(v, {} * v, v < 0.0)", alpha(0.01)?),
        "thresholdedrelu" => format!("select(0.0, v, v > {})", alpha(1.0)?),
        "scaledtanh" => format!("({} * tanh_({} * v))", alpha(1.0)?, beta(1.0)?),
        "hardsigmoid" => format!("clamp({} * v + {}, 0.0, 1.0)", alpha(0.2)?, beta(0.5)?),
        "elu" => format!("select({} * expm1_(v), v, v >= 0.0)", alpha(1.0)?),
        "softsign" => "(v / (1.0 + abs(v)))".to_owned(),
        "softplus" => "(log1p_(exp_(-abs(v))) + max(v, 0.0))".to_owned(),
        _ => return Err(error!(InvalidGraph, "activation '{name}' is not in the ONNX standard")),
    })
}
