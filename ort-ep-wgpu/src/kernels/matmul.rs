//! `MatMul`, `Gemm` and their fused forms, as GEMMs with transposed operands and an epilogue.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::fused::activation::Activation;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_gpu::gemm::{Gemm, Transposes};

use super::activation::expression;
use super::elementwise::FLOATS;
use super::gemm::Product;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::MOST_AXES;

/// The element types of a GEMM. 32-bit integer sums wrap, as on the host.
pub(super) const PRODUCTS: TypeSet = FLOATS.union(TypeSet::of(&[DType::I32, DType::U32]));

const MATMUL: KernelDef =
    KernelDef { op: "MatMul", types: &[("T", PRODUCTS)], when: has_few_axes, ..KernelDef::BASE };
const FUSED_MATMUL: KernelDef = KernelDef { op: "FusedMatMul", types: &[("T", FLOATS)], ..MATMUL };

wgpu_kernels![
    WgpuKernel::new(MATMUL, matmul),
    WgpuKernel::new(KernelDef { domain: MICROSOFT, ..FUSED_MATMUL }, fused_matmul),
    WgpuKernel::new(KernelDef { domain: RUNTIME, in_place: &[(3, 0)], ..FUSED_MATMUL }, with_addends),
    WgpuKernel::new(
        KernelDef { op: "Gemm", types: &[("T", PRODUCTS)], when: has_plain_factors, ..KernelDef::BASE },
        gemm,
    ),
    WgpuKernel::new(
        KernelDef { domain: MICROSOFT, op: "FusedGemm", types: &[("T", FLOATS)], ..KernelDef::BASE },
        gemm,
    ),
];

/// Returns whether the ranks of both operands are known and at most [`MOST_AXES`].
pub(super) fn has_few_axes(node: &NodeView<'_>) -> bool {
    [0, 1].into_iter().all(|side| node.rank(side).is_some_and(|rank| rank <= MOST_AXES))
}

/// Returns whether `alpha` and `beta` are 1, or the type is a float: integers have no fractional
/// factor.
fn has_plain_factors(node: &NodeView<'_>) -> bool {
    let plain = |name| matches!(node.attrs().float(name), Ok(1.0));
    let is_float = node.dtype(0).is_some_and(|dtype| FLOATS.contains(dtype));
    is_float || (plain("alpha") && plain("beta"))
}

fn matmul(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    Product::new(Gemm::of_node(cx, Transposes::Nothing)?).dispatches(cx)
}

/// `FusedMatMul` of `com.microsoft`.
fn fused_matmul(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let mut product = Product::new(Gemm::of_node(cx, Transposes::MatricesAndBatches)?);
    product.finish(cx.attrs.float("alpha")?, None)?;
    product.dispatches(cx)
}

/// `FusedMatMul` of the runtime's domain, with bias, residual and activation.
fn with_addends(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let mut product = Product::new(Gemm::of_node(cx, Transposes::Matrices)?);
    for (index, name) in [(2, "bias"), (3, "residual")] {
        if let Some(addend) = cx.find_input(index) {
            product.add(name, addend, &addend.shape)?;
        }
    }
    product.finish(cx.attrs.float("alpha")?, Activation::of_attributes(cx.attrs)?.as_ref())?;
    product.dispatches(cx)
}

/// `Gemm` and `FusedGemm`.
fn gemm(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let beta = cx.attrs.float("beta")?;
    let mut product = Product::new(Gemm::of_node(cx, Transposes::Matrices)?);
    // `beta` 0 leaves `c` out, even if it is NaN.
    if let Some(c) = cx.find_input(2).filter(|_| beta != 0.0) {
        product.add("c", c, &c.shape)?;
        product.numbers.push(("beta", beta));
    }
    let activation = match cx.attrs.find_string("activation") {
        Some(_) => Some(Activation::of_gemm(cx.attrs)?),
        None => None,
    };
    product.finish(cx.attrs.float("alpha")?, activation.as_ref())?;
    product.dispatches(cx)
}

impl Product {
    /// Sets the epilogue to `activation(alpha * sum + terms)`; the term `c` is multiplied by
    /// `beta`.
    fn finish(&mut self, alpha: f32, activation: Option<&Activation>) -> Result<()> {
        let mut value = "sum".to_owned();
        // The shader depends on the attributes anyway, so factors of 1 are left out.
        if alpha != 1.0 {
            self.numbers.push(("alpha", alpha));
            value = "p.alpha * sum".to_owned();
        }
        for own in &self.tensors {
            match own.name {
                "c" if self.numbers.contains(&("beta", 1.0)) => value += " + c_value",
                "c" => value += " + p.beta * c_value",
                "bias" => value += " + bias_value",
                "residual" => value += " + residual_value",
                _ => {}
            }
        }
        let activated = activation.map(|activation| expression(activation, "x")).transpose()?;
        let result = activated.unwrap_or_else(|| "x".to_owned());
        self.result = format!("let x = {value};\nreturn y_t({result});");
        Ok(())
    }
}
