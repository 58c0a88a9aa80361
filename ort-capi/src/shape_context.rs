//! `OrtShapeInferContext`: shape inference of a client's operator.

use std::collections::HashMap;
use std::ffi::CString;

use ort_runtime::dim::Dim;
use ort_runtime::fork::Mutex;
use ort_runtime::ir::ValueType;
use ort_runtime::spec::InferCx;
use ort_sys::OrtShapeInferContext;

use crate::element_type::known;
use crate::entry::{In, Object, Out, Text, entries, kinds};
use crate::op_attr::OpAttr;
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::type_info::{ShapeSource, TensorInfo, TypeInfo};

/// What a client reads of the inputs, and what it says of the outputs.
pub(crate) struct ShapeContext {
    inputs: Vec<Option<Object<TensorInfo>>>,
    attributes: Vec<Object<OpAttr>>,
    /// By position, as the client sets them.
    outputs: Mutex<Vec<Option<TensorInfo>>>,
}

kinds! {
    ShapeContext => "OrtShapeInferContext", b"OrtShpIn";
}

/// Names of sizes that are no numbers.
type Names = HashMap<CString, Dim>;

/// Calls a client's function, and sets the outputs as it says.
pub(crate) fn infer(
    cx: &mut InferCx<'_>,
    function: impl FnOnce(*mut OrtShapeInferContext) -> Outcome,
) -> Outcome {
    let mut names = Names::new();
    let inputs = (0..cx.input_count()).map(|index| input_info(cx.input_type(index), &mut names));
    let inputs = inputs.collect::<Outcome<_>>()?;
    let attributes = cx.attrs.iter().map(|(name, value)| Ok(Object::new(OpAttr::of(name, value)?)));
    let context = Box::new(Object::new(ShapeContext {
        inputs,
        attributes: attributes.collect::<Outcome<_>>()?,
        outputs: Mutex::new(vec![None; cx.output_count()]),
    }));
    function((&raw const *context).cast_mut().cast())?;
    let outputs = std::mem::take(&mut *context.inner.outputs.lock());
    for (index, info) in outputs.into_iter().enumerate() {
        let Some(info) = info else { continue };
        let Some(dtype) = known(info.element_type) else {
            return invalid(format!("output {index} was given no element type by its shape inference"));
        };
        let size = |(size, name): (i64, &CString)| match names.get(name) {
            _ if size >= 0 => Dim::constant(size),
            Some(known) => known.clone(),
            None => cx.fresh(),
        };
        let shape = info.has_shape.then(|| info.named_dims().map(size).collect());
        cx.set(index, dtype, shape);
    }
    Ok(())
}

/// The type of an input. Its sizes that are no numbers get names, by which the client may return
/// them.
fn input_info(ty: Option<&ValueType>, names: &mut Names) -> Outcome<Option<Object<TensorInfo>>> {
    let Some(ty) = ty else { return Ok(None) };
    let mut info = match TypeInfo::of(ty, &ShapeSource::default()) {
        TypeInfo::Tensor(info) => info.inner,
        TypeInfo::Unknown => return Ok(None),
        _ => return fail(code::FAIL, "shape inference not yet supported for non-tensor types".to_owned()),
    };
    for (index, size) in ty.shape().into_iter().flatten().enumerate() {
        if size.as_constant().is_none() && !size.has_unknown() {
            let name = CString::new(size.to_string()).unwrap_or_default();
            names.insert(name.clone(), size.clone());
            info.set_name(index, name);
        }
    }
    Ok(Some(Object::new(info)))
}

entries! {
    /// 267
    fn ShapeInferContext_GetInputCount(context: In<ShapeContext>, out: Out<usize>) {
        let out = out.place()?;
        out.put(context.get()?.inputs.len());
        Ok(())
    }

    /// 268. The info is lent for the call of the client's function.
    fn ShapeInferContext_GetInputTypeShape(context: In<ShapeContext>, index: usize, out: Out<*const Object<TensorInfo>>) {
        let out = out.place()?;
        let info = context.get()?.inputs.get(index).and_then(Option::as_ref);
        out.put(info.ok_or_else(|| Failure::invalid("Failed to fetch type shape info for the index."))?);
        Ok(())
    }

    /// 269
    fn ShapeInferContext_GetAttribute(context: In<ShapeContext>, name: Text, out: Out<*const Object<OpAttr>>) {
        let out = out.place()?;
        let name = name.get("the name of the attribute")?;
        let attribute = context.get()?.attributes.iter().find(|attribute| attribute.inner.name().to_bytes() == name.as_bytes());
        out.put(attribute.ok_or_else(|| Failure::invalid("Attribute does not exist."))?);
        Ok(())
    }

    /// 270
    fn ShapeInferContext_SetOutputTypeShape(context: In<ShapeContext>, index: usize, info: In<TensorInfo>) {
        let info = info.get()?.clone();
        let mut outputs = context.get()?.outputs.lock();
        let count = outputs.len();
        match outputs.get_mut(index) {
            Some(output) => *output = Some(info),
            // A client sets all outputs of its schema, of which a node may omit the last ones.
            None if index < MOST_OUTPUTS => {}
            None => return invalid(format!("output {index} is out of range: the node has {count}")),
        }
        Ok(())
    }
}

/// More outputs than an operator declares.
const MOST_OUTPUTS: usize = 1 << 16;
