//! Deadlines and cancellation inside of kernels: a node that takes seconds ends within
//! milliseconds.
//!
//! The nodes are in `golden/long_nodes.txt`. No thread may work for more than [`LATE`] once the run
//! should end. That is processor time, which other work on the machine does not add to; by the
//! clock a node may run on for `DEADLINE_SLACK` milliseconds. `DEADLINE_ONLY` takes the nodes whose
//! names contain it. The times are printed.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod hostile_support;

use std::collections::HashMap;
#[cfg(feature = "image")]
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[cfg(feature = "image")]
use flate2::{Compression, write::ZlibEncoder};
use hostile_support::text;
use ort_runtime::ep::CancelToken;
use ort_runtime::ir::GraphBuilder;
use ort_runtime::onnx::Source;
use ort_runtime::{DType, ErrorKind, Limits, Model, Result, RunOptions, Session, Tensor, Value};
use prost::Message;

const NODES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/long_nodes.txt");

/// When a run ends.
const DEADLINE: Duration = Duration::from_millis(50);

/// How long a thread may work after that.
const LATE: Duration = Duration::from_millis(50);

/// What the tests take turns at: they measure the threads of the whole process.
static PROCESS: Mutex<()> = Mutex::new(());

fn slack() -> Duration {
    let given = std::env::var("DEADLINE_SLACK").ok().and_then(|text| text.parse().ok());
    Duration::from_millis(given.unwrap_or(2000))
}

/// The processor time of each thread so far.
fn worked() -> HashMap<String, Duration> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let time = |task: std::fs::DirEntry| {
        let line = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        let nanoseconds = line.split(' ').next()?.parse().ok()?;
        Some((task.file_name().to_string_lossy().into_owned(), Duration::from_nanos(nanoseconds)))
    };
    tasks.filter_map(|task| time(task.ok()?)).collect()
}

/// Numbers from 0 to 1 in no order, again and again.
fn spread<T: Clone>(count: usize, make: impl Fn(f64) -> T) -> Vec<T> {
    const PERIOD: usize = 65_537;
    let number = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / (1u64 << 24) as f64;
    let some: Vec<T> = (0..PERIOD.min(count) as u64).map(|index| make(number(index))).collect();
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        all.extend_from_slice(&some[..some.len().min(count - all.len())]);
    }
    all
}

fn made_up(dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product();
    match dtype {
        DType::F32 => Tensor::from_vec(shape, spread(count, |x| x as f32)),
        DType::F64 => Tensor::from_vec(shape, spread(count, |x| x)),
        DType::I64 => Tensor::from_vec(shape, spread(count, |x| (x * 100.0) as i64)),
        DType::I32 => Tensor::from_vec(shape, spread(count, |x| (x * 100.0) as i32)),
        DType::U64 => Tensor::from_vec(shape, spread(count, |x| (x * 100.0) as u64)),
        DType::U8 => Tensor::from_vec(shape, spread(count, |x| (x * 255.0) as u8)),
        DType::I8 => Tensor::from_vec(shape, spread(count, |x| (x * 255.0 - 128.0) as i8)),
        DType::Bool => Tensor::from_vec(shape, spread(count, |x| x < 0.5)),
        DType::F16 => Tensor::from_vec(shape, spread(count, half::f16::from_f64)),
        DType::BF16 => Tensor::from_vec(shape, spread(count, half::bf16::from_f64)),
        DType::String => Tensor::from_strings(shape, spread(count, |x| format!("{x} a,b"))),
        other => panic!("no elements of {other}"),
    }
}

fn inputs(session: &Session) -> Result<Vec<(String, Value)>> {
    let mut inputs = Vec::new();
    for spec in session.inputs() {
        let sizes = spec.ty.shape().unwrap_or_default();
        let shape: Vec<usize> = sizes.iter().map(|size| size.as_constant().unwrap() as usize).collect();
        inputs.push((spec.name, made_up(spec.ty.dtype().unwrap(), &shape)?.into()));
    }
    Ok(inputs)
}

/// The names of the cases and the lines of their models.
fn cases() -> Vec<(String, String)> {
    let nodes = std::fs::read_to_string(NODES).unwrap();
    let of_case = |case: &str| {
        let (name, lines) = case.split_once('\n').unwrap();
        match lines.strip_prefix("each ").and_then(|rest| rest.split_once('\n')) {
            Some((words, lines)) => words
                .split(' ')
                .map(|word| (format!("{name}: {word}"), lines.replace("OPERATOR", word)))
                .collect(),
            None => vec![(name.to_string(), lines.to_string())],
        }
    };
    nodes.split("## ").skip(1).flat_map(of_case).collect()
}

