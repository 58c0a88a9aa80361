//! Tests of dimension expressions: known identities, and properties of random expressions.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Pairs of texts with the same normal form, and pairs with different ones.
#[test]
fn identities() {
    let equal = [
        ("(a + b)*2", "2*b + 2*a"),
        ("(a + b)*(a - b)", "a*a - b**2"),
        ("4*a//2", "2*a"),
        ("a*12*64//64", "12*a"),
        ("a*b//b", "a"),
        ("(a*b + a*c)//(b + c)", "a"),
        ("(a*a + 2*a*b + b*b)//(a + b)", "a + b"),
        ("floor((h + 6 - 7)/2) + 1", "floor((h + 1)/2)"),
        ("ceil(h/2)", "(h + 1)//2"),
        ("((h + 1)//2 + 1)//2", "(h + 3)//4"),
        ("(6*a + 4)//4", "(3*a + 2)//2"),
        ("(3*a*b + a)//b", "3*a + a//b"),
        ("4*a//(2*b)", "2*a//b"),
        ("a % 1", "0"),
        ("(4*a + 3) % 4", "3"),
        ("(b*a + c) % b", "c % b"),
        ("(a % 4)//4", "0"),
        ("max(a, 0)", "a"),
        ("max(a + 1, a)", "a + 1"),
        ("min(a + 1, a, a + b)", "a"),
        ("max(a, max(b, a))", "max(b, a)"),
        ("max(a, min(b, a))", "a"),
        ("min(max(a, b), b)", "b"),
        ("a - a + 7", "7"),
        ("-a//-2", "a//2"),
        ("s0**2", "s0*s0"),
        ("a/2 + a/2", "a"),
        ("2*(a/2)", "a"),
    ];
    for (left, right) in equal {
        assert_eq!(Dim::parse(left), Dim::parse(right), "{left} and {right}");
    }
    for (left, right) in
        [("a", "b"), ("2*(a//2)", "a"), ("a//b*b", "a"), ("max(a, b)", "min(a, b)"), ("a*b", "a+b")]
    {
        assert_ne!(Dim::parse(left), Dim::parse(right), "{left} and {right}");
    }
}

#[test]
fn parsing_and_printing() {
    let table = [
        ("batch", "batch"),
        ("batch-size", "batch-size"),
        ("batch size", "batch size"),
        ("2d", "2d"),
        ("h+", "h+"),
        ("f(x)", "f(x)"),
        ("max(", "max("),
        ("seq - 1", "seq - 1"),
        ("past_seq + seq", "past_seq + seq"),
        ("batch*4*seq+64", "4*batch*seq + 64"),
        ("floor(seq/2)", "floor(seq/2)"),
        ("seq/2", "floor(seq/2)"),
        ("Max(1, s0)", "max(1, s0)"),
        ("ceiling((s0 + 1)/b)", "ceil((s0 + 1)/b)"),
        ("FloorDiv(s0 - 1, 2)", "floor((s0 + 1)/2) - 1"),
        ("Mod(s0, 8)", "mod(s0, 8)"),
        ("3 - x", "-x + 3"),
        ("99999999999999999999", "99999999999999999999"),
        ("17", "17"),
    ];
    for (text, printed) in table {
        assert_eq!(Dim::parse(text).to_string(), printed, "{text}");
    }
    assert_eq!(Dim::parse("batch-size").as_symbol().and_then(Symbol::name), Some("batch-size"));
    assert!(Dim::parse(" ").has_unknown());
    assert_ne!(Dim::parse("?"), Dim::parse("?"));
}

