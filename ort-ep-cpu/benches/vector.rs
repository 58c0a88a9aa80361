//! Speed of the vector functions on one thread, the best of several runs: `cargo bench --bench
//! vector [-- filter]`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ort_ep_cpu::depthwise::channels::{ChannelBlock, DepthwiseBlockPlan};
use ort_ep_cpu::depthwise::planes::{DepthwisePlan, Planes};
use ort_ep_cpu::simd::Isa;
use ort_ep_cpu::vector::activation::Activation;
use ort_ep_cpu::vector::convert::{bf16_from_f32, f16_from_f32, f32_from_f16};
use ort_ep_cpu::vector::dynamic_quantization::DynamicQuantization;
use ort_ep_cpu::vector::elementwise::{Binary, Operand, Unary, binary, unary};
use ort_ep_cpu::vector::norm::RowNorm;
use ort_ep_cpu::vector::pool::{Pool, PoolPlan, scratch_len};
use ort_ep_cpu::vector::random::{Dropout, dropout};
use ort_ep_cpu::vector::reduce;
use ort_ep_cpu::vector::softmax::{Softmax, softmax_columns, softmax_row};
use ort_ep_cpu::vector::training::{Adam, adam};
use ort_ep_cpu::vector::transpose::{Permutation, transpose};
use ort_ep_cpu::vector::window::Window;

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
        (20, 7, 1),
        (14, 7, 1),
    ] {
        /// Planes of a call, as a layer has them.
        const PLANES: usize = 32;
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
        let (from, weights) = (values(PLANES * size * size), values(PLANES * kernel * kernel));
        let mut scratch = vec![0.0; plan.scratch_len()];
        let mut to = vec![0.0; PLANES * out * out];
        let flops = (2 * out * out * kernel * kernel) as f64;
        let name = format!("depthwise {size}x{size} k{kernel} s{stride} {}", isa.name());
        row(filter, &name, PLANES as f64 * flops, "GFLOP/s", || {
            let planes =
                Planes { values: black_box(&from), stride: size * size, weights: &weights, bias: None };
            plan.run(planes, Activation::Relu, &mut to, &mut scratch);
        });

        let plan = DepthwiseBlockPlan::new(isa, window);
        let channels = plan.channels();
        let (planes, weights) = (values(channels * size * size), values(channels * kernel * kernel));
        let mut scratch = vec![0.0; plan.scratch_len()];
        let mut to = vec![0.0; channels * out * out];
        row(filter, &format!("{name} block"), channels as f64 * flops, "GFLOP/s", || {
            let block = ChannelBlock { planes: black_box(&planes), weights: &weights, bias: None };
            plan.run(block, Activation::Relu, &mut to, &mut scratch);
        });
    }
}

fn rows(filter: &str, isa: Isa) {
    let len = 768;
    let (from, scale, mut to) = (values(len), values(len), vec![0.0; len]);
    let isa_name = isa.name();
    for kind in [Softmax::Linear, Softmax::Log] {
        row(filter, &format!("softmax {kind:?} row of {len} {isa_name}"), len as f64, "Gelem/s", || {
            softmax_row(isa, kind, black_box(&from), &mut to);
        });
    }
    let layer_norm = RowNorm { centers: true, epsilon: 1e-5, scale: Some(&scale), bias: Some(&scale) };
    row(filter, &format!("layer_norm row of {len} {isa_name}"), len as f64, "Gelem/s", || {
        layer_norm.apply(isa, black_box(&from), &mut to);
    });
    let rms_norm = RowNorm { centers: false, bias: None, ..layer_norm };
    row(filter, &format!("rms_norm row of {len} {isa_name}"), len as f64, "Gelem/s", || {
        rms_norm.apply(isa, black_box(&from), &mut to);
    });
    let wide = values(16384);
    row(filter, &format!("sum {isa_name}"), wide.len() as f64, "Gelem/s", || {
        black_box(reduce::sum(isa, black_box(&wide)));
    });
    row(filter, &format!("max {isa_name}"), wide.len() as f64, "Gelem/s", || {
        black_box(reduce::max(isa, black_box(&wide)));
    });
    let mut columns = vec![0.0; 64 * 256];
    row(filter, &format!("softmax columns 64x256 {isa_name}"), wide.len() as f64, "Gelem/s", || {
        softmax_columns(isa, Softmax::Linear, 256, black_box(&wide), &mut columns);
    });
}

