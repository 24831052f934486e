//! All fuzzers in one program: FUZZ_TARGET selects one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();

fuzz_target!(|data: &[u8]| {
    let target = TARGET.get_or_init(|| {
        let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET is not set");
        fsocket_fuzz::TARGETS.iter().find(|t| t.0 == name).expect("a target of this name").1
    });
    target(data);
});
