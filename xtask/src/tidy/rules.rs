//! The table of rules. To add one, write a check and a row.

use super::code::{lines_with_word, lines_without_tests, without_comments_and_literals};
use super::source::{Finding, Repository, SourceFile, report};
use super::{circles, documents, layers, operators, parameters, type_names, unsafe_reasons, words};

/// A rule: the files that it applies to, and its check of one of them, given the names of all
/// files.
pub(super) struct Rule {
    pub(super) applies: fn(&SourceFile) -> bool,
    pub(super) check: fn(&SourceFile, &Repository<'_>, &mut Vec<Finding>),
}

pub(super) const RULES: &[Rule] = &[
    Rule { applies: is_rust, check: length },
    Rule { applies: is_rust, check: header },
    Rule { applies: is_rust, check: comment_width },
    Rule { applies: is_rust, check: unsafe_address },
    Rule { applies: unsafe_reasons::applies, check: unsafe_reasons::check },
    Rule { applies: is_safe_crate_root, check: forbids_unsafe },
    Rule { applies: is_rust, check: forbidden_code },
    Rule { applies: runs_in_children_of_fork, check: once_cells },
    Rule { applies: is_text, check: whitespace },
    Rule { applies: may_not_name_machines, check: machine_names },
    Rule { applies: documents::applies, check: documents::links_lead_somewhere },
    Rule { applies: documents::applies, check: documents::identifiers_exist },
    Rule { applies: documents::is_contents, check: documents::all_pages_are_listed },
    Rule { applies: is_root_of_tests, check: all_tests_are_modules },
    Rule { applies: layers::applies, check: layers::check },
    Rule { applies: circles::applies, check: circles::check },
    Rule { applies: operators::applies, check: operators::check },
    Rule { applies: parameters::applies, check: parameters::check },
    Rule { applies: type_names::applies, check: type_names::check },
    Rule { applies: words::applies, check: words::check },
];

/// The maximum lines of a file without its unit tests, and of a test file.
const MAX_LINES: usize = 600;
const MAX_TEST_LINES: usize = 900;

/// The maximum width of a comment. Code in doc comments may be as wide as other code, and tables
/// have no limit.
const COMMENT_WIDTH: usize = 100;

/// The allow-list of unsafe code: folders or files, from the root.
const UNSAFE_PLACES: &[&str] = &[
    "ort-alloc/",
    "ort-capi/",
    "ort-core/src/ep/abi/",
    "ort-core/src/ep/dylib/",
    "ort-ep-cpu/depthwise/src/simd/",
    "ort-ep-cpu/gemm/src/kernels/",
    "ort-ep-cpu/threads/src/parallel.rs",
    "ort-ep-cpu/threads/src/pool.rs",
    "ort-ep-cpu/vector/src/simd/",
    // It calls `fork`.
    "ort-ep-cpu/tests/fork.rs",
    "ort-ep-cuda/src/driver.rs",
    "ort-ep-cuda/src/driver/",
    "ort-ep-cuda/src/libraries/",
    // It creates a stream, like a user of the CUDA driver would.
    "ort-ep-cuda/tests/streams.rs",
    "ort-ep-wgpu/src/driver_cache.rs",
    "ort-testkit/cuda-emulator/",
    // It is a client of the C API.
    "ort-testkit/custom-ops/",
    // It includes files of the crates above.
    "ort-loom/src/lib.rs",
    // Memory that numpy and Python's bytes own.
    "ort-py/src/arrays.rs",
    "ort-py/src/build.rs",
    "ort-py/src/dlpack.rs",
];

/// Text that must not be in code, and why.
const FORBIDDEN_CODE: &[(&str, &str)] = &[
    ("todo!", "unfinished code"),
    ("unimplemented!", "unfinished code"),
    ("dbg!", "left from debugging"),
    ("#[ignore", "a test that never runs"),
];

/// Machine-specific folders, and settings that name a package index: neither works elsewhere.
const MACHINE_NAMES: &[&str] = &["/tmp/", "/home/", "/root/", "--index-url", "--extra-index-url"];

fn is_rust(file: &SourceFile) -> bool {
    file.has_extension("rs")
}

fn is_text(file: &SourceFile) -> bool {
    // Licences, to which each package links, are verbatim copies; cargo writes the lock file, and
    // proptest writes its seeds.
    let name = file.path.rsplit('/').next().unwrap_or(&file.path);
    !name.starts_with("LICENSE") && file.path != "Cargo.lock" && !file.path.contains("proptest-regressions")
}

fn is_root_of_tests(file: &SourceFile) -> bool {
    file.path.ends_with("/tests/integration/main.rs")
}

fn is_safe_crate_root(file: &SourceFile) -> bool {
    let in_crate =
        file.path.split_once('/').filter(|(_, rest)| matches!(*rest, "src/lib.rs" | "src/main.rs"));
    in_crate
        .is_some_and(|(name, _)| !UNSAFE_PLACES.iter().any(|place| place.starts_with(&format!("{name}/"))))
}

fn may_not_name_machines(file: &SourceFile) -> bool {
    // The table itself has to name them.
    is_text(file) && !file.path.starts_with("xtask/src/tidy/")
}

fn length(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let is_tests = file.path.contains("/tests/") || file.path.ends_with("/tests.rs");
    let (lines, most) = match is_tests {
        true => (file.text.lines().count(), MAX_TEST_LINES),
        false => (lines_without_tests(&file.text), MAX_LINES),
    };
    if lines > most {
        report(findings, file, 0, format!("{lines} lines; the most is {most}"));
    }
}

fn header(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    if !file.text.starts_with("//! ") {
        report(findings, file, 1, "does not open with `//!` saying what it holds".to_owned());
    }
}

fn comment_width(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let mut is_code = false;
    for (index, line) in file.text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            is_code = false;
            continue;
        };
        let text = comment.trim_start_matches(['/', '!']).trim_start();
        is_code ^= text.starts_with("```");
        // Text indented further than one space is laid out by hand.
        let is_laid_out = text.starts_with('|') || comment.trim_start_matches(['/', '!']).starts_with("  ");
        let width = line.chars().count();
        if width > COMMENT_WIDTH && !is_code && !is_laid_out {
            report(
                findings,
                file,
                index + 1,
                format!("a comment of {width} columns; the most is {COMMENT_WIDTH}"),
            );
        }
    }
}

