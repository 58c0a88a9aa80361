//! The library side of the provider ABI: exports a Rust [`ExecutionProvider`] as a C function
//! table.
//!
//! The library has its own copy of this crate, and so has the host. They share only the records of
//! [`tables`](super::tables). No panic crosses the boundary: it becomes an error code.

use std::any::Any;
use std::ffi::{CStr, CString};
use std::mem::offset_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use ort_alloc::{Budget, Buffer, DeviceId, SharedBuffer};
use smallvec::SmallVec;

use super::code_of;
use super::decode::{list, read_dtype, read_node, read_shape, text};
use super::tables::{
    ORT_PROVIDER_ABI_VERSION, ORT_PROVIDER_ABSENT, ORT_PROVIDER_DEVICE, ORT_PROVIDER_HOST,
    ORT_PROVIDER_NOT_IMPLEMENTED, ORT_PROVIDER_OK, ORT_PROVIDER_SHAPE, OrtProviderClaim,
    OrtProviderCompileInfo, OrtProviderDevice, OrtProviderDeviceInfo, OrtProviderHost, OrtProviderKernel,
    OrtProviderNode, OrtProviderOption, OrtProviderReport, OrtProviderRun, OrtProviderTable,
    OrtProviderTensor,
};
use crate::dtype::DType;
use crate::ep::compile::{Account, Packing};
use crate::ep::packed::Owner;
use crate::ep::{
    CancelToken, Claim, CompileCx, Device, Executable, ExecutionProvider, IoShapes, NodeView, OutputSlot,
    OutputsFrom, Precision, ProviderOptions, RunControl, RunCx,
};
use crate::ir::{Graph, Node};
use crate::tensor::{DeviceRange, Shape, TensorMut, TensorView, ValueView};
use crate::{Error, Result, ensure, error};

/// Turns a `cdylib` crate into a provider library: exports the provider as the symbol
/// `ort_provider`, under the provider's name and the crate's version. Use it once per crate. The
/// crate's lints must allow `unsafe` code for the exported symbol.
///
/// ```
/// use std::sync::Arc;
///
/// use ort_core::ep::{Device, DeviceInfo, ExecutionProvider, ProviderOptions};
/// use ort_core::{Result, error};
///
/// struct Npu;
///
/// impl ExecutionProvider for Npu {
///     fn name(&self) -> &'static str {
///         "npu"
///     }
///
///     fn devices(&self) -> Result<Vec<DeviceInfo>> {
///         Err(error!(EpFail, "no driver is loaded").help("load the module npu"))
///     }
///
///     fn open(&self, index: usize, _: &ProviderOptions) -> Result<Arc<dyn Device>> {
///         Err(error!(EpFail, "there is no device {index}"))
///     }
/// }
///
/// ort_core::export_provider!(Npu);
/// ```
#[macro_export]
macro_rules! export_provider {
    ($provider:expr) => {
        /// Returns the function table of this provider library.
        ///
        /// # Safety
        ///
        /// `host` is null or points to the table of a host of ABI version `abi_version`, valid for
        /// the rest of the process.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn ort_provider(
            abi_version: u32,
            host: *const $crate::ep::abi::tables::OrtProviderHost,
        ) -> *const $crate::ep::abi::tables::OrtProviderTable {
            // SAFETY: `host` is valid by this function's contract, which is the same.
            unsafe {
                $crate::ep::abi::export::table(&$provider, env!("CARGO_PKG_VERSION"), abi_version, host)
            }
        }
    };
}

/// The provider of this library, and the host that loaded it.
struct Exported {
    provider: &'static dyn ExecutionProvider,
    host: &'static OrtProviderHost,
    table: OrtProviderTable,
    _texts: [CString; 2],
}

// SAFETY: the provider is `Sync`; the pointers in the tables are to functions and to immutable
// strings.
unsafe impl Send for Exported {}
// SAFETY: as for `Send`.
unsafe impl Sync for Exported {}

static EXPORTED: OnceLock<Exported> = OnceLock::new();

