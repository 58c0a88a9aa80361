//! `GridAttention`: attention to keys on a grid, whose biases are added to blocks of scores.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, Precision, RunCx};
use ort_core::ops::nn::attention::problem::{self, GridProblem};
use ort_core::spec::RUNTIME;

use ort_cpu_attention::{Attention, Compute, Elements, GridBias, HiddenKeys, Rows, Scores, grid_scratch_len};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::workspace::{bytes_of, scratch};

/// The kernel for half precision.
const BASE: KernelDef = KernelDef {
    domain: RUNTIME,
    op: "GridAttention",
    types: &[("T", TypeSet::of(&[DType::F16, DType::BF16]))],
    make: |cx| via_f32(cx, make::<f32>),
    ..KernelDef::BASE
};

cpu_kernels![
    BASE,
    KernelDef { types: &[("T", TypeSet::of(&[DType::F32]))], in_place: &[(0, 0)], make: make::<f32>, ..BASE },
    KernelDef { types: &[("T", TypeSet::of(&[DType::F64]))], make: make::<f64>, ..BASE },
];

struct GridAttention<T> {
    node: problem::GridAttention,
    precision: Precision,
    element: std::marker::PhantomData<fn() -> T>,
}

fn make<T: Compute>(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let node = problem::GridAttention::new(cx.attrs())?;
    Ok(Box::new(GridAttention::<T> { node, precision: cx.precision, element: std::marker::PhantomData }))
}

impl<T: Compute> GridAttention<T> {
    fn cpu(&self, threads: usize) -> Cpu {
        Cpu::with_threads(threads).in_precision(self.precision)
    }
}

impl<T: Compute> Executable for GridAttention<T> {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let GridProblem { attention, grid } =
            self.node.problem(|index| shapes.inputs.get(index)?.as_deref())?;
        bytes_of::<T>(grid_scratch_len::<T>(&attention.sizes(), self.cpu(shapes.threads), false, grid))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = self.cpu(cx.threads());
        // Queries in the output's place are read there, and the output has their shape.
        let q = if cx.in_place(0) == Some(0) { None } else { Some(cx.input(0)?) };
        let GridProblem { attention: problem, grid } = self.node.problem(|index| match (index, q) {
            (0, None) => cx.output_shape(0),
            _ => cx.find_input(index).map(|view| view.shape()),
        })?;
        let sizes = problem.sizes();
        let [k, v, rows, columns] = [cx.input(1)?, cx.input(2)?, cx.input(3)?, cx.input(4)?];
        let bias = GridBias::new(&sizes, grid, [rows.as_slice::<T>()?, columns.as_slice::<T>()?])?;
        let rows = |values, layout: problem::HeadLayout| Rows {
            elements: Elements::Full(values),
            strides: layout.rows_of(layout.size).strides,
        };
        let queries = match q {
            Some(q) => Some(rows(q.as_slice::<T>()?, problem.q)),
            None => None,
        };
        let attention = Attention {
            sizes,
            queries,
            keys: rows(k.as_slice::<T>()?, problem.k),
            values: rows(v.as_slice::<T>()?, problem.v),
            scale: self.node.scale().map_or_else(|| T::inverse_root(sizes.size), f64::from),
            softcap: 0.0,
            visible: &|_| 0..sizes.keys,
            mask: Some(&bias),
            sinks: None,
            hidden: if self.node.hidden_is_nan() { HiddenKeys::ExcludedOrNan } else { HiddenKeys::Excluded },
        };
        let strides = problem.q.rows_of(sizes.value_size).strides;
        let loops = scratch(cx.workspace()?)?;
        attention.run(cpu, (cx.output(0)?.as_mut_slice()?, strides), Scores::Unread, loops)
    }
}
