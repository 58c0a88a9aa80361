//! `GlobalNorm` and `AllFinite` over gradients of mixed types, on any number of threads.

use crate::optimizer_support::{numbers, tensor};
use ort_runtime::ir::GraphBuilder;
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

/// The one output of an operator on these gradients.
fn run(op: &str, gradients: &[Tensor], threads: usize) -> Result<Tensor> {
    let mut builder = GraphBuilder::new(op);
    let names: Vec<String> = (0..gradients.len()).map(|index| format!("g{index}")).collect();
    let mut inputs = Vec::new();
    for (name, gradient) in names.iter().zip(gradients) {
        let sizes: Vec<String> = gradient.shape().iter().map(usize::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        inputs.push(Some(builder.input(name, gradient.dtype(), &sizes)));
    }
    let outputs = builder.add(("ort-runtime", op), &inputs, &[], 1, Vec::new())?;
    let graph = builder.finish(&outputs)?;
    let session = Session::builder(&Model::from_graph(graph)).threads(threads).build()?;
    let given = names.iter().zip(gradients);
    let given: Vec<(&str, Value)> =
        given.map(|(name, tensor)| (name.as_str(), tensor.clone().into())).collect();
    Ok(session.run(&given)?[0].1.tensor()?.clone())
}

const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

#[test]
fn the_norm_is_that_of_all_elements() -> Result<()> {
    for counts in [vec![1], vec![0], vec![3, 0, 5], vec![40_000, 7, 16_385, 1024]] {
        let mut gradients = Vec::new();
        let mut squares = 0.0;
        for (index, &count) in counts.iter().enumerate() {
            let elements = numbers(count, index);
            squares += elements.iter().map(|x| x * x).sum::<f64>();
            gradients.push(tensor(TYPES[index], &[count], &elements)?);
        }
        let norm = run("GlobalNorm", &gradients, 1)?;
        assert_eq!((norm.dtype(), norm.shape()), (DType::F32, [].as_slice()));
        // The numbers and the sums of their squares are exact.
        assert_eq!(norm.to_vec::<f32>()?, [squares.sqrt() as f32], "{counts:?}");
        for threads in [2, 3] {
            assert!(run("GlobalNorm", &gradients, threads)?.bytes() == norm.bytes(), "{threads} threads");
        }
    }
    Ok(())
}

#[test]
fn sums_that_round_are_the_same_on_any_threads() -> Result<()> {
    let elements: Vec<f64> = (0..200_000).map(|index| (f64::from(index) * 0.37).sin() * 1e3).collect();
    let gradients = [tensor(DType::F32, &[400, 500], &elements)?, tensor(DType::F64, &[200_000], &elements)?];
    let norm = run("GlobalNorm", &gradients, 1)?;
    for threads in [2, 3, 4] {
        assert!(run("GlobalNorm", &gradients, threads)?.bytes() == norm.bytes(), "{threads} threads");
    }
    let singles: f64 = elements.iter().map(|&x| f64::from(x as f32).powi(2) + x * x).sum();
    assert!((f64::from(norm.to_vec::<f32>()?[0]) / singles.sqrt() - 1.0).abs() < 1e-7);
    Ok(())
}

#[test]
fn a_norm_beyond_the_squares_of_its_type_is_right() -> Result<()> {
    let gradients = [tensor(DType::F32, &[2], &[3e30, 4e30])?];
    assert_eq!(run("GlobalNorm", &gradients, 1)?.to_vec::<f32>()?, [5e30]);
    let gradients = [tensor(DType::F32, &[2], &[3e-30, 4e-30])?];
    assert_eq!(run("GlobalNorm", &gradients, 1)?.to_vec::<f32>()?, [5e-30]);
    Ok(())
}

#[test]
fn one_element_that_is_not_finite_is_found_anywhere() -> Result<()> {
    for dtype in TYPES {
        for count in [0, 1, 15, 1025, 40_000] {
            let others = tensor(DType::F32, &[3], &[1.0, -1e30, 0.0])?;
            let mut elements = numbers(count, 3);
            let finite = run("AllFinite", &[others.clone(), tensor(dtype, &[count], &elements)?], 2)?;
            assert_eq!(finite.to_vec::<bool>()?, [true], "{} of {count}", dtype.name());
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                for place in [0, count / 2, count.saturating_sub(1)] {
                    let Some(slot) = elements.get_mut(place) else { continue };
                    let kept = std::mem::replace(slot, bad);
                    let gradients = [others.clone(), tensor(dtype, &[count], &elements)?];
                    let finite = run("AllFinite", &gradients, 2)?.to_vec::<bool>()?;
                    assert_eq!(finite, [false], "{bad} at {place} of {count}, {}", dtype.name());
                    let norm = run("GlobalNorm", &gradients, 2)?.to_vec::<f32>()?[0];
                    assert!(!norm.is_finite(), "the norm is {norm}");
                    elements[place] = kept;
                }
            }
        }
    }
    Ok(())
}
