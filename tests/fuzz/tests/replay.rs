//! Runs every fuzzer on its stored corpus, which must not panic. `make fuzz` looks for new inputs.

use std::path::Path;

fn replay(name: &str) {
    let (_, target) = fsocket_fuzz::TARGETS.iter().find(|t| t.0 == name).expect("a target");
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&dir).expect("a corpus").flatten().map(|f| f.path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", dir.display());
    for file in files {
        eprintln!("{}", file.display());
        target(&std::fs::read(&file).expect("a file"));
    }
    target(&[]);
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(#[test] fn $name() { replay(stringify!($name)) })*
        #[test]
        fn all_targets_are_here() {
            let names: Vec<&str> = fsocket_fuzz::TARGETS.iter().map(|t| t.0).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}
replays!(ring syn report registry packets settings messages arena);