fn unsafe_address(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    if UNSAFE_PLACES.iter().any(|place| file.path.starts_with(place)) {
        return;
    }
    let code = without_comments_and_literals(&file.text);
    for line in lines_with_word(&code, "unsafe") {
        report(findings, file, line, "unsafe code outside the files of `UNSAFE_PLACES`".to_owned());
    }
}

fn forbids_unsafe(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    if !file.text.contains("#![forbid(unsafe_code)]") {
        report(findings, file, 0, "a crate without unsafe code says `#![forbid(unsafe_code)]`".to_owned());
    }
}

fn forbidden_code(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let code = without_comments_and_literals(&file.text);
    for (index, line) in code.lines().enumerate() {
        for (text, why) in FORBIDDEN_CODE.iter().filter(|(text, _)| line.contains(text)) {
            report(findings, file, index + 1, format!("`{text}`: {why}"));
        }
    }
}

/// The crates that models run on in a child of `fork`. Devices other than the processor do not
/// survive one.
fn runs_in_children_of_fork(file: &SourceFile) -> bool {
    const CRATES: &[&str] =
        &["ort-alloc/", "ort-core/", "ort-ep-cpu/", "ort-quant/", "ort-runtime/", "ort-train/"];
    let is_tests = file.path.contains("/tests/");
    is_rust(file)
        && !is_tests
        && file.path != "ort-alloc/src/fork.rs"
        && CRATES.iter().any(|name| file.path.starts_with(name))
}

/// A child of `fork` would wait for ever for a cell that another thread was filling.
fn once_cells(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let code = without_comments_and_literals(&file.text);
    let is_shared = code.contains("OnceLock");
    for (index, line) in code.lines().enumerate() {
        if line.contains("LazyLock") || is_shared && line.contains(".get_or_init(") {
            report(
                findings,
                file,
                index + 1,
                "fill shared cells by `ort_alloc::fork::get_or_init`".to_owned(),
            );
        }
    }
}

