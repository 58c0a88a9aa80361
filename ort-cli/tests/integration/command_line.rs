//! What the command line promises whatever the command: exit codes, help, unknown flags, a reader
//! that leaves.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::support::*;

const COMMANDS: [&str; 14] = [
    "demo",
    "run",
    "bench",
    "inspect",
    "check",
    "plan",
    "generate",
    "optimize",
    "quantize",
    "prune",
    "compile",
    "profile",
    "test",
    "providers",
];

#[test]
fn every_command_has_help_with_an_example() {
    for command in COMMANDS {
        let finished = run(&[command, "--help"]);
        assert_eq!(finished.code, Some(0));
        assert!(finished.stdout.contains(&format!("  ort {command}")), "{}", finished.stdout);
        assert!(finished.stdout.contains("Example"), "{}", finished.stdout);
    }
    assert!(run(&["--help"]).stdout.contains("Exit codes"));
    assert!(run(&["--version"]).stdout.starts_with("ort "));
}

#[test]
fn a_wrong_command_line_is_exit_code_2() {
    let lines: [&[&str]; 33] = [
        &["run", "m.onnx", "--opt-level", "most"],
        &["optimize", "m.onnx"],
        &["compile", "m.onnx"],
        &["compile", "m.onnx", "out", "--memory-limit", "1MiB"],
        &["quantize", "m.onnx", "out"],
        &["quantize", "m.onnx", "--mode", "int4"],
        &["quantize", "m.onnx", "out", "--mode", "int4", "--block", "33"],
        &["quantize", "m.onnx", "out", "--mode", "int4", "--only", "#x"],
        &["frobnicate"],
        &["run"],
        &["test"],
        &["run", "m.onnx", "--frobnicate"],
        &["run", "m.onnx", "--threads", "0"],
        &["run", "m.onnx", "--threads", "many"],
        &["run", "m.onnx", "--dim", "n"],
        &["run", "m.onnx", "--dim", "n=-1"],
        &["run", "m.onnx", "--shape", "x=1xa"],
        &["run", "m.onnx", "--input", "x.npy"],
        &["run", "m.onnx", "--memory-limit", "lots"],
        &["bench", "m.onnx", "--seconds", "-1"],
        &["bench", "m.onnx", "--seconds", "nan"],
        &["bench", "m.onnx", "--concurrency", "0"],
        &["profile", "m.onnx", "--runs", "0"],
        &["test", "cases", "--rtol", "-1"],
        &["run", "m.onnx", "-q", "-v"],
        &["run", "a.onnx", "b.onnx"],
        &["run", "m.onnx", "--arena-strategy", "doubling"],
        &["run", "m.onnx", "--ep-option", "limits=minimum"],
        &["run", "m.onnx", "--arena-strategy", "power-of-two", "--no-arena"],
        &["run", "m.onnx", "--ep", ""],
        &["run", "m.onnx", "--rewrites", "x"],
        &["bench", "m.onnx", "--warmup", "-1"],
        &["soak", "m.onnx", "--runs", "0"],
    ];
    for line in lines {
        let finished = run(line);
        assert_eq!(finished.code, Some(2), "{line:?}: {}", finished.stderr);
        assert!(finished.stdout.is_empty(), "{line:?}: {}", finished.stdout);
    }
}

