//! `MatMul`, `Gemm` and their fused forms, with transposed operands, scale factors, addends and an
//! activation.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::fused::activation::Activation;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_gpu::gemm::{Gemm, Transposes};

use super::gemm::Product;
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, scratch};

/// The types of the fused operators.
const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
/// The types of `MatMul` and `Gemm`; integer accumulation wraps, as on the host.
const PRODUCTS: TypeSet =
    FLOATS.union(TypeSet::of(&[DType::F64, DType::I32, DType::U32, DType::I64, DType::U64]));

const MATMUL: KernelDef =
    KernelDef { op: "MatMul", types: &[("T", PRODUCTS)], when: has_few_axes, ..KernelDef::BASE };
const FUSED_MATMUL: KernelDef = KernelDef { op: "FusedMatMul", types: &[("T", FLOATS)], ..MATMUL };

cuda_kernels![
    CudaKernel::new(MATMUL, matmul).with_workspace(|cx| scratch(cx, matmul)),
    CudaKernel::new(KernelDef { domain: MICROSOFT, ..FUSED_MATMUL }, fused_matmul)
        .with_workspace(|cx| scratch(cx, fused_matmul)),
    CudaKernel::new(KernelDef { domain: RUNTIME, in_place: &[(3, 0)], ..FUSED_MATMUL }, with_addends)
        .with_workspace(|cx| scratch(cx, with_addends)),
    CudaKernel::new(
        KernelDef { op: "Gemm", types: &[("T", PRODUCTS)], when: has_plain_factors, ..KernelDef::BASE },
        gemm,
    )
    .with_workspace(|cx| scratch(cx, gemm)),
    CudaKernel::new(
        KernelDef { domain: MICROSOFT, op: "FusedGemm", types: &[("T", FLOATS)], ..KernelDef::BASE },
        gemm,
    )
    .with_workspace(|cx| scratch(cx, gemm)),
];

/// Whether the ranks of both operands are known and small enough.
fn has_few_axes(node: &NodeView<'_>) -> bool {
    [0, 1].into_iter().all(|side| node.rank(side).is_some_and(|rank| rank <= MOST_AXES))
}

/// Whether the kernels can apply `alpha` and `beta`: to floats always, to integers only if both
/// are 1.
fn has_plain_factors(node: &NodeView<'_>) -> bool {
    let plain = |name| matches!(node.attrs().float(name), Ok(1.0));
    let is_float = node.dtype(0).is_some_and(|dtype| FLOATS.contains(dtype) || dtype == DType::F64);
    is_float || (plain("alpha") && plain("beta"))
}

/// Returns the GEMM of the first two inputs, with the node's whole workspace.
fn product(cx: &OpCx<'_>, transposes: Transposes) -> Result<Product> {
    let mut product = Product::new(Gemm::of_node(cx, transposes)?);
    product.has_workspace = true;
    Ok(product)
}

fn matmul(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    product(cx, Transposes::Nothing)?.launches(cx)
}

/// `FusedMatMul` of `com.microsoft`.
fn fused_matmul(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let mut product = product(cx, Transposes::MatricesAndBatches)?;
    product.alpha = cx.attrs.float("alpha")?;
    product.launches(cx)
}

/// `FusedMatMul` of the runtime's domain, with a bias, a residual and an activation.
fn with_addends(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let mut product = product(cx, Transposes::Matrices)?;
    for addend in [2, 3].into_iter().filter_map(|index| cx.find_input(index)) {
        product.add(addend, None)?;
    }
    product.alpha = cx.attrs.float("alpha")?;
    product.activation = Activation::of_attributes(cx.attrs)?;
    product.launches(cx)
}

/// `Gemm` and `FusedGemm`.
fn gemm(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (mut product, beta) = (product(cx, Transposes::Matrices)?, cx.attrs.float("beta")?);
    // With a beta of 0, C is not read at all.
    if let Some(c) = cx.find_input(2).filter(|_| beta != 0.0) {
        product.add(c, None)?;
        product.beta = beta;
    }
    product.alpha = cx.attrs.float("alpha")?;
    if cx.attrs.find_string("activation").is_some() {
        product.activation = Some(Activation::of_gemm(cx.attrs)?);
    }
    product.launches(cx)
}
