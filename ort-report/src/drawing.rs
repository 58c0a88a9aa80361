//! SVG helpers for charts: text, lines, axis steps and units.

use ort_core::{NAME_BYTES, shown};
use svg::node::element::{Line, Text};

/// Returns a text at a place, with escaped control characters.
pub fn text(x: f64, y: f64, content: impl Into<String>) -> Text {
    // XML does not allow control characters, and names come from model files. `shown` escapes them.
    let content: String = content.into();
    Text::new(shown(&content, NAME_BYTES)).set("x", round(x)).set("y", round(y))
}

/// Returns a line between two places.
pub fn line(from: [f64; 2], to: [f64; 2]) -> Line {
    Line::new().set("x1", from[0]).set("y1", from[1]).set("x2", to[0]).set("y2", to[1])
}

/// Rounds a coordinate to a tenth of a pixel, which keeps the file small.
pub fn round(place: f64) -> f64 {
    (place * 10.0).round() / 10.0
}

/// Returns the smallest step of the series 1, 2, 5, 10, 20, .. (or 0.5, 0.2, 0.1, ..) that is at
/// least `least`.
pub fn nice(least: f64) -> f64 {
    if !least.is_finite() || least <= 0.0 {
        return 1.0;
    }
    // This is the largest power of ten up to `least`, so the steps cover the decade above it.
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|factor| factor * power);
    // Tolerate rounding errors of the logarithm and the power.
    steps.into_iter().find(|step| *step >= least * (1.0 - 1e-9)).unwrap_or(10.0 * power)
}

/// Returns the largest unit that is at most `bytes`, and its size.
pub fn unit_of(bytes: f64) -> (&'static str, f64) {
    const UNITS: [(&str, f64); 3] = [("GiB", 1073741824.0), ("MiB", 1048576.0), ("KiB", 1024.0)];
    UNITS.into_iter().find(|(_, size)| bytes >= *size).unwrap_or(("bytes", 1.0))
}

#[cfg(test)]
mod tests {
    use super::nice;

    #[test]
    fn steps_of_an_axis() {
        for (least, step) in
            [(0.1, 0.1), (0.11, 0.2), (0.03, 0.05), (1.0, 1.0), (3.0, 5.0), (5.1, 10.0), (700.0, 1000.0)]
        {
            assert!((nice(least) - step).abs() < 1e-9 * step, "{least}: {}", nice(least));
        }
        assert_eq!((nice(0.0), nice(f64::NAN)), (1.0, 1.0));
    }
}
