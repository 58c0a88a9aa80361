//! Why memory could not be had: what was needed, what there was, and what to try.

use thiserror::Error;

use crate::{Category, DeviceId};

/// A request for memory that was refused. The allocator or budget that refused it stays usable.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AllocError {
    /// The device, or the limit of an arena, has no room.
    #[error(
        "Failed to allocate memory for requested buffer of size {requested} on {device}: {available}. \
         Try a smaller batch or sequence, or give unused memory back with trim()",
        available = match available {
            Some(bytes) => format!("{bytes} bytes were available"),
            None => "the operating system or driver refused".to_owned(),
        }
    )]
    OutOfMemory {
        /// Bytes asked for.
        requested: usize,
        /// Bytes that could have been had, where that is known.
        available: Option<usize>,
        /// The device that was asked.
        device: DeviceId,
    },
    /// The budget is too small for this request and what is already held.
    #[error(
        "Over the memory limit: {needed} bytes were needed for {category}, but {available} of {limit} bytes are \
         available ({in_use} in use{largest}). Try a smaller batch or sequence, fewer runs at a time, or a larger limit",
        largest = describe_largest(.largest, *.in_use)
    )]
    BudgetExceeded {
        /// Bytes asked for.
        needed: usize,
        /// Bytes that were left under the limit.
        available: usize,
        /// The limit of the budget.
        limit: usize,
        /// Bytes reserved or set aside when the request came.
        in_use: usize,
        /// What the bytes were for.
        category: Category,
        /// What holds the memory, largest first, categories with nothing left out.
        largest: Vec<(Category, usize)>,
    },
    /// The request is one that this allocator can never serve.
    #[error("Unsupported memory request on {device}: {reason}")]
    Unsupported {
        /// The device that was asked.
        device: DeviceId,
        /// Why it cannot be served.
        reason: String,
    },
    /// The allocator itself failed: it panicked, for example.
    #[error("{reason}")]
    Failed {
        /// The provider that owns the allocator, the call, and how it failed.
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
    /// The refusal of a request that had `covered` bytes set aside for it.
    pub(crate) fn with_more(mut self, covered: usize) -> Self {
        if let Self::BudgetExceeded { needed, available, in_use, .. } = &mut self {
            *needed = needed.saturating_add(covered);
            *available = available.saturating_add(covered);
            *in_use = in_use.saturating_sub(covered);
        }
        self
    }

    /// Refuses an alignment that is no power of two.
    pub(crate) fn check_alignment(device: DeviceId, alignment: usize) -> Result<(), Self> {
        if alignment.is_power_of_two() {
            return Ok(());
        }
        let reason = format!("an alignment must be a power of two, and {alignment} is not");
        Err(Self::Unsupported { device, reason })
    }
}

fn describe_largest(largest: &[(Category, usize)], in_use: usize) -> String {
    let reserved: usize = largest.iter().map(|(_, bytes)| bytes).sum();
    let set_aside = in_use.saturating_sub(reserved);
    let mut parts: Vec<String> =
        largest.iter().map(|(category, bytes)| format!("{category} {bytes}")).collect();
    parts.extend((set_aside > 0).then(|| format!("set aside for runs {set_aside}")));
    if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) }
}
