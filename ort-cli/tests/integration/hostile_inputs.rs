//! Files and folders that no honest writer makes, given to the commands that read them: each ends
//! with an answer or an error that says why, within five seconds and a gibibyte, and nothing that
//! is printed steers a terminal.
#![cfg(target_os = "linux")]

use std::io::{Cursor, Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::*;
use ort_runtime::onnx::proto::*;
use ort_runtime::steers;
use prost::Message;

const PATIENCE: Duration = Duration::from_secs(5);
const MEMORY: u64 = 1 << 30;
/// An error is one line of at most 4 KiB.
const LINE: usize = 4096;

/// How a command ended.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    time: Duration,
    peak: u64,
}

/// Runs a command to its end, or until it has had its time and its memory.
fn end_of(mut command: Command) -> Ended {
    let start = Instant::now();
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let drain = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let stdout = drain(Box::new(child.stdout.take().unwrap()));
    let stderr = drain(Box::new(child.stderr.take().unwrap()));
    let mut peak = 0;
    let status = loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let kilobytes = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:")?.trim().split(' ').next()?.parse().ok());
        peak = peak.max(kilobytes.unwrap_or(0) * 1024);
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE || peak > MEMORY {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(3));
    };
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    Ended { code: status.code(), stdout, stderr, time: start.elapsed(), peak }
}

/// What is wrong with how a command ended. `words` are of the error it should have; without any it
/// must succeed.
fn judge(name: &str, ended: &Ended, words: &[&str]) -> Vec<String> {
    let error = ended.stderr.lines().last().unwrap_or_default();
    let mut wrong = Vec::new();
    let is_said = error.starts_with("error: ") && words.iter().all(|word| error.contains(word));
    let is_right = if words.is_empty() { ended.code == Some(0) } else { ended.code == Some(1) && is_said };
    if !is_right {
        wrong.push(format!("ended with {:?}, expected {words:?}", ended.code));
    }
    let printed = [&ended.stdout, &ended.stderr];
    if printed.iter().any(|text| text.chars().any(|character| character != '\n' && steers(character))) {
        wrong.push("prints what steers a terminal".to_string());
    }
    if ended.stderr.lines().any(|line| line.len() > LINE) || ended.stdout.len() > 1 << 20 {
        wrong.push(format!("prints {} and {} bytes", ended.stdout.len(), ended.stderr.len()));
    }
    if ended.time > PATIENCE || ended.peak > MEMORY {
        wrong.push(format!("takes {:?} and {} MiB", ended.time, ended.peak >> 20));
    }
    if ended.stderr.contains("panick") || error.contains("internal error") {
        wrong.push("panics".to_string());
    }
    let head = |text: &str| text.chars().take(400).collect::<String>();
    wrong
        .iter()
        .map(|wrong| format!("{name}: {wrong}: {:?} {:?}", head(&ended.stdout), head(error)))
        .collect()
}

/// A command line of words, in the folder of the case, and words of its error.
type Case = (&'static str, &'static str, &'static [&'static str]);