/// How a run ended: how long after its time, how long a thread worked after it, and what is wrong,
/// if anything.
struct Overrun {
    late: Duration,
    worked: Duration,
    is_early: bool,
    wrong: Option<String>,
}

fn overrun(session: &Session, inputs: &[(&str, Value)], is_cancelled: bool) -> Overrun {
    let (cancel, start) = (CancelToken::new(), Instant::now());
    let deadline = (!is_cancelled).then(|| start + DEADLINE);
    let options = RunOptions { cancel: cancel.clone(), deadline, ..RunOptions::default() };
    let ((done, late, after), before) = std::thread::scope(|scope| {
        let at_deadline = scope.spawn(|| {
            std::thread::sleep(DEADLINE);
            if is_cancelled {
                cancel.cancel();
            }
            worked()
        });
        let done = session.run_with(inputs, &options).map(|_| ());
        let (late, after) = (start.elapsed().saturating_sub(DEADLINE), worked());
        ((done, late, after), at_deadline.join().unwrap())
    });
    let of_thread = |(thread, time): (&String, &Duration)| Some(time.saturating_sub(*before.get(thread)?));
    let worked = after.iter().filter_map(of_thread).max().unwrap_or_default();
    let is_late = late > slack() || worked > LATE;
    let wrong = match done {
        Ok(()) if is_late => Some(format!("is done {late:?} after its time")),
        Ok(()) => None,
        Err(problem) if problem.kind() != ErrorKind::Cancelled => Some(problem.to_string()),
        Err(_) if is_late => Some(format!("runs on for {late:?}, works for {worked:?}")),
        Err(problem) => {
            let said = if is_cancelled { "was cancelled" } else { "passed its deadline" };
            (!problem.to_string().contains(said)).then(|| problem.to_string())
        }
    };
    Overrun { late, worked, is_early: late.is_zero(), wrong }
}

#[test]
fn nodes_end_at_their_deadline_and_when_they_are_cancelled() -> Result<()> {
    let _turn = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let only = std::env::var("DEADLINE_ONLY").ok();
    let (mut wrong, mut worst, mut count, mut early) = (Vec::new(), Duration::ZERO, 0, Vec::new());
    for (name, lines) in cases() {
        if only.as_ref().is_some_and(|only| !name.contains(only)) {
            continue;
        }
        let (name, lines) = (&name, &lines);
        let model = Model::from_source(Source::from_bytes(text::model(lines).encode_to_vec()))?;
        let inputs = inputs(&Session::builder(&model).threads(1).build()?)?;
        let inputs: Vec<(&str, Value)> =
            inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        for (threads, is_cancelled) in [(1, false), (2, true)] {
            let session = Session::builder(&model).threads(threads).build()?;
            let mut end = overrun(&session, &inputs, is_cancelled);
            if end.wrong.is_some() {
                // What is late once, on a machine that does other work, may be so by chance.
                end = overrun(&session, &inputs, is_cancelled);
            }
            println!("{:>12.1?} {:>12.1?} {threads} {name}", end.worked, end.late);
            worst = worst.max(end.worked);
            early.extend(end.is_early.then(|| name.clone()));
            wrong.extend(end.wrong.map(|problem| format!("{name}, {threads} threads: {problem}")));
            session.trim();
            let held = session.memory().activations;
            if held != 0 {
                wrong.push(format!("{name}: holds {held} bytes"));
            }
        }
        count += 1;
    }
    println!("{count} nodes, the latest by {worst:?}; done before their time: {early:?}");
    // A fast machine is done with some of them before their deadline, which tests nothing.
    assert!(early.len() <= count, "too many runs were done before their deadline: make the nodes longer");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    Ok(())
}

/// Grey images, black throughout, of `side` by `side` pixels.
#[cfg(feature = "image")]
fn images(side: usize) -> Vec<(&'static str, Vec<u8>)> {
    let pixels = vec![0u8; side * side];
    let bytes = |value: usize| (value as u32).to_le_bytes();
    let bmp = [
        b"BM".as_slice(),
        &bytes(1078 + pixels.len()),
        &bytes(0),
        &bytes(1078),
        &bytes(40),
        &bytes(side),
        &bytes(side),
        &[1, 0, 8, 0],
        &[0; 24],
        &[0; 1024],
        &pixels,
    ];
    let pnm = [format!("P5\n{side} {side}\n255\n").as_bytes(), &pixels].concat();
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    (0..side).for_each(|_| encoder.write_all(&vec![0; side + 1]).unwrap());
    let size = (side as u32).to_be_bytes();
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    let header = [&size[..], &size, &[8, 0, 0, 0, 0]].concat();
    for (kind, data) in [(b"IHDR", header), (b"IDAT", encoder.finish().unwrap()), (b"IEND", Vec::new())] {
        let mut sum = flate2::Crc::new();
        sum.update(kind);
        sum.update(&data);
        png.extend((data.len() as u32).to_be_bytes());
        png.extend([&kind[..], &data, &sum.sum().to_be_bytes()].concat());
    }
    vec![("BMP", bmp.concat()), ("PNM", pnm), ("PNG", png)]
}

