//! Multi-head attention (`MultiHeadAttention`).
//!
//! Unpacks the operator's input layouts, appends new keys and values to the cache, gathers the
//! caches of beams, and leaves the attention itself to `attend`.

use std::ops::Range;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, Precision, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{Shape, TensorView, element_count};
use ort_core::{Result, ensure, error};
use smallvec::{SmallVec, smallvec};

use super::attend::{
    Bias, Hidden, Padding, PaddingMask, Problem, Rows, Sizes, Span, Stage, attend, scores_of,
};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::widened::widened;
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
        make: |cx| widened(cx, make),
        ..KernelDef::BASE
    },
];

struct MultiHead {
    heads: usize,
    scale: Option<f32>,
    causal: bool,
    mask_filter_value: f32,
    precision: Precision,
}

/// The default value added to the scores of padded keys.
const MASKED: f32 = -10000.0;

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let heads = attrs.int("num_heads")?;
    let heads = usize::try_from(heads).ok().filter(|heads| *heads > 0);
    Ok(Box::new(MultiHead {
        heads: heads.ok_or_else(|| error!(InvalidGraph, "num_heads must be at least 1"))?,
        scale: attrs.find_float("scale").filter(|scale| *scale != 0.0),
        causal: attrs.flag("unidirectional")?,
        mask_filter_value: attrs.find_float("mask_filter_value").unwrap_or(MASKED),
        precision: cx.precision,
    }))
}

/// How queries, keys and values are laid out in the inputs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Three inputs, each (batch, sequence, width).
    Apart,
    /// All in `query`: (batch, sequence, heads, 3, size).
    PackedAll,
    /// Keys and values in `key`: (batch, sequence, heads, 2, size).
    PackedKeys,
    /// Cross attention: keys and values are (batch, heads, sequence, size) and take no bias.
    Crossed,
}

/// The layout of one run, derived from its shapes.
#[derive(Clone, Copy)]
struct Layout {
    form: Form,
    batch: usize,
    heads: usize,
    queries: usize,
    /// New keys in this run.
    fresh: usize,
    size: usize,
    value_size: usize,
    /// Rows of the past tensors.
    past: usize,
    /// Whether past and present share a buffer that is longer than its valid rows.
    is_shared: bool,
    has_bias: bool,
    has_beams: bool,
}

impl MultiHead {
    fn cpu(&self, threads: usize) -> Cpu {
        Cpu::with_threads(threads).in_precision(self.precision)
    }

    fn layout(&self, shape: impl Fn(usize) -> Option<Shape>) -> Result<Layout> {
        let query = shape(0).unwrap_or_default();
        let (key, value) = (shape(1), shape(2));
        let heads = self.heads;
        let (form, batch, queries, width, fresh, value_width) =
            match (&query[..], key.as_deref(), value.as_deref()) {
                (&[batch, rows, given, 3, size], None, None) if given == heads => {
                    (Form::PackedAll, batch, rows, heads * size, rows, heads * size)
                }
                (&[batch, rows, width], Some(&[b, fresh, given, 2, size]), None)
                    if b == batch && given == heads && heads.checked_mul(size) == Some(width) =>
                {
                    (Form::PackedKeys, batch, rows, width, fresh, width)
                }
                (&[batch, rows, width], Some(&[b, fresh, w]), Some(&[c, same, value_width]))
                    if b == batch && c == batch && w == width && same == fresh =>
                {
                    (Form::Apart, batch, rows, width, fresh, value_width)
                }
                (&[batch, rows, width], Some(&[b, n, fresh, size]), Some(&[c, m, same, value_size]))
                    if b == batch
                        && c == batch
                        && n == heads
                        && m == heads
                        && same == fresh
                        && heads.checked_mul(size) == Some(width) =>
                {
                    (Form::Crossed, batch, rows, width, fresh, heads * value_size)
                }
                _ => {
                    let shapes = (query, key, value);
                    return Err(error!(
                        InvalidArgument,
                        "query, key and value of shapes {shapes:?} do not match"
                    ));
                }
            };
        let divides = width.is_multiple_of(heads) && value_width.is_multiple_of(heads);
        ensure!(
            divides,
            InvalidArgument,
            "widths {width} and {value_width} do not divide into {heads} heads"
        );
        let (size, value_size) = (width / heads, value_width / heads);
        let past = match (shape(6).as_deref(), shape(7).as_deref()) {
            (None, None) => 0,
            (Some(&[b, n, past, s]), Some(&[c, m, same, t]))
                if [b, n, s] == [batch, heads, size]
                    && [c, m, t] == [batch, heads, value_size]
                    && same == past =>
            {
                past
            }
            (key, value) => {
                return Err(error!(
                    InvalidArgument,
                    "past_key and past_value of shapes {key:?} and {value:?} do not fit"
                ));
            }
        };
        let has_bias = match shape(3).as_deref() {
            None => false,
            Some(&[len]) if Some(len) == (2 * width).checked_add(value_width) => true,
            Some(bias) => {
                let expected = 2 * width + value_width;
                return Err(error!(InvalidArgument, "bias has shape {bias:?}, expected [{expected}]"));
            }
        };
        let is_shared = shape(8).is_some();
        ensure!(!is_shared || shape(6).is_some(), InvalidArgument, "past_sequence_length without past_key");
        let has_beams = shape(9).is_some();
        let layout = Layout {
            form,
            batch,
            heads,
            queries,
            fresh,
            size,
            value_size,
            past,
            is_shared,
            has_bias,
            has_beams,
        };
        ensure!(!has_beams || is_shared, InvalidArgument, "cache_indirection needs past_sequence_length");
        Ok(layout)
    }
}

