//! `MaxPool`, `AveragePool`, `LpPool`, global pools, `NhwcMaxPool` and `NhwcAveragePool`.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::ops::nn::problem::{ImageShape, PixelLayout, PoolFold, PoolKind, pool_windows};
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_gpu::read::has_up_to_three_axes;

use super::conv::{FLOATS, suffix_of, window_sizes};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const OF_MAX: TypeSet = FLOATS.union(TypeSet::of(&[DType::I8, DType::U8]));

const QUANTIZED: &[(&str, TypeSet)] = &[("T", TypeSet::of(&[DType::I8, DType::U8]))];

const fn windowed(op: &'static str) -> KernelDef {
    KernelDef { op, types: &[("T", FLOATS)], when: has_up_to_three_axes, ..KernelDef::BASE }
}

const fn global(op: &'static str) -> KernelDef {
    KernelDef { op, types: &[("T", FLOATS)], ..KernelDef::BASE }
}

cuda_kernels![
    CudaKernel::new(KernelDef { types: &[("T", OF_MAX)], left_out: &[0], ..windowed("MaxPool") }, max_pool),
    CudaKernel::new(windowed("AveragePool"), pool),
    CudaKernel::new(windowed("LpPool"), pool),
    CudaKernel::new(KernelDef { domain: RUNTIME, ..windowed("NhwcMaxPool") }, nhwc_max_pool),
    CudaKernel::new(
        KernelDef { domain: MICROSOFT, types: QUANTIZED, ..windowed("NhwcMaxPool") },
        nhwc_max_pool
    ),
    CudaKernel::new(KernelDef { domain: RUNTIME, ..windowed("NhwcAveragePool") }, nhwc_average_pool),
    CudaKernel::new(global("GlobalAveragePool"), global_pool),
    CudaKernel::new(global("GlobalMaxPool"), global_pool),
    CudaKernel::new(global("GlobalLpPool"), global_pool),
];

/// Fills the structure `Windows` of `cu/pool.cu`.
fn windows_of(cx: &OpCx<'_>, layout: PixelLayout) -> Result<Vec<usize>> {
    let shape = &cx.input(0)?.shape;
    let axes = pool_windows(cx.attrs, shape, layout)?;
    let mut sizes = window_sizes(&axes);
    sizes.extend(axes.map(|axis| axis.pads[1]));
    for flag in ["count_include_pad", "storage_order"] {
        sizes.push(usize::from(cx.attrs.find_int(flag).unwrap_or(0) != 0));
    }
    let channels = shape.last().copied().unwrap_or(1);
    sizes.push(if layout == PixelLayout::ChannelsLast { channels } else { 1 });
    Ok(sizes)
}

/// Returns the reduction's number in `cu/pool.cu`, and its power.
fn fold_of(cx: &OpCx<'_>) -> Result<(usize, f32)> {
    let fold = PoolFold::of(cx.op, cx.attrs)?;
    let number = match fold.kind {
        PoolKind::Average => 0,
        PoolKind::Max => 1,
        PoolKind::L1 => 2,
        PoolKind::L2 => 3,
        PoolKind::Lp => 4,
    };
    Ok((number, fold.power as f32))
}

/// The largest plane that is reduced by a warp rather than a block.
const SMALL: usize = 1024;
/// Bytes of a pixel that a thread reads at once.
const PACK: usize = 16;

/// Returns the launch of a kernel for `count` results. In NHWC, a thread computes a pack of
/// channels if a pixel consists of whole packs.
fn launch_of(name: &str, x: &Operand, layout: PixelLayout, suffix: &str, count: usize) -> Result<Launch> {
    let many = x.dtype.byte_len(1).map_or(1, |bytes| PACK / bytes);
    let (entry, many) = match layout {
        PixelLayout::ChannelsFirst => (format!("{name}_{suffix}"), 1),
        PixelLayout::ChannelsLast if x.shape.last().is_some_and(|channels| channels.is_multiple_of(many)) => {
            (format!("{name}_packs_{suffix}"), many)
        }
        // NHWC has entries of its own: with both layouts in one, `MaxPool` spilled registers on
        // sm_90.
        PixelLayout::ChannelsLast => (format!("{name}_pixels_{suffix}"), 1),
    };
    Launch::new("pool", entry).threads(count / many)
}

