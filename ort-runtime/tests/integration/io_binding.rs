//! Bound runs give the bits of plain runs, in the memory that is bound, and refuse what does not
//! fit before a node runs.

#[path = "../../examples/support/decoder.rs"]
mod decoder;

use crate::support::{LAYER_OF_ONES, axis, counter, floats, ints, layer, numbers, session};
use ort_runtime::ir::{Graph, GraphBuilder};
use ort_runtime::{
    DType, DeviceId, ErrorKind, IoBinding, OutputTarget, Profile, Result, RunOptions, Session, Tensor,
    TensorBuffer, Value,
};

fn run(session: &Session, binding: &mut IoBinding) -> Result<()> {
    session.run_with_binding(binding, &RunOptions::default())
}

fn address(binding: &IoBinding, output: &str) -> Result<*const u8> {
    Ok(binding.output(output)?.tensor()?.bytes()?.as_ptr())
}

/// Outputs of every kind: computed, an input, a constant, known from the shapes, the same value
/// twice, of unknown size.
fn outputs_of_every_kind() -> Result<Graph> {
    let mut builder = GraphBuilder::new("kinds");
    let x = builder.input("x", DType::F32, &["rows", "4"]);
    let constant = builder.constant(floats(&[2], &[5.0, 6.0])?);
    let sum = builder.node("Exp", &[x], &[])?;
    let later = builder.node("Mul", &[sum, x], &[])?;
    let shape = builder.node("Shape", &[x], &[])?;
    let places = builder.node("NonZero", &[x], &[])?;
    let twin = builder.node("Identity", &[sum], &[])?;
    builder.finish(&[later, x, constant, shape, sum, twin, places])
}

fn names(session: &Session) -> Vec<String> {
    session.outputs().into_iter().map(|output| output.name).collect()
}

fn same_bits(one: &[(String, Value)], other: &[(String, Value)]) -> Result<()> {
    assert_eq!(one.len(), other.len());
    for ((name, one), (other_name, other)) in one.iter().zip(other) {
        assert_eq!(name, other_name);
        let (one, other) = (one.tensor()?, other.tensor()?);
        assert_eq!((one.dtype(), one.shape()), (other.dtype(), other.shape()), "{name}");
        assert_eq!(one.bytes(), other.bytes(), "{name}");
    }
    Ok(())
}

#[test]
fn outputs_on_the_host_have_the_bits_of_a_plain_run() -> Result<()> {
    let session = session(outputs_of_every_kind()?)?;
    let mut binding = session.io_binding();
    names(&session).iter().try_for_each(|name| binding.bind_output(name, DeviceId::HOST))?;
    for rows in [3, 1, 3, 5] {
        let x = numbers(&[rows, 4], rows)?;
        let expected = session.run(&[("x", x.clone().into())])?;
        binding.bind_input("x", x)?;
        run(&session, &mut binding)?;
        same_bits(&binding.get_outputs()?, &expected)?;
        same_bits(&binding.copy_outputs_to_cpu()?, &expected)?;
    }
    Ok(())
}

#[test]
fn buffers_of_the_caller_have_them_too() -> Result<()> {
    let session = session(outputs_of_every_kind()?)?;
    let x = numbers(&[3, 4], 1)?;
    let expected = session.run(&[("x", x.clone().into())])?;
    let mut binding = session.io_binding();
    binding.bind_input("x", x)?;
    for (name, value) in &expected {
        let tensor = value.tensor()?;
        binding.bind_output(name, TensorBuffer::new(tensor.dtype(), tensor.shape())?)?;
    }
    let first = names(&session).remove(0);
    for _ in 0..2 {
        run(&session, &mut binding)?;
        let before = address(&binding, &first)?;
        same_bits(&binding.get_outputs()?, &expected)?;
        assert_eq!(address(&binding, &first)?, before, "the memory stays");
    }
    Ok(())
}

