//! The library side of the provider ABI: exports a Rust [`ExecutionProvider`] as a C function
//! table.
//!
//! The library has its own copy of this crate, and so has the host. They share only the records of
//! [`tables`](super::tables). No panic crosses the boundary: it becomes an error code.

mod call;
mod kernel;
mod tensors;

use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ort_alloc::fork::get_or_init;
use ort_alloc::{Buffer, DeviceId, SharedBuffer};

use call::{
    EXPORTED, Exported, OpenDevice, explain, exported, only_node, opened, put, record, reporting, whole,
};
use kernel::{compile, release_kernel, run, workspace};
use tensors::{read_mut, read_view, shape};

use super::decode::{list, read_node, text};
use super::tables::{
    ORT_PROVIDER_ABI_VERSION, ORT_PROVIDER_NOT_IMPLEMENTED, OrtProviderClaim, OrtProviderDevice,
    OrtProviderDeviceInfo, OrtProviderHost, OrtProviderNode, OrtProviderOption, OrtProviderReport,
    OrtProviderTable, OrtProviderTensor,
};
use crate::ep::{Claim, ExecutionProvider, OutputsFrom, ProviderOptions};
use crate::error;
use crate::ir::Node;

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
    let exported = get_or_init(&EXPORTED, || {
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

// The host keeps to the contracts below: `OrtProviderTable` documents them for all providers.

/// Counts the provider's devices.
///
/// # Safety
///
/// `count` is null or writable, and `report` is the host's for this call.
unsafe extern "C" fn device_count(count: *mut u32, report: *mut OrtProviderReport) -> i32 {
    reporting(report, || {
        let devices = exported()?.provider.devices()?;
        // SAFETY: the host's out parameter.
        unsafe { put(count, devices.len() as u32) }
    })
}

/// Describes a device.
///
/// # Safety
///
/// `info` is null or the host's record, which nothing else uses during the call. `report` is the
/// host's for this call.
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

/// Opens a device.
///
/// # Safety
///
/// `options` holds `option_count` records of NUL-terminated strings. `device` and
/// `uses_host_memory` are null or writable, and `report` is the host's for this call.
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
        let opened = Box::new(OpenDevice { device: opened, nothing });
        // SAFETY: the host's out parameters.
        unsafe {
            put(uses_host_memory, u8::from(is_host))?;
            put(device, Box::into_raw(opened).cast())
        }
    })
}

/// Closes a device.
///
/// # Safety
///
/// `device` is from `open`. The host closes it once, after its kernels and memory are released.
unsafe extern "C" fn close(device: *mut OrtProviderDevice) {
    reporting(std::ptr::null_mut(), || {
        // SAFETY: `open` made this box, and the host closes it once, after its kernels and memory.
        drop(unsafe { Box::from_raw(device.cast::<OpenDevice>()) });
        Ok(())
    });
}

/// Allocates memory of a device.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed. `memory` is null or writable, and `report`
/// is the host's for this call.
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

/// Frees memory of a device.
///
/// # Safety
///
/// `memory` is from `allocate`, and the host releases it once.
unsafe extern "C" fn release(_: *mut OrtProviderDevice, memory: u64) {
    reporting(std::ptr::null_mut(), || {
        // SAFETY: `allocate` made this box, and the host releases it once.
        drop(unsafe { Box::from_raw(memory as *mut SharedBuffer) });
        Ok(())
    });
}

/// Frees the cached memory of a device; returns its bytes.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed.
unsafe extern "C" fn trim(device: *mut OrtProviderDevice) -> u64 {
    let mut freed = 0;
    reporting(std::ptr::null_mut(), || {
        // SAFETY: the host's open device.
        freed = unsafe { opened(device) }?.device.allocator().trim() as u64;
        Ok(())
    });
    freed
}

/// Copies a tensor.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed. `from` and `to` are null or valid records.
/// Their memory is lent for the call, that of `to` exclusively. `report` is the host's for this
/// call.
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

/// Waits for the work of a device.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed, and `report` is the host's for this call.
unsafe extern "C" fn synchronize(device: *mut OrtProviderDevice, report: *mut OrtProviderReport) -> i32 {
    // SAFETY: the host's open device.
    reporting(report, || unsafe { opened(device) }?.device.synchronize())
}

/// Whether a device is faster on NHWC images.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed.
unsafe extern "C" fn prefers_channels_last(device: *mut OrtProviderDevice) -> u8 {
    let mut prefers = false;
    reporting(std::ptr::null_mut(), || {
        // SAFETY: the host's open device.
        prefers = unsafe { opened(device) }?.device.prefers_channels_last();
        Ok(())
    });
    u8::from(prefers)
}

/// Returns the bytes that a device's GEMM kernels load at once.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed.
unsafe extern "C" fn vector_bytes(device: *mut OrtProviderDevice) -> usize {
    let mut bytes = 1;
    reporting(std::ptr::null_mut(), || {
        // SAFETY: the host's open device.
        bytes = unsafe { opened(device) }?.device.vector_bytes();
        Ok(())
    });
    bytes
}

/// Checks that a device still works.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed, and `report` is the host's for this call.
unsafe extern "C" fn check(device: *mut OrtProviderDevice, report: *mut OrtProviderReport) -> i32 {
    // SAFETY: the host's open device.
    reporting(report, || unsafe { opened(device) }?.device.check())
}

/// Claims a node, or says why not.
///
/// # Safety
///
/// `device` is null, or from `open` and not yet closed. `node` is null or a valid record. `claim`
/// and `report` are the host's for this call.
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
                return Err(
                    "provider libraries cannot run kernels that allocate their own outputs".to_owned()
                );
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
