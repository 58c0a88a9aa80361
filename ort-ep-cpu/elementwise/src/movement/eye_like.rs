//! Matrices with ones on a diagonal (`EyeLike`).

use half::{bf16, f16};
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{self, spending};

cpu_kernels![KernelDef { op: "EyeLike", make, unaligned: &[0], ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let diagonal = cx.attrs().int("k")?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| eye_like(cx, diagonal)))
}

/// Returns the bytes of the number 1.
fn one(dtype: DType) -> Result<Vec<u8>> {
    Ok(match dtype {
        DType::F32 => 1f32.to_le_bytes().to_vec(),
        DType::F64 => 1f64.to_le_bytes().to_vec(),
        DType::F16 => f16::ONE.to_le_bytes().to_vec(),
        DType::BF16 => bf16::ONE.to_le_bytes().to_vec(),
        other => {
            let width = other.byte_size();
            let width = width.ok_or_else(|| {
                error!(NotImplemented, "a unit matrix of {} is not supported", other.name())
            })?;
            1u64.to_le_bytes()[..width.min(8)].to_vec()
        }
    })
}

fn eye_like(cx: &mut RunCx<'_>, diagonal: i64) -> Result<()> {
    let output = cx.output(0)?;
    let &[height, width] = output.shape() else {
        return Err(error!(InvalidArgument, "EyeLike needs a matrix, got {:?}", output.shape()));
    };
    let one = one(output.dtype())?;
    let to = output.bytes_mut()?;
    interrupt::fill(to, 0);
    for row in spending(2, 0..height) {
        // `i128`, because the diagonal may be any `i64`.
        let column = i128::from(diagonal) + row as i128;
        if (0..width as i128).contains(&column) {
            let start = (row * width + column as usize) * one.len();
            to[start..start + one.len()].copy_from_slice(&one);
        }
    }
    Ok(())
}