/// Runs all cases in a folder, which is also where provider libraries are looked for.
fn check(folder: &Path, cases: &[Case]) {
    let mut wrong = Vec::new();
    for (name, line, words) in cases {
        let mut command = ort();
        command.current_dir(folder).args(line.split_whitespace()).env("ORT_PROVIDER_PATH", folder);
        wrong.extend(judge(name, &end_of(command), words));
    }
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// A file of a tebibyte that takes no room: zeros, behind `start`.
fn sparse(path: &Path, start: &[u8]) {
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(start).unwrap();
    file.set_len(1 << 40).unwrap();
}

/// An archive of one array as deflate packs it.
fn packed(name: &str, array: &[u8]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let options =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    writer.start_file(format!("{name}.npy"), options).unwrap();
    writer.write_all(array).unwrap();
    writer.finish().unwrap().into_inner()
}

/// What clears the screen, sets the title, turns a line round and begins another one.
const STEERING: &str = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{202e}\u{9b}31m\r\nerror: none";

const ARRAYS: &[Case] = &[
    ("a device for an array", "run m.onnx --input x=/dev/zero", &["a pipe, socket or device"]),
    ("a pipe for an array", "run m.onnx --input x=pipe", &["a pipe, socket or device"]),
    ("a folder for an array", "run m.onnx --input x=.", &["a folder"]),
    ("no array", "run m.onnx --input x=nowhere.npy", &["nowhere.npy"]),
    ("a tebibyte of zeros for an array", "run m.onnx --input x=zeros.npy", &["no .npy file"]),
    ("a tebibyte that says so", "run m.onnx --input x=tebibyte.npy", &["bytes"]),
    ("a header that never ends", "run m.onnx --input x=brackets.npy", &["the size"]),
    ("a header of 4 GiB", "run m.onnx --input x=header.npy", &["header has 4294967295 bytes"]),
    ("a shape of 30 GB", "run m.onnx --input x=promise.npy", &["cut short"]),
    ("a pickle", "run m.onnx --input x=pickle.npy", &["pickles"]),
    ("a device for an archive", "run m.onnx --inputs /dev/zero", &["a pipe, socket or device"]),
    ("a pipe for an archive", "run m.onnx --inputs pipe", &["a pipe, socket or device"]),
    ("a tebibyte of zeros for an archive", "run m.onnx --inputs zeros.npy", &["not an .npz archive"]),
    (
        "a tebibyte that begins as an archive",
        "run m.onnx --inputs tebibyte.npz",
        &["no directory at its end"],
    ),
    ("an array for an archive", "run m.onnx --inputs promise.npy", &["a .npy file of one array"]),
    (
        "a bomb",
        "run m.onnx --inputs bomb.npz --memory-limit 16MiB",
        &["takes 67108864 bytes, but at most 16777216"],
    ),
    ("a bomb of another name", "run m.onnx --inputs other.npz", &["the model has no input 'other'"]),
    ("a name that steers", "run m.onnx --inputs steering.npz", &["\\u{1b}[2J", "\\u{202e}"]),
    ("a name of 60 KB", "run m.onnx --inputs long.npz", &["the model has no input"]),
    ("a device for samples", "train m.onnx --data /dev/zero", &["a pipe, socket or device"]),
    ("a pipe for samples", "train m.onnx --data pipe", &["a pipe, socket or device"]),
    ("an array for samples", "train m.onnx --data promise.npy", &["a .npy file of one array"]),
    (
        "a pipe for a configuration",
        "train m.onnx --data ok.npz --loss mse --memory-opt-config pipe",
        &["a pipe"],
    ),
];

#[test]
fn arrays_and_archives() {
    let folder = Folder::new();
    folder.model("m.onnx", &small());
    pipe(&folder.path("pipe"));
    sparse(&folder.path("zeros.npy"), b"");
    sparse(&folder.path("tebibyte.npy"), &npy("<f4", "(68719476704, 4)", b""));
    sparse(&folder.path("tebibyte.npz"), b"PK\x03\x04");
    folder.write("brackets.npy", npy("<f4", &"(".repeat(200), b""));
    folder.write("header.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff{");
    folder.write("promise.npy", npy("<f4", "(1875000000, 4)", &[0; 64]));
    folder.write("pickle.npy", npy("|O", "(1,)", b"\x80\x04."));
    let bomb = npy("<f4", "(4194304, 4)", &vec![0; 64 << 20]);
    folder.write("bomb.npz", packed("x", &bomb));
    folder.write("other.npz", packed("other", &bomb));
    folder.write("steering.npz", packed(STEERING, &npy_floats("(1, 4)", &[0.0; 4])));
    folder.write("long.npz", packed(&"n".repeat(60_000), &npy_floats("(1, 4)", &[0.0; 4])));
    folder.write("ok.npz", packed("x", &npy_floats("(1, 4)", &[0.0; 4])));
    check(&folder.path(""), ARRAYS);
}

const SIZES: &[Case] = &[
    ("a shape that overflows", "run m.onnx --shape x=4611686018427387904x4", &["x"]),
    ("a shape of a petabyte", "run m.onnx --shape x=99999999999999x4", &["use smaller dimensions"]),
    ("a dimension of 2^63 - 1", "run m.onnx --dim n=9223372036854775807", &["x"]),
    (
        "a shape beyond the limit",
        "run m.onnx --shape x=100000000x4 --memory-limit 64MiB",
        &["use smaller dimensions"],
    ),
    ("strings by the billions", "run s.onnx --shape s=100000000000", &["use smaller dimensions"]),
    ("a profile of it", "profile m.onnx --shape x=99999999999999x4", &["use smaller dimensions"]),
    ("a measurement of it", "bench m.onnx --shape x=99999999999999x4", &["use smaller dimensions"]),
];

#[test]
fn sizes_of_inputs_that_are_made_up() {
    let folder = Folder::new();
    folder.model("m.onnx", &small());
    let strings = graph(
        vec![node("Identity", &["s"], &["t"])],
        vec![value("s", 8, &["n"])],
        vec![value("t", 8, &["n"])],
        vec![],
    );
    folder.model("s.onnx", &model(strings));
    check(&folder.path(""), SIZES);
}

const NAMES: &[Case] = &[
    ("an unknown operator that steers", "run unknown.onnx", &["\\u{1b}[2J"]),
    ("a list of it", "check unknown.onnx", &["\\u{1b}[2J"]),
    ("a list of it as JSON", "check unknown.onnx --json", &["\\u{1b}[2J"]),
    ("names that steer, run", "run names.onnx --dim n=1", &[]),
    ("names that steer, inspected", "inspect names.onnx", &[]),
    ("names that steer, in the graph", "inspect names.onnx --graph", &[]),
    ("names that steer, as JSON", "inspect names.onnx --json", &[]),
    ("names that steer, claimed", "inspect names.onnx --claims", &[]),
    ("names that steer, planned", "plan names.onnx", &[]),
    ("names that steer, planned as JSON", "plan names.onnx --json", &[]),
    ("names that steer, profiled", "profile names.onnx --runs 1", &[]),
    ("names that steer, logged", "run names.onnx -vv", &[]),
    ("names that steer, optimized", "optimize names.onnx out.onnx", &[]),
    ("names that steer, trained", "train names.onnx --check --loss mse", &["no weight of the model"]),
    ("an input that is not there", "run names.onnx --input y=x.npy", &["\\u{1b}[2J"]),
    ("an operator with a name of 10 MB", "run long.onnx", &["nnnn", "bytes ..]"]),
    ("a list of it", "check long.onnx", &["nnnn"]),
    ("an input with a name of 10 MB", "inspect wide.onnx", &[]),
    ("run on it", "run wide.onnx", &[]),
    ("another input of it", "run wide.onnx --input y=x.npy", &["the model has no input 'y'"]),
    ("a broken node with a name of 10 MB", "run broken.onnx", &["bytes ..]"]),
];

#[test]
fn names_in_models() {
    let folder = Folder::new();
    let named = |name: &str| NodeProto { name: Some(name.to_string()), ..node("Relu", &[name], &["y"]) };
    let relu = |name: &str| {
        graph(vec![named(name)], vec![value(name, 1, &["n", "4"])], vec![value("y", 1, &["n", "4"])], vec![])
    };
    let unknown = |op: &str| {
        graph(
            vec![node(op, &["x"], &["y"])],
            vec![value("x", 1, &["4"])],
            vec![value("y", 1, &["4"])],
            vec![],
        )
    };
    folder.model("unknown.onnx", &model(unknown(STEERING)));
    let mut names = model(relu(STEERING));
    names.producer_name = Some(STEERING.to_string());
    folder.model("names.onnx", &names);
    let long = "n".repeat(10 << 20);
    folder.model("long.onnx", &model(unknown(&long)));
    folder.model("wide.onnx", &model(relu(&long)));
    let mut broken = relu("x");
    broken.node = vec![NodeProto { name: Some(long), ..node("Relu", &["nowhere"], &["y"]) }];
    folder.model("broken.onnx", &model(broken));
    folder.write("x.npy", npy_floats("(1, 4)", &[0.0; 4]));
    check(&folder.path(""), NAMES);
}

const TEST_CASES: &[Case] = &[
    ("an input that is a device", "test device", &["a pipe, socket or device"]),
    ("an input that is a pipe", "test pipe", &["a pipe, socket or device"]),
    ("an input of a tebibyte", "test sparse", &["input_0.pb"]),
    ("an input that is a folder", "test folder", &["a folder"]),
    ("a model that is a pipe", "test model", &["a pipe, socket or device"]),
    ("a tolerance without end", "test tol", &["a pipe, socket or device"]),
    ("a tolerance of a tebibyte", "test large", &["expected at most"]),
    ("a check that is a pipe", "test check", &["a pipe, socket or device"]),
    ("links that go in circles", "test circle", &["circle"]),
    ("a folder whose name steers", "test names", &["\\u{1b}[2J"]),
];

#[test]
fn folders_of_test_cases() {
    let folder = Folder::new();
    let good = |name: &str| {
        folder.model(&format!("{name}/model.onnx"), &small());
        let set = folder.path(&format!("{name}/test_data_set_0"));
        std::fs::create_dir_all(&set).unwrap();
        std::fs::write(set.join("output_0.pb"), floats("y", &[1, 4], &[1.0; 4]).encode_to_vec()).unwrap();
        set.join("input_0.pb")
    };
    symlink("/dev/zero", good("device")).unwrap();
    pipe(&good("pipe"));
    sparse(&good("sparse"), b"");
    std::fs::create_dir(good("folder")).unwrap();
    let input =
        |path: PathBuf| std::fs::write(path, floats("x", &[1, 4], &[0.5; 4]).encode_to_vec()).unwrap();
    input(good("model"));
    std::fs::remove_file(folder.path("model/model.onnx")).unwrap();
    pipe(&folder.path("model/model.onnx"));
    input(good("tol"));
    symlink("/dev/zero", folder.path("tol/tol")).unwrap();
    input(good("large"));
    sparse(&folder.path("large/tol"), b"");
    input(good("check"));
    pipe(&folder.path("check/check"));
    input(good("circle"));
    symlink("..", folder.path("circle/round")).unwrap();
    input(good(&format!("names/{STEERING}")));
    std::fs::write(folder.path(&format!("names/{STEERING}/tol")), STEERING).unwrap();
    check(&folder.path(""), TEST_CASES);
}

const PROVIDERS: &[Case] = &[
    ("a device", "run m.onnx --ep /dev/zero", &["/dev/zero", "a pipe, socket or device"]),
    ("a pipe", "run m.onnx --ep ./pipe.so", &["a pipe, socket or device"]),
    ("a folder", "run m.onnx --ep ./folder.so", &["a folder"]),
    ("nothing", "run m.onnx --ep ./nowhere.so", &["nowhere.so"]),
    ("an empty file", "run m.onnx --ep ./empty.so", &["it is not a shared library"]),
    ("a text", "run m.onnx --ep ./text.so", &["it is not a shared library"]),
    ("a program", "run m.onnx --ep ./program.so", &["cannot be loaded"]),
    ("a tebibyte", "run m.onnx --ep ./tebibyte.so", &["it is not a shared library"]),
    ("half of a library", "run m.onnx --ep ./half.so", &["not a complete shared library"]),
    ("the headers of a library", "run m.onnx --ep ./headers.so", &["not a complete shared library"]),
    ("most of a library", "run m.onnx --ep ./most.so", &["not a complete shared library"]),
    ("one for another processor", "run m.onnx --ep ./other.so", &["another processor"]),
    ("one that can be done without", "run m.onnx --ep optional:./half.so --ep cpu", &[]),
    ("a folder of all of them", "providers", &[]),
];

#[test]
fn provider_libraries() {
    let folder = Folder::new();
    folder.model("m.onnx", &small());
    pipe(&folder.path("pipe.so"));
    std::fs::create_dir(folder.path("folder.so")).unwrap();
    folder.write("empty.so", b"");
    folder.write("text.so", b"#!/bin/sh\necho\n");
    sparse(&folder.path("tebibyte.so"), b"");
    std::fs::copy(env!("CARGO_BIN_EXE_ort"), folder.path("program.so")).unwrap();
    let library = std::env::current_exe().unwrap().with_file_name("libprovider_template.so");
    let whole = std::fs::read(library).unwrap();
    for (name, length) in
        [("half.so", whole.len() / 2), ("headers.so", 4096), ("most.so", loaded_bytes(&whole) - 1)]
    {
        folder.write(name, whole.get(..length).unwrap());
    }
    let mut other = whole.clone();
    other.get_mut(18..20).unwrap().copy_from_slice(&[8, 0]);
    folder.write("other.so", &other);
    check(&folder.path(""), PROVIDERS);
}

/// The bytes of a library up to the end of the last segment that is mapped.
fn loaded_bytes(library: &[u8]) -> usize {
    let number = |at: usize, size: usize| {
        library
            .get(at..at + size)
            .unwrap()
            .iter()
            .rev()
            .fold(0usize, |number, byte| number << 8 | usize::from(*byte))
    };
    let segments = (0..number(56, 2)).map(|index| number(32, 8) + index * 56);
    segments.filter(|at| number(*at, 4) == 1).map(|at| number(at + 8, 8) + number(at + 32, 8)).max().unwrap()
}

/// A name, what is done to `training.json`, and words of the error.
type CheckpointCase = (&'static str, &'static [(&'static str, &'static str)], &'static [&'static str]);

