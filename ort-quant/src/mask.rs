//! Token masks of a calibration: rows of padding count in no statistic.
//!
//! Which axes of a value are the batch and the tokens follows from symbolic shapes. Sizes alone do
//! not tell: a sequence may be as long as a row is wide.

use std::collections::BTreeMap;

use half::f16;
use ort_core::dim::Dim;
use ort_core::dtype::{DType, Element};
use ort_core::ir::Graph;
use ort_core::session::{Model, RunOptions, Session, ValueObserver};
use ort_core::tensor::{Tensor, TensorView, Value};
use ort_core::{Error, ErrorKind, Result, advise};

/// The attention mask of a model: an input of shape `[batch, tokens]` that is 0 for padding.
#[derive(Debug)]
pub struct TokenMask {
    input: String,
    /// The values whose symbolic shapes have the sizes of the mask.
    axes: BTreeMap<String, TokenAxes>,
    /// The values of other known shapes, which have no padding.
    others: BTreeMap<String, usize>,
}

/// Where the tokens of a value are. Its first axis is the batch, or both.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TokenAxes {
    /// Whether the first axis counts the tokens of all sequences.
    is_flat: bool,
    /// The axes of one sequence's tokens. Attention scores have two.
    tokens: Vec<usize>,
}

impl TokenMask {
    /// Takes an input of a model as the mask.
    ///
    /// # Errors
    ///
    /// The model has no such input, or it is not of rank 2.
    pub fn new(model: &Model, input: &str) -> Result<TokenMask> {
        let specs = model.inputs();
        let Some(spec) = specs.iter().find(|spec| spec.name == input) else {
            let text = format!("the model has no input '{input}' for the mask of tokens");
            let advice = advise("inputs", input, specs.iter().map(|spec| spec.name.as_str()));
            return Err(Error::new(ErrorKind::InvalidArgument, text).help(advice));
        };
        let shape = spec.ty.as_tensor().and_then(|tensor| tensor.shape.clone());
        let [batch, tokens] = &shape.unwrap_or_default()[..] else {
            let text = format!("the mask '{input}' is not of shape [batch, tokens]");
            return Err(Error::new(ErrorKind::InvalidArgument, text)
                .help("name the input that is 0 for the tokens of padding, such as attention_mask"));
        };
        let mut mask = TokenMask { input: input.to_string(), axes: BTreeMap::new(), others: BTreeMap::new() };
        // A constant size may be that of any axis.
        if tokens.as_constant().is_none() {
            mask.note(model.graph(), (batch, tokens));
        }
        Ok(mask)
    }

    /// Notes the values of a graph and of its bodies.
    fn note(&mut self, graph: &Graph, (batch, tokens): (&Dim, &Dim)) {
        for value in graph.value_ids().map(|id| graph.value(id)) {
            let Some(shape) = value.ty.as_tensor().and_then(|tensor| tensor.shape.as_ref()) else { continue };
            match TokenAxes::of(shape, batch, tokens) {
                Some(axes) => drop(self.axes.entry(value.name.to_string()).or_insert(axes)),
                None if shape.iter().any(Dim::has_unknown) => {}
                None => drop(self.others.insert(value.name.to_string(), shape.len())),
            }
        }
        let bodies = graph.nodes.iter().flat_map(|node| &node.subgraphs);
        bodies.for_each(|body| self.note(&body.graph, (batch, tokens)));
    }

    /// The axes of a value in a run, if it has those of the mask. A value of unknown shape has them
    /// if it begins with the sizes of the mask.
    fn axes(&self, name: &str, shape: &[usize], [batch, tokens]: [usize; 2]) -> Option<TokenAxes> {
        let known = self.axes.get(name).cloned();
        let is_other = self.others.get(name) == Some(&shape.len());
        let leading = || shape.starts_with(&[batch, tokens]) && !is_other;
        let axes = known.or_else(|| leading().then(|| TokenAxes { is_flat: false, tokens: vec![1] }))?;
        let first = if axes.is_flat { batch * tokens } else { batch };
        let fits =
            shape.first() == Some(&first) && axes.tokens.iter().all(|axis| shape.get(*axis) == Some(&tokens));
        fits.then_some(axes)
    }
}

