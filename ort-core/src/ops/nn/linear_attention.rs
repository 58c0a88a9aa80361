//! Linear attention: `LinearAttention`, a recurrence over a state matrix per head.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, Cost, Grad, InferCx, OP, OpSpec, attr, one, opt, var};
use crate::{ErrorKind, Result, ensure, error};

const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

/// The operator but for its versions, which that of com.microsoft shares.
pub(crate) const LINEAR_ATTENTION: OpSpec = OpSpec {
    name: "LinearAttention",
    grad: Grad::None("its rule for the state is not written as other operators; a Scan has a gradient"),
    inputs: &[
        one("query", "T"),
        one("key", "T"),
        one("value", "T"),
        opt("past_state", "S"),
        opt("decay", "T"),
        opt("beta", "T"),
    ],
    outputs: &[one("output", "T"), one("present_state", "S")],
    types: &[var("T", FLOATS), var("S", FLOATS)],
    attrs: &[
        attr::int("chunk_size", 64),
        attr::required("kv_num_heads", AttrKind::Int),
        attr::required("q_num_heads", AttrKind::Int),
        attr::float("scale", 0.0),
        attr::string("update_rule", "gated_delta"),
    ],
    cost: Cost::Compute,
    infer,
    ..OP
};

static LINEAR_ATTENTION_27: OpSpec = OpSpec { since: 27, first: 27, ..LINEAR_ATTENTION };

ops![LINEAR_ATTENTION_27];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (queries, heads) = (cx.attrs.int("q_num_heads")?, cx.attrs.int("kv_num_heads")?);
    let fits = heads > 0 && queries > 0 && queries % heads == 0;
    ensure!(fits, InvalidGraph, "{queries} query heads are no multiple of {heads} heads");
    // A past state fixes the type of the present one; without it the state has the type of the
    // query.
    let state_type = cx.dtype(3).or_else(|_| cx.dtype(0))?;
    let (Some(query), Some(value)) = (cx.shape(0), cx.shape(2)) else {
        cx.set(1, state_type, None);
        return Ok(());
    };
    let ([batch, time, query], [_, _, value]) = (query, value) else {
        return Err(error!(InvalidGraph, "query and value must have rank 3"));
    };
    let key_size = query.floor_div(&Dim::constant(queries));
    let value_size = value.floor_div(&Dim::constant(heads));
    // Query heads share the state of their group, but each has an output of its own.
    let state = vec![batch.clone(), Dim::constant(heads), key_size, value_size.clone()];
    cx.require_shape(3, &state, ErrorKind::Fail)?;
    cx.set(1, state_type, Some(state));
    cx.set_shape(0, vec![batch.clone(), time.clone(), value_size * queries])
}
