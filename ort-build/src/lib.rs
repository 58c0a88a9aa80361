//! Build script support: the code hash, which the key of a compiled cache contains.
//!
//! Only the code that wrote a compiled cache knows the layout of its bytes. So each crate whose
//! code decides about them calls [`emit_code_hash`] in its build script. Its manifest has this
//! crate as a build dependency, and its own name as `links`.
//!
//! The code hash of a crate covers its manifest, its folder `src`, the nearest `Cargo.lock`, and
//! the code hashes of its dependencies. Because of `links`, cargo passes the latter from build
//! script to build script, so they need no paths to other crates. It works the same in a packaged
//! crate as in this repository.
//!
//! A packaged crate cannot see the lock file of the program that it becomes a part of, only its
//! own. So crates of other authors enter with the versions that the release was tested with.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use xxhash_rust::xxh3::Xxh3;

/// The files and folders of a package that are its code.
const CODE: [&str; 2] = ["Cargo.toml", "src"];

const LOCK_FILE: &str = "Cargo.lock";

/// Sets `ORT_CODE_HASH` for the crate whose build script calls this, and passes it on to the build
/// scripts of the crates that depend on it.
///
/// # Errors
///
/// A file of the package is missing or unreadable, or there is no `Cargo.lock` in the package or in
/// a folder above it.
pub fn emit_code_hash() -> io::Result<()> {
    emit_code_hash_with(&[])
}

/// Like [`emit_code_hash`], for a crate whose code is also in other folders of its package.
///
/// # Errors
///
/// As [`emit_code_hash`].
pub fn emit_code_hash_with(folders: &[&str]) -> io::Result<()> {
    let package = variable("CARGO_MANIFEST_DIR")?;
    let mut code = Code::of(Path::new(&package), dependency_hashes(env::vars_os()))?;
    code.places.extend(folders.iter().map(PathBuf::from));
    for place in &code.places {
        println!("cargo::rerun-if-changed={}", place.display());
    }
    let hash = code.hash()?;
    println!("cargo::rustc-env=ORT_CODE_HASH={hash}");
    println!("cargo::metadata=code_hash={hash}");
    Ok(())
}

/// The code of a package, and the hashes of the code below it.
struct Code {
    /// The package's folder.
    package: PathBuf,
    /// The files and folders that belong to it, and the lock file, relative to the package: cargo
    /// must not look for changes in another checkout that was built to the same target folder.
    places: Vec<PathBuf>,
    /// The code hashes of dependencies with their names, sorted.
    dependencies: Vec<(String, String)>,
}

impl Code {
    /// Finds the code of the package in a folder.
    fn of(package: &Path, dependencies: Vec<(String, String)>) -> io::Result<Code> {
        let depth = package.ancestors().position(|folder| folder.join(LOCK_FILE).is_file());
        let depth = depth.ok_or_else(|| {
            let message = format!("no {LOCK_FILE} in {} or in a folder above it", package.display());
            io::Error::new(io::ErrorKind::NotFound, message)
        })?;
        let lock = std::iter::repeat_n("..", depth).chain([LOCK_FILE]).collect();
        let places = CODE.iter().map(PathBuf::from).chain([lock]).collect();
        Ok(Code { package: package.to_owned(), places, dependencies })
    }

    /// Hashes the names and contents of all files, and the dependencies' hashes.
    fn hash(&self) -> io::Result<String> {
        let mut files = Vec::new();
        self.places.iter().try_for_each(|place| list_files(&self.package.join(place), &mut files))?;
        files.sort();
        let mut hash = Xxh3::new();
        // The lengths separate the parts, so that no two lists of parts are the same bytes.
        let mut add = |part: &[u8]| {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        };
        for file in &files {
            // Relative, so that the hash does not depend on the place of the checkout.
            let name = file.strip_prefix(&self.package).unwrap_or(file);
            add(name.to_string_lossy().as_bytes());
            add(&fs::read(file).map_err(|error| at(file, &error))?);
        }
        for (name, dependency) in &self.dependencies {
            add(name.as_bytes());
            add(dependency.as_bytes());
        }
        Ok(format!("{:016x}", hash.digest()))
    }
}

/// Returns the code hashes among environment variables, sorted: cargo names the metadata
/// `code_hash` of a dependency with `links = "ort-alloc"` `DEP_ORT_ALLOC_CODE_HASH`.
fn dependency_hashes<T: Into<OsString>>(
    variables: impl IntoIterator<Item = (T, T)>,
) -> Vec<(String, String)> {
    let mut hashes: Vec<(String, String)> = variables
        .into_iter()
        .filter_map(|(name, value)| Some((name.into().into_string().ok()?, value.into().into_string().ok()?)))
        .filter(|(name, _)| name.starts_with("DEP_") && name.ends_with("_CODE_HASH"))
        .collect();
    hashes.sort();
    hashes
}

/// Adds the files below a folder, or the single file. A missing one is an error, because a cache
/// key without it would fit bytes of other code.
fn list_files(place: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if fs::metadata(place).map_err(|error| at(place, &error))?.is_file() {
        files.push(place.to_owned());
        return Ok(());
    }
    fs::read_dir(place)
        .map_err(|error| at(place, &error))?
        .try_for_each(|entry| list_files(&entry?.path(), files))
}

fn variable(name: &str) -> io::Result<OsString> {
    env::var_os(name)
        .ok_or_else(|| io::Error::other(format!("{name} is not set: cargo sets it for build scripts")))
}

/// Adds the path to an error of the file system.
fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
