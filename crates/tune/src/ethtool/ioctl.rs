//! `SIOCETHTOOL`: numbers and layouts of the kernel's include/uapi/linux/ethtool.h.
//!
//! Every request is a buffer of 32-bit words; its first word is the command. The kernel's
//! structures have the same layout (a 64-bit member begins at an even word), so this file counts
//! offsets in words.

// No other module of the crate passes pointers to the kernel.
#![allow(unsafe_code)]

use super::{ChannelCount, Channels, Coalesce, Driver, Feature, Nic, Rings, Rss, RssTable, Rule};
use rustix::net::netdevice;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use zerocopy::IntoBytes;

const SIOCGIFHWADDR: libc::Ioctl = 0x8927;
const SIOCETHTOOL: libc::Ioctl = 0x8946;

const GDRVINFO: u32 = 0x03;
const GCOALESCE: u32 = 0x0e;
const SCOALESCE: u32 = 0x0f;
const GRINGPARAM: u32 = 0x10;
const GSTRINGS: u32 = 0x1b;
const GRXRINGS: u32 = 0x2d;
const GRXCLSRLCNT: u32 = 0x2e;
const GRXCLSRLALL: u32 = 0x30;
const SRXCLSRLDEL: u32 = 0x31;
const SRXCLSRLINS: u32 = 0x32;
const GSSET_INFO: u32 = 0x37;
const GFEATURES: u32 = 0x3a;
const SFEATURES: u32 = 0x3b;
const GCHANNELS: u32 = 0x3c;
const SCHANNELS: u32 = 0x3d;
const GRSSH: u32 = 0x46;
const SRSSH: u32 = 0x47;

/// `ETH_SS_FEATURES`, and the length of each string (`ETH_GSTRING_LEN`).
const SS_FEATURES: u32 = 4;
const STRING: usize = 32;
/// Upper bound for allocations; no kernel or device has larger numbers.
const MOST: usize = 1 << 16;

/// `struct ethtool_rxnfc` has 192 bytes. The flow specification (168 bytes) starts at byte 16, and
/// the rule count follows.
const RXNFC_WORDS: usize = 48;
const RXNFC_DATA: usize = 2;
const RXNFC_RULE_CNT: usize = 46;
/// Byte offsets of the flow specification's parts: kind, fields, masks, queue, location. The
/// fields are a `struct ethtool_tcpip4_spec` or `…6_spec`, where the ports follow two addresses.
const FLOW_KIND: usize = 16;
const FLOW_FIELDS: usize = 20;
const FLOW_MASKS: usize = 92;
const FLOW_QUEUE: usize = 168;
const FLOW_LOCATION: usize = 176;
const TCP_V4_FLOW: u32 = 0x01;
const TCP_V6_FLOW: u32 = 0x05;
/// Asks the driver to choose a location (RX_CLS_LOC_ANY). A driver that can do so sets
/// RX_CLS_LOC_SPECIAL in its answer to GRXCLSRLCNT.
const LOCATION_ANY: u32 = u32::MAX;
const LOCATION_SPECIAL: u32 = 0x8000_0000;

/// `struct ethtool_rxfh`: command, context, table size, key size, one word with hash function and
/// input transformation, a reserved word. The table follows.
const RXFH_HEAD: usize = 6;

/// A device, by its name in the network namespace of the calling thread.
pub struct Ioctl {
    socket: OwnedFd,
    name: String,
}

/// The union in `struct ifreq`, with the two members that this file uses.
#[repr(C)]
union Payload {
    data: *mut libc::c_void,
    address: libc::sockaddr,
    /// Makes the union as large as the one of 64-bit kernels.
    _all: [u8; 24],
}

#[repr(C)]
struct IfReq {
    name: [u8; libc::IFNAMSIZ],
    payload: Payload,
}

impl Ioctl {
    pub fn new(name: &str) -> io::Result<Ioctl> {
        use rustix::net::{socket_with, AddressFamily, SocketFlags, SocketType};
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        Ok(Ioctl { socket, name: name.to_owned() })
    }

