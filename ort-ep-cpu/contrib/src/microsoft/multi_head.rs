//! Multi-head attention (`MultiHeadAttention`).
//!
//! Unpacks the operator's input layouts, appends new keys and values to the cache, gathers the
//! caches of beams, and leaves the attention itself to `attend`.

use std::ops::Range;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, Precision, RunCx};
use ort_core::ops::nn::attention::problem::{self, Causal, MultiHeadProblem, ScoreStage, SdpaSizes};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};
use smallvec::{SmallVec, smallvec};

use super::attend::{Additions, Bias, HeadSlice, Padding, PaddingMask, Problem, Span, is_lowered};
use ort_cpu_attention::{self as attention, HiddenKeys};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::interrupt::{self, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![
    KernelDef {
        domain: MICROSOFT,
        op: "MultiHeadAttention",
        types: &[("T", TypeSet::of(&[DType::F32]))],
        in_place: &[(6, 1), (7, 2)],
        make,
        ..KernelDef::BASE
    },
    KernelDef {
        domain: MICROSOFT,
        op: "MultiHeadAttention",
        types: &[("T", TypeSet::of(&[DType::F16, DType::BF16]))],
        make: |cx| via_f32(cx, make),
        ..KernelDef::BASE
    },
];

struct MultiHead {
    node: problem::MultiHead,
    precision: Precision,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(MultiHead { node: problem::MultiHead::new(cx.attrs())?, precision: cx.precision }))
}

/// The layout of one run, derived from its shapes.
#[derive(Clone, Copy)]
struct Layout {
    problem: MultiHeadProblem,
    has_beams: bool,
}

impl MultiHead {
    fn cpu(&self, threads: usize) -> Cpu {
        Cpu::with_threads(threads).in_precision(self.precision)
    }

    fn layout<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<Layout> {
        let has_beams = shape(9).is_some();
        let problem = self.node.problem(&shape, shape(8).is_some())?;
        ensure!(
            !has_beams || problem.is_shared,
            InvalidArgument,
            "cache_indirection needs past_sequence_length"
        );
        Ok(Layout { problem, has_beams })
    }
}

impl Layout {
    /// Returns the scratch lengths for queries with bias, keys, values, and the keys and values
    /// gathered for beams. Keys and values need scratch only if no present output can hold them.
    fn buffers(&self, wanted: [bool; 2]) -> Result<[usize; 4]> {
        let SdpaSizes { batch, heads, queries, size, value_size, .. } = self.problem.sizes;
        let count = |rows: usize, size: usize| -> Result<usize> {
            Ok(element_count(&[batch, heads, rows, size])?.next_multiple_of(16))
        };
        let (sizes, capacity) = ([size, value_size], self.problem.capacity());
        let mut lens = [0; 4];
        if self.problem.has_bias {
            lens[0] = count(queries, size)?;
        }
        for index in 0..2 {
            if !self.problem.reads_inputs() && !wanted[index] {
                lens[1 + index] = count(capacity, sizes[index])?;
            }
        }
        if self.has_beams {
            lens[3] = count(capacity, size)? + count(capacity, value_size)?;
        }
        Ok(lens)
    }

    /// The sizes of an attention over this many past and new keys.
    fn sizes(&self, keys: usize) -> SdpaSizes {
        SdpaSizes { keys, ..self.problem.sizes }
    }

    /// Returns the new queries (0), keys (1) or values (2) as the inputs hold them.
    fn incoming<'a>(&self, cx: &RunCx<'a>, which: usize) -> Result<HeadSlice<'a>> {
        let (input, rows) = self.problem.incoming(which);
        Ok(HeadSlice::new(cx.input(input)?.as_slice()?, rows, self.problem.row_size(which)))
    }

    /// Returns the part of the bias for queries (0), keys (1) or values (2).
    fn bias<'a>(&self, cx: &RunCx<'a>, which: usize) -> Result<Option<&'a [f32]>> {
        let Some(first) = self.problem.bias_start(which) else { return Ok(None) };
        Ok(cx.input(3)?.as_slice::<f32>()?.get(first..))
    }
}

/// Rows of heads of (batch, heads, `capacity`, size), from row `first` of each head on.
struct PresentRows<'a> {
    to: &'a mut [f32],
    capacity: usize,
    first: usize,
}

/// Copies rows of heads into a present, and adds the bias.
fn place_rows(
    threads: usize,
    from: HeadSlice<'_>,
    (heads, rows): (usize, usize),
    bias: Option<&[f32]>,
    PresentRows { to, capacity, first }: PresentRows<'_>,
) {
    let size = from.size;
    for_each_chunk_mut(threads, to, capacity * size, |index, to| {
        let (batch, head) = (index / heads, index % heads);
        let Some(to) = to.get_mut(first * size..) else { return };
        for (row, to) in spending(4 + size / 4, to.chunks_exact_mut(size.max(1)).take(rows)).enumerate() {
            let Ok(from) = from.row([batch, head, row]) else { return };
            to.copy_from_slice(from);
            if let Some(bias) = bias.and_then(|bias| bias.get(head * size..)) {
                to.iter_mut().zip(bias).for_each(|(to, bias)| *to += bias);
            }
        }
    });
}

