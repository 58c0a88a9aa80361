//! Nodes of very many inputs give their answer: nothing recurs once for each of them.

use crate::support::{axis, floats};
use ort_runtime::ir::GraphBuilder;
use ort_runtime::rewrite::Level;
use ort_runtime::{DType, Model, Result, Session};

const INPUTS: usize = 100_000;

/// What `op` gives for as many inputs, all of them [1, 2].
fn of_ones_and_twos(op: &str, level: Level) -> Result<Vec<f32>> {
    let mut builder = GraphBuilder::new("many");
    let x = builder.input("x", DType::F32, &["2"]);
    let attributes = if op == "Concat" { axis(0).to_vec() } else { Vec::new() };
    let result = builder.node(op, &vec![x; INPUTS], &attributes)?;
    let model = Model::from_graph(builder.finish(&[result])?);
    let session = Session::builder(&model).threads(1).opt_level(level).build()?;
    let outputs = session.run(&[("x", floats(&[2], &[1.0, 2.0])?.into())])?;
    outputs[0].1.tensor()?.to_vec()
}

#[test]
fn they_are_folded_or_joined() -> Result<()> {
    let all = INPUTS as f32;
    for level in [Level::Disabled, Level::All] {
        for (op, expected) in
            [("Sum", [all, 2.0 * all]), ("Mean", [1.0, 2.0]), ("Max", [1.0, 2.0]), ("Min", [1.0, 2.0])]
        {
            assert_eq!(of_ones_and_twos(op, level)?, expected, "{op}");
        }
        let joined = of_ones_and_twos("Concat", level)?;
        assert_eq!(joined.len(), 2 * INPUTS);
        assert!(joined.chunks(2).all(|pair| pair == [1.0, 2.0]));
    }
    Ok(())
}
