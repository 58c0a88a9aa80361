//! The exported functions of a kernel: compile, ask for its workspace, run.

use std::mem::offset_of;
use std::sync::Arc;

use ort_alloc::{Budget, SharedBuffer};

use super::call::{exported, only_node, opened, put, record, reporting, whole};
use super::tensors::{bytes_mut, range, read_mut, read_view, shape};
use crate::ep::abi::decode::{list, read_node};
use crate::ep::abi::tables::{
    ORT_PROVIDER_ABSENT, ORT_PROVIDER_DEVICE, ORT_PROVIDER_HOST, ORT_PROVIDER_OK, OrtProviderCompileInfo,
    OrtProviderDevice, OrtProviderKernel, OrtProviderReport, OrtProviderRun, OrtProviderTensor,
};
use crate::ep::compile::{Account, CompileSettings, Packing};
use crate::ep::packed::Owner;
use crate::ep::{
    CancelToken, CompileCx, Executable, InputViews, IoShapes, OutputSlot, OutputSlots, Precision, RunControl,
    RunCx,
};
use crate::tensor::{Shape, ValueView};
use crate::{Result, ensure, error};

/// A compiled kernel, with the device's empty buffer.
struct Kernel {
    executable: Box<dyn Executable>,
    nothing: SharedBuffer,
}

/// Borrows the kernel behind a handle.
///
/// # Safety
///
/// `kernel` is null, or from `compile` and not yet released.
unsafe fn kernel<'a>(kernel: *mut OrtProviderKernel) -> Result<&'a Kernel> {
    // SAFETY: null or valid, by this function's contract.
    unsafe { kernel.cast::<Kernel>().as_ref() }.ok_or_else(|| error!(Fail, "the host gave no kernel"))
}

/// Compiles a node.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed. `info` is null or a valid record, `kernel`
/// is null or writable, and `report` is the host's for this call.
pub(super) unsafe extern "C" fn compile(
    device: *mut OrtProviderDevice,
    info: *const OrtProviderCompileInfo,
    kernel: *mut *mut OrtProviderKernel,
    report: *mut OrtProviderReport,
) -> i32 {
    reporting(report, || {
        let exported = exported()?;
        // SAFETY: the host's open device and record.
        let (opened, info) = unsafe { (opened(device)?, record(info)?) };
        // SAFETY: the node's record is part of `info`.
        let graph = unsafe { read_node(info.node, exported.host) }?;
        // The host counts packed weights through `reserve`, but only once they are packed. This
        // local budget refuses before packing if they cannot fit.
        let budget = Budget::new(Some(whole(info.available_bytes)?));
        let owner = Arc::<Owner>::default();
        let account = Account { budget: &budget, owner: &owner };
        let precision = if info.bf16 != 0 { Precision::Bf16 } else { Precision::Fp32 };
        let packing = if info.counts_only != 0 { Packing::Counted } else { Packing::Now };
        let settings = CompileSettings { threads: info.threads as usize, precision };
        let mut cx = CompileCx::new(only_node(&graph)?, &*opened.device, settings, account, packing)?;
        let executable = opened.device.compile(&mut cx)?;
        let host = exported.host;
        if let Some(reserve) = host.reserve.filter(|_| cx.packed_bytes > 0) {
            // SAFETY: `info.compilation` and `report` are the host's for this call.
            let code = unsafe { reserve(info.compilation, cx.packed_bytes as u64, report) };
            ensure!(code == ORT_PROVIDER_OK, OutOfMemory, "the session's memory limit leaves too little");
        }
        for (index, _) in cx.consumed.iter().enumerate().filter(|(_, consumed)| **consumed) {
            // SAFETY: `info.compilation` is the host's for this call.
            host.consume.into_iter().for_each(|consume| unsafe { consume(info.compilation, index as u32) });
        }
        let made = Box::new(Kernel { executable, nothing: opened.nothing.clone() });
        // SAFETY: the host's out parameter.
        unsafe { put(kernel, Box::into_raw(made).cast()) }
    })
}

/// Frees a kernel.
///
/// # Safety
///
/// `kernel` is from `compile`, and the host releases it once, after its last call.
pub(super) unsafe extern "C" fn release_kernel(kernel: *mut OrtProviderKernel) {
    reporting(std::ptr::null_mut(), || {
        // SAFETY: `compile` made this box, and the host releases it once.
        drop(unsafe { Box::from_raw(kernel.cast::<Kernel>()) });
        Ok(())
    });
}

