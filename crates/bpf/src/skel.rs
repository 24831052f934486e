//! The skeletons that `build.rs` makes from the `.bpf.c` files, one module for each.

macro_rules! skeletons {
    ($($concern:ident),* $(,)?) => {$(
        #[allow(clippy::all, clippy::undocumented_unsafe_blocks, dead_code, unused_imports, missing_docs, non_camel_case_types)]
        pub(crate) mod $concern {
            include!(concat!(env!("OUT_DIR"), "/", stringify!($concern), ".skel.rs"));
        }
    )*};
}

skeletons!(announce, closings, links, locality, locks, pairs, readcpu, select, steer);
