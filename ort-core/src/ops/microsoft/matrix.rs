//! `FusedMatMul` and `TransposeMatMul`: matmuls with transposed operands and a scale.

use super::{becomes, float, int, number};
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::batch;
use crate::ops::linalg::matmul::product_shape;
use crate::spec::{BatchRule, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

const PRODUCT: OpSpec = OpSpec {
    domain: MICROSOFT,
    inputs: &[one("A", "T"), one("B", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    cost: Cost::Compute,
    ..OP
};

static FUSED_MATMUL: OpSpec = OpSpec {
    name: "FusedMatMul",
    attrs: &[
        attr::float("alpha", 1.0),
        attr::int("transA", 0),
        attr::int("transB", 0),
        attr::int("transBatchA", 0),
        attr::int("transBatchB", 0),
    ],
    infer,
    lower: Some(lower),
    batch: BatchRule::Rule(batch::matmul),
    ..PRODUCT
};

/// The predecessor of `FusedMatMul`.
static TRANSPOSE_MATMUL: OpSpec = OpSpec {
    name: "TransposeMatMul",
    attrs: &[attr::float("alpha", 1.0), attr::int("transA", 0), attr::int("transB", 0)],
    upgrades: &[becomes(|draft| {
        draft.op = "FusedMatMul".to_string();
        Ok(())
    })],
    batch: BatchRule::Rule(batch::matmul),
    ..PRODUCT
};

ops![FUSED_MATMUL, TRANSPOSE_MATMUL];

/// The attributes that transpose each operand: the last two axes, and the first axis with the
/// batch.
const SIDES: [[&str; 2]; 2] = [["transA", "transBatchA"], ["transB", "transBatchB"]];

/// Returns the permutation that transposes an operand. `batch` moves the first axis behind the
/// batch axes, then `matrix` swaps the last two. A vector stays as it is.
fn order(rank: usize, matrix: bool, batch: bool) -> Result<Vec<usize>> {
    let mut order: Vec<usize> = (0..rank).collect();
    if batch {
        ensure!(
            rank >= 3,
            InvalidGraph,
            "a side of rank {rank} has no batch to transpose, expected 3 or more"
        );
        order
            .iter_mut()
            .take(rank - 1)
            .enumerate()
            .for_each(|(place, axis)| *axis = (place + 1) % (rank - 1));
    }
    if matrix && rank >= 2 {
        order.swap(rank - 1, rank - 2);
    }
    Ok(order)
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let side = |index: usize, [matrix, batch]: [&str; 2]| -> Result<Option<Vec<Dim>>> {
        let Some(shape) = cx.shape(index) else { return Ok(None) };
        let order = order(shape.len(), cx.attrs.flag(matrix)?, cx.attrs.flag(batch)?)?;
        Ok(Some(order.into_iter().filter_map(|axis| shape.get(axis).cloned()).collect()))
    };
    let [left, right] = SIDES;
    let (Some(left), Some(right)) = (side(0, left)?, side(1, right)?) else { return Ok(()) };
    let shape = product_shape(&left, &right)?;
    cx.set_shape(0, shape)
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let alpha = float(draft, "alpha")?;
    let ranks = [0, 1].map(|index| draft.shape(index).map(|shape| shape.len()));
    let sides @ [left, right] = [draft.required(0)?, draft.required(1)?];
    // Two matrices are a `Gemm`, which scales and transposes in one pass.
    if ranks == [Some(2), Some(2)] {
        // `infer` refuses `transBatchA` and `transBatchB` for matrices, so `Gemm` has no need of
        // them.
        let attrs = [
            ("alpha", Attribute::Float(alpha)),
            ("transA", Attribute::Int(i64::from(int(draft, "transA")? != 0))),
            ("transB", Attribute::Int(i64::from(int(draft, "transB")? != 0))),
        ];
        draft.become_op("Gemm", &sides, &attrs);
        return Ok(());
    }
    let [a, b] = [transposed(draft, (0, left), SIDES[0])?, transposed(draft, (1, right), SIDES[1])?];
    if alpha == 1.0 {
        draft.become_op("MatMul", &[a, b], &[]);
        return Ok(());
    }
    let dtype = draft.dtype(0)?;
    let product = draft.emit("MatMul", &[a, b], &[])?;
    let alpha = number(draft, alpha, dtype)?;
    draft.become_op("Mul", &[product, alpha], &[]);
    Ok(())
}

/// Emits the transposed operand at `index`.
fn transposed(
    draft: &mut Draft<'_>,
    (index, side): (usize, ValueId),
    [matrix, batch]: [&str; 2],
) -> Result<ValueId> {
    let (matrix, batch) = (int(draft, matrix)? != 0, int(draft, batch)? != 0);
    if !matrix && !batch {
        return Ok(side);
    }
    let Some(rank) = draft.shape(index).map(|shape| shape.len()) else {
        return transposed_as_it_comes(draft, side, matrix, batch);
    };
    let order: Vec<i64> = order(rank, matrix, batch)?.into_iter().map(|axis| axis as i64).collect();
    draft.emit("Transpose", &[side], &[("perm", Attribute::Ints(order))])
}

/// Transposes an operand of unknown rank. Adjacent axes that stay together are merged into one,
/// which leaves rank 3; a vector counts as a matrix of one row.
fn transposed_as_it_comes(
    draft: &mut Draft<'_>,
    side: ValueId,
    matrix: bool,
    batch: bool,
) -> Result<ValueId> {
    let (ends, order): ([Option<i64>; 2], [usize; 3]) = match (batch, matrix) {
        // With a batch the groups are the first axis, the batch axes and the last axis. Otherwise
        // they are the batch axes and the two axes of the matrix.
        (true, true) => ([Some(1), Some(-1)], [1, 2, 0]),
        (true, false) => ([Some(1), Some(-1)], [1, 0, 2]),
        (false, _) => ([Some(-2), Some(-1)], [0, 2, 1]),
    };
    // `parts` are the shapes of the three groups of axes, `sizes` their products.
    let (mut parts, mut sizes) = (Vec::new(), Vec::new());
    for (start, end) in [(Some(0), ends[0]), (ends[0], ends[1]), (ends[1], None)] {
        let range = [("start", start), ("end", end)];
        let range: Vec<_> =
            range.into_iter().filter_map(|(name, at)| Some((name, Attribute::Int(at?)))).collect();
        let part = draft.emit("Shape", &[side], &range)?;
        sizes.push(draft.emit("ReduceProd", &[part], &[])?);
        parts.push(part);
    }
    let concat = [("axis", Attribute::Int(0))];
    let as_given = [("allowzero", Attribute::Int(1))];
    let sizes = draft.emit("Concat", &sizes, &concat)?;
    // The product of no sizes is 1, so an empty group becomes an axis of size 1.
    let grouped = draft.emit("Reshape", &[side, sizes], &as_given)?;
    let perm = order.iter().map(|&axis| axis as i64).collect();
    let turned = draft.emit("Transpose", &[grouped], &[("perm", Attribute::Ints(perm))])?;
    let parts: Vec<ValueId> = order.iter().filter_map(|&axis| parts.get(axis).copied()).collect();
    let shape = draft.emit("Concat", &parts, &concat)?;
    draft.emit("Reshape", &[turned, shape], &as_given)
}
