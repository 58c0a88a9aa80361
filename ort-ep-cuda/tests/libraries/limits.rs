//! Workspaces of libraries within the limits of a session and of its device: less where there is
//! less, and never so much that a run is refused which could do with less.

use ort_core::dtype::DType;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::rewrite::Level;
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result};
use ort_testkit::on_device::numbers;

use super::support::{is_emulated, with_device};
use super::{Found, LT, check_close, doubles, find, profiled, rows};

const KIB: usize = 1 << 10;
/// What the emulator's algorithms take, with the bytes by which they are aligned.
const LEAST: usize = 64 * KIB + 256;
const MOST: usize = (8 << 20) + 256;

/// `Tanh` of a product of [rows, 256] by [256, 256], `copies` times side by side, and its sums:
/// where there are several the product is not where most is alive.
fn model(copies: usize) -> Result<Model> {
    let mut builder = GraphBuilder::new("limits");
    let x = builder.input("x", DType::F32, &["rows", "256"]);
    let weights = builder.constant(Tensor::from_slice(&[256, 256], &numbers(256 * 256, 1))?);
    let product = builder.node("MatMul", &[x, weights], &[])?;
    let product = builder.node("Tanh", &[product], &[])?;
    let wide = builder.node("Concat", &vec![product; copies], &[("axis", Attribute::Int(1))])?;
    let wide = builder.node("Tanh", &[wide], &[])?;
    let sums = builder.node("ReduceSum", &[wide], &[("keepdims", Attribute::Int(0))])?;
    Ok(Model::from_graph(builder.finish(&[sums])?))
}

fn limited(found: &Found, model: &Model, limit: usize) -> Result<Session> {
    let builder = Session::builder(model).device(found.device.clone()).opt_level(Level::Disabled);
    builder.batch_split(false).memory_limit(limit).build()
}

/// What a session takes for the run: its plan and all constants.
fn whole(found: &Found, model: &Model, inputs: &[(&str, Value)]) -> Result<usize> {
    let session = limited(found, model, usize::MAX)?;
    session.run(inputs)?;
    let memory = session.memory();
    Ok(memory.device_constants + memory.activations_peak)
}

/// The workspace that kernels say a library's algorithm has.
fn workspace(kernels: &[String]) -> Option<usize> {
    let of_library = kernels.iter().find(|kernel| kernel.starts_with("cuBLASLt "))?;
    of_library.rsplit(", ").next()?.strip_suffix(" bytes")?.parse().ok()
}

#[test]
fn any_limit_is_kept_to_or_refused_with_one_that_is() -> Result<()> {
    if with_device("limits::any_limit_is_kept_to_or_refused_with_one_that_is")?.is_none() {
        return Ok(());
    }
    let Some(found) = find(&[LT], &[])? else { return Ok(()) };
    let inputs = rows(64, 0)?;
    for copies in [1, 6] {
        let model = model(copies)?;
        let (_, expected) = profiled(&super::session(&found.device, &model)?, &inputs, 0)?;
        let (mut smallest, mut last) = (usize::MAX, None);
        let all = whole(&found, &model, &inputs)?;
        let limits = (1..=24).map(|part| all / 24 * part).chain([LEAST, 700 * KIB, 900 * KIB, all, all + 1]);
        let mut limits: Vec<usize> = limits.collect();
        limits.sort_unstable();
        for limit in limits {
            let what = format!("{copies} copies in {limit} of {all} bytes");
            let mut session = limited(&found, &model, limit);
            let mut taken =
                session.as_ref().map_err(Clone::clone).and_then(|session| profiled(session, &inputs, 1));
            if let Err(problem) = &taken {
                assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{what}: {problem}");
                assert!(last.is_none(), "{what}: {problem}, and a smaller limit was kept to");
                let Some(shortage) = problem.shortage() else { panic!("{what}: {problem}") };
                let sufficient = shortage.sufficient_limit();
                assert!(sufficient > limit, "{what}: {problem}");
                session = limited(&found, &model, sufficient);
                taken =
                    session.as_ref().map_err(Clone::clone).and_then(|session| profiled(session, &inputs, 1));
                smallest = smallest.min(sufficient);
            }
            let ((kernels, results), session) = (taken?, session?);
            check_close(&doubles(&results[0])?, &doubles(&expected[0])?, 1e-5, &what);
            let memory = session.memory();
            assert!(
                memory.activations_peak + memory.device_constants <= limit.max(smallest),
                "{what}: {memory:?}"
            );
            let Some(own) = workspace(&kernels).filter(|_| is_emulated()) else { continue };
            assert!(last.is_none_or(|last| last <= own), "{what}: {own} bytes, {last:?} with less");
            last = (limit >= smallest || limit >= all).then_some(own);
            if limit >= all {
                assert_eq!(own + 256, MOST, "{what}: {kernels:?}");
            }
            // Within what is alive later it costs nothing.
            if copies > 1 {
                assert!(own + 256 >= LEAST, "{what}: {kernels:?}");
            }
        }
        assert!(
            smallest < all / 4 || !is_emulated(),
            "{copies} copies: {smallest} of {all} bytes are needed"
        );
    }
    Ok(())
}

/// The device's limit counts as the session's does.
#[test]
fn the_limit_of_a_device_leaves_less_to_workspaces() -> Result<()> {
    if with_device("limits::the_limit_of_a_device_leaves_less_to_workspaces")?.is_none() || !is_emulated() {
        return Ok(());
    }
    let inputs = rows(64, 0)?;
    let model = model(1)?;
    for (limit, expected) in [("16777216", MOST), ("8912896", MOST), ("8388608", LEAST), ("600000", LEAST)] {
        let given = [("gpu_mem_limit", limit), ("arena_extend_strategy", "kSameAsRequested")];
        let Some(found) = find(&[LT], &given)? else { return Ok(()) };
        let session = super::session(&found.device, &model)?;
        let (kernels, _) = profiled(&session, &inputs, 1)?;
        assert_eq!(workspace(&kernels).map(|own| own + 256), Some(expected), "{limit}: {kernels:?}");
        let stats = found.device.stats();
        assert!(stats.max_in_use <= limit.parse().unwrap_or(0), "{limit}: {stats}");
    }
    Ok(())
}
