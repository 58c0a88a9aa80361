//! Command-line flags that the commands on a MODEL share, and how results are printed.
//!
//! [`ModelArgs`] maps the flags to session options; parsers turn their values into numbers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use ort_report::{Table, split_in_words};
use ort_runtime::ep::Precision;
pub(crate) use ort_runtime::human_bytes;
use ort_runtime::onnx::{FileAccess, Source, WarningKind};
use ort_runtime::rewrite::{Level, Optimizer};
use ort_runtime::{
    ExtendStrategy, Limits, LoadOptions, MemoryUse, Model, Session, SessionBuilder, SessionOptions, Value,
};

use crate::numbers::{seconds, whole};
use crate::providers::ProviderArgs;
use crate::usage::wrong_usage;

/// The model, its inputs, and the session options.
#[derive(Args, Clone)]
pub(crate) struct ModelArgs {
    /// The model file.
    pub(crate) model: PathBuf,
    /// Read the input NAME from a .npy file (repeatable).
    #[arg(long = "input", value_name = "NAME=FILE.npy", value_parser = pair)]
    pub(crate) input: Vec<(String, String)>,
    /// Read inputs by name from a .npz archive.
    #[arg(long, value_name = "FILE.npz")]
    pub(crate) inputs: Option<PathBuf>,
    /// Seed of the random values for inputs that are not given.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    pub(crate) seed: u64,
    /// Size of a symbolic dimension [default: 1]. If you also pass input files, their shapes must
    /// match. `ort plan` also takes several sizes, NAME=1,2,4.
    #[arg(long = "dim", value_name = "NAME=N", value_parser = sized)]
    pub(crate) dims: Vec<(String, Vec<i64>)>,
    /// Fix a symbolic dimension at load time: the model is compiled for this size alone.
    #[arg(long = "fix-dim", value_name = "NAME=N", value_parser = fixed)]
    pub(crate) fix_dims: Vec<(String, i64)>,
    /// Full shape of one random input.
    #[arg(long = "shape", value_name = "INPUT=1x3x224x224", value_parser = shaped)]
    pub(crate) shapes: Vec<(String, Vec<usize>)>,
    #[command(flatten)]
    pub(crate) providers: ProviderArgs,
    /// Intra-op threads: threads inside one operator [default: the cores this process may use].
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Threads for packing weights and folding constants [default: the cores this process may use].
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) load_threads: Option<usize>,
    /// Precision of GEMM and convolution on the CPU; bf16 needs AVX512-BF16.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    pub(crate) precision: PrecisionArg,
    /// Graph optimization level: disabled, basic, extended or all.
    #[arg(long, value_name = "LEVEL", default_value = "all", value_parser = level)]
    pub(crate) opt_level: Level,
    /// Disable a rewrite rule; `ort optimize` lists the rules that apply.
    #[arg(long = "without-rule", value_name = "RULE")]
    pub(crate) without_rules: Vec<String>,
    /// Stop after N rewrites (for bisecting).
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub(crate) rewrites: Option<usize>,
    /// Hard limit on what the session allocates; weights mapped from the file do not count. Inputs
    /// that are read or generated must fit in the same limit. Bytes, or a number with KiB, MiB,
    /// GiB, KB, MB or GB.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory_limit: Option<usize>,
    /// Never split a batch to fit the memory limit.
    #[arg(long)]
    pub(crate) no_batch_split: bool,
    /// Keep packed weights in mapped files of this folder: later loads skip packing, and processes
    /// share the pages. The folder may be deleted at any time.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
    /// Timeout in seconds for load, compilation and each run, separately [default: an hour].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) deadline: Option<Duration>,
    /// How the arena for dynamically sized values grows [default: same-as-requested].
    #[arg(long, value_enum, value_name = "STRATEGY", conflicts_with = "no_arena")]
    pub(crate) arena_strategy: Option<ArenaStrategy>,
    /// Disable the arena: dynamically sized values come straight from the heap.
    #[arg(long)]
    pub(crate) no_arena: bool,
    /// Disable memory planning: allocate each value when it is produced.
    #[arg(long)]
    pub(crate) no_mem_pattern: bool,
    /// Read model files into memory. Later changes to the files then have no effect.
    #[arg(long)]
    pub(crate) no_mmap: bool,
    /// Reject what ONNX forbids but ONNX Runtime accepts, instead of warning; `ort check` lists it.
    #[arg(long)]
    pub(crate) strict: bool,
}

/// The values of `--arena-strategy`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ArenaStrategy {
    /// Regions double in size, from 1 MiB up: few system allocations.
    PowerOfTwo,
    /// Regions as large as the request: least memory.
    SameAsRequested,
}

/// The values of `--precision`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PrecisionArg {
    /// float32 throughout.
    Fp32,
    /// bfloat16 GEMM and convolution with float32 accumulators.
    Bf16,
}

