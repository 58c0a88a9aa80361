//! `OrtMemoryInfo`: where a tensor lies.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char};

use crate::entry::{In, Object, Out, Released, Text, entries, kinds};
use crate::status::{Outcome, invalid};

/// The numbers of `OrtMemoryInfoDeviceType`.
const CPU: i32 = 0;
const GPU: i32 = 1;
const NPU: i32 = 3;

/// The numbers of `OrtDeviceMemoryType`.
const DEFAULT: i32 = 0;
const HOST_ACCESSIBLE: i32 = 5;

/// Where memory lies, and which allocator it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryInfo {
    name: Cow<'static, CStr>,
    device_type: i32,
    /// `OrtAllocatorType`: 0 for a device's, 1 for an arena.
    allocator_type: i32,
    id: i32,
    /// `OrtMemType`.
    mem_type: i32,
    device_mem_type: i32,
    vendor: u32,
    alignment: usize,
}

kinds! {
    MemoryInfo => "OrtMemoryInfo", b"OrtMemIn";
}

/// Host memory of the default allocator.
pub(crate) static HOST: Object<MemoryInfo> = Object::new(MemoryInfo {
    name: Cow::Borrowed(c"Cpu"),
    device_type: CPU,
    allocator_type: 0,
    id: 0,
    mem_type: 0,
    device_mem_type: DEFAULT,
    vendor: 0,
    alignment: 0,
});

/// A name that `CreateMemoryInfo` takes, and what it stands for.
struct Named {
    name: &'static CStr,
    device_type: i32,
    device_mem_type: i32,
}

const fn named(name: &'static CStr, device_type: i32, device_mem_type: i32) -> Named {
    Named { name, device_type, device_mem_type }
}

/// A program may describe memory that this build has no device for: onnxruntime-node does so before
/// each run.
const NAMES: [Named; 14] = [
    named(c"Cpu", CPU, DEFAULT),
    named(c"CpuAligned4K", CPU, DEFAULT),
    named(c"Cuda", GPU, DEFAULT),
    named(c"CudaPinned", GPU, HOST_ACCESSIBLE),
    named(c"OpenVINO_GPU", GPU, DEFAULT),
    named(c"OpenVINO_RT_NPU", NPU, DEFAULT),
    named(c"Hip", GPU, DEFAULT),
    named(c"HipPinned", GPU, HOST_ACCESSIBLE),
    named(c"DML", GPU, DEFAULT),
    named(c"QnnHtpShared", NPU, HOST_ACCESSIBLE),
    named(c"WebGPU_Buf", GPU, DEFAULT),
    named(c"WebGPU_Buffer", GPU, DEFAULT),
    named(c"WebNN_Ten", GPU, DEFAULT),
    named(c"WebNN_Tensor", GPU, DEFAULT),
];

impl MemoryInfo {
    /// Whether our code can read the memory.
    pub(crate) fn is_host(&self) -> bool {
        self.device_type == CPU
    }

    /// Refuses memory that our code cannot read.
    pub(crate) fn require_host(&self) -> Outcome {
        match self.is_host() {
            true => Ok(()),
            false => invalid(format!(
                "memory of '{}' is not supported; copy the tensor to memory of 'Cpu'",
                self.name.to_string_lossy()
            )),
        }
    }

    /// Whether two infos are of the same device and kind of memory.
    pub(crate) fn is_same_memory(&self, other: &MemoryInfo) -> bool {
        let place = |info: &MemoryInfo| (info.device_type, info.id, info.device_mem_type, info.vendor);
        place(self) == place(other)
    }
}

/// Refuses numbers that `OrtAllocatorType` and `OrtMemType` do not have.
fn check_numbers(allocator_type: i32, mem_type: i32) -> Outcome {
    if !(0..=2).contains(&allocator_type) {
        return invalid(format!(
            "Invalid allocator type: {allocator_type}; it is 0 (device), 1 (arena) or 2"
        ));
    }
    if !(-2..=0).contains(&mem_type) {
        return invalid(format!(
            "Invalid memory type: {mem_type}; it is -2 (CPU input), -1 (CPU output) or 0"
        ));
    }
    Ok(())
}

