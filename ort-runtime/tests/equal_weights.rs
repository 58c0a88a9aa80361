//! Models that differ hold the packed weights that are equal once, whatever becomes of the others.
#![cfg(feature = "cpu")]
#![allow(clippy::expect_used)]

mod support;

use std::path::PathBuf;
use std::sync::{Barrier, Mutex, PoisonError};

use ort_alloc::{Allocator, HostAllocator};
use ort_runtime::ir::GraphBuilder;
use ort_runtime::onnx::{ModelInfo, Weights, save};
use ort_runtime::plan::MemoryKind;
use ort_runtime::{Budget, DType, Model, Result, Session, SessionBuilder, Tensor, Value};
use support::numbers;

const WIDTH: usize = 1024;
/// What the two weights of the encoder take packed, at least.
const ENCODER: usize = 2 * WIDTH * WIDTH * 4;
/// What a head of its own may take, with what is rounded up.
const HEAD: usize = 1 << 20;

/// Elements that are not the same in all lines.
fn weight(shape: &[usize], seed: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let element = |index: usize| ((index * (index / 7 + seed) % 1021) as f32 - 510.0) / 4096.0;
    Tensor::from_vec(shape, (0..count).map(element).collect())
}

/// A folder of models with the same encoder and a head each.
struct Variants(tempfile::TempDir);

impl Variants {
    fn new(heads: usize) -> Result<Variants> {
        let variants = Variants(tempfile::tempdir().expect("a folder"));
        for head in 0..heads {
            let mut builder = GraphBuilder::new("variant");
            let x = builder.input("x", DType::F32, &["rows", "1024"]);
            let one = builder.constant(weight(&[WIDTH, WIDTH], 1)?);
            let other = builder.constant(weight(&[WIDTH, WIDTH], 2)?);
            let hidden = builder.node("MatMul", &[x, one], &[])?;
            let hidden = builder.node("Relu", &[hidden], &[])?;
            let hidden = builder.node("MatMul", &[hidden, other], &[])?;
            let last = builder.constant(weight(&[WIDTH, 40], 10 + head)?);
            let result = builder.node("MatMul", &[hidden, last], &[])?;
            save(&builder.finish(&[result])?, &ModelInfo::default(), variants.file(head), &Weights::Inside)?;
        }
        Ok(variants)
    }

    fn file(&self, head: usize) -> PathBuf {
        self.0.path().join(format!("{head}.onnx"))
    }

    /// A session that has run, and so has packed its weights.
    fn session(&self, head: usize) -> Result<Session> {
        let session = Session::builder(&Model::load(self.file(head))?).threads(2).build()?;
        bits(&session)?;
        Ok(session)
    }

    /// The output of the variant while its weights are not shared.
    fn alone(&self, head: usize) -> Result<Vec<u8>> {
        bits(&self.session(head)?)
    }
}

fn bits(session: &Session) -> Result<Vec<u8>> {
    let outputs = session.run(&[("x", numbers(&[3, WIDTH], 5)?.into())])?;
    let bytes = outputs[0].1.tensor()?.bytes().expect("host memory").to_vec();
    drop(outputs);
    session.trim();
    Ok(bytes)
}

/// The bytes of the host that this process has allocated for tensors, one test at a time.
fn held() -> usize {
    HostAllocator::global().stats().in_use
}

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn one_copy_serves_all_and_lives_as_long_as_the_last() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let variants = Variants::new(2)?;
    let expected = [variants.alone(0)?, variants.alone(1)?];
    assert_ne!(expected[0], expected[1], "the heads differ");
    for first_goes_first in [true, false] {
        let start = held();
        let sessions = [variants.session(0)?, variants.session(1)?];
        let packed = sessions.each_ref().map(|session| session.memory().packed);
        assert!(packed.iter().all(|packed| *packed >= ENCODER), "each counts all that it uses: {packed:?}");
        assert!(held() - start <= ENCODER + 2 * HEAD, "{} bytes are held", held() - start);
        for (session, expected) in sessions.iter().zip(&expected) {
            let shared = session.memory().packed_shared;
            assert!((ENCODER..ENCODER + HEAD).contains(&shared), "{shared} bytes are shared");
            assert_eq!(&bits(session)?, expected);
        }
        let [one, other] = sessions;
        let (goes, stays, head) = if first_goes_first { (one, other, 1) } else { (other, one, 0) };
        drop(goes);
        assert_eq!((stays.memory().packed_shared, stays.memory().packed), (0, packed[head]));
        assert_eq!(bits(&stays)?, expected[head]);
        assert!(held() - start <= ENCODER + HEAD);
        drop(stays);
        assert_eq!(held(), start, "all is given back");
    }
    Ok(())
}

