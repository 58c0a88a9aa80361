//! Device code: kernel families, which the driver's JIT compiles on first launch, and rendered PTX,
//! which is compiled once per text.

use std::sync::Arc;

use ort_core::{Result, Within, error};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::driver::{Context, Function, Module};
use crate::families::{find_family, unpacked};
use crate::launch::{Code, Launch};

/// The oldest compute capability that kernels are compiled for.
pub(crate) const OLDEST: u32 = 75;

/// The modules loaded on a device.
pub(crate) struct Modules {
    context: Arc<Context>,
    capability: u32,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    families: FxHashMap<&'static str, Arc<Module>>,
    texts: FxHashMap<Arc<str>, Arc<Module>>,
    /// The dynamic shared memory that each function is allowed.
    allowed: FxHashMap<Function, u32>,
}

/// An entry, which keeps its module loaded.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) function: Function,
    _module: Arc<Module>,
}

impl Modules {
    pub(crate) fn new(context: Arc<Context>, capability: u32) -> Modules {
        Modules { context, capability, loaded: Mutex::default() }
    }

    /// Returns the entry of a launch, or `None` for a library call.
    pub(crate) fn entry(&self, launch: &Launch) -> Result<Option<Entry>> {
        let module = match &launch.code {
            Code::Library(_) => return Ok(None),
            Code::Family(name) => self.family(name)?,
            Code::Text(text) => self.text(text)?,
        };
        let function = module.function(&launch.entry)?;
        if launch.shared > 0 {
            self.allow_shared(&module, function, launch.shared)?;
        }
        Ok(Some(Entry { function, _module: module }))
    }

    /// Raises a function's dynamic shared memory limit above the default 48 KiB. The limit never
    /// shrinks, because cached launches of other sizes still rely on it.
    fn allow_shared(&self, module: &Module, function: Function, bytes: u32) -> Result<()> {
        // The lock is held across the driver's call. Otherwise a smaller limit could overwrite a
        // larger one.
        let mut loaded = self.loaded.lock();
        let allowed = loaded.allowed.entry(function).or_default();
        if *allowed < bytes {
            module.allow_shared(function, bytes)?;
            *allowed = bytes;
        }
        Ok(())
    }

    /// Returns how many modules are loaded.
    pub(crate) fn count(&self) -> usize {
        let loaded = self.loaded.lock();
        loaded.families.len() + loaded.texts.len()
    }

    fn family(&self, name: &'static str) -> Result<Arc<Module>> {
        // The lock is held while the driver compiles, so a second thread that wants this family
        // waits instead of compiling it twice.
        let mut loaded = self.loaded.lock();
        if let Some(module) = loaded.families.get(name) {
            return Ok(module.clone());
        }
        // Versions are listed newest first, so the first fit is the best one.
        let fitting = find_family(name)?.iter().find(|version| version.is_for(self.capability));
        let version = fitting.ok_or_else(|| {
            error!(Fail, "there are no kernels '{name}' for compute capability {}", self.capability)
        })?;
        let module = self.context.load(&unpacked(version.ptx)?).within(|| format!("kernels '{name}'"))?;
        let module = Arc::new(module);
        loaded.families.insert(name, module.clone());
        Ok(module)
    }

    fn text(&self, text: &Arc<str>) -> Result<Arc<Module>> {
        let mut loaded = self.loaded.lock();
        if let Some(module) = loaded.texts.get(text) {
            return Ok(module.clone());
        }
        // The lock is held as in `family`, so that each text is compiled once.
        let module = Arc::new(self.context.load(text).within(|| "a rendered kernel".to_owned())?);
        loaded.texts.insert(text.clone(), module.clone());
        Ok(module)
    }
}

/// The error for a device that is older than any compiled kernel.
pub(crate) fn too_old(capability: u32) -> ort_core::Error {
    error!(
        EpFail,
        "the device has compute capability {}.{}, and kernels need {}.{}",
        capability / 10,
        capability % 10,
        OLDEST / 10,
        OLDEST % 10
    )
    .help("run on a GPU of the Turing generation or newer, or on another provider")
}
