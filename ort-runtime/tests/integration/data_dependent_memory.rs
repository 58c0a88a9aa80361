//! Kernels whose tables depend on attributes and elements: they are counted, and bounded.

use ort_runtime::ir::{Attribute, GraphBuilder, ValueType};
use ort_runtime::tensor::{MapKeys, MapValue};
use ort_runtime::{DType, ErrorKind, Model, Result, Session, Tensor, Value};

use crate::support::floats;

/// Pools the region of an image of 2 by 2 to 2 by 2.
fn align(region: [f32; 4], sampling_ratio: i64) -> Result<Vec<f32>> {
    let mut builder = GraphBuilder::new("align");
    let x = builder.input("x", DType::F32, &["1", "1", "2", "2"]);
    let regions = builder.input("regions", DType::F32, &["1", "4"]);
    let images = builder.constant(Tensor::from_vec(&[1], vec![0i64])?);
    let attributes = ["output_height", "output_width"].map(|name| (name, Attribute::Int(2)));
    let attributes = [&attributes[..], &[("sampling_ratio", Attribute::Int(sampling_ratio))]].concat();
    let y = builder.node("RoiAlign", &[x, regions, images], &attributes)?;
    let session = Session::builder(&Model::from_graph(builder.finish(&[y])?)).threads(1).build()?;
    let x = floats(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0])?;
    let outputs = session.run(&[("x", x.into()), ("regions", floats(&[1, 4], &region)?.into())])?;
    outputs[0].1.tensor()?.to_vec()
}

/// ONNX Runtime's results.
#[test]
fn a_region_has_as_many_samples_as_its_size_asks_for() -> Result<()> {
    let table = [
        ([0.0, 0.0, 9000.0, 9000.0], 0, [1.333_333_3e-6, 0.0, 0.0, 0.0]),
        ([0.0, 0.0, 1.0, 1.0], 3, [1.0, 1.25, 1.5, 1.75]),
    ];
    for (region, sampling_ratio, expected) in table {
        let found = align(region, sampling_ratio)?;
        for (found, expected) in found.iter().zip(expected) {
            let error = (found - expected).abs();
            assert!(error <= 1e-5 * expected.abs(), "{found} instead of {expected} of {region:?}");
        }
    }
    Ok(())
}

#[test]
fn regions_with_too_many_samples_are_refused() {
    let far = align([0.0, 0.0, 1e30, 2.0], 0).map_err(|problem| problem.to_string());
    assert!(far.is_err_and(|said| said.contains("expected at most 1048576")));
    let many = align([0.0, 0.0, 1.0, 1.0], 1 << 30).map_err(|problem| problem.to_string());
    assert!(many.is_err_and(|said| said.contains("sampling_ratio is 1073741824")));
}

/// Casts the map of 0 to 1.5 and of 3 to -2.25 to a row of `max_map` columns.
fn cast_map(to: &str, max_map: i64) -> Result<Tensor> {
    let mut builder = GraphBuilder::new("cast");
    let tensor = Box::new(ValueType::tensor(DType::F32, None));
    let x = builder.typed_input("x", ValueType::Map(DType::I64, tensor));
    let text = |value: &str| Attribute::String(value.to_owned());
    let attributes =
        [("map_form", text("SPARSE")), ("cast_to", text(to)), ("max_map", Attribute::Int(max_map))];
    let y = builder.add(("ai.onnx.ml", "CastMap"), &[Some(x)], &attributes, 1, Vec::new())?;
    let model = Model::from_graph(builder.finish(&y)?);
    let session = Session::builder(&model).threads(1).memory_limit(16 << 20).build()?;
    let values = Box::new(Value::Tensor(floats(&[2], &[1.5, -2.25])?));
    let map = Value::Map(MapValue { keys: MapKeys::Ints(DType::I64, vec![0, 3]), values });
    let outputs = session.run(&[("x", map)])?;
    outputs[0].1.tensor().cloned()
}

#[test]
fn a_row_of_a_map_counts_in_the_budget() -> Result<()> {
    assert_eq!(cast_map("TO_FLOAT", 5)?.to_vec::<f32>()?, [1.5, 0.0, 0.0, -2.25, 0.0]);
    assert_eq!(cast_map("TO_INT64", 2)?.to_vec::<i64>()?, [1, 0]);
    for to in ["TO_FLOAT", "TO_INT64", "TO_STRING"] {
        for columns in [1 << 22, 1 << 40] {
            let kind = cast_map(to, columns).map_err(|problem| problem.kind());
            assert_eq!(kind.err(), Some(ErrorKind::OutOfMemory), "{to} of {columns} columns");
        }
        // More than can be addressed.
        assert!(cast_map(to, i64::MAX).is_err());
    }
    Ok(())
}
