//! Head layouts, and appending new rows to a KV cache with optional rotary embedding.

use ort_core::Result;
use ort_core::error;

use super::attend::Lengths;
use super::lines::product;
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

/// The rows of heads in a tensor.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub(super) operand: Operand,
    /// The first element.
    pub(super) first: usize,
    /// The strides along batch, head and row.
    pub(super) steps: [usize; 3],
}

impl Rows {
    /// Returns rows in token-major layout: (batch, rows, heads, size).
    pub(super) fn interleaved(operand: &Operand, [heads, rows, size]: [usize; 3]) -> Rows {
        Rows::parts(operand, [heads, rows, size], (1, 0))
    }

    /// Returns one part of rows whose heads have several parts each: (batch, rows, heads, parts,
    /// size).
    pub(super) fn parts(
        operand: &Operand,
        [heads, rows, size]: [usize; 3],
        (parts, part): (usize, usize),
    ) -> Rows {
        let head = parts.saturating_mul(size);
        let row = heads.saturating_mul(head);
        Rows {
            operand: operand.clone(),
            first: part.saturating_mul(size),
            steps: [rows.saturating_mul(row), head, row],
        }
    }

    /// Returns rows in head-major layout: (batch, heads, rows, size).
    pub(super) fn by_head(operand: &Operand, [heads, rows, size]: [usize; 3]) -> Rows {
        let head = rows.saturating_mul(size);
        Rows { operand: operand.clone(), first: 0, steps: [heads.saturating_mul(head), head, size] }
    }

    /// Adds the rows to a shader as `name`, with `p.name_first` and `name_step`.
    pub(super) fn read(&self, shader: Shader, name: &'static str) -> Shader {
        let shader = shader.read(name, &self.operand).sizes(&format!("{name}_step"), &self.steps);
        shader.number(&format!("{name}_first"), self.first)
    }
}

/// Rotary position embedding: rotates pairs of elements by the angles of a row's position.
#[derive(Clone, Copy)]
pub(super) struct Rotation<'a> {
    /// One row for each position, with an angle for each pair.
    pub(super) cos: &'a Operand,
    pub(super) sin: &'a Operand,
    /// The position of each new row; by default its index among all rows.
    pub(super) positions: Option<&'a Operand>,
    /// Whether the elements of a pair are adjacent.
    pub(super) interleaved: bool,
}

/// Appends new rows of heads to those of a past.
pub(super) struct Placing<'a> {
    /// The batches, heads, new rows, and the size of a row.
    pub(super) sizes: [usize; 4],
    pub(super) fresh: &'a Rows,
    /// A bias on new rows of all heads, starting at an element.
    pub(super) bias: Option<(&'a Operand, usize)>,
    pub(super) rotation: Option<Rotation<'a>>,
    /// The past to copy, (batch, heads, rows, size). `None` if there is no past, or it is in the
    /// target already.
    pub(super) past: Option<&'a Operand>,
    /// The number of rows before the new ones.
    pub(super) lengths: Lengths<'a>,
    /// Whether new rows are written at the front, although others precede them elsewhere.
    pub(super) at_front: bool,
    /// Whether the target keeps its other rows, so that only new rows are written.
    pub(super) keeps: bool,
}

