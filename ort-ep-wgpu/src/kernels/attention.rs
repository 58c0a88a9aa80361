//! `Attention` of the ONNX domain.

use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::nn::HIDDEN_IS_NAN;
use ort_core::{Result, ensure, error};

use super::attend::{Attend, Causal, Lengths, Mask, Scores, Sinks, Sizes, Stage};
use super::elementwise::FLOATS;
use super::heads::{Placing, Rows};
use super::lines::product;
use super::softmax::weights;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::TYPES;

wgpu_kernels![WgpuKernel {
    def: KernelDef {
        op: "Attention",
        types: &[("T1", FLOATS), ("T2", FLOATS), ("U", TYPES)],
        when,
        ..KernelDef::BASE
    },
    dispatches,
    workspace: Some(workspace),
}];

/// The `qk_matmul_output_mode` after the softmax.
const WEIGHTS: i64 = 3;

fn when(node: &NodeView<'_>) -> bool {
    let attrs = node.attrs();
    let is_double = attrs.find_int("softmax_precision") == Some(i64::from(DType::F64.onnx_code()));
    let wants_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    let mode = attrs.find_int("qk_matmul_output_mode").unwrap_or(0);
    // The softmax turns the score output into weights in place. A narrower type would round the
    // scores in between.
    let keeps = mode < WEIGHTS || node.dtype(0) == Some(DType::F32);
    !is_double && (!wants_scores || keeps)
}

/// The heads of queries, keys or values.
struct Heads {
    batch: usize,
    heads: usize,
    rows: usize,
    size: usize,
    is_interleaved: bool,
}

impl Heads {
    fn new(operand: &Operand, heads: usize) -> Result<Heads> {
        match *operand.shape {
            [batch, heads, rows, size] => Ok(Heads { batch, heads, rows, size, is_interleaved: false }),
            [batch, rows, width] if heads > 0 && width % heads == 0 => {
                Ok(Heads { batch, heads, rows, size: width / heads, is_interleaved: true })
            }
            ref shape => Err(error!(InvalidArgument, "shape {shape:?} does not split into {heads} heads")),
        }
    }

    /// Returns the rows of `operand`, which has the same layout.
    fn rows_of(&self, operand: &Operand, size: usize) -> Rows {
        let sizes = [self.heads, self.rows, size];
        if self.is_interleaved { Rows::interleaved(operand, sizes) } else { Rows::by_head(operand, sizes) }
    }
}

/// The sizes and workspace of a node for some shapes.
struct Plan {
    q: Heads,
    k: Heads,
    v: Heads,
    past: usize,
    /// The concatenated cache of keys and of values in the workspace, if no output has it.
    joined: [Option<Operand>; 2],
    taken: usize,
}

impl Plan {
    fn new(cx: &OpCx<'_>) -> Result<Plan> {
        let heads = |name: &str| usize::try_from(cx.attrs.find_int(name).unwrap_or(0)).unwrap_or(0);
        let q = Heads::new(cx.input(0)?, heads("q_num_heads"))?;
        let k = Heads::new(cx.input(1)?, heads("kv_num_heads"))?;
        let v = Heads::new(cx.input(2)?, heads("kv_num_heads"))?;
        let fits = q.batch == k.batch
            && k.batch == v.batch
            && q.size == k.size
            && k.rows == v.rows
            && k.heads == v.heads
            && k.heads > 0
            && q.heads % k.heads == 0;
        ensure!(fits, InvalidArgument, "queries, keys and values do not match");
        let past = cx.find_input(4).map_or(0, |past| past.size(2));
        for (input, own) in [(4, &k), (5, &v)] {
            let Some(given) = cx.find_input(input) else { continue };
            let expected = [own.batch, own.heads, past, own.size];
            ensure!(
                *given.shape == expected,
                InvalidArgument,
                "the past has shape {:?}, which does not match keys and values",
                given.shape
            );
        }
        let (mut taken, mut joined) = (0, [None, None]);
        for (index, (place, own)) in joined.iter_mut().zip([&k, &v]).enumerate() {
            if past > 0 && cx.find_output(1 + index).is_none() {
                let shape = [own.batch, own.heads, past.saturating_add(own.rows), own.size];
                *place = Some(cx.workspace(&mut taken, cx.input(1 + index)?.dtype, &shape));
            }
        }
        Ok(Plan { q, k, v, past, joined, taken })
    }

