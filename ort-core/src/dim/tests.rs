//! Tests of dimension expressions: known identities, and properties over random expressions.
