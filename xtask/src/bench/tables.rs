//! The table of timed models, and the geometric means under it.

use anyhow::Result;
use serde_json::{Value as Json, json};

use super::limits::Limits;
use super::runtime::Side;
use crate::table;

/// The file size in bytes above which a model counts in the mean of loading times.
const LARGE_FILE: u64 = 10_000_000;

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// All columns, aligned.
    Aligned,
    /// One line for each model, for the README.
    Markdown,
    /// One JSON object.
    Json,
}

/// One case at one thread count.
pub(crate) struct Row {
    pub(crate) name: String,
    /// The instruction set that ours uses.
    pub(crate) isa: String,
    pub(crate) threads: usize,
    pub(crate) is_random: bool,
    pub(crate) file_bytes: u64,
    /// The machine's peak float32 FLOP/s at this thread count.
    pub(crate) flops: f64,
    /// Ours, ONNX Runtime's and OpenVINO's, in this order. A runtime that was not asked or could
    /// not run the case is missing.
    pub(crate) sides: Vec<Option<Side>>,
    /// The error, if ours failed.
    pub(crate) problem: Option<String>,
}

impl Row {
    fn side(&self, index: usize) -> Option<&Side> {
        self.sides.get(index)?.as_ref()
    }

    fn median(&self, index: usize) -> Option<f64> {
        self.side(index).map(|side| side.median_ms)
    }

    fn load(&self, index: usize) -> Option<f64> {
        self.side(index)?.load_ms
    }

    fn growth(&self, index: usize) -> Option<u64> {
        self.side(index)?.growth
    }

    /// Returns our time divided by the fastest other runtime's.
    pub(crate) fn ratio(&self) -> Option<f64> {
        // Side 0 is ours.
        let fastest = (1..self.sides.len()).filter_map(|index| self.median(index)).reduce(f64::min)?;
        Some(self.median(0)? / fastest)
    }

    /// Returns our CPU time divided by the lowest of the others.
    fn cpu_ratio(&self) -> Option<f64> {
        let cpu = |index: usize| self.side(index)?.cpu_ms;
        Some(cpu(0)? / (1..self.sides.len()).filter_map(cpu).reduce(f64::min)?)
    }

    fn load_ratio(&self) -> Option<f64> {
        Some(self.load(0)? / self.load(1)?)
    }

    fn growth_ratio(&self) -> Option<f64> {
        Some(self.growth(0)? as f64 / self.growth(1)? as f64)
    }

    /// Returns the share of peak FLOP/s that the model's GEMMs and convolutions reach.
    fn peak_share(&self) -> Option<f64> {
        let ours = self.side(0)?;
        // `operations` counts multiplications and additions, as FLOP/s do.
        Some(ours.operations? as f64 / (ours.median_ms * 1e-3) / self.flops)
    }

    /// Describes the row in one line, for progress output.
    pub(crate) fn describe(&self) -> String {
        if let Some(problem) = &self.problem {
            return format!("{} with {} threads, {}: {problem}", self.name, self.threads, self.isa);
        }
        let times: Vec<String> =
            (0..self.sides.len()).map(|index| milliseconds(self.median(index))).collect();
        format!(
            "{} with {} threads, {}: {} ms, ratio {}",
            self.name,
            self.threads,
            self.isa,
            times.join(" / "),
            decimals(self.ratio())
        )
    }

    fn cells(&self) -> Vec<String> {
        let mut cells = vec![self.name.clone(), self.isa.clone(), self.threads.to_string()];
        if let Some(problem) = &self.problem {
            cells.push(problem.clone());
            return cells;
        }
        // A runtime that is missing fills its columns with `-`.
        cells.extend((0..3).map(|index| milliseconds(self.median(index))));
        cells.push(decimals(self.ratio()));
        cells.push(decimals(self.cpu_ratio()));
        cells.push(percent(self.peak_share()));
        cells.extend((0..3).map(|index| milliseconds(self.load(index))));
        cells.push(decimals(self.load_ratio()));
        cells.extend((0..3).map(|index| mebibytes(self.growth(index))));
        cells.push(decimals(self.growth_ratio()));
        cells
    }

    fn json(&self) -> Json {
        json!({
            "case": self.name,
            "isa": self.isa,
            "threads": self.threads,
            "ours": self.side(0),
            "onnxruntime": self.side(1),
            "openvino": self.side(2),
            "ratio": self.ratio(),
            "cpu_ratio": self.cpu_ratio(),
            "peak_share": self.peak_share(),
            "load_ratio": self.load_ratio(),
            "growth_ratio": self.growth_ratio(),
            "problem": self.problem,
        })
    }
}

