//! Normalization kernels: of rows (`LayerNormalization`, `RMSNormalization` and their skip forms),
//! of groups of channels, and with given statistics.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ir::SymShape;
use ort_core::ops::nn::problem::{ChannelGroups, RowNorm, centers, channels_of, check_parameter};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure};

use super::rows::{ContiguousRows, SHORT_FLOATS, few_axes, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const FLOAT: TypeSet = TypeSet::of(&[DType::F32]);

const LAYER: KernelDef = KernelDef {
    op: "LayerNormalization",
    types: &[("T", SHORT_FLOATS), ("U", FLOAT)],
    in_place: &[(0, 0)],
    when: has_rows_of_parameters,
    ..KernelDef::BASE
};
const RMS: KernelDef =
    KernelDef { types: &[("T", SHORT_FLOATS), ("U", FLOAT), ("V", SHORT_FLOATS)], ..LAYER };
const SKIP: KernelDef = KernelDef {
    domain: MICROSOFT,
    op: "SkipLayerNormalization",
    types: &[("T", SHORT_FLOATS), ("U", FLOAT)],
    in_place: &[(0, 0), (1, 0), (0, 3), (1, 3)],
    ..KernelDef::BASE
};
const GROUPS: KernelDef = KernelDef {
    op: "GroupNormalization",
    types: &[("T", SHORT_FLOATS)],
    in_place: &[(0, 0)],
    ..KernelDef::BASE
};
const BATCH: KernelDef = KernelDef {
    op: "BatchNormalization",
    types: &[("T", SHORT_FLOATS), ("T1", SHORT_FLOATS), ("T2", SHORT_FLOATS)],
    in_place: &[(0, 0)],
    when: |node| {
        let same = (1..5).all(|index| node.dtype(index) == node.dtype(0));
        same && node.attrs().flag("training_mode").is_ok_and(|training| !training)
    },
    ..KernelDef::BASE
};

cuda_kernels![
    CudaKernel::new(LAYER, layer),
    CudaKernel::new(KernelDef { op: "RMSNormalization", ..RMS }, layer),
    CudaKernel::new(KernelDef { op: "SimplifiedLayerNormalization", ..RMS }, layer),
    CudaKernel::new(SKIP, skip),
    CudaKernel::new(KernelDef { op: "SkipSimplifiedLayerNormalization", ..SKIP }, skip),
    CudaKernel::new(GROUPS, groups),
    CudaKernel::new(KernelDef { op: "InstanceNormalization", ..GROUPS }, groups),
    CudaKernel::new(BATCH, batch),
];

/// Whether scale and bias have the input's type, and one element per position along the leading
/// axes of a row, or per element of the row.
fn has_rows_of_parameters(node: &NodeView<'_>) -> bool {
    let (Some(shape), Ok(axis)) = (node.shape(0), node.attrs().int("axis")) else { return false };
    let axis = if axis < 0 { axis.saturating_add_unsigned(shape.len() as u64) } else { axis };
    let row = usize::try_from(axis).ok().and_then(|axis| shape.get(axis..));
    let is_of_row = |shape: &SymShape| {
        // Trailing sizes of 1 broadcast, so only the axes before them must match those of the row.
        let whole = shape.iter().rposition(|size| size.as_constant() != Some(1)).map_or(0, |last| last + 1);
        row.is_some_and(|row| row.len() == shape.len() && row.get(..whole) == shape.get(..whole))
    };
    let fits =
        |index| node.dtype(index) == node.dtype(0) && node.shape(index).as_ref().is_some_and(is_of_row);
    let same = || node.input(2).is_none() || fits(2) && node.shape(1) == node.shape(2);
    few_axes(node) && fits(1) && same()
}

/// The inputs and outputs of a normalization of contiguous rows.
struct Norm<'a> {
    epsilon: f32,
    x: &'a Operand,
    skip: Option<&'a Operand>,
    bias: Option<&'a Operand>,
    scale: &'a Operand,
    shift: Option<&'a Operand>,
    /// The result, the mean, the reciprocal deviation, and the sum.
    outputs: [Option<&'a Operand>; 4],
    count: usize,
    len: usize,
    centers: bool,
    /// Groups of rows, the parameters per group, and the elements per parameter.
    channels: [usize; 3],
}

impl Norm<'_> {
    fn launches(&self, processors: u32) -> Result<Vec<Launch>> {
        if self.count == 0 {
            return Ok(Vec::new());
        }
        // Rows without elements still have statistics, which are NaN.
        let [.., spatial] = self.channels;
        let skips = self.skip.map_or(0, Operand::count);
        // Zero is a multiple of every vector width, so one parameter per element sets no further
        // limit.
        let sizes = [self.len, skips, if spatial == 1 { 0 } else { spatial }];
        let rows = ContiguousRows::new(self.count, self.len, self.x.dtype, &sizes);
        let [.., sum] = self.outputs;
        let is_sum = self.skip.or(self.bias).or(sum).is_some();
        let many = !is_sum && (rows.are_many(processors) || rows.are_long());
        let vectors = match spatial == 1 && rows.fill_a_warp() {
            _ if many => 4,
            true => 3,
            false => 1,
        };
        let entry = format!("norm_{vectors}_{}", suffix(self.x.dtype)?);
        let launch = rows.launch(Launch::new("norm", entry), vectors)?;
        let launch = launch.tensor(self.x).find_tensor(self.skip).find_tensor(self.bias);
        let launch = launch.tensor(self.scale).find_tensor(self.shift);
        let launch = self.outputs.iter().fold(launch, |launch, output| launch.find_tensor(*output));
        let launch = launch.uints::<4>(&[self.count, self.len, skips, usize::from(self.centers)])?;
        let launch = self.channels.iter().try_fold(launch, |launch, number| launch.uint(*number))?;
        Ok(vec![launch.float(self.epsilon)])
    }
}

