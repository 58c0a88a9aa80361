//! `Attention` kernels.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::nn::HIDDEN_IS_NAN;
use ort_core::{Result, ensure, error};

use super::attend::{Attend, Causal, Lengths, Mask, Sinks, Sizes};
use super::heads::{Placing, Rows};
use super::lines::SHORT_FLOATS;
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

/// Mask types: added floats, or booleans.
const MASKS: TypeSet = SHORT_FLOATS.union(TypeSet::of(&[DType::Bool, DType::I32, DType::I64]));

cuda_kernels![CudaKernel {
    def: KernelDef {
        op: "Attention",
        types: &[("T1", SHORT_FLOATS), ("T2", SHORT_FLOATS), ("U", MASKS)],
        when,
        ..KernelDef::BASE
    },
    launches,
    workspace: Some(workspace),
    counted: None,
}];

/// The `qk_matmul_output_mode` that returns scores after the softmax.
const WEIGHTS: i64 = 3;

fn when(node: &NodeView<'_>) -> bool {
    let attrs = node.attrs();
    let in_double = attrs.find_int("softmax_precision") == Some(i64::from(DType::F64.onnx_code()));
    let has_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    let wants_weights = has_scores && attrs.find_int("qk_matmul_output_mode").unwrap_or(0) >= WEIGHTS;
    // Softmax weights are computed in place from the scores in the output, and a narrower type
    // would round the scores in between.
    !in_double && (!wants_weights || node.dtype(0) == Some(DType::F32))
}

/// The heads of queries, keys or values.
#[derive(Clone, Copy)]
struct Heads {
    /// Batch, heads, rows and row size.
    sizes: [usize; 4],
    by_token: bool,
}

impl Heads {
    fn new(cx: &OpCx<'_>, input: usize, heads: &str) -> Result<Heads> {
        let heads = usize::try_from(cx.attrs.find_int(heads).unwrap_or(0)).unwrap_or(0);
        match *cx.input(input)?.shape {
            [batch, heads, rows, size] => Ok(Heads { sizes: [batch, heads, rows, size], by_token: false }),
            [batch, rows, width] if width.checked_rem(heads) == Some(0) => {
                Ok(Heads { sizes: [batch, heads, rows, width / heads], by_token: true })
            }
            ref shape => Err(error!(InvalidArgument, "shape {shape:?} does not split into {heads} heads")),
        }
    }

    /// Returns the rows of a tensor with this layout, but with rows of another size.
    fn rows_of(&self, operand: &Operand, size: usize) -> Rows {
        let [_, heads, rows, _] = self.sizes;
        match self.by_token {
            true => Rows::by_token(operand, [heads, rows, size], (0, 1)),
            false => Rows::by_head(operand, [heads, rows, size]),
        }
    }
}

/// What a node computes for some shapes.
struct Plan {
    q: Heads,
    /// Of keys and values.
    kv: [Heads; 2],
    past: usize,
    sizes: Sizes,
    /// Workspace tensors: past and new keys and values joined if no output holds them, and float32
    /// copies if their types differ.
    joined: [Option<Operand>; 2],
    widened: [Option<Operand>; 2],
    taken: usize,
}

impl Plan {
    fn new(cx: &OpCx<'_>) -> Result<Plan> {
        let q = Heads::new(cx, 0, "q_num_heads")?;
        let kv = [Heads::new(cx, 1, "kv_num_heads")?, Heads::new(cx, 2, "kv_num_heads")?];
        let ([batch, heads, queries, size], [k, v]) = (q.sizes, kv.map(|heads| heads.sizes));
        let ([_, key_heads, fresh, _], [.., value_size]) = (k, v);
        let fits = k == [batch, key_heads, fresh, size] && v == [batch, key_heads, fresh, value_size];
        let divides = heads.checked_rem(key_heads) == Some(0);
        ensure!(fits && divides, InvalidArgument, "{:?}, {k:?} and {v:?} do not match", q.sizes);
        let past = cx.find_input(4).map_or(0, |past| past.size(2));
        for (index, size) in [size, value_size].into_iter().enumerate() {
            let given = cx.find_input(4 + index);
            let fits = given.is_none_or(|given| *given.shape == [batch, key_heads, past, size]);
            ensure!(
                fits,
                InvalidArgument,
                "the past has shape {:?}, which does not match keys and values",
                given.map(|given| &given.shape)
            );
        }
        let keys = past.saturating_add(fresh);
        let sizes = Sizes { batch, heads, key_heads, queries, keys, size, value_size };
        let mut plan = Plan { q, kv, past, sizes, joined: [None, None], widened: [None, None], taken: 0 };
        let types = [cx.input(1)?.dtype, cx.input(2)?.dtype];
        for (which, (size, dtype)) in [size, value_size].into_iter().zip(types).enumerate() {
            let shape = [batch, key_heads, keys, size];
            let joins = past > 0 && cx.find_output(1 + which).is_none();
            let widens = types != [dtype; 2] && dtype != DType::F32;
            let mut room = |dtype| Some(cx.workspace(&mut plan.taken, dtype, &shape));
            let (joined, widened) =
                (if joins { room(dtype) } else { None }, if widens { room(DType::F32) } else { None });
            plan.joined.get_mut(which).into_iter().for_each(|place| place.clone_from(&joined));
            plan.widened.get_mut(which).into_iter().for_each(|place| place.clone_from(&widened));
        }
        Ok(plan)
    }

    /// Returns the common type of keys and values.
    fn key_type(&self, cx: &OpCx<'_>) -> Result<DType> {
        let own = cx.input(1)?.dtype;
        Ok(if own == cx.input(2)?.dtype { own } else { DType::F32 })
    }

