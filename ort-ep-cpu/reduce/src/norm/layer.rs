//! `LayerNormalization` and `RMSNormalization`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx, Unary};
use ort_core::tensor::{Shape, TensorMut, TensorView};
use ort_core::{Result, ensure, error, for_each_type};

use super::row::{Row, RowNorm, for_each_row};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::layout::{broadcast_strides, normalize_axis};
use ort_cpu_kernel::number::Number;
use ort_cpu_threads::interrupt::{PIECE, pieces_mut, spend, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::simd::Isa;

cpu_kernels![
    KernelDef { op: "LayerNormalization", in_place: &[(0, 0)], make: make_layer, ..KernelDef::BASE },
    KernelDef {
        op: "RMSNormalization",
        rank: 1,
        in_place: &[(0, 0)],
        when: |node| node.dtype(0) == node.dtype(1),
        make: make_rms,
        ..KernelDef::BASE
    },
    // An input and an output of different types cannot share memory.
    KernelDef { op: "RMSNormalization", make: make_rms, ..KernelDef::BASE },
    // 16-bit floats are computed in `float`, with SIMD.
    KernelDef {
        op: "LayerNormalization",
        rank: 2,
        types: &[("T", HALF)],
        make: |cx| via_f32(cx, make_layer),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "RMSNormalization",
        rank: 2,
        types: &[("T", HALF), ("V", HALF)],
        make: |cx| via_f32(cx, make_rms),
        ..KernelDef::BASE
    },
];

const HALF: TypeSet = TypeSet::of(&[DType::F16, DType::BF16]);

#[derive(Clone, Copy)]
struct LayerNormSettings {
    axis: i64,
    epsilon: f64,
    isa: Isa,
}

fn settings(cx: &CompileCx<'_>) -> Result<LayerNormSettings> {
    let (axis, epsilon) = (cx.attrs().int("axis")?, f64::from(cx.attrs().float("epsilon")?));
    Ok(LayerNormSettings { axis, epsilon, isa: Isa::current() })
}

fn make_layer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let settings = settings(cx)?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let dtype = cx.input(1)?.dtype();
        for_each_type!(dtype in FLOATS, T => layer::<T>(cx, settings), else => {
            Err(error!(NotImplemented, "normalizing {}", dtype.name()))
        })
    }))
}

fn make_rms(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let settings = settings(cx)?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let scale = cx.input(1)?.dtype();
        let dtype = if cx.in_place(0).is_some() { scale } else { cx.input(0)?.dtype() };
        for_each_type!(scale in FLOATS, V => {
            if dtype == scale {
                return rms::<V>(cx, settings);
            }
            for_each_type!(dtype in FLOATS, T => rms_mixed::<T, V>(cx, settings), else => {
                Err(error!(NotImplemented, "normalizing {}", dtype.name()))
            })
        }, else => Err(error!(NotImplemented, "normalizing to {}", scale.name())))
    }))
}

/// A scale or bias, broadcast to the rows of the input.
struct Parameter<'a, T> {
    elements: &'a [T],
    /// The strides over the input's shape; none if the parameter is simply one row.
    strides: Option<Shape>,
    shape: &'a [usize],
    row_len: usize,
}

impl<'a, T: Number> Parameter<'a, T> {
    fn new(view: TensorView<'a>, shape: &'a [usize], axis: usize) -> Result<Parameter<'a, T>> {
        let (own, rank) = (view.shape(), shape.len());
        let fits =
            own.len() <= rank && own.iter().zip(&shape[rank - own.len()..]).all(|(&a, &b)| a == b || a == 1);
        ensure!(fits, InvalidArgument, "a scale or bias of shape {own:?} does not broadcast to {shape:?}");
        let row_len = shape[axis..].iter().product();
        // If all axes before the normalized ones have size 1, one row serves all.
        let lead = own.len().saturating_sub(rank - axis);
        let one_row = own[..lead].iter().all(|&size| size == 1) && view.element_count() == row_len;
        let strides = (!one_row).then(|| broadcast_strides(own, rank));
        Ok(Parameter { elements: view.as_slice()?, strides, shape, row_len })
    }

    /// Returns the elements for the row at `index`, gathered into `buffer` if they are not
    /// contiguous.
    fn row<'s>(&'s self, index: usize, buffer: &'s mut Vec<T>) -> &'s [T] {
        let Some(strides) = &self.strides else { return self.elements };
        buffer.clear();
        buffer.extend(spending(2, 0..self.row_len).map(|column| {
            let (mut linear, mut offset) = (index * self.row_len + column, 0);
            for (&size, &stride) in self.shape.iter().zip(strides).rev() {
                offset += linear % size * stride;
                linear /= size;
            }
            self.elements[offset]
        }));
        buffer
    }
}

