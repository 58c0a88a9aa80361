//! The host's side of a library's device: allocator, claims and kernels.

use std::collections::BTreeSet;
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, OnceLock, Weak};

use ort_alloc::fork::get_or_init;
use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, HostAllocator, Reservation, Stats};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::NodeRecords;
use super::host::{Compilation, ReportedClaim, call, is_refusal};
use crate::dtype::DType;
use crate::ep::abi::tables::{
    ORT_PROVIDER_ABSENT, ORT_PROVIDER_DEVICE, ORT_PROVIDER_HOST, ORT_PROVIDER_SHAPE, OrtProviderCompileInfo,
    OrtProviderDevice, OrtProviderKernel, OrtProviderRun, OrtProviderTable, OrtProviderTensor,
};
use crate::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, IoShapes, NodeView, OutputsFrom, Precision, RunCx,
    new_device_id,
};
use crate::tensor::{DeviceRange, Shape, TensorMut, TensorView};
use crate::{Error, ErrorKind, Result, Within, ensure, error};

/// An open device of a provider library.
pub(super) struct LibraryDevice {
    table: &'static OrtProviderTable,
    raw: NonNull<OrtProviderDevice>,
    info: DeviceInfo,
    memory: DeviceId,
    stats: Mutex<Stats>,
    /// Set once the library violates the interface. [`Device::check`] fails from then on.
    defect: OnceLock<Error>,
    /// A weak self-reference, from which buffers and kernels get an `Arc` that keeps the device
    /// open.
    own: Weak<LibraryDevice>,
}

// SAFETY: by the ABI, the functions of the table may be called from any thread and concurrently. We
// pass `raw` to them and never dereference it.
unsafe impl Send for LibraryDevice {}
// SAFETY: as for `Send`.
unsafe impl Sync for LibraryDevice {}

impl LibraryDevice {
    /// Wraps a device that the library's `open` returned.
    pub(super) fn new(
        table: &'static OrtProviderTable,
        raw: *mut OrtProviderDevice,
        info: DeviceInfo,
        on_host: bool,
    ) -> Result<Arc<LibraryDevice>> {
        let raw = NonNull::new(raw)
            .ok_or_else(|| error!(EpFail, "`open` reports success, but returns no device"))?;
        let memory = if on_host { DeviceId::HOST } else { new_device_id() };
        let opened = Arc::new_cyclic(|own: &Weak<LibraryDevice>| LibraryDevice {
            table,
            raw,
            info,
            memory,
            stats: Mutex::default(),
            defect: OnceLock::new(),
            own: own.clone(),
        });
        // Checked only now, so that on an error `LibraryDevice` is dropped and closes the device.
        let has_memory = table.allocate.is_some() && table.release.is_some() && table.copy.is_some();
        ensure!(
            on_host || has_memory,
            EpFail,
            "the device has memory of its own, but its library lacks 'allocate', 'release' or 'copy'"
        );
        Ok(opened)
    }

    fn shared(&self) -> Result<Arc<LibraryDevice>> {
        self.own.upgrade().ok_or_else(|| error!(Fail, "the device is being closed"))
    }

    /// Records a violation of the interface, so that [`Device::check`] fails from now on. The first
    /// one is kept.
    fn defective(&self, problem: Error) -> Error {
        let problem = problem.help("this is a bug of the provider library: report it, or run without it");
        get_or_init(&self.defect, || problem).clone()
    }
}

impl Drop for LibraryDevice {
    fn drop(&mut self) {
        if let Some(close) = self.table.close {
            // SAFETY: kernels and buffers hold an `Arc` of the device, so none is left. `raw` is
            // from `open`, and this is the only call to `close`.
            unsafe { close(self.raw.as_ptr()) }
        }
    }
}

