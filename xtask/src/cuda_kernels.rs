//! `cargo xtask cuda-kernels`: compiles the CUDA C of `ort-ep-cuda/cu` to the PTX of
//! `ort-ep-cuda/ptx`, and checks that the PTX is up to date.
//!
//! The PTX is committed, so that a build needs no CUDA toolkit. The file `SOURCES` beside it has
//! the hash of each family's sources, so that every test run detects stale PTX. The compiler is
//! deliberately an old one: newer drivers accept its PTX, but older drivers reject that of a newer
//! compiler.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use flate2::read::GzDecoder;

use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, run as run_command};

/// The compute capabilities that kernels are compiled for.
const COMPUTE: [&str; 3] = ["75", "80", "90"];
/// A further target that a source can choose: sm_90a code runs on compute capability 9.0 only.
const EXACT: &str = "90a";
/// The comment in a source's head that restricts its targets: `// compute: 80 90`.
const CHOICE: &str = "// compute:";
/// The targets in the table of docs/cuda/registers.md.
const DOCUMENTED: [&str; 3] = ["80", "90", EXACT];
/// Families whose kernels must not spill registers, because a spill would cost much of the run
/// time.
const WITHOUT_SPILLS: [&str; 7] =
    ["gemm", "conv", "attention", "integer", "nbits", "training_attention", "training_conv"];
/// The file of hashes beside the PTX.
const SOURCES: &str = "SOURCES";
/// The compiler script and its pinned packages: a change makes all PTX stale.
const COMPILER: [&str; 2] = ["python/compile_cuda.py", "python/cuda_requirements.txt"];

/// What to do.
#[derive(clap::Args, Default)]
pub(crate) struct CudaKernelsOptions {
    /// Compile and write nothing; fail if a hash does not match.
    #[arg(long, conflicts_with_all = ["all", "verify", "markdown"])]
    pub(crate) check: bool,
    /// Compile all families, not only stale ones.
    #[arg(long, conflicts_with_all = ["verify", "markdown"])]
    pub(crate) all: bool,
    /// Recompile everything and fail if the PTX differs; assemble it, and fail on register spills
    /// in kernels that must not spill.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Assemble, and print the table of docs/cuda/registers.md: the kernels that must not spill,
    /// on sm_80, sm_90 and sm_90a.
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// A family of kernels: one source and its targets.
struct Family {
    name: String,
    source: PathBuf,
    hash: String,
    compute: Vec<&'static str>,
}

impl Family {
    /// The name of its PTX file for a compute capability.
    fn file(&self, compute: &str) -> String {
        format!("{}_{compute}.ptx.gz", self.name)
    }

    /// The names of all its PTX files.
    fn files(&self) -> impl Iterator<Item = String> {
        self.compute.iter().map(|compute| self.file(compute))
    }

    /// Whether its kernels must not spill.
    fn is_without_spills(&self) -> bool {
        WITHOUT_SPILLS.iter().any(|name| self.name.starts_with(name))
    }
}

/// Compiles what is stale. With `check` it fails if anything is stale, with `verify` if PTX differs
/// from what its source compiles to.
pub(crate) fn run(workspace: &Workspace, options: &CudaKernelsOptions) -> Result<()> {
    let folder = workspace.root.join("ort-ep-cuda/ptx");
    let families = families(workspace)?;
    if options.check {
        return check(&families, &folder);
    }
    if !options.verify && !options.markdown {
        return compile_stale(workspace, &families, &folder, options.all);
    }
    check(&families, &folder)?;
    let python = Python::open_for_cuda(workspace)?;
    if options.verify {
        compile_again(workspace, &python, &families, &folder)?;
    }
    assemble(&python, &families, &folder, options.markdown)
}

/// Compiles the stale families, or all of them. The hashes are written after each family, so that a
/// compile error leaves only the remaining ones stale.
fn compile_stale(workspace: &Workspace, families: &[Family], folder: &Path, all: bool) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut known = read_sources(folder);
    // A family whose source was removed must leave the list, because `check` refuses unknown
    // names.
    known.retain(|name, _| families.iter().any(|family| family.name == *name));
    let stale: Vec<&Family> =
        families.iter().filter(|family| all || !is_fresh(family, &known, folder)).collect();
    if !stale.is_empty() {
        let python = Python::open_for_cuda(workspace)?;
        for (at, family) in stale.iter().enumerate() {
            println!("{} ({} of {})", family.name, at + 1, stale.len());
            compile(workspace, &python, family, folder)?;
            known.insert(family.name.clone(), entry(family, folder)?);
            write_sources(&known, folder)?;
        }
    }
    // Also if nothing was stale, because `retain` may have removed an entry.
    write_sources(&known, folder)?;
    println!("{} of {} families compiled", stale.len(), families.len());
    Ok(())
}

