//! Fused training attention: `TrainingAttention` and its gradient.
//!
//! No score matrix is stored for the backward pass.
//!
//! `output = drop(softmax(masked(query * key^T))) * value` (Vaswani et al., Attention Is All You
//! Need, 2017), over any leading axes. Queries come scaled. The gradient recomputes the weights
//! from queries and keys, as in Dao et al., FlashAttention, 2022, algorithm 4. It drops the same
//! elements, because `CounterDropout` depends only on seed, stream and step.
//!
//! With weights `P`, dropped weights `P'` and upstream gradient `dO`: `dV = P'^T dO`,
//! `dP' = dO V^T`, `dS = P' dP' - P rowsum(P' dP')`, `dQ = dS K`, `dK = dS^T Q`.

use super::step::check_scalar;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, Attributes, SymShape, ValueId};
use crate::ops;
use crate::ops::microsoft::draft_attributes;
use crate::spec::{
    AttrSpec, Cost, Draft, Grad, GradCx, InferCx, OP, OpSpec, Param, RUNTIME, attr, one, opt, var,
};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

const QUERY: Param = one("query", "T");
const KEY: Param = one("key", "T");
const VALUE: Param = one("value", "T");
/// An additive mask in the type of the queries, or in float32 for 16-bit queries; or a boolean
/// mask, false where a score becomes `fill`. Broadcast against the scores.
const MASK: Param = opt("mask", "M");
/// The share of weights to drop. Seed and step must come with it.
const RATIO: Param = opt("ratio", "tensor(float)");
const SEED: Param = opt("seed", "tensor(int64)");
const STEP: Param = opt("step", "tensor(int64)");

const ATTRS: &[AttrSpec] = &[attr::float("fill", f32::NEG_INFINITY), attr::int("stream", 0)];

const BASE: OpSpec = OpSpec {
    domain: RUNTIME,
    types: &[var("T", TypeSet::FLOATS), var("M", TypeSet::FLOATS.union(TypeSet::of(&[DType::Bool])))],
    attrs: ATTRS,
    cost: Cost::Compute,
    ..OP
};

static TRAINING_ATTENTION: OpSpec = OpSpec {
    name: "TrainingAttention",
    inputs: &[QUERY, KEY, VALUE, MASK, RATIO, SEED, STEP],
    outputs: &[one("output", "T")],
    infer: infer_forward,
    lower: Some(lower_forward),
    grad: Grad::Rule(gradient),
    ..BASE
};

static TRAINING_ATTENTION_GRAD: OpSpec = OpSpec {
    name: "TrainingAttentionGrad",
    inputs: &[one("output_grad", "T"), QUERY, KEY, VALUE, MASK, RATIO, SEED, STEP],
    outputs: &[opt("query_grad", "T"), opt("key_grad", "T"), opt("value_grad", "T")],
    infer: infer_backward,
    lower: Some(lower_backward),
    grad: Grad::None("it is a gradient, which is not differentiated again"),
    ..BASE
};

ops![TRAINING_ATTENTION, TRAINING_ATTENTION_GRAD];

fn differ(one: &Dim, other: &Dim) -> bool {
    matches!((one.as_constant(), other.as_constant()), (Some(one), Some(other)) if one != other)
}

