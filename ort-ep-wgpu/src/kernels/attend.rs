//! Fused scaled dot-product attention (FlashAttention), the kernel behind all attention operators.
//!
//! Heads may have any layout. If few workgroups would run, the keys are split into parts, and a
//! second dispatch joins their results.

use ort_core::dtype::DType;
use ort_core::{Result, ensure};

use super::heads::Rows;
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

/// The sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    /// Heads of keys and values. Each serves a group of consecutive query heads.
    pub(super) key_heads: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) size: usize,
    pub(super) value_size: usize,
}

/// The causal mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Causal {
    No,
    Yes,
    /// Causal, except that the last query sees all keys, as in ONNX Runtime.
    ButTheLast,
}

/// The valid keys of each batch, and the number of keys before the first query.
#[derive(Clone, Copy)]
pub(super) enum Lengths<'a> {
    /// All keys are valid; `before` of them precede the queries.
    All { before: usize },
    /// `lengths` plus `more` keys are valid; `before` of them precede the queries.
    Of { lengths: &'a Operand, before: usize, more: usize },
    /// `lengths` plus `more` keys are valid, and the queries are the last of them.
    AtEnd { lengths: &'a Operand, more: usize },
}

/// An additive mask that broadcasts to the scores. A boolean mask hides keys where it is false.
#[derive(Clone)]
pub(super) struct Mask<'a> {
    pub(super) operand: &'a Operand,
    /// The strides along batch, head and query.
    pub(super) steps: [usize; 3],
    /// The keys that it covers; later ones are hidden.
    pub(super) keys: usize,
}

/// A padding mask.
#[derive(Clone)]
pub(super) struct Padding<'a> {
    pub(super) operand: &'a Operand,
    pub(super) kind: Padded,
    /// The value that is added to the scores of padding.
    pub(super) added: f32,
}

/// Which keys are padding.
#[derive(Clone, Copy, Debug)]
pub(super) enum Padded {
    /// Those from a per-batch end on.
    From,
    /// Those outside of a per-batch range. The starts follow the ends of all batches.
    FromAndBefore,
    /// Those whose element is 0 or less. `first` is the first element, `steps` the strides along
    /// batch and query.
    Elements { first: usize, steps: [usize; 2] },
}

/// Attention sinks: additional scores in the softmax, without a value.
#[derive(Clone, Copy)]
pub(super) enum Sinks<'a> {
    None,
    /// A score of zero.
    Zero,
    /// A score for each head.
    Each(&'a Operand),
}

/// An output that receives the scores.
#[derive(Clone, Copy)]
pub(super) struct Scores<'a> {
    pub(super) operand: &'a Operand,
    pub(super) stage: Stage,
}

/// The stage at which scores are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Scaled,
    Capped,
    Masked,
}

/// One attention.
#[derive(Clone)]
pub(super) struct Attend<'a> {
    pub(super) sizes: Sizes,
    pub(super) q: Rows,
    pub(super) k: Rows,
    pub(super) v: Rows,
    pub(super) y: Rows,
    /// A bias on the queries of all heads.
    pub(super) q_bias: Option<&'a Operand>,
    pub(super) scale: f32,
    /// If above 0, scores become `softcap * tanh(score / softcap)`.
    pub(super) softcap: f32,
    pub(super) causal: Causal,
    /// The sliding window: the keys before and after a query's own that it sees; negative for all.
    pub(super) windows: [i64; 2],
    pub(super) lengths: Lengths<'a>,
    pub(super) mask: Option<Mask<'a>>,
    pub(super) padding: Option<Padding<'a>>,
    pub(super) sinks: Sinks<'a>,
    /// Whether a query whose scores are all -inf yields NaN instead of 0.
    pub(super) hidden_is_nan: bool,
    pub(super) scores: Option<Scores<'a>>,
}

