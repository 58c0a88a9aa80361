//! Weights that are quantized while the file is written, one at a time.

use std::sync::Arc;

use half::f16;
use ort_core::dtype::DType;
use ort_core::onnx::proto::TensorProto;
use ort_core::tensor::Tensor;
use ort_core::{Error, ErrorKind, Result};

use super::half_type::{CHUNK, HalfType};
use super::prune_form::{PruneForm, PrunedElements};
use super::scale_form::ScaleForm;
use super::slice_form::SliceForm;
use crate::columns::{Changes, Matrix};
use crate::elements::{Elements, RawElements, ScaledElements, each_chunk};
use crate::feedback::Curvature;
use crate::float8::{self, Float8Codes};
use crate::grid::{BlockQuantizer, QuantizedBlocks, Scheme};
use crate::linear::{LinearCodes, LinearQuantizer};
use crate::noise::Noise;
use crate::pages::WeightPages;
use crate::parallel;
use crate::prune::Zeros;
use crate::weight::Weight;

/// What a weight becomes. The sizes of the results are known before their elements.
#[derive(Clone, Debug)]
pub(super) enum Form {
    /// Scales, zero points and codes.
    Linear(LinearQuantizer),
    /// Scales, zero points, which are 0, and codes in float8. The axis is that of the channels.
    Float8(Option<usize>),
    /// Codes, scales, and zero points unless they are symmetric.
    Blocks(Scheme),
    /// The elements in 16 bits.
    Half(HalfType),
    /// The elements, some of which are zero.
    Pruned(PruneForm),
    /// The elements of the channels that stay.
    Sliced(SliceForm),
    /// The elements, in floating point, of channels that are multiplied by factors.
    Scaled(ScaleForm),
}

impl Form {
    /// Which of the results has the codes.
    pub(super) fn codes(&self) -> usize {
        match self {
            Form::Linear(_) | Form::Float8(_) => 2,
            Form::Blocks(..) | Form::Half(_) | Form::Pruned(_) | Form::Sliced(_) | Form::Scaled(_) => 0,
        }
    }
}

/// A quantized weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Done {
    /// The bytes of each result.
    pub(super) results: Vec<Vec<u8>>,
    pub(super) noise: Noise,
    pub(super) shift: Shift,
    /// Those of a pruned weight.
    pub(super) zeros: Zeros,
}

impl From<PrunedElements> for Done {
    fn from(pruned: PrunedElements) -> Done {
        let PrunedElements { bytes, noise, zeros } = pruned;
        Done { results: vec![bytes], noise, shift: Shift::default(), zeros }
    }
}

/// What the errors of a weight change in the mean of its outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Shift {
    /// The sum of the squares of the changes.
    square: f64,
    /// That of the outputs, as if channels were independent.
    energy: f64,
}

impl Shift {
    /// Whether a bias is worth its bytes: the change is above 1 % of the outputs.
    pub(super) fn is_significant(&self) -> bool {
        self.square > 1e-4 * self.energy
    }

    fn plus(self, other: Shift) -> Shift {
        Shift { square: self.square + other.square, energy: self.energy + other.energy }
    }
}

/// A weight to quantize.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// The float initializer, whose data usually lies in a mapped file.
    pub(super) weight: TensorProto,
    /// The name of its codes in the new model; empty until it has one.
    pub(super) codes: String,
    /// Whether the matrix is transposed first.
    pub(super) is_transposed: bool,
    /// Its shape after that.
    pub(super) shape: Vec<usize>,
    /// Whether it is float16.
    pub(super) is_half: bool,
    /// Whether one zero point stands for those of all channels, which are equal.
    pub(super) has_one_point: bool,
    /// What parts of it are multiplied by first.
    pub(super) scales: Option<RowScales>,
    /// The bias that is added to its products, which becomes a result of its own.
    pub(super) bias: Option<BiasOf>,
    /// How much an error in each row counts; the same for all without.
    pub(super) importance: Option<Arc<[f32]>>,
    /// The results, if they are there already.
    pub(super) ready: Option<Arc<Done>>,
    pub(super) form: Form,
}

/// The suffix of the result that is a bias. Its name begins with that of the float bias.
pub(super) const BIAS: &str = "bias";