    /// Returns keys and values, joined with the past where an output or the attention needs that.
    fn caches(&self, cx: &OpCx<'_>, launches: &mut Vec<Launch>) -> Result<[Rows; 2]> {
        let ([k, v], keys) = (self.kv, self.sizes.keys);
        let fresh = [k.rows_of(cx.input(1)?, k.sizes[3]), v.rows_of(cx.input(2)?, v.sizes[3])];
        let [k_rows, v_rows] = &fresh;
        let placings = [(k, k_rows, 4), (v, v_rows, 5)].map(|(own, rows, past)| {
            let (past, lengths) = (cx.find_input(past), Lengths::all(self.past));
            Placing { past, lengths, ..Placing::new(own.sizes, rows) }
        });
        let to = |(own, which): (Heads, usize)| {
            let to = cx.find_output(1 + which).or(self.joined.get(which).and_then(Option::as_ref));
            let [_, heads, _, size] = own.sizes;
            to.map(|to| Rows::by_head(to, [heads, keys, size]))
        };
        let to = [(k, 0), (v, 1)].map(to);
        // If both are written, one launch copies keys and values together.
        match (&placings, &to) {
            ([k, v], [Some(k_to), Some(v_to)]) => {
                launches.extend(Placing::both([(k, k_to), (v, v_to)], keys)?)
            }
            _ => {
                for (placing, to) in placings.iter().zip(&to) {
                    launches.extend(to.as_ref().map_or(Ok(Vec::new()), |to| placing.launches(to, keys))?);
                }
            }
        }
        // Without a past, the attention can read the new rows where they are.
        let [k_to, v_to] = to.map(|to| to.filter(|_| self.past > 0));
        let [k_rows, v_rows] = fresh.clone();
        let k = self.widen(0, k, k_to.unwrap_or(k_rows), launches)?;
        Ok([k, self.widen(1, v, v_to.unwrap_or(v_rows), launches)?])
    }

    /// Converts keys (0) or values (1) to their common type.
    fn widen(&self, which: usize, own: Heads, rows: Rows, launches: &mut Vec<Launch>) -> Result<Rows> {
        let Some(wide) = self.widened.get(which).and_then(Option::as_ref) else { return Ok(rows) };
        let ([batch, heads, fresh, size], keys) = (own.sizes, self.sizes.keys);
        let (wide, many) = (Rows::by_head(wide, [heads, keys, size]), self.past.saturating_add(fresh));
        launches.extend(Placing::new([batch, heads, many, size], &rows).launches(&wide, keys)?);
        Ok(wide)
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let plan = Plan::new(cx)?;
    let (mut taken, types) = (plan.taken, [cx.input(0)?.dtype, plan.key_type(cx)?]);
    plan.sizes.parts(cx, types, cx.find_output(3).is_some(), &mut taken)?;
    Ok(taken)
}

/// Broadcasts a mask to (batch, heads, queries, keys); it may have fewer keys.
fn mask_of<'a>(operand: &'a Operand, sizes: &Sizes) -> Result<Mask<'a>> {
    let shape = &operand.shape;
    let mut full = [1; 4];
    ensure!(
        (1..=4).contains(&shape.len()),
        InvalidArgument,
        "the mask has shape {shape:?}, expected rank 1 to 4"
    );
    full.iter_mut().rev().zip(shape.iter().rev()).for_each(|(full, size)| *full = *size);
    let whole = [sizes.batch, sizes.heads, sizes.queries];
    let fits = full.iter().zip(whole).all(|(size, whole)| *size == 1 || *size == whole);
    let [.., keys] = full;
    ensure!(
        fits && keys <= sizes.keys,
        InvalidArgument,
        "the mask of shape {shape:?} does not broadcast to the scores of shape {sizes:?}"
    );
    Ok(Mask::new(operand, full))
}

fn lengths_of<'a>(cx: &'a OpCx<'_>, plan: &Plan) -> Result<Lengths<'a>> {
    let Some(of) = cx.find_input(6) else { return Ok(Lengths::all(plan.past)) };
    let enough = of.count() == plan.sizes.batch;
    ensure!(enough, InvalidArgument, "nonpad_kv_seqlen does not have a value for each batch");
    Ok(Lengths { of: Some(of), more: 0, at_end: plan.past == 0, before: plan.past })
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let plan = Plan::new(cx)?;
    let sizes = plan.sizes;
    let mut launches = Vec::new();
    let [k, v] = plan.caches(cx, &mut launches)?;
    let mode = cx.attrs.int("qk_matmul_output_mode")?;
    ensure!((0..=WEIGHTS).contains(&mode), InvalidGraph, "qk_matmul_output_mode is {mode}, expected 0 to 3");
    let attend = Attend {
        sizes,
        q: plan.q.rows_of(cx.input(0)?, sizes.size),
        k,
        v,
        y: plan.q.rows_of(cx.output(0)?, sizes.value_size),
        q_bias: None,
        scale: cx.attrs.find_float("scale").unwrap_or(1.0 / (sizes.size as f32).sqrt()),
        softcap: cx.attrs.float("softcap")?,
        causal: if cx.attrs.flag("is_causal")? { Causal::Yes } else { Causal::No },
        windows: [cx.attrs.int("left_window_size")?, cx.attrs.int("right_window_size")?],
        lengths: lengths_of(cx, &plan)?,
        mask: cx.find_input(3).map(|mask| mask_of(mask, &sizes)).transpose()?,
        padding: None,
        sinks: Sinks::None,
        hidden_is_nan: cx.attrs.find_int(HIDDEN_IS_NAN) == Some(1),
        scores: cx.find_output(3).map(|scores| (scores, mode)),
    };
    launches.extend(attend.launches(cx, plan.taken)?);
    Ok(launches)
}
