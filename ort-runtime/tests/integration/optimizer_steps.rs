//! Steps of optimizers against the trajectories of torch's, and what holds for all of them: the
//! same bits in place, on any number of threads and for any type of gradient, no change without an
//! update, clear errors.
//!
//! The trajectories are made by `xtask/python/optimizer_reference.py`.

use crate::optimizer_support::{
    Attrs, Given, Step, doubles, graph, inputs, name, replace, same_bits, take_over, tensor,
};
use ort_runtime::ir::Attribute;
use ort_runtime::{DType, Result, Tensor};
use serde_json::Value as Json;

const TRAJECTORIES: &str = include_str!("../data/optimizer_trajectories.json");

const FIXED: (bool, usize) = (true, 1);

/// Operators with attributes that use all of their inputs.
fn operators() -> Vec<(&'static str, Vec<(&'static str, Attribute)>)> {
    let nesterov = ("nesterov", Attribute::Int(1));
    let decay = ("weight_decay", Attribute::Float(0.25));
    let mode = |mode: &str| ("mode", Attribute::String(mode.to_string()));
    vec![
        ("SGD", vec![("momentum", Attribute::Float(0.9)), ("weight_decay", Attribute::Float(0.1)), nesterov]),
        ("AdamW", vec![]),
        ("AdamW", vec![mode("huggingface")]),
        ("AdamW", vec![mode("adam")]),
        ("LAMB", vec![decay.clone()]),
        ("AdamW8bit", vec![]),
        ("Adafactor", vec![decay]),
    ]
}

fn numbers(json: &Json) -> Vec<f64> {
    json.as_array().expect("a list").iter().map(|number| number.as_f64().expect("a number")).collect()
}

fn shape(json: &Json) -> Vec<usize> {
    numbers(&json["shape"]).into_iter().map(|size| size as usize).collect()
}

fn attributes(json: &Json) -> Vec<(&str, Attribute)> {
    let attribute = |value: &Json| match value {
        Json::String(text) => Attribute::String(text.clone()),
        number if number.is_i64() => Attribute::Int(number.as_i64().unwrap_or_default()),
        number => Attribute::Float(number.as_f64().expect("a number") as f32),
    };
    let attrs = json.as_object().expect("attributes").iter();
    attrs.map(|(name, value)| (name.as_str(), attribute(value))).collect()
}

/// The greatest magnitude of each place in several lists.
fn sizes<'a>(lists: impl IntoIterator<Item = &'a Json>) -> Vec<f64> {
    let lists = lists.into_iter().map(numbers);
    lists
        .reduce(|one, other| one.iter().zip(other).map(|(a, b)| a.abs().max(b.abs())).collect())
        .expect("a list")
}

/// Whether elements differ by no more than rounding, which is relative to them or to the `sizes`
/// that their sums went through.
fn near(what: &str, actual: &Tensor, expected: &[f64], sizes: &[f64]) -> Result<()> {
    let tolerance = if actual.dtype() == DType::F64 { 1e-12 } else { 1e-6 };
    let actual = doubles(actual)?;
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (place, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let size = sizes.get(place).map_or(0.0, |size| size.abs()).max(expected.abs());
        let near = (actual - expected).abs() <= tolerance * size;
        assert!(near, "{what}[{place}] is {actual}, expected {expected}");
    }
    Ok(())
}

/// A case of the file with its tensors, as a step that is about to run.
struct Trajectory<'a> {
    case: &'a Json,
    tensors: &'a Json,
    op: &'a str,
    dtype: DType,
    given: Given,
}

