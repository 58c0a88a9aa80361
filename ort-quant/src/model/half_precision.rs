//! Conversion of models to float16 or bfloat16.
//!
//! Each value has one type: that of 16 bits if the node that computes it allows that, and float32
//! otherwise. Where a reader needs the other type there is a Cast, one for each value. Names of
//! casts are those of onnxruntime.transformers.float16; unlike its, the nodes are in topological
//! order. Inputs and outputs of the model stay float32 unless asked otherwise, and those of bodies
//! always do. With the ranges of values, nodes whose values come near the end of float16 stay in
//! float32.

use std::collections::{BTreeMap, BTreeSet};

use half::{bf16, f16};
use ort_core::dtype::DType;
use ort_core::onnx::proto::type_proto::Value as TypeValue;
use ort_core::onnx::proto::{AttributeProto, NodeProto, TensorProto, ValueInfoProto};
use ort_core::onnx::{Source, tensor_from_proto, tensor_to_proto};
use ort_core::spec::{Arity, OpSpec, Param, Registry, Traits};
use ort_core::tensor::Tensor;
use ort_core::{Result, Within};

use super::draft::{Part, integer, node, reads, rename_reads, subgraphs, subgraphs_mut};
use super::half_type::{HalfType, nearest_bfloat, nearest_half};
use super::options::{HalfOptions, Quantizer};
use super::variances;
use super::weights::{Form, Job};
use super::work::{Outcome, Work, is_standard, title};
use crate::elements::{Elements, RawElements, each_chunk};
use crate::pages::WeightPages;
use crate::range::ValueRange;

/// Operators of the standard that stay in float32: their results are ids or positions, they have no
/// types of 16 bits in older operator sets, or their sums and constants leave the range of float16.
const BLOCKED: [&str; 12] = [
    "CumSum",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "EyeLike",
    "Max",
    "Min",
    "NonMaxSuppression",
    "QuantizeLinear",
    "Range",
    "RoiAlign",
    "TopK",
    "Upsample",
];

/// The domain of classical machine learning, whose operators have no types of 16 bits.
const ML: &str = "ai.onnx.ml";

/// Whether the nodes of an operator stay in float32. Random numbers of another type would be
/// others, unless they decide what training drops.
fn is_blocked(spec: &OpSpec) -> bool {
    let is_source = spec.traits.has(Traits::RANDOM) && !spec.name.ends_with("Dropout");
    is_source || spec.domain == ML || BLOCKED.contains(&spec.name)
}

/// Values of samples may be this many times smaller than those of other inputs.
const MARGIN: f64 = 4.0;

/// The float32 values whose ranges say which nodes have to stay in float32.
pub(super) fn activations(work: &Work, nodes: &[NodeProto]) -> BTreeSet<String> {
    let names = nodes.iter().flat_map(|node| node.input.iter().chain(&node.output));
    names.filter(|name| work.is_single(name) && work.draft.constant(name).is_none()).cloned().collect()
}

/// What is known of constants, across the graphs of a model: bodies read those around them.
#[derive(Default)]
pub(super) struct SharedConstants {
    /// Those that have 16 bits now.
    halves: BTreeSet<String>,
    /// What the copy in 16 bits of one that stays is called.
    copies: BTreeMap<String, String>,
    /// Those that a graph reads in float32.
    read_as_single: BTreeSet<String>,
    /// Those with finite elements beyond float16, with whether all of these are negative, as in
    /// masks.
    large: BTreeMap<String, bool>,
    /// How many constants were searched for such elements.
    searched: usize,
}

