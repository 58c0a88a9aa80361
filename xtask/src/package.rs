//! `cargo xtask package`: what `cargo publish` would upload, without compiling it.
//!
//! All crates are packaged together, so that cargo takes the versions of each other from their
//! manifests and needs no registry.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::shared_build;
use crate::table;
use crate::workspace::{CrateTarget, Package, Workspace, capture, run as run_command};

/// The files that each package has.
const REQUIRED_FILES: [&str; 4] = ["Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md"];

/// The largest package that crates.io takes, and the crates for which it has to raise this limit.
const MAX_BYTES: u64 = 10 << 20;
/// Half of the kernels of this crate would fit.
const LARGER: [&str; 1] = ["ort-ep-cuda"];

/// The crate with the build scripts' code hash.
const CODE_HASHES: &str = "ort-build";

/// The kinds of targets that a package may leave out.
const DEVELOPMENT: [&str; 3] = ["bench", "example", "test"];

/// What marks a file that is part of the code: its path follows, in quotes.
const INCLUDES: [&str; 4] = ["include_str!(\"", "include_bytes!(\"", "include!(\"", "#[path = \""];

/// Packages all crates to `target/package` and checks their manifests and contents.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let published: Vec<&Package> =
        workspace.packages.iter().filter(|package| package.is_published()).collect();
    let mut problems: Vec<String> = published.iter().flat_map(|package| missing_metadata(package)).collect();
    problems.extend(missing_code_hashes(&workspace.packages));
    problems.extend(shared_build::differences(workspace)?);
    pack(workspace, &published)?;
    let mut rows = table::new(&["package", "files", "KiB"]);
    for package in &published {
        let files = list(workspace, package)?;
        // Cargo names the archive by crate and version.
        let archive = workspace.target.join(format!("package/{}-{}.crate", package.name, package.version));
        let bytes = fs::metadata(&archive).with_context(|| format!("no {}", archive.display()))?.len();
        rows.add_row([&package.name, &files.len().to_string(), &(bytes >> 10).to_string()]);
        problems.extend(missing_files(package, &files)?);
        if bytes > MAX_BYTES && !LARGER.contains(&package.name.as_str()) {
            problems.push(format!("{} has {bytes} bytes, and crates.io takes {MAX_BYTES}", package.name));
        }
    }
    println!("{rows}");
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(())
}

/// Packages the crates without compiling them. Cargo fails if a dependency has no version.
fn pack(workspace: &Workspace, packages: &[&Package]) -> Result<()> {
    let mut command = workspace.cargo();
    // `--no-verify` skips compiling, and `--allow-dirty` lets an uncommitted tree be checked.
    command.args(["package", "--quiet", "--no-verify", "--allow-dirty", "--offline"]);
    packages.iter().for_each(|package| {
        command.args(["--package", &package.name]);
    });
    run_command(&mut command)
}

/// Returns the paths in a package.
fn list(workspace: &Workspace, package: &Package) -> Result<BTreeSet<PathBuf>> {
    let mut command = workspace.cargo();
    command.args(["package", "--quiet", "--list", "--allow-dirty", "--offline", "--package", &package.name]);
    Ok(capture(&mut command)?.lines().map(PathBuf::from).collect())
}

/// Returns what a manifest does not say of its crate.
fn missing_metadata(package: &Package) -> Vec<String> {
    let entries = [
        ("a description", package.description.is_some()),
        ("a license", package.license.is_some()),
        ("a readme", package.readme.is_some()),
        ("keywords", !package.keywords.is_empty()),
        ("categories", !package.categories.is_empty()),
    ];
    let missing = entries.into_iter().filter(|(_, is_there)| !is_there);
    missing.map(|(what, _)| format!("{} has no {what}", package.name)).collect()
}

/// Returns the crates without a code hash below those with one. Their code would be missing from
/// the key of a compiled cache.
fn missing_code_hashes(packages: &[Package]) -> Vec<String> {
    let has_hash = |package: &Package| {
        // The hash goes to dependents through `links`, so one without it reaches none of them.
        package.links.as_ref() == Some(&package.name)
            && package.dependencies.iter().any(|other| other.is_build() && other.name == CODE_HASHES)
    };
    let mut problems = Vec::new();
    for package in packages.iter().filter(|package| has_hash(package)) {
        // Only normal dependencies are compiled into the crate.
        for below in package.dependencies.iter().filter(|dependency| dependency.is_normal()) {
            let lacks = |other: &&Package| other.name == below.name && !has_hash(other);
            if let Some(other) = packages.iter().find(lacks) {
                problems.push(format!(
                    "{} has no code hash, but {} has one and depends on it: see {CODE_HASHES}/src/lib.rs",
                    other.name, package.name
                ));
            }
        }
    }
    problems
}

