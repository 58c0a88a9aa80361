//! The check that loops over vectors contain their instructions.
//!
//! A function is compiled for AVX2, AVX-512 or NEON only if it says so. A closure in it does not,
//! and neither does a function of the standard library that takes the closure, such as
//! `<[T; N]>::map`. If the compiler does not inline it, each intrinsic in it becomes a call, whose
//! operands go through memory. The library then contains the intrinsic as a function.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, bail};

use crate::artifacts::artifacts;
use crate::workspace::{Workspace, capture};

/// The crates that are checked begin with this.
const CRATES: &str = "ort_cpu_";

/// What the mangled name of each intrinsic contains: its crate and its module.
const INTRINSIC: &[u8] = b"4core9core_arch";

/// Fails if a library of the CPU provider, built in release, calls an intrinsic as a function.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut command = workspace.cargo();
    command.args(["build", "--release", "--quiet", "--message-format=json", "--package", "ort-cli"]);
    let libraries: Vec<_> = artifacts(&capture(&mut command)?)?
        .into_iter()
        .filter(|artifact| artifact.name.starts_with(CRATES))
        .flat_map(|artifact| artifact.files)
        .filter(|path| path.extension().is_some_and(|own| own == "rlib"))
        .collect();
    if libraries.is_empty() {
        bail!("cargo built no library whose name begins with {CRATES}");
    }
    let mut found = Vec::new();
    for path in libraries {
        let library = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let names = intrinsics(&library);
        if !names.is_empty() {
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            found.push(format!("{} calls {names}", path.display()));
        }
    }
    if !found.is_empty() {
        bail!(
            "intrinsics that are not inlined; make the closures that contain them functions with \
             #[inline(always)], or loops:\n{}",
            found.join("\n")
        );
    }
    Ok(())
}

/// Returns the mangled names of the intrinsics in the symbol tables of a library, from the module
/// on.
fn intrinsics(library: &[u8]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for at in memchr::memmem::find_iter(library, INTRINSIC) {
        let rest = library.get(at + INTRINSIC.len()..).unwrap_or_default();
        let end = rest.iter().position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
        let name = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
        names.insert(String::from_utf8_lossy(name).into_owned());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intrinsics_are_found_by_their_module() {
        let names = b"\0_RNvNtNtNtCs1_4core9core_arch3x863avx15__mm256_loadu_ps\0_RNvCs1_4core3ptr\0";
        assert_eq!(intrinsics(names), BTreeSet::from(["3x863avx15__mm256_loadu_ps".to_owned()]));
        assert_eq!(intrinsics(b"4core9core_arc"), BTreeSet::new());
    }
}
