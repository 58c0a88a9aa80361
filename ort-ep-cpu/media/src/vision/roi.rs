//! Pooling of regions of interest: `RoiAlign` and `MaxRoiPool`.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::number::Real;
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![
    KernelDef { op: "RoiAlign", make: make_align, ..KernelDef::BASE },
    KernelDef { op: "MaxRoiPool", make: make_pool, ..KernelDef::BASE },
];

/// Maximum samples per bin along one axis. No sensible region needs more.
const MOST_SAMPLES: f64 = 4096.0;

#[derive(Clone, Copy)]
struct Align {
    half_pixel: bool,
    /// Whether bins take the maximum instead of the average.
    greatest: bool,
    samples: usize,
    scale: f64,
}

/// Feature maps `[images, channels, height, width]`, and the size of pooled regions.
#[derive(Clone, Copy)]
struct Maps<'a, T> {
    elements: &'a [T],
    channels: usize,
    size: [usize; 2],
    pooled: [usize; 2],
}

impl<'a, T: Real> Maps<'a, T> {
    fn new(maps: TensorView<'a>, output: &[usize]) -> Result<Maps<'a, T>> {
        let (&[_, channels, height, width], &[_, _, rows, columns]) = (maps.shape(), output) else {
            return Err(error!(InvalidArgument, "feature maps of shape {:?}", maps.shape()));
        };
        let elements = maps.as_slice::<T>()?;
        Ok(Maps { elements, channels, size: [height, width], pooled: [rows, columns] })
    }

    fn images(&self) -> usize {
        self.elements.len() / (self.channels * self.size[0] * self.size[1]).max(1)
    }

    /// Returns one channel of one image.
    fn plane(&self, image: usize, channel: usize) -> &'a [T] {
        let len = self.size[0] * self.size[1];
        &self.elements[(image * self.channels + channel) * len..][..len]
    }
}

fn image_index(index: f64, images: usize) -> Result<usize> {
    // False for NaN too, so the cast below is in range.
    let valid = index >= 0.0 && index < images as f64;
    ensure!(
        valid,
        InvalidArgument,
        help = format!("batch indices are 0 or more and less than {images}"),
        "batch index {index} of a region is out of range for a batch of {images}"
    );
    Ok(index as usize)
}

fn make_align(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let samples = attrs.int("sampling_ratio")?;
    ensure!(
        samples as f64 <= MOST_SAMPLES,
        InvalidGraph,
        "sampling_ratio is {samples}, expected at most {MOST_SAMPLES}"
    );
    let align = Align {
        half_pixel: attrs.string("coordinate_transformation_mode")? == "half_pixel",
        greatest: attrs.string("mode")? == "max",
        // 0 or less means as many samples as the bin is wide.
        samples: usize::try_from(samples).unwrap_or(0),
        scale: f64::from(attrs.float("spatial_scale")?),
    };
    let bound = |shapes: &IoShapes<'_>| {
        // The indices of the images are converted twice.
        let images = elements(shapes.input(2)).saturating_mul(size_of::<i64>() + size_of::<usize>());
        regions_bytes(shapes).saturating_add(images)
    };
    let run = move |cx: &mut RunCx<'_>| {
        let dtype = cx.input(0)?.dtype();
        for_each_type!(dtype in FLOATS, T => run_align::<T>(cx, align), else => {
            Err(error!(NotImplemented, "regions of {} are not supported", dtype.name()))
        })
    };
    Ok(Box::new(WithHeap { bound, run }))
}

/// Returns the bytes of the regions, which are converted to `f64`.
fn regions_bytes(shapes: &IoShapes<'_>) -> usize {
    elements(shapes.input(1)).saturating_mul(size_of::<f64>())
}

/// A bilinear sample: four neighbours and their weights.
type Sample = [(usize, f64); 4];

fn run_align<T: Real>(cx: &mut RunCx<'_>, align: Align) -> Result<()> {
    let regions = to_f64s(&cx.input(1)?)?;
    let images = cx.input(2)?.to_ints()?;
    let output = cx.output(0)?;
    let maps = Maps::<T>::new(cx.input(0)?, output.shape())?;
    let count = output.shape().first().copied().unwrap_or(0);
    ensure!(
        regions.len() == count * 4 && images.len() == count,
        InvalidArgument,
        "{} coordinates and {} images for {count} regions",
        regions.len(),
        images.len()
    );
    let images: Result<Vec<usize>> =
        images.iter().map(|&image| image_index(image as f64, maps.images())).collect();
    let images = images?;
    let len = maps.channels * maps.pooled[0] * maps.pooled[1];
    for_each_chunk_mut(cx.threads(), output.as_mut_slice::<T>()?, len.max(1), |region, to| {
        align.region(maps, &regions[region * 4..][..4], images[region], to);
    });
    Ok(())
}

