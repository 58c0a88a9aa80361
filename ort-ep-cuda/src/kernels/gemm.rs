//! GEMM kernels for any strides and batches, with a fused epilogue: addends and activations.

mod epilogue;
mod few;
mod lt;
mod maps;
mod product;

use ort_core::Result;
use ort_core::dtype::DType;

use super::warpgroups;
use crate::driver::{Limits, TENSOR_CORES};
use crate::launch::{Launch, OpCx, Walk};
pub(super) use epilogue::finish;
pub(crate) use epilogue::has_activation;
pub(super) use product::Product;
use product::{FEW_ROWS, suffix_of};

impl Product {
    /// Returns the launches of the GEMM.
    pub(super) fn launches(mut self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        if self.gemm.batch.contains(&0) || self.gemm.rows == 0 || self.gemm.columns == 0 {
            return Ok(Vec::new());
        }
        let mut walk = self.fold();
        // In order of preference: the library, GEMV, TMA, warpgroups, tiles.
        if let Some(launches) = lt::launches(&self, cx, &walk)? {
            return Ok(launches);
        }
        // A result of few columns is transposed, so that it runs as GEMV too.
        if self.gemm.columns <= FEW_ROWS && self.gemm.columns < self.gemm.rows {
            self.transpose();
            // The strides of `a` and `b` are the first two of the walk.
            walk.steps.swap(0, 1);
        }
        let matrices = walk.sizes.iter().product::<usize>();
        if let Some(launch) = self.of_few(cx, &walk, matrices)? {
            return Ok(vec![launch]);
        }
        if let Some(launch) = self.by_maps(cx, &walk, matrices)? {
            return Ok(vec![launch]);
        }
        if let Some(launches) = self.by_warpgroups(cx, &walk, matrices)? {
            return Ok(launches);
        }
        Ok(vec![self.launch(cx, &walk, matrices)?])
    }

    /// Returns the type suffix, the entry, the rows and columns of its tile, and its threads.
    fn entry(&self, cx: &OpCx<'_>, matrices: usize) -> Result<(&'static str, String, [usize; 2], u32)> {
        let suffix = suffix_of(self.gemm.result.tensor.dtype)?;
        let a_near = self.gemm.lhs.depth <= self.gemm.lhs.row;
        let b_near = self.gemm.rhs.depth <= self.gemm.rhs.column;
        let tiles = |block: usize| {
            [self.gemm.rows, self.gemm.columns].map(|size| size.div_ceil(block)).iter().product::<usize>()
        };
        // A large tile that is half empty, or fewer large tiles than multiprocessors, would be
        // slower than small tiles.
        let busy = tiles(128).saturating_mul(matrices) >= cx.limits.processors as usize;
        let is_large = busy && self.gemm.rows > 64 && self.gemm.columns > 64;
        // Only these types have kernels with large tiles.
        let has_large = matches!(suffix, "f32" | "f16" | "bf16" | "i32");
        let size = if is_large && has_large { ("large", 128) } else { ("small", 64) };
        let (name, block) = size;
        if let Some(suffix) = mma_suffix(&cx.limits, self.gemm.result.tensor.dtype)? {
            let sides = [(a_near, "n", "t"), (!b_near, "n", "t")];
            let sides = sides.map(|(plain, is, is_not)| if plain { is } else { is_not }).concat();
            let threads = if block == 128 { 256 } else { 128 };
            return Ok((suffix, format!("gemm_cores_{name}_{sides}_{suffix}"), [block, block], threads));
        }
        Ok((suffix, format!("gemm_{name}_{suffix}"), [block, block], 256))
    }

