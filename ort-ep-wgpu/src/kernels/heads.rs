//! The shader that places new rows of heads in a KV cache, with optional rotary embedding.

use ort_core::Result;
use ort_core::ops::tensor::geometry::product;
use ort_gpu::attention::{HeadTensor, KeyLengths, Placing, Positions, Rotation};

use crate::launch::{Dispatch, OpCx};
use crate::shader::Shader;

/// Adds rows to a shader as `name`, with `p.name_first` and `name_step`.
pub(super) fn read_rows(shader: Shader, name: &'static str, rows: &HeadTensor) -> Shader {
    let shader = shader.read(name, &rows.operand).sizes(&format!("{name}_step"), &rows.strides);
    shader.number(&format!("{name}_first"), rows.first)
}

/// Returns the dispatch that places rows.
pub(super) fn place(cx: &OpCx<'_>, placing: &Placing<'_>) -> Result<Dispatch> {
    let [batch, heads, fresh, size] = placing.sizes;
    let rows = placing.written();
    let mut shader = read_rows(Shader::new(cx), "fresh", &placing.fresh).write("to", &placing.to.operand);
    for (name, number) in [
        ("heads", heads),
        ("many", fresh),
        ("size", size),
        ("capacity", placing.capacity),
        // In place, only new rows are written; else every row of the target is.
        ("rows", rows),
    ] {
        shader = shader.number(name, number);
    }
    let mut code = String::new();
    shader = lengths(placing, shader, &mut code);
    shader = values(placing, shader, &mut code);
    let place = match placing.keeps {
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
    let front = if placing.at_front { "0u" } else { "before" };
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
    shader.each(product(&[batch, heads, rows, size]), &code)
}

/// Generates `before_of(batch)`, the number of rows before the new ones.
fn lengths(placing: &Placing<'_>, mut shader: Shader, code: &mut String) -> Shader {
    let (before, number) = match placing.lengths {
        KeyLengths::All { before } | KeyLengths::Each { before, .. } => ("p.before", before),
        // `lengths` counts the new rows, too, so subtract them.
        KeyLengths::AtEnd { lengths, more } => {
            shader = shader.read("lengths", lengths);
            ("u32(max(i32(lengths(batch)) + i32(p.before) - i32(p.many), 0))", more)
        }
    };
    code.push_str(&format!("fn before_of(batch: u32) -> u32 {{ return {before}; }}\n"));
    shader.number("before", number)
}

/// Generates the functions for an element of the past, and of the new rows.
fn values(placing: &Placing<'_>, mut shader: Shader, code: &mut String) -> Shader {
    let old = match placing.past {
        Some(past) => {
            shader = shader.read("past", past).number("past_rows", past.size(2));
            "return past((head * p.past_rows + row) * p.size + c);"
        }
        None => "return 0.0;",
    };
    let bias = match placing.bias {
        Some((bias, first)) => {
            shader = shader.read("bias", bias).number("bias_first", first);
            " + bias(p.bias_first + head * p.size + c)"
        }
        None => "",
    };
    let turned = match placing.rotation {
        None => "return plain(batch, head, row, c);".to_owned(),
        Some(rotation) => {
            let Rotation { cos, sin, half, cache_rows, positions, is_interleaved } = rotation;
            shader = shader.read("cos_of", cos).read("sin_of", sin);
            shader = shader.number("half", half).number("angles", cache_rows);
            let position = match positions {
                Positions::ByPlace => "before + row",
                Positions::Numbered => "batch * p.many + row",
                Positions::ByToken(ids) => {
                    shader = shader.read("positions", ids);
                    "u32(positions(batch * p.many + row))"
                }
                Positions::First(ids) => {
                    shader = shader.read("positions", ids);
                    "u32(positions(0u)) + row"
                }
            };
            turned(position, is_interleaved)
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

/// Generates the body of a function that returns the rotated element `c`.
fn turned(position: &str, is_interleaved: bool) -> String {
    let (pair, other, is_second) = match is_interleaved {
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
