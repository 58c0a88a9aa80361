//! A model whose packed weights are larger than its memory limit still runs, with the same bits:
//! they pass through a window.

use crate::support;

use ort_runtime::ir::{Attribute, Graph, GraphBuilder};
use ort_runtime::{Budget, DType, ErrorKind, Result, Session, Value};
use proptest::prelude::*;
use support::{bits, mapped, numbers};

/// Products and a convolution of several sizes, one after the other.
fn layers() -> Result<Graph> {
    let mut builder = GraphBuilder::new("layers");
    let x = builder.input("x", DType::F32, &["rows", "64"]);
    let mut value = x;
    for (index, sizes) in [[64, 96], [96, 200], [200, 40], [40, 64]].into_iter().enumerate() {
        let weight = builder.constant(numbers(&sizes, index)?);
        let product = builder.node("MatMul", &[value, weight], &[])?;
        value = builder.node("Sigmoid", &[product], &[])?;
    }
    let axes = builder.constant(support::ints(&[1, 3])?);
    let image = builder.node("Unsqueeze", &[value, axes], &[])?;
    let filters = builder.constant(numbers(&[8, 1, 3, 1], 9)?);
    let pads = [("pads", Attribute::Ints(vec![1, 0, 1, 0]))];
    let filtered = builder.node("Conv", &[image, filters], &pads)?;
    builder.finish(&[filtered])
}

fn rows(count: usize) -> Result<Vec<(&'static str, Value)>> {
    Ok(vec![("x", numbers(&[count, 64], 3)?.into())])
}

/// The smallest limit that an error names.
fn named_limit(problem: &ort_runtime::Error) -> usize {
    let text = problem.to_string();
    let number = text.split("raise the memory limit to ").nth(1).and_then(|rest| rest.split(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no limit is named: {text}"))
}

#[test]
fn results_have_the_same_bits_and_nothing_passes_the_limit() -> Result<()> {
    let (_folder, model) = mapped(&layers()?)?;
    let whole = Session::builder(&model).threads(1).build()?;
    let expected = bits(&whole, &rows(5)?)?;
    let all = whole.memory().packed;
    let plan = whole.plan(&[("rows", 5)])?.planned_bytes;
    let mut streamed = 0;
    for limit in (plan + 1..=plan + all).rev().step_by(all / 20) {
        let budget = Budget::new(Some(limit));
        let session = Session::builder(&model).threads(1).budget(&budget).build()?;
        match bits(&session, &rows(5)?) {
            Ok(found) => {
                assert_eq!(found, expected, "with a limit of {limit} bytes");
                streamed += usize::from(session.memory().packed < all);
            }
            Err(problem) => {
                assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
                assert!(named_limit(&problem) > limit, "{problem}");
            }
        }
        assert!(budget.peak() <= limit);
        assert!(budget.in_use() <= session.memory().packed + plan, "idle slabs and packed weights stay");
    }
    assert!(streamed > 5, "{streamed} limits let only a part of the weights stay packed");
    Ok(())
}

#[test]
fn the_limit_that_a_refusal_names_suffices_and_one_byte_less_does_not() -> Result<()> {
    let (_folder, model) = mapped(&layers()?)?;
    let limited = |limit: usize| Session::builder(&model).threads(1).memory_limit(limit).build();
    let problem = limited(1000)?.run(&rows(7)?).expect_err("it does not fit");
    let least = named_limit(&problem);
    assert!(bits(&limited(least)?, &rows(7)?).is_ok());
    let problem = limited(least - 1)?.run(&rows(7)?).expect_err("it does not fit");
    assert_eq!(named_limit(&problem), least);
    assert!(problem.to_string().contains("'weights of "), "{problem}");
    Ok(())
}

#[test]
fn weights_that_had_to_go_are_packed_again_once_there_is_room() -> Result<()> {
    let (_folder, model) = mapped(&layers()?)?;
    let whole = Session::builder(&model).threads(1).build()?;
    bits(&whole, &rows(1)?)?;
    let all = whole.memory().packed;
    // Small constants are copied to aligned memory, which is not the packed weights'.
    let limit = all + whole.plan(&[("rows", 2)])?.planned_bytes + 64;
    let session = Session::builder(&model).threads(1).memory_limit(limit).batch_split(false).build()?;
    let packed_after = |count: usize| -> Result<usize> {
        assert_eq!(bits(&session, &rows(count)?)?, bits(&whole, &rows(count)?)?);
        Ok(session.memory().packed)
    };
    assert_eq!(packed_after(2)?, all);
    assert!(packed_after(12)? < all, "the larger run takes their memory");
    assert_eq!(packed_after(1)?, all);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// Whatever the limits and sizes, and whichever run came before: the right bits or a refusal,
    /// within the limit.
    #[test]
    fn any_runs_keep_to_any_limit(limit in 1000usize..400_000, counts in prop::collection::vec(1usize..60, 1..6)) {
        let (_folder, model) = mapped(&layers()?)?;
        let whole = Session::builder(&model).threads(1).build().expect("a session");
        let budget = Budget::new(Some(limit));
        let session = Session::builder(&model).threads(1).budget(&budget).build().expect("a session");
        for count in counts {
            match bits(&session, &rows(count)?) {
                Ok(found) => prop_assert_eq!(found, bits(&whole, &rows(count)?).expect("a result")),
                Err(problem) => {
                    prop_assert_eq!(problem.kind(), ErrorKind::OutOfMemory);
                    let least = named_limit(&problem);
                    let enough = Session::builder(&model).threads(1).memory_limit(least).build().expect("a session");
                    prop_assert!(bits(&enough, &rows(count)?).is_ok(), "{}", problem);
                }
            }
            prop_assert!(budget.peak() <= limit);
        }
    }
}

#[test]
fn several_callers_share_the_window() -> Result<()> {
    let (_folder, model) = mapped(&layers()?)?;
    let whole = Session::builder(&model).threads(1).build()?;
    let expected = bits(&whole, &rows(3)?)?;
    let least = named_limit(
        &Session::builder(&model)
            .threads(1)
            .memory_limit(1000)
            .batch_split(false)
            .build()?
            .run(&rows(3)?)
            .expect_err("too little"),
    );
    let window = least - whole.plan(&[("rows", 3)])?.planned_bytes;
    // Room for the activations of all callers, and for one window.
    let budget = Budget::new(Some(4 * (least - window) + window));
    let session = Session::builder(&model).threads(1).budget(&budget).batch_split(false).build()?;
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..20 {
                        assert_eq!(
                            bits(&session, &rows(3).expect("an input")).expect("each run has its turn"),
                            expected
                        );
                    }
                })
            })
            .collect();
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
    });
    assert!(budget.peak() <= budget.limit().unwrap_or(0));
    assert_eq!(bits(&session, &rows(3)?)?, expected);
    Ok(())
}
