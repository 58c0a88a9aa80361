//! `MatMulNBits`: GEMM with weights of 2, 4 or 8 bits, read directly from their packed blocks.

use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use super::codes::float_kind;
use super::lines::{SHORT_FLOATS, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};
use crate::modules::TENSOR_CORES;

cuda_kernels![CudaKernel::new(
    KernelDef {
        domain: MICROSOFT,
        op: "MatMulNBits",
        types: &[("T1", SHORT_FLOATS)],
        when: is_covered,
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

/// Whether the node has no group index and no weights prepacked for another device.
fn is_covered(node: &NodeView<'_>) -> bool {
    node.input(4).is_none() && node.attrs().find_int("weight_prepacked").unwrap_or(0) == 0
}

/// The sizes of a node's product.
struct Product {
    rows: usize,
    columns: usize,
    depth: usize,
    bits: usize,
    block: usize,
}

impl Product {
    fn new(cx: &OpCx<'_>) -> Result<Product> {
        let size = |name: &str| -> Result<usize> {
            let value = cx.attrs.int(name)?;
            let size = usize::try_from(value).ok().filter(|size| (1..1 << 31).contains(size));
            size.ok_or_else(|| error!(InvalidGraph, "{name} is {value}, expected a size"))
        };
        let (a, depth) = (cx.input(0)?, size("K")?);
        ensure!(a.shape.last() == Some(&depth), InvalidArgument, "A has shape {:?}, K is {depth}", a.shape);
        let (columns, bits, block) = (size("N")?, size("bits")?, size("block_size")?);
        let fits = matches!(bits, 2 | 4 | 8) && block >= 16 && block.is_power_of_two();
        ensure!(fits, InvalidGraph, "blocks of {block} quantized values of {bits} bits");
        Ok(Product { rows: a.count() / depth, columns, depth, bits, block })
    }

    fn blocks(&self) -> usize {
        self.depth.div_ceil(self.block)
    }

    /// Returns the launch with its grid.
    fn launch(&self, cx: &OpCx<'_>, dtype: DType) -> Result<Launch> {
        let (entry, [across, down]) = self.entry(cx, dtype)?;
        let family =
            if self.rows <= FEW_ROWS { format!("nbits_{}", self.bits) } else { "nbits_tiles".to_owned() };
        Launch::of_type(&family, suffix(dtype)?, entry)?.grid([across, down, 1])
    }

    /// Returns the entry, and its blocks across and down.
    fn entry(&self, cx: &OpCx<'_>, dtype: DType) -> Result<(String, [usize; 2])> {
        let (suffix, processors) = (suffix(dtype)?, cx.limits.processors as usize);
        if self.rows <= FEW_ROWS {
            // Four columns per warp only if that still gives every multiprocessor a block.
            let wide = self.columns.div_ceil(WARPS * COLUMNS) >= processors;
            let columns = if wide { COLUMNS } else { 1 };
            let blocks = [self.columns.div_ceil(WARPS * columns), self.rows.div_ceil(ROWS)];
            return Ok((format!("nbits_vectors_{}_{columns}_{suffix}", self.bits), blocks));
        }
        let blocks = |lines: usize| [self.columns.div_ceil(lines), self.rows.div_ceil(lines)];
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
    let product = Product::new(cx)?;
    let (a, codes, scales, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let (columns, blocks) = (product.columns, product.blocks());
    let has = |operand: &Operand, each: usize| operand.count() == columns.saturating_mul(each);
    let of_column = blocks.saturating_mul(product.block).saturating_mul(product.bits) / 8;
    ensure!(has(codes, of_column) && has(scales, blocks), InvalidArgument, "the weights do not fit N and K");
    let (zeros, bias) = (cx.find_input(3), cx.find_input(5));
    // Zero points are quantized values of the same width, with each column starting at a byte, or
    // floats.
    let packed = blocks.saturating_mul(product.bits).div_ceil(8);
    let (zero_row, zero_kind) = match zeros {
        Some(zeros) if zeros.dtype != DType::U8 => (0, float_kind(zeros.dtype)?),
        _ => (packed, 0),
    };
    let each = if zero_row == 0 { blocks } else { packed };
    ensure!(
        zeros.is_none_or(|zeros| has(zeros, each)),
        InvalidArgument,
        "the zero points do not fit N and K"
    );
    ensure!(bias.is_none_or(|bias| has(bias, 1)), InvalidArgument, "the biases do not fit N");
    let launch = product.launch(cx, y.dtype)?.tensor(a).tensor(codes);
    let launch = launch.tensor(scales).find_tensor(zeros).find_tensor(bias).tensor(y);
    let log_block = product.block.trailing_zeros() as usize;
    let sizes = [product.rows, columns, product.depth, product.bits, log_block, blocks];
    let kinds = [float_kind(scales.dtype)?, zero_row, zero_kind];
    Ok(vec![launch.uints::<9>(&[&sizes[..], &kinds].concat())?])
}