/// Fails if PTX differs from what its source compiles to.
fn compile_again(workspace: &Workspace, python: &Python, families: &[Family], folder: &Path) -> Result<()> {
    let again = tempfile::tempdir().context("no temporary folder")?;
    let mut count = 0;
    for family in families {
        compile(workspace, python, family, again.path())?;
        for name in family.files() {
            if read(folder.join(&name))? != read(again.path().join(&name))? {
                bail!("{name} is not what its source compiles to: run `cargo xtask cuda-kernels --all`");
            }
            count += 1;
        }
    }
    eprintln!("{count} files of PTX are what their sources compile to");
    Ok(())
}

/// Decompresses PTX. We compare the text because compressed bytes may differ between machines.
fn read(path: PathBuf) -> Result<String> {
    let cannot = || format!("cannot read {}", path.display());
    let mut text = String::new();
    GzDecoder::new(File::open(&path).with_context(cannot)?).read_to_string(&mut text).with_context(cannot)?;
    Ok(text)
}

/// Returns the families by name, each with the hash of everything that its PTX depends on.
fn families(workspace: &Workspace) -> Result<Vec<Family>> {
    let folder = workspace.root.join("ort-ep-cuda/cu");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|own| own == "cu"));
    paths.sort();
    let compiler = COMPILER.map(|path| workspace.own(path));
    paths
        .into_iter()
        .map(|source| {
            let mut hash = blake3::Hasher::new();
            // The set is sorted, so the hash does not depend on the order of the includes.
            for path in with_headers(&source)?.iter().chain(&compiler) {
                let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
                // The length separates the files, so that bytes moved from one to the next change
                // the hash.
                hash.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes);
            }
            let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let compute =
                chosen(&fs::read_to_string(&source)?).with_context(|| source.display().to_string())?;
            let hash = hash.finalize().to_hex().to_string();
            Ok(Family { name, source, hash, compute })
        })
        .collect()
}

/// Returns a source with the headers of its folder that it includes, transitively. A new header
/// that no source includes makes nothing stale.
fn with_headers(source: &Path) -> Result<BTreeSet<PathBuf>> {
    let (mut found, mut waiting) = (BTreeSet::new(), vec![source.to_owned()]);
    while let Some(path) = waiting.pop() {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        // Headers in angle brackets belong to the compiler's package, whose version is in
        // `COMPILER`.
        let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
        waiting.extend(included.map(|name| path.with_file_name(name)).filter(|own| !found.contains(own)));
        found.insert(path);
    }
    Ok(found)
}

/// Returns the targets of a source: those that its leading comment names, or all of [`COMPUTE`].
fn chosen(source: &str) -> Result<Vec<&'static str>> {
    let mut comments = source.lines().take_while(|line| line.starts_with("//"));
    let Some(choice) = comments.find_map(|line| line.strip_prefix(CHOICE)) else {
        return Ok(COMPUTE.to_vec());
    };
    let known = |word| COMPUTE.into_iter().chain([EXACT]).find(|compute| *compute == word);
    let compute: Option<Vec<&str>> = choice.split_whitespace().map(known).collect();
    match compute {
        Some(compute) if !compute.is_empty() => Ok(compute),
        _ => bail!("`{CHOICE}{choice}` must name some of {} {EXACT}", COMPUTE.join(" ")),
    }
}

