//! The module tree of a crate, and which file each path in it leads to.
//!
//! A path is followed through re-exports, private imports and globs to the file that defines the
//! item. Only paths count: a method call names no file. Unit tests are left out.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::code::without_comments_and_literals;
use super::source::SourceFile;

/// A `use` of one name, or of all names of a module.
#[derive(Default)]
struct Import {
    path: Vec<String>,
    /// The name in this module; `*` for a glob.
    name: String,
    is_public: bool,
}

/// What a file declares and names.
#[derive(Default)]
struct Module {
    file: String,
    parent: Option<usize>,
    children: HashMap<String, usize>,
    /// Child modules that the file declares with `mod name;`.
    declared: Vec<String>,
    /// Items at the top level, by name.
    items: HashSet<String>,
    macros: HashSet<String>,
    /// Macros with `#[macro_export]`, which are items of the crate's root.
    exported: HashSet<String>,
    imports: Vec<Import>,
    paths: Vec<Vec<String>>,
    /// Identifiers outside imports that may name an item, and those before `!`.
    words: HashSet<String>,
    calls: HashSet<String>,
}

/// Where a name leads: to a module, or to an item of a module.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Module(usize),
    Item(usize),
}

/// The modules of a crate; the root is the first.
pub(super) struct Crate {
    modules: Vec<Module>,
    /// The module of each exported macro.
    exported: HashMap<String, usize>,
}

/// For each file, the files it names and the paths by which it does.
pub(super) type Edges = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

impl Crate {
    /// Reads the modules that the root file declares, directly or not.
    pub(super) fn of(root: &SourceFile, files: &[SourceFile]) -> Crate {
        let texts = files.iter().map(|file| (file.path.as_str(), file.text.as_str())).collect();
        let mut modules = Vec::new();
        load(&root.path, None, &texts, &mut modules);
        let of_module = |(at, module): (usize, &Module)| {
            module.exported.iter().map(|name| (name.clone(), at)).collect::<Vec<_>>()
        };
        let exported = modules.iter().enumerate().flat_map(of_module).collect();
        Crate { modules, exported }
    }

