//! Outputs that are the new values of inputs: whoever reads the old value runs first, and the
//! memory is there once.

use ort_runtime::ir::{Attribute, GraphBuilder};
use ort_runtime::{DType, ErrorKind, Model, OutputTarget, Result, RunOptions, Session, Tensor, TensorBuffer};

/// `new = weight - x`, and `late = -(weight * x)`, whose node comes last in the graph.
fn model() -> Result<Model> {
    let mut b = GraphBuilder::new("step");
    let weight = b.input("weight", DType::F32, &["4"]);
    let x = b.input("x", DType::F32, &["4"]);
    let new = b.node("Sub", &[weight, x], &[])?;
    let product = b.node("Mul", &[weight, x], &[])?;
    let late = b.node("Neg", &[product], &[])?;
    let mut graph = b.finish(&[new, late])?;
    graph.value_mut(new).name = "new".into();
    graph.value_mut(late).name = "late".into();
    Ok(Model::from_graph(graph))
}

#[test]
fn the_old_value_is_read_before_it_is_gone() -> Result<()> {
    let session = Session::builder(&model()?).update("weight", "new").build()?;
    let mut weight = TensorBuffer::new(DType::F32, &[4])?;
    weight.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
    let mut binding = session.io_binding();
    binding.bind_input("weight", weight)?;
    binding.bind_input("x", Tensor::from_slice(&[4], &[1.0f32, 1.0, 2.0, 2.0])?)?;
    binding.bind_output("new", OutputTarget::Input("weight".to_string()))?;
    binding.bind_output("late", ort_runtime::DeviceId::HOST)?;
    let late = |binding: &ort_runtime::IoBinding| -> Result<Vec<f32>> {
        binding.output("late")?.tensor()?.to_vec::<f32>()
    };
    session.run_with_binding(&mut binding, &RunOptions::default())?;
    assert_eq!(late(&binding)?, [-1.0, -2.0, -6.0, -8.0]);
    session.run_with_binding(&mut binding, &RunOptions::default())?;
    assert_eq!(late(&binding)?, [0.0, -1.0, -2.0, -4.0]);
    let buffers = binding.take_buffers();
    let [(name, weight)] = buffers.as_slice() else { panic!("{} buffers", buffers.len()) };
    assert_eq!(name, "weight");
    assert_eq!(weight.view().to_vec::<f32>()?, [-1.0, 0.0, -1.0, 0.0]);
    Ok(())
}

/// `new` is `weight` with both halves moved by `x`, one after the other; what reads the old value
/// and the half-new one comes last in the graph.
fn model_of_halves() -> Result<Model> {
    let mut b = GraphBuilder::new("halves");
    let weight = b.input("weight", DType::F32, &["4"]);
    let x = b.input("x", DType::F32, &["2"]);
    let rate = b.constant(Tensor::scalar(1.0f32)?);
    let move_rows = |b: &mut GraphBuilder, weight, first| {
        let inputs = [weight, x, rate].map(Some);
        let attrs = [("first_row", Attribute::Int(first))];
        b.add(("ort-runtime", "SGD"), &inputs, &attrs, 1, Vec::new()).map(|made| made[0])
    };
    let half = move_rows(&mut b, weight, 0)?;
    let new = move_rows(&mut b, half, 2)?;
    let of_half = b.node("Neg", &[half], &[])?;
    let of_old = b.node("Neg", &[weight], &[])?;
    let mut graph = b.finish(&[new, of_half, of_old])?;
    for (value, name) in [(new, "new"), (of_half, "of_half"), (of_old, "of_old")] {
        graph.value_mut(value).name = name.into();
    }
    Ok(Model::from_graph(graph))
}

#[test]
fn an_update_may_go_through_several_nodes() -> Result<()> {
    let model = model_of_halves()?;
    let session = Session::builder(&model).update("weight", "new").build()?;
    // Two outputs of their own, and no half-new value.
    assert_eq!(session.plan(&[])?.peak_bytes, Some(32));
    let mut weight = TensorBuffer::new(DType::F32, &[4])?;
    weight.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
    let mut binding = session.io_binding();
    binding.bind_input("weight", weight)?;
    binding.bind_input("x", Tensor::from_slice(&[2], &[1.0f32, 2.0])?)?;
    binding.bind_output("new", OutputTarget::Input("weight".to_string()))?;
    for output in ["of_half", "of_old"] {
        binding.bind_output(output, ort_runtime::DeviceId::HOST)?;
    }
    session.run_with_binding(&mut binding, &RunOptions::default())?;
    let negative = |output| binding.output(output)?.tensor()?.to_vec::<f32>();
    assert_eq!(negative("of_old")?, [-1.0, -2.0, -3.0, -4.0]);
    assert_eq!(negative("of_half")?, [-0.0, -0.0, -3.0, -4.0]);
    let buffers = binding.take_buffers();
    assert_eq!(buffers[0].1.view().to_vec::<f32>()?, [0.0, 0.0, 2.0, 2.0]);
    Ok(())
}

#[test]
fn plans_do_not_count_the_new_value() -> Result<()> {
    let peak = |session: Session| Ok::<_, ort_runtime::Error>(session.plan(&[])?.peak_bytes);
    let model = model()?;
    let apart = peak(Session::builder(&model).build()?)?;
    let updated = peak(Session::builder(&model).update("weight", "new").build()?)?;
    assert_eq!(apart.zip(updated).map(|(apart, updated)| apart - updated), Some(16));
    Ok(())
}

#[test]
fn what_cannot_be_is_refused() -> Result<()> {
    let model = model()?;
    let refused = |input: &str, output: &str| match Session::builder(&model).update(input, output).build() {
        Ok(_) => panic!("{input} and {output} are taken"),
        Err(problem) => problem,
    };
    for (input, output, part) in
        [("wieght", "new", "no input 'wieght'"), ("weight", "now", "no output 'now'")]
    {
        let problem = refused(input, output);
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
        assert!(problem.to_string().contains(part), "{problem}");
    }
    let session = Session::builder(&model).update("weight", "new").build()?;
    let given = || Tensor::from_slice(&[4], &[1.0f32; 4]);
    let problem = session.run(&[("weight", given()?.into()), ("x", given()?.into())]).unwrap_err();
    assert!(problem.to_string().contains("run_with_binding"), "{problem}");
    // The old value is read behind the new one.
    let mut b = GraphBuilder::new("circle");
    let weight = b.input("weight", DType::F32, &["4"]);
    let new = b.node("Neg", &[weight], &[])?;
    let other = b.node("Mul", &[new, weight], &[])?;
    let graph = b.finish(&[new, other])?;
    let name = graph.value(new).name.to_string();
    let circle = Session::builder(&Model::from_graph(graph)).update("weight", &name).build();
    assert!(circle.is_err_and(|problem| problem.to_string().contains("old value is read after the new one")));
    Ok(())
}
