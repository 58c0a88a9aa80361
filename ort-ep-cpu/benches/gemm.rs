//! Matrix products of transformer sizes: GFLOP/s by instruction set and threads, beside the peak
//! that a loop of multiply-adds in registers reaches in the same run.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use ort_ep_cpu::gemm::{
    Batch, Cpu, Gemm, LhsOperand, PackedRhs, RhsOperand, Strided, pack_rhs, run_batch, workspace_len,
};
use ort_ep_cpu::parallel::Pool;
use ort_ep_cpu::simd::isa::Isa;

/// Time spent on a row of the table.
const BUDGET: Duration = Duration::from_millis(150);

/// The shortest time of one call.
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

/// GFLOP/s of a product whose operands all lie in the nearest cache.
fn peak(cpu: Cpu) -> f64 {
    let (m, n, k) = (8, 48, 192);
    let (a, b) = (vec![0.5; m * k], vec![0.25; n * k]);
    let mut packed = vec![0.0; PackedRhs::len(cpu, k, n)];
    pack_rhs(cpu, &b, [k, n], [n, 1], &mut packed).unwrap();
    let gemm = Gemm::new(
        LhsOperand::Plain(Strided::row_major(&a, m, k).unwrap()),
        RhsOperand::Packed(PackedRhs::new(cpu, &packed, k, n).unwrap()),
    );
    let mut c = vec![0.0; m * n];
    let seconds = best(|| (0..100).for_each(|_| gemm.run(cpu, black_box(&mut c), n, &mut []).unwrap()));
    200.0 * (m * n * k) as f64 / seconds / 1e9
}

/// GFLOP/s of a product with fresh weights for each call, as a model has them.
fn product(cpu: Cpu, [m, n, k]: [usize; 3], packed: bool) -> f64 {
    let copies = if packed { (64 << 20) / (4 * n * k) + 1 } else { 1 };
    let (a, b) = (vec![0.5; m * k], vec![0.25; n * k]);
    let len = PackedRhs::len(cpu, k, n);
    let mut weights = vec![0.0; len * copies];
    for copy in weights.chunks_mut(len) {
        pack_rhs(cpu, &b, [k, n], [n, 1], copy).unwrap();
    }
    let mut c = vec![0.0; m * n];
    let lhs = LhsOperand::Plain(Strided::row_major(&a, m, k).unwrap());
    let mut turn = 0;
    let plain = RhsOperand::Plain(Strided::row_major(&b, k, n).unwrap());
    let mut workspace = vec![0.0; workspace_len(cpu, 1, [m, n, k], plain.source())];
    let seconds = best(|| {
        turn = (turn + 1) % copies;
        let rhs = match packed {
            true => RhsOperand::Packed(PackedRhs::new(cpu, &weights[turn * len..], k, n).unwrap()),
            false => plain,
        };
        Gemm::new(lhs, rhs).run(cpu, black_box(&mut c), n, &mut workspace).unwrap();
    });
    2.0 * (m * n * k) as f64 / seconds / 1e9
}

/// GFLOP/s of the products of attention heads: queries times keys, the keys transposed.
fn heads(cpu: Cpu, count: usize, [m, n, k]: [usize; 3]) -> f64 {
    let (a, b) = (vec![0.5; count * m * k], vec![0.25; count * n * k]);
    let mut c = vec![0.0; count * m * n];
    let problem = |index: usize| {
        let lhs = Strided::row_major(&a[index * m * k..], m, k)?;
        let rhs = Strided::row_major(&b[index * n * k..], n, k)?.transposed();
        Ok(Gemm::new(LhsOperand::Plain(lhs), RhsOperand::Plain(rhs)))
    };
    let source = problem(0).unwrap().rhs.source();
    let mut workspace = vec![0.0; workspace_len(cpu, count, [m, n, k], source)];
    let seconds = best(|| {
        let batch = Batch { values: black_box(&mut c), count, row_stride: n, batch_stride: m * n };
        run_batch(cpu, &problem, batch, &mut workspace).unwrap();
    });
    2.0 * (count * m * n * k) as f64 / seconds / 1e9
}

fn main() {
    let region = best(|| (0..100).for_each(|_| Pool::global().run(2, 2, &|index| _ = black_box(index))));
    println!("a parallel region of two empty tasks: {:.2} us", region * 1e4);
    let busy = |_| {
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(20) {}
    };
    let region = best(|| Pool::global().run(2, 2, &busy));
    println!("a parallel region of two tasks of 20 us: {:.2} us", region * 1e6);
    for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| *isa <= Isa::current()) {
        for threads in [1, 2] {
            if isa == Isa::Scalar && threads == 2 {
                continue;
            }
            let cpu = Cpu { isa, ..Cpu::with_threads(threads) };
            let peak = peak(Cpu { isa, ..Cpu::with_threads(1) }) * threads as f64;
            println!("\n{} on {threads}: in the nearest cache {peak:.1} GFLOP/s", isa.name());
            for shape in [
                [128, 768, 768],
                [128, 3072, 768],
                [128, 768, 3072],
                [1024, 3072, 768],
                [49, 768, 3072],
                [16, 768, 768],
                [1, 3072, 768],
            ] {
                for packed in [true, false] {
                    let rate = product(cpu, shape, packed);
                    let kind = if packed { "packed" } else { "plain" };
                    println!("{shape:>16?} {kind:>8} {rate:8.1} GFLOP/s {:5.1} %", 100.0 * rate / peak);
                }
            }
            let rate = heads(cpu, 12, [128, 128, 64]);
            println!("12 x [128, 128, 64] transposed {rate:.1} GFLOP/s {:5.1} %", 100.0 * rate / peak);
        }
    }
}