fn layer<T: Row>(cx: &mut RunCx<'_>, settings: LayerNormSettings) -> Result<()> {
    let LayerNormSettings { epsilon, isa, .. } = settings;
    let (shape, axis) = rows_of(cx, settings)?;
    let row_len: usize = shape[axis..].iter().product();
    let scale = Parameter::<T>::new(cx.input(1)?, shape, axis)?;
    let bias = cx.find_input(2).map(|bias| Parameter::<T>::new(bias, shape, axis)).transpose()?;
    let threads = cx.threads();
    let statistics = [1, 2].map(|index| cx.wants(index).then(|| cx.output(index)));
    let data = cx.unary::<T>(0, 0)?;
    let rows: &[T] = match &data {
        Unary::Apart(from, _) => from,
        Unary::InPlace(both) => both,
    };
    // The statistics come first, because the result may overwrite the input.
    for (index, output) in statistics.into_iter().enumerate() {
        let Some(output) = output else { continue };
        write_statistics(threads, output?, |row| {
            // Computed once more than the normalization needs: models rarely ask for statistics.
            let (mean, variance) = T::moments(isa, &rows[row * row_len..][..row_len]);
            if index == 0 { mean } else { 1.0 / (variance + epsilon).sqrt() }
        })?;
    }
    for_each_row(threads, data, row_len, |index, from, to| {
        // These stay empty unless scale or bias is broadcast in a way that must be gathered.
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let bias = bias.as_ref().map(|bias| bias.row(index, &mut second));
        let scale = scale.row(index, &mut first);
        T::layer_norm(isa, RowNorm { epsilon, scale, bias }, from, to);
    });
    Ok(())
}

/// Returns the shape of input and output 0, and the first normalized axis.
fn rows_of<'a>(cx: &RunCx<'a>, settings: LayerNormSettings) -> Result<(&'a [usize], usize)> {
    let shape = cx.output_shape(0).ok_or_else(|| error!(Fail, "output 0 has no memory ready"))?;
    Ok((shape, normalize_axis(settings.axis, shape.len())?))
}

fn write_statistics(
    threads: usize,
    output: TensorMut<'_>,
    value: impl Fn(usize) -> f64 + Sync,
) -> Result<()> {
    let dtype = output.dtype();
    for_each_type!(dtype in FLOATS, U => {
        for_each_row_chunk_mut(threads, output.as_mut_slice::<U>()?, 1, 16, |first, piece| {
            piece.iter_mut().enumerate().for_each(|(index, x)| *x = U::from_f64(value(first + index)));
        });
        Ok(())
    }, else => Err(error!(NotImplemented, "statistics of type {} are not supported", dtype.name())))
}

fn rms<T: Row>(cx: &mut RunCx<'_>, settings: LayerNormSettings) -> Result<()> {
    let LayerNormSettings { epsilon, isa, .. } = settings;
    let (shape, axis) = rows_of(cx, settings)?;
    let row_len: usize = shape[axis..].iter().product();
    let scale = Parameter::<T>::new(cx.input(1)?, shape, axis)?;
    for_each_row(cx.threads(), cx.unary::<T>(0, 0)?, row_len, |index, from, to| {
        let mut buffer = Vec::new();
        let scale = scale.row(index, &mut buffer);
        T::rms_norm(isa, RowNorm { epsilon, scale, bias: None }, from, to);
    });
    Ok(())
}

/// RMS normalization with an input and an output of different types.
fn rms_mixed<T: Row, V: Row>(cx: &mut RunCx<'_>, settings: LayerNormSettings) -> Result<()> {
    let LayerNormSettings { epsilon, isa, .. } = settings;
    let (shape, axis) = rows_of(cx, settings)?;
    let row_len: usize = shape[axis..].iter().product();
    let scale = Parameter::<V>::new(cx.input(1)?, shape, axis)?;
    let from = cx.input(0)?.as_slice::<T>()?;
    let to = cx.output(0)?.as_mut_slice::<V>()?;
    if row_len == 0 {
        return Ok(());
    }
    let mut buffer = Vec::new();
    for (index, (from, to)) in from.chunks_exact(row_len).zip(to.chunks_exact_mut(row_len)).enumerate() {
        spend(4 * row_len.min(PIECE));
        let factor = 1.0 / (T::sum_squares(isa, from) / row_len as f64 + epsilon).sqrt();
        let scale = scale.row(index, &mut buffer);
        for ((from, to), scale) in from.chunks(PIECE).zip(pieces_mut(to)).zip(scale.chunks(PIECE)) {
            for ((x, y), scale) in from.iter().zip(to).zip(scale) {
                *y = V::from_f64(x.to_f64() * factor * scale.to_f64());
            }
        }
    }
    Ok(())
}
