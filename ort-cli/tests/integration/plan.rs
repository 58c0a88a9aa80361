//! `ort plan`: its numbers, its tables, its drawing, and sweeps over sizes.

use crate::support::*;
use svg::parser::Event;

fn assert_keys(json: &serde_json::Value, expected: &[&str]) {
    let mut found: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    found.sort_unstable();
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn plan_prints_one_object_with_every_field() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let json = run(&["plan", &path, "--json", "--dim", "n=1000", "--opt-level", "disabled"]).json();
    assert_keys(
        &json,
        &[
            "peak_bytes",
            "planned_bytes",
            "file_order_peak_bytes",
            "weights_bytes",
            "lower_bound_bytes",
            "fits",
            "dims",
            "kinds",
            "peak_step",
            "steps",
            "values",
            "symbolic_peak",
            "batch_split",
            "unsplit",
        ],
    );
    assert_eq!(json["dims"]["n"], 1000);
    let steps = json["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 2);
    assert_keys(&steps[0], &["node", "op", "live_bytes"]);
    assert_eq!((&steps[0]["node"], &steps[0]["op"]), (&"relu_r".into(), &"Relu".into()));
    for value in json["values"].as_array().unwrap() {
        assert_keys(value, &["name", "bytes", "offset", "first_step", "last_step", "kind"]);
        let kind = value["kind"].as_str().unwrap();
        assert!(["planned", "view", "in_place", "dynamic"].contains(&kind), "{kind}");
    }
    // r and y of 16 kB each are the most that can be needed; y alone the least.
    let peak = json["peak_bytes"].as_u64().unwrap();
    assert!((16_000..=33_000).contains(&peak), "{peak}");
    assert!(json["lower_bound_bytes"].as_u64().unwrap() <= peak);
}

/// Rows of 4 by way of rows of 64, which no output's memory holds.
fn wide_between() -> ort_runtime::onnx::proto::ModelProto {
    model(graph(
        vec![
            node("MatMul", &["x", "w"], &["h"]),
            node("Relu", &["h"], &["r"]),
            node("MatMul", &["r", "v"], &["y"]),
        ],
        vec![value("x", 1, &["n", "4"])],
        vec![value("y", 1, &["n", "4"])],
        vec![floats("w", &[4, 64], &[0.5; 256]), floats("v", &[64, 4], &[0.25; 256])],
    ))
}

#[test]
fn a_plan_tells_the_parts_of_a_batch() {
    let folder = Folder::new();
    let path = folder.model("wide.onnx", &wide_between());
    let args = |command, limit| {
        vec![command, path.as_str(), "--dim", "n=1000", "--opt-level", "disabled", "--memory-limit", limit]
    };
    let json = run(&[args("plan", "150000"), vec!["--json"]].concat()).json();
    let split = &json["batch_split"];
    assert_eq!((&split["dim"], &json["fits"]), (&"n".into(), &true.into()));
    let parts: Vec<u64> =
        split["parts"].as_array().unwrap().iter().map(|part| part.as_u64().unwrap()).collect();
    assert!(parts.len() > 1 && parts.iter().sum::<u64>() == 1000, "{parts:?}");
    assert!(split["planned_bytes"].as_u64().unwrap() <= 150_000);
    let words = format!("batch split: 'n' of 1000 runs as {}", parts[0]);
    assert!(run(&args("plan", "150000")).stdout.contains(&words));
    let ran = run(&args("run", "150000"));
    assert!(ran.code == Some(0) && ran.stderr.contains(&words), "{}", ran.stderr);
    let whole = run(&[args("plan", "150000"), vec!["--json", "--no-batch-split"]].concat()).json();
    assert_eq!((&whole["batch_split"], &whole["fits"]), (&serde_json::Value::Null, &false.into()));
    assert_fails(
        "run",
        &run(&[args("run", "150000"), vec!["--no-batch-split"]].concat()),
        &["out of memory"],
    );
}

#[test]
fn a_plan_follows_the_inputs() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let input = folder.write("x.npy", npy_floats("(50, 4)", &[0.5; 200]));
    let peak = |flags: &[&str]| {
        let mut args = vec!["plan", &path, "--json"];
        args.extend(flags);
        run(&args).json()["peak_bytes"].as_u64().unwrap()
    };
    let by_dim = peak(&["--dim", "n=50"]);
    assert_eq!(peak(&["--shape", "x=50x4"]), by_dim);
    assert_eq!(peak(&["--input", &format!("x={input}")]), by_dim);
    assert!(peak(&[]) < by_dim);
    assert_fails("dim", &run(&["plan", &path, "--dim", "m=2"]), &["'m'", "n"]);
}

