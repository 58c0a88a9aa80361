//! Recurrent layers: `RNN`, `GRU` and `LSTM`, and `DynamicQuantizeLSTM` of `com.microsoft`.

use super::recurrent_gradients;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::SymShape;
use crate::ops;
use crate::ops::batch;
use crate::spec::{
    AttrKind, AttrSpec, BatchRule, Cost, Draft, Grad, InferCx, MICROSOFT, OP, OpSpec, Param, TypeVar,
    Upgrade, attr, one, opt, var,
};
use crate::{ErrorKind, Result, ensure, error};

const TYPES: &[TypeVar] = &[var("T", TypeSet::FLOATS), var("T1", TypeSet::of(&[DType::I32]))];
const X: Param = one("X", "T");
const W: Param = one("W", "T");
const R: Param = one("R", "T");
const B: Param = opt("B", "T");
const SEQUENCE_LENS: Param = opt("sequence_lens", "T1");
const INITIAL_H: Param = opt("initial_h", "T");
const Y: Param = opt("Y", "T");
const Y_H: Param = opt("Y_h", "T");

const ALPHA: AttrSpec = attr::optional("activation_alpha", AttrKind::Floats);
const BETA: AttrSpec = attr::optional("activation_beta", AttrKind::Floats);
const ACTIVATIONS: AttrSpec = attr::optional("activations", AttrKind::Strings);
const CLIP: AttrSpec = attr::optional("clip", AttrKind::Float);
const DIRECTION: AttrSpec = attr::string("direction", "forward");
const HIDDEN_SIZE: AttrSpec = attr::optional("hidden_size", AttrKind::Int);
const LAYOUT: AttrSpec = attr::int("layout", 0);

const UPGRADES: &[Upgrade] = &[Upgrade { before: 7, apply: drop_output_sequence }];

static RNN: OpSpec = OpSpec {
    name: "RNN",
    grad: Grad::Rule(recurrent_gradients::of_recurrent),
    since: 22,
    inputs: &[X, W, R, B, SEQUENCE_LENS, INITIAL_H],
    outputs: &[Y, Y_H],
    types: TYPES,
    attrs: &[
        ALPHA,
        BETA,
        attr::strings("activations", &["Tanh", "Tanh"]),
        CLIP,
        DIRECTION,
        HIDDEN_SIZE,
        LAYOUT,
    ],
    cost: Cost::Compute,
    infer: |cx| infer(cx, 1),
    upgrades: UPGRADES,
    batch: BatchRule::Rule(batch::recurrent),
    ..OP
};

static GRU: OpSpec = OpSpec {
    name: "GRU",
    grad: Grad::Rule(recurrent_gradients::of_recurrent),
    since: 22,
    inputs: &[X, W, R, B, SEQUENCE_LENS, INITIAL_H],
    outputs: &[Y, Y_H],
    types: TYPES,
    attrs: &[
        ALPHA,
        BETA,
        ACTIVATIONS,
        CLIP,
        DIRECTION,
        HIDDEN_SIZE,
        LAYOUT,
        attr::int("linear_before_reset", 0),
    ],
    cost: Cost::Compute,
    infer: |cx| infer(cx, 3),
    upgrades: UPGRADES,
    batch: BatchRule::Rule(batch::recurrent),
    ..OP
};

static LSTM: OpSpec = OpSpec {
    name: "LSTM",
    grad: Grad::Rule(recurrent_gradients::of_recurrent),
    since: 22,
    inputs: &[X, W, R, B, SEQUENCE_LENS, INITIAL_H, opt("initial_c", "T"), opt("P", "T")],
    outputs: &[Y, Y_H, opt("Y_c", "T")],
    types: TYPES,
    attrs: &[ALPHA, BETA, ACTIVATIONS, CLIP, DIRECTION, HIDDEN_SIZE, attr::int("input_forget", 0), LAYOUT],
    cost: Cost::Compute,
    infer: |cx| infer(cx, 4),
    upgrades: UPGRADES,
    batch: BatchRule::Rule(batch::recurrent),
    ..OP
};

/// An `LSTM` with transposed 8-bit weights. The kernel quantizes inputs and states just before each
/// GEMM.
static DYNAMIC_QUANTIZE_LSTM: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "DynamicQuantizeLSTM",
    inputs: &[
        X,
        one("W", "T2"),
        one("R", "T2"),
        B,
        SEQUENCE_LENS,
        INITIAL_H,
        opt("initial_c", "T"),
        opt("P", "T"),
        one("W_scale", "T"),
        one("W_zero_point", "T2"),
        one("R_scale", "T"),
        one("R_zero_point", "T2"),
    ],
    outputs: &[Y, Y_H, opt("Y_c", "T")],
    types: &[
        var("T", TypeSet::of(&[DType::F32])),
        var("T1", TypeSet::of(&[DType::I32])),
        var("T2", TypeSet::of(&[DType::I8, DType::U8])),
    ],
    attrs: &[ALPHA, BETA, ACTIVATIONS, CLIP, DIRECTION, HIDDEN_SIZE, attr::int("input_forget", 0)],
    cost: Cost::Compute,
    infer: infer_quantized,
    ..OP
};

