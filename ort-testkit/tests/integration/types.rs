//! Every operator of the standard runs on the CPU with every type that its schema lists.

use ort_core::Result;
use ort_core::spec::Registry;
use ort_ep_cpu as _;
use ort_testkit::Target;
use ort_testkit::sample::{Answer, Binding, Sample, bindings, coverage};

/// Operators that are not asked, with the reason.
const NOT_ASKED: &[(&str, &str)] = &[
    ("Constant", "it becomes a constant of the graph when it is loaded"),
    ("DynamicSlice", "it is replaced by Slice when it is loaded"),
    ("Gradient", "it is expanded into other operators before any provider is asked"),
    ("Scatter", "it is replaced by ScatterElements when it is loaded"),
    ("Upsample", "it is replaced by Resize when it is loaded"),
];

/// Operators with types that no provider takes yet, with the reason. One that takes them all must
/// not stand here.
const GAPS: &[(&str, &str)] = &[];

/// Domains of the standard whose operators all have samples.
const DOMAINS: [&str; 3] = ["", "ai.onnx.preview", "ai.onnx.preview.training"];

#[test]
fn the_cpu_takes_every_type_of_every_operator() -> Result<()> {
    let devices = Target::cpu()?.devices;
    let samples = Sample::all()?;
    let mut problems = Vec::new();
    for spec in Registry::global()?.records().iter().filter(|spec| DOMAINS.contains(&spec.domain)) {
        if NOT_ASKED.iter().any(|(name, _)| *name == spec.name) {
            continue;
        }
        let own: Vec<&Sample> = samples.iter().filter(|sample| std::ptr::eq(sample.spec, *spec)).collect();
        let coverage = coverage(&own, &devices);
        let refused = coverage.variables.iter().flat_map(|(name, answers)| {
            let refused = answers.iter().filter_map(|(choice, why)| Some((choice, why.as_ref()?)));
            refused.map(move |(choice, why)| format!("{} with {name} {}: {why}", spec.name, choice.name()))
        });
        let mut found: Vec<String> = refused.chain(coverage.refusal.clone()).collect();
        if !coverage.kernel && !coverage.lowered {
            let why = coverage.problem.unwrap_or_else(|| "it has no sample".to_string());
            found.push(format!("{}: nothing runs it: {why}", spec.name));
        }
        match (GAPS.iter().any(|(name, _)| *name == spec.name), found.is_empty()) {
            (true, true) => problems.push(format!("{} is a gap, but it takes every type", spec.name)),
            (false, _) => problems.extend(found),
            (true, false) => {}
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// Types whose runs must fail, with the reason. One that runs must not stand here.
const NOT_RUN: &[(&str, &[&str], &str)] = &[
    ("Col2Im", &["string"], "overlaps are added up"),
    ("GridSample", &["string"], "the sample interpolates"),
    ("ImageDecoder", &["uint8"], "the sample is no image"),
    ("Resize", &["string"], "the sample interpolates"),
    ("TfIdfVectorizer", &["string"], "the sample's pool holds integers"),
];

#[test]
fn the_cpu_runs_what_it_takes() -> Result<()> {
    let target = Target::cpu()?;
    let (mut runs, mut problems) = (0, Vec::new());
    for sample in Sample::all()?.iter().filter(|sample| DOMAINS.contains(&sample.spec.domain)) {
        let known = NOT_RUN.iter().find(|(name, ..)| *name == sample.spec.name);
        let must_fail: &[&str] = known.map_or(&[], |(_, types, _)| types);
        let own = sample.own_types();
        // One variable at a time: the choices of others that go with it are asked for above.
        for binding in one_by_one(sample, &own) {
            if !matches!(sample.ask(&binding, &target.devices), Answer::Kernel | Answer::Lowered) {
                continue;
            }
            runs += 1;
            let fails = binding.iter().any(|(_, choice)| must_fail.contains(&choice.name().as_str()));
            let problem = match (sample.run(&binding, &target), fails) {
                (Ok(_), false) | (Err(_), true) => continue,
                (Ok(_), true) => "it is listed as failing, but it runs".to_string(),
                (Err(problem), false) => problem.to_string(),
            };
            let types: Vec<String> =
                binding.iter().map(|(name, choice)| format!("{name} {}", choice.name())).collect();
            problems.push(format!("{} with {}: {problem}", sample.spec.name, types.join(", ")));
        }
    }
    assert!(problems.is_empty(), "{} of {runs} runs fail:\n{}", problems.len(), problems.join("\n"));
    assert!(runs > 1500, "only {runs} runs");
    Ok(())
}

fn one_by_one(sample: &Sample, own: &Binding) -> Vec<Binding> {
    let variables = sample.variables();
    let mut found: Vec<Binding> = Vec::new();
    for (name, choices) in &variables {
        let of_one = bindings(&[(*name, choices.clone())], own);
        found.extend(of_one.into_iter().map(|one| {
            let chosen =
                |variable: &str| one.iter().find(|(name, _)| *name == variable).map(|(_, choice)| *choice);
            own.iter().map(|&(variable, kept)| (variable, chosen(variable).unwrap_or(kept))).collect()
        }));
        // And all variables at that one type, as operators want that move from one variable to
        // another.
        for &choice in choices {
            let may = |variable: &str| {
                variables.iter().any(|(name, choices)| *name == variable && choices.contains(&choice))
            };
            found.push(
                own.iter().map(|&(other, kept)| (other, if may(other) { choice } else { kept })).collect(),
            );
        }
    }
    if found.is_empty() {
        found.push(Vec::new());
    }
    found
}