impl TokenAxes {
    fn of(shape: &[Dim], batch: &Dim, tokens: &Dim) -> Option<TokenAxes> {
        let (first, rest) = shape.split_first()?;
        if *first == batch * tokens && first != batch {
            return Some(TokenAxes { is_flat: true, tokens: Vec::new() });
        }
        let places = rest.iter().enumerate().filter(|(_, size)| *size == tokens);
        let tokens: Vec<usize> = places.map(|(place, _)| place + 1).collect();
        (first == batch && !tokens.is_empty()).then_some(TokenAxes { is_flat: false, tokens })
    }

    /// The elements that are kept, and their shape: rows of what follows the last axis of tokens.
    fn kept<T: Element>(&self, values: &[T], shape: &[usize], mask: &SampleMask) -> (Vec<usize>, Vec<T>) {
        let last = self.tokens.iter().copied().max().unwrap_or(0);
        let inner: usize = shape.iter().skip(last + 1).product();
        let mut kept = Vec::new();
        let mut rows = 0;
        for (row, elements) in values.chunks_exact(inner.max(1)).enumerate() {
            if self.is_kept(row, shape.get(..=last).unwrap_or_default(), mask) {
                kept.extend_from_slice(elements);
                rows += 1;
            }
        }
        let shape = std::iter::once(rows).chain(shape.iter().skip(last + 1).copied());
        (shape.collect(), kept)
    }

    /// Whether all tokens of a row are kept. A row is an index along these sizes.
    fn is_kept(&self, row: usize, sizes: &[usize], mask: &SampleMask) -> bool {
        let [_, tokens] = mask.shape;
        let at = |index: usize| mask.kept.get(index).copied().unwrap_or(true);
        if self.is_flat {
            return at(row);
        }
        let (mut rest, mut wanted) = (row, Vec::with_capacity(self.tokens.len()));
        for (axis, size) in sizes.iter().enumerate().rev() {
            let index = rest % size.max(&1);
            rest /= size.max(&1);
            match axis {
                0 => return wanted.iter().all(|token| at(index * tokens + token)),
                _ if self.tokens.contains(&axis) => wanted.push(index),
                _ => {}
            }
        }
        true
    }
}

/// An observer of some values, which may be masked.
pub(crate) trait MaskedObserver: ValueObserver {
    /// Whether it observes a value. Others need not be masked.
    fn wants(&self, name: &str) -> bool;
}

/// The mask of one sample.
#[derive(Debug)]
struct SampleMask {
    kept: Vec<bool>,
    shape: [usize; 2],
}

/// A run whose values lose their padding before they are observed.
#[derive(Debug)]
struct MaskedRun<'c> {
    mask: &'c TokenMask,
    sample: SampleMask,
    observer: &'c dyn MaskedObserver,
}

/// Runs a sample and observes it, without its padding if there is a mask.
pub(crate) fn run_observed(
    observer: &dyn MaskedObserver,
    mask: Option<&TokenMask>,
    (session, inputs, options): (&Session, &[(&str, Value)], &RunOptions<'_>),
) -> Result<Vec<(String, Value)>> {
    let Some(mask) = mask else {
        return session.run_with(inputs, &RunOptions { observer: Some(observer), ..options.clone() });
    };
    let value = inputs.iter().find(|(name, _)| *name == mask.input);
    let value = value.and_then(|(_, value)| value.tensor().ok());
    let sample = sample_mask(&mask.input, value)?;
    let run = MaskedRun { mask, sample, observer };
    session.run_with(inputs, &RunOptions { observer: Some(&run), ..options.clone() })
}

fn sample_mask(input: &str, value: Option<&Tensor>) -> Result<SampleMask> {
    let invalid = |text: String| Error::new(ErrorKind::InvalidArgument, text);
    let tensor = value.ok_or_else(|| invalid(format!("the sample has no mask '{input}'")))?;
    let [batch, tokens] = *tensor.shape() else {
        return Err(invalid(format!("the mask '{input}' is {:?}, not [batch, tokens]", tensor.shape())));
    };
    let kept = match tensor.dtype() {
        DType::F32 => tensor.to_vec::<f32>()?.iter().map(|value| *value != 0.0).collect(),
        DType::I64 => tensor.to_vec::<i64>()?.iter().map(|value| *value != 0).collect(),
        DType::I32 => tensor.to_vec::<i32>()?.iter().map(|value| *value != 0).collect(),
        DType::Bool => {
            tensor.bytes().map(|bytes| &bytes[..]).unwrap_or_default().iter().map(|byte| *byte != 0).collect()
        }
        other => {
            let text = format!("the mask '{input}' is {other}, expected bool, int32, int64 or float32");
            return Err(invalid(text));
        }
    };
    Ok(SampleMask { kept, shape: [batch, tokens] })
}

impl ValueObserver for MaskedRun<'_> {
    fn observe(&self, name: &str, tensor: TensorView<'_>) {
        if !self.observer.wants(name) {
            return;
        }
        match self.mask.axes(name, tensor.shape(), self.sample.shape) {
            Some(axes) if tensor.dtype() == DType::F32 => self.observe_kept::<f32>(name, tensor, &axes),
            Some(axes) if tensor.dtype() == DType::F16 => self.observe_kept::<f16>(name, tensor, &axes),
            _ => self.observer.observe(name, tensor),
        }
    }
}

