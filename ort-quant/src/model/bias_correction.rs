//! Bias correction of static models: `db = sum_j E[x_j] (W_j - W'_j)` for quantized weights `W'`.
//!
//! The errors of a weight shift the mean of the outputs, which later layers do not average out. The
//! correction goes into a constant bias, that of the product or of an `Add` behind it. Other
//! products get a bias if the shift is above 1 % of their outputs.

use std::collections::BTreeMap;

use ort_core::dtype::F8E4M3FN;
use ort_core::onnx::Source;
use ort_core::onnx::proto::NodeProto;
use ort_core::tensor::Tensor;
use ort_core::{Error, ErrorKind, Result, Within};

use super::corrected::{Correction, StaticBiases, key};
use super::draft::{float_of, integer_of};
use super::each_graph;
use super::flow::Flow;
use super::integer_products::integer_product;
use super::options::{Mode, Quantizer, StaticFormat, StaticOptions};
use super::products::{Product, product};
use super::smoothing;
use super::static_bias::{Home, home};
use super::static_weights::weight_job;
use super::weight_channels::WeightChannels;
use super::weight_reader::WeightReader;
use super::weights::{Done, Form, Job, RowScales};
use super::work::{Work, is_standard};
use crate::elements::{Elements, RawElements, ScaledElements};
use crate::means::{ChannelAxis, ChannelMeans, Means};

/// A part of the square of the outputs: a shift below it is not worth a new bias.
const INSIGNIFICANT: f64 = 1e-4;