impl Device for LibraryDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        self.memory
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        match self.own.upgrade() {
            Some(own) if self.memory != DeviceId::HOST => Arc::new(LibraryAllocator(own)),
            _ => HostAllocator::global().clone(),
        }
    }

    fn claim(&self, view: &NodeView<'_>) -> Result<Claim, String> {
        let records = NodeRecords::new(view)?;
        let mut said = ReportedClaim::default();
        let place = said.place();
        let answer = call(|report| {
            // SAFETY: the device is open; the records and `said` live through the call.
            Some(unsafe { (self.table.claim?)(self.raw.as_ptr(), &records.node, place, report) })
        });
        match answer {
            Ok(()) => {}
            // A refusal lets another provider take the node. Any other code is a defect by the ABI.
            Err(problem) if is_refusal(&problem) => return Err(problem.message().to_owned()),
            Err(problem) => return Err(self.defective(problem.within(view.node.place())).to_string()),
        }
        let claim = checked(said, view).within(|| format!("the claim for {}", view.node.place()));
        claim.map_err(|problem| self.defective(problem).to_string())
    }

    fn check(&self) -> Result<()> {
        if let Some(defect) = self.defect.get() {
            return Err(defect.clone());
        }
        let Some(check) = self.table.check else { return Ok(()) };
        // SAFETY: the device is open, and the report lives through the call.
        call(|report| Some(unsafe { check(self.raw.as_ptr(), report) }))
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let view = cx.node;
        let records = NodeRecords::new(&view).map_err(|reason| error!(NotImplemented, "{reason}"))?;
        let (threads, bf16) = (cx.threads as u32, u8::from(cx.precision == Precision::Bf16));
        let counts_only = u8::from(cx.packing.is_counted());
        let available_bytes = cx.account.budget.available() as u64;
        let mut compilation = Compilation { cx, reservations: Vec::new() };
        let info = OrtProviderCompileInfo {
            size: size_of::<OrtProviderCompileInfo>(),
            node: &records.node,
            threads,
            bf16,
            counts_only,
            available_bytes,
            compilation: (&raw mut compilation).cast(),
        };
        let mut raw = null_mut();
        // SAFETY: the device is open; the records, `compilation` and `raw` live through the call.
        call(|report| unsafe { Some((self.table.compile?)(self.raw.as_ptr(), &info, &mut raw, report)) })
            .map_err(|problem| match problem.kind() {
                // Running into a memory limit is no defect of the library.
                ErrorKind::OutOfMemory => problem,
                _ => self.defective(problem),
            })?;
        let raw = NonNull::new(raw).ok_or_else(|| {
            self.defective(error!(EpFail, "`compile` reports success, but returns no kernel"))
        })?;
        let inputs = (0..view.node.inputs.len()).map(|index| view.dtype(index));
        let kernel = Kernel {
            device: self.shared()?,
            raw,
            input_types: inputs.collect(),
            _reservations: compilation.reservations,
        };
        Ok(Box::new(kernel))
    }

    fn prefers_channels_last(&self) -> bool {
        // SAFETY: the device is open.
        self.table.prefers_channels_last.is_some_and(|prefers| unsafe { prefers(self.raw.as_ptr()) } != 0)
    }

    fn vector_bytes(&self) -> usize {
        // SAFETY: the device is open.
        self.table.vector_bytes.map_or(1, |bytes| unsafe { bytes(self.raw.as_ptr()) })
    }

    fn synchronize(&self) -> Result<()> {
        let Some(synchronize) = self.table.synchronize else { return Ok(()) };
        // SAFETY: the device is open, and the report lives through the call.
        call(|report| Some(unsafe { synchronize(self.raw.as_ptr(), report) }))
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        let same = from.dtype() == to.dtype() && from.shape() == to.shape();
        ensure!(same, Fail, "cannot copy between tensors of different types or shapes");
        let sizes = sizes(from.shape());
        let from = reading(from, &sizes)?;
        let to = writing(to, &sizes)?;
        // SAFETY: the device is open. `from` and `to` borrow both tensors' memory through the call,
        // the latter mutably.
        call(|report| unsafe { Some((self.table.copy?)(self.raw.as_ptr(), &from, &to, report)) })
    }
}

