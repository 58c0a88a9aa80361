//! `Adafactor`: updates the moments, then computes the update twice: once for its norm, once to
//! apply it.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::ops::training::{FactoredShape, adafactor_epsilon};
use ort_core::spec::RUNTIME;

use super::step::{Call, Stream, kept, kept_or_spare, rule, spread, suffix, sums, sums_of};
use crate::kernels::rows::teams;
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

/// The kernel family.
const FAMILY: &str = "adafactor";
const ROW: usize = 6;
const COLUMN: usize = 7;
const SECOND: usize = 8;

/// The longest row or column that gets one thread.
const SHORT: usize = 16;
/// The longest row or column that gets a warp.
const LONG: usize = 1024;
/// Rows in a piece of a column.
const PIECE: usize = 64;
/// The number of blocks that keep a device busy.
const BLOCKS: usize = 1024;
/// Adjacent columns that a block handles.
const ABREAST: usize = 32;

cuda_kernels![CudaKernel {
    workspace: Some(|cx| AdafactorWorkspace::of(cx).map(|space| space.bytes)),
    ..CudaKernel::new(
        KernelDef {
            domain: RUNTIME,
            op: "Adafactor",
            in_place: &[(0, 0), (ROW, 1), (COLUMN, 2), (SECOND, 3)],
            ..KernelDef::BASE
        },
        launches
    )
}];

/// Returns the threads per column, and the pieces that its rows are split into.
fn split_of_columns(layout: FactoredShape) -> (usize, usize) {
    let count = layout.matrices.saturating_mul(layout.columns);
    if layout.rows <= SHORT {
        return (1, 1);
    }
    let blocks = count.div_ceil(ABREAST).max(1);
    (8, (layout.rows / PIECE).min(BLOCKS / blocks).max(1))
}

/// Passes the layout to a kernel.
fn pass_layout(layout: FactoredShape, launch: Launch) -> Result<Launch> {
    launch.uints::<4>(&[layout.matrices, layout.rows, layout.columns, layout.is_matrix.into()])
}

/// The workspace that connects a node's passes.
struct AdafactorWorkspace {
    layout: FactoredShape,
    /// The moments of rows, or of elements if unfactored.
    moments: Operand,
    /// The moments of columns, the means of the row moments, and partial column sums.
    of_columns: Option<[Operand; 3]>,
    parts: Operand,
    bytes: usize,
}

impl AdafactorWorkspace {
    fn of(cx: &OpCx<'_>) -> Result<AdafactorWorkspace> {
        let own = cx.input(0)?;
        let (layout, mut bytes) = (FactoredShape::of(&own.shape), 0);
        let parts = sums(cx, &mut bytes, &[2, sums_of(own.count())]);
        if !layout.is_matrix {
            let moments = kept_or_spare(cx, Stream::of(cx, SECOND, 3)?, &mut bytes);
            return Ok(AdafactorWorkspace { layout, moments, of_columns: None, parts, bytes });
        }
        let [moments, columns] = [Stream::of(cx, ROW, 1)?, Stream::of(cx, COLUMN, 2)?]
            .map(|state| kept_or_spare(cx, state, &mut bytes));
        let means = cx.workspace(&mut bytes, own.dtype, &[layout.matrices]);
        let (_, splits) = split_of_columns(layout);
        let pieces = sums(cx, &mut bytes, &[splits, layout.matrices, layout.columns]);
        Ok(AdafactorWorkspace { layout, moments, of_columns: Some([columns, means, pieces]), parts, bytes })
    }
}

