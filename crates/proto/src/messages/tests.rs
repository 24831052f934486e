use super::*;
use crate::raw::Packet;
use crate::values::*;
use proptest::prelude::*;
use zerocopy::FromBytes;

/// Strategy for the words of fields: small ones, two halves that are small, all ones, and any.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..4, 1 => 0u64..2048, 1 => (0u64..4, 0u64..4).prop_map(|(a, b)| a << 32 | b),
        1 => Just(u64::MAX), 1 => any::<u64>()]
}

fn of_words(kind: u32, [id, arg0, arg1, arg2]: [u64; 4], addr: Addr) -> Msg {
    Packet { id, arg0, arg1, arg2, addr, ..Packet::new(kind) }.into()
}

fn packet(kinds: &'static [u32]) -> impl Strategy<Value = Msg> {
    let addr = (any::<[u8; 16]>(), 0u16..3, 0u16..3, 0u32..3);
    (proptest::sample::select(kinds), prop::array::uniform4(word()), addr).prop_map(|(kind, words, addr)| {
        let (ip, port, family, v6only) = addr;
        of_words(kind, words, Addr { ip, port, family, v6only })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn a_request_comes_back(m in packet(Request::KINDS)) {
        match Request::decode(&m) {
            Ok(request) => {
                prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
                prop_assert_eq!(request.encode().kind, m.kind);
            }
            Err(e) => prop_assert_eq!(e, Malformed::Value),
        }
    }

    #[test]
    fn a_message_comes_back(m in packet(Message::KINDS)) {
        match Message::decode(&m) {
            Ok(message) => {
                prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
                prop_assert_eq!(message.encode().kind, m.kind);
            }
            Err(e) => prop_assert_eq!(e, Malformed::Value),
        }
    }

    #[test]
    fn every_packet_is_a_message_or_an_error(bytes in prop::array::uniform32(any::<u8>()), kind in 0u32..128) {
        let all = [&bytes[..], &bytes, &bytes[..8]].concat();
        let m = Msg { kind, ..Msg::read_from_bytes(&all).expect("its size") };
        let (request, message) = (Request::decode(&m), Message::decode(&m));
        prop_assert_eq!(request == Err(Malformed::Kind), !Request::KINDS.contains(&kind));
        prop_assert_eq!(message == Err(Malformed::Kind), !Message::KINDS.contains(&kind));
    }
}

/// The tests above can therefore meet every variant.
#[test]
fn a_packet_of_zeros_is_a_message_of_every_kind() {
    for kind in Request::KINDS {
        assert!(Request::decode(&Msg::new(*kind)).is_ok_and(|request| request.encode().kind == *kind), "{kind}");
    }
    for kind in Message::KINDS {
        assert!(Message::decode(&Msg::new(*kind)).is_ok_and(|message| message.encode().kind == *kind), "{kind}");
    }
}

#[test]
fn a_kind_is_one_message() {
    for kinds in [Request::KINDS, Message::KINDS] {
        assert!((1..kinds.len()).all(|i| !kinds[i..].contains(&kinds[i - 1])), "{kinds:?}");
    }
}

#[test]
fn values_out_of_range_are_errors() {
    let of = |kind, words| Request::decode(&of_words(kind, words, Addr::default()));
    let (slots, many) = (SLOTS as u64, 1 << 32);
    for (kind, words) in [
        (request::Claim::KIND, [0, slots, 0, 0]),
        (request::Claim::KIND, [0, 2 << 32, 0, 0]),
        (request::Claim::KIND, [many, 0, 0, 0]),
        (request::Claim::KIND, [0, 0, many, 0]),
        (request::Claim::KIND, [0, 0, 0, 2]),
        (request::Switch::KIND, [0, 0, 64 << 32, 1]),
        (request::Switch::KIND, [0, 0, 0, 8]),
        (request::Upgrade::KIND, [0, slots, 0, 0]),
        (request::Attach::KIND, [0, 2, 0, 0]),
        (request::Ring::KIND, [0, 1, 2 << 8, 0]),
        (request::Ring::KIND, [0, 1, 0xff, 0]),
        (request::Waker::KIND, [256, 1, 0, 0]),
        (request::Worker::KIND, [0, 0, 3, 0]),
        (request::Unpublish::KIND, [0, 3, 0, 0]),
        (request::Passed::KIND, [0, 5, 0, 0]),
        (request::Local::KIND, [0, many, 0, 0]),
        (request::Counts::KIND, [u64::MAX, 0, 0, 0]),
        (request::Pair::KIND, [0, 0, 0, 1 << 16]),
    ] {
        assert_eq!(of(kind, words), Err(Malformed::Value), "{kind} {words:?}");
    }
    assert_eq!(of(0, [0; 4]), Err(Malformed::Kind));
    assert_eq!(Msg::new(request::Claim::KIND).read::<request::Release>(), Err(Malformed::Kind));
}

/// Pins the layout, so that library and monitor of builds before and after typed messages
/// understand each other.
#[test]
fn the_wire_format_is_as_it_was() {
    let of = |kind, id, arg0, arg1, arg2| Msg { id, arg0, arg1, arg2, ..Msg::new(kind) };
    let addr = Addr { ip: [3; 16], port: 80, family: 2, v6only: 0 };
    let end = End { slot: 7, side: 1 };
    let waiter = Waiter { side: 1, number: 5 };
    let hello = request::Hello { nonce: 1, pid: 2, version: 3, rights: 4, name: [5; 16], off: true };
    let as_before = Msg { addr: Addr { ip: [5; 16], port: 1, ..Addr::default() }, ..of(1, 1, 2, 3, 4) };
    assert_eq!(Msg::from(hello), as_before);
    let connect = request::Connect { to: addr, full: Some(9), identity: crate::ODD };
    assert_eq!(Msg::from(connect), Msg { addr, ..of(7, 0, 9, crate::ODD, 0) });
    let found =
        answer::Connect { channel: 1, listener: 2, size: 3, known: true, first_port: 4096, proved: true, closings: 77 };
    let addr = Addr { port: 4096, family: 1, v6only: 77, ..Addr::default() };
    assert_eq!(Msg::from(found), Msg { addr, ..of(7, 1, 2, 3, 1) });
    let switch = request::Switch { channel: 1, end, generation: 9, acts: Acts(3), what: Switching::Act };
    assert_eq!(Msg::from(switch), of(14, 1, 7 | 1 << 32, 9 | 3 << 32, 1));
    let ring = request::Ring { key: 1, channel: 2, waiter };
    assert_eq!(Msg::from(ring), of(13, 1, 2, 1 << 8 | 5, 0));
    let worker = request::Worker { listener: 1, number: Some(0), work: Work::Accepts };
    assert_eq!(Msg::from(worker), of(6, 1, 1, 2, 0));
    let local = request::Local { group: 1, cpu: None, on_trial: true };
    assert_eq!(Msg::from(local), of(21, 1, u64::MAX, 1, 0));
    let counts = request::Counts { counts: [Some(Counted { counter: 3, n: 4 }), None, None, None] };
    assert_eq!(Msg::from(counts), of(61, 4 << 56 | 4, 0, 0, 0));
    let over = notice::UpgradeSrv { channel: 1, listener: 2, slot: 3, generation: 4, name: 5, met: true };
    let addr = Addr { v6only: 1, ..Addr::default() };
    assert_eq!(Msg::from(over), Msg { addr, ..of(34, 1, 2, 3 | 4 << 32, 5) });
    let ends = [([1; 16], 80), (core::array::from_fn(|i| i as u8), 65535)];
    let addr = Addr { ip: [1; 16], port: 80, ..Addr::default() };
    let (low, high) = (0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
    assert_eq!(Msg::from(notice::Open { wish: 6, ends }), Msg { addr, ..of(86, 6, low, high, 65535) });
}
