//! No file imports, through others, itself: import circles among the files of each crate.
//!
//! An import is a path that begins with `crate`, `super`, `self` or a child module; code under
//! `#[cfg(test)]` does not count. A `pub use` is not an import of the file that has it, unless the file
//! uses the name: the importing file depends on where the name is defined.
//!
//! `cargo test -p fsocket-hooktable --test circles -- --nocapture` lists the imports within each circle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Number of files in a circle, for each crate that has one. A number here may only go down.
const IN_CIRCLES: &[(&str, usize)] = &[];

/// A module by its path from the root of its crate: `["epoll", "wait"]`.
type Module = Vec<String>;

/// Identifiers and `::`, other characters each alone; without comments, strings and characters.
fn tokens(text: &str) -> Vec<String> {
    let c: Vec<char> = text.chars().collect();
    let at = |i: usize| c.get(i).copied().unwrap_or('\0');
    let mut out = Vec::new();
    let mut i = 0;
    while i < c.len() {
        if at(i) == '/' && at(i + 1) == '/' {
            while i < c.len() && at(i) != '\n' {
                i += 1;
            }
        } else if at(i) == '/' && at(i + 1) == '*' {
            while i < c.len() && !(at(i) == '*' && at(i + 1) == '/') {
                i += 1;
            }
            i += 2;
        } else if at(i) == 'r' && (at(i + 1) == '"' || at(i + 1) == '#' && at(i + 2) == '"') {
            let hash = at(i + 1) == '#';
            i += if hash { 3 } else { 2 };
            while i < c.len() && !(at(i) == '"' && (!hash || at(i + 1) == '#')) {
                i += 1;
            }
            i += if hash { 2 } else { 1 };
        } else if at(i) == '"' {
            i += 1;
            while i < c.len() && at(i) != '"' {
                i += if at(i) == '\\' { 2 } else { 1 };
            }
            i += 1;
        } else if at(i) == '\'' && at(i + 1) == '\\' {
            i += 3;
            while i < c.len() && at(i) != '\'' {
                i += 1;
            }
            i += 1;
        } else if at(i) == '\'' && at(i + 2) == '\'' {
            i += 3;
        } else if at(i).is_alphanumeric() || at(i) == '_' {
            let start = i;
            while at(i).is_alphanumeric() || at(i) == '_' {
                i += 1;
            }
            out.push(c[start..i].iter().collect());
        } else if at(i) == ':' && at(i + 1) == ':' {
            out.push("::".into());
            i += 2;
        } else {
            if !at(i).is_whitespace() {
                out.push(at(i).to_string());
            }
            i += 1;
        }
    }
    out
}

