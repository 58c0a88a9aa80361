//! What depends on constants alone is computed while the session is built, unless that would make
//! the constants larger.

use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::rewrite::Level;
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

/// Rows and columns of the weights: larger than what is folded at any price.
const SHAPE: [usize; 2] = [64, 96];

/// A case: how the parts of the weights are read, and the nodes that are left.
struct Case {
    name: &'static str,
    /// The parts that are joined, as first row and end.
    parts: &'static [[i64; 2]],
    /// Whether the whole weights are read, too.
    reads_whole: bool,
    left: &'static [&'static str],
}

const CASES: &[Case] = &[
    // As exporters reorder the gates of an LSTM.
    Case { name: "reordered", parts: &[[0, 16], [48, 64], [16, 48]], reads_whole: false, left: &["Add"] },
    Case { name: "a part", parts: &[[16, 48]], reads_whole: false, left: &["Add"] },
    Case {
        name: "reordered, and read whole",
        parts: &[[0, 16], [48, 64], [16, 48]],
        reads_whole: true,
        left: &["Slice", "Slice", "Slice", "Concat", "Add", "Add"],
    },
    Case { name: "twice as large", parts: &[[0, 64], [0, 64]], reads_whole: false, left: &["Concat", "Add"] },
];

/// The sum of the input and the joined parts.
fn model(case: &Case) -> Result<Model> {
    let mut builder = GraphBuilder::new("folding");
    let count = SHAPE[0] * SHAPE[1];
    let numbers: Vec<f32> = (0..count).map(|index| index as f32).collect();
    let weights = builder.constant(Tensor::from_slice(&SHAPE, &numbers)?);
    let x = builder.input("x", DType::F32, &["1", "96"]);
    let mut parts: Vec<ValueId> = Vec::new();
    for [first, end] in case.parts {
        let [first, end] = [*first, *end].map(|row| Tensor::from_slice(&[1], &[row]));
        let (first, end) = (builder.constant(first?), builder.constant(end?));
        let axis = builder.constant(Tensor::from_slice(&[1], &[0_i64])?);
        parts.push(builder.node("Slice", &[weights, first, end, axis], &[])?);
    }
    let joined = builder.node("Concat", &parts, &[("axis", Attribute::Int(0))])?;
    let mut outputs = vec![builder.node("Add", &[joined, x], &[])?];
    if case.reads_whole {
        outputs.push(builder.node("Add", &[weights, x], &[])?);
    }
    Ok(Model::from_graph(builder.finish(&outputs)?))
}

#[test]
fn constants_are_folded_where_they_do_not_grow() -> Result<()> {
    for case in CASES {
        let model = model(case)?;
        let row: Vec<f32> = (0..SHAPE[1]).map(|index| index as f32 / 7.0).collect();
        let inputs = [("x", Value::from(Tensor::from_slice(&[1, SHAPE[1]], &row)?))];
        let folded = Session::builder(&model).threads(1).build()?;
        let plain = Session::builder(&model).threads(1).opt_level(Level::Disabled).build()?;
        let left: Vec<String> = folded.steps().into_iter().map(|(_, op, _)| op).collect();
        assert_eq!(left, case.left, "{}", case.name);
        let (with, without) = (folded.run(&inputs)?, plain.run(&inputs)?);
        for ((name, with), (_, without)) in with.iter().zip(&without) {
            let [with, without] = [with, without].map(|value| value.tensor().ok().and_then(Tensor::bytes));
            assert!(with.is_some() && with == without, "{}: output {name}", case.name);
        }
    }
    Ok(())
}
