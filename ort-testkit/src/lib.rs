//! Suites, tolerances and generators for ort-runtime's own tests.
