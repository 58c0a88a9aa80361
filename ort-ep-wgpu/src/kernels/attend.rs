//! Fused scaled dot-product attention (FlashAttention), the kernel behind all attention operators.
//!
//! Heads may have any layout. If few workgroups would run, the keys are split into parts, and a
//! second dispatch joins their results.

use ort_core::dtype::DType;
use ort_core::ops::nn::attention::problem::{Causal, PaddingMask, ScoreStage, SdpaSizes};
use ort_core::{Result, ensure};
use ort_gpu::attention::{
    AttentionPlan, AttentionScratch, HeadTensor, KeyLengths, Mask, Padding, Scores, Sdpa, Sinks,
};

use super::heads::{place, read_rows};
use super::softmax::weights;
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

const COMMON: &str = include_str!("attend_common.wgsl");
const PROGRAM: &str = include_str!("attend.wgsl");
/// The lanes of a workgroup.
const LANES: usize = 64;
/// The vectors of four results that a lane keeps in registers.
const KEPT: usize = 16;
/// The number of workgroups that keeps a device busy. If there are fewer, the keys are split.
const BUSY: usize = 64;
/// The least number of keys in a part.
const PART: usize = 256;

/// How a workgroup's rows and columns are divided among its lanes.
struct AttendDivision {
    /// Fours of rows in a block.
    quads: usize,
    /// The keys of a lane in a tile.
    turns: usize,
    /// The vectors of four elements that are multiplied at a time.
    chunk: usize,
    /// The value columns that lanes cover at a time.
    columns: usize,
    /// The fours of rows of a lane.
    mine: usize,
    /// The columns of a lane.
    wide: usize,
}

impl AttendDivision {
    fn new(rows: usize, value_size: usize) -> AttendDivision {
        // Blocks of 4 to 32 rows.
        let mut quads = rows.div_ceil(4).next_power_of_two().clamp(1, 8);
        loop {
            let columns = value_size.max(1).next_power_of_two().clamp(LANES / quads, LANES);
            let (mine, wide) = ((quads * columns).div_ceil(LANES), value_size.max(1).div_ceil(columns));
            // Halve the block until a lane's results fit its registers.
            if mine * wide <= KEPT || quads == 1 {
                let (turns, chunk) = match quads {
                    1 => (2, 4),
                    2 => (2, 8),
                    4 => (2, 8),
                    _ => (4, 8),
                };
                return AttendDivision { quads, turns, chunk, columns, mine, wide };
            }
            quads /= 2;
        }
    }
}

/// Unrolls marked lines: a line is repeated for every combination of numbers below the counts of
/// the names in it, with the numbers in their places.
fn unrolled(text: &str, counts: &[(&str, usize)]) -> String {
    let copies = |line: &str| {
        let mut lines = vec![line.to_owned()];
        for (name, count) in counts.iter().filter(|(name, _)| line.contains(name)) {
            let numbered = |line: &String| -> Vec<String> {
                (0..*count).map(|number| line.replace(name, &number.to_string())).collect()
            };
            lines = lines.iter().flat_map(numbered).collect();
        }
        lines.join("\n") + "\n"
    };
    text.lines().map(copies).collect()
}

/// Returns the workspace bytes of an attention node.
pub(super) fn workspace(cx: &OpCx<'_>, scratch: AttentionScratch) -> Result<usize> {
    let mut taken = scratch.taken;
    parts(cx, &scratch.sizes, &mut taken);
    Ok(taken)
}

/// Returns the dispatches of an attention node.
pub(super) fn dispatches(cx: &OpCx<'_>, plan: &AttentionPlan<'_>) -> Result<Vec<Dispatch>> {
    let placings = plan.placings.iter().chain(&plan.conversions);
    let mut dispatches = placings.map(|placing| place(cx, placing)).collect::<Result<Vec<_>>>()?;
    dispatches.extend(attention(cx, &plan.sdpa, plan.taken)?);
    let scores = plan.sdpa.scores.filter(|scores| scores.stage == ScoreStage::Weights);
    if let Some(scores) = scores {
        dispatches.push(weights(cx, scores.operand)?);
    }
    Ok(dispatches)
}

/// The row blocks of a group of heads.
fn blocks(sizes: &SdpaSizes) -> usize {
    sizes.rows().div_ceil(AttendDivision::new(sizes.rows(), sizes.value_size).quads * 4)
}

