//! The form in which a message is sent: a packet of fixed size, and the places of typed fields in
//! it.
//!
//! Only this crate reads or writes the words of a packet. Everything else uses [`Request`](crate::Request),
//! [`Message`](crate::Message), and the structures in [`request`](crate::request), [`answer`](crate::answer) and
//! [`notice`](crate::notice).

use crate::{Addr, VERSION};
use core::marker::PhantomData;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// One packet. Its kind says which message it is; the other words depend on the kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Msg {
    pub(crate) kind: u32,
    /// Number that the requester chooses; the answer has the same number.
    pub(crate) seq: u32,
    pub(crate) version: u16,
    pub(crate) _pad: u16,
    /// 0 or a positive errno.
    pub(crate) result: i32,
    pub(crate) id: u64,
    pub(crate) arg0: u64,
    pub(crate) arg1: u64,
    pub(crate) arg2: u64,
    pub(crate) addr: Addr,
}

/// Bytes of a packet.
pub const MSG_SIZE: usize = core::mem::size_of::<Msg>();

const _: () = assert!(MSG_SIZE == 72);

/// Why a packet is not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// There is no message of this kind.
    Kind,
    /// A field has a value that the kind does not allow.
    Value,
}

/// The content of one message: named fields, and the kind of their packet.
pub trait Payload: Copy + Sized {
    const KIND: u32;

    /// Writes the fields into the words of a packet of this kind.
    fn put(self, packet: &mut Msg);

    /// Reads the fields of a packet of this kind.
    ///
    /// # Errors
    /// [`Malformed::Value`].
    fn get(packet: &Msg) -> Result<Self, Malformed>;
}

/// A request that the monitor answers.
pub trait Asks: Payload {
    type Answer: Payload;
}

impl<P: Payload> From<P> for Msg {
    #[inline]
    fn from(payload: P) -> Msg {
        let mut packet = Msg::new(P::KIND);
        payload.put(&mut packet);
        packet
    }
}

impl Msg {
    #[inline]
    pub(crate) fn new(kind: u32) -> Self {
        Msg { kind, version: VERSION, ..Default::default() }
    }

    /// The packet with number `seq`. The answer to a request has the request's number; 0: no
    /// answer is wanted.
    #[inline]
    #[must_use]
    pub fn numbered(self, seq: u32) -> Msg {
        Msg { seq, ..self }
    }

    pub fn kind(&self) -> u32 {
        self.kind
    }

    /// Do sender and receiver have the same version, so that words have the same meaning?
    pub fn is_of_our_version(&self) -> bool {
        self.version == VERSION
    }

    /// The number of a request, and of its answer.
    pub fn seq(&self) -> u32 {
        self.seq
    }

    /// The errno with which the monitor refuses.
    #[inline]
    pub fn refusal(&self) -> Option<i32> {
        (self.result != 0).then_some(self.result)
    }

    /// Whether the packet is a request of this kind, or the answer to one.
    #[inline]
    pub fn is<P: Payload>(&self) -> bool {
        self.kind == P::KIND
    }

    /// Whether the packet answers that request.
    #[inline]
    pub fn answers(&self, request: &Msg) -> bool {
        (self.kind, self.seq) == (request.kind, request.seq)
    }

    /// The fields of a packet of a known kind.
    ///
    /// # Errors
    /// The packet is of another kind, or a value is out of range.
    #[inline]
    pub fn read<P: Payload>(&self) -> Result<P, Malformed> {
        if self.is::<P>() {
            P::get(self)
        } else {
            Err(Malformed::Kind)
        }
    }
}

/// The place of a field in a packet.
pub trait Slot {
    type Value;
    fn put(packet: &mut Msg, value: Self::Value);
    fn get(packet: &Msg) -> Option<Self::Value>;
}

/// A type of field, stored in a slot with values of type `S`. `None`: the value is not one of
/// this type.
pub trait Wire<S>: Sized {
    fn to_wire(self) -> S;
    fn from_wire(value: S) -> Option<Self>;
}

