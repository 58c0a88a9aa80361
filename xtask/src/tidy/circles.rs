//! Import circles: files of a crate that name each other, directly or through others.
//!
//! Files in a circle can only be understood together. A circle over folders is always an error. One
//! inside a folder is an error unless [`ALLOWED`] has it with a reason.

use std::collections::{BTreeMap, BTreeSet};

use super::modules::{Crate, Edges};
use super::source::{Finding, Repository, SourceFile};

/// The roots of the crates that the rule holds for.
const ROOTS: &[&str] = &[
    "ort-alloc/src/lib.rs",
    "ort-build/src/lib.rs",
    "ort-cli/src/main.rs",
    "ort-core/src/lib.rs",
    "ort-ep-cpu/attention/src/lib.rs",
    "ort-ep-cpu/contrib/src/lib.rs",
    "ort-ep-cpu/conv/src/lib.rs",
    "ort-ep-cpu/depthwise/src/lib.rs",
    "ort-ep-cpu/elementwise/src/lib.rs",
    "ort-ep-cpu/gemm/src/lib.rs",
    "ort-ep-cpu/kernel/src/lib.rs",
    "ort-ep-cpu/linalg/src/lib.rs",
    "ort-ep-cpu/matmul/src/lib.rs",
    "ort-ep-cpu/media/src/lib.rs",
    "ort-ep-cpu/nn/src/lib.rs",
    "ort-ep-cpu/reduce/src/lib.rs",
    "ort-ep-cpu/src/lib.rs",
    "ort-ep-cpu/threads/src/lib.rs",
    "ort-ep-cpu/vector/src/lib.rs",
    "ort-ep-cuda/src/lib.rs",
    "ort-ep-wgpu/src/lib.rs",
    "ort-generate/src/lib.rs",
    "ort-gpu/src/lib.rs",
    "ort-numpy/src/lib.rs",
    "ort-quant/src/lib.rs",
    "ort-report/src/lib.rs",
    "ort-runtime/src/lib.rs",
    "ort-testkit/src/lib.rs",
    "ort-text/src/lib.rs",
    "ort-train/src/lib.rs",
    "xtask/src/main.rs",
];

/// A circle that may stay.
struct Allowed {
    folder: &'static str,
    /// The files, in alphabetical order.
    files: &'static [&'static str],
    /// Why no item can move so that the circle opens.
    #[expect(dead_code, reason = "for the reader of the table")]
    reason: &'static str,
}

const ALLOWED: &[Allowed] = &[
    Allowed {
        folder: "ort-alloc/src",
        files: &["allocator.rs", "arena.rs", "buffer.rs", "host.rs", "recycle.rs"],
        reason: "a buffer owns the block that it returns when dropped, and a block its allocator; \
                 an owner behind a box would cost a heap allocation for each buffer",
    },
    Allowed {
        folder: "ort-core/src/ir",
        files: &[
            "attribute.rs",
            "graph.rs",
            "spec/backward.rs",
            "spec/batch.rs",
            "spec/draft.rs",
            "spec/flow.rs",
            "spec/gradient.rs",
            "spec/infer.rs",
            "spec/mod.rs",
            "spec/node_emitter.rs",
            "spec/registry.rs",
            "spec/typing.rs",
            "spec/view.rs",
        ],
        reason: "a node refers to its operator's record, and the functions in a record take nodes \
                 and emit others",
    },
    Allowed {
        folder: "ort-ep-cpu/gemm/src/kernels",
        files: &[
            "avx2.rs",
            "avx512.rs",
            "avx512_bf16.rs",
            "mod.rs",
            "neon.rs",
            "pack.rs",
            "pairs.rs",
            "scalar.rs",
        ],
        reason: "a kernel is a table of the functions of an instruction set; the choice of a table \
                 names all of them, and packing asks for the chosen one",
    },
    Allowed {
        folder: "ort-ep-cpu/gemm/src/kernels",
        files: &[
            "bytes/avx2.rs",
            "bytes/avx512.rs",
            "bytes/mod.rs",
            "bytes/neon.rs",
            "bytes/portable.rs",
            "bytes/tile.rs",
        ],
        reason: "as above, for tables of 8-bit kernels",
    },
    Allowed {
        folder: "ort-ep-cpu/vector/src/simd",
        files: &["avx2.rs", "avx512.rs", "bytes.rs", "mod.rs", "neon.rs", "portable.rs"],
        reason: "the dispatch names the vectors of each instruction set, which implement its trait",
    },
];

pub(super) fn applies(file: &SourceFile) -> bool {
    ROOTS.contains(&file.path.as_str())
}

/// Finds the circles of the crate with this root, and rows of [`ALLOWED`] that match none.
pub(super) fn check(root: &SourceFile, repository: &Repository<'_>, findings: &mut Vec<Finding>) {
    let edges = Crate::of(root, repository.files).edges();
    let circles = circles(&edges);
    let mut report = |path: &str, what| findings.push(Finding { path: path.to_owned(), line: 0, what });
    for circle in &circles {
        let first = circle.first().map_or("", String::as_str);
        match folders(root, circle).len() {
            1 if ALLOWED.iter().any(|allowed| allowed.is(circle)) => {}
            1 => report(first, format!("an import circle:{}", listed(circle, &edges))),
            _ => report(first, format!("an import circle over folders:{}", listed(circle, &edges))),
        }
    }
    let (source, _) = root.path.rsplit_once('/').unwrap_or_default();
    // An allowed circle that does not exist would hide one that comes later.
    for allowed in ALLOWED.iter().filter(|allowed| allowed.folder.starts_with(source)) {
        if !circles.iter().any(|circle| allowed.is(circle)) {
            report(allowed.folder, "its allowed circle is gone: remove it from ALLOWED".to_owned());
        }
    }
}