#[cfg(feature = "image")]
#[test]
fn decoding_an_image_ends_at_its_deadline() -> Result<()> {
    let _turn = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut builder = GraphBuilder::new("decoder");
    let file = builder.input("file", DType::U8, &["bytes"]);
    let pixels = builder.node("ImageDecoder", &[file], &[])?;
    let model = Model::from_graph(builder.finish(&[pixels])?);
    let session = Session::builder(&model).threads(1).build()?;
    for (name, file) in images(16) {
        let outputs = session.run(&[("file", Tensor::from_slice(&[file.len()], &file)?.into())])?;
        assert_eq!(outputs[0].1.tensor()?.to_vec::<u8>()?, [0; 16 * 16 * 3], "{name}");
    }
    for (name, file) in images(10_000) {
        let input = Value::from(Tensor::from_slice(&[file.len()], &file)?);
        for is_cancelled in [false, true] {
            let end = overrun(&session, &[("file", input.clone())], is_cancelled);
            println!("{:>12.1?} {:>12.1?} {name}", end.worked, end.late);
            assert!(end.wrong.is_none(), "{name}: {}", end.wrong.unwrap_or_default());
        }
    }
    Ok(())
}

/// A matrix product of quantized numbers with scales and zero points for each of many columns,
/// which rewrite rules read.
fn quantized_product(columns: usize) -> Result<Model> {
    let mut b = GraphBuilder::new("quantized");
    let x = b.input("x", DType::U8, &["1", "1"]);
    let one_scale = b.constant(Tensor::scalar(0.5f32)?);
    let one_zero = b.constant(Tensor::scalar(0u8)?);
    let weight = b.constant(Tensor::from_vec(&[1, columns], vec![1i8; columns])?);
    let scales = b.constant(Tensor::from_vec(&[columns], vec![0.25f32; columns])?);
    let zeros = b.constant(Tensor::from_vec(&[columns], vec![0i8; columns])?);
    let bias = b.constant(Tensor::from_vec(&[columns], vec![0.125f32; columns])?);
    let x = b.node("DequantizeLinear", &[x, one_scale, one_zero], &[])?;
    let weight = b.node("DequantizeLinear", &[weight, scales, zeros], &[])?;
    let product = b.node("Gemm", &[x, weight, bias], &[])?;
    let y = b.node("QuantizeLinear", &[product, one_scale, one_zero], &[])?;
    Ok(Model::from_graph(b.finish(&[y])?))
}

#[test]
fn building_a_session_ends_at_its_deadline() -> Result<()> {
    let _turn = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let model = quantized_product(1 << 22)?;
    let mut ended = 0;
    for millis in [1, 5, 10, 20, 50, 100, 200, 400] {
        let limits = Limits { deadline: Some(Duration::from_millis(millis)), ..Limits::default() };
        let Err(problem) = Session::builder(&model).threads(1).limits(limits).build() else { continue };
        assert_eq!(problem.kind(), ErrorKind::Cancelled, "{millis} ms: {problem}");
        assert!(problem.to_string().contains("passed its deadline"), "{millis} ms: {problem}");
        ended += 1;
    }
    assert!(ended > 0, "the session was built before its deadline: give it more columns");
    Ok(())
}

/// The same kernels give answers where there is time.
#[test]
fn a_run_after_one_that_was_ended_is_right() -> Result<()> {
    let _turn = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let lines = "input a float[700,700]\ny = MatMul(a, a)\noutput y";
    let model = Model::from_source(Source::from_bytes(text::model(lines).encode_to_vec()))?;
    let session = Session::builder(&model).threads(2).build()?;
    let inputs = inputs(&session)?;
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let expected = session.run(&inputs)?;
    for micros in [1, 50, 200, 1000, 3000] {
        let deadline = Some(Instant::now() + Duration::from_micros(micros));
        let ended = session.run_with(&inputs, &RunOptions { deadline, ..RunOptions::default() });
        assert!(ended.is_ok() || ended.is_err_and(|problem| problem.kind() == ErrorKind::Cancelled));
        assert_eq!(session.run(&inputs)?[0].1.tensor()?.bytes(), expected[0].1.tensor()?.bytes());
    }
    Ok(())
}
