//! `MaxPool` and `AveragePool` of planes in `float`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::{Result, ensure, error};

use super::conv_depthwise::plane_window;
use super::pool_plain::{self, Kind};
use super::{for_each_unit, part_count};
use crate::cpu_kernels;
use crate::kernels::linalg::widened::widened;
use crate::kernels::linalg::{bytes_of, scratch};
use crate::simd::Isa;
use crate::vector::pool::{Indices, Pool, PoolAxis, PoolPlan, pool_nd, scratch_len};
use crate::vector::pool_indices::max_and_indices;

cpu_kernels![
    KernelDef {
        op: "MaxPool",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16, DType::I8, DType::U8]))],
        make: |cx| widened(cx, |cx| make(cx, Pool::Max)),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "AveragePool",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        make: |cx| widened(cx, |cx| {
            let count_include_pad = cx.attrs().flag("count_include_pad")?;
            make(cx, Pool::Average { count_include_pad })
        }),
        ..KernelDef::BASE
    },
];

/// The most places of a window that the fast loops look at one by one; a larger one lies mostly outside of its image.
const MOST_TAPS: i64 = 1 << 20;

struct Pooling {
    windows: Windows,
    pool: Pool,
    column_major: bool,
}

/// The windows of a pool's node.
pub(super) fn windows_of_pool(node: &NodeView<'_>) -> Result<Windows> {
    let rank = node.attrs().ints("kernel_shape")?.len() + 2;
    Windows::of_pool(node.attrs(), rank)
}

fn make(cx: &mut CompileCx<'_>, pool: Pool) -> Result<Box<dyn Executable>> {
    let taps = cx.attrs().ints("kernel_shape")?.iter().fold(1, |taps: i64, &size| taps.saturating_mul(size));
    if taps > MOST_TAPS {
        let kind = match pool {
            Pool::Max => Kind::Max,
            Pool::Average { count_include_pad } => Kind::Average { include_pad: count_include_pad },
        };
        return pool_plain::make::<f32>(cx, kind);
    }
    let windows = windows_of_pool(&cx.node)?;
    let column_major = cx.attrs().find_int("storage_order").unwrap_or(0) != 0;
    Ok(Box::new(Pooling { windows, pool, column_major }))
}

/// Batch times channels, and the windows on each plane.
pub(super) fn planes(windows: &Windows, image: &[usize]) -> Result<(usize, Vec<WindowAxis>)> {
    match image {
        [batch, channels, spatial @ ..] => Ok((batch * channels, windows.on(spatial)?)),
        _ => Err(error!(InvalidArgument, "an image of shape {image:?}")),
    }
}

impl Pooling {
    /// The plan of planes of one or two axes.
    fn plan(&self, axes: &[WindowAxis]) -> Result<Option<PoolPlan>> {
        if axes.len() > 2 {
            return Ok(None);
        }
        let end = |from_last: usize| axes.iter().rev().nth(from_last).map_or(0, |axis| axis.pads[1]);
        Ok(Some(PoolPlan::new(plane_window(axes)?, [end(1), end(0)], self.pool)))
    }
}

fn along(axis: &WindowAxis) -> PoolAxis {
    PoolAxis {
        input: axis.input,
        output: axis.output,
        kernel: axis.kernel,
        stride: axis.stride,
        dilation: axis.dilation,
        pads: axis.pads,
    }
}

impl Executable for Pooling {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let (units, axes) = planes(&self.windows, shapes.input(0))?;
        let scratch = if axes.len() > 2 { 0 } else { scratch_len(&plane_window(&axes)?) };
        let scratch = scratch.checked_next_multiple_of(16).unwrap_or(usize::MAX);
        bytes_of::<f32>(scratch.saturating_mul(part_count(shapes.threads, units)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (isa, threads) = (Isa::current(), cx.threads());
        let workspace = scratch::<f32>(cx.workspace()?)?;
        let image = cx.input(0)?;
        let (_, axes) = planes(&self.windows, image.shape())?;
        let image = image.as_slice::<f32>()?;
        let input: usize = axes.iter().map(|axis| axis.input).product();
        let output: usize = axes.iter().map(|axis| axis.output).product();
        let indices = if cx.wants(1) { Some(cx.output(1)?.as_mut_slice::<i64>()?) } else { None };
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        if result.is_empty() {
            return Ok(());
        }
        let window = if axes.len() > 2 { None } else { Some(plane_window(&axes)?) };
        let per_unit = window.map_or(0, |window| scratch_len(&window).next_multiple_of(16));
        if let (None, Some(plan)) = (&indices, self.plan(&axes)?) {
            for_each_unit(threads, (result, output), (workspace, per_unit), |unit, plane, scratch| {
                plan.run(isa, &image[unit * input..][..input], plane, scratch);
            });
            return Ok(());
        }
        let along: Vec<PoolAxis> = axes.iter().map(along).collect();
        match indices {
            None => for_each_unit(threads, (result, output), (&mut [0_u8; 0][..], 0), |unit, plane, _| {
                pool_nd(self.pool, &along, &image[unit * input..][..input], plane, None);
            }),
            Some(indices) => {
                ensure!(indices.len() == result.len(), Fail, "there are not as many indices as values");
                let planes = result.chunks_mut(output).zip(indices.chunks_mut(output));
                let mut planes: Vec<_> = planes.collect();
                for_each_unit(threads, (&mut planes, 1), (workspace, per_unit), |unit, pairs, scratch| {
                    for (plane, values) in pairs {
                        let image = &image[unit * input..][..input];
                        let base = (unit * input) as i64;
                        let indices = Indices { values, base, column_major: self.column_major };
                        match &window {
                            Some(window) => max_and_indices(isa, window, (image, scratch), plane, indices),
                            None => pool_nd(self.pool, &along, image, plane, Some(indices)),
                        }
                    }
                });
            }
        }
        Ok(())
    }
}
