//! Configuration entries that change typed options, under ONNX Runtime's keys.

use std::path::PathBuf;

use ort_runtime::SessionOptions as EngineOptions;

use crate::own_keys;
use crate::session_options::{SessionOptions, set_level, threads};
use crate::status::{Outcome, invalid};

/// A key, the values that it takes, and what it sets.
struct Key {
    name: &'static str,
    values: &'static str,
    set: fn(&mut SessionOptions, &str) -> Option<()>,
}

const FLAG: &str = "a boolean ('0'/'1' or 'true'/'false')";
const NUMBER: &str = "a base-10 int32";

const fn key(
    name: &'static str,
    values: &'static str,
    set: fn(&mut SessionOptions, &str) -> Option<()>,
) -> Key {
    Key { name, values, set }
}

const KEYS: &[Key] = &[
    key("session.intra_op_num_threads", NUMBER, |options, value| {
        options.engine.intra_op_num_threads = threads(value.parse().ok()?);
        Some(())
    }),
    key("session.inter_op_num_threads", NUMBER, |options, value| {
        options.engine.inter_op_num_threads = threads(value.parse().ok()?);
        Some(())
    }),
    key("session.enable_cpu_mem_arena", FLAG, |options, value| {
        options.engine.enable_cpu_mem_arena = flag(value)?;
        Some(())
    }),
    key("session.enable_mem_pattern", FLAG, |options, value| {
        options.own.holds_no_idle_memory = !flag(value)?;
        Some(())
    }),
    key("session.log_id", "a text", |options, value| {
        options.log_id = value.to_owned();
        Some(())
    }),
    key("session.log_severity_level", NUMBER, |options, value| {
        options.log_severity = Some(value.parse().ok()?);
        Some(())
    }),
    key("session.log_verbosity_level", NUMBER, |options, value| {
        options.log_verbosity = value.parse().ok()?;
        Some(())
    }),
    key("session.enable_profiling", "the prefix of a file, or nothing", |options, value| {
        options.profile_prefix = Some(PathBuf::from(value)).filter(|_| !value.is_empty());
        Some(())
    }),
    key("session.optimized_model_filepath", "a path", |options, value| {
        options.optimized_path = Some(PathBuf::from(value)).filter(|_| !value.is_empty());
        Some(())
    }),
    key("session.graph_optimization_level", LEVELS, |options, value| {
        let level = match value {
            "disable_all" => 0,
            "enable_basic" => 1,
            "enable_extended" => 2,
            "enable_layout" => 3,
            "enable_all" => 99,
            number => number.parse().ok()?,
        };
        set_level(options, level).ok()
    }),
    key("session.execution_mode", "'sequential' or 'parallel'", |options, value| {
        let mode = match value.to_ascii_lowercase().as_str() {
            "sequential" | "ort_sequential" | "0" => "0",
            "parallel" | "ort_parallel" | "1" => "1",
            _ => return None,
        };
        options.engine.add_session_config_entry("session.execution_mode", mode).ok()
    }),
    key("session.use_per_session_threads", FLAG, |options, value| {
        options.uses_global_threads |= !flag(value)?;
        Some(())
    }),
    key("session.use_deterministic_compute", FLAG, |_, value| flag(value).map(drop)),
    key("optimization.disable_specified_optimizers", "names, separated by semicolons", |options, value| {
        // Names of optimizers of ONNX Runtime have no effect here.
        let known = |name: &&str| ort_runtime::rewrite::rule_names().any(|rule| rule == *name);
        let names = value.split([',', ';']).map(str::trim).filter(known);
        options.engine.disabled_rules = names.map(str::to_owned).collect();
        Some(())
    }),
];

const LEVELS: &str = "one of disable_all/enable_basic/enable_extended/enable_layout/enable_all";

/// Reads a boolean in any case.
pub(crate) fn flag(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" => Some(true),
        "0" | "false" => Some(false),
        _ => None,
    }
}

/// Sets the option that a key stands for. Other keys have no effect here.
pub(crate) fn apply(options: &mut SessionOptions, name: &str, value: &str) -> Outcome {
    if own_keys::is_own(name) {
        return own_keys::apply(&mut options.own, name, value);
    }
    if EngineOptions::arena_keys().any(|key| key == name) {
        return Ok(options.engine.add_session_config_entry(name, value)?);
    }
    let Some(key) = KEYS.iter().find(|key| key.name == name) else { return Ok(()) };
    match (key.set)(options, value) {
        Some(()) => Ok(()),
        None => invalid(format!(
            "AddSessionConfigEntry: value for '{name}' must be {}; got '{value}'",
            key.values
        )),
    }
}
