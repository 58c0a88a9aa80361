//! The term language of patterns and templates, and its parser.
//!
//! ```text
//! term   := name '@' term            the node that the term matches, to read its attributes
//!         | Op ('|' Op)* '(' [term (',' term)*] [',' '..'] (';' attr)* ')' [':' output]
//!         | name | name '?'          a value; one that may be left out
//!         | '#' name                 a constant; a template drops its dimensions if it has one element
//!         | number | '~' number      exactly this number, or within 1e-4 of it: a constant of one element
//!         | '[' integers ']'         a constant list of integers
//!         | '_'                      anything, or nothing
//! attr   := name '=' (number | "'" text "'" | '[' integers ']')
//!         | '..' name                in templates: the attributes of a matched node
//! ```
//!
//! A name that occurs twice must bind the same value both times. The name of a node is also that of
//! the value it computes. An operator is looked up in the ONNX domain, then in ours, then in ONNX
//! Runtime's. `Activation` stands for all operators with [`Traits::ACTIVATION`].

use crate::spec::{MICROSOFT, ONNX, OpSpec, RUNTIME, Registry, Traits};
use crate::{Result, ensure, error};

/// A pattern or a template.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Term {
    /// `_`: any value, or none.
    Any,
    /// A named value.
    Value { name: &'static str, optional: bool },
    /// A named constant.
    Constant(&'static str),
    /// A constant of one element with this value.
    Number { value: f64, tolerant: bool },
    /// A constant list of integers.
    Ints(Vec<i64>),
    /// An output of a node.
    Node(NodeTerm),
}

/// A node of a pattern or of a template.
#[derive(Clone, Debug)]
pub(crate) struct NodeTerm {
    /// The name before `@`.
    pub(crate) name: Option<&'static str>,
    /// The alternative operators.
    pub(crate) ops: Vec<&'static OpSpec>,
    pub(crate) args: Vec<Term>,
    /// Whether the node may have further inputs (`..`).
    pub(crate) rest: bool,
    pub(crate) attrs: Vec<(&'static str, Literal)>,
    /// Matched nodes whose attributes a template copies.
    pub(crate) copies: Vec<&'static str>,
    pub(crate) output: usize,
}

impl PartialEq for NodeTerm {
    fn eq(&self, other: &NodeTerm) -> bool {
        // Records have no equality, so operators compare by name.
        let names = |term: &NodeTerm| term.ops.iter().map(|op| op.name).collect::<Vec<_>>();
        names(self) == names(other) && self.args == other.args && self.attrs == other.attrs
    }
}

/// An attribute value in a pattern or template.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Literal {
    Number(f64),
    Text(&'static str),
    Ints(Vec<i64>),
}

impl Term {
    /// Parses the whole text; anything left over is an error.
    pub(crate) fn parse(text: &'static str) -> Result<Term> {
        let mut parser = Parser { text, rest: text };
        let term = parser.term()?;
        ensure!(parser.rest.trim_start().is_empty(), Fail, "'{text}': '{}' is left over", parser.rest);
        Ok(term)
    }

    /// Returns the root node; `None` if the term is not a node.
    pub(crate) fn root(&self) -> Option<&NodeTerm> {
        match self {
            Term::Node(node) => Some(node),
            _ => None,
        }
    }
}

impl NodeTerm {
    /// Returns the nodes of the term in preorder.
    pub(crate) fn nodes(&self) -> Vec<&NodeTerm> {
        let inner = self.args.iter().filter_map(Term::root).flat_map(NodeTerm::nodes);
        std::iter::once(self).chain(inner).collect()
    }
}

struct Parser {
    text: &'static str,
    rest: &'static str,
}

impl Parser {
    /// Consumes `token` if it comes next, and returns whether it did.
    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        ensure!(self.take(token), Fail, "'{}': '{token}' is expected before '{}'", self.text, self.rest);
        Ok(())
    }

    /// Consumes and returns the longest run of characters that satisfy `of`.
    fn run(&mut self, of: impl Fn(char) -> bool) -> &'static str {
        let rest = self.rest.trim_start();
        let end = rest.find(|c| !of(c)).unwrap_or(rest.len());
        let (run, left) = rest.split_at(end);
        self.rest = left;
        run
    }

    fn name(&mut self) -> Result<&'static str> {
        let name = self.run(|c| c.is_ascii_alphanumeric() || c == '_');
        ensure!(!name.is_empty(), Fail, "'{}': a name is expected before '{}'", self.text, self.rest);
        Ok(name)
    }

    fn number(&mut self) -> Result<f64> {
        let number = self.run(|c| c.is_ascii_digit() || matches!(c, '.' | '-' | '+' | 'e'));
        number.parse().map_err(|_| error!(Fail, "'{}': '{number}' is no number", self.text))
    }

    fn ints(&mut self) -> Result<Vec<i64>> {
        let mut ints = Vec::new();
        while !self.take("]") {
            ints.push(self.number()? as i64);
            self.take(",");
        }
        Ok(ints)
    }

    fn term(&mut self) -> Result<Term> {
        if self.take("#") {
            return Ok(Term::Constant(self.name()?));
        }
        if self.take("~") {
            return Ok(Term::Number { value: self.number()?, tolerant: true });
        }
        if self.take("[") {
            return Ok(Term::Ints(self.ints()?));
        }
        if self.rest.trim_start().starts_with(|c: char| c.is_ascii_digit() || c == '-') {
            return Ok(Term::Number { value: self.number()?, tolerant: false });
        }
        let name = self.name()?;
        if name == "_" {
            return Ok(Term::Any);
        }
        if self.take("@") {
            let mut term = self.term()?;
            let Term::Node(node) = &mut term else {
                return Err(error!(Fail, "'{}': '{name}@' stands before no operator", self.text));
            };
            node.name = Some(name);
            return Ok(term);
        }
        // Operator names are capitalized, value names are not.
        if name.starts_with(|c: char| c.is_ascii_uppercase()) {
            return Ok(Term::Node(self.node(name)?));
        }
        Ok(Term::Value { name, optional: self.take("?") })
    }

    fn node(&mut self, first: &'static str) -> Result<NodeTerm> {
        let mut ops = operators(first)?;
        while self.take("|") {
            ops.extend(operators(self.name()?)?);
        }
        let mut node = NodeTerm {
            name: None,
            ops,
            args: Vec::new(),
            rest: false,
            attrs: Vec::new(),
            copies: Vec::new(),
            output: 0,
        };
        self.expect("(")?;
        while !self.take(")") {
            if self.take(";") {
                self.attr(&mut node)?;
            } else if self.take("..") {
                node.rest = true;
            } else {
                node.args.push(self.term()?);
                self.take(",");
            }
        }
        if self.take(":") {
            node.output = self.number()? as usize;
        }
        Ok(node)
    }

    fn attr(&mut self, node: &mut NodeTerm) -> Result<()> {
        if self.take("..") {
            node.copies.push(self.name()?);
            return Ok(());
        }
        let name = self.name()?;
        self.expect("=")?;
        let value = if self.take("[") {
            Literal::Ints(self.ints()?)
        } else if self.take("'") {
            let text = self.run(|c| c != '\'');
            self.expect("'")?;
            Literal::Text(text)
        } else {
            Literal::Number(self.number()?)
        };
        node.attrs.push((name, value));
        Ok(())
    }
}

