//! ONNX Runtime's `EmbedLayerNormalization`: the normalised sum of word, position and segment
//! embeddings. An index out of range reads the nearest row of the table.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use super::lines::{SHORT_FLOATS, suffix, team_of, teams};
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
    let (ids, words, positions) = (cx.input(0)?, cx.input(2)?, cx.input(3)?);
    let (&[batch, length], &[vocabulary, width]) = (&*ids.shape, &*words.shape) else {
        return Err(error!(InvalidArgument, "ids {:?} and words {:?}", ids.shape, words.shape));
    };
    let tokens = ids.count();
    let (segment_ids, segments, place) = (cx.find_input(1), cx.find_input(4), cx.find_input(8));
    let given = place.map_or(length, |place| place.count());
    let fits = (given == length || given == tokens) && segment_ids.is_none_or(|ids| ids.count() == tokens);
    ensure!(fits, InvalidArgument, "segment_ids or position_ids do not fit ids {:?}", ids.shape);
    let (gamma, beta) = (cx.input(5)?, cx.input(6)?);
    let fits = gamma.count() == width && beta.count() == width;
    ensure!(fits, InvalidArgument, "gamma {:?} and beta {:?} for {width}", gamma.shape, beta.shape);
    let mut launches = Vec::new();
    let wanted = cx.find_output(0).or(cx.find_output(2)).is_some();
    if wanted && tokens > 0 && width > 0 {
        let tables = [Some(words), Some(positions), segments];
        // An index out of range reads the nearest row, so each table needs one.
        let there = tables.iter().flatten().all(|table| table.size(0) > 0 && table.size(1) == width);
        ensure!(there, InvalidArgument, "tables without a row, or not of width {width}");
        let all = [
            tokens.saturating_mul(width),
            words.count(),
            positions.count(),
            segments.map_or(0, |t| t.count()),
        ];
        let countable = all.iter().all(|count| *count <= i32::MAX as usize);
        ensure!(countable, NotImplemented, "embeddings of more than 2^31 - 1 elements");
        let team = team_of(width, LONG);
        let entry = format!("embed_{}_{team}", suffix(words.dtype)?);
        let mut launch = teams(Launch::new("local", entry), tokens, team, 1)?.tensor(ids);
        for input in [segment_ids, place, Some(words), Some(positions), segments, Some(gamma), Some(beta)] {
            launch = launch.find_tensor(input);
        }
        let launch = launch.find_tensor(cx.find_output(0)).find_tensor(cx.find_output(2));
        let rows = [vocabulary, positions.size(0), segments.map_or(0, |table| table.size(0))];
        let launch = launch.uints::<7>(&[&rows[..], &[tokens, length, width, given]].concat())?;
        launches.push(launch.float(cx.attrs.float("epsilon")?));
    }
    if let Some(counts) = cx.find_output(1).filter(|_| batch > 0) {
        let mask = cx.find_input(7);
        let fits = counts.count() == batch && mask.is_none_or(|mask| mask.count() == tokens);
        ensure!(fits, InvalidArgument, "a mask that does not fit ids {:?}", ids.shape);
        let launch = teams(Launch::new("local", "count_mask"), batch, 32, 1)?;
        launches.push(launch.find_tensor(mask).tensor(counts).uint(batch)?.uint(length)?);
    }
    Ok(launches)
}
