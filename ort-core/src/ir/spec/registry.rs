//! Operator registry: all operator records of this process, by domain and name.

use std::sync::OnceLock;

use ort_alloc::fork::get_or_init;
use rustc_hash::FxHashMap;

use super::OpSpec;
use crate::{Result, ensure, error};

/// A registered record; see the `ops!` macro.
#[derive(Debug)]
pub struct OpRecord(pub &'static OpSpec);

inventory::collect!(OpRecord);

/// The records, sorted by domain and name, without duplicates.
#[derive(Debug)]
pub struct Registry {
    records: Vec<&'static OpSpec>,
    by_name: FxHashMap<(&'static str, &'static str), &'static OpSpec>,
}

/// The empty domain for `ai.onnx`, because both name the standard's own; any other as it is.
pub fn canonical_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

impl Registry {
    /// Returns the registry of this process. Two records of the same operator are an error.
    pub fn global() -> Result<&'static Registry> {
        static REGISTRY: OnceLock<Result<Registry>> = OnceLock::new();
        let registry = get_or_init(&REGISTRY, || {
            Registry::collect(inventory::iter::<OpRecord>.into_iter().map(|record| record.0))
        });
        registry.as_ref().map_err(Clone::clone)
    }

    fn collect(records: impl Iterator<Item = &'static OpSpec>) -> Result<Registry> {
        let mut records: Vec<&'static OpSpec> = records.collect();
        // `inventory` iterates in no defined order. Sorting also makes duplicates adjacent.
        records.sort_by_key(|record| (record.domain, record.name));
        for (record, next) in records.iter().zip(records.iter().skip(1)) {
            let same = (record.domain, record.name) == (next.domain, next.name);
            ensure!(!same, Fail, "two records describe operator {}", record.name);
        }
        let by_name = records.iter().map(|record| ((record.domain, record.name), *record)).collect();
        Ok(Registry { records, by_name })
    }

    /// Returns the record of an operator. `ai.onnx` is an alias of the empty domain.
    pub fn find(&self, domain: &str, name: &str) -> Option<&'static OpSpec> {
        // Shortens the lifetime of the keys, because the looked-up name does not live as long as
        // the table.
        let by_name: &FxHashMap<(&str, &str), &'static OpSpec> = &self.by_name;
        by_name.get(&(canonical_domain(domain), name)).copied()
    }

    /// Returns the record of an operator, as [`Self::find`].
    ///
    /// # Errors
    ///
    /// There is no such operator.
    pub fn operator(&self, domain: &str, name: &str) -> Result<&'static OpSpec> {
        let found = self.find(domain, name);
        found.ok_or_else(|| error!(NotImplemented, "operator {name} of domain '{domain}' is not known"))
    }

    /// Returns the highest canonical version of a domain's operators, or 1 without records.
    pub fn newest_version(&self, domain: &str) -> i64 {
        let records = self.records.iter().filter(|record| record.domain == domain);
        records.map(|record| record.since).max().unwrap_or(1)
    }

    /// Returns every record, sorted by domain and name.
    pub fn records(&self) -> &[&'static OpSpec] {
        &self.records
    }
}
