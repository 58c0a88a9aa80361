//! Building sessions.
//!
//! [`SessionBuilder::build`] opens the devices and compiles the model, or reuses the program of a
//! session with equal settings. The compile stages themselves are in `pipeline`.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ort_alloc::{Budget, Category, Recycler, TrimOnDrop, exact_bytes};

use super::pipeline::{Built, CompileContext};
use super::providers::Devices;
use super::shared::CompileKey;
use super::{Independent, Model, Session, SessionBuilder};
use crate::cache::check_place;
use crate::dim::Bindings;
use crate::ep::dynamic::DynamicMemory;
use crate::ep::guard::device_allocators;
use crate::ep::{CancelToken, Device, Packing, guard};
use crate::ir::Graph;
use crate::onnx::{Location, MESSAGE_LIMIT, Weights, data_file, save, save_located};
use crate::plan::{BoundValues, SlabLimits, resolve_bound};
use crate::rewrite::Report;
use crate::run::deferred::DeferredWeights;
use crate::run::grant::MemoryDemand;
use crate::run::streaming::{Streams, Windows};
use crate::run::{CacheUse, Compiled, Executor, SessionIdleMemory};
use crate::tensor::Tensor;
use crate::{Error, MemoryShortage, Result, ensure};

impl Model {
    /// Writes a graph that was [optimized](SessionBuilder::optimized) from this model as an ONNX
    /// file, atomically, with weights in data files that the caller writes.
    ///
    /// `locate` gets the name and the value of each initializer, and its location if it is in a
    /// data file of this model. It returns the location of the data for the new file, relative to
    /// the folder of `path`, or `None` to keep the data in the model file. Strings and the
    /// initializers of subgraphs always stay in the model file; `locate` is not called for them.
    ///
    /// # Errors
    ///
    /// `locate` fails, the file cannot be written, or it would replace external data of the model.
    /// If `locate` fails, nothing is written.
    pub fn save_located(
        &self,
        graph: &Graph,
        path: impl AsRef<Path>,
        mut locate: impl FnMut(&str, &Tensor, Option<Location>) -> Result<Option<Location>>,
    ) -> Result<()> {
        let path = path.as_ref();
        check_place(path, self.contents().get(1..).unwrap_or_default())?;
        save_located(graph, self.info(), path, |name, tensor| locate(name, tensor, self.location_of(tensor)))
    }
}

impl SessionBuilder {
    /// Writes the model, its packed weights and its folded constants into one file, atomically.
    /// [`Model::load`](super::Model::load) loads it like any other model. A session with the same
    /// providers, settings and CPU then packs nothing. Any other session packs the weights again,
    /// with a warning.
    ///
    /// ```no_run
    /// use ort_core::session::{Model, Session};
    ///
    /// let model = Model::load("model.onnx")?;
    /// Session::builder(&model).save_compiled("model.compiled")?;
    /// let session = Session::builder(&Model::load("model.compiled")?).build()?;
    /// assert_eq!(session.memory().packed, 0);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// Fails if building a session would fail, if the file cannot be written, or if the graph was
    /// built by hand: save such a graph first.
    pub fn save_compiled(&self, path: impl AsRef<Path>) -> Result<()> {
        let budget = self.new_budget();
        let threads = self.thread_count()?;
        self.open_devices()?.attempt(|devices| {
            let setting = self.setting(threads, devices, &budget)?;
            self.write_compiled(path.as_ref(), setting)
        })
    }

    /// Returns the graph as it would be compiled, and a report of the rewrites. Operators that ONNX
    /// Runtime does not have ([`crate::spec::RUNTIME`], and some fused activations) are decomposed
    /// again, so that other runtimes can load the saved graph.
    ///
    /// The dimension names of inputs are documentation, and a run may contradict them. A session
    /// detects such runs, but another runtime does not. So equal names do not imply equal sizes
    /// here, unless [`trust_dimension_names`](Self::trust_dimension_names) is set.
    pub fn optimized(self) -> Result<(Graph, Report)> {
        match !self.trusts_names && self.model.may_be_independent() {
            true => self.optimized_with_independent_dims(),
            false => self.optimized_as_named(),
        }
    }

