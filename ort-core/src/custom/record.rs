//! Operator records of custom operators. Equal ones are one record, which lives as long as the
//! process: nodes refer to their record without counting.

use std::collections::BTreeMap;

use ort_alloc::fork::Mutex;

use super::CustomSchema;
use crate::Result;
use crate::ep::own_kernels;
use crate::spec::{InferCx, OP, OpSpec, Param, Traits, TypeVar, Types};

/// The records by everything that they say.
static RECORDS: Mutex<BTreeMap<String, &'static OpSpec>> = Mutex::new(BTreeMap::new());
static PAIRS: Mutex<BTreeMap<Vec<(usize, usize)>, Pairs>> = Mutex::new(BTreeMap::new());

/// Pairs (input, output).
pub(super) type Pairs = &'static [(usize, usize)];

/// Returns the record of a schema.
pub(super) fn record(schema: &CustomSchema) -> &'static OpSpec {
    let CustomSchema { domain, name, versions, inputs, outputs, is_pure, .. } = schema;
    let key = format!("{domain:?} {name:?} {} {inputs:?} {outputs:?} {is_pure}", versions.start());
    RECORDS.lock().entry(key).or_insert_with(|| Box::leak(Box::new(new_record(schema))))
}

/// Returns a list that equals this one.
pub(super) fn pairs(list: &[(usize, usize)]) -> Pairs {
    let mut known = PAIRS.lock();
    match known.get(list) {
        Some(pairs) => pairs,
        None => known.entry(list.to_vec()).or_insert(Vec::leak(list.to_vec())),
    }
}

/// The inference rule of all records here.
fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    own_kernels(cx.attrs).map_or(Ok(()), |own| own.infer(cx))
}

fn new_record(schema: &CustomSchema) -> OpSpec {
    let mut types: Vec<TypeVar> = Vec::new();
    let mut params = |list: &[super::CustomParam]| -> &'static [Param] {
        let mut params = Vec::with_capacity(list.len());
        for param in list {
            let name: &'static str = param.name.clone().leak();
            let ty = match types.iter_mut().find(|var| var.name == param.variable) {
                Some(var) => {
                    var.types.tensor = var.types.tensor.union(param.types);
                    var.name
                }
                None => {
                    let name: &'static str = param.variable.clone().leak();
                    types.push(TypeVar { name, types: Types::tensors(param.types) });
                    name
                }
            };
            params.push(Param { name, ty, arity: param.arity, host: false });
        }
        params.leak()
    };
    let (inputs, outputs) = (params(&schema.inputs), params(&schema.outputs));
    OpSpec {
        domain: schema.domain.clone().leak(),
        name: schema.name.clone().leak(),
        first: *schema.versions.start(),
        since: *schema.versions.start(),
        inputs,
        outputs,
        types: types.leak(),
        traits: match schema.is_pure {
            true => Traits::NONE,
            false => Traits::RANDOM.with(Traits::EFFECTS),
        },
        infer,
        ..OP
    }
}
