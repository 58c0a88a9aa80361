//! Gives a crate the hash of its own source as `ORT_CODE_HASH`: what other code has packed is not taken from a cache.
//! Crates whose code decides what lies in the compiled cache have this as their build script.

use std::fs;
use std::io::Result;
use std::path::{Path, PathBuf};

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=src");
    let mut files = Vec::new();
    list(Path::new("src"), &mut files)?;
    files.sort();
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    for file in files {
        let bytes = fs::read(&file)?;
        // Lengths keep names and contents apart.
        hash.add(file.to_string_lossy().as_bytes());
        hash.add(&bytes);
        hash.add(&(bytes.len() as u64).to_le_bytes());
    }
    println!("cargo::rustc-env=ORT_CODE_HASH={:016x}", hash.0);
    Ok(())
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => list(&path, files)?,
            false => files.push(path),
        }
    }
    Ok(())
}

/// The hash of Fowler, Noll and Vo, 1a, of 64 bits.
struct Fnv(u64);

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