const COLUMNS: [&str; 17] = [
    "case",
    "ISA",
    "threads",
    "ours ms",
    "ORT",
    "OV",
    "ratio to best",
    "of CPU time",
    "% of peak",
    "load ms",
    "ORT",
    "OV",
    "to ORT",
    "peak MiB",
    "ORT",
    "OV",
    "to ORT",
];

/// Prints all rows, the machine's limits and the means.
pub(crate) fn print(rows: &[Row], limits: &[Limits], style: Style) -> Result<()> {
    let means = means(rows);
    match style {
        Style::Aligned => {
            let mut table = table::new(&COLUMNS);
            for row in rows {
                table.add_row(row.cells());
            }
            println!("{table}\n");
        }
        Style::Markdown => {
            for isa in distinct(rows, |row| &row.isa) {
                let of: Vec<&Row> = rows.iter().filter(|row| &row.isa == isa).collect();
                println!("{isa}\n\n{}\n", compact(&of));
            }
        }
        Style::Json => {
            let means: Vec<Json> = means.iter().map(Mean::json).collect();
            let rows: Vec<Json> = rows.iter().map(Row::json).collect();
            println!("{}", json!({"limits": limits, "rows": rows, "means": means}));
            return Ok(());
        }
    }
    limits.iter().for_each(|limits| println!("{}", limits.describe()));
    means.iter().for_each(|mean| println!("{}", mean.describe()));
    Ok(())
}

