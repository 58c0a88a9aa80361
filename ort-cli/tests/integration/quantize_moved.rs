//! `ort quantize`: weights that nodes slice, concatenate and transpose.

use ort_runtime::onnx::FileAccess;
use ort_runtime::onnx::Source;
use ort_runtime::onnx::proto::{GraphProto, ModelProto, NodeProto, TensorProto};

use crate::support::*;

const INPUTS: usize = 8;
const HIDDEN: usize = 4;

/// Numbers that are neither regular nor random.
fn numbers(count: usize, factor: f32) -> Vec<f32> {
    (0..count).map(|step| ((step * 7919 % 10007) as f32 / 10007.0 - 0.5) * factor).collect()
}

/// The order of gates that PyTorch has as rows, from that of ONNX: i, o, f, c from i, f, g, o.
fn reordered(rows: &[f32], columns: usize) -> Vec<f32> {
    let gates: Vec<&[f32]> = rows.chunks(HIDDEN * columns).collect();
    [gates[0], gates[3], gates[1], gates[2]].concat()
}

/// Transposes a matrix of this many columns.
fn transposed(rows: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| rows.iter().skip(column).step_by(columns).copied()).collect()
}

/// Nodes that bring the gates of a matrix into the order of ONNX, with the direction in front.
fn gates(name: &str) -> Vec<NodeProto> {
    let parts = [("i", "0", "1"), ("o", "3", "last"), ("fc", "1", "3")];
    let mut nodes: Vec<NodeProto> = parts
        .iter()
        .map(|(part, from, to)| {
            let places = [format!("at{from}"), format!("at{to}")];
            node("Slice", &[name, &places[0], &places[1], "axes"], &[&format!("{name}_{part}")])
        })
        .collect();
    let names = parts.map(|(part, ..)| format!("{name}_{part}"));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let joined = node("Concat", &names, &[&format!("{name}_iofc")]);
    nodes.push(with(joined, int_attribute("axis", 0)));
    nodes.push(node("Unsqueeze", &[&format!("{name}_iofc"), "axes"], &[&format!("{name}_all")]));
    nodes
}

/// An LSTM and a product in the branch of an `If`. The weights lie around it, moved by nodes of the
/// branch or as the layers read them.
fn branching(is_moved: bool) -> ModelProto {
    let (w, r, m) = (numbers(128, 1.0), numbers(64, 1.5), numbers(INPUTS * HIDDEN, 2.0));
    let lstm = |w: &str, r: &str| {
        let lstm = node("LSTM", &["x", w, r], &["h"]);
        with(lstm, int_attribute("hidden_size", HIDDEN as i64))
    };
    let (mut nodes, weights): (_, Vec<TensorProto>) = match is_moved {
        true => {
            let mut nodes = [gates("W"), gates("R")].concat();
            nodes.push(lstm("W_all", "R_all"));
            nodes.push(node("Identity", &["M"], &["M_same"]));
            nodes.push(node("Transpose", &["M_same"], &["M_turned"]));
            let at = |name: &str, place: usize| ints(name, &[1], &[(place * HIDDEN) as i64]);
            let weights = vec![
                floats("W", &[4 * HIDDEN, INPUTS], &w),
                floats("R", &[4 * HIDDEN, HIDDEN], &r),
                floats("M", &[INPUTS, HIDDEN], &m),
                at("at0", 0),
                at("at1", 1),
                at("at3", 3),
                ints("atlast", &[1], &[i64::MAX]),
                ints("axes", &[1], &[0]),
            ];
            (nodes, weights)
        }
        false => {
            let weights = vec![
                floats("W_all", &[1, 4 * HIDDEN, INPUTS], &reordered(&w, INPUTS)),
                floats("R_all", &[1, 4 * HIDDEN, HIDDEN], &reordered(&r, HIDDEN)),
                floats("M_turned", &[HIDDEN, INPUTS], &transposed(&m, HIDDEN)),
            ];
            (vec![lstm("W_all", "R_all")], weights)
        }
    };
    nodes.push(node("MatMul", &["h", "M_turned"], &["product"]));
    let branch = |nodes: Vec<NodeProto>, output: &str| -> GraphProto {
        graph(nodes, vec![], vec![open_value(output, 1)], vec![])
    };
    let choice = node("If", &["first"], &["y"]);
    let choice = with(choice, graph_attribute("then_branch", branch(nodes, "product")));
    let other = branch(vec![node("Identity", &["x"], &["same"])], "same");
    let choice = with(choice, graph_attribute("else_branch", other));
    let inputs = vec![value("first", 9, &[]), value("x", 1, &["5", "1", "8"])];
    model(graph(vec![choice], inputs, vec![open_value("y", 1)], weights))
}

