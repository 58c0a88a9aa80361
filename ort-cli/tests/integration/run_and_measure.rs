//! The commands that run a model: their outputs, their JSON, their files.

use crate::support::*;
use ort_runtime::Tensor;
use ort_runtime::onnx::proto::ModelProto;
use ort_runtime::onnx::tensor_to_proto;

fn keys(json: &serde_json::Value) -> Vec<&str> {
    json.as_object().unwrap().keys().map(String::as_str).collect()
}

fn assert_keys(json: &serde_json::Value, expected: &[&str]) {
    let mut found = keys(json);
    found.sort_unstable();
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn run_prints_and_writes_what_comes_out() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let input = folder.write("x.npy", npy_floats("(1, 4)", &[1.0, -2.0, 3.0, -4.0]));
    let archive = text(&folder.path("out.npz"));
    let finished = run(&["run", &path, "--input", &format!("x={input}"), "--outputs", &archive]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    for word in ["y", "float", "[1, 4]", "min -4.00000", "max 6.00000"] {
        assert!(finished.stdout.contains(word), "{word}: {}", finished.stdout);
    }
    let mut archive = ort_numpy::Archive::open(std::fs::File::open(&archive).unwrap()).unwrap();
    let array = archive.read("y", 1 << 20).unwrap();
    assert_eq!(array.shape(), [1, 4]);
    assert_eq!(array.to_vec::<f32>().unwrap(), [2.0, -2.0, 6.0, -4.0]);
}

#[test]
fn an_archive_of_outputs_goes_in_as_inputs() {
    let folder = Folder::new();
    let first = folder.model("first.onnx", &small());
    let second = folder.model(
        "second.onnx",
        &model(graph(
            vec![node("Neg", &["y"], &["z"])],
            vec![value("y", 1, &["n", "4"])],
            vec![value("z", 1, &["n", "4"])],
            vec![],
        )),
    );
    let archive = text(&folder.path("out.npz"));
    assert_eq!(run(&["run", &first, "--dim", "n=3", "--outputs", &archive]).code, Some(0));
    let finished = run(&["run", &second, "--inputs", &archive]);
    assert!(finished.stdout.contains("[3, 4]"), "{} {}", finished.stdout, finished.stderr);
}

#[test]
fn a_fixed_dimension_has_its_size_in_every_run() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let finished = run(&["run", &path, "--fix-dim", "n=3"]);
    assert!(finished.stdout.contains("[3, 4]"), "{} {}", finished.stdout, finished.stderr);
    let refused = run(&["run", &path, "--fix-dim", "n=3", "--dim", "n=3"]);
    assert_fails("nothing is left to bind", &refused, &["--fix-dim has fixed 'n' to 3"]);
}

#[test]
fn sizes_that_an_input_contradicts_are_refused() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let input = format!("x={}", folder.write("x.npy", npy_floats("(2, 4)", &[1.0; 8])));
    let refused: [(&str, &[&str], &[&str]); 3] = [
        (
            "a file",
            &["--input", &input, "--dim", "n=3"],
            &["--dim n=3", "input 'x'", "axis 0 is the dimension 'n'", "has size 2"],
        ),
        (
            "a shape",
            &["--shape", "x=5x4", "--dim", "n=3"],
            &["--dim n=3", "input 'x'", "axis 0 is the dimension 'n'", "has size 5"],
        ),
        ("both", &["--input", &input, "--shape", "x=3x4"], &["--shape x", "[2, 4]", "[3, 4]"]),
    ];
    for command in ["run", "plan"] {
        for (what, flags, words) in refused {
            assert_fails(what, &run(&[&[command, path.as_str()], flags].concat()), words);
        }
        let fitting = [command, path.as_str(), "--input", &input, "--dim", "n=2", "--shape", "x=2x4"];
        assert_eq!(run(&fitting).code, Some(0), "{command}");
    }
    // `plan` makes a row of each of several sizes.
    let twice = run(&["run", &path, "--dim", "n=3", "--dim", "n=4"]);
    assert_wrong_usage(&twice, &["--dim n", "3 and 4"]);
}

