//! Selection of nodes by patterns.

use std::fmt;
use std::str::FromStr;

use ort_core::onnx::proto::NodeProto;
use ort_core::{Error, ErrorKind, Result};

use super::draft::{any_node, subgraphs};

/// A pattern that nodes match: a name with wildcards `*` and `?`, `op:Softmax`, `#12` for the node
/// of this number in the file, or `first` and `last` for the ends of the chain of layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePattern {
    /// The name, with wildcards.
    Name(String),
    /// The operator.
    Operator(String),
    /// The place in the file, from 0. Nodes need not have names.
    Index(usize),
    /// The first layer with a weight in the model's graph.
    First,
    /// The last layer with a weight in the model's graph.
    Last,
}

/// Where a node of the model's graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The number in the file.
    pub(super) index: usize,
    /// Whether it is the first or the last layer with a weight.
    pub(super) is_first: bool,
    pub(super) is_last: bool,
}

impl NodePattern {
    /// Whether a node matches. Nodes of bodies have no place.
    pub(super) fn matches(&self, place: Option<Place>, node: &NodeProto) -> bool {
        match self {
            NodePattern::Name(pattern) => matches_wildcards(pattern.as_bytes(), node.name().as_bytes()),
            NodePattern::Operator(operator) => operator == node.op_type(),
            NodePattern::Index(index) => place.is_some_and(|place| place.index == *index),
            NodePattern::First => place.is_some_and(|place| place.is_first),
            NodePattern::Last => place.is_some_and(|place| place.is_last),
        }
    }
}

impl FromStr for NodePattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<NodePattern> {
        let invalid = |why: &str| Error::new(ErrorKind::InvalidArgument, format!("pattern '{text}': {why}"));
        if let Some(number) = text.strip_prefix('#') {
            let index = number.parse().map_err(|_| invalid("expected a number of a node, such as #12"))?;
            return Ok(NodePattern::Index(index));
        }
        match text.strip_prefix("op:") {
            None if text == "first" => Ok(NodePattern::First),
            None if text == "last" => Ok(NodePattern::Last),
            Some("") => Err(invalid("expected an operator, such as op:Softmax")),
            Some(operator) => Ok(NodePattern::Operator(operator.to_string())),
            None if text.is_empty() => Err(invalid("expected a name, op:NAME or #NUMBER")),
            None => Ok(NodePattern::Name(text.to_string())),
        }
    }
}

impl fmt::Display for NodePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodePattern::Name(name) => write!(f, "{name}"),
            NodePattern::Operator(operator) => write!(f, "op:{operator}"),
            NodePattern::Index(index) => write!(f, "#{index}"),
            NodePattern::First => f.write_str("first"),
            NodePattern::Last => f.write_str("last"),
        }
    }
}

/// The nodes that a caller chooses.
#[derive(Clone, Copy)]
pub(super) struct Selection<'p> {
    /// If there are any, other nodes stay as they are.
    pub(super) only: &'p [NodePattern],
    /// Nodes that stay as they are.
    pub(super) exclude: &'p [NodePattern],
}

impl Selection<'_> {
    /// Whether the caller excludes a node.
    pub(super) fn excludes(&self, place: Option<Place>, node: &NodeProto) -> bool {
        self.exclude.iter().any(|pattern| pattern.matches(place, node))
    }

    /// Whether a node may change. If not, the reason.
    pub(super) fn allows(&self, place: Option<Place>, node: &NodeProto) -> std::result::Result<(), String> {
        if let Some(pattern) = self.exclude.iter().find(|pattern| pattern.matches(place, node)) {
            return Err(format!("excluded by '{pattern}'"));
        }
        let is_listed = self.only.is_empty() || self.only.iter().any(|pattern| pattern.matches(place, node));
        if is_listed { Ok(()) } else { Err("not among the chosen nodes".to_string()) }
    }

    /// Refuses patterns that match nothing, which are typing errors.
    pub(super) fn check(&self, nodes: &[NodeProto], place: impl Fn(usize) -> Option<Place>) -> Result<()> {
        let is_in_body = |pattern: &NodePattern, node: &NodeProto| {
            subgraphs(node).any(|graph| any_node(&graph.node, &|node| pattern.matches(None, node)))
        };
        let matches = |pattern: &NodePattern| {
            let mut numbered = nodes.iter().enumerate();
            numbered.any(|(index, node)| pattern.matches(place(index), node) || is_in_body(pattern, node))
        };
        match self.only.iter().chain(self.exclude).find(|pattern| !matches(pattern)) {
            Some(pattern) => {
                let text = format!("pattern '{pattern}' matches no node of the model");
                Err(Error::new(ErrorKind::InvalidArgument, text)
                    .help("give names of nodes with * and ?, op:OPERATOR, #NUMBER, first or last"))
            }
            None => Ok(()),
        }
    }
}

/// Whether a pattern matches all of a text. It takes at most the product of the lengths.
fn matches_wildcards(pattern: &[u8], text: &[u8]) -> bool {
    // Where to go on if a `*` has to match one more.
    let (mut at, mut place) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while place < text.len() {
        match (pattern.get(at), text.get(place)) {
            (Some(b'*'), _) => {
                retry = Some((at + 1, place));
                at += 1;
            }
            (Some(expected), Some(found)) if *expected == b'?' || expected == found => {
                at += 1;
                place += 1;
            }
            _ => match retry {
                Some((after, from)) => {
                    retry = Some((after, from + 1));
                    (at, place) = (after, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern.iter().skip(at).all(|rest| *rest == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_parse_and_match() -> Result<()> {
        let node = NodeProto {
            name: Some("/layer.1/query".into()),
            op_type: Some("MatMul".into()),
            ..NodeProto::default()
        };
        let cases = [
            ("/layer.1/query", true),
            ("*query", true),
            ("*.1/*", true),
            ("*.?/q*y", true),
            ("*", true),
            ("query", false),
            ("*x*", false),
            ("op:MatMul", true),
            ("op:Gemm", false),
            ("#3", true),
            ("#4", false),
            ("first", false),
            ("last", true),
        ];
        let place = Place { index: 3, is_first: false, is_last: true };
        for (text, expected) in cases {
            let pattern: NodePattern = text.parse()?;
            assert_eq!(pattern.matches(Some(place), &node), expected, "{text}");
            assert_eq!(pattern.to_string(), text);
        }
        for text in ["", "#", "#x", "op:"] {
            assert!(text.parse::<NodePattern>().is_err(), "{text}");
        }
        Ok(())
    }
}