#[test]
fn only_bound_outputs_are_computed() -> Result<()> {
    let session = session(outputs_of_every_kind()?)?;
    let expected = session.run(&[("x", numbers(&[2, 4], 0)?.into())])?;
    let mut binding = session.io_binding();
    binding.bind_input("x", numbers(&[2, 4], 0)?)?;
    let wanted = &expected[4].0;
    binding.bind_output(wanted, DeviceId::HOST)?;
    let profile = Profile::default();
    let options = RunOptions { profile: Some(&profile), ..RunOptions::default() };
    session.run_with_binding(&mut binding, &options)?;
    let operators: Vec<_> = profile.events().into_iter().map(|event| event.op).collect();
    assert_eq!(operators, ["Exp"]);
    same_bits(&binding.get_outputs()?, &expected[4..5])
}

#[test]
fn a_buffer_of_an_input_is_written_between_runs() -> Result<()> {
    let session = session(layer()?)?;
    let mut binding = session.io_binding();
    binding.bind_input("x", TensorBuffer::new(DType::F32, &[2, 3])?)?;
    let output = &names(&session)[0];
    binding.bind_output(output, TensorBuffer::new(DType::F32, &[2, 4])?)?;
    for value in [0.5f32, 2.0, 1.0] {
        binding.input_mut("x")?.as_mut_slice::<f32>()?.fill(value);
        run(&session, &mut binding)?;
    }
    let result = binding.output(output)?.tensor()?.to_vec::<f32>()?;
    assert_eq!(result, [LAYER_OF_ONES, LAYER_OF_ONES].concat());
    Ok(())
}

#[test]
fn memory_of_the_session_is_used_again_once_the_caller_let_go() -> Result<()> {
    let session = session(layer()?)?;
    let output = &names(&session)[0];
    let mut binding = session.io_binding();
    binding.bind_input("x", numbers(&[8, 3], 0)?)?;
    binding.bind_output(output, DeviceId::HOST)?;
    run(&session, &mut binding)?;
    let first = address(&binding, output)?;
    run(&session, &mut binding)?;
    assert_eq!(address(&binding, output)?, first);
    let held = binding.get_outputs()?;
    let elements = held[0].1.tensor()?.to_vec::<f32>()?;
    binding.bind_input("x", numbers(&[8, 3], 3)?)?;
    run(&session, &mut binding)?;
    assert_ne!(address(&binding, output)?, first, "what the caller holds is not written");
    assert_eq!(held[0].1.tensor()?.to_vec::<f32>()?, elements);
    Ok(())
}

#[test]
fn outputs_of_sequences_and_loops_are_bound_to_the_host() -> Result<()> {
    let session = session(counter()?)?;
    let output = &names(&session)[0];
    let mut binding = session.io_binding();
    binding.bind_input("x", floats(&[2], &[1.0, 2.0])?)?;
    binding.bind_output(output, DeviceId::HOST)?;
    for count in [2i64, 5] {
        binding.bind_input("count", Tensor::scalar(count)?)?;
        run(&session, &mut binding)?;
        let result = binding.output(output)?.tensor()?.to_vec::<f32>()?;
        assert_eq!(result, [1.0 + count as f32, 2.0 + count as f32]);
    }
    Ok(())
}

/// An input whose bytes begin at an odd address is copied when it is bound.
#[test]
fn unaligned_inputs_are_read_right() -> Result<()> {
    let session = session(layer()?)?;
    let mut bytes = vec![0u8];
    bytes.extend([1.0f32; 6].iter().flat_map(|value| value.to_le_bytes()));
    let x = Tensor::from_bytes(DType::F32, &[2, 3], bytes::Bytes::from(bytes).slice(1..))?;
    let output = &names(&session)[0];
    let mut binding = session.io_binding();
    binding.bind_input("x", x)?;
    binding.bind_output(output, DeviceId::HOST)?;
    run(&session, &mut binding)?;
    let result = binding.output(output)?.tensor()?.to_vec::<f32>()?;
    assert_eq!(result, [LAYER_OF_ONES, LAYER_OF_ONES].concat());
    Ok(())
}

#[test]
fn devices_are_waited_for() -> Result<()> {
    let session = session(layer()?)?;
    let binding = session.io_binding();
    binding.synchronize_inputs()?;
    binding.synchronize_outputs()
}

