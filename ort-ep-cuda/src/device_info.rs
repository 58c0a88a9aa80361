//! Device descriptions, as the list of devices shows them.

use ort_core::Result;
use ort_core::ep::DeviceInfo;

use crate::driver::{Driver, PhysicalDevice};
use crate::libraries::LibraryReport;
use crate::options::NAME;

/// Describes a device to the user.
pub(crate) fn describe(
    driver: &Driver,
    device: PhysicalDevice,
    libraries: &[LibraryReport],
) -> Result<DeviceInfo> {
    let limits = device.limits()?;
    let own = [
        ("compute capability", format!("{}.{}", limits.capability / 10, limits.capability % 10)),
        ("multiprocessors", limits.processors.to_string()),
        ("driver for CUDA", driver.version()),
    ];
    let facts = own.into_iter().chain(libraries.iter().map(|report| (report.name, report.to_text())));
    Ok(DeviceInfo {
        provider: NAME,
        name: device.name()?,
        memory_bytes: Some(device.memory()? as u64),
        facts: facts.map(|(name, value)| (name.to_owned(), value)).collect(),
    })
}