#[test]
fn sessions_that_are_made_at_the_same_time_share() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let variants = Variants::new(4)?;
    let expected = (0..4).map(|head| variants.alone(head)).collect::<Result<Vec<_>>>()?;
    let (start, barrier) = (held(), Barrier::new(4));
    let sessions = std::thread::scope(|scope| {
        let (variants, barrier) = (&variants, &barrier);
        let build = |head| {
            move || {
                barrier.wait();
                variants.session(head)
            }
        };
        let threads: Vec<_> = (0..4).map(|head| scope.spawn(build(head))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>>>()
    })?;
    assert!(held() - start <= ENCODER + 4 * HEAD, "{} bytes are held", held() - start);
    for (session, expected) in sessions.iter().zip(&expected) {
        assert_eq!(&bits(session)?, expected);
    }
    drop(sessions);
    assert_eq!(held(), start);
    Ok(())
}

/// A limit holds for what a session uses, shared or not, so that it never depends on others that
/// go.
#[test]
fn every_budget_counts_all_that_its_sessions_use() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let variants = Variants::new(2)?;
    let expected = variants.alone(1)?;
    let first = variants.session(0)?;
    let budget = Budget::new(Some(ENCODER + 2 * HEAD));
    let model = Model::load(variants.file(1))?;
    let second = Session::builder(&model).threads(2).budget(&budget).build()?;
    assert_eq!(bits(&second)?, expected);
    assert!(second.memory().packed_shared >= ENCODER, "{:?}", second.memory());
    assert!(budget.in_use() >= ENCODER);
    // Weights that do not fit pass through the window, though another session has them.
    let limited = Session::builder(&model).threads(2).memory_limit(ENCODER).build()?;
    assert_eq!(bits(&limited)?, expected);
    assert!(limited.memory().packed < ENCODER);
    drop((first, second));
    assert_eq!(bits(&limited)?, expected);
    Ok(())
}

/// The columns of a weight that is too small, when packed, to be shared between programs.
const SMALL: usize = 8;

/// A MatMul for each of two inputs. Both row counts have the same dimension name.
fn two_products(folder: &tempfile::TempDir) -> Result<Model> {
    let mut builder = GraphBuilder::new("two products");
    let a = builder.input("a", DType::F32, &["rows", "1024"]);
    let b = builder.input("b", DType::F32, &["rows", &SMALL.to_string()]);
    let large = builder.constant(weight(&[WIDTH, WIDTH], 3)?);
    let small = builder.constant(weight(&[SMALL, SMALL], 4)?);
    let products = [builder.node("MatMul", &[a, large], &[])?, builder.node("MatMul", &[b, small], &[])?];
    let file = folder.path().join("two_products.onnx");
    save(&builder.finish(&products)?, &ModelInfo::default(), &file, &Weights::Inside)?;
    Model::load(file)
}

fn rows(a: usize, b: usize) -> Result<[(&'static str, Value); 2]> {
    Ok([("a", numbers(&[a, WIDTH], 5)?.into()), ("b", numbers(&[b, SMALL], 6)?.into())])
}

/// Runs with equal row counts, then with different ones, which compiles the model again. Checks the
/// reported memory against the allocator's. Returns the packed bytes.
fn packed_for_runs_on(session: &Session, start: usize) -> Result<usize> {
    for inputs in [rows(3, 3)?, rows(3, 5)?, rows(4, 4)?] {
        drop(session.run(&inputs)?);
    }
    let memory = session.memory();
    assert_eq!(memory.slabs + memory.outputs + memory.outputs_waiting + memory.dynamic, memory.idle);
    session.trim();
    let memory = session.memory();
    assert_eq!(memory.packed + memory.weights_copied, held() - start, "{memory:?}");
    let planned = |inputs: [(&str, Value); 2]| session.plan_for_inputs(&inputs);
    for report in [session.plan(&[])?, planned(rows(3, 3)?)?, planned(rows(3, 5)?)?] {
        let packed = report.kinds.iter().find(|entry| entry.kind == MemoryKind::WeightsPacked);
        assert_eq!(packed.map(|entry| entry.bytes), Some(memory.packed));
    }
    Ok(memory.packed)
}

/// Weights that are packed again for runs that contradict dimension names count as the session's.
#[test]
fn a_session_tells_what_it_packs_again() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (folder, cache) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let model = two_products(&folder)?;
    let build = |settings: fn(SessionBuilder) -> SessionBuilder| {
        settings(Session::builder(&model).threads(2)).build()
    };
    let start = held();
    for limit in [None, Some(64 << 20)] {
        let session = match limit {
            None => build(|settings| settings)?,
            Some(_) => build(|settings| settings.memory_limit(64 << 20))?,
        };
        drop(session.run(&rows(3, 3)?)?);
        let once = session.memory().packed;
        let packed = packed_for_runs_on(&session, start)?;
        // The two programs share the large packed weight but not the small one.
        assert!((once + 1..once + WIDTH * WIDTH).contains(&packed), "{once} bytes, then {packed}");
        drop(session);
        assert_eq!(held(), start, "all is given back");
    }
    // The compiled cache holds the first program only, so that the second packs into memory.
    let cached = Session::builder(&model).threads(2).cache_dir(cache.path()).build()?;
    assert_eq!(cached.memory().packed, 0);
    assert!(packed_for_runs_on(&cached, start)? >= WIDTH * WIDTH * 4);
    Ok(())
}