#[test]
fn cleared_bindings_must_be_made_again() -> Result<()> {
    let session = session(layer()?)?;
    let output = &names(&session)[0];
    let mut binding = session.io_binding();
    binding.bind_input("x", numbers(&[2, 3], 0)?)?;
    binding.bind_output(output, DeviceId::HOST)?;
    run(&session, &mut binding)?;
    binding.clear_binding_inputs();
    let problem = run(&session, &mut binding).expect_err("x is not bound");
    assert!(problem.to_string().contains("input 'x' (float[rows, 3]) is not bound"), "{problem}");
    binding.bind_input("x", numbers(&[2, 3], 0)?)?;
    binding.clear_binding_outputs();
    let problem = run(&session, &mut binding).expect_err("nothing is bound to go anywhere");
    assert!(problem.to_string().contains("no output is bound"), "{problem}");
    Ok(())
}

/// A name, what binds it wrongly and then runs, and what the error says.
type Refusal = (&'static str, fn(&Session, &mut IoBinding) -> Result<()>, &'static str);

const REFUSALS: &[Refusal] = &[
    ("unknown input", |_, binding| binding.bind_input("y", ints(&[1])?), "the model has no input 'y'"),
    ("unknown output", |_, binding| binding.bind_output("y", DeviceId::HOST), "the model has no output 'y'"),
    (
        "type of an input",
        |_, binding| binding.bind_input("x", ints(&[1])?),
        "input 'x' is int64, expected float",
    ),
    (
        "size of an input",
        |_, binding| binding.bind_input("x", floats(&[1, 2], &[1.0, 2.0])?),
        "input 'x' is float[rows, 3], it cannot be bound to shape [1, 2]",
    ),
    (
        "type of an output",
        |_, binding| binding.bind_output("Relu_2.0", TensorBuffer::new(DType::I64, &[2, 4])?),
        "output 'Relu_2.0' is float, it cannot be bound to int64",
    ),
    (
        "rank of an output",
        |_, binding| binding.bind_output("Relu_2.0", TensorBuffer::new(DType::F32, &[8])?),
        "it cannot be bound to shape [8]",
    ),
    (
        "size of an output",
        |session, binding| {
            binding.bind_output("Relu_2.0", TensorBuffer::new(DType::F32, &[3, 4])?)?;
            run(session, binding)
        },
        "output 'Relu_2.0': it is float[2, 4], but it is bound to float[3, 4]",
    ),
    (
        "bound twice",
        |_, binding| {
            binding.bind_output("Relu_2.0", DeviceId::HOST)?;
            binding.bind_output("Relu_2.0", DeviceId::HOST)
        },
        "output 'Relu_2.0' is bound already",
    ),
    (
        "too small",
        |_, _| {
            let memory =
                TensorBuffer::new(DType::F32, &[7])?.into_dlpack(ort_runtime::dlpack::Layout::Versioned)?;
            let buffer = memory.into_buffer(28)?;
            TensorBuffer::from_buffer(DType::F32, &[2, 4], buffer).map(|_| ())
        },
        "a float tensor of shape [2, 4] takes 32 bytes, the buffer has 28",
    ),
    (
        "not bound",
        |session, binding| {
            run(session, binding)?;
            binding.output("Relu_2.0").map(|_| ())
        },
        "no output is bound",
    ),
    (
        "not run",
        |_, binding| {
            binding.bind_output("Relu_2.0", DeviceId::HOST)?;
            binding.output("Relu_2.0").map(|_| ())
        },
        "output 'Relu_2.0' is not computed",
    ),
    (
        "held",
        |session, binding| {
            binding.bind_output("Relu_2.0", TensorBuffer::new(DType::F32, &[2, 4])?)?;
            run(session, binding)?;
            let _held = binding.get_outputs()?;
            run(session, binding)
        },
        "output 'Relu_2.0': the memory is still held by a tensor that was made of it",
    ),
    (
        "another device",
        |_, binding| binding.bind_output("Relu_2.0", DeviceId(77)),
        "output 'Relu_2.0': the session has no memory of device 77; its memories are host",
    ),
    (
        "no buffer to share",
        |_, binding| binding.bind_output("Relu_2.0", OutputTarget::Input("x".to_string())),
        "which is not bound to a buffer",
    ),
    (
        "no buffer to write",
        |_, binding| binding.input_mut("x").map(|_| ()),
        "input 'x' is not bound to a buffer",
    ),
];

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let session = session(layer()?)?;
    assert_eq!(names(&session), ["Relu_2.0"]);
    for (case, bind, expected) in REFUSALS {
        let mut binding = session.io_binding();
        binding.bind_input("x", numbers(&[2, 3], 0)?)?;
        let problem = bind(&session, &mut binding).expect_err(case);
        assert!(problem.to_string().contains(expected), "{case}: {problem}");
    }
    Ok(())
}

