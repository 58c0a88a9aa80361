//! Attention and decoding: GFLOP/s of fused attention, and GB/s of a step of decoding, over the
//! shapes of models.
//!
//! `cargo run --release -p ort-ep-cpu --example attention_bench [THREADS]`

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::indexing_slicing)]

use std::time::{Duration, Instant};

use half::f16;
use ort_ep_cpu::attention::{
    Attention, Elements, HiddenKeys, Rows, ScoreMask, Scores, SdpaSizes, scratch_len,
};
use ort_ep_cpu::gemm::{
    Blocks, Cpu, Gemm, LhsOperand, Numbers, PackedRhs, Precision, RhsOperand, Strided, Zeros, pack_rhs,
    workspace_len,
};
use ort_ep_cpu::simd::blocks::{BlockLayout, arrange};

/// Time spent on a row of the table.
const BUDGET: Duration = Duration::from_millis(300);

/// The least and the median seconds of a call.
fn time(mut call: impl FnMut()) -> [f64; 2] {
    let start = Instant::now();
    let mut times = Vec::new();
    while start.elapsed() < BUDGET || times.len() < 5 {
        let start = Instant::now();
        call();
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    [times[0], times[times.len() / 2]]
}

#[derive(Clone, Copy, PartialEq)]
enum Hides {
    Nothing,
    Causal,
    ByKey,
    ByQuery,
}

impl ScoreMask<f32> for Hides {
    fn is_by_query(&self) -> bool {
        *self == Hides::ByQuery
    }

    fn apply(&self, _: [usize; 3], keys: std::ops::Range<usize>, scores: &mut [f32]) {
        keys.zip(scores).filter(|(key, _)| key % 16 == 15).for_each(|(_, score)| *score -= 10000.0);
    }
}

/// Name, heads, key heads, queries, keys, size, and what hides keys.
const SHAPES: [(&str, [usize; 5], Hides); 11] = [
    ("whisper encoder", [6, 6, 1500, 1500, 64], Hides::Nothing),
    ("bert 128", [12, 12, 128, 128, 64], Hides::Nothing),
    ("bert 128, padding", [12, 12, 128, 128, 64], Hides::ByKey),
    ("bert 128, mask", [12, 12, 128, 128, 64], Hides::ByQuery),
    ("bert 512", [12, 12, 512, 512, 64], Hides::Nothing),
    ("minilm 128", [12, 12, 128, 128, 32], Hides::Nothing),
    ("gpt2 prefill 128", [12, 12, 128, 128, 64], Hides::Causal),
    ("gpt2 prefill 1024", [12, 12, 1024, 1024, 64], Hides::Causal),
    ("gpt2 decode 129", [12, 12, 1, 129, 64], Hides::Nothing),
    ("gpt2 decode 1024", [12, 12, 1, 1024, 64], Hides::Nothing),
    ("grouped decode 8192", [32, 8, 1, 8192, 128], Hides::Nothing),
];

fn attend(
    cpu: Cpu,
    [heads, key_heads, queries, keys, size]: [usize; 5],
    hides: Hides,
    halves: bool,
) -> [f64; 2] {
    let sizes = SdpaSizes { batch: 1, heads, key_heads, queries, keys, size, value_size: size };
    let noise =
        |len: usize| -> Vec<f32> { (0..len).map(|i| ((i * 7919) % 1013) as f32 / 500.0 - 1.0).collect() };
    let (q, k, v) =
        (noise(heads * queries * size), noise(key_heads * keys * size), noise(key_heads * keys * size));
    let narrow = |values: &[f32]| -> Vec<f16> { values.iter().map(|x| f16::from_f32(*x)).collect() };
    let (narrow_k, narrow_v) = (narrow(&k), narrow(&v));
    let rows = |elements, heads: usize, rows: usize| Rows {
        elements,
        strides: [rows * heads * size, size, heads * size],
    };
    let attention = Attention {
        sizes,
        queries: Some(rows(Elements::Full(&q), heads, queries)),
        keys: rows(if halves { Elements::F16(&narrow_k) } else { Elements::Full(&k) }, key_heads, keys),
        values: rows(if halves { Elements::F16(&narrow_v) } else { Elements::Full(&v) }, key_heads, keys),
        scale: 0.125,
        softcap: 0.0,
        visible: &|[_, query]| 0..if hides == Hides::Causal { query + 1 } else { keys },
        mask: matches!(hides, Hides::ByKey | Hides::ByQuery).then_some(&hides as &dyn ScoreMask<f32>),
        sinks: None,
        hidden: HiddenKeys::Excluded,
    };
    let mut to = vec![0.0; q.len()];
    let mut scratch = vec![0.0; scratch_len::<f32>(&sizes, cpu, false, halves)];
    let strides = [0, size, heads * size];
    time(|| attention.run(cpu, (&mut to, strides), Scores::Unread, &mut scratch).unwrap())
}

/// The layers of a decode step of GPT-2: rows on the left, columns, length of the sums. Weights are
/// fresh for each call.
const LAYERS: [(&str, [usize; 3]); 8] = [
    ("gpt2 qkv", [1, 2304, 768]),
    ("gpt2 attention out", [1, 768, 768]),
    ("gpt2 up", [1, 3072, 768]),
    ("gpt2 down", [1, 768, 3072]),
    ("gpt2 head", [1, 50257, 768]),
    ("gpt2 up, 2 rows", [2, 3072, 768]),
    ("gpt2 up, 4 rows", [4, 3072, 768]),
    ("gpt2 up, 8 rows", [8, 3072, 768]),
];

fn layer(cpu: Cpu, [m, n, k]: [usize; 3]) -> [f64; 2] {
    let len = PackedRhs::len(cpu, k, n);
    let copies = (256 << 20) / (4 * len) + 2;
    let mut weights = vec![0.0; len * copies];
    let b = vec![0.25; n * k];
    for copy in weights.chunks_mut(len) {
        pack_rhs(cpu, &b, [k, n], [n, 1], copy).unwrap();
    }
    let (a, mut c) = (vec![0.5; m * k], vec![0.0; m * n]);
    let lhs = LhsOperand::Plain(Strided::row_major(&a, m, k).unwrap());
    let mut turn = 0;
    let source = RhsOperand::Packed(PackedRhs::new(cpu, &weights, k, n).unwrap()).source();
    let mut workspace = vec![0.0; workspace_len(cpu, 1, [m, n, k], source)];
    time(|| {
        turn = (turn + 1) % copies;
        let packed = PackedRhs::new(cpu, &weights[turn * len..], k, n).unwrap();
        Gemm::new(lhs, RhsOperand::Packed(packed)).run(cpu, &mut c, n, &mut workspace).unwrap();
    })
}

/// Reading memory of this many bytes, as the products of one row do: what they can reach.
fn read(cpu: Cpu, bytes: usize) -> [f64; 2] {
    let values = vec![1.0_f32; bytes / 4];
    let parts = values.len() / cpu.threads;
    let mut sums = vec![0.0; cpu.threads];
    time(|| {
        ort_ep_cpu::parallel::for_each_chunk_mut(cpu.threads, &mut sums, 1, |part, sum| {
            sum[0] = ort_ep_cpu::vector::reduce::sum(cpu.isa, &values[part * parts..][..parts]);
        });
    })
}

/// 4-bit weights in blocks of 32 with zero points: one row on the left, in `f32` and in 8 bits.
fn nbits(cpu: Cpu, [n, k]: [usize; 2], in_bytes: bool) -> [f64; 2] {
    let blocks = k / 32;
    let copies = (128 << 20) / (n * k / 2) + 2;
    let quantized: Vec<u8> = (0..copies * n * k / 2).map(|i| (i * 31) as u8).collect();
    let scales: Vec<u8> = (0..copies * n * blocks).flat_map(|_| 0.01_f32.to_ne_bytes()).collect();
    let zeros = vec![0x78_u8; copies * n * blocks.div_ceil(2)];
    let lhs: Vec<f32> = (0..k).map(|i| (i % 17) as f32 - 8.0).collect();
    let layout = BlockLayout { bits: 4, block: 32 };
    let mut memory = vec![0.0; Blocks::bytes_side_len(layout, k).max(k)];
    let (mut to, mut turn) = (vec![0.0; n], 0);
    time(|| {
        turn = (turn + 1) % copies;
        let blocks = Blocks::new(
            layout,
            [k, n],
            &quantized[turn * n * k / 2..][..n * k / 2],
            Numbers::F32(&scales[turn * n * blocks * 4..][..n * blocks * 4]),
            Zeros::Quantized(&zeros[turn * n * blocks.div_ceil(2)..][..n * blocks.div_ceil(2)]),
        )
        .unwrap();
        if in_bytes {
            let len = Blocks::bytes_side_len(layout, k);
            blocks.multiply_few_bytes(cpu, &lhs, 1, &mut memory[..len], &mut to).unwrap();
        } else {
            arrange(layout, &lhs, &mut memory[..k]);
            blocks.multiply_few(cpu, &memory[..k], 1, &mut to).unwrap();
        }
    })
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1);
    let cpu = Cpu::with_threads(threads);
    println!("{:<28} {:>10} {:>10} {:>10} {:>10}", "attention", "best us", "median us", "GFLOP/s", "GB/s");
    for (name, shape, hides) in SHAPES {
        let [heads, key_heads, queries, keys, size] = shape;
        let pairs = match hides {
            Hides::Causal => queries * (queries + 1) / 2,
            _ => queries * keys,
        };
        // Caches are narrow where one query reads them; products are of bfloat16 where many share
        // them.
        let few = queries == 1;
        let ways = [
            ("", false, Precision::Fp32, true),
            (" f16", true, Precision::Fp32, few),
            (" in bf16", false, Precision::Bf16, !few && cpu.isa.has_bf16_products()),
        ];
        for (way, halves, precision, _) in ways.into_iter().filter(|way| way.3) {
            let [best, median] = attend(cpu.in_precision(precision), shape, hides, halves);
            let flops = 4.0 * (heads * size * pairs) as f64;
            let bytes = if halves { 4.0 } else { 8.0 } * (key_heads * keys * size) as f64;
            println!(
                "{:<28} {:>10.1} {:>10.1} {:>10.1} {:>10.1}",
                format!("{name}{way}"),
                best * 1e6,
                median * 1e6,
                flops / best / 1e9,
                bytes / best / 1e9
            );
        }
    }
    println!("{:<28} {:>10} {:>10} {:>10} {:>10}", "weights", "best us", "median us", "GFLOP/s", "GB/s");
    let row = |name: &str, [best, median]: [f64; 2], [flops, bytes]: [f64; 2]| {
        let (flops, bytes) = (flops / best / 1e9, bytes / best / 1e9);
        println!("{name:<28} {:>10.1} {:>10.1} {flops:>10.1} {bytes:>10.1}", best * 1e6, median * 1e6);
    };
    row("read 256 MiB", read(cpu, 256 << 20), [0.0, (256 << 20) as f64]);
    for (name, shape) in LAYERS {
        let [m, n, k] = shape.map(|size| size as f64);
        row(name, layer(cpu, shape), [2.0 * m * n * k, 4.0 * n * k]);
    }
    for (name, [m, n, k]) in LAYERS.into_iter().filter(|(_, [m, _, _])| *m == 1) {
        for in_bytes in [false, true] {
            let name = format!("{name} {}", if in_bytes { "4 x 8 bits" } else { "4 x 32 bits" });
            let size = (m * n * k) as f64;
            // Codes, and for each block of 32 a scale and half a byte.
            row(&name, nbits(cpu, [n, k], in_bytes), [2.0 * size, size * (0.5 + 4.5 / 32.0)]);
        }
    }
}
