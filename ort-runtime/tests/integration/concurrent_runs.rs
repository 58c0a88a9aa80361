//! One session runs from many threads at once: the right answers, and no more memory than the runs
//! need.

use crate::support::{LAYER_OF_ONES, floats, layer, session};
use ort_runtime::Result;

const THREADS: usize = 8;
const RUNS: usize = 25;

#[test]
fn eight_threads_get_the_right_answers() -> Result<()> {
    let session = session(layer()?)?;
    let largest = session.plan(&[("rows", THREADS as i64 * 10)])?.planned_bytes;
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let runs = |thread: usize| {
            let session = &session;
            move || -> Result<()> {
                for round in 0..RUNS {
                    // Neighbouring runs have different sizes, so that slabs change hands.
                    let rows = 1 + (thread * 7 + round * 3) % (THREADS * 10);
                    let x = floats(&[rows, 3], &vec![1.0; rows * 3])?;
                    let outputs = session.run(&[("x", x.into())])?;
                    let expected = LAYER_OF_ONES.repeat(rows);
                    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, expected);
                }
                Ok(())
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(runs(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    let memory = session.memory();
    assert!(memory.activations_peak <= THREADS * largest, "{memory:?}, one run takes {largest}");
    assert!(
        memory.activations <= THREADS * largest,
        "idle slabs are bounded by the runs at once: {memory:?}"
    );
    session.trim();
    assert_eq!(session.memory().activations, 0);
    Ok(())
}

#[test]
fn outputs_outlive_the_session() -> Result<()> {
    let session = session(layer()?)?;
    let first = session.run(&[("x", floats(&[1, 3], &[1.0; 3])?.into())])?;
    // The slab of the first run serves the second; what the first gave must not change.
    let second = session.run(&[("x", floats(&[1, 3], &[2.0; 3])?.into())])?;
    drop(session);
    assert_eq!(first[0].1.tensor()?.to_vec::<f32>()?, LAYER_OF_ONES);
    assert_eq!(second[0].1.tensor()?.to_vec::<f32>()?, [7.25, 0.0, 1.0, 2.0]);
    Ok(())
}

#[test]
fn one_run_after_the_other_reuses_the_slab() -> Result<()> {
    let session = session(layer()?)?;
    let planned = session.plan(&[("rows", 64)])?.peak_bytes;
    for _ in 0..20 {
        session.run(&[("x", floats(&[64, 3], &[1.0; 192])?.into())])?;
    }
    assert_eq!(Some(session.memory().activations_peak), planned);
    Ok(())
}
