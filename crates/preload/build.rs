//! A library that hooks `close` must never be unloaded, and one that is loaded
//! into every process of a shell loop should not drag a second library in: the
//! unwinder comes from the compiler's static archive.
use std::{env, fs, path::Path, process::Command};

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The ends of the table of faults are ours alone.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
    // Each mapping of the library costs a program that opens no socket some 10 us of 700. So: headers, constants and code
    // in one (LLD, which rustc brings along for x86-64, has an option of its own), data in another. What the loader could
    // make read-only afterwards would protect nothing: beside it lie the addresses of libc's functions, looked up later.
    for flag in ["-Wl,-z,noseparate-code", "-Wl,-z,norelro"] {
        println!("cargo:rustc-cdylib-link-arg={flag}");
    }
    if links_with_lld() {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--no-rosegment");
    }
    // The C library's start files would add code, data and names to look up, for constructors of an age ago.
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
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

/// Does rustc link with its own LLD? (Since 1.90, on x86-64, unless somebody chose another linker.)
fn links_with_lld() -> bool {
    let is_target = |name, value| env::var(name).is_ok_and(|v| v == value);
    let minor = || -> Option<u32> {
        let out = Command::new(env::var("RUSTC").ok()?).arg("--version").output().ok()?;
        String::from_utf8(out.stdout).ok()?.split('.').nth(1)?.parse().ok()
    };
    is_target("CARGO_CFG_TARGET_ARCH", "x86_64")
        && is_target("CARGO_CFG_TARGET_ENV", "gnu")
        && !env::var("CARGO_ENCODED_RUSTFLAGS").is_ok_and(|flags| flags.contains("link"))
        && minor().is_some_and(|minor| minor >= 90)
}
