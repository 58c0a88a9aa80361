//! GEMM weights that a device loads as vectors: which of them are transposed, and that the results
//! remain those of the CPU.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder, ValueId};
use ort_core::session::{Model, Session};
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::tensor::Tensor;

use super::{assert_close, cpu, numbers};

/// GEMMs of `rows` rows with one weight.
struct WeightCase {
    ops: &'static [(&'static str, &'static str)],
    dtype: DType,
    rows: &'static [usize],
    /// The shape as stored.
    weight: [usize; 2],
    is_transposed: bool,
    /// Whether another node reads the weight, too.
    is_shared: bool,
    /// How many GEMMs read it transposed.
    moved: usize,
}

const MATMUL: (&str, &str) = ("", "MatMul");
const GEMM: (&str, &str) = ("", "Gemm");
const PLAIN: WeightCase = WeightCase {
    ops: &[MATMUL],
    dtype: DType::F16,
    rows: &[5],
    weight: [136, 257],
    is_transposed: false,
    is_shared: false,
    moved: 1,
};
const TRANSPOSED: WeightCase = WeightCase { is_transposed: true, ..PLAIN };

const CASES: &[WeightCase] = &[
    PLAIN,
    WeightCase { rows: &[2, 3], dtype: DType::F32, weight: [68, 257], ..PLAIN },
    WeightCase { rows: &[70], ops: &[GEMM], dtype: DType::BF16, ..TRANSPOSED },
    WeightCase {
        rows: &[2, 65],
        ops: &[(RUNTIME, "FusedMatMul"), (MICROSOFT, "FusedMatMul")],
        moved: 2,
        ..TRANSPOSED
    },
    WeightCase { rows: &[7], ops: &[MATMUL, GEMM], moved: 2, ..PLAIN },
    // Not transposed: it has another reader, its rows are whole vectors, its columns are not
    // either, or it is small.
    WeightCase { is_shared: true, moved: 0, ..PLAIN },
    WeightCase { weight: [257, 136], moved: 0, ..PLAIN },
    WeightCase { weight: [257, 135], moved: 0, ..PLAIN },
    WeightCase { weight: [136, 240], moved: 0, ..PLAIN },
    WeightCase { weight: [136, 239], moved: 0, ..PLAIN },
];

impl WeightCase {
    fn model(&self) -> Result<(Model, Tensor)> {
        let mut builder = GraphBuilder::new("weights");
        let [down, across] = self.weight;
        let depth = if self.is_transposed { across } else { down };
        let shape = [self.rows, &[depth]].concat();
        let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        let to = |builder: &mut GraphBuilder, value: ValueId, dtype: DType| {
            builder.node("Cast", &[value], &[("to", Attribute::Int(dtype.onnx_code().into()))])
        };
        let x = builder.input("x", DType::F32, &sizes);
        let x = to(&mut builder, x, self.dtype)?;
        let weight = builder.constant(Tensor::from_slice(&self.weight, &numbers(down * across, 1))?);
        let weight = to(&mut builder, weight, self.dtype)?;
        let mut outputs = Vec::new();
        for &(domain, name) in self.ops {
            let transposed = ("transB", Attribute::Int(self.is_transposed.into()));
            let attrs = if (domain, name) == MATMUL { Vec::new() } else { vec![transposed] };
            let product = builder.add((domain, name), &[Some(x), Some(weight)], &attrs, 1, Vec::new())?;
            outputs.push(to(&mut builder, product[0], DType::F32)?);
        }
        if self.is_shared {
            let index = builder.input("index", DType::I64, &["1"]);
            let row = builder.node("Gather", &[weight, index], &[])?;
            outputs.push(to(&mut builder, row, DType::F32)?);
        }
        let x = Tensor::from_slice(&shape, &numbers(shape.iter().product(), 2))?;
        Ok((Model::from_graph(builder.finish(&outputs)?), x))
    }

    fn check(&self, device: &Arc<dyn Device>) -> Result<()> {
        let (model, x) = self.model()?;
        let what = format!("{:?} of {} {:?}", self.ops, self.dtype, self.weight);
        let session = Session::builder(&model).threads(1).device(device.clone()).build()?;
        let hits = session.rewrites().hits().iter().find(|(name, _)| *name == "weight_vectors");
        assert_eq!(hits.map_or(0, |(_, hits)| *hits), self.moved, "{what}");
        // The weight is a constant, so its transposition is folded.
        assert!(session.steps().iter().all(|(_, op, _)| *op != "Transpose"), "{what}");
        let expected = Session::builder(&model).threads(1).device(cpu()?).build()?;
        let inputs = [("x", x.into()), ("index", Tensor::from_slice(&[1], &[3i64])?.into())];
        let inputs = if self.is_shared { &inputs[..] } else { &inputs[..1] };
        let (actual, expected) = (session.run(inputs)?, expected.run(inputs)?);
        for ((_, actual), (_, expected)) in actual.iter().zip(&expected) {
            let tolerance = if self.dtype == DType::F32 { 1e-5 } else { 1e-2 };
            assert_close(actual, expected, tolerance, &what)?;
        }
        // There is a single copy of the weight, which the device holds.
        let bytes = self.dtype.byte_len(self.weight.iter().product()).unwrap_or(0);
        assert_eq!((session.memory().device_constants, session.constant_bytes()), (bytes, bytes), "{what}");
        Ok(())
    }
}

/// Checks GEMMs with constant weights on a device with memory of its own that loads vectors of 16
/// bytes.
///
/// # Errors
///
/// The device does not run a case, or there is no CPU provider in the program.
///
/// # Panics
///
/// A result differs from the CPU's, or the wrong weights are transposed.
pub fn transposed_weights(device: &Arc<dyn Device>) -> Result<()> {
    CASES.iter().try_for_each(|case| case.check(device))
}
