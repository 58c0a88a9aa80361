//! Tensors of every element type and form of storage, and values of every kind, against the `onnx`
//! package.

use std::collections::BTreeMap;

use bytes::Bytes;
use ort_core::dtype::DType;
use ort_core::ir::ValueType;
use ort_core::onnx::proto::{SparseTensorProto, TensorProto};
use ort_core::onnx::{
    ExternalData, sparse_from_proto, sparse_to_proto, tensor_from_proto, tensor_to_proto, value_from_bytes,
    value_to_bytes,
};
use ort_core::tensor::{MapKeys, Tensor, Value};
use ort_core::{ErrorKind, Result};
use prost::Message;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    tensors: Vec<Sample>,
    sparse: Vec<String>,
    values: BTreeMap<String, String>,
}

/// A tensor of seven elements in its typed field and as raw data, and its bytes.
#[derive(Deserialize)]
struct Sample {
    name: String,
    typed: String,
    raw: String,
    bytes: String,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../data/onnx_values.json")).unwrap()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn decode(hex: &str) -> TensorProto {
    TensorProto::decode(Bytes::from(from_hex(hex))).unwrap()
}

fn read(proto: TensorProto) -> Result<Tensor> {
    tensor_from_proto(proto, &mut ExternalData::unavailable())
}

#[test]
fn every_element_type_reads_from_both_forms_and_is_written_back() {
    let golden = golden();
    assert_eq!(golden.tensors.len(), DType::all().filter(|dtype| *dtype != DType::String).count());
    for sample in golden.tensors {
        for (form, hex) in [("typed", &sample.typed), ("raw", &sample.raw)] {
            let tensor = read(decode(hex)).unwrap_or_else(|error| panic!("{} {form}: {error}", sample.name));
            assert_eq!(tensor.bytes().unwrap().to_vec(), from_hex(&sample.bytes), "{} {form}", sample.name);
            assert_eq!(tensor.shape(), [7], "{} {form}", sample.name);
            let written = tensor_to_proto("t", &tensor).unwrap().encode_to_vec();
            assert_eq!(written, from_hex(&sample.raw), "{} {form} written back", sample.name);
        }
    }
}

#[test]
fn data_of_the_wrong_length_is_refused_in_every_type_and_form() {
    for sample in golden().tensors {
        for hex in [&sample.typed, &sample.raw] {
            for dims in
                [vec![6], vec![70], vec![], vec![7, 2], vec![-7], vec![0], vec![i64::MAX], vec![i64::MAX; 3]]
            {
                let proto = TensorProto { dims: dims.clone(), ..decode(hex) };
                // Six elements of two bits take as many bytes as seven.
                let same_room = dims == [6] && matches!(sample.name.as_str(), "UINT2" | "INT2");
                let error = match read(proto) {
                    Err(error) => error,
                    Ok(_) if same_room => continue,
                    Ok(_) => panic!("{} took {dims:?}", sample.name),
                };
                assert_eq!(error.kind(), ErrorKind::Fail, "{} {dims:?}: {error}", sample.name);
            }
        }
    }
}

#[test]
fn entries_that_do_not_fit_are_refused() {
    let cases: &[(i32, i32, bool)] = &[
        (2, 255, true),
        (2, 256, false),
        (3, -128, true),
        (3, -129, false),
        (3, 255, true),
        (4, 65535, true),
        (4, 65536, false),
        (10, 0x3c00, true),
        (10, 0x1_0000, false),
        (9, 2, true),
        (27, 63, true),
        (27, 64, false),
        (27, -1, false),
    ];
    for &(data_type, entry, fits) in cases {
        let proto = TensorProto {
            data_type: Some(data_type),
            dims: vec![1],
            int32_data: vec![entry],
            ..TensorProto::default()
        };
        assert_eq!(read(proto).is_ok(), fits, "{entry} as type {data_type}");
    }
    let wide = TensorProto {
        data_type: Some(12),
        uint64_data: vec![1 << 32],
        dims: vec![1],
        ..TensorProto::default()
    };
    assert!(read(wide).is_err());
}

#[test]
fn a_bool_is_zero_or_one_whatever_the_file_has() {
    let raw = TensorProto {
        data_type: Some(9),
        dims: vec![3],
        raw_data: Some(Bytes::from_static(&[0, 1, 200])),
        ..TensorProto::default()
    };
    assert_eq!(read(raw).unwrap().to_vec::<bool>().unwrap(), [false, true, true]);
}

#[test]
fn empty_tensors_need_no_data() {
    for sample in golden().tensors {
        let proto = TensorProto {
            data_type: decode(&sample.raw).data_type,
            dims: vec![0, 3],
            ..TensorProto::default()
        };
        assert_eq!(read(proto).unwrap().element_count(), 0, "{}", sample.name);
    }
}