#[test]
fn made_up_inputs_follow_the_seed() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let out = |seed: &str| run(&["run", &path, "--seed", seed]).stdout;
    assert_eq!(out("1"), out("1"));
    assert_ne!(out("1"), out("2"));
}

#[test]
fn files_are_whole_or_not_there() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let trace = text(&folder.path("trace.json"));
    assert_eq!(
        run(&["profile", &path, "--trace", &trace, "--runs", "2", "--opt-level", "disabled"]).code,
        Some(0)
    );
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    assert_eq!((of("X").len(), of("C").len()), (2, 2), "the nodes of one run, and the memory at each");
    let sum = |name: &str| of("X").iter().map(|event| event["args"][name].as_u64().unwrap()).sum::<u64>();
    assert_eq!(sum("allocated") - sum("freed"), 16, "what is left is the output");
    assert!(
        of("C").iter().all(|event| event["name"] == "memory" && event["args"]["live"].as_u64() >= Some(16))
    );
    let before = folder.files().len();
    let nowhere = text(&folder.path("nowhere/out.npz"));
    assert_fails("outputs", &run(&["run", &path, "--outputs", &nowhere]), &["out.npz", "folder"]);
    assert_fails("trace", &run(&["profile", &path, "--trace", &nowhere]), &["out.npz", "folder"]);
    // Onto a folder nothing can be written; nothing half-done stays beside it.
    std::fs::create_dir(folder.path("taken")).unwrap();
    let taken = text(&folder.path("taken"));
    assert_fails("taken", &run(&["run", &path, "--outputs", &taken]), &["taken"]);
    assert_eq!(folder.files().len(), before + 1);
}

#[test]
fn bench_prints_one_object_with_every_field() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let json = run(&["bench", &path, "--json", "--seconds", "0.05", "--threads", "1"]).json();
    assert_keys(
        &json,
        &[
            "model",
            "providers",
            "threads",
            "opt_level",
            "load_ms",
            "first_ms",
            "runs",
            "median_ms",
            "min_ms",
            "mean_ms",
            "p90_ms",
            "p99_ms",
            "cpu_ms",
            "runs_per_second",
            "operations",
            "baseline_rss",
            "peak_rss",
            "rss_anon",
            "rss_file",
            "planned_peak",
            "arena_peak",
            "weights",
            "weights_mapped",
            "weights_cached",
            "device_peak",
            "arena",
            "memory",
        ],
    );
    assert_eq!((json["model"].as_str(), json["threads"].as_u64()), (Some("small"), Some(1)));
    assert!(json["min_ms"].as_f64() <= json["median_ms"].as_f64());
    assert!(json["planned_peak"].as_u64() >= Some(16));
    assert!(run(&["bench", &path, "--seconds", "0.05", "--concurrency", "2"]).stdout.contains("median"));
}

/// The squares of the places of what is not zero.
fn found() -> ModelProto {
    let nodes =
        vec![node("NonZero", &["x"], &["p"]), node("Mul", &["p", "p"], &["s"]), node("Neg", &["s"], &["y"])];
    model(graph(nodes, vec![value("x", 1, &["n"])], vec![value("y", 7, &["1", "m"])], vec![]))
}

