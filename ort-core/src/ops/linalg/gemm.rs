//! `Gemm`: `alpha * A * B + beta * C` of matrices, either of `A` and `B` optionally transposed.

use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::spec::{
    BatchRule, Cost, Grad, GradCx, InferCx, OP, OpSpec, Upgrade, attr, broadcast, one, opt, var,
};
use crate::{Result, ensure, error};

static GEMM: OpSpec = OpSpec {
    name: "Gemm",
    since: 13,
    inputs: &[one("A", "T"), one("B", "T"), opt("C", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::HIGH_PRECISION)],
    attrs: &[
        attr::float("alpha", 1.0),
        attr::float("beta", 1.0),
        attr::int("transA", 0),
        attr::int("transB", 0),
    ],
    cost: Cost::Compute,
    infer,
    grad: Grad::Rule(gradient),
    upgrades: &[Upgrade {
        before: 7,
        apply: |draft| {
            // From version 7 on `C` always broadcasts, so the flag is dropped.
            draft.take_attr("broadcast");
            Ok(())
        },
    }],
    batch: BatchRule::Rule(batch::gemm),
    ..OP
};

ops![GEMM];

/// Infers the output shape of `Gemm` and `FusedGemm`.
pub(in crate::ops) fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(a), Some(b)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let (rows, left) = matrix("A", a, cx.attrs.flag("transA")?)?;
    let (right, columns) = matrix("B", b, cx.attrs.flag("transB")?)?;
    cx.require_equal("the inner size of B", &right, &left)?;
    let shape = vec![rows, columns];
    if let Some(c) = cx.shape(2) {
        ensure!(c.len() <= 2, InvalidGraph, "C has rank {}, expected 2 or less", c.len());
        let broadcast = broadcast::dims(&[&shape, c])?;
        // `C` must broadcast to the product, but not enlarge it.
        let grows = broadcast.iter().zip(&shape).any(|(to, from)| {
            matches!((to.as_constant(), from.as_constant()), (Some(to), Some(from)) if to != from)
        });
        ensure!(!grows, InvalidGraph, "C does not broadcast to the output");
    }
    cx.set_shape(0, shape)
}

/// Returns the rows and columns of an operand after its transposition.
fn matrix(name: &str, shape: &[Dim], transposed: bool) -> Result<(Dim, Dim)> {
    match shape {
        [rows, columns] if transposed => Ok((columns.clone(), rows.clone())),
        [rows, columns] => Ok((rows.clone(), columns.clone())),
        _ => Err(error!(InvalidGraph, "{name} has rank {}, expected a matrix", shape.len())),
    }
}

/// The gradient of `Gemm`, in which every transposition is folded into a flag of the emitted
/// `Gemm`.
///
/// For plain operands `dA = alpha * dY * B^T`, `dB = alpha * A^T * dY` and `dC = beta * dY`.
fn gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let (a, b, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let (alpha, beta) = (cx.attrs().float("alpha")?, cx.attrs().float("beta")?);
    let (trans_a, trans_b) = (cx.attrs().flag("transA")?, cx.attrs().flag("transB")?);
    // The gradient of a transposed operand is the transpose of the plain one, so the operands swap:
    // `(dY * op(B)^T)^T = op(B) * dY^T`, and likewise for `B`.
    let rows = if trans_a { (b, upstream, trans_b, true) } else { (upstream, b, false, !trans_b) };
    let columns = if trans_b { (upstream, a, true, trans_a) } else { (a, upstream, !trans_a, false) };
    for (index, (left, right, trans_left, trans_right)) in [rows, columns].into_iter().enumerate() {
        if cx.wants(index) {
            let attrs = [
                ("alpha", Attribute::Float(alpha)),
                ("transA", Attribute::Int(i64::from(trans_left))),
                ("transB", Attribute::Int(i64::from(trans_right))),
            ];
            let gradient = cx.emit("Gemm", &[left, right], &attrs)?;
            cx.set(index, gradient);
        }
    }
    if cx.wants(2) {
        // `C` may have broadcast, so its gradient is summed back to its shape.
        let beta = cx.number(f64::from(beta), cx.dtype(upstream)?)?;
        let gradient = cx.emit("Mul", &[upstream, beta], &[])?;
        cx.set_broadcast(2, gradient)?;
    }
    Ok(())
}