/// What the system says, too.
#[test]
#[cfg(target_os = "linux")]
fn the_process_has_one_copy() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let anonymous = || {
        let status = std::fs::read_to_string("/proc/self/status").expect("the system tells");
        let line = status.lines().find(|line| line.starts_with("RssAnon")).expect("anonymous memory");
        let number = line.split_whitespace().nth(1).and_then(|field| field.parse::<usize>().ok());
        number.expect("a number") << 10
    };
    let variants = Variants::new(2)?;
    let first = variants.session(0)?;
    bits(&first)?;
    let one = anonymous();
    let second = variants.session(1)?;
    bits(&second)?;
    let both = anonymous();
    assert!(both < one + ENCODER / 2, "{one} bytes with one session, {both} with both");
    Ok(())
}

/// Filters that batch normalization scales are folded by the build and packed by the first run,
/// which frees what was folded.
#[test]
fn folded_weights_are_freed_once_they_are_packed() -> Result<()> {
    const FILTERS: usize = 128;
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let mut builder = GraphBuilder::new("normalized");
    let x = builder.input("x", DType::F32, &["1", &FILTERS.to_string(), "8", "8"]);
    let mut value = x;
    for layer in 0..3 {
        let filters = builder.constant(weight(&[FILTERS, FILTERS, 3, 3], layer)?);
        value = builder.node("Conv", &[value, filters], &[])?;
        let mut inputs = vec![value];
        for parameter in 0..4 {
            let numbers: Vec<f32> = (0..FILTERS).map(|at| 1.0 + (at * parameter) as f32 / 512.0).collect();
            inputs.push(builder.constant(Tensor::from_vec(&[FILTERS], numbers)?));
        }
        value = builder.node("BatchNormalization", &inputs, &[])?;
    }
    let file = folder.path().join("normalized.onnx");
    save(&builder.finish(&[value])?, &ModelInfo::default(), &file, &Weights::Inside)?;
    let model = Model::load(file)?;
    let run = |session: &Session| -> Result<Vec<u8>> {
        let outputs = session.run(&[("x", weight(&[1, FILTERS, 8, 8], 9)?.into())])?;
        Ok(outputs[0].1.tensor()?.bytes().expect("host memory").to_vec())
    };
    let expected = run(&Session::builder(&model).memory_limit(64 << 20).build()?)?;
    let start = held();
    let session = Session::builder(&model).threads(2).build()?;
    let (folded, before, constants) =
        (3 * FILTERS * FILTERS * 9 * 4, session.memory(), session.constant_bytes());
    assert_eq!(before.packed, 0, "a build packs nothing");
    assert!(before.weights_copied >= folded, "{before:?}");
    assert_eq!(before.weights_copied, held() - start);
    for _ in 0..2 {
        assert_eq!(run(&session)?, expected);
        session.trim();
        let after = session.memory();
        assert!(after.packed >= folded, "{after:?}");
        assert_eq!(after.weights_copied + folded, before.weights_copied);
        assert_eq!(after.packed + after.weights_copied, held() - start);
        assert_eq!(session.constant_bytes(), constants);
        assert_eq!(constants, after.packed + after.weights_copied);
    }
    Ok(())
}
