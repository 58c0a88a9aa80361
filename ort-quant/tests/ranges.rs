//! Ranges of observed values against NumPy's, computed from the definitions.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use ort_quant::{GridOptions, Observer, QuantType, RangeRule, ValueRange, Wanted};
use serde_json::Value;

const CASES: &str = include_str!("data/ranges.json");

/// The numbers of `xtask/python/quantization_reference.py`, with the same roundings.
fn numbers(name: &str) -> Vec<f32> {
    let number = |step: i64| {
        let unit = (step * 7919 % 20011) as f64 / 20011.0 - 0.5;
        match name {
            "cubes" => unit * unit * unit * 40.0 + unit,
            "one side" => (unit * unit * unit * unit * unit * 900.0).max(0.0),
            "rare side" if step % 10007 == 5 => -3.0,
            "rare side" => unit + 0.5,
            "outlier" if step == 17 => 400.0,
            "outlier" => unit,
            other => panic!("{other}"),
        }
    };
    (0..20000).map(|step| number(step) as f32).collect()
}

fn options(is_symmetric: bool) -> GridOptions {
    GridOptions::new(if is_symmetric { QuantType::Int8 } else { QuantType::UInt8 }, is_symmetric)
}

fn observed(values: &[f32], parts: usize) -> Observer {
    let mut observer = Observer::new(Wanted { histogram: true, moments: true });
    values.chunks(parts).for_each(|part| observer.observe(part));
    observer
}

fn pair(value: &Value) -> (f64, f64) {
    (value[0].as_f64().unwrap(), value[1].as_f64().unwrap())
}

fn range_of(observer: &Observer, rule: RangeRule, is_symmetric: bool) -> (f64, f64) {
    let ValueRange { low, high } = rule.range(observer, &options(is_symmetric)).unwrap().unwrap();
    (low, high)
}

#[test]
fn ranges_are_those_of_the_definitions() {
    let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let values = numbers(name);
        for parts in [20000, 333] {
            let observer = observed(&values, parts);
            let (low, high) = pair(&case["minmax"]);
            let found = range_of(&observer, RangeRule::MinMax, false);
            assert_eq!(found, (low.min(0.0), high.max(0.0)), "{name}");
            let moments = observer.moments().unwrap();
            assert!((moments.mean - case["mean"].as_f64().unwrap()).abs() < 1e-12, "{name}");
            assert!((moments.deviation - case["deviation"].as_f64().unwrap()).abs() < 1e-12, "{name}");
            for (is_symmetric, suffix) in [(false, ""), (true, " symmetric")] {
                for (rule, key) in [(RangeRule::SquaredError, "mse"), (RangeRule::Entropy, "entropy")] {
                    let found = range_of(&observer, rule, is_symmetric);
                    let expected = pair(&case[format!("{key}{suffix}")]);
                    assert_eq!(found, expected, "{name} {key}{suffix}");
                }
            }
        }
    }
}

#[test]
fn percentiles_are_those_of_the_elements_to_the_width_of_a_bin() {
    let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let observer = observed(&numbers(name), 1000);
        let width = observer.histogram().unwrap().width();
        let rule = RangeRule::Percentile(0.99);
        let (low, high) = range_of(&observer, rule, false);
        let (expected_low, expected_high) = pair(&case["percentile 0.99"]);
        // Two elements of 20,000 are -3, and their loss would be larger than a coarser grid's.
        let expected_low = if name == "rare side" { -3.0 } else { expected_low };
        assert!((low - expected_low).abs() <= width, "{name}: {low} {expected_low}");
        assert!((high - expected_high).abs() <= width, "{name}: {high} {expected_high}");
        let (low, high) = range_of(&observer, rule, true);
        let (_, expected) = pair(&case["percentile 0.99 symmetric"]);
        assert!((high.max(-low) - expected).abs() <= width, "{name}: {low} {high} {expected}");
    }
}

