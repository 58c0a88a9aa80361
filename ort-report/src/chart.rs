//! The memory plan as an SVG chart: bytes over the schedule. Each value is a bar from its first to
//! its last step, at its offset in memory.

use std::collections::HashSet;

use ort_alloc::human_bytes;
use ort_core::plan::{PlanReport, PlannedValue, ValueKind};
use ort_core::{NAME_BYTES, shown};
use svg::Document;
use svg::node::element::{Group, Polyline, Rectangle, Text, Title};

use crate::drawing::{line, nice, round, text, unit_of};
use crate::text::sizes_text;

const WIDTH: f64 = 1280.0;
const HEIGHT: f64 = 720.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 372.0;
const TOP: f64 = 76.0;
const BOTTOM: f64 = 60.0;

/// The most values in the list beside the chart.
const MOST_LISTED: usize = 14;

/// A bar of the chart: a range of memory over a range of steps.
struct Bar<'a> {
    name: &'a str,
    offset: usize,
    bytes: usize,
    first: usize,
    last: usize,
    colour: String,
}

/// Maps steps and bytes to coordinates.
struct Scale {
    steps: usize,
    bytes: usize,
}

impl Scale {
    fn x(&self, step: usize) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * step as f64 / self.steps.max(1) as f64
    }

    fn y(&self, bytes: usize) -> f64 {
        let height = HEIGHT - TOP - BOTTOM;
        // The y axis of SVG points down, and bytes grow upwards.
        TOP + height - height * bytes as f64 / self.bytes.max(1) as f64
    }
}

/// Draws a plan as an SVG document. Bars are at their offsets in the slabs. Outputs, which have
/// buffers of their own, are stacked above the slabs. `model` is the name in the title.
pub fn plan_svg(model: &str, report: &PlanReport) -> String {
    let bars = bars(report);
    let top = bars.iter().map(|bar| bar.offset.saturating_add(bar.bytes)).max().unwrap_or(0);
    let scale = Scale { steps: report.steps.len(), bytes: top.max(report.planned_bytes) };
    let mut values = Group::new();
    for bar in &bars {
        values = values.add(rectangle(bar, &scale));
    }
    let names = bars.iter().filter_map(|bar| name_in(bar, &scale));
    // Names must not block the tooltips of the bars below them.
    let names = names.fold(Group::new().set("font-size", 11).set("pointer-events", "none"), Group::add);
    Document::new()
        .set("viewBox", (0, 0, WIDTH, HEIGHT))
        .set("width", WIDTH)
        .set("height", HEIGHT)
        .set("font-family", "sans-serif")
        .set("font-size", 12)
        .add(Rectangle::new().set("width", WIDTH).set("height", HEIGHT).set("fill", "white"))
        .add(headline(model, report))
        .add(memory_axis(&scale))
        .add(step_axis(&scale))
        .add(values)
        .add(names)
        .add(alive(report, &scale))
        .add(peak(report, &scale))
        .add(listed(report, &bars))
        .to_string()
}

/// Returns a bar for each value with memory, and for each workspace.
fn bars(report: &PlanReport) -> Vec<Bar<'_>> {
    // The chart stacks the slabs, each on top of those before it.
    let mut bases = Vec::new();
    let mut top = 0usize;
    for bytes in &report.slabs {
        bases.push(top);
        top = top.saturating_add(*bytes);
    }
    // Other values may use the buffer of an output before it does. The plan gives those an offset
    // past all slabs.
    let behind = report.values.iter().filter(|value| value.slab.is_none());
    let ends = behind.filter_map(|value| value.offset?.checked_add(value.bytes?));
    top = ends.max().unwrap_or(0).max(top);
    let mut bars = Vec::new();
    for value in &report.values {
        // A view has no memory of its own, so it gets no bar.
        let Some(bytes) = value.bytes.filter(|bytes| *bytes > 0 && value.kind != ValueKind::View) else {
            continue;
        };
        let base = value.slab.and_then(|slab| bases.get(slab)).copied().unwrap_or(0);
        let offset = match value.offset {
            Some(offset) => base + offset,
            // A dynamic value has a size only at run time, and no offset in any plan.
            None if value.kind == ValueKind::Dynamic => continue,
            None => {
                top = top.saturating_add(bytes);
                top - bytes
            }
        };
        bars.push(of_value(value, offset, bytes, bars.len()));
    }
    for (index, step) in report.steps.iter().enumerate().filter(|(_, step)| !step.workspace.is_empty()) {
        bars.push(Bar {
            name: "workspace",
            offset: step.workspace.start,
            bytes: step.workspace.len(),
            first: index,
            last: index,
            colour: "#555".into(),
        });
    }
    bars
}