    /// Returns the keys (0) or values (1). Concatenates past and new ones if there is a past, or an
    /// output for them.
    fn cache(&self, cx: &OpCx<'_>, which: usize, dispatches: &mut Vec<Dispatch>) -> Result<Rows> {
        let own = if which == 0 { &self.k } else { &self.v };
        let fresh = own.rows_of(cx.input(1 + which)?, own.size);
        let joined = self.joined.get(which).and_then(Option::as_ref);
        let Some(to) = cx.find_output(1 + which).or(joined) else { return Ok(fresh) };
        let total = self.past.saturating_add(own.rows);
        let to = to.with_shape(&[own.batch, own.heads, total, own.size]);
        let placing = Placing {
            sizes: [own.batch, own.heads, own.rows, own.size],
            fresh: &fresh,
            bias: None,
            rotation: None,
            past: cx.find_input(4 + which),
            lengths: Lengths::All { before: self.past },
            at_front: false,
            keeps: false,
        };
        dispatches.push(placing.dispatch(cx, &to)?);
        // Without a past the input has all rows already.
        Ok(if self.past == 0 { fresh } else { Rows::by_head(&to, [own.heads, total, own.size]) })
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            batch: self.q.batch,
            heads: self.q.heads,
            key_heads: self.k.heads,
            queries: self.q.rows,
            keys: self.past.saturating_add(self.k.rows),
            size: self.q.size,
            value_size: self.v.size,
        }
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let plan = Plan::new(cx)?;
    let mut taken = plan.taken;
    plan.sizes().parts(cx, &mut taken);
    Ok(taken)
}

/// Broadcasts the mask to (batch, heads, queries, keys). It may have fewer keys.
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
    let [batch, heads, queries, keys] = full;
    ensure!(
        fits && keys <= sizes.keys,
        InvalidArgument,
        "the mask of shape {shape:?} does not broadcast to the scores of shape {sizes:?}"
    );
    let step = |size: usize, behind: &[usize]| if size == 1 { 0 } else { product(behind) };
    let steps = [step(batch, &[heads, queries, keys]), step(heads, &[queries, keys]), step(queries, &[keys])];
    Ok(Mask { operand, steps, keys })
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let plan = Plan::new(cx)?;
    let sizes = plan.sizes();
    let mut dispatches = Vec::new();
    let k = plan.cache(cx, 0, &mut dispatches)?;
    let v = plan.cache(cx, 1, &mut dispatches)?;
    let mode = cx.attrs.int("qk_matmul_output_mode")?;
    let stage = match mode {
        0 => Stage::Scaled,
        1 => Stage::Capped,
        2 | WEIGHTS => Stage::Masked,
        _ => return Err(error!(InvalidGraph, "qk_matmul_output_mode is {mode}, expected 0 to 3")),
    };
    let lengths = match cx.find_input(6) {
        None => Lengths::All { before: plan.past },
        Some(lengths) => {
            let enough = lengths.count() == sizes.batch;
            ensure!(enough, InvalidArgument, "nonpad_kv_seqlen does not have a value for each batch");
            match plan.past {
                0 => Lengths::AtEnd { lengths, more: 0 },
                before => Lengths::Of { lengths, before, more: 0 },
            }
        }
    };
    let scores = cx.find_output(3);
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
        lengths,
        mask: cx.find_input(3).map(|mask| mask_of(mask, &sizes)).transpose()?,
        padding: None,
        sinks: Sinks::None,
        hidden_is_nan: cx.attrs.find_int(HIDDEN_IS_NAN) == Some(1),
        scores: scores.map(|operand| Scores { operand, stage }),
    };
    dispatches.extend(attend.dispatches(cx, plan.taken)?);
    if let Some(scores) = scores.filter(|_| mode == WEIGHTS) {
        dispatches.push(weights(cx, scores)?);
    }
    Ok(dispatches)
}