impl Placing<'_> {
    /// Returns the dispatch that writes the rows to `to`, of shape (batch, heads, rows, size).
    pub(super) fn dispatch(&self, cx: &OpCx<'_>, to: &Operand) -> Result<Dispatch> {
        let [_, heads, fresh, size] = self.sizes;
        let &[batch, _, capacity, _] = &*to.shape else {
            return Err(error!(Fail, "rows are placed in a tensor of shape {:?}", to.shape));
        };
        let mut shader = self.fresh.read(Shader::new(cx), "fresh").write("to", to);
        for (name, number) in [
            ("heads", heads),
            ("many", fresh),
            ("size", size),
            ("capacity", capacity),
            // In place, only new rows are written; else every row of the target is.
            ("rows", if self.keeps { fresh } else { capacity }),
        ] {
            shader = shader.number(name, number);
        }
        let mut code = String::new();
        shader = self.lengths(shader, &mut code);
        shader = self.values(shader, &mut code);
        let place = match self.keeps {
            true => {
                "let at = front + row;
                if (at < p.capacity) {
                    let line = (batch * p.heads + head) * p.capacity + at;
                    set_to(line * p.size + c, value(batch, head, row, before, c));
                }"
            }
            false => {
                "var result = 0.0;
                if (row < front) { result = old(batch * p.heads + head, row, c); }
                else if (row - front < p.many) { result = value(batch, head, row - front, before, c); }
                set_to(i, result);"
            }
        };
        let front = if self.at_front { "0u" } else { "before" };
        code.push_str(&format!(
            "fn element(i: u32) {{
                let c = i % p.size;
                let row = i / p.size % p.rows;
                let head = i / p.size / p.rows % p.heads;
                let batch = i / p.size / p.rows / p.heads;
                let before = before_of(batch);
                let front = {front};
                {place}
            }}\n"
        ));
        let rows = if self.keeps { fresh } else { capacity };
        shader.each(product(&[batch, heads, rows, size]), &code)
    }

    /// Generates `before_of(batch)`, the number of rows before the new ones.
    fn lengths(&self, mut shader: Shader, code: &mut String) -> Shader {
        let (before, number) = match self.lengths {
            Lengths::All { before } | Lengths::Of { before, .. } => ("p.before", before),
            // `lengths` counts the new rows, too, so subtract them.
            Lengths::AtEnd { lengths, more } => {
                shader = shader.read("lengths", lengths);
                ("u32(max(i32(lengths(batch)) + i32(p.before) - i32(p.many), 0))", more)
            }
        };
        code.push_str(&format!("fn before_of(batch: u32) -> u32 {{ return {before}; }}\n"));
        shader.number("before", number)
    }

    /// Generates the functions for an element of the past, and of the new rows.
    fn values(&self, mut shader: Shader, code: &mut String) -> Shader {
        let old = match self.past {
            Some(past) => {
                shader = shader.read("past", past).number("past_rows", past.size(2));
                "return past((head * p.past_rows + row) * p.size + c);"
            }
            None => "return 0.0;",
        };
        let bias = match self.bias {
            Some((bias, first)) => {
                shader = shader.read("bias", bias).number("bias_first", first);
                " + bias(p.bias_first + head * p.size + c)"
            }
            None => "",
        };
        let turned = match self.rotation {
            None => "return plain(batch, head, row, c);".to_owned(),
            Some(rotation) => {
                shader = shader.read("cos_of", rotation.cos).read("sin_of", rotation.sin);
                shader = shader.number("half", rotation.cos.size(1)).number("angles", rotation.cos.size(0));
                let position = match rotation.positions {
                    Some(positions) => {
                        shader = shader.read("positions", positions);
                        "u32(positions(batch * p.many + row))"
                    }
                    None => "before + row",
                };
                turned(position, rotation.interleaved)
            }
        };
        code.push_str(&format!(
            "fn old(head: u32, row: u32, c: u32) -> f32 {{ {old} }}
            fn plain(batch: u32, head: u32, row: u32, c: u32) -> f32 {{
                let at = batch * fresh_step(0u) + head * fresh_step(1u) + row * fresh_step(2u) + c;
                return fresh(p.fresh_first + at){bias};
            }}
            fn value(batch: u32, head: u32, row: u32, before: u32, c: u32) -> f32 {{ {turned} }}\n"
        ));
        shader
    }
}

/// Generates the body of a function that returns the rotated element `c`.
fn turned(position: &str, interleaved: bool) -> String {
    let (pair, other, is_second) = match interleaved {
        true => ("c / 2u", "c ^ 1u", "(c & 1u) == 1u"),
        false => ("c % p.half", "select(c - p.half, c + p.half, c < p.half)", "c >= p.half"),
    };
    format!(
        "let own = plain(batch, head, row, c);
        if (c >= 2u * p.half) {{ return own; }}
        let position = min({position}, p.angles - 1u);
        let angle = position * p.half + {pair};
        let other = plain(batch, head, row, {other});
        return own * cos_of(angle) + select(-other, other, {is_second}) * sin_of(angle);"
    )
}
