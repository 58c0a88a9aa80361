//! Feature scaling (`Scaler`): `(x - offset) * scale`, with one offset and scale per feature or for
//! all.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::ONNX_ML;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{PIECE, pieces_mut, spending};

cpu_kernels![KernelDef { domain: ONNX_ML, op: "Scaler", make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let offset = cx.attrs().find_floats("offset").unwrap_or(&[0.0]).to_vec();
    let scale = cx.attrs().find_floats("scale").unwrap_or(&[1.0]).to_vec();
    Ok(Box::new(move |cx: &mut RunCx<'_>| scaler(cx, &offset, &scale)))
}

fn scaler(cx: &mut RunCx<'_>, offset: &[f32], scale: &[f32]) -> Result<()> {
    let input = cx.input(0)?;
    let features = input.shape().last().copied().unwrap_or(1).max(1);
    for (name, given) in [("offset", offset.len()), ("scale", scale.len())] {
        let fits = given == 1 || given == features;
        ensure!(
            fits,
            InvalidArgument,
            "'{name}' has {given} elements, expected one for each of the {features} features"
        );
    }
    let output = cx.output(0)?.as_mut_slice::<f32>()?;
    let dtype = input.dtype();
    for_each_type!(dtype in [F32, F64, I32, I64], T => {
        // An input without features has no elements, so `features` of 1 splits nothing.
        let rows = input.as_slice::<T>()?.chunks_exact(features).zip(output.chunks_exact_mut(features));
        for (from, to) in spending(2 * features.min(PIECE), rows) {
            for (piece, (from, to)) in from.chunks(PIECE).zip(pieces_mut(to)).enumerate() {
                for (feature, (x, y)) in (piece * PIECE..).zip(from.iter().zip(to)) {
                    let x: f32 = num_traits::AsPrimitive::as_(*x);
                    // The modulo broadcasts a list of one element.
                    *y = (x - offset[feature % offset.len()]) * scale[feature % scale.len()];
                }
            }
        }
        Ok(())
    }, else => Err(error!(NotImplemented, "Scaler of {} is not supported", DType::name(dtype))))
}
