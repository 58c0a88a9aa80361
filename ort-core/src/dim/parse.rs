//! Parser for dimension expressions.
//!
//! A recursive-descent parser for what exporters write into `dim_param`: `batch*2`, `floor(seq/2)`,
//! `past_seq + seq`, `Max(1, s0)`, `(s0 - 1)//2 + 1`. Text that is not an expression names a
//! symbol, so parsing never fails.

use super::Dim;

/// Maximum length of an expression, in bytes.
const TEXT_LIMIT: usize = 512;
/// Maximum nesting depth of parentheses.
const DEPTH_LIMIT: u32 = 24;
/// Maximum exponent after `**`.
const EXPONENT_LIMIT: i64 = 16;

impl Dim {
    /// Parses an expression. Text that is not an expression becomes the symbol of that name.
    ///
    /// The grammar has integers, names, `+ - * / // % **`, parentheses, and functions. These are
    /// `floor`, `ceil` (`ceiling`), `max`, `min`, `mod`, `floor_div` and `ceil_div`, in upper or
    /// lower case. `/` is exact inside `floor(..)` and `ceil(..)` and rounds down elsewhere. If a
    /// name is directly followed by a hyphen and a letter (`batch-size`), the whole text names a
    /// symbol. Empty text and `?` yield a fresh unknown size.
    pub fn parse(text: &str) -> Dim {
        let text = text.trim();
        if text.is_empty() || text == "?" {
            return Dim::unknown();
        }
        parse_expression(text).unwrap_or_else(|| Dim::named(text))
    }
}

fn parse_expression(text: &str) -> Option<Dim> {
    if text.len() > TEXT_LIMIT {
        return None;
    }
    let tokens = tokenize(text)?;
    let mut parser = Parser { tokens: &tokens, depth: 0 };
    let value = parser.sum()?;
    if parser.tokens.is_empty() { value.floor() } else { None }
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Integer(i64),
    Name(String),
    Sign(char),
    FloorDivide,
    Power,
}

fn tokenize(text: &str) -> Option<Vec<Token>> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if first.is_whitespace() {
            first.len_utf8()
        } else if first.is_ascii_digit() {
            let length = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            // An integer beyond 64 bits fails to parse, which makes the whole text a name.
            tokens.push(Token::Integer(rest.get(..length)?.parse().ok()?));
            length
        } else if first.is_alphabetic() || first == '_' {
            let length = rest.find(|c: char| !is_name_part(c)).unwrap_or(rest.len());
            let after = rest.get(length..)?.strip_prefix('-').and_then(|after| after.chars().next());
            // Not a subtraction: exporters use such hyphens inside names (`batch-size`).
            if after.is_some_and(|c| c.is_alphabetic() || c == '_') {
                return None;
            }
            tokens.push(Token::Name(rest.get(..length)?.to_string()));
            length
        } else if rest.starts_with("//") {
            tokens.push(Token::FloorDivide);
            2
        } else if rest.starts_with("**") {
            tokens.push(Token::Power);
            2
        } else if "+-*/%(),".contains(first) {
            tokens.push(Token::Sign(first));
            1
        } else {
            return None;
        };
        // A name that starts with a digit, as `2d` does, is not an expression.
        let ends_number = matches!(tokens.last(), Some(Token::Integer(_))) && first.is_ascii_digit();
        rest = rest.get(length..)?;
        if ends_number && rest.starts_with(|c: char| is_name_part(c)) {
            return None;
        }
    }
    Some(tokens)
}

fn is_name_part(c: char) -> bool {
    c.is_alphanumeric() || "_.:".contains(c)
}

/// A quotient that is not rounded yet.
struct Fraction {
    numerator: Dim,
    denominator: Dim,
}

impl Fraction {
    fn whole(value: Dim) -> Fraction {
        Fraction { numerator: value, denominator: Dim::constant(1) }
    }

    fn floor(&self) -> Option<Dim> {
        Some(self.numerator.floor_div(&self.denominator))
    }

    fn ceil(&self) -> Option<Dim> {
        Some(self.numerator.ceil_div(&self.denominator))
    }

    fn add(&self, other: &Fraction, scale: i64) -> Fraction {
        // An equal denominator stays as it is, which keeps the fraction small.
        let numerator = if self.denominator == other.denominator {
            return Fraction {
                numerator: &self.numerator + &other.numerator * scale,
                denominator: self.denominator.clone(),
            };
        } else {
            &self.numerator * &other.denominator + &other.numerator * &self.denominator * scale
        };
        Fraction { numerator, denominator: &self.denominator * &other.denominator }
    }

