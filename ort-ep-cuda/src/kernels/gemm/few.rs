//! GEMV: products of up to four rows, limited by the memory bandwidth of reading the right matrix
//! (`cu/gemm_few.cuh`).

use ort_core::Result;

use super::product::{FEW_ROWS, Product, suffix_of};
use crate::launch::{Launch, OpCx, Walk};

/// Threads of a block if the right matrix is contiguous along the depth.
const NEAR_THREADS: usize = 256;
/// Threads of a block if it is contiguous along its columns.
const FAR_THREADS: usize = 512;
/// The bytes a thread reads at once.
const VECTOR: usize = 16;
/// The threads that saturate a multiprocessor's memory bandwidth.
const OF_PROCESSOR: usize = 1024;
/// The vectors of a column that each thread should have to read; with fewer, more threads do not
/// pay.
const AT_ONCE: usize = 4;

/// How a block divides a GEMV.
struct Division {
    name: &'static str,
    columns: usize,
    block: [usize; 2],
}

impl Product {
    /// Returns the launch for up to four rows, or `None` for more.
    pub(super) fn of_few(&self, cx: &OpCx<'_>, walk: &Walk, matrices: usize) -> Result<Option<Launch>> {
        if self.gemm.rows > FEW_ROWS {
            return Ok(None);
        }
        let dtype = self.gemm.result.tensor.dtype;
        let suffix = suffix_of(dtype)?;
        let width = dtype.byte_len(1).map_or(1, |bytes| VECTOR / bytes.max(1));
        let in_vectors = self.in_vectors(walk, width);
        let processors = cx.limits.processors as usize;
        let is_near = self.gemm.rhs.depth <= self.gemm.rhs.column || self.gemm.columns == 1;
        let Division { name, columns, block: [x, y] } = if is_near {
            near(matrices.saturating_mul(self.gemm.columns), self.gemm.depth, width, processors)
        } else {
            far([matrices, self.gemm.columns], width, in_vectors[1], processors)
        };
        // Kernels exist for one row, and for up to four.
        let rows = if self.gemm.rows == 1 { 1 } else { FEW_ROWS };
        let across = self.gemm.columns.div_ceil(columns);
        let launch = Launch::of_type("gemm", suffix, format!("gemv_{name}_{rows}_{suffix}"))?
            .grid([matrices.saturating_mul(across), 1, 1])?
            .block([x as u32, y as u32, 1])
            .tensor(&self.gemm.lhs.tensor)
            .tensor(&self.gemm.rhs.tensor)
            .find_tensor(self.addend(0))
            .find_tensor(self.addend(1))
            .tensor(&self.gemm.result.tensor);
        Ok(Some(self.with_epilogue(launch, walk, [1, across], in_vectors)?))
    }
}

/// Gives each column several threads: as many as keep all multiprocessors busy and still have
/// enough to read.
fn near(columns: usize, depth: usize, width: usize, processors: usize) -> Division {
    let busy = processors.saturating_mul(OF_PROCESSOR);
    let mut threads = 8;
    // Double the threads of a column while each keeps enough to read and the device is not full.
    while threads < NEAR_THREADS
        && threads * width * AT_ONCE < depth
        && columns.saturating_mul(threads) < busy
    {
        threads *= 2;
    }
    let columns = NEAR_THREADS / threads;
    Division { name: "near", columns, block: [threads, columns] }
}

/// Gives each block several vectors of columns: as many as leave a block for each multiprocessor. A
/// memory transaction has at least 32 bytes, and longer rows allow larger ones. If rows are not
/// whole vectors, a block has one more vector than it has columns for.
fn far([matrices, columns]: [usize; 2], width: usize, in_vectors: bool, processors: usize) -> Division {
    let spare = usize::from(!in_vectors);
    let of_block = |vectors: usize| (vectors - spare) * width;
    let blocks = |vectors: usize| matrices.saturating_mul(columns.div_ceil(of_block(vectors)));
    let mut vectors = 2 << spare;
    // Widen the block while every multiprocessor still gets one.
    while vectors < 32 && of_block(vectors) < columns && blocks(2 * vectors) >= processors {
        vectors *= 2;
    }
    Division { name: "far", columns: of_block(vectors), block: [vectors, FAR_THREADS / vectors] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_wide_as_leaves_enough_of_them() {
        let block = |columns: usize, in_vectors: bool| {
            let Division { columns, block, .. } = far([1, columns], 8, in_vectors, 132);
            (columns, block)
        };
        assert_eq!(block(768, true), (16, [2, 256]));
        assert_eq!(block(3072, true), (16, [2, 256]));
        assert_eq!(block(32000, true), (128, [16, 32]));
        assert_eq!(block(50257, false), (248, [32, 16]));
        assert_eq!(block(5, false), (24, [4, 128]));
        assert_eq!(far([1000, 64], 8, true, 132).block, [8, 64]);
    }

    #[test]
    fn columns_have_as_many_threads_as_have_enough_to_read() {
        let block = |columns: usize, depth: usize| near(columns, depth, 8, 132).block;
        assert_eq!(block(1000, 2048), [64, 4]);
        assert_eq!(block(50257, 768), [8, 32]);
        assert_eq!(block(100, 64), [8, 32]);
        assert_eq!(block(1, 100_000), [256, 1]);
    }
}
