//! The device itself: what a second run makes, limits of memory and of bindings, integers that do
//! not fit.

mod support;

use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::{Device, ExecutionProvider, ProviderOptions};
use ort_core::ir::{Graph, GraphBuilder};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result};
use ort_ep_wgpu::{WgpuDevice, WgpuProvider};
use support::{numbers, open};

/// `x * x + exp(-x)` with x of [rows, 64].
fn chain() -> Result<Graph> {
    let mut builder = GraphBuilder::new("chain");
    let x = builder.input("x", DType::F32, &["rows", "64"]);
    let square = builder.node("Mul", &[x, x], &[])?;
    let negative = builder.node("Neg", &[x], &[])?;
    let power = builder.node("Exp", &[negative], &[])?;
    let sum = builder.node("Add", &[square, power], &[])?;
    builder.finish(&[sum])
}

fn session(device: &Arc<WgpuDevice>) -> Result<Session> {
    Session::builder(&Model::from_graph(chain()?)).device(device.clone()).batch_split(false).build()
}

/// Runs the chain on `rows` rows and compares it with the host's arithmetic.
fn check(session: &Session, rows: usize, seed: usize) -> Result<()> {
    let x = numbers(rows * 64, seed);
    let outputs = session.run(&[("x", Tensor::from_slice(&[rows, 64], &x)?.into())])?;
    let sums = outputs[0].1.tensor()?.to_vec::<f32>()?;
    for (x, sum) in x.iter().zip(sums) {
        assert!((sum - (x * x + (-x).exp())).abs() < 1e-5, "{x}: {sum}");
    }
    Ok(())
}

#[test]
fn a_run_like_one_before_makes_nothing_but_submissions() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let session = session(&device)?;
    for rows in [3, 100] {
        check(&session, rows, rows)?;
        check(&session, rows, rows + 1)?;
    }
    let before = device.counters();
    for seed in 0..3 {
        check(&session, 100, seed)?;
    }
    let after = device.counters();
    assert_eq!(
        (after.buffers, after.bind_groups, after.pipelines),
        (before.buffers, before.bind_groups, before.pipelines)
    );
    assert_eq!(after.submissions, before.submissions + 3, "one submission a run");
    Ok(())
}

#[test]
fn shapes_in_turn_make_no_buffers_after_the_first_of_each() -> Result<()> {
    // (rows of the runs in turn, the bound on bytes)
    let turns: [(&[usize], Option<&str>); 4] =
        [(&[100, 200], None), (&[100, 333], None), (&[400, 90, 210], None), (&[100, 333], Some("300000"))];
    for (turn, limit) in turns {
        let limit: Vec<(&str, &str)> = limit.map(|limit| ("memory_limit", limit)).into_iter().collect();
        let Some(device) = open(&limit) else { return Ok(()) };
        let session = session(&device)?;
        let both = |round: usize| turn.iter().try_for_each(|rows| check(&session, *rows, rows + round));
        both(0)?;
        let (groups, held) = (device.counters().bind_groups, device.allocator().stats().total_allocated);
        // Staging buffers come back when the device is done with them, which may be later than the
        // next one is needed.
        both(1)?;
        let buffers = device.counters().buffers;
        (2..=20).try_for_each(both)?;
        assert_eq!(device.counters().buffers, buffers, "{turn:?}");
        // A new buffer would have bindings of its own.
        assert_eq!(device.counters().bind_groups, groups, "{turn:?}");
        assert_eq!(device.allocator().stats().total_allocated, held, "{turn:?}");
    }
    Ok(())
}

#[test]
fn shapes_that_grow_do_not_pile_up() -> Result<()> {
    // (the first shape, the last, the distance, the bound on bytes)
    for (first, last, by, limit) in [(1, 200, 1, None), (10, 400, 90, None), (1, 200, 3, Some("120000"))] {
        let options = limit.map(|limit: &str| ("memory_limit", limit));
        let Some(device) = open(options.as_slice()) else { return Ok(()) };
        let session = session(&device)?;
        let mut largest = 0;
        for rows in (first..=last).step_by(by) {
            check(&session, rows, rows)?;
            let stats = device.allocator().stats();
            largest = largest.max(stats.max_alloc_size);
            let bound = limit.and_then(|limit| limit.parse().ok()).unwrap_or(3 * largest);
            assert!(stats.total_allocated <= bound, "{rows} rows: {stats}");
        }
        drop(session);
        device.allocator().trim();
        assert_eq!(device.allocator().stats().total_allocated, 0);
    }
    Ok(())
}