#[test]
fn sparse_tensors_go_there_and_back() {
    for hex in golden().sparse {
        let wire = from_hex(&hex);
        let proto = SparseTensorProto::decode(wire.as_slice()).unwrap();
        let sparse = sparse_from_proto(proto, &mut ExternalData::unavailable()).unwrap();
        assert_eq!(sparse.to_dense().unwrap().to_vec::<f32>().unwrap(), [0.0, 1.0, 0.0, 0.0, 2.0, 3.0]);
        let back = sparse_to_proto("s", &sparse).unwrap();
        let again = sparse_from_proto(back, &mut ExternalData::unavailable()).unwrap();
        let dense = again.to_dense().unwrap();
        assert_eq!(dense.to_vec::<f32>().unwrap(), [0.0, 1.0, 0.0, 0.0, 2.0, 3.0]);
        let dense = Value::Tensor(dense).value_type();
        assert_eq!(
            Value::Sparse(Box::new(again)).value_type(),
            ValueType::Sparse(dense.as_tensor().unwrap().clone())
        );
    }
}

fn int64() -> ValueType {
    ValueType::tensor(DType::I64, None)
}

#[test]
fn values_of_every_kind_are_read_and_written_as_the_onnx_package_does() {
    let sequence = |element: ValueType| ValueType::Sequence(Box::new(element));
    let optional = |element: ValueType| ValueType::Optional(Box::new(element));
    let map = |key, value| ValueType::Map(key, Box::new(ValueType::tensor(value, None)));
    let types = [
        ("map(int64, float)", "m", map(DType::I64, DType::F32)),
        ("map(string, int64)", "m", map(DType::String, DType::I64)),
        ("optional(int64)", "o", optional(int64())),
        ("optional(none)", "o", optional(int64())),
        ("optional(sequence(int64))", "o", optional(sequence(int64()))),
        ("sequence(int64)", "s", sequence(int64())),
        ("sequence(sequence(int64))", "s", sequence(sequence(int64()))),
        ("tensor(string)", "t", ValueType::tensor(DType::String, None)),
    ];
    let golden = golden();
    assert_eq!(types.len(), golden.values.len());
    for (kind, name, ty) in types {
        let wire = from_hex(&golden.values[kind]);
        let value = value_from_bytes(Bytes::from(wire.clone()), &ty)
            .unwrap_or_else(|error| panic!("{kind}: {error}"));
        let back = value_to_bytes(name, &value).unwrap();
        // The order of fields on the wire carries no meaning, so what is read from both is
        // compared.
        let again = value_from_bytes(Bytes::from(back.clone()), &ty).unwrap();
        assert_eq!(format!("{again:?}"), format!("{value:?}"), "{kind}");
        assert_eq!(back.len(), wire.len(), "{kind}: {back:x?}");
    }
}

#[test]
fn contents_are_right() {
    let golden = golden();
    let read =
        |kind: &str, ty: &ValueType| value_from_bytes(from_hex(&golden.values[kind]).into(), ty).unwrap();
    let sequence = read("sequence(int64)", &ValueType::Sequence(Box::new(int64())));
    let elements = &sequence.sequence().unwrap().elements;
    assert_eq!(elements[1].tensor().unwrap().to_vec::<i64>().unwrap(), [3]);
    assert_eq!(elements[1].tensor().unwrap().shape(), [1, 1]);
    let Value::Map(map) = read("map(int64, float)", &ValueType::Map(DType::I64, Box::default())) else {
        panic!()
    };
    assert_eq!(map.keys, MapKeys::Ints(DType::I64, vec![7, 9]));
    assert_eq!(map.values.tensor().unwrap().to_vec::<f32>().unwrap(), [0.5, 1.5]);
    let Value::Optional(none) = read("optional(none)", &ValueType::Optional(Box::new(int64()))) else {
        panic!()
    };
    assert!(none.element.is_none() && none.element_type == int64());
    let strings = read("tensor(string)", &ValueType::Unknown);
    assert_eq!(strings.tensor().unwrap().strings().unwrap(), ["a", "", "é"]);
}

#[test]
fn damaged_values_are_errors() {
    let types = [
        int64(),
        ValueType::Sequence(Box::new(int64())),
        ValueType::Optional(Box::new(int64())),
        ValueType::Map(DType::I64, Box::default()),
    ];
    for (kind, hex) in golden().values {
        let wire = from_hex(&hex);
        for ty in &types {
            for length in 0..wire.len() {
                // Whatever comes out, nothing panics.
                let _ = value_from_bytes(Bytes::copy_from_slice(&wire[..length]), ty);
            }
            let mut endless = wire.clone();
            endless.extend([0xff; 12]);
            assert!(value_from_bytes(endless.into(), ty).is_err(), "{kind} as {ty}");
        }
    }
}
