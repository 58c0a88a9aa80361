//! The KV cache of `GroupQueryAttention`: how rows are stored, and which of them a run keeps.

use ort_core::dtype::DType;
use ort_core::ep::RunCx;
use ort_core::ops::nn::attention::problem::{CacheQuantization, GroupQuery, GroupQueryProblem, SdpaSizes};
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use super::attend::{HeadSlice, Span, Spans};
use super::rotary::Angles;
use ort_cpu_attention::{self as attention, CacheCodec, CacheScales, Elements};
use ort_cpu_threads::interrupt::{self, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_threads::thread_scratch::with_thread_scratch;
use ort_cpu_vector::convert::{bf16_from_f32, f16_from_f32};
use ort_cpu_vector::norm::RowNorm;
use ort_cpu_vector::simd::Isa;

/// What happens to new queries and keys: an RMS norm per head, then the rotary embedding.
#[derive(Clone, Copy)]
pub(super) struct Change<'a> {
    pub(super) norm: Option<&'a [f32]>,
    pub(super) epsilon: f32,
    pub(super) rotation: Option<(Angles<'a>, &'a [usize])>,
    pub(super) queries: usize,
}

impl Change<'_> {
    fn apply(&self, batch: usize, row: usize, from: &[f32], to: &mut [f32]) {
        match self.norm {
            Some(scale) => {
                let norm = RowNorm { centers: false, epsilon: self.epsilon, scale: Some(scale), bias: None };
                norm.apply(Isa::current(), from, to);
            }
            None => to.copy_from_slice(from),
        }
        if let Some((angles, positions)) = &self.rotation
            && let Some(position) = positions.get(batch * self.queries + row)
        {
            angles.rotate(*position, to);
        }
    }

    /// Writes the new rows of a head, normalized and rotated.
    pub(super) fn place(&self, from: HeadSlice<'_>, [batch, head]: [usize; 2], to: &mut [f32]) {
        for (row, to) in spending(4 + from.size, to.chunks_exact_mut(from.size.max(1))).enumerate() {
            if let Ok(from) = from.row([batch, head, row]) {
                self.apply(batch, row, from, to);
            }
        }
    }
}

/// How a cache stores its elements.
#[derive(Clone, Copy)]
pub(super) enum Store<'a> {
    F32,
    F16,
    BF16,
    Quantized(CacheCodec<'a>),
}

impl<'a> Store<'a> {
    /// Reads the type of the cache of keys (0) or values (1), and the scales of a quantized one.
    pub(super) fn new(
        cx: &RunCx<'a>,
        which: usize,
        dtype: DType,
        quantization: Option<CacheQuantization>,
        sizes: &SdpaSizes,
    ) -> Result<Store<'a>> {
        let Some(CacheQuantization { bits, is_by_channel }) = quantization else {
            return match dtype {
                DType::F32 => Ok(Store::F32),
                DType::F16 => Ok(Store::F16),
                DType::BF16 => Ok(Store::BF16),
                other => Err(error!(Fail, "a cache of {} is not quantized", other.name())),
            };
        };
        let (name, index) = if which == 0 { ("k_scale", 12) } else { ("v_scale", 13) };
        let view = cx.find_input(index);
        let view =
            view.ok_or_else(|| error!(InvalidArgument, "{name} is missing, and the cache is quantized"))?;
        let scales = view.as_slice::<f32>()?;
        let is_by_channel = is_by_channel.get(which).copied().unwrap_or(false);
        let expected = if is_by_channel { sizes.key_heads * sizes.size } else { 1 };
        ensure!(
            scales.len() == expected,
            InvalidArgument,
            "{name} has shape {:?}, expected {expected} elements",
            view.shape()
        );
        let scales = match scales {
            [scale] if !is_by_channel => CacheScales::Tensor(*scale),
            all => CacheScales::Channels(all),
        };
        Ok(Store::Quantized(CacheCodec { is_packed: bits == 4, scales }))
    }

    /// The bytes of an element as strides count them.
    fn width(&self) -> usize {
        match self {
            Store::F32 => 4,
            Store::F16 | Store::BF16 => 2,
            Store::Quantized(_) => 1,
        }
    }

    fn elements(&self, bytes: &'a [u8]) -> Elements<'a> {
        match self {
            Store::F32 => Elements::Full(bytemuck::cast_slice(bytes)),
            Store::F16 => Elements::F16(bytemuck::cast_slice(bytes)),
            Store::BF16 => Elements::BF16(bytemuck::cast_slice(bytes)),
            Store::Quantized(codec) => Elements::Quantized(bytes, *codec),
        }
    }

    /// Writes the new rows of a head.
    fn place(&self, change: &Change<'_>, incoming: HeadSlice<'_>, at: [usize; 2], to: &mut [u8]) {
        if let Store::F32 = self {
            return change.place(incoming, at, bytemuck::cast_slice_mut(to));
        }
        let (isa, size) = (Isa::current(), incoming.size.max(1));
        with_thread_scratch(|wide: &mut Vec<f32>| {
            wide.clear();
            wide.resize(change.queries * incoming.size, 0.0);
            change.place(incoming, at, wide);
            match self {
                Store::F32 => {}
                Store::F16 => f16_from_f32(isa, wide, bytemuck::cast_slice_mut(to)),
                Store::BF16 => bf16_from_f32(isa, wide, bytemuck::cast_slice_mut(to)),
                Store::Quantized(codec) => {
                    let codec = codec.of_head(at[1], size);
                    let rows = to.chunks_exact_mut(codec.row_bytes(size).max(1));
                    for (from, to) in spending(size, wide.chunks_exact(size)).zip(rows) {
                        codec.encode(isa, from, to);
                    }
                }
            }
        });
    }
}