fn of_value(value: &PlannedValue, offset: usize, bytes: usize, index: usize) -> Bar<'_> {
    // Hues a golden angle apart keep neighbours distinguishable, however many there are.
    let hue = index as f64 * 137.508 % 360.0;
    let lightness = if value.slab.is_some() { 62 } else { 78 };
    let colour = format!("hsl({hue:.0}, 60%, {lightness}%)");
    Bar { name: &value.name, offset, bytes, first: value.first_step, last: value.last_step, colour }
}

fn rectangle(bar: &Bar<'_>, scale: &Scale) -> Rectangle {
    // A value lives through its last step, so its bar ends where the next step starts.
    let (left, right) = (scale.x(bar.first), scale.x(bar.last + 1));
    let (top, bottom) = (scale.y(bar.offset.saturating_add(bar.bytes)), scale.y(bar.offset));
    let steps = format!("steps {} to {}", bar.first, bar.last);
    Rectangle::new()
        .set("x", round(left))
        .set("y", round(top))
        .set("width", round(right - left))
        .set("height", round(bottom - top))
        .set("fill", bar.colour.as_str())
        .set("stroke", "white")
        .set("stroke-width", 0.5)
        .add(Title::new(format!("{}: {}, {steps}", shown(bar.name, NAME_BYTES), human_bytes(bar.bytes))))
}

/// Returns the name of a value within its bar, if there is room.
fn name_in(bar: &Bar<'_>, scale: &Scale) -> Option<Text> {
    const CHARACTER: f64 = 6.2;
    let width = scale.x(bar.last + 1) - scale.x(bar.first) - 8.0;
    let height = scale.y(bar.offset) - scale.y(bar.offset.saturating_add(bar.bytes));
    let room = (width / CHARACTER) as usize;
    if height < 14.0 || room < 14 {
        return None;
    }
    let middle = scale.y(bar.offset.saturating_add(bar.bytes / 2)) + 4.0;
    Some(text(scale.x(bar.first) + 4.0, middle, shortened(bar.name, room)))
}

/// Truncates a name at its start, because its end says more.
fn shortened(name: &str, most: usize) -> String {
    let count = name.chars().count();
    if count <= most {
        return name.to_string();
    }
    std::iter::once('…').chain(name.chars().skip(count - most.saturating_sub(1))).collect()
}

fn headline(model: &str, report: &PlanReport) -> Group {
    let details = format!(
        "{}peak {}, in file order {}, at least {} in this schedule",
        if report.dims.is_empty() { String::new() } else { format!("{}: ", sizes_text(&report.dims)) },
        human_bytes(report.planned_bytes),
        human_bytes(report.file_order_bytes),
        human_bytes(report.lower_bound_bytes),
    );
    Group::new()
        .add(text(LEFT, 24.0, format!("Memory of {model}")).set("font-size", 17))
        .add(text(LEFT, 42.0, details).set("fill", "#444"))
}

/// Draws the memory axis: about eight labels, in a unit that keeps them short.
fn memory_axis(scale: &Scale) -> Group {
    let bytes = scale.bytes as f64;
    let unit = unit_of(bytes);
    // The smallest step is 0.1, because labels have at most one decimal.
    let step = nice((bytes / unit.1 / 8.0).max(0.1));
    let digits = if step < 1.0 { 1 } else { 0 };
    let mut axis = Group::new();
    for index in 0..=(bytes / unit.1 / step) as usize {
        let value = index as f64 * step;
        let y = round(scale.y((value * unit.1) as usize));
        axis = axis
            .add(line([LEFT, y], [WIDTH - RIGHT, y]).set("stroke", "#ddd"))
            .add(text(LEFT - 8.0, y + 4.0, format!("{value:.digits$}")).set("text-anchor", "end"));
    }
    let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
    axis.add(
        text(24.0, middle, format!("memory ({})", unit.0))
            .set("text-anchor", "middle")
            .set("transform", format!("rotate(-90 24 {middle})")),
    )
}