/// As [`small`], with names that XML and SVG must not take for their own.
fn small_with_odd_names() -> ort_runtime::onnx::proto::ModelProto {
    model(graph(
        vec![node("Relu", &["x"], &["<r> & \"co\""]), node("Add", &["<r> & \"co\"", "x"], &["y"])],
        vec![value("x", 1, &["n", "4"])],
        vec![value("y", 1, &["n", "4"])],
        vec![],
    ))
}

#[test]
fn kinds_add_up_to_the_peak() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let json = run(&["plan", &path, "--json", "--dim", "n=100", "--opt-level", "disabled"]).json();
    let kinds = json["kinds"].as_object().unwrap();
    let bytes = |kind: &str| kinds[kind]["bytes"].as_u64().unwrap();
    let sum: u64 = ["activations", "workspaces", "outputs", "gaps"].map(bytes).iter().sum();
    assert_eq!(Some(sum), json["peak_bytes"].as_u64());
    assert_eq!((bytes("activations"), bytes("outputs")), (1_600, 1_600));
    assert_eq!((bytes("weights_mapped"), bytes("weights_packed")), (0, 0));
    assert_eq!(kinds["outputs"]["symbolic"], "16*n");

    let printed = run(&["plan", &path, "--dim", "n=100", "--opt-level", "disabled"]).stdout;
    for word in ["activations", "weights mapped", "16*n", "in file order", "alive at the peak", "50.0%"] {
        assert!(printed.contains(word), "{word}: {printed}");
    }
}

#[test]
fn a_sweep_says_the_largest_that_fits() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let sweep = |limit: &str, more: &[&str]| {
        let mut args =
            vec!["plan", &path, "--opt-level", "disabled", "--dim", "n=1,64,16", "--memory-limit", limit];
        args.extend(more);
        run(&args)
    };
    let json = sweep("1024", &["--json"]).json();
    let rows = json["sweep"].as_array().unwrap();
    let row = |index: usize| {
        assert_keys(&rows[index], &["dims", "peak_bytes", "planned_bytes", "fits"]);
        (rows[index]["dims"]["n"].as_i64(), rows[index]["peak_bytes"].as_u64(), rows[index]["fits"].as_bool())
    };
    assert_eq!(rows.len(), 3);
    assert_eq!(row(1), (Some(64), Some(64 * 32), Some(false)));
    assert_eq!(row(2), (Some(16), Some(16 * 32), Some(true)));
    assert_eq!(json["largest_that_fits"]["n"], 16);
    assert_eq!((&json["dims"]["n"], &json["fits"]), (&16.into(), &true.into()));
    assert!(sweep("1024", &[]).stdout.contains("the largest that fits 1.0 KiB: n=16"));

    let none = sweep("8", &["--json"]).json();
    assert_eq!((&none["largest_that_fits"], &none["dims"]["n"]), (&serde_json::Value::Null, &1.into()));
    assert!(sweep("8", &[]).stdout.contains("none fits 8 B"));
    // What the plan says fits runs, and the next larger does not.
    for (size, code) in [("n=16", 0), ("n=64", 1)] {
        let finished =
            run(&["run", &path, "--opt-level", "disabled", "--dim", size, "--memory-limit", "1024"]);
        assert_eq!(finished.code, Some(code), "{size}: {}", finished.stderr);
    }
}

