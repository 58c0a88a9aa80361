//! Convolutions of image models: time and GFLOP/s on one and two threads, with a bias and a Relu.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use ort_ep_cpu::conv::{
    ConvAttributes, ConvGeometry, Input, WeightSide, forward, pack_weights, packed_weights_len, workspace_len,
};
use ort_ep_cpu::gemm::{Activation, Cpu, Step};

/// Time spent on a row of the table.
const BUDGET: Duration = Duration::from_millis(100);

/// Channels, filters, size of the image, size of the kernel, stride, groups.
const SHAPES: [[usize; 6]; 24] = [
    [3, 64, 224, 7, 2, 1],
    [64, 64, 56, 1, 1, 1],
    [64, 64, 56, 3, 1, 1],
    [64, 256, 56, 1, 1, 1],
    [256, 64, 56, 1, 1, 1],
    [128, 128, 56, 3, 2, 1],
    [128, 128, 28, 3, 1, 1],
    [512, 128, 28, 1, 1, 1],
    [256, 256, 14, 3, 1, 1],
    [1024, 256, 14, 1, 1, 1],
    [256, 1024, 14, 1, 1, 1],
    [512, 512, 7, 3, 1, 1],
    [2048, 512, 7, 1, 1, 1],
    [1024, 2048, 14, 1, 2, 1],
    [3, 32, 224, 3, 2, 1],
    [16, 96, 112, 1, 1, 1],
    [96, 24, 56, 1, 1, 1],
    [192, 32, 28, 1, 1, 1],
    [576, 96, 14, 1, 1, 1],
    [128, 128, 56, 3, 1, 32],
    [960, 240, 1, 1, 1, 1],
    [72, 24, 1, 1, 1, 1],
    [160, 960, 7, 1, 1, 1],
    [960, 160, 7, 1, 1, 1],
];

fn best(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    while start.elapsed() < BUDGET || best.is_infinite() {
        let start = Instant::now();
        call();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

fn main() {
    println!("channels filters size kernel stride groups   threads    ms  GFLOP/s");
    for [channels, filters, size, kernel, stride, groups] in SHAPES {
        let attributes = ConvAttributes {
            strides: &[stride; 2],
            pads: &[kernel / 2; 4],
            groups,
            ..ConvAttributes::default()
        };
        let weight = [filters, channels / groups, kernel, kernel];
        let geometry = ConvGeometry::new(&[1, channels, size, size], &weight, &attributes).unwrap();
        let (image, weights) = (vec![0.5; channels * size * size], vec![0.25; weight.iter().product()]);
        let (bias, mut output) = (vec![0.125; filters], vec![0.0; filters * geometry.window.output_len()]);
        let steps = [Step::RowBias(&bias), Step::Activate(Activation::Relu)];
        for threads in [1, 2] {
            let cpu = Cpu::with_threads(threads);
            let side = WeightSide::preferred(cpu, &geometry);
            let mut packed = vec![0.0; packed_weights_len(cpu, &geometry, side)];
            pack_weights(cpu, &geometry, side, &weights, &mut packed).unwrap();
            let mut workspace = vec![0.0; workspace_len(cpu, &geometry, side)];
            let input = Input { image: &image, weights: &packed, side, epilogue: &steps };
            let seconds =
                best(|| forward(cpu, &geometry, input, black_box(&mut output), &mut workspace).unwrap());
            let work = 2.0 * (weights.len() * geometry.window.output_len()) as f64;
            println!(
                "{channels:8} {filters:7} {size:4} {kernel:6} {stride:6} {groups:6}   {threads:7} {:7.3} {:7.1}",
                seconds * 1e3,
                work / seconds / 1e9
            );
        }
    }
}
