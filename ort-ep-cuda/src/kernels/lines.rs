//! Functions of each line along an axis: `Softmax`, `LogSoftmax`, `Hardmax` and `LpNormalization`; and what kernels of lines share.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::{Result, ensure, error};

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
    let launch = lines.launch("lines", &format!("lines_{}", suffix(x.dtype)?), 1)?;
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

    /// Whether neighbouring lines lie side by side in memory, and are many enough for the threads of a warp.
    pub(super) fn in_columns(&self) -> bool {
        let last = |walk: &Walk| walk.steps.first().and_then(|steps| steps.last().copied());
        last(&self.begins) == Some(1) && last(&self.along) != Some(1) && self.count >= WARP
    }

    /// Threads for a line, as cu/lines.cuh has them.
    fn team(&self) -> usize {
        const LONG: usize = 1024;
        const SHORT_COLUMN: usize = 16;
        match self.in_columns() {
            _ if self.len <= 4 => 1,
            true if self.len <= SHORT_COLUMN => 1,
            true => 8,
            false => team_of(self.len, LONG),
        }
    }

    /// A launch of the entry for the team of these lines, which are cut in so many pieces.
    pub(super) fn launch(&self, family: &'static str, entry: &str, splits: usize) -> Result<Launch> {
        self.launch_by(self.team(), family, entry, splits)
    }

    /// A launch where a warp or a block takes what is in a row, and a thread each column.
    pub(super) fn launch_in_order(&self, family: &'static str, entry: &str) -> Result<Launch> {
        let team = self.team();
        self.launch_by(if team == 8 { 1 } else { team }, family, entry, 1)
    }

    fn launch_by(&self, team: usize, family: &'static str, entry: &str, splits: usize) -> Result<Launch> {
        // Places are counted in 32 bits.
        let fits = self.count.checked_mul(self.len).is_some_and(|all| all <= i32::MAX as usize);
        ensure!(fits, NotImplemented, "{} lines of {}: more than 2^31 - 1 elements", self.count, self.len);
        teams(Launch::new(family, format!("{entry}_{team}")), self.count, team, splits)
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

/// The threads of a warp.
const WARP: usize = 32;

/// With a team for each of so many lines, and as many again for each of the pieces that they are cut in.
pub(super) fn teams(launch: Launch, count: usize, team: usize, splits: usize) -> Result<Launch> {
    let lines_of_block = THREADS as usize / team.max(1);
    launch.grid([count.div_ceil(lines_of_block.max(1)).max(1), splits, 1])
}

/// A warp for a line, or a block for one longer than that.
pub(super) fn team_of(len: usize, long: usize) -> usize {
    if len <= long { WARP } else { THREADS as usize }
}