/// How a workgroup's rows and columns are divided among its lanes.
struct Cut {
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

impl Cut {
    fn new(rows: usize, value_size: usize) -> Cut {
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
                return Cut { quads, turns, chunk, columns, mine, wide };
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

impl Sizes {
    /// The rows that share keys: the queries of all heads of a group.
    fn rows(&self) -> usize {
        self.heads.checked_div(self.key_heads).unwrap_or(0).saturating_mul(self.queries)
    }

    /// The row blocks of a group of heads.
    fn blocks(&self) -> usize {
        self.rows().div_ceil(Cut::new(self.rows(), self.value_size).quads * 4)
    }

    /// The number of parts that the keys are split into. It never falls as keys are added, so the
    /// workspace for the most keys suffices.
    fn splits(&self) -> usize {
        let groups = self.batch.saturating_mul(self.key_heads).saturating_mul(self.blocks());
        (self.keys / PART).min(BUSY.checked_div(groups).unwrap_or(1)).max(1)
    }

    /// Allocates the partial results in the workspace; `None` if the keys are not split.
    pub(super) fn parts(&self, cx: &OpCx<'_>, taken: &mut usize) -> Option<Operand> {
        let splits = self.splits();
        let lines =
            self.batch.saturating_mul(self.key_heads).saturating_mul(splits).saturating_mul(self.rows());
        // Each row also keeps its maximum and its sum of weights.
        let shape = [lines, self.value_size.saturating_add(2)];
        (splits > 1).then(|| cx.workspace(taken, DType::F32, &shape))
    }

    /// Adds the uniforms that locate results.
    fn numbers(&self, shader: Shader, splits: usize, y: &Rows) -> Shader {
        shader
            .sizes("y_step", &y.steps)
            .number("splits", splits)
            .number("rows", self.rows())
            .number("sharing", self.heads.checked_div(self.key_heads).unwrap_or(0))
            .number("key_heads", self.key_heads)
            .number("queries", self.queries)
            .number("value_size", self.value_size)
    }
}

impl Attend<'_> {
    /// Returns the dispatches of the attention. The workspace has the partial results after the
    /// first `taken` bytes.
    pub(super) fn dispatches(&self, cx: &OpCx<'_>, mut taken: usize) -> Result<Vec<Dispatch>> {
        let Sizes { heads, key_heads, value_size, batch, .. } = self.sizes;
        let divides = heads.checked_rem(key_heads) == Some(0);
        ensure!(divides, InvalidArgument, "{heads} query heads are not a multiple of {key_heads} key heads");
        if batch == 0 || self.sizes.rows() == 0 || value_size == 0 {
            return Ok(Vec::new());
        }
        // The score output is written in one pass over all keys.
        let parts = if self.scores.is_some() { None } else { self.sizes.parts(cx, &mut taken) };
        let Some(parts) = parts else { return Ok(vec![self.attend(cx, &self.y.operand, 1)?]) };
        let splits = self.sizes.splits();
        Ok(vec![self.attend(cx, &parts, splits)?, self.join(cx, &parts, splits)?])
    }

    /// Attention over each part of the keys.
    fn attend(&self, cx: &OpCx<'_>, to: &Operand, splits: usize) -> Result<Dispatch> {
        let Sizes { batch, key_heads, value_size, .. } = self.sizes;
        let cut = Cut::new(self.sizes.rows(), value_size);
        ensure!(cut.mine * cut.wide <= 4 * KEPT, NotImplemented, "heads of {value_size} elements");
        let blocks = self.sizes.blocks();
        let mut shader = self.q.read(Shader::new(cx), "q");
        shader = self.v.read(self.k.read(shader, "k"), "v").write("y", to);
        shader = self.numbers(self.common_numbers(shader, splits)).number("blocks", blocks);
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
        shader = self.places(shader, &mut code);
        shader = self.scores(shader, &mut code);
        let groups = batch.saturating_mul(key_heads).saturating_mul(blocks).saturating_mul(splits);
        shader.groups(groups, LANES, &code)
    }

    /// Joins the partial results of each row, rescaled to their common maximum.
    fn join(&self, cx: &OpCx<'_>, parts: &Operand, splits: usize) -> Result<Dispatch> {
        let shader = Shader::new(cx).read("part", parts).write("y", &self.y.operand);
        let shader = self.common_numbers(shader, splits);
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
        let Sizes { batch, key_heads, value_size, .. } = self.sizes;
        let lines = batch.saturating_mul(key_heads).saturating_mul(self.sizes.rows());
        shader.each(lines.saturating_mul(value_size), &code)
    }

    /// Adds the uniforms of both shaders: where results are, and the result of a query without
    /// weights. NaN is a uniform, because WGSL rejects constant expressions that are NaN.
    fn common_numbers(&self, shader: Shader, splits: usize) -> Shader {
        let without_weights = if self.hidden_is_nan && self.sizes.keys > 0 { f32::NAN } else { 0.0 };
        self.sizes.numbers(shader, splits, &self.y).float("without_weights", without_weights)
    }

    fn numbers(&self, mut shader: Shader) -> Shader {
        let Sizes { batch, heads, keys, size, .. } = self.sizes;
        let (before, more) = match self.lengths {
            Lengths::All { before } => (before, 0),
            Lengths::Of { before, more, .. } => (before, more),
            Lengths::AtEnd { more, .. } => (0, more),
        };
        let causal = match self.causal {
            Causal::No => 0,
            Causal::Yes => 1,
            Causal::ButTheLast => 2,
        };
        for (name, number) in [
            ("keys", keys),
            ("size", size),
            ("heads", heads),
            ("batches", batch),
            ("before", before),
            ("more", more),
            ("causal", causal),
            ("sinks", usize::from(!matches!(self.sinks, Sinks::None))),
            ("all", usize::from(self.scores.is_some())),
        ] {
            shader = shader.number(name, number);
        }
        // A window longer than all keys and queries is the same as none.
        let [left, right] = self.windows.map(|size| size.clamp(-1, 1 << 29));
        shader.integer("left", left).integer("right", right).float("scale", self.scale)
    }

    /// Generates the functions for valid lengths, the query bias and the sinks.
    fn places(&self, mut shader: Shader, code: &mut String) -> Shader {
        let (length, offset) = match self.lengths {
            Lengths::All { .. } => ("i32(p.keys)", "i32(p.before)"),
            Lengths::Of { lengths, .. } => {
                shader = shader.read("lengths", lengths);
                ("i32(lengths(batch)) + i32(p.more)", "i32(p.before)")
            }
            Lengths::AtEnd { lengths, .. } => {
                shader = shader.read("lengths", lengths);
                ("i32(lengths(batch)) + i32(p.more)", "length - i32(p.queries)")
            }
        };
        let bias = match self.q_bias {
            Some(bias) => {
                shader = shader.read("q_bias", bias);
                " + q_bias(c)"
            }
            None => "",
        };
        let sink = match self.sinks {
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
    fn scores(&self, mut shader: Shader, code: &mut String) -> Shader {
        let stage = self.scores.map(|scores| scores.stage);
        let kept = |own: Stage| match stage == Some(own) {
            true => "set_scores(((batch * p.heads + head) * p.queries + query) * p.keys + key, score);\n",
            false => "",
        };
        let mut body = String::from(kept(Stage::Scaled));
        if self.softcap > 0.0 {
            shader = shader.float("softcap", self.softcap);
            body.push_str("score = p.softcap * tanh_(score / p.softcap);\n");
        }
        body.push_str(kept(Stage::Capped));
        body.push_str("var shown = seen;\n");
        if let Some(Mask { operand, steps, keys }) = &self.mask {
            shader = shader.read("mask", operand).sizes("mask_step", steps).number("mask_keys", *keys);
            let apply = if operand.dtype == DType::Bool {
                "shown = mask(at) != 0u;"
            } else {
                "score += f32(mask(at));"
            };
            body.push_str(&format!(
                "if (key >= p.mask_keys) {{ shown = false; }}
                if (shown) {{
                    let at = batch * mask_step(0u) + head * mask_step(1u) + query * mask_step(2u) + key;
                    {apply}
                }}\n"
            ));
        }
        if let Some(Padding { operand, kind, added }) = &self.padding {
            shader = shader.read("padding", operand).float("padded", *added);
            let hides = match kind {
                Padded::From => "i32(key) >= padding(batch)",
                Padded::FromAndBefore => {
                    "i32(key) >= padding(batch) || i32(key) < padding(p.batches + batch)"
                }
                Padded::Elements { first, steps } => {
                    shader = shader.sizes("padding_step", &[steps[0], steps[1], *first]);
                    "padding(padding_step(2u) + batch * padding_step(0u) + query * padding_step(1u) + key)
                        <= 0"
                }
            };
            body.push_str(&format!("if ({hides}) {{ score += p.padded; }}\n"));
        }
        // After the padding: a hidden key stays at -inf.
        body.push_str("if (!shown) { score = -infinity(); }\n");
        body.push_str(kept(Stage::Masked));
        if let Some(Scores { operand, .. }) = self.scores {
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
}

#[cfg(test)]
mod tests {
    use super::{Cut, LANES, unrolled};

    #[test]
    fn lines_are_copied_for_each_number() {
        let text = unrolled("let a_$t = $tu;\nb_$t_$w();\nc();", &[("$t", 2), ("$w", 2)]);
        assert_eq!(text, "let a_0 = 0u;\nlet a_1 = 1u;\nb_0_0();\nb_0_1();\nb_1_0();\nb_1_1();\nc();\n");
    }

    #[test]
    fn every_row_and_column_has_a_lane() {
        for rows in [1, 4, 5, 9, 17, 1000] {
            for value_size in [1, 8, 40, 64, 128, 300, 1000] {
                let Cut { quads, columns, mine, wide, .. } = Cut::new(rows, value_size);
                assert!(LANES / columns * mine >= quads, "{rows} {value_size}");
                assert!(columns * wide >= value_size && columns <= LANES, "{rows} {value_size}");
            }
        }
    }
}