/// The number of parts that the keys are split into. It never falls as keys are added, so the
/// workspace for the most keys suffices.
fn splits(sizes: &SdpaSizes) -> usize {
    let groups = sizes.groups().saturating_mul(blocks(sizes));
    (sizes.keys / PART).min(BUSY.checked_div(groups).unwrap_or(1)).max(1)
}

/// Allocates the partial results in the workspace; `None` if the keys are not split.
fn parts(cx: &OpCx<'_>, sizes: &SdpaSizes, taken: &mut usize) -> Option<Operand> {
    let splits = splits(sizes);
    let lines = sizes.groups().saturating_mul(splits).saturating_mul(sizes.rows());
    // Each row also keeps its maximum and its sum of weights.
    let shape = [lines, sizes.value_size.saturating_add(2)];
    (splits > 1).then(|| cx.workspace(taken, DType::F32, &shape))
}

/// Adds the uniforms that locate results.
fn result_numbers(sizes: &SdpaSizes, shader: Shader, splits: usize, y: &HeadTensor) -> Shader {
    shader
        .sizes("y_step", &y.strides)
        .number("splits", splits)
        .number("rows", sizes.rows())
        .number("sharing", sizes.heads.checked_div(sizes.key_heads).unwrap_or(0))
        .number("key_heads", sizes.key_heads)
        .number("queries", sizes.queries)
        .number("value_size", sizes.value_size)
}

/// Returns the dispatches of the attention. The workspace has the partial results after the first
/// `taken` bytes.
fn attention(cx: &OpCx<'_>, sdpa: &Sdpa<'_>, mut taken: usize) -> Result<Vec<Dispatch>> {
    let sizes = &sdpa.sizes;
    let SdpaSizes { heads, key_heads, value_size, batch, .. } = *sizes;
    let divides = heads.checked_rem(key_heads) == Some(0);
    ensure!(divides, InvalidArgument, "{heads} query heads are not a multiple of {key_heads} key heads");
    // Nothing is written, and the shaders divide by these sizes.
    if batch == 0 || sizes.rows() == 0 || value_size == 0 {
        return Ok(Vec::new());
    }
    // The score output is written in one pass over all keys.
    let parts = if sdpa.scores.is_some() { None } else { parts(cx, sizes, &mut taken) };
    let Some(parts) = parts else { return Ok(vec![attend(cx, sdpa, &sdpa.y.operand, 1)?]) };
    let splits = splits(sizes);
    Ok(vec![attend(cx, sdpa, &parts, splits)?, join(cx, sdpa, &parts, splits)?])
}

/// Attention over each part of the keys.
fn attend(cx: &OpCx<'_>, sdpa: &Sdpa<'_>, to: &Operand, splits: usize) -> Result<Dispatch> {
    let SdpaSizes { batch, key_heads, value_size, .. } = sdpa.sizes;
    let cut = AttendDivision::new(sdpa.sizes.rows(), value_size);
    // Only a block of four rows may exceed `KEPT`, which limits the size of heads.
    ensure!(cut.mine * cut.wide <= 4 * KEPT, NotImplemented, "heads of {value_size} elements");
    let blocks = blocks(&sdpa.sizes);
    let mut shader = Shader::new(cx);
    for (name, rows) in [("q", &sdpa.q), ("k", &sdpa.k), ("v", &sdpa.v)] {
        shader = read_rows(shader, name, rows);
    }
    shader = shader.write("y", to);
    shader = numbers(sdpa, common_numbers(sdpa, shader, splits)).number("blocks", blocks);
    for (name, constant) in [
        ("QUADS", cut.quads),
        ("ACROSS", LANES / cut.quads),
        ("TURNS", cut.turns),
        ("CHUNK", cut.chunk),
        ("COLUMNS", cut.columns),
        ("MINE", cut.mine),
        ("WIDE", cut.wide),
    ] {
        shader = shader.constant(name, constant);
    }
    // A whole result is divided by its sum. A part keeps its maximum and sum for `join`.
    let (result, line) = match splits {
        1 => ("set_y(place_of_result(pair, row) + c, quotient(result, sum));", ""),
        _ => (
            "set_y(place_of_part(pair, split, row) + c, result);",
            "let at = place_of_part(pair, split, row) + p.value_size;
            set_y(at, top);
            set_y(at + 1u, sum);",
        ),
    };
    let mut code = format!(
        "{COMMON}{}
        fn put(pair: u32, split: u32, row: u32, c: u32, result: f32, sum: f32) {{ {result} }}
        fn put_line(pair: u32, split: u32, row: u32, top: f32, sum: f32) {{ {line} }}\n",
        unrolled(PROGRAM, &[("$t", cut.turns), ("$m", cut.mine), ("$w", cut.wide)]),
    );
    shader = places(sdpa, shader, &mut code);
    shader = scores(sdpa, shader, &mut code);
    let groups = batch.saturating_mul(key_heads).saturating_mul(blocks).saturating_mul(splits);
    shader.groups(groups, LANES, &code)
}

