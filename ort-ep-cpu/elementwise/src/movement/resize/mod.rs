//! `Resize`: nearest-neighbour copies, and separable interpolation.

mod coordinates;
mod element;
mod filter;

use num_complex::Complex;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::tables;
use ort_cpu_threads::interrupt::{self, spending};

use super::indexed::{AxisMap, copy_indexed, map_bytes};
use super::number::with_numbers;
use super::{Cell, Io, Movement, movement, only, operand};

use coordinates::{Axis, Given, Settings, Transform};
use element::Pixel;
use filter::{Pass, bytes_of_axes, order_of_passes, pass_bytes, run_passes};

movement!["Resize", |cx: &mut CompileCx<'_>| Ok(Nearest(Settings::new(cx.attrs())?)), unaligned: &[0]];
cpu_kernels![KernelDef {
    op: "Resize",
    rank: 2,
    when: interpolates,
    make: make_interpolating,
    ..KernelDef::BASE
}];

/// Whether the node computes values: in all modes but nearest, and if the crop mode extrapolates.
fn interpolates(node: &NodeView<'_>) -> bool {
    let attrs = node.attrs();
    let nearest = attrs.find_string("mode") == Some("nearest");
    let crops = attrs.find_string("coordinate_transformation_mode") == Some("tf_crop_and_resize");
    !nearest
        || (crops && node.dtype(0).is_some_and(|dtype| ort_core::dtype::TypeSet::NUMERIC.contains(dtype)))
}

struct Nearest(Settings);

impl Movement for Nearest {
    fn heap(&self, shapes: &IoShapes<'_>) -> usize {
        map_bytes(shapes.output(0))
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let settings = &self.0;
        let (shape, result, to) = (io.shape(0)?, io.output_shape(0), only(to)?);
        // Next to a size of 0, another size may be arbitrarily large, so build no tables.
        if to.is_empty() {
            return Ok(());
        }
        let given = Given { roi: io.find(1), scales: io.find(2), sizes: io.find(3) };
        let axes = settings.axes(shape, result, &given)?;
        let mut maps = Vec::with_capacity(axes.len());
        for axis in &axes {
            let nearest = |index: usize| {
                settings.nearest(axis.coordinate_of_nearest(settings.transform, index), axis.from)
            };
            ensure!(
                axis.from > 0 || axis.to == 0,
                InvalidArgument,
                "shape {shape:?} cannot be resized to {result:?}"
            );
            let places = if axis.is_identity(settings.transform) {
                spending(1, 0..axis.to).collect()
            } else {
                spending(4, 0..axis.to).map(nearest).collect()
            };
            maps.push(AxisMap::new(places));
        }
        copy_indexed((shape, operand(from, 0, shape)?), &maps, T::ZERO, to, io.threads)
    }
}

struct Interpolating {
    settings: Settings,
    /// The bytes of an element in the widest compute type of its kind.
    width: usize,
}

fn make_interpolating(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let settings = Settings::new(cx.attrs())?;
    let dtype = cx.node.dtype(0);
    // The other kernel takes the mode `nearest`, also for strings.
    let is_text = dtype == Some(DType::String);
    ensure!(
        !is_text,
        NotImplemented,
        "strings are not interpolated; the mode 'nearest' takes them as they are"
    );
    let is_complex = dtype.is_some_and(|dtype| dtype.is_complex());
    let extrapolates = settings.is_cropping() && settings.extrapolation != 0.0;
    ensure!(!(is_complex && extrapolates), NotImplemented, "extrapolation of complex numbers");
    // Two reals per element for complex numbers; those of `C64` together take one `f64`.
    let width = if dtype == Some(DType::C128) { 2 * size_of::<f64>() } else { size_of::<f64>() };
    Ok(Box::new(Interpolating { settings, width }))
}

impl Executable for Interpolating {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // Two buffers for intermediates, in the wider compute type.
        let (from, to) = (shapes.input(0), shapes.output(0));
        let mut sizes = from.to_vec();
        let mut most = 0usize;
        for axis in order_of_passes(from, to) {
            sizes[axis] = to[axis];
            let count = ort_core::tensor::element_count(&sizes)?;
            most = most.max(count);
        }
        most.checked_mul(2 * self.width).ok_or_else(|| error!(InvalidArgument, "shape {to:?} is too large"))
    }

    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        Ok(tables(pass_bytes(shapes.input(0), shapes.output(0), &self.settings)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let settings = &self.settings;
        let input = cx.input(0)?;
        let given = Given { roi: cx.find_input(1), scales: cx.find_input(2), sizes: cx.find_input(3) };
        let (workspace, threads) = (cx.workspace()?, cx.threads());
        let result = cx.output_shape(0).ok_or_else(|| error!(Fail, "output 0 has no memory ready"))?.to_vec();
        let axes = settings.axes(input.shape(), &result, &given)?;
        // A crop region larger than the input stretches filters beyond what the sizes imply.
        let planned = pass_bytes(input.shape(), &result, settings);
        let beyond = bytes_of_axes(&axes, settings).saturating_sub(planned);
        let _beyond = if beyond > 0 && !result.contains(&0) { Some(cx.reserve(beyond)?) } else { None };
        let output = cx.output(0)?;
        let shapes = [input.shape(), &result[..]];
        let scratch = Scratch { workspace, threads };
        with_numbers!(
            input,
            output,
            |from, to, parts| self.interpolate(&axes, shapes, (from, to, parts), scratch),
            "interpolation"
        )
    }
}

/// The workspace of a run, and its threads.
struct Scratch<'a> {
    workspace: &'a mut [u8],
    threads: usize,
}

impl Interpolating {
    /// Interpolates elements of `parts` reals each, which form one more dimension that stays.
    fn interpolate<T: Pixel>(
        &self,
        axes: &[Axis],
        [shape, result]: [&[usize]; 2],
        (from, to, parts): (&[T], &mut [T], usize),
        scratch: Scratch<'_>,
    ) -> Result<()> {
        let settings = &self.settings;
        // Next to a size of 0, another size may be arbitrarily large, so build no tables.
        if to.is_empty() {
            return Ok(());
        }
        let mut passes = Vec::new();
        for index in order_of_passes(shape, result) {
            let axis = &axes[index];
            if !axis.is_identity(settings.transform) {
                ensure!(
                    axis.from > 0 || axis.to == 0,
                    InvalidArgument,
                    "shape {shape:?} cannot be resized to {result:?}"
                );
                passes.push(Pass::<T::Sum>::new(index, axis, settings));
            }
        }
        if passes.is_empty() {
            ensure!(from.len() == to.len(), Fail, "shape {shape:?} cannot be resized to {result:?}");
            interrupt::copy(from, to);
            return Ok(());
        }
        let mut shape = shape.to_vec();
        // The reals of an element are the innermost dimension.
        shape.push(parts);
        run_passes(&passes, (&shape, from), to, scratch.workspace, scratch.threads)
    }
}

impl Settings {
    fn is_cropping(&self) -> bool {
        self.transform == Transform::CropAndResize
    }
}