#[test]
fn bounds() {
    let table = [
        ("a", Some(0), None),
        ("a + 3", Some(3), None),
        ("3 - a", None, Some(3)),
        ("a*b + 1", Some(1), None),
        ("a // 2 + 1", Some(1), None),
        ("a % 8", Some(0), Some(7)),
        ("min(a, 4)", Some(0), Some(4)),
        ("max(a - 4, 1)", Some(1), None),
        ("(min(a, 9) + 1)//4", Some(0), Some(2)),
        ("a - b", None, None),
        ("-2*min(a, 9)", Some(-18), Some(0)),
    ];
    for (text, low, high) in table {
        let dim = Dim::parse(text);
        assert_eq!((dim.lower_bound(), dim.upper_bound()), (low, high), "{text}");
    }
    assert!(Dim::parse("a + 1").is_known_positive() && !Dim::parse("a").is_known_positive());
    assert_eq!(Dim::symbol(Symbol::unknown_value()).lower_bound(), None);
}

#[test]
fn unification() {
    let a = Symbol::named("a");
    let solved = |value: i64| Some(value);
    let table = [
        ("a", 5, solved(5)),
        ("a", 0, solved(0)),
        ("a", -1, None),
        ("2*a", 6, solved(3)),
        ("2*a", 7, None),
        ("3 - a", 1, solved(2)),
        ("a + 3", 2, None),
    ];
    for (formal, actual, expected) in table {
        let mut bindings = Bindings::new();
        let result = unify(&Dim::parse(formal), actual, &mut bindings);
        assert_eq!(result.is_ok(), expected.is_some(), "{formal} = {actual}");
        assert_eq!(bindings.get(&a), expected, "{formal} = {actual}");
    }
    let mut bindings = Bindings::from_iter([(a.clone(), 3)]);
    assert_eq!(unify(&Dim::parse("a*b + a"), 12, &mut bindings), Ok(Unified::Solved));
    assert_eq!(bindings.get(&Symbol::named("b")), Some(3));
    assert_eq!(unify(&Dim::parse("c*d"), 12, &mut bindings), Ok(Unified::Deferred));
    assert_eq!(unify(&Dim::parse("c//2"), 12, &mut bindings), Ok(Unified::Deferred));
    assert!(unify(&Dim::constant(4), 5, &mut bindings).is_err());
}

#[test]
fn errors_of_evaluation() {
    let bindings = Bindings::from_iter([(Symbol::named("a"), i64::MAX), (Symbol::named("z"), 0)]);
    let evaluate = |text: &str| Dim::parse(text).evaluate(&bindings);
    assert!(matches!(evaluate("a*a"), Err(EvaluateError::Overflow(_))));
    assert!(matches!(evaluate("a**12"), Err(EvaluateError::Overflow(_))));
    assert!(matches!(evaluate("a//z"), Err(EvaluateError::DivisionByZero(_))));
    assert!(matches!(evaluate("5//0"), Err(EvaluateError::DivisionByZero(_))));
    assert_eq!(evaluate("b"), Err(EvaluateError::Unbound(Symbol::named("b"))));
    assert_eq!(evaluate("a - 1"), Ok(i64::MAX - 1));
}

/// Expressions that a hostile model could grow without end quickly become unknown sizes.
#[test]
fn growth_is_bounded() {
    let mut power = Dim::parse("a + b + c + d");
    let mut nested = Dim::named("n");
    let mut number = Dim::constant(3);
    for step in 0..200 {
        power = &power * &power;
        nested = (&nested + 1).ceil_div(&Dim::named("k")).max(&Dim::named(&format!("m{step}")));
        number = &number * &number;
    }
    for dim in [power, nested, number] {
        assert!(dim.has_unknown(), "{dim}");
        assert!(dim.to_string().len() < 20_000);
    }
    let deep = "(".repeat(200) + "a" + &")".repeat(200);
    assert_eq!(Dim::parse(&deep).as_symbol().and_then(Symbol::name), Some(deep.as_str()));
}

