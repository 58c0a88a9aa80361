//! Every operator record against the schemas of ONNX's own package (`data/onnx_schemas.json`).
//!
//! Those of `com.microsoft` are checked against what ONNX Runtime registers
//! (`data/microsoft_schemas.json`). All differences are printed at once, a line for each.

use std::collections::BTreeMap;

use ort_core::spec::{Arity, AttrDefault, AttrSpec, OpSpec, Param, Registry};
use serde::Deserialize;
use serde_json::Value as Json;

/// Operators of the newest standard that have no record yet. An operator that has one must not
/// stand here.
const WITHOUT_RECORD: &[&str] = &[];

/// Operators that ONNX Runtime registers in the standard's domain and the standard does not have.
const BESIDE_THE_STANDARD: &[&str] = &[
    "Affine",
    "Crop",
    "DynamicSlice",
    "ImageScaler",
    "ParametricSoftplus",
    "Scale",
    "ScaledTanh",
    "SimplifiedLayerNormalization",
];

#[derive(Deserialize)]
struct Schema {
    domain: String,
    name: String,
    since_version: i64,
    #[serde(default)]
    deprecated: bool,
    inputs: Vec<Formal>,
    outputs: Vec<Formal>,
    types: BTreeMap<String, Vec<String>>,
    attributes: Vec<FormalAttribute>,
}

#[derive(Deserialize)]
struct Formal {
    name: String,
    #[serde(rename = "type")]
    ty: String,
    option: Option<String>,
    homogeneous: Option<bool>,
    min_arity: Option<usize>,
}

#[derive(Deserialize)]
struct FormalAttribute {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    required: bool,
    #[serde(default)]
    default: Json,
}

/// The schemas of a dump.
fn parse(text: &str) -> Vec<Schema> {
    serde_json::from_str(text).expect("the schemas are valid JSON")
}

type Schemas = BTreeMap<(String, String), Schema>;

/// For each operator its newest schema, where that is withdrawn the one before; and whether it is
/// withdrawn.
fn schemas() -> BTreeMap<(String, String), (Schema, bool)> {
    let all = parse(include_str!("../data/onnx_schemas.json"));
    let mut newest: Schemas = BTreeMap::new();
    let mut withdrawn = Vec::new();
    for schema in all {
        let key = (schema.domain.clone(), schema.name.clone());
        if schema.deprecated {
            withdrawn.push(key.clone());
            if newest.contains_key(&key) {
                continue;
            }
        }
        match newest.get(&key) {
            Some(known) if known.since_version > schema.since_version => {}
            _ => {
                newest.insert(key, schema);
            }
        }
    }
    newest
        .into_iter()
        .map(|(key, schema)| {
            let gone = withdrawn.contains(&key);
            (key, (schema, gone))
        })
        .collect()
}

fn full_name(domain: &str, name: &str) -> String {
    if domain.is_empty() { name.to_string() } else { format!("{domain}.{name}") }
}

fn is_standard(domain: &str) -> bool {
    domain.is_empty() || domain.starts_with("ai.onnx")
}

#[test]
fn records_equal_schemas() {
    let schemas = schemas();
    let registry = Registry::global().expect("each operator has one record");
    let mut lines = Vec::new();
    let mut compared = 0;
    for record in registry.records().iter().filter(|record| is_standard(record.domain)) {
        let name = full_name(record.domain, record.name);
        let mut differ = |what: String| lines.push(format!("{name}: {what}"));
        match schemas.get(&(record.domain.to_string(), record.name.to_string())) {
            None if BESIDE_THE_STANDARD.contains(&record.name) => {}
            None => differ("the standard has no such operator".to_string()),
            Some((schema, _)) => {
                compared += 1;
                compare(record, schema, &mut differ);
            }
        }
    }
    assert!(lines.is_empty(), "{} differences:\n{}", lines.len(), lines.join("\n"));
    assert!(compared > 150, "only {compared} records were compared");
}

#[test]
fn records_know_when_operators_appeared() {
    let mut first: BTreeMap<(String, String), i64> = BTreeMap::new();
    for schema in
        parse(include_str!("../data/onnx_schemas.json")).into_iter().filter(|schema| !schema.deprecated)
    {
        let version = first.entry((schema.domain, schema.name)).or_insert(schema.since_version);
        *version = schema.since_version.min(*version);
    }
    let registry = Registry::global().expect("each operator has one record");
    let mut compared = 0;
    for record in registry.records() {
        let name = full_name(record.domain, record.name);
        assert!(
            record.first <= record.since,
            "{name} appears in {}, its form in {}",
            record.first,
            record.since
        );
        if let Some(first) = first.get(&(record.domain.to_string(), record.name.to_string())) {
            assert_eq!(record.first, *first, "{name}");
            compared += 1;
        }
    }
    assert!(compared > 150, "only {compared} records were compared");
}

#[test]
fn records_equal_schemas_of_onnx_runtime() {
    let schemas = parse(include_str!("../data/microsoft_schemas.json"));
    let registry = Registry::global().expect("each operator has one record");
    let theirs =
        |record: &&&OpSpec| record.domain == "com.microsoft" || BESIDE_THE_STANDARD.contains(&record.name);
    let (mut lines, mut compared) = (Vec::new(), 0);
    for record in registry.records().iter().filter(theirs) {
        let name = full_name(record.domain, record.name);
        let mut differ = |what: String| lines.push(format!("{name}: {what}"));
        let same = |schema: &&Schema| schema.domain == record.domain && schema.name == record.name;
        match schemas.iter().filter(same).max_by_key(|schema| schema.since_version) {
            None => differ("ONNX Runtime has no such operator".to_string()),
            Some(schema) => {
                compared += 1;
                compare(record, schema, &mut differ);
            }
        }
    }
    assert!(lines.is_empty(), "{} differences:\n{}", lines.len(), lines.join("\n"));
    assert!(compared >= 20, "only {compared} records were compared");
}