fn whitespace(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let tab_separated = file.has_extension("tsv");
    // Not `lines`, which would remove the carriage returns that are to be found.
    for (index, line) in file.text.split('\n').enumerate() {
        if line.contains('\t') && !tab_separated {
            report(findings, file, index + 1, "a tab".to_owned());
        }
        if line.ends_with([' ', '\t', '\r']) {
            report(findings, file, index + 1, "space at the end of the line".to_owned());
        }
    }
    if !file.text.is_empty() && !file.text.ends_with('\n') {
        report(findings, file, file.text.lines().count(), "no newline at the end of the file".to_owned());
    }
}

fn machine_names(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    for (index, line) in file.text.lines().enumerate() {
        for name in MACHINE_NAMES.iter().filter(|name| line.contains(**name)) {
            report(findings, file, index + 1, format!("names a place of one machine: `{name}`"));
        }
    }
}

/// Tests in a file that no module declares would never run.
fn all_tests_are_modules(file: &SourceFile, repository: &Repository<'_>, findings: &mut Vec<Finding>) {
    let folder = file.path.trim_end_matches("main.rs");
    let beside = repository.paths.iter().filter_map(|name| name.strip_prefix(folder)?.strip_suffix(".rs"));
    for module in beside.filter(|name| !name.contains('/') && *name != "main") {
        // The whole line must match, so that a declaration in a comment does not count.
        if !file.text.lines().any(|line| line == format!("mod {module};")) {
            report(findings, file, 0, format!("has no `mod {module};`: the tests in it never run"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines on which the rules find something in a file with this path and text.
    fn lines(path: &str, text: &str) -> Vec<usize> {
        let file = SourceFile { path: path.to_owned(), text: text.to_owned() };
        let names = [
            "README.md",
            "docs/guide.md",
            "ort-core/src/ep/abi.rs",
            "ort-core/tests/integration/main.rs",
            "ort-core/tests/integration/dtype.rs",
            "ort-core/tests/integration/support/mod.rs",
        ]
        .map(str::to_owned)
        .to_vec();
        let guide =
            SourceFile { path: "docs/guide.md".to_owned(), text: "# Guide\n\n## Top of it\n".to_owned() };
        let code =
            SourceFile { path: "a.rs".to_owned(), text: "struct Session; fn run_with() {}".to_owned() };
        let records = SourceFile {
            path: "ort-core/src/ops/math/a.rs".to_owned(),
            text: "//! A.\nstatic A: OpSpec = OpSpec { attrs: &[f(\"Alpha\")], ..unary(\"Mish\", 1, f) };\n"
                .to_owned(),
        };
        let files = [guide, code, records];
        let repository = Repository::of(&files, names);
        let mut findings = Vec::new();
        for rule in RULES.iter().filter(|rule| (rule.applies)(&file)) {
            (rule.check)(&file, &repository, &mut findings);
        }
        findings.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn each_rule_finds_what_it_is_for_and_nothing_else() {
        let long = "//! Long.\n".repeat(601);
        let tested =
            format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", "//! A.\n".repeat(600), "    f();\n".repeat(99));
        let words = "word ".repeat(25);
        let wide =
            format!("//! A.\n// {words}x\n/// | {words}|\n/// ```\n/// f({words});\n/// ```\n/// {words}x\n");
        let table: [(&str, &str, &[usize]); 47] = [
            ("ort-core/src/tensor/a.rs", "//! Fine.\n\nfn f() {}\n", &[]),
            ("ort-core/src/tensor/a.rs", "fn f() {}\n", &[1]),
            ("ort-core/src/tensor/a.rs", &long, &[0]),
            ("ort-core/src/tensor/a.rs", &tested, &[]),
            ("ort-core/tests/integration/a.rs", &long, &[]),
            ("ort-core/tests/integration/a.rs", &long.repeat(2), &[0]),
            ("ort-core/src/tensor/a.rs", &wide, &[2, 7]),
            ("ort-core/src/tensor/a.rs", "//! A.\nunsafe fn f() {}\n", &[2, 2]),
            ("ort-core/src/tensor/a.rs", "//! Says unsafe.\nfn f() { g(\"unsafe\") }\n", &[]),
            ("ort-core/src/ep/abi/x.rs", "//! A.\npub(super) unsafe extern \"C\" fn f() {}\n", &[2]),
            (
                "ort-core/src/ep/abi/x.rs",
                "//! A.\n/// F.\n///\n/// # Safety\n///\n/// G.\n#[x]\nunsafe fn f() {}\n",
                &[],
            ),
            ("ort-core/src/ep/abi/x.rs", "//! A.\nstruct S {\n    f: unsafe fn(u8),\n}\n", &[]),
            ("ort-ep-cpu/vector/src/simd/x.rs", "//! A.\nimpl A for B {\n    unsafe fn f() {}\n}\n", &[]),
            ("ort-ep-cpu/vector/src/simd/x.rs", "//! A.\nimpl B {\n    unsafe fn f() {}\n}\n", &[3]),
            (
                "ort-ep-cpu/vector/src/simd/x.rs",
                "//! A.\n/// # Safety\n/// B.\ntrait A {\n    unsafe fn f();\n}\n",
                &[],
            ),
            ("ort-cli/src/main.rs", "//! A.\n", &[0]),
            ("ort-cli/src/main.rs", "//! A.\n#![forbid(unsafe_code)]\n", &[]),
            ("ort-core/src/tensor/a.rs", "//! A.\nfn f() { todo!() }\n", &[2]),
            ("ort-core/src/tensor/a.rs", "//! A.\n#[ignore = \"slow\"]\nfn f() {}\n", &[2]),
            ("ort-core/src/tensor/a.rs", "//! A.\n// todo! is not code here\n", &[]),
            ("a.py", "x = 1 \n\ty\nz", &[1, 2, 3]),
            ("a.py", "open('/home/me/x')\n", &[1]),
            ("README.md", "See `docs/guide.md`, `ep/abi.rs`, [guide](docs/guide.md#top-of-it).\n", &[]),
            ("README.md", "See [guide](docs/guide.md#top).\n", &[1]),
            ("README.md", "# A b\n\nSee [above](#a-b).\n", &[3]),
            (
                "README.md",
                "`Session::run_with`, `run_with()`, `ort run`, `a-b_c`, `Sessions`, `no_such()`\n",
                &[1, 1],
            ),
            ("docs/SUMMARY.md", "- [Guide](guide.md)\n", &[]),
            ("docs/SUMMARY.md", "Nothing.\n", &[0]),
            ("README.md", "See `docs/gone.md`.\n", &[1]),
            ("README.md", "See [x](gone.md) and [y](https://example.com/z.md).\n", &[1]),
            ("docs/guide.md", "See [x](../README.md), [y](../gone.md).\n", &[1]),
            ("docs/guide.md", "See [x](../README.md).\n", &[]),
            ("README.md", "`target/x/y.json`, `ops/<family>/x.rs`, `a b/c.rs`\n", &[]),
            ("Cargo.lock", "source = \"registry\" \n", &[]),
            ("README.md", "", &[]),
            ("ort-core/tests/integration/main.rs", "//! A.\nmod dtype;\n", &[]),
            ("ort-core/tests/integration/main.rs", "//! A.\n// mod dtype;\n", &[0]),
            ("ort-core/src/plan/a.rs", "//! A.\nuse crate::ir::Graph;\nuse crate::{Result, error};\n", &[]),
            ("ort-core/src/plan/a.rs", "//! A.\nuse crate::session::Session;\n", &[2]),
            (
                "ort-core/src/plan/a.rs",
                "//! A.\n#[cfg(test)]\nmod tests {\n    use crate::session::X;\n}\n",
                &[],
            ),
            ("ort-core/src/attic/a.rs", "//! A.\n", &[0]),
            ("ort-ep-cpu/src/a.rs", "//! A.\nfn f(op: &str) -> bool {\n    op == \"Mish\"\n}\n", &[3]),
            ("ort-ep-cpu/src/a.rs", "//! A.\ncpu_kernels![f(\"Mish\")];\nconst A: &str = \"Mish\";\n", &[3]),
            ("ort-ep-cpu/src/a.rs", "//! A.\nconst A: KernelDef = KernelDef { op: \"Mish\", ..B };\n", &[]),
            ("ort-ep-cpu/src/a.rs", "//! A.\n// \"Mish\"\nconst A: &str = \"Alpha\";\n", &[]),
            ("ort-ep-cpu/src/a.rs", "//! A.\n#[cfg(test)]\nmod tests {\n    f(\"Mish\");\n}\n", &[]),
            ("ort-ep-cpu/tests/a.rs", "//! A.\nfn f() { g(\"Mish\") }\n", &[]),
        ];
        for (path, text, expected) in table {
            assert_eq!(lines(path, text), expected, "{path}: {text:.60}");
        }
    }
}
