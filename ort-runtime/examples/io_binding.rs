//! Zero-copy inference: input and output are bound to memory once and used for every picture of a
//! data set.
//!
//!     cargo run -p ort-runtime --release --example io_binding

#[path = "support/digits.rs"]
mod digits;

use ort_runtime::{DType, DeviceId, Result, RunOptions, Session, TensorBuffer};

pub(crate) fn main() -> Result<()> {
    let session = Session::builder(&digits::model()?).build()?;

    // The output goes to memory of the session, of whatever size the run finds.
    let mut binding = session.io_binding();
    binding.bind_input("image", digits::picture(0)?)?;
    binding.bind_output("probabilities", DeviceId::HOST)?;
    session.run_with_binding(&mut binding, &RunOptions::default())?;
    for (name, value) in binding.copy_outputs_to_cpu()? {
        println!("{name}: {:?}", value.tensor()?.shape());
    }

    // Both are buffers: the picture is written where the model reads it, the result computed where
    // it is read.
    let mut binding = session.io_binding();
    binding.bind_input("image", TensorBuffer::new(DType::F32, &digits::SHAPE)?)?;
    binding.bind_output("probabilities", TensorBuffer::new(DType::F32, &[1, 10])?)?;
    let options = RunOptions::default();
    for seed in 0..10 {
        digits::draw(seed, binding.input_mut("image")?.as_mut_slice()?);
        session.run_with_binding(&mut binding, &options)?;
        let probabilities = binding.output("probabilities")?.tensor()?.as_slice::<f32>()?;
        let best = probabilities.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1));
        println!("picture {seed}: {best:?}");
    }
    Ok(())
}
