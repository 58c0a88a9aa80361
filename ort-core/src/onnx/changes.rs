//! Load-time changes to a model: fixed dimensions, and weights and data files from memory.
//!
//! ONNX Runtime calls them free dimension overrides, initializers and external initializers. They
//! apply to the messages before the graph is built, so that inference and all later stages see only
//! the changed model.

use std::collections::{BTreeMap, BTreeSet};

use blake3::Hasher;
use bytes::Bytes;
use ort_alloc::DeviceId;

use super::external::ExternalData;
use super::proto::tensor_shape_proto::{Dimension, dimension};
use super::proto::type_proto::Value;
use super::proto::{GraphProto, TensorShapeProto, ValueInfoProto};
use super::types::dtype_from_code;
use super::warnings::{WarningKind, Warnings};
use crate::cache::{Content, Identity};
use crate::custom::CustomOperators;
use crate::dim::{Bindings, Dim, Symbol};
use crate::tensor::Tensor;
use crate::{Result, Within, advise, ensure, error};

/// What loading changes in a model, for
/// [`Model::from_source_with`](crate::session::Model::from_source_with).
///
/// Names that the model does not have are warnings, unless a field says otherwise. A weight or a
/// file is used where it lies: the model shares its memory.
///
/// ```no_run
/// use ort_core::onnx::{FileAccess, LoadOptions, Source};
/// use ort_core::session::Model;
/// use ort_core::tensor::Tensor;
///
/// let options = LoadOptions {
///     free_dimensions: vec![("batch".into(), 4)],
///     initializers: vec![("bias".into(), Tensor::from_slice(&[3], &[1.0f32, 2.0, 3.0])?)],
///     ..LoadOptions::default()
/// };
/// let source = Source::open("model.onnx", FileAccess::default())?;
/// let model = Model::from_source_with(source, &options)?;
/// # Ok::<(), ort_core::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct LoadOptions {
    /// Sizes of symbolic dimensions, by name. A name counts if a dimension of a graph input has it,
    /// or has it in an expression. The size then replaces it in all declared shapes. Of two sizes
    /// for one name the last counts; a negative size is an error.
    pub free_dimensions: Vec<(String, i64)>,
    /// Sizes of dimensions of graph inputs, by denotation (`DATA_BATCH`) in upper or lower case. An
    /// input that declares another size is an error.
    pub free_denotations: Vec<(String, i64)>,
    /// Values that replace those of initializers. A type or shape other than the initializer's is
    /// an error.
    pub initializers: Vec<(String, Tensor)>,
    /// Values of initializers whose data is external. Their files need not exist. A name that the
    /// model does not have, or whose data is in the model, is an error.
    pub external_initializers: Vec<(String, Tensor)>,
    /// The content of external data files, by the `location` that the model has for them.
    pub external_files: Vec<(String, Bytes)>,
    /// Operators that the model may use besides those of this build. They take precedence over
    /// operators of the same name.
    pub operators: CustomOperators,
}

/// Fixes the dimensions that the options name. Returns what was fixed in the form that the compiled
/// cache uses.
///
/// Errors: a negative size, an input that declares another size than its denotation is given.
pub(super) fn fix_dimensions(
    options: &LoadOptions,
    graph: &mut GraphProto,
    warnings: &mut Warnings,
) -> Result<Option<Content>> {
    let mut fixed = FixedDimensions::new(options)?;
    if fixed.names.is_empty() && fixed.denotations.is_empty() {
        return Ok(None);
    }
    for ValueInfoProto { name, r#type: ty, .. } in &mut graph.input {
        let Some(shape) = ty.as_mut().and_then(|ty| ty.value.as_mut()).and_then(shape_in) else { continue };
        let place = || format!("input '{}'", name.as_deref().unwrap_or_default());
        fixed.fix_input(shape).within(place)?;
    }
    fixed.keep_found(options, warnings)?;
    fixed.fix_names(graph);
    let FixedDimensions { names, denotations, .. } = fixed;
    if names.is_empty() && denotations.is_empty() {
        return Ok(None);
    }
    let text = format!("{names:?} {denotations:?}");
    Ok(Some(Content::new("\0dimensions".into(), text.into(), None, Identity::Unknown)))
}

/// The sizes that the options give to dimensions.
struct FixedDimensions<'o> {
    names: BTreeMap<&'o str, i64>,
    /// By denotation in lower case.
    denotations: BTreeMap<String, i64>,
    /// The names and denotations that inputs have.
    found_names: BTreeSet<&'o str>,
    found_denotations: BTreeSet<String>,
}

