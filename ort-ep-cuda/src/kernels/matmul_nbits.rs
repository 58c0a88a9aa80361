//! `MatMulNBits`: GEMM with weights of 2, 4 or 8 bits, read directly from their packed blocks.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::ops::linalg::problem::NBitsMatMul;
use ort_core::spec::MICROSOFT;
use ort_gpu::nbits;

use super::rows::{SHORT_FLOATS, suffix};
use super::type_tags::scale_tag;
use super::{CudaKernel, cuda_kernels};
use crate::driver::TENSOR_CORES;
use crate::launch::{Launch, OpCx, Operand};

cuda_kernels![CudaKernel::new(
    KernelDef {
        domain: MICROSOFT,
        op: "MatMulNBits",
        types: &[("T1", SHORT_FLOATS)],
        when: nbits::is_covered,
        ..KernelDef::BASE
    },
    launches
)];

/// The most rows for which the product runs as GEMV.
const FEW_ROWS: usize = 8;
/// The rows that GEMV multiplies at once.
const ROWS: usize = 4;
/// Warps of a block in GEMV.
const WARPS: usize = 8;
/// The columns of a warp in GEMV if there are enough of them; else it has one.
const COLUMNS: usize = 4;

/// The product of a node and a matrix.
struct NBitsGemm {
    node: NBitsMatMul,
    rows: usize,
}

impl NBitsGemm {
    /// Returns the launch with its grid.
    fn launch(&self, cx: &OpCx<'_>, dtype: DType) -> Result<Launch> {
        let (entry, [across, down]) = self.entry(cx, dtype)?;
        let family = if self.rows <= FEW_ROWS {
            format!("nbits_{}", self.node.bits)
        } else {
            "nbits_tiles".to_owned()
        };
        Launch::of_type(&family, suffix(dtype)?, entry)?.grid([across, down, 1])
    }

    /// Returns the entry, and its blocks across and down.
    fn entry(&self, cx: &OpCx<'_>, dtype: DType) -> Result<(String, [usize; 2])> {
        let (suffix, processors) = (suffix(dtype)?, cx.limits.processors as usize);
        if self.rows <= FEW_ROWS {
            // Four columns per warp only if that still gives every multiprocessor a block.
            let wide = self.node.columns.div_ceil(WARPS * COLUMNS) >= processors;
            let columns = if wide { COLUMNS } else { 1 };
            let blocks = [self.node.columns.div_ceil(WARPS * columns), self.rows.div_ceil(ROWS)];
            return Ok((format!("nbits_vectors_{}_{columns}_{suffix}", self.node.bits), blocks));
        }
        let blocks = |lines: usize| [self.node.columns.div_ceil(lines), self.rows.div_ceil(lines)];
        if dtype == DType::F32 || cx.limits.capability < TENSOR_CORES {
            return Ok((format!("nbits_tiles_{suffix}"), blocks(64)));
        }
        // Large tiles only if rows fill them and every multiprocessor gets one.
        let is_large = self.rows > 64 && blocks(128).iter().product::<usize>() >= processors;
        let (name, lines) = if is_large { ("large", 128) } else { ("small", 64) };
        Ok((format!("nbits_cores_{name}_{suffix}"), blocks(lines)))
    }
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let node = NBitsMatMul::new(cx.attrs)?;
    let (a, quantized, scales, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    let product = NBitsGemm { node, rows: node.rows(&a.shape)? };
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let (zeros, bias) = (cx.find_input(3), cx.find_input(5));
    // Zero points are quantized values of the same width, or floats.
    let (zero_row, zero_kind) = match zeros {
        Some(zeros) if zeros.dtype != DType::U8 => (0, scale_tag(zeros.dtype)?),
        _ => (node.zero_bytes(), 0),
    };
    node.check(|index| cx.find_input(index).map(Operand::count), zero_row > 0)?;
    let launch = product.launch(cx, y.dtype)?.tensor(a).tensor(quantized);
    let launch = launch.tensor(scales).find_tensor(zeros).find_tensor(bias).tensor(y);
    let log_block = node.block.trailing_zeros() as usize;
    let sizes = [product.rows, node.columns, node.depth, node.bits, log_block, node.blocks()];
    let kinds = [scale_tag(scales.dtype)?, zero_row, zero_kind];
    Ok(vec![launch.uints::<9>(&[&sizes[..], &kinds].concat())?])
}
