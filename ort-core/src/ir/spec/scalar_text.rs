//! Text form of scalar formulas: `mul(x0, sigmoid(x0))`.
//!
//! `x0`, `x1`, ... are the elements of the inputs. Numbers are decimal, `inf`, `-inf` or `nan`.
//! Everything else is a function call, with a name from the tables below. Whitespace between tokens
//! is ignored.

use std::fmt;
use std::str::FromStr;

use super::{BinaryFn, ScalarExpr, UnaryFn};
use crate::{Error, Result, Within, ensure, unknown_name};

/// Maximum length of the text, in bytes.
const LONGEST: usize = 1 << 14;
/// Maximum nesting depth. Formulas are walked recursively, so it bounds the stack.
const DEEPEST: usize = 256;
/// Maximum number of inputs of a formula.
const MOST_INPUTS: usize = 1 << 10;

const UNARY: &[(&str, UnaryFn)] = &[
    ("neg", UnaryFn::Neg),
    ("abs", UnaryFn::Abs),
    ("sign", UnaryFn::Sign),
    ("floor", UnaryFn::Floor),
    ("ceil", UnaryFn::Ceil),
    ("round", UnaryFn::RoundHalfEven),
    ("reciprocal", UnaryFn::Reciprocal),
    ("sqrt", UnaryFn::Sqrt),
    ("exp", UnaryFn::Exp),
    ("expm1", UnaryFn::Expm1),
    ("log", UnaryFn::Log),
    ("log1p", UnaryFn::Log1p),
    ("sigmoid", UnaryFn::Sigmoid),
    ("erf", UnaryFn::Erf),
    ("sin", UnaryFn::Sin),
    ("cos", UnaryFn::Cos),
    ("tan", UnaryFn::Tan),
    ("asin", UnaryFn::Asin),
    ("acos", UnaryFn::Acos),
    ("atan", UnaryFn::Atan),
    ("sinh", UnaryFn::Sinh),
    ("cosh", UnaryFn::Cosh),
    ("tanh", UnaryFn::Tanh),
    ("asinh", UnaryFn::Asinh),
    ("acosh", UnaryFn::Acosh),
    ("atanh", UnaryFn::Atanh),
    ("isnan", UnaryFn::IsNan),
    ("isinf", UnaryFn::IsInf),
    ("not", UnaryFn::Not),
];

const BINARY: &[(&str, BinaryFn)] = &[
    ("add", BinaryFn::Add),
    ("sub", BinaryFn::Sub),
    ("mul", BinaryFn::Mul),
    ("div", BinaryFn::Div),
    ("min", BinaryFn::Min),
    ("max", BinaryFn::Max),
    ("pow", BinaryFn::Pow),
    ("mod", BinaryFn::Mod),
    ("fmod", BinaryFn::Fmod),
    ("less", BinaryFn::Less),
    ("less_or_equal", BinaryFn::LessOrEqual),
    ("equal", BinaryFn::Equal),
    ("and", BinaryFn::And),
    ("or", BinaryFn::Or),
    ("xor", BinaryFn::Xor),
];

const SELECT: &str = "select";

/// Returns the name of a function in its table.
fn name_of<F: PartialEq>(table: &[(&'static str, F)], function: &F) -> &'static str {
    table.iter().find(|(_, known)| known == function).map_or("", |(name, _)| name)
}

impl fmt::Display for ScalarExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScalarExpr::Input(index) => write!(f, "x{index}"),
            // `{:?}` would print `NaN`, which `number` does not read.
            ScalarExpr::Constant(value) if value.is_nan() => f.write_str("nan"),
            // `{:?}` prints the shortest digits that parse back to the same number.
            ScalarExpr::Constant(value) => write!(f, "{value:?}"),
            ScalarExpr::Unary(function, x) => write!(f, "{}({x})", name_of(UNARY, function)),
            ScalarExpr::Binary(function, a, b) => write!(f, "{}({a}, {b})", name_of(BINARY, function)),
            ScalarExpr::Select(condition, then, otherwise) => {
                write!(f, "{SELECT}({condition}, {then}, {otherwise})")
            }
        }
    }
}