/// A refused value says what a valid one is, and an unknown flag what to type instead.
#[test]
fn a_wrong_command_line_says_what_is_right() {
    let cases: [(&[&str], &[&str]); 13] = [
        (&["run", "m.onnx", "--memory-limit", "-3"], &["--memory-limit", "must not be negative"]),
        (&["run", "m.onnx", "--memory-limit", "-3MiB"], &["must not be negative"]),
        (&["run", "m.onnx", "--memory-limit", "99999999999GiB"], &["larger than any memory"]),
        (&["run", "m.onnx", "--memory-limit", "lots"], &["such as 512MiB"]),
        (&["run", "m.onnx", "--dim", "n=-1"], &["`-1` is not a size", "0 or more"]),
        (&["bench", "m.onnx", "--seconds", "-1"], &["`-1` is not a number of seconds", "0 or more"]),
        (&["bench", "m.onnx", "--concurrency", "0"], &["--concurrency", "1 or more"]),
        (&["bench", "m.onnx", "--rows", "0"], &["--rows", "1 or more"]),
        (&["run", "m.onnx", "--rewrites", "x"], &["`x` is not a whole number of 0 or more"]),
        (&["run", "m.onnx", "--ep", ""], &["the name is empty", "`ort providers`"]),
        (&["run", "m.onnx", "--ep-option", "foo=1"], &["such as wgpu.limits=minimum"]),
        (&["optimize", "m.onnx", "-o", "out.onnx"], &["second argument"]),
        (&["compile", "m.onnx", "-o", "out"], &["second argument"]),
    ];
    for (line, words) in cases {
        let finished = run(line);
        assert_wrong_usage(&finished, words);
        assert!(!finished.stderr.contains("to pass"), "{line:?}: {}", finished.stderr);
    }
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    for (line, words) in [
        (["--ep-option", "wgpu.limits=minimum"], "add --ep wgpu"),
        (["--ep-option", "cpu.threads=2"], "use --threads 2"),
        (["--dim", "n=1,2"], "`ort plan`"),
    ] {
        assert_wrong_usage(&run(&[&["run", &path][..], &line].concat()), &[words]);
    }
}

/// Advice is about what is wrong: the provider, the dimension or the array.
#[test]
fn errors_say_what_to_try() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let double = folder.write("double.npy", npy("<f8", "(1, 4)", &[0; 32]));
    let good = folder.write("good.npy", npy_floats("(1, 4)", &[0.0; 4]));
    let (double, good) = (format!("x={double}"), format!("x={good}"));
    let cases: [(&[&str], &[&str]); 9] = [
        (&["--ep", "foo"], &["`ort providers`", "give its path"]),
        (&["--ep-option", "cpu.bla=1"], &["'bla'", "it takes no options"]),
        (&["--input", &double], &["'x' is double, expected float", "astype(\"float32\")"]),
        (&["--input", "x=nofile.npy"], &["there is no such file", "check the path"]),
        (&["--input", &good, "--input", &good], &["'x' is given twice", "leave one out"]),
        (&["--fix-dim", "foo=3"], &["--fix-dim", "'foo'", "`ort inspect`"]),
        (&["--fix-dim", "n=2", "--dim", "n=3"], &["--fix-dim has fixed 'n' to 2", "leave --dim n out"]),
        (&["--without-rule", "bla"], &["`ort optimize` lists the rules", "docs/RULES.md"]),
        (&["--memory-limit", "5"], &["raise --memory-limit"]),
    ];
    for (flags, words) in cases {
        assert_fails(&flags.join(" "), &run(&[&["run", &path][..], flags].concat()), words);
    }
    assert_fails(
        "no model",
        &run(&["run", "nofile.onnx"]),
        &["no such file: ", "nofile.onnx", "check the path"],
    );
    let outputs = run(&["run", &path, "--outputs", &text(&folder.path(""))]);
    assert_fails("a folder", &outputs, &["it is a folder; name a file in it"]);
    for command in [["run", "--outputs"], ["plan", "--svg"], ["profile", "--trace"]] {
        let [command, flag] = command;
        assert_fails(
            command,
            &run(&[command, &path, flag, &path]),
            &["would replace the model that is read"],
        );
    }
}

/// Generated indices are 0 or 1, which may be out of range.
#[test]
fn an_error_tells_that_the_inputs_were_random() {
    let folder = Folder::new();
    let gather = graph(
        vec![node("Gather", &["w", "i"], &["y"])],
        vec![value("i", 7, &["64"])],
        vec![open_value("y", 1)],
        vec![floats("w", &[1, 2], &[0.5; 2])],
    );
    let path = folder.model("gather.onnx", &model(gather));
    assert_fails("random", &run(&["run", &path]), &["'i' were random, 0 or 1", "--input"]);
    let indices = folder.write("i.npy", npy("<i8", "(64,)", &[1; 512]));
    let given = run(&["run", &path, "--input", &format!("i={indices}")]);
    assert_fails("given", &given, &["gather_y"]);
    assert!(!given.stderr.contains("random"), "{}", given.stderr);
}