fn pool(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    pool_of(cx, PixelLayout::ChannelsFirst)
}

fn nhwc_average_pool(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    pool_of(cx, PixelLayout::ChannelsLast)
}

fn pool_of(cx: &OpCx<'_>, layout: PixelLayout) -> Result<Vec<Launch>> {
    let (x, y, (kind, power)) = (cx.input(0)?, cx.output(0)?, fold_of(cx)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let launch = launch_of("pool", x, layout, suffix_of(x.dtype)?, y.count())?;
    let launch = launch.tensor(x).tensor(y).uints::<24>(&windows_of(cx, layout)?)?;
    Ok(vec![launch.uint(kind)?.float(power).uint(y.count())?])
}

fn max_pool(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    max_pool_of(cx, PixelLayout::ChannelsFirst)
}

fn nhwc_max_pool(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    if let Some(launch) = max_pool_of_pairs(cx)? {
        return Ok(vec![launch]);
    }
    max_pool_of(cx, PixelLayout::ChannelsLast)
}

/// Threads of a block, each of which computes two adjacent results.
const PAIR_THREADS: u32 = 128;

/// Returns the launch for float maxima over 2x2 or 3x3 windows with stride 2, if channels are whole
/// packs; `None` for other windows.
fn max_pool_of_pairs(cx: &OpCx<'_>) -> Result<Option<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let ImageShape { batch, channels, places } = ImageShape::new(&x.shape, PixelLayout::ChannelsLast)?;
    let axes = Windows::of_pool(cx.attrs, x.rank())?.on(&places)?;
    let pack = x.dtype.byte_len(1).map_or(1, |bytes| PACK / bytes);
    let [height, width] = axes.as_slice() else { return Ok(None) };
    let is_near = |axis: &WindowAxis| axis.stride == 2 && axis.dilation == 1;
    let is_fit = FLOATS.contains(x.dtype)
        && matches!(height.kernel, 2 | 3)
        && height.kernel == width.kernel
        && is_near(height)
        && is_near(width)
        && channels.is_multiple_of(pack);
    if !is_fit || y.count() == 0 {
        return Ok(None);
    }
    let rows = batch.saturating_mul(height.output);
    let of_row = width.output.div_ceil(2).saturating_mul(channels / pack);
    let entry = format!("max_pool_pair_{}_{}", height.kernel, suffix_of(x.dtype)?);
    let launch = Launch::new("pool", entry)
        .grid([rows, of_row.div_ceil(PAIR_THREADS as usize), 1])?
        .block([PAIR_THREADS, 1, 1])
        .tensor(x)
        .tensor(y);
    launch.uints::<24>(&windows_of(cx, PixelLayout::ChannelsLast)?).map(Some)
}

fn max_pool_of(cx: &OpCx<'_>, layout: PixelLayout) -> Result<Vec<Launch>> {
    let (x, y, indices) = (cx.input(0)?, cx.find_output(0), cx.find_output(1));
    let count = y.or(indices).map_or(0, |output| output.count());
    if count == 0 {
        return Ok(Vec::new());
    }
    let suffix = match x.dtype {
        DType::I8 => "i8",
        DType::U8 => "u8",
        float => suffix_of(float)?,
    };
    let launch = launch_of("max_pool", x, layout, suffix, count)?;
    let launch =
        launch.tensor(x).find_tensor(y).find_tensor(indices).uints::<24>(&windows_of(cx, layout)?)?;
    Ok(vec![launch.uint(count)?])
}

fn global_pool(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y, (kind, power)) = (cx.input(0)?, cx.output(0)?, fold_of(cx)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let plane = x.shape.iter().skip(2).fold(1, |plane: usize, size| plane.saturating_mul(*size));
    let suffix = suffix_of(x.dtype)?;
    // A block per plane would not have enough work.
    if plane <= SMALL {
        let launch =
            Launch::new("pool", format!("pool_small_{suffix}")).threads(y.count().saturating_mul(32))?;
        return Ok(vec![launch.tensor(x).tensor(y).uint(kind)?.float(power).uint(plane)?.uint(y.count())?]);
    }
    let launch = Launch::new("pool", format!("pool_plane_{suffix}"));
    let launch = launch.grid([y.count(), 1, 1])?.tensor(x).tensor(y);
    Ok(vec![launch.uint(kind)?.float(power).uint(plane)?])
}
