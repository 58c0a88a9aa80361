//! `CounterDropout`: what it drops follows from seed, stream, step and place alone, in the share
//! that was asked for.

use crate::optimizer_support::{doubles, tensor};
use ort_runtime::ir::{Attribute, GraphBuilder};
use ort_runtime::{DType, Model, OutputTarget, Result, RunOptions, Session, Tensor, TensorBuffer};

fn session(dtype: DType, stream: i64, threads: usize) -> Result<Session> {
    let mut builder = GraphBuilder::new("dropout");
    let inputs = [
        builder.input("data", dtype, &["n"]),
        builder.input("ratio", DType::F32, &[]),
        builder.input("seed", DType::I64, &[]),
        builder.input("step", DType::I64, &[]),
    ];
    let attrs = [("stream", Attribute::Int(stream))];
    let outputs = builder.add(("ort-runtime", "CounterDropout"), &inputs.map(Some), &attrs, 1, Vec::new())?;
    let graph = builder.finish(&outputs)?;
    Session::builder(&Model::from_graph(graph)).threads(threads).build()
}

fn run(session: &Session, data: &Tensor, ratio: f32, seed: i64, step: i64) -> Result<Tensor> {
    let outputs = session.run(&[
        ("data", data.clone().into()),
        ("ratio", Tensor::scalar(ratio)?.into()),
        ("seed", Tensor::scalar(seed)?.into()),
        ("step", Tensor::scalar(step)?.into()),
    ])?;
    Ok(outputs[0].1.tensor()?.clone())
}

/// Which of `count` elements are kept.
fn kept(stream: i64, seed: i64, step: i64, ratio: f32, count: usize) -> Result<Vec<bool>> {
    let ones = tensor(DType::F32, &[count], &vec![1.0; count])?;
    let output = run(&session(DType::F32, stream, 1)?, &ones, ratio, seed, step)?;
    Ok(doubles(&output)?.into_iter().map(|x| x != 0.0).collect())
}

const COUNT: usize = 200_003;

#[test]
fn the_share_that_is_kept_is_what_was_asked_for() -> Result<()> {
    for ratio in [0.01f32, 0.1, 0.5, 0.9] {
        for (seed, step) in [(0, 0), (0, 1), (-1, 7), (i64::MAX, i64::MAX)] {
            let kept = kept(3, seed, step, ratio, COUNT)?;
            let share = kept.iter().filter(|kept| **kept).count() as f64 / COUNT as f64;
            let expected = 1.0 - f64::from(ratio);
            // Of independent draws all but one in 10^7 lie within 5 deviations.
            let deviation = (expected * (1.0 - expected) / COUNT as f64).sqrt();
            assert!((share - expected).abs() < 5.0 * deviation, "{ratio}, {seed}, {step}: {share}");
        }
    }
    Ok(())
}

#[test]
fn seeds_steps_streams_and_neighbours_are_independent() -> Result<()> {
    let base = kept(0, 1, 1, 0.5, COUNT)?;
    let mut others = vec![kept(1, 1, 1, 0.5, COUNT)?, kept(0, 2, 1, 0.5, COUNT)?, kept(0, 1, 2, 0.5, COUNT)?];
    for distance in [1, 2, 3, 4, 8, 64] {
        others.push(base.iter().cycle().skip(distance).take(COUNT).copied().collect());
    }
    for (index, other) in others.iter().enumerate() {
        let same = base.iter().zip(other).filter(|(one, other)| one == other).count() as f64 / COUNT as f64;
        assert!((same - 0.5).abs() < 5.0 * (0.25 / COUNT as f64).sqrt(), "{index}: {same} are the same");
    }
    Ok(())
}

#[test]
fn elements_are_divided_or_zero_in_every_type() -> Result<()> {
    let count = 3001;
    let numbers: Vec<f64> = (0..count).map(|index| index as f64 / 16.0 - 90.0).collect();
    let is_kept = kept(5, 9, 4, 0.25, count)?;
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let data = tensor(dtype, &[count], &numbers)?;
        let exact = |tensor: &Tensor| -> Result<Vec<f64>> {
            match dtype {
                DType::F16 => Ok(tensor.to_vec::<half::f16>()?.into_iter().map(f64::from).collect()),
                DType::BF16 => Ok(tensor.to_vec::<half::bf16>()?.into_iter().map(f64::from).collect()),
                _ => doubles(tensor),
            }
        };
        let given = exact(&data)?;
        let divided: Vec<f64> = given.iter().map(|x| x / 0.75).collect();
        // Divided in float, or in double, and rounded once.
        let divided = match dtype {
            DType::F64 => divided,
            _ => given.iter().map(|x| f64::from(*x as f32 / 0.75)).collect(),
        };
        let divided = exact(&tensor(dtype, &[count], &divided)?)?;
        let output = exact(&run(&session(dtype, 5, 1)?, &data, 0.25, 9, 4)?)?;
        for place in 0..count {
            let expected = if is_kept[place] { divided[place] } else { 0.0 };
            assert_eq!(output[place], expected, "{} at {place}", dtype.name());
        }
        let same = run(&session(dtype, 5, 1)?, &data, 0.0, 9, 4)?;
        assert!(same.bytes() == data.bytes(), "without a ratio nothing changes");
    }
    Ok(())
}

#[test]
fn bits_are_the_same_on_any_threads_and_in_place() -> Result<()> {
    for count in [0, 1, 5, 1023, 16_385, 100_001] {
        let numbers: Vec<f64> = (0..count).map(|index| index as f64 + 1.0).collect();
        let data = tensor(DType::F32, &[count], &numbers)?;
        let expected = run(&session(DType::F32, 0, 1)?, &data, 0.4, 3, 2)?;
        for threads in [1, 2, 3] {
            let session = session(DType::F32, 0, threads)?;
            assert!(
                run(&session, &data, 0.4, 3, 2)?.bytes() == expected.bytes(),
                "{count}, {threads} threads"
            );
            let mut binding = session.io_binding();
            binding.bind_input("data", TensorBuffer::copy_of(&data)?)?;
            binding.bind_input("ratio", Tensor::scalar(0.4f32)?)?;
            binding.bind_input("seed", Tensor::scalar(3i64)?)?;
            binding.bind_input("step", Tensor::scalar(2i64)?)?;
            let output = session.outputs().remove(0).name;
            binding.bind_output(&output, OutputTarget::Input("data".to_string()))?;
            session.run_with_binding(&mut binding, &RunOptions::default())?;
            let output = binding.output(&output)?.tensor()?.to_tensor()?;
            assert!(output.bytes() == expected.bytes(), "{count} in place, {threads} threads");
        }
    }
    Ok(())
}

#[test]
fn what_is_no_share_is_refused() -> Result<()> {
    let data = tensor(DType::F32, &[4], &[1.0; 4])?;
    let session = session(DType::F32, 0, 1)?;
    for ratio in [1.0, -0.25, f32::NAN, f32::INFINITY] {
        let problem = run(&session, &data, ratio, 0, 0).expect_err("no share").to_string();
        assert!(problem.contains("expected 0 or more and less than 1"), "{ratio}: {problem}");
    }
    Ok(())
}
