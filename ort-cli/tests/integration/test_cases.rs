//! `ort test`: which file goes to which input, what is compared, what it says.

use crate::support::*;
use ort_runtime::onnx::proto::*;
use prost::Message;

/// y = x - w, where the weight w is listed first among the inputs, as old models do.
fn weights_first() -> ModelProto {
    model(graph(
        vec![node("Sub", &["x", "w"], &["y"])],
        vec![value("w", 1, &["4"]), value("x", 1, &["n", "4"])],
        vec![value("y", 1, &["n", "4"])],
        vec![floats("w", &[4], &[1.0, 2.0, 3.0, 4.0])],
    ))
}

/// y = a - b.
fn two_inputs() -> ModelProto {
    model(graph(
        vec![node("Sub", &["a", "b"], &["y"])],
        vec![value("a", 1, &["1"]), value("b", 1, &["1"])],
        vec![value("y", 1, &["1"])],
        vec![],
    ))
}

fn case(folder: &Folder, name: &str, model: &ModelProto, files: &[(&str, TensorProto)]) {
    folder.model(&format!("{name}/model.onnx"), model);
    for (file, tensor) in files {
        folder.write(&format!("{name}/test_data_set_0/{file}.pb"), tensor.encode_to_vec());
    }
}

fn number(name: &str, value: f32) -> TensorProto {
    floats(name, &[1], &[value])
}

#[test]
fn inputs_are_bound_by_name_or_by_number() {
    let folder = Folder::new();
    let row = |name, values: [f32; 4]| floats(name, &[1, 4], &values);
    let (x, y) = ([5.0, 5.0, 5.0, 5.0], [4.0, 3.0, 2.0, 1.0]);
    case(&folder, "a_weights_first", &weights_first(), &[("input_0", row("", x)), ("output_0", row("", y))]);
    case(&folder, "b_named", &weights_first(), &[("input_0", row("x", x)), ("output_0", row("y", y))]);
    let swapped =
        [("input_0", number("b", 1.0)), ("input_1", number("a", 5.0)), ("output_0", number("", 4.0))];
    case(&folder, "c_swapped", &two_inputs(), &swapped);
    let strange =
        [("input_0", number("p", 5.0)), ("input_1", number("q", 1.0)), ("output_0", number("", 4.0))];
    case(&folder, "d_other_names", &two_inputs(), &strange);
    let finished = run(&["test", &text(&folder.path("."))]);
    assert_eq!(
        finished.stdout,
        "PASS a_weights_first\nPASS b_named\nPASS c_swapped\nPASS d_other_names\n4 passed, 0 failed, 0 skipped\n"
    );
    assert_eq!(finished.code, Some(0));
    // Several folders, and one of them twice: each case counts once.
    let (a, b) = (text(&folder.path("a_weights_first")), text(&folder.path("b_named")));
    assert!(run(&["test", &a, &b, &a]).stdout.ends_with("2 passed, 0 failed, 0 skipped\n"));
}

#[test]
fn failures_say_what_is_wrong() {
    let folder = Folder::new();
    let files = |expected| {
        [("input_0", number("a", 5.0)), ("input_1", number("b", 1.0)), ("output_0", number("", expected))]
    };
    case(&folder, "a_right", &two_inputs(), &files(4.0));
    case(&folder, "b_wrong", &two_inputs(), &files(4.5));
    case(&folder, "c_lenient", &two_inputs(), &files(4.5));
    folder.write("c_lenient/tol", "0.5 0.5\n");
    case(&folder, "d_no_data", &two_inputs(), &[]);
    case(&folder, "e_missing_input", &two_inputs(), &files(4.0)[..1]);
    folder.write("f_damaged/model.onnx", "<html>");
    folder.write("f_damaged/test_data_set_0/output_0.pb", "");
    let finished = run(&["test", &text(&folder.path("."))]);
    let lines: Vec<&str> = finished.stdout.lines().collect();
    let starts = [
        "PASS a_right",
        "FAIL b_wrong: output 'y'",
        "PASS c_lenient",
        "SKIP d_no_data: ",
        "FAIL e_missing_input: ",
        "FAIL f_damaged: ",
        "2 passed, 3 failed, 1 skipped",
    ];
    assert_eq!(lines.len(), starts.len(), "{}", finished.stdout);
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(start), "{line}");
    }
    assert_fails("test", &finished, &["3 of 6 cases failed", "b_wrong"]);
    // The command line's tolerance goes before the case's.
    assert_eq!(run(&["test", &text(&folder.path("b_wrong")), "--atol", "1"]).code, Some(0));
    assert_eq!(run(&["test", &text(&folder.path("c_lenient")), "--rtol", "0", "--atol", "0"]).code, Some(1));
}

#[test]
fn folders_without_cases_are_errors() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("empty")).unwrap();
    assert_fails("empty", &run(&["test", &text(&folder.path("empty"))]), &["empty", "model.onnx"]);
    assert_fails("nowhere", &run(&["test", &text(&folder.path("nowhere"))]), &["nowhere"]);
}