impl MaskedRun<'_> {
    fn observe_kept<T: Element>(&self, name: &str, tensor: TensorView<'_>, axes: &TokenAxes) {
        let Ok(values) = tensor.to_cow::<T>() else { return };
        let (shape, kept) = axes.kept(&values, tensor.shape(), &self.sample);
        if let Ok(kept) = Tensor::from_vec::<T>(&shape, kept) {
            self.observer.observe(name, kept.view());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two sequences of three tokens, the second has one of padding.
    fn mask() -> SampleMask {
        SampleMask { kept: vec![true, true, true, true, true, false], shape: [2, 3] }
    }

    #[test]
    fn tokens_are_found_by_their_symbols() {
        let (batch, tokens, wide) = (Dim::named("batch"), Dim::named("seq"), Dim::constant(4));
        let both = &batch * &tokens;
        let cases: [(&[&Dim], Option<(bool, &[usize])>); 6] = [
            (&[&batch, &tokens, &wide], Some((false, &[1]))),
            (&[&batch, &wide, &tokens, &wide], Some((false, &[2]))),
            (&[&batch, &wide, &tokens, &tokens], Some((false, &[2, 3]))),
            (&[&both, &wide], Some((true, &[]))),
            (&[&wide, &tokens], None),
            (&[&batch, &wide], None),
        ];
        for (shape, expected) in cases {
            let shape: Vec<Dim> = shape.iter().map(|size| (*size).clone()).collect();
            let found = TokenAxes::of(&shape, &batch, &tokens);
            assert_eq!(found.as_ref().map(|axes| (axes.is_flat, &axes.tokens[..])), expected, "{shape:?}");
        }
    }

    /// As NumPy selects them with `values[mask]` after the axes are in front.
    #[test]
    fn padding_is_left_out() {
        let cases: [(&[usize], bool, &[usize], &[usize]); 4] = [
            // [batch, tokens, 2]: the last two elements are those of the padding.
            (&[2, 3, 2], false, &[1], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
            // [batch, 2, tokens]
            (&[2, 2, 3], false, &[2], &[0, 1, 2, 3, 4, 5, 6, 7, 9, 10]),
            // [batch, tokens, tokens]: rows and columns of the padding.
            (&[2, 3, 3], false, &[1, 2], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13]),
            (&[6, 1], true, &[], &[0, 1, 2, 3, 4]),
        ];
        for (shape, is_flat, tokens, expected) in cases {
            let axes = TokenAxes { is_flat, tokens: tokens.to_vec() };
            let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|value| value as f32).collect();
            let (kept_shape, kept) = axes.kept(&values, shape, &mask());
            let expected: Vec<f32> = expected.iter().map(|value| *value as f32).collect();
            assert_eq!(kept, expected, "{shape:?}");
            assert_eq!(kept_shape.iter().product::<usize>(), kept.len());
        }
    }
}