#[test]
fn every_operator_has_a_record() {
    let registry = Registry::global().expect("each operator has one record");
    let mut missing: Vec<String> = Vec::new();
    for ((domain, name), (_, withdrawn)) in schemas() {
        if !withdrawn && registry.find(&domain, &name).is_none() {
            missing.push(full_name(&domain, &name));
        }
    }
    missing.sort();
    let mut listed: Vec<String> = WITHOUT_RECORD.iter().map(|name| name.to_string()).collect();
    listed.sort();
    let unlisted: Vec<&String> = missing.iter().filter(|name| !listed.contains(name)).collect();
    let stale: Vec<&String> = listed.iter().filter(|name| !missing.contains(name)).collect();
    assert!(unlisted.is_empty(), "operators without a record, not listed: {unlisted:?}");
    assert!(stale.is_empty(), "listed, but no operator without a record: {stale:?}");
}

fn compare(record: &OpSpec, schema: &Schema, differ: &mut dyn FnMut(String)) {
    if record.since != schema.since_version {
        differ(format!("since is {}, the schema has {}", record.since, schema.since_version));
    }
    compare_params("input", record.inputs, &schema.inputs, differ);
    compare_params("output", record.outputs, &schema.outputs, differ);
    compare_types(record, schema, differ);
    compare_attributes(record, schema, differ);
}

fn compare_params(what: &str, params: &[Param], formals: &[Formal], differ: &mut dyn FnMut(String)) {
    let names = |list: &mut dyn Iterator<Item = String>| list.collect::<Vec<_>>().join(", ");
    let ours = names(&mut params.iter().map(|param| param.name.to_string()));
    let theirs = names(&mut formals.iter().map(|formal| formal.name.clone()));
    if ours != theirs {
        return differ(format!("{what}s are ({ours}), the schema has ({theirs})"));
    }
    for (param, formal) in params.iter().zip(formals) {
        if param.ty != formal.ty {
            differ(format!("{what} {} is {}, the schema has {}", param.name, param.ty, formal.ty));
        }
        let expected = match formal.option.as_deref() {
            None => Arity::Single,
            Some("optional") => Arity::Optional,
            Some("variadic") => Arity::Variadic {
                min: formal.min_arity.unwrap_or(1),
                homogeneous: formal.homogeneous.unwrap_or(true),
            },
            Some(other) => panic!("unknown option {other}"),
        };
        if param.arity != expected {
            differ(format!("{what} {} is {:?}, the schema has {expected:?}", param.name, param.arity));
        }
    }
}

fn compare_types(record: &OpSpec, schema: &Schema, differ: &mut dyn FnMut(String)) {
    for var in record.types {
        if !schema.types.contains_key(var.name) {
            differ(format!("type variable {} is not in the schema", var.name));
        }
    }
    for (name, allowed) in &schema.types {
        let Some(var) = record.type_var(name) else {
            differ(format!("type variable {name} is missing"));
            continue;
        };
        let ours = var.types.names();
        let extra: Vec<&String> = ours.iter().filter(|name| !allowed.contains(name)).collect();
        let missing: Vec<&String> = allowed.iter().filter(|name| !ours.contains(name)).collect();
        if !extra.is_empty() {
            differ(format!("{name} allows beyond the schema {extra:?}"));
        }
        if !missing.is_empty() {
            differ(format!("{name} lacks {missing:?}"));
        }
    }
}

fn compare_attributes(record: &OpSpec, schema: &Schema, differ: &mut dyn FnMut(String)) {
    for attr in record.attrs {
        if !schema.attributes.iter().any(|formal| formal.name == attr.name) {
            differ(format!("attribute {} is not in the schema", attr.name));
        }
    }
    for formal in &schema.attributes {
        let Some(attr) = record.attrs.iter().find(|attr| attr.name == formal.name) else {
            differ(format!("attribute {} is missing", formal.name));
            continue;
        };
        let kind = attr.kind.onnx_name();
        if kind != formal.kind {
            differ(format!("attribute {} is {kind}, the schema has {}", formal.name, formal.kind));
        } else if !same_default(attr, formal) {
            let theirs = if formal.required { "required".to_string() } else { formal.default.to_string() };
            differ(format!(
                "attribute {} has default {:?}, the schema has {theirs}",
                formal.name, attr.default
            ));
        }
    }
}

fn same_default(attr: &AttrSpec, formal: &FormalAttribute) -> bool {
    let given = &formal.default;
    let float = |json: &Json| json.as_f64().map(|value| value as f32);
    let list = |json: &Json| json.as_array().cloned().unwrap_or_default();
    match attr.default {
        AttrDefault::Required => formal.required,
        AttrDefault::None => !formal.required && given.is_null(),
        AttrDefault::Int(value) => given.as_i64() == Some(value),
        AttrDefault::Float(value) => float(given) == Some(value),
        AttrDefault::String(value) => given.as_str() == Some(value),
        AttrDefault::Ints(values) => {
            given.is_array() && list(given).iter().map(Json::as_i64).eq(values.iter().copied().map(Some))
        }
        AttrDefault::Floats(values) => {
            given.is_array() && list(given).iter().map(float).eq(values.iter().copied().map(Some))
        }
        AttrDefault::Strings(values) => {
            given.is_array() && list(given).iter().map(Json::as_str).eq(values.iter().copied().map(Some))
        }
    }
}
