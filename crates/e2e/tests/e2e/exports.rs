//! The library must export exactly the functions of the table of hooks.

use std::collections::BTreeSet;
use std::process::Command;

#[test]
fn exported_symbols_are_the_table_of_hooks() {
    let nm = fsocket_testkit::need!("nm");
    let library = fsocket_testkit::artifacts::library();
    let out = Command::new(nm).args(["-D", "--defined-only", "--format=posix"]).arg(&library).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    // In the output of nm, a version may follow the name after an @.
    let name = |line: &str| line.split([' ', '@']).next().unwrap_or_default().to_owned();
    let exported: BTreeSet<String> = text.lines().map(name).collect();
    let table: BTreeSet<String> = fsocket_hooktable::hooks().map(|h| h.name.to_owned()).collect();
    let leaked: Vec<_> = exported.difference(&table).collect();
    let missing: Vec<_> = table.difference(&exported).collect();
    assert!(
        leaked.is_empty() && missing.is_empty(),
        "{}: exported but not in the table: {leaked:?}; in the table but not exported: {missing:?}",
        library.display()
    );
}

/// Between distant CPUs, a send takes as long as its stores. Saving a single register cost 5 %,
/// which no test of behaviour can see (docs/performance.md).
#[cfg(target_arch = "x86_64")]
#[test]
fn small_sends_save_no_register() {
    if fsocket_testkit::artifacts::dir().ends_with("quick") {
        return eprintln!("of a release build alone (make test-all): less optimised code saves registers");
    }
    let objdump = fsocket_testkit::need!("objdump");
    for call in ["send", "write"] {
        let out = Command::new(&objdump)
            .args(["-d", "--no-show-raw-insn", &format!("--disassemble={call}")])
            .arg(fsocket_testkit::artifacts::library())
            .output()
            .unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(text.contains(&format!("<{call}>:")) && text.contains("ret"), "{call} not found in: {text}");
        assert!(!text.contains("push") && !text.contains("%rsp"), "{call} uses the stack: {text}");
    }
}

/// The newest version of glibc (2.x) whose symbols the files need. The library must also load into
/// programs of older containers. Programs that are linked on glibc 2.34 or later need that version
/// for their start-up code (docs/limits.md).
#[test]
fn symbols_are_of_old_glibc() {
    use fsocket_testkit::artifacts;
    let objdump = fsocket_testkit::need!("objdump");
    for (file, newest) in [(artifacts::library(), 28), (artifacts::monitor(), 34), (artifacts::cli(), 34)] {
        let out = Command::new(&objdump).arg("-T").arg(&file).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let number = |line: &str| {
            let (_, version) = line.split_once("GLIBC_2.")?;
            version.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok()
        };
        let needed = || text.lines().filter(|l| l.contains("*UND*"));
        assert!(needed().filter_map(number).count() > 10, "{}: {text}", file.display());
        let newer: Vec<_> = needed().filter(|l| number(l).is_some_and(|n| n > newest)).collect();
        assert!(newer.is_empty(), "{}: {newer:#?}", file.display());
    }
}

/// A fork copies no page tables of program code, and at a page fault the kernel maps 64 KiB of
/// code. So the functions that a child needs for one connection must be in one such stretch
/// (crates/preload/layout.ld). The names in that file must still match functions.
#[test]
fn code_of_forked_children_lies_in_one_stretch() {
    let readelf = fsocket_testkit::need!("readelf");
    let library = fsocket_testkit::artifacts::library();
    let out = Command::new(&readelf).args(["-SW"]).arg(&library).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let section = |name: &str| {
        let mut words = text.lines().find_map(|l| l.split_once(&format!(" {name} ")))?.1.split_whitespace().skip(1);
        let mut number = || usize::from_str_radix(words.next()?, 16).ok();
        let (address, _offset, size) = (number()?, number()?, number()?);
        Some((address, address + size))
    };
    let (code, plt) = (section(".text.fsocket").expect(&text), section(".plt").expect(&text));
    assert!(code.0 % 0x10000 == 0 && code.0 < plt.0 && plt.1 <= code.0 + 0x10000, "{code:x?} and .plt {plt:x?}");
    assert!(code.1 - code.0 > 0x8000, "{code:x?}: names in layout.ld match nothing");
}

/// Whether the linker would match `name` with `pattern`. The only wildcard supported here is `*`.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let mut last = "";
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
        last = part;
    }
    rest.is_empty() || pattern.ends_with('*') || !last.is_empty() && name.ends_with(last)
}

