//! Scaled dot-product attention over heads with any strides (`cu/attention.cuh`). All attention
//! operators use it.

use ort_core::dtype::DType;
use ort_core::ops::nn::attention::problem::{Causal, PaddingMask, SdpaSizes};
use ort_core::{Result, ensure, error};
use ort_gpu::attention::{AttentionPlan, AttentionScratch, KeyLengths, Sdpa, Sinks};

use super::heads::{in_vectors, kind_of, place, word, words_of};
use super::rows::suffix;
use crate::driver::{Limits, TENSOR_CORES};
use crate::launch::{Launch, OpCx, Operand};

/// The largest head size of the tensor core kernels.
const MOST_OF_MMA: usize = 128;
/// The largest head size of the kernels for few rows.
const MOST_OF_ROWS: usize = 256;
/// The most query rows sharing a key head that the kernels for few rows take.
const FEW_ROWS: usize = 8;
/// The least number of keys worth a block of its own.
const PART: usize = 256;
/// The number of keys from which splitting them is worth the extra launch that joins the parts.
const LEAST_CUT: usize = 3 * PART;
/// Query rows of a block on tensor cores.
const OF_MMA: usize = 64;
/// Query rows of a block whose warps share the same rows.
const OF_WARP: usize = 16;
/// A window as long as all keys and queries is no window.
const NO_WINDOW: i64 = 1 << 29;

/// How the work is divided into blocks.
struct AttendDivision {
    /// The kind of kernel, which has one family per type, and its entry.
    kind: &'static str,
    entry: String,
    threads: u32,
    /// Blocks over the rows that share keys, and over columns of values.
    blocks: usize,
    across: usize,
    /// The number of parts that the keys are split into.
    splits: usize,
    /// In the kernels for few rows: threads per row of keys and of values, powers of two.
    lanes: [usize; 2],
}

/// Returns the workspace bytes of an attention node.
pub(super) fn workspace(cx: &OpCx<'_>, scratch: AttentionScratch) -> Result<usize> {
    let AttentionScratch { sizes, types, has_scores, mut taken } = scratch;
    parts(cx, &sizes, types, has_scores, &mut taken)?;
    Ok(taken)
}

/// Returns the launches of an attention node.
pub(super) fn launches(cx: &OpCx<'_>, plan: AttentionPlan<'_>) -> Result<Vec<Launch>> {
    let mut launches = place(&plan.placings)?;
    launches.extend(place(&plan.conversions)?);
    launches.extend(attend(cx, &plan.sdpa, plan.taken)?);
    Ok(launches)
}

/// Chooses kernel and division for the given query type and key type. The number of parts never
/// falls as the number of keys grows.
fn cut(
    sizes: &SdpaSizes,
    limits: Limits,
    [query, key]: [DType; 2],
    has_scores: bool,
) -> Result<AttendDivision> {
    let (rows, widest, suffix) = (sizes.rows(), sizes.size.max(sizes.value_size), suffix(key)?);
    let mut kept = vector_of(key)?;
    // Blocks of 64 rows would not reach all multiprocessors, and there are too few keys to
    // split.
    let is_small = sizes.keys < LEAST_CUT
        && sizes.groups().saturating_mul(rows.div_ceil(OF_MMA)) <= limits.processors as usize;
    // Tensor cores multiply two operands of the same short type.
    let has_mma = key != DType::F32 && key == query && limits.capability >= TENSOR_CORES;
    let columns_of = |size: usize| if size <= 64 { 64 } else { 128 };
    // Only the tiled kernel writes scores out.
    let (kind, name, [down, columns], threads) = if has_scores {
        ("tiles", "scores".to_owned(), [64, 64], 256)
    } else if rows <= FEW_ROWS && widest <= MOST_OF_ROWS {
        // Kernels exist for 1, 4 and 8 rows.
        let many = if rows == 1 { 1 } else { rows.next_power_of_two().max(4) };
        kept = if many == 1 { kept } else { 4 };
        ("rows", format!("rows_{many}"), [many, MOST_OF_ROWS], 256)
    } else if has_mma && widest <= MOST_OF_MMA {
        let (name, down) = if is_small { ("cores_apart", OF_WARP) } else { ("cores", OF_MMA) };
        ("cores", format!("{name}_{}", columns_of(widest)), [down, MOST_OF_MMA], 128)
    } else {
        let columns = columns_of(sizes.value_size);
        ("tiles", format!("tiles_{columns}"), [64, columns], 256)
    };
    let (blocks, across) = (rows.div_ceil(down), sizes.value_size.div_ceil(columns));
    // If the blocks do not keep all multiprocessors busy, we split the keys between several.
    // Scores are written for all keys at once, which rules splitting out.
    let busy = (limits.processors as usize).saturating_mul(if threads == 128 { 4 } else { 2 });
    let others = sizes.groups().saturating_mul(blocks).saturating_mul(across);
    let parts = sizes.keys.div_ceil(PART).min(busy.checked_div(others).unwrap_or(1)).max(1);
    let splits = if has_scores || sizes.keys < LEAST_CUT { 1 } else { parts };
    // A row of keys longer than one warp's vectors takes several passes.
    let of_keys = sizes.size.div_ceil(vector_of(key)?).next_power_of_two().min(32);
    let lanes = [of_keys, sizes.value_size.div_ceil(kept).next_power_of_two()];
    Ok(AttendDivision {
        kind,
        entry: format!("attend_{name}_{suffix}"),
        threads,
        blocks,
        across,
        splits,
        lanes,
    })
}

