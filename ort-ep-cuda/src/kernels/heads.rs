//! Launches that place new rows of attention heads after those of a past (`cu/heads.cu`).

use ort_core::dtype::DType;
use ort_core::{Result, error};
use ort_gpu::attention::{HeadTensor, KeyLengths, Placing, Positions};

use crate::launch::{Launch, Operand};

/// Threads of a warp.
const WARP: usize = 32;
/// Warps of a block.
const WARPS: usize = 8;
/// Elements of a vector access.
const VECTOR: usize = 4;

/// Converts a number for a kernel's structure. An overflow saturates, and the launch then rejects
/// it.
pub(super) fn word(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Returns the kernels' tag of an element type.
pub(super) fn kind_of(dtype: DType) -> Result<i64> {
    Ok(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::Bool => 3,
        DType::I32 => 4,
        DType::I64 => 5,
        other => return Err(error!(NotImplemented, "attention with elements of {other} is not supported")),
    })
}

/// Fills the kernels' structure `Rows`.
pub(super) fn words_of(rows: &HeadTensor) -> [i64; 4] {
    let [batch, head, row] = rows.strides;
    [rows.first, batch, head, row].map(word)
}

/// Whether rows of this size can be read in vectors of `vector` elements.
pub(super) fn in_vectors(rows: &HeadTensor, size: usize, vector: usize) -> bool {
    let whole = |number: &usize| number.is_multiple_of(vector);
    whole(&size) && whole(&rows.first) && rows.strides.iter().all(whole)
}

/// Returns the launches that place rows, one for each placing.
pub(super) fn place(placings: &[Placing<'_>]) -> Result<Vec<Launch>> {
    placings.iter().filter(|placing| row_count(placing) > 0).map(place_rows).collect()
}

/// Returns the launches for a pair of keys and values: a single one if both are copied unchanged.
pub(super) fn place_pair(pair: &[Placing<'_>; 2]) -> Result<Vec<Launch>> {
    let [count, others] = pair.each_ref().map(row_count);
    let is_plain = pair
        .iter()
        .all(|placing| placing.bias.is_none() && placing.rotation.is_none() && placing.ends().is_none());
    // One launch covers both only if they have equally many rows.
    if !is_plain || count == 0 || count != others {
        return place(pair);
    }
    let mut launch = Launch::new("heads", "place_both").grid([count.div_ceil(WARPS), 2, 1])?;
    launch = launch.block([(WARP * WARPS) as u32, 1, 1]);
    for Placing { fresh, past, to, .. } in pair {
        launch = launch.tensor(&fresh.operand).find_tensor(*past).tensor(&to.operand);
    }
    for placing in pair {
        launch = launch.ints::<27>(&placing_words(placing)?)?;
    }
    Ok(vec![launch.uint(count)?])
}

fn place_rows(placing: &Placing<'_>) -> Result<Launch> {
    let count = row_count(placing);
    let (cos, sin) = placing.rotation.map(|rotation| (rotation.cos, rotation.sin)).unzip();
    let launch = Launch::new("heads", "place_rows").grid([count.div_ceil(WARPS), 1, 1])?;
    let launch = launch
        .block([(WARP * WARPS) as u32, 1, 1])
        .tensor(&placing.fresh.operand)
        .find_tensor(placing.past)
        .find_tensor(placing.bias.map(|(bias, _)| bias))
        .find_tensor(placing.ends().map(|(lengths, _)| lengths))
        .find_tensor(cos)
        .find_tensor(sin)
        .find_tensor(rotation_words(placing)?.0)
        .tensor(&placing.to.operand);
    launch.ints::<27>(&placing_words(placing)?)?.uint(count)
}

/// Returns how many rows are written; none if rows are empty.
fn row_count(placing: &Placing<'_>) -> usize {
    let [batch, heads, _, size] = placing.sizes;
    if size == 0 { 0 } else { batch.saturating_mul(heads).saturating_mul(placing.written()) }
}

/// Fills the kernels' structure `Placing`.
fn placing_words(placing: &Placing<'_>) -> Result<Vec<i64>> {
    let Placing { sizes: [_, heads, many, size], fresh, to, capacity, past, .. } = placing;
    let ends = placing.ends();
    let before = match placing.lengths {
        KeyLengths::All { before } | KeyLengths::Each { before, .. } => before,
        KeyLengths::AtEnd { more, .. } => more,
    };
    let mut words = [*heads, *size, *many, placing.written(), *capacity].map(word).to_vec();
    words.extend(words_of(fresh));
    words.extend(words_of(to));
    words.extend([kind_of(fresh.operand.dtype)?, kind_of(to.operand.dtype)?]);
    words.extend([past.map_or(0, |past| past.size(2)), before].map(word));
    words.push(ends.map_or(Ok(0), |(lengths, _)| kind_of(lengths.dtype))?);
    let bias_first = placing.bias.map_or(0, |(_, first)| first);
    words.extend([i64::from(placing.at_front), i64::from(placing.keeps), word(bias_first)]);
    words.extend(rotation_words(placing)?.1);
    // Rows of one type that are whole vectors are moved without conversion.
    let same = fresh.operand.dtype == to.operand.dtype;
    let moves = same && in_vectors(fresh, *size, VECTOR) && in_vectors(to, *size, VECTOR);
    words.push(i64::from(moves));
    Ok(words)
}

/// Returns the positions, and the rotation's fields.
fn rotation_words<'a>(placing: &Placing<'a>) -> Result<(Option<&'a Operand>, [i64; 5])> {
    let Some(rotation) = placing.rotation.filter(|rotation| rotation.half > 0) else {
        return Ok((None, [0; 5]));
    };
    let (positions, how) = match rotation.positions {
        Positions::ByPlace => (None, 0),
        Positions::ByToken(positions) => (Some(positions), 1),
        Positions::First(positions) => (Some(positions), 2),
        Positions::Numbered => (None, 3),
    };
    let sizes = [rotation.half, rotation.cache_rows].map(word);
    let [half, rows] = sizes;
    Ok((positions, [half, rows, how, i64::from(rotation.is_interleaved), kind_of(rotation.cos.dtype)?]))
}
