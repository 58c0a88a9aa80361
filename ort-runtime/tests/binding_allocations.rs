//! After its first runs a bound session allocates nothing, and a cache that is decoded with exists
//! once.
#![cfg(feature = "cpu")]

mod support;

#[path = "../examples/support/decoder.rs"]
mod decoder;

use std::alloc::System;

use ort_runtime::ir::{Attribute, GraphBuilder};
use ort_runtime::rewrite::Level;
use ort_runtime::spec::MICROSOFT;
use ort_runtime::{
    DType, DeviceId, Model, OutputTarget, Result, RunOptions, Session, Tensor, TensorBuffer, Value,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, Stats, StatsAlloc};
use support::{LAYER_OF_ONES, floats, ints, layer};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Positions of the cache, and how many of them are decoded.
const LONGEST: usize = 1024;
const STEPS: i32 = 32;

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
    OPERATORS.iter().try_for_each(operator)?;
    nothing_is_copied()?;
    kept_outputs_keep_only_themselves()
}

/// `exp(x)` of a mebibyte.
fn large() -> Result<(Session, Tensor)> {
    let mut builder = GraphBuilder::new("exp");
    let x = builder.input("x", DType::F32, &["n"]);
    let y = builder.node("Exp", &[x], &[])?;
    let model = Model::from_graph(builder.finish(&[y])?);
    let x = Tensor::from_vec(&[MEBIBYTE / 4], vec![0.0f32; MEBIBYTE / 4])?;
    Ok((Session::builder(&model).threads(1).build()?, x))
}

const MEBIBYTE: usize = 1 << 20;

fn nothing_is_copied() -> Result<()> {
    let (session, x) = large()?;
    let y = TensorBuffer::new(DType::F32, x.shape())?;
    let mut binding = session.io_binding();
    let stats = allocated(|| {
        binding.bind_input("x", x)?;
        binding.bind_output("Exp_0.0", y)?;
        session.run_with_binding(&mut binding, &RunOptions::default())
    })?;
    assert!(stats.bytes_allocated < MEBIBYTE / 16, "{stats:?}");
    assert_eq!(binding.output("Exp_0.0")?.tensor()?.as_slice::<f32>()?[MEBIBYTE / 4 - 1], 1.0);
    Ok(())
}

/// After session, model and binding are gone.
fn kept_outputs_keep_only_themselves() -> Result<()> {
    let plain = || -> Result<Value> {
        let (session, x) = large()?;
        Ok(session.run(&[("x", x.into())])?.remove(0).1)
    };
    let bound = || -> Result<Value> {
        let (session, x) = large()?;
        let mut binding = session.io_binding();
        binding.bind_input("x", x)?;
        binding.bind_output("Exp_0.0", DeviceId::HOST)?;
        session.run_with_binding(&mut binding, &RunOptions::default())?;
        Ok(binding.get_outputs()?.remove(0).1)
    };
    for make in [&plain as &dyn Fn() -> Result<Value>, &bound] {
        let mut kept = None;
        let stats = allocated(|| {
            kept = Some(make()?);
            Ok(())
        })?;
        let held = stats.bytes_allocated as isize - stats.bytes_deallocated as isize;
        let bytes = kept.as_ref().map_or(0, Value::byte_count) as isize;
        assert_eq!(bytes, MEBIBYTE as isize);
        // Outputs are rounded up by a sixteenth at most.
        assert!((bytes..bytes + bytes / 16 + 4096).contains(&held), "{held} bytes are held: {stats:?}");
    }
    Ok(())
}

/// The runs after which each thread has what it keeps.
const WARM_UP: usize = 4;

/// A domain and an operator, the shapes of its `float` inputs, what it takes besides as constants,
/// its attributes, and the number of its outputs.
type Operator =
    (&'static str, &'static str, &'static [&'static [usize]], fn() -> Result<Vec<Tensor>>, Attributes, usize);
type Attributes = &'static [(&'static str, &'static [i64])];

const NONE: fn() -> Result<Vec<Tensor>> = || Ok(Vec::new());

