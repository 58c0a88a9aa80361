//! Tests of the layout: packed trees against their nodes, and nodes that form no trees.

use bytemuck::Zeroable;
use proptest::prelude::*;

use super::layout::{Branch, Narrow, Node, Places, Wide};
use super::plan::{Place, Plan};
use super::run::copy_columns;
use super::walk::{WIDTH, walk};
use super::{Comparison, Test};

const FEATURES: usize = 5;

fn numbers() -> impl Strategy<Value = f64> {
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1.0, -1.0, 0.1, f64::MAX];
    prop_oneof![prop::sample::select(special.to_vec()), -3.0..3.0]
}

fn tests() -> impl Strategy<Value = Test> {
    use Comparison::*;
    let comparisons = vec![LessOrEqual, Less, GreaterOrEqual, Greater, Equal, NotEqual];
    prop_oneof![
        3 => (prop::sample::select(comparisons), numbers(), any::<bool>())
            .prop_map(|(comparison, split, missing)| Test::compare(comparison, split, missing)),
        1 => (prop::collection::vec(numbers(), 0..5), any::<bool>())
            .prop_map(|(members, missing)| Test::member(&members, missing)),
    ]
}

/// The nodes of a tree: each leads to the next two free nodes, or is a leaf.
fn trees() -> impl Strategy<Value = Vec<Branch>> {
    prop::collection::vec((tests(), 0..FEATURES, prop::bool::weighted(0.8)), 1..60).prop_map(|given| {
        let mut branches: Vec<Branch> = Vec::new();
        let (count, mut free) = (given.len(), 1);
        for (index, (test, feature, goes_on)) in given.into_iter().enumerate() {
            let next = (goes_on && free + 1 < count).then_some((free + 1, free));
            free += if next.is_some() { 2 } else { 0 };
            branches.push(Branch { feature, test, next, leaf: index });
        }
        branches
    })
}

/// Returns the leaf that a row reaches in the original nodes.
fn expected(branches: &[Branch], row: &[f64]) -> u32 {
    let mut branch = &branches[0];
    while let Some((yes, no)) = branch.next {
        let (x, splits) = (row[branch.feature], &branch.test.splits);
        let interval = match x.is_nan() {
            true => branch.test.missing_interval(),
            false => splits.iter().position(|split| x <= *split).unwrap_or(splits.len()),
        };
        branch = &branches[if branch.test.answer(interval) { yes } else { no }];
    }
    branch.leaf as u32
}

/// Returns the leaves that rows reach in the packed nodes.
fn walked<N: Node>(plan: &Plan, rows: &[Vec<N::Value>]) -> Vec<Option<u32>> {
    let (tree, bits) = (&plan.trees()[0], plan.column_bits());
    let len = 2 << bits;
    let mut values = vec![N::Value::zeroed(); len * WIDTH];
    for (row, to) in rows.iter().zip(values.chunks_mut(len)) {
        copy_columns(row, to);
    }
    let mut at = [tree.root; WIDTH];
    let starts = std::array::from_fn(|way| way * len);
    walk::<N>((&plan.nodes::<N>(), Places::new(bits, true)), &values, &starts, &mut at, tree.depth);
    let leaf = |at: u32| match plan.places[at as usize] {
        Place::Leaf(leaf) => Some(leaf),
        _ => None,
    };
    at[..rows.len()].iter().map(|at| leaf(*at)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn arrays_lead_where_the_nodes_lead(
        branches in trees(),
        rows in prop::collection::vec(prop::collection::vec(numbers(), FEATURES), WIDTH),
    ) {
        let plan = Plan::new(&[0], &branches).unwrap();
        let wanted: Vec<Option<u32>> = rows.iter().map(|row| Some(expected(&branches, row))).collect();
        prop_assert_eq!(walked::<Wide>(&plan, &rows), wanted);

        let rows: Vec<Vec<f32>> = rows.iter().map(|row| row.iter().map(|x| *x as f32).collect()).collect();
        let as_doubles = |row: &Vec<f32>| row.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let wanted: Vec<Option<u32>> =
            rows.iter().map(|row| Some(expected(&branches, &as_doubles(row)))).collect();
        prop_assert_eq!(walked::<Narrow>(&plan, &rows), wanted);
    }
}

#[test]
fn nodes_that_form_no_trees_are_refused() {
    let split = |yes: usize, no: usize| Branch {
        feature: 0,
        test: Test::compare(Comparison::LessOrEqual, 0.5, false),
        next: Some((yes, no)),
        leaf: 0,
    };
    let leaf = || Branch::leaf(0);
    let table: [(&str, &[usize], Vec<Branch>); 7] = [
        ("a node that leads to itself", &[0], vec![split(0, 1), leaf()]),
        ("a cycle", &[0], vec![split(1, 2), split(0, 3), leaf(), leaf()]),
        ("two ways to one node", &[0], vec![split(1, 2), split(3, 4), split(4, 5), leaf(), leaf(), leaf()]),
        ("both ways to one node", &[0], vec![split(1, 1), leaf()]),
        ("a node that is not there", &[0], vec![split(1, 7), leaf()]),
        ("a root that is not there", &[2], vec![leaf(), leaf()]),
        ("a root within another tree", &[0, 1], vec![split(1, 2), leaf(), leaf()]),
    ];
    for (what, roots, branches) in table {
        let problem = Plan::new(roots, &branches).err().map(|error| error.kind());
        assert_eq!(problem, Some(ort_core::ErrorKind::InvalidGraph), "{what}");
    }
    // Unreachable nodes are dropped.
    let plan = Plan::new(&[2], &[split(0, 0), leaf(), leaf()]).unwrap();
    assert_eq!(plan.places.len(), 2);
}
