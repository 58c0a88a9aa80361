//! The flags that every command taking a model shares.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use ort_runtime::ep::Precision;
use ort_runtime::onnx::{FileAccess, Source};
use ort_runtime::rewrite::{Level, Optimizer};
use ort_runtime::{
    BatchSplit, ExtendStrategy, Limits, MemoryUse, Model, Session, SessionBuilder, SessionOptions, Value,
};

use crate::output::Table;
use crate::providers::ProviderArgs;

/// Which model, on what, within which bounds.
#[derive(Args, Clone)]
pub(crate) struct ModelArgs {
    /// The model file.
    pub(crate) model: PathBuf,
    /// An input by name, from a NumPy file.
    #[arg(long = "input", value_name = "NAME=FILE.npy", value_parser = pair)]
    pub(crate) input: Vec<(String, String)>,
    /// Inputs by name, from a NumPy archive.
    #[arg(long, value_name = "FILE.npz")]
    pub(crate) inputs: Option<PathBuf>,
    /// Seed of made-up inputs: those not given are random.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// The size of a symbolic dimension, for made-up inputs and for planning; 1 where it is not
    /// given. `ort plan` also takes several sizes, NAME=1,2,4.
    #[arg(long = "dim", value_name = "NAME=N", value_parser = sized)]
    pub(crate) dims: Vec<(String, Vec<i64>)>,
    /// The whole shape of one made-up input.
    #[arg(long = "shape", value_name = "INPUT=1x3x224x224", value_parser = shaped)]
    pub(crate) shapes: Vec<(String, Vec<usize>)>,
    #[command(flatten)]
    pub(crate) providers: ProviderArgs,
    /// Threads inside one operator [default: the cores this process may use].
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Threads that load: they pack weights and fold constants [default: the cores this process may
    /// use].
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) load_threads: Option<usize>,
    /// How the CPU provider multiplies float matrices; bf16 needs a CPU with AVX512-BF16.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    pub(crate) precision: PrecisionArg,
    /// How much of the graph may be rewritten before it runs.
    #[arg(long, value_name = "LEVEL", default_value = "all", value_parser = level)]
    pub(crate) opt_level: Level,
    /// A rewrite rule that is left out; `ort optimize` lists those that apply.
    #[arg(long = "without-rule", value_name = "RULE")]
    pub(crate) without_rules: Vec<String>,
    /// Rewrite rules apply this often at most: to find the one that does harm.
    #[arg(long, value_name = "N")]
    pub(crate) rewrites: Option<usize>,
    /// A hard bound on what the run may allocate: bytes, or with KiB, MiB, GiB.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory_limit: Option<usize>,
    /// Do not run a batch that the memory limit cannot hold in parts.
    #[arg(long)]
    pub(crate) no_batch_split: bool,
    /// Keep packed weights in files of this folder and map them: loading again packs nothing, and
    /// processes share them. The folder may be removed at any time.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
    /// Seconds that loading, compiling and each run may take, each by itself [default: an hour].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) deadline: Option<Duration>,
    /// How the arena grows that holds values whose size only the run tells [default:
    /// same-as-requested].
    #[arg(long, value_enum, value_name = "STRATEGY", conflicts_with = "no_arena")]
    pub(crate) arena_strategy: Option<ArenaStrategy>,
    /// No arena: such values come straight from the heap.
    #[arg(long)]
    pub(crate) no_arena: bool,
    /// Do not plan memory ahead: every value is allocated as it comes.
    #[arg(long)]
    pub(crate) no_mem_pattern: bool,
    /// Read model files into memory instead of mapping them: a private copy, which whoever changes
    /// the files cannot change.
    #[arg(long)]
    pub(crate) no_mmap: bool,
    /// Refuse what ONNX does not allow but ONNX Runtime runs, instead of warning of it; `ort check`
    /// lists it.
    #[arg(long)]
    pub(crate) strict: bool,
}

/// `--arena-strategy`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ArenaStrategy {
    /// Regions that double in size, of 1 MiB at least: few requests to the system.
    PowerOfTwo,
    /// Regions as large as what is asked for: least memory.
    SameAsRequested,
}

