//! Coordinate transformations of `Resize`: where each output element comes from.

use num_traits::{AsPrimitive, Float};
use ort_core::ir::Attributes;
use ort_core::ops::tensor::geometry::{ResizePolicy, ResizeScale, normalize_axes};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, unknown_name};

/// The interpolation mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Nearest,
    Linear,
    Cubic,
}

/// The transformation from an output coordinate to an input coordinate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transform {
    HalfPixel,
    HalfPixelSymmetric,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
    /// Exists only in version 11.
    HalfPixelForNearest,
    CropAndResize,
}

/// Which neighbour is the nearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rounding {
    PreferFloor,
    PreferCeil,
    Floor,
    Ceil,
}

/// The attributes of a node.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) mode: Mode,
    pub(super) transform: Transform,
    rounding: Rounding,
    policy: ResizePolicy,
    axes: Option<Vec<i64>>,
    pub(super) antialias: bool,
    pub(super) exclude_outside: bool,
    pub(super) cubic_a: f32,
    pub(super) extrapolation: f32,
}

/// The optional inputs.
#[derive(Debug)]
pub(super) struct Given<'a> {
    pub(super) roi: Option<TensorView<'a>>,
    pub(super) scales: Option<TensorView<'a>>,
    pub(super) sizes: Option<TensorView<'a>>,
}

/// One dimension of the resize.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Axis {
    /// The size in the input.
    pub(super) from: usize,
    /// The size in the output.
    pub(super) to: usize,
    /// Output elements per input element.
    pub(super) scale: ResizeScale,
    /// The scale as the node gives it; `None` if it gives sizes.
    given: Option<f32>,
    /// The crop region, from 0 to 1.
    roi: (f64, f64),
}

const NEAREST: &[&str] = &["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"];
const TRANSFORMS: &[&str] = &[
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
];

impl Settings {
    pub(super) fn new(attrs: &Attributes) -> Result<Settings> {
        let mode = match attrs.string("mode")? {
            "nearest" => Mode::Nearest,
            "linear" => Mode::Linear,
            "cubic" => Mode::Cubic,
            other => return Err(unknown_name("the mode", other, &["nearest", "linear", "cubic"])),
        };
        let transform = match attrs.string("coordinate_transformation_mode")? {
            "half_pixel" => Transform::HalfPixel,
            "half_pixel_symmetric" => Transform::HalfPixelSymmetric,
            "pytorch_half_pixel" => Transform::PytorchHalfPixel,
            "align_corners" => Transform::AlignCorners,
            "asymmetric" => Transform::Asymmetric,
            "tf_half_pixel_for_nn" => Transform::HalfPixelForNearest,
            "tf_crop_and_resize" => Transform::CropAndResize,
            other => return Err(unknown_name("the coordinate transformation", other, TRANSFORMS)),
        };
        let rounding = match attrs.string("nearest_mode")? {
            "round_prefer_floor" => Rounding::PreferFloor,
            "round_prefer_ceil" => Rounding::PreferCeil,
            "floor" => Rounding::Floor,
            "ceil" => Rounding::Ceil,
            other => return Err(unknown_name("the nearest mode", other, NEAREST)),
        };
        Ok(Settings {
            mode,
            transform,
            rounding,
            policy: ResizePolicy::parse(attrs.string("keep_aspect_ratio_policy")?)?,
            axes: attrs.find_ints("axes").map(<[i64]>::to_vec),
            antialias: attrs.flag("antialias")?,
            exclude_outside: attrs.flag("exclude_outside")?,
            cubic_a: attrs.float("cubic_coeff_a")?,
            extrapolation: attrs.float("extrapolation_value")?,
        })
    }

    /// Combines shapes, scales, sizes and region into one [`Axis`] per dimension.
    pub(super) fn axes(&self, shape: &[usize], result: &[usize], given: &Given<'_>) -> Result<Vec<Axis>> {
        ensure!(shape.len() == result.len(), Fail, "shape {shape:?} cannot be resized to {result:?}");
        let mut axes: Vec<Axis> = shape
            .iter()
            .zip(result)
            .map(|(&from, &to)| Axis { from, to, scale: ResizeScale::ONE, given: None, roi: (0.0, 1.0) })
            .collect();
        let chosen = match &self.axes {
            Some(chosen) => normalize_axes(chosen, shape.len())?,
            // Axes that are not chosen keep the scale 1.
            None => (0..shape.len()).collect(),
        };
        let count = chosen.len();
        // An empty `scales` input counts as absent.
        let scales = given.scales.filter(|scales| scales.element_count() > 0);
        let (scales, given_scales) = match (scales, given.sizes) {
            (Some(scales), _) => {
                let given = scales.to_vec::<f32>()?;
                (given.iter().copied().map(ResizeScale::given).collect(), given)
            }
            (None, Some(sizes)) => {
                let from: Vec<i64> = chosen.iter().map(|&axis| shape[axis] as i64).collect();
                (self.policy.apply(&from, &sizes.to_ints()?).0, Vec::new())
            }
            (None, None) => return Err(error!(InvalidArgument, "Resize needs scales or sizes")),
        };
        ensure!(scales.len() == count, InvalidArgument, "{} scales are given for {count} axes", scales.len());
        for (entry, (&axis, scale)) in chosen.iter().zip(scales).enumerate() {
            axes[axis].scale = scale;
            axes[axis].given = given_scales.get(entry).copied();
        }
        if self.transform == Transform::CropAndResize {
            let roi = given.roi.map(|roi| numbers(&roi)).transpose()?.unwrap_or_default();
            ensure!(
                roi.len() == 2 * count,
                InvalidArgument,
                "a region of {} numbers for {count} axes",
                roi.len()
            );
            for (entry, &axis) in chosen.iter().enumerate() {
                // The region lists all starts, then all ends.
                axes[axis].roi = (roi[entry], roi[count + entry]);
            }
        }
        Ok(axes)
    }

