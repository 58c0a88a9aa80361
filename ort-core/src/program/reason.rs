//! Placement reasons: why nodes run where they do.

use std::fmt;

use ort_alloc::human_bytes;

/// Why a node runs on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reason {
    /// The device is the first in the session's order that claims the node.
    #[default]
    FirstClaim,
    /// The node computes shapes, which the host does.
    Shapes,
    /// The node is control flow whose bodies run on this device. The host drives it, and its values
    /// stay in the device's memory.
    Bodies,
    /// The node moved to the device of its neighbours to save copies.
    Cluster(Cluster),
}

/// A connected group of nodes that moved together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The number of nodes.
    pub nodes: usize,
    /// How many fewer values are copied between memories.
    pub copies: i64,
    /// How many fewer bytes are copied, at the assumed sizes of symbolic dimensions.
    pub bytes: i64,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::FirstClaim => f.write_str("it is the first provider that claims it"),
            Reason::Shapes => f.write_str("it computes shapes, whose numbers the host needs"),
            Reason::Bodies => f.write_str("its bodies run there"),
            Reason::Cluster(cluster) => cluster.fmt(f),
        }
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = |count: i64, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
        // Either number may be negative: the move is judged by total cost.
        let copied = match (self.copies, self.bytes) {
            (1.., 1..) => format!("{} ({})", counted(self.copies, "value"), in_units(self.bytes)),
            (1.., _) => format!("{} more", counted(self.copies, "value")),
            _ => format!("{} more", in_units(self.bytes)),
        };
        let nodes = counted(self.nodes as i64, "node");
        write!(f, "moving its group of {nodes} would save less than copying {copied} costs")
    }
}

fn in_units(bytes: i64) -> String {
    usize::try_from(bytes).map_or_else(|_| format!("{bytes} B"), human_bytes)
}
