//! Calibration: observers in the runs of a session, for `ort_runtime.quantization`.
//!
//! The values of a run are seen while it has them, so that no output is added to the model, and
//! memory does not grow with the number of samples.

use std::collections::BTreeMap;

use half::f16;
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use ort_quant::{
    AxisCalibration, Bits, BlockLayout, BlockMethod, BlockQuantizer, Extremes, GptqOptions, GridOptions,
    HessianInput, Observer, QuantType, QuantizedBlocks, RangeRule, ValueRange, Wanted, Weight, entropy_range,
};
use ort_runtime::{Result as EngineResult, RunOptions, Session, Value};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::readable;
use crate::cancel::{CancelToken, detached, enter, interruptibly};
use crate::error::OrRaise;
use crate::quantize::{Float, element_type, typed};
use crate::session::{Given, InferenceSession};

/// What sees the values of a run.
type Observe<'a> = dyn Fn(&Session, &[(&str, Value)], &RunOptions<'_>) -> EngineResult<()> + Sync + 'a;

/// Runs a sample. The session is on the CPU and without optimizations, or values are missing.
fn run(
    py: Python<'_>,
    session: &Bound<'_, InferenceSession>,
    feed: &Bound<'_, PyDict>,
    observe: &Observe<'_>,
) -> PyResult<()> {
    let _call = enter(py);
    let built = session.get().built(py)?;
    let mut given = Given::new();
    built.values(feed, None, &mut given)?;
    let done = interruptibly(py, CancelToken::default().token(), |cancel| {
        observe(&built.session, &given, &RunOptions { cancel, ..RunOptions::default() })
    })?;
    done.or_raise(py)
}

/// Observers of values: their extremes, and histograms or moments if these are wanted.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct Calibration(ort_quant::Calibration);

#[pymethods]
impl Calibration {
    #[new]
    fn new(names: Vec<String>, histogram: bool, moments: bool) -> Calibration {
        Calibration(ort_quant::Calibration::new(names, Wanted { histogram, moments }))
    }

    /// Runs a sample and observes its values.
    fn run(
        &self,
        py: Python<'_>,
        session: &Bound<'_, InferenceSession>,
        feed: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        run(py, session, feed, &|session, inputs, options| {
            self.0.run_with(session, inputs, options).map(|_| ())
        })
    }

    /// Observes a float32 array as a value of one run.
    fn observe(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
        let array = readable(array)?;
        let array = typed::<f32>(name, &array)?.try_readonly()?;
        let values = array.as_slice()?;
        match detached(py, || self.0.observe(name, values)) {
            true => Ok(()),
            false => Err(unknown(name)),
        }
    }

    /// The elements seen: all, zeros, NaN and infinities.
    fn counts(&self, name: &str) -> PyResult<(u64, u64, u64, u64)> {
        let counts = self.observer(name)?.counts();
        Ok((counts.elements, counts.zeros, counts.nan, counts.infinite))
    }

    /// The least and the greatest finite element; `None` if there was none.
    fn extremes(&self, name: &str) -> PyResult<Option<(f32, f32)>> {
        Ok(self.observer(name)?.extremes().map(|Extremes { low, high }| (low, high)))
    }

    /// Mean and standard deviation.
    fn moments(&self, name: &str) -> PyResult<Option<(f64, f64)>> {
        Ok(self.observer(name)?.moments().map(|moments| (moments.mean, moments.deviation)))
    }

    /// The counts of negative elements by magnitude and of positive ones, and the width of a bin.
    /// Zeros are in neither.
    #[allow(clippy::type_complexity, reason = "a tuple, as Python returns several results")]
    fn histogram<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<Option<(Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u64>>, f64)>> {
        let observer = self.observer(name)?;
        Ok(observer.histogram().map(|histogram| {
            let (negative, positive) = histogram.bins();
            let array = |bins| PyArray1::from_slice(py, bins);
            (array(negative), array(positive), histogram.width())
        }))
    }

