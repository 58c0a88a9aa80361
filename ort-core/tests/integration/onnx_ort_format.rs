//! Models in ORT format: the same as the ONNX models that ONNX Runtime saved beside them, and
//! errors if they are damaged. `data/ort_format.py` made the files.

use std::path::Path;

use ort_core::ErrorKind::{Fail, InvalidGraph};
use ort_core::ir::{Attribute, Graph, Subgraph, ValueId};
use ort_core::onnx::{FileAccess, LoadedModel, ModelInfo, Source, load};
use ort_core::tensor::Tensor;
use ort_core::{Limits, Result};

const KINDS: &[u8] = include_bytes!("../data/ort_format/kinds.ort");
const MAPS: &[u8] = include_bytes!("../data/ort_format/maps.ort");

fn loaded(bytes: &[u8]) -> Result<LoadedModel> {
    load(&Source::from_bytes(bytes.to_vec()))
}

/// The inputs, outputs, nodes and constants of a graph and of its subgraphs. ONNX Runtime orders
/// attributes and subgraphs at random, and loses the sign of zero in ORT format.
fn facts(graph: &Graph) -> Vec<String> {
    let name = |id: &ValueId| graph.value(*id).name.to_string();
    let names = |ids: &[Option<ValueId>]| -> Vec<_> { ids.iter().map(|id| id.as_ref().map(name)).collect() };
    let inputs = graph.inputs.iter().map(|&id| format!("input {} {:?}", name(&id), graph.value(id).ty));
    let outputs = graph.outputs.iter().map(|id| format!("output {}", name(id)));
    let mut facts: Vec<String> = inputs.chain(outputs).collect();
    for node in &graph.nodes {
        let mut attributes: Vec<String> = node.attrs.iter().map(attribute).collect();
        attributes.sort();
        let (from, to) = (names(&node.inputs), names(&node.outputs));
        facts.push(format!("{to:?} = {} {from:?} {attributes:?}", node.spec.name));
        let mut subgraphs: Vec<&Subgraph> = node.subgraphs.iter().collect();
        subgraphs.sort_by_key(|sub| sub.attr);
        facts.extend(subgraphs.into_iter().flat_map(|sub| self::facts(&sub.graph)));
    }
    let mut constants: Vec<String> =
        graph.constants.iter().map(|(id, tensor)| format!("{} {}", name(id), content(tensor))).collect();
    constants.sort();
    facts.extend(constants);
    facts
}

fn attribute((name, value): (&str, &Attribute)) -> String {
    match value {
        Attribute::Tensor(tensor) => format!("{name} {}", content(tensor)),
        Attribute::Float(value) => format!("{name} {}", value + 0.0),
        value => format!("{name} {value:?}"),
    }
}

fn content(tensor: &Tensor) -> String {
    let shape = tensor.shape();
    match tensor.strings() {
        Ok(strings) => format!("{shape:?} {strings:?}"),
        Err(_) => format!("{:?} {shape:?} {:?}", tensor.dtype(), tensor.bytes()),
    }
}

#[test]
fn a_model_is_the_same_in_both_formats() {
    let pairs = [
        (KINDS, &include_bytes!("../data/ort_format/kinds.onnx")[..], 15),
        (MAPS, &include_bytes!("../data/ort_format/maps.onnx")[..], 1),
    ];
    for (ort, onnx, nodes) in pairs {
        let (ort, onnx) = (loaded(ort).unwrap(), loaded(onnx).unwrap());
        assert_eq!(ort.graph.nodes.len(), nodes);
        assert_eq!(facts(&ort.graph), facts(&onnx.graph));
        let sorted = |info: &ModelInfo| {
            let mut info = info.clone();
            info.opsets.sort();
            info.metadata.sort();
            info.initializers.sort();
            info.graph_name = String::new();
            // ORT format has the types that ONNX Runtime inferred.
            info.declared_outputs.clear();
            info
        };
        assert_eq!(sorted(&ort.info), sorted(&onnx.info));
    }
}