#[test]
fn what_the_device_has_no_memory_for_is_refused_and_less_runs() -> Result<()> {
    let Some(device) = open(&[("memory_limit", "100000")]) else { return Ok(()) };
    let session = session(&device)?;
    let x = Tensor::from_slice(&[1000, 64], &vec![1.0f32; 64_000])?;
    let problem = session.run(&[("x", x.into())]).expect_err("it needs more than the limit");
    assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
    // The padding of this size overflows.
    assert!(device.allocator().allocate(usize::MAX - 1, 64).is_err());
    check(&session, 10, 0)
}

#[test]
fn integers_beyond_32_bits_are_refused_with_the_number() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let mut builder = GraphBuilder::new("minimum");
    let (a, b) = (builder.input("a", DType::I64, &["3"]), builder.input("b", DType::I64, &["3"]));
    let least = builder.node("Min", &[a, b], &[])?;
    let model = Model::from_graph(builder.finish(&[least])?);
    let session = Session::builder(&model).device(device).build()?;
    let run = |a: [i64; 3], b: [i64; 3]| -> Result<Vec<i64>> {
        let values: [Value; 2] = [Tensor::from_slice(&[3], &a)?.into(), Tensor::from_slice(&[3], &b)?.into()];
        let [a, b] = values;
        session.run(&[("a", a), ("b", b)])?[0].1.tensor()?.to_vec()
    };
    let (low, high) = (i64::from(i32::MIN), i64::from(i32::MAX));
    assert_eq!(run([1, low, high], [-1, 5, high])?, [-1, low, high]);
    let problem = run([1, 2, 3], [0, high + 1, 0]).expect_err("it does not fit");
    assert_eq!(problem.kind(), ErrorKind::NotImplemented);
    assert!(problem.to_string().contains("2147483648"), "{problem}");
    Ok(())
}

/// A tensor of 144 MiB takes two bindings of the 128 MiB that every device has.
#[test]
fn tensors_larger_than_a_binding_are_bound_in_parts() -> Result<()> {
    let Some(device) = open(&[("limits", "minimum")]) else { return Ok(()) };
    let count = 36 << 20;
    let mut builder = GraphBuilder::new("large");
    let x = builder.input("x", DType::F32, &["n"]);
    let result = builder.node("Neg", &[x], &[])?;
    let session = Session::builder(&Model::from_graph(builder.finish(&[result])?)).device(device).build()?;
    let x: Vec<f32> = (0..count).map(|index| index as f32).collect();
    let outputs = session.run(&[("x", Tensor::from_slice(&[count], &x)?.into())])?;
    let negative = outputs[0].1.tensor()?.to_vec::<f32>()?;
    let wrong = x.iter().zip(&negative).position(|(x, negative)| -x != *negative);
    assert_eq!(wrong, None);
    Ok(())
}

#[test]
fn a_lost_device_is_an_error_and_another_one_runs() -> Result<()> {
    let (Some(device), Some(other)) = (open(&[]), open(&[])) else { return Ok(()) };
    let lost = session(&device)?;
    check(&lost, 5, 0)?;
    device.destroy();
    for _ in 0..2 {
        let x = Tensor::from_slice(&[5, 64], &numbers(320, 0))?;
        let problem = lost.run(&[("x", x.into())]).expect_err("the device is lost");
        assert_eq!(problem.kind(), ErrorKind::EpFail, "{problem}");
        assert!(problem.to_string().contains("lost"), "{problem}");
    }
    assert!(device.is_lost() && device.check().is_err());
    let problem = session(&device).err().map(|problem| problem.to_string()).unwrap_or_default();
    assert!(problem.contains("the device is lost"), "{problem}");
    check(&session(&other)?, 5, 0)
}

#[test]
fn sessions_with_the_same_options_share_a_device() -> Result<()> {
    if open(&[]).is_none() {
        return Ok(());
    }
    let open = |limit: &str| {
        let options = ProviderOptions::from([("memory_limit".to_owned(), limit.to_owned())]);
        WgpuProvider.open(0, &options).map(|device| device.memory())
    };
    let first = WgpuProvider.open(0, &ProviderOptions::new())?;
    assert_eq!(WgpuProvider.open(0, &ProviderOptions::new())?.memory(), first.memory());
    assert_ne!(open("1000")?, first.memory());
    let problem = WgpuProvider.open(99, &ProviderOptions::new()).err().map(|problem| problem.to_string());
    assert!(problem.as_ref().is_some_and(|problem| problem.contains("no adapter 99")), "{problem:?}");
    Ok(())
}