    /// Returns which file names which.
    pub(super) fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (at, module) in self.modules.iter().enumerate() {
            for (target, path) in self.named(at) {
                // A path that ends at a module uses none of its items.
                let Target::Item(target) = target else { continue };
                if target != at {
                    let to = self.modules[target].file.clone();
                    edges.entry(module.file.clone()).or_default().entry(to).or_default().insert(path);
                }
            }
        }
        edges
    }

    /// Everything that a module names, with the path.
    fn named(&self, at: usize) -> Vec<(Target, String)> {
        let module = &self.modules[at];
        let mut named = Vec::new();
        let mut add = |targets: Vec<Target>, path: String| {
            named.extend(targets.into_iter().map(|target| (target, path.clone())));
        };
        for import in &module.imports {
            if import.name == "*" {
                for (targets, path) in self.used_of_glob(at, import) {
                    add(targets, path);
                }
            } else if !import.is_public || module.words.contains(&import.name) {
                // A name that is only re-exported makes no edge: who uses it has one to its file.
                add(self.follow(at, &import.path, &mut Vec::new()), import.path.join("::"));
            }
        }
        for path in &module.paths {
            add(self.follow(at, path, &mut Vec::new()), path.join("::"));
        }
        // `macro_rules` has textual scope: a module below sees it without an import.
        for name in module.calls.iter().filter(|name| !module.names(name)) {
            add(self.macro_in_scope(at, name).into_iter().collect(), format!("{name}!"));
        }
        named
    }

    /// What a module uses of those that it imports by a glob.
    fn used_of_glob(&self, at: usize, glob: &Import) -> Vec<(Vec<Target>, String)> {
        let module = &self.modules[at];
        let mut used = Vec::new();
        for target in self.follow(at, &glob.path, &mut Vec::new()) {
            // `use Enum::*` leads to the enum, and its variants are in the same file.
            let Target::Module(from) = target else {
                used.push((vec![target], glob.path.join("::")));
                continue;
            };
            // In Rust, items and named imports of a module shadow its globs.
            for word in module.words.iter().filter(|word| !module.names(word)) {
                used.extend(self.look_up(from, word, &mut Vec::new()).map(|found| (found, word.clone())));
            }
        }
        used
    }

    /// Returns the nearest module above that defines a macro before the `mod` of this one.
    fn macro_in_scope(&self, at: usize, name: &str) -> Option<Target> {
        let mut above = self.modules[at].parent;
        while let Some(parent) = above {
            if self.modules[parent].macros.contains(name) {
                return Some(Target::Item(parent));
            }
            above = self.modules[parent].parent;
        }
        None
    }

    /// Returns where a path of module `at` leads; nowhere if that is in another crate. `pending`
    /// holds the names being looked up, as re-exports may go round.
    fn follow(&self, at: usize, path: &[String], pending: &mut Vec<(usize, String)>) -> Vec<Target> {
        let (mut module, mut rest) = match path.split_first() {
            Some((first, others)) if first == "crate" => (0, others),
            _ => (at, path),
        };
        while let Some((first, others)) = rest.split_first().filter(|(name, _)| is_relative(name)) {
            if first == "super" {
                let Some(parent) = self.modules[module].parent else { return Vec::new() };
                module = parent;
            }
            rest = others;
        }
        // A first name that the module does not have is that of another crate.
        let is_certain = rest.len() < path.len();
        let mut targets = vec![Target::Module(module)];
        for (index, name) in rest.iter().enumerate() {
            let mut next = Vec::new();
            for target in targets {
                match target {
                    // What follows an item, such as a variant or an associated function, counts as
                    // part of its file.
                    Target::Item(_) => next.push(target),
                    Target::Module(inner) => match self.look_up(inner, name, pending) {
                        Some(found) => next.extend(found),
                        // The module exists but does not show the name, which a macro may
                        // generate. The path counts as a use of the module's file.
                        None if index > 0 || is_certain => next.push(Target::Item(inner)),
                        None => {}
                    },
                }
            }
            targets = next;
        }
        targets
    }

    /// Returns what a name stands for in a module, in each namespace: nothing if the module imports
    /// it from another crate, and `None` if it has no such name.
    fn look_up(&self, at: usize, name: &str, pending: &mut Vec<(usize, String)>) -> Option<Vec<Target>> {
        // The name is already being looked up: a circle of re-exports adds nothing.
        if pending.iter().any(|(module, other)| *module == at && other == name) {
            return None;
        }
        pending.push((at, name.to_owned()));
        let module = &self.modules[at];
        let mut found = Vec::new();
        // A function, a module and a macro may share a name, because they are in different
        // namespaces.
        found.extend(module.items.contains(name).then_some(Target::Item(at)));
        let exported = self.exported.get(name).filter(|_| at == 0);
        found.extend(exported.map(|module| Target::Item(*module)));
        found.extend(module.children.get(name).map(|child| Target::Module(*child)));
        let mut has_name = !found.is_empty();
        for import in module.imports.iter().filter(|import| import.name == name) {
            has_name = true;
            found.extend(self.follow(at, &import.path, pending));
        }
        // As in Rust, globs count only if the module has no such name of its own.
        if !has_name {
            for glob in module.imports.iter().filter(|import| import.name == "*") {
                for target in self.follow(at, &glob.path, pending) {
                    let Target::Module(from) = target else { continue };
                    let inner = self.look_up(from, name, pending);
                    has_name |= inner.is_some();
                    found.extend(inner.into_iter().flatten());
                }
            }
        }
        pending.pop();
        has_name.then_some(found)
    }
}

impl Module {
    /// Whether the file itself defines or imports the name.
    fn names(&self, name: &str) -> bool {
        self.items.contains(name) || self.imports.iter().any(|import| import.name == name)
    }
}

fn is_relative(name: &str) -> bool {
    name == "self" || name == "super"
}

/// Reads a file and the modules below it; returns its position.
fn load(
    path: &str,
    parent: Option<usize>,
    texts: &HashMap<&str, &str>,
    modules: &mut Vec<Module>,
) -> Option<usize> {
    let text = texts.get(path)?;
    let at = modules.len();
    modules.push(Module { file: path.to_owned(), parent, ..parsed(text) });
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    // The children of `a/mod.rs` are in `a`, and so are those of `a.rs`.
    let below = match name {
        "lib.rs" | "main.rs" | "mod.rs" => folder,
        _ => path.trim_end_matches(".rs"),
    };
    for child in modules[at].declared.clone() {
        let places = [format!("{below}/{child}.rs"), format!("{below}/{child}/mod.rs")];
        if let Some(index) = places.iter().find_map(|place| load(place, Some(at), texts, modules)) {
            modules[at].children.insert(child, index);
        }
    }
    Some(at)
}

/// What a file declares and names.
fn parsed(text: &str) -> Module {
    let code = without_comments_and_literals(text);
    let mut reader =
        Reader { tokens: tokens(&code), at: 0, depth: 0, inline: Vec::new(), module: Module::default() };
    while reader.at < reader.tokens.len() {
        reader.step();
    }
    reader.module
}

/// Identifiers, `::`, and other characters one by one.
fn tokens(code: &str) -> Vec<&str> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match first {
            ':' if rest.starts_with("::") => 2,
            _ if is_part(first) => rest.find(|c| !is_part(c)).unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let (token, others) = rest.split_at(length);
        tokens.push(token);
        rest = others.trim_start();
    }
    tokens
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Reads the tokens of a file.
struct Reader<'a> {
    tokens: Vec<&'a str>,
    at: usize,
    /// The braces that are open.
    depth: usize,
    /// The depths at which inline modules begin.
    inline: Vec<usize>,
    module: Module,
}

