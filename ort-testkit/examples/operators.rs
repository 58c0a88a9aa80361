//! Prints as JSON what each operator of the registry is and which types each provider takes: what
//! `cargo xtask ops` makes its page of.

use std::sync::Arc;

use ort_core::ep::{Device, providers};
use ort_core::spec::{AttrKind, OpSpec, Registry, Types};
use ort_core::{Result, error};
use ort_ep_cpu as _;
use ort_testkit::ClaimingDevice;
use ort_testkit::sample::{Coverage, Sample, coverage};
use serde_json::{Value as Json, json};

fn main() -> Result<()> {
    let mut devices: Vec<(&str, Vec<Arc<dyn Device>>)> = Vec::new();
    // The opaque provider is for tests only; what wgpu takes follows from its kernels, whatever
    // adapters are here.
    let own = |name: &str| name != "opaque" && name != "wgpu";
    for provider in providers().into_iter().filter(|provider| own(provider.name())) {
        if provider.devices().is_ok_and(|found| !found.is_empty()) {
            devices.push((provider.name(), vec![provider.open(0, &Default::default())?]));
        }
    }
    devices.push(("wgpu", vec![ClaimingDevice::new("wgpu", ort_ep_wgpu::kernel_table())]));
    let samples = Sample::all()?;
    let mut operators = Vec::new();
    for spec in Registry::global()?.records() {
        let own: Vec<&Sample> = samples.iter().filter(|sample| std::ptr::eq(sample.spec, *spec)).collect();
        let mut answers = serde_json::Map::new();
        for (name, devices) in &devices {
            answers.insert(name.to_string(), answer(spec, &coverage(&own, devices)));
        }
        operators.push(json!({
            "domain": spec.domain,
            "op": spec.name,
            "since": spec.since,
            "view": spec.view.is_some(),
            "lower": spec.lower.is_some(),
            "gradient": spec.gradient().to_string(),
            "control": spec.attrs.iter().any(|attr| attr.kind == AttrKind::Graph),
            "replaced": spec.upgrades.iter().any(|upgrade| upgrade.before == i64::MAX),
            "constant": spec.domain.is_empty() && spec.name == "Constant",
            "sampled": !own.is_empty(),
            "providers": answers,
        }));
    }
    let text = serde_json::to_string_pretty(&operators).map_err(|problem| error!(Fail, "{problem}"))?;
    println!("{text}");
    Ok(())
}

/// What one provider takes: by type variable the types that the record allows, by whether they run.
fn answer(spec: &OpSpec, coverage: &Coverage) -> Json {
    let variables = spec.types.iter().map(|var| {
        let asked = coverage.variables.iter().find(|(name, _)| *name == var.name);
        let asked = asked.map_or(&[][..], |(_, answers)| answers);
        let names = |refused: bool| -> Vec<String> {
            let chosen = asked.iter().filter(|(_, refusal)| refusal.is_some() == refused);
            chosen.map(|(choice, _)| choice.name()).collect()
        };
        json!({ "name": var.name, "allowed": count(&var.types), "runs": names(false), "refused": names(true) })
    });
    json!({ "kernel": coverage.kernel, "lowered": coverage.lowered, "refusal": coverage.refusal, "problem": coverage.problem, "variables": variables.collect::<Vec<_>>() })
}

fn count(types: &Types) -> usize {
    let sets = [types.tensor, types.sequence, types.optional, types.optional_sequence, types.sparse];
    sets.iter().map(|set| set.len()).sum::<usize>() + types.maps.len()
}
