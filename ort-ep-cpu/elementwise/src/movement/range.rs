//! Arithmetic sequences (`Range`).
//!
//! Each element is computed from its index, so rounding errors do not accumulate. Half-precision
//! types compute in `f32`, or in `f64` if `stash_type` asks for it.

use half::{bf16, f16};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, dtype::DType, dtype::Element, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{PIECE, pieces_mut};

cpu_kernels![KernelDef { op: "Range", make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let in_double = cx.attrs().int("stash_type")? == i64::from(DType::F64.onnx_code());
    Ok(Box::new(move |cx: &mut RunCx<'_>| match cx.input(0)?.dtype() {
        DType::F32 => {
            fill::<f32>(cx, |start, delta, index| (f64::from(start) + index as f64 * f64::from(delta)) as f32)
        }
        DType::F64 => fill::<f64>(cx, |start, delta, index| start + index as f64 * delta),
        DType::F16 if in_double => fill::<f16>(cx, |start, delta, index| {
            f16::from_f64(start.to_f64() + index as f64 * delta.to_f64())
        }),
        DType::F16 => fill::<f16>(cx, |start, delta, index| {
            f16::from_f32(start.to_f32() + index as f32 * delta.to_f32())
        }),
        DType::BF16 if in_double => fill::<bf16>(cx, |start, delta, index| {
            bf16::from_f64(start.to_f64() + index as f64 * delta.to_f64())
        }),
        DType::BF16 => fill::<bf16>(cx, |start, delta, index| {
            bf16::from_f32(start.to_f32() + index as f32 * delta.to_f32())
        }),
        DType::I16 => {
            // The cast keeps the low bits of the index, which are all that a wrapping product
            // needs.
            fill::<i16>(cx, |start, delta, index| start.wrapping_add(delta.wrapping_mul(index as i16)))
        }
        DType::I32 => {
            fill::<i32>(cx, |start, delta, index| start.wrapping_add(delta.wrapping_mul(index as i32)))
        }
        DType::I64 => {
            fill::<i64>(cx, |start, delta, index| start.wrapping_add(delta.wrapping_mul(index as i64)))
        }
        other => Err(error!(NotImplemented, "a Range of {} is not supported", other.name())),
    }))
}

fn fill<T: Element>(cx: &mut RunCx<'_>, at: impl Fn(T, T, usize) -> T) -> Result<()> {
    let (start, delta) = (cx.input(0)?.to_scalar::<T>()?, cx.input(2)?.to_scalar::<T>()?);
    let to = cx.output(0)?.as_mut_slice::<T>()?;
    for (piece, to) in pieces_mut(to).enumerate() {
        (piece * PIECE..).zip(to).for_each(|(index, to)| *to = at(start, delta, index));
    }
    Ok(())
}
