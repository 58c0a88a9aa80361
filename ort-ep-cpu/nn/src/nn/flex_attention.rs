//! `FlexAttention`, unfused.
//!
//! Its subgraphs see all scores as one tensor, so we compute them at once.

use num_traits::ToPrimitive;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, NewTensor, OutputsFrom, RunCx};
use ort_core::spec::ONNX_PREVIEW;
use ort_core::tensor::{Tensor, TensorView, Value, ValueView, element_count};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_gemm::{Cpu, RhsSource};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_threads::interrupt::{self, pieces_mut, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![KernelDef {
    domain: ONNX_PREVIEW,
    op: "FlexAttention",
    outputs: OutputsFrom::Kernel,
    make,
    ..KernelDef::BASE
}];

struct Flex {
    /// The type to which scores and weights are rounded; the subgraphs see it.
    precision: DType,
    scale: Option<f32>,
    score_mod: Option<usize>,
    prob_mod: Option<usize>,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let subgraph = |name: &str| cx.node.node.subgraphs.iter().position(|subgraph| subgraph.attr == name);
    let (score_mod, prob_mod) = (subgraph("score_mod"), subgraph("prob_mod"));
    let double = cx.node.dtype(0) == Some(DType::F64);
    let default = if double { DType::F64 } else { DType::F32 };
    let precision = match cx.attrs().find_int("softmax_precision") {
        None => Some(default),
        Some(code) => i32::try_from(code).ok().and_then(DType::from_onnx).filter(|dtype| dtype.is_float()),
    };
    let precision =
        precision.ok_or_else(|| error!(InvalidGraph, "softmax_precision names no type of floating point"))?;
    let flex = Flex { precision, scale: cx.attrs().find_float("scale"), score_mod, prob_mod };
    // A softmax in double needs scores in double.
    if double || precision == DType::F64 {
        return Ok(Box::new(move |cx: &mut RunCx<'_>| run::<f64>(cx, &flex)));
    }
    Ok(Box::new(move |cx: &mut RunCx<'_>| run::<f32>(cx, &flex)))
}

/// Reads elements in the compute type.
fn read<T: Real>(view: TensorView<'_>) -> Result<Vec<T>> {
    let dtype = view.dtype();
    for_each_type!(dtype in FLOATS, E => {
        let wide = |x: E| T::from_f64(ToPrimitive::to_f64(&x).unwrap_or(f64::NAN));
        Ok(spending(2, view.to_vec::<E>()?).map(wide).collect())
    }, else => Err(error!(InvalidArgument, "attention of type {dtype}")))
}

/// Rounds a tensor to the softmax's type and passes it through a subgraph, if there is one. The
/// subgraph must return the same shape and type.
fn modify<T: Real>(
    cx: &mut RunCx<'_>,
    subgraph: Option<usize>,
    tensor: NewTensor,
    precision: DType,
) -> Result<Tensor> {
    let mut tensor = tensor.finish()?;
    if tensor.dtype() != precision {
        let mut rounded = cx.allocate(precision, tensor.shape())?;
        write::<T>(tensor.view().as_slice::<T>()?, (&mut rounded, precision))?;
        tensor = rounded.finish()?;
    }
    let Some(subgraph) = subgraph else { return Ok(tensor) };
    let results = cx.run_subgraph(subgraph, &[ValueView::Tensor(tensor.view())])?;
    match results.into_iter().next() {
        Some(Value::Tensor(result)) if result.shape() == tensor.shape() && result.dtype() == precision => {
            Ok(result)
        }
        _ => Err(error!(InvalidGraph, "a modifier must give one tensor of its input's shape and type")),
    }
}

/// Writes values of the compute type as elements of `dtype`.
fn write<T: Real>(from: &[T], (to, dtype): (&mut NewTensor, DType)) -> Result<()> {
    for_each_type!(dtype in FLOATS, E => {
        for (to, from) in spending(2, to.as_mut_slice::<E>()?.iter_mut().zip(from)) {
            *to = <E as num_traits::NumCast>::from(from.to_f64()).unwrap_or(*to);
        }
        Ok(())
    }, else => Err(error!(InvalidArgument, "attention of type {dtype}")))
}

fn run<T: Real>(cx: &mut RunCx<'_>, flex: &Flex) -> Result<()> {
    let cpu = Cpu::with_threads(cx.threads());
    let (q, k, v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (&[batch, heads, queries, size], &[_, key_heads, keys, _], &[.., value_size]) =
        (q.shape(), k.shape(), v.shape())
    else {
        return Err(error!(InvalidArgument, "Q, K and V must have rank 4"));
    };
    let fits = key_heads > 0
        && heads.is_multiple_of(key_heads)
        && k.shape() == [batch, key_heads, keys, size]
        && v.shape() == [batch, key_heads, keys, value_size];
    ensure!(fits, InvalidArgument, "queries, keys and values do not match");
    let dtype = q.dtype();
    let first = T::workspace_len(cpu, [queries, keys, size], RhsSource::Strided);
    let second = T::workspace_len(cpu, [queries, value_size, keys], RhsSource::Rows);
    // The heap memory of this function: inputs and results in the compute type, the GEMM workspace,
    // and scores. Scores count twice because `read` may hold them in their own type and in the
    // compute type.
    let scores = element_count(&[batch, heads, queries, keys])?.saturating_mul(2);
    let results = element_count(&[batch, heads, queries, value_size])?;
    let inputs = [q, k, v].map(|view| view.element_count());
    let numbers = inputs.into_iter().chain([first.max(second), results]).fold(scores, usize::saturating_add);
    let _held = cx.reserve(numbers.saturating_mul(size_of::<T>()))?;
    let (q, k, v) = (read::<T>(q)?, read::<T>(k)?, read::<T>(v)?);
    let scale = flex.scale.map_or(1.0 / (size as f64).sqrt(), f64::from);
    // Grouped-query attention: consecutive query heads share a key head.
    let key_head = |index: usize| index / heads * key_heads + index % heads / (heads / key_heads);
    let mut workspace = vec![T::ZERO; first.max(second)];
    let mut scores = cx.allocate(T::DTYPE, &[batch, heads, queries, keys])?;
    let plane = (queries * keys).max(1);
    for (index, scores) in scores.as_mut_slice::<T>()?.chunks_mut(plane).enumerate() {
        let rows = Matrix::rows(&q[index * queries * size..][..queries * size], queries, size);
        let columns = Matrix::transposed(&k[key_head(index) * keys * size..][..keys * size], size, keys);
        T::multiply(cpu, rows, Rhs::Plain(columns), GemmTarget::write(&mut *scores, keys), &mut workspace)?;
        pieces_mut(scores).flatten().for_each(|score| *score = *score * T::from_f64(scale));
    }
    let scores = modify::<T>(cx, flex.score_mod, scores, flex.precision)?;
    let mut weights = cx.allocate(T::DTYPE, scores.shape())?;
    let values = weights.as_mut_slice::<T>()?;
    interrupt::copy(&read::<T>(scores.view())?, values);
    for_each_chunk_mut(cpu.threads, values, keys, |_, row| T::softmax(row));
    let weights = modify::<T>(cx, flex.prob_mod, weights, flex.precision)?;
    let weights = read::<T>(weights.view())?;
    let mut result = vec![T::ZERO; results];
    for (index, result) in result.chunks_mut((queries * value_size).max(1)).enumerate() {
        let rows = Matrix::rows(&weights[index * queries * keys..][..queries * keys], queries, keys);
        let values = &v[key_head(index) * keys * value_size..][..keys * value_size];
        let columns = Rhs::Plain(Matrix::rows(values, keys, value_size));
        T::multiply(cpu, rows, columns, GemmTarget::write(result, value_size), &mut workspace)?;
    }
    let mut output = cx.allocate(dtype, &[batch, heads, queries, value_size])?;
    write::<T>(&result, (&mut output, dtype))?;
    cx.set(0, output.finish()?)
}