/// Returns the files that a package needs and has not.
fn missing_files(package: &Package, files: &BTreeSet<PathBuf>) -> Result<Vec<String>> {
    let folder = package.folder();
    let mut problems: Vec<String> = Vec::new();
    let mut require = |file: &Path, by: &str| {
        if !files.contains(file) {
            problems.push(format!("{by} needs {}, which is not in the package", file.display()));
        }
    };
    REQUIRED_FILES.iter().for_each(|file| require(Path::new(file), &package.name));
    // Tests and examples that need a crate for development stay out.
    let is_needed =
        |target: &&CrateTarget| !target.kinds.iter().any(|kind| DEVELOPMENT.contains(&kind.as_str()));
    for target in package.targets.iter().filter(is_needed) {
        require(target.src_path.strip_prefix(folder).unwrap_or(&target.src_path), &package.name);
    }
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "rs")) {
        let path = folder.join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        included(file, &text).iter().for_each(|needed| require(needed, &path.display().to_string()));
    }
    Ok(problems)
}

/// Returns the files that a source file includes by a literal path, from the package's folder.
fn included(file: &Path, text: &str) -> Vec<PathBuf> {
    let parent = file.parent().unwrap_or(Path::new(""));
    let paths = INCLUDES.iter().flat_map(|mark| text.split(mark).skip(1));
    paths.filter_map(|rest| rest.split_once('"')).map(|(path, _)| resolve(&parent.join(path))).collect()
}

/// Removes `..` with the folder before it. One that leaves the package stays.
fn resolve(path: &Path) -> PathBuf {
    let mut resolved = PathBuf::new();
    for component in path.components() {
        let is_inside = matches!(resolved.components().next_back(), Some(Component::Normal(_)));
        if component == Component::ParentDir && is_inside {
            resolved.pop();
        } else {
            resolved.push(component);
        }
    }
    resolved
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    fn package(name: &str, has_hash: bool, dependencies: &[&str]) -> Package {
        let dependency = |name: &str, kind: Option<&str>| Dependency {
            name: name.to_owned(),
            kind: kind.map(str::to_owned),
        };
        let mut all: Vec<Dependency> = dependencies.iter().map(|name| dependency(name, None)).collect();
        all.push(dependency("ort-testkit", Some("dev")));
        if has_hash {
            all.push(dependency(CODE_HASHES, Some("build")));
        }
        Package {
            name: name.to_owned(),
            links: has_hash.then(|| name.to_owned()),
            dependencies: all,
            ..Package::default()
        }
    }

    #[test]
    fn code_below_a_code_hash_has_one() {
        let testkit = || package("ort-testkit", false, &[]);
        let good = [package("low", true, &["serde"]), package("top", true, &["low"]), testkit()];
        assert_eq!(missing_code_hashes(&good), Vec::<String>::new());
        let bad = [package("low", false, &[]), package("top", true, &["low"]), testkit()];
        assert!(missing_code_hashes(&bad)[0].starts_with("low has no code hash, but top has one"));
        let above = [package("low", true, &[]), package("facade", false, &["low"]), testkit()];
        assert_eq!(missing_code_hashes(&above), Vec::<String>::new());
    }

    #[test]
    fn included_files_are_found_from_the_package_folder() {
        let text = "include_str!(\"x.wgsl\"); #[path = \"../tests/y.rs\"] mod y; include_bytes!(concat!(1));";
        let found = included(Path::new("src/a/b.rs"), text);
        assert_eq!(found, [Path::new("src/a/x.wgsl"), Path::new("src/tests/y.rs")]);
        assert_eq!(resolve(Path::new("src/../../other/z.rs")), Path::new("../other/z.rs"));
    }

    #[test]
    fn a_package_needs_its_licences_build_script_and_included_files() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("src")).unwrap();
        fs::write(folder.path().join("src/lib.rs"), "const X: &str = include_str!(\"../../x\");").unwrap();
        let target = |kind: &str, path: &str| CrateTarget {
            kinds: vec![kind.to_owned()],
            src_path: folder.path().join(path),
        };
        let package = Package {
            name: "a".to_owned(),
            manifest_path: folder.path().join("Cargo.toml"),
            targets: vec![target("custom-build", "../build.rs"), target("test", "tests/left_out.rs")],
            ..Package::default()
        };
        let files = ["Cargo.toml", "LICENSE-MIT", "README.md", "src/lib.rs"].map(PathBuf::from).into();
        let problems = missing_files(&package, &files).unwrap().join("\n");
        let needed = ["LICENSE-APACHE", "build.rs", "../x"];
        assert!(needed.iter().all(|file| problems.contains(file)), "{problems}");
        assert_eq!(problems.lines().count(), needed.len());
    }

    #[test]
    fn metadata_that_a_manifest_lacks_is_named() {
        let missing = missing_metadata(&Package { name: "a".to_owned(), ..Package::default() });
        assert_eq!(missing.len(), 5);
        assert_eq!(missing[3], "a has no keywords");
    }
}