/// Without what `#[cfg(test)]` stands before; modules in files of their own that are so marked are added to `tests`.
fn without_tests(t: Vec<String>, tests: &mut Vec<String>) -> Vec<String> {
    let mark = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut out: Vec<String> = Vec::new();
    let mut i = 0;
    while i < t.len() {
        if t[i..].len() < mark.len() || t[i..].iter().zip(mark).any(|(a, b)| a != b) {
            out.push(t[i].clone());
            i += 1;
            continue;
        }
        i += mark.len();
        let item = i;
        let mut depth = 0;
        while i < t.len() {
            let word = t[i].as_str();
            i += 1;
            match word {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            if depth == 0 && matches!(word, "}" | ";") {
                break;
            }
        }
        if let Some(m) = t[item..i].iter().position(|w| w == "mod").filter(|_| t[i - 1] == ";") {
            tests.push(t[item + m + 1].clone());
        }
    }
    out
}

/// The paths of a `use` whose tree begins at `i`, each with the name it gives; leaves `i` behind the tree.
fn tree(t: &[String], i: &mut usize, before: &[String], out: &mut Vec<(Vec<String>, String)>) {
    let mut path = before.to_vec();
    while *i < t.len() {
        match t[*i].as_str() {
            "{" => {
                *i += 1;
                while *i < t.len() && t[*i] != "}" {
                    tree(t, i, &path, out);
                    if t[*i] == "," {
                        *i += 1;
                    }
                }
                *i += 1;
                return;
            }
            "as" => {
                out.push((path, t[*i + 1].clone()));
                *i += 2;
                return;
            }
            "," | ";" | "}" => break,
            "::" => *i += 1,
            word => {
                if word != "self" || path.is_empty() {
                    path.push(word.into());
                }
                *i += 1;
            }
        }
    }
    let name = path.last().cloned().unwrap_or_default();
    out.push((path, name));
}

#[derive(Default)]
struct File {
    /// Paths as written, from the file's own module.
    imports: BTreeSet<Vec<String>>,
    /// `pub use`: name, path as written.
    exports: BTreeMap<String, Vec<String>>,
}

fn read(text: &str, children: &BTreeSet<String>, tests: &mut Vec<String>) -> File {
    let t = without_tests(tokens(text), tests);
    let mut file = File::default();
    let mut exported = Vec::new();
    let mut words = BTreeMap::new();
    let mut i = 0;
    while i < t.len() {
        if t[i] == "use" && t.get(i + 1).is_some_and(|n| n != "<" && n != "::") {
            let public =
                i > 0 && (t[i - 1] == "pub" || (t[i - 1] == ")" && t[..i].iter().rev().take(5).any(|w| w == "pub")));
            i += 1;
            let mut paths = Vec::new();
            tree(&t, &mut i, &[], &mut paths);
            match public {
                true => exported.extend(paths),
                false => file.imports.extend(paths.into_iter().map(|(path, _)| path)),
            }
        } else if (matches!(t[i].as_str(), "crate" | "super" | "self") || children.contains(&t[i]))
            && t.get(i + 1).is_some_and(|n| n == "::")
            && (i == 0 || t[i - 1] != "::")
        {
            let mut path = vec![t[i].clone()];
            while t.get(i + 1).is_some_and(|n| n == "::") && t.get(i + 2).is_some() {
                path.push(t[i + 2].clone());
                i += 2;
            }
            file.imports.insert(path);
            i += 1;
        } else {
            *words.entry(t[i].clone()).or_insert(0) += 1;
            i += 1;
        }
    }
    for (path, name) in exported {
        if words.contains_key(&name) || name == "*" {
            file.imports.insert(path.clone());
        }
        file.exports.insert(name, path);
    }
    file
}

/// From where a path starts, and what follows.
fn start(from: &Module, path: &[String], files: &BTreeMap<Module, File>) -> Option<(Module, usize)> {
    let mut module = from.clone();
    let mut i = 0;
    match path.first()?.as_str() {
        "crate" => return Some((Vec::new(), 1)),
        "self" => return Some((module, 1)),
        "super" => {
            while path.get(i).is_some_and(|s| s == "super") {
                module.pop();
                i += 1;
            }
            return Some((module, i));
        }
        child => module.push(child.into()),
    }
    files.contains_key(&module).then_some((module, 1))
}

/// The file that defines what a path names.
fn target(from: &Module, path: &[String], files: &BTreeMap<Module, File>, depth: usize) -> Option<Module> {
    let (mut module, mut i) = start(from, path, files)?;
    while let Some(name) = path.get(i) {
        let mut inner = module.clone();
        inner.push(name.clone());
        if files.contains_key(&inner) {
            module = inner;
            i += 1;
            continue;
        }
        if let Some(there) = files.get(&module).and_then(|f| f.exports.get(name)).filter(|_| depth < 8) {
            return target(&module, there, files, depth + 1).or(Some(module));
        }
        break;
    }
    Some(module)
}

fn sources(dir: &Path, at: &Module, out: &mut BTreeMap<Module, PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a source folder") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let mut module = at.clone();
        if path.is_dir() {
            module.push(stem);
            sources(&path, &module, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            // A program beside a library is a crate of its own, which nothing imports.
            let beside_lib = stem == "main" && dir.join("lib.rs").is_file();
            if !matches!(stem.as_str(), "lib" | "main" | "mod") || beside_lib {
                module.push(stem);
            }
            out.insert(module, path);
        }
    }
}

/// Each file, with the files that it imports.
fn imports(src: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut paths = BTreeMap::new();
    sources(src, &Vec::new(), &mut paths);
    let mut tests = Vec::new();
    let mut files: BTreeMap<Module, File> = BTreeMap::new();
    for (module, path) in &paths {
        let inside = |m: &&Module| m.len() == module.len() + 1 && m.starts_with(module);
        let children = paths.keys().filter(inside).filter_map(|m| m.last().cloned()).collect();
        let text = std::fs::read_to_string(path).expect("a source file");
        let mut own = Vec::new();
        files.insert(module.clone(), read(&text, &children, &mut own));
        tests.extend(own.into_iter().map(|name| [module.as_slice(), &[name]].concat()));
    }
    files.retain(|m, _| !tests.iter().any(|t| m.starts_with(t)));
    let of = |(m, f): (&Module, &File)| {
        let found = f.imports.iter().filter_map(|path| target(m, path, &files, 0));
        (m.clone(), found.filter(|there| there != m && files.contains_key(there)).collect())
    };
    files.iter().map(of).collect()
}

fn reached(from: &Module, edges: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<Module> {
    let mut seen = BTreeSet::new();
    let mut next: Vec<&Module> = edges[from].iter().collect();
    while let Some(m) = next.pop() {
        if seen.insert(m.clone()) {
            next.extend(&edges[m]);
        }
    }
    seen
}

/// The imports between files that reach each other.
fn circles(edges: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<(Module, Module)> {
    let reach: BTreeMap<_, _> = edges.keys().map(|m| (m, reached(m, edges))).collect();
    let all = edges.iter().flat_map(|(m, to)| to.iter().map(move |t| (m.clone(), t.clone())));
    all.filter(|(m, t)| reach[t].contains(m)).collect()
}

#[test]
fn no_file_imports_itself_through_others() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut wrong = Vec::new();
    let crates = std::fs::read_dir(root.join("crates")).expect("the crates").map(|e| e.expect("a crate").path());
    for dir in crates.chain([root.join("bench/host")]) {
        let name = dir.file_name().expect("a name").to_string_lossy().into_owned();
        if !dir.join("src").is_dir() {
            continue;
        }
        let found = circles(&imports(&dir.join("src")));
        for (from, to) in &found {
            println!("{name}: {} -> {}", from.join("::"), to.join("::"));
        }
        let number = found.iter().map(|(from, _)| from).collect::<BTreeSet<_>>().len();
        let limit = IN_CIRCLES.iter().find(|(n, _)| *n == name).map_or(0, |(_, limit)| *limit);
        println!("{name}: {number} files in circles, {} imports", found.len());
        if number > limit {
            wrong.push(format!("{name}: {number} files import each other in circles, {limit} did"));
        } else if number < limit {
            wrong.push(format!("{name}: {number} files are in circles; {limit} is in IN_CIRCLES and can go down"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Imports of every form are seen, tests and comments are not.
#[test]
fn imports_are_seen() {
    let write = |dir: &Path, name: &str, text: &str| std::fs::write(dir.join(name), text).expect("a file");
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("circles");
    std::fs::create_dir_all(dir.join("a")).expect("a folder");
    write(&dir, "lib.rs", "mod a; mod b; mod c; pub use b::B;");
    write(
        &dir,
        "a.rs",
        "mod in_a; use crate::{c, B}; // crate::d\n const S: &str = \"crate::d\"; fn f() { in_a::g() }",
    );
    write(&dir.join("a"), "in_a.rs", "fn g() { super::super::d::f() }");
    write(&dir, "b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::a; }");
    write(&dir, "c.rs", "");
    write(&dir, "d.rs", "fn f<'a>() { crate::a::f() }");
    let found = imports(&dir);
    let of = |m: &[&str]| {
        let module: Module = m.iter().map(|s| s.to_string()).collect();
        found[&module].iter().map(|m| m.join("::")).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(of(&["a"]), "a::in_a b c");
    assert_eq!(of(&["b"]), "");
    assert_eq!(of(&[]), "");
    let circle: BTreeSet<_> = circles(&found).into_iter().map(|(m, _)| m.join("::")).collect();
    assert_eq!(circle.into_iter().collect::<Vec<_>>().join(" "), "a a::in_a d");
}
