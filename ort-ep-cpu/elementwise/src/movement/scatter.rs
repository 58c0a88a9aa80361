//! Scatter operators: `ScatterElements`, `ScatterND` and `TensorScatter`.
//!
//! They update the data in place if the output aliases it. Scattering is sequential, because
//! updates of the same element must apply in order.

use num_complex::Complex;
use ort_core::dtype::{DType, Element};
use ort_core::ep::{CompileCx, Executable, KernelDef, NodeView, RunCx};
use ort_core::ops::tensor::geometry::normalize_axis;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};
use smallvec::smallvec;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{self, PIECE, pieces, pieces_mut, spending};

use super::gather::{ElementWalk, Indices, Tuples};
use super::number::{Number, Reduction};
use super::strided::copy_all;
use super::{Cell, Io, Movement, Operands, movement, only};

movement![
    "ScatterElements",
    |cx: &mut CompileCx<'_>| Ok(ScatterElements { axis: cx.attrs().int("axis")? }),
    in_place: &[(0, 0)]
];
movement!["ScatterND", |_: &mut CompileCx<'_>| Ok(ScatterNd), in_place: &[(0, 0)]];
movement!["TensorScatter", make_tensor_scatter, in_place: &[(0, 0)]];

cpu_kernels![
    KernelDef {
        op: "ScatterElements",
        rank: 2,
        in_place: &[(0, 0)],
        when: reduces,
        make: |cx| make_reducing(cx, Target::Elements(cx.attrs().int("axis")?)),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "ScatterND",
        rank: 2,
        in_place: &[(0, 0)],
        when: reduces,
        make: |cx| make_reducing(cx, Target::Tuples),
        ..KernelDef::BASE
    },
];

struct ScatterElements {
    axis: i64,
}

struct ScatterNd;

struct TensorScatter {
    axis: i64,
    circular: bool,
}

fn make_tensor_scatter(cx: &mut CompileCx<'_>) -> Result<TensorScatter> {
    let circular = cx.attrs().string("mode")? == "circular";
    Ok(TensorScatter { axis: cx.attrs().int("axis")?, circular })
}

/// Calls `meet` with each element of `to` that an index addresses and its update, in order.
fn scatter_elements<T: Copy>(
    (shape, to): (&[usize], &mut [T]),
    (indices, updates): (TensorView<'_>, &[T]),
    axis: i64,
    meet: impl Fn(&mut T, T),
) -> Result<()> {
    let walk = ElementWalk::new(shape, indices.shape(), axis)?;
    let indices = Indices::new(indices)?;
    ensure!(
        indices.len() == updates.len(),
        InvalidArgument,
        "got {} updates, expected one for each of the {} indices",
        updates.len(),
        indices.len()
    );
    indices.check(walk.size)?;
    // An axis of size 0 in the indices has no updates; `chunks_exact` refuses a length of 0.
    let rows = updates.chunks_exact(walk.row.max(1));
    for (row, updates) in spending(walk.row, rows).enumerate() {
        let base = walk.base(row);
        for (piece, updates) in pieces(updates).enumerate() {
            for (column, &update) in (piece * PIECE..).zip(updates) {
                let pick = indices.at(row * walk.row + column, walk.size);
                meet(&mut to[base + column * walk.column_step + pick * walk.axis_step], update);
            }
        }
    }
    Ok(())
}

/// Like [`scatter_elements`], for index tuples, each of which addresses a run of elements.
fn scatter_tuples<T: Copy>(
    (shape, to): (&[usize], &mut [T]),
    (indices, updates): (TensorView<'_>, &[T]),
    meet: impl Fn(&mut T, T),
) -> Result<()> {
    let tuples = Tuples::new(shape, indices, 0)?;
    let run = tuples.run;
    ensure!(
        updates.len() == tuples.count * run,
        InvalidArgument,
        "updates has {} elements, expected {}",
        updates.len(),
        tuples.count * run
    );
    if run == 0 {
        return Ok(());
    }
    for (tuple, updates) in spending(run, updates.chunks_exact(run)).enumerate() {
        let start = tuples.start(tuple);
        for (to, updates) in pieces_mut(&mut to[start..start + run]).zip(updates.chunks(PIECE)) {
            to.iter_mut().zip(updates).for_each(|(to, &update)| meet(to, update));
        }
    }
    Ok(())
}

/// Returns the output, initialized with the data.
fn start<'o, T: Cell>(io: &Io<'_>, data: &[T], to: &'o mut [Option<&mut [T]>]) -> Result<&'o mut [T]> {
    let to = only(to)?;
    if !io.in_place {
        copy_all(data, to, io.threads)?;
    }
    Ok(to)
}

impl Movement for ScatterElements {
    fn operands(&self, _inputs: usize) -> Operands {
        smallvec![0, 2]
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let to = start(io, from[0], to)?;
        scatter_elements((io.shape(0)?, to), (io.input(1)?, from[1]), self.axis, |to, update| *to = update)
    }
}

impl Movement for ScatterNd {
    fn operands(&self, _inputs: usize) -> Operands {
        smallvec![0, 2]
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let to = start(io, from[0], to)?;
        scatter_tuples((io.shape(0)?, to), (io.input(1)?, from[1]), |to, update| *to = update)
    }
}

impl Movement for TensorScatter {
    fn operands(&self, _inputs: usize) -> Operands {
        smallvec![0, 1]
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let to = start(io, from[0], to)?;
        let (cache, update) = (io.shape(0)?, io.input(1)?.shape());
        let axis = normalize_axis(self.axis, cache.len())?;
        // The axis cannot be the batch, because write indices are per batch.
        let fits = axis > 0
            && cache.len() == update.len()
            && (0..cache.len()).all(|other| other == axis || cache[other] == update[other])
            && update[axis] <= cache[axis];
        ensure!(fits, InvalidArgument, "an update of shape {update:?} for a cache of shape {cache:?}");
        let (size, length, run) = (cache[axis], update[axis], cache[axis + 1..].iter().product::<usize>());
        let writes = io.ints(2)?.unwrap_or_else(|| smallvec![0; cache[0]]);
        ensure!(
            writes.len() == cache[0],
            InvalidArgument,
            "got {} write indices, expected {cache:?}",
            writes.len()
        );
        let prefixes: usize = cache[..axis].iter().product();
        for prefix in 0..prefixes {
            // The batch is the outermost dimension, so consecutive prefixes share a write index.
            let write = writes[prefix / (prefixes / cache[0])];
            // A circular cache wraps around at its end.
            let write = if self.circular { write.rem_euclid(size.max(1) as i64) } else { write };
            let first =
                usize::try_from(write).ok().filter(|&w| self.circular || w.saturating_add(length) <= size);
            let first = first.ok_or_else(|| {
                error!(InvalidArgument, "write index {write} is out of range for size {size}")
            })?;
            for step in spending(2 + run / 4, 0..length) {
                // Only a circular cache wraps: a linear one was checked to hold all steps.
                let place = (prefix * size + (first + step) % size) * run;
                let source = (prefix * length + step) * run;
                interrupt::copy(&from[1][source..source + run], &mut to[place..place + run]);
            }
        }
        Ok(())
    }
}

fn reduces(node: &NodeView<'_>) -> bool {
    let reduction = node.attrs().find_string("reduction").unwrap_or("none");
    reduction != "none" && node.output_dtype(0) != Some(DType::String)
}

#[derive(Debug, Clone, Copy)]
enum Target {
    Elements(i64),
    Tuples,
}

fn make_reducing(cx: &CompileCx<'_>, target: Target) -> Result<Box<dyn Executable>> {
    let reduction = match cx.attrs().string("reduction")? {
        "add" => Reduction::Add,
        "mul" => Reduction::Mul,
        "min" => Reduction::Min,
        "max" => Reduction::Max,
        other => return Err(error!(InvalidGraph, "the reduction '{other}' is not known")),
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        // In place, input 0 may not be readable, so the updates determine the type.
        let dtype = cx.input(2)?.dtype();
        if dtype == DType::Bool {
            return reduce_bools(cx, target, reduction);
        }
        match dtype {
            DType::C64 => return reduce_complex::<f32>(cx, target, reduction),
            DType::C128 => return reduce_complex::<f64>(cx, target, reduction),
            _ => {}
        }
        for_each_type!(dtype in NUMERIC, T => {
            reduce(cx, target, |to: &mut T, update: T| *to = to.reduce(update, reduction))
        }, else => Err(error!(NotImplemented, "a reduction of {} is not supported", dtype.name())))
    }))
}

/// Reduces complex numbers. They have no order, so only sums and products exist.
fn reduce_complex<T>(cx: &mut RunCx<'_>, target: Target, reduction: Reduction) -> Result<()>
where
    Complex<T>: Element + num_traits::NumAssignRef,
{
    match reduction {
        Reduction::Add => reduce(cx, target, |to: &mut Complex<T>, update| *to += update),
        Reduction::Mul => reduce(cx, target, |to: &mut Complex<T>, update| *to *= update),
        Reduction::Min | Reduction::Max => {
            Err(error!(InvalidGraph, "complex numbers have no least and no greatest"))
        }
    }
}

fn reduce<T: Element>(cx: &mut RunCx<'_>, target: Target, meet: impl Fn(&mut T, T)) -> Result<()> {
    let (indices, updates) = (cx.input(1)?, cx.input(2)?.as_slice::<T>()?);
    // In place, the output already holds the data.
    let data = if cx.in_place(0) == Some(0) { None } else { Some(cx.input(0)?.as_slice::<T>()?) };
    let output = cx.output(0)?;
    let shape = output.shape();
    let to = output.as_mut_slice::<T>()?;
    if let Some(data) = data {
        ensure!(data.len() == to.len(), Fail, "the output does not have the data's shape, {shape:?}");
        interrupt::copy(data, to);
    }
    match target {
        Target::Elements(axis) => scatter_elements((shape, to), (indices, updates), axis, meet),
        Target::Tuples => scatter_tuples((shape, to), (indices, updates), meet),
    }
}

/// Reduces booleans: sums and maxima are "or", products and minima "and".
fn reduce_bools(cx: &mut RunCx<'_>, target: Target, reduction: Reduction) -> Result<()> {
    let (indices, updates) = (cx.input(1)?, cx.input(2)?.bytes()?);
    let data = if cx.in_place(0) == Some(0) { None } else { Some(cx.input(0)?.bytes()?) };
    let output = cx.output(0)?;
    let shape = output.shape();
    let to = output.bytes_mut()?;
    if let Some(data) = data {
        ensure!(data.len() == to.len(), Fail, "the output does not have the data's shape, {shape:?}");
        interrupt::copy(data, to);
    }
    let is_or = matches!(reduction, Reduction::Add | Reduction::Max);
    // Any byte but 0 is true.
    let meet = |to: &mut u8, update: u8| {
        let (old, new) = (*to != 0, update != 0);
        *to = u8::from(if is_or { old | new } else { old & new });
    };
    match target {
        Target::Elements(axis) => scatter_elements((shape, to), (indices, updates), axis, meet),
        Target::Tuples => scatter_tuples((shape, to), (indices, updates), meet),
    }
}