/// layout.ld names functions by their mangled names. If a function were renamed, moved or inlined,
/// it would silently get another place, and page faults would make forks slower.
#[test]
fn each_name_in_the_layout_matches_a_function() {
    if fsocket_testkit::artifacts::dir().ends_with("quick") {
        return eprintln!("of a release build alone (make test-all): less optimised code inlines other functions");
    }
    let readelf = fsocket_testkit::need!("readelf");
    let library = fsocket_testkit::artifacts::library();
    let out = Command::new(&readelf).args(["-SsW"]).arg(&library).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let hex = |word: &str| usize::from_str_radix(word, 16).ok();
    let section = |name: &str| {
        let mut words = text.lines().find_map(|l| l.split_once(&format!(" {name} ")))?.1.split_whitespace();
        let (address, size) = (hex(words.nth(1)?)?, hex(words.nth(1)?)?);
        Some(address..address + size)
    };
    let here = [section(".text.fsocket").expect(&text), section(".data.fsocket").expect(&text)];
    // The columns are: number, address, size, type, binding, visibility, section, name.
    let symbol = |line: &str| {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let (address, name) = (hex(words.get(1)?)?, words.get(7)?.clone());
        here.iter().any(|section| section.contains(&address)).then_some(name)
    };
    let symbols: BTreeSet<String> = text.lines().filter_map(symbol).collect();
    assert!(symbols.len() > 50, "{symbols:?}");
    // The section of a function is `.text.NAME`, or `.text.unlikely.NAME` if it is cold.
    let layout = include_str!("../../../preload/layout.ld");
    let words = layout.split(|c: char| c.is_whitespace() || "()".contains(c));
    let names = words.filter_map(|w| w.strip_prefix(".text.").or(w.strip_prefix(".data.")));
    let of_functions = |name: &&str| !name.starts_with("fsocket") && !name.starts_with("rel.ro");
    let names: BTreeSet<&str> = names.filter(of_functions).collect();
    let nothing: Vec<_> = names.iter().filter(|name| !symbols.iter().any(|s| matches(name, s))).collect();
    assert!(
        names.len() > 20 && nothing.is_empty(),
        "of {} names in layout.ld these match nothing: {nothing:#?}",
        names.len()
    );
}

#[test]
fn wildcards_match_as_in_a_linker_script() {
    let name = "_ZN7fsocket5hooks4read7unusual17h0E";
    assert!(matches("*5hooks4read7unusual*", name) && matches("_ZN*0E", name) && matches(name, name));
    assert!(!matches("*5hooks5write*", name) && !matches("read", name) && !matches("_ZN*7unusual", name));
}

/// The library's data counts in every program that loads it: for RLIMIT_DATA, for memory that
/// `mlockall` locks, and in core files. So large tables must be allocated at first use
/// (`fsocket_runtime::pieces`).
#[test]
fn data_is_small() {
    let readelf = fsocket_testkit::need!("readelf");
    let out = Command::new(&readelf).args(["-lW"]).arg(fsocket_testkit::artifacts::library()).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let writable = text.lines().filter(|l| l.trim_start().starts_with("LOAD") && l.contains("RW"));
    let size = |line: &str| {
        let number = line.split_whitespace().nth(5)?.strip_prefix("0x")?;
        usize::from_str_radix(number, 16).ok()
    };
    let sizes: Vec<usize> = writable.filter_map(size).collect();
    assert!(!sizes.is_empty() && sizes.iter().sum::<usize>() < 256 << 10, "{sizes:?}\n{text}");
}

/// Names that the library imports, and why it does no harm if a program or another preloaded
/// library defines them. Most functions are not imported: the library makes system calls itself,
/// and has its own copies, comparisons and clock (`memory.rs`, `vdso.rs`).
const TAKEN: &[(&str, &[&str])] = &[
    (
        "the standard library, only when the library has panicked",
        &[
            "__cxa_thread_atexit_impl",
            "abort",
            "calloc",
            "close",
            "free",
            "fstat64",
            "getcwd",
            "getenv",
            "lseek64",
            "malloc",
            "mmap64",
            "munmap",
            "open64",
            "posix_memalign",
            "pthread_mutex_lock",
            "pthread_mutex_unlock",
            "read",
            "readlink",
            "realloc",
            "realpath",
            "statx",
            "syscall",
            "write",
            "writev",
            "clock_gettime",
            "nanosleep",
            "sched_yield",
        ],
    ),
    ("where the program looks for its errors", &["__errno_location"]),
    ("the program's environment, which the next program gets", &["environ"]),
    ("what stands behind a hook is found by the loader", &["dlsym", "dlopen", "__libc_dlsym", "__libc_dlopen_mode"]),
    ("which library an address lies in: the loader's list", &["dl_iterate_phdr"]),
    ("what the kernel says to the process at its start", &["getauxval"]),
    ("the program's fork, with all handlers", &["fork", "__register_atfork"]),
    ("the program's FILE, whose layout is libc's", &["fopencookie"]),
    ("the state of the program's thread, which is libc's", &["pthread_setcancelstate"]),
    ("its address is looked at, and tells musl from glibc; nobody calls it", &["__dls3"]),
    (
        "a layout of libc's is learned from a sample",
        &[
            "posix_spawn_file_actions_addclose",
            "posix_spawn_file_actions_adddup2",
            "posix_spawn_file_actions_destroy",
            "posix_spawn_file_actions_init",
        ],
    ),
];

#[cfg(target_arch = "x86_64")]
#[test]
fn nothing_that_others_may_replace_is_called() {
    let readelf = fsocket_testkit::need!("readelf");
    let out = Command::new(&readelf).args(["-rW"]).arg(fsocket_testkit::artifacts::library()).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let by_name = |l: &str| {
        let [_, _, kind, _, name, ..] = l.split_whitespace().collect::<Vec<_>>()[..] else { return None };
        let is_symbol = ["GLOB_DAT", "JUMP_SLO", "R_X86_64_64"].iter().any(|k| kind.contains(k));
        is_symbol.then(|| name.split('@').next().unwrap_or_default().to_owned())
    };
    let needed: BTreeSet<String> = text.lines().filter_map(by_name).collect();
    assert!(needed.contains("dlsym"), "{text}");
    let known: BTreeSet<&str> = TAKEN.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    let new: Vec<_> = needed.iter().filter(|name| !known.contains(name.as_str())).collect();
    assert!(new.is_empty(), "without a reason in this test: {new:?}");
}
