//! Memory budgets: reservations by category against a limit, advances, and high-water marks.

use std::sync::Arc;

use crate::AllocError;
pub use crate::category::Category;
use crate::sync::{AtomicUsize, Mutex, Ordering};

/// A current value and its high-water mark.
#[derive(Debug, Default)]
struct Gauge {
    in_use: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    fn add(&self, bytes: usize) {
        let now = self.in_use.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        // Most additions are below the mark, and a load is cheaper than an update.
        if now > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(now, Ordering::Relaxed);
        }
    }

    fn subtract(&self, bytes: usize) {
        self.in_use.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn in_use(&self) -> usize {
        self.in_use.load(Ordering::Relaxed)
    }

    fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    fn reset_peak(&self) {
        self.peak.store(self.in_use(), Ordering::Relaxed);
    }
}

/// Counts memory against a limit. A reservation takes a few atomic operations and no lock.
///
/// ```
/// use ort_alloc::{Budget, Category};
///
/// let budget = Budget::new(Some(1000));
/// let slab = budget.reserve(Category::Slab, 800)?;
/// let refused = budget.reserve(Category::Output, 300).err().map(|error| error.to_string());
/// assert!(refused.is_some_and(|text| text.contains("300 bytes were needed for outputs, but 200 bytes")));
/// drop(slab);
/// assert_eq!((budget.in_use(), budget.peak()), (0, 800));
/// # Ok::<(), ort_alloc::AllocError>(())
/// ```
///
/// A budget [`within`](Self::within) another also counts against that one. So several sessions can
/// share a limit, while each knows its own part:
///
/// ```
/// use ort_alloc::{Budget, Category};
///
/// let shared = Budget::new(Some(1000));
/// let (one, other) = (Budget::within(&shared, None), Budget::within(&shared, None));
/// let slab = one.reserve(Category::Slab, 800)?;
/// assert!(other.reserve(Category::Slab, 300).is_err());
/// assert_eq!((one.in_use(), other.in_use(), shared.in_use(), other.available()), (800, 0, 800, 200));
/// # Ok::<(), ort_alloc::AllocError>(())
/// ```
///
/// Work that knows its demand takes an [`advance`](Self::advance), so that others cannot take the
/// memory meanwhile.
#[derive(Debug)]
pub struct Budget {
    /// `usize::MAX` if the budget only counts.
    limit: AtomicUsize,
    /// The budget that its bytes count against too.
    parent: Option<Arc<Budget>>,
    /// For the budget of an [`Advance`]: the bytes set aside, which reservations use first. Under a
    /// lock, because the bytes drawn and the bytes committed must change together.
    advance: Option<Mutex<Drawn>>,
    /// What counts against the limit: reservations, and the unused part of advances.
    committed: AtomicUsize,
    total: Gauge,
    activations: Gauge,
    categories: [Gauge; Category::ALL.len()],
}

impl Budget {
    /// Creates a budget of `limit` bytes, or one that only counts.
    pub fn new(limit: Option<usize>) -> Arc<Self> {
        Self::make(limit, None, None)
    }

    /// Creates a budget that also counts against `parent`, with or without a limit of its own.
    pub fn within(parent: &Arc<Self>, limit: Option<usize>) -> Arc<Self> {
        Self::make(limit, Some(Arc::clone(parent)), None)
    }

    /// Sets `bytes` aside for as long as the advance lives. They can be reserved from
    /// [`Advance::budget`], released and reserved again, whatever others reserve meanwhile. That
    /// budget may reserve more, in competition with the others.
    ///
    /// ```
    /// use ort_alloc::{Budget, Category};
    ///
    /// let budget = Budget::new(Some(1000));
    /// let advance = budget.advance(700)?;
    /// assert_eq!((budget.in_use(), budget.available()), (0, 300));
    /// let kept = advance.budget().reserve(Category::Output, 600)?;
    /// assert_eq!((budget.in_use(), budget.available()), (600, 300));
    /// drop(advance);
    /// assert_eq!((budget.in_use(), budget.available()), (600, 400));
    /// # Ok::<(), ort_alloc::AllocError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AllocError::BudgetExceeded`] if fewer bytes are available; then nothing is set aside.
    pub fn advance(self: &Arc<Self>, bytes: usize) -> Result<Advance, AllocError> {
        self.advance_for(Category::Dynamic, bytes)
    }

    /// [`advance`](Self::advance) for bytes of a category, which only a refusal names.
    ///
    /// # Errors
    ///
    /// As [`advance`](Self::advance).
    pub fn advance_for(self: &Arc<Self>, category: Category, bytes: usize) -> Result<Advance, AllocError> {
        self.commit(category, bytes)?;
        let drawn = Drawn { bytes: 0, set_aside: bytes };
        let budget = Self::make(None, Some(Arc::clone(self)), Some(Mutex::new(drawn)));
        budget.committed.store(bytes, Ordering::Relaxed);
        Ok(Advance { budget })
    }