#[test]
fn each_memory_switch_has_an_effect() {
    let folder = Folder::new();
    // Bytes are read from a mapped file wherever they are in it.
    let weights = tensor_to_proto("w", &Tensor::from_slice(&[1024], &[3u8; 1024]).unwrap()).unwrap();
    let nodes =
        vec![node("Softmax", &["x"], &["s"]), node("Neg", &["s"], &["y"]), node("Add", &["u", "w"], &["z"])];
    let inputs = vec![value("x", 1, &["64", "1024"]), value("u", 2, &["1024"])];
    let outputs = vec![value("y", 1, &["64", "1024"]), value("z", 2, &["1024"])];
    let fixed = graph(nodes, inputs, outputs, vec![weights]);
    let (fixed, found) = (folder.model("fixed.onnx", &model(fixed)), folder.model("found.onnx", &found()));
    let bench = |path: &str, flags: &[&str]| {
        let sizes: &[&str] = if path == found { &["--dim", "n=50000"] } else { &[] };
        run(&[&["bench", path, "--json", "--seconds", "0", "--threads", "1"], sizes, flags].concat()).json()
    };
    let number = |json: &serde_json::Value, name: &str| json["arena"][name].as_u64().unwrap();
    let plain = bench(&found, &[]);
    assert!(number(&plain, "num_allocs") > 0, "{plain}");
    let same = bench(&found, &["--arena-strategy", "same-as-requested"]);
    assert_eq!(number(&same, "total_allocated"), number(&plain, "total_allocated"));
    let powers = bench(&found, &["--arena-strategy", "power-of-two"]);
    assert_eq!(number(&powers, "total_allocated") % (1 << 20), 0, "{powers}");
    assert!(number(&powers, "total_allocated") > number(&same, "total_allocated"), "{powers}");
    assert!(bench(&found, &["--no-arena"])["arena"].is_null());

    let (planned, unplanned) = (bench(&fixed, &[]), bench(&fixed, &["--no-mem-pattern"]));
    assert!(planned["planned_peak"].is_u64() && unplanned["planned_peak"].is_null(), "{unplanned}");
    assert_eq!(number(&planned, "num_allocs"), 0, "all of it is planned");
    assert!(number(&unplanned, "num_allocs") > 0, "{unplanned}");
    assert!(planned["weights_mapped"].as_u64() > Some(0), "{planned}");
    assert_eq!(bench(&fixed, &["--no-mmap"])["weights_mapped"], 0);
}

#[test]
fn limits_are_measured_for_some_threads() {
    let json = run(&["limits", "--threads", "2"]).json();
    assert_keys(&json, &["threads", "isa", "flops", "copies"]);
    assert_eq!(json["threads"], 2);
    // No processor of this century is slower.
    assert!(json["flops"].as_f64().unwrap() > 1e8, "{json}");
    assert_eq!(json["copies"].as_array().unwrap().len(), 3);
}

#[test]
fn bench_keeps_to_a_rate() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let json = run(&["bench", &path, "--json", "--seconds", "0.25", "--rate", "20", "--threads", "1"]).json();
    // At 0, 50, 100, 150 and 200 ms, and no more on a busy machine.
    assert!((1..=5).contains(&json["runs"].as_u64().unwrap()), "{json}");
    assert!(json["runs_per_second"].as_f64().unwrap() <= 20.5, "{json}");
}

/// A node of `com.microsoft`, whose operator set the model does not import, and an output of
/// another declared shape.
#[test]
fn what_onnx_does_not_allow_is_warned_of_or_refused() {
    let folder = Folder::new();
    let mut model = small();
    let nodes = &mut model.graph.as_mut().unwrap().node;
    let output = nodes.last().unwrap().output[0].clone();
    nodes.last_mut().unwrap().output[0] = "before".to_string();
    let mut gelu = node("Gelu", &["before"], &[output.as_str()]);
    gelu.domain = Some("com.microsoft".to_string());
    nodes.push(gelu);
    let path = folder.model("lax.onnx", &model);
    let warned = run(&["run", &path]);
    assert_eq!(warned.code, Some(0), "{}", warned.stderr);
    assert!(warned.stderr.contains("operator set 'com.microsoft' is not imported"), "{}", warned.stderr);
    let checked = run(&["check", &path]);
    assert_eq!(checked.code, Some(0), "{}", checked.stderr);
    assert!(checked.stdout.contains("opset_import"), "{}", checked.stdout);
    let json = run(&["check", &path, "--json"]).json();
    assert_eq!((&json["ok"], &json["findings"]), (&true.into(), &serde_json::json!([])));
    let warning = &json["warnings"][0];
    assert_eq!((&warning["kind"], &warning["count"]), (&"opset_import".into(), &1.into()));
    assert!(warning["first_place"].as_str().unwrap().starts_with("node '"), "{warning}");
    for command in ["run", "check", "inspect", "plan", "bench", "profile"] {
        assert_fails(command, &run(&[command, &path, "--strict"]), &["is not imported", "strict"]);
    }
    let written = folder.path("written.onnx").display().to_string();
    for command in ["optimize", "compile"] {
        assert_fails(command, &run(&[command, &path, &written, "--strict"]), &["is not imported", "strict"]);
    }
}

