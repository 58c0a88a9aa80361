//! Rotary position embedding (`RotaryEmbedding`).
//!
//! Position ids are either one start position for all sequences or one id per token.
//! `GroupQueryAttention` uses the same tables.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_threads::interrupt::{self, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "RotaryEmbedding",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    make: |cx| via_f32(cx, make),
    ..KernelDef::BASE
}];

struct Rotary {
    interleaved: bool,
    heads: usize,
    rotated: usize,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let size = |name: &str| {
        let value = attrs.find_int(name).unwrap_or(0);
        usize::try_from(value).map_err(|_| error!(InvalidGraph, "{name} is {value}, expected 0 or more"))
    };
    let rotary = Rotary {
        interleaved: attrs.find_int("interleaved").unwrap_or(0) != 0,
        heads: size("num_heads")?,
        rotated: size("rotary_embedding_dim")?,
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| rotary.run(cx)))
}

/// The cosine and sine tables: one row per position, one column per rotated pair.
#[derive(Clone, Copy)]
pub(super) struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    /// Rotated pairs per row.
    half: usize,
    /// Positions in the tables.
    rows: usize,
    interleaved: bool,
}

impl<'a> Angles<'a> {
    pub(super) fn new(cos: TensorView<'a>, sin: TensorView<'a>, interleaved: bool) -> Result<Angles<'a>> {
        match (cos.shape(), sin.shape()) {
            (&[rows, half], same) if same == [rows, half] => {
                Ok(Angles { cos: cos.as_slice()?, sin: sin.as_slice()?, half, rows, interleaved })
            }
            (cos, sin) => Err(error!(
                InvalidArgument,
                "cos_cache and sin_cache have shapes {cos:?} and {sin:?}, expected rank 2"
            )),
        }
    }

    /// Returns the number of leading elements of a row that are rotated.
    pub(super) fn width(&self) -> usize {
        2 * self.half
    }

    /// Checks that the tables hold a position.
    pub(super) fn check(&self, position: i64) -> Result<usize> {
        // Negative positions and positions beyond the caches come from the model's inputs.
        let found = usize::try_from(position).ok().filter(|row| *row < self.rows);
        let rows = self.rows;
        found.ok_or_else(|| {
            error!(InvalidArgument, "position {position} is outside the caches, which have {rows}")
        })
    }

    /// Rotates the leading elements of a row by the angles of a position that [`Angles::check`]
    /// accepted.
    pub(super) fn rotate(&self, position: usize, row: &mut [f32]) {
        let (half, start) = (self.half, position * self.half);
        let (cos, sin) = (&self.cos[start..start + half], &self.sin[start..start + half]);
        for pair in 0..half {
            // Interleaved pairs are adjacent elements; otherwise a pair spans the two halves of the
            // rotated part.
            let (a, b) = if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            // The rotation of the point (x, y) by the angle of this position and pair.
            let (x, y) = (row[a], row[b]);
            row[a] = cos[pair] * x - sin[pair] * y;
            row[b] = sin[pair] * x + cos[pair] * y;
        }
    }
}

/// Positions of tokens, stored inline for a decoding step.
pub(super) type Positions = SmallVec<[usize; 8]>;

/// Returns the position of each token of (batch, sequence). `ids` holds the first position of every
/// sequence, or one position per token.
pub(super) fn positions(
    angles: &Angles<'_>,
    ids: TensorView<'_>,
    [batch, sequence]: [usize; 2],
) -> Result<Positions> {
    let values: SmallVec<[i64; 8]> = ids.collect_ints()?;
    let is_first = ids.rank() <= 1;
    let fits = if is_first { values.len() == 1 } else { ids.shape() == [batch, sequence] };
    let shape = ids.shape();
    ensure!(fits, InvalidArgument, "position_ids has shape {shape:?}, expected [1] or [{batch}, {sequence}]");
    let mut positions = Positions::with_capacity(batch * sequence);
    for index in 0..batch * sequence {
        let id = match is_first {
            // A start near the maximum must not wrap to a valid position; `check` refuses it.
            true => values[0].saturating_add((index % sequence) as i64),
            false => values[index],
        };
        positions.push(angles.check(id)?);
    }
    Ok(positions)
}

impl Rotary {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let x = cx.input(0)?;
        let angles = Angles::new(cx.input(2)?, cx.input(3)?, self.interleaved)?;
        // Rank 4 is (batch, heads, sequence, size), rank 3 is (batch, sequence, heads * size).
        let (batch, heads, sequence, size, heads_last) = match *x.shape() {
            [batch, heads, sequence, size] => (batch, heads, sequence, size, false),
            [batch, sequence, width] => {
                // Without `num_heads`, a head is as wide as the rotated part.
                let size = width.checked_div(self.heads).unwrap_or_else(|| angles.width());
                let heads = width.checked_div(size).unwrap_or(0);
                ensure!(
                    heads * size == width,
                    InvalidArgument,
                    "a width of {width} does not divide into heads of {size}"
                );
                (batch, heads, sequence, size, true)
            }
            ref shape => {
                return Err(error!(InvalidArgument, "input has shape {shape:?}, expected rank 3 or 4"));
            }
        };
        let rotated = if self.rotated > 0 { self.rotated } else { angles.width() };
        ensure!(
            rotated == angles.width() && rotated <= size,
            InvalidArgument,
            "the caches have {} columns for {rotated} rotated elements of heads of {size}, expected {}",
            angles.half,
            rotated / 2
        );
        // All positions are checked before the parallel loop, which cannot return errors.
        let positions = positions(&angles, cx.input(1)?, [batch, sequence])?;
        let x = x.as_slice::<f32>()?;
        let (threads, y) = (cx.threads(), cx.output(0)?.as_mut_slice::<f32>()?);
        // A chunk has one position (rank 3) or one head (rank 4).
        let unit = if heads_last { heads * size } else { sequence * size };
        for_each_chunk_mut(threads, y, unit, |index, to| {
            // Elements behind the rotated part keep the copied values.
            interrupt::copy(&x[index * unit..][..to.len()], to);
            for (at, row) in spending(size, to.chunks_exact_mut(size.max(1))).enumerate() {
                // There is no chunk without heads, so `heads` is not 0 here.
                let token = if heads_last { index } else { index / heads * sequence + at };
                angles.rotate(positions[token], row);
            }
        });
        Ok(())
    }
}
