//! Gives a crate the hash of the code that it is made of as `ORT_CODE_HASH`: what other code has
//! packed is not taken from a cache. Crates whose code decides what lies in the compiled cache have
//! this as their build script.

use std::fs;
use std::io::Result;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

/// The crate's own files, the crate of memory that all build on, and the versions of what others
/// wrote.
const CODE: [&str; 4] = ["Cargo.toml", "src", "../ort-alloc/src", "../Cargo.lock"];

fn main() -> Result<()> {
    let mut files = Vec::new();
    for place in CODE.iter().map(Path::new).filter(|place| place.exists()) {
        println!("cargo::rerun-if-changed={}", place.display());
        list(place, &mut files)?;
    }
    files.sort();
    let mut hash = Xxh3::new();
    for file in files {
        // Lengths keep names and contents apart.
        for part in [file.to_string_lossy().as_bytes(), &fs::read(&file)?] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    println!("cargo::rustc-env=ORT_CODE_HASH={:016x}", hash.digest());
    Ok(())
}

/// The files of a folder, or the one file.
fn list(place: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if place.is_file() {
        files.push(place.to_path_buf());
        return Ok(());
    }
    fs::read_dir(place)?.try_for_each(|entry| list(&entry?.path(), files))
}