impl<'a> Reader<'a> {
    fn ahead(&self, by: usize) -> &'a str {
        self.tokens.get(self.at + by).copied().unwrap_or_default()
    }

    fn before(&self) -> &'a str {
        self.at.checked_sub(1).and_then(|at| self.tokens.get(at)).copied().unwrap_or_default()
    }

    /// Reads one token, or the import, declaration, path or test item that it begins.
    fn step(&mut self) {
        match self.ahead(0) {
            "#" if self.is_test_attribute() => return self.skip_item(),
            // `use<'a>` is a bound that lists captured lifetimes.
            "use" if self.ahead(1) != "<" => {
                // `pub(crate) use` has a parenthesis before the keyword.
                let is_public = matches!(self.before(), "pub" | ")");
                self.at += 1;
                return self.import(&[], is_public);
            }
            "mod" if self.ahead(2) == ";" => {
                let name = self.ahead(1).to_owned();
                self.module.declared.push(name);
                self.at += 3;
                return;
            }
            "macro_rules" => return self.define_macro(),
            "{" => self.depth += 1,
            "}" => {
                self.depth = self.depth.saturating_sub(1);
                let depth = self.depth;
                self.inline.pop_if(|begin| *begin == depth);
            }
            "struct" | "enum" | "trait" | "type" | "fn" | "const" | "static" | "mod" | "union"
                // `&'static T` and `*const T` define nothing.
                if self.depth == 0 && is_name(self.ahead(1)) && !matches!(self.before(), "'" | "*") =>
            {
                let name = self.ahead(1).to_owned();
                self.module.items.insert(name);
                self.inline.extend((self.ahead(0) == "mod").then_some(self.depth));
            }
            token if is_name(token) => return self.path(),
            _ => {}
        }
        self.at += 1;
    }

    /// Whether the next tokens are `#[cfg(test)]` or `#[cfg(all(test, ..))]`.
    fn is_test_attribute(&self) -> bool {
        let begins = |tokens: &[&str]| tokens.iter().enumerate().all(|(by, token)| self.ahead(by) == *token);
        begins(&["#", "[", "cfg", "(", "test"]) || begins(&["#", "[", "cfg", "(", "all", "(", "test"])
    }

    /// Skips attributes, and what they apply to: to a `;` or `,`, or the end of a block.
    fn skip_item(&mut self) {
        let mut open = 0usize;
        let mut in_attribute = false;
        while self.at < self.tokens.len() {
            let token = self.ahead(0);
            // The `]` of an attribute closes a bracket, but does not end the item.
            in_attribute |= token == "#" && open == 0;
            match token {
                "(" | "[" | "{" => open += 1,
                // The end of what encloses the item.
                ")" | "]" | "}" if open == 0 => return,
                ")" | "]" | "}" => open -= 1,
                _ => {}
            }
            self.at += 1;
            let is_end = matches!(token, "}" | ";" | ",") && open == 0;
            if is_end && !in_attribute {
                return;
            }
            in_attribute &= !(token == "]" && open == 0);
        }
    }

    fn define_macro(&mut self) {
        let name = self.ahead(2).to_owned();
        // Attributes stand between the end of the previous item and the macro.
        let attributes =
            self.tokens[..self.at].iter().rev().take_while(|token| !matches!(**token, ";" | "}"));
        if attributes.clone().any(|token| *token == "macro_export") {
            self.module.exported.insert(name.clone());
        }
        self.module.macros.insert(name.clone());
        self.module.items.insert(name);
        self.at += 3;
    }

    /// Reads the tree of a `use` after `prefix`.
    fn import(&mut self, prefix: &[String], is_public: bool) {
        let mut path = prefix.to_vec();
        while self.at < self.tokens.len() {
            let token = self.ahead(0).to_owned();
            self.at += 1;
            match token.as_str() {
                "{" => {
                    // A nested list: each branch continues the path up to here.
                    while self.at < self.tokens.len() && self.ahead(0) != "}" {
                        self.import(&path, is_public);
                        self.at += usize::from(self.ahead(0) == ",");
                    }
                    self.at += 1;
                    return;
                }
                "*" => return self.push_import(path, token, is_public),
                "::" => continue,
                // `a::{self}` imports `a`.
                "self" if !path.is_empty() => {}
                _ => path.push(token),
            }
            if self.ahead(0) == "::" {
                continue;
            }
            let mut name = path.last().cloned().unwrap_or_default();
            if self.ahead(0) == "as" {
                name = self.ahead(1).to_owned();
                self.at += 2;
            }
            return self.push_import(path, name, is_public);
        }
    }

    fn push_import(&mut self, path: Vec<String>, name: String, is_public: bool) {
        let path = self.in_file(path);
        self.module.imports.push(Import { path, name, is_public });
    }

    /// Rewrites a path of an inline module to one of the file.
    fn in_file(&self, path: Vec<String>) -> Vec<String> {
        let supers = path.iter().take_while(|name| *name == "super").count().min(self.inline.len());
        let mut in_file = path;
        in_file.iter_mut().take(supers).for_each(|name| "self".clone_into(name));
        in_file
    }

    /// Reads a name, or a path of several.
    fn path(&mut self) {
        let first = self.ahead(0).to_owned();
        // A field or a method is no name of the module.
        let is_member = matches!(self.before(), "." | "'");
        let mut path = vec![first.clone()];
        let continues = self.before() == "::";
        while self.ahead(1) == "::" && is_name(self.ahead(2)) {
            self.at += 2;
            path.push(self.ahead(0).to_owned());
        }
        if self.ahead(1) == "!" {
            self.module.calls.extend((path.len() == 1).then(|| first.clone()));
        }
        self.at += 1;
        // A name in lower case that is not called is a variable.
        let is_item =
            first.starts_with(char::is_uppercase) || path.len() > 1 || matches!(self.ahead(0), "(" | "::");
        if is_item && !is_member && !continues {
            self.module.words.insert(first);
        }
        if path.len() > 1 && !continues {
            let path = self.in_file(path);
            self.module.paths.push(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The edges of a crate, as `from > to: path`.
    fn edges(files: &[(&str, &str)]) -> Vec<String> {
        let file = |(path, text): &(&str, &str)| SourceFile {
            path: format!("a/src/{path}"),
            text: (*text).to_owned(),
        };
        let files: Vec<_> = files.iter().map(file).collect();
        let edges = Crate::of(&files[0], &files).edges();
        let line = |from: &str, to: &str, path: &String| {
            let short = |file: &str| file.trim_start_matches("a/src/").trim_end_matches(".rs").to_owned();
            format!("{} > {}: {path}", short(from), short(to))
        };
        let of_file = |(from, targets): (&String, &BTreeMap<String, BTreeSet<String>>)| {
            let of_target = |(to, paths): (&String, &BTreeSet<String>)| {
                paths.iter().map(|path| line(from, to, path)).collect::<Vec<_>>()
            };
            targets.iter().flat_map(of_target).collect::<Vec<_>>()
        };
        edges.iter().flat_map(of_file).collect()
    }

    #[test]
    fn paths_lead_to_the_file_that_defines_the_item() {
        let root = (
            "lib.rs",
            "mod a;\nmod b;\npub use a::{Deep, inner as other};\n#[macro_export] macro_rules! fail { () => {} }",
        );
        let a = ("a/mod.rs", "mod deep;\npub use deep::Deep;\npub fn inner() { deep::run() }\nuse std::fmt;");
        let deep = ("a/deep.rs", "pub struct Deep;\npub fn run() {}\n");
        let table: [(&str, &[&str]); 13] = [
            ("use crate::Deep;", &["b > a/deep: crate::Deep"]),
            ("use crate::a::{self, Deep as D};", &["b > a/deep: crate::a::Deep"]),
            ("use crate::a;\nfn f() { a::inner() }", &["b > a/mod: a::inner"]),
            ("fn f() { crate::other() }", &["b > a/mod: crate::other"]),
            ("fn f(deep: super::Deep) {}", &["b > a/deep: super::Deep"]),
            ("use super::a::*;\nfn f(deep: Deep) {}", &["b > a/deep: Deep"]),
            ("use crate::a::fmt;\nfn f() -> fmt::Result {}", &[]),
            ("pub use crate::a::Deep;", &[]),
            ("pub use crate::a::Deep;\nfn f(deep: Deep) {}", &["b > a/deep: crate::a::Deep"]),
            ("fn f() { fail!() }", &["b > lib: fail!"]),
            ("mod x {\n    use super::super::Deep;\n}", &["b > a/deep: self::super::Deep"]),
            ("// crate::a::inner()\nfn f() { \"crate::a::inner\" }", &[]),
            ("#[cfg(test)]\nmod tests {\n    use crate::Deep;\n}\n#[cfg(test)]\nuse crate::a::inner;", &[]),
        ];
        for (text, expected) in table {
            let found = edges(&[root, a, deep, ("b.rs", text)]);
            let found: Vec<_> = found.iter().filter(|edge| edge.starts_with("b ")).collect();
            assert_eq!(found, expected, "{text}");
        }
        assert_eq!(edges(&[root, a, deep]), ["a/mod > a/deep: deep::run"]);
    }
}