/// Checks types and shapes of the inputs from index `first` on, and returns the known shapes of
/// queries, keys and values.
fn check<'a>(cx: &InferCx<'a>, first: usize) -> Result<[Option<&'a [Dim]>; 3]> {
    for (index, param) in [RATIO, SEED, STEP].iter().enumerate() {
        check_scalar(cx, first + 4 + index, param.name)?;
    }
    if let (Ok(dtype), Ok(mask)) = (cx.dtype(first), cx.dtype(first + 3)) {
        let is_wider = mask == DType::F32 && matches!(dtype, DType::F16 | DType::BF16);
        ensure!(
            mask == dtype || mask == DType::Bool || is_wider,
            InvalidGraph,
            help = "cast the mask to the type of the queries",
            "a mask of {mask} for queries of {dtype}"
        );
    }
    let given = [4, 5, 6].map(|index| cx.has_input(first + index));
    ensure!(
        given.iter().all(|one| *one == given[0]),
        InvalidGraph,
        help = "give ratio, seed and step, or none of them",
        "dropout has some of its inputs"
    );
    let shapes = [0, 1, 2].map(|index| cx.shape(first + index));
    let [Some(q), Some(k), Some(v)] = shapes else { return Ok(shapes) };
    let fits = match (q, k, v) {
        ([heads @ .., _, d], [key_heads @ .., l, key_d], [value_heads @ .., value_l, _]) => {
            let same = |others: &[Dim]| {
                others.len() == heads.len()
                    && !heads.iter().zip(others).any(|(one, other)| differ(one, other))
            };
            same(key_heads) && same(value_heads) && !differ(d, key_d) && !differ(l, value_l)
        }
        _ => false,
    };
    ensure!(
        fits,
        InvalidGraph,
        help = "give queries [..., S, D], keys [..., L, D] and values [..., L, E] with the same leading axes",
        "queries {q:?}, keys {k:?} and values {v:?} do not match"
    );
    Ok(shapes)
}

fn infer_forward(cx: &mut InferCx<'_>) -> Result<()> {
    let [Some(q), _, Some(v)] = check(cx, 0)? else { return Ok(()) };
    let mut shape: SymShape = q.to_vec();
    if let (Some(last), Some(size)) = (shape.last_mut(), v.last()) {
        *last = size.clone();
    }
    cx.set_shape(0, shape)
}

fn infer_backward(cx: &mut InferCx<'_>) -> Result<()> {
    let shapes = check(cx, 1)?;
    for (index, shape) in shapes.into_iter().enumerate().filter(|(index, _)| *index < 3) {
        if let (true, Some(shape)) = (cx.has_output(index), shape) {
            cx.set_shape(index, shape.to_vec())?;
        }
    }
    Ok(())
}

fn gradient(cx: &mut GradCx<'_>) -> Result<()> {
    if cx.wants(3) {
        return Err(error!(NotImplemented, "the gradient of TrainingAttention by its mask")
            .help("write attention with a trained mask as MatMul, Softmax and MatMul"));
    }
    let mut inputs = vec![Some(cx.upstream()?)];
    inputs.extend((0..7).map(|index| cx.find_input(index)));
    // Trailing absent inputs are no inputs of the node.
    while inputs.last() == Some(&None) {
        inputs.pop();
    }
    let attrs = cx.attr_list();
    let gradients = cx.pen.emit_many_in((RUNTIME, "TrainingAttentionGrad"), &inputs, &attrs, 3)?;
    for (index, gradient) in gradients.into_iter().enumerate() {
        cx.set(index, gradient);
    }
    Ok(())
}

/// Emits attention as standard operators.
struct Parts<'d, 'g> {
    draft: &'d mut Draft<'g>,
    attrs: Attributes,
    /// The input index of the queries.
    first: usize,
}

impl Parts<'_, '_> {
    fn op(&mut self, op: &str, inputs: &[ValueId]) -> Result<ValueId> {
        self.draft.emit(op, inputs, &[])
    }

    /// Transposes the last two axes. The value must have the rank of the queries.
    fn turned(&mut self, value: ValueId) -> Result<ValueId> {
        let rank = self.draft.shape(self.first).map_or(0, |shape| shape.len()) as i64;
        ensure!(rank >= 2, NotImplemented, "attention of queries whose rank is not known");
        let order = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
        self.draft.emit("Transpose", &[value], &[("perm", Attribute::Ints(order))])
    }

