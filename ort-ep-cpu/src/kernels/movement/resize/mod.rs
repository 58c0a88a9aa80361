//! `Resize`: picks the nearest element, or interpolates one axis after another.

mod coordinates;
mod filter;

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use crate::cpu_kernels;

use super::indexed::{AxisMap, copy_indexed};
use super::number::Number;
use super::{Cell, Io, Movement, movement, only, operand};

use coordinates::{Given, Settings, Transform};
use filter::{Pass, order_of_passes, run_passes};

movement!["Resize", |cx: &mut CompileCx<'_>| Ok(Nearest(Settings::new(cx.attrs())?)), unaligned: &[0]];
cpu_kernels![KernelDef {
    op: "Resize",
    rank: 2,
    when: interpolates,
    make: make_interpolating,
    ..KernelDef::BASE
}];

/// Whether numbers are computed: in all modes but the nearest, and where values outside of the image are given.
fn interpolates(node: &NodeView<'_>) -> bool {
    let attrs = node.attrs();
    let nearest = attrs.find_string("mode") == Some("nearest");
    let crops = attrs.find_string("coordinate_transformation_mode") == Some("tf_crop_and_resize");
    !nearest
        || (crops && node.dtype(0).is_some_and(|dtype| ort_core::dtype::TypeSet::NUMERIC.contains(dtype)))
}

struct Nearest(Settings);

impl Movement for Nearest {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let settings = &self.0;
        let (shape, result, to) = (io.shape(0)?, io.output_shape(0), only(to)?);
        // Beside a size of 0 another may be without bound.
        if to.is_empty() {
            return Ok(());
        }
        let given = Given { roi: io.find(1), scales: io.find(2), sizes: io.find(3) };
        let axes = settings.axes(shape, result, &given)?;
        let mut maps = Vec::with_capacity(axes.len());
        for axis in &axes {
            let nearest =
                |index: usize| settings.nearest(axis.coordinate(settings.transform, index), axis.from);
            ensure!(axis.from > 0 || axis.to == 0, InvalidArgument, "shape {shape:?} resized to {result:?}");
            let places = if axis.is_identity(settings.transform) {
                (0..axis.to).collect()
            } else {
                (0..axis.to).map(nearest).collect()
            };
            maps.push(AxisMap::new(places));
        }
        copy_indexed((shape, operand(from, 0, shape)?), &maps, T::ZERO, to, io.threads)
    }
}

struct Interpolating(Settings);

fn make_interpolating(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(Interpolating(Settings::new(cx.attrs())?)))
}

impl Executable for Interpolating {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // Two buffers for what is between passes, in the wider type of computation.
        let (from, to) = (shapes.input(0), shapes.output(0));
        let mut sizes = from.to_vec();
        let mut most = 0usize;
        for axis in order_of_passes(from, to) {
            sizes[axis] = to[axis];
            let count = ort_core::tensor::element_count(&sizes)?;
            most = most.max(count);
        }
        most.checked_mul(2 * size_of::<f64>())
            .ok_or_else(|| error!(InvalidArgument, "shape {to:?} is too large"))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let dtype = cx.input(0)?.dtype();
        if dtype == DType::Bool {
            return Err(error!(NotImplemented, "booleans are not interpolated"));
        }
        for_each_type!(dtype in NUMERIC, T => self.interpolate::<T>(cx), else => {
            Err(error!(NotImplemented, "elements of type {} are not interpolated", dtype.name()))
        })
    }
}

impl Interpolating {
    fn interpolate<T: Number>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let settings = &self.0;
        let input = cx.input(0)?;
        let given = Given { roi: cx.find_input(1), scales: cx.find_input(2), sizes: cx.find_input(3) };
        let workspace = cx.workspace()?;
        let threads = cx.threads();
        let output = cx.output(0)?;
        let (shape, result) = (input.shape(), output.shape());
        let axes = settings.axes(shape, result, &given)?;
        let mut passes = Vec::new();
        for index in order_of_passes(shape, result) {
            let axis = &axes[index];
            if !axis.is_identity(settings.transform) {
                ensure!(
                    axis.from > 0 || axis.to == 0,
                    InvalidArgument,
                    "shape {shape:?} resized to {result:?}"
                );
                passes.push(Pass::<T::Compute>::new(index, axis, settings));
            }
        }
        let (from, to) = (input.as_slice::<T>()?, output.as_mut_slice::<T>()?);
        if to.is_empty() {
            return Ok(());
        }
        if passes.is_empty() {
            ensure!(from.len() == to.len(), Fail, "shape {shape:?} resized to {result:?}");
            to.copy_from_slice(from);
            return Ok(());
        }
        run_passes(&passes, (shape, from), to, workspace, threads)
    }
}

impl Settings {
    fn is_cropping(&self) -> bool {
        self.transform == Transform::CropAndResize
    }
}
