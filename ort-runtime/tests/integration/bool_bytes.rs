//! Booleans are bytes, of which any but 0 is true: callers view the bytes of other libraries as
//! booleans.

use bytes::Bytes;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

fn bools(shape: &[usize], bytes: &'static [u8]) -> Result<Tensor> {
    Tensor::from_bytes(DType::Bool, shape, Bytes::from_static(bytes))
}

/// Runs one node with these inputs, all of which are the graph's.
fn run(op: &str, inputs: &[Tensor], attrs: &[(&str, Attribute)], outputs: usize) -> Result<Vec<Value>> {
    let mut builder = GraphBuilder::new("one");
    let mut ids: Vec<Option<ValueId>> = Vec::new();
    let mut given = Vec::new();
    for (index, tensor) in inputs.iter().enumerate() {
        let sizes: Vec<String> = tensor.shape().iter().map(usize::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        ids.push(Some(builder.input(&format!("x{index}"), tensor.dtype(), &sizes)));
        given.push((format!("x{index}"), Value::from(tensor.clone())));
    }
    let results = builder.add(("", op), &ids, attrs, outputs, Vec::new())?;
    let session = Session::builder(&Model::from_graph(builder.finish(&results)?)).threads(1).build()?;
    let given: Vec<(&str, Value)> =
        given.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    Ok(session.run(&given)?.into_iter().map(|(_, value)| value).collect())
}

/// Returns the elements of a boolean tensor as 0 and 1.
fn flags(value: &Value) -> Result<Vec<u8>> {
    Ok(value.tensor()?.view().bytes()?.iter().map(|byte| u8::from(*byte != 0)).collect())
}

fn ints(value: &Value) -> Result<Vec<i64>> {
    value.tensor()?.to_vec()
}

/// As `numpy.unique` of the same booleans as 0 and 1.
#[test]
fn unique_finds_two() -> Result<()> {
    let x = bools(&[6], &[2, 0, 255, 1, 0, 7])?;
    let results = run("Unique", &[x], &[], 4)?;
    assert_eq!(flags(&results[0])?, [0, 1]);
    assert_eq!(ints(&results[1])?, [1, 0]);
    assert_eq!(ints(&results[2])?, [1, 0, 1, 1, 0, 1]);
    assert_eq!(ints(&results[3])?, [2, 4]);
    let rows = bools(&[3, 2], &[2, 0, 0, 9, 1, 0])?;
    let results = run("Unique", &[rows], &[("axis", Attribute::Int(0))], 4)?;
    assert_eq!(flags(&results[0])?, [0, 1, 1, 0]);
    assert_eq!(ints(&results[2])?, [1, 0, 1]);
    Ok(())
}

#[test]
fn flags_of_nodes_are_true() -> Result<()> {
    let ones = Tensor::from_slice(&[64], &[1.0f32; 64])?;
    let ratio = Tensor::scalar(0.5f32)?;
    for (byte, dropped) in [(&[0u8], false), (&[2], true)] {
        let training = bools(&[], byte)?;
        let results = run("Dropout", &[ones.clone(), ratio.clone(), training], &[], 1)?;
        let values: Vec<f32> = results[0].tensor()?.to_vec()?;
        assert_eq!(values.contains(&0.0), dropped, "{byte:?}");
    }
    assert!(bools(&[1], &[4])?.view().to_scalar::<bool>()?);
    assert_eq!(bools(&[3], &[0, 1, 200])?.view().to_vec::<bool>()?, [false, true, true]);
    assert_eq!(bools(&[3], &[0, 1, 200])?.view().to_ints()?, [0, 1, 1]);
    Ok(())
}

/// Kernels that compute new elements write 0 and 1, whatever was in the memory before.
#[test]
fn computed_booleans_are_zeros_and_ones() -> Result<()> {
    let x = bools(&[1, 1, 2, 2], &[0, 2, 255, 1])?;
    let none = Tensor::from_slice(&[0], &[0f32; 0])?;
    let scales = Tensor::from_slice(&[4], &[1.0f32, 1.0, 2.0, 1.0])?;
    let attrs = [("mode", Attribute::String("linear".into()))];
    let results = run("Resize", &[x.clone(), none, scales], &attrs, 1)?;
    assert_eq!(results[0].tensor()?.view().bytes()?, [0, 1, 1, 1, 1, 1, 1, 1]);
    let grid = [-0.5f32, -0.5, 0.5, -0.5, -0.5, 0.5, 5.0, 5.0];
    let grid = Tensor::from_slice(&[1, 2, 2, 2], &grid)?;
    let attrs = [("mode", Attribute::String("nearest".into()))];
    let results = run("GridSample", &[x, grid], &attrs, 1)?;
    assert_eq!(flags(&results[0])?, [0, 1, 1, 0]);
    Ok(())
}
