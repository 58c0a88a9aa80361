//! The templates, in Rust and in C: they compute what the CPU does, in memory of their own that all
//! comes back.

use std::path::PathBuf;

use ort_runtime::ep::{ProviderOptions, load_provider, provider};
use ort_runtime::rewrite::Level;
use ort_runtime::{Model, Session, Value};

use crate::libraries::{built, compiled, inputs, model};

fn templates() -> Vec<(&'static str, PathBuf)> {
    let c = compiled("examples/provider-template-c/provider.c", "template_c", &[]);
    vec![("template", built("provider_template")), ("template-c", c)]
}

fn session(model: &Model, providers: &[&str]) -> Session {
    // Nothing is rewritten, so that the operators stay those of the templates.
    let builder = Session::builder(model).threads(1).opt_level(Level::Disabled);
    let builder = providers.iter().fold(builder, |builder, name| builder.provider(name));
    builder.build().unwrap_or_else(|problem| panic!("{providers:?}: {problem}"))
}

fn elements(outputs: &[(String, Value)]) -> Vec<f32> {
    let tensors = outputs.iter().map(|(_, value)| value.tensor().expect("a tensor"));
    tensors.flat_map(|tensor| tensor.view().as_slice::<f32>().expect("floats").to_vec()).collect()
}

#[test]
fn they_compute_what_the_cpu_does_and_say_which_nodes() {
    let model = model();
    let expected = session(&model, &["cpu"]);
    for (name, path) in templates() {
        let mixed = session(&model, &[&path.display().to_string(), "cpu"]);
        for rows in [1, 5, 2, 0] {
            let (ours, cpu) = (mixed.run(&inputs(rows)), expected.run(&inputs(rows)));
            let (ours, cpu) = (elements(&ours.expect("a run")), elements(&cpu.expect("a run")));
            assert_eq!(ours.len(), cpu.len());
            let apart = ours.iter().zip(&cpu).map(|(a, b)| (a - b).abs());
            // Unlike `f32::max`, `total_cmp` keeps a NaN.
            let apart = apart.max_by(f32::total_cmp).unwrap_or(0.0);
            assert!(apart < 1e-6, "{name}: {apart} apart at {rows} rows");
        }
        let claims = mixed.placement();
        let placed: Vec<(&str, &str)> =
            claims.iter().map(|claim| (claim.operator.as_str(), claim.provider)).collect();
        assert_eq!(placed, [("MatMul", name), ("Add", name), ("Relu", name), ("Sub", "cpu")]);
        let (_, why) = &claims[3].refusals[0];
        assert!(why.contains("operator"), "{why}");
    }
}

#[test]
fn what_they_do_not_run_is_an_error_without_another_provider() {
    for (name, path) in templates() {
        let built = Session::builder(&model()).provider(&path.display().to_string()).build();
        let problem = built.err().expect("Sub has no kernel").to_string();
        assert!(problem.contains("Sub") && problem.contains(name), "{problem}");
    }
}

#[test]
fn their_memory_counts_and_comes_back() {
    for (name, path) in templates() {
        let options = ProviderOptions::from([("memory_limit".to_owned(), "100000".to_owned())]);
        let provider = load_provider(&path).expect("the library loads");
        let device = provider.open(0, &options).expect("a device");
        let allocator = device.allocator();
        let builder = Session::builder(&model()).opt_level(Level::Disabled).device(device.clone());
        let session = builder.provider("cpu").build().expect("a session");
        session.run(&inputs(100)).expect("it fits");
        let stats = allocator.stats();
        assert!(stats.in_use >= 36 && stats.max_in_use > 2 * 1200, "{name}: {stats:?}");
        let problem = session.run(&inputs(100_000)).expect_err("it does not fit");
        assert_eq!(problem.kind(), ort_runtime::ErrorKind::OutOfMemory, "{name}: {problem}");
        session.run(&inputs(100)).expect("a smaller run goes on");
        drop(session);
        assert_eq!(allocator.stats().in_use, 0, "{name}");
        let wrong = ProviderOptions::from([("memory".to_owned(), "1".to_owned())]);
        let problem = provider.open(0, &wrong).err().expect("an unknown option").to_string();
        assert!(problem.contains("memory_limit"), "{problem}");
    }
}

#[test]
fn devices_memory_and_kernels_may_go_in_any_order() {
    for (_, path) in templates() {
        let device = load_provider(&path).and_then(|provider| provider.open(0, &ProviderOptions::new()));
        let device = device.expect("a device");
        let buffer = device.allocator().allocate(64, 64).expect("memory");
        let builder = Session::builder(&model()).opt_level(Level::Disabled).device(device.clone());
        let session = builder.provider("cpu").build().expect("a session");
        drop(device);
        session.run(&inputs(2)).expect("a run");
        drop(session);
        drop(buffer);
    }
}

#[test]
fn a_run_from_several_threads_at_once() {
    for (name, path) in templates() {
        let session = session(&model(), &[&path.display().to_string(), "cpu"]);
        let expected = elements(&session.run(&inputs(7)).expect("a run"));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        assert_eq!(elements(&session.run(&inputs(7)).expect("a run")), expected, "{name}");
                    }
                });
            }
        });
    }
}

#[test]
fn a_library_is_loaded_once_and_found_by_its_path_only() {
    let path = built("provider_template");
    let (first, second) = (load_provider(&path).expect("it loads"), load_provider(&path).expect("it loads"));
    assert!(std::ptr::eq(first, second));
    let by_name = provider(&path.display().to_string()).expect("a path is a name");
    assert!(std::ptr::eq(first, by_name));
    let problem = provider("template").err().expect("no folder names it").to_string();
    assert!(problem.contains("no execution provider 'template'"), "{problem}");
    let facts = &first.devices().expect("a device")[0].facts;
    assert!(facts.iter().any(|(name, value)| name == "library" && value.contains("provider_template")));
}