impl<'a> Trajectory<'a> {
    fn new(file: &'a Json, case: &'a Json) -> Result<Trajectory<'a>> {
        let op = case["op"].as_str().expect("an operator");
        let dtype = if case["dtype"] == "float64" { DType::F64 } else { DType::F32 };
        let tensors = &file["tensors"][case["tensor"].as_str().expect("a tensor")];
        let initial = tensor(dtype, &shape(tensors), &numbers(&tensors["initial"]))?;
        let mut given = vec![
            ("parameter", initial.clone()),
            ("gradient", initial),
            ("learning_rate", Tensor::scalar(0.0f32)?),
        ];
        if op != "SGD" {
            given.push(("step", Tensor::scalar(0i64)?));
        }
        for (state, expected) in case["states"].as_object().expect("states") {
            let shape = shape(expected);
            let zeros = vec![0.0; shape.iter().product()];
            given.push((name(op, state), tensor(dtype, &shape, &zeros)?));
        }
        Ok(Trajectory { case, tensors, op, dtype, given })
    }

    fn set(&mut self, number: usize, rate: f64) -> Result<()> {
        let gradient = numbers(&self.tensors["gradients"][number]);
        let gradient = tensor(self.dtype, &shape(self.tensors), &gradient)?;
        replace(&mut self.given, "gradient", gradient);
        replace(&mut self.given, "learning_rate", Tensor::scalar(rate as f32)?);
        if self.op != "SGD" {
            replace(&mut self.given, "step", Tensor::scalar(number as i64 + 1)?);
        }
        Ok(())
    }

    fn check(mut self, rates: &[f64]) -> Result<()> {
        let case = self.case;
        let list = |json: &'a Json| json.as_array().expect("lists");
        let seen = list(&case["parameters"]);
        let through = sizes(seen.iter().chain([&self.tensors["initial"]]));
        let what = format!("{}, {}, {}", self.op, case["name"], self.dtype.name());
        let step = Step::new(self.op, &attributes(&case["attrs"]), &self.given)?;
        for (number, rate) in rates.iter().enumerate() {
            self.set(number, *rate)?;
            let new = step.run(&self.given)?;
            let what = format!("{what}: parameter after step {}", number + 1);
            near(&what, &new[0].1, &numbers(&seen[number]), &through)?;
            take_over(&mut self.given, new);
        }
        let gradients = sizes(list(&self.tensors["gradients"]));
        for (state, expected) in case["states"].as_object().expect("states") {
            let (_, actual) = self.given.iter().find(|(name, _)| name == state).expect("a state");
            let has_sign = matches!(state.as_str(), "velocity" | "first_moment");
            let through = if has_sign { gradients.as_slice() } else { &[] };
            near(&format!("{what}: {state}"), actual, &numbers(&expected["values"]), through)?;
        }
        Ok(())
    }
}

#[test]
fn trajectories_are_those_of_torch() -> Result<()> {
    let file: Json = serde_json::from_str(TRAJECTORIES).expect("the file is JSON");
    let rates = numbers(&file["rates"]);
    let mut ran = 0;
    for case in file["cases"].as_array().expect("cases") {
        if operators().iter().any(|(known, _)| case["op"] == *known) {
            Trajectory::new(&file, case)?.check(&rates)?;
            ran += 1;
        }
    }
    assert_eq!(ran, 38, "cases ran");
    Ok(())
}

/// Sizes around those of blocks and of tasks, one of none, and no dimension at all.
const SHAPES: [&[usize]; 8] = [&[], &[0], &[3, 0], &[1, 7], &[5, 3, 2], &[1024], &[1, 16385], &[300, 341]];