    fn make(limit: Option<usize>, parent: Option<Arc<Self>>, advance: Option<Mutex<Drawn>>) -> Arc<Self> {
        let (committed, total, activations, categories) = Default::default();
        let limit = AtomicUsize::new(limit.unwrap_or(usize::MAX));
        Arc::new(Self { limit, parent, advance, committed, total, activations, categories })
    }

    /// Reserves `bytes` until the reservation is dropped.
    ///
    /// # Errors
    ///
    /// [`AllocError::BudgetExceeded`] if fewer bytes are available here or in a parent; then
    /// nothing is reserved.
    pub fn reserve(self: &Arc<Self>, category: Category, bytes: usize) -> Result<Reservation, AllocError> {
        self.take(category, bytes)?;
        Ok(Reservation { budget: Arc::clone(self), category, bytes })
    }

    /// Counts `bytes` here and in all parents.
    fn take(&self, category: Category, bytes: usize) -> Result<(), AllocError> {
        match &self.advance {
            None => self.commit(category, bytes)?,
            Some(drawn) => {
                let mut drawn = drawn.lock();
                let covered = drawn.left().min(bytes);
                self.commit(category, bytes - covered).map_err(|refusal| refusal.with_more(covered))?;
                drawn.bytes += bytes;
            }
        }
        self.count(category, bytes);
        Ok(())
    }

    /// Counts `bytes` against the limits, here and in all parents.
    fn commit(&self, category: Category, bytes: usize) -> Result<(), AllocError> {
        let limit = self.own_limit();
        let within = |now: usize| now.checked_add(bytes).filter(|&sum| sum <= limit);
        if let Err(in_use) = self.committed.fetch_update(Ordering::Acquire, Ordering::Relaxed, within) {
            return Err(self.refusal(category, bytes, in_use));
        }
        if let Some(Err(problem)) = self.parent.as_ref().map(|parent| parent.commit(category, bytes)) {
            // The parent refused, so undo our own share.
            self.committed.fetch_sub(bytes, Ordering::Relaxed);
            return Err(problem);
        }
        Ok(())
    }

    fn refusal(&self, category: Category, needed: usize, in_use: usize) -> AllocError {
        let limit = self.own_limit();
        let available = limit.saturating_sub(in_use);
        AllocError::BudgetExceeded { needed, available, limit, in_use, category, largest: self.largest() }
    }

    /// Undoes [`commit`](Self::commit). Release here pairs with Acquire there, so a thread that
    /// reuses released bytes increments the gauges after they were decremented. Otherwise a gauge
    /// could exceed the limit.
    fn uncommit(&self, bytes: usize) {
        self.committed.fetch_sub(bytes, Ordering::Release);
        if let Some(parent) = &self.parent {
            parent.uncommit(bytes);
        }
    }

    fn count(&self, category: Category, bytes: usize) {
        self.total.add(bytes);
        self.gauge(category).add(bytes);
        if category.is_activation() {
            self.activations.add(bytes);
        }
        if let Some(parent) = &self.parent {
            parent.count(category, bytes);
        }
    }

    /// Returns the non-empty categories with their bytes, largest first.
    pub fn largest(&self) -> Vec<(Category, usize)> {
        let mut held: Vec<_> = Category::ALL
            .into_iter()
            .map(|category| (category, self.in_use_of(category)))
            .filter(|&(_, bytes)| bytes > 0)
            .collect();
        held.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        held
    }

    /// Returns the smallest limit among this budget and its parents, or `None` if all only count.
    pub fn limit(&self) -> Option<usize> {
        let above = self.parent.as_ref().and_then(|parent| parent.limit());
        let own = Some(self.own_limit()).filter(|limit| *limit < usize::MAX);
        own.into_iter().chain(above).min()
    }

    fn own_limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Raises this budget's own limit to at least `bytes`. Returns whether that is an increase. A
    /// budget that only counts is unchanged.
    pub fn raise_limit(&self, bytes: usize) -> bool {
        self.limit.fetch_max(bytes, Ordering::Relaxed) < bytes
    }

    /// Returns the available bytes and the limit of the tightest among this budget and its parents.
    pub fn tightest(&self) -> (usize, usize) {
        let limit = self.own_limit();
        let own = (limit.saturating_sub(self.committed.load(Ordering::Relaxed)), limit);
        let above = self.parent.as_ref().map(|parent| parent.tightest());
        above.into_iter().chain([own]).min_by_key(|(available, _)| *available).unwrap_or(own)
    }

