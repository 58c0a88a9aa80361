//! `--cache` and `ort compile`: weights are mapped, processes share them, and what was made
//! elsewhere is packed again with a word.

use std::process::{Output, Stdio};

use crate::support::*;

/// A product with a weight of `[size, size]`, whose numbers repeat.
fn product(folder: &Folder, size: usize) -> String {
    let numbers: Vec<f32> = (0..size * size).map(|index| (index % 251) as f32 / 251.0 - 0.5).collect();
    let width = size.to_string();
    folder.model(
        "product.onnx",
        &model(graph(
            vec![node("MatMul", &["x", "w"], &["y"])],
            vec![value("x", 1, &["n", &width])],
            vec![value("y", 1, &["n", &width])],
            vec![floats("w", &[size, size], &numbers)],
        )),
    )
}

/// The files of the cache that end like this.
fn cached(folder: &Folder, ending: &str) -> usize {
    let files = std::fs::read_dir(folder.path("cache")).unwrap();
    files.filter(|entry| entry.as_ref().unwrap().path().to_string_lossy().ends_with(ending)).count()
}

/// Runs the binary as on a CPU with no more than this instruction set.
fn run_on(isa: &str, arguments: &[&str]) -> Output {
    let output = ort().args(arguments).env("ORT_ISA", isa).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
#[cfg(target_os = "linux")]
fn mapped_weights_are_no_memory_of_the_process() {
    const MIB: u64 = 1 << 20;
    let folder = Folder::new();
    let path = product(&folder, 4096);
    let (cache, compiled) = (text(&folder.path("cache")), text(&folder.path("product.compiled")));
    let anonymous = |model: &str, arguments: &[&str]| {
        let common = ["bench", model, "--json", "--seconds", "0", "--warmup", "0", "--threads", "1"];
        let json = run(&[&common, arguments].concat()).json();
        (json["rss_anon"].as_u64().unwrap(), json["weights_cached"].as_u64().unwrap())
    };
    let (packed, cached) = anonymous(&path, &[]);
    assert!(packed > 64 * MIB && cached == 0, "{packed} bytes, {cached} cached");
    let finished = run(&["compile", &path, &compiled]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    // The first time it is written, then found.
    for (model, arguments) in
        [(&path, &["--cache", &cache][..]), (&path, &["--cache", &cache]), (&compiled, &[])]
    {
        let (anonymous, cached) = anonymous(model, arguments);
        assert!(anonymous < 16 * MIB, "{model} {arguments:?}: {anonymous} bytes");
        assert!(cached >= 64 * MIB, "{model} {arguments:?}: {cached} bytes cached");
    }
}

#[test]
fn what_another_cpu_packed_is_packed_again() {
    let folder = Folder::new();
    let path = product(&folder, 64);
    let (cache, compiled) = (text(&folder.path("cache")), text(&folder.path("product.compiled")));
    if run(&["providers"]).stdout.contains("scalar") {
        return;
    }
    let expected = run_on("scalar", &["run", &path]).stdout;
    assert_eq!(run(&["run", &path, "--cache", &cache]).code, Some(0));
    let again = run_on("scalar", &["run", &path, "--cache", &cache, "-v"]);
    assert!(!stderr(&again).contains("writing an entry of the compiled cache again"), "{}", stderr(&again));
    assert_eq!(again.stdout, expected);
    assert_eq!(cached(&folder, ".compiled"), 2, "each CPU has its own");
    assert_eq!(run(&["compile", &path, &compiled]).code, Some(0));
    assert_eq!(run(&["run", &compiled]).stderr, "");
    let other = run_on("scalar", &["run", &compiled]);
    assert!(stderr(&other).contains("it was compiled for 'device"), "{}", stderr(&other));
    assert!(stderr(&other).contains("`ort compile`"), "{}", stderr(&other));
    assert_eq!(other.stdout, expected);
}

#[test]
fn processes_that_write_at_once_leave_one_entry() {
    let folder = Folder::new();
    let path = product(&folder, 256);
    let cache = text(&folder.path("cache"));
    let expected = run(&["run", &path]).stdout;
    let start = || {
        let mut command = ort();
        command.args(["run", &path, "--cache", &cache]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let processes: Vec<_> = (0..8).map(|_| start()).collect();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", stderr(&output));
        assert_eq!(stderr(&output), "");
    }
    assert_eq!((cached(&folder, ".compiled"), cached(&folder, ".unfinished")), (1, 0));
}

#[test]
fn mistakes_are_errors_that_name_the_fix() {
    let folder = Folder::new();
    let path = product(&folder, 8);
    let nowhere = text(&folder.path("nowhere/product.compiled"));
    let out = text(&folder.path("product.compiled"));
    let table: &[(&str, &[&str], &[&str])] = &[
        ("itself", &["compile", &path, &path], &["replace", "another file"]),
        ("no folder", &["compile", &path, &nowhere], &["product.compiled", "check that its folder exists"]),
        (
            "no such rule",
            &["compile", &path, &out, "--without-rule", "nothing"],
            &["no rewrite rule 'nothing'"],
        ),
        ("a file as the cache", &["run", &path, "--cache", &path], &["product.onnx", "expected a folder"]),
        ("no provider", &["compile", &path, &out, "--ep", "abacus"], &["abacus"]),
    ];
    for (name, arguments, words) in table {
        assert_fails(name, &run(arguments), words);
    }
    assert_eq!(folder.files(), ["product.onnx"], "nothing half-done stays");
}