/// A sweep and the plan of one size say the same of a size that fits only with a split batch.
#[test]
fn a_sweep_splits_batches_as_a_single_plan_does() {
    let folder = Folder::new();
    let path = folder.model("wide.onnx", &wide_between());
    let plan = |dim: &str, more: &[&str]| {
        let args = ["plan", &path, "--dim", dim, "--opt-level", "disabled", "--memory-limit", "150000"];
        run(&[&args[..], more].concat())
    };
    let sweep = plan("n=10,1000,20000", &["--json"]).json();
    assert_eq!(sweep["largest_that_fits"]["n"], 1000);
    for row in sweep["sweep"].as_array().unwrap() {
        let size = &row["dims"]["n"];
        let single = plan(&format!("n={size}"), &["--json"]).json();
        assert_eq!(row["fits"], single["fits"], "{size}");
        assert_eq!(row["planned_bytes"], single["planned_bytes"], "{size}");
    }
    // The object around the sweep is the plan of the largest that fits.
    let single = plan("n=1000", &["--json"]).json();
    assert_eq!((&sweep["fits"], &sweep["batch_split"]), (&true.into(), &single["batch_split"]));
    let parts = single["batch_split"]["parts"].as_array().unwrap();
    let parts = format!("{} + {}", parts[0], parts[1]);
    assert!(plan("n=10,1000", &[]).stdout.contains(&format!("as {parts}")));
    assert!(plan("n=1000", &[]).stdout.contains(&format!("it fits only as {parts}")));
    // Without splitting neither fits.
    let whole = plan("n=10,1000", &["--json", "--no-batch-split"]).json();
    assert_eq!((&whole["sweep"][1]["fits"], &whole["largest_that_fits"]["n"]), (&false.into(), &10.into()));
}

/// The limit that a plan names for a run that does not fit is the one that the run names, and it
/// suffices.
#[test]
fn a_plan_that_does_not_fit_names_the_limit() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let with = |command: &str, limit: &str| {
        run(&[command, &path, "--opt-level", "disabled", "--dim", "n=64", "--memory-limit", limit])
    };
    let planned = with("plan", "1024").stdout;
    // The limit is for a batch that is split, so it may be below the peak of the whole.
    assert!(planned.contains("it does not fit, even in parts; raise"), "{planned}");
    let named = planned.split("raise the limit to ").nth(1).and_then(|text| text.split('(').nth(1));
    let least = named.and_then(|text| text.split(' ').next()).unwrap();
    let ran = with("run", "1024");
    assert!(ran.stderr.contains(&format!("raise the memory limit to {least} bytes")), "{}", ran.stderr);
    assert!(ran.stderr.contains("the run in parts of 1 item needs"), "{}", ran.stderr);
    assert_eq!(with("run", least).code, Some(0));
}

#[test]
fn several_sizes_are_for_plans_of_dimensions() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let drawing = text(&folder.path("plan.svg"));
    assert_wrong_usage(&run(&["run", &path, "--dim", "n=1,2"]), &["--dim", "`ort plan`"]);
    assert_wrong_usage(&run(&["plan", &path, "--dim", "n=1,2", "--shape", "x=1x4"]), &["--shape"]);
    assert_wrong_usage(&run(&["plan", &path, "--dim", "n=1,2", "--svg", &drawing]), &["--svg"]);
    let all = (0..70).map(|size| size.to_string()).collect::<Vec<_>>().join(",");
    let all = format!("n={all}");
    assert_wrong_usage(&run(&["plan", &path, "--dim", &all, "--dim", &all]), &["4096"]);
    assert_eq!(run(&["plan", &path, "--dim", "n=1,"]).code, Some(2));
}

#[test]
fn a_plan_is_drawn() {
    let folder = Folder::new();
    let path = folder.model("odd.onnx", &small_with_odd_names());
    let file = folder.path("plan.svg");
    let drawing = text(&file);
    let args = ["plan", &path, "--dim", "n=100000", "--opt-level", "disabled", "--svg", &drawing];
    assert_eq!(run(&args).code, Some(0));
    let content = std::fs::read_to_string(&file).unwrap();
    let mut bars = 0;
    for event in svg::read(&content).unwrap() {
        match event {
            Event::Error(problem) => panic!("{problem}"),
            Event::Tag("title", ..) => bars += 1,
            _ => {}
        }
    }
    // r and y; each opens and closes a title.
    assert_eq!(bars, 4);
    for word in
        ["memory (MiB)", "step of the schedule", "peak at step 0", "&lt;r&gt; &amp;", "Alive at the peak"]
    {
        assert!(content.contains(word), "{word}");
    }
    assert!(!content.contains("<r>"));
}

#[test]
fn a_drawing_is_whole_or_not_there() {
    let folder = Folder::new();
    let path = folder.model("small.onnx", &small());
    let before = folder.files();
    let drawing = text(&folder.path("plan.svg"));
    assert_fails("dim", &run(&["plan", &path, "--dim", "m=1", "--svg", &drawing]), &["'m'"]);
    let elsewhere = text(&folder.path("missing").join("plan.svg"));
    assert_fails("folder", &run(&["plan", &path, "--svg", &elsewhere]), &["plan.svg", "folder"]);
    assert_eq!(folder.files(), before);
}
