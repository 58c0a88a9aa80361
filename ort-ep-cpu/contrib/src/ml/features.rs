//! Feature selection and thresholding: `ArrayFeatureExtractor` and `Binarizer`.

use ort_core::dtype::DType;
use ort_core::ep::{IoShapes, KernelDef, OutputsFrom, RunCx};
use ort_core::spec::ONNX_ML;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_threads::interrupt::spending;

cpu_kernels![
    KernelDef {
        domain: ONNX_ML,
        op: "ArrayFeatureExtractor",
        outputs: OutputsFrom::Kernel,
        make: |_| {
            // Each index as `i64` and as `usize`.
            let bound = |shapes: &IoShapes<'_>| elements(shapes.input(1)).saturating_mul(16);
            Ok(Box::new(WithHeap { bound, run: extract }))
        },
        ..KernelDef::BASE
    },
    KernelDef {
        domain: ONNX_ML,
        op: "Binarizer",
        make: |cx| {
            let threshold = cx.attrs().float("threshold")?;
            Ok(Box::new(move |cx: &mut RunCx<'_>| binarize(cx, threshold)))
        },
        ..KernelDef::BASE
    },
];

fn extract(cx: &mut RunCx<'_>) -> Result<()> {
    let input = cx.input(0)?;
    let Some((&size, outer)) = input.shape().split_last() else {
        return Err(error!(InvalidArgument, "ArrayFeatureExtractor needs rank 1 or more, got rank 0"));
    };
    let columns = spending(1, cx.input(1)?.to_ints()?);
    let columns = columns.map(|column| usize::try_from(column).ok().filter(|&column| column < size));
    // One negative or too large index makes this none.
    let columns: Option<Vec<usize>> = columns.collect();
    let columns =
        columns.ok_or_else(|| error!(InvalidArgument, "an index is out of range for {size} features"))?;
    ensure!(!columns.is_empty(), InvalidArgument, "no feature is asked for");
    // A rank-1 input is one row.
    let mut shape: Shape = if outer.is_empty() { [1].as_slice().into() } else { outer.into() };
    shape.push(columns.len());
    if let Ok(strings) = input.strings() {
        // `size` is not 0, because some column is below it.
        let picked = strings.chunks(size).flat_map(|row| columns.iter().map(|&column| row[column].clone()));
        let picked = cx.strings(&shape, picked)?;
        return cx.set(0, picked);
    }
    let width = input.dtype().byte_size().unwrap_or(1);
    let mut output = cx.allocate(input.dtype(), &shape)?;
    let rows = input.bytes()?.chunks_exact(size * width);
    let rows = rows.zip(output.bytes_mut()?.chunks_exact_mut(columns.len() * width));
    for (row, to) in rows {
        for (&column, to) in spending(4, columns.iter().zip(to.chunks_exact_mut(width))) {
            to.copy_from_slice(&row[column * width..(column + 1) * width]);
        }
    }
    let output = output.finish()?;
    cx.set(0, output)
}

fn binarize(cx: &mut RunCx<'_>, threshold: f32) -> Result<()> {
    let input = cx.input(0)?;
    let dtype = input.dtype();
    let output = cx.output(0)?;
    for_each_type!(dtype in [F32, F64, I32, I64], T => {
        for (x, y) in spending(1, input.as_slice::<T>()?.iter().zip(output.as_mut_slice::<T>()?)) {
            // In `f64`, so that `i32` and `f32` elements compare exactly with the threshold.
            let value: f64 = num_traits::AsPrimitive::as_(*x);
            *y = u8::from(value > f64::from(threshold)) as T;
        }
        Ok(())
    }, else => Err(error!(NotImplemented, "Binarizer of {} is not supported", DType::name(dtype))))
}
