//! Readers of whole inputs that other programs have written.

use crate::input::Input;
use fsocket_listeners::route;
use fsocket_proto::registry::{Registry, ENTRIES, LOCALS};
use fsocket_proto::report::Report;
use fsocket_proto::{Addr, Message, Msg, Request};
use zerocopy::FromBytes;

/// If a report can be read, it can be written, and reading it again gives the same report.
pub fn report(data: &[u8]) {
    let Ok(report) = serde_json::from_slice::<Report>(data) else { return };
    let text = serde_json::to_string(&report).expect("a report");
    let again: Report = serde_json::from_str(&text).expect("what we wrote");
    assert_eq!(serde_json::to_string(&again).expect("a report"), text);
}

/// Every packet is a message or an error. A message can be sent, and reading it again gives the
/// same message.
pub fn packets(data: &[u8]) {
    let mut input = Input::new(data);
    while !input.is_empty() {
        let bytes = input.bytes::<{ fsocket_proto::MSG_SIZE }>();
        let packet = Msg::read_from_bytes(&bytes).expect("its size");
        if let Ok(request) = Request::decode(&packet) {
            assert_eq!(Request::decode(&request.encode()), Ok(request));
            assert_eq!(request.encode().kind(), packet.kind());
        }
        if let Ok(message) = Message::decode(&packet) {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
            assert_eq!(message.encode().kind(), packet.kind());
        }
    }
}

/// The library looks for a listener in a registry with any contents. It must not find more
/// listeners than there are entries.
pub fn registry(data: &[u8]) {
    thread_local! {
        // SAFETY: the layout has a positive size, and zero is valid for its integers and atomics.
        // (It is too large for the stack.)
        static REGISTRY: *mut Registry = unsafe { std::alloc::alloc_zeroed(std::alloc::Layout::new::<Registry>()) }.cast();
    }
    // SAFETY: allocated above for this thread alone, and never freed.
    let reg = REGISTRY.with(|r| unsafe { &mut **r });
    let mut input = Input::new(data);
    reg.entries = input.u64();
    reg.locals = input.u64();
    let address = |input: &mut Input| {
        let ip = match input.u8() % 5 {
            0 => [0; 16],
            1 => std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets(),
            2 => std::net::Ipv4Addr::UNSPECIFIED.to_ipv6_mapped().octets(),
            3 => std::net::Ipv6Addr::LOCALHOST.octets(),
            _ => input.bytes(),
        };
        Addr { ip, port: u16::from(input.u8()), family: input.u16(), v6only: u32::from(input.u8() & 1) }
    };
    let dst = address(&mut input);
    let mut rounds = 0;
    while !input.is_empty() && rounds < 64 {
        rounds += 1;
        let which = input.u16();
        if which & 1 == 0 {
            reg.local[usize::from(which >> 1) % LOCALS] = address(&mut input).ip;
        } else {
            let entry = &mut reg.entry[usize::from(which >> 1) % ENTRIES];
            (entry.listener, entry.netns, entry.addr) = (input.u64(), u64::from(input.u8()), address(&mut input));
        }
    }
    if let Ok(found) = route::scan(reg, &dst, 0) {
        assert!((1..=ENTRIES).contains(&found.count));
    }
}

#[cfg(feature = "monitor")]
/// A configuration file is refused or gives values. Reading it does not fail in any other way.
pub fn settings(data: &[u8]) {
    use std::io::{Seek, SeekFrom, Write};
    thread_local! {
        static FILE: std::cell::RefCell<tempfile::NamedTempFile> =
            std::cell::RefCell::new(tempfile::NamedTempFile::new().expect("a file"));
    }
    FILE.with_borrow_mut(|file| {
        let f = file.as_file_mut();
        f.set_len(0).and_then(|()| f.seek(SeekFrom::Start(0))).and_then(|_| f.write_all(data)).expect("a file");
        if let Ok(settings) = fsocket_monitor::settings::read(Some(file.path())) {
            let _ = settings.balance.knobs();
        }
    });
}

#[cfg(feature = "monitor")]
/// A message made of the next bytes.
pub(crate) fn message(input: &mut Input) -> fsocket_proto::raw::Packet {
    fsocket_proto::raw::Packet::read_from_bytes(&input.bytes::<{ fsocket_proto::MSG_SIZE }>()).expect("its size")
}
