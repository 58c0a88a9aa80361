//! A small decoder with `GroupQueryAttention`, built by hand: its caches are buffers as long as the
//! longest text.

use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::spec::MICROSOFT;
use ort_runtime::{DType, Result, Tensor};

pub(crate) const LAYERS: usize = 2;
pub(crate) const VOCABULARY: usize = 64;
const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const SIZE: usize = 16;
const WIDTH: usize = HEADS * SIZE;

/// The shape of each cache for texts of up to `longest` tokens.
pub(crate) fn cache_shape(longest: usize) -> [usize; 4] {
    [1, KEY_HEADS, longest, SIZE]
}

/// The names of the caches as inputs and, after the new tokens, as outputs.
pub(crate) fn cache_names() -> Vec<(String, String)> {
    let layers = (0..LAYERS).flat_map(|layer| ["key", "value"].map(|kind| (layer, kind)));
    layers.map(|(layer, kind)| (format!("past.{layer}.{kind}"), format!("present.{layer}.{kind}"))).collect()
}

/// Inputs: `input_ids` [1, sequence], `seqlens_k` [1], `total_sequence_length` [1] and the caches.
/// Outputs: `logits` [1, sequence, 64] and the caches.
pub(crate) fn decoder(longest: usize) -> Result<Graph> {
    let mut builder = GraphBuilder::new("decoder");
    let ids = builder.input("input_ids", DType::I64, &["1", "sequence"]);
    let lengths = builder.input("seqlens_k", DType::I32, &["1"]);
    let total = builder.input("total_sequence_length", DType::I32, &["1"]);
    let sizes = cache_shape(longest).map(|size| size.to_string());
    let sizes = [&*sizes[0], &*sizes[1], "past", &*sizes[3]];
    let pasts: Vec<ValueId> =
        cache_names().iter().map(|(past, _)| builder.input(past, DType::F32, &sizes)).collect();
    let angles = |function: fn(f32) -> f32| {
        let angle = |index: usize| {
            let (position, pair) = (index / (SIZE / 2), index % (SIZE / 2));
            function(position as f32 / 100f32.powf(2.0 * pair as f32 / SIZE as f32))
        };
        let angles = (0..longest * SIZE / 2).map(angle).collect();
        Tensor::from_vec(&[longest, SIZE / 2], angles)
    };
    let cos = builder.constant(angles(f32::cos)?);
    let sin = builder.constant(angles(f32::sin)?);
    let table = weight(&mut builder, &[VOCABULARY, WIDTH], 1)?;
    let mut hidden = builder.node("Gather", &[table, ids], &[])?;
    let mut presents = Vec::new();
    for (layer, past) in pasts.chunks(2).enumerate() {
        let normed = norm(&mut builder, hidden)?;
        let q = product(&mut builder, normed, [WIDTH, WIDTH], 10 * layer + 2)?;
        let k = product(&mut builder, normed, [WIDTH, KEY_HEADS * SIZE], 10 * layer + 3)?;
        let v = product(&mut builder, normed, [WIDTH, KEY_HEADS * SIZE], 10 * layer + 4)?;
        let inputs = [q, k, v, past[0], past[1], lengths, total, cos, sin].map(Some);
        let attributes = [
            ("num_heads", Attribute::Int(HEADS as i64)),
            ("kv_num_heads", Attribute::Int(KEY_HEADS as i64)),
            ("do_rotary", Attribute::Int(1)),
        ];
        let attention = (MICROSOFT, "GroupQueryAttention");
        let outputs = builder.add(attention, &inputs, &attributes, 3, Vec::new())?;
        presents.extend(&outputs[1..]);
        let attended = product(&mut builder, outputs[0], [WIDTH, WIDTH], 10 * layer + 5)?;
        hidden = builder.node("Add", &[hidden, attended], &[])?;
        let normed = norm(&mut builder, hidden)?;
        let wide = product(&mut builder, normed, [WIDTH, 4 * WIDTH], 10 * layer + 6)?;
        let active = builder.node("Gelu", &[wide], &[])?;
        let narrow = product(&mut builder, active, [4 * WIDTH, WIDTH], 10 * layer + 7)?;
        hidden = builder.node("Add", &[hidden, narrow], &[])?;
    }
    let normed = norm(&mut builder, hidden)?;
    let logits = product(&mut builder, normed, [WIDTH, VOCABULARY], 9)?;
    let outputs: Vec<ValueId> = std::iter::once(logits).chain(presents).collect();
    let mut graph = builder.finish(&outputs)?;
    let names = cache_names().into_iter().map(|(_, present)| present);
    for (id, name) in outputs.into_iter().zip(std::iter::once("logits".to_string()).chain(names)) {
        graph.value_mut(id).name = name.into();
    }
    Ok(graph)
}

fn norm(builder: &mut GraphBuilder, x: ValueId) -> Result<ValueId> {
    let scale = builder.constant(Tensor::from_slice(&[WIDTH], &[1.0f32; WIDTH])?);
    let bias = builder.constant(Tensor::from_slice(&[WIDTH], &[0.0f32; WIDTH])?);
    builder.node("LayerNormalization", &[x, scale, bias], &[])
}

fn product(builder: &mut GraphBuilder, x: ValueId, shape: [usize; 2], seed: usize) -> Result<ValueId> {
    let weight = weight(builder, &shape, seed)?;
    builder.node("MatMul", &[x, weight], &[])
}

/// Numbers of either sign that look random and are the same each time.
fn weight(builder: &mut GraphBuilder, shape: &[usize], seed: usize) -> Result<ValueId> {
    let mut state = seed as u32 + 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let elements = (0..shape.iter().product()).map(|_| next()).collect();
    Ok(builder.constant(Tensor::from_vec(shape, elements)?))
}