fn factor_rule(cx: &OpCx<'_>, dtype: DType) -> Result<Vec<u8>> {
    let attr = |name: &str| cx.attrs.decimal(name);
    let least = adafactor_epsilon(cx.attrs, dtype)?;
    Ok(rule(
        &[attr("beta2_decay")?, least, attr("epsilon2")?, attr("clip_threshold")?, attr("weight_decay")?],
        &[],
    ))
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (call, space) = (Call::of(cx)?, AdafactorWorkspace::of(cx)?);
    let parameter = Stream::of(cx, 0, 0)?;
    let count = call.gradient.count();
    if count == 0 {
        // State outputs without elements still have to take over their inputs.
        let states = if space.layout.is_matrix { &[(ROW, 1), (COLUMN, 2)][..] } else { &[(SECOND, 3)] };
        let states = states.iter().map(|(input, output)| Stream::of(cx, *input, *output));
        let streams: Vec<Stream<'_>> = std::iter::once(Ok(parameter)).chain(states).collect::<Result<_>>()?;
        return kept(cx, &streams);
    }
    let rule = factor_rule(cx, parameter.from.dtype)?;
    let mut launches = moments(cx, &call, &space, &rule)?;
    let blocks = sums_of(count);
    let [columns, means] = match &space.of_columns {
        Some([columns, means, _]) => [Some(columns), Some(means)],
        None => [None, None],
    };
    let estimated = |launch: Launch| {
        let launch = launch.tensor(&space.moments).find_tensor(columns).find_tensor(means);
        launch.tensor(call.gradient)
    };
    // The clipping threshold needs the norm of the whole update before any of it is applied.
    let norms = estimated(call.launch(FAMILY, "factor_norms")?.tensor(parameter.from));
    let norms = call.update(call.scale(norms)).tensor(&space.parts).uint(count)?;
    launches.push(pass_layout(space.layout, norms)?.bytes(&rule).grid([blocks, 1, 1])?);
    if let Some(target) = parameter.to {
        let apply = estimated(call.launch(FAMILY, "factor_apply")?.tensor(parameter.from).tensor(target));
        let apply = call.step(call.update(call.scale(call.rate(apply))));
        let apply = apply.tensor(&space.parts).uint(count)?.uint(blocks)?;
        launches.push(spread(cx, pass_layout(space.layout, apply)?.bytes(&rule), count)?);
    }
    Ok(launches)
}

/// Returns the launches that update the moments.
fn moments(
    cx: &OpCx<'_>,
    call: &Call<'_, '_>,
    space: &AdafactorWorkspace,
    rule: &[u8],
) -> Result<Vec<Launch>> {
    let (layout, count) = (space.layout, call.gradient.count());
    let told = |launch: Launch| call.step(call.update(call.scale(launch)));
    let Some([columns, means, pieces]) = &space.of_columns else {
        let old = Stream::of(cx, SECOND, 3)?;
        old.check_len(count)?;
        let launch = told(
            call.launch(FAMILY, "factor_each")?.tensor(old.from).tensor(&space.moments).tensor(call.gradient),
        );
        return Ok(vec![spread(cx, launch.uint(count)?.bytes(rule), count)?]);
    };
    let (old_rows, old_columns) = (Stream::of(cx, ROW, 1)?, Stream::of(cx, COLUMN, 2)?);
    let (row_count, column_count) = (layout.matrices * layout.rows, layout.matrices * layout.columns);
    old_rows.check_len(row_count)?;
    old_columns.check_len(column_count)?;
    let team = team_of(layout.columns);
    let with_team =
        |launch: Launch, team: usize| Launch { entry: format!("{}_{team}", launch.entry), ..launch };
    let rows = with_team(call.launch(FAMILY, "factor_rows")?, team);
    let rows = told(rows.tensor(old_rows.from).tensor(&space.moments).tensor(call.gradient));
    let rows = teams(pass_layout(layout, rows)?.bytes(rule), row_count, team, 1)?;
    let (team, splits) = split_of_columns(layout);
    let sums = with_team(call.launch(FAMILY, "factor_columns")?, team).tensor(call.gradient);
    let sums = teams(pass_layout(layout, call.update(sums).tensor(pieces))?, column_count, team, splits)?;
    let suffix = suffix(columns.dtype)?;
    let join =
        Launch::of_type(FAMILY, suffix, format!("factor_join_{suffix}"))?.tensor(pieces).uint(splits)?;
    let join = told(join.tensor(old_columns.from).tensor(columns));
    let join = spread(cx, pass_layout(layout, join)?.bytes(rule), column_count)?;
    let team = team_of(layout.rows);
    let of_rows =
        Launch::of_type(FAMILY, suffix, format!("factor_means_{suffix}_{team}"))?.tensor(&space.moments);
    let of_rows = pass_layout(layout, call.update(of_rows.tensor(means)))?.bytes(rule);
    Ok(vec![rows, sums, join, teams(of_rows, layout.matrices, team, 1)?])
}

/// Returns the threads per row or column.
fn team_of(len: usize) -> usize {
    match len {
        0..=SHORT => 1,
        _ if len <= LONG => 32,
        _ => 256,
    }
}