const CHECKPOINTS: &[CheckpointCase] = &[
    ("as it was", &[], &[]),
    ("a learning rate below 0", &[("learning_rate", "-1")], &["learning rate is -1"]),
    ("a learning rate of 1e300", &[("learning_rate", "1e300")], &["damaged"]),
    ("a learning rate of 1e20", &[("learning_rate", "1e20")], &["learning rate is 1"]),
    ("a learning rate of text", &[("learning_rate", "\"high\"")], &["damaged"]),
    ("updates without end", &[("updates", "18446744073709551615")], &["18446744073709551615 updates"]),
    ("batches without end", &[("batches", "18446744073709551615")], &["18446744073709551615 batches"]),
    ("gradients without end", &[("pending", "18446744073709551615")], &["18446744073709551615 pending"]),
    ("updates below 0", &[("updates", "-1")], &["damaged"]),
    ("tensors elsewhere", &[("tensors", "\"../victim\"")], &["expected a plain file name"]),
    ("tensors at the root", &[("tensors", "\"/etc/hostname\"")], &["expected a plain file name"]),
    ("tensors of no name", &[("tensors", "\"\"")], &["expected a plain file name"]),
    ("tensors in a pipe", &[("tensors", "\"pipe\"")], &["a pipe, socket or device"]),
    ("tensors that are no tensors", &[("tensors", "\"training.json\"")], &["damaged"]),
    ("another version", &[("version", "4000000000")], &["version 4000000000"]),
    (
        "a place beyond the data",
        &[("properties", "{\"epoch\": 0, \"batch\": 18446744073709551615, \"loss_sum\": 0, \"samples\": 0}")],
        &["checkpoint"],
    ),
    ("properties 10,000 deep", &[("properties", "[[10000")], &["damaged"]),
];

