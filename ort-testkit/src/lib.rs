//! Suites, tolerances and generators for ort-runtime's own tests.

#![forbid(unsafe_code)]