ops![RNN, GRU, LSTM, DYNAMIC_QUANTIZE_LSTM];

/// Drops `output_sequence`: since version 7, a node that wants the whole sequence has the first
/// output.
fn drop_output_sequence(draft: &mut Draft<'_>) -> Result<()> {
    draft.take_attr("output_sequence");
    Ok(())
}

/// The recurrence weights are (directions, gates * hidden, hidden).
fn infer(cx: &mut InferCx<'_>, gates: i64) -> Result<()> {
    let hidden = cx.shape(2).and_then(<[Dim]>::last).cloned();
    let state = infer_states(cx, hidden.clone())?;
    let (Some([_, _, width]), Some(hidden), Some(state)) = (cx.shape(0), hidden, state) else {
        return Ok(());
    };
    let directions = directions(cx)?;
    let rows = &hidden * gates;
    cx.require_shape(1, &[directions.clone(), rows.clone(), width.clone()], ErrorKind::InvalidArgument)?;
    cx.require_shape(2, &[directions.clone(), rows.clone(), hidden.clone()], ErrorKind::InvalidArgument)?;
    cx.require_shape(3, &[directions.clone(), rows * 2], ErrorKind::InvalidArgument)?;
    for index in [5, 6] {
        cx.require_shape(index, &state, ErrorKind::Fail)?;
    }
    cx.require_shape(7, &[directions, hidden * 3], ErrorKind::Fail)
}

/// The recurrence weights are (directions, hidden, 4 * hidden). Scales and zero points are per
/// direction, or per column of a direction.
fn infer_quantized(cx: &mut InferCx<'_>) -> Result<()> {
    let may_equal = |a: &Dim, b: &Dim| a.as_constant().zip(b.as_constant()).is_none_or(|(a, b)| a == b);
    for (index, of) in [(8, 1), (9, 1), (10, 2), (11, 2)] {
        let (Some(own), Some(weights)) = (cx.shape(index), cx.shape(of)) else { continue };
        let [directions, _, columns] = weights else { continue };
        let fits = match own {
            [own] => may_equal(own, directions),
            [own, width] => may_equal(own, directions) && may_equal(width, columns),
            _ => false,
        };
        ensure!(fits, InvalidGraph, "input {index} is not one for each direction or column of input {of}");
    }
    let hidden = cx.shape(2).and_then(|shape| shape.get(1)).cloned();
    infer_states(cx, hidden).map(|_| ())
}

fn directions(cx: &InferCx<'_>) -> Result<Dim> {
    match cx.attrs.string("direction")? {
        "forward" | "reverse" => Ok(Dim::constant(1)),
        "bidirectional" => Ok(Dim::constant(2)),
        other => {
            Err(error!(InvalidGraph, "direction is '{other}', expected forward, reverse or bidirectional"))
        }
    }
}

/// Infers the outputs, and returns the shape of a state.
fn infer_states(cx: &mut InferCx<'_>, hidden: Option<Dim>) -> Result<Option<SymShape>> {
    let directions = directions(cx)?;
    // The weights win over `hidden_size`, which is optional.
    let given = cx.attrs.find_int("hidden_size").map(Dim::constant);
    let Some(hidden) = hidden.or(given) else { return Ok(None) };
    let Some(x) = cx.shape(0) else { return Ok(None) };
    let [first, second, _] = x else {
        return Err(error!(InvalidGraph, "the input has rank {}, expected 3", x.len()));
    };
    // The ranks of W, R, B, sequence_lens and initial_h.
    for (index, rank) in [(1, 3), (2, 3), (3, 2), (4, 1), (5, 3)] {
        let fits = cx.shape(index).is_none_or(|shape| shape.len() == rank);
        ensure!(fits, InvalidGraph, "input {index} does not have rank {rank}");
    }
    // Layout 0 is (steps, batch, ...), layout 1 is (batch, steps, ...); directions sit next to
    // hidden.
    let (y, state) = if cx.attrs.find_int("layout").is_some_and(|layout| layout != 0) {
        (
            vec![first.clone(), second.clone(), directions.clone(), hidden.clone()],
            [first.clone(), directions, hidden],
        )
    } else {
        (
            vec![first.clone(), directions.clone(), second.clone(), hidden.clone()],
            [directions, second.clone(), hidden],
        )
    };
    cx.set_shape(0, y)?;
    cx.set_shape(1, state.to_vec())?;
    // `Y_c` has the shape of `Y_h`. The operators without it ignore this.
    cx.set_shape(2, state.to_vec())?;
    Ok(Some(state.to_vec()))
}