    /// The range that this share of the elements is in.
    fn percentile(
        &self,
        py: Python<'_>,
        name: &str,
        share: f64,
        symmetric: bool,
    ) -> PyResult<Option<(f64, f64)>> {
        let observer = self.observer(name)?;
        let grid = GridOptions::new(QuantType::Int8, symmetric);
        let range = detached(py, || RangeRule::Percentile(share).range(&observer, &grid));
        Ok(range.or_raise(py)?.map(ends))
    }

    /// The range of least divergence with this many levels on each side of zero.
    fn entropy(
        &self,
        py: Python<'_>,
        name: &str,
        levels: usize,
        symmetric: bool,
    ) -> PyResult<Option<(f64, f64)>> {
        let observer = self.observer(name)?;
        let range = detached(py, || entropy_range(&observer, levels, symmetric));
        Ok(range.or_raise(py)?.map(ends))
    }
}

impl Calibration {
    fn observer(&self, name: &str) -> PyResult<Observer> {
        self.0.observer(name).ok_or_else(|| unknown(name))
    }
}

fn unknown(name: &str) -> PyErr {
    PyKeyError::new_err(format!("value '{name}' is not observed"))
}

fn ends(range: ValueRange) -> (f64, f64) {
    (range.low, range.high)
}

/// The least and the greatest element of each channel of a value.
type ChannelArrays<'py> = (Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<f32>>);

/// Observers of the channels of values, which are along the second axis.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct ChannelCalibration(AxisCalibration);

#[pymethods]
impl ChannelCalibration {
    #[new]
    fn new(names: Vec<String>) -> ChannelCalibration {
        ChannelCalibration(AxisCalibration::new(names))
    }

    /// Runs a sample and observes its values.
    fn run(
        &self,
        py: Python<'_>,
        session: &Bound<'_, InferenceSession>,
        feed: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        run(py, session, feed, &|session, inputs, options| {
            self.0.run_with(session, inputs, options).map(|_| ())
        })
    }

    /// Returns the extremes by the names of values that were seen, and forgets them. A channel
    /// without a finite element has infinities.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<BTreeMap<String, ChannelArrays<'py>>> {
        let taken = self.0.take().or_raise(py)?;
        let arrays = |channels: &[Option<Extremes>]| {
            let none = Extremes { low: f32::INFINITY, high: f32::NEG_INFINITY };
            let known = || channels.iter().map(|extremes| extremes.unwrap_or(none));
            let lows = PyArray1::from_iter(py, known().map(|extremes| extremes.low));
            (lows, PyArray1::from_iter(py, known().map(|extremes| extremes.high)))
        };
        let seen = taken.into_iter().filter(|(_, channels)| channels.iter().any(Option::is_some));
        Ok(seen.map(|(name, channels)| (name, arrays(&channels))).collect())
    }
}

/// The Hessians of what values are multiplied with, for GPTQ.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct HessianCalibration(ort_quant::HessianCalibration);

#[pymethods]
impl HessianCalibration {
    /// Creates the Hessians of values by the length of their last axis.
    #[new]
    fn new(channels: BTreeMap<String, usize>) -> HessianCalibration {
        let input = |(name, channels)| HessianInput { names: vec![name], channels };
        let inputs: Vec<HessianInput> = channels.into_iter().map(input).collect();
        HessianCalibration(ort_quant::HessianCalibration::new(&inputs))
    }

    /// Runs a sample and observes its values.
    fn run(
        &self,
        py: Python<'_>,
        session: &Bound<'_, InferenceSession>,
        feed: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        run(py, session, feed, &|session, inputs, options| {
            self.0.run_with(session, inputs, options).map(|_| ())
        })
    }
}

