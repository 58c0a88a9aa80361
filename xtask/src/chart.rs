//! `cargo xtask chart`: draws the table of docs/performance.md as a bar chart.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use svg::Document;
use svg::node::element::{Group, Rectangle, Text};

use crate::workspace::Workspace;

/// The measurements, and the chart, from the repository's root.
const TABLE: &str = "docs/performance.md";
const CHART: &str = "docs/performance.svg";

/// The models that the chart shows: one of each kind, so that it stays readable.
const MODELS: [&str; 8] = [
    "mobilenet_v2_b1",
    "resnet50_b1",
    "convnext_tiny_b1",
    "minilm_l6_b1_s128",
    "bert_base_b1_s128",
    "whisper_tiny_enc",
    "gpt2_b1_s1_p128",
    "ocr_det_v4_640",
];

const RUNTIMES: [(&str, &str); 3] =
    [("ort-runtime", "#2f6fde"), ("ONNX Runtime", "#8d99a6"), ("OpenVINO", "#c8ced5")];

/// A chart of bars, by the title and the column of the table.
const PANELS: [(&str, &str); 2] = [
    ("Time of a run, 1 thread", "1 thread: ours / ORT / OV ms"),
    ("Peak memory", "peak: ours / ORT / OV MiB"),
];

const WIDTH: f64 = 900.0;
const TOP: f64 = 58.0;
const ROW: f64 = 38.0;
const BAR: f64 = 10.0;
const NAMES: f64 = 130.0;
const PANEL: f64 = 370.0;
/// The longest bar, relative to ONNX Runtime's.
const LONGEST: f64 = 1.8;

/// What to do.
#[derive(clap::Args, Default)]
pub(crate) struct ChartOptions {
    /// Write nothing; fail if the chart is not that of the table.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Writes the chart, or with `check` fails if it is stale.
pub(crate) fn run(workspace: &Workspace, options: &ChartOptions) -> Result<()> {
    let table =
        fs::read_to_string(workspace.root.join(TABLE)).with_context(|| format!("cannot read {TABLE}"))?;
    let chart = format!("{}\n", draw(&table)?);
    let path = workspace.root.join(CHART);
    if options.check {
        if fs::read_to_string(&path).unwrap_or_default() != chart {
            bail!("{CHART} is stale: run `cargo xtask chart`");
        }
        return Ok(());
    }
    fs::write(&path, chart).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {CHART}");
    Ok(())
}

fn draw(table: &str) -> Result<Document> {
    let height = TOP + ROW * MODELS.len() as f64 + 16.0;
    let mut document = Document::new()
        .set("viewBox", (0, 0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .set("font-family", "sans-serif")
        .set("font-size", 12)
        .add(Rectangle::new().set("width", WIDTH).set("height", height).set("fill", "white"))
        .add(legend())
        .add(names());
    for (index, (title, column)) in PANELS.into_iter().enumerate() {
        document = document.add(panel(table, title, column, NAMES + PANEL * index as f64)?);
    }
    Ok(document)
}

/// Bars relative to ONNX Runtime's, which all have the same length.
fn panel(table: &str, title: &str, column: &str, left: f64) -> Result<Group> {
    let mut group = Group::new().add(Text::new(title).set("x", left).set("y", 44).set("font-weight", "bold"));
    for (row, model) in MODELS.into_iter().enumerate() {
        let values = cell(table, model, column)?;
        // The numbers are in the order of `RUNTIMES`: the second is ONNX Runtime's.
        let one = values[1];
        for (bar, (value, (_, colour))) in values.into_iter().zip(RUNTIMES).enumerate() {
            let share = value / one;
            let (x, y) = (left, TOP + ROW * row as f64 + BAR * bar as f64);
            // 60 units remain for the label to the right of the bar.
            let length = (share.min(LONGEST) * (PANEL - 60.0) / LONGEST).round();
            let label = format!("{share:.2}");
            group = group
                .add(bar_of(x, y, length).set("fill", colour))
                .add(Text::new(label).set("x", x + length + 4.0).set("y", y + BAR - 1.0).set("font-size", 9));
        }
    }
    Ok(group)
}

fn bar_of(x: f64, y: f64, width: f64) -> Rectangle {
    Rectangle::new().set("x", x).set("y", y).set("width", width).set("height", BAR - 1.0)
}

fn names() -> Group {
    let name = |(row, model): (usize, &&str)| {
        let y = TOP + ROW * row as f64 + 1.5 * BAR + 4.0;
        Text::new(*model).set("x", 8).set("y", y)
    };
    MODELS.iter().enumerate().map(name).fold(Group::new(), Group::add)
}

fn legend() -> Group {
    let note = Text::new("relative to ONNX Runtime, lower is better").set("x", NAMES + 390.0).set("y", 22);
    RUNTIMES.into_iter().enumerate().fold(Group::new().add(note), |group, (index, (name, colour))| {
        let x = NAMES + 130.0 * index as f64;
        let name = Text::new(name).set("x", x + 22.0).set("y", 22);
        group.add(bar_of(x, 14.0, 16.0).set("fill", colour)).add(name)
    })
}

/// The three numbers of a cell of the table that has this column.
fn cell(document: &str, model: &str, column: &str) -> Result<[f64; 3]> {
    let cells =
        |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    // A document may have several tables; the column names the one that is meant.
    let mut lines = document.lines().skip_while(|line| !line.starts_with('|') || !line.contains(column));
    let header = lines.next().with_context(|| format!("{TABLE} has no column '{column}'"))?;
    let place = cells(header).iter().position(|cell| cell == column);
    let row = lines
        .take_while(|line| line.starts_with('|'))
        .map(cells)
        .find(|row| row.first().is_some_and(|name| name == model));
    let row = row.with_context(|| format!("{TABLE} has no row '{model}'"))?;
    let text =
        place.and_then(|place| row.get(place)).with_context(|| format!("{TABLE}: row '{model}' is short"))?;
    let numbers: Vec<f64> = text.split('/').filter_map(|number| number.trim().parse().ok()).collect();
    ensure!(
        // A runtime without a time shows as `-`, and no bar can be relative to it.
        numbers.len() == 3 && numbers.iter().all(|number| *number > 0.0),
        "{TABLE}: '{text}' of '{model}' is not three numbers"
    );
    Ok([numbers[0], numbers[1], numbers[2]])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "# A\n\n| model | a: ours / ORT / OV ms | b |\n| --- | --- | --- |\n| x | 1.5 / 2 / 3.25 | 4 |\n| y | 1 / - / 2 | 4 |\n";

    #[test]
    fn a_cell_has_three_numbers() {
        let column = "a: ours / ORT / OV ms";
        assert_eq!(cell(SMALL, "x", column).unwrap(), [1.5, 2.0, 3.25]);
        for (model, column) in [("y", column), ("z", column), ("x", "b"), ("x", "c")] {
            assert!(cell(SMALL, model, column).is_err(), "{model} {column}");
        }
    }
}
