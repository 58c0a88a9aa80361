//! Activation epilogues: what fused operators name in `activation` and `activation_params`.

use std::sync::OnceLock;

use ort_alloc::fork::get_or_init;
use smallvec::SmallVec;

use crate::ir::{Attribute, Attributes, Node, ValueId};
use crate::ops::microsoft::number;
use crate::spec::{AttrKind, Draft, ONNX, OpSpec, Registry, ScalarExpr, Traits};
use crate::{Result, ensure, error, unknown_name};

/// One activation: its name in fused operators, and the standard operator that it stands for.
struct Row {
    name: &'static str,
    spec: &'static OpSpec,
    /// The parameters in the order of `activation_params`, named like the operator's attributes
    /// (for `Clip`, its inputs).
    parameters: Vec<&'static str>,
    /// The operator's attributes that the name implies.
    fixed: &'static [(&'static str, &'static str)],
}

/// The activations that ONNX Runtime's `FusedConv` has.
const IN_ONNX_RUNTIME: &[&str] =
    &["Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Tanh"];

/// The operators with [`Traits::ACTIVATION`], and two that differ from an operator: `Clip`, whose
/// bounds are parameters, and an approximation of `Gelu`.
fn rows() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    get_or_init(&ROWS, || {
        let row = |spec: &'static OpSpec| {
            let floats = spec.attrs.iter().filter(|attr| attr.kind == AttrKind::Float);
            Row { name: spec.name, spec, parameters: floats.map(|attr| attr.name).collect(), fixed: &[] }
        };
        let records = Registry::global().map_or(&[][..], Registry::records).iter().copied();
        let standard = || records.clone().filter(|spec| spec.domain == ONNX);
        let mut rows = Vec::new();
        // Before `Gelu` itself, because a search by operator takes the first row that fits.
        for spec in standard() {
            match spec.name {
                CLIP => rows.push(Row { parameters: vec!["min", "max"], ..row(spec) }),
                "Gelu" => {
                    rows.push(Row { name: "FastGelu", fixed: &[("approximate", "tanh")], ..row(spec) });
                }
                _ => {}
            }
        }
        rows.extend(standard().filter(|spec| spec.traits.has(Traits::ACTIVATION)).map(row));
        rows
    })
    .as_slice()
}

/// The standard's `Clip` has no formula, because its bounds are inputs. As parameters of an
/// activation they are constants.
const CLIP: &str = "Clip";

fn find(name: &str) -> Result<&'static Row> {
    rows().iter().find(|row| row.name == name).ok_or_else(|| {
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
            help = match row.parameters.as_slice() {
                [] => "leave the parameters out".to_string(),
                names => format!("'activation_params' holds {}", names.join(", ")),
            },
            "activation '{name}' takes {expected} parameters, got {given}"
        );
        Ok(Activation { name: row.name, values: values.iter().take(expected).copied().collect() })
    }

    /// Returns the names of all activations.
    pub fn names() -> impl Iterator<Item = &'static str> {
        rows().iter().map(|row| row.name)
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
        let same = |row: &&Row| row.spec.name == op && op != CLIP && row.fixed.iter().all(is_fixed);
        let row = rows().iter().find(same)?;
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

    /// Returns an activation of a fused operator that is not among those of a provider. The
    /// provider refuses such a node, which then is decomposed.
    pub fn missing_of(node: &Node, has: impl Fn(&Activation) -> bool) -> Option<Activation> {
        let names = |name: &str| node.spec.attrs.iter().any(|attr| attr.name == name);
        // `FusedGemm` has a float attribute for each parameter; the other fused operators have one
        // list.
        let all = match (names("activation_params"), names("activation") && names("activation_gamma")) {
            (true, _) => {
                [Activation::of_attributes(&node.attrs), Activation::inner_of_attributes(&node.attrs)]
            }
            (_, true) => [Activation::of_gemm(&node.attrs).map(Some), Ok(None)],
            _ => return None,
        };
        all.into_iter().filter_map(|found| found.ok().flatten()).find(|activation| !has(activation))
    }

    /// Returns whether ONNX Runtime's `FusedConv` has the activation.
    pub fn is_in_onnx_runtime(&self) -> bool {
        IN_ONNX_RUNTIME.contains(&self.name)
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
        if row.name == CLIP {
            let [min, max] = ["min", "max"].map(|name| self.parameter(name));
            // The upper bound last: the standard sets every element to `max` if `min` exceeds
            // `max`.
            return Ok(ScalarExpr::Input(0).max(f64::from(min?)).min(f64::from(max?)));
        }
        let named = row.parameters.iter().zip(&self.values);
        let mut given: Vec<(String, Attribute)> =
            named.map(|(name, value)| (name.to_string(), Attribute::Float(*value))).collect();
        given.extend(row.fixed.iter().map(|(n, v)| (n.to_string(), Attribute::String(v.to_string()))));
        row.spec.formula(&Attributes::new(row.spec, given)?, 1)
    }

    /// Turns a draft into the standard operator that applies the activation to a value.
    pub(in crate::ops) fn become_of(&self, draft: &mut Draft<'_>, value: ValueId) -> Result<()> {
        let row = find(self.name)?;
        if row.name == CLIP {
            let dtype = draft.dtype(0)?;
            let mut inputs = vec![value];
            for &bound in &self.values {
                inputs.push(number(draft, bound, dtype)?);
            }
            draft.become_op(row.spec.name, &inputs, &[]);
            return Ok(());
        }
        let named = row.parameters.iter().zip(&self.values);
        let mut attrs: Vec<(&str, Attribute)> =
            named.map(|(name, value)| (*name, Attribute::Float(*value))).collect();
        attrs.extend(row.fixed.iter().map(|(name, value)| (*name, Attribute::String(value.to_string()))));
        draft.become_op(row.spec.name, &[value], &attrs);
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

    /// `of_operator` finds each row from the attributes of its operator.
    #[test]
    fn rows_are_operators() -> Result<()> {
        assert!(rows().len() >= 17);
        assert!(IN_ONNX_RUNTIME.iter().all(|name| find(name).is_ok()));
        for row in rows().iter().filter(|row| row.name != CLIP) {
            let mut given: Vec<(String, Attribute)> =
                row.parameters.iter().map(|name| (name.to_string(), Attribute::Float(0.25))).collect();
            given.extend(row.fixed.iter().map(|(n, v)| (n.to_string(), Attribute::String(v.to_string()))));
            let found = Activation::of_operator(row.spec.name, &Attributes::new(row.spec, given)?);
            let expected = Activation::new(row.name, &vec![0.25; row.parameters.len()])?;
            assert!(expected.formula()?.input_count() == 1, "{}", row.name);
            assert_eq!(found, Some(expected), "{}", row.name);
        }
        Ok(())
    }
}
