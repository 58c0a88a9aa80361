//! Repository commands.

fn main() {}