impl From<PrecisionArg> for Precision {
    fn from(precision: PrecisionArg) -> Precision {
        match precision {
            PrecisionArg::Fp32 => Precision::Fp32,
            PrecisionArg::Bf16 => Precision::Bf16,
        }
    }
}

impl ModelArgs {
    pub(crate) fn source(&self) -> Result<Source> {
        let access = FileAccess { map: !self.no_mmap, ..FileAccess::default() };
        let standard = Limits::default();
        // Without the flag, the default deadline stays in force; only a number replaces it.
        let limits = Limits { deadline: self.deadline.or(standard.deadline), ..standard };
        Ok(Source::open(&self.model, access)?
            .limits(limits)
            // Only the compile cache needs the model's hash.
            .keep_hash(self.cache.is_some())
            .strict(self.strict))
    }

    pub(crate) fn load(&self) -> Result<Model> {
        let options = LoadOptions { free_dimensions: self.fix_dims.clone(), ..LoadOptions::default() };
        let model = Model::from_source_with(self.source()?, &options)?;
        // The library only warns of a dimension that the model does not have. On the command line
        // the name is misspelled.
        let unknown = model.warnings().iter().find(|warning| warning.kind == WarningKind::LoadOption);
        if let Some(unknown) = unknown {
            bail!("{}: --fix-dim: {unknown}; `ort inspect` lists the inputs", self.model.display());
        }
        Ok(model)
    }

    /// Loads the model for a command that may write a file, which must not be a file of the model.
    pub(crate) fn load_for_output(&self, output: Option<&Path>) -> Result<Model> {
        if output.is_some() {
            self.source()?.check_outputs(output)?;
        }
        self.load()
    }

    /// Returns the `--dim` sizes. Several sizes for one dimension are an error.
    pub(crate) fn single_dims(&self) -> Result<Vec<(String, i64)>> {
        let single = |(name, sizes): &(String, Vec<i64>)| match sizes.as_slice() {
            [size] => Ok((name.clone(), *size)),
            // A run binds each dimension to one size, so a list makes sense for plans alone.
            _ => wrong_usage!("--dim {name} has {} sizes; give one, or use `ort plan`", sizes.len()),
        };
        self.dims.iter().map(single).collect()
    }

    /// Returns the graph optimizer that the flags describe.
    pub(crate) fn optimizer(&self) -> Optimizer {
        Optimizer { level: self.opt_level, disabled: self.without_rules.clone(), stop_after: self.rewrites }
    }

    pub(crate) fn session(&self, model: &Model) -> Result<Session> {
        Ok(self.builder(model)?.build()?)
    }

    /// Returns a session builder with all options set from the flags.
    pub(crate) fn builder(&self, model: &Model) -> Result<SessionBuilder> {
        let mut builder = Session::builder(model).options(&self.options());
        builder = builder.precision(self.precision.into()).optimizer(self.optimizer());
        builder = builder.batch_split(!self.no_batch_split);
        if let Some(folder) = &self.cache {
            builder = builder.cache_dir(folder);
        }
        self.providers.request(builder)
    }

    /// Warns if a run on these inputs will be split into smaller batches.
    pub(crate) fn note_split(&self, session: &Session, inputs: &[(&str, Value)]) -> Result<()> {
        if self.memory_limit.is_none() || self.no_batch_split {
            return Ok(());
        }
        if let Some(split) = session.plan_for_inputs(inputs)?.batch_split {
            tracing::warn!("{}", split_in_words(&split));
        }
        Ok(())
    }

    /// Returns the options that ONNX Runtime also has, under its names.
    fn options(&self) -> SessionOptions {
        let mut options = SessionOptions {
            enable_cpu_mem_arena: !self.no_arena,
            enable_mem_pattern: !self.no_mem_pattern,
            // 0 stands for the default: one thread per core that the process may use.
            intra_op_num_threads: self.threads.unwrap_or(0),
            load_threads: self.load_threads.unwrap_or(0),
            memory_limit: self.memory_limit,
            ..SessionOptions::default()
        };
        options.arena.extend = match self.arena_strategy {
            Some(ArenaStrategy::PowerOfTwo) => ExtendStrategy::PowerOfTwo,
            Some(ArenaStrategy::SameAsRequested) | None => ExtendStrategy::SameAsRequested,
        };
        options
    }

