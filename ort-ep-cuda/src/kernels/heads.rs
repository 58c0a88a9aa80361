//! The layout of attention heads, and the placement of new rows after those of a past
//! (`cu/heads.cu`).

use ort_core::dtype::DType;
use ort_core::{Result, ensure, error};

use super::attend::Lengths;
use crate::launch::{Launch, Operand};

/// Threads of a warp.
const WARP: usize = 32;
/// Warps of a block.
const WARPS: usize = 8;
/// Elements of a vector access.
const VECTOR: usize = 4;

/// The rows of heads in a tensor.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub(super) operand: Operand,
    /// The offset of the first element.
    pub(super) first: usize,
    /// The strides of batch, head and row.
    pub(super) steps: [usize; 3],
}

impl Rows {
    /// Heads interleaved per token, with `parts` tensors packed in each head, of which this is
    /// number `part`: (batch, rows, heads, parts, size).
    pub(super) fn by_token(
        operand: &Operand,
        [heads, rows, size]: [usize; 3],
        (part, parts): (usize, usize),
    ) -> Rows {
        let head = parts.saturating_mul(size);
        let row = head.saturating_mul(heads);
        let steps = [row.saturating_mul(rows), head, row];
        Rows { operand: operand.clone(), first: part.saturating_mul(size), steps }
    }

    /// Contiguous rows per head: (batch, heads, rows, size).
    pub(super) fn by_head(operand: &Operand, [heads, rows, size]: [usize; 3]) -> Rows {
        let head = rows.saturating_mul(size);
        Rows { operand: operand.clone(), first: 0, steps: [heads.saturating_mul(head), head, size] }
    }

    /// Fills the kernels' structure `Rows`.
    pub(super) fn words(&self) -> [i64; 4] {
        let [batch, head, row] = self.steps;
        [self.first, batch, head, row].map(word)
    }

    /// Whether rows of this size can be read in vectors of `vector` elements.
    pub(super) fn in_vectors(&self, size: usize, vector: usize) -> bool {
        let whole = |number: &usize| number.is_multiple_of(vector);
        whole(&size) && whole(&self.first) && self.steps.iter().all(whole)
    }
}

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