fn operators(name: &str) -> Result<Vec<&'static OpSpec>> {
    let registry = Registry::global()?;
    if name == "Activation" {
        let records = registry.records().iter().copied();
        return Ok(records.filter(|spec| spec.traits.has(Traits::ACTIVATION)).collect());
    }
    let mut found = [ONNX, RUNTIME, MICROSOFT].into_iter().filter_map(|domain| registry.find(domain, name));
    let found = found.next();
    found
        .map(|spec| vec![spec])
        .ok_or_else(|| error!(Fail, "a rule names the operator {name}, which is not known"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_parse() -> Result<()> {
        let text = "m@Mul(Add(x, ~1.5), [1, -2], #c, b?, -0.5; axis=-1; mode='up'; axes=[0,1]; ..m):1";
        let term = Term::parse(text)?;
        let node = term.root().expect("an operator");
        assert_eq!((node.name, node.output, node.args.len()), (Some("m"), 1, 5));
        assert_eq!(node.args[1], Term::Ints(vec![1, -2]));
        assert_eq!(node.args[3], Term::Value { name: "b", optional: true });
        assert_eq!(node.args[4], Term::Number { value: -0.5, tolerant: false });
        assert_eq!(node.attrs[0], ("axis", Literal::Number(-1.0)));
        assert_eq!(node.attrs[1], ("mode", Literal::Text("up")));
        assert_eq!(node.copies, ["m"]);
        assert_eq!(node.nodes().len(), 2);
        assert!(matches!(Term::parse("Relu|Sigmoid(x, ..)")?.root(), Some(node) if node.rest));
        for wrong in ["Mul(x", "NoSuchOperator(x)", "Mul(x, y) z", "Mul(x; axis)", "@", "x@y"] {
            assert!(Term::parse(wrong).is_err(), "{wrong}");
        }
        Ok(())
    }
}
