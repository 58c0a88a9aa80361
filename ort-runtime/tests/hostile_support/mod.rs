//! Junk for operators, drawn by dice that fall the same each time, and the memory that this process
//! took.
#![allow(dead_code, reason = "each test uses some of it")]

pub(crate) mod text;

use bytes::Bytes;
use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::*;
use ort_runtime::onnx::{NEWEST_OPSET, tensor_to_proto};
use ort_runtime::spec::{Arity, AttrDefault, AttrKind, AttrSpec, OpSpec, Param, Registry};
use ort_runtime::tensor::{OptionalValue, SequenceValue};
use ort_runtime::{DType, Tensor, Value};

/// Numbers that follow from a name and a round (S. Vigna's splitmix64).
pub(crate) struct Dice {
    state: u64,
    /// Throws that are given, the last first; after them the numbers follow from the state.
    given: Vec<u8>,
}

impl Dice {
    pub(crate) fn new(name: &str, round: u64) -> Dice {
        let seed = name.bytes().fold(round, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        Dice { state: seed, given: Vec::new() }
    }

    /// Dice whose first throws are these bytes, two each.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Dice {
        Dice { given: bytes.iter().rev().copied().collect(), ..Dice::new("", bytes.len() as u64) }
    }

    fn roll(&mut self) -> u64 {
        if let (Some(low), Some(high)) = (self.given.pop(), self.given.pop()) {
            return u64::from(u16::from_le_bytes([low, high]));
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound.max(1) as u64) as usize
    }

    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(crate) fn pick_mut<'a, T>(&mut self, from: &'a mut [T]) -> &'a mut T {
        let at = self.below(from.len());
        &mut from[at]
    }

    /// Mostly a small number, else one at an edge.
    fn int(&mut self) -> i64 {
        if self.chance(65) { self.below(5) as i64 } else { self.pick(EDGES) }
    }

    pub(crate) fn float(&mut self) -> f64 {
        if self.chance(60) { self.below(9) as f64 / 2.0 - 1.0 } else { self.pick(FLOATS) }
    }
}

/// Random bytes, the same for each seed.
pub(crate) fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut dice = Dice::new("noise", seed);
    (0..length).map(|_| dice.below(256) as u8).collect()
}

pub(crate) const EDGES: &[i64] = &[
    -1,
    -2,
    -7,
    7,
    16,
    100,
    1000,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    1 << 32,
    1 << 40,
    1 << 60,
    1 << 62,
    i64::MAX,
    i64::MIN,
    i64::MIN + 1,
];

