//! What the host does for provider libraries: the functions of its table, and what they collect
//! during a call.

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

/// The host's table, which libraries keep.
pub(super) struct Table(pub(super) OrtProviderHost);

// SAFETY: the pointers in the table are to functions and to text that never changes.
unsafe impl Sync for Table {}

pub(super) static HOST: Table = Table(OrtProviderHost {
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

/// Text for a library.
pub(super) fn c_text(what: &str, text: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| error!(InvalidArgument, "{what} '{}' has a zero byte", text.escape_default()))
}

/// What a library said of an error.
#[derive(Default)]
struct Report {
    message: Option<String>,
    help: Option<String>,
}

/// Calls a function of a library, which is none where the library has no such function, and makes
/// an error of its code.
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

/// # Safety
///
/// The pointer is null or to text that ends with a zero byte.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: the caller vouches for it.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

unsafe extern "C" fn fail(
    report: *mut OrtProviderReport,
    code: i32,
    message: *const c_char,
    help: *const c_char,
) -> i32 {
    // SAFETY: the library gives back the report of this call, which nothing else uses meanwhile,
    // and text of its own.
    unsafe {
        if let Some(report) = report.cast::<Report>().as_mut() {
            *report = Report { message: text(message), help: text(help) };
        }
    }
    // An error with the code of success would be taken for one.
    if code == ORT_PROVIDER_OK { ORT_PROVIDER_FAIL } else { code }
}

/// What a device says of itself.
#[derive(Default)]
pub(super) struct Facts {
    pub(super) list: Vec<(String, String)>,
}

impl Facts {
    /// The record for `device_info`, good as long as this stays where it is.
    pub(super) fn record(&mut self) -> OrtProviderDeviceInfo {
        let facts = (&raw mut *self).cast();
        OrtProviderDeviceInfo { size: size_of::<OrtProviderDeviceInfo>(), memory_bytes: 0, facts }
    }
}

unsafe extern "C" fn fact(facts: *mut OrtProviderFacts, name: *const c_char, value: *const c_char) {
    /// More than that no device has to tell.
    const MOST: usize = 64;
    // SAFETY: the library gives back the place of this call, which nothing else uses meanwhile, and
    // text of its own.
    unsafe {
        let Some(facts) = facts.cast::<Facts>().as_mut() else { return };
        if let (Some(name), Some(value)) = (text(name), text(value))
            && facts.list.len() < MOST
        {
            facts.list.push((name, value));
        }
    }
}

/// What a claim says, as it was said.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) in_place: Vec<(usize, usize)>,
    pub(super) grows: Vec<(usize, usize)>,
    pub(super) host_inputs: Vec<usize>,
    pub(super) unaligned: Vec<usize>,
    pub(super) left_out: Vec<usize>,
    /// Whether more was said than the host notes.
    pub(super) too_much: bool,
}

impl Said {
    pub(super) fn place(&mut self) -> *mut OrtProviderClaim {
        (&raw mut *self).cast()
    }

    fn note<T>(list: &mut Vec<T>, too_much: &mut bool, item: T) {
        /// A node has fewer inputs than this.
        const MOST: usize = 1 << 16;
        match list.len() < MOST {
            true => list.push(item),
            false => *too_much = true,
        }
    }
}

/// # Safety
///
/// The library gives back the claim of this call, which nothing else uses meanwhile.
unsafe fn said<'a>(claim: *mut OrtProviderClaim) -> Option<&'a mut Said> {
    // SAFETY: the caller vouches for it.
    unsafe { claim.cast::<Said>().as_mut() }
}

unsafe extern "C" fn in_place(claim: *mut OrtProviderClaim, input: u32, output: u32, grows: u8) {
    // SAFETY: the claim of this call.
    let Some(said) = (unsafe { said(claim) }) else { return };
    let pair = (input as usize, output as usize);
    Said::note(&mut said.in_place, &mut said.too_much, pair);
    if grows != 0 {
        Said::note(&mut said.grows, &mut said.too_much, pair);
    }
}

unsafe extern "C" fn host_input(claim: *mut OrtProviderClaim, input: u32) {
    // SAFETY: the claim of this call.
    let Some(said) = (unsafe { said(claim) }) else { return };
    Said::note(&mut said.host_inputs, &mut said.too_much, input as usize);
}

unsafe extern "C" fn unaligned_input(claim: *mut OrtProviderClaim, input: u32) {
    // SAFETY: the claim of this call.
    let Some(said) = (unsafe { said(claim) }) else { return };
    Said::note(&mut said.unaligned, &mut said.too_much, input as usize);
}

unsafe extern "C" fn left_out(claim: *mut OrtProviderClaim, output: u32) {
    // SAFETY: the claim of this call.
    let Some(said) = (unsafe { said(claim) }) else { return };
    Said::note(&mut said.left_out, &mut said.too_much, output as usize);
}

/// What a library says of the node that it compiles.
pub(super) struct Compilation<'a, 'b> {
    pub(super) cx: &'a mut CompileCx<'b>,
    /// What the kernel keeps, counted as long as it lives.
    pub(super) reservations: Vec<ort_alloc::Reservation>,
}

unsafe extern "C" fn reserve(
    compilation: *mut OrtProviderCompilation,
    bytes: u64,
    report: *mut OrtProviderReport,
) -> i32 {
    // SAFETY: the library gives back the compilation of this call, which nothing else uses
    // meanwhile.
    let compilation = unsafe { compilation.cast::<Compilation<'_, '_>>().as_mut() };
    let reserved = compilation
        .ok_or_else(|| error!(Fail, "memory is reserved for no compilation"))
        .and_then(|compilation| compilation.reserve(usize::try_from(bytes).unwrap_or(usize::MAX)));
    let Err(problem) = reserved else { return ORT_PROVIDER_OK };
    let code = crate::ep::abi::code_of(problem.kind());
    let message = CString::new(problem.located_message()).unwrap_or_default();
    // SAFETY: the report of this call, and text that lives as long.
    unsafe { fail(report, code, message.as_ptr(), std::ptr::null()) }
}

unsafe extern "C" fn consume(compilation: *mut OrtProviderCompilation, input: u32) {
    // SAFETY: as for `reserve`.
    if let Some(compilation) = unsafe { compilation.cast::<Compilation<'_, '_>>().as_mut() } {
        compilation.cx.consume(input as usize);
    }
}

unsafe extern "C" fn retain(owner: *const OrtProviderOwner) {
    if !owner.is_null() {
        // SAFETY: owners are shared tensors, which the library got with a record whose owner lives
        // during the call.
        unsafe { Arc::increment_strong_count(owner.cast::<Tensor>()) }
    }
}

unsafe extern "C" fn release(owner: *const OrtProviderOwner) {
    if !owner.is_null() {
        // SAFETY: the library gives up what `retain` counted.
        unsafe { Arc::decrement_strong_count(owner.cast::<Tensor>()) }
    }
}

impl Compilation<'_, '_> {
    fn reserve(&mut self, bytes: usize) -> Result<()> {
        self.reservations.extend(self.cx.reserve_packed(bytes)?);
        Ok(())
    }
}

/// Whether an error says that the device does not run a node, not that something is wrong.
pub(super) fn is_refusal(problem: &Error) -> bool {
    problem.kind() == ErrorKind::NotImplemented
}
