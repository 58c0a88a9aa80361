//! `ort train`: what it prints, what it refuses, and that it goes on where it was stopped.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::*;
use half::f16;
use ort_numpy::ArchiveWriter;
use ort_runtime::dtype::Element;
use ort_runtime::onnx::proto::ModelProto;
use ort_runtime::{Tensor, Value};

/// A file of the training crate's tests.
fn data(name: &str) -> String {
    text(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../ort-train/tests/data").join(name))
}

/// An array of an archive.
enum Array<'a> {
    Floats(&'a [u64], Vec<f32>),
    Halves(&'a [u64], Vec<f16>),
    Ints(&'a [u64], Vec<i64>),
    Int32s(&'a [u64], Vec<i32>),
    Bytes(&'a [u64], Vec<u8>),
}

fn archive(path: &Path, arrays: &[(&str, Array<'_>)]) -> String {
    fn tensor<T: Element>(shape: &[u64], elements: &[T]) -> Value {
        let shape: Vec<usize> = shape.iter().map(|size| *size as usize).collect();
        Tensor::from_slice(&shape, elements).unwrap().into()
    }
    let mut writer = ArchiveWriter::new(std::fs::File::create(path).unwrap());
    for (name, array) in arrays {
        let value = match array {
            Array::Floats(shape, elements) => tensor(shape, elements),
            Array::Halves(shape, elements) => tensor(shape, elements),
            Array::Ints(shape, elements) => tensor(shape, elements),
            Array::Int32s(shape, elements) => tensor(shape, elements),
            Array::Bytes(shape, elements) => tensor(shape, elements),
        };
        writer.value(name, &value).unwrap();
    }
    writer.finish().unwrap();
    text(path)
}

/// Scores of 3 classes for x float[batch, 4].
fn linear(batch: &str) -> ModelProto {
    let w: Vec<f32> = (0..12).map(|index| (index as f32 - 5.5) / 10.0).collect();
    model(graph(
        vec![node("Gemm", &["x", "w", "b"], &["scores"])],
        vec![value("x", 1, &[batch, "4"])],
        vec![value("scores", 1, &[batch, "3"])],
        vec![floats("w", &[4, 3], &w), floats("b", &[3], &[0.0; 3])],
    ))
}

/// Ten samples for [`linear`]: x and classes in turn.
fn x() -> (&'static str, Array<'static>) {
    ("x", Array::Floats(&[10, 4], (0..40).map(|index| (index % 7) as f32 / 7.0).collect()))
}

fn labels() -> (&'static str, Array<'static>) {
    ("labels", Array::Ints(&[10], (0..10).map(|index| index % 3).collect()))
}

#[test]
fn digits_are_learned_from_the_command_line_alone() {
    let (model, train, held_out) = (data("digits.onnx"), data("digits.npz"), data("digits_held_out.npz"));
    let folder = Folder::new();
    let saved = text(&folder.path("trained.onnx"));
    let finished = run(&["train", &model, "--data", &train, "--validation", &held_out, "--save", &saved]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let last = finished.stdout.lines().find(|line| line.starts_with("epoch 10/10")).unwrap();
    let accuracy = last.split("accuracy ").nth(1).unwrap().split(' ').next().unwrap();
    let accuracy: f64 = accuracy.parse().unwrap();
    println!("{last}, {:?}", finished.time);
    assert!(accuracy >= 97.0, "{last}");
    for words in ["8 weights of 13706 numbers", "a step takes", "predicted", "measured", "loss of an epoch"] {
        assert!(finished.stdout.contains(words), "`{words}` is missing in:\n{}", finished.stdout);
    }
    // A progress bar is of no use in a file.
    assert_eq!(finished.stderr, "");
    // What was saved is the model for inference with other weights.
    let shown = run(&["inspect", &saved, "--json"]).json();
    let original = run(&["inspect", &model, "--json"]).json();
    assert_eq!((&shown["inputs"], &shown["outputs"]), (&original["inputs"], &original["outputs"]));
    assert_ne!(std::fs::read(&saved).unwrap(), std::fs::read(&model).unwrap());
}

#[test]
fn the_report_is_one_object_and_memory_is_as_predicted() {
    let folder = Folder::new();
    let drawing = text(&folder.path("training.svg"));
    let (model, train, held_out) = (data("digits.onnx"), data("digits.npz"), data("digits_held_out.npz"));
    let args = [
        "train",
        &model,
        "--data",
        &train,
        "--validation",
        &held_out,
        "--epochs",
        "2",
        "--freeze",
        "conv1.*",
    ];
    let json = run(&[&args[..], &["--json", "--plot", &drawing]].concat()).json();
    assert_eq!(json["losses"].as_array().unwrap().len(), 2 * 45);
    assert_eq!(json["updates"], 90);
    assert_eq!((&json["trained"]["weights"], &json["frozen"]["weights"]), (&6.into(), &2.into()));
    assert_eq!(json["frozen"]["bytes"], 4 * (16 * 9 + 16));
    let epochs = json["epochs"].as_array().unwrap();
    for (epoch, number) in epochs.iter().zip(1..) {
        assert_eq!(epoch["epoch"], number);
        assert!(
            epoch["accuracy"].as_f64().unwrap() > 0.5 && epoch["validation_loss"].as_f64().unwrap() > 0.0
        );
    }
    assert!(epochs[1]["loss"].as_f64() < epochs[0]["loss"].as_f64());
    let (predicted, measured) = (&json["memory_predicted"], &json["memory_measured"]);
    for part in ["parameters", "states", "gradients"] {
        assert_eq!(predicted[part], measured[part], "{part}");
    }
    let [predicted, measured] = [predicted, measured].map(|it| it["activations"].as_f64().unwrap());
    assert!((0.9 * predicted..=predicted).contains(&measured), "{measured} of {predicted}");
    let content = std::fs::read_to_string(&drawing).unwrap();
    let problem = svg::read(&content).unwrap().find(|event| matches!(event, svg::parser::Event::Error(_)));
    assert!(problem.is_none(), "{problem:?}");
    for words in ["Training of digits", "loss", "validation", "resident (MiB)", "batch"] {
        assert!(content.contains(words), "{words}");
    }
}

#[test]
fn a_profile_has_the_operators_of_a_batch() {
    let (model, train) = (data("digits.onnx"), data("digits.npz"));
    let args = ["train", &model, "--data", &train, "--epochs", "1", "--profile", "3"];
    let finished = run(&args);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let told = &finished.stdout;
    for operator in ["Gemm", "SoftmaxCrossEntropyLoss", "AdamW", "total"] {
        assert!(told.lines().any(|line| line.trim().starts_with(operator)), "{operator}: {told}");
    }
    // One object has no room for tables.
    assert_eq!(run(&[&args[..], &["--json"]].concat()).code, Some(2));
}

fn run_owned(args: &[String]) -> Finished {
    run(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

/// A step of two batches, a schedule over the whole training, and a last smaller batch of an epoch.
const LONG: [&str; 11] = [
    "--epochs",
    "2",
    "--batch",
    "48",
    "--accumulate",
    "2",
    "--schedule",
    "cosine",
    "--warmup",
    "3",
    "--json",
];

#[test]
fn a_training_that_goes_on_is_the_one_that_was_never_stopped() {
    let (model, train) = (data("digits.onnx"), data("digits.npz"));
    let folder = Folder::new();
    let path = |name: &str| text(&folder.path(name));
    let args = |more: &[&str]| -> Vec<String> {
        let args = [&["train", &model, "--data", &train][..], &LONG, more].concat();
        args.into_iter().map(str::to_string).collect()
    };
    let whole = run_owned(&args(&["--save", &path("whole.onnx")])).json();
    // 30 batches and 15 updates in an epoch: stopped in the middle of each.
    let checkpoint = path("checkpoint");
    let mut losses = Vec::new();
    for (count, more) in
        [(7, &["--stop-after", "7"][..]), (20, &["--resume", "--stop-after", "13"]), (30, &["--resume"])]
    {
        let saved = path("parts.onnx");
        let part =
            run_owned(&args(&[&["--checkpoint", &checkpoint, "--save", &saved], more].concat())).json();
        assert_eq!(part["updates"], count);
        losses.extend(part["losses"].as_array().unwrap().clone());
    }
    assert_eq!(Some(&losses), whole["losses"].as_array());
    let [one, other] = ["whole.onnx", "parts.onnx"].map(|name| std::fs::read(folder.path(name)).unwrap());
    assert!(one == other, "the models differ");
    // Then nothing is left to do.
    let done = run_owned(&args(&["--checkpoint", &checkpoint, "--resume"])).json();
    assert_eq!((&done["updates"], done["losses"].as_array().unwrap().len()), (&30.into(), 0));
}

#[test]
fn a_training_that_was_killed_goes_on() {
    let (model, train) = (data("digits.onnx"), data("digits.npz"));
    let folder = Folder::new();
    let path = |name: &str| text(&folder.path(name));
    let checkpoint = path("checkpoint");
    let args = |more: &[&str]| -> Vec<String> {
        let args = [&["train", &model, "--data", &train, "--epochs", "4", "--json"][..], more].concat();
        args.into_iter().map(str::to_string).collect()
    };
    let mut child = ort()
        .args(args(&["--checkpoint", &checkpoint, "--checkpoint-every", "1"]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let manifest = PathBuf::from(&checkpoint).join("training.json");
    let start = Instant::now();
    while !manifest.exists() && start.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let resumed = args(&["--checkpoint", &checkpoint, "--resume", "--save", &path("resumed.onnx")]);
    let resumed = run_owned(&resumed).json();
    assert!(!resumed["losses"].as_array().unwrap().is_empty(), "it was over before it was killed");
    let whole = args(&["--save", &path("whole.onnx")]);
    assert_eq!(run_owned(&whole).code, Some(0));
    let [one, other] = ["whole.onnx", "resumed.onnx"].map(|name| std::fs::read(folder.path(name)).unwrap());
    assert!(one == other, "the models differ");
}

#[test]
fn samples_that_do_not_suit_are_refused() {
    let folder = Folder::new();
    let path = folder.model("linear.onnx", &linear("n"));
    let long = |count: u64| vec![0.5f32; count as usize];
    let mut nan = long(40);
    nan[33] = f32::NAN;
    let mut wrong: Vec<i64> = vec![1; 10];
    wrong[6] = 3;
    let cases: Vec<(&str, Vec<(&str, Array<'_>)>, &[&str])> = vec![
        ("missing", vec![x()], &["no array 'labels'", "int64[n]", "it contains x", "Add labels"]),
        (
            "unknown",
            vec![x(), labels(), ("y", Array::Bytes(&[10], vec![0; 10]))],
            &["has an array 'y' that training does not use", "needs the arrays", "remove 'y'"],
        ),
        (
            "bytes",
            vec![("x", Array::Bytes(&[10, 4], vec![1; 40])), labels()],
            &["'x' is uint8", "float32", "astype"],
        ),
        (
            "narrow",
            vec![x(), ("labels", Array::Int32s(&[10], vec![1; 10]))],
            &["'labels' is int32", "int64", "astype"],
        ),
        (
            "class",
            vec![x(), ("labels", Array::Ints(&[10], wrong))],
            &["label 3 in row 6", "classes 0 to 2", "--ignore-index"],
        ),
        (
            "rows",
            vec![x(), ("labels", Array::Ints(&[9], vec![1; 9]))],
            &["10", "'labels'", "9", "first axis"],
        ),
        (
            "width",
            vec![("x", Array::Floats(&[10, 5], long(50))), labels()],
            &["size 5 on axis 1", "expected 4"],
        ),
        ("rank", vec![("x", Array::Floats(&[10], long(10))), labels()], &["shape [10]", "2 axes"]),
        ("nan", vec![("x", Array::Floats(&[10, 4], nan)), labels()], &["NaN in row 8"]),
        (
            "none",
            vec![("x", Array::Floats(&[0, 4], vec![])), ("labels", Array::Ints(&[0], vec![]))],
            &["no samples"],
        ),
        ("scalar", vec![("x", Array::Floats(&[], vec![1.0])), labels()], &["'x' is one number"]),
        ("empty", vec![], &["holds no arrays"]),
    ];
    for (name, arrays, words) in cases {
        let file = archive(&folder.path("data.npz"), &arrays);
        assert_fails(name, &run(&["train", &path, "--data", &file]), words);
    }
    let good = archive(&folder.path("good.npz"), &[x(), labels()]);
    let bad = archive(&folder.path("bad.npz"), &[x(), ("labels", Array::Ints(&[10], vec![-1; 10]))]);
    let validation = run(&["train", &path, "--data", &good, "--validation", &bad]);
    assert_fails("validation", &validation, &["bad.npz", "label -1 in row 0"]);
    let ignored = run(&["train", &path, "--data", &good, "--validation", &bad, "--ignore-index", "-1"]);
    assert_fails("ignored", &ignored, &["bad.npz", "there is nothing to train on", "--ignore-index"]);
    assert_fails("file", &run(&["train", &path, "--data", "nowhere.npz"]), &["nowhere.npz"]);
}

/// [`linear`] behind a cast: the input is float16, the scores of the 3 classes are float32.
fn linear_of_halves() -> ModelProto {
    let mut model = linear("n");
    let graph = model.graph.as_mut().unwrap();
    graph.input = vec![value("halves", 10, &["n", "4"])];
    graph.node.insert(0, with(node("Cast", &["halves"], &["x"]), int_attribute("to", 1)));
    model
}

#[test]
fn numbers_of_float16_are_checked_like_those_of_float32() {
    let folder = Folder::new();
    let path = folder.model("halves.onnx", &linear_of_halves());
    let with = |number: f16| {
        let mut numbers = vec![f16::from_f32(0.5); 40];
        numbers[33] = number;
        let arrays = [("halves", Array::Halves(&[10, 4], numbers)), labels()];
        run(&["train", &path, "--data", &archive(&folder.path("data.npz"), &arrays), "--epochs", "1"])
    };
    assert_fails("nan", &with(f16::NAN), &["'halves' has NaN in row 8", "remove that sample"]);
    assert_fails("infinity", &with(f16::INFINITY), &["'halves' has inf in row 8", "remove that sample"]);
    // An input may be a mask, so that what -inf does to the loss decides.
    let words =
        ["the loss is", "in batch 1 of epoch 1", "after 0 updates", "'halves' has -inf in this batch"];
    assert_fails("negative infinity", &with(f16::NEG_INFINITY), &words);
    let largest = with(f16::MAX);
    assert_eq!(largest.code, Some(0), "{}", largest.stderr);
}

#[test]
fn masks_may_hold_negative_infinity() {
    let folder = Folder::new();
    let path = folder.model(
        "masked.onnx",
        &model(graph(
            vec![
                node("Mul", &["x", "w"], &["scores"]),
                node("Add", &["scores", "mask"], &["masked"]),
                with(node("Softmax", &["masked"], &["weights"]), int_attribute("axis", -1)),
                node("Mul", &["weights", "x"], &["y"]),
            ],
            vec![value("x", 1, &["n", "3"]), value("mask", 1, &["n", "3"])],
            vec![value("y", 1, &["n", "3"])],
            vec![floats("w", &[3], &[0.5, 0.25, -0.5])],
        )),
    );
    let x = [1.0f32, 2.0, 3.0];
    let target = [0.5f32, 0.0, 1.0];
    let data = |mask: f32, target: [f32; 3]| {
        let arrays = [
            ("x", Array::Floats(&[1, 3], x.to_vec())),
            ("mask", Array::Floats(&[1, 3], vec![0.0, mask, 0.0])),
            ("target", Array::Floats(&[1, 3], target.to_vec())),
        ];
        let file = archive(&folder.path("data.npz"), &arrays);
        run(&["train", &path, "--data", &file, "--loss", "mse", "--epochs", "3", "--json"])
    };
    let losses = data(f32::NEG_INFINITY, target).json()["losses"].clone();
    // The first and the third place alone: scores of 0.5 and -1.5.
    let share = 1.0 / (1.0 + (-2.0f64).exp());
    let expected = ((share - 0.5).powi(2) + (3.0 * (1.0 - share) - 1.0).powi(2)) / 3.0;
    let first = losses[0].as_f64().unwrap();
    assert!((first - expected).abs() <= 1e-6, "the loss is {first}, expected {expected}");
    assert_eq!(losses, data(-1e9, target).json()["losses"], "-inf is not what a large negative number is");
    let refused = data(0.0, [0.5, f32::NEG_INFINITY, 1.0]);
    assert_fails("target", &refused, &["'target' has -inf in row 0", "remove that sample"]);
    assert_fails("mask", &data(f32::NAN, target), &["'mask' has NaN in row 0"]);
    assert_fails("positive", &data(f32::INFINITY, target), &["'mask' has inf in row 0"]);
}

#[test]
fn flags_that_the_model_has_no_nodes_for_are_told_of() {
    let folder = Folder::new();
    let plain = folder.model("linear.onnx", &linear("n"));
    let mut with_nodes = linear("n");
    let inner = with_nodes.graph.as_mut().unwrap();
    let statistics = [("scale", 1.0), ("shift", 0.0), ("mean", 0.0), ("variance", 1.0)];
    inner.initializer.extend(statistics.map(|(name, number)| floats(name, &[3], &[number; 3])));
    inner.node[0].output = vec!["products".into()];
    let names = ["products", "scale", "shift", "mean", "variance"];
    inner.node.push(node("BatchNormalization", &names, &["normal"]));
    inner.node.push(node("Dropout", &["normal"], &["scores"]));
    let with_nodes = folder.model("with_nodes.onnx", &with_nodes);
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    for (flag, operator) in [("--freeze-statistics", "BatchNormalization"), ("--no-dropout", "Dropout")] {
        let said = |path: &str, flags: &[&str]| {
            let finished = run(&[&["train", path, "--data", &file, "--epochs", "1"][..], flags].concat());
            assert_eq!(finished.code, Some(0), "{flag}: {}", finished.stderr);
            finished.stderr.contains(&format!("{flag} has no effect: the model has no {operator}"))
        };
        assert!(said(&plain, &[flag]), "{flag} is ignored without a word");
        assert!(!said(&plain, &[]) && !said(&with_nodes, &[flag]), "{flag}: a warning without a reason");
    }
    let told = run(&["train", &with_nodes, "--data", &file, "--epochs", "1", "--freeze-statistics", "-v"]);
    let weights = |list: &str| {
        let line = told.stderr.lines().find_map(|line| line.split_once(list)).unwrap_or_default().1;
        line.split(", ").map(|name| name.trim().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(weights("trained: "), ["w", "b", "scale", "shift"], "{}", told.stderr);
    assert_eq!(weights("frozen: "), ["mean", "variance"], "{}", told.stderr);
}

#[test]
fn tied_normalizations_keep_their_own_running_statistics() {
    let folder = Folder::new();
    let mut model = linear("n");
    let inner = model.graph.as_mut().unwrap();
    inner.node[0].output = vec!["products".into()];
    for (index, [from, to]) in [["products", "normal"], ["normal", "scores"]].into_iter().enumerate() {
        let names = ["scale", "shift", "mean", "variance"].map(|name| format!("{name}{index}"));
        let numbers = names.iter().zip([1.0, 0.0, 0.0, 1.0]);
        inner.initializer.extend(numbers.map(|(name, number)| floats(name, &[3], &[number; 3])));
        let inputs: Vec<&str> = std::iter::once(from).chain(names.iter().map(String::as_str)).collect();
        inner.node.push(node("BatchNormalization", &inputs, &[to]));
    }
    let mut with_inputs = model.clone();
    let inner = with_inputs.graph.as_mut().unwrap();
    inner.input.extend(["scale0", "scale1"].map(|name| value(name, 1, &["3"])));
    let mut shared = model.clone();
    shared.graph.as_mut().unwrap().node[2].input[1] = "scale0".into();
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    for (name, model) in [("constants.onnx", &model), ("inputs.onnx", &with_inputs)] {
        let path = folder.model(name, model);
        for ties in [&["--tie", "*"][..], &["--tie", "scale0", "--tie", "scale1"]] {
            let arguments = [&["train", &path, "--data", &file, "--epochs", "1", "-v"], ties].concat();
            let trained = run(&arguments);
            assert_eq!(trained.code, Some(0), "{name}: {}", trained.stderr);
            assert!(trained.stderr.contains("'scale0' serves"), "{name}, {ties:?}: {}", trained.stderr);
        }
    }
    // What is untied stays apart.
    let path = folder.model("shared.onnx", &shared);
    let ties = ["--untie", "scale0", "--tie", "*"];
    let trained = run(&[&["train", &path, "--data", &file, "--epochs", "1", "-v"][..], &ties].concat());
    assert!(trained.stderr.contains("scale0, ") && trained.stderr.contains("scale0.2"), "{}", trained.stderr);
}

#[test]
fn flags_that_have_no_effect_or_no_place_are_refused() {
    let folder = Folder::new();
    let path = folder.model("linear.onnx", &linear("n"));
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    let missing = text(&folder.path("missing").join("file"));
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--warmup", "300", "--schedule", "linear"], &["warmup has 300 updates", "has 10"]),
        (&["--loss", "output"], &["'scores' is", "one element"]),
        (&["--output-name", "score"], &["no output 'score'", "scores"]),
        (&["--freeze", "W"], &["no weight 'W'"]),
        (&["--freeze", "*"], &["no weight of the model is trained", "freeze fewer weights"]),
        (&["--save", &missing], &["--save", "no folder", "create it"]),
        (&["--plot", &missing], &["--plot", "no folder", "create it"]),
        (&["--mixed-precision", "fp16", "--loss-scale", "3e38"], &["loss scale is 3", "65536 is usual"]),
    ];
    for (flags, words) in cases {
        let args = [&["train", &path, "--data", &file, "--epochs", "1", "--batch", "1"][..], flags].concat();
        assert_fails(&flags.join(" "), &run(&args), words);
    }
    let usage: [(&[&str], &[&str]); 14] = [
        (&["--momentum", "0.9"], &["--momentum", "--optimizer sgd"]),
        (&["--nesterov"], &["--nesterov", "--optimizer sgd"]),
        (&["--nesterov", "--optimizer", "sgd"], &["--nesterov", "momentum above 0"]),
        (&["--warmup", "3"], &["--warmup", "linear or cosine"]),
        (&["--step-factor", "0.5"], &["--step-factor", "--schedule step"]),
        (&["--temperature", "2"], &["--temperature", "--loss kl"]),
        (&["--loss", "output", "--ignore-index", "1"], &["--ignore-index", "cross-entropy"]),
        (&["--label-smoothing", "1"], &["--label-smoothing", "0 or more and less than 1"]),
        (&["--lr", "nan"], &["--lr", "use a number of 0 or more"]),
        (&["--lr", "abc"], &["--lr", "`abc` is not a number"]),
        (&["--lr", "-1"], &["--lr", "use a number of 0 or more"]),
        (&["--clip-norm", "-1"], &["--clip-norm", "use a number above 0"]),
        (&["--profile", "-1"], &["--profile", "must not be negative"]),
        (&["--ignore-index", "x"], &["--ignore-index", "`x` is not a whole number"]),
    ];
    for (flags, words) in usage {
        let args = [&["train", &path, "--data", &file, "--epochs", "1", "--batch", "1"][..], flags].concat();
        assert_wrong_usage(&run(&args), words);
    }
    for wrong in [
        &["--resume"][..],
        &["--checkpoint-every", "3"],
        &["--check"],
        &["--optimizer", "adamW"],
        &["--schedule", "step"],
        &["--batch", "0"],
        &["--memory-opt-level", "3"],
        &["--loss-scale", "dynamic"],
        &["--mixed-precision", "fp16", "--loss-scale", "0"],
        &["--mixed-precision", "fp32"],
    ] {
        let args = [&["train", &path, "--data", &file][..], wrong].concat();
        assert_eq!(run(&args).code, Some(2), "{wrong:?}");
    }
    assert_eq!(run(&["train", &path]).code, Some(2));
}

#[test]
fn checkpoints_are_of_one_training() {
    let folder = Folder::new();
    let path = folder.model("linear.onnx", &linear("n"));
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    let checkpoint = text(&folder.path("checkpoint"));
    let args = |flags: &[&str]| {
        run(&[&["train", &path, "--data", &file, "--epochs", "1", "--checkpoint", &checkpoint][..], flags]
            .concat())
    };
    assert_fails("none", &args(&["--resume"]), &["holds no checkpoint", "leave --resume out"]);
    assert_eq!(args(&[]).code, Some(0));
    let cases: [(&[&str], &[&str]); 4] = [
        (&[], &["holds a checkpoint", "--resume"]),
        (&["--resume", "--lr", "0.5"], &["--lr 0.001, not 0.5"]),
        (&["--resume", "--batch", "3"], &["--batch 10, not 3"]),
        (&["--resume", "--optimizer", "sgd"], &["optimizer"]),
    ];
    for (flags, words) in cases {
        assert_fails(&flags.join(" "), &args(flags), words);
    }
    // More epochs are no other training where the learning rate is the same throughout.
    let more = run(&[
        "train",
        &path,
        "--data",
        &file,
        "--epochs",
        "3",
        "--checkpoint",
        &checkpoint,
        "--resume",
        "--json",
    ]);
    assert_eq!(more.json()["updates"], 3);
    std::fs::write(folder.path("checkpoint").join("training.json"), "{").unwrap();
    assert_fails("damaged", &args(&["--resume"]), &["damaged"]);
}

#[test]
fn a_checkpoint_folder_is_tried_before_the_first_epoch() {
    let folder = Folder::new();
    let path = folder.model("linear.onnx", &linear("n"));
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    let into = |checkpoint: &str| {
        run(&["train", &path, "--data", &file, "--epochs", "1", "--checkpoint", checkpoint])
    };
    let occupied = folder.write("occupied", "a file");
    for checkpoint in [&occupied, &format!("{occupied}/below")] {
        let finished = into(checkpoint);
        assert_fails(checkpoint, &finished, &["checkpoint", checkpoint, "cannot be written"]);
        assert_eq!(finished.stdout, "", "{checkpoint}: it trained before it looked");
    }
    assert_eq!(std::fs::read(&occupied).unwrap(), b"a file");
    // The write test leaves no files behind.
    let made = folder.path("above").join("checkpoint");
    assert_eq!(into(&text(&made)).code, Some(0));
    let names = std::fs::read_dir(&made).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    let [tensors, manifest] = names.as_slice() else { panic!("{names:?}") };
    assert!(tensors.starts_with("tensors-") && manifest == "training.json", "{names:?}");
}

#[test]
fn a_fixed_batch_is_kept_to() {
    let folder = Folder::new();
    let path = folder.model("fixed.onnx", &linear("4"));
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    let finished = run(&["train", &path, "--data", &file, "--epochs", "1", "--json"]);
    let json = finished.json();
    assert_eq!((&json["batch"], json["losses"].as_array().unwrap().len()), (&4.into(), 2));
    assert!(finished.stderr.contains("2 of 10 samples do not fill a batch of 4"), "{}", finished.stderr);
    let other = run(&["train", &path, "--data", &file, "--batch", "5"]);
    assert_fails("batch", &other, &["batches of 4 only", "leave --batch out"]);
}

#[test]
fn a_limit_is_kept_to_or_refused_with_what_fits() {
    let (model, train) = (data("digits.onnx"), data("digits.npz"));
    let args = ["train", &model, "--data", &train, "--epochs", "1", "--json"];
    let with = |flags: &[&str]| run(&[&args[..], flags].concat());
    let free = with(&[]).json();
    let total = free["memory_predicted"]["total"].as_u64().unwrap();
    assert_fails("all", &with(&["--memory-limit", "100KiB"]), &["out of memory", "freeze weights"]);
    let limit = (total / 2).to_string();
    let refused = with(&["--memory-limit", &limit]);
    assert_fails("half", &refused, &["out of memory", "--batch", "fits"]);
    let size = refused.error().split("--batch ").nth(1).unwrap().split(' ').next().unwrap().to_string();
    let kept = with(&["--memory-limit", &limit, "--batch", &size]).json();
    assert!(kept["memory_measured"]["total"].as_u64().unwrap() <= total / 2);
}

/// Rows that are gathered by constants, one of them folded.
fn gathered() -> ModelProto {
    let numbers = |count: usize| (0..count).map(|index| (index as f32 - 9.5) / 20.0).collect::<Vec<f32>>();
    model(graph(
        vec![
            node("Add", &["places", "one"], &["moved"]),
            node("MatMul", &["x", "w1"], &["h"]),
            with(node("Gather", &["h", "moved"], &["g"]), int_attribute("axis", 1)),
            node("Gelu", &["g"], &["a"]),
            node("MatMul", &["a", "w2"], &["scores"]),
        ],
        vec![value("x", 1, &["n", "4"])],
        vec![value("scores", 1, &["n", "3"])],
        vec![
            floats("w1", &[4, 6], &numbers(24)),
            floats("w2", &[5, 3], &numbers(15)),
            ints("places", &[5], &[0, 4, 2, 1, 3]),
            ints("one", &[], &[1]),
        ],
    ))
}

#[test]
fn a_limit_that_a_report_or_a_refusal_names_is_taken_and_no_smaller_one() {
    let folder = Folder::new();
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    for (name, model) in [("layered", layered()), ("gathered", gathered())] {
        let path = folder.model(&format!("{name}.onnx"), &model);
        let args = ["train", &path, "--data", &file, "--epochs", "1", "--batch", "5", "--json"];
        let within = |limit: u64| run(&[&args[..], &["--memory-limit", &limit.to_string()]].concat());
        let whole = run(&args).json();
        let memory = &whole["memory_predicted"];
        let bytes = |part: &str| memory[part].as_u64().unwrap();
        let kept = bytes("parameters") + bytes("states") + bytes("gradients");
        assert_eq!(within(bytes("total")).json()["losses"], whole["losses"], "{name}: the whole need");
        let named = |limit: u64| {
            let refused = within(limit);
            assert_fails(
                name,
                &refused,
                &["out of memory: a training step needs", "raise the memory limit to"],
            );
            let text = refused.error().split("raise the memory limit to ").nth(1).unwrap();
            text.split(' ').next().unwrap().parse::<u64>().unwrap()
        };
        let least = named(1);
        for limit in [kept - 1, kept, kept + 1, kept + 100, least - 1] {
            assert_eq!(named(limit), least, "{name}: the least limit, from {limit}");
        }
        let done = within(least).json();
        assert_eq!(done["losses"], whole["losses"], "{name}: the least limit");
        assert!(done["memory_measured"]["total"].as_u64().unwrap() <= least, "{name}: {done}");
    }
}

/// The sum of what is above 0, whose number only the run knows, scales what is multiplied.
fn of_data() -> ModelProto {
    let weight = |name: &str, rows: usize, columns: usize| {
        let numbers: Vec<f32> =
            (0..rows * columns).map(|index| ((index * 37 + 11) % 101) as f32 / 202.0 - 0.25).collect();
        floats(name, &[rows, columns], &numbers)
    };
    model(graph(
        vec![
            node("MatMul", &["x", "w1"], &["h1"]),
            node("Gelu", &["h1"], &["a1"]),
            node("Greater", &["x", "zero"], &["is_above"]),
            node("NonZero", &["is_above"], &["places"]),
            node("Transpose", &["places"], &["each"]),
            node("GatherND", &["a1", "each"], &["chosen"]),
            with(node("ReduceMean", &["chosen"], &["mean"]), int_attribute("keepdims", 0)),
            node("Mul", &["a1", "mean"], &["scaled"]),
            node("Gelu", &["scaled"], &["a2"]),
            node("MatMul", &["a2", "w2"], &["scores"]),
        ],
        vec![value("x", 1, &["n", "4"])],
        vec![value("scores", 1, &["n", "3"])],
        vec![weight("w1", 4, 64), weight("w2", 64, 3), floats("zero", &[], &[0.0])],
    ))
}

#[test]
fn levels_and_limits_take_models_whose_sizes_depend_on_data() {
    let folder = Folder::new();
    let path = folder.model("of_data.onnx", &of_data());
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    let with = |flags: &[&str]| {
        run(&[&["train", &path, "--data", &file, "--epochs", "3", "--batch", "5", "--json"][..], flags]
            .concat())
    };
    let plain = with(&[]).json();
    assert!(plain["memory_predicted"].is_null(), "{plain}");
    for flags in [["--memory-opt-level", "1"], ["--memory-opt-level", "2"], ["--memory-limit", "1MiB"]] {
        assert_eq!(with(&flags).json()["losses"], plain["losses"], "{flags:?}");
    }
    let recompute = with(&["--memory-opt-level", "2"]).json()["recompute"].clone();
    assert!(recompute["values"].as_u64().unwrap() > 0, "{recompute}");
    let words = ["a training step needs", "raise the memory limit to", "depend on data"];
    assert_fails("1 KiB", &with(&["--memory-limit", "6KiB"]), &words);
}

#[test]
fn each_optimizer_learns() {
    let (model, train) = (data("digits.onnx"), data("digits.npz"));
    let cases: [(&str, &[&str]); 7] = [
        ("sgd", &["--lr", "0.1"]),
        ("sgd", &["--lr", "0.05", "--momentum", "0.9", "--nesterov", "--weight-decay", "0.001"]),
        ("adam", &["--schedule", "linear", "--warmup", "20"]),
        ("adamw", &["--clip-norm", "1", "--no-decay", "*.bias", "--label-smoothing", "0.02"]),
        ("adamw-hf", &["--schedule", "step", "--step-every", "60", "--accumulate", "2", "--lr", "0.003"]),
        ("lamb", &["--lr", "0.01", "--weight-decay", "0.01"]),
        ("adafactor", &["--lr", "0.05"]),
    ];
    for (optimizer, more) in cases {
        let args = ["train", &model, "--data", &train, "--epochs", "3", "--json", "--optimizer", optimizer];
        let json = run(&[&args[..], more].concat()).json();
        let losses: Vec<f64> =
            json["epochs"].as_array().unwrap().iter().map(|epoch| epoch["loss"].as_f64().unwrap()).collect();
        assert!(losses[2] < 0.5 * losses[0], "{optimizer} {more:?}: {losses:?}");
    }
}

/// Three layers of 64 features with an activation that is computed again from what the layer before
/// it made.
fn layered() -> ModelProto {
    let weight = |name: &str, rows: usize, columns: usize| {
        let numbers: Vec<f32> =
            (0..rows * columns).map(|index| ((index * 37 + 11) % 101) as f32 / 101.0 - 0.5).collect();
        floats(name, &[rows, columns], &numbers)
    };
    model(graph(
        vec![
            node("MatMul", &["x", "w1"], &["h1"]),
            node("Gelu", &["h1"], &["a1"]),
            node("MatMul", &["a1", "w2"], &["h2"]),
            node("Gelu", &["h2"], &["a2"]),
            node("MatMul", &["a2", "w3"], &["scores"]),
        ],
        vec![value("x", 1, &["n", "4"])],
        vec![value("scores", 1, &["n", "3"])],
        vec![weight("w1", 4, 64), weight("w2", 64, 64), weight("w3", 64, 3)],
    ))
}

#[test]
fn what_is_computed_again_changes_no_result() {
    let folder = Folder::new();
    let path = folder.model("layered.onnx", &layered());
    let file = archive(&folder.path("data.npz"), &[x(), labels()]);
    let with = |flags: &[&str]| {
        run(&[&["train", &path, "--data", &file, "--epochs", "5", "--batch", "5"][..], flags].concat())
    };
    let plain = with(&["--json"]).json();
    let table = with(&["--memory-opt-level", "1"]).stdout;
    for words in ["TRANSFORMER_LAYERWISE_RECOMPUTE", "Gelu+:1:-1"] {
        assert!(table.contains(words), "`{words}` is missing in:\n{table}");
    }
    let config = folder.write("plans.json", "[\"Gelu+:1:-1\"]");
    let ways = [
        ["--memory-opt-level", "1"],
        ["--memory-opt-level", "2"],
        ["--memory-opt-config", &config],
        ["--memory-opt-config", "Gelu+:1:1,Gelu+:1:-1"],
    ];
    for flags in &ways {
        let json = with(&[&flags[..], &["--json"]].concat()).json();
        assert_eq!(json["losses"], plain["losses"], "{flags:?}");
        let recompute = &json["recompute"];
        assert!(recompute["activations"].as_u64() <= recompute["activations_without"].as_u64());
        assert_eq!(recompute["activations_without"], plain["memory_predicted"]["activations"], "{flags:?}");
    }
    let wrong = folder.write("wrong.json", "[\"Relu\"]");
    assert_fails("config", &with(&["--memory-opt-config", &wrong]), &["wrong.json", "<ClusterID>"]);
    let both = with(&["--memory-opt-config", &config, "--memory-opt-level", "1"]);
    assert_wrong_usage(&both, &["level 1", "--memory-opt-config"]);
}

#[test]
fn a_loss_that_is_no_number_ends_the_training() {
    let folder = Folder::new();
    let path = folder.model("linear.onnx", &linear("n"));
    let target = ("target", Array::Floats(&[10, 3], vec![1.0; 30]));
    let file = archive(&folder.path("data.npz"), &[x(), target]);
    let saved = text(&folder.path("out.onnx"));
    let args = ["--loss", "mse", "--optimizer", "sgd", "--lr", "1e30", "--save", &saved];
    let finished = run(&[&["train", &path, "--data", &file][..], &args].concat());
    assert_fails(
        "diverged",
        &finished,
        &["the loss is", "after", "updates", "in the batch before", "lower --lr", "--clip-norm"],
    );
    assert!(!folder.files().contains(&"out.onnx".to_string()));
}

#[test]
fn a_check_says_what_stands_in_the_way() {
    let folder = Folder::new();
    let path = folder.model("linear.onnx", &linear("n"));
    let finished = run(&["train", &path, "--check"]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    for words in ["can be trained", "2 weights", "x, labels"] {
        assert!(finished.stdout.contains(words), "{}", finished.stdout);
    }
    let mut blocked = model(graph(
        vec![
            node("Gemm", &["x", "w"], &["scores"]),
            with(node("BitCast", &["scores"], &["out"]), int_attribute("to", 1)),
        ],
        vec![value("x", 1, &["n", "4"])],
        vec![value("out", 1, &["n", "3"])],
        vec![floats("w", &[4, 3], &[0.5; 12])],
    ));
    blocked.opset_import[0].version = Some(26);
    let path = folder.model("blocked.onnx", &blocked);
    let args = ["train", &path, "--check", "--loss", "mse"];
    let refused = run(&args);
    assert_fails("blocked", &refused, &["blocked.onnx", "BitCast", "--freeze"]);
    assert!(refused.stdout.contains("bitcast_out"), "{}", refused.stdout);
    let json = run(&[&args[..], &["--json"]].concat());
    assert_eq!(json.code, Some(1));
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((&json["ok"], &json["findings"][0]["operator"]), (&false.into(), &"BitCast".into()));
}

#[test]
fn training_in_mixed_precision_learns_and_goes_on() {
    let folder = Folder::new();
    let (model, train) = (data("digits.onnx"), data("digits.npz"));
    let args = ["train", &model, "--data", &train, "--epochs", "2", "--json"];
    let single = run(&args).json();
    assert_eq!((&single["loss_scale"], &single["precisions"]), (&().into(), &().into()));
    for (flags, scale) in [
        (&["--mixed-precision", "bf16"][..], None),
        (&["--mixed-precision", "fp16"], Some(65536.0)),
        (&["--mixed-precision", "fp16", "--loss-scale", "512"], Some(512.0)),
    ] {
        let json = run(&[&args[..], flags].concat()).json();
        let loss = |json: &serde_json::Value| json["epochs"][1]["loss"].as_f64().unwrap();
        assert!((loss(&json) / loss(&single) - 1.0).abs() < 0.1, "{flags:?}: {}", loss(&json));
        assert_eq!((json["loss_scale"].as_f64(), &json["skipped_updates"]), (scale, &0.into()), "{flags:?}");
        assert!(json["precisions"]["Conv"]["half"].as_u64() > Some(0), "{flags:?}");
        let bytes = |json: &serde_json::Value| json["memory_measured"]["activations"].as_u64().unwrap();
        println!("{flags:?}: {} of {} bytes", bytes(&json), bytes(&single));
    }
    // A scale that is far too large and stays so ends the training.
    let flags = ["--mixed-precision", "fp16", "--loss-scale", "1e30", "--batch", "64"];
    let lost = run(&[&args[..], &flags].concat());
    assert_fails("too large a scale", &lost, &["32 updates in a row were skipped", "--loss-scale"]);
    let said = run(&["train", &model, "--data", &train, "--epochs", "1", "--mixed-precision", "fp16"]);
    assert!(
        said.stdout.contains("in float16") && said.stdout.contains("0 updates skipped"),
        "{}",
        said.stdout
    );
    let kept = text(&folder.path("kept"));
    let flags = ["--mixed-precision", "fp16", "--checkpoint", &kept];
    let stopped = run(&[&args[..], &flags, &["--stop-after", "50"]].concat());
    assert_eq!(stopped.code, Some(0), "{}", stopped.stderr);
    let resumed = run(&[&args[..], &flags, &["--resume"]].concat()).json();
    let whole = run(&[&args[..], &flags[..2]].concat()).json();
    let (whole, resumed) = (whole["losses"].as_array().unwrap(), resumed["losses"].as_array().unwrap());
    assert_eq!(whole[50..], resumed[..]);
    let other = run(&[&args[..], &["--mixed-precision", "bf16", "--checkpoint", &kept, "--resume"]].concat());
    assert_fails("another precision", &other, &["precision"]);
}
