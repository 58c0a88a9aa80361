//! Allocation that counts against a budget.

use std::fmt;
use std::sync::Arc;

use crate::{AllocError, Allocator, Budget, Buffer, Category, DeviceId, Stats};

/// Reserves, then allocates a buffer that carries the reservation.
///
/// # Errors
///
/// [`AllocError::BudgetExceeded`] from the budget, or the allocator's error; then nothing stays
/// reserved.
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

/// An allocator whose allocations all count against a budget.
pub struct BudgetedAllocator {
    /// The source of the memory.
    pub inner: Arc<dyn Allocator>,
    /// The budget that the memory counts against.
    pub budget: Arc<Budget>,
    /// The category that it counts as.
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