#[test]
fn bits_are_the_same_in_place_on_any_threads_and_without_states() -> Result<()> {
    for (op, attrs) in operators() {
        for dtype in [DType::F32, DType::F64] {
            for shape in SHAPES {
                let given = inputs(op, dtype, DType::F32, shape)?;
                let one = Step::on(op, &attrs, &given, FIXED)?;
                let expected = one.run(&given)?;
                let changes = expected[0].1.element_count() > 0;
                assert_eq!(expected[0].1.bytes() != given[0].1.bytes(), changes, "{op} {shape:?}");
                same_bits(&one.run_in_place(&given)?, &expected);
                assert!(one.run_for_parameter(&given)?.bytes() == expected[0].1.bytes(), "{op} {shape:?}");
                for (fixed, threads) in [(true, 2), (false, 2), (true, 3)] {
                    let step = Step::on(op, &attrs, &given, (fixed, threads))?;
                    same_bits(&step.run(&given)?, &expected);
                    same_bits(&step.run_in_place(&given)?, &expected);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn without_an_update_nothing_changes() -> Result<()> {
    for (op, attrs) in operators() {
        for dtype in [DType::F32, DType::F64] {
            let mut given = inputs(op, dtype, DType::F16, &[70, 300])?;
            let all = given[1].1.element_count();
            replace(&mut given, "gradient", tensor(DType::F16, &[70, 300], &vec![f64::NAN; all])?);
            if op != "SGD" {
                replace(&mut given, "step", Tensor::scalar(0i64)?);
            }
            given.push(("update", Tensor::scalar(false)?));
            let step = Step::on(op, &attrs, &given, (true, 2))?;
            let kept = |new: &Given| {
                let kept = new.iter().map(|(name, _)| given.iter().find(|(given, _)| given == name));
                kept.map(|given| given.expect("an input").clone()).collect::<Given>()
            };
            let new = step.run(&given)?;
            same_bits(&new, &kept(&new));
            let new = step.run_in_place(&given)?;
            same_bits(&new, &kept(&new));
            // With an update nothing of it is the same.
            replace(&mut given, "update", Tensor::scalar(true)?);
            if op != "SGD" {
                replace(&mut given, "step", Tensor::scalar(1i64)?);
            }
            let new = doubles(&step.run(&given)?[0].1)?;
            assert!(new.iter().all(|x| x.is_nan()), "{op}: a gradient of NaN gives NaN");
        }
    }
    Ok(())
}

#[test]
fn lamb_keeps_nan_in_its_trust_ratio() -> Result<()> {
    for dtype in [DType::F32, DType::F64] {
        let mut given = inputs("LAMB", dtype, dtype, &[5])?;
        replace(&mut given, "gradient", tensor(dtype, &[5], &[0.5, f64::NAN, 1.0, -2.0, 0.25])?);
        let new = doubles(&Step::new("LAMB", &[], &given)?.run(&given)?[0].1)?;
        assert!(new.iter().all(|x| x.is_nan()), "the norm of the update is NaN: {new:?}");
    }
    Ok(())
}

#[test]
fn states_of_another_length_are_refused_beside_rows() -> Result<()> {
    let attrs = [("first_row", Attribute::Int(3))];
    for (length, fits) in [(2, false), (4, true), (9, false)] {
        let mut given = inputs("AdamW", DType::F32, DType::F32, &[4])?;
        replace(&mut given, "gradient", tensor(DType::F32, &[1], &[0.5])?);
        replace(&mut given, "first_moment", tensor(DType::F32, &[length], &vec![0.0; length])?);
        // With names for sizes, the run is the first to see them.
        let result = Step::on("AdamW", &attrs, &given, (false, 1))?.run(&given);
        assert_eq!(result.is_ok(), fits, "a state of {length} elements");
    }
    Ok(())
}

#[test]
fn gradients_of_all_types_and_scales_give_the_same_bits() -> Result<()> {
    for (op, attrs) in operators() {
        for dtype in [DType::F32, DType::F64] {
            let mut given = inputs(op, dtype, dtype, &[13, 111])?;
            given.push(("scale", Tensor::scalar(1.0f32)?));
            let expected = Step::new(op, &attrs, &given)?.run(&given)?;
            let gradient = doubles(&given[1].1)?;
            for narrow in [DType::F32, DType::F64, DType::F16, DType::BF16] {
                for scale in [0.5f32, 1.0, 4.0] {
                    let scaled: Vec<f64> = gradient.iter().map(|x| x / f64::from(scale)).collect();
                    replace(&mut given, "gradient", tensor(narrow, &[13, 111], &scaled)?);
                    replace(&mut given, "scale", Tensor::scalar(scale)?);
                    same_bits(&Step::new(op, &attrs, &given)?.run(&given)?, &expected);
                }
            }
            let without: Given = given.iter().filter(|(name, _)| *name != "scale").cloned().collect();
            let mut without = without;
            replace(&mut without, "gradient", tensor(dtype, &[13, 111], &gradient)?);
            same_bits(&Step::new(op, &attrs, &without)?.run(&without)?, &expected);
        }
    }
    Ok(())
}

/// What is changed in the inputs, and what the error says.
type Refusal = (&'static str, fn(&mut Given) -> Result<()>, Attrs<'static>, &'static str);

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    fn with(given: &mut Given, name: &str, tensor: Result<Tensor>) -> Result<()> {
        replace(given, name, tensor?);
        Ok(())
    }
    let momentum: Attrs<'static> = &[("momentum", Attribute::Float(0.9))];
    let refusals: [Refusal; 19] = [
        (
            "SGD",
            |g| with(g, "gradient", Tensor::from_vec(&[2, 2], vec![0.0f32; 4])),
            momentum,
            "gradient has shape",
        ),
        (
            "SGD",
            |g| with(g, "velocity", Tensor::from_vec(&[5], vec![0.0f32; 5])),
            momentum,
            "velocity has shape",
        ),
        ("SGD", |g| with(g, "velocity", Tensor::from_vec(&[2, 3], vec![0.0f64; 6])), momentum, "type"),
        (
            "SGD",
            |g| with(g, "learning_rate", Tensor::from_vec(&[1], vec![0.1f32])),
            momentum,
            "expected a scalar",
        ),
        ("SGD", |_| Ok(()), &[("nesterov", Attribute::Int(1))], "'momentum' is 0"),
        ("SGD", |_| Ok(()), &[("momentum", Attribute::Float(-0.5))], "'momentum' is -0.5"),
        (
            "SGD",
            |g| {
                g.retain(|(name, _)| *name != "velocity");
                Ok(())
            },
            momentum,
            "'velocity' is not given",
        ),
        ("LAMB", |_| Ok(()), &[("max_trust_ratio", Attribute::Float(-1.0))], "'max_trust_ratio' is -1"),
        ("Adafactor", |_| Ok(()), &[("beta2_decay", Attribute::Float(0.5))], "'beta2_decay' is 0.5"),
        ("Adafactor", |_| Ok(()), &[("clip_threshold", Attribute::Float(0.0))], "'clip_threshold' is 0"),
        (
            "Adafactor",
            |g| {
                g.retain(|(name, _)| *name != "row_moment");
                Ok(())
            },
            &[],
            "the states row_moment and column_moment",
        ),
        (
            "Adafactor",
            |g| with(g, "row_moment", Tensor::from_vec(&[2, 3], vec![0.0f32; 6])),
            &[],
            "row_moment has shape",
        ),
        (
            "AdamW8bit",
            |g| with(g, "first_scales", Tensor::from_vec(&[2], vec![0.0f32; 2])),
            &[],
            "of one scale for each 256 elements",
        ),
        (
            "AdamW8bit",
            |g| with(g, "second_codes", Tensor::from_vec(&[6], vec![0u8; 6])),
            &[],
            "second_codes has shape",
        ),
        ("AdamW", |_| Ok(()), &[("beta1", Attribute::Float(1.0))], "'beta1' is 1"),
        ("AdamW", |_| Ok(()), &[("epsilon", Attribute::Float(f32::NAN))], "'epsilon' is NaN"),
        (
            "AdamW",
            |g| with(g, "first_moment", Tensor::from_vec(&[3, 2], vec![0.0f32; 6])),
            &[],
            "first_moment has shape",
        ),
        ("AdamW", |g| with(g, "step", Tensor::from_vec(&[1], vec![1i64])), &[], "step has shape"),
        ("AdamW", |g| with(g, "step", Tensor::scalar(1i32)), &[], "takes tensor(int64)"),
    ];
    for (op, change, attrs, expected) in refusals {
        let mut given = inputs(op, DType::F32, DType::F32, &[2, 3])?;
        change(&mut given)?;
        let problem = graph(op, attrs, &given, true).expect_err("it does not fit").to_string();
        assert!(problem.contains(expected), "{op}: expected '{expected}' in: {problem}");
    }
    let mode: Attrs<'_> = &[("mode", Attribute::String("tourch".to_string()))];
    let given = inputs("AdamW", DType::F32, DType::F32, &[2, 3])?;
    let problem = graph("AdamW", mode, &given, true).expect_err("there is no such mode").to_string();
    assert!(problem.contains("did you mean 'torch'"), "{problem}");
    Ok(())
}

#[test]
fn what_only_the_run_sees_is_refused_there() -> Result<()> {
    for (op, attrs) in operators() {
        let given = inputs(op, DType::F32, DType::F32, &[4, 6])?;
        let step = Step::on(op, &attrs, &given, (false, 1))?;
        step.run(&given)?;
        for shape in [[4, 5], [6, 4]] {
            let mut other = given.clone();
            replace(&mut other, "gradient", tensor(DType::F32, &shape, &vec![1.0; shape[0] * shape[1]])?);
            let problem = step.run(&other).expect_err("the gradient is another's").to_string();
            assert!(problem.contains("the gradient has shape"), "{op}: {problem}");
        }
        if op != "SGD" {
            let mut early = given.clone();
            replace(&mut early, "step", Tensor::scalar(0i64)?);
            let problem = step.run(&early).expect_err("steps count from 1").to_string();
            assert!(problem.contains("counted from 1"), "{op}: {problem}");
        }
    }
    Ok(())
}
