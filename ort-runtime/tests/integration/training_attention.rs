//! `TrainingAttention` and its gradient: against the operators that they are made of, against
//! finite differences, and in the same bits with any number of threads.

use crate::gradient_support::rows::{check_all, row};
use crate::optimizer_support::{doubles, tensor};
use crate::support::Without;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{DType, Model, Result, Session, Tensor};

/// The sizes and what comes with them.
#[derive(Clone, Copy, Debug)]
struct Case {
    heads: &'static [usize],
    /// Queries, keys, the size of a query and that of a value.
    sizes: [usize; 4],
    mask: Option<(DType, &'static [usize])>,
    ratio: f32,
}

const PLAIN: Case = Case { heads: &[2, 3], sizes: [5, 7, 4, 6], mask: None, ratio: 0.0 };

/// The last two are of several blocks of queries, with some left over.
const CASES: [Case; 9] = [
    PLAIN,
    Case { ratio: 0.3, ..PLAIN },
    Case { mask: Some((DType::F32, &[2, 1, 1, 7])), ..PLAIN },
    Case { mask: Some((DType::F32, &[5, 1])), ..PLAIN },
    Case { mask: Some((DType::Bool, &[1, 1, 5, 7])), ratio: 0.5, ..PLAIN },
    Case { mask: Some((DType::Bool, &[2, 1, 1, 7])), ..PLAIN },
    Case { heads: &[4], sizes: [3, 1, 2, 1], mask: Some((DType::F32, &[1])), ratio: 0.0 },
    Case { heads: &[1, 2], sizes: [20, 4201, 3, 5], mask: Some((DType::Bool, &[20, 4201])), ratio: 0.1 },
    Case { heads: &[1], sizes: [515, 130, 8, 8], mask: Some((DType::F32, &[1, 515, 130])), ratio: 0.2 },
];

impl Case {
    /// The tensors: upstream gradient, queries, keys, values, mask.
    fn tensors(&self, dtype: DType) -> Result<Vec<(&'static str, Tensor)>> {
        let [queries, keys, size, value_size] = self.sizes;
        let float = |name: &'static str, rows: usize, size: usize, seed: usize| {
            let shape: Vec<usize> = self.heads.iter().copied().chain([rows, size]).collect();
            Ok::<_, ort_runtime::Error>((name, numbers(dtype, &shape, seed)?))
        };
        let mut tensors = vec![
            float("output_grad", queries, value_size, 1)?,
            float("query", queries, size, 2)?,
            float("key", keys, size, 3)?,
            float("value", keys, value_size, 4)?,
        ];
        match self.mask {
            None => {}
            Some((DType::Bool, shape)) => {
                let count: usize = shape.iter().product();
                let kept: Vec<bool> = (0..count).map(|index| index % 5 != 3).collect();
                tensors.push(("mask", Tensor::from_bools(shape, &kept)?));
            }
            Some((_, shape)) => tensors.push(("mask", numbers(dtype, shape, 5)?)),
        }
        Ok(tensors)
    }

