//! `RotaryEmbedding`: rotary position embedding.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_threads::interrupt::spending;
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![KernelDef {
    op: "RotaryEmbedding",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    make: |cx| via_f32(cx, make),
    ..KernelDef::BASE
}];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let interleaved = cx.attrs().flag("interleaved")?;
    let size = |value: i64| {
        usize::try_from(value).map_err(|_| error!(InvalidGraph, "a size is {value}, expected 0 or more"))
    };
    let heads = size(cx.attrs().find_int("num_heads").unwrap_or(0))?;
    let rotated = size(cx.attrs().int("rotary_embedding_dim")?)?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| rotate(cx, interleaved, heads, rotated)))
}

fn rotate(cx: &mut RunCx<'_>, interleaved: bool, heads: usize, rotated: usize) -> Result<()> {
    let x = cx.input(0)?;
    // Rank 4 has heads before positions, rank 3 has positions before heads.
    let (batch, heads, positions, size, heads_last) = match *x.shape() {
        [batch, heads, positions, size] => (batch, heads, positions, size, false),
        [batch, positions, width] if heads > 0 && width.is_multiple_of(heads) => {
            (batch, heads, positions, width / heads, true)
        }
        ref other => {
            return Err(error!(InvalidArgument, "X of shape {other:?} does not split into {heads} heads"));
        }
    };
    // 0 stands for the whole head.
    let rotated = if rotated == 0 { size } else { rotated };
    ensure!(
        rotated <= size && rotated.is_multiple_of(2),
        InvalidArgument,
        "{rotated} of {size} cannot be rotated"
    );
    let half = rotated / 2;
    let (cos, sin) = (cx.input(1)?, cx.input(2)?);
    let fits = cos.shape() == sin.shape() && cos.shape().last() == Some(&half);
    ensure!(fits, InvalidArgument, "caches of shape {:?} and {:?}", cos.shape(), sin.shape());
    let ids = cx.find_input(3).map(|ids| ids.collect_ints::<SmallVec<[i64; 8]>>()).transpose()?;
    let (cos, sin) = (cos.as_slice::<f32>()?, sin.as_slice::<f32>()?);
    let rows = cos.len() / half.max(1);
    let angles: SmallVec<[usize; 8]> = match ids {
        Some(ids) => {
            let row = |id: i64| usize::try_from(id).ok().filter(|row| *row < rows);
            let found: Option<SmallVec<_>> = ids.into_iter().map(row).collect();
            found.ok_or_else(|| error!(InvalidArgument, "a position is outside the caches"))?
        }
        // Without position ids, the caches have one row for each position of each batch.
        None => (0..rows).collect(),
    };
    ensure!(angles.len() == batch * positions, InvalidArgument, "there are {} angles", angles.len());
    let x = x.as_slice::<f32>()?;
    let (threads, y) = (cx.threads(), cx.output(0)?.as_mut_slice::<f32>()?);
    // A chunk is one position of all heads, or all positions of one head.
    let row_len = if heads_last { heads * size } else { positions * size };
    for_each_chunk_mut(threads, y, row_len, |chunk, to| {
        let from = &x[chunk * row_len..][..to.len()];
        let rows = to.chunks_mut(size.max(1)).zip(from.chunks(size.max(1)));
        for (at, (to, from)) in spending(size, rows).enumerate() {
            let angle = if heads_last { chunk } else { chunk / heads * positions + at };
            let row = angles[angle] * half;
            let (cos, sin) = (&cos[row..][..half], &sin[row..][..half]);
            // Elements past `rotated` pass through.
            to[rotated..].copy_from_slice(&from[rotated..]);
            for pair in 0..half {
                // The two elements of a pair are adjacent, or half of the rotated part apart.
                let (a, b) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
                to[a] = cos[pair] * from[a] - sin[pair] * from[b];
                to[b] = sin[pair] * from[a] + cos[pair] * from[b];
            }
        }
    });
    Ok(())
}