/// An expression as written, evaluated directly.
#[derive(Clone, Debug)]
enum Tree {
    Number(i64),
    Symbol(usize),
    Binary(usize, Box<Tree>, Box<Tree>),
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const OPERATIONS: usize = 8;

impl Tree {
    fn build(&self) -> Dim {
        match self {
            Tree::Number(value) => Dim::constant(*value),
            Tree::Symbol(index) => Dim::named(NAMES[*index]),
            Tree::Binary(operation, left, right) => {
                let (left, right) = (left.build(), right.build());
                match operation {
                    0 => left + right,
                    1 => left - right,
                    2 => left * right,
                    3 => left.floor_div(&right),
                    4 => left.ceil_div(&right),
                    5 => left.modulo(&right),
                    6 => left.max(&right),
                    _ => left.min(&right),
                }
            }
        }
    }

    /// Returns the value by definition, or `None` for division by zero.
    fn value(&self, symbols: &[i64]) -> Option<i128> {
        Some(match self {
            Tree::Number(value) => (*value).into(),
            Tree::Symbol(index) => symbols[*index].into(),
            Tree::Binary(operation, left, right) => {
                let (left, right) = (left.value(symbols)?, right.value(symbols)?);
                let floor = |a: i128, b: i128| (a - (a % b + b) % b) / b;
                match operation {
                    0 => left + right,
                    1 => left - right,
                    2 => left * right,
                    3..=5 if right == 0 => return None,
                    3 => floor(left, right),
                    4 => -floor(-left, right),
                    5 => left - right * floor(left, right),
                    6 => left.max(right),
                    _ => left.min(right),
                }
            }
        })
    }
}

fn trees() -> impl Strategy<Value = Tree> {
    let leaf = prop_oneof![(-6_i64..20).prop_map(Tree::Number), (0..NAMES.len()).prop_map(Tree::Symbol)];
    leaf.prop_recursive(5, 24, 2, |inner| {
        (0..OPERATIONS, inner.clone(), inner)
            .prop_map(|(operation, left, right)| Tree::Binary(operation, left.into(), right.into()))
    })
}

fn bind(values: &[i64]) -> Bindings {
    NAMES.iter().zip(values).map(|(name, value)| (Symbol::named(*name), *value)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn normal_form_keeps_the_value(tree in trees(), values in prop::array::uniform4(0_i64..12)) {
        let dim = tree.build();
        if let Some(expected) = tree.value(&values) && !dim.has_unknown() {
            let expected = i64::try_from(expected).unwrap();
            prop_assert_eq!(dim.evaluate(&bind(&values)), Ok(expected), "{}", dim);
            prop_assert!(dim.lower_bound().is_none_or(|low| low <= expected), "{}", dim);
            prop_assert!(dim.upper_bound().is_none_or(|high| expected <= high), "{}", dim);
        }
    }

    #[test]
    fn printed_form_reads_back(tree in trees()) {
        let dim = tree.build();
        if !dim.has_unknown() {
            prop_assert_eq!(Dim::parse(&dim.to_string()), dim);
        }
    }

    #[test]
    fn substitution_keeps_the_value(
        tree in trees(), inner in trees(), values in prop::array::uniform4(0_i64..6)
    ) {
        let (dim, replacement) = (tree.build(), inner.build());
        let mut replaced = values;
        // A symbol stands for a size, so only sizes may replace it.
        let Some(Ok(value @ 0..)) = inner.value(&values).map(i64::try_from) else { return Ok(()) };
        replaced[0] = value;
        let substituted = dim.substitute(&BTreeMap::from([(Symbol::named("a"), replacement)]));
        if let (Some(Ok(expected)), false) = (tree.value(&replaced).map(i64::try_from), substituted.has_unknown()) {
            prop_assert_eq!(substituted.evaluate(&bind(&values)), Ok(expected), "{} in {}", inner.build(), dim);
            prop_assert_eq!(dim.bind(&bind(&replaced)).as_constant(), Some(expected), "{}", dim);
        }
    }

    #[test]
    fn arbitrary_text_never_panics(text in "[a-c0-9+*/%(), -]{0,24}") {
        let dim = Dim::parse(&text);
        let _ = dim.evaluate(&bind(&[1, 2, 3, 4]));
    }
}