#[test]
fn inspect_and_check_tell_what_a_model_is() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let json = run(&["inspect", &path, "--json"]).json();
    assert_eq!(json["operators"]["Relu"], 1);
    assert_eq!(json["inputs"][0]["name"], "x");
    assert!(run(&["inspect", &path]).stdout.contains("Relu"));
    assert!(run(&["inspect", &path, "--graph"]).stdout.contains("Relu"));
    assert!(run(&["inspect", &path, "--claims"]).stdout.contains("cpu"));
    let claims = run(&["inspect", &path, "--claims", "--json"]).json();
    let first = &claims["claims"][0];
    assert_eq!((&first["provider"], &first["refusals"]), (&"cpu".into(), &serde_json::json!({})));
    assert_eq!(first["reason"], "it is the first provider that claims it");
    assert_eq!(run(&["check", &path]).code, Some(0));
    assert_eq!(run(&["check", &path, "--json"]).json()["ok"], true);

    let mut broken = small();
    broken.graph.as_mut().unwrap().node = vec![
        node("Frobnicate", &["x"], &["a"]),
        node("Frobnicate", &["a"], &["b"]),
        node("Twiddle", &["b"], &["y"]),
    ];
    let path = folder.model("broken.onnx", &broken);
    let finished = run(&["check", &path, "--json"]);
    assert_fails("check", &finished, &["broken.onnx", "2 findings", "frobnicate_a", "not known"]);
    let json: serde_json::Value = serde_json::from_str(&finished.stdout).unwrap();
    let findings = json["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 2);
    assert_eq!((&findings[0]["count"], &findings[0]["first_node"]), (&2.into(), &"frobnicate_a".into()));
}

/// The line about an output is made without a copy of it: doubles of these bytes alone would take a
/// gibibyte.
#[cfg(target_os = "linux")]
#[test]
fn a_large_output_is_summed_up_where_it_is() {
    let folder = Folder::new();
    let large = graph(
        vec![node("Expand", &["x", "shape"], &["y"])],
        vec![value("x", 2, &["1"])],
        vec![open_value("y", 2)],
        vec![ints("shape", &[1], &[128 << 20])],
    );
    let path = folder.model("large.onnx", &model(large));
    let input = folder.write("x.npy", npy("|u1", "(1,)", &[7]));
    let command = "ulimit -v 800000 && exec \"$0\" \"$@\"";
    let finished = std::process::Command::new("sh")
        .args(["-c", command, env!("CARGO_BIN_EXE_ort"), "run", &path, "--threads", "1"])
        .args(["--memory-limit", "140000000", "--input", &format!("x={input}")])
        .output()
        .unwrap();
    let (stdout, stderr) =
        (String::from_utf8_lossy(&finished.stdout), String::from_utf8_lossy(&finished.stderr));
    assert!(finished.status.success(), "{stdout} {stderr}");
    assert!(stdout.contains("min 7.00000, mean 7.00000, max 7.00000: 7.00000"), "{stdout}");
}