impl Quantizer {
    /// The values whose means [`Quantizer::correct_static_bias`] needs.
    ///
    /// # Errors
    ///
    /// The mode is another one, the model cannot be loaded, or a pattern matches no node.
    pub fn bias_inputs(&self, source: &Source) -> Result<Vec<(String, ChannelAxis)>> {
        let Mode::Static(options) = &self.mode else { return Err(not_static()) };
        let (mut work, nodes) = self.start(source)?;
        let mut inputs = Vec::new();
        each_graph(&mut work, &nodes, &mut |work, nodes| {
            for (_, node, _) in layers(work, nodes, (options, self)) {
                inputs.extend(node.input.first().map(|input| (input.clone(), channel_axis(node))));
            }
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        Ok(inputs)
    }

    /// Corrects the biases of products, for the ranges and the smoothing that the options have by
    /// now. Reads and quantizes every weight, one at a time. Returns how many products have another
    /// bias.
    ///
    /// # Errors
    ///
    /// The mode is another one, or a weight cannot be read, or has NaN or infinite elements.
    pub fn correct_static_bias(&mut self, source: &Source, means: &Means) -> Result<usize> {
        let Mode::Static(options) = &self.mode else { return Err(not_static()) };
        let (mut work, nodes) = self.start(source)?;
        let mut reader = WeightReader::open(source)?;
        let mut biases = BTreeMap::new();
        each_graph(&mut work, &nodes, &mut |work, nodes| {
            let flow = Flow::of(nodes);
            for (index, node, product) in layers(work, nodes, (options, self)) {
                let input = node.input.first().cloned().unwrap_or_default();
                let seen = means.get(&(input, channel_axis(node)));
                let layer = Correctable { work, flow: &flow, nodes, index, product: &product };
                let Some(seen) = seen else { continue };
                if let (Some(key), Some(found)) = (key(node), layer.correction(&mut reader, seen, options)?) {
                    biases.insert(key, found);
                }
            }
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        let count = biases.len();
        if let Mode::Static(options) = &mut self.mode {
            options.biases = StaticBiases(biases);
        }
        Ok(count)
    }
}

fn not_static() -> Error {
    let text = "this bias correction is one of the static mode, and the mode is another one";
    Error::new(ErrorKind::InvalidArgument, text)
}

fn channel_axis(node: &NodeProto) -> ChannelAxis {
    if is_standard(node, "Conv") { ChannelAxis::Second } else { ChannelAxis::Last }
}

/// The products of a graph that are quantized and whose outputs are sums over channels. At the
/// border of a transposed convolution, and between its strides, not all of the filter counts.
fn layers<'n>(
    work: &Work,
    nodes: &'n [NodeProto],
    (options, quantizer): (&StaticOptions, &Quantizer),
) -> Vec<(usize, &'n NodeProto, Product)> {
    let layer = |(index, node): (usize, &'n NodeProto)| {
        quantizer.allows(work.place(index), node).ok()?;
        let found = match options.format {
            StaticFormat::Qdq => product(work, node, !options.per_tensor),
            StaticFormat::QOperator => integer_product(work, node, options),
        };
        let found = found?.ok()?;
        let is_sum = match &found.weight.as_ref()?.shape[..] {
            [_, _] => !is_standard(node, "Conv") && integer_of(node, "transA", 0) == 0,
            [_, _, _, ..] => is_standard(node, "Conv"),
            _ => false,
        };
        let has_range = options.ranges.contains_key(node.input.first()?);
        (is_sum && has_range).then_some((index, node, found))
    };
    nodes.iter().enumerate().filter_map(layer).collect()
}

/// A product in its graph.
struct Correctable<'l> {
    work: &'l Work,
    flow: &'l Flow<'l>,
    nodes: &'l [NodeProto],
    index: usize,
    product: &'l Product,
}

impl Correctable<'_> {
    /// The corrected bias, if there is a place for one that is worth it.
    fn correction(
        &self,
        reader: &mut WeightReader<'_>,
        seen: &ChannelMeans,
        options: &StaticOptions,
    ) -> Result<Option<Correction>> {
        let (work, Some(node)) = (self.work, self.nodes.get(self.index)) else { return Ok(None) };
        let (Some(weight), Some(name)) = (&self.product.weight, node.input.get(1)) else { return Ok(None) };
        let (Some(means), Some(squares)) = (seen.means(), seen.mean_squares()) else { return Ok(None) };
        let smoothed = node.input.first().and_then(|input| options.smoothing.get(input));
        let scales = smoothed.filter(|_| !work.is_inside).map(|by| smoothing::row_scales(by, node));
        let job = weight_job(work, (name, weight), (scales, None), options)?;
        let tensor = reader.tensor(work, name)?;
        let done =
            job.run(&tensor, None, reader.pages(&tensor).as_ref()).within(|| format!("weight '{name}'"))?;
        let shift = shift(&job, (&tensor, &done), &WeightChannels::of(node, &job.shape), (&means, &squares));
        reader.release(&tensor);
        let Some(Shift { means, square }) = shift else { return Ok(None) };
        let alpha = f64::from(if is_standard(node, "Gemm") { float_of(node, "alpha", 1.0) } else { 1.0 });
        let means: Vec<f64> = means.iter().map(|mean| mean * alpha).collect();
        let is_worth_a_bias =
            means.iter().map(|mean| mean * mean).sum::<f64>() > INSIGNIFICANT * square * alpha * alpha;
        let old = match home(self.flow, work, self.nodes, self.index) {
            Home::Own(Some(name)) | Home::Reader { name, .. } => {
                reader.tensor(work, &name)?.to_vec::<f32>()?
            }
            Home::Own(None) if is_worth_a_bias => vec![0.0; means.len()],
            Home::Behind if is_worth_a_bias && options.format == StaticFormat::Qdq => {
                let values = means.iter().map(|mean| *mean as f32).collect();
                let mut dims = vec![means.len() as i64];
                // Behind the channels come the spatial dimensions.
                if is_standard(node, "Conv") {
                    dims.resize(weight.shape.len().max(2) - 1, 1);
                }
                return Ok(Some(Correction { values, dims, is_added: true }));
            }
            Home::Own(None) | Home::Behind => return Ok(None),
        };
        let values = old.iter().zip(&means).map(|(old, mean)| (f64::from(*old) + mean) as f32).collect();
        let dims = vec![means.len() as i64];
        Ok((old.len() == means.len()).then_some(Correction { values, dims, is_added: false }))
    }
}

/// What the errors of a weight change.
struct Shift {
    /// What the mean of each output lacks.
    means: Vec<f64>,
    /// The sum of the squares of the outputs, as if channels were independent.
    square: f64,
}

/// The elements that are looked at side by side.
const CHUNK: usize = 1024;

/// `None` if the statistics are those of other channels.
fn shift(
    job: &Job,
    (tensor, done): (&Tensor, &Done),
    channels: &WeightChannels,
    (means, squares): (&[f64], &[f64]),
) -> Option<Shift> {
    let elements = RawElements::<f32>::new(tensor.bytes()?);
    let scales = job.scales.as_ref().map_or(&[][..], |RowScales { scales, .. }| &scales[..]);
    let axis = job.scales.as_ref().map_or(0, |scales| scales.axis);
    let inner = job.shape.iter().skip(axis + 1).product();
    let elements = ScaledElements { elements: &elements, scales, inner };
    let decoded = Decoded::of(job, done)?;
    let mut shift = Shift { means: vec![0.0; channels.outputs()], square: 0.0 };
    let mut wide = [0.0_f32; CHUNK];
    for start in (0..elements.count()).step_by(CHUNK) {
        let wide = wide.get_mut(..CHUNK.min(elements.count() - start))?;
        elements.widen(start, wide);
        for (place, value) in wide.iter().enumerate() {
            let (input, output) = channels.at(start + place);
            // Of a smoothed value, which is divided.
            let scale = f64::from(scales.get(input).copied().unwrap_or(1.0));
            let error = f64::from(*value) - f64::from(decoded.value(start + place));
            *shift.means.get_mut(output)? += error * means.get(input)? / scale;
            shift.square += (f64::from(*value) / scale).powi(2) * squares.get(input)?;
        }
    }
    Some(shift)
}

/// The values that codes stand for.
struct Decoded<'d> {
    codes: &'d [u8],
    scales: Vec<f32>,
    /// The elements of a channel that are side by side.
    inner: usize,
    is_float: bool,
}

impl Decoded<'_> {
    fn of<'d>(job: &Job, done: &'d Done) -> Option<Decoded<'d>> {
        let (axis, is_float) = match &job.form {
            Form::Linear(quantizer) => (quantizer.axis, false),
            Form::Float8(axis) => (*axis, true),
            _ => return None,
        };
        let [scales, _, codes] = &done.results[..] else { return None };
        let scales = scales.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let inner = axis.map_or(usize::MAX, |axis| job.shape.iter().skip(axis + 1).product());
        Some(Decoded { codes, scales, inner: inner.max(1), is_float })
    }

    fn value(&self, element: usize) -> f32 {
        let code = self.codes.get(element).copied().unwrap_or_default();
        let scale = self.scales.get(element / self.inner % self.scales.len().max(1));
        let code = if self.is_float { F8E4M3FN(code).to_f32() } else { f32::from(code as i8) };
        code * scale.copied().unwrap_or(1.0)
    }
}
