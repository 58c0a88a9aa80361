//! `Einsum` by a batched GEMM, by pairwise contraction, or by one strided loop.
//!
//! Two `f32` operands that form a matmul take the GEMM.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ops::{Equation, Label};
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error, for_each_type};

use crate::contraction::Contraction;
use crate::subscripts::{size_of_label, sizes};
use ort_cpu_gemm::{
    Batch, Cpu, Gemm, GemmError, LhsOperand, RhsOperand, RhsSource, Strided, run_batch, workspace_len,
};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::number::{Number, Wide};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::refused;
use ort_cpu_threads::interrupt::{in_blocks, spend};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::transpose::Permutation;

/// The fewest multiplications that are worth a thread.
const GRAIN: usize = 1 << 14;

cpu_kernels![
    KernelDef { op: "Einsum", make: make_loop, ..KernelDef::BASE },
    KernelDef {
        op: "Einsum",
        rank: 1,
        when: |node| {
            let float = node.dtype(0) == Some(DType::F32) && node.node.inputs.len() == 2;
            let ranks = [0, 1].map(|index| node.rank(index));
            match (ranks, node.attrs().string("equation")) {
                ([Some(a), Some(b)], Ok(text)) if float => {
                    Equation::parse(text, &[a, b]).is_ok_and(|equation| Roles::of(&equation).is_some())
                }
                _ => false,
            }
        },
        make: make_matmul,
        ..KernelDef::BASE
    },
];

/// Returns the bytes of the accumulator type of `dtype`.
fn wide_bytes(dtype: DType) -> Result<usize> {
    for_each_type!(dtype in NUMERIC, T => Ok(size_of::<<T as Number>::Wide>()),
        else => Err(error!(NotImplemented, "sums of {} are not supported", dtype.name())))
}

fn make_loop(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let text = cx.attrs().string("equation")?.to_string();
    let wide_bytes = wide_bytes(cx.node.dtype(0).unwrap_or(DType::F64))?;
    Ok(Box::new(Loop { text, wide_bytes }))
}

/// The kernel for any type and any number of operands: pairwise contraction if that is less work,
/// else one sum over all subscripts.
struct Loop {
    text: String,
    wide_bytes: usize,
}

impl Executable for Loop {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let inputs: Vec<&[usize]> = (0..shapes.inputs.len()).map(|index| shapes.input(index)).collect();
        let ranks: Vec<usize> = inputs.iter().map(|shape| shape.len()).collect();
        let contraction = Contraction::new(&Equation::parse(&self.text, &ranks)?, &inputs)?;
        let len = contraction.map_or(0, |contraction| contraction.len);
        let bytes = len.checked_mul(self.wide_bytes);
        bytes.ok_or_else(|| error!(InvalidArgument, "the workspace of an Einsum is too large"))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let inputs: Result<Vec<TensorView<'_>>> =
            (0..cx.input_count()).map(|index| cx.input(index)).collect();
        let inputs = inputs?;
        let ranks: Vec<usize> = inputs.iter().map(TensorView::rank).collect();
        let equation = Equation::parse(&self.text, &ranks)?;
        let shapes: Vec<&[usize]> = inputs.iter().map(TensorView::shape).collect();
        let contraction = Contraction::new(&equation, &shapes)?;
        let (threads, workspace, output) = (cx.threads(), cx.workspace()?, cx.output(0)?);
        let dtype = output.dtype();
        for_each_type!(dtype in NUMERIC, T => {
            let operands: Result<Vec<&[T]>> = inputs.iter().map(|input| input.as_slice::<T>()).collect();
            let (operands, to) = (operands?, output.as_mut_slice()?);
            match contraction {
                Some(contraction) => {
                    let named = equation.inputs.iter().zip(&shapes).zip(&operands);
                    let named: Vec<(&[Label], &[usize], &[T])> =
                        named.map(|((labels, shape), values)| (&labels[..], *shape, *values)).collect();
                    contraction.run(threads, &named, scratch(workspace)?, to)
                }
                None => {
                    Sum::new(&equation, &inputs)?.run(threads, &operands, to);
                    Ok(())
                }
            }
        }, else => Err(error!(NotImplemented, "sums of {} are not supported", dtype.name())))
    }
}

/// One subscript: its size, and its stride in each operand.
type Axis = (usize, Vec<usize>);

struct Sum {
    kept: Vec<Axis>,
    summed: Vec<Axis>,
}

