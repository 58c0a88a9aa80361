//! Operators that have a kernel and a decomposition run both ways, with equal results.
//!
//! The decomposition is forced by a device that is the CPU without the operator's kernels.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ort_core::dtype::DType;
use ort_core::spec::{OpSpec, Registry};
use ort_core::tensor::{Tolerance, Value, compare};
use ort_core::{Result, Within, ensure, error};
use ort_ep_cpu::CpuKernel;
use ort_testkit::sample::{Answer, Binding, Sample, bindings};
use ort_testkit::{Target, read_case};

/// Operators whose decomposition is no second way, with the reason.
const NO_SECOND_WAY: &[(&str, &str)] =
    &[("Attention", "it is made of casts and itself, for types that its kernel does not take")];

/// The operators of the registry that the CPU has kernels for and that can be decomposed.
fn operators() -> Result<Vec<&'static OpSpec>> {
    let kernels: BTreeSet<(&str, &str)> = ort_ep_cpu::inventory::iter::<CpuKernel>
        .into_iter()
        .map(|kernel| (kernel.0.domain, kernel.0.op))
        .collect();
    let records = Registry::global()?.records().iter().copied();
    let both = records.filter(|spec| spec.lower.is_some() && kernels.contains(&(spec.domain, spec.name)));
    Ok(both.filter(|spec| !NO_SECOND_WAY.iter().any(|(name, _)| *name == spec.name)).collect())
}

/// How far two orders of rounding may be apart. Narrow floats are rounded once in a kernel, and by each part.
fn tolerance(types: &Binding) -> Tolerance {
    let of = |dtype: DType| match dtype {
        DType::F64 => 1e-12,
        DType::F16 => 5e-3,
        DType::BF16 => 4e-2,
        _ => 1e-5,
    };
    let widest = types.iter().map(|(_, choice)| of(choice.dtype)).fold(1e-12, f64::max);
    Tolerance { relative: widest, absolute: widest }
}

#[test]
fn kernels_and_decompositions_agree_on_random_elements() -> Result<()> {
    const SEEDS: u64 = 3;
    let (cpu, samples) = (Target::cpu()?, Sample::all()?);
    let (mut runs, mut problems) = (BTreeMap::new(), Vec::new());
    for spec in operators()? {
        let parts = cpu.without(&[spec]);
        let own: Vec<&Sample> = samples.iter().filter(|sample| std::ptr::eq(sample.spec, spec)).collect();
        for sample in own {
            for types in bindings(&sample.variables(), &sample.own_types()) {
                if sample.ask(&types, &cpu.devices) != Answer::Kernel {
                    continue;
                }
                for seed in 0..SEEDS {
                    *runs.entry(spec.name).or_insert(0) += 1;
                    if let Err(problem) = agree(sample, &types, seed, [&cpu, &parts]) {
                        problems.push(format!("{} with {types:?}, seed {seed}: {problem}", spec.name));
                    }
                }
            }
        }
        if !runs.contains_key(spec.name) {
            problems.push(format!("{} has a kernel and a decomposition, but no sample", spec.name));
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    assert!(runs.len() >= 7, "only these operators have both: {runs:?}");
    Ok(())
}

fn agree(sample: &Sample, types: &Binding, seed: u64, [cpu, parts]: [&Target; 2]) -> Result<()> {
    let answer = sample.ask(types, &parts.devices);
    ensure!(answer == Answer::Lowered, Fail, "without the kernel it is {answer:?}");
    let expected = sample.run_random(types, seed, cpu)?;
    let actual = sample.run_random(types, seed, parts)?;
    same(&actual, &expected, tolerance(types))
}

fn same(actual: &[Value], expected: &[Value], tolerance: Tolerance) -> Result<()> {
    ensure!(actual.len() == expected.len(), Fail, "{} outputs, expected {}", actual.len(), expected.len());
    let mut pairs = actual.iter().zip(expected).enumerate();
    pairs.try_for_each(|(index, (actual, expected))| {
        compare(actual, expected, tolerance).within(|| format!("output {index}"))
    })
}

/// The variable of the environment that names folders of cases, separated as in `PATH`.
const CASES: &str = "ORT_CASES";

/// Holds the decompositions against what the cases expect, in their tolerance; the kernels are by `ort test`.
#[test]
#[ignore = "needs folders of cases; cargo xtask conformance and cargo xtask reference run it"]
fn decompositions_pass_the_cases() -> Result<()> {
    let folders = std::env::var_os(CASES).ok_or_else(|| error!(InvalidArgument, "{CASES} is not set"))?;
    let (cpu, both) = (Target::cpu()?, operators()?);
    let (mut runs, mut problems) = (BTreeMap::new(), Vec::new());
    for folder in std::env::split_paths(&folders) {
        for case in cases(&folder)? {
            let found = decomposed(&case, &cpu, &both);
            let names = match found {
                Ok(names) => names,
                Err((names, problem)) => {
                    problems.push(format!("{}: {problem}", case.display()));
                    names
                }
            };
            names.into_iter().for_each(|name| *runs.entry(name).or_insert(0) += 1);
        }
    }
    println!("decomposed in cases: {runs:?}");
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    assert!(!runs.is_empty(), "no case has an operator with a kernel and a decomposition");
    Ok(())
}

fn cases(folder: &Path) -> Result<Vec<PathBuf>> {
    let problem = |problem: std::io::Error| error!(NoSuchFile, "{}: {problem}", folder.display());
    let mut cases: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(problem)?
        .map(|entry| Ok(entry.map_err(problem)?.path()))
        .collect::<Result<_>>()?;
    cases.retain(|case| case.join("model.onnx").is_file());
    cases.sort();
    Ok(cases)
}

type Names = Vec<&'static str>;

/// Runs a case with all such operators of its graph decomposed; those that there are.
fn decomposed(
    folder: &Path,
    cpu: &Target,
    both: &[&'static OpSpec],
) -> Result<Names, (Names, ort_core::Error)> {
    // A case that cannot be read is one that `ort test` reports.
    let Ok(case) = read_case(folder) else { return Ok(Vec::new()) };
    let nodes = &case.model.graph().nodes;
    let has = |spec: &&&'static OpSpec| nodes.iter().any(|node| std::ptr::eq(node.spec, **spec));
    let there: Vec<&'static OpSpec> = both.iter().filter(has).copied().collect();
    if there.is_empty() {
        return Ok(Vec::new());
    }
    let names: Names = there.iter().map(|spec| spec.name).collect();
    let outcome = cpu.without(&there).session(&case.model).and_then(|session| case.check(&session));
    outcome.map(|()| names.clone()).map_err(|problem| (names, problem))
}
