//! Plot of a training run as SVG: the loss above, the resident memory below, per batch.

use ort_report::drawing::{line, nice, round, text, unit_of};
use svg::Document;
use svg::node::element::{Circle, Group, Polyline, Rectangle};

use super::training::History;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 620.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 24.0;
/// The top and the height of each chart.
const CHARTS: [(f64, f64); 2] = [(64.0, 240.0), (364.0, 180.0)];
/// The most points of a curve. More are invisible, so neighbours are averaged.
const MOST_POINTS: usize = 600;

/// Maps batches and values to coordinates of one chart.
struct Frame {
    top: f64,
    height: f64,
    batches: usize,
    most: f64,
}

impl Frame {
    fn x(&self, batch: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * batch / self.batches.max(1) as f64
    }

    fn y(&self, value: f64) -> f64 {
        self.top + self.height - self.height * value / self.most
    }

    /// Draws the axes, with about five labels on the value axis, in `unit`.
    fn axes(&self, name: &str, unit: f64) -> Group {
        let base = self.top + self.height;
        let step = nice(self.most / unit / 5.0);
        let digits = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
        let mut axes = Group::new();
        // Tolerate rounding, so that the last label is not lost.
        for index in 0..=(self.most / unit / step + 1e-9) as usize {
            let value = index as f64 * step;
            let y = round(self.y(value * unit));
            axes = axes
                .add(line([LEFT, y], [WIDTH - RIGHT, y]).set("stroke", "#ddd"))
                .add(text(LEFT - 8.0, y + 4.0, format!("{value:.digits$}")).set("text-anchor", "end"));
        }
        let step = (nice((self.batches as f64 / 10.0).max(1.0)) as usize).max(1);
        for batch in (0..=self.batches).step_by(step) {
            let x = round(self.x(batch as f64));
            axes = axes
                .add(line([x, base], [x, base + 5.0]).set("stroke", "#444"))
                .add(text(x, base + 18.0, batch.to_string()).set("text-anchor", "middle"));
        }
        let middle = round(self.top + self.height / 2.0);
        axes.add(line([LEFT, base], [WIDTH - RIGHT, base]).set("stroke", "#444"))
            .add(text((LEFT + WIDTH - RIGHT) / 2.0, base + 38.0, "batch").set("text-anchor", "middle"))
            .add(
                text(22.0, middle, name)
                    .set("text-anchor", "middle")
                    .set("transform", format!("rotate(-90 22 {middle})")),
            )
    }

    /// Draws values of batches, counted from 1, as a line.
    fn curve(&self, points: &[(f64, f64)], colour: &str) -> Polyline {
        let points: Vec<String> = points
            .iter()
            .map(|(batch, value)| format!("{},{}", round(self.x(*batch)), round(self.y(*value))))
            .collect();
        Polyline::new()
            .set("points", points.join(" "))
            .set("fill", "none")
            .set("stroke", colour)
            .set("stroke-width", 1.5)
    }
}

/// Draws a training run.
pub(super) fn draw(model: &str, history: &History) -> Document {
    Document::new()
        .set("viewBox", (0, 0, WIDTH, HEIGHT))
        .set("width", WIDTH)
        .set("height", HEIGHT)
        .set("font-family", "sans-serif")
        .set("font-size", 12)
        .add(Rectangle::new().set("width", WIDTH).set("height", HEIGHT).set("fill", "white"))
        .add(text(LEFT, 28.0, format!("Training of {model}")).set("font-size", 17))
        .add(losses(history))
        .add(memory(history))
}