#[test]
fn all_of_the_elements_are_the_whole_range() {
    for name in ["cubes", "one side", "rare side", "outlier"] {
        let observer = observed(&numbers(name), 20000);
        let whole = range_of(&observer, RangeRule::MinMax, false);
        let found = range_of(&observer, RangeRule::Percentile(1.0), false);
        assert_eq!(found, whole, "{name}");
    }
}

/// A search with more bins than levels cuts off what is rare, which one with 128 bins cannot.
#[test]
fn what_is_rare_is_cut_off() {
    let (low, high) = range_of(&observed(&numbers("rare side"), 20000), RangeRule::Entropy, true);
    assert!(low == -1.0 && high < 1.0, "{low} {high}");
    let (low, high) = range_of(&observed(&numbers("outlier"), 20000), RangeRule::Percentile(0.999), false);
    assert!(low < -0.45 && high < 1.0, "{low} {high}");
}

#[test]
fn averages_are_means_over_the_observations() {
    let mut observer = Observer::new(RangeRule::Average.wanted());
    observer.observe(&[-1.0, 3.0]);
    observer.observe(&[f32::NAN]);
    observer.observe(&[2.0, 1.0]);
    assert_eq!(range_of(&observer, RangeRule::Average, false), (0.0, 2.5));
    assert_eq!(range_of(&observer, RangeRule::MinMax, false), (-1.0, 3.0));
}

#[test]
fn degenerate_values_have_defined_ranges() {
    let rules = [
        RangeRule::MinMax,
        RangeRule::Average,
        RangeRule::Percentile(0.9999),
        RangeRule::Entropy,
        RangeRule::SquaredError,
    ];
    for rule in rules {
        for is_symmetric in [false, true] {
            let options = options(is_symmetric);
            let range = |values: &[f32]| {
                let mut observer = Observer::new(Wanted { histogram: true, moments: false });
                observer.observe(values);
                rule.range(&observer, &options).unwrap().map(|ValueRange { low, high }| (low, high))
            };
            // Never reached, empty, nothing finite.
            assert_eq!(range(&[]), None, "{rule:?}");
            assert_eq!(range(&[f32::NAN, f32::INFINITY]), None, "{rule:?}");
            assert_eq!(range(&[0.0, -0.0]), Some((0.0, 0.0)), "{rule:?}");
            let constant = range(&[5.0; 10]).unwrap();
            assert!(constant.0 == 0.0 && (constant.1 - 5.0).abs() <= 0.11, "{rule:?}: {constant:?}");
            let one_sign = range(&[-5.0, -3.0]).unwrap();
            assert!(one_sign.1 == 0.0 && one_sign.0 >= -5.0 && one_sign.0 < -4.8, "{rule:?}: {one_sign:?}");
            let subnormal = range(&[1e-42, -1e-42]).unwrap();
            assert!(subnormal.0 <= 0.0 && subnormal.1 >= 0.0, "{rule:?}: {subnormal:?}");
            let grid = options.grid(subnormal.0, subnormal.1).unwrap();
            assert_eq!((grid.scale, grid.zero_point), (1.0, 0));
            let largest = range(&[f32::MAX, f32::MIN]).unwrap();
            assert!(largest.0 >= f64::from(f32::MIN) && largest.1 <= f64::from(f32::MAX), "{rule:?}");
        }
    }
}

#[test]
fn rules_without_their_statistics_are_errors() {
    let mut observer = Observer::new(RangeRule::MinMax.wanted());
    observer.observe(&[1.0]);
    for rule in [RangeRule::Entropy, RangeRule::SquaredError, RangeRule::Percentile(0.99)] {
        assert!(rule.range(&observer, &options(false)).is_err(), "{rule:?}");
    }
    let observer = observed(&[1.0], 1);
    for share in [0.0, 0.3, 1.5, f64::NAN] {
        assert!(RangeRule::Percentile(share).range(&observer, &options(false)).is_err(), "{share}");
    }
}
