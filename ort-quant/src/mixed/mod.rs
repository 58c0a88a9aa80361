//! Mixed precision: what each precision of a weight costs and harms, and the best assignments.

mod front;
mod probe;

pub use front::{Cost, Front};
pub use probe::WeightProbe;
