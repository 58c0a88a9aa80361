//! What stands in the way of a gradient is named, all of it at once.

use ort_runtime::dtype::DType;
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::pass::{Blocking, add_backward, blocking_nodes};
use ort_runtime::spec::{OpSpec, Registry};
use ort_runtime::{ErrorKind, Result, Tensor};

fn same_bits(b: &mut GraphBuilder, x: ValueId) -> Result<ValueId> {
    b.node("BitCast", &[x], &[("to", Attribute::Int(i64::from(DType::F32.onnx_code())))])
}

/// `Sin` between two nodes without gradient, and another of them beside the way.
fn obstructed() -> Result<(Graph, ValueId, ValueId, ValueId)> {
    let mut b = GraphBuilder::new("obstructed");
    let x = b.input("x", DType::F32, &["n", "4"]);
    let other = b.input("other", DType::F32, &["n", "4"]);
    let first = same_bits(&mut b, x)?;
    let sine = b.node("Sin", &[first], &[])?;
    let second = same_bits(&mut b, sine)?;
    let beside = same_bits(&mut b, other)?;
    let sum = b.node("Add", &[second, beside], &[])?;
    let graph = b.finish(&[sum])?;
    Ok((graph, x, other, sum))
}

#[test]
fn all_nodes_are_listed() -> Result<()> {
    let (graph, x, other, sum) = obstructed()?;
    let found = blocking_nodes(&graph, sum, &[x])?;
    let reason = "its output is the same bits as another type".to_string();
    let nodes = vec!["BitCast_2".to_string(), "BitCast_0".to_string()];
    assert_eq!(found, [Blocking { operator: "BitCast".into(), reason, nodes }]);
    assert_eq!(blocking_nodes(&graph, sum, &[other])?.len(), 1);
    let before = graph.nodes.len();
    let problem = add_backward(&mut graph.clone(), sum, &[x, other]).err().map(|problem| {
        assert_eq!(problem.kind(), ErrorKind::NotImplemented);
        problem.to_string()
    });
    let problem = problem.unwrap_or_default();
    assert!(problem.contains("BitCast: its output is the same bits as another type (3 nodes"), "{problem}");
    assert_eq!(graph.nodes.len(), before);
    Ok(())
}

#[test]
fn the_error_has_an_end() -> Result<()> {
    let mut b = GraphBuilder::new("many");
    let x = b.input("x", DType::F32, &["2", "8"]);
    let mut sum = x;
    for _ in 0..2000 {
        sum = same_bits(&mut b, sum)?;
    }
    let mut graph = b.finish(&[sum])?;
    let problem = add_backward(&mut graph, sum, &[x]).err().map(|problem| problem.to_string());
    let problem = problem.unwrap_or_default();
    assert!(problem.contains("(2000 nodes, first 'BitCast_1999')") && problem.len() < 400, "{problem}");
    Ok(())
}

#[test]
fn rounding_has_slope_zero_and_no_obstacle() -> Result<()> {
    for op in ["Floor", "Round", "Sign", "Hardmax", "Bernoulli", "RandomNormalLike"] {
        let mut b = GraphBuilder::new(op);
        let x = b.input("x", DType::F32, &["2", "8"]);
        let y = b.node(op, &[x], &[])?;
        let z = b.node("Mul", &[x, y], &[])?;
        let mut graph = b.finish(&[z])?;
        assert_eq!(blocking_nodes(&graph, z, &[x])?, [], "{op}");
        assert!(add_backward(&mut graph, z, &[x])?.iter().all(Option::is_some), "{op}");
    }
    Ok(())
}

/// Sizes and positions of hostile models are at most an error. The error for a position is our own
/// if the number of parts is known.
#[test]
fn positions_in_a_sequence_do_not_overflow() -> Result<()> {
    const MAX: i64 = i64::MAX;
    let scalar = |size: i64| Some((vec![], vec![size]));
    let list = |sizes: &[i64]| Some((vec![sizes.len()], sizes.to_vec()));
    for (size, split, position, is_outside) in [
        ("4", None, 3, false),
        ("4", None, 4, true),
        ("4", None, -5, true),
        ("4", None, MAX, true),
        ("4", None, i64::MIN, true),
        ("4", scalar(3), 2, true),
        ("4", scalar(3), MAX, true),
        ("4", scalar(MAX), 0, false),
        ("4", list(&[1, 3]), 2, true),
        ("n", None, MAX, false),
        ("n", scalar(3), MAX, false),
        ("n", list(&[MAX, MAX, 1]), 2, false),
    ] {
        let name = format!("{split:?} of {size} at {position}");
        let mut b = GraphBuilder::new(&name);
        let x = b.input("x", DType::F32, &[size]);
        let mut inputs = vec![x];
        if let Some((shape, sizes)) = split {
            inputs.push(b.constant(Tensor::from_slice(&shape, &sizes)?));
        }
        let parts = b.node("SplitToSequence", &inputs, &[])?;
        let position = b.constant(Tensor::scalar(position)?);
        let part = b.node("SequenceAt", &[parts, position], &[])?;
        let mut graph = b.finish(&[part])?;
        let problem = add_backward(&mut graph, part, &[x]).err().map(|problem| problem.to_string());
        let problem = problem.unwrap_or_default();
        assert_eq!(problem.contains("is out of range"), is_outside, "{name}: {problem}");
    }
    Ok(())
}

/// Every operator of the standard has a gradient or says why it has none.
#[test]
fn every_operator_says_why() -> Result<()> {
    let records = Registry::global()?.records();
    // One that loading replaces is never in a graph.
    let is_replaced = |record: &OpSpec| record.upgrades.iter().any(|upgrade| upgrade.before == i64::MAX);
    let silent = records.iter().filter(|record| record.domain.is_empty() && !is_replaced(record));
    let silent =
        silent.filter(|record| record.gradient().to_string() == "none: it has no rule for its gradient");
    let silent: Vec<&str> = silent.map(|record| record.name).collect();
    assert_eq!(silent, [""; 0]);
    Ok(())
}
