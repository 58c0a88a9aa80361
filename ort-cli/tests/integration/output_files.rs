//! Output files of all commands: whole or not there, whatever the target is and wherever the disk
//! ends.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::support::*;
use ort_runtime::onnx::proto::*;

/// A command that writes a file, as words, with the file at its end.
const WRITERS: [(&str, &str); 6] = [
    ("npz", "run m.onnx --dim n=4000 --outputs"),
    ("trace", "profile m.onnx --runs 1 --trace"),
    ("drawing", "plan m.onnx --svg"),
    ("model", "optimize m.onnx"),
    ("compiled", "compile m.onnx"),
    ("trained", "train t.onnx --data t.npz --loss mse --epochs 1 --save"),
];

/// A folder with what the commands read. The models have weights, so that each file is larger than
/// a limit of a few kilobytes.
fn folder() -> Folder {
    let folder = Folder::new();
    let weights: Vec<f32> = (0..4096).map(|index| index as f32 / 4096.0).collect();
    let product = |names: [&str; 2]| {
        graph(
            vec![node("MatMul", &[names[0], "w"], &[names[1]])],
            vec![value(names[0], 1, &["n", "4"])],
            vec![value(names[1], 1, &["n", "1024"])],
            vec![floats("w", &[4, 1024], &weights)],
        )
    };
    folder.model("m.onnx", &model(product(["x", "y"])));
    folder.model("t.onnx", &model(product(["x", "y"])));
    let tensor = |columns: usize| {
        ort_runtime::Tensor::from_slice(&[2, columns], &vec![0.5f32; 2 * columns]).unwrap().into()
    };
    let arrays = [("x".to_string(), tensor(4)), ("target".to_string(), tensor(1024))];
    ort_numpy::write_npz(File::create(folder.path("t.npz")).unwrap(), &arrays).unwrap();
    folder
}

fn run_in(folder: &Folder, line: &str, file: &str) -> std::process::Output {
    ort().current_dir(folder.path("")).args(line.split_whitespace()).arg(file).output().unwrap()
}

fn assert_written(name: &str, folder: &Folder, file: &str) {
    let bytes = std::fs::read(folder.path(file)).unwrap();
    assert!(bytes.len() > 200, "{name}: {} bytes", bytes.len());
}

#[test]
fn every_command_writes_devices_links_and_files_alike() {
    for (name, line) in WRITERS {
        let folder = folder();
        std::fs::create_dir(folder.path("sub")).unwrap();
        folder.write("sub/target", "old");
        symlink("sub/target", folder.path("link")).unwrap();
        symlink("sub/new", folder.path("dangling")).unwrap();
        for file in ["file", "link", "dangling", "/dev/null", "/dev/stdout"] {
            let output = run_in(&folder, line, file);
            assert!(output.status.success(), "{name} {file}: {}", String::from_utf8_lossy(&output.stderr));
            if file == "/dev/stdout" {
                assert!(output.stdout.len() > 300, "{name}: {} bytes", output.stdout.len());
            }
        }
        assert!(folder.path("link").is_symlink() && folder.path("dangling").is_symlink(), "{name}");
        ["file", "sub/target", "sub/new"].iter().for_each(|file| assert_written(name, &folder, file));
        assert!(!Path::new("/dev/null").metadata().unwrap().is_file(), "{name}");
    }
}

/// Output to the null device is discarded without a temporary file. Output to a pipe is staged in
/// the temporary folder.
#[test]
fn the_null_device_needs_no_folder() {
    for (name, line) in WRITERS {
        let folder = folder();
        let run = |file: &str| {
            let mut command = ort();
            command.current_dir(folder.path("")).env("TMPDIR", folder.path("missing"));
            command.args(line.split_whitespace()).arg(file).output().unwrap()
        };
        let output = run("/dev/null");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let output = run("/dev/stdout");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains("TMPDIR"), "{name}: {stderr}");
    }
}

