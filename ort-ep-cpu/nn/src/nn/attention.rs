//! `Attention` of the standard: its operands, its KV cache, and what happens to its scores.
//!
//! A half-precision KV cache is read in place, without conversion, if no scores are an output.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ops::nn::attention::problem::{self, AttentionProblem, HeadLayout};
use ort_core::{Result, error};

use super::attention_cache::{elements, join_cache};
use super::attention_mask::Mask;
use super::attention_reach::Reach;
use ort_cpu_attention::{
    self as attention, Attention, Compute, Elements, HiddenKeys, KeptScores, Rows, ScoreMask, Scores,
};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{narrow, via_f32, widen};
use ort_cpu_kernel::heap;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};

const HALVES: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);
const DOUBLE: TypeSet = TypeSet::of(&[DType::F64]);

/// The kernel for nodes that do not output scores.
const STREAMED: KernelDef = KernelDef {
    op: "Attention",
    types: &[("T1", HALVES), ("T2", HALVES)],
    rank: 1,
    when: |node| is_single(node) && !wants_scores(node),
    make: |cx| {
        let widths = widths(cx);
        make::<f32>(cx, widths)
    },
    ..KernelDef::BASE
};

cpu_kernels![
    KernelDef {
        types: &[("T1", SINGLE), ("T2", HALVES)],
        rank: 2,
        in_place: &[(0, 0)],
        when: |node| (STREAMED.when)(node) && node.dtype(0) == Some(DType::F32),
        ..STREAMED
    },
    STREAMED,
    KernelDef {
        op: "Attention",
        types: &[("T1", HALVES), ("T2", HALVES)],
        when: is_single,
        make: |cx| via_f32(cx, |cx| make::<f32>(cx, [4; 3])),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "Attention",
        types: &[("T1", DOUBLE), ("T2", DOUBLE)],
        make: |cx| make::<f64>(cx, [8; 3]),
        ..KernelDef::BASE
    },
];

/// Returns whether a node outputs scores.
fn wants_scores(node: &NodeView<'_>) -> bool {
    node.node.outputs.get(3).is_some_and(Option::is_some)
}

/// Returns whether the softmax is in single precision. The operator's decomposition computes one in
/// double.
fn is_single(node: &NodeView<'_>) -> bool {
    node.attrs().find_int("softmax_precision") != Some(i64::from(DType::F64.onnx_code()))
}

/// Returns the bytes per element of queries, keys and values.
fn widths(cx: &CompileCx<'_>) -> [usize; 3] {
    [0, 1, 2].map(|index| if cx.node.dtype(index) == Some(DType::F32) { 4 } else { 2 })
}

struct AttentionKernel<T> {
    node: problem::Attention,
    /// Bytes per element of queries, keys and values.
    widths: [usize; 3],
    precision: Precision,
    /// Whether the mask must be converted to the compute type.
    widens_mask: bool,
    element: std::marker::PhantomData<fn() -> T>,
}

fn make<T: Compute>(cx: &mut CompileCx<'_>, widths: [usize; 3]) -> Result<Box<dyn Executable>> {
    Ok(Box::new(AttentionKernel::<T> {
        node: problem::Attention::new(cx.attrs())?,
        widths,
        precision: cx.precision,
        widens_mask: cx.node.dtype(3).is_some_and(|dtype| dtype != DType::Bool && dtype != T::DTYPE),
        element: std::marker::PhantomData,
    }))
}

/// Rounds a number of bytes up to whole cache lines.
fn whole_cache_lines(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}

/// Returns the elements of a tensor of this layout.
fn count(layout: HeadLayout) -> usize {
    layout.sizes().into_iter().product()
}

/// The workspace of a run by purpose, in bytes.
struct Parts {
    /// Queries in the compute type; 0 if they are already.
    queries: usize,
    /// Results in the compute type; 0 if the output is.
    results: usize,
    /// Past and new keys and values joined, unless an output holds them.
    caches: [usize; 2],
    /// Scratch of the attention loops.
    loops: usize,
}

impl<T: Compute> AttentionKernel<T> {
    fn cpu(&self, threads: usize) -> Cpu {
        Cpu::with_threads(threads).in_precision(self.precision)
    }

    /// Returns the workspace of a run. `wanted` says which of the outputs 1 to 3 it computes.
    fn parts(&self, problem: &AttentionProblem, threads: usize, wanted: [bool; 3]) -> Result<Parts> {
        let AttentionProblem { q, k, v, past } = *problem;
        let wide = |layout: HeadLayout| match self.widths[0] == size_of::<T>() {
            true => Ok(0),
            false => bytes_of::<T>(count(layout)),
        };
        // No workspace if the input serves as it is, or if an output takes the joined rows.
        let cache = |layout: HeadLayout, which: usize| match past == 0 || wanted[which] {
            true => 0,
            false => count(HeadLayout { rows: past + layout.rows, ..layout }) * self.widths[1 + which],
        };
        let is_half = self.widths[1..].contains(&2);
        let loops = attention::scratch_len::<T>(&problem.sizes(), self.cpu(threads), wanted[2], is_half);
        Ok(Parts {
            queries: whole_cache_lines(wide(q)?),
            results: whole_cache_lines(wide(HeadLayout { size: v.size, ..q })?),
            caches: [whole_cache_lines(cache(k, 0)), whole_cache_lines(cache(v, 1))],
            loops: bytes_of::<T>(loops)?,
        })
    }

