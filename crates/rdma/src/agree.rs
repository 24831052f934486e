//! Authentication of two agents: over a TCP connection, with a key that the administrator gave to
//! both hosts.
//!
//! ```text
//! connecting agent                         accepting agent
//! nonce  ───────────────────────────────▶
//!        ◀───────────────────────────────  nonce
//! endpoint, MAC ────────────────────────▶  checked before anything is answered
//! checked ◀────────────────────────────── endpoint, MAC
//! ```
//!
//! A MAC covers the sender's role, both nonces and the endpoint. So an agent accepts neither a
//! message of an earlier exchange nor one that it has sent itself. Without a key there is no
//! exchange. Bytes are authenticated but not encrypted: an eavesdropper sees the rkeys, and the
//! data that RDMA carries.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Also the version of the messages that follow, because agents must be of the same build.
const MAGIC: [u8; 8] = *b"fsRDMA01";
const NONCE: usize = 32;
const MAC: usize = 32;
/// Size of an encoded endpoint in bytes.
pub const ENDPOINT: usize = 48;
/// Time limit for the whole exchange, however slowly the other side sends.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a key has at least 32 bytes")]
    ShortKey,
    #[error("the other agent is of another version, or something else")]
    Version,
    #[error("the other agent does not have the key")]
    Refused,
    #[error("the exchange with the other agent: {0}")]
    Io(#[from] io::Error),
}

/// The secret that both hosts share. It must be random bytes, not a password: an eavesdropper can
/// test guesses of the key.
pub struct Key(Vec<u8>);

impl Key {
    pub fn new(bytes: &[u8]) -> Result<Key, Error> {
        if bytes.len() < 32 {
            return Err(Error::ShortKey);
        }
        Ok(Key(bytes.to_vec()))
    }

    fn mac(&self, role: Role, nonces: &[[u8; NONCE]; 2], endpoint: &[u8; ENDPOINT]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        mac.update(&MAGIC);
        mac.update(&[role as u8]);
        mac.update(&nonces[0]);
        mac.update(&nonces[1]);
        mac.update(endpoint);
        mac
    }
}

/// Which agent opened the TCP connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    Connecting = 1,
    Accepting = 2,
}

/// One end of a reliable connection, and its inbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endpoint {
    pub gid: [u8; 16],
    pub qpn: u32,
    pub psn: u32,
    pub inbox: u64,
    pub rkey: u32,
    /// Number of messages that fit into the inbox.
    pub depth: u32,
    /// The MTU as the kernel and the verbs number it. The smaller one of both ends is used.
    pub mtu: u32,
}

impl Endpoint {
    fn encode(&self) -> [u8; ENDPOINT] {
        let mut to = [0; ENDPOINT];
        to[..16].copy_from_slice(&self.gid);
        to[16..24].copy_from_slice(&self.inbox.to_le_bytes());
        for (i, word) in [self.qpn, self.psn, self.rkey, self.depth, self.mtu].into_iter().enumerate() {
            to[24 + 4 * i..28 + 4 * i].copy_from_slice(&word.to_le_bytes());
        }
        to
    }

    fn decode(from: &[u8; ENDPOINT]) -> Endpoint {
        let word = |i: usize| u32::from_le_bytes(from[24 + 4 * i..28 + 4 * i].try_into().expect("4 bytes"));
        Endpoint {
            gid: from[..16].try_into().expect("16 bytes"),
            inbox: u64::from_le_bytes(from[16..24].try_into().expect("8 bytes")),
            qpn: word(0),
            psn: word(1),
            rkey: word(2),
            depth: word(3),
            mtu: word(4),
        }
    }
}

/// Sends our endpoint and returns the other agent's. After an error the stream must not be used
/// any more.
pub fn exchange(stream: &TcpStream, role: Role, key: &Key, own: &Endpoint) -> Result<Endpoint, Error> {
    let mut limited = Limited { stream, until: Instant::now() + LIMIT };
    let mut nonce = [0; NONCE];
    random(&mut nonce)?;
    let mut hello = [0; 8 + NONCE];
    hello[..8].copy_from_slice(&MAGIC);
    hello[8..].copy_from_slice(&nonce);
    limited.put(&hello)?;
    limited.get(&mut hello)?;
    if hello[..8] != MAGIC {
        return Err(Error::Version);
    }
    let theirs: [u8; NONCE] = hello[8..].try_into().expect("a nonce's length");
    // Both sides put the nonces in the order of the roles.
    let (other, nonces) = match role {
        Role::Connecting => (Role::Accepting, [nonce, theirs]),
        Role::Accepting => (Role::Connecting, [theirs, nonce]),
    };
    let own = own.encode();
    let mut proof = [0; ENDPOINT + MAC];
    proof[..ENDPOINT].copy_from_slice(&own);
    proof[ENDPOINT..].copy_from_slice(&key.mac(role, &nonces, &own).finalize().into_bytes());
    if role == Role::Connecting {
        limited.put(&proof)?;
    }
    let mut answer = [0; ENDPOINT + MAC];
    limited.get(&mut answer).map_err(|e| match e.kind() {
        // An accepting agent that receives a wrong MAC closes without an answer.
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Error::Refused,
        _ => Error::Io(e),
    })?;
    let endpoint: [u8; ENDPOINT] = answer[..ENDPOINT].try_into().expect("an endpoint's length");
    key.mac(other, &nonces, &endpoint).verify_slice(&answer[ENDPOINT..]).map_err(|_| Error::Refused)?;
    if role == Role::Accepting {
        limited.put(&proof)?;
    }
    Ok(Endpoint::decode(&endpoint))
}