/// What a step of decoding is made of, fused and unfused.
const OPERATORS: &[Operator] = &[
    ("", "Gather", &[&[16, 8]], || Ok(vec![ints(&[3])?]), &[], 1),
    ("", "Add", &[&[1, 1, 16], &[16]], NONE, &[], 1),
    ("", "Mul", &[&[1, 4, 8, 1], &[1, 1, 8, 16]], NONE, &[], 1),
    ("", "Split", &[&[1, 1, 48]], NONE, &[("axis", &[2]), ("num_outputs", &[3])], 3),
    ("", "Transpose", &[&[1, 8, 4, 16]], NONE, &[("perm", &[0, 2, 1, 3])], 1),
    ("", "Concat", &[&[1, 4, 8, 16], &[1, 4, 1, 16]], NONE, &[("axis", &[2])], 1),
    ("", "Slice", &[&[16, 8]], || Ok(vec![ints(&[0])?, ints(&[9])?, ints(&[1])?, ints(&[2])?]), &[], 1),
    ("", "Expand", &[&[1, 8]], || Ok(vec![ints(&[4, 8])?]), &[], 1),
    ("", "MatMul", &[&[1, 4, 1, 16], &[1, 4, 16, 9]], NONE, &[], 1),
    ("", "MatMul", &[&[1, 4, 8, 16], &[1, 4, 16, 9]], NONE, &[], 1),
    ("", "Gemm", &[&[1, 16], &[16, 48], &[48]], NONE, &[], 1),
    ("", "Softmax", &[&[1, 4, 1, 9]], NONE, &[], 1),
    ("", "Tanh", &[&[1, 64]], NONE, &[], 1),
    ("", "Gelu", &[&[1, 64]], NONE, &[], 1),
    ("", "Mish", &[&[1, 64]], NONE, &[], 1),
    ("", "Cast", &[&[1, 64]], NONE, &[("to", &[7])], 1),
    ("", "ReduceMean", &[&[1, 4, 64]], || Ok(vec![ints(&[2])?]), &[], 1),
    ("", "LayerNormalization", &[&[1, 1, 16], &[16], &[16]], NONE, &[], 1),
    ("", "RMSNormalization", &[&[1, 1, 16], &[16]], NONE, &[], 1),
    ("", "Attention", &[&[1, 4, 1, 16], &[1, 4, 9, 16], &[1, 4, 9, 16]], NONE, &[], 1),
    (
        "",
        "ScatterND",
        &[&[8, 16]],
        || Ok(vec![Tensor::from_slice(&[1, 1], &[3i64])?, floats(&[1, 16], &[1.0; 16])?]),
        &[],
        1,
    ),
    ("", "TensorScatter", &[&[1, 4, 8, 16], &[1, 4, 1, 16]], || Ok(vec![ints(&[5])?]), &[], 1),
    (MICROSOFT, "SkipLayerNormalization", &[&[1, 1, 16], &[1, 1, 16], &[16], &[16]], NONE, &[], 1),
    (MICROSOFT, "BiasGelu", &[&[1, 1, 16], &[16]], NONE, &[], 1),
    (
        MICROSOFT,
        "MultiHeadAttention",
        &[&[1, 1, 16], &[1, 1, 16], &[1, 1, 16]],
        NONE,
        &[("num_heads", &[2])],
        1,
    ),
];

fn operator(&(domain, op, shapes, constants, attributes, outputs): &Operator) -> Result<()> {
    let mut builder = GraphBuilder::new(op);
    let mut inputs = Vec::new();
    for (index, shape) in shapes.iter().enumerate() {
        let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        inputs.push(Some(builder.input(&format!("input{index}"), DType::F32, &sizes)));
    }
    inputs.extend(constants()?.into_iter().map(|constant| Some(builder.constant(constant))));
    let attribute = |values: &[i64]| match values {
        [value] => Attribute::Int(*value),
        values => Attribute::Ints(values.to_vec()),
    };
    let attributes: Vec<_> = attributes.iter().map(|(name, values)| (*name, attribute(values))).collect();
    let results = builder.add((domain, op), &inputs, &attributes, outputs, Vec::new())?;
    let model = Model::from_graph(builder.finish(&results)?);
    // As it is written, so that nothing is computed ahead.
    let session = Session::builder(&model).threads(1).opt_level(Level::Disabled).build()?;
    let mut binding = session.io_binding();
    for (index, shape) in shapes.iter().enumerate() {
        binding.bind_input(&format!("input{index}"), TensorBuffer::new(DType::F32, shape)?)?;
    }
    session.outputs().iter().try_for_each(|output| binding.bind_output(&output.name, DeviceId::HOST))?;
    let options = RunOptions::default();
    (0..WARM_UP).try_for_each(|_| session.run_with_binding(&mut binding, &options))?;
    let stats = allocated(|| session.run_with_binding(&mut binding, &options))?;
    assert_eq!((stats.allocations, stats.reallocations), (0, 0), "{op}: {stats:?}");
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
    (0..WARM_UP).try_for_each(|_| run(0.0))?;
    let stats = allocated(|| run(1.0))?;
    assert_eq!((stats.allocations, stats.reallocations), (0, 0), "{stats:?}");
    assert_eq!(binding.output("Relu_2.0")?.tensor()?.to_vec::<f32>()?, LAYER_OF_ONES.repeat(64));
    Ok(())
}

fn decoding(threads: usize) -> Result<()> {
    let session =
        Session::builder(&Model::from_graph(decoder::decoder(LONGEST)?)).threads(threads).build()?;
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
    // Again and again from the start: each thread of the pool takes part at some time.
    for _ in 0..50 {
        (0..WARM_UP as i32).try_for_each(&mut run)?;
    }
    let stats = allocated(|| (WARM_UP as i32..STEPS).try_for_each(&mut run))?;
    assert_eq!((stats.allocations, stats.reallocations), (0, 0), "{stats:?}");

    let cache: usize = plain.iter().map(|(_, value)| value.byte_count()).sum();
    let held = session.memory().activations_peak;
    assert!(held < cache / 2, "{held} bytes beside a cache of {cache}: is there a second one?");
    for (past, present) in decoder::cache_names() {
        let start = binding.input_mut(&past)?.bytes_mut()?.as_ptr();
        assert_eq!(binding.output(&present)?.tensor()?.bytes()?.as_ptr(), start, "{present}");
    }

    // The same steps one by one, with caches that are handed back and forth.
    let mut logits = Vec::new();
    for position in 0..STEPS {
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