#[test]
fn a_binding_of_another_session_is_refused() -> Result<()> {
    let mut binding = session(layer()?)?.io_binding();
    let problem = run(&session(layer()?)?, &mut binding).expect_err("it is another session");
    assert!(problem.to_string().contains("the binding is of another session"), "{problem}");
    Ok(())
}

#[test]
fn sizes_that_only_the_run_tells_are_refused_by_their_node() -> Result<()> {
    let mut builder = GraphBuilder::new("places");
    let x = builder.input("x", DType::F32, &["n"]);
    let sizes = builder.input("sizes", DType::I64, &["1"]);
    let places = builder.node("Expand", &[x, sizes], &[])?;
    let session = session(builder.finish(&[places])?)?;
    let mut binding = session.io_binding();
    binding.bind_input("x", floats(&[1], &[3.0])?)?;
    binding.bind_output("Expand_0.0", TensorBuffer::new(DType::F32, &[4])?)?;
    binding.bind_input("sizes", ints(&[4])?)?;
    run(&session, &mut binding)?;
    assert_eq!(binding.output("Expand_0.0")?.tensor()?.to_vec::<f32>()?, [3.0; 4]);
    binding.bind_input("sizes", ints(&[5])?)?;
    let problem = run(&session, &mut binding).expect_err("it has 5 elements");
    assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
    let expected = "node 'Expand_0' (Expand): the output is float[5], but it is bound to float[4]";
    assert!(problem.to_string().contains(expected), "{problem}");
    // The buffer is there for the next run.
    binding.bind_input("sizes", ints(&[4])?)?;
    run(&session, &mut binding)
}

/// `x + y` and `x * 2` over an `x` whose buffer shall hold the sum.
fn sum_in_place(later: bool) -> Result<Session> {
    let mut builder = GraphBuilder::new("sum");
    let x = builder.input("x", DType::F32, &["n"]);
    let y = builder.input("y", DType::F32, &["m"]);
    let product = builder.node("Mul", &[x, x], &[])?;
    let sum = builder.node("Add", &[x, y], &[])?;
    let after = builder.node("Sub", &[if later { x } else { sum }, sum], &[])?;
    session(builder.finish(&[sum, after, product])?)
}

#[test]
fn an_output_takes_the_place_of_an_input() -> Result<()> {
    let session = sum_in_place(false)?;
    let mut binding = session.io_binding();
    let x = floats(&[3], &[1.0, 2.0, 3.0])?;
    binding.bind_input("x", TensorBuffer::copy_of(&x)?)?;
    binding.bind_input("y", floats(&[3], &[10.0, 20.0, 30.0])?)?;
    binding.bind_output("Add_1.0", OutputTarget::Input("x".to_string()))?;
    binding.bind_output("Mul_0.0", DeviceId::HOST)?;
    let start = binding.input_mut("x")?.bytes_mut()?.as_ptr();
    for round in 1..4 {
        run(&session, &mut binding)?;
        let sum: Vec<f32> = (1..4).map(|i| (i + 10 * i * round) as f32).collect();
        assert_eq!(binding.output("Add_1.0")?.tensor()?.to_vec::<f32>()?, sum);
        assert_eq!(address(&binding, "Add_1.0")?, start);
        let before: Vec<f32> = (1..4).map(|i| (i + 10 * i * (round - 1)) as f32).collect();
        let squares: Vec<f32> = before.iter().map(|x| x * x).collect();
        assert_eq!(binding.output("Mul_0.0")?.tensor()?.to_vec::<f32>()?, squares);
    }
    Ok(())
}