impl Allowed {
    fn is(&self, circle: &BTreeSet<String>) -> bool {
        let files = self.files.iter().map(|file| format!("{}/{file}", self.folder));
        // Both sides are in alphabetical order: the table by its rule, the set by its type.
        files.eq(circle.iter().cloned())
    }
}

/// The folders of the crate's `src` that the files are in; files of `src` itself are in one folder.
fn folders<'a>(root: &SourceFile, circle: &'a BTreeSet<String>) -> BTreeSet<&'a str> {
    let source = root.path.rfind('/').map_or(0, |at| at + 1);
    let folder = |file: &'a String| file.get(source..)?.split_once('/').map(|(folder, _)| folder);
    circle.iter().map(|file| folder(file).unwrap_or("")).collect()
}

/// The edges inside a circle, one a line.
fn listed(circle: &BTreeSet<String>, edges: &Edges) -> String {
    let mut lines = String::new();
    for from in circle {
        for (to, paths) in edges.get(from).into_iter().flatten().filter(|(to, _)| circle.contains(*to)) {
            let paths: Vec<_> = paths.iter().map(String::as_str).collect();
            lines.push_str(&format!("\n    {from} -> {to}: {}", paths.join(", ")));
        }
    }
    lines
}

/// The strongly connected components of more than one file (Tarjan).
fn circles(edges: &Edges) -> Vec<BTreeSet<String>> {
    let mut search = Search::default();
    for file in edges.keys() {
        search.visit(file, edges);
    }
    search.circles
}

#[derive(Default)]
struct Search<'a> {
    /// By file, the number of its visit, and the lowest that it reaches on the stack.
    visits: BTreeMap<&'a str, (usize, usize)>,
    stack: Vec<&'a str>,
    circles: Vec<BTreeSet<String>>,
}

impl<'a> Search<'a> {
    /// Visits a file and all that it reaches; returns the lowest visit that it reaches.
    fn visit(&mut self, file: &'a str, edges: &'a Edges) -> usize {
        if let Some((number, lowest)) = self.visits.get(file) {
            // A file that has left the stack belongs to a component of its own.
            return if self.stack.contains(&file) { *lowest.min(number) } else { usize::MAX };
        }
        let number = self.visits.len();
        self.visits.insert(file, (number, number));
        let depth = self.stack.len();
        self.stack.push(file);
        let mut lowest = number;
        for target in edges.get(file).into_iter().flat_map(BTreeMap::keys) {
            lowest = lowest.min(self.visit(target, edges));
        }
        self.visits.insert(file, (number, lowest));
        // A file that reaches no earlier one on the stack is the root of its component.
        if lowest == number {
            let component: BTreeSet<_> = self.stack.drain(depth..).map(str::to_owned).collect();
            // A file alone is no circle, even if it names itself.
            self.circles.extend((component.len() > 1).then_some(component));
        }
        lowest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(edges: &[(&str, &[&str])]) -> Vec<Vec<String>> {
        let targets =
            |targets: &[&str]| targets.iter().map(|to| ((*to).to_owned(), BTreeSet::new())).collect();
        let edges: Edges = edges.iter().map(|(from, to)| ((*from).to_owned(), targets(to))).collect();
        circles(&edges).into_iter().map(|circle| circle.into_iter().collect()).collect()
    }

    #[test]
    fn circles_are_the_strongly_connected_components() {
        assert!(found(&[("a", &["b", "c"]), ("b", &["c"])]).is_empty());
        assert_eq!(found(&[("a", &["b"]), ("b", &["c"]), ("c", &["a", "d"]), ("d", &[])]), [["a", "b", "c"]]);
        // Two circles with one edge between them.
        let two: [(&str, &[&str]); 4] = [("a", &["b"]), ("b", &["a", "c"]), ("c", &["d"]), ("d", &["c"])];
        assert_eq!(found(&two), [["c", "d"], ["a", "b"]]);
        // Two circles through one file are one.
        let joined: [(&str, &[&str]); 3] = [("a", &["b", "c"]), ("b", &["a"]), ("c", &["a"])];
        assert_eq!(found(&joined), [["a", "b", "c"]]);
    }

    /// A crate with two files that import each other, in these places.
    fn findings(first: &str, second: &str) -> Vec<String> {
        let name = |path: &str| path.trim_end_matches(".rs").replace('/', "::");
        let file = |path: &str, text: String| SourceFile { path: format!("ort-train/src/{path}"), text };
        let files = [
            file("lib.rs", "mod x;\nmod y;\n".to_owned()),
            file("x/mod.rs", "mod a;\nmod b;\n".to_owned()),
            file("y/mod.rs", "mod a;\nmod b;\n".to_owned()),
            file(first, format!("use crate::{}::Item;\nstruct Item;\n", name(second))),
            file(second, format!("use crate::{}::Item;\nstruct Item;\n", name(first))),
        ];
        let repository = Repository { files: &files, ..Repository::default() };
        let mut findings = Vec::new();
        check(&files[0], &repository, &mut findings);
        let text = |finding: Finding| finding.what.lines().next().unwrap_or_default().to_owned();
        findings.into_iter().filter(|finding| finding.line == 0).map(text).collect()
    }

    #[test]
    fn circles_over_folders_are_told_apart() {
        let circles = |first, second| {
            let mut all = findings(first, second);
            all.retain(|what| what.starts_with("an import circle"));
            all
        };
        assert_eq!(circles("x/a.rs", "x/b.rs"), ["an import circle:"]);
        assert_eq!(circles("x/a.rs", "y/b.rs"), ["an import circle over folders:"]);
    }
}