fn compile(workspace: &Workspace, python: &Python, family: &Family, to: &Path) -> Result<()> {
    let mut command = python.script("compile_cuda.py");
    command.arg("ptx").arg(workspace.root.join("ort-ep-cuda/cu"));
    for compute in &family.compute {
        command.arg(&family.source).arg(compute).arg(to.join(family.file(compute)));
    }
    run_command(&mut command)
}

/// A family's line of hashes: that of its sources, then those of its PTX files.
fn entry(family: &Family, folder: &Path) -> Result<String> {
    let mut entry = family.hash.clone();
    for name in family.files() {
        let path = folder.join(name);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        // The hash of the PTX itself detects a file that was edited or merged by hand.
        entry = format!("{entry} {}", blake3::hash(&bytes).to_hex());
    }
    Ok(entry)
}

/// Whether the recorded hashes match the files; false if the PTX is missing.
fn is_fresh(family: &Family, known: &BTreeMap<String, String>, folder: &Path) -> bool {
    entry(family, folder).is_ok_and(|entry| known.get(&family.name) == Some(&entry))
}

fn read_sources(folder: &Path) -> BTreeMap<String, String> {
    // A missing list makes every family stale.
    let text = fs::read_to_string(folder.join(SOURCES)).unwrap_or_default();
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.map(|(name, hashes)| (name.to_owned(), hashes.to_owned())).collect()
}

fn write_sources(known: &BTreeMap<String, String>, folder: &Path) -> Result<()> {
    let lines = known.iter().map(|(name, hashes)| format!("{name} {hashes}\n"));
    fs::write(folder.join(SOURCES), lines.collect::<String>()).context("cannot write the hashes of sources")
}

/// Fails unless the PTX is up to date and the folder holds nothing else.
fn check(families: &[Family], folder: &Path) -> Result<()> {
    const HELP: &str = "run `cargo xtask cuda-kernels`";
    let known = read_sources(folder);
    for family in families {
        if !is_fresh(family, &known, folder) {
            bail!("the PTX of {} is stale: {HELP}", family.name);
        }
    }
    if let Some(name) = known.keys().find(|name| families.iter().all(|family| family.name != **name)) {
        bail!("{SOURCES} has {name}, which has no source: {HELP}");
    }
    let mut expected: Vec<String> = families.iter().flat_map(Family::files).collect();
    expected.push(SOURCES.to_owned());
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !expected.contains(&name) {
            bail!("{} has no source: remove it", folder.join(name).display());
        }
    }
    Ok(())
}

/// The resource usage that the assembler reports for a kernel and the functions that it calls.
#[derive(Default)]
struct Resources {
    kernel: String,
    sm: String,
    registers: u64,
    shared: u64,
    spill_stores: u64,
    spill_loads: u64,
    stack: u64,
}

impl Resources {
    fn spills(&self) -> bool {
        self.spill_stores + self.spill_loads > 0
    }

    fn row(&self) -> [String; 7] {
        let numbers = [self.registers, self.shared, self.spill_stores, self.spill_loads, self.stack];
        let [registers, shared, stores, loads, stack] = numbers.map(|number| number.to_string());
        [self.kernel.clone(), self.sm.clone(), registers, shared, stores, loads, stack]
    }
}