#[test]
fn where_the_disk_ends_is_an_error_and_what_was_there_stays() {
    for (name, line) in WRITERS {
        let folder = folder();
        folder.write("file", "kept");
        // Files that may have no bytes, and a device that is full.
        let mut limited = Command::new("sh");
        let script = format!("ulimit -f 0; exec {} {line} file", env!("CARGO_BIN_EXE_ort"));
        let limited = limited.current_dir(folder.path("")).args(["-c", &script]).output().unwrap();
        for (what, output) in [("limit", limited), ("/dev/full", run_in(&folder, line, "/dev/full"))] {
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{name} {what}: {stderr}");
            assert!(
                stderr.lines().last().unwrap_or_default().starts_with("error: "),
                "{name} {what}: {stderr}"
            );
            let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
            assert_eq!(errors, 1, "{name} {what}: {stderr}");
        }
        assert_eq!(std::fs::read_to_string(folder.path("file")).unwrap(), "kept", "{name}");
        let left: Vec<String> =
            folder.files().into_iter().filter(|file| file.contains("unfinished")).collect();
        assert!(left.is_empty(), "{name}: {left:?}");
    }
}

#[test]
fn what_a_killed_process_left_is_in_nobodys_way() {
    let folder = folder();
    for left in ["file.1-0.tmp", "file.2-0.tmp", ".ort-aaaaaa.unfinished"] {
        folder.write(left, "left");
    }
    for (name, line) in WRITERS {
        let output = run_in(&folder, line, "file");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        assert_written(name, &folder, "file");
    }
}

#[test]
fn an_output_that_the_model_lists_twice_is_written_once() {
    let folder = Folder::new();
    let outputs = vec![value("y", 1, &["2"]), value("y", 1, &["2"])];
    let graph = graph(vec![node("Neg", &["x"], &["y"])], vec![value("x", 1, &["2"])], outputs, vec![]);
    let path = folder.model("m.onnx", &model(graph));
    let out = text(&folder.path("out.npz"));
    let finished = run(&["run", &path, "--outputs", &out]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let archive = ort_numpy::Archive::open(File::open(&out).unwrap()).unwrap();
    assert_eq!(archive.names().collect::<Vec<_>>(), ["y"]);
}

#[test]
fn strings_sequences_and_maps_are_written() {
    let folder = Folder::new();
    let attribute = |name: &str, strings: &[&str]| AttributeProto {
        name: Some(name.into()),
        r#type: Some(attribute_proto::AttributeType::Strings as i32),
        strings: strings.iter().map(|text| text.as_bytes().to_vec().into()).collect(),
        ..AttributeProto::default()
    };
    let mut zip_map =
        with(node("ZipMap", &["x"], &["maps"]), attribute("classlabels_strings", &["cat", "dog"]));
    zip_map.domain = Some("ai.onnx.ml".into());
    let nodes =
        vec![zip_map, node("Identity", &["s"], &["t"]), node("SequenceConstruct", &["x", "x"], &["parts"])];
    let inputs = vec![value("x", 1, &["n", "2"]), value("s", 8, &["n"])];
    let named = |name: &str| ValueInfoProto { name: Some(name.into()), ..ValueInfoProto::default() };
    let mut model =
        model(graph(nodes, inputs, vec![named("maps"), value("t", 8, &["n"]), named("parts")], vec![]));
    model.opset_import.push(OperatorSetIdProto { domain: Some("ai.onnx.ml".into()), version: Some(3) });
    let path = folder.model("m.onnx", &model);
    let x = folder.write("x.npy", npy_floats("(2, 2)", &[0.25, 0.75, 0.5, 0.5]));
    let texts: Vec<u8> = "猫\0\0cow".chars().flat_map(|c| u32::from(c).to_le_bytes()).collect();
    let s = folder.write("s.npy", npy("<U3", "(2,)", &texts));
    let out = text(&folder.path("out.npz"));
    let (x, s) = (format!("x={x}"), format!("s={s}"));
    let finished = run(&["run", &path, "--input", &x, "--input", &s, "--outputs", &out]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let mut archive = ort_numpy::Archive::open(File::open(&out).unwrap()).unwrap();
    let names: Vec<String> = archive.names().map(str::to_string).collect();
    let expected =
        ["maps[0].keys", "maps[0].values", "maps[1].keys", "maps[1].values", "t", "parts[0]", "parts[1]"];
    assert_eq!(names, expected);
    let mut read = |name: &str| archive.read(name, 1 << 20).unwrap();
    assert_eq!(read("maps[0].keys").strings().unwrap(), ["cat", "dog"]);
    assert_eq!(read("maps[0].values").to_vec::<f32>().unwrap(), [0.25, 0.75]);
    assert_eq!(read("t").strings().unwrap(), ["猫", "cow"]);
    assert_eq!(read("parts[1]").shape(), [2, 2]);
}