fn layer(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (RowNorm { count, len }, centers) = (RowNorm::from_axis(cx.attrs, &y.shape)?, centers(cx.op));
    let (mean, factor) = match centers {
        true => (cx.find_output(1), cx.find_output(2)),
        false => (None, cx.find_output(1)),
    };
    let (scale, shift) = (cx.input(1)?, cx.find_input(2));
    let outputs = [Some(y), mean, factor, None];
    let each = scale.count();
    ensure!(len.is_multiple_of(each), InvalidArgument, "{each} factors for rows of {len}");
    let (skip, bias, channels) = (None, None, [1, each, len.checked_div(each).unwrap_or(1).max(1)]);
    let epsilon = cx.attrs.float("epsilon")?;
    Norm { epsilon, x, skip, bias, scale, shift, outputs, count, len, centers, channels }
        .launches(cx.limits.processors)
}

fn skip(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, skip, scale) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let centers = centers(cx.op);
    let (shift, bias) = match centers {
        true => (cx.find_input(3), cx.find_input(4)),
        false => (None, cx.find_input(3)),
    };
    let parameters = [Some(scale), shift, bias].into_iter().flatten().map(Operand::count);
    let RowNorm { count, len } = RowNorm::of_skip(&x.shape, skip.count(), parameters)?;
    let outputs = [0, 1, 2, 3].map(|index| cx.find_output(index));
    let channels = [1, len, 1];
    let epsilon = cx.attrs.float("epsilon")?;
    Norm { epsilon, x, skip: Some(skip), bias, scale, shift, outputs, count, len, centers, channels }
        .launches(cx.limits.processors)
}

fn groups(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let groups = ChannelGroups::new(cx.attrs, &y.shape)?;
    let (scale, shift) = (cx.input(1)?, cx.input(2)?);
    for parameter in [scale, shift] {
        check_parameter(parameter.count(), groups.channels)?;
    }
    let (count, len) = (groups.count, groups.len());
    let outputs = [Some(y), None, None, None];
    let channels = [groups.groups.max(1), groups.each, groups.spatial.max(1)];
    let (skip, bias, shift, centers) = (None, None, Some(shift), true);
    let epsilon = cx.attrs.float("epsilon")?;
    Norm { epsilon, x, skip, bias, scale, shift, outputs, count, len, centers, channels }
        .launches(cx.limits.processors)
}

fn batch(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (channels, spatial) = channels_of(&y.shape);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let mut launch =
        Launch::new("norm", format!("batch_norm_{}", suffix(x.dtype)?)).threads(y.count())?.tensor(x);
    for index in 1..5 {
        let parameter = cx.input(index)?;
        check_parameter(parameter.count(), channels)?;
        launch = launch.tensor(parameter);
    }
    let launch = launch.tensor(y).uint(y.count())?.uint(channels)?.uint(spatial)?;
    Ok(vec![launch.float(cx.attrs.float("epsilon")?)])
}