/// Converts a reported claim after validating its positions against the node.
fn checked(said: ReportedClaim, view: &NodeView<'_>) -> Result<Claim> {
    let (inputs, outputs) = (view.node.inputs.len(), view.node.outputs.len());
    ensure!(!said.too_much, EpFail, "it says more than can be of a node");
    for (input, output) in &said.in_place {
        let fits = *input < inputs && *output < outputs;
        ensure!(
            fits,
            EpFail,
            "it computes output {output} in place of input {input}, but the node has {inputs} inputs and {outputs} outputs"
        );
    }
    for input in said.host_inputs.iter().chain(&said.unaligned) {
        ensure!(*input < inputs, EpFail, "it names input {input}, but the node has {inputs} inputs");
    }
    for output in &said.left_out {
        ensure!(*output < outputs, EpFail, "it names output {output}, but the node has {outputs} outputs");
    }
    Ok(Claim {
        in_place: interned(&PAIRS, said.in_place),
        shared_buffers: interned(&PAIRS, said.grows),
        host_inputs: interned(&POSITIONS, said.host_inputs),
        unaligned: interned(&POSITIONS, said.unaligned),
        left_out: interned(&POSITIONS, said.left_out),
        outputs: OutputsFrom::Plan,
    })
}

/// Interned lists, which are never freed.
type Lists<T> = Mutex<BTreeSet<&'static [T]>>;

static PAIRS: Lists<(usize, usize)> = Mutex::new(BTreeSet::new());
static POSITIONS: Lists<usize> = Mutex::new(BTreeSet::new());

/// Interns a list as a static slice, because [`Claim`] has static lists for kernels that are
/// compiled in. The leak is bounded: about one list per kernel of the library.
fn interned<T: Ord>(lists: &Lists<T>, list: Vec<T>) -> &'static [T] {
    let mut lists = lists.lock();
    if let Some(list) = lists.get(list.as_slice()) {
        return list;
    }
    let list: &'static [T] = list.leak();
    lists.insert(list);
    list
}

/// The allocator for an open device's memory.
struct LibraryAllocator(Arc<LibraryDevice>);

impl Allocator for LibraryAllocator {
    fn device(&self) -> DeviceId {
        self.0.memory
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        let opened = &self.0;
        let refused = |problem: Error| {
            tracing::warn!(provider = opened.info.provider, bytes, "no device memory: {problem}");
            match problem.kind() {
                ErrorKind::OutOfMemory => {
                    AllocError::OutOfMemory { requested: bytes, available: None, device: opened.memory }
                }
                _ => AllocError::Unsupported { device: opened.memory, reason: problem.to_string() },
            }
        };
        if bytes == 0 {
            // Libraries need not support empty allocations.
            return Ok(Buffer::empty(opened.memory));
        }
        let mut memory = 0;
        let (asked, aligned) = (bytes as u64, alignment as u64);
        call(|report| {
            let allocate = opened.table.allocate?;
            // SAFETY: the device is open; `memory` and the report live through the call.
            Some(unsafe { allocate(opened.raw.as_ptr(), asked, aligned, &mut memory, report) })
        })
        .map_err(refused)?;
        if memory == 0 {
            // 0 is not a valid handle: records use it for "no device memory".
            let problem = error!(EpFail, "`allocate` reports success, but returns no memory");
            return Err(refused(opened.defective(problem)));
        }
        let mut stats = opened.stats.lock();
        stats.num_allocs += 1;
        stats.in_use += bytes;
        stats.total_allocated = stats.in_use;
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.max_alloc_size = stats.max_alloc_size.max(bytes);
        drop(stats);
        let owner = opened.clone();
        let release = move |memory| {
            if let Some(release) = owner.table.release {
                // SAFETY: `owner` keeps the device open, which returned this handle. The buffer
                // calls this once.
                unsafe { release(owner.raw.as_ptr(), memory) }
            }
            let mut stats = owner.stats.lock();
            stats.in_use -= bytes;
            stats.total_allocated = stats.in_use;
        };
        Ok(Buffer::opaque(opened.memory, bytes, memory, Box::new(release)))
    }

    fn stats(&self) -> Stats {
        *self.0.stats.lock()
    }

    fn trim(&self) -> usize {
        let Some(trim) = self.0.table.trim else { return 0 };
        // SAFETY: the device is open.
        usize::try_from(unsafe { trim(self.0.raw.as_ptr()) }).unwrap_or(usize::MAX)
    }
}

