//! `EmbedLayerNormalization` of `com.microsoft`: sums word, position and segment embeddings, and
//! normalizes the result. An index out of range of a table reads the nearest row.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::EmbedLayerNorm;
use ort_core::spec::MICROSOFT;
use ort_gpu::read;

use super::elementwise::FLOATS;
use super::indexing::{INDICES, check_source};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

/// The invocations of a workgroup, which normalizes one row.
const LANES: usize = 128;

wgpu_kernels![WgpuKernel {
    workspace: Some(workspace),
    ..WgpuKernel::new(
        KernelDef {
            domain: MICROSOFT,
            op: "EmbedLayerNormalization",
            types: &[("T", FLOATS)],
            ..KernelDef::BASE
        },
        dispatches
    )
}];

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    sum(cx, &mut taken)?;
    Ok(taken)
}

/// The embedding sums in the workspace, in case no output has them.
fn sum(cx: &OpCx<'_>, taken: &mut usize) -> Result<Operand> {
    let (ids, words) = (cx.input(0)?, cx.input(2)?);
    Ok(cx.workspace(taken, DType::F32, &[ids.count(), words.size(1)]))
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (problem, own) = (read::embed_layer_norm(cx)?, sum(cx, &mut 0)?);
    let sum = cx.find_output(2).unwrap_or(&own);
    let mut dispatches = vec![added(cx, &problem, sum)?, normalized(cx, problem.width, sum)?];
    if let Some(counts) = cx.find_output(1) {
        dispatches.push(counted(cx, problem.length, counts)?);
    }
    Ok(dispatches)
}

/// Sums the embeddings.
fn added(cx: &OpCx<'_>, problem: &EmbedLayerNorm, sum: &Operand) -> Result<Dispatch> {
    let (ids, words, positions) = (cx.input(0)?, cx.input(2)?, cx.input(3)?);
    let [vocabulary, places, kinds] = problem.rows;
    let mut shader = Shader::new(cx)
        .read("ids", ids)
        .read("words", words)
        .read("positions", positions)
        .write("sum", sum)
        .number("width", problem.width)
        .number("vocabulary", vocabulary)
        .number("length", problem.length)
        .number("places", places);
    check_source(words, sum)?;
    check_source(positions, sum)?;
    // Without `position_ids`, a token's position is its place in the sequence.
    let mut position = "i32(token % p.length)";
    if let Some(place) = cx.find_input(8) {
        // One row of positions may serve the whole batch.
        shader = shader.read("position_ids", place).number("given", problem.position_ids);
        position = "position_ids(token % p.given)";
    }
    let mut segment = String::new();
    if let Some(segments) = cx.find_input(4) {
        check_source(segments, sum)?;
        shader = shader.read("segments", segments).number("kinds", kinds);
        let which = match cx.find_input(1) {
            Some(which) => {
                shader = shader.read("segment_ids", which);
                "segment_ids(token)"
            }
            // All tokens are in segment 0 by default.
            None => "0",
        };
        segment = format!("+ segments(clamped({which}, p.kinds) * p.width + k)");
    }
    let code = format!(
        "{INDICES}
        fn element(i: u32) {{
            let token = i / p.width;
            let k = i - token * p.width;
            let word = words(clamped(ids(token), p.vocabulary) * p.width + k);
            set_sum(i, word + positions(clamped({position}, p.places) * p.width + k) {segment});
        }}"
    );
    shader.each(sum.count(), &code)
}

/// Normalizes the sums, one row per workgroup.
fn normalized(cx: &OpCx<'_>, width: usize, sum: &Operand) -> Result<Dispatch> {
    let (gamma, beta, y) = (cx.input(5)?, cx.input(6)?, cx.output(0)?);
    let code = "
    var<workgroup> parts: array<f32, LANES>;
    fn whole(part: f32, lane: u32) -> f32 {
        workgroupBarrier();
        parts[lane] = part;
        for (var reach = LANES / 2u; reach > 0u; reach /= 2u) {
            workgroupBarrier();
            if (lane < reach) { parts[lane] += parts[lane + reach]; }
        }
        workgroupBarrier();
        return parts[0];
    }
    fn group(row: u32, lane: u32) {
        let base = row * p.width;
        var part = 0.0;
        for (var k = lane; k < p.width; k += LANES) { part += sum(base + k); }
        let mean = whole(part, lane) / f32(p.width);
        part = 0.0;
        for (var k = lane; k < p.width; k += LANES) {
            let distance = sum(base + k) - mean;
            part += distance * distance;
        }
        let rate = 1.0 / sqrt(whole(part, lane) / f32(p.width) + p.epsilon);
        for (var k = lane; k < p.width; k += LANES) {
            set_y(base + k, (sum(base + k) - mean) * rate * gamma(k) + beta(k));
        }
    }";
    let shader = Shader::new(cx)
        .read("sum", sum)
        .read("gamma", gamma)
        .read("beta", beta)
        .write("y", y)
        .number("width", width)
        .float("epsilon", cx.attrs.float("epsilon")?);
    shader.groups(sum.count().checked_div(width).unwrap_or(0), LANES, code)
}

/// Counts the ones in each sequence's mask; 0 without a mask.
fn counted(cx: &OpCx<'_>, length: usize, counts: &Operand) -> Result<Dispatch> {
    let shader = Shader::new(cx).write("counts", counts);
    let Some(mask) = cx.find_input(7) else {
        return shader.each(counts.count(), "fn element(i: u32) { set_counts(i, 0); }");
    };
    let code = "fn element(i: u32) {
        var count = 0;
        for (var k = 0u; k < p.length; k++) { count += select(0, 1, mask(i * p.length + k) == 1); }
        set_counts(i, count);
    }";
    shader.read("mask", mask).number("length", length).each(counts.count(), code)
}
