//! The rewrite rules, one table per family. A table reads as its file's documentation: what each
//! rule looks for, and what stands there afterwards.

/// The operators that products and convolutions end in, for patterns.
macro_rules! activations {
    () => {
        "Relu|LeakyRelu|HardSwish|HardSigmoid|Sigmoid|Tanh|Gelu|Swish|Mish|Elu|Softplus"
    };
}

mod activation;
mod algebra;
mod attention;
mod codes;
mod conv;
mod layout;
mod linear;
mod norm;
mod qdq;
mod separable;

use crate::rewrite::RuleSet;

/// All tables, in the order in which rules of the same root are tried.
pub(crate) static ALL: &[&RuleSet] = &[
    &algebra::RULES,
    &codes::RULES,
    &activation::RULES,
    &norm::RULES,
    &conv::RULES,
    &separable::RULES,
    &attention::RULES,
    &linear::RULES,
    &qdq::RULES,
    &layout::RULES,
];
