//! Loading of NVIDIA's libraries: their functions, versions and paths.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;
use parking_lot::Mutex;

use super::report::FoundLibrary;

/// A library: its names, where it may be found, and the oldest usable version.
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// The option that disables it.
    pub(super) option: &'static str,
    /// Its file names, newest first.
    pub(super) names: &'static [&'static str],
    /// The folders in `site-packages/nvidia` whose wheels contain it.
    pub(super) wheels: &'static [&'static str],
    /// The oldest usable version, as the library encodes it.
    pub(super) oldest: usize,
}

/// A version, as a library encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version(usize);

impl Version {
    /// Formats major, minor and patch. Minor and patch take two decimal digits each, but before
    /// cuDNN 9 the minor version took one.
    fn to_text(self) -> String {
        // cuDNN 8.x has four digits at most; all newer encodings have five or more.
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
    /// Looks up all functions; the error names the first missing one.
    fn of(library: &Library) -> Result<Self, String>;

    /// Returns the version that the library reports.
    fn version(&self) -> usize;
}

/// Declares foreign functions with the signatures that NVIDIA documents, and names the one that
/// returns the version.
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
                        // it. It is only called while the library is loaded, which is until the
                        // process ends.
                        let found = unsafe { library.get(stringify!($function).as_bytes()) };
                        *found.map_err(|_| concat!("it has no function ", stringify!($function)).to_owned())?
                    },)*
                })
            }

            fn version(&self) -> usize {
                // SAFETY: the function takes no arguments and may be called at any time.
                unsafe { (self.$version)() }
            }
        }
    };
}

pub(super) use functions;

/// A loaded library. It is never unloaded, because its threads and exit handlers need its code.
pub(crate) struct Loaded<F> {
    pub(super) functions: F,
    pub(super) found: FoundLibrary,
    _library: Library,
}

/// Why a library could not be opened.
pub(super) enum Refusal {
    /// It is not there.
    Missing,
    /// It is there but cannot be used; the reason.
    Unfit(String),
}

/// All loaded libraries, by the requested path.
static ALL: Mutex<BTreeMap<PathBuf, Arc<dyn Any + Send + Sync>>> = Mutex::new(BTreeMap::new());

impl<F: Functions> Loaded<F> {
    /// Opens the library at a path, or one by name through the loader's search path.
    pub(super) fn open(kind: &Kind, place: &Path) -> Result<Arc<Loaded<F>>, Refusal> {
        // Held while loading, so that two devices do not load one library twice.
        let mut all = ALL.lock();
        if let Some(known) = all.get(place).and_then(|known| known.clone().downcast::<Loaded<F>>().ok()) {
            return Ok(known);
        }
        // A bare name goes through the loader's search path, where the file cannot be checked
        // before.
        let named = place.components().count() == 1;
        if !named && !place.is_file() {
            return Err(Refusal::Missing);
        }
        let unfit = |reason: String| Refusal::Unfit(format!("{}: {reason}", place.display()));
        // SAFETY: loading a library of NVIDIA's runs its initialisers, which any thread may run.
        let library = unsafe { Library::new(place) }.map_err(|problem| {
            let said = problem.to_string();
            // The loader reports a missing library and a missing dependency alike, but its message
            // starts with the name of the file that is absent.
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

/// Returns the file of a library that the loader found by name, if `/proc/self/maps` shows it.
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