/// The operators of the model's branch.
fn operators(path: &str) -> Vec<String> {
    let model = Source::open(path, FileAccess::default()).unwrap().decode().unwrap();
    let graph = model.graph.unwrap();
    let choice = graph.node.iter().find(|node| node.op_type() == "If").unwrap();
    let then = choice.attribute.iter().find(|attribute| attribute.name() == "then_branch").unwrap();
    then.g.as_ref().unwrap().node.iter().map(|node| node.op_type().to_string()).collect()
}

#[test]
fn moved_weights_become_those_that_layers_read() {
    let folder = Folder::new();
    let first = folder.write("first.npy", npy("|b1", "()", &[1]));
    let input = format!("first={first}");
    let paths = [true, false].map(|is_moved| {
        let path = folder.model(&format!("{is_moved}.onnx"), &branching(is_moved));
        let out = text(&folder.path(&format!("{is_moved}_out.onnx")));
        let report = run(&["quantize", &path, &out, "--mode", "dynamic", "--input", &input, "--json"]).json();
        let precisions = report["layers"].as_array().unwrap().iter();
        let precisions: Vec<_> = precisions.map(|layer| layer["precision"].as_str()).collect();
        assert_eq!(precisions, [Some("int8, per channel"); 3], "{report}");
        (path, out)
    });
    let [(float, moved), (_, plain)] = &paths;
    let moves = ["Slice", "Concat", "Unsqueeze", "Identity", "Transpose"];
    assert!(moves.iter().all(|operator| operators(float).iter().any(|found| found == operator)));
    let left = operators(moved);
    assert!(!left.iter().any(|found| moves.contains(&found.as_str())), "{left:?}");
    assert_eq!(left, operators(plain));
    let same = run(&["quantize", moved, plain, "--compare", "--input", &input, "--json"]).json();
    assert_eq!(same["checked"]["relative_error"], 0.0, "{same}");
    let error = run(&["quantize", float, moved, "--compare", "--input", &input, "--json"]).json();
    let error = error["checked"]["relative_error"].as_f64().unwrap();
    assert!(0.0 < error && error < 0.05, "{error}");
}

#[test]
fn weights_that_others_read_stay_for_them() {
    let folder = Folder::new();
    let turned = |name: &str| node("Transpose", &["M"], &[name]);
    let nodes = vec![
        turned("turned"),
        node("MatMul", &["x", "turned"], &["y"]),
        node("Relu", &["turned"], &["z"]),
        // Larger than what it is made of.
        with(node("Concat", &["M", "M"], &["twice"]), int_attribute("axis", 0)),
        node("MatMul", &["x", "twice"], &["t"]),
    ];
    let weights = vec![floats("M", &[16, 16], &numbers(256, 1.0))];
    let outputs = ["y", "z", "t"].map(|name| open_value(name, 1)).to_vec();
    let inputs = vec![value("x", 1, &["3", "16"])];
    let mut wide = graph(nodes, inputs, outputs, weights);
    wide.input = vec![value("x", 1, &["3", "16"])];
    wide.node[4].input[0] = "wide".to_string();
    wide.input.push(value("wide", 1, &["3", "32"]));
    let path = folder.model("model.onnx", &model(wide));
    let out = text(&folder.path("out.onnx"));
    let report = run(&["quantize", &path, &out, "--mode", "dynamic", "--json"]).json();
    let layers = report["layers"].as_array().unwrap();
    assert_eq!(layers[0]["precision"], "int8, per channel", "{report}");
    assert_eq!(layers[1]["kept"], "its weight is computed", "{report}");
    let outputs = report["outputs"].as_array().unwrap();
    let errors: Vec<f64> = outputs.iter().map(|output| output["relative_error"].as_f64().unwrap()).collect();
    assert!(errors[0] > 0.0 && errors[0] < 0.05 && errors[1..] == [0.0, 0.0], "{errors:?}");
}
