//! Run-time tensors that do not fit the attributes of operators on quantized weights, which the
//! model leaves open: typed errors, whatever is wrong.

use crate::support::session;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{DType, Error, ErrorKind, Result, Tensor, Value};

/// A tensor as text with the value of all elements, `uint8[4, 2, 16]=3`; empty for an input left
/// out.
type Given = &'static str;

fn parse(text: Given) -> Result<(DType, Tensor)> {
    let (head, fill) = text.split_once("]=").expect("a fill");
    let (dtype, sizes) = head.split_once('[').expect("a shape");
    let shape: Vec<usize> =
        sizes.split(", ").filter(|size| !size.is_empty()).map(|size| size.parse().expect("a size")).collect();
    let (count, fill): (usize, i64) = (shape.iter().product(), fill.parse().expect("a number"));
    let dtype = DType::from_name(dtype).expect("a type");
    let tensor = match dtype {
        DType::F32 => Tensor::from_vec(&shape, vec![fill as f32; count]),
        DType::U8 => Tensor::from_vec(&shape, vec![fill as u8; count]),
        DType::I8 => Tensor::from_vec(&shape, vec![fill as i8; count]),
        DType::I32 => Tensor::from_vec(&shape, vec![fill as i32; count]),
        DType::I64 => Tensor::from_vec(&shape, vec![fill; count]),
        other => panic!("no test has {other}"),
    }?;
    Ok((dtype, tensor))
}

/// Runs one node whose inputs have only their ranks in the model.
fn run(op: &str, attrs: &[(&str, i64)], given: &[Given]) -> Result<()> {
    let mut builder = GraphBuilder::new("one node");
    let (mut ids, mut inputs): (Vec<Option<ValueId>>, Vec<(String, Value)>) = Default::default();
    for (index, text) in given.iter().enumerate() {
        if text.is_empty() {
            ids.push(None);
            continue;
        }
        let ((dtype, tensor), name) = (parse(text)?, format!("x{index}"));
        let dims: Vec<String> = (0..tensor.shape().len()).map(|axis| format!("{name}_{axis}")).collect();
        let dims: Vec<&str> = dims.iter().map(String::as_str).collect();
        ids.push(Some(builder.input(&name, dtype, &dims)));
        inputs.push((name, tensor.into()));
    }
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (*name, Attribute::Int(*value))).collect();
    let outputs = builder.add(("com.microsoft", op), &ids, &attrs, 1, Vec::new())?;
    let session = session(builder.finish(&outputs)?)?;
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    session.run(&inputs).map(|_| ())
}

const NBITS: &[(&str, i64)] = &[("K", 40), ("N", 3), ("block_size", 16)];
const GATHER: &[(&str, i64)] = &[("block_size", 16), ("bits", 8)];
const A: Given = "float[2, 40]=1";
const B: Given = "uint8[3, 3, 8]=17";
const SCALES: Given = "float[3, 3]=1";
const LSTM_X: Given = "float[2, 1, 3]=1";
const LSTM_W: Given = "int8[1, 3, 8]=1";
const LSTM_R: Given = "int8[1, 2, 8]=1";
const SCALE: Given = "float[1]=1";
const ZERO: Given = "int8[1]=0";