/// Joins the partial results of each row, rescaled to their common maximum.
fn join(cx: &OpCx<'_>, sdpa: &Sdpa<'_>, parts: &Operand, splits: usize) -> Result<Dispatch> {
    let shader = Shader::new(cx).read("part", parts).write("y", &sdpa.y.operand);
    let shader = common_numbers(sdpa, shader, splits);
    let code = format!(
        "{COMMON}
        fn element(i: u32) {{
            let c = i % p.value_size;
            let row = i / p.value_size % p.rows;
            let pair = i / p.value_size / p.rows;
            var top = -infinity();
            for (var s = 0u; s < p.splits; s++) {{
                top = max(top, part(place_of_part(pair, s, row) + p.value_size));
            }}
            var result = 0.0;
            var sum = 0.0;
            for (var s = 0u; s < p.splits; s++) {{
                let at = place_of_part(pair, s, row);
                let share = weight(part(at + p.value_size), top);
                result += share * part(at + c);
                sum += share * part(at + p.value_size + 1u);
            }}
            set_y(place_of_result(pair, row) + c, quotient(result, sum));
        }}"
    );
    let SdpaSizes { batch, key_heads, value_size, .. } = sdpa.sizes;
    let lines = batch.saturating_mul(key_heads).saturating_mul(sdpa.sizes.rows());
    shader.each(lines.saturating_mul(value_size), &code)
}

/// Adds the uniforms of both shaders: where results are, and the result of a query without
/// weights. NaN is a uniform, because WGSL rejects constant expressions that are NaN.
fn common_numbers(sdpa: &Sdpa<'_>, shader: Shader, splits: usize) -> Shader {
    let without_weights = if sdpa.hidden_is_nan && sdpa.sizes.keys > 0 { f32::NAN } else { 0.0 };
    result_numbers(&sdpa.sizes, shader, splits, &sdpa.y).float("without_weights", without_weights)
}

fn numbers(sdpa: &Sdpa<'_>, mut shader: Shader) -> Shader {
    let SdpaSizes { batch, heads, keys, size, .. } = sdpa.sizes;
    // If the queries are the last keys, their offset follows from the length alone.
    let (before, more) = match sdpa.lengths {
        KeyLengths::All { before } => (before, 0),
        KeyLengths::Each { before, more, .. } => (before, more),
        KeyLengths::AtEnd { more, .. } => (0, more),
    };
    let causal = match sdpa.causal {
        Causal::No => 0,
        Causal::Yes => 1,
        Causal::BottomRight => 2,
    };
    for (name, number) in [
        ("keys", keys),
        ("size", size),
        ("heads", heads),
        ("batches", batch),
        ("before", before),
        ("more", more),
        ("causal", causal),
        ("sinks", usize::from(!matches!(sdpa.sinks, Sinks::None))),
        ("all", usize::from(sdpa.scores.is_some())),
    ] {
        shader = shader.number(name, number);
    }
    // A window longer than all keys and queries is the same as none.
    let [left, right] = sdpa.windows.map(|size| size.clamp(-1, 1 << 29));
    shader.integer("left", left).integer("right", right).float("scale", sdpa.scale)
}

/// Generates the functions for valid lengths, the query bias and the sinks.
fn places(sdpa: &Sdpa<'_>, mut shader: Shader, code: &mut String) -> Shader {
    let (length, offset) = match sdpa.lengths {
        KeyLengths::All { .. } => ("i32(p.keys)", "i32(p.before)"),
        KeyLengths::Each { lengths, .. } => {
            shader = shader.read("lengths", lengths);
            ("i32(lengths(batch)) + i32(p.more)", "i32(p.before)")
        }
        KeyLengths::AtEnd { lengths, .. } => {
            shader = shader.read("lengths", lengths);
            ("i32(lengths(batch)) + i32(p.more)", "length - i32(p.queries)")
        }
    };
    let bias = match sdpa.q_bias {
        Some(bias) => {
            shader = shader.read("q_bias", bias);
            " + q_bias(c)"
        }
        None => "",
    };
    let sink = match sdpa.sinks {
        Sinks::Each(sinks) => {
            shader = shader.read("sink", sinks);
            "sink(head)"
        }
        _ => "0.0",
    };
    code.push_str(&format!(
        "fn length_of(batch: u32) -> i32 {{ return {length}; }}
        fn offset_of(length: i32) -> i32 {{ return {offset}; }}
        fn q_at(at: u32, c: u32) -> f32 {{ return q(at){bias}; }}
        fn sink_of(head: u32) -> f32 {{ return {sink}; }}\n"
    ));
    shader
}

