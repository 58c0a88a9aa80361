//! Constant streaming: sessions under memory limits that cannot hold all of a device's constants at
//! once. Every limit must preserve the bits, and a refusal must name the limit that suffices.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "what differs fails the test"
)]

use std::sync::Arc;

use ort_alloc::Budget;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Graph, GraphBuilder};
use ort_core::plan::MemoryKind;
use ort_core::session::{Model, Session, SessionBuilder};
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result};

use crate::on_device::numbers;

/// Opens a device whose memory holds at most this many bytes.
pub type Open<'a> = &'a dyn Fn(Option<usize>) -> Result<Arc<dyn Device>>;

/// The rows of the weight matrices of successive MatMuls, and the columns of the last.
const SIZES: [usize; 10] = [64, 96, 96, 80, 96, 96, 96, 96, 96, 64];

/// The MatMul whose weights the next one also reads.
const READ_TWICE: usize = 4;

/// A chain of MatMuls of several sizes, each with a bias.
pub fn products() -> Result<Graph> {
    let mut builder = GraphBuilder::new("products");
    let mut value = builder.input("x", DType::F32, &["rows", "64"]);
    let mut before = None;
    for (index, sizes) in SIZES.windows(2).enumerate() {
        let [rows, columns] = [sizes[0], sizes[1]];
        let elements: Vec<f32> = numbers(rows * columns, index).iter().map(|x| x / 8.0).collect();
        let weights = match before.filter(|_| index == READ_TWICE + 1) {
            Some(weights) => weights,
            None => builder.constant(Tensor::from_slice(&[rows, columns], &elements)?),
        };
        before = Some(weights);
        let product = builder.node("MatMul", &[value, weights], &[])?;
        let bias = builder.constant(Tensor::from_slice(&[columns], &numbers(columns, index + 50))?);
        value = builder.node("Add", &[product, bias], &[])?;
    }
    builder.finish(&[value])
}

fn run(session: &Session, rows: usize) -> Result<Vec<u32>> {
    let x: Value = Tensor::from_slice(&[rows, 64], &numbers(rows * 64, rows))?.into();
    let outputs = session.run(&[("x", x)])?;
    Ok(outputs[0].1.tensor()?.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())
}

fn builder(model: &Model, device: &Arc<dyn Device>) -> SessionBuilder {
    // A split batch would fit the limits without streaming.
    Session::builder(model).device(device.clone()).batch_split(false)
}

/// The planned bytes of a memory kind.
fn planned(session: &Session, rows: usize, kind: MemoryKind) -> Result<usize> {
    let report = session.plan(&[("rows", rows as i64)])?;
    Ok(report.kinds.iter().filter(|entry| entry.kind == kind).map(|entry| entry.bytes).sum())
}

/// Runs [`products`] on a device under memory limits of the session, from its whole need down to
/// the minimum, and one byte below that.
pub fn session_keeps_to_limits(model: &Model, open: Open<'_>) -> Result<()> {
    let rows = 5;
    let counted = Budget::new(None);
    let whole = builder(model, &open(None)?).budget(&counted).build()?;
    let expected = run(&whole, rows)?;
    // Memory that no one wrote holds NaN. Such results could be equal on both sides.
    assert!(expected.iter().all(|bits| !f32::from_bits(*bits).is_nan()));
    let all = counted.peak();
    let constants = planned(&whole, rows, MemoryKind::DeviceConstants)?;
    assert_eq!(planned(&whole, rows, MemoryKind::DeviceStreamed)?, 0);
    assert_eq!(whole.memory().device_constants, constants);
    // A limit that is far too low makes the refusal name the minimum.
    let least =
        sufficient(run(&builder(model, &open(None)?).memory_limit(all / 10).build()?, rows), all / 10);
    // The limits below are between the minimum and the whole need.
    assert!(least < all * 6 / 10, "{least} of {all}");
    let mut kept_before = usize::MAX;
    // One byte less than the whole need must already lead to streaming.
    for limit in [all, all - 1, all * 8 / 10, all * 6 / 10, least + 1000, least] {
        let (device, budget) = (open(None)?, Budget::new(Some(limit)));
        // Several runs, because the first one fills the cache of constants.
        let session = builder(model, &device).budget(&budget).build()?;
        for _ in 0..3 {
            assert!(run(&session, rows)? == expected, "within {limit} bytes");
        }
        let of = |kind| planned(&session, rows, kind);
        let (kept, window) = (of(MemoryKind::DeviceConstants)?, of(MemoryKind::DeviceWindow)?);
        let planned = session.plan(&[("rows", rows as i64)])?.planned_bytes;
        assert!(
            kept + window + planned <= limit && budget.peak() <= limit,
            "{kept}+{window}+{planned} of {limit}"
        );
        assert_eq!(of(MemoryKind::DeviceStreamed)? == 0, limit >= all, "within {limit} bytes");
        assert_eq!(session.memory().device_constants, kept);
        assert!(device.allocator().stats().max_in_use <= limit, "within {limit} bytes");
        assert!(kept <= kept_before, "more stays within {limit} bytes than within more");
        kept_before = kept;
    }
    let problem = run(&builder(model, &open(None)?).memory_limit(least - 1).build()?, rows);
    assert_eq!(sufficient(problem, least - 1), least);
    Ok(())
}