impl Sum {
    fn new(equation: &Equation, inputs: &[TensorView<'_>]) -> Result<Sum> {
        let shapes: Vec<&[usize]> = inputs.iter().map(TensorView::shape).collect();
        let sizes = sizes(equation, &shapes)?;
        let stride_of = |operand: usize, label: Label| -> usize {
            // A repeated subscript walks the diagonal. A size of 1 has stride 0.
            let (mut stride, mut total) = (1, 0);
            for (&own, &size) in equation.inputs[operand].iter().zip(shapes[operand]).rev() {
                if own == label && size != 1 {
                    total += stride;
                }
                stride *= size;
            }
            total
        };
        let axis = |label: Label| -> Axis {
            let strides = (0..inputs.len()).map(|operand| stride_of(operand, label)).collect();
            (size_of_label(&sizes, label), strides)
        };
        Ok(Sum {
            kept: equation.output.iter().copied().map(axis).collect(),
            summed: equation.summed().into_iter().map(axis).collect(),
        })
    }

    fn run<T: Number>(&self, threads: usize, operands: &[&[T]], to: &mut [T]) {
        let terms: usize = self.summed.iter().map(|(size, _)| size).product();
        let grain = (GRAIN / terms.max(1)).max(1);
        for_each_row_chunk_mut(threads, to, 1, grain, |first, piece| {
            let mut places = vec![0usize; operands.len()];
            // Offsets advance with the counters, so the inner loop has neither multiplications nor
            // divisions.
            let mut counters = vec![0usize; self.summed.len()];
            let mut uncounted = 0;
            for (index, to) in piece.iter_mut().enumerate() {
                places.fill(0);
                let mut rest = first + index;
                for (size, strides) in self.kept.iter().rev() {
                    let at = rest % size;
                    rest /= size;
                    places.iter_mut().zip(strides).for_each(|(place, stride)| *place += at * stride);
                }
                let mut sum = T::Wide::ZERO;
                in_blocks(terms, || {
                    let factors =
                        operands.iter().zip(&places).map(|(operand, &place)| operand[place].widen());
                    sum = sum.add(factors.fold(T::Wide::ONE, Wide::mul));
                    self.advance(&mut counters, &mut places);
                });
                *to = T::narrow(sum);
                // `in_blocks` counts long sums itself, but many short ones are as much work.
                uncounted += terms;
                if uncounted >= GRAIN {
                    spend(uncounted);
                    uncounted = 0;
                }
            }
        });
    }

    /// Advances to the next term. After the last one, starts over.
    fn advance(&self, counters: &mut [usize], places: &mut [usize]) {
        for (counter, (size, strides)) in counters.iter_mut().zip(&self.summed).rev() {
            *counter += 1;
            if *counter < *size {
                places.iter_mut().zip(strides).for_each(|(place, stride)| *place += stride);
                return;
            }
            *counter = 0;
            places.iter_mut().zip(strides).for_each(|(place, stride)| *place -= stride * (size - 1));
        }
    }
}

/// The role of each subscript in a matmul of two operands.
struct Roles {
    batch: Vec<Label>,
    rows: Vec<Label>,
    columns: Vec<Label>,
    summed: Vec<Label>,
}

impl Roles {
    /// Returns the roles; none if the equation is not a matmul, because it takes a diagonal or sums
    /// over a subscript of one operand.
    fn of(equation: &Equation) -> Option<Roles> {
        let [a, b] = equation.inputs.as_slice() else { return None };
        let repeats =
            |labels: &[Label]| (1..labels.len()).any(|index| labels[..index].contains(&labels[index]));
        if repeats(a) || repeats(b) {
            return None;
        }
        let of_output = |in_a: bool, in_b: bool| -> Vec<Label> {
            let labels = equation.output.iter().copied();
            labels.filter(|label| a.contains(label) == in_a && b.contains(label) == in_b).collect()
        };
        let summed = equation.summed();
        // A subscript that one operand alone sums would be a reduction before the matmul.
        let shared = summed.iter().all(|label| a.contains(label) && b.contains(label));
        shared.then(|| Roles {
            batch: of_output(true, true),
            rows: of_output(true, false),
            columns: of_output(false, true),
            summed,
        })
    }
}

fn make_matmul(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(EinsumMatmul { text: cx.attrs().string("equation")?.to_string() }))
}

struct EinsumMatmul {
    text: String,
}

/// An equation for concrete shapes: permutations around a batch of matmuls.
struct Steps {
    count: usize,
    shape: [usize; 3],
    lhs: Permutation,
    rhs: Permutation,
    result: Permutation,
    /// Whether sizes broadcast, which only the loop supports.
    broadcast: bool,
}

