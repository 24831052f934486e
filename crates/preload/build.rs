//! A library that hooks `close` must never be unloaded. It also should not load a second library,
//! because every process of a shell loop would load that, too: so the unwinder comes from the
//! compiler's static archive.
use std::{env, fs, path::Path, process::Command};

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Only this library may see the symbols for the ends of the fault table.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
    // Each mapping of the library costs a program that opens no socket some 10 us of 700. So
    // headers, constants and code share one mapping (LLD, which rustc brings along for x86-64,
    // needs an extra option), and data has another. RELRO is off: the addresses of libc's
    // functions, which are looked up later, lie beside the protected pages, so read-only pages
    // would protect nothing.
    for flag in ["-Wl,-z,noseparate-code", "-Wl,-z,norelro"] {
        println!("cargo:rustc-cdylib-link-arg={flag}");
    }
    if links_with_lld() {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--no-rosegment");
    }
    // The C library's start files would add code, data and symbols, only for old-style
    // constructors.
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
    // The linker script places code and data that forked children use side by side.
    let layout = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("layout.ld");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-T,{}", layout.display());
    println!("cargo:rerun-if-changed=layout.ld");
    let out = env::var("OUT_DIR").expect("cargo sets it");
    // The standard library links with -lgcc_s. The linker finds this script under that name first.
    fs::write(Path::new(&out).join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc -lc)\n").expect("OUT_DIR is writable");
    println!("cargo:rustc-link-search=native={out}");
    println!("cargo:rerun-if-changed=build.rs");
}

/// Does rustc link with its own LLD? (It does since 1.90, on x86-64, unless another linker is
/// configured.)
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