/// One number per batch.
type Few = SmallVec<[usize; 8]>;

/// Which rows of the past a run keeps, and where the new ones go.
pub(super) struct Lengths {
    /// The rows of the attention's keys, past and new.
    pub(super) spans: Spans,
    /// For each batch the position of its first row.
    pub(super) bases: Few,
    /// For each batch the rows of the past before those that are kept.
    leaving: Few,
    /// For each batch the rows that stay after the run.
    staying: Few,
    /// The longest sequence, past and new tokens.
    pub(super) total: usize,
    /// The most rows of a batch's keys.
    pub(super) keys: usize,
    /// Rows of the present tensors.
    pub(super) capacity: usize,
    /// Whether queries may see rows that the present has no room for.
    pub(super) is_staged: bool,
}

impl Lengths {
    /// Checks `seqlens_k` and `total_sequence_length` against the buffers.
    pub(super) fn new(cx: &RunCx<'_>, node: &GroupQuery, problem: &GroupQueryProblem) -> Result<Lengths> {
        let has_past = cx.find_input(3).is_some() || cx.in_place(1) == Some(3);
        let (SdpaSizes { batch, queries, .. }, past) = (problem.sizes, problem.past);
        let totals: SmallVec<[i64; 8]> = cx.input(6)?.collect_ints()?;
        let given = totals.first().copied().unwrap_or(-1);
        let total = match node.slides {
            false => problem.total(given)?,
            true => usize::try_from(given).ok().filter(|total| *total >= queries).ok_or_else(|| {
                error!(InvalidArgument, "total_sequence_length is {given}, expected at least {queries}")
            })?,
        };
        let lengths: SmallVec<[i64; 8]> = cx.input(5)?.collect_ints()?;
        ensure!(
            lengths.len() == batch,
            InvalidArgument,
            "seqlens_k has {} values, expected {batch}",
            lengths.len()
        );
        // A window never grows. Without a past it has the rows of the prompt.
        let capacity = if node.slides && has_past { past } else { past.max(total) };
        ensure!(
            !(node.slides && has_past) || usize::try_from(node.window).is_ok_and(|window| window <= capacity),
            InvalidArgument,
            "the cache has {capacity} rows, expected at least local_window_size, {}",
            node.window
        );
        let mut all = Lengths {
            spans: Spans::with_capacity(batch),
            bases: Few::with_capacity(batch),
            leaving: Few::with_capacity(batch),
            staying: Few::with_capacity(batch),
            total,
            keys: 0,
            capacity,
            is_staged: node.slides && queries > 1,
        };
        // The batches of a prompt may be padded, so they may have fewer keys than queries.
        let is_prompt = queries == total;
        for length in lengths {
            let keys = length.checked_add(1).and_then(|keys| usize::try_from(keys).ok());
            let keys = keys.filter(|keys| (1..=total).contains(keys) && (is_prompt || *keys >= queries));
            let keys = keys.ok_or_else(|| {
                let least = if is_prompt { 0 } else { queries.saturating_sub(1) };
                error!(
                    InvalidArgument,
                    "seqlens_k holds {length}, expected {least} to {}",
                    total.saturating_sub(1)
                )
            })?;
            all.push(node, keys, if is_prompt { 0 } else { keys - queries });
        }
        Ok(all)
    }