    fn weights(&mut self) -> Result<ValueId> {
        let [q, k] = [self.draft.required(self.first)?, self.draft.required(self.first + 1)?];
        // [..., D, L], so that the scores are [..., S, L].
        let k = self.turned(k)?;
        let mut scores = self.op("MatMul", &[q, k])?;
        if let Some(mask) = self.draft.input(self.first + 3) {
            scores = match self.draft.dtype(self.first + 3)? {
                DType::Bool => {
                    let fill = self.filled(self.attrs.float("fill")?)?;
                    self.op("Where", &[mask, scores, fill])?
                }
                _ => {
                    let mask = self.cast(mask)?;
                    self.op("Add", &[scores, mask])?
                }
            };
        }
        self.draft.emit("Softmax", &[scores], &[("axis", Attribute::Int(-1))])
    }

    /// A scalar of the queries' type.
    fn filled(&mut self, value: f32) -> Result<ValueId> {
        let number = self.draft.constant(Tensor::scalar(value)?);
        self.cast(number)
    }

    /// Casts a value to the queries' type.
    fn cast(&mut self, value: ValueId) -> Result<ValueId> {
        let dtype = self.draft.dtype(self.first)?;
        self.draft.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(dtype.onnx_code())))])
    }

    fn dropped(&mut self, value: ValueId) -> Result<ValueId> {
        let given = [4, 5, 6].map(|index| self.draft.input(self.first + index));
        let [Some(ratio), Some(seed), Some(step)] = given else { return Ok(value) };
        let attrs = [("stream", Attribute::Int(self.attrs.int("stream")?))];
        let inputs = [value, ratio, seed, step].map(Some);
        let made = self.draft.emit_in((RUNTIME, "CounterDropout"), &inputs, &attrs, 1)?;
        made.first().copied().ok_or_else(|| error!(Fail, "CounterDropout has no output"))
    }
}

fn lower_forward(draft: &mut Draft<'_>) -> Result<()> {
    let mut parts = Parts { attrs: draft_attributes(draft)?, draft, first: 0 };
    let weights = parts.weights()?;
    let weights = parts.dropped(weights)?;
    let values = parts.draft.required(2)?;
    let output = parts.op("MatMul", &[weights, values])?;
    parts.draft.replace(&[output])
}

fn lower_backward(draft: &mut Draft<'_>) -> Result<()> {
    let mut parts = Parts { attrs: draft_attributes(draft)?, draft, first: 1 };
    let [upstream, q, k, v] = [
        parts.draft.required(0)?,
        parts.draft.required(1)?,
        parts.draft.required(2)?,
        parts.draft.required(3)?,
    ];
    let weights = parts.weights()?;
    let dropped = parts.dropped(weights)?;
    // dV = P'^T dO
    let turned = parts.turned(dropped)?;
    let by_values = parts.op("MatMul", &[turned, upstream])?;
    let values = parts.turned(v)?;
    // P' dP' with dP' = dO V^T, then dS = P' dP' - P rowsum(P' dP').
    let by_weights = parts.op("MatMul", &[upstream, values])?;
    let by_weights = parts.op("Mul", &[dropped, by_weights])?;
    let axis = parts.draft.constant_ints(&[-1])?;
    let sums = parts.op("ReduceSum", &[by_weights, axis])?;
    let sums = parts.op("Mul", &[weights, sums])?;
    let mut by_scores = parts.op("Sub", &[by_weights, sums])?;
    // A masked score is the constant `fill`, so it has no gradient. That matters if `fill` is
    // finite.
    if let (Some(mask), Ok(DType::Bool)) = (parts.draft.input(4), parts.draft.dtype(4)) {
        let zero = parts.filled(0.0)?;
        by_scores = parts.op("Where", &[mask, by_scores, zero])?;
    }
    let by_queries = parts.op("MatMul", &[by_scores, k])?;
    // dQ = dS K and dK = dS^T Q.
    let turned = parts.turned(by_scores)?;
    let by_keys = parts.op("MatMul", &[turned, q])?;
    parts.draft.replace(&[by_queries, by_keys, by_values])
}
