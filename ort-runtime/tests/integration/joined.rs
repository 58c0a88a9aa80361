//! Inputs of `Concat` are computed where its output is, where that is possible and takes no more
//! memory.

use crate::support::{axis, inputs_of, numbers, run};
use ort_runtime::ir::{Graph, GraphBuilder, ValueId};
use ort_runtime::rewrite::Level;
use ort_runtime::{DType, Model, Result, Session};

fn session(graph: Graph) -> Result<Session> {
    Session::builder(&Model::from_graph(graph)).opt_level(Level::Disabled).threads(1).build()
}

/// Two values of `columns` columns from `x`, joined along `along`, and a sum over all; `more` also
/// reads one of the two.
fn two_parts(columns: usize, along: i64, more: bool) -> Result<Graph> {
    let mut builder = GraphBuilder::new("parts");
    let x = builder.input("x", DType::F32, &["rows", &columns.to_string()]);
    let parts = [builder.node("Neg", &[x], &[])?, builder.node("Sqrt", &[x], &[])?];
    let joined = builder.node("Concat", &parts, &axis(along))?;
    let joined = builder.node("Exp", &[joined], &[])?;
    let sum = builder.node("ReduceSum", &[joined], &[])?;
    let mut outputs = vec![sum];
    if more {
        outputs.push(builder.node("ReduceMax", &parts[..1], &[])?);
    }
    builder.finish(&outputs)
}

fn runs(session: &Session, rows: usize, op: &str) -> Result<bool> {
    Ok(session.plan(&[("rows", rows as i64)])?.steps.iter().any(|step| step.op == op))
}

#[test]
fn parts_are_computed_in_place() -> Result<()> {
    let session = session(two_parts(16, 0, false)?)?;
    let plan = session.plan(&[("rows", 4)])?;
    assert!(!runs(&session, 4, "Concat")?);
    // Both parts and nothing else, and the sum, which is an output.
    assert_eq!(plan.peak_bytes, Some(2 * 4 * 16 * 4 + 4 + workspaces(&plan)));
    let outputs = run(&session, &inputs_of(&session, 4)?)?;
    let x = numbers(&[4, 16], 0)?.to_vec::<f32>()?;
    let expected: f64 = x.iter().map(|x| f64::from((-x).exp()) + f64::from(x.sqrt().exp())).sum();
    let sum = outputs[0].1.tensor()?.to_vec::<f32>()?[0];
    assert!(
        expected.is_nan() == sum.is_nan()
            && (expected.is_nan() || (f64::from(sum) - expected).abs() < 1e-3 * expected)
    );
    assert_eq!(session.memory().activations_peak, plan.planned_bytes);
    Ok(())
}

fn workspaces(plan: &ort_runtime::plan::PlanReport) -> usize {
    plan.steps.iter().map(|step| step.workspace.len()).max().unwrap_or(0)
}

#[test]
fn what_cannot_be_a_part_is_copied() -> Result<()> {
    // Rows of the result lie apart; a part is read elsewhere, too; a part does not begin where
    // kernels may write.
    for (columns, along, more) in [(16, 1, false), (16, 0, true), (5, 0, false)] {
        let session = session(two_parts(columns, along, more)?)?;
        assert!(runs(&session, 3, "Concat")?, "{columns} {along} {more}");
        run(&session, &inputs_of(&session, 3)?)?;
    }
    // With one row the parts lie one behind the other along the second dimension as well.
    assert!(!runs(&session(two_parts(16, 1, false)?)?, 1, "Concat")?);
    Ok(())
}

/// The first part is computed at the beginning and small beside the second, so that room for both
/// would be held for long.
#[test]
fn a_part_that_waits_long_does_not_hold_the_place_of_the_others() -> Result<()> {
    let mut builder = GraphBuilder::new("long");
    let x = builder.input("x", DType::F32, &["1", "16"]);
    let project = |builder: &mut GraphBuilder, value: ValueId, [from, to]: [usize; 2]| -> Result<ValueId> {
        let matrix = builder.constant(numbers(&[from, to], 1)?);
        builder.node("MatMul", &[value, matrix], &[])
    };
    let early = builder.node("Neg", &[x], &[])?;
    let mut value = builder.node("Exp", &[early], &[])?;
    let kept = builder.node("Abs", &[early], &[])?;
    let branch = builder.node("Add", &[kept, value], &[])?;
    for _ in 0..3 {
        value = project(&mut builder, branch, [16, 2048])?;
        value = project(&mut builder, value, [2048, 16])?;
    }
    let late = project(&mut builder, value, [16, 1024])?;
    let joined = builder.node("Concat", &[branch, late], &axis(1))?;
    let last = builder.node("ReduceSum", &[joined], &[])?;
    let session = session(builder.finish(&[last])?)?;
    let plan = session.plan(&[])?;
    // Never more than with a copy at the end: the widest value, the branch, and what is around
    // them.
    assert!(plan.lower_bound_bytes <= plan.planned_bytes);
    assert!(plan.planned_bytes <= 2048 * 4 + 1024 * 4 + 4096 + workspaces(&plan), "{}", plan.planned_bytes);
    Ok(())
}