    fn request(&self, payload: Payload) -> io::Result<IfReq> {
        let mut name = [0; libc::IFNAMSIZ];
        let bytes = self.name.as_bytes();
        if bytes.len() >= name.len() {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        name[..bytes.len()].copy_from_slice(bytes);
        Ok(IfReq { name, payload })
    }

    /// Sends one command. The kernel writes the answer into `words`.
    fn call(&self, words: &mut [u32]) -> io::Result<()> {
        let mut request = self.request(Payload { data: words.as_mut_ptr().cast() })?;
        // SAFETY: `words` is live during the call and nobody else uses it. Its first word is a
        // command of this file, and its length is that of the kernel's structure for this command.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Sends a command whose answer has a fixed size.
    fn ask<const N: usize>(&self, command: u32) -> io::Result<[u32; N]> {
        let mut words = [0; N];
        words[0] = command;
        self.call(&mut words)?;
        Ok(words)
    }

    /// Names of all features; the index is the number of the bit.
    fn feature_names(&self) -> io::Result<Vec<String>> {
        // The words are: command, reserved, sset_mask (64 bits), data.
        let mut info = [GSSET_INFO, 0, 1 << SS_FEATURES, 0, 0];
        self.call(&mut info)?;
        let count = (info[4] as usize).min(MOST);
        let mut words = vec![0u32; 3 + count * STRING / 4];
        words[..3].copy_from_slice(&[GSTRINGS, SS_FEATURES, count as u32]);
        self.call(&mut words)?;
        let given = (words[2] as usize).min(count);
        Ok(words[3..].as_bytes().chunks_exact(STRING).take(given).map(text).collect())
    }

    /// The highest location without a rule. The card tries lower locations first, so filters of
    /// other programs keep precedence.
    fn free_location(&self) -> io::Result<u32> {
        let counted: [u32; RXNFC_WORDS] = self.ask(GRXCLSRLCNT)?;
        let count = (counted[RXNFC_RULE_CNT] as usize).min(MOST);
        // Room for the locations, behind the structure.
        let mut words = vec![0u32; RXNFC_WORDS + count];
        (words[0], words[RXNFC_RULE_CNT]) = (GRXCLSRLALL, count as u32);
        self.call(&mut words)?;
        // The kernel writes the locations right after the count, so they begin within the padding.
        let taken = &words[RXNFC_RULE_CNT + 1..][..count];
        let size = words[RXNFC_DATA].min(MOST as u32);
        (0..size).rev().find(|l| !taken.contains(l)).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))
    }