#[test]
fn what_does_not_fit_is_a_typed_error() -> Result<()> {
    // operator, attributes, inputs; the first of each operator fits
    let cases: &[(&str, &[(&str, i64)], &[Given])] = &[
        ("MatMulNBits", NBITS, &[A, B, SCALES, "uint8[3, 2]=0", "int32[40]=2", "float[3]=1"]),
        ("MatMulNBits", NBITS, &["float[2, 41]=1", B, SCALES]),
        ("MatMulNBits", NBITS, &["float[0]=1", B, SCALES]),
        ("MatMulNBits", NBITS, &[A, "uint8[3, 3, 7]=0", SCALES]),
        ("MatMulNBits", NBITS, &[A, "uint8[0, 3, 8]=0", SCALES]),
        ("MatMulNBits", NBITS, &[A, "uint8[72]=0", "float[2, 3]=1"]),
        ("MatMulNBits", NBITS, &[A, B, SCALES, "uint8[3, 3]=0"]),
        ("MatMulNBits", NBITS, &[A, B, SCALES, "float[3, 2]=0"]),
        ("MatMulNBits", NBITS, &[A, B, SCALES, "", "int32[39]=0"]),
        ("MatMulNBits", NBITS, &[A, B, SCALES, "", "int32[40]=3"]),
        ("MatMulNBits", NBITS, &[A, B, SCALES, "", "int32[40]=-1"]),
        ("MatMulNBits", NBITS, &[A, B, SCALES, "", "int32[40]=-2147483648"]),
        ("MatMulNBits", NBITS, &[A, B, SCALES, "", "", "float[2]=1"]),
        ("MatMulNBits", &[("K", 1 << 62), ("N", 1 << 62), ("block_size", 16)], &[A, B, SCALES]),
        ("MatMulNBits", &[("K", 40), ("N", 3), ("block_size", 16), ("bits", 64)], &[A, B, SCALES]),
        ("GatherBlockQuantized", GATHER, &["uint8[4, 20]=1", "int64[3]=9", "float[4, 2]=1", "uint8[4, 2]=0"]),
        ("GatherBlockQuantized", GATHER, &["uint8[4, 20]=1", "int64[3]=1", "float[4, 1]=1"]),
        ("GatherBlockQuantized", GATHER, &["uint8[4, 20]=1", "int64[3]=1", "float[1, 2]=1"]),
        ("GatherBlockQuantized", GATHER, &["uint8[4, 20]=1", "int64[3]=1", "float[2]=1"]),
        ("GatherBlockQuantized", GATHER, &["uint8[4, 20]=1", "int64[3]=1", "float[4, 2]=1", "uint8[4, 1]=0"]),
        ("GatherBlockQuantized", GATHER, &["uint8[20]=1", "int64[3]=1", "float[2]=1"]),
        ("GatherBlockQuantized", &[("bits", 0)], &["uint8[4, 20]=1", "int64[3]=1", "float[4, 2]=1"]),
        ("GatherBlockQuantized", &[("block_size", -16)], &["uint8[4, 20]=1", "int64[3]=1", "float[4, 2]=1"]),
        ("DynamicQuantizeMatMul", &[], &[A, "int8[40, 3]=1", "float[3]=1", "int8[3]=0", "float[3]=1"]),
        ("DynamicQuantizeMatMul", &[], &[A, "int8[39, 3]=1", "float[3]=1"]),
        ("DynamicQuantizeMatMul", &[], &[A, "int8[40, 3]=1", "float[2]=1"]),
        ("DynamicQuantizeMatMul", &[], &[A, "int8[40, 3]=1", "float[3]=1", "int8[2]=0"]),
        ("MatMulIntegerToFloat", &[], &["int8[2, 4]=1", "int8[4, 3]=1", SCALE, "float[3]=1", ZERO]),
        ("MatMulIntegerToFloat", &[], &["int8[2, 4]=1", "int8[4, 3]=1", "float[3]=1", SCALE]),
        ("MatMulIntegerToFloat", &[], &["int8[2, 4]=1", "int8[4, 3]=1", SCALE, SCALE, "int8[2]=0"]),
        ("QGemm", &[], &["int8[2, 4]=1", SCALE, ZERO, "int8[4, 3]=1", SCALE, ZERO, "int32[2, 1]=1"]),
        ("QGemm", &[("transA", 1)], &["int8[2, 4]=1", SCALE, ZERO, "int8[4, 3]=1", SCALE, ZERO]),
        ("QGemm", &[], &["int8[2, 4]=1", SCALE, ZERO, "int8[4, 3]=1", SCALE, ZERO, "int32[4, 3]=1"]),
        ("QGemm", &[], &["int8[2, 4]=1", "float[2]=1", ZERO, "int8[4, 3]=1", SCALE, ZERO]),
        (
            "DynamicQuantizeLSTM",
            &[],
            &[LSTM_X, LSTM_W, LSTM_R, "", "int32[1]=2", "", "", "", SCALE, ZERO, SCALE, "int8[1, 8]=0"],
        ),
        (
            "DynamicQuantizeLSTM",
            &[],
            &[LSTM_X, LSTM_W, LSTM_R, "", "int32[1]=3", "", "", "", SCALE, ZERO, SCALE, ZERO],
        ),
        (
            "DynamicQuantizeLSTM",
            &[],
            &[LSTM_X, "int8[1, 4, 8]=1", LSTM_R, "", "", "", "", "", SCALE, ZERO, SCALE, ZERO],
        ),
        (
            "DynamicQuantizeLSTM",
            &[],
            &[LSTM_X, LSTM_W, "int8[1, 8, 2]=1", "", "", "", "", "", SCALE, ZERO, SCALE, ZERO],
        ),
        (
            "DynamicQuantizeLSTM",
            &[],
            &[LSTM_X, LSTM_W, LSTM_R, "", "", "", "", "", "float[8]=1", ZERO, SCALE, ZERO],
        ),
        (
            "DynamicQuantizeLSTM",
            &[],
            &[LSTM_X, LSTM_W, LSTM_R, "", "", "", "", "", SCALE, ZERO, SCALE, "int8[0]=0"],
        ),
    ];
    let mut before = "";
    for (op, attrs, given) in cases {
        let result = run(op, attrs, given);
        if *op != before {
            before = op;
            result.map_err(|problem: Error| {
                Error::new(ErrorKind::Fail, format!("{op} of {given:?} is refused: {problem}"))
            })?;
            continue;
        }
        let problem =
            result.err().unwrap_or_else(|| panic!("{op} of {given:?} with {attrs:?} is not refused"));
        let kinds =
            [ErrorKind::Fail, ErrorKind::InvalidGraph, ErrorKind::InvalidArgument, ErrorKind::OutOfMemory];
        assert!(kinds.contains(&problem.kind()), "{op} of {given:?}: {:?} {problem}", problem.kind());
        assert!(!problem.to_string().contains("panicked"), "{op} of {given:?}: {problem}");
    }
    Ok(())
}