    /// Returns the bytes that can still be reserved.
    pub fn available(&self) -> usize {
        let (above, _) = self.tightest();
        above.saturating_add(self.advance.as_ref().map_or(0, |drawn| drawn.lock().left()))
    }

    /// Returns the bytes reserved now.
    pub fn in_use(&self) -> usize {
        self.total.in_use()
    }

    /// Returns the high-water mark of reserved bytes since the start or the last
    /// [`reset_peak`](Self::reset_peak).
    pub fn peak(&self) -> usize {
        self.total.peak()
    }

    /// Returns the bytes of one category reserved now.
    pub fn in_use_of(&self, category: Category) -> usize {
        self.gauge(category).in_use()
    }

    /// Returns the high-water mark of one category.
    pub fn peak_of(&self, category: Category) -> usize {
        self.gauge(category).peak()
    }

    /// Returns the bytes reserved now for activations: slabs, workspaces, outputs and dynamic
    /// values.
    pub fn activation_in_use(&self) -> usize {
        self.activations.in_use()
    }

    /// Returns the high-water mark of activations: slabs, workspaces, outputs and dynamic values
    /// together.
    pub fn activation_peak(&self) -> usize {
        self.activations.peak()
    }

    /// Resets all high-water marks to the bytes in use now.
    pub fn reset_peak(&self) {
        [&self.total, &self.activations].into_iter().chain(&self.categories).for_each(Gauge::reset_peak);
    }

    #[allow(clippy::indexing_slicing, reason = "there is a gauge for each category")]
    fn gauge(&self, category: Category) -> &Gauge {
        &self.categories[category as usize]
    }

    fn give_back(&self, category: Category, bytes: usize) {
        // First the gauges, then the limit; see `uncommit`.
        self.uncount(category, bytes);
        match &self.advance {
            None => self.uncommit(bytes),
            Some(drawn) => {
                let mut drawn = drawn.lock();
                let set_aside = drawn.give_back(bytes);
                self.uncommit(bytes - set_aside);
            }
        }
    }

    fn uncount(&self, category: Category, bytes: usize) {
        self.gauge(category).subtract(bytes);
        if category.is_activation() {
            self.activations.subtract(bytes);
        }
        self.total.subtract(bytes);
        if let Some(parent) = &self.parent {
            parent.uncount(category, bytes);
        }
    }
}

/// Bytes set aside in a [`Budget`]. Dropping it releases the part that is not reserved.
#[derive(Debug)]
pub struct Advance {
    budget: Arc<Budget>,
}

impl Advance {
    /// Returns the budget whose reservations use the bytes set aside. Reservations may outlive the
    /// advance.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }
}

impl Drop for Advance {
    fn drop(&mut self) {
        if let Some(drawn) = &self.budget.advance {
            let mut drawn = drawn.lock();
            let left = drawn.close();
            self.budget.uncommit(left);
        }
    }
}

/// The state of an advance: bytes reserved through it, which use the bytes set aside first.
#[derive(Debug)]
struct Drawn {
    bytes: usize,
    set_aside: usize,
}

impl Drawn {
    /// Returns the bytes set aside but not reserved.
    fn left(&self) -> usize {
        self.set_aside.saturating_sub(self.bytes)
    }

    /// Releases `bytes` and returns how many of them are set aside again.
    fn give_back(&mut self, bytes: usize) -> usize {
        let before = self.left();
        self.bytes -= bytes;
        self.left() - before
    }

    /// Ends the advance and returns the unused bytes.
    fn close(&mut self) -> usize {
        let left = self.left();
        self.set_aside = 0;
        left
    }
}

/// Bytes reserved in a [`Budget`]. Dropping it releases them.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    category: Category,
    bytes: usize,
}

impl Reservation {
    /// Returns the number of reserved bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns what they are reserved for.
    pub fn category(&self) -> Category {
        self.category
    }

    /// Absorbs another reservation of the same budget and category. Returns any other one
    /// unchanged.
    pub fn absorb(&mut self, mut other: Reservation) -> Option<Reservation> {
        if !Arc::ptr_eq(&self.budget, &other.budget) || self.category != other.category {
            return Some(other);
        }
        self.bytes += std::mem::take(&mut other.bytes);
        None
    }

    /// Releases all but `bytes`. Does nothing if fewer are reserved.
    pub fn shrink_to(&mut self, bytes: usize) {
        let surplus = self.bytes.saturating_sub(bytes);
        self.bytes -= surplus;
        self.budget.give_back(self.category, surplus);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.give_back(self.category, self.bytes);
    }
}
