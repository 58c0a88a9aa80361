//! Operators that have a kernel and a decomposition run both ways, with equal results.
//!
//! The decomposition is forced by a device that is the CPU without the operator's kernels.

use std::collections::BTreeMap;

use crate::both_ways_support::operators;
use ort_core::dtype::DType;
use ort_core::spec::{Arity, Param};
use ort_core::tensor::{Tolerance, Value, compare};
use ort_core::{Result, Within, ensure};
use ort_testkit::Target;
use ort_testkit::sample::{Answer, Binding, Choice, Sample, bindings};

/// How far two orders of rounding may be apart. Narrow floats are rounded once in a kernel, and by
/// each part.
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
            for types in bindings(&variables(sample), &sample.own_types()) {
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

/// The variables that are chosen for all operands alike; operands of mixed types keep those they
/// are written with.
fn variables(sample: &Sample) -> Vec<(&'static str, Vec<Choice>)> {
    let mut variables = sample.variables();
    let mixed = |param: &Param| matches!(param.arity, Arity::Variadic { homogeneous: false, .. });
    variables.retain(|(name, _)| !sample.spec.inputs.iter().any(|param| mixed(param) && param.ty == *name));
    variables
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
        let tolerance = Tolerance { absolute: tolerance.absolute * largest(expected)?.max(1.0), ..tolerance };
        compare(actual, expected, tolerance).within(|| format!("output {index}"))
    })
}

/// The largest magnitude of a tensor's elements: where large parts cancel, the small rest carries
/// the rounding of the parts.
fn largest(value: &Value) -> Result<f64> {
    let Value::Tensor(tensor) = value else { return Ok(0.0) };
    if !tensor.dtype().is_float() {
        return Ok(0.0);
    }
    let finite = tensor.to_doubles()?.into_iter().map(f64::abs).filter(|element| element.is_finite());
    Ok(finite.fold(0.0, f64::max))
}
