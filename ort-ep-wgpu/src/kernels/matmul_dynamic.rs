//! `DynamicQuantizeMatMul`: quantizes the left operand over its full range, then multiplies
//! integers.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;

use super::matmul::has_few_axes;
use super::matmul_integer::product;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

/// The most workgroups that search for the extremes. One workgroup combines their results, so this
/// is at most [`LANES`].
const PARTS: usize = 256;
const LANES: usize = 256;

wgpu_kernels![WgpuKernel {
    def: KernelDef { domain: MICROSOFT, op: "DynamicQuantizeMatMul", when: has_few_axes, ..KernelDef::BASE },
    dispatches,
    workspace: Some(|cx| Ok(DynamicWorkspace::new(cx)?.bytes)),
}];

struct DynamicWorkspace {
    /// The extremes of each workgroup: all minima, then all maxima.
    extremes: Operand,
    scale: Operand,
    zero: Operand,
    quantized: Operand,
    bytes: usize,
}

impl DynamicWorkspace {
    fn new(cx: &OpCx<'_>) -> Result<DynamicWorkspace> {
        let (a, mut bytes) = (cx.input(0)?, 0);
        let parts = a.count().div_ceil(LANES).clamp(1, PARTS);
        Ok(DynamicWorkspace {
            extremes: cx.workspace(&mut bytes, DType::F32, &[2, parts]),
            scale: cx.workspace(&mut bytes, DType::F32, &[]),
            zero: cx.workspace(&mut bytes, DType::U8, &[]),
            quantized: cx.workspace(&mut bytes, DType::U8, &a.shape),
            bytes,
        })
    }
}

/// Reduces the extremes of a workgroup's invocations to `least[0]` and `most[0]`. Zero is always in
/// the range.
const EXTREMES: &str = "
var<workgroup> least: array<f32, LANES>;
var<workgroup> most: array<f32, LANES>;
fn reduce(lane: u32, own_least: f32, own_most: f32) {
    least[lane] = own_least;
    most[lane] = own_most;
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half = half / 2u) {
        if (lane < half) {
            least[lane] = min_(least[lane], least[lane + half]);
            most[lane] = max_(most[lane], most[lane + half]);
        }
        workgroupBarrier();
    }
}
";

/// Finds the extremes of the elements that a workgroup reads.
const OF_PARTS: &str = "
fn group(index: u32, lane: u32) {
    var low = 0.0;
    var high = 0.0;
    for (var i = index * LANES + lane; i < p.size; i += p.parts * LANES) {
        low = min_(low, a(i));
        high = max_(high, a(i));
    }
    reduce(lane, low, high);
    if (lane == 0u) {
        set_extremes(index, least[0]);
        set_extremes(p.parts + index, most[0]);
    }
}";

/// Computes scale and zero point from the extremes of all workgroups.
const OF_ALL: &str = "
fn group(index: u32, lane: u32) {
    var low = 0.0;
    var high = 0.0;
    if (lane < p.parts) {
        low = extremes(lane);
        high = extremes(p.parts + lane);
    }
    reduce(lane, low, high);
    if (lane == 0u) {
        let step = divide_(most[0] - least[0], 255.0);
        set_scale(0u, step);
        set_zero(0u, select(u32(round(clamp(divide_(-least[0], step), 0.0, 255.0))), 0u, step == 0.0));
    }
}";

/// Quantizes an element.
const ENCODE: &str = "
fn element(i: u32) {
    let step = select(scale(0u), 1.0, scale(0u) == 0.0);
    set_quantized(i, u32(clamp(round(divide_(a(i), step)) + f32(zero(0u)), 0.0, 255.0)));
}";

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let DynamicWorkspace { extremes, scale, zero, quantized, .. } = DynamicWorkspace::new(cx)?;
    let parts = extremes.size(1);
    let shader = Shader::new(cx).read("a", a).write("extremes", &extremes);
    let mut all = vec![
        shader.number("size", a.count()).number("parts", parts).groups(
            parts,
            LANES,
            &(EXTREMES.to_owned() + OF_PARTS),
        )?,
        Shader::new(cx)
            .read("extremes", &extremes)
            .write("scale", &scale)
            .write("zero", &zero)
            .number("parts", parts)
            .groups(1, LANES, &(EXTREMES.to_owned() + OF_ALL))?,
    ];
    let shader = Shader::new(cx).read("a", a).read("scale", &scale).read("zero", &zero);
    all.push(shader.write("quantized", &quantized).each(a.count(), ENCODE)?);

    let mut product = product(cx, [&quantized, b], [false; 2])?;
    product.add_zeros(Some(&zero), cx.find_input(3))?;
    product.scale(&scale, cx.input(2)?, cx.find_input(4))?;
    all.extend(product.dispatches(cx)?);
    Ok(all)
}