macro_rules! slots {
    ($($slot:ident: $value:ty, |$packet:ident| $place:expr;)*) => {
        $(pub enum $slot {}
        impl Slot for $slot {
            type Value = $value;
            #[inline]
            fn put($packet: &mut Msg, value: $value) {
                $place = value;
            }
            #[inline]
            fn get($packet: &Msg) -> Option<$value> {
                Some($place)
            }
        })*
    };
}

slots! {
    Id: u64, |p| p.id;
    Arg0: u64, |p| p.arg0;
    Arg1: u64, |p| p.arg1;
    Arg2: u64, |p| p.arg2;
    Address: Addr, |p| p.addr;
    Ip: [u8; 16], |p| p.addr.ip;
    Port: u16, |p| p.addr.port;
    Family: u16, |p| p.addr.family;
    V6only: u32, |p| p.addr.v6only;
}

/// The lower and the higher half of a word.
pub struct Low<W>(PhantomData<W>);
pub struct High<W>(PhantomData<W>);

impl<W: Slot<Value = u64>> Slot for Low<W> {
    type Value = u32;
    #[inline]
    fn put(packet: &mut Msg, value: u32) {
        let word = W::get(packet).unwrap_or(0) >> 32 << 32;
        W::put(packet, word | u64::from(value));
    }
    #[inline]
    fn get(packet: &Msg) -> Option<u32> {
        W::get(packet).map(|word| word as u32)
    }
}

impl<W: Slot<Value = u64>> Slot for High<W> {
    type Value = u32;
    #[inline]
    fn put(packet: &mut Msg, value: u32) {
        let word = u64::from(W::get(packet).unwrap_or(0) as u32);
        W::put(packet, word | u64::from(value) << 32);
    }
    #[inline]
    fn get(packet: &Msg) -> Option<u32> {
        W::get(packet).map(|word| (word >> 32) as u32)
    }
}

/// A word in which one value (0 or all ones) means "none".
pub struct OrNone<W, const NONE: u64>(PhantomData<W>);
pub type OrZero<W> = OrNone<W, 0>;
pub type OrOnes<W> = OrNone<W, { u64::MAX }>;

impl<W: Slot<Value = u64>, const NONE: u64> Slot for OrNone<W, NONE> {
    type Value = Option<u64>;
    #[inline]
    fn put(packet: &mut Msg, value: Option<u64>) {
        W::put(packet, value.unwrap_or(NONE));
    }
    #[inline]
    fn get(packet: &Msg) -> Option<Option<u64>> {
        W::get(packet).map(|word| Some(word).filter(|word| *word != NONE))
    }
}

/// A word that holds a number plus one; 0 means none.
pub struct PlusOne<W>(PhantomData<W>);

impl<W: Slot<Value = u64>> Slot for PlusOne<W> {
    type Value = Option<u64>;
    #[inline]
    fn put(packet: &mut Msg, value: Option<u64>) {
        W::put(packet, value.map_or(0, |n| n.saturating_add(1)));
    }
    #[inline]
    fn get(packet: &Msg) -> Option<Option<u64>> {
        W::get(packet).map(|word| word.checked_sub(1))
    }
}

/// A slot whose values are below `END`.
pub struct Below<W, const END: u64>(PhantomData<W>);

impl<W: Slot<Value: Copy + Into<u64>>, const END: u64> Slot for Below<W, END> {
    type Value = W::Value;
    #[inline]
    fn put(packet: &mut Msg, value: W::Value) {
        W::put(packet, value);
    }
    #[inline]
    fn get(packet: &Msg) -> Option<W::Value> {
        W::get(packet).filter(|value| (*value).into() < END)
    }
}

/// All four words.
pub enum Words {}

impl Slot for Words {
    type Value = [u64; 4];
    #[inline]
    fn put(packet: &mut Msg, value: [u64; 4]) {
        [packet.id, packet.arg0, packet.arg1, packet.arg2] = value;
    }
    #[inline]
    fn get(packet: &Msg) -> Option<[u64; 4]> {
        Some([packet.id, packet.arg0, packet.arg1, packet.arg2])
    }
}

