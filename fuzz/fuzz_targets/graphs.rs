//! Small graphs that the bytes choose, as they are, without rewrites: run whole they give what they
//! give node by node, and take the memory that was planned.
#![no_main]

#[path = "../../ort-runtime/tests/integration/random_support/mod.rs"]
mod random_support;
#[path = "../../ort-runtime/tests/support/mod.rs"]
mod support;

use libfuzzer_sys::fuzz_target;
use random_support::{Choice, check};

/// More steps say nothing new.
const STEPS: usize = 24;

fuzz_target!(|data: &[u8]| {
    let choice = |bytes: &[u8; 5]| -> Choice {
        let [kind, a, b, c, d] = *bytes;
        (kind, u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
    };
    let choices: Vec<Choice> = data.as_chunks().0.iter().take(STEPS).map(choice).collect();
    let outputs: Vec<u16> = choices.iter().map(|(_, _, output)| *output).take(3).collect();
    if !choices.is_empty()
        && let Err(problem) = check(&choices, &outputs)
    {
        panic!("{problem}");
    }
});