/// A bias. In 32 bits its scale is the product of the scales of input and weight.
#[derive(Clone, Debug)]
pub(super) struct BiasOf {
    pub(super) tensor: TensorProto,
    pub(super) input_scale: f32,
}

/// Factors of the parts of a weight along an axis.
#[derive(Clone, Debug)]
pub(super) struct RowScales {
    /// The smoothed input, which tells these factors from others of the weight.
    pub(super) input: String,
    pub(super) axis: usize,
    pub(super) scales: Arc<[f32]>,
}

impl Job {
    /// The bytes of each result.
    pub(super) fn lengths(&self) -> Result<Vec<usize>> {
        if let Some(ready) = &self.ready {
            return Ok(ready.results.iter().map(Vec::len).collect());
        }
        let element = if self.is_half { 2 } else { 4 };
        Ok(match &self.form {
            Form::Linear(quantizer) => {
                let ty = quantizer.grid.ty;
                let grids = match &self.shape[..] {
                    // Each direction of a recurrent weight has grids of its own.
                    [directions, _, gates] if self.is_transposed => {
                        directions * if quantizer.axis.is_some() { *gates } else { 1 }
                    }
                    shape => quantizer.axis.map_or(1, |axis| shape.get(axis).copied().unwrap_or(1)),
                };
                let points = if self.has_one_point { 1 } else { grids };
                let codes = ty.byte_count(self.shape.iter().product());
                let mut lengths = vec![grids * element, ty.byte_count(points), codes];
                let biases = |bias: &BiasOf| bias.tensor.dims.iter().product::<i64>() as usize;
                lengths.extend(self.bias.as_ref().map(|bias| 4 * biases(bias)));
                lengths
            }
            Form::Float8(axis) => {
                let channels = axis.map_or(1, |axis| self.shape.get(axis).copied().unwrap_or(1));
                vec![channels * element, channels, self.shape.iter().product()]
            }
            Form::Half(_) => vec![2 * self.shape.iter().product::<usize>()],
            Form::Pruned(_) | Form::Sliced(_) | Form::Scaled(_) => {
                vec![element * self.shape.iter().product::<usize>()]
            }
            Form::Blocks(scheme) => {
                let sizes = scheme.sizes(element)?;
                let mut lengths = vec![sizes.codes, sizes.scales * element];
                lengths.extend((!scheme.blocks.is_symmetric).then_some(sizes.zero_points));
                lengths
            }
        })
    }

    /// Quantizes the weight, and its bias if the job has one.
    pub(super) fn run(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        pages: Option<&WeightPages<'_>>,
    ) -> Result<Done> {
        if let Some(ready) = &self.ready {
            return Ok(Done::clone(ready));
        }
        if let (Some(bias), Some(of)) = (bias, &self.bias) {
            return self.run_with_bias(weight, (&bias.to_vec::<f32>()?, of.input_scale), pages);
        }
        let importance = self.importance.as_deref().unwrap_or_default();
        self.run_with(weight, Curvature { importance, ..Curvature::default() }, pages)
    }

    /// Quantizes the weight with what samples say about its rows.
    pub(super) fn run_with(
        &self,
        weight: &Tensor,
        curvature: Curvature<'_>,
        pages: Option<&WeightPages<'_>>,
    ) -> Result<Done> {
        let bytes = weight.bytes().map(|bytes| &bytes[..]).unwrap_or_default();
        match weight.dtype() {
            DType::F32 => self.run_as(&RawElements::<f32>::new(bytes).paged(pages), curvature),
            DType::F16 => self.run_as(&RawElements::<f16>::new(bytes).paged(pages), curvature),
            other => {
                let text = format!("a weight of {other} cannot be quantized");
                Err(Error::new(ErrorKind::NotImplemented, text))
            }
        }
    }

