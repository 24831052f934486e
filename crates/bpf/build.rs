//! Compiles every `src/<concern>.bpf.c` to a skeleton `OUT_DIR/<concern>.skel.rs`, and the
//! policies (an example, and those of the tests) to object files beside the skeletons.
//!
//! `clang-19` is the name of clang in Debian; the variable `CLANG` may name another one. Warnings
//! are errors, because cargo hides the output of a build script that succeeds.

use std::path::{Path, PathBuf};
use std::{env, fs};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang-19".to_owned());
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=policies");
    let builder = |source: &Path| {
        let mut builder = SkeletonBuilder::new();
        builder.source(source).clang(&clang).clang_args(["-Wall", "-Werror", "-Isrc", "-mcpu=v3"]);
        builder
    };
    for (source, concern) in sources("src") {
        builder(&source)
            .build_and_generate(out.join(format!("{concern}.skel.rs")))
            .unwrap_or_else(|error| panic!("{concern}: {error:?}\n(clang: {clang}; Debian package clang-19)"));
    }
    for (source, name) in sources("policies") {
        builder(&source)
            .obj(out.join(format!("{name}.bpf.o")))
            .build()
            .unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
}

/// The `.bpf.c` files of a folder, and their names without that ending.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let files = fs::read_dir(folder).expect("part of the crate").map(|entry| entry.expect("a readable folder").path());
    let mut found: Vec<(PathBuf, String)> = files
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?.strip_suffix(".bpf.c")?.to_owned();
            Some((path, name))
        })
        .collect();
    found.sort();
    found
}
