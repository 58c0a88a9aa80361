//! Loading a library: its functions, its version, and where it is.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;
use parking_lot::Mutex;

use super::FoundLibrary;

/// A library: what it is called, where it is looked for, and what is too old.
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// The option that switches it off.
    pub(super) option: &'static str,
    /// What its file is called, the newest first.
    pub(super) names: &'static [&'static str],
    /// The folders of wheels in `site-packages/nvidia` that have it.
    pub(super) wheels: &'static [&'static str],
    /// The oldest version that is used, as it tells it.
    pub(super) oldest: usize,
}

/// A version as a library tells it, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version(usize);

impl Version {
    /// Major, minor and patch: a number of them of two digits each, or of one and two before cuDNN
    /// 9.
    fn to_text(self) -> String {
        let number = self.0;
        let (major, minor) = if number >= 10_000 {
            (number / 10_000, number % 10_000 / 100)
        } else {
            (number / 1000, number % 1000 / 100)
        };
        format!("{major}.{minor}.{}", number % 100)
    }
}

/// The functions of a library.
pub(super) trait Functions: Sized + Send + Sync + 'static {
    /// All of them; the error names the first that is missing.
    fn of(library: &Library) -> Result<Self, String>;

    /// The version that the library tells.
    fn version(&self) -> usize;
}

/// Functions with their signatures, as NVIDIA documents them, and the one that tells the version.
macro_rules! functions {
    ($(#[$documentation:meta])* $name:ident, $version:ident,
     $(fn $function:ident($($argument:ident: $ty:ty),* $(,)?) -> $result:ty;)*) => {
        $(#[$documentation])*
        #[allow(non_snake_case, reason = "the names are the library's")]
        pub(crate) struct $name {
            $(pub(in crate::libraries) $function: unsafe extern "C" fn($($ty),*) -> $result,)*
        }

        impl crate::libraries::load::Functions for $name {
            fn of(library: &libloading::Library) -> Result<$name, String> {
                Ok($name {
                    $($function: {
                        // SAFETY: the function of this name has this signature, as NVIDIA documents
                        // it, and is only called while the library is loaded, which is until the
                        // end of the process.
                        let found = unsafe { library.get(stringify!($function).as_bytes()) };
                        *found.map_err(|_| concat!("it has no function ", stringify!($function)).to_owned())?
                    },)*
                })
            }

            fn version(&self) -> usize {
                // SAFETY: it takes nothing and may be called at any time.
                unsafe { (self.$version)() }
            }
        }
    };
}

pub(super) use functions;

/// A library that is loaded, until the process ends: what its threads and handlers still do then
/// needs its code.
pub(crate) struct Loaded<F> {
    pub(super) functions: F,
    pub(super) found: FoundLibrary,
    _library: Library,
}

/// Why there is no library at a place.
pub(super) enum Refusal {
    /// There is none.
    Missing,
    /// It cannot be used.
    Unfit(String),
}

/// What was loaded, by the path that was asked for.
static ALL: Mutex<BTreeMap<PathBuf, Arc<dyn Any + Send + Sync>>> = Mutex::new(BTreeMap::new());

impl<F: Functions> Loaded<F> {
    /// The library at a path, or of a name that the loader looks for.
    pub(super) fn open(kind: &Kind, place: &Path) -> Result<Arc<Loaded<F>>, Refusal> {
        let mut all = ALL.lock();
        if let Some(known) = all.get(place).and_then(|known| known.clone().downcast::<Loaded<F>>().ok()) {
            return Ok(known);
        }
        let named = place.components().count() == 1;
        if !named && !place.is_file() {
            return Err(Refusal::Missing);
        }
        let unfit = |reason: String| Refusal::Unfit(format!("{}: {reason}", place.display()));
        // SAFETY: loading a library of NVIDIA's runs its initialisers, which may run anywhere.
        let library = unsafe { Library::new(place) }.map_err(|problem| {
            let said = problem.to_string();
            // The loader has one answer for a name that nobody has and for one that needs what is
            // not there.
            let absent = named && said.starts_with(&*place.to_string_lossy());
            if absent { Refusal::Missing } else { unfit(said) }
        })?;
        let functions = F::of(&library).map_err(unfit)?;
        let version = functions.version();
        let text = Version(version).to_text();
        if version < kind.oldest {
            return Err(unfit(format!(
                "it is version {text}, and {} is needed",
                Version(kind.oldest).to_text()
            )));
        }
        let path = if named { loaded_from(place) } else { place.to_owned() };
        let found = FoundLibrary { version: text, path };
        let loaded = Arc::new(Loaded { functions, found, _library: library });
        all.insert(place.to_owned(), loaded.clone());
        Ok(loaded)
    }
}

/// The file of a library that the loader found, where the system tells it.
fn loaded_from(name: &Path) -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let wanted = name.to_string_lossy();
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(Path::new);
    let found =
        paths.find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&*wanted)));
    found.unwrap_or(name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_they_are_told() {
        let texts = [120_400, 130_001, 8907, 90_201].map(|number| Version(number).to_text());
        assert_eq!(texts, ["12.4.0", "13.0.1", "8.9.7", "9.2.1"]);
    }
}