/// A kernel that a library compiled.
struct Kernel {
    raw: NonNull<OrtProviderKernel>,
    device: Arc<LibraryDevice>,
    input_types: SmallVec<[Option<DType>; 8]>,
    _reservations: Vec<Reservation>,
}

// SAFETY: as for `LibraryDevice`: only the library's thread-safe functions use `raw`.
unsafe impl Send for Kernel {}
// SAFETY: as for `Send`.
unsafe impl Sync for Kernel {}

impl Drop for Kernel {
    fn drop(&mut self) {
        if let Some(release) = self.device.table.release_kernel {
            // SAFETY: `compile` returned `raw`, and only this drop releases it. Runs borrow the
            // kernel, so none is active.
            unsafe { release(self.raw.as_ptr()) }
        }
    }
}

type Tensors = SmallVec<[OrtProviderTensor; 8]>;

impl Executable for Kernel {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let Some(workspace) = self.device.table.workspace else { return Ok(0) };
        let all = |list: &[Option<Shape>]| -> Vec<Option<Sizes>> {
            list.iter().map(|shape| shape.as_deref().map(sizes)).collect()
        };
        let (inputs, outputs) = (all(shapes.inputs), all(shapes.outputs));
        let records = |list: &[Option<Sizes>]| -> Tensors {
            let record = |sizes: &Option<Sizes>| match sizes {
                None => ABSENT,
                Some(sizes) => of_shape(ORT_PROVIDER_SHAPE, sizes),
            };
            list.iter().map(record).collect()
        };
        let (inputs, outputs) = (records(&inputs), records(&outputs));
        let run = run_of(&inputs, &outputs, None, shapes.threads, shapes.room);
        let mut bytes = 0;
        // SAFETY: the kernel is alive; the records, `bytes` and the report live through the call.
        call(|report| Some(unsafe { workspace(self.raw.as_ptr(), &run, &mut bytes, report) }))?;
        let bytes = isize::try_from(bytes)
            .map_err(|_| error!(EpFail, "the kernel of the library asks for {bytes} bytes of workspace"))?;
        Ok(bytes.unsigned_abs())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (mut input_sizes, mut output_sizes) = (Vec::new(), Vec::new());
        for index in 0..cx.input_count() {
            input_sizes.push(cx.find_input(index).map(|view| sizes(view.shape())));
        }
        for index in 0..cx.output_count() {
            output_sizes.push(cx.output_shape(index).map(sizes));
        }
        let mut inputs = Tensors::new();
        for (index, sizes) in input_sizes.iter().enumerate() {
            inputs.push(match (cx.find_input(index), sizes) {
                (Some(view), Some(sizes)) => reading(view, sizes).within(|| format!("input {index}"))?,
                _ => ABSENT,
            });
        }
        let mut outputs = Tensors::new();
        for (index, sizes) in output_sizes.iter().enumerate() {
            if !cx.wants(index) {
                outputs.push(ABSENT);
                continue;
            }
            let in_place = cx.in_place(index);
            let output = cx.output(index)?;
            let sizes = sizes.as_ref().ok_or_else(|| error!(Fail, "output {index} has no shape"))?;
            let output = writing(output, sizes).within(|| format!("output {index}"))?;
            // The context has no view of an in-place input. Pass the library the output's memory
            // for it, with the input's element type.
            if let Some(place) = in_place.and_then(|input| inputs.get_mut(input)) {
                let own = in_place.and_then(|input| self.input_types.get(input).copied().flatten());
                *place = OrtProviderTensor {
                    element_type: own.map_or(output.element_type, |ty| ty as i32),
                    ..output
                };
            }
            let in_place = in_place.map_or(-1, |input| input as i32);
            outputs.push(OrtProviderTensor { in_place, ..output });
        }
        let scratch = self.workspace_of(cx)?;
        let scratch = scratch.as_ref().map(|(record, _)| record);
        let run = run_of(&inputs, &outputs, scratch, cx.threads(), usize::MAX);
        // SAFETY: the kernel is alive. `cx` lends the memory of all tensors for its lifetime, that
        // of outputs and the workspace mutably.
        call(|report| unsafe { Some((self.device.table.run?)(self.raw.as_ptr(), &run, report)) })
    }
}