    /// Adds a batch of `total` tokens, of which `before` are past.
    fn push(&mut self, node: &GroupQuery, total: usize, before: usize) {
        let [held, staying] = match node.slides {
            true => [before, total].map(|total| node.resident(total, self.capacity)),
            false => [before, total],
        };
        // A staged run reads all of the past before it drops any of it.
        let kept = if self.is_staged { held } else { held.min(staying.saturating_sub(1)) };
        let kept = if node.slides { kept } else { held };
        let keys = kept + (total - before);
        self.spans.push(Span { keys, before: kept });
        self.bases.push(total - keys);
        self.leaving.push(held - kept);
        self.staying.push(staying);
        self.keys = self.keys.max(keys);
    }
}

/// The cache of keys or of values in a run.
pub(super) struct Cache<'c, 'a> {
    pub(super) problem: &'c GroupQueryProblem,
    pub(super) lengths: &'c Lengths,
    pub(super) store: Store<'a>,
    pub(super) threads: usize,
}

impl<'a> Cache<'_, 'a> {
    /// The bytes of a row.
    fn row(&self) -> usize {
        self.problem.cache_row * self.store.width()
    }

    /// Returns a buffer of `rows` rows per head as the attention reads it.
    pub(super) fn rows(&self, bytes: &'a [u8], rows: usize) -> attention::Rows<'a> {
        let (key_heads, row) = (self.problem.sizes.key_heads, self.problem.cache_row);
        attention::Rows {
            elements: self.store.elements(bytes),
            strides: [key_heads * rows * row, rows * row, row],
        }
    }

    /// Copies the rows of the past that stay to a buffer of `rows` rows per head, and appends the
    /// new ones. Without `past`, the buffer holds it already. Then rows beyond the valid ones keep
    /// their contents, which no one may read; otherwise they are zeroed.
    pub(super) fn fill(
        &self,
        past: Option<&[u8]>,
        incoming: HeadSlice<'_>,
        change: &Change<'_>,
        to: &mut [u8],
        rows: usize,
    ) {
        let SdpaSizes { key_heads, queries, .. } = self.problem.sizes;
        let row = self.row();
        for_each_chunk_mut(self.threads, to, rows * row, |index, to| {
            let (batch, head) = (index / key_heads, index % key_heads);
            let (before, leaving) = (self.lengths.spans[batch].before, self.lengths.leaving[batch]);
            match past {
                Some(past) => {
                    let from = &past[(index * self.problem.past + leaving) * row..];
                    interrupt::copy(&from[..before * row], &mut to[..before * row]);
                }
                None if leaving > 0 => to.copy_within(leaving * row..(leaving + before) * row, 0),
                None => {}
            }
            let (new, unused) = to[before * row..].split_at_mut(queries * row);
            if past.is_some() {
                interrupt::fill(unused, 0);
            }
            self.store.place(change, incoming, [batch, head], new);
        });
    }

    /// Copies the rows that stay from a buffer of `rows` rows per head to the present tensor.
    pub(super) fn settle(&self, staged: &[u8], rows: usize, present: &mut [u8], is_in_place: bool) {
        let row = self.row();
        for_each_chunk_mut(self.threads, present, self.lengths.capacity * row, |index, to| {
            let batch = index / self.problem.sizes.key_heads;
            let (keys, staying) = (self.lengths.spans[batch].keys, self.lengths.staying[batch]);
            let (latest, unused) = to.split_at_mut(staying * row);
            let from = &staged[(index * rows + keys - staying) * row..];
            interrupt::copy(&from[..latest.len()], latest);
            if !is_in_place {
                interrupt::fill(unused, 0);
            }
        });
    }
}
