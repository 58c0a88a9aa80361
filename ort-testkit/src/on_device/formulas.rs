//! An operator that providers know only by the formula of its record, and its gradient.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::pass::expand_gradients;
use ort_core::session::{Model, Session};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{Tensor, Value};

use super::typed::{Case, case, check_all, run};
use super::{assert_close, cpu, numbers};

/// Rows and columns of the operands.
const ROWS: usize = 5;
const COLUMNS: usize = 7;

/// Checks `GatedAdd` and its gradient.
///
/// # Errors
///
/// The device or the CPU does not run a node.
///
/// # Panics
///
/// A result differs.
pub fn gated_add(device: &Arc<dyn Device>) -> Result<()> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (shape, gate) in [
            (&[ROWS, 67][..], &[ROWS, 1][..]),
            (&[2, 3, 33], &[2, 3, 1]),
            (&[300, 512], &[300, 1]),
            (&[1], &[1]),
            // No rows: CUDA refuses a launch without blocks.
            (&[0, 4], &[0, 1]),
        ] {
            let inputs = vec![run(dtype, shape), run(dtype, shape), run(dtype, gate)];
            cases.push(Case { domain: MICROSOFT, ..case("GatedAdd", inputs, &[]) });
        }
    }
    check_all(device, &cases);
    let (model, inputs) = gradient_model()?;
    let expected = gradients(&inputs)?;
    for device in [device.clone(), cpu()?] {
        let provider = device.info().provider;
        // With rewrites, because constant folding removes the shapes that gradients compute.
        let session = Session::builder(&model).threads(2).device(device).build()?;
        let given: Vec<(&str, Value)> = inputs.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        for ((_, actual), expected) in session.run(&given)?.iter().zip(&expected) {
            assert_close(actual, expected, 1e-5, &format!("a gradient of GatedAdd on {provider}"))?;
        }
    }
    Ok(())
}

/// The gradients of `GatedAdd(x, y, gate)` squared, by all three inputs; and these inputs.
fn gradient_model() -> Result<(Model, Vec<(String, Value)>)> {
    let mut builder = GraphBuilder::new("gradient");
    let (mut ids, mut values) = (Vec::new(), Vec::new());
    for (seed, (name, columns)) in [("x", COLUMNS), ("y", COLUMNS), ("gate", 1)].into_iter().enumerate() {
        ids.push(Some(builder.input(name, DType::F32, &[&ROWS.to_string(), &columns.to_string()])));
        let tensor = Tensor::from_vec(&[ROWS, columns], numbers(ROWS * columns, seed))?;
        values.push((name.to_owned(), tensor.into()));
    }
    let sum = builder.add((MICROSOFT, "GatedAdd"), &ids, &[], 1, Vec::new())?;
    let square = builder.node("Mul", &[sum[0], sum[0]], &[])?;
    let graph = builder.finish(&[square])?;
    let y = graph.value(square).name.to_string();
    let xs = ["x", "y", "gate"].map(str::to_owned).to_vec();
    let attrs = [("xs", Attribute::Strings(xs)), ("y", Attribute::String(y))];
    let mut builder = GraphBuilder::extend(graph);
    let all = builder.add(("ai.onnx.preview.training", "Gradient"), &ids, &attrs, 3, Vec::new())?;
    let mut graph = builder.finish(&all)?;
    expand_gradients(&mut graph)?;
    Ok((Model::from_graph(graph), values))
}

/// What calculus gives: `2 s`, `2 s gate` and the row sums of `2 s y`, where `s = x + y gate`.
fn gradients(inputs: &[(String, Value)]) -> Result<[Value; 3]> {
    let of = |index: usize| inputs[index].1.tensor()?.to_vec::<f32>();
    let (x, y, gate) = (of(0)?, of(1)?, of(2)?);
    let twice: Vec<f32> = (0..x.len()).map(|at| 2.0 * (x[at] + y[at] * gate[at / COLUMNS])).collect();
    let by_y = (0..x.len()).map(|at| twice[at] * gate[at / COLUMNS]).collect();
    let row = |row: usize| (row * COLUMNS..(row + 1) * COLUMNS).map(|at| twice[at] * y[at]).sum();
    let by_gate = (0..ROWS).map(row).collect();
    let wide = [ROWS, COLUMNS];
    Ok([
        Tensor::from_vec(&wide, twice.clone())?.into(),
        Tensor::from_vec(&wide, by_y)?.into(),
        Tensor::from_vec::<f32>(&[ROWS, 1], by_gate)?.into(),
    ])
}