#[test]
fn checkpoints() {
    let folder = Folder::new();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ort-train/tests/data");
    let train = |folder: &Path, more: &[&str]| {
        let mut command = ort();
        command.arg("train").arg(data.join("digits.onnx")).arg("--data").arg(data.join("digits.npz"));
        command.args(["--epochs", "1", "--batch", "200"]).arg("--checkpoint").arg(folder).args(more);
        end_of(command)
    };
    let made = train(&folder.path("first"), &["--stop-after", "1"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let victim = folder.write("victim", "kept");
    let manifest = std::fs::read_to_string(folder.path("first/training.json")).unwrap();
    let mut wrong = Vec::new();
    for (index, (name, changes, words)) in CHECKPOINTS.iter().enumerate() {
        let copy = folder.path(&format!("copy{index}"));
        std::fs::create_dir(&copy).unwrap();
        for entry in std::fs::read_dir(folder.path("first")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
        }
        pipe(&copy.join("pipe"));
        let mut text: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&manifest).unwrap();
        changes.iter().for_each(|(key, _)| drop(text.insert((*key).to_string(), format!("@{key}@").into())));
        let mut text = serde_json::to_string(&text).unwrap();
        for (key, json) in *changes {
            let json = if *json == "[[10000" { "[".repeat(10_000) } else { (*json).to_string() };
            text = text.replace(&format!("\"@{key}@\""), &json);
        }
        std::fs::write(copy.join("training.json"), text).unwrap();
        wrong.extend(judge(name, &train(&copy, &["--resume", "--stop-after", "1"]), words));
    }
    for (name, make) in [
        ("a manifest that is a device", (|path: &Path| symlink("/dev/zero", path).unwrap()) as fn(&Path)),
        ("a manifest that is a pipe", pipe),
        ("a manifest of a tebibyte", |path: &Path| sparse(path, b"{")),
    ] {
        let copy = folder.path(name);
        std::fs::create_dir(&copy).unwrap();
        make(&copy.join("training.json"));
        wrong.extend(judge(name, &train(&copy, &["--resume"]), &["checkpoint"]));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(std::fs::read_to_string(victim).unwrap(), "kept");
}