/// How a node takes part.
enum Role {
    /// It computes in 16 bits.
    Half(&'static OpSpec),
    /// It stays as it is, and reads and writes float32.
    Single { reason: String },
    /// It has no float32 value.
    Other,
    /// It was a `Constant`, which is an initializer now.
    Gone,
}

/// A constant that has 16 bits now.
struct Converted {
    name: String,
    shape: Vec<usize>,
    before: usize,
    after: usize,
}

/// The state of the conversion.
struct Conversion<'n> {
    /// The type of 16 bits.
    ty: HalfType,
    /// The values that have it now.
    halves: BTreeSet<String>,
    /// What a value is called as the other type.
    casts: BTreeMap<String, String>,
    /// What an output of the model is called before its last Cast.
    inner: BTreeMap<String, String>,
    /// The position of each input of the model.
    inputs: BTreeMap<&'n str, usize>,
    /// The constants that have 16 bits now, by the node that reads them first.
    constants: BTreeMap<usize, Vec<Converted>>,
}

/// Rewrites a graph. The bodies in it were rewritten before.
pub(super) fn rewrite(
    work: &mut Work,
    nodes: &[NodeProto],
    (options, source): (&HalfOptions, &Source),
    (quantizer, shared): (&Quantizer, &mut SharedConstants),
) -> Result<()> {
    let gone = constants_to_initializers(work, nodes);
    // bfloat16 has the range of float32.
    if options.ty == HalfType::Float16 {
        shared.search(work, source)?;
    }
    let variances = match options.ty {
        HalfType::Float16 => variances::nodes(nodes),
        // Whoever takes it has accepted few digits.
        HalfType::BFloat16 => BTreeSet::new(),
    };
    let roles: Vec<Role> = nodes
        .iter()
        .enumerate()
        .map(|(index, node)| match (gone.contains(&index), variances.contains(&index)) {
            (true, _) => Ok(Role::Gone),
            (false, true) => Ok(Role::Single { reason: variances::REASON.to_string() }),
            (false, false) => role(work, (index, node), (&shared.large, options), quantizer),
        })
        .collect::<Result<_>>()?;
    let graph = work.draft.message.graph.clone().unwrap_or_default();
    let inputs = graph.input.iter().enumerate().map(|(place, input)| (input.name(), place));
    let inputs = inputs.filter(|_| !work.is_inside).collect();
    let (halves, casts) = (shared.halves.clone(), shared.copies.clone());
    let (inner, constants) = (BTreeMap::new(), BTreeMap::new());
    let mut conversion = Conversion { ty: options.ty, halves, casts, inner, inputs, constants };
    let converts_io = options.converts_io && !work.is_inside;
    if converts_io {
        conversion.convert_inputs(work);
    }
    conversion.convert_constants(work, (nodes, &roles), shared)?;
    let outputs: Vec<String> = match work.is_inside {
        true => work.outputs.iter().cloned().collect(),
        false => graph.output.iter().map(|output| output.name().to_string()).collect(),
    };
    let outputs: BTreeMap<&str, usize> =
        outputs.iter().enumerate().map(|(place, output)| (output.as_str(), place)).collect();
    let casts_outputs = if converts_io { BTreeMap::new() } else { outputs };
    for (node, role) in nodes.iter().zip(&roles) {
        let place = || format!("node '{}' ({})", title(node), node.op_type());
        conversion.convert(work, node, role, &casts_outputs).within(place)?;
    }
    for (index, (node, role)) in nodes.iter().zip(&roles).enumerate() {
        conversion.note(work, (index, node), role);
    }
    if converts_io {
        conversion.convert_outputs(work);
    }
    shared.note_reads(work);
    // What they said of types is not true any more, and readers find out themselves.
    work.draft.message.graph.get_or_insert_default().value_info.clear();
    Ok(())
}