impl Layout {
    /// Returns the rows of the present tensors.
    fn capacity(&self) -> usize {
        if self.is_shared { self.past } else { self.past + self.fresh }
    }

    /// Whether keys and values are read directly from the inputs.
    fn reads_inputs(&self) -> bool {
        self.past == 0 && !self.is_shared && (!self.has_bias || self.form == Form::Crossed)
    }

    /// Returns the scratch lengths for queries with bias, keys, values, and the keys and values
    /// gathered for beams. Keys and values need scratch only if no present output can hold them.
    fn buffers(&self, wanted: [bool; 2]) -> Result<[usize; 4]> {
        let count = |rows: usize, size: usize| -> Result<usize> {
            Ok(element_count(&[self.batch, self.heads, rows, size])?.next_multiple_of(16))
        };
        let sizes = [self.size, self.value_size];
        let mut lens = [0; 4];
        if self.has_bias {
            lens[0] = count(self.queries, self.size)?;
        }
        for index in 0..2 {
            if !self.reads_inputs() && !wanted[index] {
                lens[1 + index] = count(self.capacity(), sizes[index])?;
            }
        }
        if self.has_beams {
            lens[3] = count(self.capacity(), self.size)? + count(self.capacity(), self.value_size)?;
        }
        Ok(lens)
    }

    fn sizes(&self, keys: usize) -> Sizes {
        Sizes {
            batch: self.batch,
            heads: self.heads,
            key_heads: self.heads,
            queries: self.queries,
            keys,
            capacity: self.capacity(),
            size: self.size,
            value_size: self.value_size,
        }
    }

    /// Returns the new queries (0), keys (1) or values (2) as the inputs hold them.
    fn incoming<'a>(&self, cx: &RunCx<'a>, which: usize) -> Result<Rows<'a>> {
        let Layout { heads, queries, fresh, size, value_size, .. } = *self;
        let packed = |values: &'a [f32], rows: usize, parts: usize, part: usize| Rows {
            values: values.get(part * size..).unwrap_or(&[]),
            strides: [rows * heads * parts * size, parts * size, heads * parts * size],
            size,
        };
        let row_size = if which == 2 { value_size } else { size };
        Ok(match (self.form, which) {
            (Form::PackedAll, _) => packed(cx.input(0)?.as_slice()?, queries, 3, which),
            (_, 0) => Rows::interleaved(cx.input(0)?.as_slice()?, [heads, queries, size]),
            (Form::PackedKeys, _) => packed(cx.input(1)?.as_slice()?, fresh, 2, which - 1),
            (Form::Apart, _) => Rows::interleaved(cx.input(which)?.as_slice()?, [heads, fresh, row_size]),
            (Form::Crossed, _) => Rows::by_head(cx.input(which)?.as_slice()?, [heads, fresh, row_size]),
        })
    }

    /// Returns the part of the bias for queries (0), keys (1) or values (2).
    fn bias<'a>(&self, cx: &RunCx<'a>, which: usize) -> Result<Option<&'a [f32]>> {
        if !self.has_bias || (which > 0 && self.form == Form::Crossed) {
            return Ok(None);
        }
        let width = self.heads * self.size;
        let bias = cx.input(3)?.as_slice::<f32>()?;
        Ok(bias.get(which * width..))
    }
}

