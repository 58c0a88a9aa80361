//! Operators whose result depends only on shapes: `Shape`, `Size` and `ConstantOfShape`.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ops::tensor::geometry::shape_range;
use ort_core::tensor::ValueView;
use ort_core::{Result, ensure};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{self, PIECE, spending};

cpu_kernels![
    KernelDef { op: "ConstantOfShape", make: make_constant_of_shape, ..KernelDef::BASE },
    KernelDef { op: "Shape", make: make_shape, unaligned: &[0], ..KernelDef::BASE },
    KernelDef { op: "Size", make: |_| Ok(Box::new(size)), unaligned: &[0], ..KernelDef::BASE },
];

fn shape_of<'a>(cx: &RunCx<'a>) -> Result<&'a [usize]> {
    Ok(match cx.input_value(0)? {
        ValueView::Tensor(view) => view.shape(),
        value => value.tensor()?.shape(),
    })
}

fn make_shape(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (start, end) = (cx.attrs().int("start")?, cx.attrs().find_int("end"));
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let shape = shape_of(cx)?;
        let sizes = &shape[shape_range(start, end, shape.len())];
        let to = cx.output(0)?.as_mut_slice::<i64>()?;
        ensure!(to.len() == sizes.len(), Fail, "the shape of a tensor of shape {shape:?}");
        to.iter_mut().zip(sizes).for_each(|(to, &size)| *to = size as i64);
        Ok(())
    }))
}

fn size(cx: &mut RunCx<'_>) -> Result<()> {
    let count = shape_of(cx)?.iter().product::<usize>();
    cx.output(0)?.as_mut_slice::<i64>()?.fill(count as i64);
    Ok(())
}

fn make_constant_of_shape(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (dtype, element) = match cx.attrs().find_tensor("value") {
        Some(value) => (value.dtype(), value.view().bytes()?.to_vec()),
        None => (DType::F32, vec![0; 4]),
    };
    let mut pattern = element;
    if let (Some(bits @ 1..8), [byte]) = (dtype.bits(), pattern.as_slice()) {
        // Repeats a sub-byte element across its byte.
        let cell = byte & ((1 << bits) - 1);
        pattern = vec![(0..8 / bits).fold(0, |packed, place| packed | (cell << (place * bits)))];
    }
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let output = cx.output(0)?;
        let (count, bits) = (output.element_count(), dtype.bits().unwrap_or(8) as usize);
        let to = output.bytes_mut()?;
        match pattern.as_slice() {
            [byte] => interrupt::fill(to, *byte),
            // Equal bytes, such as zeros, fill faster than a pattern.
            pattern if pattern.iter().all(|&byte| byte == pattern[0]) => interrupt::fill(to, pattern[0]),
            pattern => {
                for piece in spending(PIECE, to.chunks_mut(PIECE * pattern.len())) {
                    piece.chunks_exact_mut(pattern.len()).for_each(|to| to.copy_from_slice(pattern));
                }
            }
        }
        // Bits after the last packed element stay zero.
        let used = count.wrapping_mul(bits) % 8;
        if let (true, Some(last)) = (used != 0, to.last_mut()) {
            *last &= (1u8 << used) - 1;
        }
        Ok(())
    }))
}
