//! The largest batch that fits into a budget as a whole is computed, and is right: it runs within
//! that limit, and one more does not.

use crate::support;

use ort_runtime::ir::GraphBuilder;
use ort_runtime::{DType, ErrorKind, Model, Result, Session};
use support::{axis, layer, numbers};

#[test]
fn it_runs_within_the_budget_and_one_more_does_not() -> Result<()> {
    let model = Model::from_graph(layer()?);
    let session = Session::builder(&model).threads(1).build()?;
    for budget in [2_000, 10_000, 123_456, 5 << 20] {
        let largest = session.largest_batch("rows", budget)?.expect("one row fits") as usize;
        let limited = || Session::builder(&model).threads(1).memory_limit(budget).batch_split(false).build();
        let rows = |count: usize| numbers(&[count, 3], 0);
        assert!(limited()?.run(&[("x", rows(largest)?.into())]).is_ok(), "{largest} rows, {budget} bytes");
        let problem = limited()?.run(&[("x", rows(largest + 1)?.into())]).err();
        assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    }
    Ok(())
}

#[test]
fn it_is_none_where_nothing_fits_and_says_which_dimensions_there_are() -> Result<()> {
    let session = support::session(layer()?)?;
    assert_eq!(session.largest_batch("rows", 10)?, None);
    let problem = session.largest_batch("row", 1 << 20).err().map(|problem| problem.to_string());
    assert!(problem.is_some_and(|text| text.contains("'row'") && text.contains("rows")));
    Ok(())
}

#[test]
fn other_dimensions_count_with_the_sizes_given() -> Result<()> {
    let mut builder = GraphBuilder::new("rows");
    let x = builder.input("x", DType::F32, &["batch", "length"]);
    let y = builder.node("Softmax", &[x], &axis(1))?;
    let session = support::session(builder.finish(&[y])?)?;
    let of = |length| session.largest_size("batch", &[("length", length)], 1 << 20);
    assert_eq!((of(64)?, of(128)?), (Some(4096), Some(2048)));
    Ok(())
}
