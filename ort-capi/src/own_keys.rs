//! Configuration entries of our own: memory limits, shared budgets, the compiled cache.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use ort_runtime::Budget;
use ort_runtime::fork::Mutex;

use crate::config_keys::flag;
use crate::status::{Failure, Outcome, invalid};

/// What the keys of our own set.
#[derive(Clone, Default)]
pub(crate) struct OwnKeys {
    pub(crate) memory_limit: Option<usize>,
    pub(crate) budget: Option<Arc<Budget>>,
    pub(crate) cache_dir: Option<PathBuf>,
    /// Whether runs may not split a batch.
    pub(crate) is_batch_whole: bool,
    /// The file that the memory plan is written to, and the sizes of named dimensions in it.
    pub(crate) plan: Option<PlanFile>,
    /// Whether memory goes back to the system after each run.
    pub(crate) holds_no_idle_memory: bool,
}

/// Where the memory plan of a session goes.
#[derive(Clone)]
pub(crate) struct PlanFile {
    pub(crate) path: PathBuf,
    pub(crate) dims: Vec<(String, i64)>,
}

/// A key, the values that it takes, and what it does. docs/C_API.md has this table.
pub(crate) struct OwnKey {
    pub(crate) name: &'static str,
    pub(crate) values: &'static str,
    #[cfg_attr(not(test), allow(dead_code, reason = "the test of docs/C_API.md reads it"))]
    pub(crate) effect: &'static str,
    set: fn(&mut OwnKeys, &str) -> Option<()>,
}

/// The keys of our own.
pub(crate) const OWN_KEYS: [OwnKey; 5] = [
    OwnKey {
        name: "ort_runtime.memory_limit",
        values: "a size: `512MiB`, `2GiB`, `1000000`",
        effect: "the most bytes that the session allocates; a run that needs more is refused before it starts",
        set: |own, value| {
            own.memory_limit = Some(size(value)?);
            Some(())
        },
    },
    OwnKey {
        name: "ort_runtime.budget",
        values: "a name and a size: `models=4GiB`",
        effect: "a limit that all sessions with this name share",
        set: |own, value| {
            let (name, bytes) = value.split_once('=')?;
            own.budget = Some(shared_budget(name, size(bytes)?)?);
            Some(())
        },
    },
    OwnKey {
        name: "ort_runtime.cache_dir",
        values: "a folder",
        effect: "keeps packed weights in files there, which later sessions and processes map",
        set: |own, value| {
            own.cache_dir = Some(PathBuf::from(value)).filter(|_| !value.is_empty());
            Some(())
        },
    },
    OwnKey {
        name: "ort_runtime.batch_split",
        values: "`0`, `1`, `true`, `false`",
        effect: "whether a run may split its batch to fit a memory limit (`1`)",
        set: |own, value| {
            own.is_batch_whole = !flag(value)?;
            Some(())
        },
    },
    OwnKey {
        name: "ort_runtime.plan",
        values: "a file, and sizes of dimensions: `plan.json`, `plan.json;batch=8`",
        effect: "writes the memory plan of a run to the file, as JSON, when the session is created",
        set: |own, value| {
            let mut parts = value.split(';');
            let path = parts.next().map(PathBuf::from).filter(|path| !path.as_os_str().is_empty())?;
            let dim = |part: &str| {
                let (name, size) = part.split_once('=')?;
                Some((name.to_owned(), size.parse().ok()?))
            };
            let dims = parts.filter(|part| !part.is_empty()).map(dim).collect::<Option<_>>()?;
            own.plan = Some(PlanFile { path, dims });
            Some(())
        },
    },
];

const PREFIX: &str = "ort_runtime.";

/// Whether a key is one of our own, or looks like one.
pub(crate) fn is_own(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Sets a key of our own. Unlike other providers' keys, an unknown one is an error.
pub(crate) fn apply(own: &mut OwnKeys, name: &str, value: &str) -> Outcome {
    let Some(key) = OWN_KEYS.iter().find(|key| key.name == name) else {
        let known = OWN_KEYS.iter().map(|key| key.name);
        let advice = ort_runtime::advise("keys", name, known);
        return invalid(format!("there is no configuration key '{name}'; {advice}"));
    };
    (key.set)(own, value).ok_or_else(|| {
        Failure::invalid(format!(
            "AddSessionConfigEntry: value for '{name}' must be {}; got '{value}'",
            key.values
        ))
    })
}

/// Reads a number of bytes, with `KiB`, `MiB` or `GiB` behind it or not.
fn size(text: &str) -> Option<usize> {
    const UNITS: [(&str, usize); 3] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let text = text.trim();
    let unit = UNITS.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, *bytes)));
    let (number, unit) = unit.unwrap_or((text, 1));
    number.trim().parse::<usize>().ok()?.checked_mul(unit)
}

/// Returns the budget of a name. The sessions that share it agree on its size.
fn shared_budget(name: &str, bytes: usize) -> Option<Arc<Budget>> {
    static BUDGETS: Mutex<BTreeMap<String, Weak<Budget>>> = Mutex::new(BTreeMap::new());
    let mut budgets = BUDGETS.lock();
    budgets.retain(|_, budget| budget.strong_count() > 0);
    if let Some(budget) = budgets.get(name).and_then(Weak::upgrade) {
        return (budget.limit() == Some(bytes)).then_some(budget);
    }
    let budget = Budget::new(Some(bytes));
    budgets.insert(name.to_owned(), Arc::downgrade(&budget));
    Some(budget)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("1000", Some(1000)),
            ("2 KiB", Some(2048)),
            ("3MiB", Some(3 << 20)),
            ("1GiB", Some(1 << 30)),
            ("1GB", None),
            ("-1", None),
            ("99999999999999999GiB", None),
            ("", None),
        ] {
            assert_eq!(size(text), bytes, "{text}");
        }
    }

    #[test]
    fn a_budget_has_one_size() {
        let first = shared_budget("one size", 1000);
        assert!(first.is_some());
        assert!(shared_budget("one size", 2000).is_none());
        assert!(
            shared_budget("one size", 1000)
                .is_some_and(|other| first.is_some_and(|first| Arc::ptr_eq(&first, &other)))
        );
        assert!(shared_budget("one size", 2000).is_some(), "the first one is gone");
    }
}