impl<'o> FixedDimensions<'o> {
    fn new(options: &'o LoadOptions) -> Result<FixedDimensions<'o>> {
        let LoadOptions { free_dimensions, free_denotations, .. } = options;
        for (name, size) in free_dimensions.iter().chain(free_denotations) {
            ensure!(
                *size >= 0,
                InvalidArgument,
                help = "leave it out to keep the dimension free",
                "dimension '{name}' is given size {size}, expected 0 or more"
            );
        }
        Ok(FixedDimensions {
            names: free_dimensions.iter().map(|(name, size)| (name.as_str(), *size)).collect(),
            denotations: free_denotations.iter().map(|(name, size)| (lower(name), *size)).collect(),
            found_names: BTreeSet::new(),
            found_denotations: BTreeSet::new(),
        })
    }

    /// Fixes the denoted dimensions of an input, and records which names its shape has.
    fn fix_input(&mut self, shape: &mut TensorShapeProto) -> Result<()> {
        for Dimension { denotation, value } in &mut shape.dim {
            let is_named = match &*value {
                Some(dimension::Value::DimParam(text)) => self.find_names(text),
                _ => false,
            };
            let Some(denotation) = denotation.as_deref().filter(|text| !text.is_empty()).map(lower) else {
                continue;
            };
            let Some(&size) = self.denotations.get(&denotation) else { continue };
            self.found_denotations.insert(denotation.clone());
            // A size by name takes precedence over one by denotation.
            if is_named {
                continue;
            }
            let declared = match &*value {
                Some(dimension::Value::DimValue(declared)) => Some(*declared).filter(|size| *size >= 0),
                _ => None,
            };
            ensure!(
                declared.is_none_or(|declared| declared == size),
                InvalidArgument,
                help = "leave the size out, or give the one that the model declares",
                "Invalid free dimension override. Denotation '{denotation}' is given size {size}, the model declares {}",
                declared.unwrap_or_default()
            );
            *value = Some(dimension::Value::DimValue(size));
        }
        Ok(())
    }

    /// Records which of the names a dimension has. Returns whether it has any.
    fn find_names(&mut self, text: &str) -> bool {
        // First as a whole: for ONNX Runtime every text is a name.
        if let Some((&name, _)) = self.names.get_key_value(text) {
            self.found_names.insert(name);
            return true;
        }
        let symbols = Dim::parse(text).symbols();
        let found = symbols.iter().filter_map(|symbol| self.names.get_key_value(symbol.name()?));
        let found: Vec<&'o str> = found.map(|(&name, _)| name).collect();
        self.found_names.extend(found.iter().copied());
        !found.is_empty()
    }

    /// Forgets the names and denotations that no input has, with a warning.
    fn keep_found(&mut self, options: &LoadOptions, warnings: &mut Warnings) -> Result<()> {
        let (names, denotations) = (&self.found_names, &self.found_denotations);
        let unknown_names = options.free_dimensions.iter().filter(|(name, _)| !names.contains(name.as_str()));
        let unknown_denotations =
            options.free_denotations.iter().filter(|(name, _)| !denotations.contains(&lower(name)));
        let unknown = unknown_names.map(|(name, _)| ("dimension", name));
        for (what, name) in unknown.chain(unknown_denotations.map(|(name, _)| ("denotation", name))) {
            let text = format!("no input has the {what} '{name}', so the size given for it has no effect");
            warnings.add(WarningKind::LoadOption, String::new, text)?;
        }
        self.names.retain(|name, _| names.contains(name));
        self.denotations.retain(|name, _| denotations.contains(name));
        Ok(())
    }

    /// Replaces the names by their sizes in the declared types of a graph and its subgraphs.
    fn fix_names(&self, graph: &mut GraphProto) {
        if self.names.is_empty() {
            return;
        }
        let bindings: Bindings =
            self.names.iter().map(|(name, size)| (Symbol::named(*name), *size)).collect();
        // A worklist, so that deep nesting cannot overflow the stack.
        let mut graphs = vec![graph];
        while let Some(graph) = graphs.pop() {
            let GraphProto { node, input, output, value_info, .. } = graph;
            for info in input.iter_mut().chain(output).chain(value_info) {
                let value = info.r#type.as_mut().and_then(|ty| ty.value.as_mut());
                let dims = value.and_then(shape_in).map(|shape| &mut shape.dim);
                dims.into_iter().flatten().for_each(|dim| self.fix_name(dim, &bindings));
            }
            for attribute in node.iter_mut().flat_map(|node| &mut node.attribute) {
                graphs.extend(attribute.g.as_deref_mut());
                graphs.extend(&mut attribute.graphs);
            }
        }
    }

    fn fix_name(&self, dim: &mut Dimension, bindings: &Bindings) {
        let Some(dimension::Value::DimParam(text)) = &dim.value else { return };
        let size = match self.names.get(text.as_str()) {
            Some(size) => Dim::constant(*size),
            None => {
                let declared = Dim::parse(text);
                let size = declared.bind(bindings);
                if size == declared {
                    return;
                }
                size
            }
        };
        dim.value = match size.as_constant() {
            Some(size) if size >= 0 => Some(dimension::Value::DimValue(size)),
            // Negative, as `n - 4` is for an `n` below 4: the declaration is wrong, so it says
            // nothing.
            Some(_) => None,
            None if size.has_unknown() => None,
            None => Some(dimension::Value::DimParam(size.to_string())),
        };
    }
}

/// ONNX Runtime compares denotations without regard to case.
fn lower(denotation: &str) -> String {
    denotation.to_ascii_lowercase()
}

/// Returns the shape in a type: that of the tensor, or of the innermost element of a container.
fn shape_in(value: &mut Value) -> Option<&mut TensorShapeProto> {
    let element = match value {
        Value::TensorType(tensor) => return tensor.shape.as_mut(),
        Value::SparseTensorType(tensor) => return tensor.shape.as_mut(),
        Value::SequenceType(sequence) => &mut sequence.elem_type,
        Value::OptionalType(optional) => &mut optional.elem_type,
        Value::MapType(map) => &mut map.value_type,
        Value::OpaqueType(_) => return None,
    };
    // The protobuf decoder bounds the nesting.
    shape_in(element.as_mut()?.value.as_mut()?)
}

/// The values that the options give to initializers of the model, by name.
pub(super) struct GivenValues<'o>(BTreeMap<&'o str, GivenValue<'o>>);

struct GivenValue<'o> {
    tensor: &'o Tensor,
    /// Whether it is for an initializer with external data only.
    is_external: bool,
}