const FLOATS: &[f64] =
    &[-0.0, 1e-30, 1e10, -1e10, 1e30, -1e30, 2.5e9, 1e300, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

const SHAPES: &[&[usize]] = &[
    &[],
    &[0],
    &[1],
    &[2],
    &[3],
    &[4],
    &[8],
    &[0, 3],
    &[2, 3],
    &[3, 2],
    &[4, 4],
    &[1, 4],
    &[2, 0, 2],
    &[1, 2, 3],
    &[2, 3, 4],
    &[1, 1, 5, 5],
    &[1, 2, 3, 3],
    &[2, 2, 1, 4],
    &[1, 2, 0, 3],
    &[1, 1, 2, 3, 2],
    &[1, 1, 1, 1, 1, 2, 1, 2],
    // No elements, with a dimension so large that a loop over it, or a table of it, is noticed.
    &[1 << 28, 0],
    &[0, 1 << 27, 2],
];

pub(crate) const TEXTS: &[&str] = &[
    "",
    "a",
    "linear",
    "nearest",
    "cubic",
    "constant",
    "reflect",
    "edge",
    "wrap",
    "max",
    "avg",
    "SAME_UPPER",
    "SAME_LOWER",
    "VALID",
    "NOTSET",
    "add",
    "mul",
    "none",
    "mean",
    "sum",
    "half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
    "bilinear",
    "bicubic",
    "zeros",
    "border",
    "reflection",
    "DCR",
    "CRD",
    "forward",
    "reverse",
    "bidirectional",
    "ij,jk->ik",
    "i,i",
    "...,...->",
    "...ii->...i",
    "ij->ji",
    "aa->a",
    "ij,kl",
    "->",
    ",",
    "i..j",
    "TF",
    "IDF",
    "TFIDF",
    "tanh",
    "output_half_pixel",
    "half_pixel_symmetric",
    "round_prefer_ceil",
    "floor",
    "stretch",
    "not_larger",
    "not_smaller",
    "left",
    "right",
    "LOWER",
    "UPPER",
    "RIGHT",
    "LEFT",
    "SUM",
    "AVERAGE",
    "MIN",
    "MAX",
    "BRANCH_LEQ",
    "LEAF",
    "SOFTMAX",
    "LOGISTIC",
    "RBF",
    "POLY",
    "L1",
    "L2",
    "RGB",
    "BGR",
    "Grayscale",
    "(",
    "[",
    "a{1000}{1000}",
    "(a*)*b",
    ".*",
    "é\u{301}",
    "\u{10ffff}",
    "Relu",
    "Sigmoid",
    "Tanh",
    "Affine",
    "float32",
    "1e999",
    "nan",
    "-",
    "0x10",
];

/// Attributes of versions past, which only upgrades know.
const OLD_ATTRIBUTES: &[&str] = &[
    "axes",
    "pads",
    "paddings",
    "value",
    "split",
    "k",
    "shape",
    "ratio",
    "is_test",
    "scales",
    "axis",
    "to",
    "broadcast",
    "starts",
    "ends",
    "spatial",
    "consumed_inputs",
    "height_scale",
    "width_scale",
    "perm",
    "keepdims",
    "dtype",
    "select_last_index",
    "mode",
    "keys_strings",
    "classes_strings",
    "max_trip_count",
    "directions",
];

const LIKED_TYPES: &[DType] = &[DType::F32, DType::F32, DType::I64, DType::I32, DType::U8, DType::F16];

/// The elements of a tensor of this type, mostly harmless.
pub(crate) fn tensor(dice: &mut Dice, dtype: DType, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    if dtype == DType::String {
        let texts = (0..count).map(|_| dice.pick(TEXTS).to_string()).collect();
        return Tensor::from_strings(shape, texts).unwrap();
    }
    let length = dtype.byte_len(count).unwrap();
    let mut bytes = Vec::with_capacity(length);
    match dtype {
        DType::F32 => (0..count).for_each(|_| bytes.extend((dice.float() as f32).to_le_bytes())),
        DType::F64 => (0..count).for_each(|_| bytes.extend(dice.float().to_le_bytes())),
        DType::Bool => bytes.extend((0..count).map(|_| dice.below(2) as u8)),
        _ => {
            let width = dtype.bits().unwrap_or(8).div_ceil(8) as usize;
            while bytes.len() < length {
                bytes.extend(dice.int().to_le_bytes().iter().chain(&[0; 8]).take(width));
            }
        }
    }
    bytes.truncate(length);
    Tensor::from_bytes(dtype, shape, Bytes::from(bytes)).unwrap().to_owned_copy().unwrap()
}

/// Any operator of the registry.
pub(crate) fn spec(dice: &mut Dice) -> &'static OpSpec {
    dice.pick(Registry::global().unwrap().records())
}

