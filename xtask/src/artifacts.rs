//! The artifacts of a build, parsed from `cargo build --message-format=json`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;

/// A crate, test or example that cargo built or found up to date.
#[derive(Debug)]
pub(crate) struct Artifact {
    /// The target's name.
    pub(crate) name: String,
    /// The kinds of the target: `lib`, `bin`, `test`, `example` and others.
    kinds: Vec<String>,
    /// Whether it was built with the test harness.
    pub(crate) is_test: bool,
    /// The folder of its package.
    pub(crate) package: PathBuf,
    /// The executable, if it is one.
    pub(crate) executable: Option<PathBuf>,
    /// All files that were built for it.
    pub(crate) files: Vec<PathBuf>,
}

impl Artifact {
    /// Whether it is an example.
    pub(crate) fn is_example(&self) -> bool {
        self.kinds.iter().any(|kind| kind == "example")
    }
}

/// One message of cargo's output.
#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Parses cargo's messages, one a line.
pub(crate) fn artifacts(messages: &str) -> Result<Vec<Artifact>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: Message = serde_json::from_str(line).context("cannot read what cargo printed")?;
        // Messages about warnings or the build's end lack some of these.
        let (Some(target), Some(profile), Some(manifest)) =
            (message.target, message.profile, message.manifest_path)
        else {
            continue;
        };
        // Build scripts report a target and a manifest too, but build nothing that we want.
        if message.reason != "compiler-artifact" {
            continue;
        }
        found.push(Artifact {
            name: target.name,
            kinds: target.kind,
            is_test: profile.test,
            package: manifest.parent().map(PathBuf::from).unwrap_or_default(),
            executable: message.executable,
            files: message.filenames,
        });
    }
    Ok(found)
}
