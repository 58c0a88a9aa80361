//! Functions of quantized values become one lookup table, with the bits of the operators.

use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::rewrite::Level;
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

/// A graph under construction over quantized values of one type.
struct Codes {
    builder: GraphBuilder,
    dtype: DType,
}

/// A quantized value with its scale and zero point.
#[derive(Clone, Copy)]
struct Coded {
    id: ValueId,
    scale: f32,
    zero: u8,
}

impl Codes {
    fn code(&mut self, bits: u8) -> Result<ValueId> {
        let tensor = match self.dtype {
            DType::I8 => Tensor::scalar(bits as i8)?,
            _ => Tensor::scalar(bits)?,
        };
        Ok(self.builder.constant(tensor))
    }

    fn number(&mut self, bits: u8, scale: f32) -> Result<Coded> {
        Ok(Coded { id: self.code(bits)?, scale, zero: 0 })
    }

    /// The inputs that stand for values: each with its scale and zero point.
    fn inputs(&mut self, values: &[Coded]) -> Result<Vec<Option<ValueId>>> {
        let mut inputs = Vec::new();
        for value in values {
            let scale = self.builder.constant(Tensor::scalar(value.scale)?);
            inputs.extend([Some(value.id), Some(scale), Some(self.code(value.zero)?)]);
        }
        Ok(inputs)
    }

    /// A `QLinear` operator on these values, with this scale and zero point of the result.
    fn qlinear(&mut self, op: &str, values: &[Coded], scale: f32, zero: u8) -> Result<Coded> {
        let mut inputs = self.inputs(values)?;
        inputs.push(Some(self.builder.constant(Tensor::scalar(scale)?)));
        inputs.push(Some(self.code(zero)?));
        let id = self.builder.add(("com.microsoft", op), &inputs, &[], 1, Vec::new())?[0];
        Ok(Coded { id, scale, zero })
    }

    /// A float operator between `DequantizeLinear` and `QuantizeLinear`.
    fn float(&mut self, op: &str, value: Coded, attrs: &[(&str, Attribute)], scale: f32) -> Result<Coded> {
        let inputs = self.inputs(&[value])?;
        let numbers = self.builder.add(("", "DequantizeLinear"), &inputs, &[], 1, Vec::new())?[0];
        let numbers = self.builder.add(("", op), &[Some(numbers)], attrs, 1, Vec::new())?[0];
        let zero = 9;
        let inputs =
            [Some(numbers), Some(self.builder.constant(Tensor::scalar(scale)?)), Some(self.code(zero)?)];
        let id = self.builder.add(("", "QuantizeLinear"), &inputs, &[], 1, Vec::new())?[0];
        Ok(Coded { id, scale, zero })
    }
}

type Build = fn(&mut Codes, Coded) -> Result<Coded>;

/// The functions of networks, as quantizers write them.
const FUNCTIONS: [(&str, Build); 4] = [
    ("scaled hard swish", |b, x| {
        let (factor, shift) = (b.number(100, 0.02)?, b.number(50, 0.01)?);
        let scaled = b.qlinear("QLinearMul", &[factor, x], 0.1, 60)?;
        let three = b.number(100, 0.03)?;
        let gate = b.qlinear("QLinearAdd", &[scaled, three], 0.0235, 0)?;
        let product = b.qlinear("QLinearMul", &[scaled, gate], 0.2, 5)?;
        let requantized = b.qlinear("QLinearLeakyRelu", &[product], 0.03, 5)?;
        b.qlinear("QLinearAdd", &[requantized, shift], 0.04, 1)
    }),
    ("swish", |b, x| {
        let gate = b.qlinear("QLinearSigmoid", &[x], 1.0 / 256.0, 0)?;
        b.qlinear("QLinearMul", &[gate, x], 0.03, 20)
    }),
    ("gelu", |b, x| {
        let gate = b.float("Erf", x, &[], 0.008)?;
        let one = b.number(100, 0.01)?;
        let gate = b.qlinear("QLinearAdd", &[one, gate], 0.0079, 0)?;
        b.qlinear("QLinearMul", &[x, gate], 0.05, 30)
    }),
    ("hard sigmoid", |b, x| b.float("HardSigmoid", x, &[("alpha", Attribute::Float(0.1667))], 0.0039)),
];

#[test]
fn a_function_of_quantized_values_is_one_lookup() -> Result<()> {
    for dtype in [DType::U8, DType::I8] {
        for (name, build) in FUNCTIONS {
            let mut codes = Codes { builder: GraphBuilder::new(name), dtype };
            let x = codes.builder.input("x", dtype, &["n", "257"]);
            let y = build(&mut codes, Coded { id: x, scale: 0.04, zero: 100 })?;
            let model = Model::from_graph(codes.builder.finish(&[y.id])?);
            let session = |level: Level| Session::builder(&model).threads(2).opt_level(level).build();
            let (plain, fused) = (session(Level::Disabled)?, session(Level::All)?);
            let operators: Vec<String> = fused.steps().into_iter().map(|(_, operator, _)| operator).collect();
            assert_eq!(operators, ["LookupTable"], "{name} of {}", dtype.name());
            let bytes: Vec<u8> = (0..3 * 257).map(|at| (at * 7 / 3) as u8).collect();
            let input: Value = Tensor::from_bytes(dtype, &[3, 257], bytes.into())?.into();
            let [expected, actual] = [plain, fused].map(|session| session.run(&[("x", input.clone())]));
            let bits = |outputs: Vec<(String, Value)>| {
                Ok::<_, ort_runtime::Error>(outputs[0].1.tensor()?.bytes().cloned())
            };
            assert_eq!(bits(actual?)?, bits(expected?)?, "{name} of {}", dtype.name());
        }
    }
    Ok(())
}
