//! Device identities.

use std::fmt;

/// The identifier of a memory space. Kernels that can read one buffer can read every buffer with
/// the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

impl DeviceId {
    /// Memory that the host reads and writes directly.
    pub const HOST: Self = Self(0);
}

impl fmt::Display for DeviceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::HOST => formatter.write_str("host"),
            Self(id) => write!(formatter, "device {id}"),
        }
    }
}
