//! Functions of each line along an axis: `Softmax`, `LogSoftmax`, `Hardmax` and `LpNormalization`; and what kernels of lines share.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::error;

use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, THREADS, Walk, strides};

/// Floats that are computed in float32.
pub(super) const SHORT_FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

const fn line(op: &'static str) -> CudaKernel {
    // A thread writes just the elements that it reads, after its team has read the line.
    let def = KernelDef {
        op,
        types: &[("T", SHORT_FLOATS)],
        in_place: &[(0, 0)],
        when: few_axes,
        ..KernelDef::BASE
    };
    CudaKernel::new(def, launches)
}

cuda_kernels![line("Softmax"), line("LogSoftmax"), line("Hardmax"), line("LpNormalization")];

/// Whether the rank is known, and small enough.
pub(super) fn few_axes(node: &NodeView<'_>) -> bool {
    node.rank(0).is_some_and(|rank| rank <= MOST_AXES)
}

/// What entries of an element type are called.
pub(super) fn suffix(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        _ => return Err(error!(NotImplemented, "no kernel for elements of {}", dtype.name())),
    })
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let axis = cx.axis(cx.attrs.int("axis")?, x.rank())?;
    let mask: Vec<bool> = (0..x.rank()).map(|other| other == axis).collect();
    let lines = Lines::new(&x.shape, &mask);
    // As in cu/lines.cu.
    let function = match cx.op {
        "Softmax" => 0,
        "LogSoftmax" => 1,
        "Hardmax" => 2,
        _ if cx.attrs.int("p")? == 1 => 3,
        _ => 4,
    };
    let launch = lines.launch("lines", &format!("lines_{}", suffix(x.dtype)?))?;
    Ok(vec![lines.param(launch.tensor(x).tensor(y))?.uint(function)?])
}

/// The lines of a tensor along some of its axes, and the team of threads that takes one.
pub(super) struct Lines {
    begins: Walk,
    along: Walk,
    pub(super) count: usize,
    pub(super) len: usize,
}

impl Lines {
    /// The lines of a tensor of `shape` along the axes of the mask.
    pub(super) fn new(shape: &[usize], mask: &[bool]) -> Lines {
        let strides = strides(shape);
        let part = |wanted: bool| -> (Vec<usize>, Vec<i64>) {
            let axes = shape.iter().zip(&strides).zip(mask).filter(|(_, along)| **along == wanted);
            axes.map(|((size, stride), _)| (*size, i64::try_from(*stride).unwrap_or(i64::MAX))).unzip()
        };
        let ((kept, kept_steps), (along, along_steps)) = (part(false), part(true));
        let product = |sizes: &[usize]| sizes.iter().fold(1usize, |all, size| all.saturating_mul(*size));
        Lines {
            count: product(&kept),
            len: product(&along),
            begins: Walk::new(&kept, &[kept_steps]),
            along: Walk::new(&along, &[along_steps]),
        }
    }

    /// Threads for a line: one where neighbouring lines lie side by side, so that threads read side by side.
    fn team(&self) -> usize {
        const LONG: usize = 1024;
        let last = |walk: &Walk| walk.steps.first().and_then(|steps| steps.last().copied());
        let in_columns = last(&self.begins) == Some(1) && last(&self.along) != Some(1);
        if in_columns && self.count >= 32 || self.len <= 4 { 1 } else { team_of(self.len, LONG) }
    }

    /// A launch of the entry for the team of these lines.
    pub(super) fn launch(&self, family: &'static str, entry: &str) -> Result<Launch> {
        let team = self.team();
        Launch::new(family, format!("{entry}_{team}")).threads(self.count.saturating_mul(team))
    }

    /// The lines as the next parameter: the structure `Lines` of cu/lines.cuh.
    pub(super) fn param(&self, launch: Launch) -> Result<Launch> {
        let number = |number: i64| {
            let number = i32::try_from(number);
            number.map_err(|_| error!(NotImplemented, "a size or stride of more than 2^31 - 1 elements"))
        };
        let of = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let mut words = vec![number(of(self.count))?, number(of(self.len))?];
        words.push(number(of(self.begins.sizes.len()))?);
        words.push(number(of(self.along.sizes.len()))?);
        for walk in [&self.begins, &self.along] {
            let steps = walk.steps.first().map_or(&[][..], |steps| steps);
            let sizes: Vec<i64> = walk.sizes.iter().copied().map(of).collect();
            for list in [&sizes[..], steps] {
                for axis in 0..MOST_AXES {
                    words.push(number(list.get(axis).copied().unwrap_or(0))?);
                }
            }
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(launch.bytes(&bytes))
    }
}

/// A warp for a line, or a block for one longer than that.
pub(super) fn team_of(len: usize, long: usize) -> usize {
    if len <= long { 32 } else { THREADS as usize }
}