/// Makes float32 tensors of `Constant` nodes initializers, so that one rule holds for both. Returns
/// the nodes. Those of bodies were moved with their weights.
fn constants_to_initializers(work: &mut Work, nodes: &[NodeProto]) -> BTreeSet<usize> {
    let mut gone = BTreeSet::new();
    for (index, node) in nodes.iter().enumerate().filter(|(_, node)| is_standard(node, "Constant")) {
        let tensor = node.attribute.iter().find_map(|attribute| attribute.t.as_deref());
        let (Some(tensor), [output]) = (tensor, &node.output[..]) else { continue };
        // An output of the graph has to be computed by a node.
        if tensor.data_type() == DType::F32.onnx_code() && !work.outputs.contains(output) {
            work.draft.add_constant(TensorProto { name: Some(output.clone()), ..tensor.clone() });
            gone.insert(index);
        }
    }
    gone
}

impl SharedConstants {
    /// Looks for elements beyond float16 in the constants that were not searched yet.
    fn search(&mut self, work: &Work, source: &Source) -> Result<()> {
        let mut external = source.external_data()?;
        for proto in work.draft.initializers.iter().skip(self.searched) {
            if proto.data_type() != DType::F32.onnx_code() {
                continue;
            }
            let tensor = tensor_from_proto(proto.clone(), &mut external)?;
            let bytes = tensor.bytes().map(|bytes| &bytes[..]).unwrap_or_default();
            let mappings = || source.mapping().into_iter().chain(external.mappings());
            let pages = WeightPages::of(bytes, mappings());
            if let Some(is_negative) = beyond_half(&RawElements::<f32>::new(bytes).paged(pages.as_ref())) {
                self.large.insert(proto.name().to_string(), is_negative);
            }
            for mapping in mappings() {
                if let Some(range) = mapping.range_of(bytes) {
                    // A hint, so a failure only costs memory.
                    let _ = mapping.release(range);
                }
            }
        }
        self.searched = work.draft.initializers.len();
        Ok(())
    }

    /// Notes which constants the new nodes of a graph read as they are.
    fn note_reads(&mut self, work: &Work) {
        let names = work.draft.nodes.iter().flat_map(|node| &node.input);
        let singles =
            names.filter(|name| work.draft.constant(name).is_some() && !self.halves.contains(*name));
        self.read_as_single.extend(singles.cloned());
    }
}

/// Whether finite elements are beyond float16: if so, whether all of those are negative.
fn beyond_half(elements: &impl Elements) -> Option<bool> {
    let (most, mut are_negative) = (f16::MAX.to_f32(), None);
    each_chunk(elements, |values| {
        // All of them, so that the loop becomes vector instructions.
        if !values.iter().fold(false, |found, value| found | (value.abs() > most)) {
            return;
        }
        for value in values.iter().filter(|value| value.is_finite() && value.abs() > most) {
            are_negative = Some(are_negative.unwrap_or(true) && *value < 0.0);
        }
    });
    are_negative
}

/// The end of a range that is too near to that of float16.
fn beyond_range(range: &ValueRange, is_mask: bool) -> Option<f64> {
    let most = f64::from(f16::MAX) / MARGIN;
    let is_high = range.high > most;
    let is_low = range.low < -most && !is_mask;
    (is_high || is_low).then_some(if is_high { range.high } else { range.low })
}

