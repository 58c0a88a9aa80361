//! All operator records of this process, found by domain and name.

use std::sync::OnceLock;

use rustc_hash::FxHashMap;

use super::OpSpec;
use crate::{Result, ensure};

/// A record as crates submit it; see the `ops!` macro.
#[derive(Debug)]
pub struct OpRecord(pub &'static OpSpec);

inventory::collect!(OpRecord);

/// The records by domain and name, sorted, each name once.
#[derive(Debug)]
pub struct Registry {
    records: Vec<&'static OpSpec>,
    by_name: FxHashMap<(&'static str, &'static str), &'static OpSpec>,
}

impl Registry {
    /// The registry of this process. Two records of one name are an error.
    pub fn global() -> Result<&'static Registry> {
        static REGISTRY: OnceLock<Result<Registry>> = OnceLock::new();
        let registry = REGISTRY.get_or_init(|| {
            Registry::collect(inventory::iter::<OpRecord>.into_iter().map(|record| record.0))
        });
        registry.as_ref().map_err(Clone::clone)
    }

    fn collect(records: impl Iterator<Item = &'static OpSpec>) -> Result<Registry> {
        let mut records: Vec<&'static OpSpec> = records.collect();
        records.sort_by_key(|record| (record.domain, record.name));
        for (record, next) in records.iter().zip(records.iter().skip(1)) {
            let same = (record.domain, record.name) == (next.domain, next.name);
            ensure!(!same, Fail, "two records describe operator {}", record.name);
        }
        let by_name = records.iter().map(|record| ((record.domain, record.name), *record)).collect();
        Ok(Registry { records, by_name })
    }

    /// The record of an operator. `ai.onnx` and the empty domain are one.
    pub fn find(&self, domain: &str, name: &str) -> Option<&'static OpSpec> {
        let domain = if domain == "ai.onnx" { "" } else { domain };
        // The names of the table live longer than the one that is looked up.
        let by_name: &FxHashMap<(&str, &str), &'static OpSpec> = &self.by_name;
        by_name.get(&(domain, name)).copied()
    }

    /// The newest version of a domain that a record's form is of; 1 of a domain without records.
    pub fn newest_version(&self, domain: &str) -> i64 {
        let records = self.records.iter().filter(|record| record.domain == domain);
        records.map(|record| record.since).max().unwrap_or(1)
    }

    /// Every record, sorted by domain and name.
    pub fn records(&self) -> &[&'static OpSpec] {
        &self.records
    }
}