fn moves(filter: &str, isa: Isa) {
    let name = isa.name();
    let side = 384;
    let (from, mut to) = (values(side * side), vec![0.0; side * side]);
    let bytes = (2 * 4 * side * side) as f64;
    row(filter, &format!("copy {side}x{side} f32 {name}"), bytes, "GB/s", || {
        to.copy_from_slice(black_box(&from));
    });
    row(filter, &format!("transpose {side}x{side} f32 {name}"), bytes, "GB/s", || {
        transpose(isa, (side, side), black_box(&from), &mut to);
    });
    for perm in [[0, 2, 1, 3], [0, 3, 1, 2], [0, 2, 3, 1]] {
        let Some(permutation) = Permutation::new(&[1, 128, 12, 96], &perm) else { continue };
        row(filter, &format!("permute 1x128x12x96 {perm:?} {name}"), bytes, "GB/s", || {
            permutation.apply(isa, black_box(&from), &mut to);
        });
    }
    let mut halves = vec![half::f16::ZERO; from.len()];
    let mut brains = vec![half::bf16::ZERO; from.len()];
    let moved = (6 * from.len()) as f64;
    row(filter, &format!("f16_from_f32 {name}"), moved, "GB/s", || {
        f16_from_f32(isa, black_box(&from), &mut halves);
    });
    row(filter, &format!("f32_from_f16 {name}"), moved, "GB/s", || {
        f32_from_f16(isa, black_box(&halves), &mut to);
    });
    row(filter, &format!("bf16_from_f32 {name}"), moved, "GB/s", || {
        bf16_from_f32(isa, black_box(&from), &mut brains);
    });
}

fn pools(filter: &str, isa: Isa) {
    for (size, kernel, stride, pool) in [
        (112, 3, 2, Pool::Max),
        (56, 2, 2, Pool::Max),
        (28, 3, 1, Pool::Max),
        (28, 3, 1, Pool::Average { count_include_pad: false }),
    ] {
        let pad = (kernel - 1) / 2;
        let out = (size + 2 * pad - kernel) / stride + 1;
        let window = Window {
            input: [size; 2],
            output: [out; 2],
            kernel: [kernel; 2],
            strides: [stride; 2],
            dilations: [1; 2],
            pads: [pad; 2],
        };
        let plan = PoolPlan::new(window, [pad; 2], pool);
        let (from, mut to) = (values(size * size), vec![0.0; out * out]);
        let mut scratch = vec![0.0; scratch_len(&window)];
        let name = format!("{pool:?} {size}x{size} k{kernel} s{stride} {}", isa.name());
        row(filter, &name, (size * size * 4) as f64, "GB/s read", || {
            plan.run(isa, black_box(&from), &mut to, &mut scratch);
        });
    }
}

/// Steps on tensors that the second cache holds and on such that no cache does, in elements; a step
/// of Adam reads four of them and writes three.
fn training(filter: &str, isa: Isa) {
    let adam_step = Adam {
        scale: 0.5,
        gradient_decay: 0.0,
        kept_before: 0.999,
        kept_after: 1.0,
        beta: [0.9, 0.999],
        beta_rest: [0.1, 0.001],
        bias_root: 0.3,
        epsilon: 1e-8,
        size: 1e-3,
    };
    let rule = Dropout::new(0.1, 1, 2, 3);
    for len in [16_384, 1 << 24] {
        if !"training".contains(filter) && len > 16_384 {
            continue;
        }
        let (mut x, mut m, mut v) = (values(len), vec![0.0; len], vec![0.0; len]);
        let gradient = values(len);
        row(filter, &format!("training: adam {} {len}", isa.name()), len as f64, "elements", || {
            adam(isa, &adam_step, [&mut x, &mut m, &mut v], &gradient);
        });
        row(filter, &format!("training: copy {} {len}", isa.name()), len as f64, "elements", || {
            x.copy_from_slice(black_box(&gradient));
        });
        let mut data = values(len);
        row(
            filter,
            &format!("training: counter dropout {} {len}", isa.name()),
            len as f64,
            "elements",
            || {
                data.fill(1.0);
                dropout(isa, &rule, 0, 0.9, &mut data);
            },
        );
    }
    let (numbers, mut quantized) = (values(256), vec![0; 256]);
    row(filter, &format!("training: code of 8 bits {}", isa.name()), 256.0, "elements", || {
        black_box(DynamicQuantization::signed().encode(black_box(&numbers), &mut quantized));
    });
}

fn main() {
    let filter = std::env::args().nth(1).filter(|name| !name.starts_with('-')).unwrap_or_default();
    for isa in Isa::available() {
        elementwise(&filter, isa);
        depthwise(&filter, isa);
        rows(&filter, isa);
        moves(&filter, isa);
        pools(&filter, isa);
        training(&filter, isa);
    }
}