/// The connection's own address, and its peer's.
pub enum BothEnds {}

impl Slot for BothEnds {
    type Value = [([u8; 16], u16); 2];
    fn put(packet: &mut Msg, [own, peer]: Self::Value) {
        let ip = u128::from_le_bytes(peer.0);
        packet.addr = Addr { ip: own.0, port: own.1, ..Addr::default() };
        (packet.arg0, packet.arg1, packet.arg2) = (ip as u64, (ip >> 64) as u64, peer.1.into());
    }
    fn get(packet: &Msg) -> Option<Self::Value> {
        let ip = u128::from(packet.arg0) | u128::from(packet.arg1) << 64;
        let port = u16::try_from(packet.arg2).ok()?;
        Some([(packet.addr.ip, packet.addr.port), (ip.to_le_bytes(), port)])
    }
}

macro_rules! as_it_is {
    ($($t:ty),*) => {
        $(impl Wire<$t> for $t {
            #[inline]
            fn to_wire(self) -> $t {
                self
            }
            #[inline]
            fn from_wire(value: $t) -> Option<$t> {
                Some(value)
            }
        })*
    };
}
as_it_is!(u64, u32, u16, [u8; 16], Addr, [([u8; 16], u16); 2]);

macro_rules! narrower {
    ($($t:ty, $s:ty;)*) => {
        $(impl Wire<$s> for $t {
            #[inline]
            fn to_wire(self) -> $s {
                self as $s
            }
            #[inline]
            fn from_wire(value: $s) -> Option<$t> {
                <$t>::try_from(value).ok()
            }
        }
        )*
    };
}
narrower! { u32, u64; u16, u64; u8, u64; usize, u64; usize, u32; }

macro_rules! yes_or_no {
    ($($s:ty),*) => {
        $(impl Wire<$s> for bool {
            #[inline]
            fn to_wire(self) -> $s {
                self.into()
            }
            #[inline]
            fn from_wire(value: $s) -> Option<bool> {
                match value {
                    0 => Some(false),
                    1 => Some(true),
                    _ => None,
                }
            }
        })*
    };
}
yes_or_no!(u64, u32, u16);

impl<T: Wire<u64>> Wire<Option<u64>> for Option<T> {
    #[inline]
    fn to_wire(self) -> Option<u64> {
        self.map(T::to_wire)
    }
    #[inline]
    fn from_wire(value: Option<u64>) -> Option<Option<T>> {
        match value {
            None => Some(None),
            Some(word) => T::from_wire(word).map(Some),
        }
    }
}

