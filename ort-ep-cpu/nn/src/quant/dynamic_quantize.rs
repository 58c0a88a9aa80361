//! `DynamicQuantizeLinear`.

use ort_core::Result;
use ort_core::ep::{Executable, KernelDef, RunCx};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::dynamic_quantize::ByteQuantizer;
use ort_cpu_vector::simd::Isa;

cpu_kernels![KernelDef {
    op: "DynamicQuantizeLinear",
    make: |_| Ok(Box::new(run) as Box<dyn Executable>),
    ..KernelDef::BASE
}];

fn run(cx: &mut RunCx<'_>) -> Result<()> {
    let isa = Isa::current();
    let (threads, x) = (cx.threads(), cx.input(0)?.as_slice::<f32>()?);
    let quantizer = ByteQuantizer::covering(isa, threads, x);
    quantizer.encode(isa, threads, x, cx.output(0)?.as_mut_slice()?);
    if cx.wants(1) {
        cx.output(1)?.as_mut_slice::<f32>()?.fill(quantizer.scale);
    }
    if cx.wants(2) {
        cx.output(2)?.as_mut_slice::<u8>()?.fill(quantizer.zero as u8);
    }
    Ok(())
}
