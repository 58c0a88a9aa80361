//! Model check: all that is unsupported or broken in a model, found without running it.

use std::fmt;
use std::sync::Arc;

use ort_core::Error;
use ort_core::ep::Device;
use ort_core::onnx::{ModelWarning, Source, unknown_operators};
use ort_core::placement::unclaimed;
use ort_core::session::{Model, SessionBuilder};
use serde::Serialize;
use serde_json::{Value, json};

use crate::table::{Table, in_line};

/// Nodes of one operator with the same problem, or a problem of the whole model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The operator with its domain. `None` for a problem of the whole model.
    pub operator: Option<String>,
    /// What is wrong, and what to try.
    pub problem: String,
    /// The number of nodes.
    pub count: usize,
    /// The first of these nodes.
    pub first_node: Option<String>,
}

impl Finding {
    fn of_model(problem: &Error) -> Finding {
        Finding { operator: None, problem: problem.to_string(), count: 1, first_node: None }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A problem of the whole model has no node to name.
        if let (Some(node), Some(operator)) = (&self.first_node, &self.operator) {
            write!(formatter, "node '{node}' ({operator}): ")?;
        }
        formatter.write_str(&self.problem)
    }
}

/// All findings and warnings about a model.
#[derive(Clone, Debug)]
pub struct CheckReport {
    /// What keeps the model from running.
    pub findings: Vec<Finding>,
    /// Deviations from the standard that loading tolerated.
    pub warnings: Vec<ModelWarning>,
    /// Whether the findings are nodes that these devices do not run, so that other devices may.
    pub is_of_providers: bool,
}

/// Checks a model against these devices. A model that cannot be decoded or loaded is a finding, and
/// so is one for which no session can be built.
///
/// `devices` opens the devices, and `builder` sets the options of a session. Both are called only
/// for a model that loads.
///
/// # Errors
///
/// Those of `devices` and `builder`, since they say nothing of the model.
pub fn check<E: From<Error>>(
    source: Source,
    devices: impl FnOnce() -> Result<Vec<Arc<dyn Device>>, E>,
    builder: impl FnOnce(&Model) -> Result<SessionBuilder, E>,
) -> Result<CheckReport, E> {
    let unknown = match source.decode().and_then(|proto| unknown_operators(&proto)) {
        Ok(unknown) => unknown,
        Err(problem) => return Ok(CheckReport::broken(&problem)),
    };
    let mut findings = Vec::new();
    for unknown in unknown {
        // The domain of ONNX itself is an empty string, which would read as a gap.
        let domain = if unknown.domain.is_empty() { "ai.onnx" } else { &unknown.domain };
        findings.push(Finding {
            operator: Some(format!("{domain}.{}", unknown.op)),
            problem: format!("the operator is not known; {}", unknown.advice()?),
            count: unknown.count,
            first_node: Some(unknown.first_node),
        });
    }
    // A model with unknown operators cannot be loaded, so the checks below are impossible.
    if !findings.is_empty() {
        return Ok(CheckReport { findings, warnings: Vec::new(), is_of_providers: false });
    }
    let model = match Model::from_source(source) {
        Ok(model) => model,
        Err(problem) => return Ok(CheckReport::broken(&problem)),
    };
    for refused in unclaimed(model.graph(), &devices()?)? {
        findings.push(Finding {
            operator: Some(refused.operator),
            problem: refused.reason,
            count: refused.count,
            first_node: Some(refused.first_node),
        });
    }
    let is_of_providers = !findings.is_empty();
    // Building a session finds the remaining problems. With unclaimed nodes it would only repeat
    // them.
    if findings.is_empty()
        && let Err(problem) = builder(&model)?.build()
    {
        findings.push(Finding::of_model(&problem));
    }
    Ok(CheckReport { findings, warnings: model.warnings().to_vec(), is_of_providers })
}

impl CheckReport {
    /// The report of a model that cannot be loaded, and so has no warnings.
    fn broken(problem: &Error) -> CheckReport {
        let findings = vec![Finding::of_model(problem)];
        CheckReport { findings, warnings: Vec::new(), is_of_providers: false }
    }

    /// Returns the tables that `ort check` prints: of the findings and of the warnings, if there
    /// are any.
    pub fn tables(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        if !self.findings.is_empty() {
            let mut rows = Table::new(&["operator", "nodes", "first node", "problem"]);
            for finding in &self.findings {
                rows.add_row([
                    finding.operator.as_deref().unwrap_or("(model)"),
                    &finding.count.to_string(),
                    finding.first_node.as_deref().unwrap_or_default(),
                    &finding.problem,
                ]);
            }
            tables.push(rows);
        }
        if !self.warnings.is_empty() {
            let mut rows = Table::new(&["warning", "places", "first place", "problem"]);
            for ModelWarning { kind, text, place, count } in &self.warnings {
                rows.add_row([kind.name(), &count.to_string(), place, text]);
            }
            tables.push(rows);
        }
        tables
    }

    /// Returns the findings and then the warnings, a line each. Without any, there are no lines.
    pub fn lines(&self) -> Vec<String> {
        let findings = self.findings.iter().map(|finding| match finding.count {
            0 | 1 => finding.to_string(),
            count => format!("{finding} (and {} more like it)", count - 1),
        });
        let warnings = self.warnings.iter().map(|warning| format!("warning: {warning}"));
        findings.chain(warnings).map(|line| in_line(&line).into_owned()).collect()
    }

    /// Returns the JSON object that `ort check --json` prints.
    pub fn to_json(&self) -> Value {
        let warnings = self.warnings.iter().map(|warning| {
            json!({
                "kind": warning.kind.name(),
                "problem": warning.text,
                "count": warning.count,
                "first_place": warning.place,
            })
        });
        json!({
            "ok": self.findings.is_empty(),
            "findings": self.findings,
            "warnings": warnings.collect::<Vec<Value>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use ort_core::onnx::WarningKind;
    use ort_core::session::Session;

    use super::*;

    #[test]
    fn a_model_that_cannot_be_decoded_is_a_finding() -> Result<(), Error> {
        let no_devices = || Ok::<_, Error>(Vec::new());
        let report = check(Source::from_bytes("junk"), no_devices, |model| Ok(Session::builder(model)))?;
        assert!(matches!(report.findings.as_slice(), [Finding { operator: None, count: 1, .. }]));
        assert_eq!(report.lines(), [report.findings[0].problem.clone()]);
        let json = report.to_json();
        assert_eq!((&json["ok"], &json["warnings"]), (&false.into(), &json!([])));
        assert_eq!((&json["findings"][0]["operator"], report.tables().len()), (&Value::Null, 1));
        Ok(())
    }

    #[test]
    fn lines_count_and_steer_no_terminal() {
        let finding = Finding {
            operator: Some("ai.onnx.Twist".to_owned()),
            problem: "the operator is not known".to_owned(),
            count: 3,
            first_node: Some("a\x1b".to_owned()),
        };
        let warning = ModelWarning {
            kind: WarningKind::Attribute,
            text: "'alpha' is ignored".to_owned(),
            place: "node 'b'".to_owned(),
            count: 1,
        };
        let report = CheckReport { findings: vec![finding], warnings: vec![warning], is_of_providers: false };
        let expected = [
            "node 'a\\u{1b}' (ai.onnx.Twist): the operator is not known (and 2 more like it)",
            "warning: node 'b': 'alpha' is ignored",
        ];
        assert_eq!(report.lines(), expected);
        assert_eq!(report.tables().len(), 2);
    }
}