entries! {
    /// 68
    fn CreateMemoryInfo(name: Text, allocator_type: i32, id: i32, mem_type: i32, out: Out<*mut Object<MemoryInfo>>) {
        let out = out.place()?;
        check_numbers(allocator_type, mem_type)?;
        let given = name.bytes("the name of the memory")?;
        let Some(known) = NAMES.iter().find(|known| known.name.to_bytes() == given) else {
            let given = String::from_utf8_lossy(given);
            return invalid(format!("Specified device is not supported. Try CreateMemoryInfo_V2. Got '{given}'"));
        };
        out.put(Object::give(MemoryInfo {
            name: Cow::Borrowed(known.name),
            device_type: known.device_type,
            allocator_type,
            id,
            mem_type,
            device_mem_type: known.device_mem_type,
            ..HOST.inner.clone()
        }));
        Ok(())
    }

    /// 69
    fn CreateCpuMemoryInfo(allocator_type: i32, mem_type: i32, out: Out<*mut Object<MemoryInfo>>) {
        let out = out.place()?;
        check_numbers(allocator_type, mem_type)?;
        out.put(Object::give(MemoryInfo { allocator_type, mem_type, ..HOST.inner.clone() }));
        Ok(())
    }

    /// 320
    fn CreateMemoryInfo_V2(name: Text, device_type: i32, vendor: u32, id: i32, device_mem_type: i32, alignment: usize, allocator_type: i32, out: Out<*mut Object<MemoryInfo>>) {
        let out = out.place()?;
        check_numbers(allocator_type, 0)?;
        if !(CPU..=NPU).contains(&device_type) {
            return invalid(format!("Invalid device type specified: {device_type}; it is 0 to 3"));
        }
        if device_mem_type != DEFAULT && device_mem_type != HOST_ACCESSIBLE {
            return invalid(format!("Invalid memory type: {device_mem_type}; it is 0 (default) or 5 (host accessible)"));
        }
        let name = CString::new(name.bytes("the name of the memory")?).unwrap_or_default();
        out.put(Object::give(MemoryInfo {
            name: Cow::Owned(name),
            device_type,
            allocator_type,
            id,
            mem_type: 0,
            device_mem_type,
            vendor,
            alignment,
        }));
        Ok(())
    }

    /// 94
    fn ReleaseMemoryInfo(info: Released<MemoryInfo>) -> (), else (), {
        // The allocator of the library lends this one.
        if !info.is(&HOST) {
            info.release();
        }
    }

    /// 70
    fn CompareMemoryInfo(one: In<MemoryInfo>, other: In<MemoryInfo>, out: Out<i32>) {
        let out = out.place()?;
        out.put(if one.get()? == other.get()? { 0 } else { -1 });
        Ok(())
    }

    /// 71
    fn MemoryInfoGetName(info: In<MemoryInfo>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(info.get()?.name.as_ptr());
        Ok(())
    }

    /// 72
    fn MemoryInfoGetId(info: In<MemoryInfo>, out: Out<i32>) {
        out.place()?.put(info.get()?.id);
        Ok(())
    }

    /// 73
    fn MemoryInfoGetMemType(info: In<MemoryInfo>, out: Out<i32>) {
        out.place()?.put(info.get()?.mem_type);
        Ok(())
    }

    /// 74
    fn MemoryInfoGetType(info: In<MemoryInfo>, out: Out<i32>) {
        out.place()?.put(info.get()?.allocator_type);
        Ok(())
    }

    /// 225
    fn MemoryInfoGetDeviceType(info: In<MemoryInfo>, out: Out<i32>) -> (), else (), {
        if let (Ok(info), Ok(out)) = (info.get(), out.place()) {
            out.put(info.device_type);
        }
    }

    /// 321
    fn MemoryInfoGetDeviceMemType(info: In<MemoryInfo>) -> i32, else DEFAULT, {
        info.get().map_or(DEFAULT, |info| info.device_mem_type)
    }

    /// 322
    fn MemoryInfoGetVendorId(info: In<MemoryInfo>) -> u32, else 0, {
        info.get().map_or(0, |info| info.vendor)
    }
}
