//! The numbers of the library's own descriptors, which the program must not use.

use fsocket_runtime::process::{close_own, high_fd, owns, spare_fd};
use fsocket_sys as sys;

#[test]
fn a_number_that_the_library_has_left_is_the_programs() {
    let fd = high_fd(sys::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap());
    let again = high_fd(fd);
    assert!(owns(again) && again != fd);
    assert!(!owns(fd), "{fd} was moved to {again}, and is free");
    let spare = spare_fd(again).unwrap();
    assert!(owns(spare) && !owns(again));
    close_own(spare);
    assert!(!owns(spare));
}
