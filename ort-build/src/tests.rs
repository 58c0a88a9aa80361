//! Tests of what a code hash covers.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use super::{Code, dependency_hashes};

/// Writes a package with a lock file in the folder above it, as in a workspace.
fn package(workspace: &Path) -> std::path::PathBuf {
    let package = workspace.join("lower");
    fs::create_dir_all(package.join("src/inner")).unwrap();
    fs::write(workspace.join("Cargo.lock"), "lock").unwrap();
    fs::write(package.join("Cargo.toml"), "manifest").unwrap();
    fs::write(package.join("src/lib.rs"), "code").unwrap();
    fs::write(package.join("src/inner/mod.rs"), "more").unwrap();
    package
}

fn hash(package: &Path) -> String {
    Code::of(package, Vec::new()).unwrap().hash().unwrap()
}

fn error_of(package: &Path) -> String {
    Code::of(package, Vec::new()).and_then(|code| code.hash()).unwrap_err().to_string()
}

#[test]
fn every_file_and_its_name_change_the_hash() {
    let workspace = tempfile::tempdir().unwrap();
    let package = package(workspace.path());
    let mut seen = vec![hash(&package)];
    assert_eq!(seen, [hash(&package)]);
    let mut differs = |why| {
        let hash = hash(&package);
        assert!(!seen.contains(&hash), "{why}");
        seen.push(hash);
    };
    for file in ["Cargo.toml", "src/lib.rs", "src/inner/mod.rs", "../Cargo.lock"] {
        fs::write(package.join(file), "changed").unwrap();
        differs(file);
    }
    fs::rename(package.join("src/inner/mod.rs"), package.join("src/inner/other.rs")).unwrap();
    differs("another name");
    fs::write(package.join("src/new.wgsl"), "").unwrap();
    differs("an empty file");
}

#[test]
fn a_checkout_in_another_folder_is_the_same_code() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [one, other] = [package(one.path()), package(other.path())];
    assert_eq!(hash(&one), hash(&other));
    let places = Code::of(&one, Vec::new()).unwrap().places;
    assert_eq!(places, ["Cargo.toml", "src", "../Cargo.lock"].map(std::path::PathBuf::from));
}

#[test]
fn a_packaged_crate_has_a_lock_file_of_its_own() {
    let workspace = tempfile::tempdir().unwrap();
    let package = package(workspace.path());
    fs::write(package.join("Cargo.lock"), "its own").unwrap();
    let own = hash(&package);
    fs::write(workspace.path().join("Cargo.lock"), "another program's").unwrap();
    assert_eq!(hash(&package), own);
    fs::write(package.join("Cargo.lock"), "newer").unwrap();
    assert_ne!(hash(&package), own);
}

#[test]
fn a_missing_file_is_an_error_that_names_it() {
    let workspace = tempfile::tempdir().unwrap();
    let package = package(workspace.path());
    fs::remove_dir_all(package.join("src")).unwrap();
    assert!(error_of(&package).contains("src: "), "{}", error_of(&package));
    fs::create_dir(package.join("src")).unwrap();
    fs::remove_file(package.join("Cargo.toml")).unwrap();
    assert!(error_of(&package).contains("Cargo.toml: "), "{}", error_of(&package));
    fs::write(package.join("Cargo.toml"), "").unwrap();
    fs::remove_file(workspace.path().join("Cargo.lock")).unwrap();
    assert!(error_of(&package).contains("no Cargo.lock in "), "{}", error_of(&package));
}

#[test]
fn hashes_of_dependencies_change_the_hash() {
    let workspace = tempfile::tempdir().unwrap();
    let package = package(workspace.path());
    let hash = |alloc, core| {
        let variables = [
            ("DEP_ORT_CORE_CODE_HASH", core),
            ("PATH", "/bin"),
            ("DEP_ORT_ALLOC_CODE_HASH", alloc),
            ("DEP_Z_ROOT", "/z"),
        ];
        let dependencies = dependency_hashes(variables);
        assert_eq!(dependencies.len(), 2);
        Code::of(&package, dependencies).unwrap().hash().unwrap()
    };
    let hashes =
        [hash("1", "2"), hash("2", "1"), hash("12", ""), hash("1", "3"), super::tests::hash(&package)];
    for (index, one) in hashes.iter().enumerate() {
        assert!(!hashes.iter().skip(index + 1).any(|other| other == one), "{hashes:?}");
    }
}
