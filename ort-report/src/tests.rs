//! The three forms of one plan, with names that want to steer a terminal and to leave XML.

use ort_core::plan::{KindBytes, MemoryKind, PlanReport, PlannedStep, PlannedValue, ValueKind};
use ort_core::session::BatchSplit;
use ort_core::{MemoryShortage, steers};

use super::*;

const NAME: &str = "<r>\x1b[2J";

/// The plan of two steps: `NAME` of 3 KiB, and an output of 1 KiB computed from it.
fn report() -> PlanReport {
    let step = |node: &str, live_bytes| PlannedStep {
        node: node.to_owned(),
        op: "Relu".to_owned(),
        live_bytes,
        workspace: 0..0,
    };
    let value = |name: &str, bytes, offset, first_step, kind| PlannedValue {
        name: name.to_owned(),
        bytes: Some(bytes),
        offset,
        slab: offset.map(|_| 0),
        first_step,
        last_step: 1,
        kind,
    };
    PlanReport {
        peak_bytes: Some(4096),
        planned_bytes: 4096,
        file_order_bytes: 5120,
        kinds: vec![KindBytes {
            kind: MemoryKind::Activations,
            bytes: 3072,
            symbolic: Some("1536*n".to_owned()),
        }],
        available_bytes: 4000,
        batch_split: Some(BatchSplit { dim: NAME.to_owned(), parts: vec![1; 10], planned_bytes: 3000 }),
        unsplit: None,
        shortage: None,
        slabs: vec![3072],
        weights_bytes: 7,
        lower_bound_bytes: 4096,
        dims: vec![("n".to_owned(), 2), (NAME.to_owned(), 10)],
        steps: vec![step(NAME, 3072), step("y", 4096)],
        values: vec![
            value(NAME, 3072, Some(0), 0, ValueKind::Planned),
            value("y", 1024, None, 1, ValueKind::InPlace),
        ],
        peak_step: 1,
        largest: vec![(NAME.to_owned(), 3072), ("y".to_owned(), 1024)],
        symbolic_peak: Some("2048*n".to_owned()),
    }
}

#[test]
fn a_plan_is_text() {
    let text = plan_text(&report(), Some(8192));
    let lines: Vec<&str> = text.lines().collect();
    let expected = [
        "dimensions        n=2 <r>\\u{1b}[2J=10",
        "activations peak  4.0 KiB (4096 bytes)",
        "in file order     5.0 KiB (5120 bytes)",
        "lower bound       4.0 KiB (4096 bytes)",
        "weights           7 B (7 bytes)",
        "memory limit      8.0 KiB, of which 3.9 KiB are left for a run: it fits only as 1 + 1 + 1 + 1 + \
         1 + 1 + 1 + 1 and 2 more items",
        "batch split: '<r>\\u{1b}[2J' of 10 runs as 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 and 2 more, which \
         takes 2.9 KiB (3000 bytes)",
        "peak, symbolic    2048*n",
        "steps             2, the peak at 1: 'y' (Relu)",
        "",
    ];
    assert_eq!(lines[..expected.len()], expected);
    assert!(text.contains("75.0%") && !text.ends_with('\n'), "{text}");
    assert!(!text.chars().any(|character| character != '\n' && steers(character)), "{text:?}");
    assert!(!plan_text(&report(), None).contains("memory limit"));
    // What does not fit names the limit that suffices.
    let shortage = MemoryShortage { needed: 4096, available: 4000, limit: 8192, largest: Vec::new() };
    let short = PlanReport { batch_split: None, shortage: Some(shortage), ..report() };
    let text = plan_text(&short, Some(8192));
    assert!(text.contains("it does not fit; raise the limit to 8.1 KiB (8288 bytes)"), "{text}");
    let shortage = MemoryShortage { needed: 4095, available: 4000, limit: 8192, largest: Vec::new() };
    let split = PlanReport { batch_split: None, shortage: Some(shortage), ..report() };
    let text = plan_text(&split, Some(8192));
    assert!(
        text.contains("does not fit, even in parts; raise the limit to 8.1 KiB (8287 bytes), which"),
        "{text}"
    );
    let open = plan_text(&PlanReport { peak_bytes: None, ..report() }, None);
    assert!(open.contains("4.0 KiB (4096 bytes) known; some value sizes depend on data"), "{open}");
}

#[test]
fn a_plan_is_json() {
    let json = plan_json(&report());
    assert_eq!((&json["peak_bytes"], &json["fits"]), (&4096.into(), &true.into()));
    assert_eq!(json["kinds"]["activations"]["symbolic"], "1536*n");
    // JSON holds names as they are: who prints it escapes them.
    assert_eq!((&json["dims"][NAME], &json["values"][0]["name"]), (&10.into(), &NAME.into()));
    assert_eq!(json["values"][1]["kind"], "in_place");
    assert_eq!(json["steps"].as_array().map(Vec::len), Some(2));
}

#[test]
fn a_plan_is_a_drawing() {
    let drawing = plan_svg("model", &report());
    assert!(drawing.starts_with("<svg") && drawing.ends_with("</svg>"), "{drawing}");
    for word in ["Memory of model", "peak at step 1: 4.0 KiB alive", "&lt;r&gt;\\u{1b}[2J"] {
        assert!(drawing.contains(word), "{word}: {drawing}");
    }
    assert!(!drawing.contains("<r>"));
}
