//! Session options under ONNX Runtime's names, as fields and as string keys.
//!
//! A table lists the known keys. The execution mode and `inter_op_num_threads` are accepted but
//! ignored.

use ort_alloc::{ArenaConfig, ExtendStrategy};

use crate::rewrite::Level;
use crate::{Result, advise, error};

/// Settings of a session, with the names of ONNX Runtime's `SessionOptions`. Pass them to
/// [`SessionBuilder::options`](super::SessionBuilder::options). Sizes are in bytes; defaults are in
/// parentheses.
///
/// ```
/// use ort_core::session::SessionOptions;
///
/// let mut options = SessionOptions { enable_mem_pattern: false, ..SessionOptions::default() };
/// options.add_session_config_entry("session.intra_op_num_threads", "2")?;
/// options.add_session_config_entry("arena_extend_strategy", "kNextPowerOfTwo")?;
/// assert_eq!(options.intra_op_num_threads, 2);
/// let refused = options.add_session_config_entry("session.enable_mem_patern", "1").err().map(|error| error.to_string());
/// assert!(refused.is_some_and(|text| text.contains("did you mean 'session.enable_mem_pattern'?")));
/// # Ok::<(), ort_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SessionOptions {
    /// Whether values whose size is known only at run time come from an arena instead of the heap
    /// (true).
    pub enable_cpu_mem_arena: bool,
    /// Whether each run's memory is planned ahead, in one slab that is kept for the next run
    /// (true). Without a plan each value is allocated on demand, and a run that exceeds a limit
    /// fails halfway.
    pub enable_mem_pattern: bool,
    /// Whether values that are not alive at the same time share memory in the plan (true). Without
    /// it each value has bytes of its own for the whole run, which helps to find a read after free.
    pub enable_mem_reuse: bool,
    /// How much of the graph may be rewritten (`all`).
    pub graph_optimization_level: Level,
    /// The rewrite rules to disable.
    pub disabled_rules: Vec<String>,
    /// Threads inside one operator; 0 means all cores that the process may use (0).
    pub intra_op_num_threads: usize,
    /// Threads that build the session, independent of the threads of runs: see
    /// [`SessionBuilder::load_threads`](super::SessionBuilder::load_threads). 0 means all cores
    /// that the process may use (0). OpenVINO calls this setting `compilation_num_threads`.
    pub load_threads: usize,
    /// Ignored: nodes run one after another, so that their memory can be planned, and each uses all
    /// threads. ONNX Runtime reads this setting only with [`ExecutionMode::Parallel`].
    pub inter_op_num_threads: usize,
    /// Ignored, see [`ExecutionMode`].
    pub execution_mode: ExecutionMode,
    /// A limit on everything that the session allocates: see
    /// [`SessionBuilder::memory_limit`](super::SessionBuilder::memory_limit).
    pub memory_limit: Option<usize>,
    /// How arenas grow ([`ArenaConfig::lean`]).
    pub arena: ArenaConfig,
}

/// Whether nodes may run in parallel. Ignored: both modes run one node after another and compute
/// the same results, because parallel nodes would need the memory of both at once. The type exists
/// so that programs that choose a mode need no change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExecutionMode {
    /// Corresponds to ONNX Runtime's `ORT_SEQUENTIAL`.
    #[default]
    Sequential,
    /// Corresponds to ONNX Runtime's `ORT_PARALLEL`.
    Parallel,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            enable_cpu_mem_arena: true,
            enable_mem_pattern: true,
            enable_mem_reuse: true,
            graph_optimization_level: Level::All,
            disabled_rules: Vec::new(),
            intra_op_num_threads: 0,
            load_threads: 0,
            inter_op_num_threads: 0,
            execution_mode: ExecutionMode::Sequential,
            memory_limit: None,
            arena: ArenaConfig::lean(),
        }
    }
}

/// A setting by string: its key, a description of the accepted values, and its setter.
struct Entry {
    key: &'static str,
    values: &'static str,
    set: fn(&mut SessionOptions, &str) -> Option<()>,
}