/// Waits until both agents are ready: each queue pair must be able to receive before the other one
/// sends.
pub fn ready(stream: &TcpStream) -> Result<(), Error> {
    let mut limited = Limited { stream, until: Instant::now() + LIMIT };
    limited.put(b"R")?;
    let mut byte = [0];
    limited.get(&mut byte)?;
    if byte != *b"R" {
        return Err(Error::Version);
    }
    Ok(())
}

/// Fills `to` with random bytes that an attacker cannot guess.
pub fn random(to: &mut [u8]) -> io::Result<()> {
    let got = rustix::rand::getrandom(&mut *to, rustix::rand::GetRandomFlags::empty())?;
    // The kernel returns up to 256 bytes in one call.
    if got == to.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// A time limit for the whole exchange, not for each read.
struct Limited<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl Limited<'_> {
    fn left(&self) -> io::Result<Duration> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        let mut stream = self.stream;
        stream.write_all(bytes)
    }

    fn get(&mut self, mut to: &mut [u8]) -> io::Result<()> {
        let mut stream = self.stream;
        while !to.is_empty() {
            stream.set_read_timeout(Some(self.left()?))?;
            match stream.read(to) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => to = &mut to[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    fn endpoint(n: u32) -> Endpoint {
        Endpoint {
            gid: [n as u8; 16],
            qpn: n,
            psn: n + 1,
            inbox: u64::from(n) << 40,
            rkey: n + 2,
            depth: n + 3,
            mtu: n + 4,
        }
    }

    fn key(n: u8) -> Key {
        Key::new(&[n; 32]).unwrap()
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// Runs the accepting side. The stream is closed at the end, as by an agent.
    fn accept(stream: TcpStream, k: u8) -> thread::JoinHandle<Result<Endpoint, Error>> {
        thread::spawn(move || exchange(&stream, Role::Accepting, &key(k), &endpoint(7)))
    }

    #[test]
    fn both_learn_the_others_endpoint() {
        let (near, far) = pair();
        let far = accept(far, 1);
        assert_eq!(exchange(&near, Role::Connecting, &key(1), &endpoint(1000)).unwrap(), endpoint(7));
        assert_eq!(far.join().unwrap().unwrap(), endpoint(1000));
    }

    #[test]
    fn another_key_is_refused_and_learns_nothing() {
        let (near, far) = pair();
        let far = accept(far, 2);
        assert!(matches!(exchange(&near, Role::Connecting, &key(1), &endpoint(1)), Err(Error::Refused)));
        assert!(matches!(far.join().unwrap(), Err(Error::Refused)));
    }

    #[test]
    fn a_changed_endpoint_is_refused() {
        let (near, far) = pair();
        let far = accept(far, 1);
        let nonce = [9; NONCE];
        let mut stream = &near;
        stream.write_all(&[&MAGIC[..], &nonce].concat()).unwrap();
        let mut hello = [0; 8 + NONCE];
        stream.read_exact(&mut hello).unwrap();
        let theirs = hello[8..].try_into().unwrap();
        let mac = key(1).mac(Role::Connecting, &[nonce, theirs], &endpoint(1).encode()).finalize().into_bytes();
        stream.write_all(&[&endpoint(2).encode()[..], &mac].concat()).unwrap();
        assert!(matches!(far.join().unwrap(), Err(Error::Refused)));
        assert_eq!(stream.read(&mut hello).unwrap(), 0, "no endpoint for a stranger");
    }

    #[test]
    fn what_an_agent_has_sent_itself_is_refused() {
        // A relay connects two accepting agents. Each receives a MAC of the wrong role, and must
        // refuse it.
        let (near, far) = pair();
        let (near2, far2) = pair();
        let agents = [accept(far, 1), accept(far2, 1)];
        let relay = |from: &TcpStream, to: &TcpStream, n: usize| {
            let (mut from, mut to) = (from, to);
            let mut bytes = vec![0; n];
            from.read_exact(&mut bytes).unwrap();
            to.write_all(&bytes).unwrap();
        };
        relay(&near, &near2, 8 + NONCE);
        relay(&near2, &near, 8 + NONCE);
        // An accepting agent sends no proof first, and must refuse an invented one.
        for stream in [&near, &near2] {
            let mut stream = stream;
            stream.write_all(&[0; ENDPOINT + MAC]).unwrap();
        }
        for agent in agents {
            assert!(matches!(agent.join().unwrap(), Err(Error::Refused)));
        }
    }

    #[test]
    fn a_short_key_is_none() {
        assert!(matches!(Key::new(&[1; 31]), Err(Error::ShortKey)));
    }
}