#[test]
fn weights_stay_in_the_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/ort_format/kinds.ort");
    let source = Source::open(path, FileAccess::default()).unwrap();
    assert!(source.is_ort_format() && source.mapping().is_some());
    let file = source.bytes().clone();
    let graph = load(&source).unwrap().graph;
    for name in ["w", "shape", "most"] {
        let weight = graph.constants.iter().find(|(id, _)| &*graph.value(**id).name == name).unwrap().1;
        assert!(file.as_ptr_range().contains(&weight.bytes().unwrap().as_ptr()), "{name}");
    }
}

#[test]
fn damage_is_an_error_or_harmless() {
    for whole in [KINDS, MAPS] {
        for length in (0..whole.len()).step_by(64) {
            assert!(loaded(&whole[..length]).is_err(), "{length}");
        }
        // Each byte after the identifier becomes another one: offsets, lengths, kinds and texts.
        for place in 8..whole.len() {
            let mut bytes = whole.to_vec();
            bytes[place] = [0, 1, 0x7f, 0xff, bytes[place].wrapping_add(4)][place % 5];
            let _ = loaded(&bytes);
        }
        // A linear congruential generator of Knuth's MMIX.
        let mut state = 1u64;
        for _ in 0..2000 {
            let mut bytes = whole.to_vec();
            for _ in 0..3 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let place = (state >> 33) as usize % bytes.len();
                bytes[place] = (state >> 25) as u8;
            }
            let _ = loaded(&bytes);
        }
    }
}

#[test]
fn what_is_wrong_is_said() {
    let mut huge_root = KINDS.to_vec();
    huge_root[1] = 0xff;
    let versioned = |version: &str, model: &[usize]| {
        let mut file = Writer::session(version);
        file.table(model);
        file.0
    };
    let (newer, huge) = (versioned("7", &[]), versioned("99999999999999999999", &[]));
    let (old, no_graph) = (versioned("4", &[]), versioned("any", &[]));
    let mut no_opsets = Writer::file();
    no_opsets.table(&[]);
    let cases: &[(&str, &[u8], &str)] = &[
        ("a version of the future", &newer, "The ORT format model version [7] is not supported"),
        ("a huge version", &huge, "The ORT format model version [9999"),
        ("an old version, and no graph", &old, "Graph is null. Invalid ORT format model"),
        ("no number as version, and no graph", &no_graph, "Graph is null. Invalid ORT format model"),
        ("no operator sets", &no_opsets.0, "Model must have opset imports. Invalid ORT format model"),
        ("nothing else", b"\x08\0\0\0ORTM", "ORT model verification failed"),
        ("zeros", &[&b"\x18\0\0\0ORTM"[..], &[0; 64]].concat(), "Serialized version info is null"),
        ("cut short", &KINDS[..300], "ORT model verification failed"),
        ("root out of the file", &huge_root, "ORT model verification failed"),
    ];
    for (name, bytes, words) in cases {
        let error = loaded(bytes).map(drop).unwrap_err();
        assert_eq!(error.kind(), Fail, "{name}: {error}");
        assert!(error.to_string().contains(words), "{name}: {error}");
    }
}

