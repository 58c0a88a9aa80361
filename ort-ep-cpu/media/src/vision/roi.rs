//! Pooling of regions of interest: `RoiAlign` and `MaxRoiPool`.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::number::Real;
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::{PIECE, spend, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![
    KernelDef { op: "RoiAlign", make: make_align, ..KernelDef::BASE },
    KernelDef { op: "MaxRoiPool", make: make_pool, ..KernelDef::BASE },
];

/// Maximum samples per bin along one axis. No sensible region needs more.
const MOST_SAMPLES: usize = 1 << 20;

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
        samples <= MOST_SAMPLES as i64,
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
    let bound = move |shapes: &IoShapes<'_>| {
        // The indices of the images are converted twice.
        let images = elements(shapes.input(2)).saturating_mul(size_of::<i64>() + size_of::<usize>());
        let &[.., height, width] = shapes.input(0) else { return regions_bytes(shapes) };
        let pairs = align.most_inside(height).saturating_add(align.most_inside(width));
        let pairs = pairs.saturating_mul(size_of::<Pair>()).saturating_mul(shapes.threads);
        regions_bytes(shapes).saturating_add(images).saturating_add(pairs)
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
    // Before the parallel loop, which cannot return errors.
    for region in spending(8, regions.chunks_exact(4)) {
        align.bins(region, maps.pooled)?;
    }
    let len = maps.channels * maps.pooled[0] * maps.pooled[1];
    for_each_chunk_mut(cx.threads(), output.as_mut_slice::<T>()?, len.max(1), |region, to| {
        if let Ok(bins) = align.bins(&regions[region * 4..][..4], maps.pooled) {
            align.region(maps, &bins, images[region], to);
        }
    });
    Ok(())
}

/// The bins of a region, in elements of the map.
struct Bins {
    start: [f64; 2],
    size: [f64; 2],
    /// The samples of a bin along each axis.
    samples: [usize; 2],
}

impl Align {
    /// Returns the bins of a region, or an error if they have too many samples.
    fn bins(self, region: &[f64], pooled: [usize; 2]) -> Result<Bins> {
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
        let size = [extent[0] / pooled[0] as f64, extent[1] / pooled[1] as f64];
        if self.samples > 0 {
            return Ok(Bins { start, size, samples: [self.samples; 2] });
        }
        // `max` ignores NaN, which has no samples.
        let widest = size.iter().fold(0.0, |widest, size| f64::max(widest, size.ceil()));
        ensure!(
            widest <= MOST_SAMPLES as f64,
            InvalidArgument,
            help = "make the region smaller, or set sampling_ratio",
            "the bins of region {region:?} span {widest:?} elements, expected at most {MOST_SAMPLES}"
        );
        Ok(Bins { start, size, samples: size.map(|size| size.ceil().max(0.0) as usize) })
    }

    /// Returns an upper bound on the samples of a bin that are inside of a map, along an axis.
    fn most_inside(self, size: usize) -> usize {
        match self.samples {
            // Two samples are more than half an element apart.
            0 => size.saturating_mul(2).saturating_add(3).min(MOST_SAMPLES),
            samples => samples,
        }
    }

    fn region<T: Real>(self, maps: Maps<'_, T>, bins: &Bins, image: usize, to: &mut [T]) {
        let Bins { start, size: bin, samples } = *bins;
        let count = (samples[0] * samples[1]).max(1) as f64;
        let most = |axis: usize| samples[axis].min(self.most_inside(maps.size[axis]));
        let mut pairs = [0, 1].map(|axis| Vec::<Pair>::with_capacity(most(axis)));
        let [rows, columns] = maps.pooled;
        for cell in 0..rows * columns {
            let place = [cell / columns, cell % columns];
            spend(samples[0] + samples[1]);
            for (axis, pairs) in pairs.iter_mut().enumerate() {
                let (first, size) = (start[axis] + place[axis] as f64 * bin[axis], maps.size[axis]);
                let at = |index: usize| first + (index as f64 + 0.5) * bin[axis] / samples[axis] as f64;
                // Samples outside of the map have no weight, and a region far larger than the map
                // has millions of them.
                let inside = (0..samples[axis]).map(at).filter(|at| (-1.0..=size as f64).contains(at));
                pairs.clear();
                pairs.extend(inside.map(|at| pair(at, size)));
            }
            for channel in 0..maps.channels {
                let plane = maps.plane(image, channel);
                let value = match self.greatest {
                    true => {
                        let mut best = None;
                        let keep = |x: f64| best = Some(best.map_or(x, |best| greater(best, x)));
                        each_tap(plane, maps.size[1], &pairs, keep);
                        best.unwrap_or(0.0)
                    }
                    false => {
                        let mut sum = -0.0;
                        each_tap(plane, maps.size[1], &pairs, |x| sum += x);
                        sum / count
                    }
                };
                to[channel * rows * columns + cell] = T::from_f64(value);
            }
        }
    }
}

/// Calls `take` with each weighted element of the samples, row by row. A sample has four, by its
/// pairs along both axes.
fn each_tap<T: Real>(plane: &[T], width: usize, [rows, columns]: &[Vec<Pair>; 2], mut take: impl FnMut(f64)) {
    // Few samples are counted at once.
    let all = 4 * rows.len() * columns.len();
    let is_long = all > PIECE;
    spend(if is_long { 0 } else { all });
    for &[top, bottom] in rows {
        if is_long {
            spend(4 * columns.len());
        }
        for &[left, right] in columns {
            for (y, x) in [(top, left), (top, right), (bottom, left), (bottom, right)] {
                // A weight of 0 skips the element, because 0 times infinity is NaN.
                take(match y.1 * x.1 {
                    0.0 => 0.0,
                    weight => plane[y.0 * width + x.0].to_f64() * weight,
                });
            }
        }
    }
}

/// Returns the greater of two numbers, or NaN if either is NaN.
fn greater(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// The two elements along an axis between which a sample is interpolated, with their weights.
type Pair = [(usize, f64); 2];

/// Returns the elements on both sides of a position that is inside of the map.
fn pair(at: f64, size: usize) -> Pair {
    if size == 0 {
        return [(0, 0.0); 2];
    }
    let at = at.max(0.0);
    let low = (at as usize).min(size - 1);
    // At the last element both neighbours are the same, so its weight is 1.
    let high = (low + 1).min(size - 1);
    let weight = if high == low { 0.0 } else { at - low as f64 };
    [(low, 1.0 - weight), (high, weight)]
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