/// Returns the workspace that a kernel needs for a run.
///
/// # Safety
///
/// `kernel` is null, or from `compile` and not yet released. `run` is null or a valid record,
/// `bytes` is null or writable, and `report` is the host's for this call.
pub(super) unsafe extern "C" fn workspace(
    kernel: *mut OrtProviderKernel,
    run: *const OrtProviderRun,
    bytes: *mut u64,
    report: *mut OrtProviderReport,
) -> i32 {
    reporting(report, || {
        // SAFETY: the host's kernel and record.
        let (kernel, run) = unsafe { (self::kernel(kernel)?, record(run)?) };
        let shapes = |tensors: &[OrtProviderTensor]| {
            let shape = |tensor: &OrtProviderTensor| match tensor.kind {
                ORT_PROVIDER_ABSENT => Ok(None),
                // SAFETY: the tensor is part of the host's record.
                _ => unsafe { shape(tensor) }.map(Some),
            };
            tensors.iter().map(shape).collect::<Result<Vec<_>>>()
        };
        // SAFETY: both lists are part of the host's record.
        let (inputs, outputs) = unsafe {
            (shapes(list(run.inputs, run.input_count))?, shapes(list(run.outputs, run.output_count))?)
        };
        // `room` was added after the first release of this version, so an older host's record ends
        // before it.
        let knows_room = run.size >= offset_of!(OrtProviderRun, room) + size_of::<u64>();
        let room = if knows_room { usize::try_from(run.room).unwrap_or(usize::MAX) } else { usize::MAX };
        let shapes = IoShapes { inputs: &inputs, outputs: &outputs, threads: run.threads as usize, room };
        let needed = kernel.executable.workspace(&shapes)?;
        // SAFETY: the host's out parameter.
        unsafe { put(bytes, needed as u64) }
    })
}

/// Runs a kernel.
///
/// # Safety
///
/// `kernel` is null, or from `compile` and not yet released. `run` is null or a valid record whose
/// memory is lent for the call: outputs and workspace exclusively, except for in-place inputs.
/// `report` is the host's for this call.
pub(super) unsafe extern "C" fn run(
    kernel: *mut OrtProviderKernel,
    run: *const OrtProviderRun,
    report: *mut OrtProviderReport,
) -> i32 {
    reporting(report, || {
        // SAFETY: the host's kernel and record.
        let (kernel, run) = unsafe { (self::kernel(kernel)?, record(run)?) };
        // SAFETY: both lists are part of the host's record.
        let (inputs, outputs) =
            unsafe { (list(run.inputs, run.input_count), list(run.outputs, run.output_count)) };
        // SAFETY: the host lends the memory of the run's tensors for the call, outputs and
        // workspace for writing. Written memory is lent once, except for an in-place input, which
        // `run_on` skips.
        unsafe { run_on(kernel, inputs, outputs, run) }
    })
}

/// Runs a kernel on a run's tensors.
///
/// # Safety
///
/// The records are those of `run`, and their memory is lent to this kernel for the call: outputs
/// and workspace exclusively, except for in-place inputs.
unsafe fn run_on(
    kernel: &Kernel,
    inputs: &[OrtProviderTensor],
    outputs: &[OrtProviderTensor],
    run: &OrtProviderRun,
) -> Result<()> {
    let shapes = |tensors: &[OrtProviderTensor]| -> Result<Vec<Shape>> {
        // SAFETY: the records are valid by this function's contract.
        tensors.iter().map(|tensor| unsafe { shape(tensor) }).collect()
    };
    let (input_shapes, output_shapes) = (shapes(inputs)?, shapes(outputs)?);
    // The ABI passes no cancellation, deadline or budget into a run.
    let (cancel, budget) = (CancelToken::new(), Budget::new(None));
    let control = RunControl { cancel, deadline: None, budget, threads: run.threads as usize };
    let in_place = |index: usize| {
        outputs
            .iter()
            .any(|output| output.kind != ORT_PROVIDER_ABSENT && usize::try_from(output.in_place) == Ok(index))
    };
    let mut given: InputViews<'_> = Vec::with_capacity(inputs.len());
    for (index, (tensor, shape)) in inputs.iter().zip(&input_shapes).enumerate() {
        // A view of an in-place input would alias the output's mutable view.
        if tensor.kind == ORT_PROVIDER_ABSENT || in_place(index) {
            given.push(None);
            continue;
        }
        // SAFETY: the input's memory is lent for reading, and no output aliases it: in-place inputs
        // are skipped.
        given.push(Some(ValueView::Tensor(unsafe { read_view(tensor, shape, &kernel.nothing) }?)));
    }
    let mut taken: OutputSlots<'_> = Vec::with_capacity(outputs.len());
    for (tensor, shape) in outputs.iter().zip(&output_shapes) {
        if tensor.kind == ORT_PROVIDER_ABSENT {
            taken.push(OutputSlot::Unwanted);
            continue;
        }
        // SAFETY: the output's memory is lent exclusively.
        let target = unsafe { read_mut(tensor, shape, &kernel.nothing) }?;
        taken.push(OutputSlot::Ready {
            tensor: Some(target),
            in_place: usize::try_from(tensor.in_place).ok(),
        });
    }
    // SAFETY: null or the host's record.
    let scratch = unsafe { run.workspace.as_ref() };
    let on_host = scratch.filter(|scratch| scratch.kind == ORT_PROVIDER_HOST);
    let bytes = match on_host {
        // SAFETY: the workspace is lent exclusively.
        Some(scratch) => unsafe { bytes_mut(scratch)? },
        None => &mut [],
    };
    let on_device = scratch.filter(|scratch| scratch.kind == ORT_PROVIDER_DEVICE);
    // SAFETY: by the ABI, `memory` is a handle from `allocate` that the host has not released.
    let on_device = on_device.map(|scratch| unsafe { range(scratch, &kernel.nothing) }).transpose()?;
    let mut cx = RunCx::new(given, taken, bytes, &control);
    cx.device_workspace = on_device;
    kernel.executable.run(&mut cx)
}
