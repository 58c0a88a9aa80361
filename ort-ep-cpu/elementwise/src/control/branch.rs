//! `If`: runs one of two subgraphs.

use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::{Result, error};

use super::subgraph;
use ort_cpu_kernel::cpu_kernels;

cpu_kernels![KernelDef {
    op: "If",
    host_inputs: &[0],
    outputs: OutputsFrom::Subgraph,
    make,
    ..KernelDef::BASE
}];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let then = subgraph(cx, "then_branch")?.0;
    let otherwise = subgraph(cx, "else_branch")?.0;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let condition = cx.input(0)?;
        let &[holds] = condition.bytes()? else {
            return Err(error!(
                Fail,
                "the condition has shape {:?}, expected one element",
                condition.shape()
            ));
        };
        let branch = if holds != 0 { then } else { otherwise };
        // Branches have no inputs; what they read of the graph around are captures.
        for (index, value) in cx.run_subgraph(branch, &[])?.into_iter().enumerate() {
            cx.set(index, value)?;
        }
        Ok(())
    }))
}
