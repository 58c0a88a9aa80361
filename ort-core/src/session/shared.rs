//! Sharing compiled programs: sessions on one model that need the same program compile it once.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use ort_alloc::Budget;
use parking_lot::Mutex;

use super::providers::ProviderRequest;
use crate::Result;
use crate::ep::{Device, Precision};
use crate::rewrite::Optimizer;
use crate::run::Compiled;

/// Everything that compiling depends on besides the model.
pub(super) struct CompileKey {
    pub(super) providers: Vec<ProviderRequest>,
    /// The devices that the caller opened.
    pub(super) devices: Vec<Arc<dyn Device>>,
    pub(super) threads: usize,
    pub(super) precision: Precision,
    pub(super) optimizer: Optimizer,
    /// The budget that the caller shares between sessions.
    pub(super) budget: Option<Arc<Budget>>,
    pub(super) cache_dir: Option<PathBuf>,
    /// The updated inputs, each with the output that is its new value.
    pub(super) updates: Vec<(String, String)>,
}

impl PartialEq for CompileKey {
    fn eq(&self, other: &CompileKey) -> bool {
        // Devices and budgets have no equality, so they are compared by identity.
        let devices = self.devices.iter().zip(&other.devices);
        let same_budget = match (&self.budget, &other.budget) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        self.providers == other.providers
            && self.devices.len() == other.devices.len()
            && devices.into_iter().all(|(one, other)| std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other)))
            && (self.threads, self.precision) == (other.threads, other.precision)
            && self.optimizer == other.optimizer
            && self.cache_dir == other.cache_dir
            && self.updates == other.updates
            && same_budget
    }
}

/// A compiled program that other sessions may share, and its key.
pub(super) struct Shared {
    key: CompileKey,
    pub(super) compiled: Arc<Compiled>,
}

/// The compiled programs of one model. A program lives as long as a session uses it.
#[derive(Default)]
pub(super) struct CompiledPrograms(Mutex<Vec<Weak<Shared>>>);

impl CompiledPrograms {
    /// Returns the program for `key`, which `make` compiles if there is none. Other callers wait
    /// meanwhile, because two copies of one program would take twice the memory.
    pub(super) fn get(
        &self,
        key: CompileKey,
        make: impl FnOnce() -> Result<Compiled>,
    ) -> Result<Arc<Shared>> {
        let mut known = self.0.lock();
        // Nothing else removes the entries of programs that were dropped.
        known.retain(|shared| shared.strong_count() > 0);
        if let Some(shared) = known.iter().filter_map(Weak::upgrade).find(|shared| shared.key == key) {
            return Ok(shared);
        }
        let shared = Arc::new(Shared { key, compiled: Arc::new(make()?) });
        known.push(Arc::downgrade(&shared));
        Ok(shared)
    }
}