    /// The table with its head, as GRSSH returns both.
    fn rxfh(&self) -> io::Result<Vec<u32>> {
        let sizes: [u32; RXFH_HEAD] = self.ask(GRSSH)?;
        let (table, key) = (sizes[2] as usize, sizes[3] as usize);
        if table > MOST || key > MOST {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        if table == 0 {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let mut words = vec![0u32; RXFH_HEAD + table + key.div_ceil(4)];
        words[0] = GRSSH;
        (words[2], words[3]) = (sizes[2], sizes[3]);
        self.call(&mut words)?;
        Ok(words)
    }
}

/// The `struct ethtool_rxnfc` that installs a rule.
fn insertion(rule: &Rule, location: u32) -> [u32; RXNFC_WORDS] {
    let mut words = [0u32; RXNFC_WORDS];
    words[0] = SRXCLSRLINS;
    let bytes = words.as_mut_bytes();
    let (kind, addresses) = if rule.v6 { (TCP_V6_FLOW, 32) } else { (TCP_V4_FLOW, 8) };
    // The source port comes first.
    let port = addresses + 2;
    bytes[FLOW_KIND..][..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[FLOW_FIELDS + port..][..2].copy_from_slice(&rule.port.to_be_bytes());
    bytes[FLOW_MASKS + port..][..2].copy_from_slice(&rule.mask.to_be_bytes());
    bytes[FLOW_QUEUE..][..8].copy_from_slice(&u64::from(rule.queue).to_ne_bytes());
    bytes[FLOW_LOCATION..][..4].copy_from_slice(&location.to_ne_bytes());
    words
}

/// Text up to the first zero byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

impl Nic for Ioctl {
    fn identity(&self) -> io::Result<(u32, String)> {
        let index = netdevice::name_to_index(self.socket.as_fd(), &self.name)?;
        let mut request = self.request(Payload { _all: [0; 24] })?;
        // SAFETY: SIOCGIFHWADDR writes a sockaddr into the union of `request`. The union is large
        // enough, and `request` is live during the call.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCGIFHWADDR, &raw mut request) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has written a sockaddr, and any bytes are valid for its fields.
        let address = unsafe { request.payload.address };
        let hex: Vec<String> = address.sa_data[..6].iter().map(|b| format!("{:02x}", *b as u8)).collect();
        Ok((index, hex.join(":")))
    }

    fn driver(&self) -> io::Result<Driver> {
        let words: [u32; 49] = self.ask(GDRVINFO)?;
        let bytes = words.as_bytes();
        let field = |at: usize| text(&bytes[at..at + 32]);
        Ok(Driver { name: field(4), version: field(36), firmware: field(68), bus: field(100) })
    }

    fn channels(&self) -> io::Result<Channels> {
        let w: [u32; 9] = self.ask(GCHANNELS)?;
        let count = ChannelCount { rx: w[5], tx: w[6], combined: w[8] };
        // Find out whether the driver can change the channels. The request has a number above any
        // limit. The kernel first checks whether the driver has the call (EOPNOTSUPP), and then
        // refuses the number itself (EINVAL) without asking the driver. Without privilege the
        // answer is EPERM.
        let mut more = w;
        (more[0], more[8]) = (SCHANNELS, w[4].saturating_add(1));
        let fixed = self.call(&mut more).is_err_and(|e| e.raw_os_error() == Some(libc::EOPNOTSUPP));
        Ok(Channels { max_rx: w[1], max_tx: w[2], max_combined: w[4], count, fixed })
    }

    fn set_channels(&self, count: ChannelCount) -> io::Result<()> {
        let mut words: [u32; 9] = self.ask(GCHANNELS)?;
        words[0] = SCHANNELS;
        (words[5], words[6], words[8]) = (count.rx, count.tx, count.combined);
        self.call(&mut words)
    }

    fn coalesce(&self) -> io::Result<Coalesce> {
        let w: [u32; 23] = self.ask(GCOALESCE)?;
        Ok(Coalesce {
            adaptive_rx: w[10] != 0,
            adaptive_tx: w[11] != 0,
            rx_usecs: w[1],
            rx_frames: w[2],
            tx_usecs: w[5],
            tx_frames: w[6],
        })
    }

    fn set_coalesce(&self, to: &Coalesce) -> io::Result<()> {
        let mut words: [u32; 23] = self.ask(GCOALESCE)?;
        words[0] = SCOALESCE;
        (words[1], words[2], words[5], words[6]) = (to.rx_usecs, to.rx_frames, to.tx_usecs, to.tx_frames);
        (words[10], words[11]) = (to.adaptive_rx.into(), to.adaptive_tx.into());
        self.call(&mut words)
    }

    fn rings(&self) -> io::Result<Rings> {
        let w: [u32; 9] = self.ask(GRINGPARAM)?;
        Ok(Rings { max_rx: w[1], max_tx: w[4], rx: w[5], tx: w[8] })
    }

    fn features(&self) -> io::Result<BTreeMap<String, Feature>> {
        let names = self.feature_names()?;
        let blocks = names.len().div_ceil(32);
        // The four words of each block are: available, requested, active, never changed.
        let mut words = vec![0u32; 2 + blocks * 4];
        (words[0], words[1]) = (GFEATURES, blocks as u32);
        self.call(&mut words)?;
        let bit = |i: usize, which: usize| words[2 + i / 32 * 4 + which] >> (i % 32) & 1 == 1;
        let feature = |i| Feature { on: bit(i, 2), changeable: bit(i, 0) && !bit(i, 3) };
        Ok(names.into_iter().enumerate().map(|(i, name)| (name, feature(i))).collect())
    }

    fn set_feature(&self, name: &str, on: bool) -> io::Result<()> {
        let names = self.feature_names()?;
        let unsupported = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        let bit = names.iter().position(|n| n == name).ok_or_else(unsupported)?;
        let blocks = names.len().div_ceil(32);
        // The two words of each block are: bits to change, and their new values.
        let mut words = vec![0u32; 2 + blocks * 2];
        (words[0], words[1]) = (SFEATURES, blocks as u32);
        let block = 2 + bit / 32 * 2;
        words[block] = 1 << (bit % 32);
        words[block + 1] = u32::from(on) << (bit % 32);
        self.call(&mut words)
    }

    fn rss(&self) -> io::Result<Rss> {
        let words = self.rxfh()?;
        let rings: [u32; RXNFC_WORDS] = self.ask(GRXRINGS)?;
        let table = words[RXFH_HEAD..RXFH_HEAD + words[2] as usize].to_vec();
        Ok(Rss { rings: rings[RXNFC_DATA], table, key_bytes: words[3] })
    }

    fn set_rss(&self, table: &RssTable) -> io::Result<()> {
        // Hash function 0 and key size 0 leave both unchanged. The same word also has the input
        // transformation (since 6.8), where 0 would mean none, so the present value is sent back.
        let current: [u32; RXFH_HEAD] = self.ask(GRSSH)?;
        let transformation = u32::from_ne_bytes([0, current[4].to_ne_bytes()[1], 0, 0]);
        let entries = match table {
            RssTable::Default => &[][..],
            RssTable::Explicit(entries) => entries,
        };
        let mut words = vec![SRSSH, 0, entries.len() as u32, 0, transformation, 0];
        words.extend(entries);
        self.call(&mut words)
    }

    fn ntuple_rules(&self) -> io::Result<u32> {
        let words: [u32; RXNFC_WORDS] = self.ask(GRXCLSRLCNT)?;
        Ok(words[RXNFC_RULE_CNT])
    }

    fn add_rule(&self, rule: &Rule) -> io::Result<u32> {
        let counted: [u32; RXNFC_WORDS] = self.ask(GRXCLSRLCNT)?;
        let location = if counted[RXNFC_DATA] & LOCATION_SPECIAL != 0 { LOCATION_ANY } else { self.free_location()? };
        let mut words = insertion(rule, location);
        self.call(&mut words)?;
        // The driver has written the location that it chose.
        Ok(words[FLOW_LOCATION / 4])
    }

    fn remove_rule(&self, location: u32) -> io::Result<()> {
        let mut words = [0u32; RXNFC_WORDS];
        (words[0], words[FLOW_LOCATION / 4]) = (SRXCLSRLDEL, location);
        self.call(&mut words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the offsets that `pahole -C ethtool_rxnfc` prints for x86-64.
    #[test]
    fn a_rule_as_the_kernel_reads_it() {
        let words = insertion(&Rule { v6: false, port: 0xa000, mask: 0xe000, queue: 3 }, 9);
        let bytes = words.as_bytes();
        assert_eq!((words[0], words[4], words[42], words[43], words[44]), (0x32, 1, 3, 0, 9));
        assert_eq!((&bytes[30..32], &bytes[102..104]), (&[0xa0, 0][..], &[0xe0, 0][..]));
        let words = insertion(&Rule { v6: true, port: 0xa000, mask: 0xe000, queue: 3 }, 9);
        let bytes = words.as_bytes();
        assert_eq!(words[4], 5);
        assert_eq!((&bytes[54..56], &bytes[126..128]), (&[0xa0, 0][..], &[0xe0, 0][..]));
        // The rule must not compare any other field.
        let others = bytes.iter().enumerate().filter(|(i, b)| **b != 0 && *i >= 20 && *i < 164).count();
        assert_eq!(others, 2);
    }
}
