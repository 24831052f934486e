//! Every text that the commands, the monitor, the agent and the library print, in one list.
//!
//! `FASTSOCKET_LIST=1 cargo test -p fsocket-hooktable --test messages -- --nocapture` prints it, for somebody who reads all
//! texts once. The test only looks for words that say nothing to a user.

use std::path::{Path, PathBuf};

/// Crates whose texts users see, each with the files to leave out.
const CRATES: &[(&str, &[&str])] = &[
    ("agent", &[]),
    ("bpf", &[]),
    ("cli", &[]),
    ("client", &[]),
    ("metrics", &[]),
    ("monitor", &[]),
    ("rdma", &[]),
    ("tune", &[]),
    // (The table's texts are those of docs/hooks.md; the other files have assembly.)
    ("preload", &["table.rs", "hooks", "memory.rs", "init.rs", "musl.rs", "old_glibc.rs"]),
];

/// Words that only the authors understand.
const PRIVATE: &[&str] =
    &["us", "ours", "our", "we", "nobody", "somebody", "anybody", "go over", "goes over", "gone over", "the kernel's:"];

fn sources(dir: &Path, without: &[&str], out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a folder of sources").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        match path.is_dir() {
            _ if without.contains(&name.as_str()) || name == "tests" || name == "tests.rs" => {}
            true => sources(&path, without, out),
            false if name.ends_with(".rs") => out.push(path),
            false => {}
        }
    }
}

/// String literals of at least three words, with their lines. Raw strings and what follows `#[cfg(test)]` are left out.
fn texts(source: &str) -> Vec<(usize, String)> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let (mut found, mut chars, mut line) = (Vec::new(), code.chars().peekable(), 1);
    while let Some(c) = chars.next() {
        match c {
            '\n' => line += 1,
            '/' if chars.peek() == Some(&'/') => while chars.next_if(|c| *c != '\n').is_some() {},
            // (A quote as a character, and not a lifetime.)
            '\'' if chars.peek() == Some(&'"') => drop(chars.next()),
            '"' => {
                let (mut text, begin) = (String::new(), line);
                while let Some(c) = chars.next().filter(|c| *c != '"') {
                    match (c, chars.peek().copied()) {
                        ('\\', Some('\n')) => {
                            while chars
                                .next_if(|c| c.is_whitespace())
                                .inspect(|c| line += usize::from(*c == '\n'))
                                .is_some()
                            {}
                        }
                        ('\\', Some(next)) => {
                            chars.next();
                            text.push(if next == 'n' { '\n' } else { next });
                        }
                        _ => {
                            line += usize::from(c == '\n');
                            text.push(c);
                        }
                    }
                }
                let is_prose = text.split_whitespace().filter(|w| w.chars().all(char::is_alphabetic)).count() > 2;
                found.extend(is_prose.then_some((begin, text)));
            }
            _ => {}
        }
    }
    found
}

fn private(text: &str) -> Option<&'static &'static str> {
    let padded = format!(" {} ", text.replace([',', '.', ';', '(', ')', '\n'], " "));
    PRIVATE.iter().find(|word| padded.contains(&format!(" {word} ")))
}

#[test]
fn messages_have_no_private_words() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let list = std::env::var_os("FASTSOCKET_LIST").is_some();
    let (mut wrong, mut all) = (Vec::new(), 0);
    for (name, without) in CRATES {
        let mut files = Vec::new();
        sources(&crates.join(name).join("src"), without, &mut files);
        files.sort();
        for file in files {
            let source = std::fs::read_to_string(&file).expect("a source file");
            let place = file.strip_prefix(&crates).expect("below the crates").display().to_string();
            for (line, text) in texts(&source) {
                all += 1;
                if list {
                    println!("{place}:{line}: {}", text.replace('\n', " / "));
                }
                wrong.extend(private(&text).map(|word| format!("{place}:{line}: '{word}': {text}")));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(all > 300, "{all} texts");
}

#[test]
fn texts_are_found() {
    let source = "let a = '\"'; // \"not this one here\"\nb(\"two words\", \"a text of ours, \\\n   here\");\n#[cfg(test)]\n\"no more of them\"";
    assert_eq!(texts(source), [(2, "a text of ours, here".to_owned())]);
    assert_eq!(private("a text of ours, here"), Some(&"ours"));
    assert_eq!(private("the hours of a bus"), None);
}
