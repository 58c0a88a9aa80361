//! Provider libraries: the two templates compute what the CPU does, and a library that misbehaves
//! is an error, without which the session runs only where it was asked to.

#![cfg(all(feature = "cpu", feature = "provider-libraries"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod libraries;
mod misbehaviour;
mod templates;
