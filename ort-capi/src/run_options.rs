//! `OrtRunOptions`.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::sync::Arc;

use ort_runtime::ep::CancelToken;
use ort_runtime::{ArenaDevice, RunOptions as EngineOptions};
use parking_lot::Mutex;

use crate::entry::{In, Object, Out, PathText, Released, Text, entries, kinds};
use crate::log::warn;
use crate::lora::Parameter;
use crate::profile::Profiling;
use crate::session_options::check_entry;
use crate::status::Outcome;

const SHRINKAGE: &str = "memory.enable_memory_arena_shrinkage";

/// Options of runs. Another thread may end the runs that have them.
#[derive(Default)]
pub(crate) struct RunOptions(Mutex<Settings>);

#[derive(Default)]
struct Settings {
    token: CancelToken,
    is_terminated: bool,
    severity: i32,
    verbosity: i32,
    tag: CString,
    entries: BTreeMap<CString, CString>,
    shrink_arenas: Vec<ArenaDevice>,
    adapters: Vec<Arc<Vec<Parameter>>>,
    profile_prefix: Option<PathBuf>,
}

kinds! {
    RunOptions => "OrtRunOptions", b"OrtRunOp";
}

impl RunOptions {
    /// What ends the runs that have these options.
    pub(crate) fn token(&self) -> CancelToken {
        self.0.lock().token.clone()
    }

    pub(crate) fn is_terminated(&self) -> bool {
        self.0.lock().is_terminated
    }

    /// The lowest severity of the lines of a run; `None` for that of its session.
    pub(crate) fn severity(&self) -> Option<i32> {
        Some(self.0.lock().severity).filter(|level| *level >= 0)
    }

    /// Begins the profile of a run, if the options ask for it.
    pub(crate) fn start_profile(&self) -> Option<Profiling> {
        self.0.lock().profile_prefix.as_deref().map(Profiling::start)
    }

    /// The adapters of runs, in the order in which they were added.
    pub(crate) fn adapters(&self) -> Vec<Arc<Vec<Parameter>>> {
        self.0.lock().adapters.clone()
    }

    /// Warns of adapters that a function does not apply, and returns none.
    pub(crate) fn ignore_adapters(&self, function: &str) -> Vec<Arc<Vec<Parameter>>> {
        if !self.0.lock().adapters.is_empty() {
            warn(
                "run_options.rs",
                format!("{function}() has active adapters specified, but won't have an effect"),
            );
        }
        Vec::new()
    }

    pub(crate) fn add_adapter(&self, adapter: Arc<Vec<Parameter>>) {
        self.0.lock().adapters.push(adapter);
    }

    pub(crate) fn shrink_arenas(&self) -> Vec<ArenaDevice> {
        self.0.lock().shrink_arenas.clone()
    }
}

entries! {
    /// 39
    fn CreateRunOptions(out: Out<*mut Object<RunOptions>>) {
        let out = out.place()?;
        let options = RunOptions::default();
        options.0.lock().severity = -1;
        out.put(Object::give(options));
        Ok(())
    }

    /// 97
    fn ReleaseRunOptions(options: Released<RunOptions>) -> (), else (), {
        options.release();
    }

    /// 40
    fn RunOptionsSetRunLogVerbosityLevel(options: In<RunOptions>, level: i32) {
        options.get()?.0.lock().verbosity = level;
        Ok(())
    }

    /// 41
    fn RunOptionsSetRunLogSeverityLevel(options: In<RunOptions>, level: i32) {
        options.get()?.0.lock().severity = level;
        Ok(())
    }

    /// 42
    fn RunOptionsSetRunTag(options: In<RunOptions>, tag: Text) {
        let options = options.get()?;
        let tag = if tag.is_null() { &[][..] } else { tag.bytes("the tag")? };
        options.0.lock().tag = CString::new(tag).unwrap_or_default();
        Ok(())
    }

    /// 43
    fn RunOptionsGetRunLogVerbosityLevel(options: In<RunOptions>, out: Out<i32>) {
        let out = out.place()?;
        out.put(options.get()?.0.lock().verbosity);
        Ok(())
    }

    /// 44
    fn RunOptionsGetRunLogSeverityLevel(options: In<RunOptions>, out: Out<i32>) {
        let out = out.place()?;
        out.put(options.get()?.0.lock().severity);
        Ok(())
    }

    /// 45
    fn RunOptionsGetRunTag(options: In<RunOptions>, out: Out<*const c_char>) {
        let out = out.place()?;
        // The memory of the text stays until the tag is set again.
        out.put(options.get()?.0.lock().tag.as_ptr());
        Ok(())
    }

    /// 46
    fn RunOptionsSetTerminate(options: In<RunOptions>) {
        let mut settings = options.get()?.0.lock();
        settings.is_terminated = true;
        settings.token.cancel();
        Ok(())
    }

    /// 47. A token cannot be taken back, so later runs have a new one.
    fn RunOptionsUnsetTerminate(options: In<RunOptions>) {
        let mut settings = options.get()?.0.lock();
        if std::mem::take(&mut settings.is_terminated) {
            settings.token = CancelToken::new();
        }
        Ok(())
    }

    /// 165. Unknown keys are kept: other providers read them.
    fn AddRunConfigEntry(options: In<RunOptions>, key: Text, value: Text) {
        let options = options.get()?;
        let (key, value) = (key.get("the key")?, value.get("the value")?);
        check_entry(key, value)?;
        if key == SHRINKAGE {
            options.0.lock().shrink_arenas = arenas(value)?;
        }
        let pair = (CString::new(key).unwrap_or_default(), CString::new(value).unwrap_or_default());
        options.0.lock().entries.insert(pair.0, pair.1);
        Ok(())
    }

    /// 415. Each run writes a file of its own.
    fn RunOptionsEnableProfiling(options: In<RunOptions>, prefix: PathText) {
        let options = options.get()?;
        options.0.lock().profile_prefix = Some(prefix.get("the prefix of the profile")?);
        Ok(())
    }

    /// 416
    fn RunOptionsDisableProfiling(options: In<RunOptions>) {
        options.get()?.0.lock().profile_prefix = None;
        Ok(())
    }

    /// 373
    fn GetRunConfigEntry(options: In<RunOptions>, key: Text) -> *const c_char, else std::ptr::null(), {
        let (Ok(options), Ok(key)) = (options.get(), key.bytes("the key")) else { return std::ptr::null() };
        let key = CString::new(key).unwrap_or_default();
        options.0.lock().entries.get(&key).map_or(std::ptr::null(), |value| value.as_ptr())
    }
}

fn arenas(list: &str) -> Outcome<Vec<ArenaDevice>> {
    if list.is_empty() {
        return Ok(Vec::new());
    }
    let mut options = EngineOptions::default();
    options.add_run_config_entry(SHRINKAGE, list)?;
    Ok(options.shrink_arenas)
}