impl EinsumMatmul {
    fn steps(&self, shapes: [&[usize]; 2]) -> Result<Steps> {
        let equation = Equation::parse(&self.text, &[shapes[0].len(), shapes[1].len()])?;
        let roles = Roles::of(&equation).ok_or_else(|| error!(Fail, "the equation is not a matmul"))?;
        let sizes = sizes(&equation, &shapes)?;
        let size = |labels: &[Label]| -> Result<usize> {
            let sizes: Vec<usize> = labels.iter().map(|&label| size_of_label(&sizes, label)).collect();
            element_count(&sizes)
        };
        let permute = |from: &[Label], parts: [&[Label]; 3]| -> Result<Permutation> {
            let axes = parts.into_iter().flatten().map(|label| from.iter().position(|own| own == label));
            let axes: Option<Vec<usize>> = axes.collect();
            let shape: Vec<usize> = from.iter().map(|&label| size_of_label(&sizes, label)).collect();
            axes.and_then(|axes| Permutation::new(&shape, &axes))
                .ok_or_else(|| error!(Fail, "subscripts are no permutation"))
        };
        let Roles { batch, rows, columns, summed } = &roles;
        let labels: Vec<Label> = [batch, rows, columns].into_iter().flatten().copied().collect();
        let broadcast = equation.inputs.iter().zip(shapes).any(|(labels, shape)| {
            labels.iter().zip(shape).any(|(&label, &own)| size_of_label(&sizes, label) != own)
        });
        Ok(Steps {
            count: size(batch)?,
            shape: [size(rows)?, size(columns)?, size(summed)?],
            lhs: permute(&equation.inputs[0], [batch, rows, summed])?,
            rhs: permute(&equation.inputs[1], [batch, summed, columns])?,
            result: permute(&labels, [&equation.output, &[], &[]])?,
            broadcast,
        })
    }
}

impl Steps {
    /// Returns the number of elements to permute in both operands and in the result, and the GEMM
    /// workspace.
    fn lens(&self, threads: usize) -> Result<[usize; 4]> {
        let [rows, columns, k] = self.shape;
        let moved = |permutation: &Permutation, sizes: [usize; 3]| {
            if permutation.is_identity() { Ok(0) } else { element_count(&sizes) }
        };
        // The loop needs no workspace.
        if self.broadcast {
            return Ok([0; 4]);
        }
        Ok([
            moved(&self.lhs, [self.count, rows, k])?,
            moved(&self.rhs, [self.count, k, columns])?,
            moved(&self.result, [self.count, rows, columns])?,
            workspace_len(Cpu::with_threads(threads), self.count, self.shape, RhsSource::Rows),
        ])
    }
}

impl Executable for EinsumMatmul {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let steps = self.steps([shapes.input(0), shapes.input(1)])?;
        bytes_of::<f32>(steps.lens(shapes.threads)?.into_iter().fold(0, usize::saturating_add))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let inputs = [cx.input(0)?, cx.input(1)?];
        let steps = self.steps([inputs[0].shape(), inputs[1].shape()])?;
        let [a, b] = [inputs[0].as_slice::<f32>()?, inputs[1].as_slice::<f32>()?];
        let threads = cx.threads();
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        let to = cx.output(0)?.as_mut_slice::<f32>()?;
        // Only the run knows whether sizes broadcast.
        if steps.broadcast {
            let equation = Equation::parse(&self.text, &[inputs[0].rank(), inputs[1].rank()])?;
            Sum::new(&equation, &inputs)?.run(threads, &[a, b], to);
            return Ok(());
        }
        let [lhs_len, rhs_len, result_len, work_len] = steps.lens(threads)?;
        // Axes in matmul order need no copy, which is the usual case.
        let lhs = permuted(&steps.lhs, a, take(&mut rest, lhs_len)?);
        let rhs = permuted(&steps.rhs, b, take(&mut rest, rhs_len)?);
        let moved = take(&mut rest, result_len)?;
        let work = take(&mut rest, work_len)?;
        ensure!(
            to.len() == steps.count * steps.shape[0] * steps.shape[1],
            Fail,
            "the result has another size"
        );
        // Without a permutation, the GEMM writes the output directly.
        if steps.result.is_identity() {
            return multiply(&steps, threads, [lhs, rhs], to, work);
        }
        multiply(&steps, threads, [lhs, rhs], moved, work)?;
        steps.result.apply(Isa::current(), moved, to);
        Ok(())
    }
}

fn permuted<'a>(permutation: &Permutation, from: &'a [f32], to: &'a mut [f32]) -> &'a [f32] {
    if permutation.is_identity() {
        return from;
    }
    permutation.apply(Isa::current(), from, to);
    to
}

fn multiply(
    steps: &Steps,
    threads: usize,
    [lhs, rhs]: [&[f32]; 2],
    to: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let [rows, columns, k] = steps.shape;
    if to.is_empty() {
        return Ok(());
    }
    let part = |what: &'static str, values: &'_ [f32], index: usize, len: usize| {
        let found = index.checked_mul(len).is_some_and(|start| start + len <= values.len());
        if found {
            Ok(index * len)
        } else {
            Err(GemmError::TooShort { what, needed: len, len: values.len() })
        }
    };
    let problem = |index: usize| {
        let lhs = &lhs[part("the left side", lhs, index, rows * k)?..];
        let rhs = &rhs[part("the right side", rhs, index, k * columns)?..];
        let lhs = Strided::row_major(lhs, rows, k)?;
        Ok(Gemm::new(LhsOperand::Plain(lhs), RhsOperand::Plain(Strided::row_major(rhs, k, columns)?)))
    };
    let results = Batch { values: to, count: steps.count, row_stride: columns, batch_stride: rows * columns };
    run_batch(Cpu::with_threads(threads), &problem, results, work).map_err(refused)
}
