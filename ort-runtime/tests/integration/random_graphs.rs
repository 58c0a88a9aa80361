//! Random graphs of elementwise operators and operators that move data: with views and results in
//! place they give what they give node by node, each node in a session of its own.

use crate::random_support::{Choice, check};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sharing_memory_changes_no_result(
        choices in prop::collection::vec(any::<Choice>(), 1..24),
        outputs in prop::collection::vec(any::<u16>(), 0..4),
    ) {
        check(&choices, &outputs).map_err(TestCaseError::fail)?;
    }
}
