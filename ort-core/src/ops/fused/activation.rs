//! Activation epilogues: what fused operators name in `activation` and `activation_params`.

use smallvec::SmallVec;

use crate::ir::{Attribute, Attributes, ValueId};
use crate::ops::microsoft::number;
use crate::spec::{Draft, Registry, ScalarExpr};
use crate::{Result, ensure, error, unknown_name};

/// One activation: its name in fused operators, and the standard operator that it stands for.
struct Row {
    name: &'static str,
    /// The name of the standard operator.
    op: &'static str,
    /// The parameters in the order of `activation_params`, named like the operator's attributes
    /// (for `Clip`, its inputs).
    parameters: &'static [&'static str],
    /// The operator's attributes that the name implies.
    fixed: &'static [(&'static str, &'static str)],
    /// Whether ONNX Runtime's `FusedConv` has it.
    in_onnx_runtime: bool,
}

/// An activation that ONNX Runtime's `FusedConv` lacks.
const fn row(name: &'static str, parameters: &'static [&'static str]) -> Row {
    Row { name, op: name, parameters, fixed: &[], in_onnx_runtime: false }
}

/// An activation that ONNX Runtime's `FusedConv` has.
const fn shared(name: &'static str, parameters: &'static [&'static str]) -> Row {
    Row { in_onnx_runtime: true, ..row(name, parameters) }
}

/// The activations that ONNX Runtime fuses, and more.
const ROWS: &[Row] = &[
    row("Celu", &["alpha"]),
    shared("Clip", &["min", "max"]),
    row("Elu", &["alpha"]),
    Row { op: "Gelu", fixed: &[("approximate", "tanh")], ..row("FastGelu", &[]) },
    row("Gelu", &[]),
    shared("HardSigmoid", &["alpha", "beta"]),
    shared("HardSwish", &[]),
    shared("LeakyRelu", &["alpha"]),
    row("Mish", &[]),
    shared("Relu", &[]),
    row("Selu", &["alpha", "gamma"]),
    shared("Sigmoid", &[]),
    row("Softplus", &[]),
    row("Softsign", &[]),
    row("Swish", &["alpha"]),
    shared("Tanh", &[]),
    row("ThresholdedRelu", &["alpha"]),
];

fn find(name: &str) -> Result<&'static Row> {
    ROWS.iter().find(|row| row.name == name).ok_or_else(|| {
        let names: Vec<&str> = Activation::names().collect();
        unknown_name("activation", name, &names)
    })
}

/// An activation with its parameters.
///
/// ```
/// use ort_core::ops::fused::activation::Activation;
/// let clip = Activation::new("Clip", &[0.0, 6.0])?;
/// assert_eq!(clip.parameter("max")?, 6.0);
/// assert!(Activation::new("Clip", &[0.0]).is_err());
/// # Ok::<(), ort_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Activation {
    /// The name in the attribute `activation`.
    pub name: &'static str,
    values: SmallVec<[f32; 2]>,
}

impl Activation {
    /// Creates the activation called `name` with its parameters in order. An activation without
    /// parameters ignores `values`.
    ///
    /// # Errors
    /// An unknown name, or a wrong number of parameters.
    pub fn new(name: &str, values: &[f32]) -> Result<Activation> {
        let row = find(name)?;
        let (expected, given) = (row.parameters.len(), values.len());
        ensure!(
            given == expected || expected == 0,
            InvalidGraph,
            help = match row.parameters {
                [] => "leave the parameters out".to_string(),
                names => format!("'activation_params' holds {}", names.join(", ")),
            },
            "activation '{name}' takes {expected} parameters, got {given}"
        );
        Ok(Activation { name: row.name, values: values.iter().take(expected).copied().collect() })
    }

