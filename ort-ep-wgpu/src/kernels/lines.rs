//! Workgroup reductions over lines: the slices of a tensor along some of its axes.
//!
//! A workgroup handles one line or several. A team of lanes shares a line and combines its values
//! in a tree.

use std::ops::Deref;

use ort_core::Result;

use crate::launch::Dispatch;
use crate::shader::Shader;

pub(super) use ort_core::ops::tensor::geometry::product;

/// The most lanes for one line.
const MOST_PARTS: usize = 256;
/// The fewest lanes of a workgroup.
const LEAST_LANES: usize = 64;
/// The elements that make a further lane worthwhile.
const EACH: usize = 8;
/// The most adjacent lines of a workgroup, if lines are strided and long.
const ABREAST: usize = 32;

/// The lines of a tensor, which teams of lanes reduce.
pub(super) struct Lines(ort_gpu::Lines);

impl Deref for Lines {
    type Target = ort_gpu::Lines;

    fn deref(&self) -> &ort_gpu::Lines {
        &self.0
    }
}

/// How the lanes of a workgroup are divided among lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Team {
    /// The lines of a workgroup.
    columns: usize,
    /// The lanes of a line.
    parts: usize,
    /// The distance between consecutive lanes of a line.
    step: usize,
}

impl Lines {
    /// Returns the lines of a tensor of `shape` along the axes that the mask selects.
    pub(super) fn new(shape: &[usize], mask: &[bool]) -> Lines {
        Lines(ort_gpu::Lines::new(shape, mask))
    }

    /// Returns the lines along one axis.
    pub(super) fn along_axis(shape: &[usize], axis: usize) -> Lines {
        Lines(ort_gpu::Lines::along_axis(shape, axis))
    }

    /// Returns `count` contiguous lines.
    pub(super) fn rows(count: usize, len: usize) -> Lines {
        Lines(ort_gpu::Lines::rows(count, len))
    }

    /// Chooses the team size. Lanes that are neighbours access neighbouring elements: along a
    /// contiguous line, or across lines if those are strided.
    fn team(&self) -> Team {
        let wanted = self.len.div_ceil(EACH).next_power_of_two();
        let in_rows = self.along.steps.iter().all(|steps| steps.last().is_none_or(|step| *step == 1));
        if in_rows {
            let parts = if self.len <= EACH { 1 } else { wanted.min(MOST_PARTS) };
            return Team { columns: (LEAST_LANES / parts).max(1), parts, step: 1 };
        }
        // A short strided line is cheapest in a single lane, which needs no barrier.
        if self.len <= 2 * EACH {
            return Team { columns: LEAST_LANES, parts: 1, step: LEAST_LANES };
        }
        let columns = self.count.clamp(1, ABREAST).next_power_of_two();
        Team { columns, parts: wanted.min(MOST_PARTS / columns), step: columns }
    }

    /// Generates a function `name(value, lane)` that reduces the values of a line's lanes and
    /// returns the result to all of them. `join` combines `a` and `b`, the values of a lane and of
    /// a later one.
    pub(super) fn tree(&self, name: &str, value: &str, join: &str) -> String {
        if self.team().parts == 1 {
            return format!("fn {name}(value: {value}, lane: u32) -> {value} {{ return value; }}\n");
        }
        format!(
            "var<workgroup> {name}_cells: array<{value}, LANES>;
            fn {name}(value: {value}, lane: u32) -> {value} {{
                let part = part_of(lane);
                {name}_cells[lane] = value;
                workgroupBarrier();
                for (var many = PARTS / 2u; many > 0u; many = many / 2u) {{
                    if (part < many) {{
                        let a = {name}_cells[lane];
                        let b = {name}_cells[lane + many * STEP];
                        {name}_cells[lane] = {join};
                    }}
                    workgroupBarrier();
                }}
                let result = {name}_cells[lane - part * STEP];
                workgroupBarrier();
                return result;
            }}\n"
        )
    }

    /// Finishes a dispatch of `group(index, lane)` for the teams of all lines, with each line cut
    /// into `splits` pieces. The code has `p.lines` and `p.length`. The number of a line is
    /// `line_of(index, lane)`. It begins at `at_line(line)`, and its element `r` is `at_along(r)`
    /// after that. A lane handles every `PARTS`th element from `part_of(lane)` on.
    pub(super) fn dispatch(&self, shader: Shader, splits: usize, code: &str) -> Result<Dispatch> {
        let Team { columns, parts, step } = self.team();
        let shader = shader
            .walk_over("begins", &self.begins, &["line"])
            .walk_over("along", &self.along, &["along"])
            .number("lines", self.count)
            .number("length", self.len)
            .number("splits", splits)
            .constant("COLUMNS", columns)
            .constant("PARTS", parts)
            .constant("STEP", step)
            // The distance between the lanes of adjacent lines.
            .constant("ACROSS", if step == 1 { parts } else { 1 });
        let helpers = "fn part_of(lane: u32) -> u32 { return (lane / STEP) % PARTS; }
            fn line_of(index: u32, lane: u32) -> u32 {
                return index / p.splits * COLUMNS + (lane / ACROSS) % COLUMNS;
            }\n";
        let groups = self.count.div_ceil(columns).saturating_mul(splits);
        shader.groups(groups, columns * parts, &format!("{helpers}{code}"))
    }
}

#[cfg(test)]
mod tests {
    use super::{Lines, MOST_PARTS, Team};

    #[test]
    fn teams_are_whole_workgroups() {
        for len in [0, 1, 8, 9, 64, 1000, 100_000] {
            for shape in [[1, len, 1], [7, len, 1], [3, len, 5], [1, len, 1000]] {
                let Team { columns, parts, step } = Lines::along_axis(&shape, 1).team();
                assert!(columns * parts <= MOST_PARTS && parts.is_power_of_two(), "{shape:?}");
                assert!(step == 1 || step == columns, "{shape:?}");
            }
        }
        assert_eq!(Lines::rows(10, 64).team(), Team { columns: 8, parts: 8, step: 1 });
    }
}