impl Align {
    fn region<T: Real>(self, maps: Maps<'_, T>, region: &[f64], image: usize, to: &mut [T]) {
        let shift = if self.half_pixel { 0.5 } else { 0.0 };
        // Regions are [x1, y1, x2, y2]; the arrays below are [y, x].
        let at = |index: usize| region[index] * self.scale - shift;
        let start = [at(1), at(0)];
        let mut extent = [at(3) - at(1), at(2) - at(0)];
        // Without half-pixel coordinates, a region is at least one element wide.
        if !self.half_pixel {
            extent = extent.map(|extent| extent.max(1.0));
        }
        // Without half-pixel coordinates no bin is empty; otherwise its samples may be none.
        let bin = [extent[0] / maps.pooled[0] as f64, extent[1] / maps.pooled[1] as f64];
        let samples = bin.map(|bin| match self.samples {
            0 => bin.ceil().clamp(0.0, MOST_SAMPLES) as usize,
            samples => samples,
        });
        let count = (samples[0] * samples[1]).max(1) as f64;
        let mut places: Vec<Sample> = Vec::new();
        let [rows, columns] = maps.pooled;
        for cell in 0..rows * columns {
            let cell_start =
                [start[0] + (cell / columns) as f64 * bin[0], start[1] + (cell % columns) as f64 * bin[1]];
            places.clear();
            spend(samples[0] + samples[1]);
            let step = |axis: usize, index: usize| {
                cell_start[axis] + (index as f64 + 0.5) * bin[axis] / samples[axis] as f64
            };
            // Samples outside of the map have no weight, and a region far larger than the map has
            // millions of them.
            let inside = |axis: usize| {
                let size = maps.size[axis] as f64;
                (0..samples[axis])
                    .map(move |index| step(axis, index))
                    .filter(move |at| (-1.0..=size).contains(at))
            };
            let columns_inside: Vec<f64> = inside(1).collect();
            for row in inside(0) {
                places.extend(columns_inside.iter().map(|&column| neighbours([row, column], maps.size)));
            }
            for channel in 0..maps.channels {
                spend(4 * places.len());
                let plane = maps.plane(image, channel);
                // A weight of 0 skips the element, because 0 times infinity is NaN.
                let weighted = |&(index, weight): &(usize, f64)| match weight {
                    0.0 => 0.0,
                    _ => plane[index].to_f64() * weight,
                };
                let value = if self.greatest {
                    let all = places.iter().flatten().map(weighted);
                    all.reduce(greater).unwrap_or(0.0)
                } else {
                    places.iter().flatten().map(weighted).sum::<f64>() / count
                };
                to[channel * rows * columns + cell] = T::from_f64(value);
            }
        }
    }
}

/// Returns the greater of two numbers, or NaN if either is NaN.
fn greater(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// Returns the four neighbours of a position for bilinear interpolation. Outside of the map their
/// weights are 0.
fn neighbours(place: [f64; 2], size: [usize; 2]) -> Sample {
    let inside = |axis: usize| place[axis] >= -1.0 && place[axis] <= size[axis] as f64 && size[axis] > 0;
    if !(inside(0) && inside(1)) {
        return [(0, 0.0); 4];
    }
    let split = |axis: usize| {
        let at = place[axis].max(0.0);
        let low = (at as usize).min(size[axis] - 1);
        // At the last element both neighbours are the same, so its weight is 1.
        let high = (low + 1).min(size[axis] - 1);
        let weight = if high == low { 0.0 } else { at - low as f64 };
        [(low, 1.0 - weight), (high, weight)]
    };
    let ([top, bottom], [left, right]) = (split(0), split(1));
    [(top, left), (top, right), (bottom, left), (bottom, right)]
        .map(|(y, x)| (y.0 * size[1] + x.0, y.1 * x.1))
}

fn make_pool(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let scale = cx.attrs().float("spatial_scale")?;
    let run = move |cx: &mut RunCx<'_>| {
        let dtype = cx.input(0)?.dtype();
        for_each_type!(dtype in FLOATS, T => run_pool::<T>(cx, scale), else => {
            Err(error!(NotImplemented, "regions of {} are not supported", dtype.name()))
        })
    };
    Ok(Box::new(WithHeap { bound: regions_bytes, run }))
}

/// Max-pools each cell of each region. Regions are `[image, x1, y1, x2, y2]`, rounded to whole
/// elements and inclusive, as in R. Girshick, *Fast R-CNN* (2015).
fn run_pool<T: Real>(cx: &mut RunCx<'_>, scale: f32) -> Result<()> {
    let regions = to_f64s(&cx.input(1)?)?;
    let output = cx.output(0)?;
    let maps = Maps::<T>::new(cx.input(0)?, output.shape())?;
    let count = output.shape().first().copied().unwrap_or(0);
    ensure!(regions.len() == count * 5, InvalidArgument, "{} numbers for {count} regions", regions.len());
    // Before the parallel loop, which cannot return errors.
    for region in regions.chunks_exact(5) {
        image_index(region[0], maps.images())?;
    }
    let [rows, columns] = maps.pooled;
    let len = maps.channels * rows * columns;
    for_each_chunk_mut(cx.threads(), output.as_mut_slice::<T>()?, len.max(1), |index, to| {
        let region = &regions[index * 5..][..5];
        // Single precision, because the corners of existing models were rounded in it.
        let at = |index: usize| f64::from((region[index] as f32 * scale).round());
        let (start, end) = ([at(2), at(1)], [at(4), at(3)]);
        let bounds = |axis: usize, cell: usize| {
            let bin = (end[axis] - start[axis] + 1.0).max(1.0) / maps.pooled[axis] as f64;
            let size = maps.size[axis] as f64;
            let low = ((cell as f64 * bin).floor() + start[axis]).clamp(0.0, size) as usize;
            let high = (((cell + 1) as f64 * bin).ceil() + start[axis]).clamp(0.0, size) as usize;
            low..high
        };
        for (place, to) in to.iter_mut().enumerate() {
            let (channel, cell) = (place / (rows * columns), place % (rows * columns));
            let plane = maps.plane(region[0] as usize, channel);
            let (ys, xs) = (bounds(0, cell / columns), bounds(1, cell % columns));
            spend(ys.len() * xs.len());
            let cells = ys.flat_map(|y| xs.clone().map(move |x| plane[y * maps.size[1] + x].to_f64()));
            *to = T::from_f64(cells.reduce(greater).unwrap_or(0.0));
        }
    });
    Ok(())
}
