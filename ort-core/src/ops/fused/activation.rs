//! The activations that fused operators name in their attributes `activation` and
//! `activation_params`.

use smallvec::SmallVec;

use crate::ir::{Attribute, Attributes, ValueId};
use crate::ops::microsoft::number;
use crate::spec::{Draft, Registry, ScalarExpr};
use crate::{Result, ensure, error, unknown_name};

/// One activation: how fused operators name it, and the operator that it is.
struct Row {
    name: &'static str,
    /// The standard's operator.
    op: &'static str,
    /// Its parameters in the order of `activation_params`, named as the operator's attributes (for
    /// `Clip`, inputs).
    parameters: &'static [&'static str],
    /// Attributes of the operator that the name stands for.
    fixed: &'static [(&'static str, &'static str)],
    /// Whether ONNX Runtime's `FusedConv` has it, too.
    in_onnx_runtime: bool,
}

const fn row(name: &'static str, parameters: &'static [&'static str]) -> Row {
    Row { name, op: name, parameters, fixed: &[], in_onnx_runtime: false }
}

const fn shared(name: &'static str, parameters: &'static [&'static str]) -> Row {
    Row { in_onnx_runtime: true, ..row(name, parameters) }
}

/// Those that ONNX Runtime fuses, and more.
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
        let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
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
    /// Its name in the attribute `activation`.
    pub name: &'static str,
    values: SmallVec<[f32; 2]>,
}

impl Activation {
    /// The activation called `name`, with its parameters in their order. One without parameters
    /// ignores what is given.
    ///
    /// # Errors
    /// An unknown name, or another number of parameters.
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

    /// What the attributes `activation` and `activation_params` of a fused operator say.
    pub fn of_attributes(attrs: &Attributes) -> Result<Option<Activation>> {
        Activation::named_by(attrs, ["activation", "activation_params"])
    }

    /// What the attributes `inner_activation` and `inner_activation_params` say, of an operator
    /// that is made of two.
    pub fn inner_of_attributes(attrs: &Attributes) -> Result<Option<Activation>> {
        Activation::named_by(attrs, ["inner_activation", "inner_activation_params"])
    }

    fn named_by(attrs: &Attributes, [name, params]: [&str; 2]) -> Result<Option<Activation>> {
        match attrs.find_string(name) {
            None | Some("") => Ok(None),
            Some(name) => Activation::new(name, attrs.find_floats(params).unwrap_or(&[])).map(Some),
        }
    }

    /// What the attributes `activation` and `activation_alpha`, `activation_beta`,
    /// `activation_gamma` of `FusedGemm` say.
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

    /// The activation that a node of the standard's operator `op` computes from its first input,
    /// where it is one; not for `Clip`, whose bounds are inputs.
    pub fn of_operator(op: &str, attrs: &Attributes) -> Option<Activation> {
        let is_fixed = |(name, value): &(&str, &str)| attrs.find_string(name) == Some(*value);
        let same = |row: &&Row| row.op == op && row.op != "Clip" && row.fixed.iter().all(is_fixed);
        let row = ROWS.iter().find(same)?;
        let values: Option<Vec<f32>> = row.parameters.iter().map(|name| attrs.find_float(name)).collect();
        Activation::new(row.name, &values?).ok()
    }

    /// The attributes that say it, of an operator with `activation` and `activation_params`.
    pub fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.attributes_by(["activation", "activation_params"])
    }

    /// The attributes that say it, of an operator with `inner_activation` and
    /// `inner_activation_params`.
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

    /// Whether ONNX Runtime's `FusedConv` has the activation, too.
    pub fn is_in_onnx_runtime(&self) -> bool {
        ROWS.iter().any(|row| row.name == self.name && row.in_onnx_runtime)
    }

    /// A parameter by its name.
    ///
    /// # Errors
    /// The activation has no such parameter.
    pub fn parameter(&self, name: &str) -> Result<f32> {
        let place = find(self.name)?.parameters.iter().position(|parameter| *parameter == name);
        let value = place.and_then(|place| self.values.get(place)).copied();
        value.ok_or_else(|| error!(InvalidGraph, "activation '{}' has no parameter '{name}'", self.name))
    }

    /// The formula of it, of the first input.
    ///
    /// # Errors
    /// The operator of the standard that it is has none.
    pub fn formula(&self) -> Result<ScalarExpr> {
        let row = find(self.name)?;
        if row.op == "Clip" {
            let [min, max] = ["min", "max"].map(|name| self.parameter(name));
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

    /// Makes a draft the operator that applies it to a value.
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

/// Makes a draft the activation that its attributes say, or the value itself.
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

    /// Each row names an operator of the standard and its attributes, and is found again from that
    /// operator.
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