    /// Writes the graph of [`optimized`](Self::optimized) as an ONNX file, atomically, and returns
    /// it. Any runtime loads a file of level `basic`. ONNX Runtime also loads one of level
    /// `extended`. Weights above 2 GiB go to a data file even with [`Weights::Inside`]. Corresponds
    /// to ONNX Runtime's `optimized_model_filepath`.
    ///
    /// ```no_run
    /// use ort_core::onnx::Weights;
    /// use ort_core::rewrite::Level;
    /// use ort_core::session::{Model, Session};
    ///
    /// let model = Model::load("model.onnx")?;
    /// let builder = Session::builder(&model).opt_level(Level::Basic);
    /// builder.save_optimized("optimized.onnx", &Weights::Inside)?;
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The model cannot be optimized. The file would replace external data of this model, or its
    /// data file would replace any file of this model. A file cannot be written. In that case
    /// neither the file nor its data file is replaced.
    pub fn save_optimized(&self, path: impl AsRef<Path>, weights: &Weights) -> Result<(Graph, Report)> {
        let path = path.as_ref();
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // Before the rewrites, which may take minutes.
        ensure!(
            folder.is_none_or(Path::is_dir),
            InvalidArgument,
            help = "give a folder that exists",
            "cannot write '{}': there is no such folder",
            path.display()
        );
        let (graph, report) = self.clone().optimized()?;
        let beside = Weights::Beside { least: LEAST_OUTSIDE };
        let weights = match weights {
            Weights::Inside if graph.weight_bytes() > MESSAGE_LIMIT => &beside,
            weights => weights,
        };
        // The model itself may be replaced: a mapping keeps the old file.
        let files = self.model.contents();
        check_place(path, files.get(1..).unwrap_or_default())?;
        if let Some((name, _)) = data_file(path, weights)? {
            check_place(&path.with_file_name(name), files)?;
        }
        save(&graph, self.model.info(), path, weights)?;
        Ok((graph, report))
    }

    /// Compiles the model, or reuses the program of a session with equal settings.
    ///
    /// Fails if no provider runs an operator, or if the session's constants exceed the memory
    /// limit. These are folded constants, copies of constants, and packed weights that cannot be
    /// streamed, such as those not in a mapped file or read in a subgraph. Without a limit all
    /// packed weights stay, and the machine's free memory is the bound.
    pub fn build(self) -> Result<Session> {
        // The independent session is built during a run, which has a cancel token of its own.
        let independent = Independent::new(SessionBuilder { cancel: CancelToken::new(), ..self.clone() });
        let threads = self.thread_count()?;
        let key = CompileKey {
            providers: self.providers.clone(),
            devices: self.devices.clone(),
            threads,
            precision: self.precision,
            optimizer: self.optimizer.clone(),
            budget: self.budget.clone(),
            cache_dir: self.cache_dir.clone(),
            updates: self.updates.clone(),
        };
        // A session with a limit of its own does not share: its packed weights count against that
        // limit.
        let shared = match self.memory_limit {
            None => Some(self.model.compiled().get(key, || self.compile(threads))?),
            Some(_) => None,
        };
        let compiled = match &shared {
            Some(shared) => shared.compiled.clone(),
            None => Arc::new(self.compile(threads)?),
        };
        // If a mapped file was changed during the build, the packed weights may come from the new
        // content.
        self.model.check_files(true)?;
        let is_bounded = self.is_bounded();
        // Runs count in a budget of their own within the shared one, so that each session knows its
        // own use.
        let budget = Budget::within(&compiled.budget, None);
        let executor = Executor {
            files: self.model.files(),
            kept: SessionIdleMemory::new(
                DynamicMemory::new(
                    &budget,
                    device_allocators(&compiled.devices)?,
                    self.arena.as_ref(),
                    is_bounded,
                ),
                // With a limit, dropped outputs are freed at once, because recycled outputs count
                // in no budget.
                (!is_bounded).then(Recycler::new),
                self.idle_memory,
            ),
            poison: self.poison,
            machine: (!is_bounded).then(|| compiled.budget.clone()),
            budget,
            compiled,
            threads,
            planning: self.planning,
            batch_split: self.batch_split,
            limits: self.limits,
        };
        let signature = OnceLock::new();
        Ok(Session { model: self.model, executor, _shared: shared, independent, signature })
    }

    fn thread_count(&self) -> Result<usize> {
        at_least_one(self.threads)
    }