/// Keys with a dot are ONNX Runtime's configuration entries. The others come from its `OrtArenaCfg`
/// and its provider options, except [`OURS`].
const ENTRIES: &[Entry] = &[
    Entry {
        key: "session.enable_cpu_mem_arena",
        values: FLAG,
        set: |options, value| flag(value, &mut options.enable_cpu_mem_arena),
    },
    Entry {
        key: "session.enable_mem_pattern",
        values: FLAG,
        set: |options, value| flag(value, &mut options.enable_mem_pattern),
    },
    Entry {
        key: "session.enable_mem_reuse",
        values: FLAG,
        set: |options, value| flag(value, &mut options.enable_mem_reuse),
    },
    Entry {
        key: "session.graph_optimization_level",
        values: "ORT_DISABLE_ALL (0), ORT_ENABLE_BASIC (1), ORT_ENABLE_EXTENDED (2), ORT_ENABLE_LAYOUT (3) or ORT_ENABLE_ALL (99)",
        set: set_level,
    },
    Entry { key: "session.execution_mode", values: "ORT_SEQUENTIAL (0) or ORT_PARALLEL (1)", set: set_mode },
    Entry {
        key: "session.intra_op_num_threads",
        values: NUMBER,
        set: |options, value| number(value, &mut options.intra_op_num_threads),
    },
    Entry {
        key: "session.inter_op_num_threads",
        values: NUMBER,
        set: |options, value| number(value, &mut options.inter_op_num_threads),
    },
    Entry {
        key: "optimization.disable_specified_optimizers",
        values: "names of rewrite rules, with commas or semicolons between them",
        set: set_disabled,
    },
    Entry { key: "memory_limit", values: NUMBER, set: set_limit },
    Entry {
        key: "load_threads",
        values: NUMBER,
        set: |options, value| number(value, &mut options.load_threads),
    },
    Entry {
        key: "arena_extend_strategy",
        values: "kNextPowerOfTwo (0) or kSameAsRequested (1)",
        set: set_strategy,
    },
    Entry { key: "max_mem", values: "a number of bytes, 0 for no limit", set: set_max_mem },
    Entry {
        key: "initial_chunk_size_bytes",
        values: SIZE,
        set: |options, value| size(value, |arena| &mut arena.initial_chunk_bytes, options),
    },
    Entry {
        key: "max_dead_bytes_per_chunk",
        values: SIZE,
        set: |options, value| size(value, |arena| &mut arena.max_dead_bytes_per_chunk, options),
    },
    Entry {
        key: "initial_growth_chunk_size_bytes",
        values: SIZE,
        set: |options, value| size(value, |arena| &mut arena.initial_growth_chunk_bytes, options),
    },
    Entry {
        key: "max_power_of_two_extend_bytes",
        values: SIZE,
        set: |options, value| size(value, |arena| &mut arena.max_power_of_two_extend_bytes, options),
    },
];

/// The keys that ONNX Runtime does not have.
const OURS: [&str; 2] = ["memory_limit", "load_threads"];

const FLAG: &str = "1 or 0";
const NUMBER: &str = "a whole number";
const SIZE: &str = "a number of bytes, -1 for what it is without the entry";

impl SessionOptions {
    /// The keys that [`add_session_config_entry`](Self::add_session_config_entry) takes.
    pub fn config_keys() -> impl Iterator<Item = &'static str> {
        ENTRIES.iter().map(|entry| entry.key)
    }

    /// The keys of ONNX Runtime's arena settings.
    pub fn arena_keys() -> impl Iterator<Item = &'static str> {
        SessionOptions::config_keys().filter(|key| !key.contains('.') && !OURS.contains(key))
    }

    /// Changes a setting by its key, as ONNX Runtime's `add_session_config_entry` does. The keys of
    /// ONNX Runtime's arena settings, such as `arena_extend_strategy`, work as well.
    ///
    /// # Errors
    ///
    /// The key does not exist: the error suggests the nearest one. Or the setting does not accept
    /// the value: the error lists the accepted values.
    pub fn add_session_config_entry(&mut self, key: &str, value: &str) -> Result<()> {
        let entry = ENTRIES.iter().find(|entry| entry.key == key).ok_or_else(|| {
            let keys = ENTRIES.iter().map(|entry| entry.key);
            error!(InvalidArgument, "there is no session option '{key}'").help(advise(
                "session options",
                key,
                keys,
            ))
        })?;
        (entry.set)(self, value).ok_or_else(|| {
            error!(InvalidArgument, "session option '{key}' does not accept '{value}'")
                .help(format!("it takes {}", entry.values))
        })
    }
}

fn flag(value: &str, setting: &mut bool) -> Option<()> {
    *setting = match value {
        "1" | "true" | "True" => true,
        "0" | "false" | "False" => false,
        _ => return None,
    };
    Some(())
}

fn number(value: &str, setting: &mut usize) -> Option<()> {
    *setting = value.parse().ok()?;
    Some(())
}

/// Sets a size of the arena; -1 selects the default.
fn size(value: &str, of: fn(&mut ArenaConfig) -> &mut usize, options: &mut SessionOptions) -> Option<()> {
    let bytes = match value {
        "-1" => *of(&mut ArenaConfig::lean()),
        value => value.parse().ok()?,
    };
    *of(&mut options.arena) = bytes;
    Some(())
}

fn set_level(options: &mut SessionOptions, value: &str) -> Option<()> {
    options.graph_optimization_level = match value {
        "0" | "ORT_DISABLE_ALL" => Level::Disabled,
        "1" | "ORT_ENABLE_BASIC" => Level::Basic,
        "2" | "ORT_ENABLE_EXTENDED" => Level::Extended,
        // Layout rewrites have no level of their own: `Level::All` includes them.
        "3" | "99" | "ORT_ENABLE_LAYOUT" | "ORT_ENABLE_ALL" => Level::All,
        value => Level::named(value)?,
    };
    Some(())
}

