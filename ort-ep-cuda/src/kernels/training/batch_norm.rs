//! Batch normalization in training: `BatchNormalization` with batch statistics,
//! `BatchNormalizationStatistics` and `BatchNormalizationGrad`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error};

use super::step::{spread, suffix, sums};
use crate::kernels::rows::teams;
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const FAMILY: &str = "training_norm";
const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F64, DType::F16, DType::BF16]);
const UPSTREAM: usize = 2;

cuda_kernels![
    CudaKernel {
        workspace: Some(|cx| NormWorkspace::of(cx).map(|workspace| workspace.bytes)),
        ..CudaKernel::new(
            KernelDef {
                op: "BatchNormalization",
                types: &[("T", FLOATS), ("T1", FLOATS), ("T2", FLOATS)],
                when: |node| {
                    let same = (1..5).all(|index| node.dtype(index) == node.dtype(0));
                    same && node.attrs().flag("training_mode").unwrap_or(false)
                },
                ..KernelDef::BASE
            },
            normalization
        )
    },
    CudaKernel {
        workspace: Some(|cx| NormWorkspace::of(cx).map(|workspace| workspace.bytes)),
        ..CudaKernel::new(
            KernelDef {
                domain: RUNTIME,
                op: "BatchNormalizationStatistics",
                left_out: &[0, 1, 2, 3],
                ..KernelDef::BASE
            },
            statistics
        )
    },
    CudaKernel {
        workspace: Some(|cx| NormWorkspace::of(cx).map(|workspace| workspace.bytes)),
        ..CudaKernel::new(
            KernelDef {
                domain: RUNTIME,
                op: "BatchNormalizationGrad",
                in_place: &[(UPSTREAM, 0)],
                ..KernelDef::BASE
            },
            gradient
        )
    },
];

/// The most contiguous elements per channel for which a block handles adjacent channels.
const NARROW: usize = 4;
/// The number of adjacent channels it then handles, and the least that are worth it.
const ABREAST: usize = 32;
/// Elements per thread in a piece of a channel.
const PIECE: usize = 16;
/// The number of blocks that keep a device busy.
const BLOCKS: usize = 1024;
/// The most sums per piece in the pass after the means.
const MOST_SUMS: usize = 3;
/// The most values per channel that the last pass reads.
const NUMBERS: usize = 4;

/// The kernels' structure `Channels`.
struct Channels {
    count: usize,
    channels: usize,
    spatial: usize,
    splits: usize,
    team: usize,
}

impl Channels {
    fn of(x: &Operand) -> Result<Channels> {
        let [_, channels, spatial @ ..] = x.shape.as_slice() else {
            return Err(error!(InvalidArgument, "an input of shape {:?}", x.shape)
                .help("a batch normalization has an axis of the batch and one of channels"));
        };
        let (channels, spatial) = (*channels, spatial.iter().product::<usize>());
        let len = x.count().checked_div(channels).unwrap_or(0);
        let narrow = spatial <= NARROW && channels >= ABREAST;
        let (team, blocks) = if narrow { (8, channels.div_ceil(ABREAST)) } else { (256, channels) };
        let splits = (len / (team * PIECE)).min(BLOCKS / blocks.max(1)).max(1);
        Ok(Channels { count: x.count(), channels, spatial, splits, team })
    }

    fn pass(&self, launch: Launch) -> Result<Launch> {
        launch.uints::<4>(&[self.count, self.channels, self.spatial, self.splits])
    }

    /// Returns the launch of a pass over all elements that leaves partial sums.
    fn sums(
        &self,
        what: &str,
        dtype: DType,
        tensors: [Option<&Operand>; 4],
        parts: &Operand,
    ) -> Result<Launch> {
        let entry = format!("channel_{what}_{}_{}", suffix(dtype)?, self.team);
        let launch = tensors.into_iter().fold(Launch::new(FAMILY, entry), Launch::find_tensor);
        teams(self.pass(launch.tensor(parts))?, self.channels, self.team, self.splits)
    }
}

/// The workspace that connects the passes.
struct NormWorkspace {
    channels: Channels,
    levels: Operand,
    parts: Operand,
    numbers: Operand,
    bytes: usize,
}

impl NormWorkspace {
    fn of(cx: &OpCx<'_>) -> Result<NormWorkspace> {
        let x = cx.input(0)?;
        let (channels, mut bytes) = (Channels::of(x)?, 0);
        let dtype = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let levels = sums(cx, &mut bytes, &[channels.splits, channels.channels]);
        let parts = sums(cx, &mut bytes, &[MOST_SUMS, channels.splits, channels.channels]);
        let numbers = cx.workspace(&mut bytes, dtype, &[NUMBERS, channels.channels]);
        Ok(NormWorkspace { channels, levels, parts, numbers, bytes })
    }