    /// Returns the model's file name without its extension.
    pub(crate) fn name(&self) -> String {
        self.model.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// The most threads that we accept. Larger numbers are typing errors.
const MOST_THREADS: usize = 4096;

pub(crate) fn threads(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|threads| (1..=MOST_THREADS).contains(threads));
    number.ok_or_else(|| format!("`{text}` is not a number of threads from 1 to {MOST_THREADS}"))
}

pub(crate) fn level(text: &str) -> Result<Level, String> {
    let names = Level::NAMES.map(|(name, _)| name);
    Level::named(text).ok_or_else(|| format!("`{text}` is not one of {}", names.join(", ")))
}

fn pair(text: &str) -> Result<(String, String), String> {
    // Split at the last `=`, because names from model files may contain one.
    let (name, value) = text.rsplit_once('=').ok_or_else(|| format!("`{text}` is not NAME=VALUE"))?;
    if name.is_empty() {
        return Err(format!("`{text}` has no name before the `=`"));
    }
    Ok((name.to_string(), value.to_string()))
}

fn sized(text: &str) -> Result<(String, Vec<i64>), String> {
    let (name, sizes) = pair(text)?;
    let size = |size: &str| {
        let parsed = size.parse().ok().filter(|parsed| *parsed >= 0);
        parsed.ok_or_else(|| format!("`{size}` is not a size: use a whole number of 0 or more"))
    };
    Ok((name, sizes.split(',').map(size).collect::<Result<_, _>>()?))
}

fn fixed(text: &str) -> Result<(String, i64), String> {
    let (name, sizes) = sized(text)?;
    match sizes.as_slice() {
        [size] => Ok((name, *size)),
        _ => Err(format!("`{text}` is not NAME=N: a dimension is fixed at one size")),
    }
}

fn shaped(text: &str) -> Result<(String, Vec<usize>), String> {
    let (name, sizes) = pair(text)?;
    // An empty shape is a scalar.
    if sizes.is_empty() {
        return Ok((name, Vec::new()));
    }
    // Shapes use `x`, because a comma separates the sizes of a sweep in `--dim`.
    let sizes: Result<Vec<usize>, _> = sizes.split('x').map(str::parse).collect();
    sizes.map(|sizes| (name, sizes)).map_err(|_| format!("`{text}` is not INPUT=1x3x224x224"))
}

pub(crate) fn size(text: &str) -> Result<usize, String> {
    const UNITS: [(&str, usize); 6] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
    ];
    // No unit is the ending of another one, so the order of the table does not matter.
    let unit = UNITS.iter().find(|(unit, _)| text.ends_with(unit));
    let (number, factor) =
        unit.map_or((text, 1), |(unit, factor)| (text.strip_suffix(unit).unwrap_or(text), *factor));
    let refused = || {
        let units = UNITS.map(|(unit, _)| unit).join(", ");
        format!("`{text}` is not a size: use a number of bytes, or one with {units}, such as 512MiB")
    };
    // A fraction such as `1.5GiB` is a valid size, so the number is parsed as a float.
    let number: f64 = number.trim().parse().map_err(|_| refused())?;
    let bytes = number * factor as f64;
    match bytes {
        _ if bytes.is_nan() => Err(refused()),
        ..0.0 => Err("must not be negative: use a size such as 512MiB".to_string()),
        // `as usize` would saturate, so reject what does not fit.
        _ if bytes >= usize::MAX as f64 => {
            Err(format!("`{text}` is larger than any memory: use a size such as 512MiB"))
        }
        _ => Ok(bytes as usize),
    }
}

/// Formats a session's memory by category, without the empty ones.
pub(crate) fn parts(memory: &MemoryUse) -> String {
    let named = [
        ("weights in the mapped file", memory.weights_mapped),
        ("weights in memory", memory.weights_copied),
        ("packed weights", memory.packed),
        ("packed weights in the mapped cache", memory.cached),
        ("constants on devices", memory.device_constants),
        ("slabs", memory.slabs),
        ("workspaces", memory.workspace),
        ("outputs", memory.outputs + memory.outputs_waiting),
        ("values of unknown size", memory.dynamic),
    ];
    // Most sessions have few of these categories, and a line of zeros hides the others.
    let parts = named.iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<String> = parts.map(|(name, bytes)| format!("{name} {}", human_bytes(*bytes))).collect();
    let (total, idle) = (human_bytes(memory.total()), human_bytes(memory.idle));
    format!("the session holds {total}, {idle} of it idle: {}", parts.join(", "))
}

/// Returns an empty table with this header.
pub(crate) fn table(header: &[&str]) -> Table {
    Table::new(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_shapes_parse() {
        assert_eq!(size("512"), Ok(512));
        assert_eq!(size("1.5KiB"), Ok(1536));
        assert!(size("-1").is_err() && size("lots").is_err());
        assert_eq!(shaped("x=1x3"), Ok(("x".into(), vec![1, 3])));
        assert_eq!(shaped("x="), Ok(("x".into(), vec![])));
        assert!(size("99999999999GiB").is_err_and(|text| text.contains("larger than any memory")));
        assert!(size("-3MiB").is_err_and(|text| text.contains("negative")) && size("nan").is_err());
        assert_eq!(sized("n=1,2"), Ok(("n".into(), vec![1, 2])));
        assert!(sized("n=").is_err() && sized("n=1,").is_err());
        assert_eq!(fixed("n=3"), Ok(("n".into(), 3)));
        assert!(fixed("n=1,2").is_err() && fixed("n=-1").is_err());
        assert!(shaped("x=1xa").is_err() && sized("n=-1").is_err());
    }
}
