//! Shared parts of the exported functions: the exported provider, open devices, the records of the
//! host, and error codes in place of errors and panics.

use std::any::Any;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use ort_alloc::SharedBuffer;

use super::super::code_of;
use super::super::tables::{
    ORT_PROVIDER_OK, OrtProviderDevice, OrtProviderHost, OrtProviderReport, OrtProviderTable,
};
use crate::ep::{Device, ExecutionProvider, NodeView};
use crate::ir::Graph;
use crate::{Error, Result, ensure, error};

/// The provider of this library, and the host that loaded it.
pub(super) struct Exported {
    pub(super) provider: &'static dyn ExecutionProvider,
    pub(super) host: &'static OrtProviderHost,
    pub(super) table: OrtProviderTable,
    pub(super) _texts: [CString; 2],
}

// SAFETY: the provider is `Sync`; the pointers in the tables are to functions and to immutable
// strings.
unsafe impl Send for Exported {}

// SAFETY: as for `Send`.
unsafe impl Sync for Exported {}

pub(super) static EXPORTED: OnceLock<Exported> = OnceLock::new();

pub(super) fn exported() -> Result<&'static Exported> {
    EXPORTED.get().ok_or_else(|| error!(Fail, "the library's table was not asked for"))
}

/// Runs the body of an ABI function. Converts an error or a panic to a status code, and reports it
/// to the host.
pub(super) fn reporting(report: *mut OrtProviderReport, work: impl FnOnce() -> Result<()>) -> i32 {
    let outcome = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic)));
    let Err(problem) = outcome else { return ORT_PROVIDER_OK };
    explain(report, code_of(problem.kind()), &problem)
}

pub(super) fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    error!(EpFail, "the library panicked: {text}").help("this is a bug of the provider library: report it")
}

pub(super) fn explain(report: *mut OrtProviderReport, code: i32, problem: &Error) -> i32 {
    // A message may quote a name with a NUL, which a C string cannot hold.
    let c_text = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
    let (message, help) = (c_text(&problem.located_message()), problem.advice().map(c_text));
    let Some(fail) = exported().ok().and_then(|exported| exported.host.fail) else { return code };
    let help = help.as_deref().map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: `report` is null or the host's report for this call; the strings live through it.
    unsafe { fail(report, code, message.as_ptr(), help) }
}

/// An open device.
pub(super) struct OpenDevice {
    pub(super) device: Arc<dyn Device>,
    /// An empty buffer, for tensors without elements: they have no allocation to refer to.
    pub(super) nothing: SharedBuffer,
}

/// Borrows the device behind a handle.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed.
pub(super) unsafe fn opened<'a>(device: *mut OrtProviderDevice) -> Result<&'a OpenDevice> {
    // SAFETY: null or valid, by this function's contract.
    unsafe { device.cast::<OpenDevice>().as_ref() }.ok_or_else(|| error!(Fail, "the host gave no device"))
}

/// Borrows a record.
///
/// # Safety
///
/// `pointer` is null or points to a record of the host that outlives `'a`.
pub(super) unsafe fn record<'a, T>(pointer: *const T) -> Result<&'a T> {
    // SAFETY: null or valid, by this function's contract.
    unsafe { pointer.as_ref() }.ok_or_else(|| error!(Fail, "the host gave no record"))
}

/// Writes an out parameter; fails if it is null.
///
/// # Safety
///
/// `place` is null or writable.
pub(super) unsafe fn put<T>(place: *mut T, value: T) -> Result<()> {
    ensure!(!place.is_null(), Fail, "the host gave no place for the answer");
    // SAFETY: not null, and writable by this function's contract.
    unsafe { place.write(value) };
    Ok(())
}

pub(super) fn only_node(graph: &Graph) -> Result<NodeView<'_>> {
    let node = graph.nodes.first().ok_or_else(|| error!(Fail, "the graph has no node"))?;
    Ok(NodeView { graph, node })
}

pub(super) fn whole(count: u64) -> Result<usize> {
    usize::try_from(count).map_err(|_| error!(OutOfMemory, "{count} bytes on this machine"))
}