    /// A model of the operator and its gradient.
    fn model(&self, tensors: &[(&'static str, Tensor)]) -> Result<Model> {
        let mut builder = GraphBuilder::new("attention");
        let mut inputs: Vec<Option<ValueId>> = Vec::new();
        for (name, tensor) in tensors {
            let sizes: Vec<String> = tensor.shape().iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            inputs.push(Some(builder.input(name, tensor.dtype(), &sizes)));
        }
        inputs.resize(5, None);
        if self.ratio > 0.0 {
            inputs.push(Some(builder.constant(Tensor::scalar(self.ratio)?)));
            inputs.push(Some(builder.constant(Tensor::scalar(17i64)?)));
            inputs.push(Some(builder.constant(Tensor::scalar(3i64)?)));
        }
        while inputs.last() == Some(&None) {
            inputs.pop();
        }
        let attrs = [("stream", Attribute::Int(4)), ("fill", Attribute::Float(-3.0))];
        let name = "ort-runtime";
        let mut outputs = builder.add((name, "TrainingAttention"), &inputs[1..], &attrs, 1, vec![])?;
        outputs.extend(builder.add((name, "TrainingAttentionGrad"), &inputs, &attrs, 3, vec![])?);
        Ok(Model::from_graph(builder.finish(&outputs)?))
    }

    fn run(&self, session: &Session, tensors: &[(&'static str, Tensor)]) -> Result<Vec<Vec<f64>>> {
        let given: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor.clone().into())).collect();
        session.run(&given)?.iter().map(|(_, value)| doubles(value.tensor()?)).collect()
    }
}

/// Numbers between -1 and 1.
fn numbers(dtype: DType, shape: &[usize], seed: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let number = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f64 / 1001.0 - 1.0;
    tensor(dtype, shape, &(0..count).map(number).collect::<Vec<f64>>())
}

#[test]
fn the_operator_is_what_its_parts_are() -> Result<()> {
    let parts = Without::new(&["TrainingAttention", "TrainingAttentionGrad"])?;
    for (dtype, tolerance) in
        [(DType::F32, 2e-6), (DType::F64, 1e-14), (DType::F16, 4e-3), (DType::BF16, 3e-2)]
    {
        for case in CASES {
            let tensors = case.tensors(dtype)?;
            let model = case.model(&tensors)?;
            let whole = case.run(&Session::builder(&model).build()?, &tensors)?;
            // The parts in double: those of narrow types round scores, which the operator does not.
            let wide = case.tensors(dtype)?.into_iter().map(|(name, narrow)| match narrow.dtype() {
                DType::Bool => Ok((name, narrow)),
                _ => Ok((name, tensor(DType::F64, narrow.shape(), &doubles(&narrow)?)?)),
            });
            let wide: Vec<_> = wide.collect::<Result<_>>()?;
            let made =
                case.run(&Session::builder(&case.model(&wide)?).device(parts.clone()).build()?, &wide)?;
            for (output, (whole, parts)) in whole.iter().zip(&made).enumerate() {
                let largest = parts.iter().fold(1e-3f64, |most, x| most.max(x.abs()));
                // Unlike `f64::max`, `total_cmp` keeps a NaN.
                let apart = whole.iter().zip(parts).map(|(one, other)| (one - other).abs());
                let worst = apart.max_by(f64::total_cmp).unwrap_or(0.0);
                assert!(
                    worst <= tolerance * largest,
                    "{dtype}, {case:?}, output {output}: {worst} of {largest}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn the_same_bits_with_any_number_of_threads() -> Result<()> {
    for case in CASES {
        let tensors = case.tensors(DType::F32)?;
        let model = case.model(&tensors)?;
        let one = case.run(&Session::builder(&model).threads(1).build()?, &tensors)?;
        for threads in [2, 3, 8] {
            let other = case.run(&Session::builder(&model).threads(threads).build()?, &tensors)?;
            assert!(one == other, "{case:?} with {threads} threads");
        }
    }
    Ok(())
}

fn attention(builder: &mut GraphBuilder, inputs: &[ValueId], more: &[Option<ValueId>]) -> Result<ValueId> {
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).chain(more.iter().copied()).collect();
    let attrs = [("stream", Attribute::Int(1)), ("fill", Attribute::Float(-0.5))];
    let outputs = builder.add(("ort-runtime", "TrainingAttention"), &inputs, &attrs, 1, vec![])?;
    Ok(outputs[0])
}

#[test]
fn finite_differences() {
    const SHAPES: &[&[usize]] = &[&[2, 3, 2], &[2, 4, 2], &[2, 4, 3]];
    check_all(&[
        row("plain", |b, x| attention(b, x, &[]), SHAPES).fixed(),
        row(
            "a mask that is added",
            |b, x| {
                let mask = b.constant(tensor(DType::F64, &[3, 4], &[0.5; 12])?);
                attention(b, x, &[Some(mask)])
            },
            SHAPES,
        )
        .fixed(),
        row(
            "a mask that fills, and dropout",
            |b, x| {
                let mask = b.constant(Tensor::from_bools(&[1, 4], &[true, false, true, true])?);
                let ratio = b.constant(Tensor::scalar(0.3f32)?);
                let (seed, step) = (b.constant(Tensor::scalar(1i64)?), b.constant(Tensor::scalar(2i64)?));
                attention(b, x, &[mask, ratio, seed, step].map(Some))
            },
            SHAPES,
        )
        .fixed(),
    ]);
}
