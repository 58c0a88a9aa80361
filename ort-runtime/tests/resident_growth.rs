//! A memory limit bounds what a process really holds: kernels whose tables, plans of transforms or
//! texts grow with their data count them. Each case runs in a process of its own, whose resident
//! memory is what the system says.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::expect_used, clippy::panic)]

mod support;

use std::process::Command;

use ort_runtime::ir::{Attribute, Graph, GraphBuilder};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};
use support::{axis, floats, ints};

/// What a process may take besides: code, the graph, threads' stacks, pages of the heap that are
/// only partly used.
const SLACK: usize = 16 << 20;

const MIB: usize = 1 << 20;

/// How the child is told its case.
const CASE: &str = "RESIDENT_GROWTH_CASE";

struct Case {
    name: &'static str,
    make: fn() -> Result<(Graph, Vec<Tensor>)>,
}

/// A node over inputs that are named by their places.
fn one(
    (domain, op): (&str, &str),
    inputs: Vec<Tensor>,
    attrs: &[(&str, Attribute)],
    outputs: usize,
) -> Result<(Graph, Vec<Tensor>)> {
    let mut builder = GraphBuilder::new(op);
    let mut ids = Vec::new();
    for (index, tensor) in inputs.iter().enumerate() {
        let sizes: Vec<String> = tensor.shape().iter().map(usize::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        ids.push(Some(builder.input(&format!("input_{index}"), tensor.dtype(), &sizes)));
    }
    let made = builder.add((domain, op), &ids, attrs, outputs, Vec::new())?;
    Ok((builder.finish(&made)?, inputs))
}

fn bytes(count: usize) -> Result<Tensor> {
    Tensor::from_vec(&[count], (0..count).map(|index| (index * 7 % 251) as u8).collect())
}

fn numbers(shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    Tensor::from_vec(shape, (0..count).map(|index| (index * 7919 % 104_729) as f32).collect())
}

fn texts(count: usize) -> Result<Tensor> {
    Tensor::from_strings(&[count], (0..count).map(|index| format!("text {index}")).collect())
}

fn text(value: &str) -> Attribute {
    Attribute::String(value.into())
}

const CASES: &[Case] = &[
    Case { name: "Pad", make: || one(("", "Pad"), vec![bytes(8 * MIB)?, ints(&[5, 6])?], &[], 1) },
    Case {
        name: "Pad, wrapped",
        make: || one(("", "Pad"), vec![bytes(8 * MIB)?, ints(&[5, 6])?], &[("mode", text("wrap"))], 1),
    },
    Case {
        name: "CenterCropPad",
        make: || one(("", "CenterCropPad"), vec![bytes(8 * MIB)?, ints(&[(9 * MIB) as i64])?], &[], 1),
    },
    Case {
        name: "Resize to the nearest",
        make: || {
            let mut builder = GraphBuilder::new("resize");
            let x = builder.input("input_0", DType::U8, &["8388608"]);
            let scales = builder.constant(floats(&[1], &[1.5])?);
            let resized = builder.add(
                ("", "Resize"),
                &[Some(x), None, Some(scales)],
                &[("mode", text("nearest"))],
                1,
                Vec::new(),
            )?;
            Ok((builder.finish(&resized)?, vec![bytes(8 * MIB)?]))
        },
    },
    Case {
        name: "Resize, interpolated",
        make: || {
            let mut builder = GraphBuilder::new("resize");
            let x = builder.input("input_0", DType::F32, &["2097152"]);
            let scales = builder.constant(floats(&[1], &[1.5])?);
            let resized = builder.add(
                ("", "Resize"),
                &[Some(x), None, Some(scales)],
                &[("mode", text("cubic"))],
                1,
                Vec::new(),
            )?;
            Ok((builder.finish(&resized)?, vec![numbers(&[2 * MIB])?]))
        },
    },
    Case { name: "Unique", make: || one(("", "Unique"), vec![numbers(&[2 * MIB])?], &[], 4) },
    Case {
        name: "Unique by first occurrence",
        make: || one(("", "Unique"), vec![numbers(&[2 * MIB])?], &[("sorted", Attribute::Int(0))], 4),
    },
    Case { name: "Unique of texts", make: || one(("", "Unique"), vec![texts(MIB / 2)?], &[], 4) },
    Case { name: "NonZero", make: || one(("", "NonZero"), vec![numbers(&[4 * MIB])?], &[], 1) },
    Case {
        name: "TopK",
        make: || one(("", "TopK"), vec![numbers(&[2 * MIB])?, ints(&[MIB as i64])?], &axis(0), 2),
    },
    Case {
        name: "TopK without places",
        make: || one(("", "TopK"), vec![numbers(&[2 * MIB])?, ints(&[MIB as i64])?], &axis(0), 1),
    },
    Case { name: "DFT of a power of two", make: || one(("", "DFT"), vec![numbers(&[1, MIB, 1])?], &[], 1) },
    Case { name: "DFT of a prime", make: || one(("", "DFT"), vec![numbers(&[1, 1_000_003, 1])?], &[], 1) },
    Case {
        name: "DFT of another prime",
        make: || one(("", "DFT"), vec![numbers(&[1, 786_433, 2])?], &[], 1),
    },
    Case {
        name: "DFT, one-sided",
        make: || one(("", "DFT"), vec![numbers(&[1, MIB, 1])?], &[("onesided", Attribute::Int(1))], 1),
    },
    Case {
        name: "numbers as texts",
        make: || one(("", "Cast"), vec![numbers(&[MIB])?], &[("to", Attribute::Int(8))], 1),
    },
    Case {
        name: "StringConcat",
        make: || one(("", "StringConcat"), vec![texts(MIB / 2)?, texts(MIB / 2)?], &[], 1),
    },
    Case {
        name: "StringSplit",
        make: || one(("", "StringSplit"), vec![texts(MIB / 2)?], &[("delimiter", text(" "))], 2),
    },
    Case {
        name: "StringNormalizer",
        make: || {
            let upper = [("case_change_action", text("UPPER"))];
            one(("", "StringNormalizer"), vec![texts(MIB / 2)?], &upper, 1)
        },
    },
    Case {
        name: "texts that are repeated",
        make: || one(("", "Tile"), vec![texts(MIB / 4)?, ints(&[4])?], &[], 1),
    },
    Case {
        name: "texts that are chosen",
        make: || {
            let condition = Tensor::from_bools(&[MIB / 2], &vec![true; MIB / 2])?;
            one(("", "Where"), vec![condition, texts(MIB / 2)?, texts(MIB / 2)?], &[], 1)
        },
    },
    Case {
        name: "NonMaxSuppression",
        make: || {
            let boxes = (0..200_000).flat_map(|index| {
                let place = (index * 3) as f32;
                [place, place, place + 1.0, place + 1.0]
            });
            let boxes = Tensor::from_vec(&[1, 200_000, 4], boxes.collect())?;
            // Nothing overlaps beyond all measure: the search for that is quadratic, so that few
            // are asked for.
            one(("", "NonMaxSuppression"), vec![boxes, numbers(&[1, 1, 200_000])?, ints(&[100])?], &[], 1)
        },
    },
    Case {
        name: "LabelEncoder",
        make: || {
            let attrs = [
                ("keys_floats", Attribute::Floats(vec![1.0, 2.0])),
                ("values_int64s", Attribute::Ints(vec![5, 6])),
            ];
            one(("ai.onnx.ml", "LabelEncoder"), vec![numbers(&[MIB])?], &attrs, 1)
        },
    },
    Case {
        name: "FeatureVectorizer",
        make: || one(("ai.onnx.ml", "FeatureVectorizer"), vec![numbers(&[2 * MIB, 2])?], &[], 1),
    },
    Case {
        name: "CategoryMapper",
        make: || {
            let attrs = [
                ("cats_int64s", Attribute::Ints(vec![0, 1])),
                ("cats_strings", Attribute::Strings(vec!["a".into(), "b".into()])),
            ];
            let keys = (0..3 * MIB as i64).map(|index| index % 3).collect();
            one(("ai.onnx.ml", "CategoryMapper"), vec![Tensor::from_vec(&[3 * MIB], keys)?], &attrs, 1)
        },
    },
    Case {
        name: "ArrayFeatureExtractor",
        make: || {
            let indices = (0..2 * MIB as i64).map(|index| index % 8).collect();
            let indices = Tensor::from_vec(&[2 * MIB], indices)?;
            one(("ai.onnx.ml", "ArrayFeatureExtractor"), vec![numbers(&[1, 8])?, indices], &[], 1)
        },
    },
    Case {
        name: "SoftmaxCrossEntropyLoss",
        make: || {
            let labels =
                Tensor::from_vec(&[2 * MIB], (0..2 * MIB).map(|index| (index % 2) as i64).collect())?;
            one(("", "SoftmaxCrossEntropyLoss"), vec![numbers(&[2 * MIB, 2])?, labels], &[], 1)
        },
    },
    Case {
        name: "LinearRegressor",
        make: || {
            let attrs = [
                ("coefficients", Attribute::Floats(vec![0.5, -1.0])),
                ("intercepts", Attribute::Floats(vec![1.0])),
                ("targets", Attribute::Int(1)),
            ];
            one(("ai.onnx.ml", "LinearRegressor"), vec![numbers(&[2 * MIB, 2])?], &attrs, 1)
        },
    },
    Case {
        name: "GridSample",
        make: || {
            let grid = Tensor::from_vec(&[1, 2048, 2048, 2], vec![0.25f32; 8 * MIB])?;
            one(("", "GridSample"), vec![numbers(&[1, 1, 8, 8])?, grid], &[], 1)
        },
    },
    Case {
        name: "RoiAlign",
        make: || {
            let images = Tensor::from_vec(&[MIB], vec![0i64; MIB])?;
            let inputs = vec![numbers(&[1, 1, 8, 8])?, numbers(&[MIB, 4])?, images];
            one(("", "RoiAlign"), inputs, &[("sampling_ratio", Attribute::Int(1))], 1)
        },
    },
    Case {
        name: "RoiAlign of many samples",
        make: || {
            // A million samples of a bin are inside of the image, in one row.
            let far = 4_194_304.0;
            let regions = floats(&[2, 4], &[0.0, -far, 7.0, far, 0.0, -far, 7.0, far])?;
            let inputs = vec![numbers(&[1, 1, 8, 8])?, regions, ints(&[0, 0])?];
            one(("", "RoiAlign"), inputs, &[("sampling_ratio", Attribute::Int(1 << 20))], 1)
        },
    },
    Case {
        name: "MaxRoiPool",
        make: || {
            let regions = floats(&[MIB, 5], &vec![0.0; 5 * MIB])?;
            let size = [("pooled_shape", Attribute::Ints(vec![1, 1]))];
            one(("", "MaxRoiPool"), vec![numbers(&[1, 1, 8, 8])?, regions], &size, 1)
        },
    },
    Case { name: "Bernoulli", make: || one(("", "Bernoulli"), vec![numbers(&[4 * MIB])?], &[], 1) },
    Case { name: "Multinomial", make: || one(("", "Multinomial"), vec![numbers(&[MIB, 2])?], &[], 1) },
    Case {
        name: "LRN",
        make: || one(("", "LRN"), vec![numbers(&[1, 2, 1024, 1024])?], &[("size", Attribute::Int(3))], 1),
    },
];

/// A line of what the system says of this process, in bytes.
fn status(name: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").expect("the system tells");
    let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
    let number = line.trim_start_matches(':').trim().trim_end_matches("kB").trim();
    number.parse::<usize>().expect("a number") * 1024
}

/// The least limit that runs, by what refusals name.
fn least_limit(model: &Model, inputs: &[(&str, Value)]) -> Result<usize> {
    let mut limit = 1;
    for _ in 0..10_000 {
        let session = Session::builder(model).threads(2).memory_limit(limit).build();
        // What the heap keeps of earlier attempts is not to hide what the last one takes.
        let run = |session: Session| session.run(inputs).map(|_| session.trim());
        match session.and_then(run) {
            Ok(()) => return Ok(limit),
            Err(problem) => match problem.shortage().map(|shortage| shortage.sufficient_limit()) {
                Some(named) if named > limit => limit = named,
                _ => panic!("no limit is named: {problem}"),
            },
        }
    }
    panic!("no limit does")
}

/// The child: runs its case at the least limit, and prints by how much it grew.
#[test]
fn child() -> Result<()> {
    let Ok(name) = std::env::var(CASE) else { return Ok(()) };
    let case = CASES.iter().find(|case| case.name == name).expect("a case");
    let (graph, inputs) = (case.make)()?;
    let model = Model::from_graph(graph);
    let names: Vec<String> = model.inputs().into_iter().map(|input| input.name).collect();
    let inputs: Vec<(&str, Value)> =
        names.iter().map(String::as_str).zip(inputs.into_iter().map(Value::from)).collect();
    let limit = least_limit(&model, &inputs)?;
    // The most that was ever resident is from here on that of the run; without the file the kernel
    // is too old to tell.
    let before = status("VmRSS");
    if std::fs::write("/proc/self/clear_refs", "5").is_err() {
        return Ok(());
    }
    let session = Session::builder(&model).threads(2).memory_limit(limit).build()?;
    let outputs = session.run(&inputs)?;
    println!("GREW {} OF {limit}", status("VmHWM").saturating_sub(before));
    drop(outputs);
    Ok(())
}

#[test]
fn a_process_grows_by_no_more_than_the_limit() {
    let program = std::env::current_exe().expect("this program");
    let mut wrong = Vec::new();
    for case in CASES {
        let child = Command::new(&program)
            .args(["--exact", "child", "--nocapture"])
            .env(CASE, case.name)
            .output()
            .expect("a process");
        let text = String::from_utf8_lossy(&child.stdout).into_owned();
        if !child.status.success() {
            wrong.push(format!("{}: {text}{}", case.name, String::from_utf8_lossy(&child.stderr)));
            continue;
        }
        let said = text.split("GREW ").nth(1).and_then(|rest| rest.lines().next());
        let numbers: Vec<usize> =
            said.into_iter().flat_map(|said| said.split(" OF ")).flat_map(str::parse::<usize>).collect();
        let &[grew, limit] = numbers.as_slice() else { continue };
        println!("{}: {} of {} MiB", case.name, grew / MIB, limit / MIB);
        if grew > limit + SLACK {
            wrong.push(format!("{}: grew by {grew} bytes with a limit of {limit}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
