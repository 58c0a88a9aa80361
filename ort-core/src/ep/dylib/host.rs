//! The host table for provider libraries: callbacks, and the state that they collect during a call.

use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;

use crate::ep::CompileCx;
use crate::ep::abi::kind_of;
use crate::ep::abi::tables::{
    ORT_PROVIDER_ABI_VERSION, ORT_PROVIDER_FAIL, ORT_PROVIDER_OK, OrtProviderClaim, OrtProviderCompilation,
    OrtProviderDeviceInfo, OrtProviderFacts, OrtProviderHost, OrtProviderOwner, OrtProviderReport,
};
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result, error};

/// The host's table; libraries keep a pointer to it.
pub(super) struct HostTable(pub(super) OrtProviderHost);

// SAFETY: the table is immutable; its pointers are to functions and to a static string.
unsafe impl Sync for HostTable {}

pub(super) static HOST: HostTable = HostTable(OrtProviderHost {
    size: size_of::<OrtProviderHost>(),
    abi_version: ORT_PROVIDER_ABI_VERSION,
    version: VERSION.as_ptr(),
    fail: Some(fail),
    fact: Some(fact),
    in_place: Some(in_place),
    host_input: Some(host_input),
    unaligned_input: Some(unaligned_input),
    left_out: Some(left_out),
    reserve: Some(reserve),
    consume: Some(consume),
    retain: Some(retain),
    release: Some(release),
});

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"",
};

/// Converts text to a C string for a library.
pub(super) fn c_text(what: &str, text: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| error!(InvalidArgument, "{what} '{}' has a zero byte", text.escape_default()))
}

/// The error that a library reported through `fail`.
#[derive(Default)]
struct Report {
    message: Option<String>,
    help: Option<String>,
}

/// Calls a function of a library and converts its return code to a result. `function` returns
/// `None` if the library lacks the function.
pub(super) fn call(function: impl FnOnce(*mut OrtProviderReport) -> Option<i32>) -> Result<()> {
    let mut report = Report::default();
    let code = function((&raw mut report).cast());
    let code = code.ok_or_else(|| error!(EpFail, "the provider library does not have this function"))?;
    if code == ORT_PROVIDER_OK {
        return Ok(());
    }
    let message =
        report.message.unwrap_or_else(|| format!("the provider library gave no reason, only code {code}"));
    let Some(kind) = kind_of(code) else {
        return Err(error!(EpFail, "{message} (code {code}, which is none of this interface)"));
    };
    let problem = Error::new(kind, message);
    Err(match report.help {
        None => problem,
        Some(help) => problem.help(help),
    })
}

/// Copies a C string.
///
/// # Safety
///
/// `pointer` is null or a NUL-terminated string.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: not null, and NUL-terminated by this function's contract.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// `OrtProviderHost::fail`: reports an error.
///
/// # Safety
///
/// `report` is null or the one that [`call`] made for this call, and nothing else uses it
/// meanwhile. `message` and `help` are null or NUL-terminated.
unsafe extern "C" fn fail(
    report: *mut OrtProviderReport,
    code: i32,
    message: *const c_char,
    help: *const c_char,
) -> i32 {
    // SAFETY: `report` is null or the one that `call` made for this call, and nothing else uses it
    // meanwhile. By the ABI, the strings are null or NUL-terminated.
    unsafe {
        if let Some(report) = report.cast::<Report>().as_mut() {
            *report = Report { message: text(message), help: text(help) };
        }
    }
    // The library returns this code from its function, where `ORT_PROVIDER_OK` would hide the
    // error.
    if code == ORT_PROVIDER_OK { ORT_PROVIDER_FAIL } else { code }
}

/// The facts that a device reports about itself.
#[derive(Default)]
pub(super) struct Facts {
    pub(super) list: Vec<(String, String)>,
}

impl Facts {
    /// Returns the record to pass to `device_info`. It points to `self`, which must not move
    /// meanwhile.
    pub(super) fn record(&mut self) -> OrtProviderDeviceInfo {
        let facts = (&raw mut *self).cast();
        OrtProviderDeviceInfo { size: size_of::<OrtProviderDeviceInfo>(), memory_bytes: 0, facts }
    }
}

