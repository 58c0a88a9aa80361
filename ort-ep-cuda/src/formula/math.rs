//! The math library of generated code: the PTX of `cu/math.cu`, split into functions so that a
//! module includes only those it needs.

use std::sync::OnceLock;

use ort_core::{Error, Result};

use crate::families::unpacked;

/// The compressed PTX of `cu/math.cu`.
const COMPILED: &[u8] = include_bytes!("../../ptx/math_75.ptx.gz");

/// Returns the named functions, their callees and the tables they read, as the head of a module.
pub(super) fn functions(names: &[String]) -> Result<String> {
    static TEXT: OnceLock<Result<String>> = OnceLock::new();
    static MODULE: OnceLock<MathModule<'static>> = OnceLock::new();
    let text = TEXT.get_or_init(|| unpacked(COMPILED)).as_ref().map_err(Error::clone)?;
    Ok(MODULE.get_or_init(|| MathModule::of(text)).of_names(names))
}

/// The functions and tables of a module.
struct MathModule<'t> {
    /// Name and line of each table.
    tables: Vec<(&'t str, &'t str)>,
    /// Name and text of each function.
    functions: Vec<(&'t str, String)>,
}

impl<'t> MathModule<'t> {
    fn of(text: &'t str) -> MathModule<'t> {
        let mut parts = MathModule { tables: Vec::new(), functions: Vec::new() };
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if line.starts_with(".global") || line.starts_with(".const") {
                let declared = line.split(['=', '[', ';']).next().unwrap_or(line);
                parts.tables.extend(declared.split_whitespace().last().map(|name| (name, line)));
            }
            let line = line.strip_prefix(".visible ").unwrap_or(line);
            let Some(head) = line.strip_prefix(".func") else { continue };
            let (mut body, mut whole) = (format!("{line}\n"), false);
            for line in lines.by_ref() {
                body.push_str(line);
                body.push('\n');
                whole = line.starts_with('}');
                // A `;` before any body ends a declaration.
                if whole || line.trim_end().ends_with(';') && !body.contains('{') {
                    break;
                }
            }
            // The result precedes the name in parentheses, and the parameters follow it.
            let name = head.rsplit(')').find(|part| !part.trim().is_empty()).unwrap_or(head);
            let name = name.trim().trim_end_matches('(').trim_end();
            if whole {
                parts.functions.push((name, body));
            }
        }
        parts
    }

    fn function(&self, name: &str) -> Option<usize> {
        self.functions.iter().position(|(own, _)| *own == name)
    }

    fn of_names(&self, names: &[String]) -> String {
        let mut wanted = vec![false; self.functions.len()];
        for name in names {
            self.want(name, &mut wanted);
        }
        let chosen: Vec<&str> = self
            .functions
            .iter()
            .zip(&wanted)
            .filter_map(|((_, body), wanted)| wanted.then_some(body.as_str()))
            .collect();
        let read =
            |table: &&(&str, &str)| chosen.iter().any(|body| names_in(body).any(|name| name == table.0));
        let mut text = String::new();
        for (_, line) in self.tables.iter().filter(read) {
            text.push_str(line);
            text.push('\n');
        }
        // Declare all functions first: one may be called before its body.
        for body in &chosen {
            text.push_str(body.split('{').next().unwrap_or_default().trim_end());
            text.push_str(";\n");
        }
        text + &chosen.concat()
    }

    /// Marks a function and its callees, transitively.
    fn want(&self, name: &str, wanted: &mut [bool]) {
        let Some(index) = self.function(name) else { return };
        let (Some(flag), Some((_, body))) = (wanted.get_mut(index), self.functions.get(index)) else {
            return;
        };
        // A function that is marked already is not visited again, so recursion ends.
        if !std::mem::replace(flag, true) {
            names_in(body).filter(|called| *called != name).for_each(|called| self.want(called, wanted));
        }
    }
}

/// Splits a text into words that may be names.
fn names_in(text: &str) -> impl Iterator<Item = &str> {
    let inside = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '$');
    text.split(move |letter| !inside(letter)).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_bring_what_they_need() {
        let parts = MathModule::of(
            ".version 8.1\n.func  (.param .b32 func_retval0) inner\n(\n\t.param .b32 inner_param_0\n)\n;\n\
             .global .align 4 .b8 table[2] = {1, 2};\n.global .align 4 .b8 other[2] = {1, 2};\n\
             .func  (.param .b32 func_retval0) outer(\n\t.param .b32 p\n)\n{\n\tcall.uni (retval0),\n\tinner,\n\
             \t(param0);\n\tret;\n}\n\
             .func  (.param .b32 func_retval0) inner(\n\t.param .b32 p\n)\n{\n\tmov.u64 %rd1, table;\n\tret;\n}\n",
        );
        let text = parts.of_names(&["outer".to_owned()]);
        assert_eq!(text.matches("inner(").count(), 2, "declared and defined: {text}");
        assert!(text.contains("table[2]") && !text.contains("other"));
        let alone = parts.of_names(&["inner".to_owned()]);
        assert!(!alone.contains("outer") && !alone.contains(".version"));
    }
}