/// What binds an output to an input that it cannot share memory with, and why.
type NoShare = (fn() -> Result<Session>, &'static str, [usize; 2], &'static str);

const NO_SHARES: &[NoShare] = &[
    (|| sum_in_place(true), "Add_1.0", [3, 3], "the input is still read afterwards by node 'Sub_2'"),
    (|| sum_in_place(false), "Mul_0.0", [3, 3], "reads it twice"),
    (|| sum_in_place(false), "Add_1.0", [1, 3], "it is float[3], the input float[1]"),
    (|| sum_in_place(false), "Sub_2.0", [3, 3], "node 'Sub_2' (Sub) does not compute it in place"),
    (
        || {
            let mut builder = GraphBuilder::new("softmax");
            let x = builder.input("x", DType::F32, &["n"]);
            builder.input("y", DType::F32, &["m"]);
            let sum = builder.node("Softmax", &[x], &axis(0))?;
            session(builder.finish(&[sum, x])?)
        },
        "Softmax_0.0",
        [3, 3],
        "it is an output itself",
    ),
];

#[test]
fn an_output_that_cannot_share_says_why() -> Result<()> {
    for (make, output, [x, y], expected) in NO_SHARES {
        let session = make()?;
        let mut binding = session.io_binding();
        binding.bind_input("x", TensorBuffer::new(DType::F32, &[*x])?)?;
        binding.bind_input("y", TensorBuffer::new(DType::F32, &[*y])?)?;
        binding.bind_output(output, OutputTarget::Input("x".to_string()))?;
        for other in names(&session).iter().filter(|name| name != output) {
            binding.bind_output(other, DeviceId::HOST)?;
        }
        let problem = run(&session, &mut binding).expect_err(expected);
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
        let text = problem.to_string();
        assert!(text.contains("cannot be in the memory of input 'x'") && text.contains(expected), "{text}");
    }
    Ok(())
}

#[test]
fn caches_longer_than_their_buffer_are_refused() -> Result<()> {
    // Positions go further than the buffers.
    let session = session(decoder::decoder(9)?)?;
    let mut binding = session.io_binding();
    binding.bind_input("input_ids", Tensor::from_slice(&[1, 1], &[3i64])?)?;
    for (past, present) in decoder::cache_names() {
        binding.bind_input(&past, TensorBuffer::new(DType::F32, &decoder::cache_shape(8))?)?;
        binding.bind_output(&present, OutputTarget::Input(past))?;
    }
    binding.bind_output("logits", DeviceId::HOST)?;
    let step = |binding: &mut IoBinding, position: i32| -> Result<()> {
        binding.bind_input("seqlens_k", Tensor::from_slice(&[1], &[position])?)?;
        binding.bind_input("total_sequence_length", Tensor::from_slice(&[1], &[position + 1])?)?;
        run(&session, binding)
    };
    (0..8).try_for_each(|position| step(&mut binding, position))?;
    let before = binding.copy_outputs_to_cpu()?;
    let problem = step(&mut binding, 8).expect_err("there is no ninth row");
    assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
    let expected = "the cache that past and present share has 8 rows, the run needs 9";
    assert!(problem.to_string().contains(expected), "{problem}");
    // Nothing was written: the last step gives the same again.
    step(&mut binding, 7)?;
    same_bits(&binding.copy_outputs_to_cpu()?, &before)
}