/// Copies rows of heads into (batch, heads, `capacity`, size) from row `first` on, and adds the
/// bias.
fn place_rows(
    threads: usize,
    from: Rows<'_>,
    (heads, rows): (usize, usize),
    bias: Option<&[f32]>,
    (to, capacity, first): (&mut [f32], usize, usize),
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
        from: Rows<'_>,
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
        let layout = self.layout(|index| shapes.inputs.get(index)?.clone())?;
        let wanted = [1, 2].map(|index| shapes.outputs.get(index).is_some_and(Option::is_some));
        let buffers: usize = layout.buffers(wanted)?.iter().sum();
        let is_wanted = shapes.outputs.get(3).is_some_and(Option::is_some);
        let padding =
            if shapes.inputs.get(4).is_some_and(Option::is_some) { self.mask_filter_value } else { 0.0 };
        let scores = scores_of(is_wanted, self.causal, padding);
        let attention = layout.sizes(layout.capacity()).scratch_len(self.cpu(shapes.threads), scores, false);
        bytes_of::<f32>(buffers + attention)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let threads = cx.threads();
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        // If past and present share memory, the past is no longer readable as an input.
        let present_shape = |index: usize| cx.output_shape(index).map(Shape::from);
        let layout = self.layout(|index| match index {
            6 | 7 if cx.in_place(index - 5) == Some(index) => present_shape(index - 5),
            _ => cx.find_input(index).map(|view| view.shape().into()),
        })?;
        let past = past_length(cx, &layout)?;
        let total = past + layout.fresh;
        let lens = layout.buffers([cx.wants(1), cx.wants(2)])?;
        // A bias needs a copy of the queries, because the input must stay unchanged.
        let mut q = layout.incoming(cx, 0)?;
        if layout.has_bias {
            let to =
                &mut take(&mut rest, lens[0])?[..layout.batch * layout.heads * layout.queries * layout.size];
            let bias = layout.bias(cx, 0)?;
            place_rows(threads, q, (layout.heads, layout.queries), bias, (&mut *to, layout.queries, 0));
            q = Rows::by_head(to, [layout.heads, layout.queries, layout.size]);
        }
        let k = keys_of(cx, &layout, (1, past), take(&mut rest, lens[1])?)?;
        let v = keys_of(cx, &layout, (2, past), take(&mut rest, lens[2])?)?;
        let (mut k, mut v) = (k, v);
        let mut gathered = take(&mut rest, lens[3])?;
        // The past of a beam may be spread over other beams' caches, so gather it first.
        if let Some(view) = cx.find_input(9) {
            let beams = Beams::new(view, layout.batch, past)?;
            for rows in [&mut k, &mut v] {
                let to = take(&mut gathered, layout.batch * layout.heads * total * rows.size)?;
                beams.gather(threads, *rows, (layout.heads, past, total), to);
                *rows = Rows::by_head(to, [layout.heads, total, rows.size]);
            }
        }
        let sizes = layout.sizes(total);
        let scores = if cx.wants(3) { Some(cx.output(3)?.as_mut_slice::<f32>()?) } else { None };
        let problem = Problem {
            sizes,
            q,
            k: k.plain(),
            v: v.plain(),
            spans: smallvec![Span { keys: total, before: past }; layout.batch],
            scale: self.scale.unwrap_or(1.0 / (layout.size as f32).sqrt()),
            softcap: 0.0,
            causal: self.causal,
            window: None,
            hidden: Hidden::Lowered,
            padding: cx.find_input(4).map(|view| self.padding(view, &sizes)).transpose()?,
            bias: cx
                .find_input(5)
                .map(|view| Bias::new(view.as_slice()?, view.shape(), &sizes))
                .transpose()?,
            sinks: None,
            stage: if scores.is_some() { Stage::Scores } else { Stage::Weights },
        };
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        attend(&problem, self.cpu(threads), result, scores, rest)
    }
}

