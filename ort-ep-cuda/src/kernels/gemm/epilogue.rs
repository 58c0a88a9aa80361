//! The GEMM epilogue: activations by their numbers in `cu/gemm.cuh`, and its parameters.

use std::sync::OnceLock;

use ort_core::ops::fused::activation::Activation;
use ort_core::{Result, error};
use rustc_hash::FxHashMap;

/// Fills the structure `Finish` of `cu/gemm.cuh`.
///
/// # Errors
///
/// As [`number_of`].
pub(in crate::kernels) fn finish(activation: Option<&Activation>, alpha: f32, beta: f32) -> Result<Vec<u8>> {
    let (number, parameters) = activation.map_or(Ok((0, [0.0; 2])), number_of)?;
    let floats = [alpha, beta].into_iter().chain(parameters);
    let words = std::iter::once(number).chain(floats.map(f32::to_bits));
    Ok(words.flat_map(u32::to_ne_bytes).collect())
}

/// Returns the number of an activation in `cu/gemm.cuh`, and its parameters.
///
/// # Errors
///
/// The epilogues have no such activation.
fn number_of(activation: &Activation) -> Result<(u32, [f32; 2])> {
    let number = find_number(activation.name).ok_or_else(|| {
        error!(NotImplemented, "activation '{}' in the epilogue of a CUDA kernel", activation.name)
            .help("run the node on another provider, or apply the activation in a node of its own")
    })?;
    let given = |names: [&str; 2]| names.into_iter().find_map(|name| activation.parameter(name).ok());
    let [first, second] = [given(["alpha", "min"]), given(["beta", "gamma"]).or(given(["max", "max"]))];
    // A parameter that the activation lacks is not read.
    Ok((number, [first.unwrap_or(0.0), second.unwrap_or(0.0)]))
}

/// Returns whether the epilogues of `cu/gemm.cuh` have an activation.
pub(crate) fn has_activation(activation: &Activation) -> bool {
    find_number(activation.name).is_some()
}

fn find_number(name: &str) -> Option<u32> {
    numbers().get(&constant_name(name)).copied()
}

/// The numbers of the enumeration `Activation` in `cu/gemm.cuh`, by name.
fn numbers() -> &'static FxHashMap<String, u32> {
    static NUMBERS: OnceLock<FxHashMap<String, u32>> = OnceLock::new();
    NUMBERS.get_or_init(|| {
        let header = include_str!("../../../cu/gemm.cuh");
        let body = header.split_once("enum Activation {").and_then(|(_, rest)| rest.split_once('}'));
        let lines = body.map_or("", |(body, _)| body).lines();
        let code = lines.filter(|line| !line.trim_start().starts_with("//"));
        let names = code.flat_map(|line| line.split(',')).map(str::trim).filter(|name| !name.is_empty());
        names.zip(0..).map(|(name, number)| (name.to_owned(), number)).collect()
    })
}

/// Returns `HARD_SWISH` for `HardSwish`.
fn constant_name(name: &str) -> String {
    let mut constant = String::new();
    for (index, letter) in name.char_indices() {
        if index > 0 && letter.is_ascii_uppercase() {
            constant.push('_');
        }
        constant.push(letter.to_ascii_uppercase());
    }
    constant
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_activation_has_a_number_and_its_parameters() {
        let mut found: Vec<u32> = Activation::names().filter_map(find_number).collect();
        found.sort_unstable();
        assert_eq!(found, (1..numbers().len() as u32).collect::<Vec<_>>());
        let clip = Activation::new("Clip", &[0.5, 6.0]).unwrap();
        assert_eq!(number_of(&clip).unwrap(), (2, [0.5, 6.0]));
        let selu = Activation::new("Selu", &[1.5, 1.25]).unwrap();
        assert_eq!(number_of(&selu).unwrap(), (13, [1.5, 1.25]));
        assert_eq!(number_of(&Activation::new("Tanh", &[]).unwrap()).unwrap(), (17, [0.0; 2]));
    }

    #[test]
    fn an_unknown_activation_is_refused() {
        let mut unknown = Activation::new("Tanh", &[]).unwrap();
        unknown.name = "Unknown";
        let refused = number_of(&unknown).unwrap_err();
        assert_eq!(refused.kind(), ort_core::ErrorKind::NotImplemented);
        assert!(refused.to_string().contains("'Unknown'"));
    }
}