fn set_mode(options: &mut SessionOptions, value: &str) -> Option<()> {
    options.execution_mode = match value {
        "0" | "ORT_SEQUENTIAL" => ExecutionMode::Sequential,
        "1" | "ORT_PARALLEL" => ExecutionMode::Parallel,
        _ => return None,
    };
    Some(())
}

fn set_disabled(options: &mut SessionOptions, value: &str) -> Option<()> {
    let names = value.split([',', ';']).map(str::trim).filter(|name| !name.is_empty());
    options.disabled_rules = names.map(str::to_string).collect();
    Some(())
}

fn set_limit(options: &mut SessionOptions, value: &str) -> Option<()> {
    options.memory_limit = Some(value.parse().ok()?);
    Some(())
}

fn set_strategy(options: &mut SessionOptions, value: &str) -> Option<()> {
    options.arena.extend = match value {
        "0" | "kNextPowerOfTwo" => ExtendStrategy::PowerOfTwo,
        "1" | "kSameAsRequested" => ExtendStrategy::SameAsRequested,
        "-1" => ArenaConfig::lean().extend,
        _ => return None,
    };
    Some(())
}

fn set_max_mem(options: &mut SessionOptions, value: &str) -> Option<()> {
    options.arena.limit = Some(value.parse().ok()?).filter(|bytes| *bytes > 0);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(key: &str, value: &str) -> Result<SessionOptions> {
        let mut options = SessionOptions::default();
        options.add_session_config_entry(key, value)?;
        Ok(options)
    }

    #[test]
    fn each_entry_changes_its_setting() -> Result<()> {
        let standard = SessionOptions::default;
        let lean = ArenaConfig::lean;
        let arena = |arena: ArenaConfig| SessionOptions { arena, ..standard() };
        let cases = [
            (
                "session.enable_cpu_mem_arena",
                "0",
                SessionOptions { enable_cpu_mem_arena: false, ..standard() },
            ),
            (
                "session.enable_mem_pattern",
                "False",
                SessionOptions { enable_mem_pattern: false, ..standard() },
            ),
            ("session.enable_mem_reuse", "0", SessionOptions { enable_mem_reuse: false, ..standard() }),
            (
                "session.graph_optimization_level",
                "ORT_ENABLE_BASIC",
                SessionOptions { graph_optimization_level: Level::Basic, ..standard() },
            ),
            (
                "session.execution_mode",
                "ORT_PARALLEL",
                SessionOptions { execution_mode: ExecutionMode::Parallel, ..standard() },
            ),
            ("session.intra_op_num_threads", "3", SessionOptions { intra_op_num_threads: 3, ..standard() }),
            ("session.inter_op_num_threads", "3", SessionOptions { inter_op_num_threads: 3, ..standard() }),
            (
                "optimization.disable_specified_optimizers",
                "silu, gelu;",
                SessionOptions { disabled_rules: vec!["silu".into(), "gelu".into()], ..standard() },
            ),
            ("memory_limit", "1000", SessionOptions { memory_limit: Some(1000), ..standard() }),
            ("load_threads", "3", SessionOptions { load_threads: 3, ..standard() }),
            (
                "arena_extend_strategy",
                "kNextPowerOfTwo",
                arena(ArenaConfig { extend: ExtendStrategy::PowerOfTwo, ..lean() }),
            ),
            ("max_mem", "5000", arena(ArenaConfig { limit: Some(5000), ..lean() })),
            ("initial_chunk_size_bytes", "7", arena(ArenaConfig { initial_chunk_bytes: 7, ..lean() })),
            ("max_dead_bytes_per_chunk", "7", arena(ArenaConfig { max_dead_bytes_per_chunk: 7, ..lean() })),
            (
                "initial_growth_chunk_size_bytes",
                "7",
                arena(ArenaConfig { initial_growth_chunk_bytes: 7, ..lean() }),
            ),
            (
                "max_power_of_two_extend_bytes",
                "7",
                arena(ArenaConfig { max_power_of_two_extend_bytes: 7, ..lean() }),
            ),
        ];
        for (entry, case) in ENTRIES.iter().zip(&cases) {
            assert_eq!(entry.key, case.0, "each entry has a case");
        }
        for (key, value, expected) in cases {
            assert_eq!(with(key, value)?, expected, "{key}");
            let refused = with(key, "-2,,").err().map(|problem| problem.to_string());
            assert!(refused.is_none_or(|text| text.contains(key) && text.contains("it takes ")), "{key}");
        }
        Ok(())
    }

    #[test]
    fn what_is_wrong_is_refused_with_what_there_is() {
        for (key, value, words) in [
            ("session.use_env_allocatorz", "1", "the session options are arena_extend_strategy, "),
            ("arena_extend_strateg", "0", "did you mean 'arena_extend_strategy'?"),
            ("arena_extend_strategy", "kWhatever", "it takes kNextPowerOfTwo (0) or kSameAsRequested (1)"),
            ("session.enable_mem_pattern", "maybe", "it takes 1 or 0"),
        ] {
            let text = with(key, value).err().map(|problem| problem.to_string()).unwrap_or_default();
            assert!(text.contains(words), "{text}");
        }
    }
}
