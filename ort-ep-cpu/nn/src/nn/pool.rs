//! `MaxPool` and `AveragePool` in `float`, plane by plane.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::{Result, ensure};

use super::conv_depthwise::plane_window;
use super::pool_reference::{self, Kind};
use super::pool_windows::{planes, windows_of_pool};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::units::{for_each_unit, part_count};
use ort_cpu_kernel::workspace::{bytes_of, scratch, whole_lines};
use ort_cpu_vector::pool::{Indices, Pool, PoolAxis, PoolPlan, pool_nd, scratch_len};
use ort_cpu_vector::pool_indices::max_and_indices;
use ort_cpu_vector::simd::Isa;

cpu_kernels![
    KernelDef {
        op: "MaxPool",
        types: &[("T", TypeSet::of(&[DType::F32]))],
        rank: 1,
        left_out: &[0],
        when: |node| taps(node).is_ok_and(|taps| taps <= MOST_TAPS),
        make: |cx| make(cx, Pool::Max),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "MaxPool",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16, DType::I8, DType::U8]))],
        make: |cx| via_f32(cx, |cx| make(cx, Pool::Max)),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "AveragePool",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        make: |cx| via_f32(cx, |cx| {
            let count_include_pad = cx.attrs().flag("count_include_pad")?;
            make(cx, Pool::Average { count_include_pad })
        }),
        ..KernelDef::BASE
    },
];

/// The most taps of a window that the fast loops visit one by one. A larger window is mostly
/// outside of its image, so the reference loops take it.
const MOST_TAPS: i64 = 1 << 20;

struct Pooling {
    windows: Windows,
    pool: Pool,
    column_major: bool,
    has_indices: bool,
}

/// Returns the number of taps of a window.
fn taps(node: &NodeView<'_>) -> Result<i64> {
    let sizes = node.attrs().ints("kernel_shape")?.iter();
    // A hostile kernel saturates and goes to the reference loops.
    Ok(sizes.fold(1, |taps: i64, &size| taps.saturating_mul(size)))
}

fn make(cx: &mut CompileCx<'_>, pool: Pool) -> Result<Box<dyn Executable>> {
    if taps(&cx.node)? > MOST_TAPS {
        let kind = match pool {
            Pool::Max => Kind::Max,
            Pool::Average { count_include_pad } => Kind::Average { include_pad: count_include_pad },
        };
        return pool_reference::make::<f32>(cx, kind);
    }
    let windows = windows_of_pool(&cx.node)?;
    let column_major = cx.attrs().find_int("storage_order").unwrap_or(0) != 0;
    // By the node, because the workspace is sized before a run says which outputs it wants.
    let has_indices = cx.node.output_dtype(1).is_some();
    Ok(Box::new(Pooling { windows, pool, column_major, has_indices }))
}

impl Pooling {
    /// Returns the plan for planes of one or two axes; none for more axes.
    fn plan(&self, axes: &[WindowAxis]) -> Result<Option<PoolPlan>> {
        if axes.len() > 2 {
            return Ok(None);
        }
        // A plan has two axes; the first of a plane with one axis has no padding.
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

impl Pooling {
    /// Returns the scratch of each thread, in values: for the loops over windows, then for a plane
    /// of maxima. Indices need the maxima even if the run does not output them.
    fn scratch_len(&self, axes: &[WindowAxis]) -> Result<[usize; 2]> {
        let loops = if axes.len() > 2 { 0 } else { scratch_len(&plane_window(axes)?) };
        let plane = axes.iter().fold(1, |plane: usize, axis| plane.saturating_mul(axis.output));
        Ok([whole_lines(loops), if self.has_indices { plane } else { 0 }])
    }

    /// Computes the indices of the maxima, and the maxima if `result` is given.
    fn run_with_indices(
        &self,
        cx: &RunCx<'_>,
        (image, axes): (&[f32], &[WindowAxis]),
        workspace: &mut [f32],
        (result, indices): (Option<&mut [f32]>, &mut [i64]),
    ) -> Result<()> {
        let (isa, along): (_, Vec<PoolAxis>) = (Isa::current(), axes.iter().map(along).collect());
        let window = if axes.len() > 2 { None } else { Some(plane_window(axes)?) };
        let [loops, plane] = self.scratch_len(axes)?;
        let input: usize = axes.iter().map(|axis| axis.input).product();
        let output = plane.max(1);
        let maxima: Vec<Option<&mut [f32]>> = match result {
            Some(result) => {
                ensure!(indices.len() == result.len(), Fail, "there are not as many indices as values");
                result.chunks_mut(output).map(Some).collect()
            }
            // The operator may want the indices alone.
            None => indices.chunks(output).map(|_| None).collect(),
        };
        let mut planes: Vec<_> = maxima.into_iter().zip(indices.chunks_mut(output)).collect();
        let scratch = (workspace, loops + plane);
        for_each_unit(cx.threads(), (&mut planes, 1), scratch, |unit, pairs, scratch| {
            let (scratch, spare) = scratch.split_at_mut(loops);
            for (maxima, values) in pairs {
                // Maxima that no one reads go to scratch.
                let maxima = maxima.as_deref_mut().unwrap_or(&mut *spare);
                let image = &image[unit * input..][..input];
                // The standard counts indices through the whole tensor.
                let base = (unit * input) as i64;
                let indices = Indices { values, base, column_major: self.column_major };
                match &window {
                    // The loops over two axes find maxima by rows first; more axes are rare and go
                    // window by window.
                    Some(window) => max_and_indices(isa, window, (image, scratch), maxima, indices),
                    None => pool_nd(self.pool, &along, image, maxima, Some(indices)),
                }
            }
        });
        Ok(())
    }
}

impl Executable for Pooling {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let (units, axes) = planes(&self.windows, shapes.input(0))?;
        let [loops, plane] = self.scratch_len(&axes)?;
        let parts = part_count(shapes.threads, units);
        bytes_of::<f32>(loops.saturating_add(plane).saturating_mul(parts))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let workspace = scratch::<f32>(cx.workspace()?)?;
        let image = cx.input(0)?;
        let (_, axes) = planes(&self.windows, image.shape())?;
        let image = image.as_slice::<f32>()?;
        let result = if cx.wants(0) { Some(cx.output(0)?.as_mut_slice::<f32>()?) } else { None };
        if cx.wants(1) {
            let indices = cx.output(1)?.as_mut_slice::<i64>()?;
            return self.run_with_indices(cx, (image, &axes), workspace, (result, indices));
        }
        let Some(result) = result else { return Ok(()) };
        let input: usize = axes.iter().map(|axis| axis.input).product();
        let output: usize = axes.iter().map(|axis| axis.output).product();
        let (isa, threads) = (Isa::current(), cx.threads());
        match self.plan(&axes)? {
            Some(plan) => {
                let scratch = (workspace, self.scratch_len(&axes)?.into_iter().sum());
                for_each_unit(threads, (result, output), scratch, |unit, plane, scratch| {
                    plan.run(isa, &image[unit * input..][..input], plane, scratch);
                });
            }
            None => {
                let along: Vec<PoolAxis> = axes.iter().map(along).collect();
                for_each_unit(threads, (result, output), (&mut [0_u8; 0][..], 0), |unit, plane, _| {
                    pool_nd(self.pool, &along, &image[unit * input..][..input], plane, None);
                });
            }
        }
        Ok(())
    }
}