    /// Returns the names of all activations.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ROWS.iter().map(|row| row.name)
    }

    /// Reads the attributes `activation` and `activation_params` of a fused operator.
    pub fn of_attributes(attrs: &Attributes) -> Result<Option<Activation>> {
        Activation::named_by(attrs, ["activation", "activation_params"])
    }

    /// Reads the attributes `inner_activation` and `inner_activation_params`, of an operator that
    /// fuses two convolutions.
    pub fn inner_of_attributes(attrs: &Attributes) -> Result<Option<Activation>> {
        Activation::named_by(attrs, ["inner_activation", "inner_activation_params"])
    }

    fn named_by(attrs: &Attributes, [name, params]: [&str; 2]) -> Result<Option<Activation>> {
        match attrs.find_string(name) {
            None | Some("") => Ok(None),
            Some(name) => Activation::new(name, attrs.find_floats(params).unwrap_or(&[])).map(Some),
        }
    }

    /// Reads the attributes `activation`, `activation_alpha`, `activation_beta` and
    /// `activation_gamma` of `FusedGemm`.
    pub fn of_gemm(attrs: &Attributes) -> Result<Activation> {
        let row = find(attrs.string("activation")?)?;
        let value = |parameter: &&str| {
            let attr = format!("activation_{parameter}");
            let value = attrs.find_float(&attr);
            value.ok_or_else(|| error!(InvalidGraph, "activation '{}' needs attribute '{attr}'", row.name))
        };
        let values: Vec<f32> = row.parameters.iter().map(value).collect::<Result<_>>()?;
        Activation::new(row.name, &values)
    }

    /// Returns the activation that a node of the standard operator `op` applies to its first input.
    /// `None` for `Clip`, whose bounds are inputs.
    pub fn of_operator(op: &str, attrs: &Attributes) -> Option<Activation> {
        let is_fixed = |(name, value): &(&str, &str)| attrs.find_string(name) == Some(*value);
        let same = |row: &&Row| row.op == op && row.op != "Clip" && row.fixed.iter().all(is_fixed);
        let row = ROWS.iter().find(same)?;
        let values: Option<Vec<f32>> = row.parameters.iter().map(|name| attrs.find_float(name)).collect();
        Activation::new(row.name, &values?).ok()
    }

    /// Returns the attributes `activation` and `activation_params` for this activation.
    pub fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.attributes_by(["activation", "activation_params"])
    }

    /// Returns the attributes `inner_activation` and `inner_activation_params` for this activation.
    pub fn inner_attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.attributes_by(["inner_activation", "inner_activation_params"])
    }

    fn attributes_by(&self, [name, params]: [&'static str; 2]) -> Vec<(&'static str, Attribute)> {
        let mut attrs = vec![(name, Attribute::String(self.name.to_string()))];
        if !self.values.is_empty() {
            attrs.push((params, Attribute::Floats(self.values.to_vec())));
        }
        attrs
    }

    /// Returns whether ONNX Runtime's `FusedConv` has the activation.
    pub fn is_in_onnx_runtime(&self) -> bool {
        ROWS.iter().any(|row| row.name == self.name && row.in_onnx_runtime)
    }

    /// Returns a parameter by its name.
    ///
    /// # Errors
    /// The activation has no such parameter.
    pub fn parameter(&self, name: &str) -> Result<f32> {
        let place = find(self.name)?.parameters.iter().position(|parameter| *parameter == name);
        let value = place.and_then(|place| self.values.get(place)).copied();
        value.ok_or_else(|| error!(InvalidGraph, "activation '{}' has no parameter '{name}'", self.name))
    }

    /// Returns the scalar formula over the first input.
    ///
    /// # Errors
    /// The standard operator has no formula.
    pub fn formula(&self) -> Result<ScalarExpr> {
        let row = find(self.name)?;
        if row.op == "Clip" {
            let [min, max] = ["min", "max"].map(|name| self.parameter(name));
            // The standard's `Clip` has no formula, because its bounds are inputs; here they are
            // constants.
            return Ok(ScalarExpr::Input(0).max(f64::from(min?)).min(f64::from(max?)));
        }
        let spec = Registry::global()?.find("", row.op);
        let spec = spec.ok_or_else(|| error!(Fail, "there is no operator {}", row.op))?;
        let named = row.parameters.iter().zip(&self.values);
        let mut given: Vec<(String, Attribute)> =
            named.map(|(name, value)| (name.to_string(), Attribute::Float(*value))).collect();
        given.extend(row.fixed.iter().map(|(n, v)| (n.to_string(), Attribute::String(v.to_string()))));
        let scalar = spec.scalar.ok_or_else(|| error!(Fail, "{} has no formula", row.op))?;
        scalar(&Attributes::new(spec, given)?)
    }

    /// Turns a draft into the standard operator that applies the activation to a value.
    pub(in crate::ops) fn become_of(&self, draft: &mut Draft<'_>, value: ValueId) -> Result<()> {
        let row = find(self.name)?;
        if row.op == "Clip" {
            let dtype = draft.dtype(0)?;
            let mut inputs = vec![value];
            for &bound in &self.values {
                inputs.push(number(draft, bound, dtype)?);
            }
            draft.become_op(row.op, &inputs, &[]);
            return Ok(());
        }
        let named = row.parameters.iter().zip(&self.values);
        let mut attrs: Vec<(&str, Attribute)> =
            named.map(|(name, value)| (*name, Attribute::Float(*value))).collect();
        attrs.extend(row.fixed.iter().map(|(name, value)| (*name, Attribute::String(value.to_string()))));
        draft.become_op(row.op, &[value], &attrs);
        Ok(())
    }
}

/// Replaces a draft by the activation of a value, or by the value itself if there is none.
pub(in crate::ops) fn end_with(
    draft: &mut Draft<'_>,
    value: ValueId,
    activation: Option<&Activation>,
) -> Result<()> {
    match activation {
        Some(activation) => activation.become_of(draft, value),
        None => draft.replace(&[value]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each row names a standard operator and its attributes, and `of_operator` finds it from them.
    #[test]
    fn rows_are_operators() -> Result<()> {
        for row in ROWS {
            let spec = Registry::global()?.find("", row.op);
            let spec = spec.ok_or_else(|| error!(Fail, "{} is no operator", row.op))?;
            if row.op == "Clip" {
                continue;
            }
            let mut given: Vec<(String, Attribute)> =
                row.parameters.iter().map(|name| (name.to_string(), Attribute::Float(0.25))).collect();
            given.extend(row.fixed.iter().map(|(n, v)| (n.to_string(), Attribute::String(v.to_string()))));
            let found = Activation::of_operator(row.op, &Attributes::new(spec, given)?);
            let expected = Activation::new(row.name, &vec![0.25; row.parameters.len()])?;
            assert!(expected.formula()?.input_count() == 1, "{}", row.name);
            assert_eq!(found, Some(expected), "{}", row.name);
        }
        Ok(())
    }
}
