//! A library that hooks `close` must never be unloaded, and one that is loaded
//! into every process of a shell loop should not drag a second library in: the
//! unwinder comes from the compiler's static archive.
use std::{env, fs, path::Path};

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The ends of the table of faults are ours alone.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
    // Code and data of forked children lie together.
    let layout = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("layout.ld");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-T,{}", layout.display());
    println!("cargo:rerun-if-changed=layout.ld");
    let out = env::var("OUT_DIR").expect("cargo sets it");
    // The standard library asks for -lgcc_s; this linker script answers first.
    fs::write(Path::new(&out).join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc -lc)\n").expect("OUT_DIR is writable");
    println!("cargo:rustc-link-search=native={out}");
    println!("cargo:rerun-if-changed=build.rs");
}
