//! Agents, which carry connections of all users to other hosts. The monitor accepts only an agent
//! that runs as root in the monitor's network namespace.

use super::rights::{as_user, for_users};
use super::support::*;
use fsocket_monitor::links::Links;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use rustix::io::Errno;
use rustix::thread::UnshareFlags;

/// The monitor's answer to a process that wants to be the agent: 0, or an errno.
fn asked(d: &Daemon) -> i32 {
    d.stranger().request(Packet::new(request::Agent::KIND), None).0.result
}

#[test]
fn an_agent_is_roots_and_of_this_network() {
    let address = |port| ([127, 0, 0, 1], port).into();
    let links = Links { address: address(1), peers: vec![address(2)], key: "/nowhere".into() };
    let Some(d) = for_users("an_agent_is_roots_and_of_this_network", |config| config.links = Some(links)) else {
        return;
    };
    let refused = Errno::PERM.raw_os_error();
    assert_eq!(as_user(70_001, || asked(&d)), refused, "another user");
    // Root of a container has the same user number.
    let elsewhere = std::thread::scope(|s| {
        let ask = || {
            // SAFETY: the call changes only this thread, and no descriptors are shared in another
            // way.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.expect("a network namespace");
            asked(&d)
        };
        s.spawn(ask).join().unwrap()
    });
    assert_eq!(elsewhere, refused, "root in another network namespace");
    assert_eq!(asked(&d), 0, "root");
}

#[test]
fn without_configuration_there_is_none() {
    let Some(d) = for_users("without_configuration_there_is_none", |_| {}) else { return };
    assert_eq!(asked(&d), Errno::OPNOTSUPP.raw_os_error());
}
