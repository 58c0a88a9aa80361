//! Normalization shader: mean and variance of each row, then its normalized elements.

use ort_core::Result;

use super::rows::TeamRows;
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

/// A normalization of rows. Its WGSL expressions can use the `row`, the index `r` in it, and the
/// `place` in the tensor.
pub(super) struct Norm<'a> {
    pub(super) rows: TeamRows,
    /// The expression of an input element.
    pub(super) value: &'a str,
    /// Whether the mean is subtracted.
    pub(super) centers: bool,
    /// The expression of the scale factor, from `variance` and `p.epsilon`.
    pub(super) factor: &'a str,
    /// The expression of the output for the normalized element `v`.
    pub(super) result: &'a str,
    pub(super) epsilon: f32,
}

/// The outputs: the results, mean and factor of each row, and the input elements. `None` for one
/// without a reader.
#[derive(Clone, Copy, Default)]
pub(super) struct Written<'a> {
    pub(super) result: Option<&'a Operand>,
    pub(super) mean: Option<&'a Operand>,
    pub(super) factor: Option<&'a Operand>,
    pub(super) value: Option<&'a Operand>,
}

/// The scale factor with epsilon added to the variance.
pub(super) const INVERSE_DEVIATION: &str = "1.0 / sqrt(variance + p.epsilon)";

impl Norm<'_> {
    /// Finishes a dispatch for a shader that has its inputs. A lane reads only elements that it
    /// writes, before it writes them, so input and output may alias.
    pub(super) fn dispatch(&self, mut shader: Shader, written: Written<'_>) -> Result<Dispatch> {
        let outputs = [
            ("result", written.result),
            ("mean", written.mean),
            ("factor", written.factor),
            ("value", written.value),
        ];
        for (name, operand) in outputs {
            shader = operand.into_iter().fold(shader, |shader, operand| shader.write(name, operand));
        }
        shader = shader.float("epsilon", self.epsilon);
        self.rows.dispatch(shader, 1, &self.code(written))
    }

    fn code(&self, written: Written<'_>) -> String {
        let Norm { value, factor, result, .. } = self;
        let each = |body: &str| {
            format!(
                "for (var r = part_of(lane); r < end; r += PARTS) {{
                    let place = begin + at_along(r);
                    let before = {value};
                    {body}
                }}\n"
            )
        };
        let mean = match self.centers {
            true => each("sum += before;") + "let center = total(sum, lane) / f32(p.length);\n",
            false => "let center = 0.0;\n".to_owned(),
        };
        // Two sweeps: the squares of differences from the mean lose no precision to cancellation.
        let squares = each("let apart = before - center; squares += apart * apart;");
        let wanted =
            |operand: Option<&Operand>, code: &str| operand.map_or(String::new(), |_| code.to_owned());
        let elements = wanted(written.value, "set_value(place, before);\n")
            + &wanted(
                written.result,
                &format!("let v = (before - center) * scaled;\nset_result(place, {result});\n"),
            );
        let elements = if elements.is_empty() { elements } else { each(&elements) };
        let of_row = wanted(written.mean, "set_mean(row, center);\n")
            + &wanted(written.factor, "set_factor(row, scaled);\n");
        format!(
            "{tree}
            fn group(index: u32, lane: u32) {{
                let row = row_of(index, lane);
                let end = select(0u, p.length, row < p.rows);
                let begin = at_row(row);
                var sum = 0.0;
                {mean}
                var squares = 0.0;
                {squares}
                let variance = total(squares, lane) / f32(p.length);
                let scaled = {factor};
                {elements}
                if (row < p.rows && part_of(lane) == 0u) {{ {of_row} }}
            }}",
            tree = self.rows.tree("total", "f32", "a + b"),
        )
    }
}

/// Begins a shader that reads `x`.
pub(super) fn reading(cx: &OpCx<'_>, x: &Operand) -> Shader {
    Shader::new(cx).read("x", x)
}
