//! Workgroup reductions over rows: the slices of a tensor along some of its axes.
//!
//! A workgroup handles one row or several. A team of lanes shares a row and combines its values
//! in a tree.

use std::ops::Deref;

use ort_core::Result;

use crate::launch::Dispatch;
use crate::shader::Shader;

/// The most lanes for one row.
const MOST_PARTS: usize = 256;
/// The fewest lanes of a workgroup.
const LEAST_LANES: usize = 64;
/// The elements that make a further lane worthwhile.
const EACH: usize = 8;
/// The most adjacent rows of a workgroup, if rows are strided and long.
const ABREAST: usize = 32;

/// The rows of a tensor, which teams of lanes reduce.
pub(super) struct TeamRows(ort_gpu::StridedRows);

impl Deref for TeamRows {
    type Target = ort_gpu::StridedRows;

    fn deref(&self) -> &ort_gpu::StridedRows {
        &self.0
    }
}

/// How the lanes of a workgroup are divided among rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Team {
    /// The rows of a workgroup.
    columns: usize,
    /// The lanes of a row.
    parts: usize,
    /// The distance between consecutive lanes of a row.
    step: usize,
}

impl TeamRows {
    /// Returns the rows of a tensor of `shape` along the axes that the mask selects.
    pub(super) fn new(shape: &[usize], mask: &[bool]) -> TeamRows {
        TeamRows(ort_gpu::StridedRows::new(shape, mask))
    }

    /// Returns the rows along one axis.
    pub(super) fn along_axis(shape: &[usize], axis: usize) -> TeamRows {
        TeamRows(ort_gpu::StridedRows::along_axis(shape, axis))
    }

    /// Returns `count` contiguous rows.
    pub(super) fn rows(count: usize, len: usize) -> TeamRows {
        TeamRows(ort_gpu::StridedRows::rows(count, len))
    }

    /// Chooses the team size. Lanes that are neighbours access neighbouring elements: along a
    /// contiguous row, or across rows if those are strided.
    fn team(&self) -> Team {
        // A power of two, because the tree halves the lanes in each step.
        let wanted = self.len.div_ceil(EACH).next_power_of_two();
        let in_rows = self.along.steps.iter().all(|steps| steps.last().is_none_or(|step| *step == 1));
        if in_rows {
            let parts = if self.len <= EACH { 1 } else { wanted.min(MOST_PARTS) };
            return Team { columns: (LEAST_LANES / parts).max(1), parts, step: 1 };
        }
        // A short strided row is cheapest in a single lane, which needs no barrier.
        if self.len <= 2 * EACH {
            return Team { columns: LEAST_LANES, parts: 1, step: LEAST_LANES };
        }
        let columns = self.count.clamp(1, ABREAST).next_power_of_two();
        Team { columns, parts: wanted.min(MOST_PARTS / columns), step: columns }
    }

    /// Generates a function `name(value, lane)` that reduces the values of a row's lanes and
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

    /// Finishes a dispatch of `group(index, lane)` for the teams of all rows, with each row cut
    /// into `splits` pieces. The code has `p.rows` and `p.length`. The number of a row is
    /// `row_of(index, lane)`. It begins at `at_row(row)`, and its element `r` is `at_along(r)`
    /// after that. A lane handles every `PARTS`th element from `part_of(lane)` on.
    pub(super) fn dispatch(&self, shader: Shader, splits: usize, code: &str) -> Result<Dispatch> {
        let Team { columns, parts, step } = self.team();
        let shader = shader
            .walk_over("begins", &self.begins, &["row"])
            .walk_over("along", &self.along, &["along"])
            .number("rows", self.count)
            .number("length", self.len)
            .number("splits", splits)
            .constant("COLUMNS", columns)
            .constant("PARTS", parts)
            .constant("STEP", step)
            // The distance between the lanes of adjacent rows.
            .constant("ACROSS", if step == 1 { parts } else { 1 });
        let helpers = "fn part_of(lane: u32) -> u32 { return (lane / STEP) % PARTS; }
            fn row_of(index: u32, lane: u32) -> u32 {
                return index / p.splits * COLUMNS + (lane / ACROSS) % COLUMNS;
            }\n";
        let groups = self.count.div_ceil(columns).saturating_mul(splits);
        shader.groups(groups, columns * parts, &format!("{helpers}{code}"))
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST_PARTS, Team, TeamRows};

    #[test]
    fn teams_are_whole_workgroups() {
        for len in [0, 1, 8, 9, 64, 1000, 100_000] {
            for shape in [[1, len, 1], [7, len, 1], [3, len, 5], [1, len, 1000]] {
                let Team { columns, parts, step } = TeamRows::along_axis(&shape, 1).team();
                assert!(columns * parts <= MOST_PARTS && parts.is_power_of_two(), "{shape:?}");
                assert!(step == 1 || step == columns, "{shape:?}");
            }
        }
        assert_eq!(TeamRows::rows(10, 64).team(), Team { columns: 8, parts: 8, step: 1 });
    }
}