    /// Returns the passes that compute the batch statistics into four outputs. With a scale, they
    /// also compute the factors that the normalization applies.
    fn statistics(
        &self,
        cx: &OpCx<'_>,
        running: [&Operand; 2],
        outputs: [Option<&Operand>; 4],
        scale: Option<&Operand>,
    ) -> Result<Vec<Launch>> {
        let (x, channels) = (cx.input(0)?, &self.channels);
        for running in running {
            ensure!(
                running.count() == channels.channels,
                InvalidArgument,
                help = "running statistics have one element for each channel, axis 1 of the input",
                "running statistics of shape {:?} for {} channels",
                running.shape,
                channels.channels
            );
        }
        let levels = channels.sums("level", x.dtype, [Some(x), None, None, None], &self.levels)?;
        let given = [Some(x), None, None, Some(&self.levels)];
        let squares = channels.sums("squares", x.dtype, given, &self.parts)?;
        let finish = Launch::new(FAMILY, format!("channel_statistics_{}", suffix(x.dtype)?));
        let finish = finish.tensor(&self.levels).tensor(&self.parts);
        let finish = running.into_iter().fold(finish, Launch::tensor);
        let finish = outputs.into_iter().fold(finish, Launch::find_tensor).find_tensor(scale);
        let finish = channels.pass(finish.find_tensor(scale.map(|_| &self.numbers)))?;
        let [epsilon, momentum] = [cx.attrs.float("epsilon")?, cx.attrs.float("momentum")?].map(f64::from);
        let finish = finish.bytes(&epsilon.to_ne_bytes()).bytes(&momentum.to_ne_bytes());
        Ok(vec![levels, squares, finish.threads(channels.channels)?])
    }
}

fn statistics(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let workspace = NormWorkspace::of(cx)?;
    if workspace.channels.channels == 0 {
        return Ok(Vec::new());
    }
    let outputs = [0, 1, 2, 3].map(|index| cx.find_output(index));
    workspace.statistics(cx, [cx.input(1)?, cx.input(2)?], outputs, None)
}

fn normalization(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let workspace = NormWorkspace::of(cx)?;
    if workspace.channels.channels == 0 {
        return Ok(Vec::new());
    }
    let (x, y) = (cx.input(0)?, cx.find_output(0));
    let (scale, shift) = (cx.input(1)?, cx.input(2)?);
    let fits = [scale, shift].iter().all(|given| given.count() == workspace.channels.channels);
    ensure!(fits, InvalidArgument, "a scale of shape {:?} for an input of shape {:?}", scale.shape, x.shape);
    let outputs = [None, None, cx.find_output(1), cx.find_output(2)];
    let mut launches = workspace.statistics(cx, [cx.input(3)?, cx.input(4)?], outputs, Some(scale))?;
    if let Some(y) = y.filter(|y| y.count() > 0) {
        let launch = Launch::new(FAMILY, format!("channel_normalize_{}", suffix(x.dtype)?));
        let launch = launch.tensor(x).tensor(shift).tensor(y).tensor(&workspace.numbers);
        launches.push(spread(cx, workspace.channels.pass(launch)?, y.count())?);
    }
    Ok(launches)
}

fn gradient(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let NormWorkspace { channels, levels, parts, numbers, .. } = NormWorkspace::of(cx)?;
    let (x, scale, upstream) = (cx.input(0)?, cx.input(1)?, cx.input(UPSTREAM)?);
    ensure!(
        scale.count() == channels.channels && upstream.shape == x.shape,
        InvalidArgument,
        help = "scale has an element for each channel, and the upstream gradient the shape of X",
        "an input of shape {:?}, a scale of shape {:?} and an upstream gradient of shape {:?}",
        x.shape,
        scale.shape,
        upstream.shape
    );
    if channels.channels == 0 {
        return Ok(Vec::new());
    }
    let given = [cx.find_input(3), cx.find_input(4)];
    let [mean, inverse] = if given.iter().all(Option::is_some) { given } else { [None; 2] };
    for given in [mean, inverse].into_iter().flatten() {
        let count = given.count();
        ensure!(
            count == channels.channels,
            InvalidArgument,
            "got {count} statistics, expected one for each of the {} channels",
            channels.channels
        );
    }
    let mut launches = Vec::new();
    // Without saved statistics, the means are computed again first.
    if mean.is_none() {
        launches.push(channels.sums("level", x.dtype, [Some(x), None, None, None], &levels)?);
    }
    let tensors = [Some(x), Some(upstream), mean, Some(&levels)];
    launches.push(channels.sums("gradient", x.dtype, tensors, &parts)?);
    let suffix = suffix(x.dtype)?;
    let finish = Launch::new(FAMILY, format!("channel_gradients_{suffix}")).tensor(&levels).tensor(&parts);
    let finish = finish.find_tensor(mean).find_tensor(inverse).tensor(scale);
    let finish = finish.find_tensor(cx.find_output(1)).find_tensor(cx.find_output(2)).tensor(&numbers);
    let epsilon = f64::from(cx.attrs.float("epsilon")?);
    let finish = channels.pass(finish)?.bytes(&epsilon.to_ne_bytes());
    launches.push(finish.threads(channels.channels)?);
    if let Some(y) = cx.find_output(0).filter(|y| y.count() > 0) {
        let launch = Launch::new(FAMILY, format!("channel_spread_{suffix}"));
        let launch = launch.tensor(x).tensor(upstream).tensor(y).tensor(&numbers);
        launches.push(spread(cx, channels.pass(launch)?, y.count())?);
    }
    Ok(launches)
}
