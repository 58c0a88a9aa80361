//! Provider libraries on the command line: by path, by name, left out where that is asked for.

use std::path::PathBuf;
use std::process::Output;

use crate::support::*;

/// The template in Rust, which cargo built beside this test.
fn template() -> PathBuf {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::env::current_exe().unwrap().with_file_name(format!("{prefix}provider_template{suffix}"))
}

/// A folder with the template and with a file that only looks like a library.
fn folder() -> Folder {
    let folder = Folder::new();
    std::fs::copy(template(), folder.path(template().file_name().unwrap().to_str().unwrap())).unwrap();
    folder.write(&format!("broken{}", std::env::consts::DLL_SUFFIX), b"nothing");
    folder
}

fn with_path(folder: &Folder, args: &[&str]) -> Output {
    ort().env("ORT_PROVIDER_PATH", folder.path("")).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_library_is_a_provider_by_its_path() {
    let models = Folder::new();
    let relu = graph(
        vec![node("Relu", &["x"], &["y"])],
        vec![value("x", 1, &["n"])],
        vec![value("y", 1, &["n"])],
        vec![],
    );
    let model = models.model("relu.onnx", &model(relu));
    let path = template().display().to_string();
    let claims = run(&["inspect", &model, "--claims", "--ep", &path, "--json"]);
    assert!(claims.stdout.contains("template"), "{}{}", claims.stdout, claims.stderr);
    assert_eq!(run(&["run", &model, "--ep", &path]).code, Some(0));
}

#[test]
fn the_folders_of_a_variable_have_libraries_by_name() {
    let libraries = folder();
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&with_path(&libraries, &["providers", "--json"]))).unwrap();
    let list = json["providers"].as_array().unwrap();
    let template = list.iter().find(|one| one["provider"] == "template").unwrap();
    assert_eq!(template["device"], "template device");
    let broken = list.iter().find(|one| one["provider"].as_str().unwrap().contains("broken")).unwrap();
    assert!(broken["error"].as_str().unwrap().contains("it cannot be loaded"), "{broken}");
    let models = Folder::new();
    let path = models.model("small.onnx", &small());
    stdout(&with_path(&libraries, &["run", &path, "--ep", "template", "--ep", "cpu"]));
    let output = with_path(&libraries, &["run", &path, "--ep", "npu"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    for words in ["no execution provider 'npu'", "template", "it cannot be loaded"] {
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn a_provider_that_cannot_be_used_is_left_out_only_where_that_is_asked_for() {
    let models = Folder::new();
    let path = models.model("small.onnx", &small());
    let library = models.write(&format!("broken{}", std::env::consts::DLL_SUFFIX), b"nothing");
    let refused = run(&["run", &path, "--ep", &library, "--ep", "cpu"]);
    assert_fails("a broken library", &refused, &["it cannot be loaded", "broken"]);
    for name in [&*library, "npu"] {
        let optional = format!("optional:{name}");
        let ran = run(&["run", &path, "--ep", &optional, "--ep", "cpu"]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert!(ran.stderr.contains("running without provider"), "{}", ran.stderr);
    }
}

#[test]
fn options_reach_the_provider_that_they_name() {
    let models = Folder::new();
    let (model, path) = (models.model("small.onnx", &small()), template().display().to_string());
    let with = |option: &str| run(&["run", &model, "--ep", &path, "--ep", "cpu", "--ep-option", option]);
    assert_fails("an unknown option", &with(&format!("{path}.speed=2")), &["speed"]);
    assert_wrong_usage(&with("npu.speed=2"), &["npu.speed", "--ep npu", "cpu"]);
    let twice = format!("{path}.speed=2");
    let line = ["run", &model, "--ep", &path, "--ep-option", &twice, "--ep-option", &twice];
    assert_wrong_usage(&run(&line), &["given twice"]);
}
