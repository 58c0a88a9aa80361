//! Memory that is counted against a budget while it is allocated.

use std::fmt;
use std::sync::Arc;

use crate::{AllocError, Allocator, Budget, Buffer, Category, DeviceId, Stats};

/// Allocates after reserving, and lets the buffer carry the reservation.
///
/// # Errors
///
/// [`AllocError::BudgetExceeded`] from the budget, or whatever the allocator answers; nothing stays
/// reserved then.
pub fn allocate_in(
    budget: &Arc<Budget>,
    category: Category,
    allocator: &dyn Allocator,
    bytes: usize,
    alignment: usize,
) -> Result<Buffer, AllocError> {
    let reservation = budget.reserve(category, bytes)?;
    Ok(allocator.allocate(bytes, alignment)?.with_reservation(reservation))
}

/// An allocator whose every allocation passes a budget.
pub struct BudgetedAllocator {
    /// Where the memory comes from.
    pub inner: Arc<dyn Allocator>,
    /// What it is counted against.
    pub budget: Arc<Budget>,
    /// What it is counted as.
    pub category: Category,
}

impl fmt::Debug for BudgetedAllocator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("BudgetedAllocator")
            .field("device", &self.inner.device())
            .field("category", &self.category)
            .finish_non_exhaustive()
    }
}

impl Allocator for BudgetedAllocator {
    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        allocate_in(&self.budget, self.category, &*self.inner, bytes, alignment)
    }

    fn stats(&self) -> Stats {
        Stats { limit: self.budget.limit(), ..self.inner.stats() }
    }

    fn trim(&self) -> usize {
        self.inner.trim()
    }
}
