//! Allocation errors: the bytes needed, the bytes available, and advice.

use thiserror::Error;

use crate::{Category, DeviceId, exact_bytes};

/// A refused memory request. The allocator or budget that refused it stays usable.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AllocError {
    /// The device, or the arena's limit, has no room.
    #[error(
        "Failed to allocate memory for requested buffer of size {requested} on {device}: {available}. \
         Try a smaller batch or sequence, or give unused memory back with trim()",
        available = match available {
            Some(bytes) => format!("{} were available", exact_bytes(*bytes)),
            None => "the operating system or driver refused".to_owned(),
        }
    )]
    OutOfMemory {
        /// Bytes requested.
        requested: usize,
        /// Bytes available, if known.
        available: Option<usize>,
        /// The device of the request.
        device: DeviceId,
    },
    /// The budget cannot hold this request on top of what is in use.
    #[error(
        "over the memory limit: {needed} were needed for {category}, but {available} of the limit of {limit} are free \
         ({in_use} in use{largest}); {advice}",
        needed = exact_bytes(*needed),
        available = exact_bytes(*available),
        limit = exact_bytes(*limit),
        in_use = exact_bytes(*in_use),
        largest = describe_largest(.largest, *.in_use),
        advice = AllocError::BUDGET_ADVICE
    )]
    BudgetExceeded {
        /// Bytes requested.
        needed: usize,
        /// Bytes left under the limit.
        available: usize,
        /// The limit of the budget.
        limit: usize,
        /// Bytes reserved or set aside at the time of the request.
        in_use: usize,
        /// The purpose of the bytes.
        category: Category,
        /// The categories in use, largest first.
        largest: Vec<(Category, usize)>,
    },
    /// This allocator can never serve the request.
    #[error("Unsupported memory request on {device}: {reason}")]
    Unsupported {
        /// The device of the request.
        device: DeviceId,
        /// The reason why it cannot be served.
        reason: String,
    },
    /// The allocator itself failed, for example by a panic.
    #[error("{reason}")]
    Failed {
        /// The provider of the allocator, the call, and the failure.
        reason: String,
    },
    /// The caller cancelled the run that asked for the memory, or its deadline passed.
    #[error("{reason}")]
    Interrupted {
        /// Which of the two.
        reason: String,
    },
}

impl AllocError {
    /// The end of the text of [`BudgetExceeded`](Self::BudgetExceeded): what its reader can try.
    pub const BUDGET_ADVICE: &str =
        "use a smaller batch or sequence, fewer runs at a time, or a larger limit";

    /// Adds the `covered` bytes that an advance would have contributed to the refused request.
    pub(crate) fn with_more(mut self, covered: usize) -> Self {
        if let Self::BudgetExceeded { needed, available, in_use, .. } = &mut self {
            *needed = needed.saturating_add(covered);
            *available = available.saturating_add(covered);
            *in_use = in_use.saturating_sub(covered);
        }
        self
    }

    /// Refuses an alignment that is not a power of two.
    pub(crate) fn check_alignment(device: DeviceId, alignment: usize) -> Result<(), Self> {
        if alignment.is_power_of_two() {
            return Ok(());
        }
        let reason = format!("the alignment is {alignment}, expected a power of two");
        Err(Self::Unsupported { device, reason })
    }
}

fn describe_largest(largest: &[(Category, usize)], in_use: usize) -> String {
    let reserved: usize = largest.iter().map(|(_, bytes)| bytes).sum();
    let set_aside = in_use.saturating_sub(reserved);
    let mut parts: Vec<String> =
        largest.iter().map(|(category, bytes)| format!("{category} {}", exact_bytes(*bytes))).collect();
    parts.extend((set_aside > 0).then(|| format!("set aside for runs {}", exact_bytes(set_aside))));
    if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) }
}