/// Copies the first `rows` rows of each past head to a present of `capacity` rows.
fn copy_past(
    threads: usize,
    past: &[f32],
    [past_rows, rows, size]: [usize; 3],
    (to, capacity): (&mut [f32], usize),
) {
    for_each_chunk_mut(threads, to, capacity * size, |index, to| {
        let from = past.get(index * past_rows * size..).and_then(|past| past.get(..rows * size));
        if let (Some(from), Some(to)) = (from, to.get_mut(..rows * size)) {
            interrupt::copy(from, to);
        }
    });
}

/// For each beam and position, the beam of the same batch whose past it continues.
struct Beams<'a> {
    sources: &'a [i32],
    width: usize,
    row_len: usize,
}

impl<'a> Beams<'a> {
    fn new(view: TensorView<'a>, batch: usize, past: usize) -> Result<Beams<'a>> {
        let (width, row_len) = match *view.shape() {
            [groups, width, row_len] if groups.checked_mul(width) == Some(batch) && row_len >= past => {
                (width, row_len)
            }
            ref shape => {
                let expected = format!("[batches, beams, {past} or more] for {batch} beams in all");
                return Err(error!(
                    InvalidArgument,
                    "cache_indirection has shape {shape:?}, expected {expected}"
                ));
            }
        };
        let sources = view.as_slice::<i32>()?;
        let rows = sources.chunks(row_len.max(1)).flat_map(|row| &row[..past.min(row.len())]);
        let wrong = rows.into_iter().find(|beam| usize::try_from(**beam).map_or(true, |beam| beam >= width));
        match wrong {
            Some(beam) => Err(error!(InvalidArgument, "cache_indirection names beam {beam} of {width}")),
            None => Ok(Beams { sources, width, row_len }),
        }
    }

    /// Copies `total` rows of each head. The first `past` of them come from the beams they
    /// continue.
    fn gather(
        &self,
        threads: usize,
        from: HeadSlice<'_>,
        (heads, past, total): (usize, usize, usize),
        to: &mut [f32],
    ) {
        let size = from.size;
        for_each_chunk_mut(threads, to, total * size, |index, to| {
            let (batch, head) = (index / heads, index % heads);
            for (row, to) in spending(4 + size / 4, to.chunks_exact_mut(size.max(1))).enumerate() {
                let beam = self.sources.get(batch * self.row_len + row).map_or(0, |beam| *beam as usize);
                let source = if row < past { batch / self.width * self.width + beam } else { batch };
                if let Ok(from) = from.row([source, head, row]) {
                    to.copy_from_slice(from);
                }
            }
        });
    }
}

impl Executable for MultiHead {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let layout = self.layout(|index| shapes.inputs.get(index)?.as_deref())?;
        let wanted = [1, 2].map(|index| shapes.outputs.get(index).is_some_and(Option::is_some));
        let buffers: usize = layout.buffers(wanted)?.iter().sum();
        let is_wanted = shapes.outputs.get(3).is_some_and(Option::is_some);
        let has_padding = shapes.inputs.get(4).is_some_and(Option::is_some);
        let padding = if has_padding { self.node.mask_filter_value } else { 0.0 };
        let keeps = is_lowered(self.node.causal != Causal::No, padding, is_wanted);
        let sizes = layout.sizes(layout.problem.capacity());
        let attention = attention::scratch_len::<f32>(&sizes, self.cpu(shapes.threads), keeps, false);
        bytes_of::<f32>(buffers + attention)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let threads = cx.threads();
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        // If past and present share memory, the past is no longer readable as an input.
        let layout = self.layout(|index| match index {
            6 | 7 if cx.in_place(index - 5) == Some(index) => cx.output_shape(index - 5),
            _ => cx.find_input(index).map(|view| view.shape()),
        })?;
        let SdpaSizes { batch, heads, queries, keys: fresh, size, .. } = layout.problem.sizes;
        let past = past_length(cx, &layout.problem)?;
        let total = past + fresh;
        let lens = layout.buffers([cx.wants(1), cx.wants(2)])?;
        // A bias needs a copy of the queries, because the input must stay unchanged.
        let mut q = layout.incoming(cx, 0)?;
        if layout.problem.has_bias {
            let to = &mut take(&mut rest, lens[0])?[..batch * heads * queries * size];
            let present = PresentRows { to: &mut *to, capacity: queries, first: 0 };
            place_rows(threads, q, (heads, queries), layout.bias(cx, 0)?, present);
            q = HeadSlice::by_head(to, [heads, queries, size]);
        }
        let k = keys_of(cx, &layout, (1, past), take(&mut rest, lens[1])?)?;
        let v = keys_of(cx, &layout, (2, past), take(&mut rest, lens[2])?)?;
        let (mut k, mut v) = (k, v);
        let mut gathered = take(&mut rest, lens[3])?;
        // The past of a beam may be spread over other beams' caches, so gather it first.
        if let Some(view) = cx.find_input(9) {
            let beams = Beams::new(view, batch, past)?;
            for rows in [&mut k, &mut v] {
                let to = take(&mut gathered, batch * heads * total * rows.size)?;
                beams.gather(threads, *rows, (heads, past, total), to);
                *rows = HeadSlice::by_head(to, [heads, total, rows.size]);
            }
        }
        let sizes = layout.sizes(total);
        let scores = if cx.wants(3) { Some(cx.output(3)?.as_mut_slice::<f32>()?) } else { None };
        let padding = cx.find_input(4).map(|view| self.padding(view, &sizes)).transpose()?;
        let bias =
            cx.find_input(5).map(|view| Bias::new(view.as_slice()?, view.shape(), &sizes)).transpose()?;
        let causal = self.node.causal != Causal::No;
        let added = padding.as_ref().map_or(0.0, |padding| padding.added);
        let problem = Problem {
            sizes,
            q,
            k: k.rows(),
            v: v.rows(),
            spans: smallvec![Span { keys: total, before: past }; batch],
            scale: layout.problem.sizes.scale(self.node.scale),
            softcap: 0.0,
            causal,
            last_sees_all: true,
            window: None,
            hidden: match is_lowered(causal, added, scores.is_some()) {
                true => HiddenKeys::Lowered,
                false => HiddenKeys::Excluded,
            },
            additions: Additions { padding, bias },
            sinks: None,
            stage: ScoreStage::Masked,
        };
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        problem.run(self.cpu(threads), result, scores, rest)
    }
}

