//! What a caller chooses: the mode of a quantization, and its nodes.

use std::collections::BTreeMap;

use ort_core::onnx::proto::NodeProto;
use ort_core::{Error, ErrorKind, Result};

use super::corrected::StaticBiases;
use super::half_type::HalfType;
use super::select::{NodePattern, Place, Selection};
use super::smoothed::Smoothing;
use super::tuned::TunedWeights;
use crate::grid::{Bits, BlockMethod};
use crate::integer::{GridOptions, QuantType};
use crate::range::ValueRange;

/// How a model is quantized.
#[derive(Clone, Debug)]
pub struct Quantizer {
    /// What weights and nodes become.
    pub mode: Mode,
    /// If there are any, other nodes stay as they are.
    pub only: Vec<NodePattern>,
    /// Nodes that stay as they are.
    pub exclude: Vec<NodePattern>,
}

/// What weights and nodes become.
#[derive(Clone, Debug, PartialEq)]
pub enum Mode {
    /// Weights are integers of 8 bits, and the inputs of products are quantized in each run:
    /// `MatMulInteger` and `ConvInteger`.
    Dynamic(DynamicOptions),
    /// Weights and the inputs of products are integers of 8 bits, in ranges that a calibration
    /// found: `QuantizeLinear` and `DequantizeLinear` around products in floating point, which
    /// runtimes compute with integers.
    Static(StaticOptions),
    /// Weights and values are float16 or bfloat16, where the operators and constants allow it.
    Half(HalfOptions),
    /// Weights are integers of 2, 4 or 8 bits in blocks with a scale each, and products stay in
    /// floating point: `MatMulNBits` and `GatherBlockQuantized`.
    Blocks(BlockOptions),
}

/// The options of [`Mode::Dynamic`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DynamicOptions {
    /// One scale for a whole weight, not one for each output channel.
    pub per_tensor: bool,
    /// Weights of 7 bits, for other runtimes on processors whose 8-bit products saturate.
    pub reduce_range: bool,
}

/// How a statically quantized model says what is quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StaticFormat {
    /// `QuantizeLinear` and `DequantizeLinear` around products in floating point. Only the inputs
    /// of products are rounded.
    #[default]
    Qdq,
    /// Operators on integers, such as `QLinearConv`. The results of products are rounded, too.
    QOperator,
}

/// The type of weights and of the inputs of products in a statically quantized model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StaticType {
    /// Weights int8, inputs uint8.
    #[default]
    Int8,
    /// Both E4M3FN, of which the largest number is 448. Inputs have room for values twice as large
    /// as those of the samples.
    Float8,
}

/// Which nodes of a statically quantized model read quantized values. In the QOperator format it is
/// the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Products alone, so that a value is rounded once before each and nowhere else.
    #[default]
    Heavy,
    /// Also sums, scalings, averages, concatenations and `Resize`, if all that they read comes from
    /// products: a convolutional network then stays in 8 bits.
    All,
    /// Every operator that onnxruntime.quantization quantizes by default, which ruins transformers.
    /// Constants and biases stay in floating point.
    Default,
}

/// The options of [`Mode::Static`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StaticOptions {
    /// Which operators are written.
    pub format: StaticFormat,
    /// What weights and inputs become.
    pub ty: StaticType,
    /// Which nodes read quantized values.
    pub scope: Scope,
    /// The ranges of the values that [`Quantizer::activations`] lists. A layer with a value that
    /// has none stays.
    pub ranges: BTreeMap<String, ValueRange>,
    /// The values that SmoothQuant divides, from [`Quantizer::smoothing`]. Their ranges are those
    /// after the division: see [`Calibration::smoothed`](crate::Calibration::smoothed).
    pub smoothing: Smoothing,
    /// What [`Quantizer::correct_static_bias`] found; nothing by default.
    pub biases: StaticBiases,
    /// One scale for a whole weight, not one for each output channel.
    pub per_tensor: bool,
    /// Weights of 7 bits, for other runtimes on processors whose 8-bit products saturate.
    pub reduce_range: bool,
    /// Whether the zero point of inputs is the middle of their codes.
    pub is_symmetric: bool,
}

impl StaticOptions {
    /// Refuses options that do not go together.
    pub(super) fn check(&self) -> Result<()> {
        if self.ty == StaticType::Float8 && self.format == StaticFormat::QOperator {
            let text = "float8 has no products of codes: the QOperator format is one of integers";
            return Err(Error::new(ErrorKind::InvalidArgument, text).help("take the QDQ format"));
        }
        if self.scope != Scope::Heavy && self.format == StaticFormat::QOperator {
            let text = "the QOperator format has a scope of its own: products, and what moves their results";
            return Err(Error::new(ErrorKind::InvalidArgument, text).help("take the QDQ format"));
        }
        Ok(())
    }

    /// The grid of the inputs of products.
    pub fn activations(&self) -> GridOptions {
        GridOptions::new(QuantType::UInt8, self.is_symmetric)
    }
}

/// The options of [`Mode::Half`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HalfOptions {
    /// What float32 becomes.
    pub ty: HalfType,
    /// Whether the inputs and outputs of the model have that type, too.
    pub converts_io: bool,
    /// The ranges of the values that [`Quantizer::activations`] lists, if they are known. Nodes
    /// with a value above a quarter of the largest number stay in float32.
    pub ranges: BTreeMap<String, ValueRange>,
}

/// What becomes of the last product of a model in [`Mode::Blocks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LastProduct {
    /// It has 8 bits if it makes the answer: its result is not normalized first.
    #[default]
    Head,
    /// It has 8 bits.
    Protected,
    /// It becomes what the others do.
    AsOthers,
}

/// The options of [`Mode::Blocks`].
#[derive(Clone, Debug, PartialEq)]
pub struct BlockOptions {
    /// The bits of a quantized weight.
    pub bits: Bits,
    /// The weights of a block: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// Whether blocks have no zero point.
    pub is_symmetric: bool,
    /// How the range of a block is chosen.
    pub method: BlockMethod,
    /// Whether the last product has 8 bits.
    pub last: LastProduct,
    /// What [`Quantizer::gptq`] or [`Quantizer::awq`] found; nothing by default.
    pub tuned: TunedWeights,
}

impl Quantizer {
    /// Which nodes the caller chooses.
    pub(super) fn selection(&self) -> Selection<'_> {
        Selection { only: &self.only, exclude: &self.exclude }
    }

    /// Whether the caller excludes a node.
    pub(super) fn excludes(&self, place: Option<Place>, node: &NodeProto) -> bool {
        self.selection().excludes(place, node)
    }

    /// Whether a node may be quantized. If not, the reason.
    pub(super) fn allows(&self, place: Option<Place>, node: &NodeProto) -> std::result::Result<(), String> {
        self.selection().allows(place, node)
    }
}

impl Mode {
    /// The oldest operator set with the operators that the mode writes.
    pub(super) fn least_opset(&self) -> i64 {
        match self {
            // DynamicQuantizeLinear.
            Mode::Dynamic(_) => 11,
            // QuantizeLinear to float8.
            Mode::Static(StaticOptions { ty: StaticType::Float8, .. }) => 19,
            // DequantizeLinear of channels.
            Mode::Static(_) => 13,
            // Older operator sets have operators with fewer types.
            Mode::Half(HalfOptions { ty: HalfType::Float16, .. }) => 13,
            Mode::Half(HalfOptions { ty: HalfType::BFloat16, .. }) => 22,
            Mode::Blocks(_) => 7,
        }
    }
}
