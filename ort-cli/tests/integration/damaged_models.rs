//! Files that are no models, models that cannot be, and inputs that do not fit: each is one clear
//! error, soon.

use std::time::Duration;

use crate::support::*;
use ort_runtime::onnx::proto::*;
use prost::Message;

/// A debug build on a busy machine is slow; a hang or an allocation of terabytes is slower still.
const LIMIT: Duration = Duration::from_secs(20);

/// A name, the bytes of the file, and words of the error.
type FileCase = (&'static str, Vec<u8>, &'static [&'static str]);

fn file_cases() -> Vec<FileCase> {
    let good = small().encode_to_vec();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n".to_vec();
    let noise: Vec<u8> = (0..4096u32).map(|n| (n.wrapping_mul(2654435761) >> 13) as u8).collect();
    vec![
        ("empty", Vec::new(), &["empty"]),
        ("truncated", good[..good.len() * 2 / 3].to_vec(), &[]),
        (
            "html",
            b"<!DOCTYPE html><html><body>Not found</body></html>".to_vec(),
            &["a web page", "download the file itself"],
        ),
        ("lfs", pointer, &["git-lfs pointer", "git lfs pull"]),
        ("json", b"{\"model\": \"gpt\", \"layers\": 12}".to_vec(), &["JSON"]),
        ("noise", noise, &[]),
        ("zeros", vec![0; 4096], &[]),
        ("text", b"hello, world\n".to_vec(), &[]),
        ("zip", b"PK\x03\x04\x14\x00\x00\x00\x08\x00weights".to_vec(), &[]),
    ]
}

#[test]
fn files_that_hold_no_model() {
    let folder = Folder::new();
    for (name, bytes, words) in file_cases() {
        let path = folder.write(&format!("{name}.onnx"), bytes);
        for command in ["run", "inspect", "check", "plan"] {
            let finished = run_within(LIMIT, &[command, &path]);
            assert_fails(&format!("{command} {name}"), &finished, words);
            assert!(finished.error().contains(&format!("{name}.onnx")), "{}", finished.stderr);
        }
    }
    assert_fails("missing", &run(&["run", &text(&folder.path("nowhere.onnx"))]), &["nowhere.onnx"]);
    assert_fails("folder", &run(&["run", &text(&folder.path("."))]), &[]);
}

#[test]
fn a_model_cut_anywhere_is_an_error_or_a_smaller_model() {
    let folder = Folder::new();
    let good = small().encode_to_vec();
    for length in (0..good.len()).step_by(7) {
        let finished = run_within(LIMIT, &["run", &folder.write("cut.onnx", &good[..length])]);
        match finished.code {
            Some(0) => {}
            _ => assert_fails(&format!("{length} bytes"), &finished, &[]),
        }
    }
}

fn one_node(node: NodeProto, weights: Vec<TensorProto>) -> ModelProto {
    model(graph(vec![node], vec![value("x", 1, &["2", "3"])], vec![open_value("y", 1)], weights))
}

fn huge(op: &str, weights: Vec<TensorProto>) -> ModelProto {
    let names: Vec<String> = weights.iter().filter_map(|weight| weight.name.clone()).collect();
    let mut inputs = vec!["x"];
    inputs.extend(names.iter().map(String::as_str));
    one_node(node(op, &inputs, &["y"]), weights)
}

/// A body for Loop that counts and does nothing else.
fn counting_body() -> GraphProto {
    graph(
        vec![node("Identity", &["c"], &["go"]), node("Identity", &["v"], &["out"])],
        vec![value("i", 7, &[]), value("c", 9, &[]), value("v", 1, &["2", "3"])],
        vec![value("go", 9, &[]), value("out", 1, &["2", "3"])],
        vec![],
    )
}

/// Like [`counting_body`], and each round hands out a value that Loop stacks.
fn stacking_body() -> GraphProto {
    let mut body = counting_body();
    body.node.push(node("Identity", &["v"], &["scan"]));
    body.output.push(value("scan", 1, &["2", "3"]));
    body
}

/// If in If in If, `depth` deep.
fn nested(depth: usize) -> GraphProto {
    let mut inner = graph(vec![node("Identity", &["x"], &["y0"])], vec![], vec![open_value("y0", 1)], vec![]);
    for level in 1..=depth {
        let name = format!("y{level}");
        let branch = node("If", &["flag"], &[&name]);
        let branch = with(branch, graph_attribute("then_branch", inner.clone()));
        let other = graph(vec![node("Identity", &["x"], &["z"])], vec![], vec![open_value("z", 1)], vec![]);
        inner = graph(
            vec![with(branch, graph_attribute("else_branch", other))],
            vec![],
            vec![open_value(&name, 1)],
            vec![],
        );
    }
    inner.input = vec![value("x", 1, &["2", "3"])];
    inner.initializer = vec![bools("flag", &[true])];
    inner
}

fn model_cases() -> Vec<(&'static str, ModelProto, &'static [&'static str])> {
    let cycle =
        vec![node("Add", &["x", "b"], &["a"]), node("Relu", &["a"], &["b"]), node("Relu", &["b"], &["y"])];
    let dimension = |dim: &str| {
        model(graph(
            vec![node("Relu", &["x"], &["y"])],
            vec![value("x", 1, &[dim, "3"])],
            vec![open_value("y", 1)],
            vec![],
        ))
    };
    const TERA: i64 = 1 << 40;
    vec![
        (
            "cycle",
            model(graph(cycle, vec![value("x", 1, &["2"])], vec![open_value("y", 1)], vec![])),
            &["cycle", "relu_b"],
        ),
        ("dangling", one_node(node("Add", &["x", "nowhere"], &["y"]), vec![]), &["nowhere", "add_y"]),
        ("unknown", one_node(node("Frobnicate", &["x"], &["y"]), vec![]), &["Frobnicate"]),
        ("no output", one_node(node("Relu", &["x"], &["z"]), vec![]), &["Graph output (y) does not exist"]),
        ("types", one_node(node("Add", &["x", "k"], &["y"]), vec![ints("k", &[1], &[1])]), &["add_y"]),
        (
            "shapes",
            one_node(node("Add", &["x", "k"], &["y"]), vec![floats("k", &[5], &[1.0; 5])]),
            &["add_y"],
        ),
        ("huge dimension", dimension("4611686018427387904"), &[]),
        ("largest dimension", dimension("9223372036854775807"), &[]),
        ("huge expand", huge("Expand", vec![ints("s", &[3], &[TERA, 2, 3])]), &["memory"]),
        ("overflowing expand", huge("Expand", vec![ints("s", &[4], &[TERA, TERA, 2, 3])]), &[]),
        ("huge tile", huge("Tile", vec![ints("s", &[2], &[TERA, 1])]), &["memory"]),
        ("overflowing tile", huge("Tile", vec![ints("s", &[2], &[i64::MAX, i64::MAX])]), &[]),
        ("negative tile", huge("Tile", vec![ints("s", &[2], &[-1, 1])]), &["tile_y"]),
        ("huge pad", huge("Pad", vec![ints("s", &[4], &[0, TERA, 0, 0])]), &["memory"]),
        ("overflowing pad", huge("Pad", vec![ints("s", &[4], &[i64::MAX, 1, i64::MAX, 1])]), &[]),
        ("negative pad", huge("Pad", vec![ints("s", &[4], &[-5, 0, 0, 0])]), &[]),
        ("bad reshape", huge("Reshape", vec![ints("s", &[2], &[7, -1])]), &["reshape_y"]),
        ("negative reshape", huge("Reshape", vec![ints("s", &[2], &[-7, 2])]), &["reshape_y"]),
        (
            "huge constant",
            one_node(node("ConstantOfShape", &["s"], &["y"]), vec![ints("s", &[1], &[TERA])]),
            &["memory"],
        ),
        (
            "negative constant",
            one_node(node("ConstantOfShape", &["s"], &["y"]), vec![ints("s", &[1], &[-1])]),
            &["constantofshape_y"],
        ),
        (
            "huge range",
            model(graph(
                vec![node("Range", &["a", "b", "c"], &["y"])],
                vec![],
                vec![open_value("y", 7)],
                vec![ints("a", &[], &[0]), ints("b", &[], &[TERA]), ints("c", &[], &[1])],
            )),
            &[],
        ),
        (
            "range that stands still",
            model(graph(
                vec![node("Range", &["a", "b", "c"], &["y"])],
                vec![],
                vec![open_value("y", 7)],
                vec![ints("a", &[], &[0]), ints("b", &[], &[9]), ints("c", &[], &[0])],
            )),
            &["range_y"],
        ),
        (
            "huge one-hot",
            model(graph(
                vec![node("OneHot", &["i", "d", "v"], &["y"])],
                vec![],
                vec![open_value("y", 1)],
                vec![ints("i", &[1], &[0]), ints("d", &[], &[TERA]), floats("v", &[2], &[0.0, 1.0])],
            )),
            &[],
        ),
        (
            "negative axis",
            one_node(with(node("Concat", &["x", "x"], &["y"]), int_attribute("axis", -9)), vec![]),
            &["concat_y"],
        ),
        (
            "loop that stacks until memory ends",
            one_node(
                with(
                    node("Loop", &["n", "t", "x"], &["last", "y"]),
                    graph_attribute("body", stacking_body()),
                ),
                vec![ints("n", &[], &[1 << 36]), bools("t", &[true])],
            ),
            &["out of memory", "'y'", "raise the memory limit"],
        ),
        (
            "loop that stacks without end",
            one_node(
                with(
                    node("Loop", &["n", "t", "x"], &["last", "y"]),
                    graph_attribute("body", stacking_body()),
                ),
                vec![ints("n", &[], &[1 << 62]), bools("t", &[true])],
            ),
            &["loop_last", "too many elements"],
        ),
    ]
}

#[test]
fn nesting_without_end() {
    let folder = Folder::new();
    // Making and writing such a model takes more stack than a test has.
    let big = std::thread::Builder::new().stack_size(512 << 20);
    let thread = big.spawn(|| model(nested(400)).encode_to_vec()).unwrap();
    let path = folder.write("deep.onnx", thread.join().unwrap());
    for command in ["run", "check", "inspect"] {
        assert_fails(command, &run_within(LIMIT, &[command, &path]), &["deep.onnx"]);
    }
}

#[test]
fn models_that_cannot_be() {
    let folder = Folder::new();
    let mut failures = Vec::new();
    for (name, model, words) in model_cases() {
        let path = folder.model(&format!("{}.onnx", name.replace(' ', "_")), &model);
        let limit = if name.starts_with("loop") { "16MiB" } else { "1GiB" };
        let outcome = std::panic::catch_unwind(|| {
            let finished = run_within(LIMIT, &["run", &path, "--memory-limit", limit]);
            assert_fails(name, &finished, words);
        });
        // All of them are told at once.
        if let Err(panic) = outcome {
            failures.push(panic.downcast_ref::<String>().cloned().unwrap_or_default());
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn without_a_limit_the_machine_is_the_limit() {
    let folder = Folder::new();
    for (op, shape) in [("Expand", [1 << 40, 2, 3].as_slice()), ("Tile", &[1 << 40, 1])] {
        let model = huge(op, vec![ints("s", &[shape.len()], shape)]);
        let finished = run_within(LIMIT, &["run", &folder.model("huge.onnx", &model)]);
        assert_fails(
            op,
            &finished,
            &["out of memory", "raise the memory limit to ", "or use smaller dimensions"],
        );
    }
}

#[test]
fn inputs_that_do_not_fit() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let good = folder.write("good.npy", npy_floats("(1, 4)", &[1.0, -2.0, 3.0, -4.0]));
    let wrong_type = folder.write("type.npy", npy("<i8", "(1, 4)", &[0; 32]));
    let wrong_rank = folder.write("rank.npy", npy_floats("(4,)", &[0.0; 4]));
    let wrong_size = folder.write("size.npy", npy_floats("(1, 5)", &[0.0; 5]));
    let short = folder.write("short.npy", npy_floats("(1000, 4)", &[0.0; 4]));
    let lying = folder.write("lying.npy", npy_floats("(1099511627776, 1099511627776)", &[0.0; 4]));
    let vast = folder.write("vast.npy", npy_floats("(1099511627776, 4)", &[0.0; 4]));
    let noise = folder.write("noise.npy", b"no array at all");
    let objects = folder.write("objects.npy", npy("|O", "(1, 4)", &[0; 32]));
    let cases: Vec<(&str, Vec<String>, &[&str])> = vec![
        ("type", vec!["--input".into(), format!("x={wrong_type}")], &["'x'", "int64", "float"]),
        ("rank", vec!["--input".into(), format!("x={wrong_rank}")], &["'x'", "rank 1"]),
        ("size", vec!["--input".into(), format!("x={wrong_size}")], &["'x'", "[1, 5]"]),
        ("name", vec!["--input".into(), format!("z={good}")], &["'z'", "the inputs are x"]),
        (
            "twice",
            vec!["--input".into(), format!("x={good}"), "--input".into(), format!("x={good}")],
            &["'x'"],
        ),
        ("short", vec!["--input".into(), format!("x={short}")], &["short.npy"]),
        ("lying", vec!["--input".into(), format!("x={lying}")], &["lying.npy"]),
        ("vast", vec!["--input".into(), format!("x={vast}")], &["vast.npy"]),
        ("noise", vec!["--input".into(), format!("x={noise}")], &["noise.npy"]),
        ("objects", vec!["--input".into(), format!("x={objects}")], &["objects.npy"]),
        ("missing", vec!["--input".into(), "x=nowhere.npy".into()], &["nowhere.npy"]),
        ("archive", vec!["--inputs".into(), noise.clone()], &["noise.npy"]),
        ("dim", vec!["--dim".into(), "m=3".into()], &["'m'", "n"]),
        ("shape name", vec!["--shape".into(), "z=1x4".into()], &["'z'", "the inputs are x"]),
        ("shape", vec!["--shape".into(), "x=1x5".into()], &["'x'", "[1, 5]"]),
        ("huge shape", vec!["--shape".into(), "x=1099511627776x4".into()], &["'x'", "16.0 TiB"]),
        ("huge dim", vec!["--dim".into(), "n=4611686018427387904".into()], &["'x'"]),
        ("provider", vec!["--ep".into(), "abacus".into()], &["abacus", "cpu"]),
        (
            "limit",
            vec!["--opt-level".into(), "disabled".into(), "--memory-limit".into(), "16".into()],
            &["out of memory", "raise the memory limit"],
        ),
    ];
    for (name, flags, words) in cases {
        let mut args = vec!["run", &path];
        args.extend(flags.iter().map(String::as_str));
        assert_fails(name, &run_within(LIMIT, &args), words);
    }
}

#[test]
fn nesting_that_is_not_deep_runs() {
    let folder = Folder::new();
    let finished = run(&["run", &folder.model("nested.onnx", &model(nested(20)))]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
}