    /// The inputs of the compile stages, for runs on `threads` threads.
    pub(super) fn setting<'a>(
        &self,
        threads: usize,
        devices: &'a [Arc<dyn Device>],
        budget: &'a Arc<Budget>,
    ) -> Result<CompileContext<'a>> {
        let load_threads = at_least_one(self.load_threads)?;
        Ok(CompileContext { threads, load_threads, devices, budget, until: self.limits.until() })
    }

    fn compile(&self, threads: usize) -> Result<Compiled> {
        let mut devices = self.open_devices()?;
        let start = Instant::now();
        let budget = self.new_budget();
        let (built, entry) = devices.attempt(|devices| {
            // Inside the closure, because `attempt` may call it again without a broken device.
            let setting = self.setting(threads, devices, &budget)?;
            if let Some((built, entry)) = self.cached(setting)? {
                return Ok((built, Some(entry)));
            }
            let built = self.program(setting, Packing::Now);
            Ok((built.map_err(|problem| self.explain(problem, setting))?, None))
        })?;
        let devices = devices.all;
        // Devices may still compile in the background. Wait for them, because runs need the
        // results.
        devices.iter().try_for_each(|device| guard::end_of_build(&**device))?;
        let Built { program, plans, packed_bytes, deferred_bytes, cached_bytes, rewrites, owner, .. } = built;
        let cache = entry.map(|entry| CacheUse { entry, packed_bytes: cached_bytes });
        // Compiling has read the mapped weights; drop their pages until a run reads them.
        self.model.release_all();
        let (nodes, copies) = program.counts(&devices);
        tracing::info!(
            steps = program.steps.len(),
            nodes,
            copies,
            packed_bytes,
            deferred_bytes,
            cached_bytes,
            milliseconds = start.elapsed().as_millis() as u64,
            "compiled"
        );
        let windows = Windows::of(&program, &devices)?;
        let streams = Streams::of(&program, (self.precision, &owner), windows);
        // Small programs do not trim the heap: folding builds hundreds of them.
        let trims =
            !streams.is_empty() || packed_bytes.saturating_add(deferred_bytes) >= Compiled::WORTH_A_TRIM;
        let _trim = trims.then(TrimOnDrop::new);
        let batch = OnceLock::new();
        let deferred = DeferredWeights::of(&program, self.precision, &owner);
        let held = budget.in_use().saturating_sub(deferred.passing_bytes);
        let constant_bytes = held.saturating_add(deferred_bytes);
        Ok(Compiled {
            deferred,
            program,
            plans,
            streams,
            devices,
            packed_bytes,
            constant_bytes,
            rewrites,
            batch,
            budget,
            cache,
            _trim,
        })
    }

    pub(super) fn open_devices(&self) -> Result<Devices> {
        Devices::open(&self.devices, &self.providers)
    }

    /// If a build exceeded its memory limit, adds to its error the limit that would suffice. That
    /// limit covers the build's peak of folded constants, packed weights and copies. It also covers
    /// the constants that remain after the build, plus the smallest run if all sizes are known. To
    /// measure this, the session is built once more, within a bound that follows from the model's
    /// size. This build folds constants, but only reserves packed weights in the budget.
    fn explain(&self, problem: Error, setting: CompileContext<'_>) -> Error {
        if problem.shortage().is_none() {
            return problem;
        }
        let (available, limit) = self.new_budget().tightest();
        let most = limit.saturating_add(self.model.graph().weight_bytes().saturating_mul(2));
        let budget = Budget::new(Some(most.saturating_add(FOLDING_SLACK_BYTES)));
        let setting = CompileContext { budget: &budget, ..setting };
        let Ok(built) = self.program(setting, Packing::Reserved) else {
            let least = problem.shortage().map_or(0, MemoryShortage::sufficient_limit);
            return problem.help(format!("raise the memory limit to more than {}", exact_bytes(least)));
        };
        let stays = budget.in_use().saturating_add(self.least_run(&built, setting).unwrap_or(0));
        let mut largest: Vec<(String, usize)> = Category::ALL
            .into_iter()
            .map(|category| match category {
                // Constant folding runs in sessions of its own, whose outputs are the folded
                // constants.
                Category::Output => ("folded constants".to_string(), budget.peak_of(category)),
                _ => (category.to_string(), budget.peak_of(category)),
            })
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let shortage = MemoryShortage { needed: budget.peak().max(stays), available, limit, largest };
        let raise =
            format!("raise the memory limit to at least {}", exact_bytes(shortage.sufficient_limit()));
        let advice = match self.model.has_mapped_files() {
            true => raise,
            false => format!(
                "{raise}, or map the model from a file: weights in a mapped file are packed again for each run"
            ),
        };
        Error::out_of_memory("building the session", shortage).help(advice)
    }

    /// The fewest bytes that a run needs beside the constants that are always in memory, without
    /// values of unknown size.
    fn least_run(
        &self,
        built: &Built,
        CompileContext { threads, devices, .. }: CompileContext<'_>,
    ) -> Result<usize> {
        let Built { program, owner, .. } = built;
        let room = SlabLimits::LEAST;
        let bound = BoundValues { room, ..program.bound_values(self.planning) };
        let plan = resolve_bound(program, &Bindings::new(), threads, &bound)?;
        let streams = Streams::of(program, (self.precision, owner), Windows::of(program, devices)?);
        Ok(MemoryDemand::of(program, &plan).total().saturating_add(streams.least_bytes()))
    }
}

/// Weights of at least this many bytes go to a data file. Other readers infer shapes from small
/// constants and need them in the model file.
const LEAST_OUTSIDE: usize = 1024;

/// The bytes that [`SessionBuilder::explain`] allows for folding, beyond the limit plus twice the
/// model's weights.
const FOLDING_SLACK_BYTES: usize = 64 << 20;

/// Returns the number of threads; by default, the number of cores that this process may use.
fn at_least_one(threads: Option<usize>) -> Result<usize> {
    let threads = threads.unwrap_or_else(ort_alloc::processors);
    ensure!(threads > 0, InvalidArgument, "a session needs at least one thread");
    Ok(threads)
}
