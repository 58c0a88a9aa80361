//! Pooling of regions of interest: `RoiAlign` and `MaxRoiPool`.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::number::Real;
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::{PIECE, spend, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_threads::thread_scratch::{ThreadScratch, with_thread_scratch};

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
    /// Whether positions are rounded to `f32`, as in ONNX Runtime and on GPUs: whether a sample at
    /// the border is inside of the map depends on it.
    single: bool,
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
        single: false,
    };
    let bound = move |shapes: &IoShapes<'_>| {
        // The indices of the images are converted twice.
        let images = elements(shapes.input(2)).saturating_mul(size_of::<i64>() + size_of::<usize>());
        let (&[.., height, width], &[.., rows, columns]) = (shapes.input(0), shapes.output(0)) else {
            return regions_bytes(shapes);
        };
        let of_axis = |size, bins: usize| {
            align
                .most_taps(size)
                .saturating_mul(size_of::<Tap>())
                .saturating_add(size_of::<(usize, bool)>())
                .saturating_mul(bins)
        };
        let taps = of_axis(height, rows).saturating_add(of_axis(width, columns));
        let taps = taps.saturating_mul(shapes.threads);
        regions_bytes(shapes).saturating_add(images).saturating_add(taps)
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
    let align = Align { single: T::DTYPE != DType::F64, ..align };
    for region in spending(8, regions.chunks_exact(4)) {
        align.bins(region, maps.pooled)?;
    }
    let len = maps.channels * maps.pooled[0] * maps.pooled[1];
    for_each_chunk_mut(cx.threads(), output.as_mut_slice::<T>()?, len.max(1), |region, to| {
        if let Ok(bins) = align.bins(&regions[region * 4..][..4], maps.pooled) {
            with_thread_scratch(|axes: &mut (AxisTaps, AxisTaps)| {
                align.region(maps, &bins, images[region], axes, to);
            });
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
    /// Rounds a position to the type in which they are computed.
    fn round(self, position: f64) -> f64 {
        // Rounding the result of one operation in `f64` is the same as computing it in `f32`.
        if self.single { f64::from(position as f32) } else { position }
    }

    /// Returns the bins of a region, or an error if they have too many samples.
    fn bins(self, region: &[f64], pooled: [usize; 2]) -> Result<Bins> {
        let shift = if self.half_pixel { 0.5 } else { 0.0 };
        // Regions are [x1, y1, x2, y2]; the arrays below are [y, x].
        let at = |index: usize| self.round(self.round(region[index] * self.scale) - shift);
        let start = [at(1), at(0)];
        let mut extent = [at(3) - at(1), at(2) - at(0)].map(|extent| self.round(extent));
        // Without half-pixel coordinates, a region is at least one element wide.
        if !self.half_pixel {
            extent = extent.map(|extent| extent.max(1.0));
        }
        // Without half-pixel coordinates no bin is empty; otherwise its samples may be none.
        let size = [extent[0] / pooled[0] as f64, extent[1] / pooled[1] as f64].map(|size| self.round(size));
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

    /// Returns an upper bound on the elements of an axis that the samples of a bin weigh.
    fn most_taps(self, size: usize) -> usize {
        if self.samples > 0 { self.samples.saturating_mul(2).min(size) } else { size }
    }

    /// Finds the taps of the bins along an axis.
    fn fill(self, taps: &mut AxisTaps, bins: &Bins, axis: usize, (count, size): (usize, usize)) {
        let Bins { start, size: bin, samples } = *bins;
        let (start, bin, samples) = (start[axis], bin[axis], samples[axis]);
        taps.clear(count, count.saturating_mul(self.most_taps(size).min(samples.saturating_mul(2))));
        let step = bin / samples as f64;
        for cell in 0..count {
            let first = self.round(start + self.round(cell as f64 * bin));
            let at = |index: usize| {
                let within = self.round((index as f64 + 0.5) * bin);
                self.round(first + self.round(within / samples as f64))
            };
            // The samples that may be inside of the map: a region far larger than the map has
            // millions of others. The margin is for rounding.
            let index_of = |position: f64| (position - first) / step - 0.5;
            let range = match step > 0.0 {
                true => {
                    let from = (index_of(-1.0).floor() - 1.0).clamp(0.0, samples as f64) as usize;
                    let to = (index_of(size as f64).ceil() + 2.0).clamp(0.0, samples as f64) as usize;
                    from..to.max(from)
                }
                false => 0..samples,
            };
            spend(1 + range.len());
            let inside = |index: &usize| (-1.0..=size as f64).contains(&at(*index));
            let seen = taps.taps.len();
            let mut found = 0;
            for index in range {
                // Samples in ascending order of their positions.
                let index = if step < 0.0 { samples - 1 - index } else { index };
                if inside(&index) && size > 0 {
                    found += 1;
                    pair(at(index), size)
                        .into_iter()
                        .for_each(|(place, weight)| taps.add(seen, place, weight));
                }
            }
            taps.bins.push((taps.taps.len(), found < samples));
        }
    }

    fn region<T: Real>(
        self,
        maps: Maps<'_, T>,
        bins: &Bins,
        image: usize,
        (rows, columns): &mut (AxisTaps, AxisTaps),
        to: &mut [T],
    ) {
        let count = (bins.samples[0] as f64 * bins.samples[1] as f64).max(1.0);
        self.fill(rows, bins, 0, (maps.pooled[0], maps.size[0]));
        self.fill(columns, bins, 1, (maps.pooled[1], maps.size[1]));
        let (rows, columns) = (&*rows, &*columns);
        // Little work is counted at once.
        let work = rows.taps.len().saturating_mul(columns.taps.len());
        let is_long = work > PIECE;
        let cells = maps.pooled[0] * maps.pooled[1];
        // A channel's plane stays in the cache from bin to bin.
        for (channel, to) in to.chunks_exact_mut(cells.max(1)).enumerate() {
            let plane = maps.plane(image, channel);
            spend(if is_long { 0 } else { work });
            let mut to = to.iter_mut();
            for (ys, is_row_off) in rows.bins() {
                for ((xs, is_column_off), to) in columns.bins().zip(to.by_ref()) {
                    let lines = ys.iter().map(|y| {
                        spend(if is_long { xs.len() } else { 0 });
                        (y, &plane[y.index * maps.size[1]..][..maps.size[1]])
                    });
                    *to = T::from_f64(match self.greatest {
                        true if ys.is_empty() => 0.0,
                        true => greatest(lines, xs, is_row_off || is_column_off),
                        false => weighted_sum(lines, xs) / count,
                    });
                }
            }
        }
    }
}

/// Sums the elements of the lines, weighted along both axes.
#[inline]
fn weighted_sum<'a, T: Real>(lines: impl Iterator<Item = (&'a Tap, &'a [T])>, xs: &[Tap]) -> f64 {
    // A weight of 0 skips the element, because 0 times infinity is NaN.
    let lines = lines.filter(|(y, _)| y.weight > 0.0);
    lines.fold(0.0, |sum, (y, line)| {
        let taps = xs.iter().filter(|x| x.weight > 0.0);
        sum + taps.fold(0.0, |sum, x| sum + line[x.index].to_f64() * x.weight) * y.weight
    })
}

/// Returns the greatest of the weighted elements of all samples. A sample off the map counts as 0,
/// as in the standard's evaluator.
#[inline]
fn greatest<'a, T: Real>(
    lines: impl Iterator<Item = (&'a Tap, &'a [T])>,
    xs: &[Tap],
    has_sample_off_map: bool,
) -> f64 {
    let mut best = if has_sample_off_map || xs.is_empty() { 0.0 } else { f64::NEG_INFINITY };
    for (y, line) in lines {
        for x in xs {
            let element = line[x.index].to_f64();
            // Each weight of a row meets each weight of a column. The greatest product makes the
            // most of a positive element, and the least one of a negative element.
            let weight = if element < 0.0 { y.least * x.least } else { y.most * x.most };
            let value = if weight == 0.0 { 0.0 } else { element * weight };
            best = greater(best, value);
        }
    }
    best
}

/// An element along an axis, with the weights that the samples of a bin give it.
struct Tap {
    index: usize,
    /// The sum of its weights.
    weight: f64,
    least: f64,
    most: f64,
}

/// The taps of all bins along an axis. Samples share taps, so bins have fewer of them than samples
/// have neighbours.
#[derive(Default)]
struct AxisTaps {
    taps: Vec<Tap>,
    /// For each bin, the end of its taps, and whether some of its samples are off the map.
    bins: Vec<(usize, bool)>,
}

impl ThreadScratch for AxisTaps {
    fn bytes(&self) -> usize {
        self.taps.capacity() * size_of::<Tap>() + self.bins.bytes()
    }
}

impl AxisTaps {
    /// Removes all taps, and makes room for those of the next region.
    fn clear(&mut self, bins: usize, taps: usize) {
        self.taps.clear();
        self.bins.clear();
        self.taps.reserve_exact(taps);
        self.bins.reserve_exact(bins);
    }

    /// Adds a weight to the tap of an element of the bin whose taps begin at `begin`. Elements come
    /// in ascending order, two for each sample, so the tap is one of the last two or a new one.
    fn add(&mut self, begin: usize, index: usize, weight: f64) {
        let last = begin.max(self.taps.len().saturating_sub(2));
        match self.taps[last..].iter_mut().find(|tap| tap.index == index) {
            Some(tap) => {
                tap.weight += weight;
                (tap.least, tap.most) = (tap.least.min(weight), tap.most.max(weight));
            }
            None => self.taps.push(Tap { index, weight, least: weight, most: weight }),
        }
    }

    /// Iterates over the bins: their taps, and whether samples are off the map.
    fn bins(&self) -> impl Iterator<Item = (&[Tap], bool)> {
        let mut begin = 0;
        self.bins
            .iter()
            .map(move |&(end, is_off)| (&self.taps[std::mem::replace(&mut begin, end)..end], is_off))
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
