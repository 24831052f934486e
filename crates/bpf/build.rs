//! Compiles every `src/<concern>.bpf.c` into a skeleton `OUT_DIR/<concern>.skel.rs`.
//!
//! `clang-19` is Debian's name for it; `CLANG` names another one. Warnings are
//! errors, because cargo hides what a build script prints when it succeeds.

use std::path::{Path, PathBuf};
use std::{env, fs};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang-19".to_owned());
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src");
    for source in sources(Path::new("src")) {
        let name = source.file_name().and_then(|n| n.to_str()).expect("a source has an ASCII name");
        let concern = name.strip_suffix(".bpf.c").expect("as selected");
        SkeletonBuilder::new()
            .source(&source)
            .clang(&clang)
            .clang_args(["-Wall", "-Werror", "-Isrc", "-mcpu=v3"])
            .build_and_generate(out.join(format!("{concern}.skel.rs")))
            .unwrap_or_else(|error| panic!("{name}: {error:?}\n(clang: {clang}; Debian package clang-19)"));
    }
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .expect("the crate has sources")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.to_string_lossy().ends_with(".bpf.c"))
        .collect();
    found.sort();
    found
}
