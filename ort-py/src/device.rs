//! Devices as callers name them.

use ort_runtime::{DeviceId, ErrorKind, Session};
use pyo3::intern;
use pyo3::prelude::*;

use crate::error::exception;

/// Refuses memory that is not the host's.
pub(crate) fn require_host(device: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let Some(device) = device else { return Ok(()) };
    let kind: i64 = device.call_method0(intern!(device.py(), "device_type"))?.extract()?;
    match kind {
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
    let py = device.py();
    let kind: i64 = device.call_method0(intern!(py, "device_type"))?.extract()?;
    let number: usize = device.call_method0(intern!(py, "device_id"))?.extract()?;
    if kind == 0 {
        return Ok(DeviceId::HOST);
    }
    let own = session.devices().iter().map(|device| device.memory()).filter(|id| *id != DeviceId::HOST);
    Ok(own.into_iter().nth(number).unwrap_or(DeviceId::HOST))
}