/// Returns the number of valid rows of the past.
fn past_length(cx: &RunCx<'_>, problem: &MultiHeadProblem) -> Result<usize> {
    let lengths: SmallVec<[i64; 1]> = match cx.find_input(8) {
        Some(view) => view.collect_ints()?,
        None => SmallVec::new(),
    };
    problem.past_length(lengths.first().copied().unwrap_or(-1))
}

/// Returns keys (1) or values (2). They stay in the input if nothing precedes them; otherwise past
/// and new rows are joined in the present output or in `scratch`.
fn keys_of<'a>(
    cx: &mut RunCx<'a>,
    layout: &Layout,
    (which, past): (usize, usize),
    scratch: &'a mut [f32],
) -> Result<HeadSlice<'a>> {
    let (threads, incoming) = (cx.threads(), layout.incoming(cx, which)?);
    let (SdpaSizes { batch, heads, keys, .. }, capacity) = (layout.problem.sizes, layout.problem.capacity());
    let len = batch * heads * capacity * incoming.size;
    let is_in_place = cx.in_place(which) == Some(which + 5);
    // A wanted present must be filled, even if the inputs could be read directly.
    let to = match cx.wants(which) {
        true => cx.output(which)?.as_mut_slice::<f32>()?,
        false if layout.problem.reads_inputs() => return Ok(incoming),
        false => scratch.get_mut(..len).ok_or_else(|| error!(Fail, "the workspace is too small"))?,
    };
    if !is_in_place && let Some(view) = cx.find_input(which + 5) {
        let rows = [layout.problem.past, layout.problem.past, incoming.size];
        copy_past(threads, view.as_slice()?, rows, (&mut *to, capacity));
    }
    let bias = layout.bias(cx, which)?;
    let present = PresentRows { to: &mut *to, capacity, first: past };
    place_rows(threads, incoming, (heads, keys), bias, present);
    Ok(HeadSlice::by_head(to, [heads, capacity, incoming.size]))
}

impl MultiHead {
    /// Reads the padding mask.
    fn padding<'a>(&self, view: TensorView<'a>, sizes: &SdpaSizes) -> Result<Padding<'a>> {
        let SdpaSizes { batch, keys, .. } = *sizes;
        let elements = view.as_slice::<i32>()?;
        let place = |at: usize| elements.get(at).map_or(0, |place| (*place).clamp(0, i32::MAX) as usize);
        let ranges =
            |range: &dyn Fn(usize) -> Range<usize>| PaddingMask::Ranges((0..batch).map(range).collect());
        let mask = match problem::PaddingMask::new(view.shape(), sizes)? {
            None => ranges(&|_| 0..keys),
            Some(problem::PaddingMask::From) => ranges(&|index| 0..place(index)),
            Some(problem::PaddingMask::FromAndBefore) => ranges(&|index| place(batch + index)..place(index)),
            Some(problem::PaddingMask::Elements { first, strides }) => {
                PaddingMask::Elements(elements.get(first..).unwrap_or(&[]), strides)
            }
        };
        Ok(Padding { mask, added: self.node.mask_filter_value })
    }
}