    fn multiply(&self, other: &Fraction) -> Fraction {
        Fraction {
            numerator: &self.numerator * &other.numerator,
            denominator: &self.denominator * &other.denominator,
        }
    }

    fn divide(&self, other: &Fraction) -> Fraction {
        Fraction {
            numerator: &self.numerator * &other.denominator,
            denominator: &self.denominator * &other.numerator,
        }
    }
}

struct Parser<'a> {
    /// Tokens not consumed yet.
    tokens: &'a [Token],
    /// Current nesting of parentheses and function calls.
    depth: u32,
}

impl Parser<'_> {
    fn take(&mut self, token: &Token) -> bool {
        match self.tokens.split_first() {
            Some((first, rest)) if first == token => {
                self.tokens = rest;
                true
            }
            _ => false,
        }
    }

    fn next(&mut self) -> Option<Token> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first.clone())
    }

    fn sum(&mut self) -> Option<Fraction> {
        self.depth += 1;
        // Every parenthesis and function call recurses through here.
        if self.depth > DEPTH_LIMIT {
            return None;
        }
        let mut value = self.product()?;
        loop {
            if self.take(&Token::Sign('+')) {
                value = value.add(&self.product()?, 1);
            } else if self.take(&Token::Sign('-')) {
                value = value.add(&self.product()?, -1);
            } else {
                self.depth -= 1;
                return Some(value);
            }
        }
    }

    fn product(&mut self) -> Option<Fraction> {
        let mut value = self.signed()?;
        loop {
            if self.take(&Token::Sign('*')) {
                value = value.multiply(&self.signed()?);
            } else if self.take(&Token::Sign('/')) {
                value = value.divide(&self.signed()?);
            } else if self.take(&Token::FloorDivide) {
                value = Fraction::whole(value.divide(&self.signed()?).floor()?);
            } else if self.take(&Token::Sign('%')) {
                let divisor = self.signed()?.floor()?;
                // Modulo is an integer operation, so both operands are rounded down first.
                value = Fraction::whole(value.floor()?.modulo(&divisor));
            } else {
                return Some(value);
            }
        }
    }

    fn signed(&mut self) -> Option<Fraction> {
        let mut scale = 1;
        while self.take(&Token::Sign('-')) {
            scale = -scale;
        }
        // `**` binds tighter than a sign: `-a**2` is `-(a**2)`.
        let value = self.power()?;
        Some(if scale < 0 { value.multiply(&Fraction::whole(Dim::constant(-1))) } else { value })
    }

    fn power(&mut self) -> Option<Fraction> {
        let base = self.primary()?;
        if !self.take(&Token::Power) {
            return Some(base);
        }
        let Some(Token::Integer(exponent @ 0..=EXPONENT_LIMIT)) = self.next() else { return None };
        let one = Fraction::whole(Dim::constant(1));
        Some((0..exponent).fold(one, |product, _| product.multiply(&base)))
    }

    fn primary(&mut self) -> Option<Fraction> {
        match self.next()? {
            Token::Integer(value) => Some(Fraction::whole(Dim::constant(value))),
            Token::Sign('(') => {
                let value = self.sum()?;
                self.take(&Token::Sign(')')).then_some(value)
            }
            Token::Name(name) if self.take(&Token::Sign('(')) => {
                let mut arguments = vec![self.sum()?];
                while self.take(&Token::Sign(',')) {
                    arguments.push(self.sum()?);
                }
                let value = call(&name.to_ascii_lowercase(), &arguments)?;
                self.take(&Token::Sign(')')).then_some(Fraction::whole(value))
            }
            Token::Name(name) => Some(Fraction::whole(Dim::named(&name))),
            _ => None,
        }
    }
}

fn call(name: &str, arguments: &[Fraction]) -> Option<Dim> {
    let fold = |choose: fn(&Dim, &Dim) -> Dim| {
        let values = arguments.iter().map(Fraction::floor).collect::<Option<Vec<_>>>()?;
        values.into_iter().reduce(|best, value| choose(&best, &value))
    };
    match (name, arguments) {
        ("floor", [value]) => value.floor(),
        ("ceil" | "ceiling", [value]) => value.ceil(),
        ("max", _) => fold(Dim::max),
        ("min", _) => fold(Dim::min),
        ("mod" | "pythonmod", [a, b]) => Some(a.floor()?.modulo(&b.floor()?)),
        ("floordiv" | "floor_div", [a, b]) => a.divide(b).floor(),
        ("ceildiv" | "ceil_div", [a, b]) => a.divide(b).ceil(),
        _ => None,
    }
}