    fn launch(&self, cx: &OpCx<'_>, walk: &Walk, matrices: usize) -> Result<Launch> {
        let (suffix, entry, [rows, columns], threads) = self.entry(cx, matrices)?;
        // Tensor core kernels load 16 bytes at once, the others four elements.
        let many = if entry.starts_with("gemm_cores") && suffix != "tf32" { 8 } else { 4 };
        let (down, across) = (self.gemm.rows.div_ceil(rows), self.gemm.columns.div_ceil(columns));
        let blocks = matrices.saturating_mul(down).saturating_mul(across);
        let launch = Launch::of_type("gemm", suffix, entry)?
            .grid([blocks, 1, 1])?
            .block([threads, 1, 1])
            .tensor(&self.gemm.lhs.tensor)
            .tensor(&self.gemm.rhs.tensor)
            .find_tensor(self.addend(0))
            .find_tensor(self.addend(1))
            .tensor(&self.gemm.result.tensor);
        self.with_epilogue(launch, walk, [down, across], self.in_vectors(walk, many))
    }

    /// Returns the launches by warpgroups, or `None` if the device has none or cannot read the
    /// operands. The left one must be readable in vectors along the depth. The right one must be
    /// readable in vectors too, or be contiguous along its columns, in which case its rows need no
    /// alignment.
    fn by_warpgroups(&self, cx: &OpCx<'_>, walk: &Walk, matrices: usize) -> Result<Option<Vec<Launch>>> {
        let y = &self.gemm.result.tensor;
        let Some(suffix) = warpgroups::suffix_of(&cx.limits, y.dtype) else { return Ok(None) };
        let in_vectors = self.in_vectors(walk, 8);
        let is_readable =
            in_vectors[0] && self.gemm.lhs.depth == 1 && (in_vectors[1] || self.gemm.rhs.column == 1);
        if self.gemm.rows <= FEW_ROWS || !is_readable {
            return Ok(None);
        }
        let sizes = [self.gemm.rows, self.gemm.columns, self.gemm.depth];
        let (side, tiles) = if self.gemm.rhs.column == 1 {
            ("nn", warpgroups::OF_NEAR_COLUMNS)
        } else {
            ("nt", warpgroups::OF_NEAR_STEPS)
        };
        let cut = warpgroups::cut(&cx.limits, tiles, matrices, sizes, self.has_workspace);
        let Some(cut) = cut else { return Ok(None) };
        let parts = (cut.parts > 1).then(|| cx.workspace(&mut 0, DType::F32, &[cut.parts, y.count()]));
        let (family, tile) = ("gemm_warpgroups", cut.tile);
        let launch = Launch::of_type(family, suffix, format!("{family}_{}_{side}_{suffix}", tile.name))?
            .grid([cut.blocks, cut.parts, 1])?
            .block([tile.threads, 1, 1])
            .shared(tile.shared())
            .tensor(&self.gemm.lhs.tensor)
            .tensor(&self.gemm.rhs.tensor)
            .find_tensor(self.addend(0))
            .find_tensor(self.addend(1))
            .tensor(y)
            .find_tensor(parts.as_ref());
        let mut launches = vec![self.with_epilogue(launch, walk, [cut.down, cut.across], in_vectors)?];
        if let Some(parts) = &parts {
            let join = Launch::of_type(family, suffix, format!("gemm_join_{suffix}"))?;
            let join = join.threads(warpgroups::joining(y.count()))?;
            let join = join.tensor(parts).find_tensor(self.addend(0)).find_tensor(self.addend(1)).tensor(y);
            let join = self.with_epilogue(join, walk, [cut.down, cut.across], in_vectors)?;
            launches.push(join.uint(cut.parts)?.uint(y.count())?);
        }
        Ok(Some(launches))
    }
}

/// Returns the type suffix of the tensor core kernels, if the device has them for the type.
pub(super) fn mma_suffix(limits: &Limits, dtype: DType) -> Result<Option<&'static str>> {
    Ok(match dtype {
        DType::F16 | DType::BF16 if limits.capability >= TENSOR_CORES => Some(suffix_of(dtype)?),
        DType::F32 if limits.tf32 => Some("tf32"),
        _ => None,
    })
}