impl Kernel {
    /// The record of a run's workspace, as bytes, with the sizes that it points to. `None` if it is
    /// empty.
    fn workspace_of(&self, cx: &mut RunCx<'_>) -> Result<Option<(OrtProviderTensor, Box<Sizes>)>> {
        let on_device = cx.device_workspace();
        let on_host = if self.device.memory == DeviceId::HOST { cx.workspace()? } else { &mut [] };
        let bytes = on_device.map_or(on_host.len(), |range| range.len);
        if bytes == 0 {
            return Ok(None);
        }
        // Boxed, because the record points to the sizes and both are moved to the caller.
        let sizes = Box::new(sizes(&[bytes]));
        let mut record = match on_device {
            Some(range) => in_range(range, &sizes),
            None => {
                OrtProviderTensor { data: on_host.as_mut_ptr().cast(), ..of_shape(ORT_PROVIDER_HOST, &sizes) }
            }
        };
        (record.element_type, record.bytes) = (DType::U8 as i32, bytes as u64);
        Ok(Some((record, sizes)))
    }
}

/// Tensor dimensions in the ABI's integer type.
type Sizes = SmallVec<[i64; 6]>;

fn sizes(shape: &[usize]) -> Sizes {
    shape.iter().map(|size| *size as i64).collect()
}

/// The record of a missing tensor, and the defaults of all others.
const ABSENT: OrtProviderTensor = OrtProviderTensor {
    kind: ORT_PROVIDER_ABSENT,
    element_type: 0,
    rank: 0,
    in_place: -1,
    sizes: null(),
    bytes: 0,
    data: null_mut(),
    memory: 0,
    offset: 0,
};

fn of_shape(kind: u32, sizes: &Sizes) -> OrtProviderTensor {
    OrtProviderTensor { kind, rank: sizes.len() as u32, sizes: sizes.as_ptr(), ..ABSENT }
}

fn in_range(range: DeviceRange<'_>, sizes: &Sizes) -> OrtProviderTensor {
    OrtProviderTensor {
        bytes: range.len as u64,
        memory: range.buffer.handle().unwrap_or(0),
        offset: (range.buffer.offset() + range.offset) as u64,
        ..of_shape(ORT_PROVIDER_DEVICE, sizes)
    }
}

/// The record of a tensor to read. It must not outlive the tensor's memory or `sizes`.
fn reading(view: TensorView<'_>, sizes: &Sizes) -> Result<OrtProviderTensor> {
    let record = match view.device_range() {
        Some(range) => in_range(range, sizes),
        None => {
            let bytes = view.bytes()?;
            let data = bytes.as_ptr().cast_mut().cast();
            OrtProviderTensor { data, bytes: bytes.len() as u64, ..of_shape(ORT_PROVIDER_HOST, sizes) }
        }
    };
    Ok(OrtProviderTensor { element_type: view.dtype() as i32, ..record })
}

/// The record of a tensor to write. It must not outlive the tensor's memory or `sizes`.
fn writing(tensor: TensorMut<'_>, sizes: &Sizes) -> Result<OrtProviderTensor> {
    let element_type = tensor.dtype() as i32;
    let record = match tensor.device_range() {
        Some(range) => in_range(range, sizes),
        None => {
            let bytes = tensor.bytes_mut()?;
            let (data, len) = (bytes.as_mut_ptr().cast(), bytes.len() as u64);
            OrtProviderTensor { data, bytes: len, ..of_shape(ORT_PROVIDER_HOST, sizes) }
        }
    };
    Ok(OrtProviderTensor { element_type, ..record })
}

fn run_of(
    inputs: &Tensors,
    outputs: &Tensors,
    workspace: Option<&OrtProviderTensor>,
    threads: usize,
    room: usize,
) -> OrtProviderRun {
    OrtProviderRun {
        size: size_of::<OrtProviderRun>(),
        inputs: inputs.as_ptr(),
        input_count: inputs.len(),
        outputs: outputs.as_ptr(),
        output_count: outputs.len(),
        workspace: workspace.map_or(null(), |scratch| &raw const *scratch),
        threads: threads as u32,
        room: room as u64,
    }
}
