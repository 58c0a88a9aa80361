//! Map conversions: `CastMap`, `DictVectorizer` and `ZipMap`; and `FeatureVectorizer`, which
//! concatenates features of several inputs.

use super::{LABELS, NUMBERS};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::ValueType;
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, TypeVar, Types, attr, many, one, var};
use crate::{Result, ensure, error};

static CAST_MAP: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "CastMap",
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: &[
        TypeVar {
            name: "T1",
            types: Types { maps: &["map(int64, string)", "map(int64, float)"], ..Types::NONE },
        },
        var("T2", LABELS.union(TypeSet::of(&[DType::F32]))),
    ],
    attrs: &[attr::int("max_map", 1), attr::string("map_form", "DENSE"), attr::string("cast_to", "TO_FLOAT")],
    infer: infer_cast_map,
    ..OP
};

static DICT_VECTORIZER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "DictVectorizer",
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: &[
        TypeVar {
            name: "T1",
            types: Types {
                maps: &[
                    "map(string, int64)",
                    "map(int64, string)",
                    "map(int64, float)",
                    "map(int64, double)",
                    "map(string, float)",
                    "map(string, double)",
                ],
                ..Types::NONE
            },
        },
        var("T2", LABELS.union(TypeSet::of(&[DType::F32, DType::F64]))),
    ],
    attrs: &[
        attr::optional("int64_vocabulary", AttrKind::Ints),
        attr::optional("string_vocabulary", AttrKind::Strings),
    ],
    infer: infer_dict_vectorizer,
    ..OP
};

static FEATURE_VECTORIZER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "FeatureVectorizer",
    inputs: &[many("X", "T1", 1)],
    outputs: &[one("Y", "tensor(float)")],
    types: &[var("T1", NUMBERS)],
    attrs: &[attr::optional("inputdimensions", AttrKind::Ints)],
    infer: infer_feature_vectorizer,
    ..OP
};

static ZIP_MAP: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "ZipMap",
    inputs: &[one("X", "tensor(float)")],
    outputs: &[one("Z", "T")],
    types: &[TypeVar {
        name: "T",
        types: Types { maps: &["seq(map(string, float))", "seq(map(int64, float))"], ..Types::NONE },
    }],
    attrs: &[
        attr::optional("classlabels_int64s", AttrKind::Ints),
        attr::optional("classlabels_strings", AttrKind::Strings),
    ],
    infer: infer_zip_map,
    ..OP
};

ops![CAST_MAP, DICT_VECTORIZER, FEATURE_VECTORIZER, ZIP_MAP];

/// Infers one row: of all values, or in the sparse form of `max_map` values.
fn infer_cast_map(cx: &mut InferCx<'_>) -> Result<()> {
    let dtype = match cx.attrs.string("cast_to")? {
        "TO_FLOAT" => DType::F32,
        "TO_INT64" => DType::I64,
        "TO_STRING" => DType::String,
        other => {
            return Err(error!(
                InvalidGraph,
                "cast_to is '{other}', expected TO_FLOAT, TO_INT64 or TO_STRING"
            ));
        }
    };
    let columns = match cx.attrs.string("map_form")? {
        // The dense form lists all values of the map, whose number is data-dependent.
        "DENSE" => cx.fresh(),
        "SPARSE" => {
            let columns = cx.attrs.int("max_map")?;
            ensure!(columns >= 0, InvalidGraph, "max_map is {columns}, expected 0 or more");
            Dim::constant(columns)
        }
        other => return Err(error!(InvalidGraph, "map_form is '{other}', expected DENSE or SPARSE")),
    };
    cx.set(0, dtype, Some(vec![Dim::constant(1), columns]));
    Ok(())
}

/// Infers one row with a column for each word of the vocabulary.
fn infer_dict_vectorizer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(ValueType::Map(key, value)) = cx.input_type(0) else { return Ok(()) };
    let words = if *key == DType::String {
        cx.attrs.find_strings("string_vocabulary").map(<[String]>::len)
    } else {
        cx.attrs.find_ints("int64_vocabulary").map(<[i64]>::len)
    };
    let words = words.ok_or_else(|| error!(InvalidGraph, "there is no vocabulary of {}", key.name()))?;
    let dtype = value.dtype().ok_or_else(|| error!(InvalidGraph, "the map's values are no tensors"))?;
    cx.set(0, dtype, Some(vec![Dim::constant(1), Dim::constant(words as i64)]));
    Ok(())
}

/// Infers the concatenated columns of all inputs, each cut or padded to its size in
/// `inputdimensions`.
fn infer_feature_vectorizer(cx: &mut InferCx<'_>) -> Result<()> {
    let sizes = cx.attrs.find_ints("inputdimensions");
    if let Some(sizes) = sizes {
        let (given, inputs) = (sizes.len(), cx.input_count());
        ensure!(
            given == inputs,
            InvalidGraph,
            "'inputdimensions' has {given} elements, expected one for each of the {inputs} inputs"
        );
    }
    let mut rows = None;
    let mut columns = Some(Dim::constant(0));
    for index in 0..cx.input_count() {
        let own = match cx.shape(index) {
            None => None,
            Some([]) => return Err(error!(InvalidGraph, "input {index} has no dimensions")),
            // A vector is one row.
            Some([columns]) => Some((Dim::constant(1), columns.clone())),
            Some([rows, columns @ ..]) => Some((rows.clone(), columns.iter().product())),
        };
        let (own_rows, own_columns) = own.unzip();
        // All inputs have the same rows, so the first known number serves.
        rows = rows.or(own_rows);
        let own_columns = match sizes.and_then(|sizes| sizes.get(index)) {
            Some(&size) => {
                ensure!(size >= 0, InvalidGraph, "'inputdimensions' has the element {size}");
                Some(Dim::constant(size))
            }
            None => own_columns,
        };
        // One input of unknown width leaves the whole width unknown.
        columns = columns.zip(own_columns).map(|(sum, own)| sum + own);
    }
    let (Some(rows), Some(columns)) = (rows, columns) else { return Ok(()) };
    cx.set_shape(0, vec![rows, columns])
}

fn infer_zip_map(cx: &mut InferCx<'_>) -> Result<()> {
    let (key, labels) = super::class_labels(cx.attrs, "classlabels_int64s", "classlabels_strings")?;
    if let Some(shape) = cx.shape(0) {
        ensure!(
            matches!(shape.len(), 1 | 2),
            InvalidGraph,
            "ZipMap takes rank 1 or 2, got rank {}",
            shape.len()
        );
        let columns = shape.last().and_then(Dim::as_constant);
        let fits = columns.is_none_or(|columns| usize::try_from(columns) == Ok(labels));
        ensure!(fits, InvalidGraph, "ZipMap has {labels} labels for inputs of shape {shape:?}");
    }
    let value = ValueType::tensor(DType::F32, None);
    cx.set_type(0, ValueType::Sequence(Box::new(ValueType::Map(key, Box::new(value)))));
    Ok(())
}
