//! What a session says it holds is what the process grows by.
#![cfg(target_os = "linux")]

use crate::support::*;
use ort_runtime::Tensor;
use ort_runtime::onnx::proto::{ModelProto, TensorProto};
use ort_runtime::onnx::tensor_to_proto;

const MIB: u64 = 1 << 20;

/// The code that runs, the graph, the kernels' tables and the stacks of threads, and what the heap
/// keeps between: no more than so much, most of it code, which unoptimised builds have two or three
/// times as much of.
const BESIDES: u64 = 16 * MIB;

fn weights(name: &str, shape: &[usize]) -> TensorProto {
    let count = shape.iter().product();
    let elements: Vec<f32> = (0..count).map(|number| (number % 13) as f32).collect();
    tensor_to_proto(name, &Tensor::from_vec(shape, elements).unwrap()).unwrap()
}

/// A product with 64 MiB of weights, which are packed.
fn packed() -> ModelProto {
    let nodes = vec![node("MatMul", &["x", "w"], &["p"]), node("Relu", &["p"], &["y"])];
    let (x, y) = (value("x", 1, &["n", "4096"]), value("y", 1, &["n", "4096"]));
    model(graph(nodes, vec![x], vec![y], vec![weights("w", &[4096, 4096])]))
}

/// A sum with 64 MiB of weights, which are read where the file is mapped: bytes, which may be
/// anywhere in it.
fn mapped() -> ModelProto {
    let nodes = vec![node("Add", &["x", "w"], &["s"]), node("ReduceMax", &["s"], &["y"])];
    let (x, y) = (value("x", 2, &["16384"]), value("y", 2, &["1", "1"]));
    let bytes: Vec<u8> = (0..4096 * 16384).map(|number| (number % 13) as u8).collect();
    let weights = tensor_to_proto("w", &Tensor::from_vec(&[4096, 16384], bytes).unwrap()).unwrap();
    model(graph(nodes, vec![x], vec![y], vec![weights]))
}

/// Activations of 64 MiB each.
fn activations() -> ModelProto {
    let nodes = vec![
        node("Mul", &["x", "c"], &["wide"]),
        node("Softmax", &["wide"], &["s"]),
        node("Transpose", &["s"], &["t"]),
        node("ReduceMax", &["t"], &["y"]),
    ];
    let (x, y) = (value("x", 1, &["n", "1"]), value("y", 1, &["1", "1"]));
    model(graph(nodes, vec![x], vec![y], vec![weights("c", &[1, 4096])]))
}

/// Values whose size only the run tells.
fn dynamic() -> ModelProto {
    let nodes = vec![
        node("Add", &["x", "c"], &["wide"]),
        node("NonZero", &["wide"], &["p"]),
        node("Mul", &["p", "p"], &["s"]),
        node("ReduceMax", &["s"], &["y"]),
    ];
    let (x, y) = (value("x", 1, &["n", "1"]), value("y", 7, &["1", "1"]));
    model(graph(nodes, vec![x], vec![y], vec![weights("c", &[1, 1024])]))
}

#[test]
fn the_parts_add_up_to_what_is_resident() {
    let folder = Folder::new();
    let cases = [
        ("packed", packed(), &["--dim", "n=256"][..], "weights_packed"),
        ("mapped", mapped(), &[], "weights_mapped"),
        ("activations", activations(), &["--dim", "n=4096"], "slabs"),
        ("dynamic", dynamic(), &["--dim", "n=4096"], "dynamic"),
    ];
    for (name, proto, dims, largest) in cases {
        let path = folder.model(&format!("{name}.onnx"), &proto);
        drop(proto);
        let json =
            run(&[&["bench", &path, "--json", "--seconds", "0", "--threads", "1"], dims].concat()).json();
        let number = |name: &str| json[name].as_u64().unwrap();
        let part = |name: &str| json["memory"][name].as_u64().unwrap();
        let grown = (number("rss_anon") + number("rss_file")).saturating_sub(number("baseline_rss"));
        let total = part("total");
        let allowed = total / 20 + BESIDES;
        assert!(grown.abs_diff(total) <= allowed, "{name}: grew by {grown}, holds {total}: {json}");
        if largest != "dynamic" {
            assert!(part(largest) >= 60 * MIB, "{name}: {json}");
        }
        assert!(part("idle") <= total && part("arena") <= part("dynamic"), "{name}: {json}");
    }
}