/// `OrtProviderHost::fact`: reports a fact about a device.
///
/// # Safety
///
/// `facts` is null or the pointer that [`Facts::record`] put into the record of this call, and
/// nothing else uses it meanwhile. `name` and `value` are null or NUL-terminated.
unsafe extern "C" fn fact(facts: *mut OrtProviderFacts, name: *const c_char, value: *const c_char) {
    /// Limit on facts per device; the rest is dropped.
    const MOST: usize = 64;
    // SAFETY: `facts` is null or the pointer that `Facts::record` put into the record of this call,
    // and nothing else uses it meanwhile. By the ABI, the strings are null or NUL-terminated.
    unsafe {
        let Some(facts) = facts.cast::<Facts>().as_mut() else { return };
        if let (Some(name), Some(value)) = (text(name), text(value))
            && facts.list.len() < MOST
        {
            facts.list.push((name, value));
        }
    }
}

/// A claim as the library reported it, unchecked.
#[derive(Debug, Default)]
pub(super) struct ReportedClaim {
    pub(super) in_place: Vec<(usize, usize)>,
    pub(super) grows: Vec<(usize, usize)>,
    pub(super) host_inputs: Vec<usize>,
    pub(super) unaligned: Vec<usize>,
    pub(super) left_out: Vec<usize>,
    /// Whether the library reported more than the limit.
    pub(super) too_much: bool,
}

impl ReportedClaim {
    pub(super) fn place(&mut self) -> *mut OrtProviderClaim {
        (&raw mut *self).cast()
    }

    fn note<T>(list: &mut Vec<T>, too_much: &mut bool, item: T) {
        /// More than the inputs of any node; it bounds what a faulty library can make us allocate.
        const MOST: usize = 1 << 16;
        match list.len() < MOST {
            true => list.push(item),
            false => *too_much = true,
        }
    }
}

/// Casts a claim pointer back to the [`ReportedClaim`] behind it.
///
/// # Safety
///
/// `claim` is null or comes from [`ReportedClaim::place`], and nothing else uses that
/// `ReportedClaim` meanwhile.
unsafe fn said<'a>(claim: *mut OrtProviderClaim) -> Option<&'a mut ReportedClaim> {
    // SAFETY: by this function's contract.
    unsafe { claim.cast::<ReportedClaim>().as_mut() }
}

/// `OrtProviderHost::in_place`: adds a pair to a claim.
///
/// # Safety
///
/// As [`said`].
unsafe extern "C" fn in_place(claim: *mut OrtProviderClaim, input: u32, output: u32, grows: u8) {
    // SAFETY: by the ABI, null or the claim that `LibraryDevice::claim` passed in this call.
    let Some(said) = (unsafe { said(claim) }) else { return };
    let pair = (input as usize, output as usize);
    ReportedClaim::note(&mut said.in_place, &mut said.too_much, pair);
    if grows != 0 {
        ReportedClaim::note(&mut said.grows, &mut said.too_much, pair);
    }
}

/// `OrtProviderHost::host_input`: adds an input in host memory to a claim.
///
/// # Safety
///
/// As [`said`].
unsafe extern "C" fn host_input(claim: *mut OrtProviderClaim, input: u32) {
    // SAFETY: by the ABI, null or the claim that `LibraryDevice::claim` passed in this call.
    let Some(said) = (unsafe { said(claim) }) else { return };
    ReportedClaim::note(&mut said.host_inputs, &mut said.too_much, input as usize);
}

/// `OrtProviderHost::unaligned_input`: adds an input of any alignment to a claim.
///
/// # Safety
///
/// As [`said`].
unsafe extern "C" fn unaligned_input(claim: *mut OrtProviderClaim, input: u32) {
    // SAFETY: by the ABI, null or the claim that `LibraryDevice::claim` passed in this call.
    let Some(said) = (unsafe { said(claim) }) else { return };
    ReportedClaim::note(&mut said.unaligned, &mut said.too_much, input as usize);
}

