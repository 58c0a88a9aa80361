//! Decodes with one copy of the key and value caches: they are bound as `past` and written in place
//! as `present`.
//!
//!     cargo run -p ort-runtime --release --example kv_cache_decode

#[path = "support/decoder.rs"]
mod decoder;

use ort_runtime::{DType, Model, OutputTarget, Result, RunOptions, Session, TensorBuffer};

const LONGEST: usize = 128;

pub(crate) fn main() -> Result<()> {
    let model = Model::from_graph(decoder::decoder(LONGEST)?);
    let session = Session::builder(&model).build()?;
    let mut binding = session.io_binding();
    binding.bind_input("input_ids", TensorBuffer::new(DType::I64, &[1, 1])?)?;
    binding.bind_input("seqlens_k", TensorBuffer::new(DType::I32, &[1])?)?;
    binding.bind_input("total_sequence_length", TensorBuffer::new(DType::I32, &[1])?)?;
    binding.bind_output("logits", TensorBuffer::new(DType::F32, &[1, 1, decoder::VOCABULARY])?)?;
    for (past, present) in decoder::cache_names() {
        binding.bind_input(&past, TensorBuffer::new(DType::F32, &decoder::cache_shape(LONGEST))?)?;
        binding.bind_output(&present, OutputTarget::Input(past))?;
    }

    let options = RunOptions::default();
    let mut token = 7;
    let mut text = vec![token];
    for position in 0..LONGEST as i32 {
        binding.input_mut("input_ids")?.as_mut_slice::<i64>()?.fill(token);
        binding.input_mut("seqlens_k")?.as_mut_slice::<i32>()?.fill(position);
        binding.input_mut("total_sequence_length")?.as_mut_slice::<i32>()?.fill(position + 1);
        session.run_with_binding(&mut binding, &options)?;
        let logits = binding.output("logits")?.tensor()?.as_slice::<f32>()?;
        let best = logits.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1));
        token = best.map_or(0, |(index, _)| index as i64);
        text.push(token);
    }
    println!("{text:?}");
    println!("activations at most: {} bytes", session.memory().activations_peak);
    Ok(())
}
