//! Operator schemas and kernels, as the objects of the package's `_schemas` module.

use ort_runtime::onnxruntime::CPU;
use ort_runtime::spec::{Arity, AttrDefault, AttrKind, AttrSpec, OpSpec, Param, Registry};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyType};

use crate::error::OrRaise;

/// What stands for any number of inputs or outputs, and for no last opset.
const MANY: usize = i32::MAX as usize;

/// Returns the newest schema of each operator.
pub(crate) fn operator_schemas(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let classes = Classes::find(py)?;
    let list = PyList::empty(py);
    for spec in public_records(py)? {
        list.append(classes.schema(spec)?)?;
    }
    Ok(list)
}

/// Returns the kernels of the CPU, which runs every operator.
pub(crate) fn kernel_definitions(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let class = py.import("ort_runtime.capi._schemas")?.getattr("KernelDef")?;
    let list = PyList::empty(py);
    for spec in public_records(py)? {
        let types = PyDict::new(py);
        for variable in spec.types {
            types.set_item(variable.name, variable.types.names())?;
        }
        let opsets = (spec.first, MANY);
        list.append(class.call1((spec.name, spec.domain, opsets, CPU, types))?)?;
    }
    Ok(list)
}

/// The operators that a model may have; those of the runtime's own domain only rewrites make.
fn public_records(py: Python<'_>) -> PyResult<impl Iterator<Item = &'static OpSpec>> {
    let records = Registry::global().or_raise(py)?.records();
    Ok(records.iter().copied().filter(|spec| spec.domain != ort_runtime::spec::RUNTIME))
}

/// The classes of `_schemas`.
struct Classes<'py> {
    schema: Bound<'py, PyType>,
    parameter: Bound<'py, PyAny>,
    attribute: Bound<'py, PyAny>,
    constraint: Bound<'py, PyAny>,
}

impl<'py> Classes<'py> {
    fn find(py: Python<'py>) -> PyResult<Classes<'py>> {
        let schema: Bound<'_, PyType> =
            py.import("ort_runtime.capi._schemas")?.getattr("OpSchema")?.cast_into()?;
        Ok(Classes {
            parameter: schema.getattr("FormalParameter")?,
            attribute: schema.getattr("Attribute")?,
            constraint: schema.getattr("TypeConstraintParam")?,
            schema,
        })
    }

    fn schema(&self, spec: &'static OpSpec) -> PyResult<Bound<'py, PyAny>> {
        let py = self.schema.py();
        let fields = PyDict::new(py);
        fields.set_item("name", spec.name)?;
        fields.set_item("domain", spec.domain)?;
        fields.set_item("since_version", spec.since)?;
        fields.set_item("doc", "")?;
        fields.set_item("file", "")?;
        fields.set_item("line", 0)?;
        fields.set_item("support_level", 0)?;
        // An upgrade from every opset: a successor has replaced the operator.
        let is_deprecated = spec.upgrades.iter().any(|upgrade| upgrade.before == i64::MAX);
        fields.set_item("deprecated", is_deprecated)?;
        let ([min_input, max_input], [min_output, max_output]) = (counts(spec.inputs), counts(spec.outputs));
        fields.set_item("min_input", min_input)?;
        fields.set_item("max_input", max_input)?;
        fields.set_item("min_output", min_output)?;
        fields.set_item("max_output", max_output)?;
        fields.set_item("inputs", self.parameters(spec, spec.inputs)?)?;
        fields.set_item("outputs", self.parameters(spec, spec.outputs)?)?;
        let attributes = PyDict::new(py);
        for attr in spec.attrs {
            attributes.set_item(attr.name, self.attribute(attr)?)?;
        }
        fields.set_item("attributes", attributes)?;
        let constraints = PyList::empty(py);
        for variable in spec.types {
            constraints.append(self.constraint.call1((variable.name, "", variable.types.names()))?)?;
        }
        fields.set_item("type_constraints", constraints)?;
        fields.set_item("has_type_and_shape_inference_function", true)?;
        self.schema.call((), Some(&fields))
    }

    fn parameters(&self, spec: &OpSpec, params: &[Param]) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(self.schema.py());
        for param in params {
            let variable = spec.types.iter().find(|variable| variable.name == param.ty);
            let types = variable.map_or_else(|| vec![param.ty.to_owned()], |variable| variable.types.names());
            let (option, is_homogeneous) = match param.arity {
                Arity::Single => (0, true),
                Arity::Optional => (1, true),
                Arity::Variadic { homogeneous, .. } => (2, homogeneous),
            };
            let parameter = (param.name, "", param.ty, types, option, is_homogeneous);
            list.append(self.parameter.call1(parameter)?)?;
        }
        Ok(list)
    }

    fn attribute(&self, attr: &AttrSpec) -> PyResult<Bound<'py, PyAny>> {
        let is_required = attr.default == AttrDefault::Required;
        self.attribute.call1((attr.name, "", attribute_code(attr.kind), is_required))
    }
}

/// Returns the fewest and the most values of parameters.
fn counts(params: &[Param]) -> [usize; 2] {
    let (mut fewest, mut most) = (0, params.len());
    for (place, param) in params.iter().enumerate() {
        match param.arity {
            Arity::Single => fewest = place + 1,
            Arity::Optional => {}
            Arity::Variadic { min, .. } => {
                fewest = place + min;
                most = MANY;
            }
        }
    }
    [fewest, most]
}

/// ONNX's number of a kind of attribute.
fn attribute_code(kind: AttrKind) -> i32 {
    match kind {
        AttrKind::Float => 1,
        AttrKind::Int => 2,
        AttrKind::String => 3,
        AttrKind::Tensor => 4,
        AttrKind::Graph => 5,
        AttrKind::Floats => 6,
        AttrKind::Ints => 7,
        AttrKind::Strings => 8,
        AttrKind::Tensors => 9,
        AttrKind::Sparse => 11,
        AttrKind::Type => 13,
    }
}
