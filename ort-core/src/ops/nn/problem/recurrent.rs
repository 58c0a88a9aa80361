//! Recurrent layers: the sizes of `LSTM`, `GRU` and `RNN`, and the activations of their cells.

use crate::ir::Attributes;
use crate::ops::tensor::geometry::product;
use crate::{Result, ensure, error};

/// The sizes and flags of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recurrent {
    /// The time steps.
    pub steps: usize,
    /// The sequences.
    pub batch: usize,
    /// The elements of a step's input.
    pub depth: usize,
    /// The hidden units.
    pub hidden: usize,
    /// The directions, 1 or 2.
    pub directions: usize,
    /// The gates of a unit.
    pub gates: usize,
    /// Whether the batch is the first axis of input and output.
    pub batch_first: bool,
    /// Whether the only direction is backwards.
    pub reverse: bool,
    /// Whether the reset gate of a `GRU` applies after the linear transform.
    pub linear_before_reset: bool,
    /// Whether the forget gate of an `LSTM` is 1 minus the input gate.
    pub input_forget: bool,
    /// The bound to which the inputs of activations are clipped.
    pub clip: Option<f32>,
}

/// The number of gates of an operator's cell.
pub fn gate_count(op: &str) -> usize {
    match op {
        "LSTM" => 4,
        "GRU" => 3,
        _ => 1,
    }
}

impl Recurrent {
    /// Reads a node whose input and recurrence weights have these shapes.
    ///
    /// # Errors
    ///
    /// If they do not fit each other, or the direction.
    pub fn new(op: &str, attrs: &Attributes, input: &[usize], recurrence: &[usize]) -> Result<Recurrent> {
        let (&[first, second, depth], &[directions, rows, hidden]) = (input, recurrence) else {
            return Err(error!(InvalidArgument, "the input or the recurrence weights do not have rank 3"));
        };
        let (direction, gates) = (attrs.string("direction")?, gate_count(op));
        // Inference refused other names of directions.
        let expected = if direction == "bidirectional" { 2 } else { 1 };
        let fits = directions == expected && gates.checked_mul(hidden) == Some(rows);
        ensure!(fits, InvalidArgument, "recurrence weights of shape {recurrence:?}");
        let flag = |name: &str| attrs.find_int(name).is_some_and(|flag| flag != 0);
        let batch_first = flag("layout");
        let (steps, batch) = if batch_first { (second, first) } else { (first, second) };
        Ok(Recurrent {
            steps,
            batch,
            depth,
            hidden,
            directions,
            gates,
            batch_first,
            reverse: direction == "reverse",
            linear_before_reset: flag("linear_before_reset"),
            input_forget: flag("input_forget"),
            clip: attrs.find_float("clip").filter(|bound| *bound > 0.0),
        })
    }

    /// The rows of each direction's weights: the gates of all units.
    pub fn rows(&self) -> usize {
        // `new` checked that the product does not overflow.
        self.gates * self.hidden
    }

    /// The rows of all directions' weights.
    pub fn columns(&self) -> usize {
        self.directions.saturating_mul(self.rows())
    }

    /// The elements of the states of all directions and sequences.
    pub fn states(&self) -> usize {
        product(&[self.directions, self.batch, self.hidden])
    }
}

/// A function that a cell applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellFunction {
    /// `max(x, 0)`.
    Relu,
    /// `tanh(x)`.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `alpha * x + beta`.
    Affine,
    /// `x`, or `alpha * x` below 0.
    LeakyRelu,
    /// `x` above `alpha`, else 0.
    ThresholdedRelu,
    /// `alpha * tanh(beta * x)`.
    ScaledTanh,
    /// `min(max(alpha * x + beta, 0), 1)`.
    HardSigmoid,
    /// `x`, or `alpha * (exp(x) - 1)` below 0.
    Elu,
    /// `x / (1 + |x|)`.
    Softsign,
    /// `log(1 + exp(x))`.
    Softplus,
}

/// A function with its parameters. One that the function lacks is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CellActivation {
    /// The function.
    pub function: CellFunction,
    /// The first parameter.
    pub alpha: f32,
    /// The second parameter.
    pub beta: f32,
}

