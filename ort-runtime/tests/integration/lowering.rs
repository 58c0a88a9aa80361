//! An operator that no provider claims is decomposed, and one that has no decomposition is an
//! error.

use crate::support::{Without, axis, floats};
use ort_runtime::ir::GraphBuilder;
use ort_runtime::rewrite::Level;
use ort_runtime::{DType, ErrorKind, Model, Result, Session};

fn softmax() -> Result<Model> {
    let mut builder = GraphBuilder::new("softmax");
    let x = builder.input("x", DType::F32, &["n", "3"]);
    let y = builder.node("LogSoftmax", &[x], &axis(-1))?;
    Ok(Model::from_graph(builder.finish(&[y])?))
}

fn operators(session: &Session) -> Vec<String> {
    session.steps().into_iter().map(|(_, op, _)| op).collect()
}

#[test]
fn the_parts_run_in_place_of_the_operator() -> Result<()> {
    let model = softmax()?;
    let x = floats(&[2, 3], &[1.0, 2.0, 3.0, 0.0, 0.0, 0.0])?;
    // NumPy's x - log(sum(exp(x))).
    let third = -1.098_612_3;
    let expected = [-2.407_606, -1.407_606, -0.407_606, third, third, third];
    for (without, parts) in [(&[][..], 1), (&["LogSoftmax"][..], 2), (&["LogSoftmax", "Softmax"][..], 3)] {
        let session = Session::builder(&model).device(Without::new(without)?).build()?;
        let operators = operators(&session);
        assert!(operators.len() >= parts, "{operators:?}");
        assert!(operators.iter().all(|op| !without.contains(&op.as_str())), "{operators:?}");
        let outputs = session.run(&[("x", x.clone().into())])?;
        let actual = outputs[0].1.tensor()?.to_vec::<f32>()?;
        let near = actual.iter().zip(expected).all(|(a, e): (&f32, f32)| (a - e).abs() < 1e-5);
        assert!(near, "without {without:?}: {actual:?}, expected {expected:?}");
    }
    Ok(())
}

#[test]
fn what_nothing_runs_is_one_error_that_lists_everything() -> Result<()> {
    let mut builder = GraphBuilder::new("missing");
    let x = builder.input("x", DType::F32, &["3"]);
    let a = builder.node("Exp", &[x], &[])?;
    let b = builder.node("Exp", &[a], &[])?;
    let c = builder.node("Erf", &[b], &[])?;
    let model = Model::from_graph(builder.finish(&[c])?);
    // Fused, the chain would be one operator that the device has.
    let builder = Session::builder(&model).opt_level(Level::Disabled);
    let problem = builder.device(Without::new(&["Exp", "Erf"])?).build().err();
    let problem = problem.expect("two operators are missing");
    assert_eq!(problem.kind(), ErrorKind::NotImplemented);
    assert_eq!(
        problem.to_string(),
        "not implemented: no execution provider runs \
         Exp: cpu: this device is without it (2 nodes, first 'Exp_0' of (float[3])); \
         Erf: cpu: this device is without it (1 node, first 'Erf_2' of (float[3])); \
         `ort check MODEL` lists everything that is unsupported"
    );
    Ok(())
}
