//! `ort optimize`: what it writes computes the same in fewer nodes; a rule can be left out, and its
//! name misspelt.

use crate::support::*;

/// `x * sigmoid(x + -0)`, through an identity. Adding 0 would turn a negative zero into a positive
/// one.
fn silu(folder: &Folder) -> String {
    let nodes = vec![
        node("Add", &["x", "zero"], &["a"]),
        node("Identity", &["a"], &["b"]),
        node("Sigmoid", &["b"], &["c"]),
        node("Mul", &["x", "c"], &["y"]),
    ];
    let zero = floats("zero", &[], &[-0.0]);
    let graph = graph(nodes, vec![value("x", 1, &["2", "3"])], vec![value("y", 1, &["2", "3"])], vec![zero]);
    folder.model("silu.onnx", &model(graph))
}

#[test]
fn fewer_nodes_and_the_same_result() {
    let folder = Folder::new();
    let (path, out) = (silu(&folder), folder.path("out.onnx"));
    let out = out.to_str().unwrap();
    let finished = run(&["optimize", &path, out]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    for word in ["add_zero", "silu", "nodes became 1;"] {
        assert!(finished.stdout.contains(word), "{word}: {}", finished.stdout);
    }
    let summary = |path: &str| run(&["run", path, "--opt-level", "disabled", "--seed", "3"]).stdout;
    assert_eq!(summary(out), summary(&path));
    let basic = run(&["optimize", &path, out, "--level", "basic"]);
    assert!(basic.stdout.contains("nodes became 2;"), "{}", basic.stdout);
    let without =
        run(&["optimize", &path, out, "--without-rule", "silu", "--without-rule", "elementwise_chain"]);
    assert!(without.stdout.contains("nodes became 2;"), "{}", without.stdout);
}

/// Whether `x` and `y` differ in size, both of a size that is called `n`.
#[test]
fn names_of_dimensions_are_trusted_only_if_asked() {
    let folder = Folder::new();
    let nodes = vec![
        node("Shape", &["x"], &["of_x"]),
        node("Shape", &["y"], &["of_y"]),
        node("Equal", &["of_x", "of_y"], &["alike"]),
        node("Not", &["alike"], &["differ"]),
    ];
    let inputs = vec![value("x", 1, &["n"]), value("y", 1, &["n"])];
    let graph = graph(nodes, inputs, vec![value("differ", 9, &["1"])], vec![]);
    let path = folder.model("differ.onnx", &model(graph));
    let out = folder.path("out.onnx");
    let out = out.to_str().unwrap();
    let independent = run(&["optimize", &path, out]);
    for word in ["4 nodes became 4;", "dimensions of the same name (n)", "--trust-dimension-names"] {
        assert!(independent.stdout.contains(word), "{word}: {}", independent.stdout);
    }
    let inspected = run(&["inspect", out]).stdout;
    assert!(inspected.contains("[n]") && !inspected.contains("x.0"), "{inspected}");
    let trusted = run(&["optimize", &path, out, "--trust-dimension-names"]);
    assert!(!trusted.stdout.contains("nodes became 4;"), "{}", trusted.stdout);
    assert!(!trusted.stdout.contains("of the same name"), "{}", trusted.stdout);
}

#[test]
fn a_rule_that_does_not_exist_is_an_error_with_the_nearest_name() {
    let folder = Folder::new();
    let (path, out) = (silu(&folder), folder.path("out.onnx"));
    let finished = run(&["optimize", &path, out.to_str().unwrap(), "--without-rule", "silo"]);
    assert_fails("misspelt", &finished, &["silo", "silu"]);
    assert!(!out.exists(), "a file appears only when all is well");
}

#[test]
fn the_model_is_not_overwritten() {
    let folder = Folder::new();
    let path = silu(&folder);
    assert_fails("itself", &run(&["optimize", &path, &path]), &["replace"]);
}