/// The functions in the order of [`CellFunction`], with the defaults of the parameters they have.
const FUNCTIONS: [(&str, CellFunction, Option<f32>, Option<f32>); 11] = [
    ("relu", CellFunction::Relu, None, None),
    ("tanh", CellFunction::Tanh, None, None),
    ("sigmoid", CellFunction::Sigmoid, None, None),
    ("affine", CellFunction::Affine, Some(1.0), Some(0.0)),
    ("leakyrelu", CellFunction::LeakyRelu, Some(0.01), None),
    ("thresholdedrelu", CellFunction::ThresholdedRelu, Some(1.0), None),
    ("scaledtanh", CellFunction::ScaledTanh, Some(1.0), Some(1.0)),
    ("hardsigmoid", CellFunction::HardSigmoid, Some(0.2), Some(0.5)),
    ("elu", CellFunction::Elu, Some(1.0), None),
    ("softsign", CellFunction::Softsign, None, None),
    ("softplus", CellFunction::Softplus, None, None),
];

/// Returns the activations of a cell, a list for each direction. `DynamicQuantizeLSTM` has those of
/// `LSTM`.
///
/// # Errors
///
/// If the attribute names too few, or one that the standard does not have.
pub fn activations(op: &str, attrs: &Attributes, directions: usize) -> Result<Vec<Vec<CellActivation>>> {
    let defaults: &[&str] = match op {
        "LSTM" | "DynamicQuantizeLSTM" => &["Sigmoid", "Tanh", "Tanh"],
        "GRU" => &["Sigmoid", "Tanh"],
        _ => &["Tanh"],
    };
    let given = attrs.find_strings("activations").unwrap_or(&[]);
    let names: Vec<&str> = match given {
        [] => defaults.repeat(directions),
        given => given.iter().map(String::as_str).collect(),
    };
    // By default, `RNN` lists two activations even for one direction, so extra names are ignored.
    let needed = directions * defaults.len();
    ensure!(names.len() >= needed, InvalidGraph, "{} activations, expected {needed}", names.len());
    // Only activations that have a parameter consume a value of these lists.
    let mut alphas = attrs.find_floats("activation_alpha").unwrap_or(&[]).iter().copied();
    let mut betas = attrs.find_floats("activation_beta").unwrap_or(&[]).iter().copied();
    let mut all = Vec::with_capacity(needed);
    for name in names.into_iter().take(needed) {
        let known = FUNCTIONS.iter().find(|(known, ..)| known.eq_ignore_ascii_case(name));
        let Some((_, function, alpha, beta)) = known else {
            return Err(error!(InvalidGraph, "activation '{name}' is not in the ONNX standard"));
        };
        let alpha = alpha.map_or(0.0, |default| alphas.next().unwrap_or(default));
        let beta = beta.map_or(0.0, |default| betas.next().unwrap_or(default));
        all.push(CellActivation { function: *function, alpha, beta });
    }
    Ok(all.chunks(defaults.len()).map(<[CellActivation]>::to_vec).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Attribute;
    use crate::spec::Registry;

    #[test]
    fn activations_take_the_parameters_that_they_have() -> Result<()> {
        let names = ["ELU", "Tanh", "Affine"].map(str::to_owned).to_vec();
        let spec = Registry::global()?.find("", "LSTM").ok_or_else(|| error!(Fail, "there is no LSTM"))?;
        let lists = [
            ("activations", Attribute::Strings(names)),
            ("activation_alpha", Attribute::Floats(vec![2.0, 3.0])),
        ];
        let given = lists.map(|(name, list)| (name.to_owned(), list)).to_vec();
        let attrs = Attributes::new(spec, given)?;
        let cells = activations("LSTM", &attrs, 1)?;
        let read = |index: usize| cells[0].get(index).map(|own| (own.function, own.alpha, own.beta));
        assert_eq!(read(0), Some((CellFunction::Elu, 2.0, 0.0)));
        assert_eq!(read(1), Some((CellFunction::Tanh, 0.0, 0.0)));
        assert_eq!(read(2), Some((CellFunction::Affine, 3.0, 0.0)));
        assert!(activations("LSTM", &attrs, 2).is_err());
        assert_eq!(activations("GRU", &Attributes::default(), 2)?.len(), 2);
        Ok(())
    }
}