impl<'o> GivenValues<'o> {
    /// Collects the values for the initializers in `known`, the names that the model has.
    ///
    /// Errors: two values for one name, a value in device memory, an external initializer that the
    /// model does not have.
    pub(super) fn new(
        options: &'o LoadOptions,
        known: &[String],
        warnings: &mut Warnings,
    ) -> Result<GivenValues<'o>> {
        let LoadOptions { initializers, external_initializers, .. } = options;
        let mut values = BTreeMap::new();
        if initializers.is_empty() && external_initializers.is_empty() {
            return Ok(GivenValues(values));
        }
        let known: BTreeSet<&str> = known.iter().map(String::as_str).collect();
        let ordinary = initializers.iter().map(|given| (given, false));
        for ((name, tensor), is_external) in
            ordinary.chain(external_initializers.iter().map(|given| (given, true)))
        {
            ensure!(
                tensor.memory() == DeviceId::HOST,
                InvalidArgument,
                help = "copy it to the host first",
                "the value given for initializer '{name}' is in device memory"
            );
            match (known.contains(name.as_str()), is_external) {
                (true, _) => {
                    let other = values.insert(name.as_str(), GivenValue { tensor, is_external });
                    ensure!(other.is_none(), InvalidArgument, "{}", added_already(name));
                }
                (false, true) => {
                    return Err(error!(Fail, "Failed to find existing initializer with name {name}.")
                        .help(advise("initializers", name, known.iter().copied())));
                }
                (false, false) => {
                    let text = "the model has no such initializer, so the value given for it is not used";
                    warnings.add(WarningKind::LoadOption, || format!("initializer '{name}'"), text)?;
                }
            }
        }
        Ok(GivenValues(values))
    }

    /// Returns the value given for an initializer of this name, element type and shape.
    ///
    /// Errors: the value has another type or shape, or it is for external data and the data is in
    /// the model.
    pub(super) fn value(
        &self,
        name: &str,
        code: i32,
        dims: &[i64],
        is_external: bool,
    ) -> Result<Option<Tensor>> {
        let Some(given) = self.0.get(name) else { return Ok(None) };
        ensure!(
            is_external || !given.is_external,
            Fail,
            help = "give it as an ordinary initializer",
            "Trying to replace non-external initializer with external data: '{name}'"
        );
        let (tensor, dtype) = (given.tensor, dtype_from_code(code)?);
        let declared = dims.iter().map(|size| usize::try_from(*size).ok());
        let is_same_shape = declared.eq(tensor.shape().iter().map(|size| Some(*size)));
        ensure!(
            tensor.dtype() == dtype && is_same_shape,
            InvalidArgument,
            help = "give a tensor of the type and shape that the model declares",
            "initializer '{name}' is {dtype}{dims:?} in the model, the value given for it is {}{:?}",
            tensor.dtype(),
            tensor.shape()
        );
        Ok(Some(tensor.clone()))
    }

    /// Returns the values in the form that the compiled cache uses.
    pub(super) fn contents(&self) -> Vec<Content> {
        self.0.iter().map(|(name, given)| content_of(name, given.tensor)).collect()
    }
}

