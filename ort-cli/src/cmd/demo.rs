//! `ort demo`: classifies the embedded digit images with the embedded model.
//!
//! The images are held-out samples of the Optical Recognition of Handwritten Digits data set (E.
//! Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0), as shipped with
//! scikit-learn. The model was trained on the other samples by `demo/train.py` of this crate.

#![allow(
    clippy::indexing_slicing,
    reason = "the embedded model and pictures have the shapes that this expects"
)]

use std::io::Cursor;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use ort_numpy::Archive;
use ort_runtime::{Model, Session, Tensor};

use crate::args::human_bytes;
use crate::output::say;
use crate::resident;

const MODEL: &[u8] = include_bytes!("../../demo/digits.onnx");
const DIGITS: &[u8] = include_bytes!("../../demo/digits.npz");

/// The shades of a pixel, from white to black.
const SHADES: [&str; 5] = ["  ", "░░", "▒▒", "▓▓", "██"];

pub(crate) fn run() -> Result<ExitCode> {
    // The embedded arrays are far below this bound of 16 MiB.
    let arrays = Archive::open(Cursor::new(DIGITS))?.read_all(1 << 24)?;
    let array = |name: &str| {
        let found = arrays.iter().find(|(known, _)| known == name);
        found.map(|(_, tensor)| tensor).with_context(|| format!("the demo has no array '{name}'"))
    };
    let (images, labels) = (array("image")?, array("label")?.view().to_ints()?);
    let before = resident::measure();
    let start = Instant::now();
    let model = Model::from_bytes(MODEL)?;
    let session = Session::builder(&model).build()?;
    let load = start.elapsed();
    // Plan before running: the demo prints the predicted next to the measured memory.
    let planned = session.plan(&[("batch", images.shape()[0] as i64)])?;
    let start = Instant::now();
    let outputs = session.run(&[("image", images.clone().into())])?;
    let time = start.elapsed();
    let probabilities = outputs[0].1.tensor()?;
    show(images, &labels, probabilities)?;
    let memory = session.memory();
    say!("loaded in {:.2} ms, ran in {:.3} ms", load.as_secs_f64() * 1e3, time.as_secs_f64() * 1e3)?;
    say!(
        "activations: {} planned before the run, {} measured; weights: {}",
        planned.peak_bytes.map_or("unknown".to_string(), human_bytes),
        human_bytes(memory.activations_peak),
        human_bytes(memory.weights),
    )?;
    if let (Some(before), Some(after)) = (before.now, resident::measure().peak) {
        say!("resident: {} over the start", human_bytes(after.saturating_sub(before) as usize))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Draws each digit next to its prediction.
fn show(images: &Tensor, labels: &[i64], probabilities: &Tensor) -> Result<()> {
    let pixels = images.to_vec::<f32>()?;
    let scores = probabilities.to_vec::<f32>()?;
    let classes = probabilities.shape()[1];
    // An image that is all 0 must not cause a division by 0.
    let largest = pixels.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    let mut right = 0;
    // An image has 8 × 8 pixels.
    for (index, (image, scores)) in pixels.chunks_exact(64).zip(scores.chunks_exact(classes)).enumerate() {
        let best = (0..classes).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap_or(0);
        right += usize::from(labels[index] == best as i64);
        for (row, line) in image.chunks_exact(8).enumerate() {
            let drawn: String = line
                .iter()
                .map(|&ink| SHADES[((ink / largest * 4.0).round().max(0.0) as usize).min(4)])
                .collect();
            let text = match row {
                2 => format!("  prediction {best}"),
                3 => format!("  probability {:.1} %", scores[best] * 100.0),
                4 => format!("  label {}", labels[index]),
                _ => String::new(),
            };
            say!("  {drawn}{text}")?;
        }
        say!()?;
    }
    say!("{right} of {} right", labels.len())?;
    Ok(())
}