/// Assembles all PTX for its targets and prints the resources of all kernels, or of the documented
/// ones. Fails if a kernel spills that must not, or if the assembler serialises `wgmma`.
fn assemble(python: &Python, families: &[Family], folder: &Path, documented: bool) -> Result<()> {
    let mut rows =
        table::new(&["kernel", "sm", "registers", "shared bytes", "spill stores", "spill loads", "stack"]);
    let (mut count, mut spilling, mut serialized) = (0, Vec::new(), Vec::new());
    for family in families {
        let said = assembled(python, family, folder)?;
        serialized.extend(serialized_in(&said).map(str::to_owned));
        for resources in resources(&said) {
            count += 1;
            if family.is_without_spills() && resources.spills() {
                spilling.push(format!("{} on sm_{}", resources.kernel, resources.sm));
            }
            let is_documented = family.is_without_spills() && DOCUMENTED.contains(&resources.sm.as_str());
            if is_documented || !documented {
                rows.add_row(resources.row());
            }
        }
    }
    println!("{rows}");
    eprintln!("{count} kernels assemble");
    if !spilling.is_empty() {
        bail!("these kernels spill registers, give each thread less to hold: {}", spilling.join(", "));
    }
    if !serialized.is_empty() {
        bail!("products of warpgroups wait for each other in these kernels: {}", serialized.join(", "));
    }
    Ok(())
}

/// Returns the kernels for which the assembler serialises `wgmma`: "(C7515) Potential Performance
/// Loss: wgmma.mma_async instructions are serialized".
fn serialized_in(said: &str) -> impl Iterator<Item = &str> {
    let lines = said.lines().filter(|line| line.contains("wgmma.mma_async instructions are serialized"));
    // The name of the kernel is the last quoted part of the line.
    lines.map(|line| line.rsplit('\'').nth(1).unwrap_or(line))
}

/// Returns the output of `ptxas -v` for a family.
fn assembled(python: &Python, family: &Family, folder: &Path) -> Result<String> {
    let mut command = python.script("compile_cuda.py");
    command.arg("assemble");
    for compute in &family.compute {
        command.arg(folder.join(family.file(compute))).arg(compute);
    }
    let output = command.output().context("cannot run compile_cuda.py")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{} does not assemble:\n{said}{}", family.name, String::from_utf8_lossy(&output.stderr));
    }
    Ok(said)
}

/// Parses the output of `ptxas -v`. The functions that a kernel calls follow it with lines of their
/// own, and count towards the kernel.
fn resources(said: &str) -> Vec<Resources> {
    let (mut all, mut sm) = (Vec::<Resources>::new(), String::new());
    for line in said.lines() {
        if let Some(file) = line.strip_prefix("file ") {
            sm = file.split_whitespace().last().unwrap_or_default().to_owned();
        } else if line.contains("Compiling entry function") {
            // The line is `Compiling entry function 'NAME' for 'sm_80'`.
            let kernel = line.split('\'').nth(1).unwrap_or_default().to_owned();
            all.push(Resources { kernel, sm: sm.clone(), ..Resources::default() });
        } else if let Some(current) = all.last_mut() {
            // Registers are allocated once for the whole call tree, so its maximum counts; the rest
            // adds up.
            current.registers = current.registers.max(number(line, "registers"));
            current.shared += number(line, "bytes smem");
            current.spill_stores += number(line, "bytes spill stores");
            current.spill_loads += number(line, "bytes spill loads");
            current.stack += number(line, "bytes stack frame");
        }
    }
    all
}