fn content_of(name: &str, tensor: &Tensor) -> Content {
    // A null byte, which no location of a data file has: the names of files and of changes differ.
    let name = format!("\0initializer {name}");
    match tensor.bytes() {
        Some(bytes) => Content::new(name, bytes.clone(), None, Identity::Unknown),
        None => {
            // Strings: values in device memory were refused.
            let mut hasher = Hasher::new();
            for text in tensor.strings().unwrap_or_default() {
                hasher.update(&(text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
            Content::new(name, Bytes::new(), None, Identity::Hash(hasher.finalize()))
        }
    }
}

/// Adds the files that the options give to the data files of the model.
///
/// Errors: two files of one name.
pub(super) fn give_files(options: &LoadOptions, external: &mut ExternalData) -> Result<()> {
    let mut names = BTreeSet::new();
    for (name, bytes) in &options.external_files {
        ensure!(names.insert(name.as_str()), InvalidArgument, "{}", added_already(name));
        external.give(name, bytes.clone());
    }
    Ok(())
}

/// Warns of the given files that no initializer is read from.
pub(super) fn warn_of_unread_files(
    options: &LoadOptions,
    external: &ExternalData,
    warnings: &mut Warnings,
) -> Result<()> {
    let unread = options.external_files.iter().filter(|(name, _)| !external.was_read(name));
    for (name, _) in unread {
        let text = "no initializer is read from the file of that name, so its content is not used";
        warnings.add(WarningKind::LoadOption, || format!("external data '{name}'"), text)?;
    }
    Ok(())
}

fn added_already(name: &str) -> String {
    format!("A value for this name has already been added: {name}")
}

#[cfg(test)]
mod tests {
    use super::super::proto::{AttributeProto, NodeProto, TypeProto, type_proto};
    use super::*;

    fn named(name: &str) -> Dimension {
        Dimension { denotation: None, value: Some(dimension::Value::DimParam(name.into())) }
    }

    /// A sequence of tensors of these dimensions.
    fn info(names: &[&str]) -> ValueInfoProto {
        let shape = Some(TensorShapeProto { dim: names.iter().map(|name| named(name)).collect() });
        let tensor = type_proto::Tensor { elem_type: Some(1), shape };
        let element = TypeProto { denotation: None, value: Some(Value::TensorType(tensor)) };
        let sequence = type_proto::Sequence { elem_type: Some(Box::new(element)) };
        let ty = TypeProto { denotation: None, value: Some(Value::SequenceType(sequence)) };
        ValueInfoProto { r#type: Some(ty), ..ValueInfoProto::default() }
    }

    fn texts(info: &mut ValueInfoProto) -> Vec<String> {
        let value = info.r#type.as_mut().and_then(|ty| ty.value.as_mut());
        let text = |dim: &Dimension| match &dim.value {
            Some(dimension::Value::DimValue(size)) => size.to_string(),
            Some(dimension::Value::DimParam(name)) => name.clone(),
            None => "?".into(),
        };
        value.and_then(shape_in).map(|shape| shape.dim.iter().map(text).collect()).unwrap_or_default()
    }

    #[test]
    fn names_are_replaced_in_bodies_and_containers_if_an_input_has_them() -> Result<()> {
        let declared = ["n", "n + m", "2*n", "n - 5", "free", "n.1"];
        let body = GraphProto { value_info: vec![info(&declared)], ..GraphProto::default() };
        let attribute = AttributeProto { g: Some(Box::new(body)), ..AttributeProto::default() };
        let node = NodeProto { attribute: vec![attribute], ..NodeProto::default() };
        let mut graph = GraphProto {
            node: vec![node],
            input: vec![info(&["n"])],
            output: vec![info(&declared)],
            ..GraphProto::default()
        };
        let free_dimensions = vec![("n".into(), 4), ("free".into(), 7)];
        let options = LoadOptions { free_dimensions, ..LoadOptions::default() };
        let mut warnings = Warnings::default();
        let fixed = fix_dimensions(&options, &mut graph, &mut warnings)?;
        assert!(fixed.is_some() && warnings.into_list().len() == 1, "no input has the dimension 'free'");
        let body = graph.node[0].attribute[0].g.as_deref_mut().and_then(|body| body.value_info.first_mut());
        let infos = body.into_iter().chain(&mut graph.output);
        let expected = ["4", "m + 4", "8", "?", "free", "n.1"];
        for texts in infos.map(texts) {
            assert_eq!(texts, expected);
        }
        Ok(())
    }
}
