//! A model of 10 GiB loads at once and in little memory: its weights stay in their file, also where
//! a session is built that cannot hold them.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod hostile_support;
mod support;

use std::fs::{self, File};
use std::time::{Duration, Instant};

use hostile_support::{peak_above, reset_peak, text};
use ort_runtime::{Model, Session};
use prost::Message;

/// Weights of 1 GiB each.
const WEIGHTS: u64 = 10;
const GIB: u64 = 1 << 30;
const MIB: usize = 1 << 20;

/// The model; its weights are a file that is all hole.
fn sparse() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    File::create(folder.path().join("weights.bin")).unwrap().set_len(WEIGHTS * GIB).unwrap();
    let mut lines = "input v0 float[rows,16384]".to_owned();
    for index in 0..WEIGHTS {
        let offset = index * GIB;
        lines += &format!(
            "\nexternal w{index} float[16384,16384] location=weights.bin offset={offset} length={GIB}"
        );
    }
    for index in 0..WEIGHTS {
        lines += &format!("\nv{} = MatMul(v{index}, w{index})", index + 1);
    }
    lines += &format!("\noutput v{WEIGHTS}");
    fs::write(folder.path().join("model.onnx"), text::model(&lines).encode_to_vec()).unwrap();
    folder
}

#[test]
fn ten_gibibytes_load_within_a_second_and_are_planned_within_a_limit() {
    let folder = sparse();
    reset_peak();
    let start = Instant::now();
    let model = Model::load(folder.path().join("model.onnx")).unwrap();
    let (loading, loaded) = (start.elapsed(), peak_above());
    assert_eq!(model.graph().weight_bytes() as u64, WEIGHTS * GIB);
    let limit = 2 * GIB as usize;
    let session = Session::builder(&model).memory_limit(limit).build().unwrap();
    let plan = session.plan(&[("rows", 8)]).unwrap();
    let (all, taken) = (start.elapsed(), peak_above());
    println!(
        "loaded in {loading:?} with {} MiB, planned after {all:?} with {} MiB",
        loaded / MIB,
        taken / MIB
    );
    assert!(plan.planned_bytes < MIB * 8, "{} bytes of activations", plan.planned_bytes);
    assert!(all < Duration::from_secs(1), "{all:?}");
    assert!(taken < 64 * MIB, "{} MiB", taken / MIB);
}