/// Generates `score_of`: softcap, mask and padding, and the score output at its stage.
fn scores(sdpa: &Sdpa<'_>, mut shader: Shader, code: &mut String) -> Shader {
    // A softmax over the masked scores makes the weights afterwards.
    let stage = sdpa.scores.map(|scores| match scores.stage {
        ScoreStage::Weights => ScoreStage::Masked,
        stage => stage,
    });
    let kept = |own: ScoreStage| match stage == Some(own) {
        true => "set_scores(((batch * p.heads + head) * p.queries + query) * p.keys + key, score);\n",
        false => "",
    };
    let mut body = String::from(kept(ScoreStage::Scaled));
    if sdpa.softcap > 0.0 {
        shader = shader.float("softcap", sdpa.softcap);
        body.push_str("score = p.softcap * tanh_(score / p.softcap);\n");
    }
    body.push_str(kept(ScoreStage::Capped));
    body.push_str("var shown = seen;\n");
    if let Some(Mask { operand, layout }) = sdpa.mask {
        shader = shader.read("mask", operand);
        shader = shader.sizes("mask_step", &layout.strides).number("mask_keys", layout.keys);
        let apply =
            if operand.dtype == DType::Bool { "shown = mask(at) != 0u;" } else { "score += f32(mask(at));" };
        body.push_str(&format!(
            "if (key >= p.mask_keys) {{ shown = false; }}
            if (shown) {{
                let at = batch * mask_step(0u) + head * mask_step(1u) + query * mask_step(2u) + key;
                {apply}
            }}\n"
        ));
    }
    if let Some(Padding { operand, mask, added }) = sdpa.padding {
        shader = shader.read("padding", operand).float("padded", added);
        let hides = match mask {
            PaddingMask::From => "i32(key) >= padding(batch)",
            PaddingMask::FromAndBefore => {
                "i32(key) >= padding(batch) || i32(key) < padding(p.batches + batch)"
            }
            PaddingMask::Elements { first, strides: [of_batch, of_query] } => {
                shader = shader.sizes("padding_step", &[of_batch, of_query, first]);
                "padding(padding_step(2u) + batch * padding_step(0u) + query * padding_step(1u) + key)
                    <= 0"
            }
        };
        body.push_str(&format!("if ({hides}) {{ score += p.padded; }}\n"));
    }
    // After the padding: a hidden key stays at -inf.
    body.push_str("if (!shown) { score = -infinity(); }\n");
    body.push_str(kept(ScoreStage::Masked));
    if let Some(Scores { operand, .. }) = sdpa.scores {
        shader = shader.write("scores", operand);
    }
    code.push_str(&format!(
        "fn score_of(product: f32, seen: bool, batch: u32, head: u32, query: u32, key: u32) -> f32 {{
            var score = product;
            {body}
            return score;
        }}\n"
    ));
    shader
}

#[cfg(test)]
mod tests {
    use super::{AttendDivision, LANES, unrolled};

    #[test]
    fn lines_are_copied_for_each_number() {
        let text = unrolled("let a_$t = $tu;\nb_$t_$w();\nc();", &[("$t", 2), ("$w", 2)]);
        assert_eq!(text, "let a_0 = 0u;\nlet a_1 = 1u;\nb_0_0();\nb_0_1();\nb_1_0();\nb_1_1();\nc();\n");
    }

    #[test]
    fn every_row_and_column_has_a_lane() {
        for rows in [1, 4, 5, 9, 17, 1000] {
            for value_size in [1, 8, 40, 64, 128, 300, 1000] {
                let AttendDivision { quads, columns, mine, wide, .. } = AttendDivision::new(rows, value_size);
                assert!(LANES / columns * mine >= quads, "{rows} {value_size}");
                assert!(columns * wide >= value_size && columns <= LANES, "{rows} {value_size}");
            }
        }
    }
}
