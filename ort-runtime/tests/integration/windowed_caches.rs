//! `GroupQueryAttention` decodes the same with a cache of all positions, with a window of the
//! latest ones, and with a window that past and present share, whatever the cache stores.

use crate::support::session;
use ort_runtime::ir::{Attribute, Graph, GraphBuilder};
use ort_runtime::spec::MICROSOFT;
use ort_runtime::{DType, DeviceId, OutputTarget, Result, RunOptions, Tensor, TensorBuffer, Value};

const SIZE: usize = 32;
const WINDOW: i64 = 6;
/// Tokens of each run: a prompt, steps, and chunks that evict what they still have to read.
const CHUNKS: [usize; 12] = [5, 1, 1, 1, 3, 1, 1, 7, 1, 9, 1, 1];

/// How a cache stores its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    Floats,
    Bytes(&'static str),
    Nibbles(&'static str),
}

impl Stored {
    fn dtype(self) -> DType {
        match self {
            Stored::Floats => DType::F32,
            Stored::Bytes(_) => DType::I8,
            Stored::Nibbles(_) => DType::U8,
        }
    }

    /// The shape of a cache.
    fn shape(self, rows: usize) -> [usize; 4] {
        [1, 2, rows, if matches!(self, Stored::Nibbles(_)) { SIZE / 2 } else { SIZE }]
    }

    /// The granularity, the bits and the scales.
    fn quantization(self) -> Result<Option<(&'static str, i64, Tensor)>> {
        let (kind, bits, scale) = match self {
            Stored::Floats => return Ok(None),
            Stored::Bytes(kind) => (kind, 8, 0.01_f32),
            Stored::Nibbles(kind) => (kind, 4, 0.15),
        };
        let scales: Vec<f32> = (0..2 * SIZE).map(|at| scale * (1.0 + (at % 5) as f32 / 8.0)).collect();
        let scales = match kind {
            "PER_CHANNEL" => Tensor::from_slice(&[1, 2, 1, SIZE], &scales)?,
            _ => Tensor::from_slice(&[1], &[scale])?,
        };
        Ok(Some((kind, bits, scales)))
    }
}

/// Four query heads over two key heads, packed, with rotary embedding.
fn graph(stored: Stored, slides: bool) -> Result<Graph> {
    let mut builder = GraphBuilder::new("attention");
    let query = builder.input("query", DType::F32, &["1", "tokens", "256"]);
    let row = stored.shape(0)[3].to_string();
    let sizes = ["1", "2", "past", &*row];
    let (key, value) =
        (builder.input("key", stored.dtype(), &sizes), builder.input("value", stored.dtype(), &sizes));
    let lengths = builder.input("seqlens_k", DType::I32, &["1"]);
    let total = builder.input("total", DType::I32, &["1"]);
    let angle = |at: usize| (at / (SIZE / 2)) as f32 / 50f32.powf((at % (SIZE / 2)) as f32 / SIZE as f32);
    let table = |function: fn(f32) -> f32| {
        Tensor::from_vec(&[64, SIZE / 2], (0..32 * SIZE).map(|at| function(angle(at))).collect())
    };
    let (cos, sin) = (builder.constant(table(f32::cos)?), builder.constant(table(f32::sin)?));
    let mut inputs = [query, key, value, lengths, total, cos, sin].map(Some).to_vec();
    inputs.splice(1..1, [None, None]);
    let mut attributes = vec![
        ("num_heads", Attribute::Int(4)),
        ("kv_num_heads", Attribute::Int(2)),
        ("do_rotary", Attribute::Int(1)),
        ("local_window_size", Attribute::Int(WINDOW)),
        ("sliding_window_cache", Attribute::Int(i64::from(slides))),
    ];
    if let Some((kind, bits, scales)) = stored.quantization()? {
        let scales = builder.constant(scales);
        inputs.extend([None, None, None, Some(scales), Some(scales)]);
        attributes
            .extend(["k_quant_type", "v_quant_type"].map(|name| (name, Attribute::String(kind.into()))));
        attributes.push(("kv_cache_bit_width", Attribute::Int(bits)));
    }
    let outputs = builder.add((MICROSOFT, "GroupQueryAttention"), &inputs, &attributes, 3, Vec::new())?;
    let mut graph = builder.finish(&outputs)?;
    for (id, name) in outputs.into_iter().zip(["attended", "present_key", "present_value"]) {
        graph.value_mut(id).name = name.into();
    }
    Ok(graph)
}

/// The inputs of each run without the caches: numbers of either sign that look random.
fn chunks() -> Result<Vec<[(&'static str, Value); 3]>> {
    let (mut state, mut total) = (1_u32, 0);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let chunk = |tokens: usize| -> Result<_> {
        total += tokens as i32;
        let query = Tensor::from_vec(&[1, tokens, 256], (0..tokens * 256).map(|_| next()).collect())?;
        Ok([
            ("query", query.into()),
            ("seqlens_k", Tensor::from_slice(&[1], &[total - 1])?.into()),
            ("total", Tensor::from_slice(&[1], &[total])?.into()),
        ])
    };
    CHUNKS.into_iter().map(chunk).collect()
}

fn zeros(stored: Stored, rows: usize) -> Result<Value> {
    Ok(TensorBuffer::new(stored.dtype(), &stored.shape(rows))?.tensor()?.into())
}

/// The attention of each run, with caches of `rows` rows that go from outputs to inputs.
fn with_copies(stored: Stored, slides: bool, rows: usize) -> Result<Vec<Vec<f32>>> {
    let session = session(graph(stored, slides)?)?;
    let (mut key, mut value) = (zeros(stored, rows)?, zeros(stored, rows)?);
    let mut all = Vec::new();
    for chunk in chunks()? {
        let inputs: Vec<_> = chunk.into_iter().chain([("key", key), ("value", value)]).collect();
        let mut outputs = session.run(&inputs)?.into_iter().map(|(_, value)| value);
        let (Some(attended), Some(next_key), Some(next_value)) =
            (outputs.next(), outputs.next(), outputs.next())
        else {
            panic!("there are three outputs");
        };
        all.push(attended.tensor()?.to_vec::<f32>()?);
        (key, value) = (next_key, next_value);
    }
    Ok(all)
}

/// The same with a window in one buffer.
fn in_place(stored: Stored, rows: usize) -> Result<Vec<Vec<f32>>> {
    let session = session(graph(stored, true)?)?;
    let mut binding = session.io_binding();
    for (past, present) in [("key", "present_key"), ("value", "present_value")] {
        binding.bind_input(past, TensorBuffer::new(stored.dtype(), &stored.shape(rows))?)?;
        binding.bind_output(present, OutputTarget::Input(past.to_string()))?;
    }
    binding.bind_output("attended", DeviceId::HOST)?;
    let mut all = Vec::new();
    for chunk in chunks()? {
        for (name, value) in chunk {
            binding.bind_input(name, value)?;
        }
        session.run_with_binding(&mut binding, &RunOptions::default())?;
        all.push(binding.output("attended")?.tensor()?.to_vec::<f32>()?);
    }
    Ok(all)
}

#[test]
fn windows_give_what_full_caches_give() -> Result<()> {
    let total = CHUNKS.iter().sum();
    let kinds = ["PER_TENSOR", "PER_CHANNEL"];
    let quantized = kinds.into_iter().flat_map(|kind| [Stored::Bytes(kind), Stored::Nibbles(kind)]);
    for stored in quantized.chain([Stored::Floats]) {
        let full = with_copies(stored, false, total)?;
        for rows in [6, 7, 9, 16] {
            let copied = with_copies(stored, true, rows)?;
            assert_eq!(in_place(stored, rows)?, copied, "{stored:?}, {rows} rows");
            for (chunk, (actual, expected)) in copied.iter().zip(&full).enumerate() {
                let apart = actual.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < 1e-5, "{stored:?}, {rows} rows, chunk {chunk}: {apart} apart");
                assert_eq!(actual.len(), expected.len());
            }
        }
    }
    Ok(())
}