/// Parses a formula.
///
/// ```
/// use ort_core::spec::ScalarExpr;
/// let silu: ScalarExpr = "mul(x0, sigmoid(x0))".parse()?;
/// assert_eq!(silu.to_string(), "mul(x0, sigmoid(x0))");
/// # Ok::<(), ort_core::Error>(())
/// ```
impl FromStr for ScalarExpr {
    type Err = Error;

    fn from_str(text: &str) -> Result<ScalarExpr> {
        // Each part of a formula takes at least a byte of text, so this bounds the parsed tree.
        ensure!(
            text.len() <= LONGEST,
            InvalidGraph,
            "a formula of {} bytes, at most {LONGEST} are read",
            text.len()
        );
        let mut reader = Reader { text, at: 0 };
        let formula = reader.formula(0)?;
        reader.blanks();
        ensure!(reader.rest().is_empty(), InvalidGraph, "a formula goes on after its end, {}", reader.here());
        Ok(formula)
    }
}

struct Reader<'t> {
    text: &'t str,
    /// Byte offset of the next character.
    at: usize,
}

impl<'t> Reader<'t> {
    fn rest(&self) -> &'t str {
        self.text.get(self.at..).unwrap_or("")
    }

    /// Returns the position and the next characters, for error messages.
    fn here(&self) -> String {
        let next: String = self.rest().chars().take(16).collect();
        format!("at byte {}: '{next}'", self.at)
    }

    fn blanks(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    /// Consumes one character, after whitespace.
    fn expect(&mut self, character: char) -> Result<()> {
        self.blanks();
        let found = self.rest().starts_with(character);
        ensure!(found, InvalidGraph, "a formula needs '{character}' {}", self.here());
        self.at += character.len_utf8();
        Ok(())
    }

    /// Consumes the longest run of characters that names and numbers consist of.
    fn word(&mut self) -> &'t str {
        self.blanks();
        let rest = self.rest();
        // A sign starts a number or follows its exponent.
        let mut before = ' ';
        let end = rest.find(|character: char| {
            let signs = matches!(character, '+' | '-') && matches!(before, ' ' | 'e' | 'E');
            before = character;
            !(character.is_ascii_alphanumeric() || matches!(character, '_' | '.') || signs)
        });
        let word = rest.get(..end.unwrap_or(rest.len())).unwrap_or("");
        self.at += word.len();
        word
    }

    fn formula(&mut self, depth: usize) -> Result<ScalarExpr> {
        ensure!(depth < DEEPEST, InvalidGraph, "a formula nests more than {DEEPEST} deep");
        let place = self.at;
        let word = self.word();
        // `xor` has no digits after its first letter and is found in the table.
        if let Some(index) = word.strip_prefix('x').and_then(|digits| digits.parse::<usize>().ok()) {
            ensure!(index < MOST_INPUTS, InvalidGraph, "a formula has an input {index}");
            return Ok(ScalarExpr::Input(index));
        }
        if let Some(number) = number(word) {
            return Ok(ScalarExpr::Constant(number));
        }
        if let Some((_, function)) = UNARY.iter().find(|(name, _)| *name == word) {
            let [x] = self.operands(depth)?;
            return Ok(x.apply(*function));
        }
        if let Some((_, function)) = BINARY.iter().find(|(name, _)| *name == word) {
            let [a, b] = self.operands(depth)?;
            return Ok(ScalarExpr::binary(*function, a, b));
        }
        if word == SELECT {
            let [condition, then, otherwise] = self.operands(depth)?;
            return Ok(ScalarExpr::select(condition, then, otherwise));
        }
        // Go back, so that the message points at the unknown name.
        self.at = place;
        let names = UNARY.iter().map(|(name, _)| *name).chain(BINARY.iter().map(|(name, _)| *name));
        let names: Vec<&str> = names.chain([SELECT]).collect();
        Err(unknown_name("function", word, &names)).within(|| format!("a formula, {}", self.here()))
    }

    /// Parses `N` comma-separated formulas in parentheses.
    fn operands<const N: usize>(&mut self, depth: usize) -> Result<[ScalarExpr; N]> {
        let mut operands = [const { ScalarExpr::Input(0) }; N];
        for (index, operand) in operands.iter_mut().enumerate() {
            self.expect(if index == 0 { '(' } else { ',' })?;
            *operand = self.formula(depth + 1)?;
        }
        self.expect(')')?;
        Ok(operands)
    }
}

