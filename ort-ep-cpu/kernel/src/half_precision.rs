//! Half-precision kernels on top of `float` ones: inputs are widened, and results are rounded once.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, OutputSlot, RunCx};
use ort_core::tensor::{TensorMut, TensorView, ValueView, element_count};
use ort_core::{Result, for_each_type};
use smallvec::SmallVec;

use crate::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::convert;
use ort_cpu_vector::simd::Isa;

/// Values in one task of a conversion.
const CHUNK: usize = 1 << 14;

/// The constructor of a kernel.
pub type Make = fn(&mut CompileCx<'_>) -> Result<Box<dyn Executable>>;

/// Creates the kernel of a node whose `float16`, `bfloat16`, `int8` or `uint8` inputs and outputs
/// are converted from and to `float`. `make` creates the kernel for `float`.
///
/// Only operators that select values, such as `MaxPool`, may widen 8-bit integers.
pub fn via_f32(cx: &mut CompileCx<'_>, make: Make) -> Result<Box<dyn Executable>> {
    via_f32_except(cx, &[], &[], make)
}

/// Like [`via_f32`], but the kernel takes some inputs and outputs as they are.
pub fn via_f32_except(
    cx: &mut CompileCx<'_>,
    inputs_as_they_are: &[usize],
    outputs_as_they_are: &[usize],
    make: Make,
) -> Result<Box<dyn Executable>> {
    let is_narrow =
        |dtype: Option<DType>| matches!(dtype, Some(DType::F16 | DType::BF16 | DType::I8 | DType::U8));
    // First, because the kernel consumes the constants that it packs.
    let inner = make(cx)?;
    let node = cx.node.node;
    // A consumed constant was packed, so runs do not convert it.
    let inputs: SmallVec<[bool; 8]> = (0..node.inputs.len())
        .map(|index| is_narrow(cx.node.dtype(index)) && !cx.is_consumed(index))
        .enumerate()
        .map(|(index, narrow)| narrow && !inputs_as_they_are.contains(&index))
        .collect();
    let outputs: SmallVec<[bool; 4]> = (0..node.outputs.len())
        .map(|index| is_narrow(cx.node.output_dtype(index)) && !outputs_as_they_are.contains(&index))
        .collect();
    // `float` nodes get the kernel itself, without a layer around it.
    if !inputs.iter().chain(&outputs).any(|narrow| *narrow) {
        return Ok(inner);
    }
    Ok(Box::new(ViaF32 { inner, inputs, outputs }))
}

struct ViaF32 {
    inner: Box<dyn Executable>,
    inputs: SmallVec<[bool; 8]>,
    outputs: SmallVec<[bool; 4]>,
}

/// Returns the scratch of a tensor in values, in whole cache lines.
fn room(shape: &[usize]) -> Result<usize> {
    Ok(element_count(shape)?.next_multiple_of(16))
}

impl Executable for ViaF32 {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let mut values = 0;
        let sides = [(&self.inputs[..], shapes.inputs), (&self.outputs[..], shapes.outputs)];
        for (narrow, shape) in sides.into_iter().flat_map(|(narrow, shapes)| narrow.iter().zip(shapes)) {
            // Each converted tensor has a part of its own, before the inner kernel's workspace.
            if let (true, Some(shape)) = (*narrow, shape) {
                values += room(shape)?;
            }
        }
        Ok(bytes_of::<f32>(values)? + self.inner.workspace(shapes)?)
    }

    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        self.inner.heap(shapes)
    }

    fn kernels(&self) -> Option<String> {
        self.inner.kernels()
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (threads, control) = (cx.threads(), cx.control());
        let mut rest = cx.workspace()?;
        // Declared first, because the context below borrows it as long as the inputs.
        let mut results: SmallVec<[Option<(TensorMut<'_>, &mut [f32])>; 4]> = SmallVec::new();
        let mut inputs: SmallVec<[Option<ValueView<'_>>; 16]> = SmallVec::new();
        for index in 0..cx.input_count() {
            let Some(view) = cx.find_input(index) else {
                inputs.push(None);
                continue;
            };
            let view = match self.inputs.get(index) {
                Some(true) => {
                    let bytes = take(&mut rest, bytes_of::<f32>(room(view.shape())?)?)?;
                    let wide = &mut scratch::<f32>(bytes)?[..view.element_count()];
                    widen(threads, view, wide)?;
                    TensorView::host(DType::F32, view.shape(), bytemuck::cast_slice(wide))
                }
                _ => view,
            };
            inputs.push(Some(ValueView::Tensor(view)));
        }
        let mut others: SmallVec<[Option<TensorMut<'_>>; 4]> = SmallVec::new();
        for index in 0..cx.output_count() {
            let tensor = if cx.wants(index) { Some(cx.output(index)?) } else { None };
            match (self.outputs.get(index), tensor) {
                (Some(true), Some(tensor)) => {
                    let bytes = take(&mut rest, bytes_of::<f32>(room(tensor.shape())?)?)?;
                    let wide = &mut scratch::<f32>(bytes)?[..tensor.element_count()];
                    results.push(Some((tensor, wide)));
                    others.push(None);
                }
                (_, tensor) => {
                    results.push(None);
                    others.push(tensor);
                }
            }
        }
        // The inner kernel must know which outputs share memory with inputs that are not converted.
        let in_place: SmallVec<[Option<usize>; 4]> =
            (0..cx.output_count()).map(|index| cx.in_place(index)).collect();
        let slots = results.iter_mut().zip(others).zip(in_place).map(|((result, other), in_place)| {
            let tensor = match result {
                Some((tensor, wide)) => {
                    Some(TensorMut::host(DType::F32, tensor.shape(), bytemuck::cast_slice_mut(wide)))
                }
                None => other,
            };
            match tensor {
                Some(tensor) => OutputSlot::Ready { tensor: Some(tensor), in_place },
                None => OutputSlot::Unwanted,
            }
        });
        // The rest of the workspace is the inner kernel's, which asked for it after the converted
        // tensors.
        self.inner.run(&mut RunCx::new(inputs, slots, rest, control))?;
        for (tensor, wide) in results.into_iter().flatten() {
            narrow(threads, wide, tensor)?;
        }
        Ok(())
    }
}

/// Widens a tensor to `float`.
pub fn widen(threads: usize, view: TensorView<'_>, wide: &mut [f32]) -> Result<()> {
    let (isa, dtype) = (Isa::current(), view.dtype());
    for_each_type!(dtype in [F16, BF16, I8, U8, F32], T => {
        let from = view.to_cow::<T>()?;
        for_each_chunk_mut(threads, wide, CHUNK, |chunk, to| {
            to_f32(isa, &from[chunk * CHUNK..][..to.len()], to);
        });
        Ok(())
    }, else => Err(ort_core::error!(Fail, "{} is not widened", dtype.name())))
}

/// Rounds `float` values to the type of a tensor.
pub fn narrow(threads: usize, wide: &[f32], tensor: TensorMut<'_>) -> Result<()> {
    let (isa, dtype) = (Isa::current(), tensor.dtype());
    for_each_type!(dtype in [F16, BF16, I8, U8, F32], T => {
        let to = tensor.as_mut_slice::<T>()?;
        for_each_chunk_mut(threads, to, CHUNK, |chunk, to| {
            <T as Narrow>::from_f32(isa, &wide[chunk * CHUNK..][..to.len()], to);
        });
        Ok(())
    }, else => Err(ort_core::error!(Fail, "{} is not narrowed", dtype.name())))
}

fn to_f32<T: Narrow>(isa: Isa, from: &[T], to: &mut [f32]) {
    <T as Narrow>::to_f32(isa, from, to);
}

/// A type that kernels widen to `float`.
pub trait Narrow: Sized {
    /// Widens values.
    fn to_f32(isa: Isa, from: &[Self], to: &mut [f32]);
    /// Rounds values to this type.
    fn from_f32(isa: Isa, from: &[f32], to: &mut [Self]);

    /// Returns values in `float`, with `scratch` as their memory if they are widened.
    fn widened<'a>(isa: Isa, from: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
        let wide = &mut scratch[..from.len()];
        Self::to_f32(isa, from, wide);
        wide
    }

    /// Returns the values of scratch that [`in_f32`](Self::in_f32) takes.
    fn scratch_len(from: usize, to: usize) -> usize {
        from.saturating_add(to)
    }

    /// Calls `compute` with `from` widened, and rounds its result to `to`.
    fn in_f32(
        isa: Isa,
        from: &[Self],
        to: &mut [Self],
        scratch: &mut [f32],
        compute: impl FnOnce(&[f32], &mut [f32]),
    ) {
        let (wide, result) = scratch.split_at_mut(from.len());
        let result = &mut result[..to.len()];
        Self::to_f32(isa, from, wide);
        compute(wide, result);
        Self::from_f32(isa, result, to);
    }
}

macro_rules! narrow_types {
    ($($native:ty, $widen:path, $narrow:path;)*) => {$(
        impl Narrow for $native {
            fn to_f32(isa: Isa, from: &[Self], to: &mut [f32]) {
                $widen(isa, from, to);
            }

            fn from_f32(isa: Isa, from: &[f32], to: &mut [Self]) {
                $narrow(isa, from, to);
            }
        }
    )*};
}

narrow_types! {
    half::f16, convert::f32_from_f16, convert::f16_from_f32;
    half::bf16, convert::f32_from_bf16, convert::bf16_from_f32;
    i8, convert::f32_from_i8, convert::i8_from_f32;
    u8, convert::f32_from_u8, convert::u8_from_f32;
}

impl Narrow for f32 {
    fn to_f32(_: Isa, from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn from_f32(_: Isa, from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn widened<'a>(_: Isa, from: &'a [f32], _: &'a mut [f32]) -> &'a [f32] {
        from
    }

    fn scratch_len(_: usize, _: usize) -> usize {
        0
    }

    fn in_f32(_: Isa, from: &[f32], to: &mut [f32], _: &mut [f32], compute: impl FnOnce(&[f32], &mut [f32])) {
        compute(from, to);
    }
}
