//! `GlobalNorm` and `AllFinite`: reductions over any number of gradients of mixed types.

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::spec::RUNTIME;
use ort_core::{Result, error};

use super::step::{part_of, sums};
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const fn of_all(op: &'static str) -> CudaKernel {
    let def = KernelDef { domain: RUNTIME, op, ..KernelDef::BASE };
    CudaKernel { workspace: Some(workspace), ..CudaKernel::new(def, launches) }
}

cuda_kernels![of_all("GlobalNorm"), of_all("AllFinite")];

/// The kernel family.
const FAMILY: &str = "gradients";
/// The gradients of a launch, as in `cu/gradients.cu`.
const GROUP: usize = 8;
/// The least elements of a block, unless the gradient has fewer.
const LEAST: usize = 4096;
/// The most blocks for a gradient.
const MOST_BLOCKS: usize = 128;

/// Returns a type's number in `cu/gradients.cu`.
fn kind_of(dtype: DType) -> Result<usize> {
    Ok(match dtype {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::BF16 => 3,
        other => return Err(error!(NotImplemented, "a gradient of {other} is not supported")),
    })
}

/// The gradients of one launch, and the blocks for each.
struct Group<'a> {
    gradients: Vec<&'a Operand>,
    blocks: usize,
}

fn groups<'a>(cx: &'a OpCx<'_>) -> Result<Vec<Group<'a>>> {
    let all: Vec<&Operand> = (0..cx.inputs.len()).map(|index| cx.input(index)).collect::<Result<_>>()?;
    let group = |gradients: &[&'a Operand]| {
        // All gradients of a launch get the same number of blocks, which the longest determines.
        let longest = gradients.iter().map(|gradient| gradient.count()).max().unwrap_or(0);
        Group { gradients: gradients.to_vec(), blocks: longest.div_ceil(LEAST).clamp(1, MOST_BLOCKS) }
    };
    Ok(all.chunks(GROUP).map(group).collect())
}

/// Reserves the partial results of all blocks, one after the other.
fn parts(cx: &OpCx<'_>, groups: &[Group<'_>], taken: &mut usize) -> Operand {
    let count = groups.iter().map(|group| group.gradients.len() * group.blocks).sum();
    sums(cx, taken, &[count])
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    parts(cx, &groups(cx)?, &mut taken);
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let groups = groups(cx)?;
    let parts = parts(cx, &groups, &mut 0);
    let [each, whole] = match cx.op {
        "GlobalNorm" => ["all_squares", "norm_of_parts"],
        _ => ["all_infinite", "finite_of_parts"],
    };
    let (mut launches, mut first) = (Vec::with_capacity(groups.len() + 1), 0);
    for Group { gradients, blocks } in &groups {
        let all = gradients.iter().map(|gradient| Some(*gradient));
        let missing = std::iter::repeat(None);
        let launch = all.chain(missing).take(GROUP).fold(Launch::new(FAMILY, each), Launch::find_tensor);
        let own = part_of(&parts, first, gradients.len() * blocks)?;
        first += own.count();
        let mut words = [0; 2 * GROUP];
        let (counts, kinds) = words.split_at_mut(GROUP);
        for ((count, kind), gradient) in counts.iter_mut().zip(kinds).zip(gradients) {
            (*count, *kind) = (gradient.count(), kind_of(gradient.dtype)?);
        }
        let launch = launch.tensor(&own).uints::<{ 2 * GROUP }>(&words)?;
        launches.push(launch.grid([*blocks, gradients.len(), 1])?);
    }
    launches.push(Launch::new(FAMILY, whole).tensor(&parts).tensor(cx.output(0)?).uint(parts.count())?);
    Ok(launches)
}
