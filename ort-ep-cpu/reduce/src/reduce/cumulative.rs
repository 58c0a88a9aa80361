//! `CumSum` and `CumProd`: inclusive or exclusive scans along an axis.

use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx, Unary};
use ort_core::{Result, error, for_each_type};
use smallvec::SmallVec;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::layout::around_axis;
use ort_cpu_kernel::number::{Number, Wide};
use ort_cpu_threads::interrupt::{in_blocks, spend};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 14;
/// Columns that are scanned at a time.
const TILE: usize = 128;

cpu_kernels![
    KernelDef { op: "CumSum", make: |cx| make(cx, false), ..KernelDef::BASE },
    KernelDef { op: "CumProd", make: |cx| make(cx, true), ..KernelDef::BASE },
];

#[derive(Clone, Copy)]
struct Scan {
    product: bool,
    exclusive: bool,
    reverse: bool,
}

fn make(cx: &mut CompileCx<'_>, product: bool) -> Result<Box<dyn Executable>> {
    let (exclusive, reverse) = (cx.attrs().flag("exclusive")?, cx.attrs().flag("reverse")?);
    let scan = Scan { product, exclusive, reverse };
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let axis = cx.input(1)?.collect_ints::<SmallVec<[i64; 1]>>()?;
        let &[axis] = axis.as_slice() else {
            return Err(error!(InvalidArgument, "the axis must be one number, got {}", axis.len()));
        };
        let (input, threads) = (cx.input(0)?, cx.threads());
        let [_, len, inner] = around_axis(input.shape(), axis)?;
        let dtype = input.dtype();
        for_each_type!(dtype in NUMERIC, T => {
            // No pair is registered as in place, so input and output are always apart.
            if let Unary::Apart(from, to) = cx.unary::<T>(0, 0)? {
                scan.run(threads, [len, inner], from, to);
            }
            Ok(())
        }, else => Err(error!(NotImplemented, "accumulating {}", dtype.name())))
    }))
}

impl Scan {
    fn run<T: Number>(self, threads: usize, [len, inner]: [usize; 2], from: &[T], to: &mut [T]) {
        let block = len * inner;
        if block == 0 {
            return;
        }
        for_each_row_chunk_mut(threads, to, block, (GRAIN / block).max(1), |first, blocks| {
            for (index, to) in blocks.chunks_exact_mut(block).enumerate() {
                let from = &from[(first + index) * block..][..block];
                for start in (0..inner).step_by(TILE) {
                    spend(4 * len);
                    self.columns([len, inner], start, from, to);
                }
            }
        });
    }

    fn columns<T: Number>(self, [len, inner]: [usize; 2], start: usize, from: &[T], to: &mut [T]) {
        let width = TILE.min(inner - start);
        let identity = if self.product { T::Wide::ONE } else { T::Wide::ZERO };
        // Totals keep the accumulator type, so each element is rounded once and errors do not add
        // up.
        let mut totals = [identity; TILE];
        let mut steps = 0..len;
        in_blocks(len, || {
            let step = steps.next().unwrap_or(0);
            let place = if self.reverse { len - 1 - step } else { step };
            let row = place * inner + start..place * inner + start + width;
            for ((&x, y), total) in from[row.clone()].iter().zip(&mut to[row]).zip(&mut totals) {
                let before = *total;
                *total = if self.product { before.mul(x.widen()) } else { before.add(x.widen()) };
                *y = T::narrow(if self.exclusive { before } else { *total });
            }
        });
    }
}
