//! `CumSum` and `CumProd`: prefix scans, by a workgroup for long rows and by one invocation for
//! others.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::reduce::problem::scanned_axis;
use ort_core::ops::tensor::geometry::around_axis;

use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::{Element, Shader};

/// Without 64-bit integers, whose sums might exceed 32 bits.
const NUMBERS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16, DType::I32, DType::U32]);
/// The least length for a workgroup per row.
const LONG: usize = 128;
/// The most rows for a workgroup per row: more rows keep the device busy with an invocation
/// each.
const FEW_ROWS: usize = 1 << 14;
/// The invocations of a workgroup.
const LANES: usize = 256;

const fn cumulative(op: &'static str) -> WgpuKernel {
    let def =
        KernelDef { op, types: &[("T", NUMBERS)], host_inputs: &[1], in_place: &[(0, 0)], ..KernelDef::BASE };
    WgpuKernel::new(def, dispatches)
}

wgpu_kernels![cumulative("CumSum"), cumulative("CumProd")];

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let [outer, len, inner] = around_axis(&x.shape, scanned_axis(&cx.ints(1)?, x.rank())?);
    let value = Element::of(y.dtype)?.value;
    let (identity, operator) = if cx.op == "CumProd" { (1, "*") } else { (0, "+") };
    let scan = Scan { value, identity, operator, exclusive: cx.attrs.flag("exclusive")? };
    let step = if cx.attrs.flag("reverse")? { "p.len - 1u - step" } else { "step" };
    let place = format!(
        "fn place(row: u32, step: u32) -> u32 {{
            return (row / p.inner * p.len + ({step})) * p.inner + row % p.inner;
        }}\n"
    );
    let rows = if len == 0 { 0 } else { outer.saturating_mul(inner) };
    let shader = Shader::new(cx).read("x", x).write("y", y).number("len", len).number("inner", inner);
    Ok(vec![match len < LONG || rows > FEW_ROWS {
        true => shader.each(rows, &(place + &scan.alone()))?,
        false => shader.groups(rows, LANES, &(place + &scan.together()))?,
    }])
}

/// The scan operation, as WGSL.
struct Scan {
    /// The element type in the shader.
    value: &'static str,
    identity: u32,
    operator: &'static str,
    exclusive: bool,
}

impl Scan {
    /// Generates the scan of a row by one invocation.
    fn alone(&self) -> String {
        let Scan { value, identity, operator, exclusive } = self;
        let result = if *exclusive { "before" } else { "total" };
        format!(
            "fn element(row: u32) {{
                var total = {value}({identity});
                for (var step = 0u; step < p.len; step++) {{
                    let at = place(row, step);
                    let before = total;
                    total = before {operator} x(at);
                    set_y(at, {result});
                }}
            }}"
        )
    }

    /// Generates the scan of a row by a workgroup, one chunk of `LANES` elements at a time, after
    /// W. D. Hillis and G. L. Steele, "Data parallel algorithms" (1986).
    fn together(&self) -> String {
        let Scan { value, identity, operator, exclusive } = self;
        let result = match exclusive {
            true => format!("select(carried, carried {operator} sums[max(lane, 1u) - 1u], lane > 0u)"),
            false => format!("carried {operator} sums[lane]"),
        };
        format!(
            "var<workgroup> sums: array<{value}, {LANES}>;
            fn group(row: u32, lane: u32) {{
                var carried = {value}({identity});
                for (var start = 0u; start < p.len; start += LANES) {{
                    let step = start + lane;
                    var own = {value}({identity});
                    if (step < p.len) {{ own = x(place(row, step)); }}
                    sums[lane] = own;
                    for (var reach = 1u; reach < LANES; reach *= 2u) {{
                        workgroupBarrier();
                        if (lane >= reach) {{ own = sums[lane - reach] {operator} own; }}
                        workgroupBarrier();
                        sums[lane] = own;
                    }}
                    workgroupBarrier();
                    if (step < p.len) {{ set_y(place(row, step), {result}); }}
                    carried = carried {operator} sums[LANES - 1u];
                    workgroupBarrier();
                }}
            }}"
        )
    }
}
