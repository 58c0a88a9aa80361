//! The command line of ort-runtime.

fn main() {}