    /// Quantizes a weight and its bias.
    ///
    /// A channel of tiny weights has a tiny scale, with which the bias would need more than 32
    /// bits. Its scale is as large as the bias needs instead.
    fn run_with_bias(
        &self,
        weight: &Tensor,
        (bias, input_scale): (&[f32], f32),
        pages: Option<&WeightPages<'_>>,
    ) -> Result<Done> {
        let Form::Linear(quantizer) = &self.form else {
            return Err(Error::new(ErrorKind::Fail, "only a linear weight has a bias"));
        };
        if let Some(value) = bias.iter().find(|value| !value.is_finite()) {
            let text = format!("its bias has an element that is {value}");
            return Err(Error::new(ErrorKind::InvalidArgument, text).help("exclude the node that reads it"));
        }
        let least = |value: &f32| {
            let scale = MARGIN * 2.0 * f64::from(value.abs()) / (4_294_967_294.0 * f64::from(input_scale));
            scale as f32
        };
        let least: Vec<f32> = bias.iter().map(least).collect();
        let bytes = weight.bytes().map(|bytes| &bytes[..]).unwrap_or_default();
        let elements = RawElements::<f32>::new(bytes).paged(pages);
        let done = match &self.scales {
            Some(RowScales { axis, scales, .. }) => {
                let inner = self.shape.iter().skip(axis + 1).product();
                let scaled = ScaledElements { elements: &elements, scales, inner };
                quantizer.quantize_at_least(&scaled, &self.shape, &least)?
            }
            None => quantizer.quantize_at_least(&elements, &self.shape, &least)?,
        };
        let scale = |channel: usize| {
            let grid = done.grids.get(channel).or(done.grids.first());
            input_scale * grid.map_or(1.0, |grid| grid.scale)
        };
        let codes = bias.iter().enumerate();
        // The cast saturates.
        let codes = codes.map(|(channel, value)| (value / scale(channel)).round_ties_even() as i32);
        let bias: Vec<u8> = codes.flat_map(i32::to_le_bytes).collect();
        let (scales, points) = (done.scale_bytes(false), done.zero_point_bytes(&quantizer.grid));
        let results = vec![scales, points, done.codes, bias];
        Ok(Done { results, noise: done.noise, shift: Shift::default(), zeros: Zeros::default() })
    }

    fn run_as<E: Elements>(&self, elements: &E, curvature: Curvature<'_>) -> Result<Done> {
        match (&self.form, &self.scales) {
            (Form::Linear(quantizer), Some(RowScales { axis, scales, .. })) => {
                let inner = self.shape.iter().skip(axis + 1).product();
                self.linear(quantizer, &ScaledElements { elements, scales, inner })
            }
            (Form::Linear(quantizer), None) => self.linear(quantizer, elements),
            (Form::Float8(axis), Some(RowScales { axis: scaled, scales, .. })) => {
                let inner = self.shape.iter().skip(scaled + 1).product();
                self.float8(*axis, &ScaledElements { elements, scales, inner })
            }
            (Form::Float8(axis), None) => self.float8(*axis, elements),
            (Form::Half(ty), _) => Ok(halves(*ty, elements)),
            (Form::Pruned(form), _) => {
                check_finite(elements)?;
                Ok(Done::from(form.run(elements)))
            }
            (Form::Sliced(form), _) => Ok(Done {
                results: vec![form.run(elements)],
                noise: Noise::default(),
                shift: Shift::default(),
                zeros: Zeros::default(),
            }),
            (Form::Scaled(form), _) => Ok(Done {
                results: vec![form.run(elements, &self.shape)],
                noise: Noise::default(),
                shift: Shift::default(),
                zeros: Zeros::default(),
            }),
            (Form::Blocks(scheme), Some(RowScales { axis, scales, .. })) => {
                let inner = if *axis == 0 { scheme.blocks.n } else { 1 };
                self.in_blocks(scheme, curvature, &ScaledElements { elements, scales, inner })
            }
            (Form::Blocks(scheme), None) => self.in_blocks(scheme, curvature, elements),
        }
    }

    fn in_blocks<E: Elements>(
        &self,
        scheme: &Scheme,
        curvature: Curvature<'_>,
        elements: &E,
    ) -> Result<Done> {
        match !self.is_transposed && elements.count() > MOST_WITHOUT_PARTS {
            true => self.run_parts(scheme, curvature, elements),
            false => blocks(scheme, curvature, &Matrix { elements, is_transposed: self.is_transposed }),
        }
    }