    /// Returns the keys (0) or values (1): the input itself if there is no past and no output for
    /// them, else past and new rows joined.
    fn cache<'a>(
        &self,
        cx: &mut RunCx<'a>,
        which: usize,
        (layout, past): (HeadLayout, usize),
        spare: &'a mut [u8],
    ) -> Result<Rows<'a, T>> {
        let new = cx.input(1 + which)?;
        let dtype = new.dtype();
        if past == 0 && !cx.wants(1 + which) {
            let strides = layout.rows_of(layout.size).strides;
            return Ok(Rows { elements: elements(dtype, new.bytes()?)?, strides });
        }
        let full = HeadLayout { rows: past + layout.rows, is_token_major: false, ..layout };
        let len = count(full) * self.widths[1 + which];
        let threads = cx.threads();
        let old = match cx.find_input(4 + which) {
            Some(view) => view.bytes()?,
            None => &[],
        };
        let to = match cx.wants(1 + which) {
            true => cx.output(1 + which)?.bytes_mut()?,
            false => spare.get_mut(..len).ok_or_else(|| error!(Fail, "the workspace is too small"))?,
        };
        let bytes = HeadLayout { size: layout.size * self.widths[1 + which], ..layout };
        join_cache(threads, (old, past), (new.bytes()?, bytes), to)?;
        Ok(Rows { elements: elements(dtype, to)?, strides: full.rows_of(full.size).strides })
    }

    /// Returns what becomes of keys that a query does not see.
    fn hidden(&self) -> HiddenKeys {
        if self.node.hidden_is_nan { HiddenKeys::ExcludedOrNan } else { HiddenKeys::Excluded }
    }

    /// Returns the scores as the engine handles them.
    fn scores<'a>(&self, cx: &mut RunCx<'a>) -> Result<Scores<'a, T>> {
        if !cx.wants(3) {
            return Ok(Scores::Unread);
        }
        let (values, excluded) = (cx.output(3)?.as_mut_slice::<T>()?, T::from_f64(f64::NEG_INFINITY));
        Ok(Scores::Kept(KeptScores { stage: self.node.stage, values, excluded }))
    }
}

impl<T: Compute> Executable for AttentionKernel<T> {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let problem = self.node.problem(|index| shapes.inputs.get(index)?.as_deref())?;
        let wanted = [1, 2, 3].map(|output| shapes.outputs.get(output).is_some_and(Option::is_some));
        let Parts { queries, results, caches, loops } = self.parts(&problem, shapes.threads, wanted)?;
        Ok(queries + results + caches[0] + caches[1] + loops)
    }

    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // A mask is first read in its own type, then converted to the compute type.
        let mask = if self.widens_mask { heap::elements(shapes.input(3)) } else { 0 };
        Ok(heap::tables(mask.saturating_mul(size_of::<f64>() + size_of::<T>())))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let threads = cx.threads();
        // Queries in the output's place are read there, but the output has their shape.
        let q = if cx.in_place(0) == Some(0) { None } else { Some(cx.input(0)?) };
        let problem = self.node.problem(|index| match (index, q) {
            (0, None) => cx.output_shape(0),
            _ => cx.find_input(index).map(|view| view.shape()),
        })?;
        let parts = self.parts(&problem, threads, [cx.wants(1), cx.wants(2), cx.wants(3)])?;
        let mut rest = cx.workspace()?;
        let wide = take(&mut rest, parts.queries)?;
        let result = take(&mut rest, parts.results)?;
        let [spare_keys, spare_values] =
            [take(&mut rest, parts.caches[0])?, take(&mut rest, parts.caches[1])?];
        let keys = self.cache(cx, 0, (problem.k, problem.past), spare_keys)?;
        let values = self.cache(cx, 1, (problem.v, problem.past), spare_values)?;
        let queries = match q {
            None => None,
            Some(q) if q.dtype() == T::DTYPE => Some(q.as_slice::<T>()?),
            Some(q) => {
                widen(threads, q, &mut scratch::<f32>(wide)?[..count(problem.q)])?;
                Some(&scratch::<T>(wide)?[..count(problem.q)])
            }
        };
        let strides = problem.q.rows_of(problem.q.size).strides;
        let queries = queries.map(|values| Rows { elements: Elements::Full(values), strides });
        let (sizes, reach) = (problem.sizes(), Reach::new(cx, &self.node, &problem)?);
        let mask = cx.find_input(3).map(|view| Mask::<T>::new(view, &sizes, self.node.hidden_is_nan));
        let mask = mask.transpose()?;
        let attention = Attention {
            sizes,
            queries,
            keys,
            values,
            scale: self.node.scale.map_or_else(|| T::inverse_root(sizes.size), f64::from),
            softcap: self.node.softcap,
            visible: &|[batch, query]| reach.visible(batch, query),
            mask: mask.as_ref().map(|mask| mask as &dyn ScoreMask<T>),
            sinks: None,
            hidden: self.hidden(),
        };
        let strides = problem.q.rows_of(sizes.value_size).strides;
        let (cpu, scores, output) = (self.cpu(threads), self.scores(cx)?, cx.output(0)?);
        let loops = scratch(rest)?;
        if output.dtype() == T::DTYPE {
            return attention.run(cpu, (output.as_mut_slice()?, strides), scores, loops);
        }
        // Half precision is rounded once, from a result in single precision.
        let result = &mut scratch::<T>(result)?[..output.element_count()];
        attention.run(cpu, (&mut *result, strides), scores, loops)?;
        narrow(threads, bytemuck::cast_slice(result), output)
    }
}