/// Defines everything that travels in a packet.
///
/// - `values NAME: WORD { VARIANT = NUMBER, … }`: an enum that is one word.
/// - `requests { KIND NAME { FIELD: TYPE = SLOT, … }; … } answered { KIND NAME { … } -> { … }; … } notices { … }`: the
///   messages. Each becomes a structure with documented fields, and a variant of [`Request`](crate::Request) or
///   [`Message`](crate::Message). An undefined kind is an error. So is a value that the type of a field does not have.
macro_rules! wire {
    (values $(#[$doc:meta])* $name:ident: $word:ty { $($(#[$vdoc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$vdoc])* $variant = $number,)*
        }
        impl $crate::packet::Wire<$word> for $name {
            #[inline]
            fn to_wire(self) -> $word {
                self as $word
            }
            #[inline]
            fn from_wire(value: $word) -> Option<$name> {
                match value {
                    $($number => Some($name::$variant),)*
                    _ => None,
                }
            }
        }
    };
    (@payload $(#[$doc:meta])* $kind:literal $name:ident { $($(#[$fdoc:meta])* $field:ident: $type:ty = $slot:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$fdoc])* pub $field: $type,)*
        }
        impl Payload for $name {
            const KIND: u32 = $kind;
            #[inline]
            fn put(self, _packet: &mut Msg) {
                $(<$slot as Slot>::put(_packet, <$type as Wire<<$slot as Slot>::Value>>::to_wire(self.$field));)*
            }
            #[inline]
            fn get(_packet: &Msg) -> Result<$name, Malformed> {
                $(let $field = <$slot as Slot>::get(_packet)
                    .and_then(<$type as Wire<<$slot as Slot>::Value>>::from_wire)
                    .ok_or(Malformed::Value)?;)*
                Ok($name { $($field,)* })
            }
        }
    };
    (@enum $(#[$doc:meta])* $all:ident { $($kind:literal $module:ident $name:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $all {
            $(#[doc = concat!("[`", stringify!($module), "::", stringify!($name), "`]")] $name($module::$name),)*
        }
        impl $all {
            /// All kinds of this enum.
            pub const KINDS: &'static [u32] = &[$($kind,)*];

            /// The name of a kind.
            pub fn name(kind: u32) -> Option<&'static str> {
                match kind {
                    $($kind => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// Decodes a packet. Only the packet's kind and words are used.
            ///
            /// # Errors
            /// [`Malformed`].
            pub fn decode(packet: &Msg) -> Result<$all, Malformed> {
                match packet.kind {
                    $($kind => Payload::get(packet).map($all::$name),)*
                    _ => Err(Malformed::Kind),
                }
            }

            /// The packet of a message.
            pub fn encode(self) -> Msg {
                match self {
                    $($all::$name(payload) => payload.into(),)*
                }
            }
        }
        $(impl From<$module::$name> for $all {
            #[inline]
            fn from(payload: $module::$name) -> $all {
                $all::$name(payload)
            }
        })*
    };
    (
        requests {
            $($(#[$rdoc:meta])* $rkind:literal $rname:ident { $($(#[$rfdoc:meta])* $rfield:ident: $rtype:ty = $rslot:ty,)* };)*
        }
        answered {
            $($(#[$adoc:meta])* $akind:literal $aname:ident { $($(#[$afdoc:meta])* $afield:ident: $atype:ty = $aslot:ty,)* }
            -> { $($(#[$bfdoc:meta])* $bfield:ident: $btype:ty = $bslot:ty,)* };)*
        }
        notices {
            $($(#[$ndoc:meta])* $nkind:literal $nname:ident { $($(#[$nfdoc:meta])* $nfield:ident: $ntype:ty = $nslot:ty,)* };)*
        }
    ) => {
        /// Messages of processes, commands and the agent to the monitor.
        pub mod request {
            use super::*;
            $(wire!(@payload $(#[$rdoc])* $rkind $rname { $($(#[$rfdoc])* $rfield: $rtype = $rslot,)* });)*
            $(wire!(@payload $(#[$adoc])* $akind $aname { $($(#[$afdoc])* $afield: $atype = $aslot,)* });)*
            $(impl Asks for $aname {
                type Answer = answer::$aname;
            })*
        }
        /// Answers of the monitor, each to the request of the same name.
        pub mod answer {
            use super::*;
            $(wire!(@payload
                #[doc = concat!("The answer to [`request::", stringify!($aname), "`](super::request::", stringify!($aname), ").")]
                $akind $aname { $($(#[$bfdoc])* $bfield: $btype = $bslot,)* });)*
        }
        /// Messages that the monitor sends unasked.
        pub mod notice {
            use super::*;
            $(wire!(@payload $(#[$ndoc])* $nkind $nname { $($(#[$nfdoc])* $nfield: $ntype = $nslot,)* });)*
        }
        wire!(@enum
            /// A request from a process, a command or the agent to the monitor.
            Request { $($rkind request $rname,)* $($akind request $aname,)* });
        wire!(@enum
            /// An answer of the monitor to a request, or a message that it sends unasked.
            Message { $($akind answer $aname,)* $($nkind notice $nname,)* });
    };
}
pub(crate) use wire;