/// Returns the function table for a provider. `export_provider!` calls it.
///
/// # Safety
///
/// `host` is null or points to the table of a host of ABI version `abi_version`, valid for the rest
/// of the process.
#[doc(hidden)]
pub unsafe fn table(
    provider: &'static dyn ExecutionProvider,
    version: &'static str,
    abi_version: u32,
    host: *const OrtProviderHost,
) -> *const OrtProviderTable {
    /// The table for a host of another version. It only tells that host our version, and has no
    /// name.
    static OTHER_VERSION: OtherVersion = OtherVersion(TABLE);
    if abi_version != ORT_PROVIDER_ABI_VERSION {
        return &OTHER_VERSION.0;
    }
    // SAFETY: the versions match, so `host` is null or a table of this layout, by this function's
    // contract.
    let Some(host) = (unsafe { host.as_ref::<'static>() }) else { return std::ptr::null() };
    let made = catch_unwind(AssertUnwindSafe(|| {
        Some([CString::new(provider.name()).ok()?, CString::new(version).ok()?])
    }));
    let Some(texts) = made.ok().flatten() else { return std::ptr::null() };
    let exported = EXPORTED.get_or_init(|| {
        let [name, version] = &texts;
        let table = OrtProviderTable { name: name.as_ptr(), version: version.as_ptr(), ..TABLE };
        Exported { provider, host, table, _texts: texts }
    });
    &exported.table
}

struct OtherVersion(OrtProviderTable);

// SAFETY: the table's only pointers are to functions; `name` and `version` are null.
unsafe impl Sync for OtherVersion {}

const TABLE: OrtProviderTable = OrtProviderTable {
    size: size_of::<OrtProviderTable>(),
    abi_version: ORT_PROVIDER_ABI_VERSION,
    name: std::ptr::null(),
    version: std::ptr::null(),
    device_count: Some(device_count),
    device_info: Some(device_info),
    open: Some(open),
    close: Some(close),
    allocate: Some(allocate),
    release: Some(release),
    trim: Some(trim),
    copy: Some(copy),
    synchronize: Some(synchronize),
    claim: Some(claim),
    compile: Some(compile),
    workspace: Some(workspace),
    run: Some(run),
    release_kernel: Some(release_kernel),
    check: Some(check),
    prefers_channels_last: Some(prefers_channels_last),
    vector_bytes: Some(vector_bytes),
};

fn exported() -> Result<&'static Exported> {
    EXPORTED.get().ok_or_else(|| error!(Fail, "the library's table was not asked for"))
}

/// Runs the body of an ABI function. Converts an error or a panic to a status code, and reports it
/// to the host.
fn reporting(report: *mut OrtProviderReport, work: impl FnOnce() -> Result<()>) -> i32 {
    let outcome = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic)));
    let Err(problem) = outcome else { return ORT_PROVIDER_OK };
    explain(report, code_of(problem.kind()), &problem)
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    error!(EpFail, "the library panicked: {text}").help("this is a defect of the provider library: report it")
}

fn explain(report: *mut OrtProviderReport, code: i32, problem: &Error) -> i32 {
    // A message may quote a name with a NUL, which a C string cannot hold.
    let c_text = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
    let (message, help) = (c_text(&problem.located_message()), problem.advice().map(c_text));
    let Some(fail) = exported().ok().and_then(|exported| exported.host.fail) else { return code };
    let help = help.as_deref().map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: `report` is null or the host's report for this call; the strings live through it.
    unsafe { fail(report, code, message.as_ptr(), help) }
}

/// An open device.
struct Opened {
    device: Arc<dyn Device>,
    /// An empty buffer, for tensors without elements: they have no allocation to refer to.
    nothing: SharedBuffer,
}

/// A compiled kernel, with the device's empty buffer.
struct Kernel {
    executable: Box<dyn Executable>,
    nothing: SharedBuffer,
}

