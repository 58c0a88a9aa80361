//! `LabelEncoder`: maps each element to the value of its key.

use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::spec::{AttrKind, Draft, InferCx, ONNX_ML, OP, OpSpec, Upgrade, attr, one, var};
use crate::{Result, ensure, error};

const LABELS: TypeSet =
    TypeSet::of(&[DType::String, DType::I64, DType::F32, DType::I32, DType::I16, DType::F64]);

static LABEL_ENCODER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "LabelEncoder",
    since: 4,
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: &[var("T1", LABELS), var("T2", LABELS)],
    attrs: &[
        attr::optional("default_tensor", AttrKind::Tensor),
        attr::int("default_int64", -1),
        attr::float("default_float", -0.0),
        attr::string("default_string", "_Unused"),
        attr::optional("values_int64s", AttrKind::Ints),
        attr::optional("values_strings", AttrKind::Strings),
        attr::optional("values_tensor", AttrKind::Tensor),
        attr::optional("keys_floats", AttrKind::Floats),
        attr::optional("keys_strings", AttrKind::Strings),
        attr::optional("values_floats", AttrKind::Floats),
        attr::optional("keys_int64s", AttrKind::Ints),
        attr::optional("keys_tensor", AttrKind::Tensor),
    ],
    infer,
    upgrades: &[
        Upgrade { before: 2, apply: classes_to_keys },
        Upgrade { before: 4, apply: without_nan_keys },
    ],
    ..OP
};

ops![LABEL_ENCODER];

/// Returns whether version 1 of the operator maps numbers to strings. The type of the input
/// decides; if it is unknown, the type of the output, then which default is given.
fn makes_strings(draft: &Draft<'_>) -> bool {
    if let Ok(dtype) = draft.dtype(0) {
        return dtype != DType::String;
    }
    let output = draft.outputs.first().copied().flatten();
    match output.and_then(|id| draft.value_type(id).dtype()) {
        Some(dtype) => dtype == DType::String,
        None => draft.attr("default_string").is_some() && draft.attr("default_int64").is_none(),
    }
}

/// Before version 2 the classes were a list of strings, numbered by their position.
fn classes_to_keys(draft: &mut Draft<'_>) -> Result<()> {
    let Some(Attribute::Strings(classes)) = draft.take_attr("classes_strings") else {
        return Err(error!(InvalidGraph, "LabelEncoder has no 'classes_strings'"));
    };
    // The position of a class is its number, in either direction.
    let places = Attribute::Ints((0..classes.len() as i64).collect());
    let classes = Attribute::Strings(classes);
    if makes_strings(draft) {
        // The other default would be of the wrong type for the values.
        draft.take_attr("default_int64");
        draft.set_attr("keys_int64s", places);
        draft.set_attr("values_strings", classes);
    } else {
        draft.take_attr("default_string");
        draft.set_attr("keys_strings", classes);
        draft.set_attr("values_int64s", places);
    }
    Ok(())
}

/// Drops NaN keys. Before version 4 a NaN key matches nothing, in ONNX Runtime and the standard's
/// reference evaluator; since then it matches every NaN.
fn without_nan_keys(draft: &mut Draft<'_>) -> Result<()> {
    let Some(Attribute::Floats(keys)) = draft.attr("keys_floats") else { return Ok(()) };
    if !keys.iter().any(|key| key.is_nan()) {
        return Ok(());
    }
    fn kept<T: Clone>(keys: &[f32], list: &[T]) -> Vec<T> {
        let pairs = keys.iter().zip(list).filter(|(key, _)| !key.is_nan());
        pairs.map(|(_, element)| element.clone()).collect()
    }
    let keys = keys.clone();
    for name in ["values_int64s", "values_floats", "values_strings"] {
        let values = match draft.attr(name) {
            Some(Attribute::Ints(values)) if values.len() == keys.len() => {
                Attribute::Ints(kept(&keys, values))
            }
            Some(Attribute::Floats(values)) if values.len() == keys.len() => {
                Attribute::Floats(kept(&keys, values))
            }
            Some(Attribute::Strings(values)) if values.len() == keys.len() => {
                Attribute::Strings(kept(&keys, values))
            }
            // Keys and values of different lengths stay as they are, and the kernel refuses them.
            Some(_) => return Ok(()),
            None => continue,
        };
        draft.set_attr(name, values);
    }
    draft.set_attr("keys_floats", Attribute::Floats(kept(&keys, &keys)));
    Ok(())
}

/// Returns the type of the keys or values, from whichever of the four attributes is given.
fn listed_type(cx: &InferCx<'_>, what: &str) -> Result<DType> {
    let name = |kind: &str| format!("{what}_{kind}");
    let attrs = cx.attrs;
    let dtype = attrs
        .find_tensor(&name("tensor"))
        .map(|tensor| tensor.dtype())
        .or_else(|| attrs.find_ints(&name("int64s")).map(|_| DType::I64))
        .or_else(|| attrs.find_floats(&name("floats")).map(|_| DType::F32))
        .or_else(|| attrs.find_strings(&name("strings")).map(|_| DType::String));
    dtype.ok_or_else(|| error!(InvalidGraph, "LabelEncoder has no {what}"))
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (keys, values) = (listed_type(cx, "keys")?, listed_type(cx, "values")?);
    if let Ok(dtype) = cx.dtype(0) {
        let (given, keys_name) = (dtype.name(), keys.name());
        ensure!(dtype == keys, InvalidGraph, "the input is {given}, but the keys are {keys_name}");
    }
    let shape = cx.shape(0).map(<[_]>::to_vec);
    cx.set(0, values, shape);
    Ok(())
}
