//! Sweeps: one plan for each combination of sizes, and the largest that fits, whole or with a split
//! batch.

use ort_alloc::human_bytes;
use ort_core::Result;
use ort_core::plan::PlanReport;
use ort_core::session::Session;
use serde_json::{Map, Value, json};

use crate::plan::{fits, plan_json};
use crate::table::{Table, in_line};
use crate::text::{OPEN, parts_text, sizes_text};

/// The most plans of a sweep. Larger numbers are typing errors.
pub const MOST_PLANS: usize = 4096;

/// The sizes of one combination, and its result.
struct Planned<'a> {
    dims: Vec<(&'a str, i64)>,
    peak_bytes: Option<usize>,
    planned_bytes: usize,
    fits: bool,
    /// The items of each part, if it fits only with a split batch.
    parts: Option<String>,
}

impl Planned<'_> {
    fn dims_json(&self) -> Value {
        self.dims.iter().map(|(name, size)| ((*name).to_owned(), json!(size))).collect::<Map<_, _>>().into()
    }
}

/// The plans of several combinations of sizes.
pub struct Sweep<'a> {
    all: Vec<Planned<'a>>,
    /// The largest that fits, as an index into `all`.
    largest: Option<usize>,
    /// The plan of the largest that fits; if nothing fits, the first.
    shown: Option<PlanReport>,
}

impl<'a> Sweep<'a> {
    /// Plans a run for each of the [`combinations`].
    ///
    /// # Errors
    ///
    /// The model has no dimension of such a name, or a size is negative.
    pub fn new(session: &Session, combinations: Vec<Vec<(&'a str, i64)>>) -> Result<Sweep<'a>> {
        let mut sweep = Sweep { all: Vec::new(), largest: None, shown: None };
        for dims in combinations {
            let report = session.plan(&dims)?;
            sweep.add(dims, report);
        }
        Ok(sweep)
    }

    fn add(&mut self, dims: Vec<(&'a str, i64)>, report: PlanReport) {
        let (peak_bytes, planned_bytes, fits) = (report.peak_bytes, report.planned_bytes, fits(&report));
        let parts = report.batch_split.as_ref().map(parts_text);
        // The largest combination is the one that needs the most bytes. Of equal plans the last
        // counts: sizes are usually listed in ascending order.
        let is_largest = fits && self.largest().is_none_or(|best| planned_bytes >= best.planned_bytes);
        if is_largest {
            self.largest = Some(self.all.len());
        }
        if is_largest || self.shown.is_none() {
            self.shown = Some(report);
        }
        self.all.push(Planned { dims, peak_bytes, planned_bytes, fits, parts });
    }

    fn largest(&self) -> Option<&Planned<'a>> {
        self.largest.and_then(|index| self.all.get(index))
    }

    /// Returns the JSON object that `ort plan --json` prints for several sizes: the plan of the
    /// largest combination that fits, and the numbers of all.
    pub fn to_json(&self) -> Value {
        let sweep = self.all.iter().map(|planned| {
            json!({
                "dims": planned.dims_json(),
                "peak_bytes": planned.peak_bytes,
                "planned_bytes": planned.planned_bytes,
                "fits": planned.fits,
            })
        });
        let mut object = self.shown.as_ref().map_or_else(|| json!({}), plan_json);
        if let Some(object) = object.as_object_mut() {
            object.insert("sweep".into(), sweep.collect());
            object.insert(
                "largest_that_fits".into(),
                self.largest().map_or(Value::Null, |best| best.dims_json()),
            );
        }
        object
    }

    /// Returns a table of the combinations and the largest that fits, without a newline at the end.
    /// `limit` is the memory limit of the session.
    pub fn to_text(&self, limit: Option<usize>) -> String {
        let names = self.all.first().map(|planned| planned.dims.iter().map(|(name, _)| *name));
        let header: Vec<&str> = names.into_iter().flatten().chain(["peak bytes", "", "fits"]).collect();
        let numbers = header.len() - 1;
        let mut rows = Table::new(&header);
        for planned in &self.all {
            // Values of unknown size are not in the plan, so the peak is a lower bound.
            let open = if planned.peak_bytes.is_none() { "+" } else { "" };
            let sizes = planned.dims.iter().map(|(_, size)| size.to_string());
            let fits = match &planned.parts {
                Some(parts) => format!("as {parts} items"),
                None if planned.fits => "yes".to_owned(),
                None => "no".to_owned(),
            };
            rows.add_row(sizes.chain([
                format!("{}{open}", planned.planned_bytes),
                human_bytes(planned.planned_bytes),
                fits,
            ]));
        }
        let mut lines = vec![rows.align_right(0..numbers).to_string()];
        if self.all.iter().any(|planned| planned.peak_bytes.is_none()) {
            lines.push(format!("\n+ {OPEN}"));
        }
        let bound = limit.map_or("this machine's memory".to_string(), human_bytes);
        lines.push(match self.largest() {
            Some(best) => format!("\nthe largest that fits {bound}: {}", in_line(&sizes_text(&best.dims))),
            None => format!("\nnone fits {bound}"),
        });
        lines.join("\n")
    }
}

/// Returns the Cartesian product of the sizes of dimensions, or `None` if it has more than
/// [`MOST_PLANS`] combinations. The last dimension varies fastest.
pub fn combinations(dims: &[(String, Vec<i64>)]) -> Option<Vec<Vec<(&str, i64)>>> {
    // The number is checked first, because the product may be too large to list.
    let count = dims.iter().try_fold(1usize, |count, (_, sizes)| count.checked_mul(sizes.len()))?;
    if count > MOST_PLANS {
        return None;
    }
    let mut all: Vec<Vec<(&str, i64)>> = vec![Vec::new()];
    for (name, sizes) in dims {
        let longer = all.iter().flat_map(|chosen| {
            sizes.iter().map(move |size| {
                let mut chosen = chosen.clone();
                chosen.push((name.as_str(), *size));
                chosen
            })
        });
        all = longer.collect();
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_dimension_varies_fastest() {
        let dims = [("a".to_owned(), vec![1, 2]), ("b".to_owned(), vec![3, 4])];
        let sizes = [(1, 3), (1, 4), (2, 3), (2, 4)];
        let expected: Vec<_> = sizes.iter().map(|&(a, b)| vec![("a", a), ("b", b)]).collect();
        assert_eq!(combinations(&dims), Some(expected));
        let many = vec![1; 100];
        assert_eq!(combinations(&[("a".to_owned(), many.clone()), ("b".to_owned(), many)]), None);
    }
}