/// `OrtProviderHost::left_out`: adds an omitted output to a claim.
///
/// # Safety
///
/// As [`said`].
unsafe extern "C" fn left_out(claim: *mut OrtProviderClaim, output: u32) {
    // SAFETY: by the ABI, null or the claim that `LibraryDevice::claim` passed in this call.
    let Some(said) = (unsafe { said(claim) }) else { return };
    ReportedClaim::note(&mut said.left_out, &mut said.too_much, output as usize);
}

/// The host's state while a library compiles a node.
pub(super) struct Compilation<'a, 'b> {
    pub(super) cx: &'a mut CompileCx<'b>,
    /// Reservations for what the kernel keeps. The kernel holds them until it is released.
    pub(super) reservations: Vec<ort_alloc::Reservation>,
}

/// `OrtProviderHost::reserve`: counts the packed weights of a kernel.
///
/// # Safety
///
/// `compilation` is null or the one that `LibraryDevice::compile` passed in this call, and nothing
/// else uses it meanwhile. `report` is as for [`fail`].
unsafe extern "C" fn reserve(
    compilation: *mut OrtProviderCompilation,
    bytes: u64,
    report: *mut OrtProviderReport,
) -> i32 {
    // SAFETY: by the ABI, this is null or the compilation that `LibraryDevice::compile` passed in
    // this call, and nothing else uses it meanwhile.
    let compilation = unsafe { compilation.cast::<Compilation<'_, '_>>().as_mut() };
    let reserved = compilation
        .ok_or_else(|| error!(Fail, "memory is reserved for no compilation"))
        // A count beyond the address space saturates, and the budget refuses it.
        .and_then(|compilation| compilation.reserve(usize::try_from(bytes).unwrap_or(usize::MAX)));
    let Err(problem) = reserved else { return ORT_PROVIDER_OK };
    let code = crate::ep::abi::code_of(problem.kind());
    let message = CString::new(problem.located_message()).unwrap_or_default();
    // SAFETY: the library got `report` for this call, and `message` lives through this one.
    unsafe { fail(report, code, message.as_ptr(), std::ptr::null()) }
}

/// `OrtProviderHost::consume`: declares that runs do not read an input.
///
/// # Safety
///
/// `compilation` is as for [`reserve`].
unsafe extern "C" fn consume(compilation: *mut OrtProviderCompilation, input: u32) {
    // SAFETY: as in `reserve`.
    if let Some(compilation) = unsafe { compilation.cast::<Compilation<'_, '_>>().as_mut() } {
        compilation.cx.consume(input as usize);
    }
}

/// `OrtProviderHost::retain`: keeps a constant's bytes valid.
///
/// # Safety
///
/// `owner` is null or that of a tensor record of this call.
unsafe extern "C" fn retain(owner: *const OrtProviderOwner) {
    if !owner.is_null() {
        // SAFETY: `Held::constant` set `owner` to the pointer of an `Arc<Tensor>`, which the node's
        // records hold through the call.
        unsafe { Arc::increment_strong_count(owner.cast::<Tensor>()) }
    }
}

/// `OrtProviderHost::release`: ends what `retain` began.
///
/// # Safety
///
/// `owner` is null or was retained, and is released once for each `retain`.
unsafe extern "C" fn release(owner: *const OrtProviderOwner) {
    if !owner.is_null() {
        // SAFETY: by the ABI, the library releases once what it retained, so the count is positive.
        unsafe { Arc::decrement_strong_count(owner.cast::<Tensor>()) }
    }
}

impl Compilation<'_, '_> {
    fn reserve(&mut self, bytes: usize) -> Result<()> {
        self.reservations.extend(self.cx.reserve_packed(bytes)?);
        Ok(())
    }
}

/// Whether an error means that the device does not support a node, rather than that something
/// failed.
pub(super) fn is_refusal(problem: &Error) -> bool {
    problem.kind() == ErrorKind::NotImplemented
}
