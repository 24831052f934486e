//! A descriptor of one client is taken by another one.

use crate::support::*;
use fsocket_proto::{kind, Msg};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

#[test]
fn the_holder_is_told_and_the_taker_hears_of_it() {
    let d = Daemon::start();
    let (mut taker, mut holder) = (d.process(), d.process());
    let me = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
    let init = pidfd_open(Pid::INIT, PidfdFlags::empty()).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let take = |p: &mut Proc, fd| p.request(Msg { arg0: 7, ..Msg::new(kind::TRANSFER) }, fd).0.result;
    assert_eq!(take(&mut taker, None), Errno::BADF.raw_os_error());
    assert_eq!(take(&mut taker, Some(null.as_fd())), Errno::INVAL.raw_os_error());
    assert_eq!(take(&mut taker, Some(init.as_fd())), Errno::NOENT.raw_os_error(), "it is none of ours");
    // All of these are this process.
    assert_eq!(take(&mut taker, Some(me.as_fd())), 0);
    let (told, _) = holder.wait_unasked();
    assert_eq!((told.kind, told.arg0), (kind::TRANSFER, 7));
    holder.tell(Msg { id: told.id, ..Msg::new(kind::TRANSFERRED) }, None);
    assert_eq!(taker.wait_unasked().0.kind, kind::TRANSFERRED);
    // Nobody, or one that has gone.
    holder.tell(Msg { id: told.id + 100, ..Msg::new(kind::TRANSFERRED) }, None);
    holder.sync();
    drop(holder);
    taker.sync();
    assert!(taker.unasked.is_empty(), "{:?}", taker.unasked);
}
