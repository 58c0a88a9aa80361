//! Operators that make, describe, move and select elements.

mod trilu;
