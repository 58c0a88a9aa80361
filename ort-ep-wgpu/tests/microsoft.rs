//! Quantized products, dynamic quantization and recurrent layers on the device against those of the
//! CPU.

mod support;

use ort_core::Result;
use ort_core::ir::{Attribute, GraphBuilder, ValueId};
use ort_core::session::Model;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{Tensor, Value};
use support::{assert_close, cpu, numbers, open, outputs};

/// How far floats may be off, of the largest.
const TOLERANCE: f32 = 1e-4;

/// One node; an input that is left out is none.
struct Case {
    domain: &'static str,
    op: &'static str,
    inputs: Vec<Option<Tensor>>,
    outputs: usize,
    attrs: Vec<(&'static str, Attribute)>,
}

/// A tensor of numbers without a pattern, times a factor.
fn floats(shape: &[usize], seed: usize, factor: f32) -> Result<Option<Tensor>> {
    let count = shape.iter().product();
    let values = numbers(count, seed).into_iter().map(|value| value * factor).collect();
    Tensor::from_vec(shape, values).map(Some)
}

/// A tensor of bytes without a pattern.
fn bytes(shape: &[usize], seed: usize) -> Result<Option<Tensor>> {
    let values = numbers(shape.iter().product(), seed).into_iter();
    let values: Vec<u8> = values.map(|value| ((value + 1.0) * 127.9) as u8).collect();
    Tensor::from_vec(shape, values).map(Some)
}

impl Case {
    /// The outputs of the device and of the CPU; none without an adapter.
    fn run(&self) -> Result<Option<[Vec<Value>; 2]>> {
        let Some(device) = open(&[]) else { return Ok(None) };
        let mut builder = GraphBuilder::new("one node");
        let (mut ids, mut given): (Vec<Option<ValueId>>, Vec<(String, Value)>) = Default::default();
        for (index, input) in self.inputs.iter().enumerate() {
            let Some(tensor) = input else {
                ids.push(None);
                continue;
            };
            let (name, shape) = (format!("x{index}"), tensor.shape().to_vec());
            let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            ids.push(Some(builder.input(&name, tensor.dtype(), &sizes)));
            given.push((name, tensor.clone().into()));
        }
        let results = builder.add((self.domain, self.op), &ids, &self.attrs, self.outputs, Vec::new())?;
        let model = Model::from_graph(builder.finish(&results)?);
        Ok(Some([outputs(&model, device, &given)?, outputs(&model, cpu()?, &given)?]))
    }

    /// Fails where floats differ by more than the tolerance.
    fn check_floats(&self, what: &str) -> Result<()> {
        let Some([actual, expected]) = self.run()? else { return Ok(()) };
        for (actual, expected) in actual.iter().zip(&expected) {
            assert_close(actual, expected, TOLERANCE, what)?;
        }
        Ok(())
    }
}

#[test]
fn products_with_narrow_weights() -> Result<()> {
    // rows, K, N, bits, block, packed zero points, bias
    let cases: [([usize; 5], bool, bool); 7] = [
        ([1, 256, 64, 4, 32], false, false),
        ([1, 100, 37, 4, 32], true, true),
        ([3, 129, 65, 8, 32], true, false),
        ([4, 50, 5, 2, 16], false, true),
        ([5, 96, 33, 4, 16], true, true),
        ([17, 200, 130, 8, 64], false, false),
        ([70, 300, 70, 4, 128], true, true),
    ];
    for ([rows, k, n, bits, block], zeros, bias) in cases {
        let blocks = k.div_ceil(block);
        let names = ["K", "N", "bits", "block_size"].into_iter();
        let attrs = names.zip([k, n, bits, block]).map(|(name, value)| (name, Attribute::Int(value as i64)));
        let case = Case {
            domain: MICROSOFT,
            op: "MatMulNBits",
            inputs: vec![
                floats(&[rows, k], 1, 1.0)?,
                bytes(&[n, blocks, block * bits / 8], 2)?,
                floats(&[n, blocks], 3, 0.1)?,
                if zeros { bytes(&[n, (blocks * bits).div_ceil(8)], 4)? } else { None },
                None,
                if bias { floats(&[n], 5, 1.0)? } else { None },
            ],
            outputs: 1,
            attrs: attrs.collect(),
        };
        case.check_floats(&format!("{rows} rows, K {k}, N {n}, {bits} bits, blocks of {block}"))?;
    }
    Ok(())
}

#[test]
fn codes_over_the_range_of_the_data() -> Result<()> {
    for count in [1, 5, 4096, 4097, 300_001] {
        let input = floats(&[count], count, 3.0)?;
        let case =
            Case { domain: "", op: "DynamicQuantizeLinear", inputs: vec![input], outputs: 3, attrs: vec![] };
        let Some([actual, expected]) = case.run()? else { return Ok(()) };
        assert_close(&actual[1], &expected[1], 1e-6, "the scale")?;
        for index in [0, 2] {
            let [actual, expected] =
                [&actual[index], &expected[index]].map(|value| value.tensor().and_then(|t| t.to_vec::<u8>()));
            for (actual, expected) in actual?.iter().zip(&expected?) {
                assert!(actual.abs_diff(*expected) <= 1, "{count}: {actual}, expected {expected}");
            }
        }
    }
    Ok(())
}

/// A layer of `gates` gates; sequences of several lengths where there are more than one.
fn layer(op: &'static str, gates: usize, sizes: [usize; 4], direction: &str, flag: i64) -> Result<Case> {
    let [steps, batch, depth, hidden] = sizes;
    let directions = if direction == "bidirectional" { 2 } else { 1 };
    let (rows, state) = (gates * hidden, [directions, batch, hidden]);
    let lengths: Vec<i32> = (0..batch).map(|sequence| (steps - sequence % steps) as i32).collect();
    let mut inputs = vec![
        floats(&[steps, batch, depth], 1, 1.0)?,
        floats(&[directions, rows, depth], 2, 0.5)?,
        floats(&[directions, rows, hidden], 3, 0.3)?,
        floats(&[directions, 2 * rows], 4, 0.5)?,
        if batch > 1 { Some(Tensor::from_vec(&[batch], lengths)?) } else { None },
        floats(&state, 5, 1.0)?,
    ];
    let mut attrs = vec![("direction", Attribute::String(direction.to_owned()))];
    match op {
        "LSTM" => {
            inputs.push(floats(&state, 6, 1.0)?);
            inputs.push(if flag == 1 { floats(&[directions, 3 * hidden], 7, 0.5)? } else { None });
        }
        "GRU" => attrs.push(("linear_before_reset", Attribute::Int(flag))),
        _ => {}
    }
    let outputs = if op == "LSTM" { 3 } else { 2 };
    Ok(Case { domain: "", op, inputs, outputs, attrs })
}

#[test]
fn recurrent_layers() -> Result<()> {
    let sizes = [[5, 1, 3, 4], [7, 5, 10, 17], [1, 4, 128, 64], [9, 9, 33, 70]];
    for (op, gates) in [("LSTM", 4), ("GRU", 3), ("RNN", 1)] {
        for sizes in sizes {
            for direction in ["forward", "reverse", "bidirectional"] {
                for flag in [0, 1] {
                    let case = layer(op, gates, sizes, direction, flag)?;
                    case.check_floats(&format!("{op} {sizes:?} {direction} {flag}"))?;
                }
            }
        }
    }
    Ok(())
}