/// A file that is written from its start: fields are placed in order, offsets are filled in later.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, value: usize) -> usize {
        self.0.extend((value as u32).to_le_bytes());
        self.0.len() - 4
    }

    /// Sets the offset at `place` to lead to the end of what is written.
    fn here(&mut self, place: usize) {
        let offset = (self.0.len() - place) as u32;
        self.0[place..place + 4].copy_from_slice(&offset.to_le_bytes());
    }

    /// Writes a table with these fields of 4 bytes; returns the places of the fields.
    fn table(&mut self, fields: &[usize]) -> Vec<usize> {
        let count = fields.iter().max().map_or(0, |most| most + 1);
        let length = 4 + 2 * count;
        let mut list = vec![0u16; 2 + count];
        list[0] = length as u16;
        for (index, &field) in fields.iter().enumerate() {
            list[2 + field] = 4 + 4 * index as u16;
        }
        // The list of fields lies after the table.
        let size = 4 + 4 * fields.len();
        self.0.extend((-(size as i32)).to_le_bytes());
        let places = fields.iter().map(|_| self.u32(0)).collect();
        self.0.extend(list.iter().flat_map(|entry| entry.to_le_bytes()));
        places
    }

    fn text(&mut self, text: &str) {
        self.u32(text.len());
        self.0.extend(text.as_bytes());
    }

    /// Starts a file up to its model.
    fn session(version: &str) -> Writer {
        let mut file = Writer::default();
        file.u32(0);
        file.0.extend(b"ORTM");
        file.here(0);
        let session = file.table(&[0, 1]);
        file.here(session[0]);
        file.text(version);
        file.here(session[1]);
        file
    }

    /// Starts a file up to the graph of its model.
    fn file() -> Writer {
        let mut file = Writer::session("6");
        let model = file.table(&[7]);
        file.here(model[0]);
        file
    }

    /// Writes a vector of `count` offsets that all lead to what comes next.
    fn shared(&mut self, count: usize) {
        self.u32(count);
        let places: Vec<usize> = (0..count).map(|_| self.u32(0)).collect();
        places.into_iter().for_each(|place| self.here(place));
    }
}

#[test]
fn graphs_that_share_their_bodies_are_bounded() {
    // Each graph has 100 nodes that are one, each node 100 attributes that are one, whose graph is
    // the next: 10,000 times as many graphs at each level.
    let mut file = Writer::file();
    for _ in 0..20 {
        let graph = file.table(&[2]);
        file.here(graph[0]);
        file.shared(100);
        let node = file.table(&[10]);
        file.here(node[0]);
        file.shared(100);
        let attribute = file.table(&[2, 7]);
        // The kind of a graph.
        file.0[attribute[0]] = 5;
        file.here(attribute[1]);
    }
    file.table(&[]);
    let limits = Limits { bytes: 64 << 20, ..Limits::default() };
    let error = load(&Source::from_bytes(file.0).limits(limits)).map(drop).unwrap_err();
    assert!(error.to_string().contains("too much memory"), "{error}");
}

#[test]
fn strings_that_are_one_are_bounded() {
    // A tensor of 100,000 strings, which are the same 1 MB.
    let mut file = Writer::file();
    let graph = file.table(&[0]);
    file.here(graph[0]);
    file.shared(1);
    let tensor = file.table(&[3, 5]);
    // The type of strings.
    file.0[tensor[0]] = 8;
    file.here(tensor[1]);
    file.shared(100_000);
    file.text(&"x".repeat(1 << 20));
    let error = loaded(&file.0).map(drop).unwrap_err();
    assert!(error.to_string().contains("too much memory"), "{error}");
}

#[test]
fn offsets_of_zero_are_bounded() {
    // A file of zeros but for the root: each offset leads to itself, each table is empty.
    for field in 0..10 {
        let mut file = Writer::session("6");
        file.table(&[7]);
        assert!(loaded(&file.0).is_err());
        let mut file = Writer::file();
        file.table(&[field]);
        file.0.extend([0; 64]);
        assert!(loaded(&file.0).is_err(), "{field}");
    }
}

#[test]
fn graphs_inside_one_another_are_bounded() {
    let mut file = Writer::file();
    for _ in 0..100_000 {
        let graph = file.table(&[2]);
        file.here(graph[0]);
        file.shared(1);
        let node = file.table(&[10]);
        file.here(node[0]);
        file.shared(1);
        let attribute = file.table(&[2, 7]);
        file.0[attribute[0]] = 5;
        file.here(attribute[1]);
    }
    file.table(&[]);
    let error = loaded(&file.0).map(drop).unwrap_err();
    assert_eq!(error.kind(), InvalidGraph, "{error}");
    assert!(error.to_string().contains("nested too deep"), "{error}");
}
