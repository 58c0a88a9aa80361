//! Devices as callers name them.

use ort_runtime::{DeviceId, ErrorKind, Session};
use pyo3::intern;
use pyo3::prelude::*;

use crate::error::exception;

/// The number of a device's type, 0 for the host.
pub(crate) fn kind(device: &Bound<'_, PyAny>) -> PyResult<i64> {
    device.call_method0(intern!(device.py(), "device_type"))?.extract()
}

/// Describes a device in onnxruntime's words.
pub(crate) fn describe(device: &Bound<'_, PyAny>) -> PyResult<String> {
    let number = |name: &str| device.call_method0(name)?.extract::<i64>();
    let [kind, memory, vendor, id] =
        [number("device_type")?, number("mem_type")?, number("vendor_id")?, number("device_id")?];
    Ok(format!("Device:[DeviceType:{kind} MemoryType:{memory} VendorId:{vendor} DeviceId:{id} Alignment:0]"))
}

/// Refuses memory that is not the host's.
pub(crate) fn require_host(device: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let Some(device) = device else { return Ok(()) };
    match kind(device)? {
        0 => Ok(()),
        _ => Err(exception(
            device.py(),
            ErrorKind::NotImplemented,
            "a value in the memory of a device belongs to a session: \
             use session.create_ortvalue_from_shape_and_type, or bind the output to the device",
        )),
    }
}

/// Returns the memory of a session that a device names. What the session has no such device for is
/// in host memory, as in builds of onnxruntime without that provider.
pub(crate) fn memory_of(session: &Session, device: &Bound<'_, PyAny>) -> PyResult<DeviceId> {
    let number: usize = device.call_method0(intern!(device.py(), "device_id"))?.extract()?;
    if kind(device)? == 0 {
        return Ok(DeviceId::HOST);
    }
    let own = session.devices().iter().map(|device| device.memory()).filter(|id| *id != DeviceId::HOST);
    Ok(own.into_iter().nth(number).unwrap_or(DeviceId::HOST))
}
