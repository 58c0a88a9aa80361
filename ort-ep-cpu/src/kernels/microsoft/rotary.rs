//! `RotaryEmbedding`: positions come as a first one for all or one for each token.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use crate::cpu_kernels;
use crate::interrupt::{self, spending};
use crate::kernels::linalg::widened::widened;
use crate::parallel::for_each_chunk_mut;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "RotaryEmbedding",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    make: |cx| widened(cx, make),
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
        usize::try_from(value).map_err(|_| error!(InvalidGraph, "{name} is {value}"))
    };
    let rotary = Rotary {
        interleaved: attrs.find_int("interleaved").unwrap_or(0) != 0,
        heads: size("num_heads")?,
        rotated: size("rotary_embedding_dim")?,
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| rotary.run(cx)))
}

/// The cosines and sines of each position: rows of half the elements that are rotated.
#[derive(Clone, Copy)]
pub(super) struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    /// Pairs that are rotated.
    half: usize,
    /// Positions.
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

    /// How many leading elements of a row are rotated.
    pub(super) fn width(&self) -> usize {
        2 * self.half
    }

    /// A position that the caches have.
    pub(super) fn check(&self, position: i64) -> Result<usize> {
        let found = usize::try_from(position).ok().filter(|row| *row < self.rows);
        let rows = self.rows;
        found.ok_or_else(|| {
            error!(InvalidArgument, "position {position} is outside the caches, which have {rows}")
        })
    }

    /// Rotates the first elements of a row by the angles of a checked position.
    pub(super) fn rotate(&self, position: usize, row: &mut [f32]) {
        let (half, start) = (self.half, position * self.half);
        let (cos, sin) = (&self.cos[start..start + half], &self.sin[start..start + half]);
        for pair in 0..half {
            let (a, b) = if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let (x, y) = (row[a], row[b]);
            row[a] = cos[pair] * x - sin[pair] * y;
            row[b] = sin[pair] * x + cos[pair] * y;
        }
    }
}

/// Positions of tokens, those of a step of decoding in place.
pub(super) type Positions = SmallVec<[usize; 8]>;

/// The position of each token of (batch, sequence): `ids` is their first one, or one for each.
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
        // Heads lie before or after the positions.
        let (batch, heads, sequence, size, heads_last) = match *x.shape() {
            [batch, heads, sequence, size] => (batch, heads, sequence, size, false),
            [batch, sequence, width] => {
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
        let positions = positions(&angles, cx.input(1)?, [batch, sequence])?;
        let x = x.as_slice::<f32>()?;
        let (threads, y) = (cx.threads(), cx.output(0)?.as_mut_slice::<f32>()?);
        let unit = if heads_last { heads * size } else { sequence * size };
        for_each_chunk_mut(threads, y, unit, |index, to| {
            interrupt::copy(&x[index * unit..][..to.len()], to);
            for (at, row) in spending(size, to.chunks_exact_mut(size.max(1))).enumerate() {
                let token = if heads_last { index } else { index / heads * sequence + at };
                angles.rotate(positions[token], row);
            }
        });
        Ok(())
    }
}
