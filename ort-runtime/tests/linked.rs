//! Each cargo feature of a provider links exactly that provider.

use ort_runtime::ep;

/// The provider that each feature brings.
const PROVIDERS: &[(&str, bool)] =
    &[("cpu", cfg!(feature = "cpu")), ("cuda", cfg!(feature = "cuda")), ("wgpu", cfg!(feature = "wgpu"))];

#[test]
fn the_providers_are_those_of_the_features() {
    let expected: Vec<&str> = PROVIDERS.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let linked: Vec<&str> = ep::providers().iter().map(|provider| provider.name()).collect();
    assert_eq!(linked, expected);
}

#[test]
fn a_provider_that_is_not_linked_is_an_error_that_lists_those_that_are() {
    let problem = ep::provider("abacus").err().map(|problem| problem.to_string()).unwrap_or_default();
    assert!(problem.contains("no execution provider 'abacus'"), "{problem}");
    let (_, listed) = problem.split_once("the providers of this build are").unwrap_or_default();
    for (name, on) in PROVIDERS {
        assert_eq!(listed.contains(name), *on, "{problem}");
        assert_eq!(ep::provider(name).is_ok(), *on);
    }
}

#[test]
fn a_provider_of_another_build_is_named_with_its_feature() {
    let refused =
        |name: &str| ep::provider(name).err().map(|problem| problem.to_string()).unwrap_or_default();
    for (name, on) in PROVIDERS {
        let feature = format!("build with the cargo feature `{name}`");
        if !on {
            let problem = refused(name);
            assert!(problem.contains(&format!("no execution provider '{name}' in this build")), "{problem}");
            assert!(problem.contains(&feature) && !problem.contains("did you mean"), "{problem}");
        }
        for other in [format!("{name}s"), name.to_uppercase()] {
            let problem = refused(&other);
            assert!(problem.contains(&format!("did you mean '{name}'?")), "{problem}");
            assert_eq!(problem.contains(&feature), !on, "{problem}");
        }
    }
    let theirs = [
        ("CPUExecutionProvider", "cpu"),
        ("CUDAExecutionProvider", "cuda"),
        ("WebGpuExecutionProvider", "wgpu"),
    ];
    for (name, own) in theirs {
        let problem = refused(name);
        assert!(problem.contains(&format!("did you mean '{own}'?")), "{problem}");
    }
}