/// Findings about the model itself do not advise another provider.
#[test]
fn check_gives_the_advice_of_the_finding() {
    let folder = Folder::new();
    let unknown = |op: &str| {
        let unknown = graph(
            vec![node(op, &["x", "x"], &["y"])],
            vec![value("x", 1, &["4"])],
            vec![open_value("y", 1)],
            vec![],
        );
        folder.model(&format!("{op}.onnx"), &model(unknown))
    };
    let mistyped = run(&["check", &unknown("Ad")]);
    assert_fails("Ad", &mistyped, &["1 finding", "did you mean 'Add'?"]);
    assert!(!mistyped.stderr.contains("--ep"), "{}", mistyped.stderr);
    let broken = folder.write("broken.onnx", b"junk");
    let finished = run(&["check", &broken]);
    assert_fails("junk", &finished, &["broken.onnx"]);
    assert!(finished.stdout.contains("(model)") && !finished.stderr.contains("--ep"), "{}", finished.stderr);
    let mut newer = small();
    newer.ir_version = Some(99);
    let json = run(&["check", &folder.model("newer.onnx", &newer), "--json"]).json();
    assert_eq!((&json["ok"], &json["warnings"][0]["kind"]), (&true.into(), &"ir_version".into()));
}

#[test]
fn without_a_command_it_is_the_demo() {
    let finished = run(&[]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    for word in ["prediction", "10 of 10 right", "ran in", "planned before the run"] {
        assert!(finished.stdout.contains(word), "{word}: {}", finished.stdout);
    }
    assert_eq!(run(&["demo"]).code, Some(0));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    for command in ["plan", "inspect", "run", "bench"] {
        let mut args = vec![command, path.as_str()];
        if command == "bench" {
            args.extend(["--seconds", "0.01"]);
        }
        let mut child = ort().args(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // No one reads anything at all.
        drop(child.stdout.take());
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.next().is_none(), "{command} says nothing");
        assert_eq!(child.wait().unwrap().code(), Some(0), "{command}");
    }
}

#[test]
fn quiet_and_verbose() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    assert!(run(&["run", &path]).stderr.is_empty());
    assert!(run(&["run", &path, "-q"]).stderr.is_empty());
    let told = run(&["run", &path, "-v"]).stderr;
    assert!(told.contains("ran in"), "{told}");
    // How many nodes each provider runs.
    assert!(["nodes", "\"cpu ", "copies"].iter().all(|part| told.contains(part)), "{told}");
    assert!(run(&["-v", "run", &path]).stderr.contains("ran in"));
    // An error is said even by a quiet program.
    assert_fails("quiet", &run(&["run", "nowhere.onnx", "-q"]), &["nowhere.onnx"]);
}

/// A variable with a value that it does not have changes nothing in silence.
#[test]
fn unknown_values_of_environment_variables_are_refused() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let run_with = |variable: &str, value: &str| {
        let output = ort().args(["run", &path]).env(variable, value).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (variable, value) in [("ORT_ISA", "scalar"), ("ORT_ISA", ""), ("ORT_CPU_AFFINITY", "on")] {
        assert_eq!(run_with(variable, value), (Some(0), String::new()), "{variable}={value}");
    }
    let table = [
        ("ORT_ISA", "junk", "ORT_ISA is 'junk', expected one of scalar, "),
        ("ORT_ISA", "AVX2", "ORT_ISA is 'AVX2', expected one of scalar, "),
        ("ORT_ISA", "\u{1b}[2J", r"ORT_ISA is '\u{1b}[2J', expected"),
        ("ORT_CPU_AFFINITY", "of", "ORT_CPU_AFFINITY is 'of', expected one of on, off"),
    ];
    for (variable, value, said) in table {
        let (code, stderr) = run_with(variable, value);
        assert!(code == Some(1) && stderr.contains(said), "{variable}={value}: {stderr}");
    }
    // An instruction set of another kind of processor is none here.
    let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    assert!(run_with("ORT_ISA", foreign).1.contains("expected one of scalar"));
    let listed = ort().arg("providers").env("ORT_ISA", "junk").output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains("ORT_ISA is 'junk'"));
}

#[test]
fn providers_are_listed() {
    assert!(run(&["providers"]).stdout.contains("cpu"));
    let json = run(&["providers", "--json"]).json();
    assert_eq!(json["providers"][0]["provider"], "cpu");
}