fn step_axis(scale: &Scale) -> Group {
    let base = HEIGHT - BOTTOM;
    let step = (nice((scale.steps as f64 / 14.0).max(1.0)) as usize).max(1);
    let mut axis = Group::new().add(line([LEFT, base], [WIDTH - RIGHT, base]).set("stroke", "#444"));
    for index in (0..scale.steps).step_by(step) {
        let x = round((scale.x(index) + scale.x(index + 1)) / 2.0);
        axis = axis
            .add(line([x, base], [x, base + 5.0]).set("stroke", "#444"))
            .add(text(x, base + 19.0, index.to_string()).set("text-anchor", "middle"));
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    axis.add(text(middle, base + 42.0, "step of the schedule").set("text-anchor", "middle"))
}

/// Draws the live bytes of each step as a line.
fn alive(report: &PlanReport, scale: &Scale) -> Polyline {
    let points = report.steps.iter().enumerate().flat_map(|(index, step)| {
        let y = round(scale.y(step.live_bytes));
        // Live bytes are constant within a step, so the line has a level for each.
        [index, index + 1].map(|place| format!("{},{y}", round(scale.x(place))))
    });
    let points: Vec<String> = points.collect();
    Polyline::new()
        .set("points", points.join(" "))
        .set("fill", "none")
        .set("stroke", "#111")
        .set("stroke-width", 1.5)
}

fn peak(report: &PlanReport, scale: &Scale) -> Group {
    const RED: &str = "#c00";
    let x = round((scale.x(report.peak_step) + scale.x(report.peak_step + 1)) / 2.0);
    let alive = report.steps.get(report.peak_step).map_or(0, |step| step.live_bytes);
    let label = format!("peak at step {}: {} alive", report.peak_step, human_bytes(alive));
    // Keep the label inside the chart if the peak is near the right edge.
    let anchor = if x > (LEFT + WIDTH - RIGHT) / 2.0 { "end" } else { "start" };
    Group::new()
        .add(line([x, TOP - 6.0], [x, HEIGHT - BOTTOM]).set("stroke", RED).set("stroke-dasharray", "5 3"))
        .add(text(x, TOP - 8.0, label).set("fill", RED).set("text-anchor", anchor))
}

/// Lists the values live at the peak, with the colours of their bars, and the legend.
fn listed(report: &PlanReport, bars: &[Bar<'_>]) -> Group {
    let left = WIDTH - RIGHT + 20.0;
    let mut group = Group::new();
    let step = report.steps.get(report.peak_step);
    let step = step.map_or(String::new(), |step| format!(" while {} runs", step.op));
    group = group.add(text(left, TOP + 4.0, format!("Alive at the peak{step}")).set("font-weight", "bold"));
    let mut alive: Vec<&Bar<'_>> =
        bars.iter().filter(|bar| (bar.first..=bar.last).contains(&report.peak_step)).collect();
    alive.sort_by_key(|bar| std::cmp::Reverse(bar.bytes));
    // A value computed in place shares its memory with an operand that dies there. List that memory
    // once.
    let mut places = HashSet::new();
    alive.retain(|bar| places.insert((bar.offset, bar.bytes)));
    for (index, bar) in alive.iter().take(MOST_LISTED).enumerate() {
        let y = TOP + 26.0 + 36.0 * index as f64;
        let square = Rectangle::new().set("x", left).set("y", y - 10.0).set("width", 12).set("height", 12);
        let bytes = format!("{}, steps {} to {}", human_bytes(bar.bytes), bar.first, bar.last);
        group = group
            .add(square.set("fill", bar.colour.as_str()))
            .add(text(left + 20.0, y, shortened(bar.name, 44)))
            .add(text(left + 20.0, y + 15.0, bytes).set("fill", "#444"));
    }
    let y = TOP + 26.0 + 36.0 * alive.len().min(MOST_LISTED) as f64;
    if alive.len() > MOST_LISTED {
        group = group.add(text(left + 20.0, y, format!("and {} more", alive.len() - MOST_LISTED)));
    }
    group
        .add(
            line([left, HEIGHT - 40.0], [left + 14.0, HEIGHT - 40.0])
                .set("stroke", "#111")
                .set("stroke-width", 1.5),
        )
        .add(text(left + 20.0, HEIGHT - 36.0, "bytes alive"))
        .add(text(left + 20.0, HEIGHT - 54.0, "pale bars: in memory of outputs"))
        .add(text(left + 20.0, HEIGHT - 72.0, "dark bars: workspaces"))
}