/// A model of one node of this operator, and what its inputs are given.
pub(crate) fn case(spec: &'static OpSpec, dice: &mut Dice) -> (ModelProto, Vec<(String, Value)>) {
    let mut draft = Draft { base: dice.pick(SHAPES), graph: GraphProto::default(), given: Vec::new() };
    let types: Vec<(&str, DType)> =
        spec.types.iter().map(|var| (var.name, pick_type(dice, var.types.tensor.iter().collect()))).collect();
    let mut node = NodeProto {
        name: Some("node".into()),
        op_type: Some(spec.name.into()),
        domain: Some(spec.domain.into()),
        ..NodeProto::default()
    };
    for param in spec.inputs {
        let count = match param.arity {
            Arity::Single => usize::from(!dice.chance(1)),
            Arity::Optional if dice.chance(35) => {
                node.input.push(String::new());
                0
            }
            Arity::Optional => 1,
            Arity::Variadic { min, .. } => min + dice.below(3),
        };
        for _ in 0..count {
            let name = format!("x{}", node.input.len());
            draft.input(dice, &name, spec, param, &types);
            node.input.push(name);
        }
    }
    for param in spec.outputs {
        let count = match param.arity {
            Arity::Variadic { min, .. } => min.max(1) + dice.below(3),
            _ => 1,
        };
        for _ in 0..count {
            node.output.push(format!("y{}", node.output.len()));
        }
    }
    node.attribute = spec.attrs.iter().filter_map(|attr| attribute(dice, attr)).collect();
    let mut version = NEWEST_OPSET;
    if dice.chance(25) {
        version = 1 + dice.below(NEWEST_OPSET as usize) as i64;
        if dice.chance(60) {
            node.attribute.push(old_attribute(dice));
        }
    }
    let outputs =
        node.output.iter().map(|name| ValueInfoProto { name: Some(name.clone()), ..Default::default() });
    draft.graph.output = outputs.collect();
    draft.graph.node = vec![node];
    let opset =
        |domain: &str, version| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
    let model = ModelProto {
        ir_version: Some(10),
        opset_import: ["", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft"]
            .iter()
            .map(|domain| opset(domain, if *domain == spec.domain { version } else { 1 }))
            .chain((!spec.domain.is_empty()).then(|| opset(spec.domain, version)))
            .collect(),
        graph: Some(draft.graph),
        ..ModelProto::default()
    };
    (unique_opsets(model), draft.given)
}

fn unique_opsets(mut model: ModelProto) -> ModelProto {
    let mut seen = std::collections::HashSet::new();
    model.opset_import.retain(|import| seen.insert(import.domain().to_string()));
    model
}

fn pick_type(dice: &mut Dice, all: Vec<DType>) -> DType {
    let liked: Vec<DType> = LIKED_TYPES.iter().copied().filter(|dtype| all.contains(dtype)).collect();
    match (liked.is_empty(), all.is_empty()) {
        (false, _) if dice.chance(75) => dice.pick(&liked),
        (_, false) => dice.pick(&all),
        _ => DType::F32,
    }
}

struct Draft {
    base: &'static [usize],
    graph: GraphProto,
    given: Vec<(String, Value)>,
}

impl Draft {
    fn input(&mut self, dice: &mut Dice, name: &str, spec: &OpSpec, param: &Param, types: &[(&str, DType)]) {
        let bound = types.iter().find(|(var, _)| *var == param.ty).map(|(_, dtype)| *dtype);
        let fixed = (1..=28)
            .filter_map(DType::from_onnx)
            .find(|dtype| param.ty.contains(&format!("({})", dtype.name())));
        let dtype = bound.or(fixed).unwrap_or(DType::F32);
        let container = spec.type_var(param.ty).map(|var| var.types);
        let only_others = container.is_some_and(|types| types.tensor.is_empty());
        let sequence = param.ty.starts_with("seq(")
            || container.is_some_and(|types| !types.sequence.is_empty() && (only_others || dice.chance(20)));
        let optional = param.ty.starts_with("optional(")
            || container.is_some_and(|types| !types.optional.is_empty() && (only_others || dice.chance(20)));
        let shape = self.shape(dice, dtype, param);
        let elements = tensor(dice, dtype, &shape);
        let tensor_type = type_of(dice, dtype, &shape);
        let (ty, value) = if sequence {
            let inner = type_proto::Sequence { elem_type: Some(Box::new(wrap(tensor_type))) };
            let values = (0..dice.below(4)).map(|_| {
                let shape = if dice.chance(70) { shape.clone() } else { dice.pick(SHAPES).to_vec() };
                Value::Tensor(tensor(dice, dtype, &shape))
            });
            let value = SequenceValue { element_type: elements_type(dtype), elements: values.collect() };
            (type_proto::Value::SequenceType(inner), Value::Sequence(value))
        } else if optional {
            let inner = type_proto::Optional { elem_type: Some(Box::new(wrap(tensor_type))) };
            let element = dice.chance(60).then(|| Box::new(Value::Tensor(elements)));
            let value = OptionalValue { element_type: elements_type(dtype), element };
            (type_proto::Value::OptionalType(inner), Value::Optional(value))
        } else if dice.chance(if param.host { 50 } else { 30 }) {
            self.graph.initializer.push(tensor_to_proto(name, &elements).unwrap());
            return;
        } else {
            (tensor_type, Value::Tensor(elements))
        };
        let ty = TypeProto { value: Some(ty), ..TypeProto::default() };
        self.graph.input.push(ValueInfoProto {
            name: Some(name.into()),
            r#type: Some(ty),
            ..ValueInfoProto::default()
        });
        self.given.push((name.into(), value));
    }

    fn shape(&self, dice: &mut Dice, dtype: DType, param: &Param) -> Vec<usize> {
        let small = param.host || (matches!(dtype, DType::I64 | DType::I32) && dice.chance(40));
        if small && dice.chance(80) {
            return match dice.below(10) {
                0..2 => Vec::new(),
                2..7 => vec![self.base.len()],
                _ => vec![dice.below(6)],
            };
        }
        if dice.chance(70) { self.base.to_vec() } else { dice.pick(SHAPES).to_vec() }
    }
}

fn elements_type(dtype: DType) -> ort_runtime::ir::ValueType {
    ort_runtime::ir::ValueType::tensor(dtype, None)
}

fn wrap(value: type_proto::Value) -> TypeProto {
    TypeProto { value: Some(value), ..TypeProto::default() }
}

/// The declared type of an input: its shape as numbers, as names, or not at all.
fn type_of(dice: &mut Dice, dtype: DType, shape: &[usize]) -> type_proto::Value {
    let form = dice.below(4);
    let dim = |(axis, &size): (usize, &usize)| {
        let value = match form {
            0 => Some(dimension::Value::DimParam(format!("n{axis}"))),
            1 if axis == 0 => Some(dimension::Value::DimParam("batch".into())),
            _ => Some(dimension::Value::DimValue(size as i64)),
        };
        Dimension { value, ..Dimension::default() }
    };
    let shape = TensorShapeProto { dim: shape.iter().enumerate().map(dim).collect() };
    let shape = (form < 3).then_some(shape);
    type_proto::Value::TensorType(type_proto::Tensor { elem_type: Some(dtype.onnx_code()), shape })
}

fn attribute(dice: &mut Dice, attr: &AttrSpec) -> Option<AttributeProto> {
    let given = match attr.default {
        AttrDefault::Required => 98,
        AttrDefault::None => 50,
        _ => 35,
    };
    dice.chance(given).then(|| attribute_of(dice, attr.name, attr.kind))
}

fn old_attribute(dice: &mut Dice) -> AttributeProto {
    let name = dice.pick(OLD_ATTRIBUTES);
    let kind =
        dice.pick(&[AttrKind::Int, AttrKind::Ints, AttrKind::Float, AttrKind::Floats, AttrKind::String]);
    attribute_of(dice, name, kind)
}

fn attribute_of(dice: &mut Dice, name: &str, kind: AttrKind) -> AttributeProto {
    let named = AttributeProto { name: Some(name.into()), ..AttributeProto::default() };
    let count = dice.below(5);
    let of = |ty: AttributeType, rest: AttributeProto| AttributeProto { r#type: Some(ty as i32), ..rest };
    match kind {
        AttrKind::Int => of(AttributeType::Int, AttributeProto { i: Some(dice.int()), ..named }),
        AttrKind::Float => of(AttributeType::Float, AttributeProto { f: Some(dice.float() as f32), ..named }),
        AttrKind::String => {
            of(AttributeType::String, AttributeProto { s: Some(Bytes::from(dice.pick(TEXTS))), ..named })
        }
        AttrKind::Ints => {
            let ints = (0..count).map(|_| dice.int()).collect();
            of(AttributeType::Ints, AttributeProto { ints, ..named })
        }
        AttrKind::Floats => {
            let floats = (0..count).map(|_| dice.float() as f32).collect();
            of(AttributeType::Floats, AttributeProto { floats, ..named })
        }
        AttrKind::Strings => {
            let strings = (0..count).map(|_| Bytes::from(dice.pick(TEXTS))).collect();
            of(AttributeType::Strings, AttributeProto { strings, ..named })
        }
        AttrKind::Tensor => {
            let dtype = pick_type(dice, (1..=28).filter_map(DType::from_onnx).collect());
            let shape = dice.pick(SHAPES);
            let t = tensor_to_proto("", &tensor(dice, dtype, shape)).unwrap();
            of(AttributeType::Tensor, AttributeProto { t: Some(Box::new(t)), ..named })
        }
        AttrKind::Tensors => {
            let shape = dice.pick(SHAPES);
            let tensors = (0..count).map(|_| tensor_to_proto("", &tensor(dice, DType::F32, shape)).unwrap());
            let tensors = tensors.collect();
            of(AttributeType::Tensors, AttributeProto { tensors, ..named })
        }
        AttrKind::Sparse => {
            let values = tensor_to_proto("", &tensor(dice, DType::F32, &[count])).unwrap();
            let indices = tensor_to_proto("", &tensor(dice, DType::I64, &[count])).unwrap();
            let dims = vec![dice.int(), dice.int()];
            let sparse = SparseTensorProto { values: Some(values), indices: Some(indices), dims };
            of(AttributeType::SparseTensor, AttributeProto { sparse_tensor: Some(Box::new(sparse)), ..named })
        }
        AttrKind::Type => {
            let tp = Some(Box::new(wrap(type_of(dice, DType::F32, &[2]))));
            of(AttributeType::TypeProto, AttributeProto { tp, ..named })
        }
        AttrKind::Graph => {
            of(AttributeType::Graph, AttributeProto { g: Some(Box::new(body(dice))), ..named })
        }
    }
}

/// A graph of a few inputs, which it hands through, adds up or reads from around.
fn body(dice: &mut Dice) -> GraphProto {
    let inputs: Vec<String> = (0..dice.below(5)).map(|index| format!("i{index}")).collect();
    let name = |name: &str| ValueInfoProto { name: Some(name.into()), ..ValueInfoProto::default() };
    let mut graph = GraphProto { name: Some("body".into()), ..GraphProto::default() };
    graph.input = inputs.iter().map(|input| name(input)).collect();
    for index in 0..dice.below(5) {
        let output = format!("o{index}");
        let operand = |dice: &mut Dice| match inputs.is_empty() || dice.chance(15) {
            true => "x0".to_string(),
            false => inputs[dice.below(inputs.len())].clone(),
        };
        let op = dice.pick(&["Identity", "Identity", "Add", "Not", "Shape"]);
        let input = (0..if op == "Add" { 2 } else { 1 }).map(|_| operand(dice)).collect();
        let node =
            NodeProto { op_type: Some(op.into()), input, output: vec![output.clone()], ..Default::default() };
        graph.node.push(node);
        graph.output.push(name(&output));
    }
    graph
}

/// Sets the high-water mark of resident memory back to what is resident now.
pub(crate) fn reset_peak() {
    std::fs::write("/proc/self/clear_refs", "5").ok();
    BASE.store(status("VmRSS"), std::sync::atomic::Ordering::Relaxed);
}

/// The bytes that were resident at most since [`reset_peak`], beyond those resident then.
pub(crate) fn peak_above() -> usize {
    status("VmHWM").saturating_sub(BASE.load(std::sync::atomic::Ordering::Relaxed))
}

static BASE: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

fn status(field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap_or_default();
    let kib = line.split_whitespace().nth(1).and_then(|number| number.parse::<usize>().ok());
    kib.unwrap_or(0) << 10
}

/// Ones for every input of a session; symbolic sizes are 2.
pub(crate) fn made_up(session: &ort_runtime::Session) -> ort_runtime::Result<Vec<(String, Value)>> {
    let mut inputs = Vec::new();
    for spec in session.inputs().into_iter().filter(|spec| !spec.has_default) {
        let sizes = spec.ty.shape().unwrap_or_default();
        let size =
            |dim: &ort_runtime::dim::Dim| dim.as_constant().map_or(2, |size| size.clamp(0, 64) as usize);
        let shape: Vec<usize> = sizes.iter().map(size).collect();
        let count: usize = shape.iter().product();
        let tensor = match spec.ty.dtype() {
            Some(DType::I64) => Tensor::from_vec(&shape, vec![1i64; count])?,
            Some(DType::I32) => Tensor::from_vec(&shape, vec![1i32; count])?,
            Some(DType::Bool) => Tensor::from_bools(&shape, &vec![true; count])?,
            _ => Tensor::from_vec(&shape, vec![1f32; count])?,
        };
        inputs.push((spec.name, tensor.into()));
    }
    Ok(inputs)
}
