//! What a build made, as `cargo build --message-format=json` tells it.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;

/// A crate, test or example that cargo built or found built.
#[derive(Debug)]
pub(crate) struct Artifact {
    /// The target's name.
    pub(crate) name: String,
    /// What the target is: `lib`, `bin`, `test`, `example` and others.
    kinds: Vec<String>,
    /// Whether it has the harness of tests.
    pub(crate) is_test: bool,
    /// The folder of its package.
    pub(crate) package: PathBuf,
    /// The program, where it is one.
    pub(crate) executable: Option<PathBuf>,
    /// All that was made of it.
    pub(crate) files: Vec<PathBuf>,
}

impl Artifact {
    /// Whether it is an example.
    pub(crate) fn is_example(&self) -> bool {
        self.kinds.iter().any(|kind| kind == "example")
    }
}

/// A line of what cargo says of a build.
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

/// Reads what cargo printed.
pub(crate) fn artifacts(messages: &str) -> Result<Vec<Artifact>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: Message = serde_json::from_str(line).context("cannot read what cargo printed")?;
        let (Some(target), Some(profile), Some(manifest)) =
            (message.target, message.profile, message.manifest_path)
        else {
            continue;
        };
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