    /// Quantizes a tensor with a scale for each channel. If it is transposed, so are its codes,
    /// which are a quarter of its size.
    fn linear<E: Elements>(&self, quantizer: &LinearQuantizer, elements: &E) -> Result<Done> {
        let done = match &self.shape[..] {
            [rows, columns] if self.is_transposed => {
                let axis = quantizer.axis.map(|axis| 1 - axis.min(1));
                let own = LinearQuantizer { axis, ..*quantizer };
                let done = own.quantize_elements(elements, &[*columns, *rows])?;
                LinearCodes { codes: transpose(&done.codes, &self.shape), ..done }
            }
            [directions, inputs, gates] if self.is_transposed => {
                let rows = if quantizer.axis.is_some() { directions * gates } else { *directions };
                let own = LinearQuantizer { axis: Some(0), ..*quantizer };
                let columns = directions * gates * inputs / rows.max(1);
                let done = own.quantize_elements(elements, &[rows, columns])?;
                let parts = done.codes.chunks((gates * inputs).max(1));
                let codes = parts.flat_map(|part| transpose(part, &[*inputs, *gates])).collect();
                LinearCodes { codes, ..done }
            }
            shape => quantizer.quantize_elements(elements, shape)?,
        };
        let scales = done.scale_bytes(self.is_half);
        let mut zero_points = done.zero_point_bytes(&quantizer.grid);
        if self.has_one_point {
            zero_points.truncate(quantizer.grid.ty.byte_count(1));
        }
        let results = vec![scales, zero_points, done.codes];
        Ok(Done { results, noise: done.noise, shift: Shift::default(), zeros: Zeros::default() })
    }

    /// Quantizes a tensor to float8, with a scale for each channel.
    fn float8<E: Elements>(&self, axis: Option<usize>, elements: &E) -> Result<Done> {
        check_finite(elements)?;
        let channels = axis.map_or(1, |axis| self.shape.get(axis).copied().unwrap_or(1));
        let inner = axis.map_or(elements.count(), |axis| self.shape.iter().skip(axis + 1).product());
        let Float8Codes { scales, codes, noise } = float8::encode(elements, (channels, inner));
        let scales: Vec<u8> = scales.into_iter().flat_map(f32::to_le_bytes).collect();
        let results = vec![scales, vec![0; channels], codes];
        Ok(Done { results, noise, shift: Shift::default(), zeros: Zeros::default() })
    }

    /// Quantizes a large matrix a few columns at a time. It is read in long runs, because each
    /// short one maps pages around it.
    fn run_parts<E: Elements>(
        &self,
        scheme: &Scheme,
        curvature: Curvature<'_>,
        elements: &E,
    ) -> Result<Done> {
        let BlockQuantizer { k, n: columns, .. } = scheme.blocks;
        let most = (ELEMENTS_AT_ONCE / k.max(1)).max(1).next_multiple_of(TILE_COLUMNS);
        let mut results: Vec<Vec<u8>> = self.lengths()?.into_iter().map(Vec::with_capacity).collect();
        results.extend((!curvature.means.is_empty()).then(Vec::new));
        let (mut noise, mut shift) = (Noise::default(), Shift::default());
        for first in (0..columns).step_by(most) {
            let n = most.min(columns - first);
            let mut wide = vec![0.0; n * k];
            let rows = wide.chunks_mut(n).enumerate();
            rows.for_each(|(row, wide)| elements.widen(row * columns + first, wide));
            // Exact: the elements have been of this type.
            let part: Vec<E::Element> = wide.into_iter().map(E::Element::narrow).collect();
            let part_scheme = Scheme { blocks: BlockQuantizer { n, ..scheme.blocks }, ..*scheme };
            let done =
                blocks(&part_scheme, curvature, &Matrix { elements: &part[..], is_transposed: false })?;
            results.iter_mut().zip(done.results).for_each(|(result, part)| result.extend(part));
            (noise, shift) = (noise.plus(done.noise), shift.plus(done.shift));
        }
        Ok(Done { results, noise, shift, zeros: Zeros::default() })
    }
}

/// How much larger than needed the scale of a channel with a large bias is, for roundings.
const MARGIN: f64 = 1.0001;

/// The elements of a matrix that are quantized at once, and those of one that is not divided.
const ELEMENTS_AT_ONCE: usize = 1 << 20;
const MOST_WITHOUT_PARTS: usize = 4 * ELEMENTS_AT_ONCE;