/// Outputs of one step are inputs of the next: what grows has memory of its own each time.
#[test]
fn a_growing_cache_goes_from_output_to_input() -> Result<()> {
    let mut builder = GraphBuilder::new("growing");
    let past = builder.input("past", DType::F32, &["past", "2"]);
    let new = builder.input("new", DType::F32, &["1", "2"]);
    let present = builder.node("Concat", &[past, new], &axis(0))?;
    let sum = builder.node("Mul", &[new, new], &[])?;
    let session = session(builder.finish(&[present, sum])?)?;
    let mut binding = session.io_binding();
    binding.bind_input("past", floats(&[0, 2], &[])?)?;
    binding.bind_output("Concat_0.0", DeviceId::HOST)?;
    binding.bind_output("Mul_1.0", DeviceId::HOST)?;
    let mut expected = Vec::new();
    for step in 0..5 {
        binding.bind_input("new", floats(&[1, 2], &[step as f32; 2])?)?;
        run(&session, &mut binding)?;
        expected.extend([step as f32; 2]);
        let present = binding.get_outputs()?.remove(0).1;
        assert_eq!(present.tensor()?.to_vec::<f32>()?, expected);
        binding.bind_input("past", present)?;
    }
    Ok(())
}

#[test]
fn a_static_cache_is_scattered_into() -> Result<()> {
    let mut builder = GraphBuilder::new("scatter");
    let past = builder.input("past", DType::F32, &["1", "1", "4", "2"]);
    let update = builder.input("update", DType::F32, &["1", "1", "1", "2"]);
    let place = builder.input("place", DType::I64, &["1"]);
    let present = builder.node("TensorScatter", &[past, update, place], &[])?;
    let session = session(builder.finish(&[present])?)?;
    let mut binding = session.io_binding();
    binding.bind_input("past", TensorBuffer::new(DType::F32, &[1, 1, 4, 2])?)?;
    binding.bind_output("TensorScatter_0.0", OutputTarget::Input("past".to_string()))?;
    for row in 0..4i64 {
        binding.bind_input("update", floats(&[1, 1, 1, 2], &[row as f32 + 1.0; 2])?)?;
        binding.bind_input("place", ints(&[row])?)?;
        run(&session, &mut binding)?;
    }
    let cache = binding.output("TensorScatter_0.0")?.tensor()?.to_vec::<f32>()?;
    assert_eq!(cache, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    Ok(())
}

/// Memory that another library lends through DLPack is read and written where it lies.
#[test]
fn memory_of_other_libraries_is_bound() -> Result<()> {
    let session = session(layer()?)?;
    let lent = floats(&[2, 3], &[1.0; 6])?;
    let x = Tensor::from_dlpack(lent.to_dlpack()?)?;
    let start = |tensor: &Tensor| tensor.bytes().map(|bytes| bytes.as_ptr());
    assert_eq!(start(&x), start(&lent));
    let y = TensorBuffer::new(DType::F32, &[2, 4])?.into_dlpack(ort_runtime::dlpack::Layout::Versioned)?;
    let mut binding = session.io_binding();
    binding.bind_input("x", x)?;
    binding.bind_output("Relu_2.0", TensorBuffer::from_dlpack(y)?)?;
    run(&session, &mut binding)?;
    let result = binding.output("Relu_2.0")?.tensor()?.to_vec::<f32>()?;
    assert_eq!(result, [LAYER_OF_ONES, LAYER_OF_ONES].concat());
    Ok(())
}

#[test]
fn an_output_kept_after_its_session_keeps_its_own_bytes_only() -> Result<()> {
    let session = session(layer()?)?;
    let kept = session.run(&[("x", numbers(&[5, 3], 0)?.into())])?.remove(0).1;
    let mut binding = session.io_binding();
    binding.bind_input("x", numbers(&[5, 3], 0)?)?;
    binding.bind_output("Relu_2.0", DeviceId::HOST)?;
    run(&session, &mut binding)?;
    let bound = binding.get_outputs()?.remove(0).1;
    let elements = kept.tensor()?.to_vec::<f32>()?;
    drop((binding, session));
    assert_eq!(kept.tensor()?.to_vec::<f32>()?, elements);
    assert_eq!(bound.tensor()?.to_vec::<f32>()?, elements);
    Ok(())
}
