//! `OrtEpDevice` and `OrtHardwareDevice`: the CPU, lent by the library.

use std::ffi::c_char;
use std::ptr::null;

use crate::entry::{ArrayMut, In, Object, Out, entries, kinds};
use crate::env::Env;
use crate::key_values::KeyValues;
use crate::memory_info::MemoryInfo;
use crate::session::Session;
use crate::status::{Outcome, invalid};

/// A provider on a device.
pub(crate) struct EpDevice;

/// A device.
pub(crate) struct HardwareDevice;

kinds! {
    EpDevice => "OrtEpDevice", b"OrtEpDev";
    HardwareDevice => "OrtHardwareDevice", b"OrtHarDe";
}

static EP_DEVICE: Object<EpDevice> = Object::new(EpDevice);
static HARDWARE_DEVICE: Object<HardwareDevice> = Object::new(HardwareDevice);
static NO_PAIRS: Object<KeyValues> = Object::new(KeyValues::new());

/// The array of all devices, which C reads.
struct Devices([*const Object<EpDevice>; 1]);

// SAFETY: it points to a static object that never changes.
unsafe impl Sync for Devices {}

static DEVICES: Devices = Devices([&raw const EP_DEVICE]);

fn text_of<T: crate::entry::Kind>(object: In<T>, text: &'static std::ffi::CStr) -> *const c_char {
    match object.get() {
        Ok(_) => text.as_ptr(),
        Err(_) => null(),
    }
}

fn pairs_of<T: crate::entry::Kind>(object: In<T>) -> *const Object<KeyValues> {
    match object.get() {
        Ok(_) => &raw const NO_PAIRS,
        Err(_) => null(),
    }
}

/// All inputs and outputs are on the CPU.
fn put_devices(count: usize, devices: &mut [*const Object<EpDevice>]) -> Outcome {
    if devices.len() != count {
        return invalid(format!("the array has {} places, expected {count}", devices.len()));
    }
    devices.fill(&raw const EP_DEVICE);
    Ok(())
}

entries! {
    /// 303
    fn GetEpDevices(env: In<Env>, devices: Out<*const *const Object<EpDevice>>, count: Out<usize>) {
        let (devices, count) = (devices.place()?, count.place()?);
        env.get()?;
        devices.put(DEVICES.0.as_ptr());
        count.put(DEVICES.0.len());
        Ok(())
    }

    /// 307. 0 is the CPU.
    fn HardwareDevice_Type(_device: In<HardwareDevice>) -> i32, else 0, {
        0
    }

    /// 308
    fn HardwareDevice_VendorId(_device: In<HardwareDevice>) -> u32, else 0, {
        0
    }

    /// 309
    fn HardwareDevice_Vendor(device: In<HardwareDevice>) -> *const c_char, else null(), {
        text_of(device, c"")
    }

    /// 310
    fn HardwareDevice_DeviceId(_device: In<HardwareDevice>) -> u32, else 0, {
        0
    }

    /// 311
    fn HardwareDevice_Metadata(device: In<HardwareDevice>) -> *const Object<KeyValues>, else null(), {
        pairs_of(device)
    }

    /// 312
    fn EpDevice_EpName(device: In<EpDevice>) -> *const c_char, else null(), {
        text_of(device, c"CPUExecutionProvider")
    }

    /// 313. Programs compare the vendor's name.
    fn EpDevice_EpVendor(device: In<EpDevice>) -> *const c_char, else null(), {
        text_of(device, c"Microsoft")
    }

    /// 314
    fn EpDevice_EpMetadata(device: In<EpDevice>) -> *const Object<KeyValues>, else null(), {
        pairs_of(device)
    }

    /// 315
    fn EpDevice_EpOptions(device: In<EpDevice>) -> *const Object<KeyValues>, else null(), {
        pairs_of(device)
    }

    /// 316
    fn EpDevice_Device(device: In<EpDevice>) -> *const Object<HardwareDevice>, else null(), {
        match device.get() {
            Ok(_) => &raw const HARDWARE_DEVICE,
            Err(_) => null(),
        }
    }

    /// 374
    fn EpDevice_MemoryInfo(device: In<EpDevice>, _kind: i32) -> *const Object<MemoryInfo>, else null(), {
        match device.get() {
            Ok(_) => crate::allocator::host_info(),
            Err(_) => null(),
        }
    }

    /// 382
    fn SessionGetEpDeviceForInputs(session: In<Session>, devices: ArrayMut<*const Object<EpDevice>>, count: usize) {
        let inputs = session.get()?.inputs.ports.iter().filter(|port| !port.spec.has_default).count();
        put_devices(inputs, devices.get(count, "the array of devices")?)
    }

    /// 396
    fn SessionGetEpDeviceForOutputs(session: In<Session>, devices: ArrayMut<*const Object<EpDevice>>, count: usize) {
        put_devices(session.get()?.outputs.ports.len(), devices.get(count, "the array of devices")?)
    }

    /// 397
    fn GetNumHardwareDevices(env: In<Env>, count: Out<usize>) {
        let count = count.place()?;
        env.get()?;
        count.put(1);
        Ok(())
    }

    /// 398
    fn GetHardwareDevices(env: In<Env>, devices: ArrayMut<*const Object<HardwareDevice>>, count: usize) {
        env.get()?;
        let devices = devices.get(count, "the array of devices")?;
        devices.iter_mut().take(1).for_each(|device| *device = &raw const HARDWARE_DEVICE);
        Ok(())
    }
}
