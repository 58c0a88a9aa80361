//! Weights of static models: int8 or float8, with scales for each channel.

use ort_core::dtype::DType;
use ort_core::{Error, ErrorKind, Result};

use super::options::{StaticOptions, StaticType};
use super::products::ProductWeight;
use super::weights::{BIAS, BiasOf, Form, Job, RowScales};
use super::work::Work;
use crate::integer::{GridOptions, QuantType};
use crate::linear::LinearQuantizer;

/// The names of a quantized weight.
pub(super) struct WeightNames {
    pub(super) codes: String,
    pub(super) scale: String,
    pub(super) zero_point: String,
    /// That of its bias in 32 bits.
    pub(super) bias: Option<String>,
}

/// What quantizes a weight to int8 or float8.
pub(super) fn weight_job(
    work: &Work,
    (name, weight): (&str, &ProductWeight),
    (scales, bias): (Option<RowScales>, Option<BiasOf>),
    options: &StaticOptions,
) -> Result<Job> {
    let missing = || Error::new(ErrorKind::Fail, format!("there is no constant '{name}'"));
    let grid = GridOptions::new(QuantType::Int8, true);
    let grid = GridOptions { reduce_range: options.reduce_range, ..grid };
    let form = match options.ty {
        StaticType::Int8 => Form::Linear(LinearQuantizer { grid, axis: weight.axis }),
        StaticType::Float8 => Form::Float8(weight.axis),
    };
    Ok(Job {
        weight: work.draft.constant(name).cloned().ok_or_else(missing)?,
        codes: String::new(),
        is_transposed: false,
        shape: weight.shape.clone(),
        is_half: false,
        has_one_point: false,
        scales,
        bias,
        importance: None,
        ready: None,
        form,
    })
}

/// Adds a weight as int8 or float8, and the bytes that it takes.
pub(super) fn weight_codes(
    work: &mut Work,
    (name, weight): (&str, &ProductWeight),
    (scales, bias): (Option<RowScales>, Option<BiasOf>),
    options: &StaticOptions,
) -> Result<(WeightNames, usize)> {
    let missing = || Error::new(ErrorKind::Fail, format!("there is no constant '{name}'"));
    let job = weight_job(work, (name, weight), (scales, bias), options)?;
    let channels = weight.axis.and_then(|axis| weight.shape.get(axis)).copied();
    let channels: Vec<usize> = channels.into_iter().collect();
    let dtype = match options.ty {
        StaticType::Int8 => QuantType::Int8.dtype(),
        StaticType::Float8 => DType::F8E4M3FN,
    };
    let mut results = vec![
        ("_scale", DType::F32, channels.clone()),
        ("_zero_point", dtype, channels),
        ("_quantized", dtype, weight.shape.clone()),
    ];
    if let Some(bias) = &job.bias {
        let dims = bias.tensor.dims.iter().map(|size| *size as usize);
        results.push((BIAS, DType::I32, dims.collect()));
    }
    let (names, added) = work.add_weight(job, &results)?;
    let mut names = names.into_iter();
    let (Some(scale), Some(zero_point), Some(codes)) = (names.next(), names.next(), names.next()) else {
        return Err(missing());
    };
    Ok((WeightNames { codes, scale, zero_point, bias: names.next() }, added))
}