fn role(
    work: &Work,
    (index, node): (usize, &NodeProto),
    (large, options): (&BTreeMap<String, bool>, &HalfOptions),
    quantizer: &Quantizer,
) -> Result<Role> {
    let ty = options.ty;
    let is_single = |name: &String| work.is_single(name);
    let outer: BTreeSet<String> = subgraphs(node).flat_map(|graph| reads(&graph.node)).collect();
    if !node.input.iter().chain(&node.output).any(is_single) && !outer.iter().any(is_single) {
        return Ok(Role::Other);
    }
    let single = |reason: &str| Ok(Role::Single { reason: reason.to_string() });
    if let Err(reason) = quantizer.allows(work.place(index), node) {
        return single(&reason);
    }
    if subgraphs(node).next().is_some() {
        return single("what its bodies read and return stays in float32");
    }
    let domain = if node.domain() == "ai.onnx" { "" } else { node.domain() };
    let spec = Registry::global()?.find(domain, node.op_type());
    let Some(spec) = spec.filter(|spec| !is_blocked(spec)) else {
        return single("its operator stays in float32");
    };
    if node.attribute.iter().any(|attribute| attribute.name() == "dtype") {
        return single("an attribute says what its type is");
    }
    if is_standard(node, "Constant") {
        return single("its value is an attribute");
    }
    // A mask before a softmax means no more than "much less than the others".
    let is_mask = ["Add", "Where", "Softmax"].iter().any(|operator| is_standard(node, operator));
    for name in &node.input {
        if let Some(is_negative) = large.get(name)
            && !(*is_negative && is_mask)
        {
            return single(&format!("constant '{name}' is beyond the range of float16"));
        }
    }
    for name in node.input.iter().chain(&node.output) {
        if let Some(end) = options.ranges.get(name).and_then(|range| beyond_range(range, is_mask)) {
            return single(&format!("value '{name}' reaches {end:.3e}, near the end of float16, 65504"));
        }
    }
    let has_half = |(names, params): (&[String], &'static [Param])| {
        names.iter().enumerate().any(|(place, name)| is_single(name) && allows_half(ty, spec, params, place))
    };
    let sides: [(&[String], &'static [Param]); 2] =
        [(&node.input, spec.inputs), (&node.output, spec.outputs)];
    match sides.into_iter().any(has_half) {
        true => Ok(Role::Half(spec)),
        false => single(&format!("its operator has no {}", ty.name())),
    }
}

/// Whether a parameter may have a type of 16 bits.
fn allows_half(ty: HalfType, spec: &OpSpec, params: &'static [Param], place: usize) -> bool {
    let variadic = || params.last().filter(|param| matches!(param.arity, Arity::Variadic { .. }));
    let Some(param) = params.get(place).or_else(variadic) else { return false };
    // The scales of Resize are float32 in every version, and ratios like 1/3 need it.
    if spec.name == "Resize" && param.name == "scales" {
        return false;
    }
    spec.types.iter().any(|var| var.name == param.ty && var.types.tensor.contains(ty.dtype()))
}

impl Conversion<'_> {
    /// Declares the inputs of the model as the type of 16 bits.
    fn convert_inputs(&mut self, work: &mut Work) {
        let graph = work.draft.message.graph.get_or_insert_default();
        for input in &mut graph.input {
            if set_half(input, self.ty) {
                self.halves.insert(input.name().to_string());
            }
        }
    }

    /// Declares the outputs of the model as what they are.
    fn convert_outputs(&self, work: &mut Work) {
        let graph = work.draft.message.graph.get_or_insert_default();
        for output in &mut graph.output {
            if self.halves.contains(output.name()) {
                set_half(output, self.ty);
            }
        }
    }

    /// Replaces the constants that only nodes in 16 bits read. One that others read as well becomes
    /// two.
    fn convert_constants(
        &mut self,
        work: &mut Work,
        (nodes, roles): (&[NodeProto], &[Role]),
        shared: &mut SharedConstants,
    ) -> Result<()> {
        // The first reader in 16 bits, and whether there are others.
        let mut readers: BTreeMap<&str, (Option<usize>, bool)> = BTreeMap::new();
        // What bodies read, and what the caller does.
        let mut captured = BTreeSet::new();
        for (index, (node, role)) in nodes.iter().zip(roles).enumerate() {
            for (place, name) in node.input.iter().enumerate() {
                let is_half =
                    matches!(role, Role::Half(spec) if allows_half(self.ty, spec, spec.inputs, place));
                let entry = readers.entry(name).or_default();
                if is_half {
                    entry.0 = entry.0.or(Some(index));
                } else {
                    entry.1 = true;
                }
            }
            captured.extend(subgraphs(node).flat_map(|graph| reads(&graph.node)));
        }
        captured.extend(work.outputs.iter().cloned());
        for proto in work.draft.initializers.clone() {
            let name = proto.name();
            let is_constant = work.draft.constant(name).is_some();
            let is_done = self.halves.contains(name) || self.casts.contains_key(name);
            let Some((Some(first), others)) = readers.get(name).copied() else { continue };
            if !is_constant || is_done || proto.data_type() != DType::F32.onnx_code() {
                continue;
            }
            let elements: usize = proto.dims.iter().map(|size| *size as usize).product();
            let keeps = others || captured.contains(name) || shared.read_as_single.contains(name);
            let new = match keeps {
                true => work.draft.value_name(&format!("{name}_cast_to_{}", self.ty.suffix())),
                false => name.to_string(),
            };
            let header = TensorProto {
                name: Some(new.clone()),
                data_type: Some(self.ty.dtype().onnx_code()),
                dims: proto.dims.clone(),
                doc_string: proto.doc_string.clone(),
                metadata_props: proto.metadata_props.clone(),
                ..TensorProto::default()
            };
            let job = work.draft.jobs.len();
            let shape: Vec<usize> = proto.dims.iter().map(|size| *size as usize).collect();
            let (is_half, is_transposed, has_one_point) = (true, false, false);
            work.draft.jobs.push(Job {
                weight: proto.clone(),
                codes: new.clone(),
                is_transposed,
                shape: shape.clone(),
                is_half,
                has_one_point,
                scales: None,
                bias: None,
                importance: None,
                ready: None,
                form: Form::Half(self.ty),
            });
            work.draft.parts.push(Part { header, from: Some((job, 0)) });
            if keeps {
                self.casts.insert(name.to_string(), new.clone());
                shared.copies.insert(name.to_string(), new.clone());
            } else {
                work.draft.replace(name);
                self.halves.insert(name.to_string());
                shared.halves.insert(name.to_string());
            }
            let before = if keeps { 0 } else { 4 * elements };
            let converted = Converted { name: new, shape, before, after: 2 * elements };
            self.constants.entry(first).or_default().push(converted);
        }
        Ok(())
    }

    /// The name of a value as the wanted type, with a Cast if it has the other one.
    fn read(&mut self, work: &mut Work, name: &str, is_half: bool) -> String {
        let own = self.inner.get(name).cloned().unwrap_or_else(|| name.to_string());
        if self.halves.contains(name) == is_half {
            return own;
        }
        if let Some(cast) = self.casts.get(name) {
            return cast.clone();
        }
        let (suffix, to) = if is_half { (self.ty.suffix(), self.ty.dtype()) } else { ("fp32", DType::F32) };
        let (value, title) = match self.inputs.get(name).filter(|_| is_half) {
            Some(place) => (format!("graph_input_cast_{place}"), format!("graph_input_cast{place}")),
            None => (format!("{name}_cast_to_{suffix}"), format!("{name}_cast_to_{suffix}_node")),
        };
        let (cast, title) = (work.draft.value_name(&value), work.draft.node_name(&title));
        let attributes = vec![integer("to", i64::from(to.onnx_code()))];
        work.draft.nodes.push(node(("", "Cast"), title, &[&own], &[&cast], attributes));
        self.casts.insert(name.to_string(), cast.clone());
        cast
    }

    fn convert(
        &mut self,
        work: &mut Work,
        old: &NodeProto,
        role: &Role,
        cast_outputs: &BTreeMap<&str, usize>,
    ) -> Result<()> {
        if matches!(role, Role::Gone) {
            return Ok(());
        }
        let mut new = old.clone();
        for (place, input) in new.input.iter_mut().enumerate() {
            if !work.is_single(input) {
                continue;
            }
            let is_half = matches!(role, Role::Half(spec) if allows_half(self.ty, spec, spec.inputs, place));
            let name = self.read(work, input, is_half);
            *input = name;
        }
        // A body reads the values around it by their names, which have to be float32 there.
        for name in subgraphs(old).flat_map(|graph| reads(&graph.node)).collect::<BTreeSet<_>>() {
            // It was rewritten with constants as they are now.
            let is_value = work.is_single(&name) && work.draft.constant(&name).is_none();
            if is_value && (self.halves.contains(&name) || self.inner.contains_key(&name)) {
                let cast = self.read(work, &name, false);
                rename_reads(std::slice::from_mut(&mut new), &name, &cast);
            }
        }
        for body in subgraphs_mut(&mut new) {
            body.value_info.clear();
        }
        let mut last = Vec::new();
        if let Role::Half(spec) = role {
            for (place, output) in new.output.iter_mut().enumerate() {
                if !work.is_single(output) || !allows_half(self.ty, spec, spec.outputs, place) {
                    continue;
                }
                self.halves.insert(output.clone());
                let Some(number) = cast_outputs.get(output.as_str()) else { continue };
                // The caller reads float32, the nodes read what was computed.
                let inner = work.draft.value_name(&format!("graph_output_cast_{number}"));
                let name = work.draft.node_name(&format!("graph_output_cast{number}"));
                let to = vec![integer("to", i64::from(DType::F32.onnx_code()))];
                last.push(node(("", "Cast"), name, &[&inner], &[output], to));
                self.casts.insert(output.clone(), output.clone());
                self.inner.insert(output.clone(), inner.clone());
                *output = inner;
            }
            new.attribute.iter_mut().try_for_each(|attribute| convert_attribute(self.ty, old, attribute))?;
        }
        work.draft.nodes.push(new);
        work.draft.nodes.append(&mut last);
        Ok(())
    }

    /// A row for each constant that was converted, and for each node that stays.
    fn note(&self, work: &mut Work, (index, node): (usize, &NodeProto), role: &Role) {
        if let Role::Single { reason } = role {
            work.note(node, Vec::new(), Outcome::Kept { reason: reason.clone() });
        }
        for converted in self.constants.get(&index).into_iter().flatten() {
            let Converted { name, shape, before, after } = converted;
            let precision = format!("{}: '{name}'", self.ty.name());
            let (before, after, codes) = (*before, *after, name.clone());
            let outcome = Outcome::Quantized { precision, before, after, codes };
            work.note(node, shape.clone(), outcome);
        }
    }
}

/// Makes an attribute say the type of 16 bits: the target of a Cast, and tensors.
fn convert_attribute(ty: HalfType, node: &NodeProto, attribute: &mut AttributeProto) -> Result<()> {
    let single = i64::from(DType::F32.onnx_code());
    if is_standard(node, "Cast") && attribute.name() == "to" && attribute.i() == single {
        attribute.i = Some(i64::from(ty.dtype().onnx_code()));
    }
    if let Some(proto) = attribute.t.as_deref_mut()
        && proto.data_type() == DType::F32.onnx_code()
    {
        let tensor = tensor_from_proto(proto.clone(), &mut ort_core::onnx::ExternalData::unavailable())?;
        let numbers = tensor.to_vec::<f32>()?.into_iter();
        let halves = match ty {
            HalfType::Float16 => {
                Tensor::from_vec::<f16>(tensor.shape(), numbers.map(nearest_half).collect())?
            }
            HalfType::BFloat16 => {
                Tensor::from_vec::<bf16>(tensor.shape(), numbers.map(nearest_bfloat).collect())?
            }
        };
        *proto = tensor_to_proto(proto.name(), &halves)?;
    }
    Ok(())
}

/// Declares a float32 value as one of 16 bits. Returns whether it was one.
fn set_half(info: &mut ValueInfoProto, ty: HalfType) -> bool {
    let value = info.r#type.as_mut().and_then(|ty| ty.value.as_mut());
    let Some(TypeValue::TensorType(tensor)) = value else { return false };
    let is_single = tensor.elem_type == Some(DType::F32.onnx_code());
    if is_single {
        tensor.elem_type = Some(ty.dtype().onnx_code());
    }
    is_single
}