    /// Returns the index nearest to a coordinate, clamped to the input.
    pub(super) fn nearest(&self, x: f64, size: usize) -> usize {
        let index = match self.rounding {
            // Rounds to the nearest; these two differ only at ties.
            Rounding::PreferFloor => (x - 0.5).ceil(),
            Rounding::PreferCeil => (x + 0.5).floor(),
            Rounding::Floor => x.floor(),
            Rounding::Ceil => x.ceil(),
        };
        // The cast saturates, and NaN becomes 0, so the result is always inside.
        (index.max(0.0) as usize).min(size.saturating_sub(1))
    }
}

fn numbers(view: &TensorView<'_>) -> Result<Vec<f64>> {
    let dtype = view.dtype();
    ort_core::for_each_type!(dtype in [F32, F64, F16], T => {
        Ok(view.to_vec::<T>()?.into_iter().map(AsPrimitive::<f64>::as_).collect())
    }, else => Err(error!(InvalidArgument, "a region of type {}", dtype.name())))
}

impl Axis {
    /// Whether every element stays where it is.
    pub(super) fn is_identity(&self, transform: Transform) -> bool {
        let whole = transform != Transform::CropAndResize || self.roi == (0.0, 1.0);
        self.from == self.to && self.scale.is_one() && whole
    }

    /// Returns the input coordinate from which the nearest element is taken.
    ///
    /// At a tie, precision decides. Sizes make the coordinate exact. A given scale is an `f32` that
    /// approximates a ratio (0.6 for 3/5). Computing in `f32`, as ONNX Runtime does, yields the
    /// coordinate of that ratio.
    pub(super) fn coordinate_of_nearest(&self, transform: Transform, index: usize) -> f64 {
        match self.given.filter(|_| transform != Transform::CropAndResize) {
            Some(scale) => {
                f64::from(self.coordinate_in(transform, index, scale * self.from as f32, |x: f32| x / scale))
            }
            None => self.coordinate(transform, index),
        }
    }

    /// Returns the coordinate that weights derive from, in `f64`. An `f32` error would grow with
    /// the coordinate and show at once in `f64` and integer results.
    pub(super) fn coordinate(&self, transform: Transform, index: usize) -> f64 {
        // Not the integer size: the standard's formulas use the size before truncation.
        let width = self.scale.times(self.from as f64);
        self.coordinate_in(transform, index, width, |x: f64| self.scale.divide(x))
    }

    /// Computes the coordinate. `width` is the output size before it is truncated to an integer,
    /// and `divide` divides by the scale. The special cases for an output of one element use the
    /// integer size, as in the standard's text and ONNX Runtime.
    fn coordinate_in<F: Float + 'static>(
        &self,
        transform: Transform,
        index: usize,
        width: F,
        divide: impl Fn(F) -> F,
    ) -> F
    where
        usize: AsPrimitive<F>,
        f64: AsPrimitive<F>,
    {
        let (zero, one, half): (F, F, F) = (0.0_f64.as_(), 1.0_f64.as_(), 0.5_f64.as_());
        let (x, from, to): (F, F, F) = (index.as_(), self.from.as_(), self.to.as_());
        let last = from - one;
        let half_pixel = || divide(x + half) - half;
        match transform {
            Transform::HalfPixel => half_pixel(),
            Transform::PytorchHalfPixel if self.to > 1 => half_pixel(),
            // PyTorch's exception: one element takes the first, not the middle.
            Transform::PytorchHalfPixel => zero,
            Transform::HalfPixelSymmetric => {
                // Centres the output that was truncated to whole elements within the width that was
                // not.
                let offset = from * half * (one - to / width);
                offset + divide(x + half) - half
            }
            // The formula below would divide by zero.
            Transform::AlignCorners if width == one => zero,
            Transform::AlignCorners => x * last / (width - one),
            Transform::Asymmetric => divide(x),
            Transform::HalfPixelForNearest => divide(x + half),
            Transform::CropAndResize => {
                let (start, end): (F, F) = (self.roi.0.as_(), self.roi.1.as_());
                // The standard: a single element takes the middle of the region.
                match self.to > 1 {
                    true => start * last + x * (end - start) * last / (width - one),
                    false => half * (start + end) * last,
                }
            }
        }
    }

    /// Whether a coordinate is outside of the input, so that the extrapolation value applies.
    pub(super) fn is_outside(&self, x: f64) -> bool {
        x < 0.0 || x > self.from as f64 - 1.0
    }
}