/// Reserves the partial results in the workspace; `None` if the keys are not split.
fn parts(
    cx: &OpCx<'_>,
    sizes: &SdpaSizes,
    types: [DType; 2],
    has_scores: bool,
    taken: &mut usize,
) -> Result<Option<Operand>> {
    let splits = cut(sizes, *cx.limits, types, has_scores)?.splits;
    let partials = sizes.groups().saturating_mul(splits).saturating_mul(sizes.rows());
    // Beside its values, a row of a part has the maximum of its scores and the sum of its weights.
    let shape = [partials, sizes.value_size.saturating_add(2)];
    Ok((splits > 1).then(|| cx.workspace(taken, DType::F32, &shape)))
}

/// Returns the launches of an attention. The partial results follow the `taken` bytes of the
/// workspace.
pub(super) fn attend(cx: &OpCx<'_>, sdpa: &Sdpa<'_>, mut taken: usize) -> Result<Vec<Launch>> {
    let Sdpa { sizes, q, k, v, y, .. } = sdpa;
    let SdpaSizes { heads, key_heads, value_size, .. } = *sizes;
    let divides = heads.checked_rem(key_heads) == Some(0);
    ensure!(divides, InvalidArgument, "{heads} query heads are not a multiple of {key_heads} key heads");
    ensure!(k.operand.dtype == v.operand.dtype, Fail, "keys and values of two types");
    let rows = sizes.groups().saturating_mul(sizes.rows());
    if rows == 0 || value_size == 0 {
        return Ok(Vec::new());
    }
    let types = [q.operand.dtype, k.operand.dtype];
    let cut = cut(sizes, *cx.limits, types, sdpa.scores.is_some())?;
    let parts = parts(cx, sizes, types, sdpa.scores.is_some(), &mut taken)?;
    let words = words(sdpa, &cut)?;
    let blocks = sizes.groups().saturating_mul(cut.blocks).saturating_mul(cut.splits);
    let lengths = match sdpa.lengths {
        KeyLengths::All { .. } => None,
        KeyLengths::Each { lengths, .. } | KeyLengths::AtEnd { lengths, .. } => Some(lengths),
    };
    let sinks = match sdpa.sinks {
        Sinks::Each(sinks) => Some(sinks),
        _ => None,
    };
    let attend = Launch::of_type(&format!("attention_{}", cut.kind), suffix(k.operand.dtype)?, cut.entry)?
        .grid([blocks, cut.across, 1])?
        .block([cut.threads, 1, 1])
        .tensor(&q.operand)
        .tensor(&k.operand)
        .tensor(&v.operand)
        .find_tensor(sdpa.q_bias)
        .find_tensor(lengths)
        .find_tensor(sdpa.mask.map(|mask| mask.operand))
        .find_tensor(sdpa.padding.map(|padding| padding.operand))
        .find_tensor(sinks)
        .find_tensor(sdpa.scores.map(|scores| scores.operand))
        .tensor(&y.operand)
        .find_tensor(parts.as_ref())
        .ints::<WORDS>(&words)?;
    // Without a split, the first launch has written the result.
    let Some(parts) = parts else { return Ok(vec![attend]) };
    let results = rows.saturating_mul(value_size);
    let join = Launch::new("attention_join", "attend_join").threads(results)?;
    let join = join.tensor(&parts).tensor(&y.operand).ints::<WORDS>(&words)?;
    Ok(vec![attend, join.uint(results)?])
}

