//! One session for a whole data set, and one model for several sessions: weights are there once.
//!
//!     cargo run -p ort-runtime --release --example reuse_sessions

#[path = "support/digits.rs"]
mod digits;

use ort_runtime::{Result, Session};

pub(crate) fn main() -> Result<()> {
    let model = digits::model()?;
    // Made once, used for every picture, from any number of threads.
    let session = Session::builder(&model).build()?;
    for seed in 0..10 {
        let outputs = session.run(&[("image", digits::picture(seed)?.into())])?;
        for (name, value) in outputs {
            println!("picture {seed}, {name}: {:?}", value.tensor()?.to_vec::<f32>()?);
        }
    }
    // Another one shares the model and what it mapped.
    let other = Session::builder(&model).threads(1).build()?;
    println!("weights: {} bytes, once for {} sessions", other.memory().weights, [&session, &other].len());
    Ok(())
}
