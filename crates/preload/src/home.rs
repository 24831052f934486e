//! Finds the loaded program or library that contains an address.

use core::ffi::CStr;
use libc::{c_int, c_void, dl_iterate_phdr, dl_phdr_info, PT_LOAD};

/// A loaded object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Home {
    /// The address at which it was loaded.
    pub base: usize,
    /// The loader's path of the object. It is valid while the object is loaded, and empty for the
    /// program itself.
    pub name: &'static CStr,
}

/// The object that contains `p`. (`dladdr` would also search all symbols of the object for the
/// nearest one. That would take a twentieth of the start time of a small program.)
#[link_section = ".text.fsocket_start"]
pub fn of(p: *const c_void) -> Option<Home> {
    struct Search {
        at: usize,
        found: Option<Home>,
    }
    #[link_section = ".text.fsocket_start"]
    unsafe extern "C" fn each(info: *mut dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: the loader passes a valid description, and `search` is the `Search` below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
        let base = info.dlpi_addr as usize;
        // SAFETY: the loader passes the address and the number of headers, and keeps them during
        // the call.
        let headers = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let is_there = |at: usize| {
            let mut parts = headers.iter().filter(|h| h.p_type == PT_LOAD);
            parts.any(|h| at.wrapping_sub(base.wrapping_add(h.p_vaddr as usize)) < h.p_memsz as usize)
        };
        if !is_there(search.at) {
            return 0;
        }
        let name = match info.dlpi_name.is_null() {
            true => c"",
            // SAFETY: the loader's name is a NUL-terminated string.
            false => unsafe { CStr::from_ptr(info.dlpi_name) },
        };
        search.found = Some(Home { base, name });
        1
    }
    let mut search = Search { at: p as usize, found: None };
    // SAFETY: `each` expects a `Search`, and is only called before this call returns.
    unsafe { dl_iterate_phdr(Some(each), (&raw mut search).cast()) };
    search.found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libc_and_this_program_are_two_homes() {
        let (libcs, own) = (of(libc::malloc as *const c_void), of(of as *const c_void));
        assert!(libcs.is_some_and(|h| h.name.to_bytes().ends_with(b"libc.so.6")) && own.is_some() && libcs != own);
        assert!(of(core::ptr::null()).is_none());
    }
}
