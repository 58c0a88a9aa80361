//! ONNX Runtime's `EmbedLayerNormalization`: the normalised sum of word, position and segment
//! embeddings. An index out of range reads the nearest row of the table.

use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::EmbedLayerNorm;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure};
use ort_gpu::read;

use super::rows::{SHORT_FLOATS, suffix, team_of, teams};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

cuda_kernels![CudaKernel::new(
    KernelDef {
        domain: MICROSOFT,
        op: "EmbedLayerNormalization",
        types: &[("T", SHORT_FLOATS)],
        ..KernelDef::BASE
    },
    launches
)];

/// The row width from which a whole block handles a row.
const LONG: usize = 512;

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let problem = read::embed_layer_norm(cx)?;
    let mut launches = Vec::new();
    let wanted = cx.find_output(0).or(cx.find_output(2)).is_some();
    if wanted && problem.tokens() > 0 && problem.width > 0 {
        launches.push(normalize(cx, &problem)?);
    }
    if let Some(counts) = cx.find_output(1).filter(|_| problem.batch > 0) {
        ensure!(counts.count() == problem.batch, Fail, "{} counts of masks", counts.count());
        let launch = teams(Launch::new("local", "count_mask"), problem.batch, 32, 1)?;
        let launch = launch.find_tensor(cx.find_input(7)).tensor(counts);
        launches.push(launch.uint(problem.batch)?.uint(problem.length)?);
    }
    Ok(launches)
}

/// Sums the embeddings and normalizes the sums.
fn normalize(cx: &OpCx<'_>, problem: &EmbedLayerNorm) -> Result<Launch> {
    let EmbedLayerNorm { length, width, rows, position_ids, .. } = *problem;
    let words = cx.input(2)?;
    let tables = rows.into_iter().map(|rows| rows.saturating_mul(width));
    let countable =
        tables.chain([problem.tokens().saturating_mul(width)]).all(|all| all <= i32::MAX as usize);
    ensure!(countable, NotImplemented, "embeddings of more than 2^31 - 1 elements");
    let team = team_of(width, LONG);
    let entry = format!("embed_{}_{team}", suffix(words.dtype)?);
    let mut launch = teams(Launch::new("local", entry), problem.tokens(), team, 1)?.tensor(cx.input(0)?);
    // Segment ids, position ids, the tables, gamma and beta.
    for input in [1, 8, 2, 3, 4, 5, 6] {
        launch = launch.find_tensor(cx.find_input(input));
    }
    let launch = launch.find_tensor(cx.find_output(0)).find_tensor(cx.find_output(2));
    let launch =
        launch.uints::<7>(&[&rows[..], &[problem.tokens(), length, width, position_ids]].concat())?;
    Ok(launch.float(cx.attrs.float("epsilon")?))
}
