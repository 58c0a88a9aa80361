//! Code hashes of a chain of crates that cargo builds: a change below changes the hashes above.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const BUILD_SCRIPT: &str = "fn main() -> std::io::Result<()> { ort_build::emit_code_hash() }";

/// A workspace of the crates `low`, `middle` and `top`, each of which depends on the one before.
struct Chain(tempfile::TempDir);

impl Chain {
    fn new() -> Chain {
        let chain = Chain(tempfile::tempdir().unwrap());
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        // The versions that this workspace has already downloaded.
        fs::copy(own.join("../Cargo.lock"), chain.path("Cargo.lock")).unwrap();
        chain
            .write("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"low\", \"middle\", \"top\"]\n");
        for (name, below) in [("low", None), ("middle", Some("low")), ("top", Some("middle"))] {
            let below = below.map_or(String::new(), |below| format!("{below}.path = \"../{below}\"\n"));
            let manifest = format!(
                "[package]\nname = \"{name}\"\nedition = \"2024\"\nlinks = \"{name}\"\n[dependencies]\n{below}[build-dependencies]\nort-build.path = {own:?}\n"
            );
            chain.write(&format!("{name}/Cargo.toml"), &manifest);
            chain.write(&format!("{name}/build.rs"), BUILD_SCRIPT);
        }
        chain.write("low/src/lib.rs", "");
        chain.write("middle/src/lib.rs", "pub const CODE_HASH: &str = env!(\"ORT_CODE_HASH\");");
        let main = "fn main() { println!(\"{} {}\", middle::CODE_HASH, env!(\"ORT_CODE_HASH\")); }";
        chain.write("top/src/main.rs", main);
        chain
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs::write(self.path(path), text).unwrap();
    }

    /// Builds the chain and returns the code hashes of `middle` and `top`.
    fn hashes(&self) -> [String; 2] {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["run", "--quiet", "--offline", "--package", "top"]).current_dir(self.path("."));
        // The caller's settings of a build must not reach this one.
        cargo.env("CARGO_TARGET_DIR", self.path("target")).env_remove("RUSTFLAGS");
        let output = cargo.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let hashes: Vec<String> =
            String::from_utf8(output.stdout).unwrap().split_whitespace().map(str::to_owned).collect();
        hashes.try_into().unwrap()
    }
}

#[test]
fn a_change_of_any_crate_changes_the_hashes_above_it() {
    let chain = Chain::new();
    let [middle, top] = chain.hashes();
    assert_ne!(middle, top);
    chain.write("low/src/lib.rs", "// Packs in another layout.");
    let [new_middle, new_top] = chain.hashes();
    assert!(new_middle != middle && new_top != top, "a crate two levels below");
    chain.write("top/src/new.rs", "");
    let [same_middle, newer_top] = chain.hashes();
    assert_eq!(same_middle, new_middle, "a crate above decides nothing below");
    assert_ne!(newer_top, new_top);
    chain.write("low/src/lib.rs", "");
    let [old_middle, _] = chain.hashes();
    assert_eq!(old_middle, middle, "the same code has the same hash");
}