/// Quantizes a matrix in blocks of its columns. With the means of the channels, the last result is
/// a bias that corrects the means of the outputs.
fn blocks<E: Elements + ?Sized>(
    scheme: &Scheme,
    curvature: Curvature<'_>,
    weights: &Matrix<'_, E>,
) -> Result<Done> {
    let sizes = scheme.sizes(size_of::<E::Element>())?;
    let (mut codes, mut zero_points) = (vec![0; sizes.codes], vec![0; sizes.zero_points]);
    let mut scales = vec![E::Element::narrow(0.0); sizes.scales];
    let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut zero_points };
    let Changes { noise, bias, energies } = scheme.quantize(curvature, weights, out)?;
    // The squares of finite numbers have a finite sum.
    if !noise.signal.is_finite() {
        check_finite(weights.elements)?;
    }
    let mut results = vec![codes, E::Element::bytes(&scales)];
    results.extend((!scheme.blocks.is_symmetric).then_some(zero_points));
    let square = bias.iter().map(|bias| bias * bias).sum();
    if !bias.is_empty() {
        let bias: Vec<E::Element> = bias.iter().map(|bias| E::Element::narrow(*bias as f32)).collect();
        results.push(E::Element::bytes(&bias));
    }
    let shift = Shift { square, energy: energies.iter().sum() };
    Ok(Done { results, noise, shift, zeros: Zeros::default() })
}

/// The columns of a part are a multiple of those of a tile.
const TILE_COLUMNS: usize = 64;

/// Converts elements to 16 bits, on up to as many threads as the machine has cores.
fn halves<E: Elements>(ty: HalfType, elements: &E) -> Done {
    let count = elements.count();
    let mut bytes = vec![0; 2 * count];
    let threads = parallel::threads_for(count);
    let per_job = count.div_ceil(threads).next_multiple_of(CHUNK).max(CHUNK);
    let mut noises = vec![Noise::default(); threads];
    let jobs: Vec<_> = bytes.chunks_mut(2 * per_job).zip(&mut noises).enumerate().collect();
    parallel::for_each(jobs, |(index, (bytes, noise))| {
        let mut wide = [0.0_f32; CHUNK];
        for (part, bytes) in bytes.chunks_mut(2 * CHUNK).enumerate() {
            let Some(wide) = wide.get_mut(..bytes.len() / 2) else { continue };
            elements.widen(index * per_job + part * CHUNK, wide);
            let (halves, _) = bytes.as_chunks_mut::<2>();
            *noise = noise.plus(ty.convert(wide, halves));
        }
    });
    let noise = noises.into_iter().fold(Noise::default(), Noise::plus);
    Done { results: vec![bytes], noise, shift: Shift::default(), zeros: Zeros::default() }
}

/// Transposes a matrix to this shape, by tiles that stay in the cache.
fn transpose<T: Copy>(elements: &[T], shape: &[usize]) -> Vec<T> {
    const TILE: usize = 32;
    let [rows, columns] = *shape else { return elements.to_vec() };
    let Some(first) = elements.first() else { return Vec::new() };
    let mut transposed = vec![*first; elements.len()];
    for row_tile in (0..rows).step_by(TILE) {
        for column_tile in (0..columns).step_by(TILE) {
            for row in row_tile..(row_tile + TILE).min(rows) {
                for column in column_tile..(column_tile + TILE).min(columns) {
                    let from = elements.get(column * rows + row);
                    if let (Some(to), Some(from)) = (transposed.get_mut(row * columns + column), from) {
                        *to = *from;
                    }
                }
            }
        }
    }
    transposed
}

pub(super) fn check_finite<E: Elements + ?Sized>(elements: &E) -> Result<()> {
    let mut found = None;
    each_chunk(elements, |values| {
        // All of them, so that the loop becomes vector instructions.
        if !values.iter().fold(true, |all, value| all & value.is_finite()) {
            found = found.or_else(|| values.iter().copied().find(|value| !value.is_finite()));
        }
    });
    match found {
        Some(value) => {
            let text = format!("an element is {value}");
            Err(Error::new(ErrorKind::InvalidArgument, text).help("exclude the node that reads it"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_make_a_transposed_matrix() {
        let (rows, columns) = (70, 33);
        let given: Vec<usize> = (0..rows * columns).collect();
        let found = transpose(&given, &[rows, columns]);
        for row in 0..rows {
            for column in 0..columns {
                assert_eq!(found[row * columns + column], given[column * rows + row]);
            }
        }
        assert!(transpose::<u8>(&[], &[0, 3]).is_empty());
    }
}
