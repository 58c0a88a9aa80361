//! Scaled dot-product attention over heads that lie anywhere: all attention operators come down to
//! this program.

use ort_core::dtype::DType;
use ort_core::{Result, ensure};

use super::heads::Rows;
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

const COMMON: &str = include_str!("attend_common.wgsl");
const PROGRAM: &str = include_str!("attend.wgsl");
/// The lanes of a workgroup.
const LANES: usize = 64;
/// Results that a lane keeps, in fours.
const KEPT: usize = 16;
/// Workgroups that keep a device busy; where there are fewer, each has a part of the keys, of which
/// it is worth to have so many.
const BUSY: usize = 64;
const PART: usize = 256;

/// The sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    /// Heads of keys and values; each serves as many consecutive heads of queries.
    pub(super) key_heads: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) size: usize,
    pub(super) value_size: usize,
}

/// Which keys queries see by their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Causal {
    No,
    Yes,
    /// The last query sees all keys, as in ONNX Runtime.
    ButTheLast,
}

/// How many keys there are in each batch, and how many precede the first query.
#[derive(Clone, Copy)]
pub(super) enum Lengths<'a> {
    /// All keys, so many before.
    All { before: usize },
    /// As many as the tensor says and so many more, so many before.
    Of { lengths: &'a Operand, before: usize, more: usize },
    /// As many as the tensor says and so many more; the queries stand at the end.
    AtEnd { lengths: &'a Operand, more: usize },
}

/// What is added to scores, broadcast to them; where it is of truth values, what is false hides.
#[derive(Clone)]
pub(super) struct Mask<'a> {
    pub(super) operand: &'a Operand,
    /// From one batch, head and query to the next.
    pub(super) steps: [usize; 3],
    /// Keys beyond are hidden.
    pub(super) keys: usize,
}

/// Keys that are padding.
#[derive(Clone)]
pub(super) struct Padding<'a> {
    pub(super) operand: &'a Operand,
    pub(super) kind: Padded,
    /// What is added to their scores.
    pub(super) added: f32,
}

/// Which keys are padding.
#[derive(Clone, Copy, Debug)]
pub(super) enum Padded {
    /// Those from a number for each batch on.
    From,
    /// Those, and those before another number for each batch, which stands behind all of the first
    /// kind.
    FromAndBefore,
    /// Those whose element is not above 0: the first element, and the steps of batches and queries.
    Elements { first: usize, steps: [usize; 2] },
}

/// What else takes part in the softmax of each head.
#[derive(Clone, Copy)]
pub(super) enum Sinks<'a> {
    None,
    /// A score of zero.
    Zero,
    /// A score for each head.
    Each(&'a Operand),
}

/// Scores that are written out.
#[derive(Clone, Copy)]
pub(super) struct Scores<'a> {
    pub(super) operand: &'a Operand,
    pub(super) stage: Stage,
}

/// A stage of scores.
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
    /// What is added to the queries of all heads.
    pub(super) q_bias: Option<&'a Operand>,
    pub(super) scale: f32,
    /// Where above 0, scores become `softcap * tanh(score / softcap)`.
    pub(super) softcap: f32,
    pub(super) causal: Causal,
    /// The keys before and after its own that a query sees; negative where all.
    pub(super) windows: [i64; 2],
    pub(super) lengths: Lengths<'a>,
    pub(super) mask: Option<Mask<'a>>,
    pub(super) padding: Option<Padding<'a>>,
    pub(super) sinks: Sinks<'a>,
    /// Whether a query all of whose scores are -inf gives NaN instead of 0.
    pub(super) hidden_is_nan: bool,
    pub(super) scores: Option<Scores<'a>>,
}

/// How the program cuts its work.
struct Cut {
    quads: usize,
    turns: usize,
    chunk: usize,
    columns: usize,
    /// Fours of rows of a lane, and its columns.
    mine: usize,
    wide: usize,
}

impl Cut {
    fn new(rows: usize, value_size: usize) -> Cut {
        let mut quads = rows.div_ceil(4).next_power_of_two().clamp(1, 8);
        loop {
            let columns = value_size.max(1).next_power_of_two().clamp(LANES / quads, LANES);
            let (mine, wide) = ((quads * columns).div_ceil(LANES), value_size.max(1).div_ceil(columns));
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

/// The text with each line in as many copies as the names in it count, each with its numbers in
/// their place.
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
    /// Rows that share keys: the queries of all heads that do.
    fn rows(&self) -> usize {
        self.heads.checked_div(self.key_heads).unwrap_or(0).saturating_mul(self.queries)
    }

    fn blocks(&self) -> usize {
        self.rows().div_ceil(Cut::new(self.rows(), self.value_size).quads * 4)
    }

    /// The parts of all keys; more keys have no fewer.
    fn splits(&self) -> usize {
        let groups = self.batch.saturating_mul(self.key_heads).saturating_mul(self.blocks());
        (self.keys / PART).min(BUSY.checked_div(groups).unwrap_or(1)).max(1)
    }

    /// The results of parts, in the workspace; none where there is one part.
    pub(super) fn parts(&self, cx: &OpCx<'_>, taken: &mut usize) -> Option<Operand> {
        let splits = self.splits();
        let lines =
            self.batch.saturating_mul(self.key_heads).saturating_mul(splits).saturating_mul(self.rows());
        let shape = [lines, self.value_size.saturating_add(2)];
        (splits > 1).then(|| cx.workspace(taken, DType::F32, &shape))
    }

    /// Adds the numbers that tell where results are.
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
    /// The dispatches of the attention. The workspace has the parts behind what is `taken`.
    pub(super) fn dispatches(&self, cx: &OpCx<'_>, mut taken: usize) -> Result<Vec<Dispatch>> {
        let Sizes { heads, key_heads, value_size, batch, .. } = self.sizes;
        let divides = heads.checked_rem(key_heads) == Some(0);
        ensure!(divides, InvalidArgument, "{heads} heads do not divide among {key_heads}");
        if batch == 0 || self.sizes.rows() == 0 || value_size == 0 {
            return Ok(Vec::new());
        }
        // Scores are written for all keys at once.
        let parts = if self.scores.is_some() { None } else { self.sizes.parts(cx, &mut taken) };
        let Some(parts) = parts else { return Ok(vec![self.attend(cx, &self.y.operand, 1)?]) };
        let splits = self.sizes.splits();
        Ok(vec![self.attend(cx, &parts, splits)?, self.join(cx, &parts, splits)?])
    }

    /// Attention over each of the parts of all keys.
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

    /// One result of the parts of each row.
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

    /// Adds the numbers of both programs: where results are, and what a query without weights
    /// gives. NaN is a number of the program, as WGSL refuses constant expressions that are NaN.
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
        // A window that is longer than all keys and queries is none.
        let [left, right] = self.windows.map(|size| size.clamp(-1, 1 << 29));
        shader.integer("left", left).integer("right", right).float("scale", self.scale)
    }

    /// Adds what says how long batches are, what is added to queries, and what else is in the
    /// softmax.
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

    /// Adds what becomes of a score.
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