/// How the position of a new row is determined.
#[derive(Clone, Copy)]
pub(super) enum Positions<'a> {
    /// It is the row's index among all rows.
    ByPlace,
    /// A tensor holds it per token.
    ByToken(&'a Operand),
    /// A tensor holds the position of the first row.
    BehindFirst(&'a Operand),
    /// Tokens are numbered through all batches.
    ByNumber,
}

/// A rotary embedding: rotates pairs of elements of a row by the angles of its position.
#[derive(Clone, Copy)]
pub(super) struct Rotation<'a> {
    /// Rows of cosines and sines, one value per rotated pair.
    pub(super) angles: [&'a Operand; 2],
    pub(super) half: usize,
    pub(super) positions: Positions<'a>,
    /// Whether the elements of a pair are adjacent.
    pub(super) interleaved: bool,
}

/// Copies new rows of heads after those of a past.
#[derive(Clone, Copy)]
pub(super) struct Placing<'a> {
    /// Batches, heads, new rows and row size.
    pub(super) sizes: [usize; 4],
    pub(super) fresh: &'a Rows,
    /// A bias for the new rows of all heads, and its first element.
    pub(super) bias: Option<(&'a Operand, usize)>,
    pub(super) rotation: Option<Rotation<'a>>,
    /// The past rows, (batch, heads, rows, size) of the target's type; `None` if the target holds
    /// them already.
    pub(super) past: Option<&'a Operand>,
    /// How many rows precede the new ones.
    pub(super) lengths: Lengths<'a>,
    /// Whether new rows go to the front, whatever precedes them elsewhere.
    pub(super) at_front: bool,
    /// Whether the target's other rows stay as they are.
    pub(super) keeps: bool,
}

impl<'a> Placing<'a> {
    /// Copies the new rows alone, unchanged.
    pub(super) fn new(sizes: [usize; 4], fresh: &'a Rows) -> Placing<'a> {
        let lengths = Lengths::all(0);
        Placing {
            sizes,
            fresh,
            bias: None,
            rotation: None,
            past: None,
            lengths,
            at_front: false,
            keeps: false,
        }
    }

    /// Returns the launch that writes the rows to `to`, which has `capacity` rows per head.
    pub(super) fn launches(&self, to: &Rows, capacity: usize) -> Result<Vec<Launch>> {
        let (lines, lengths) = (self.lines(capacity), self.lengths());
        if lines == 0 {
            return Ok(Vec::new());
        }
        let [cos, sin] = self.rotation.map_or([None; 2], |rotation| rotation.angles.map(Some));
        let (bias, positions) = (self.bias.map(|(bias, _)| bias), self.turned()?.0);
        let launch = Launch::new("heads", "place_rows").grid([lines.div_ceil(WARPS), 1, 1])?;
        let launch = launch
            .block([(WARP * WARPS) as u32, 1, 1])
            .tensor(&self.fresh.operand)
            .find_tensor(self.past)
            .find_tensor(bias)
            .find_tensor(lengths)
            .find_tensor(cos)
            .find_tensor(sin)
            .find_tensor(positions)
            .tensor(&to.operand);
        Ok(vec![launch.ints::<27>(&self.words(to, capacity)?)?.uint(lines)?])
    }

    /// Copies keys and values in one launch, if both are copied unchanged; otherwise in one launch
    /// each.
    pub(super) fn both(pair: [(&Placing<'_>, &Rows); 2], capacity: usize) -> Result<Vec<Launch>> {
        let [lines, others] = pair.map(|(placing, _)| placing.lines(capacity));
        let is_plain = pair.iter().all(|(placing, _)| {
            placing.bias.is_none() && placing.rotation.is_none() && placing.lengths().is_none()
        });
        // One launch covers both only if they have equally many rows.
        if !is_plain || lines == 0 || lines != others {
            let each = pair.into_iter().map(|(placing, to)| placing.launches(to, capacity));
            return Ok(each.collect::<Result<Vec<_>>>()?.concat());
        }
        let mut launch = Launch::new("heads", "place_both").grid([lines.div_ceil(WARPS), 2, 1])?;
        launch = launch.block([(WARP * WARPS) as u32, 1, 1]);
        for (placing, to) in pair {
            launch = launch.tensor(&placing.fresh.operand).find_tensor(placing.past).tensor(&to.operand);
        }
        for (placing, to) in pair {
            launch = launch.ints::<27>(&placing.words(to, capacity)?)?;
        }
        Ok(vec![launch.uint(lines)?])
    }

    /// Returns how many rows are written; none if rows are empty.
    fn lines(&self, capacity: usize) -> usize {
        let [batch, heads, many, size] = self.sizes;
        // If the target keeps its other rows, only the new ones are written.
        let rows = if self.keeps { many } else { capacity };
        if size == 0 { 0 } else { batch.saturating_mul(heads).saturating_mul(rows) }
    }

    /// Returns the tensor of row counts per batch, if the new rows are the last ones.
    fn lengths(&self) -> Option<&'a Operand> {
        self.lengths.of.filter(|_| self.lengths.at_end)
    }

    /// Fills the kernels' structure `Placing`.
    fn words(&self, to: &Rows, capacity: usize) -> Result<Vec<i64>> {
        let [_, heads, many, size] = self.sizes;
        let rows = if self.keeps { many } else { capacity };
        let lengths = self.lengths();
        let before = if lengths.is_some() { self.lengths.more } else { self.lengths.before };
        let bias_first = self.bias.map(|(_, first)| first);
        let mut words = [heads, size, many, rows, capacity].map(word).to_vec();
        words.extend(self.fresh.words());
        words.extend(to.words());
        words.extend([kind_of(self.fresh.operand.dtype)?, kind_of(to.operand.dtype)?]);
        words.extend([self.past.map_or(0, |past| past.size(2)), before].map(word));
        words.push(lengths.map_or(Ok(0), |lengths| kind_of(lengths.dtype))?);
        words.extend([i64::from(self.at_front), i64::from(self.keeps), word(bias_first.unwrap_or(0))]);
        words.extend(self.turned()?.1);
        // Rows of one type that are whole vectors are moved without conversion.
        let same = self.fresh.operand.dtype == to.operand.dtype;
        let moves = same && self.fresh.in_vectors(size, VECTOR) && to.in_vectors(size, VECTOR);
        words.push(i64::from(moves));
        Ok(words)
    }

    /// Returns the positions, and the rotation's fields.
    fn turned(&self) -> Result<(Option<&'a Operand>, [i64; 5])> {
        let Some(rotation) = self.rotation.filter(|rotation| rotation.half > 0) else {
            return Ok((None, [0; 5]));
        };
        let (positions, how) = match rotation.positions {
            Positions::ByPlace => (None, 0),
            Positions::ByToken(positions) => (Some(positions), 1),
            Positions::BehindFirst(positions) => (Some(positions), 2),
            Positions::ByNumber => (None, 3),
        };
        let [cos, _] = rotation.angles;
        let rows = cos.count().checked_div(rotation.half).unwrap_or(0);
        ensure!(rows > 0, InvalidArgument, "the caches of angles are empty");
        let interleaved = i64::from(rotation.interleaved);
        let kind = kind_of(cos.dtype)?;
        Ok((positions, [word(rotation.half), word(rows), how, interleaved, kind]))
    }
}