/// Returns the values that rows have, in the order of their first rows.
fn distinct<'a, T: PartialEq>(rows: &'a [Row], value: impl Fn(&'a Row) -> T) -> Vec<T> {
    let mut found = Vec::new();
    for value in rows.iter().map(value) {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

/// Builds a table with one line for each case, its thread counts side by side.
fn compact(rows: &[&Row]) -> comfy_table::Table {
    let mut threads: Vec<usize> = rows.iter().map(|row| row.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    let mut columns = vec!["model".to_owned()];
    for count in &threads {
        let noun = if *count == 1 { "thread" } else { "threads" };
        columns.extend([
            format!("{count} {noun}: ours / ORT / OV ms"),
            "ratio".to_owned(),
            "% of peak".to_owned(),
        ]);
    }
    columns.extend(["load: ours / ORT / OV ms".to_owned(), "peak: ours / ORT / OV MiB".to_owned()]);
    let mut table = table::new(&columns.iter().map(String::as_str).collect::<Vec<_>>());
    let mut names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    // The rows of a case are adjacent, so no sorting is needed and the table keeps its order.
    names.dedup();
    for name in names {
        let row = |count: &usize| rows.iter().find(|row| row.name == name && row.threads == *count);
        let mut cells = vec![name.to_owned()];
        for row in threads.iter().map(row) {
            cells.push(triple(|index| milliseconds(row.and_then(|row| row.median(index)))));
            cells.push(decimals(row.and_then(|row| row.ratio())));
            cells.push(percent(row.and_then(|row| row.peak_share())));
        }
        // Loading and memory have one column each: that of the fewest threads.
        let first = threads.first().and_then(row);
        cells.push(triple(|index| milliseconds(first.and_then(|row| row.load(index)))));
        cells.push(triple(|index| mebibytes(first.and_then(|row| row.growth(index)))));
        table.add_row(cells);
    }
    table
}

fn triple(cell: impl Fn(usize) -> String) -> String {
    [0, 1, 2].map(cell).join(" / ")
}

/// A geometric mean of ratios, and the worst of them.
#[derive(Debug)]
struct Mean {
    what: &'static str,
    isa: String,
    threads: usize,
    value: f64,
    worst: (String, f64),
    count: usize,
}

/// The mean's name, the filter of its rows, and the ratio of a row.
type Summed = (&'static str, fn(&Row) -> bool, fn(&Row) -> Option<f64>);

const MEANS: [Summed; 5] = [
    ("time to the fastest other, random weights", |row| row.is_random, Row::ratio),
    ("time to the fastest other, all", |_| true, Row::ratio),
    ("processor time to the thriftiest other, all", |_| true, Row::cpu_ratio),
    ("load time to ORT, files over 10 MB", |row| row.file_bytes > LARGE_FILE, Row::load_ratio),
    ("peak memory to ORT, all", |_| true, Row::growth_ratio),
];

fn means(rows: &[Row]) -> Vec<Mean> {
    let mut means = Vec::new();
    for (isa, threads) in distinct(rows, |row| (&row.isa, row.threads)) {
        for (what, counts, ratio) in MEANS {
            let of = rows.iter().filter(|row| &row.isa == isa && row.threads == threads && counts(row));
            let ratios: Vec<(&str, f64)> =
                of.filter_map(|row| Some((row.name.as_str(), ratio(row)?))).collect();
            // No row has this ratio if the other runtimes were left out.
            let Some(value) = geometric_mean(ratios.iter().map(|(_, ratio)| *ratio)) else { continue };
            let worst = ratios.iter().max_by(|a, b| a.1.total_cmp(&b.1));
            let worst = worst.map_or((String::new(), f64::NAN), |(name, ratio)| ((*name).to_owned(), *ratio));
            means.push(Mean { what, isa: isa.clone(), threads, value, worst, count: ratios.len() });
        }
    }
    means
}

impl Mean {
    fn describe(&self) -> String {
        format!(
            "{} threads, {}, {}: geometric mean {:.3} over {}, at worst {:.2} ({})",
            self.threads, self.isa, self.what, self.value, self.count, self.worst.1, self.worst.0
        )
    }

    fn json(&self) -> Json {
        json!({
            "what": self.what,
            "isa": self.isa,
            "threads": self.threads,
            "geometric_mean": self.value,
            "worst": self.worst.1,
            "worst_case": self.worst.0,
            "count": self.count,
        })
    }
}

fn geometric_mean(values: impl ExactSizeIterator<Item = f64>) -> Option<f64> {
    let count = values.len();
    // The geometric mean, so that a ratio and its inverse cancel.
    (count > 0).then(|| (values.map(f64::ln).sum::<f64>() / count as f64).exp())
}

/// Formats a time with about three digits, or `-`.
pub(crate) fn milliseconds(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value < 1.0 => format!("{value:.3}"),
        Some(value) if value < 100.0 => format!("{value:.2}"),
        Some(value) => format!("{value:.0}"),
    }
}

/// Formats bytes in MiB, or `-`.
pub(crate) fn mebibytes(bytes: Option<u64>) -> String {
    bytes.map_or("-".to_owned(), |bytes| format!("{:.1}", bytes as f64 / 1048576.0))
}

/// Formats a ratio, or `-`.
pub(crate) fn decimals(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.2}"))
}

/// Formats a share in percent, or `-`.
pub(crate) fn percent(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), |share| format!("{:.0}", share * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, medians: &[Option<f64>]) -> Row {
        let side = |median: &Option<f64>| {
            median.map(|median_ms| Side {
                median_ms,
                min_ms: median_ms,
                cpu_ms: Some(median_ms),
                load_ms: Some(median_ms),
                growth: Some(1 << 20),
                operations: Some(1_000_000_000),
            })
        };
        let sides = medians.iter().map(side).collect();
        let (name, isa) = (name.to_owned(), "avx2".to_owned());
        Row { name, isa, threads: 1, is_random: false, file_bytes: 0, flops: 1e12, sides, problem: None }
    }

    #[test]
    fn ratios_are_to_the_fastest_other_that_ran() {
        let table = [
            (row("a", &[Some(6.0), Some(3.0), Some(2.0)]), Some(3.0)),
            (row("b", &[Some(6.0), Some(3.0), None]), Some(2.0)),
            (row("c", &[Some(6.0), None, Some(4.0)]), Some(1.5)),
            (row("d", &[Some(6.0), None, None]), None),
            (row("e", &[]), None),
        ];
        for (row, expected) in &table {
            assert_eq!(row.ratio(), *expected, "{}", row.name);
        }
        // 10^9 operations in 6 ms, of 10^12 a second.
        assert!((table[0].0.peak_share().unwrap() - 1.0 / 6.0).abs() < 1e-12);
    }

    #[test]
    fn means_leave_out_what_is_missing() {
        let rows = [row("a", &[Some(4.0), Some(1.0)]), row("b", &[Some(1.0), Some(1.0)]), row("c", &[])];
        let means = means(&rows);
        let all = means.iter().find(|mean| mean.what.starts_with("time") && mean.what.ends_with("all"));
        let all = all.unwrap();
        assert!((all.value - 2.0).abs() < 1e-12);
        assert_eq!((all.count, all.worst.clone()), (2, ("a".to_owned(), 4.0)));
        assert!(!means.iter().any(|mean| mean.what.contains("random")), "there is none");
    }

    #[test]
    fn a_compact_table_has_a_line_for_each_case() {
        let mut second = row("a", &[Some(3.0), Some(2.0)]);
        second.threads = 2;
        let text = compact(&[&row("a", &[Some(5.0), Some(4.0)]), &second]).to_string();
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.contains("5.00 / 4.00 / -") && text.contains("3.00 / 2.00 / -"), "{text}");
    }
}
