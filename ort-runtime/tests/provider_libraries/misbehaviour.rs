//! Libraries that misbehave, as a table: what the error says, and that a session that was asked to
//! runs without them.

use std::path::{Path, PathBuf};

use ort_runtime::ep::{ProviderOptions, load_provider};
use ort_runtime::rewrite::Level;
use ort_runtime::{ErrorKind, Session, SessionBuilder};

use crate::libraries::{built, compiled, inputs, model};

/// When a fault shows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    /// Never: the session works.
    Never,
    /// When the session is built.
    Build,
    /// When it runs; it stays usable.
    Run,
}

/// Faults of the C library: when they show, and what the error says.
const FAULTS: &[(&str, At, &str)] = &[
    ("NO_FAULT", At::Never, ""),
    ("EARLIER_TABLE", At::Never, ""),
    ("LONGER_TABLE", At::Never, ""),
    ("OTHER_VERSION", At::Build, "its interface version is 2, expected 1"),
    ("SHORT_TABLE", At::Build, "its table of functions has 104 bytes, expected at least 152"),
    ("NO_TABLE", At::Build, "it returns no function table"),
    ("NO_NAME", At::Build, "it returns no name"),
    ("ODD_NAME", At::Build, "its name is 'n p u'"),
    ("NO_RUN", At::Build, "has no 'run'"),
    ("NO_ALLOCATE", At::Build, "lacks 'allocate'"),
    ("NO_DEVICE_NAME", At::Build, "device 0 of misbehaving has no name"),
    ("OPENS_NOTHING", At::Build, "`open` reports success, but returns no device"),
    (
        "CLAIMS_PLACES",
        At::Build,
        "it computes output 0 in place of input 7, but the node has 2 inputs and 1 outputs",
    ),
    ("CLAIMS_HOST_INPUT", At::Build, "it names input 4000000000"),
    ("CLAIMS_WITHOUT_END", At::Build, "it says more than can be of a node"),
    ("CLAIM_FAILS", At::Build, "the driver hung up; reset the device"),
    ("ODD_CODE", At::Build, "code 12345, which is none of this interface"),
    ("NO_REASON", At::Build, "gave no reason"),
    ("COMPILES_NOTHING", At::Build, "`compile` reports success, but returns no kernel"),
    ("COMPILE_FAILS", At::Build, "the compiler crashed"),
    ("ALLOCATES_NOTHING", At::Build, "`allocate` reports success, but returns no memory"),
    ("HUGE_WORKSPACE", At::Run, "18446744073709551615"),
    ("RUN_FAILS", At::Run, "a bit was lost; run again"),
];

/// Faults of the library in Rust: the call that fails, and when that shows.
const CALLS: &[(&str, At)] = &[
    ("open", At::Build),
    ("claim", At::Build),
    ("check", At::Build),
    ("compile", At::Build),
    ("workspace", At::Run),
    ("run", At::Run),
];

fn builder() -> SessionBuilder {
    Session::builder(&model()).threads(1).opt_level(Level::Disabled)
}

/// Holds a library to when its fault shows and to what is said of it.
fn hold(library: &Path, options: &ProviderOptions, at: At, said: &str) {
    let name = library.display().to_string();
    let built = builder().provider_with(&name, options.clone()).provider("cpu").build();
    let session = match (built, at) {
        (Err(problem), At::Build) => {
            assert!(problem.to_string().contains(said), "{problem}\nexpected: {said}");
            let without = builder().optional_provider(&name, options.clone()).provider("cpu").build();
            let without = without.unwrap_or_else(|problem| panic!("{said}: not without it: {problem}"));
            assert!(without.placement().iter().all(|claim| claim.provider == "cpu"), "{said}");
            without.run(&inputs(3)).expect("the CPU runs it");
            return;
        }
        (Ok(session), At::Run | At::Never) => session,
        (Err(problem), _) => panic!("{said}: {problem}"),
        (Ok(_), At::Build) => panic!("{said}: the session was built"),
    };
    for _ in 0..2 {
        match (session.run(&inputs(3)), at) {
            (Ok(_), At::Never) => {}
            (Err(problem), At::Run) => {
                assert!(problem.to_string().contains(said), "{problem}\nexpected: {said}")
            }
            (Ok(_), _) => panic!("{said}: it ran"),
            (Err(problem), _) => panic!("{said}: {problem}"),
        }
    }
}