/// Fills the kernels' structure `Attend`.
fn words(sdpa: &Sdpa<'_>, cut: &AttendDivision) -> Result<Vec<i64>> {
    let Sdpa { sizes, q, k, v, y, .. } = sdpa;
    let SdpaSizes { batch, heads, key_heads, queries, keys, size, value_size } = *sizes;
    let sharing = heads.checked_div(key_heads).unwrap_or(0);
    let own = [heads, key_heads, queries, keys, size, value_size, sharing, sizes.rows()];
    // The words have the order of `struct Attend`; the compiler cannot detect exchanged ones.
    let mut words: Vec<i64> = own.into_iter().chain([cut.blocks, cut.splits]).map(word).collect();
    for rows in [q, k, v, y] {
        words.extend(words_of(rows));
    }
    words.extend([kind_of(q.operand.dtype)?, kind_of(y.operand.dtype)?]);
    words.extend(length_words(sdpa.lengths)?);
    words.push(match sdpa.causal {
        Causal::No => 0,
        Causal::Yes => 1,
        Causal::BottomRight => 2,
    });
    // Kernels take any negative size for no window. `NO_WINDOW` keeps sums with positions within
    // `int`.
    words.extend(sdpa.windows.map(|size| size.clamp(-1, NO_WINDOW)));
    let (kind, strides, limit) = match sdpa.mask {
        Some(mask) => (kind_of(mask.operand.dtype)?, mask.layout.strides, mask.layout.keys),
        None => (0, [0; 3], keys),
    };
    words.push(kind);
    words.extend(strides.into_iter().chain([limit]).map(word));
    let (padding, places) = match sdpa.padding.map(|padding| padding.mask) {
        None => (0, [0; 3]),
        Some(PaddingMask::From) => (1, [0; 3]),
        Some(PaddingMask::FromAndBefore) => (2, [0; 3]),
        Some(PaddingMask::Elements { first, strides: [batch, query] }) => (3, [first, batch, query]),
    };
    words.push(padding);
    words.extend(places.into_iter().chain([batch]).map(word));
    words.push(match sdpa.sinks {
        Sinks::None => 0,
        Sinks::Zero => 1,
        Sinks::Each(_) => 2,
    });
    words.push(sdpa.scores.map_or(-1, |scores| scores.stage as i64));
    for (rows, size) in [(q, size), (k, size), (v, value_size), (y, value_size)] {
        words.push(i64::from(in_vectors(rows, size, vector_of(rows.operand.dtype)?)));
    }
    words.extend(cut.lanes.map(word));
    let padded = sdpa.padding.map_or(0.0, |padding| padding.added);
    let without_weights = if sdpa.hidden_is_nan && keys > 0 { f32::NAN } else { 0.0 };
    // The structure is passed as 32-bit words, so floats go in as their bits.
    words.extend(
        [sdpa.scale, sdpa.softcap, padded, without_weights]
            .map(|number| i64::from(number.to_bits().cast_signed())),
    );
    Ok(words)
}

/// The fields of the lengths: the keys before the first query, what is added to a length, whether
/// the queries are the last keys, and the type of lengths.
fn length_words(lengths: KeyLengths<'_>) -> Result<[i64; 4]> {
    Ok(match lengths {
        KeyLengths::All { before } => [word(before), 0, 0, 0],
        KeyLengths::Each { lengths, more, before } => [word(before), word(more), 0, kind_of(lengths.dtype)?],
        KeyLengths::AtEnd { lengths, more } => [0, word(more), 1, kind_of(lengths.dtype)?],
    })
}

/// The number of words in `Attend`.
const WORDS: usize = 57;

/// Returns how many elements fit into 16 bytes.
fn vector_of(dtype: DType) -> Result<usize> {
    let bytes = dtype.byte_len(1).filter(|bytes| *bytes > 0);
    bytes
        .map(|bytes| 16 / bytes)
        .ok_or_else(|| error!(NotImplemented, "attention of {dtype} is not supported"))
}