/// The same under memory limits of the device, which allocates in multiples of `granule` bytes.
pub fn device_keeps_to_limits(model: &Model, granule: usize, open: Open<'_>) -> Result<()> {
    let rows = 5;
    let device = open(None)?;
    let expected = run(&builder(model, &device).build()?, rows)?;
    let all = device.allocator().stats().max_in_use;
    let start = all / 6;
    let least = sufficient(run(&builder(model, &open(Some(start))?).build()?, rows), start);
    assert!(least < all * 6 / 10, "{least} of {all}");
    for limit in [all, all * 8 / 10, all * 6 / 10, least] {
        let device = open(Some(limit))?;
        let session = builder(model, &device).build()?;
        for _ in 0..3 {
            assert!(run(&session, rows)? == expected, "within {limit} bytes");
        }
        let stats = device.allocator().stats();
        let held = stats.total_allocated <= limit.next_multiple_of(granule);
        assert!(held && stats.max_in_use <= limit, "{stats}within {limit} bytes");
        let streamed = planned(&session, rows, MemoryKind::DeviceStreamed)?;
        assert_eq!(streamed == 0, limit == all, "{streamed} bytes are streamed within {limit}");
    }
    let problem = run(&builder(model, &open(Some(least - 1))?).build()?, rows);
    assert_eq!(sufficient(problem, least - 1), least);
    Ok(())
}

/// A larger run evicts constants, and a smaller one uploads them again.
pub fn constants_come_and_go(model: &Model, open: Open<'_>) -> Result<()> {
    let whole = builder(model, &open(None)?).build()?;
    let counted = Budget::new(None);
    run(&builder(model, &open(None)?).budget(&counted).build()?, 2)?;
    let device = open(None)?;
    // What two rows need. The activations of more rows leave no memory for all constants.
    let session = builder(model, &device).memory_limit(counted.peak()).build()?;
    let kept = |rows: usize| -> Result<usize> {
        assert!(run(&session, rows)? == run(&whole, rows)?, "{rows} rows");
        Ok(session.memory().device_constants)
    };
    let all = kept(2)?;
    assert!(kept(60)? < all, "the larger run takes their memory");
    assert_eq!(kept(1)?, all);
    drop(session);
    device.synchronize()?;
    assert_eq!(device.allocator().stats().in_use, 0);
    Ok(())
}

/// Returns the limit that a refusal names, which must exceed this one.
fn sufficient(refused: Result<Vec<u32>>, limit: usize) -> usize {
    let problem = match refused {
        Err(problem) => problem,
        Ok(_) => panic!("a limit of {limit} bytes suffices"),
    };
    assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
    let named = problem.shortage().map(|shortage| shortage.sufficient_limit()).unwrap_or_default();
    assert!(named > limit && problem.to_string().contains(&format!("limit to {named} bytes")), "{problem}");
    named
}