/// Returns the number of valid rows of the past.
fn past_length(cx: &RunCx<'_>, layout: &Layout) -> Result<usize> {
    if !layout.is_shared {
        return Ok(layout.past);
    }
    let lengths: SmallVec<[i64; 1]> = cx.input(8)?.collect_ints()?;
    let length = lengths.first().copied().unwrap_or(-1);
    let fits = usize::try_from(length)
        .ok()
        .filter(|length| length.checked_add(layout.fresh).is_some_and(|total| total <= layout.past));
    fits.ok_or_else(|| {
        let (fresh, capacity) = (layout.fresh, layout.past);
        error!(
            InvalidArgument,
            "past_sequence_length is {length}; with {fresh} new keys a buffer of {capacity} takes 0 to {}",
            capacity.saturating_sub(fresh)
        )
    })
}

/// Returns keys (1) or values (2). They stay in the input if nothing precedes them; otherwise past
/// and new rows are joined in the present output or in `scratch`.
fn keys_of<'a>(
    cx: &mut RunCx<'a>,
    layout: &Layout,
    (which, past): (usize, usize),
    scratch: &'a mut [f32],
) -> Result<Rows<'a>> {
    let (threads, incoming) = (cx.threads(), layout.incoming(cx, which)?);
    let capacity = layout.capacity();
    let len = layout.batch * layout.heads * capacity * incoming.size;
    let is_in_place = cx.in_place(which) == Some(which + 5);
    // A wanted present must be filled, even if the inputs could be read directly.
    let to = match cx.wants(which) {
        true => cx.output(which)?.as_mut_slice::<f32>()?,
        false if layout.reads_inputs() => return Ok(incoming),
        false => scratch.get_mut(..len).ok_or_else(|| error!(Fail, "the workspace is too small"))?,
    };
    if !is_in_place && let Some(view) = cx.find_input(which + 5) {
        let rows = [layout.past, layout.past, incoming.size];
        copy_past(threads, view.as_slice()?, rows, (&mut *to, capacity));
    }
    let bias = layout.bias(cx, which)?;
    place_rows(threads, incoming, (layout.heads, layout.fresh), bias, (&mut *to, capacity, past));
    Ok(Rows::by_head(to, [layout.heads, capacity, incoming.size]))
}

impl MultiHead {
    /// Reads the padding mask. Rank 1 holds lengths (batch), ends and starts (2 * batch), or
    /// lengths and offsets (3 * batch + 2). Higher ranks hold elements: (batch, keys), (batch,
    /// queries, keys), or (batch, 1, rows, columns) with at least `keys` rows and columns.
    fn padding<'a>(&self, view: TensorView<'a>, sizes: &Sizes) -> Result<Padding<'a>> {
        let Sizes { batch, queries, keys, .. } = *sizes;
        let elements = view.as_slice::<i32>()?;
        let place = |at: usize| elements.get(at).map_or(0, |place| (*place).clamp(0, i32::MAX) as usize);
        let ranges =
            |range: &dyn Fn(usize) -> Range<usize>| PaddingMask::Ranges((0..batch).map(range).collect());
        let mask = match *view.shape() {
            [len] if len == batch || len == 3 * batch + 2 => ranges(&|index| 0..place(index)),
            [len] if len == 2 * batch => ranges(&|index| place(batch + index)..place(index)),
            [b, k] if [b, k] == [batch, keys] => PaddingMask::Elements(elements, [keys, 0]),
            // A mask of one column would shift all scores alike, without effect. ONNX Runtime
            // ignores it too.
            [b, 1] if b == batch || b == 1 => ranges(&|_| 0..keys),
            [b, q, k] if [b, q, k] == [batch, queries, keys] => {
                PaddingMask::Elements(elements, [queries * keys, keys])
            }
            // Of a square mask over all positions, the queries have the last of the keys' rows.
            [b, 1, rows, columns] if b == batch && rows >= keys && columns >= keys && keys >= queries => {
                let first = elements.get((keys - queries) * columns..).unwrap_or(&[]);
                PaddingMask::Elements(first, [rows * columns, columns])
            }
            ref shape => {
                return Err(error!(
                    InvalidArgument,
                    "the padding mask has shape {shape:?}, expected [{batch}], [{}], [{}], [{batch}, {keys}], [{batch}, {queries}, {keys}], \
                     or [{batch}, 1, positions, positions]",
                    2 * batch,
                    3 * batch + 2
                ));
            }
        };
        Ok(Padding { mask, added: self.mask_filter_value })
    }
}
