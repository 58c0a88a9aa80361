//! Damaged models load or are errors; nothing panics, hangs or takes memory without bound.

use crate::onnx_support::*;
use bytes::Bytes;
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::*;
use ort_core::onnx::{Source, load, to_proto};
use proptest::prelude::*;
use prost::Message;

/// A model with a bit of everything: weights in three forms, a subgraph, a function, constants,
/// types.
fn sample() -> ModelProto {
    let body = graph(vec![node("Pair", &["x", "w"], &["i"]), node("Pair", &["i", "a"], &["r"])], &[], &["r"]);
    let value = AttributeProto { ints: vec![4, 5], ..attribute("value_ints", AttributeType::Ints) };
    let call = NodeProto { domain: Some("local".into()), ..node("F", &["a", "v"], &["z"]) };
    let nodes = vec![
        with(node("Constant", &[], &["c"]), value),
        node("Identity", &["w"], &["v"]),
        node("Pair", &["x", "w"], &["a"]),
        with(node("Run", &["c"], &["y"]), graph_attribute("body", body)),
        call,
    ];
    let mut main = graph(nodes, &["x"], &["y", "z"]);
    let mut typed = weight("t", &[]);
    (typed.raw_data, typed.dims, typed.float_data) = (None, vec![2], vec![1.0, 2.0]);
    let mut indices = weight("", &[]);
    (indices.raw_data, indices.data_type, indices.dims, indices.int64_data) =
        (None, Some(7), vec![1], vec![3]);
    let sparse =
        SparseTensorProto { values: Some(weight("s", &[1.0])), indices: Some(indices), dims: vec![2, 3] };
    main.initializer = vec![weight("w", &[9.0]), typed];
    main.sparse_initializer = vec![sparse];
    let function = FunctionProto {
        name: Some("F".into()),
        domain: Some("local".into()),
        input: vec!["a".into(), "b".into()],
        output: vec!["r".into()],
        node: vec![with(node("Pair", &["a", "b"], &["r"]), reference("alpha", "s", AttributeType::Float))],
        attribute_proto: vec![AttributeProto { f: Some(0.5), ..attribute("s", AttributeType::Float) }],
        opset_import: vec![opset(TEST, 3)],
        ..FunctionProto::default()
    };
    let mut model = model_of(main);
    model.functions = vec![function];
    model
}

#[test]
fn the_sample_itself_loads() {
    let loaded = load(&Source::from_bytes(sample().encode_to_vec())).unwrap();
    assert_eq!(loaded.graph.nodes.len(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damage_is_an_error_or_harmless(edits in prop::collection::vec((any::<prop::sample::Index>(), 0u8..6, any::<u8>()), 1..6)) {
        let mut bytes = sample().encode_to_vec();
        for (place, kind, byte) in edits {
            let at = place.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes[at] ^= 1 << (byte % 8),
                2 => { bytes.remove(at); }
                3 => bytes.insert(at, byte),
                4 => bytes[at] = bytes[at].wrapping_add(1),
                // Bytes of one place at another: fields appear twice or in the wrong message.
                _ => {
                    let part = bytes[at..bytes.len().min(at + usize::from(byte % 32))].to_vec();
                    bytes.splice(at..at, part);
                }
            }
        }
        if let Ok(loaded) = load(&Source::from_bytes(Bytes::from(bytes))) {
            prop_assert!(to_proto(&loaded.graph, &loaded.info).is_ok());
        }
    }
}
