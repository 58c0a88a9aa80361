//! After its first runs a bound session allocates nothing, and a cache that is decoded with exists once.
#![cfg(feature = "cpu")]

mod support;

#[path = "../examples/support/decoder.rs"]
mod decoder;

use std::alloc::System;

use ort_runtime::{DType, Model, OutputTarget, Result, RunOptions, Session, Tensor, TensorBuffer, Value};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, Stats, StatsAlloc};
use support::{LAYER_OF_ONES, layer};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const LONGEST: usize = 32;

/// What `work` takes from the heap.
fn allocated(work: impl FnOnce() -> Result<()>) -> Result<Stats> {
    let region = Region::new(ALLOCATOR);
    work()?;
    Ok(region.change())
}

/// Tests of one process share its heap, so that there is one test here.
#[test]
fn bound_runs_allocate_nothing() -> Result<()> {
    for threads in [1, 2] {
        one_layer(threads)?;
        decoding(threads)?;
    }
    Ok(())
}

fn one_layer(threads: usize) -> Result<()> {
    let session = Session::builder(&Model::from_graph(layer()?)).threads(threads).build()?;
    let mut binding = session.io_binding();
    binding.bind_input("x", TensorBuffer::new(DType::F32, &[64, 3])?)?;
    binding.bind_output("Relu_2.0", TensorBuffer::new(DType::F32, &[64, 4])?)?;
    let options = RunOptions::default();
    let mut run = |value: f32| -> Result<()> {
        binding.input_mut("x")?.as_mut_slice::<f32>()?.fill(value);
        session.run_with_binding(&mut binding, &options)
    };
    (0..4).try_for_each(|_| run(0.0))?;
    let stats = allocated(|| run(1.0))?;
    assert_eq!((stats.allocations, stats.reallocations), (0, 0), "{stats:?}");
    assert_eq!(binding.output("Relu_2.0")?.tensor()?.to_vec::<f32>()?, LAYER_OF_ONES.repeat(64));
    Ok(())
}

fn decoding(threads: usize) -> Result<()> {
    let session = Session::builder(&Model::from_graph(decoder::decoder(LONGEST)?)).threads(threads).build()?;
    let mut binding = session.io_binding();
    binding.bind_input("input_ids", TensorBuffer::new(DType::I64, &[1, 1])?)?;
    binding.bind_input("seqlens_k", TensorBuffer::new(DType::I32, &[1])?)?;
    binding.bind_input("total_sequence_length", TensorBuffer::new(DType::I32, &[1])?)?;
    binding.bind_output("logits", TensorBuffer::new(DType::F32, &[1, 1, decoder::VOCABULARY])?)?;
    let mut plain: Vec<(String, Value)> = Vec::new();
    for (past, present) in decoder::cache_names() {
        let shape = decoder::cache_shape(LONGEST);
        plain.push((past.clone(), TensorBuffer::new(DType::F32, &shape)?.tensor()?.into()));
        binding.bind_input(&past, TensorBuffer::new(DType::F32, &shape)?)?;
        binding.bind_output(&present, OutputTarget::Input(past))?;
    }
    let options = RunOptions::default();
    let mut run = |position: i32| -> Result<()> {
        binding.input_mut("input_ids")?.as_mut_slice::<i64>()?.fill(i64::from(position * 7 % 64));
        binding.input_mut("seqlens_k")?.as_mut_slice::<i32>()?.fill(position);
        binding.input_mut("total_sequence_length")?.as_mut_slice::<i32>()?.fill(position + 1);
        session.run_with_binding(&mut binding, &options)
    };
    (0..4).try_for_each(&mut run)?;
    let stats = allocated(|| (4..LONGEST as i32).try_for_each(&mut run))?;
    assert_eq!((stats.allocations, stats.reallocations), (0, 0), "{stats:?}");

    // The same steps one by one, with caches that are handed back and forth.
    let cache: usize = plain.iter().map(|(_, value)| value.byte_count()).sum();
    assert!(session.memory().activations_peak < cache, "no second copy of the cache was made");
    let mut logits = Vec::new();
    for position in 0..LONGEST as i32 {
        let mut inputs: Vec<(&str, Value)> = vec![
            ("input_ids", Tensor::from_slice(&[1, 1], &[i64::from(position * 7 % 64)])?.into()),
            ("seqlens_k", Tensor::from_slice(&[1], &[position])?.into()),
            ("total_sequence_length", Tensor::from_slice(&[1], &[position + 1])?.into()),
        ];
        inputs.extend(plain.iter().map(|(name, value)| (name.as_str(), value.clone())));
        let mut outputs = session.run(&inputs)?.into_iter();
        logits = outputs.next().map_or(Ok(Vec::new()), |(_, value)| value.tensor()?.to_vec::<f32>())?;
        for ((_, past), (_, present)) in plain.iter_mut().zip(outputs) {
            *past = present;
        }
    }
    assert_eq!(binding.output("logits")?.tensor()?.to_vec::<f32>()?, logits);
    for ((past, value), (_, present)) in plain.iter().zip(decoder::cache_names()) {
        let bound = binding.output(&present)?.tensor()?;
        assert_eq!(bound.bytes()?, value.tensor()?.view().bytes()?, "{past}");
    }
    Ok(())
}
