//! `LinearAttention`: a recurrence over a state per head, with all time steps in one launch.

use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, error};

use super::heads::word;
use super::rows::{SHORT_FLOATS, suffix};
use super::type_tags::scale_tag;
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

cuda_kernels![CudaKernel::new(
    KernelDef {
        op: "LinearAttention",
        types: &[("T", SHORT_FLOATS), ("S", SHORT_FLOATS)],
        ..KernelDef::BASE
    },
    launches
)];

/// The key sizes that kernels exist for, and the lanes that share a column of the state, as in
/// `cu/linear_attention.cu`.
const SIZES: [(usize, usize); 3] = [(64, 8), (256, 8), (1024, 32)];
const THREADS: usize = 128;

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let count = |name: &str| -> Result<usize> {
        let value = cx.attrs.int(name)?;
        let count = usize::try_from(value).ok().filter(|count| *count > 0);
        count.ok_or_else(|| error!(InvalidGraph, "{name} is {value}, expected a number of heads"))
    };
    let (queries, heads) = (count("q_num_heads")?, count("kv_num_heads")?);
    ensure!(queries.is_multiple_of(heads), InvalidGraph, "{queries} query heads of {heads} heads");
    let (has_decay, has_delta) = match cx.attrs.string("update_rule")? {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => return Err(error!(InvalidGraph, "update_rule '{other}' is not in the ONNX standard")),
    };
    let [query, key, value] = [cx.input(0)?, cx.input(1)?, cx.input(2)?];
    ensure!(query.rank() == 3 && value.rank() == 3, InvalidArgument, "query and value must have rank 3");
    let (batch, times) = (query.size(0), query.size(1));
    let (key_size, value_size) = (query.size(2) / queries, value.size(2) / heads);
    let fits = |index: usize, widths: [usize; 2]| -> Result<usize> {
        let operand = cx.input(index)?;
        let width = operand.shape.last().copied().unwrap_or(0);
        let fits = widths.contains(&width) && operand.shape.as_slice() == [batch, times, width];
        ensure!(fits, InvalidArgument, "input {index} has shape {:?}", operand.shape);
        Ok(width)
    };
    for (index, width) in [(0, queries * key_size), (1, heads * key_size), (2, heads * value_size)] {
        fits(index, [width; 2])?;
    }
    let (decay, beta, past) = (cx.find_input(4), cx.find_input(5), cx.find_input(3));
    ensure!(decay.is_some() == has_decay, InvalidArgument, "decay does not go with the update rule");
    ensure!(beta.is_some() == has_delta, InvalidArgument, "beta does not go with the update rule");
    let decay_width = if has_decay { fits(4, [heads, heads * key_size])? } else { 0 };
    let beta_width = if has_delta { fits(5, [heads, 1])? } else { 0 };
    let states = batch.saturating_mul(heads).saturating_mul(key_size).saturating_mul(value_size);
    ensure!(past.is_none_or(|past| past.count() == states), InvalidArgument, "past_state has another shape");
    if batch == 0 || value_size == 0 {
        return Ok(Vec::new());
    }
    // The smallest kernel whose state fits the keys.
    let size = SIZES.into_iter().find(|(size, _)| key_size <= *size);
    let (size, lanes) = size.ok_or_else(|| {
        error!(NotImplemented, "linear attention with keys of {key_size} numbers, of at most 1024")
            .help("run the model on another provider")
    })?;
    let across = value_size.div_ceil(THREADS / lanes);
    let state = cx.find_output(1).or(past).unwrap_or(query).dtype;
    let scale = match cx.attrs.float("scale")? {
        // 0 stands for the default scale.
        0.0 => 1.0 / (key_size as f32).sqrt(),
        scale => scale,
    };
    let entry = format!("linear_attention_{size}_{}", suffix(query.dtype)?);
    let launch = Launch::new("linear_attention", entry)
        .grid([batch.saturating_mul(heads).saturating_mul(across), 1, 1])?
        .block([THREADS as u32, 1, 1])
        .tensor(query)
        .tensor(key)
        .tensor(value)
        .find_tensor(past)
        .find_tensor(decay)
        .find_tensor(beta)
        .find_tensor(cx.find_output(0))
        .find_tensor(cx.find_output(1));
    let sizes = [heads, queries / heads, times, key_size, value_size, across, decay_width, beta_width];
    let mut words: Vec<i64> = sizes.into_iter().map(word).collect();
    words.extend([word(scale_tag(state)?), i64::from(scale.to_bits().cast_signed())]);
    Ok(vec![launch.ints::<10>(&words)?])
}