/// Borrows the device behind a handle.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed.
unsafe fn opened<'a>(device: *mut OrtProviderDevice) -> Result<&'a Opened> {
    // SAFETY: null or valid, by this function's contract.
    unsafe { device.cast::<Opened>().as_ref() }.ok_or_else(|| error!(Fail, "the host gave no device"))
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

/// Borrows a record.
///
/// # Safety
///
/// `pointer` is null or points to a record of the host that outlives `'a`.
unsafe fn record<'a, T>(pointer: *const T) -> Result<&'a T> {
    // SAFETY: null or valid, by this function's contract.
    unsafe { pointer.as_ref() }.ok_or_else(|| error!(Fail, "the host gave no record"))
}

/// Writes an out parameter; fails if it is null.
///
/// # Safety
///
/// `place` is null or writable.
unsafe fn put<T>(place: *mut T, value: T) -> Result<()> {
    ensure!(!place.is_null(), Fail, "the host gave no place for the answer");
    // SAFETY: not null, and writable by this function's contract.
    unsafe { place.write(value) };
    Ok(())
}

// SAFETY of all that follows: the host calls these functions as `OrtProviderTable` documents.
// Handles come from `open`, `compile` and `allocate` and are not yet released. Records and out
// parameters are valid through the call.

unsafe extern "C" fn device_count(count: *mut u32, report: *mut OrtProviderReport) -> i32 {
    reporting(report, || {
        let devices = exported()?.provider.devices()?;
        // SAFETY: the host's out parameter.
        unsafe { put(count, devices.len() as u32) }
    })
}

unsafe extern "C" fn device_info(
    index: u32,
    info: *mut OrtProviderDeviceInfo,
    report: *mut OrtProviderReport,
) -> i32 {
    reporting(report, || {
        let exported = exported()?;
        let devices = exported.provider.devices()?;
        let device = devices.get(index as usize);
        let device = device.ok_or_else(|| error!(InvalidArgument, "there is no device {index}"))?;
        // SAFETY: the host's record, which nothing else uses during the call.
        let info = unsafe { info.as_mut() }.ok_or_else(|| error!(Fail, "the host gave no record"))?;
        info.memory_bytes = device.memory_bytes.unwrap_or(0);
        let Some(fact) = exported.host.fact else { return Ok(()) };
        let name = ("name".to_owned(), device.name.clone());
        for (name, value) in std::iter::once(&name).chain(&device.facts) {
            let texts = (CString::new(name.as_str()), CString::new(value.as_str()));
            if let (Ok(name), Ok(value)) = texts {
                // SAFETY: `info.facts` is the host's for this call; the strings live through it.
                unsafe { fact(info.facts, name.as_ptr(), value.as_ptr()) };
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn open(
    index: u32,
    options: *const OrtProviderOption,
    option_count: usize,
    device: *mut *mut OrtProviderDevice,
    uses_host_memory: *mut u8,
    report: *mut OrtProviderReport,
) -> i32 {
    reporting(report, || {
        let mut given = ProviderOptions::new();
        // SAFETY: the host's list of options.
        for option in unsafe { list(options, option_count) } {
            // SAFETY: by the ABI, both are NUL-terminated strings.
            let (name, value) = unsafe { (text(option.name)?, text(option.value)?) };
            given.insert(name.to_owned(), value.to_owned());
        }
        let opened = exported()?.provider.open(index as usize, &given)?;
        let nothing = Buffer::empty(opened.memory()).freeze();
        let is_host = opened.memory() == DeviceId::HOST;
        let opened = Box::new(Opened { device: opened, nothing });
        // SAFETY: the host's out parameters.
        unsafe {
            put(uses_host_memory, u8::from(is_host))?;
            put(device, Box::into_raw(opened).cast())
        }
    })
}

unsafe extern "C" fn close(device: *mut OrtProviderDevice) {
    reporting(std::ptr::null_mut(), || {
        // SAFETY: `open` made this box, and the host closes it once, after its kernels and memory.
        drop(unsafe { Box::from_raw(device.cast::<Opened>()) });
        Ok(())
    });
}

unsafe extern "C" fn allocate(
    device: *mut OrtProviderDevice,
    bytes: u64,
    alignment: u64,
    memory: *mut u64,
    report: *mut OrtProviderReport,
) -> i32 {
    reporting(report, || {
        // SAFETY: the host's open device.
        let allocator = unsafe { opened(device) }?.device.allocator();
        let buffer = allocator.allocate(whole(bytes)?, whole(alignment)?)?.freeze();
        // The handle is the address of the boxed buffer, so it is never 0.
        // SAFETY: the host's out parameter.
        unsafe { put(memory, Box::into_raw(Box::new(buffer)) as u64) }
    })
}

unsafe extern "C" fn release(_: *mut OrtProviderDevice, memory: u64) {
    reporting(std::ptr::null_mut(), || {
        // SAFETY: `allocate` made this box, and the host releases it once.
        drop(unsafe { Box::from_raw(memory as *mut SharedBuffer) });
        Ok(())
    });
}

unsafe extern "C" fn trim(device: *mut OrtProviderDevice) -> u64 {
    let mut freed = 0;
    reporting(std::ptr::null_mut(), || {
        // SAFETY: the host's open device.
        freed = unsafe { opened(device) }?.device.allocator().trim() as u64;
        Ok(())
    });
    freed
}

unsafe extern "C" fn copy(
    device: *mut OrtProviderDevice,
    from: *const OrtProviderTensor,
    to: *const OrtProviderTensor,
    report: *mut OrtProviderReport,
) -> i32 {
    reporting(report, || {
        // SAFETY: the host's open device and records.
        let (opened, from, to) = unsafe { (opened(device)?, record(from)?, record(to)?) };
        // SAFETY: the records are valid, so their sizes are, too.
        let shapes = unsafe { (shape(from)?, shape(to)?) };
        // SAFETY: the host lends the memory of both tensors for the call, the second one for
        // writing.
        let (from, to) = unsafe {
            (read_view(from, &shapes.0, &opened.nothing)?, read_mut(to, &shapes.1, &opened.nothing)?)
        };
        opened.device.copy(from, to)
    })
}

unsafe extern "C" fn synchronize(device: *mut OrtProviderDevice, report: *mut OrtProviderReport) -> i32 {
    // SAFETY: the host's open device.
    reporting(report, || unsafe { opened(device) }?.device.synchronize())
}

unsafe extern "C" fn prefers_channels_last(device: *mut OrtProviderDevice) -> u8 {
    let mut prefers = false;
    reporting(std::ptr::null_mut(), || {
        // SAFETY: the host's open device.
        prefers = unsafe { opened(device) }?.device.prefers_channels_last();
        Ok(())
    });
    u8::from(prefers)
}

unsafe extern "C" fn vector_bytes(device: *mut OrtProviderDevice) -> usize {
    let mut bytes = 1;
    reporting(std::ptr::null_mut(), || {
        // SAFETY: the host's open device.
        bytes = unsafe { opened(device) }?.device.vector_bytes();
        Ok(())
    });
    bytes
}

unsafe extern "C" fn check(device: *mut OrtProviderDevice, report: *mut OrtProviderReport) -> i32 {
    // SAFETY: the host's open device.
    reporting(report, || unsafe { opened(device) }?.device.check())
}

unsafe extern "C" fn claim(
    device: *mut OrtProviderDevice,
    node: *const OrtProviderNode,
    claim: *mut OrtProviderClaim,
    report: *mut OrtProviderReport,
) -> i32 {
    let mut refusal = None;
    let code = reporting(report, || {
        let exported = exported()?;
        // SAFETY: the host's open device and record.
        let (opened, graph) = unsafe { (opened(device)?, read_node(node, exported.host)) };
        // A node that we cannot decode is a refusal, so that another provider can run it.
        let answer = graph.map_err(|problem| problem.message().to_owned());
        let answer = answer.and_then(|graph| {
            let view = only_node(&graph).map_err(|problem| problem.to_string())?;
            let claimed = opened.device.claim(&view)?;
            if claimed.outputs != OutputsFrom::Plan {
                return Err("a provider library runs no kernel that makes its outputs itself".to_owned());
            }
            // SAFETY: `claim` is the host's for this call.
            unsafe { say(exported.host, claim, &claimed, view.node) };
            Ok(())
        });
        refusal = answer.err();
        Ok(())
    });
    match refusal {
        Some(reason) => explain(report, ORT_PROVIDER_NOT_IMPLEMENTED, &error!(NotImplemented, "{reason}")),
        None => code,
    }
}

/// Reports a claim to the host. Positions that this node lacks are skipped, because the host would
/// reject the claim.
///
/// # Safety
///
/// `claim` is the host's for this call.
unsafe fn say(host: &OrtProviderHost, claim: *mut OrtProviderClaim, claimed: &Claim, node: &Node) {
    let (inputs, outputs) = (node.inputs.len(), node.outputs.len());
    let pairs = claimed.in_place.iter().filter(|(input, output)| *input < inputs && *output < outputs);
    for pair in pairs {
        let grows = u8::from(claimed.shared_buffers.contains(pair));
        // SAFETY: `claim` is valid by this function's contract.
        host.in_place.into_iter().for_each(|say| unsafe { say(claim, pair.0 as u32, pair.1 as u32, grows) });
    }
    let lists = [
        (host.host_input, claimed.host_inputs, inputs),
        (host.unaligned_input, claimed.unaligned, inputs),
        (host.left_out, claimed.left_out, outputs),
    ];
    for (say, list, count) in lists {
        for index in list.iter().filter(|index| **index < count) {
            // SAFETY: `claim` is valid by this function's contract.
            say.into_iter().for_each(|say| unsafe { say(claim, *index as u32) });
        }
    }
}

fn only_node(graph: &Graph) -> Result<NodeView<'_>> {
    let node = graph.nodes.first().ok_or_else(|| error!(Fail, "the graph has no node"))?;
    Ok(NodeView { graph, node })
}

unsafe extern "C" fn compile(
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
        let settings = (info.threads as usize, precision);
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

unsafe extern "C" fn release_kernel(kernel: *mut OrtProviderKernel) {
    reporting(std::ptr::null_mut(), || {
        // SAFETY: `compile` made this box, and the host releases it once.
        drop(unsafe { Box::from_raw(kernel.cast::<Kernel>()) });
        Ok(())
    });
}

unsafe extern "C" fn workspace(
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

unsafe extern "C" fn run(
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
    let mut given: SmallVec<[Option<ValueView<'_>>; 16]> = SmallVec::new();
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
    let mut taken: SmallVec<[OutputSlot<'_>; 4]> = SmallVec::new();
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

/// The shape of a tensor record; empty for an absent one.
///
/// # Safety
///
/// `tensor` is a valid record.
unsafe fn shape(tensor: &OrtProviderTensor) -> Result<Shape> {
    if tensor.kind == ORT_PROVIDER_ABSENT {
        return Ok(Shape::new());
    }
    // SAFETY: `sizes` has `rank` elements in a valid record.
    read_shape(unsafe { list(tensor.sizes, tensor.rank as usize) })
}

/// Creates a view of a tensor to read.
///
/// # Safety
///
/// The tensor's memory is lent for reading throughout `'a`.
unsafe fn read_view<'a>(
    tensor: &OrtProviderTensor,
    shape: &'a [usize],
    nothing: &'a SharedBuffer,
) -> Result<TensorView<'a>> {
    let dtype = checked(tensor, shape)?;
    match tensor.kind {
        ORT_PROVIDER_HOST => {
            // SAFETY: `data` has `bytes` bytes in a valid record, lent for `'a` by this function's
            // contract.
            let bytes = unsafe { list(tensor.data.cast_const().cast(), whole(tensor.bytes)?) };
            Ok(TensorView::host(dtype, shape, bytes))
        }
        // SAFETY: the same for `memory`, a handle from `allocate`.
        _ => Ok(TensorView::device(dtype, shape, unsafe { range(tensor, nothing) }?)),
    }
}

/// Creates a view of a tensor to write.
///
/// # Safety
///
/// The tensor's memory is lent exclusively throughout `'a`.
unsafe fn read_mut<'a>(
    tensor: &OrtProviderTensor,
    shape: &'a [usize],
    nothing: &'a SharedBuffer,
) -> Result<TensorMut<'a>> {
    let dtype = checked(tensor, shape)?;
    match tensor.kind {
        // SAFETY: lent exclusively for `'a`, by this function's contract.
        ORT_PROVIDER_HOST => Ok(TensorMut::host(dtype, shape, unsafe { bytes_mut(tensor) }?)),
        // SAFETY: the same for `memory`, a handle from `allocate`.
        _ => Ok(TensorMut::device(dtype, shape, unsafe { range(tensor, nothing) }?)),
    }
}

/// Borrows a host tensor's bytes to write; empty if there are none.
///
/// # Safety
///
/// The tensor's memory is lent exclusively throughout `'a`.
unsafe fn bytes_mut<'a>(tensor: &OrtProviderTensor) -> Result<&'a mut [u8]> {
    let len = whole(tensor.bytes)?;
    if len == 0 || tensor.data.is_null() {
        return Ok(&mut []);
    }
    // SAFETY: not null, and lent exclusively for `'a` by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data.cast(), len) })
}

/// Resolves a tensor's device memory, with bounds checked.
///
/// # Safety
///
/// `tensor.memory` is 0, or from `allocate` and not yet released.
unsafe fn range<'a>(tensor: &OrtProviderTensor, nothing: &'a SharedBuffer) -> Result<DeviceRange<'a>> {
    let (offset, len) = (whole(tensor.offset)?, whole(tensor.bytes)?);
    // SAFETY: null or valid, by this function's contract.
    let buffer = unsafe { (tensor.memory as *const SharedBuffer).as_ref() };
    let Some(buffer) = buffer.filter(|_| len > 0) else {
        return Ok(DeviceRange { buffer: nothing, offset: 0, len: 0 });
    };
    let fits = offset.checked_add(len).is_some_and(|end| end <= buffer.len());
    ensure!(fits, Fail, "{len} bytes at {offset} of a buffer of {} bytes", buffer.len());
    Ok(DeviceRange { buffer, offset, len })
}

/// Returns the element type of a tensor, after a check that its byte count matches the shape.
fn checked(tensor: &OrtProviderTensor, shape: &[usize]) -> Result<DType> {
    ensure!(tensor.kind != ORT_PROVIDER_SHAPE, Fail, "a tensor has no memory");
    let dtype = read_dtype(tensor.element_type)?;
    let expected = crate::tensor::byte_count(dtype, shape)? as u64;
    ensure!(tensor.bytes == expected, Fail, "a tensor of {} bytes, expected {expected}", tensor.bytes);
    Ok(dtype)
}

fn whole(count: u64) -> Result<usize> {
    usize::try_from(count).map_err(|_| error!(OutOfMemory, "{count} bytes on this machine"))
}