/// Returns the number before `words` in a line, or 0.
fn number(line: &str, words: &str) -> u64 {
    // A line has several counts: `Used 40 registers, 1024 bytes smem`.
    let part = line.split(',').find_map(|part| part.trim_end().strip_suffix(words));
    part.and_then(|part| part.split_whitespace().last()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_lines_are_read() {
        let said = "file gemm_80 80
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm_f32' for 'sm_80'
ptxas info    : Function properties for gemm_f32
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, 16384 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function 'calls' for 'sm_80'
ptxas info    : Function properties for calls
    416 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers
ptxas info    : Function properties for _Z5heavyPf
    0 bytes stack frame, 416 bytes spill stores, 572 bytes spill loads
";
        let all = resources(said);
        let rows: Vec<[String; 7]> = all.iter().map(Resources::row).collect();
        assert_eq!(rows[0], ["gemm_f32", "80", "128", "16384", "4", "12", "8"]);
        assert_eq!(rows[1], ["calls", "80", "255", "0", "416", "572", "416"]);
        assert_eq!(rows.len(), 2);
        assert_eq!(serialized_in(said).count(), 0);
    }

    #[test]
    fn products_that_wait_for_each_other_are_named() {
        let said = "file gemm_warpgroups_f16_90a 90a
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage in the function 'gemm_warpgroups_small_nt_f16'
ptxas info    : 0 bytes gmem
";
        assert_eq!(serialized_in(said).collect::<Vec<_>>(), ["gemm_warpgroups_small_nt_f16"]);
    }

    #[test]
    fn a_source_chooses_what_it_is_for() {
        assert_eq!(chosen("// Products.\n\nint x;").unwrap(), COMPUTE);
        assert_eq!(chosen("// Products.\n// compute: 80 90\n").unwrap(), ["80", "90"]);
        assert_eq!(chosen("int x;\n// compute: 80\n").unwrap(), COMPUTE);
        assert_eq!(chosen("// Products of warpgroups.\n// compute: 90a\n").unwrap(), ["90a"]);
        let error = chosen("// compute: 60\n").unwrap_err().to_string();
        assert_eq!(error, "`// compute: 60` must name some of 75 80 90 90a");
    }

    #[test]
    fn what_is_stale_changed_or_stray_is_found() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        let family = Family {
            name: "gemm".to_owned(),
            source: PathBuf::new(),
            hash: "12".to_owned(),
            compute: vec!["80"],
        };
        let families = [family];
        let why = || check(&families, folder).unwrap_err().to_string();
        // Never compiled: no hash, and no PTX either.
        assert_eq!(why(), "the PTX of gemm is stale: run `cargo xtask cuda-kernels`");
        fs::write(folder.join("gemm_80.ptx.gz"), "mov").unwrap();
        let mut known = BTreeMap::from([("gemm".to_owned(), entry(&families[0], folder).unwrap())]);
        write_sources(&known, folder).unwrap();
        check(&families, folder).unwrap();
        fs::write(folder.join("gemm_75.ptx.gz"), "mov").unwrap();
        assert!(why().ends_with("gemm_75.ptx.gz has no source: remove it"));
        fs::remove_file(folder.join("gemm_75.ptx.gz")).unwrap();
        fs::write(folder.join("gemm_80.ptx.gz"), "add").unwrap();
        assert_eq!(why(), "the PTX of gemm is stale: run `cargo xtask cuda-kernels`");
        fs::write(folder.join("gemm_80.ptx.gz"), "mov").unwrap();
        known.insert("conv".to_owned(), "34".to_owned());
        write_sources(&known, folder).unwrap();
        assert_eq!(why(), "SOURCES has conv, which has no source: run `cargo xtask cuda-kernels`");
    }

    #[test]
    fn a_source_follows_from_what_it_includes_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        fs::write(place("gemm.cu"), "// Products.\n#include \"tiles.cuh\"\n#include <cuda_fp16.h>\n")
            .unwrap();
        fs::write(place("tiles.cuh"), "#pragma once\n#include \"common.cuh\"\n").unwrap();
        // Each includes the other, which `#pragma once` ends.
        fs::write(place("common.cuh"), "#pragma once\n#include \"tiles.cuh\"\n").unwrap();
        fs::write(place("codes.cuh"), "").unwrap();
        let own = ["common.cuh", "gemm.cu", "tiles.cuh"].map(place);
        assert_eq!(with_headers(&place("gemm.cu")).unwrap(), BTreeSet::from(own));
        fs::write(place("common.cuh"), "#include \"missing.cuh\"\n").unwrap();
        let why = with_headers(&place("gemm.cu")).unwrap_err().to_string();
        assert!(why.ends_with("missing.cuh"), "{why}");
    }
}