/// `--precision`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PrecisionArg {
    /// float32 throughout.
    Fp32,
    /// Matrix products and convolutions of bfloat16 with float32 sums.
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
        let limits = Limits { deadline: self.deadline.or(standard.deadline), ..standard };
        Ok(Source::open(&self.model, access)?
            .limits(limits)
            .keep_hash(self.cache.is_some())
            .strict(self.strict))
    }

    pub(crate) fn load(&self) -> Result<Model> {
        Ok(Model::from_source(self.source()?)?)
    }

    /// The sizes of symbolic dimensions, one each.
    pub(crate) fn single_dims(&self) -> Result<Vec<(String, i64)>> {
        let single = |(name, sizes): &(String, Vec<i64>)| match sizes.as_slice() {
            [size] => Ok((name.clone(), *size)),
            _ => bail!("--dim {name} has {} sizes; only `ort plan` takes more than one", sizes.len()),
        };
        self.dims.iter().map(single).collect()
    }

    /// What may be rewritten.
    pub(crate) fn optimizer(&self) -> Optimizer {
        Optimizer { level: self.opt_level, disabled: self.without_rules.clone(), stop_after: self.rewrites }
    }

    pub(crate) fn session(&self, model: &Model) -> Result<Session> {
        Ok(self.builder(model)?.build()?)
    }

    /// The session as these arguments ask for it.
    pub(crate) fn builder(&self, model: &Model) -> Result<SessionBuilder> {
        let mut builder = Session::builder(model).options(&self.options());
        builder = builder.precision(self.precision.into()).optimizer(self.optimizer());
        builder = builder.batch_split(!self.no_batch_split);
        if let Some(folder) = &self.cache {
            builder = builder.cache_dir(folder);
        }
        self.providers.request(builder)
    }

    /// Says on standard error where a run on these inputs will be split.
    pub(crate) fn note_split(&self, session: &Session, inputs: &[(&str, Value)]) -> Result<()> {
        if self.memory_limit.is_none() || self.no_batch_split {
            return Ok(());
        }
        if let Some(split) = session.plan_for_inputs(inputs)?.batch_split {
            tracing::warn!("{}", split_in_words(&split));
        }
        Ok(())
    }

    /// What the flags say under ONNX Runtime's names.
    fn options(&self) -> SessionOptions {
        let mut options = SessionOptions {
            enable_cpu_mem_arena: !self.no_arena,
            enable_mem_pattern: !self.no_mem_pattern,
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

    /// The name of the model without folder and ending.
    pub(crate) fn name(&self) -> String {
        self.model.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// More threads than this in one operator are a slip of the keyboard.
const MOST_THREADS: usize = 4096;

pub(crate) fn threads(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|threads| (1..=MOST_THREADS).contains(threads));
    number.ok_or_else(|| format!("`{text}` is not a number of threads from 1 to {MOST_THREADS}"))
}

pub(crate) fn level(text: &str) -> Result<Level, String> {
    let names = Level::NAMES.map(|(name, _)| name);
    Level::named(text).ok_or_else(|| format!("`{text}` is not one of {}", names.join(", ")))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| format!("`{text}` is not a number of seconds"))
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.rsplit_once('=').ok_or_else(|| format!("`{text}` is not NAME=VALUE"))?;
    if name.is_empty() {
        return Err(format!("`{text}` begins with no name"));
    }
    Ok((name.to_string(), value.to_string()))
}

fn sized(text: &str) -> Result<(String, Vec<i64>), String> {
    let (name, sizes) = pair(text)?;
    let size = |size: &str| size.parse().ok().filter(|size| *size >= 0);
    let sizes: Option<Vec<i64>> = sizes.split(',').map(size).collect();
    sizes.map(|sizes| (name, sizes)).ok_or_else(|| format!("`{text}` is not NAME=N"))
}

fn shaped(text: &str) -> Result<(String, Vec<usize>), String> {
    let (name, sizes) = pair(text)?;
    if sizes.is_empty() {
        return Ok((name, Vec::new()));
    }
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
    let unit = UNITS.iter().find(|(unit, _)| text.ends_with(unit));
    let (number, factor) =
        unit.map_or((text, 1), |(unit, factor)| (text.strip_suffix(unit).unwrap_or(text), *factor));
    let number: f64 = number.trim().parse().map_err(|_| format!("`{text}` is not a size such as 512MiB"))?;
    let bytes = number * factor as f64;
    if bytes.is_finite() && bytes >= 0.0 && bytes < usize::MAX as f64 {
        Ok(bytes as usize)
    } else {
        Err(format!("`{text}` is not a size such as 512MiB"))
    }
}

/// Bytes for people: `1.5 MiB`.
pub(crate) fn human_bytes(bytes: usize) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = UNITS.iter().peekable();
    while value >= 1024.0 && units.next_if(|unit| **unit != "TiB").is_some() {
        value /= 1024.0;
    }
    format!("{value:.1} {}", units.peek().map_or("TiB", |unit| unit))
}

/// What a session holds, by what it is for.
pub(crate) fn parts(memory: &MemoryUse) -> String {
    let named = [
        ("mapped weights", memory.weights_mapped),
        ("other weights", memory.weights_copied),
        ("packed weights", memory.packed),
        ("constants on devices", memory.device_constants),
        ("slabs", memory.slabs),
        ("workspaces", memory.workspace),
        ("outputs", memory.outputs + memory.outputs_waiting),
        ("values of unknown size", memory.dynamic),
    ];
    let parts = named.iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<String> = parts.map(|(name, bytes)| format!("{name} {}", human_bytes(*bytes))).collect();
    let (total, idle) = (human_bytes(memory.total()), human_bytes(memory.idle));
    format!("the session holds {total}, {idle} of it idle: {}", parts.join(", "))
}

/// A table in the style of all commands: aligned, without frames.
pub(crate) fn table(header: &[&str]) -> Table {
    Table::new(header)
}

/// A split batch in words: `batch split: 'batch' of 8 runs as 3 + 3 + 2`.
pub(crate) fn split_in_words(split: &BatchSplit) -> String {
    const MOST: usize = 8;
    let count: usize = split.parts.iter().sum();
    let parts: Vec<String> = split.parts.iter().take(MOST).map(ToString::to_string).collect();
    let more = split.parts.len().saturating_sub(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("batch split: '{}' of {count} runs as {}{more}", split.dim, parts.join(" + "))
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
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(seconds("-1").is_err() && seconds("soon").is_err());
        assert_eq!(sized("n=1,2"), Ok(("n".into(), vec![1, 2])));
        assert!(sized("n=").is_err() && sized("n=1,").is_err());
        assert!(shaped("x=1xa").is_err() && sized("n=-1").is_err());
    }
}
