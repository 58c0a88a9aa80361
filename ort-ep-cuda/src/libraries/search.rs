//! Search for NVIDIA's libraries. A folder given by option is the only place searched. Otherwise
//! the order is the loader's search path, the wheels of Python environments, and CUDA toolkits. The
//! search starts no process and needs no environment variable.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::load::Kind;

/// The folder that holds libraries.
#[cfg(windows)]
const FOLDER: &str = "bin";
#[cfg(not(windows))]
const FOLDER: &str = "lib";
/// The name of the Python executable.
#[cfg(windows)]
const PYTHON: &str = "python.exe";
#[cfg(not(windows))]
const PYTHON: &str = "python3";

/// Returns the paths to try; a bare name goes through the loader's search path.
pub(super) fn places(kind: &Kind, own: Option<&Path>) -> Vec<PathBuf> {
    match own {
        Some(folder) => within(folder, kind).collect(),
        None => of_system(kind, &|name| std::env::var_os(name)),
    }
}

fn within(folder: &Path, kind: &Kind) -> impl Iterator<Item = PathBuf> {
    kind.names.iter().map(move |name| folder.join(name))
}

fn of_system(kind: &Kind, variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = kind.names.iter().map(PathBuf::from).collect();
    let mut folders: Vec<PathBuf> = Vec::new();
    for site in prefixes(variable).iter().flat_map(|prefix| sites(prefix)) {
        folders.extend(kind.wheels.iter().map(|wheel| site.join("nvidia").join(wheel).join(FOLDER)));
    }
    for home in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).map(PathBuf::from) {
        folders.extend(["lib64", FOLDER].map(|folder| home.join(folder)));
    }
    // Two variables often name the same folder.
    let mut known = Vec::new();
    for folder in folders {
        if !known.contains(&folder) {
            places.extend(within(&folder, kind).filter(|path| path.is_file()));
            known.push(folder);
        }
    }
    places
}

/// Returns the Python environments: the active one, conda's, and that of the `python3` first in
/// `PATH`.
fn prefixes(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).map(PathBuf::from);
    let path = variable("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).collect::<Vec<PathBuf>>();
    let python = folders.iter().find(|folder| folder.join(PYTHON).is_file());
    // On Windows the executable is in the prefix itself, elsewhere in a subfolder.
    let own = python.and_then(|folder| if cfg!(windows) { Some(folder.as_path()) } else { folder.parent() });
    named.chain(own.map(Path::to_owned)).collect()
}

/// Returns the package folders of an environment.
fn sites(prefix: &Path) -> Vec<PathBuf> {
    if cfg!(windows) {
        return vec![prefix.join("Lib").join("site-packages")];
    }
    let mut sites = Vec::new();
    for folder in [prefix.join("lib"), prefix.join("lib64")] {
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut versions: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        versions.retain(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("python3"))
        });
        versions.sort();
        sites.extend(
            versions.iter().flat_map(|version| {
                ["site-packages", "dist-packages"].map(|packages| version.join(packages))
            }),
        );
    }
    sites
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        name: "cuBLASLt",
        option: "use_cublas",
        names: &["libcublasLt.so.13", "libcublasLt.so.12"],
        wheels: &["cu13", "cublas"],
        oldest: 0,
    };

    #[test]
    fn places_come_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let file = |path: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            path
        };
        let venv = file("venv/lib/python3.11/site-packages/nvidia/cublas/lib/libcublasLt.so.12");
        let newer = file("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13");
        let conda = file("conda/lib/python3.10/site-packages/nvidia/cublas/lib/libcublasLt.so.12");
        let found = file("python/lib/python3/dist-packages/nvidia/cublas/lib/libcublasLt.so.12");
        let home = file("cuda/lib64/libcublasLt.so.13");
        file("python/bin/python3");
        file("other/lib/python3.11/site-packages/nvidia/cublas/lib/libcublasLt.so.12");
        let of = |name: &str| folder.path().join(name).into_os_string();
        let variable = |name: &str| match name {
            "VIRTUAL_ENV" => Some(of("venv")),
            "CONDA_PREFIX" => Some(of("conda")),
            "PATH" => std::env::join_paths([of("nothing"), of("python/bin")]).ok(),
            "CUDA_HOME" | "CUDA_PATH" => Some(of("cuda")),
            _ => None,
        };
        let names = ["libcublasLt.so.13", "libcublasLt.so.12"].map(PathBuf::from);
        let expected: Vec<PathBuf> = names.iter().cloned().chain([venv, newer, conda, found, home]).collect();
        assert_eq!(of_system(&KIND, &variable), expected);
        assert_eq!(of_system(&KIND, &|_| None), names);
        let own = places(&KIND, Some(Path::new("own")));
        assert_eq!(own, ["own/libcublasLt.so.13", "own/libcublasLt.so.12"].map(PathBuf::from));
    }
}