/// Quantizes a matrix by blocks of its columns for `MatMulNBits`. Returns codes, scales and zero
/// points, flat; the latter are numbers for `hqq`, and `None` for symmetric blocks. The last result
/// says whether GPTQ was possible.
#[pyfunction]
#[pyo3(signature = (weights, block_size, bits, is_symmetric, method, hessian=None, damping=0.01, act_order=false))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn quantize_blocks<'py>(
    weights: &Bound<'py, PyUntypedArray>,
    block_size: usize,
    bits: usize,
    is_symmetric: bool,
    method: &str,
    hessian: Option<(Bound<'py, HessianCalibration>, String)>,
    damping: f64,
    act_order: bool,
) -> PyResult<Blocks<'py>> {
    let method = match method {
        "minmax" => BlockMethod::MinMax,
        "mse" => BlockMethod::SquaredError,
        "k_quant" => BlockMethod::KQuant,
        "hqq" => BlockMethod::HalfQuadratic,
        _ => return Err(PyValueError::new_err(format!("there is no method '{method}'"))),
    };
    let (k, n) = match weights.shape() {
        [k, n] => (*k, *n),
        shape => return Err(PyValueError::new_err(format!("a weight of shape {shape:?}, expected [k, n]"))),
    };
    let bits = match bits {
        2 => Bits::Two,
        4 => Bits::Four,
        8 => Bits::Eight,
        _ => return Err(PyValueError::new_err(format!("bits: {bits}, expected 2, 4 or 8"))),
    };
    let layout = BlockLayout::MatMulNBits;
    let blocks = BlockQuantizer { k, n, block_size, bits, is_symmetric, layout };
    let gptq = GptqOptions { damping, act_order, ..GptqOptions::default() };
    let job = BlockJob { blocks, method, hessian, gptq };
    match element_type(weights)? {
        Float::F32 => job.run::<f32>(weights),
        Float::F16 => job.run::<f16>(weights),
    }
}

/// Codes, scales and zero points, and whether GPTQ was possible.
type Blocks<'py> = (Bound<'py, PyArray1<u8>>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, bool);

/// The quantization of a matrix.
struct BlockJob<'py> {
    blocks: BlockQuantizer,
    method: BlockMethod,
    hessian: Option<(Bound<'py, HessianCalibration>, String)>,
    gptq: GptqOptions,
}

impl<'py> BlockJob<'py> {
    fn run<T: Weight + Element>(&self, weights: &Bound<'py, PyUntypedArray>) -> PyResult<Blocks<'py>> {
        let py = weights.py();
        let sizes = self.blocks.sizes_by::<T>(self.method).or_raise(py)?;
        let weights = readable(weights)?;
        let weights = typed::<T>("weights", &weights)?.try_readonly()?;
        let values = weights.as_slice()?;
        let mut codes = vec![0; sizes.codes];
        let mut scales = vec![T::narrow(0.0); sizes.scales];
        let mut zero_points = vec![0; sizes.zero_points];
        let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut zero_points };
        let hessian = self.hessian.as_ref().map(|(calibration, name)| (&calibration.get().0, name.as_str()));
        let (blocks, method, gptq) = (self.blocks, self.method, self.gptq);
        let done = detached(py, || match hessian {
            None => blocks.quantize_by(method, None, values, out),
            Some((calibration, name)) => calibration.with_hessian(name, |hessian| {
                blocks.quantize_by(method, hessian.map(|hessian| (hessian, gptq)), values, out)
            }),
        });
        let used = done.or_raise(py)?;
        let has_points = !self.blocks.is_symmetric;
        let points = PyArray1::from_vec(py, zero_points).into_any();
        let points = match self.method {
            // The bytes are those of numbers.
            BlockMethod::HalfQuadratic => points.call_method1("view", (numpy::dtype::<T>(py),))?,
            _ => points,
        };
        let scales = PyArray1::from_vec(py, scales).into_any();
        Ok((PyArray1::from_vec(py, codes), scales, has_points.then_some(points), used))
    }
}