#[test]
fn a_fault_in_c_is_an_error_and_no_more() {
    for (fault, at, said) in FAULTS {
        let source = "ort-runtime/tests/provider_libraries/misbehaving.c";
        let library = compiled(source, fault, &[format!("-DFAULT={fault}")]);
        hold(&library, &ProviderOptions::new(), *at, said);
    }
}

#[test]
fn the_cpu_takes_the_place_of_an_only_provider_that_breaks() {
    let source = "ort-runtime/tests/provider_libraries/misbehaving.c";
    let library =
        compiled(source, "CLAIM_FAILS_ALONE", &["-DFAULT=CLAIM_FAILS".to_owned()]).display().to_string();
    let session = builder().optional_provider(&library, ProviderOptions::new()).build();
    let session = session.expect("the session does without it");
    assert!(session.placement().iter().all(|claim| claim.provider == "cpu"));
}

#[test]
fn more_devices_than_can_be_are_not_listed() {
    let source = "ort-runtime/tests/provider_libraries/misbehaving.c";
    let library = compiled(source, "MANY_DEVICES", &["-DFAULT=MANY_DEVICES".to_owned()]);
    let provider = load_provider(&library).expect("a provider");
    let problem = provider.devices().expect_err("no machine has so many devices");
    assert!(problem.to_string().contains("it reports 4294967295 devices"), "{problem}");
}

#[test]
fn an_error_and_a_panic_in_rust_are_errors_and_no_more() {
    let library = built("faulty_provider");
    hold(&library, &ProviderOptions::new(), At::Never, "");
    for (call, at) in CALLS {
        for (how, said) in [("error", "told to fail in"), ("panic", "told to panic in")] {
            if (*call, how) == ("claim", "error") {
                // That is a refusal like any other.
                continue;
            }
            let options = [("fails_in", *call), ("how", how)];
            let options = options.map(|(name, value)| (name.to_owned(), value.to_owned()));
            hold(&library, &ProviderOptions::from(options), *at, &format!("{said} {call}"));
        }
    }
}

#[test]
fn what_is_no_provider_library_is_said_so() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = |name: &str| folder.path().join(format!("{name}{}", std::env::consts::DLL_SUFFIX));
    let text = file("text");
    std::fs::write(&text, "not a library at all").expect("a file");
    let other = folder.path().join("other.c");
    std::fs::write(&other, "int something_else(void) { return 1; }").expect("a file");
    let other = compiled(&other.display().to_string(), "other", &[]);
    let cases: [(PathBuf, ErrorKind, &str); 3] = [
        (file("missing"), ErrorKind::NoSuchFile, "missing"),
        (text, ErrorKind::EpFail, "it cannot be loaded"),
        (other, ErrorKind::EpFail, "it has no symbol ort_provider: it is not a provider library"),
    ];
    for (path, kind, said) in cases {
        let problem = load_provider(&path).err().expect("it is no provider library");
        assert_eq!(problem.kind(), kind, "{problem}");
        let text = problem.to_string();
        assert!(text.contains(said) && text.contains(&path.display().to_string()), "{text}");
        let name = path.display().to_string();
        assert!(builder().provider(&name).provider("cpu").build().is_err());
        builder().optional_provider(&name, ProviderOptions::new()).build().expect("the CPU runs all of it");
    }
}

#[test]
fn what_a_kernel_keeps_counts_against_the_memory_limit() {
    let library = built("faulty_provider").display().to_string();
    let session = builder().provider(&library).provider("cpu").memory_limit(1 << 20).build();
    let session = session.expect("a session");
    assert!(session.memory().packed >= 4096, "{:?}", session.memory());
    let problem = builder().provider(&library).provider("cpu").memory_limit(2000).build().err();
    let problem = problem.expect("4096 bytes are packed");
    assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
}
