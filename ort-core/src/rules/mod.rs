//! Rewrite rules, one table per family.
//!
//! A table documents its file: each row says what the rule does, its pattern and its replacement.
//! docs/RULES.md is generated from the rows.

mod activation;
mod algebra;
mod attention;
mod codes;
mod conv;
mod integer_conv;
mod layout;
mod linear;
mod norm;
mod qdq;
mod qdq_movement;
mod quantized_weights;
mod separable;
mod tables;

use crate::rewrite::RuleSet;

/// All tables, in the order in which rules with the same root operator are tried.
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
    &qdq_movement::RULES,
    &integer_conv::RULES,
    &quantized_weights::RULES,
    &tables::RULES,
    &layout::RULES,
];
