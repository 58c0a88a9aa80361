//! `ScatterElements` and `ScatterND` with a reduction; the gradients of gathering and pooling use
//! them. Updates are sorted by target, so that each element applies its own in their order and runs
//! are bitwise reproducible.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::{Scatter, combines};
use ort_core::{Result, error, unknown_name};

use super::step::spread;
use crate::kernels::elements::few_axes;
use crate::kernels::gather::Target;
use crate::kernels::movement::copied;
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const FAMILY: &str = "scatter";
const TYPES: TypeSet =
    TypeSet::of(&[DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64]);

const fn combining(op: &'static str) -> CudaKernel {
    let def = KernelDef {
        op,
        types: &[("T", TYPES)],
        in_place: &[(0, 0)],
        when: |node| combines(node.attrs()) && few_axes(node),
        ..KernelDef::BASE
    };
    CudaKernel { workspace: Some(workspace), ..CudaKernel::new(def, launches) }
}

cuda_kernels![combining("ScatterElements"), combining("ScatterND")];

/// Keys that a block sorts, as in `cu/scatter.cu`.
const MOST_KEYS: usize = 2048;
/// The keys that a thread processes in sequence.
const WINDOW: usize = 64;
/// The same for small updates, so that there are enough threads.
const SHORT_WINDOW: usize = 8;
/// The least elements of an update that is not small.
const FEW: usize = 32;

/// The workspace that connects the passes: keys, their merge buffer, and partial results of slots.
struct ScatterWorkspace {
    keys: [Operand; 2],
    parts: Operand,
    window: usize,
    bytes: usize,
}

impl ScatterWorkspace {
    fn of(cx: &OpCx<'_>, scatter: &Scatter) -> Result<ScatterWorkspace> {
        let (dtype, mut bytes) = (cx.input(0)?.dtype, 0);
        // Half-precision updates accumulate in float32.
        let sum = if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
        let keys = [(); 2].map(|()| cx.workspace(&mut bytes, DType::U64, &[scatter.tuples]));
        let window = if scatter.run < FEW { SHORT_WINDOW } else { WINDOW };
        let parts = cx.workspace(&mut bytes, sum, &[scatter.tuples.div_ceil(window), 2, scatter.run]);
        Ok(ScatterWorkspace { keys, parts, window, bytes })
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    Ok(ScatterWorkspace::of(cx, &Target::new(cx)?.scatter)?.bytes)
}

/// Returns the launches that sort the keys, and the buffer that then holds them.
fn sorted(cx: &OpCx<'_>, target: &Target, workspace: &ScatterWorkspace) -> Result<(Vec<Launch>, Operand)> {
    let [mut from, mut to] = workspace.keys.clone();
    let tuples = target.scatter.tuples;
    let size = tuples.next_power_of_two().clamp(2, MOST_KEYS);
    let sort = Launch::new(FAMILY, "scatter_sort").grid([tuples.div_ceil(size), 1, 1])?;
    let sort = sort.tensor(cx.input(1)?).tensor(&from).uint(tuples)?.uint(size)?;
    let mut launches = vec![target.pass(sort)?];
    let mut width = size;
    while width < tuples {
        let merge = Launch::new(FAMILY, "scatter_merge").threads(tuples)?.tensor(&from).tensor(&to);
        launches.push(merge.uint(tuples)?.uint(width)?);
        std::mem::swap(&mut from, &mut to);
        width = width.saturating_mul(2);
    }
    Ok((launches, from))
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, updates, y) = (cx.input(0)?, cx.input(2)?, cx.output(0)?);
    let target = Target::new(cx)?;
    let scatter = &target.scatter;
    let count = scatter.check_updates(updates.count())?;
    let mut launches = copied(data, y)?;
    if count == 0 || y.count() == 0 {
        return Ok(launches);
    }
    let fold = match cx.attrs.string("reduction")? {
        "add" => 0,
        "mul" => 1,
        "min" => 2,
        "max" => 3,
        other => return Err(unknown_name("reduction", other, &["none", "add", "mul", "min", "max"])),
    };
    let suffix = match y.dtype {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        other => return Err(error!(NotImplemented, "updates of {other} that are combined")),
    };
    let workspace = ScatterWorkspace::of(cx, scatter)?;
    let (sorts, keys) = sorted(cx, &target, &workspace)?;
    launches.extend(sorts);
    let threads = scatter.tuples.div_ceil(workspace.window).saturating_mul(scatter.run);
    let sizes =
        |launch: Launch| launch.uint(scatter.tuples)?.uint(scatter.run)?.uint(workspace.window)?.uint(fold);
    let windows = Launch::new(FAMILY, format!("scatter_windows_{suffix}"));
    let windows = windows.tensor(&keys).tensor(updates).tensor(y).tensor(&workspace.parts);
    launches.push(spread(cx, sizes(windows)?, threads)?);
    // With one window, no slot is split between threads.
    if scatter.tuples > workspace.window {
        let join = Launch::new(FAMILY, format!("scatter_join_{suffix}"));
        let join = join.tensor(&keys).tensor(y).tensor(&workspace.parts);
        launches.push(spread(cx, sizes(join)?, threads)?);
    }
    Ok(launches)
}
