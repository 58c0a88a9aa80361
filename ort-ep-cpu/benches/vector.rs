//! Speed of the vector functions on one thread, the best of several runs: `cargo bench --bench vector [-- filter]`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ort_ep_cpu::simd::Isa;
use ort_ep_cpu::vector::activation::Activation;
use ort_ep_cpu::vector::depthwise::{DepthwisePlan, Window};
use ort_ep_cpu::vector::elementwise::{Binary, Operand, Unary, binary, unary};

/// Seconds of the fastest of many runs that take 20 ms in all.
fn fastest(mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(20) {
        let before = Instant::now();
        for _ in 0..8 {
            work();
        }
        best = best.min(before.elapsed().as_secs_f64() / 8.0);
    }
    best
}

/// Prints one row: how much work of a unit a run does, in 10^9 a second.
fn row(filter: &str, name: &str, amount: f64, unit: &str, work: impl FnMut()) {
    if name.contains(filter) {
        println!("{name:44} {:9.2} {unit}", amount / fastest(work) / 1e9);
    }
}

fn values(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.37).sin() * 3.0).collect()
}

fn elementwise(filter: &str, isa: Isa) {
    let len = 8192;
    let (from, mut to) = (values(len), vec![0.0; len]);
    let functions = [
        Unary::Relu,
        Unary::Exp,
        Unary::Log,
        Unary::Erf,
        Unary::Tanh,
        Unary::Sigmoid,
        Unary::Silu,
        Unary::Gelu,
        Unary::GeluTanh,
        Unary::Softplus,
        Unary::Sin,
        Unary::HardSwish,
    ];
    for function in functions {
        row(filter, &format!("{function:?} {}", isa.name()), len as f64, "Gelem/s", || {
            unary(isa, function, black_box(&from), &mut to);
        });
    }
    row(filter, &format!("Add {}", isa.name()), len as f64, "Gelem/s", || {
        binary(isa, Binary::Add, Operand::Slice(black_box(&from)), Operand::Slice(&from), &mut to);
    });
}

fn depthwise(filter: &str, isa: Isa) {
    for (size, kernel, stride) in [
        (112, 3, 1),
        (112, 3, 2),
        (56, 3, 1),
        (56, 3, 2),
        (28, 3, 1),
        (14, 3, 1),
        (7, 3, 1),
        (28, 5, 1),
        (28, 5, 2),
        (14, 5, 1),
        (7, 5, 1),
        (56, 7, 1),
        (14, 7, 1),
    ] {
        let out = (size - 1) / stride + 1;
        let window = Window {
            input: [size; 2],
            output: [out; 2],
            kernel: [kernel; 2],
            strides: [stride; 2],
            dilations: [1; 2],
            pads: [kernel / 2; 2],
        };
        let plan = DepthwisePlan::new(isa, window);
        let (from, weights) = (values(size * size), values(kernel * kernel));
        let mut scratch = vec![0.0; plan.scratch_len()];
        let mut to = vec![0.0; out * out];
        let flops = (2 * out * out * kernel * kernel) as f64;
        let name = format!("depthwise {size}x{size} k{kernel} s{stride} {}", isa.name());
        row(filter, &name, flops, "GFLOP/s", || {
            plan.run(black_box(&from), &weights, 0.5, Activation::Relu, &mut to, &mut scratch);
        });
    }
}

fn main() {
    let filter = std::env::args().nth(1).filter(|name| !name.starts_with('-')).unwrap_or_default();
    for isa in Isa::available() {
        elementwise(&filter, isa);
        depthwise(&filter, isa);
    }
}