/// Parses a number: decimal, or one of the three words. Rust would accept more words than these.
fn number(word: &str) -> Option<f64> {
    let is_decimal = word.bytes().any(|byte| byte.is_ascii_digit())
        && word.starts_with(|first: char| first.is_ascii_digit() || matches!(first, '-' | '+' | '.'));
    if is_decimal || matches!(word, "inf" | "-inf" | "nan") { word.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn formulas() -> impl Strategy<Value = ScalarExpr> {
        let numbers = prop_oneof![
            any::<f64>().prop_filter("equal to itself", |value| !value.is_nan()),
            Just(f64::INFINITY),
            Just(-0.0),
            Just(0.1),
        ];
        let leaves = prop_oneof![
            (0..MOST_INPUTS).prop_map(ScalarExpr::Input),
            numbers.prop_map(ScalarExpr::Constant),
        ];
        leaves.prop_recursive(6, 60, 3, |inner| {
            prop_oneof![
                (0..UNARY.len(), inner.clone()).prop_map(|(at, x)| x.apply(UNARY[at].1)),
                (0..BINARY.len(), inner.clone(), inner.clone()).prop_map(|(at, a, b)| ScalarExpr::binary(
                    BINARY[at].1,
                    a,
                    b
                )),
                (inner.clone(), inner.clone(), inner).prop_map(|(c, a, b)| ScalarExpr::select(c, a, b)),
            ]
        })
    }

    proptest! {
        #[test]
        fn text_gives_the_formula_back(formula in formulas()) {
            let text = formula.to_string();
            prop_assert_eq!(text.parse::<ScalarExpr>().map_err(|e| e.to_string()), Ok(formula));
        }

        #[test]
        fn no_text_panics(text in "[a-z0-9x(), .+-]{0,40}|\\PC{0,20}") {
            if let Ok(formula) = text.parse::<ScalarExpr>() {
                prop_assert_eq!(format!("{:?}", formula.to_string().parse::<ScalarExpr>()), format!("{:?}", Ok::<_, Error>(formula)));
            }
        }
    }

    #[test]
    fn forms_that_are_read_and_refused() -> Result<()> {
        let x = || ScalarExpr::Input(0);
        let read = [
            ("x0", x()),
            (" max ( x0 ,-1e-3 ) ", x().max(-1e-3)),
            (
                "select(less(x0, +2.5E+1), .5, nan)",
                ScalarExpr::select(x().less(25.0), 0.5.into(), f64::NAN.into()),
            ),
        ];
        for (text, formula) in read {
            assert_eq!(format!("{:?}", text.parse::<ScalarExpr>()?), format!("{formula:?}"), "{text}");
        }
        let deep = format!("{}x0{}", "neg(".repeat(DEEPEST), ")".repeat(DEEPEST));
        let long = " ".repeat(LONGEST + 1);
        let wide = format!("x{MOST_INPUTS}");
        let refused = [
            "",
            "x",
            "x-1",
            "x99999999999999999999",
            "add(x0)",
            "add(x0, x1, x2)",
            "neg x0",
            "neg(x0",
            "neg(x0))",
            "infinity",
            "1.2.3",
            "sigmod(x0)",
            "x0 x1",
            "-",
            "é",
            &deep,
            &long,
            &wide,
        ];
        for text in refused {
            assert!(text.parse::<ScalarExpr>().is_err(), "{text}");
        }
        Ok(())
    }
}