fn losses(history: &History) -> Group {
    const BATCH: &str = "#9db8d9";
    const EPOCH: &str = "#1f4e8c";
    const VALIDATION: &str = "#c00";
    let all: Vec<f64> = history.losses.iter().map(|loss| f64::from(*loss)).collect();
    let ends = history.epochs.iter();
    let is_finite = |(_, loss): &(f64, f64)| loss.is_finite();
    let epochs = ends.clone().map(|epoch| (epoch.batches as f64, epoch.loss));
    let epochs: Vec<(f64, f64)> = epochs.filter(is_finite).collect();
    let validation = ends.filter_map(|epoch| Some((epoch.batches as f64, epoch.validation.loss?)));
    let validation: Vec<(f64, f64)> = validation.filter(is_finite).collect();
    let values = all.iter().chain(epochs.iter().chain(&validation).map(|(_, loss)| loss));
    // A loss that is 0 must not scale the axis to 0, and an infinite one not to infinity.
    let most = values.copied().filter(|loss| loss.is_finite()).fold(f64::MIN_POSITIVE, f64::max);
    let [(top, height), _] = CHARTS;
    // Leave some room above the curve. A checkpoint may hold losses near the largest number, and
    // the labels of an infinite axis would not come to an end.
    let frame = Frame { top, height, batches: all.len(), most: (most * 1.05).min(f64::MAX) };
    let mut group = Group::new().add(frame.axes("loss", 1.0)).add(frame.curve(&thinned(&all), BATCH));
    for (points, colour) in [(&epochs, EPOCH), (&validation, VALIDATION)] {
        group = group.add(frame.curve(points, colour));
        for (batch, value) in points {
            group = group.add(
                Circle::new()
                    .set("cx", round(frame.x(*batch)))
                    .set("cy", round(frame.y(*value)))
                    .set("r", 2.5)
                    .set("fill", colour),
            );
        }
    }
    let legend = [("batches", BATCH), ("mean of each epoch", EPOCH), ("validation", VALIDATION)];
    let shown = if validation.is_empty() { 2 } else { 3 };
    for (index, (name, colour)) in legend.into_iter().take(shown).enumerate() {
        let x = LEFT + 150.0 * index as f64;
        group = group
            .add(line([x, 47.0], [x + 18.0, 47.0]).set("stroke", colour).set("stroke-width", 2))
            .add(text(x + 24.0, 51.0, name));
    }
    group
}

fn memory(history: &History) -> Group {
    let bytes: Vec<f64> = history.resident.iter().flatten().map(|bytes| *bytes as f64).collect();
    let [_, (top, height)] = CHARTS;
    if bytes.is_empty() {
        return Group::new().add(text(LEFT, top + 20.0, "this system does not tell the resident memory"));
    }
    let most = bytes.iter().copied().fold(1.0, f64::max);
    let (unit, size) = unit_of(most);
    let frame = Frame { top, height, batches: bytes.len(), most: most * 1.05 };
    let name = format!("resident ({unit})");
    Group::new().add(frame.axes(&name, size)).add(frame.curve(&thinned(&bytes), "#2a7d3f"))
}

/// Returns the points of a curve: batch numbers from 1, and values. Many batches are averaged in
/// groups. Batches that overflowed under a loss scale are left out.
fn thinned(values: &[f64]) -> Vec<(f64, f64)> {
    let group = values.len().div_ceil(MOST_POINTS).max(1);
    let mean = |(index, values): (usize, &[f64])| {
        // Batches count from 1, and a group stands at the mean of its batches.
        let place = (index * group) as f64 + (values.len() + 1) as f64 / 2.0;
        let finite = values.iter().filter(|value| value.is_finite());
        let (sum, count) = finite.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
        (count > 0.0).then(|| (place, sum / count))
    };
    values.chunks(group).enumerate().filter_map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::super::evaluation::Score;
    use super::super::training::Epoch;
    use super::*;

    #[test]
    fn few_values_are_points_and_many_are_means() {
        assert_eq!(thinned(&[4.0, 2.0]), [(1.0, 4.0), (2.0, 2.0)]);
        let many: Vec<f64> = (1..=1200).map(f64::from).collect();
        let points = thinned(&many);
        assert_eq!(points.len(), 600);
        assert!(points.iter().all(|(place, value)| place == value));
    }

    #[test]
    fn losses_that_are_not_finite_are_left_out() {
        assert_eq!(thinned(&[2.0, f64::INFINITY, f64::NAN, 1.0]), [(1.0, 2.0), (4.0, 1.0)]);
        for losses in [vec![2.0, f32::INFINITY, f32::NAN, 1.0], vec![f32::INFINITY]] {
            let epoch = Epoch {
                epoch: 1,
                loss: f64::MAX,
                validation: Score { loss: Some(f64::INFINITY), ..Score::default() },
                seconds: 1.0,
                batches: losses.len(),
            };
            let drawing = draw("m", &History { losses, epochs: vec![epoch], ..History::default() });
            assert!(drawing.to_string().contains("mean of each epoch"));
        }
    }
}
