//! `share` and `[[rule]]` of the configuration file: turns their text into [`Rules`].
//!
//! Names are looked up once, when the file is read. Anything doubtful is an error: a rule that
//! silently means something else is worse than a monitor that does not start.

use super::programs::Program;
use super::rules::{Action, End, Member, Namespace, Network, Rule, Rules};
use serde::Deserialize;
use std::ffi::CString;
use std::net::IpAddr;
use std::path::PathBuf;
use toml::Spanned;

/// An error, and its position in the file in bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Wrong {
    pub at: usize,
    pub what: String,
}

fn wrong<T>(at: usize, what: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong { at, what: what.into() })
}

/// A user or group, by name or number.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Name {
    Number(u32),
    Text(String),
}

/// A port, or a range such as "8000-8080"; an inode number, or a path.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Number {
    Number(u64),
    Text(String),
}

type Field<T> = Option<Spanned<T>>;

/// `[[rule]]`; see fastsocketd.toml(5).
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawRule {
    action: Spanned<String>,
    client_user: Field<Name>,
    client_group: Field<Name>,
    client_exe: Field<String>,
    client_cgroup: Field<String>,
    server_user: Field<Name>,
    server_group: Field<Name>,
    server_exe: Field<String>,
    server_cgroup: Field<String>,
    netns: Field<Number>,
    address: Field<String>,
    port: Field<Number>,
    path: Field<String>,
}

/// One line of `share`.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct RawShare(Vec<Name>);

/// `[[program]]`; see fastsocketd.toml(5).
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawProgram {
    exe: Field<String>,
    unit: Field<String>,
    cgroup: Field<String>,
    off: Option<bool>,
    zones: Option<bool>,
    spin: Option<bool>,
    stdio: Option<bool>,
    channels: Field<i64>,
}

/// Reads the `[[program]]` entries. `place` turns a position in the file into text for messages.
///
/// # Errors
/// The first mistake.
pub fn programs(raw: &[Spanned<RawProgram>], place: &dyn Fn(usize) -> String) -> Result<Vec<Program>, Wrong> {
    let mut list: Vec<Program> = Vec::new();
    for raw in raw {
        let at = raw.span().start;
        let next = program(at, place(at), raw.get_ref())?;
        if let Some(before) = list.iter().find(|p| p.covers(&next)) {
            return wrong(at, format!("this program never matches: the one at {} comes first", before.place));
        }
        list.push(next);
    }
    Ok(list)
}

fn program(at: usize, place: String, raw: &RawProgram) -> Result<Program, Wrong> {
    let p = Program {
        place,
        exe: given(&raw.exe, |at, p: &String| absolute(at, p).map(PathBuf::from))?,
        unit: given(&raw.unit, |at, u: &String| unit(at, u))?,
        cgroup: given(&raw.cgroup, |at, p: &String| cgroup(at, p))?,
        off: raw.off == Some(true),
        no_zones: raw.zones == Some(false),
        no_spin: raw.spin == Some(false),
        no_stdio: raw.stdio == Some(false),
        channels: given(&raw.channels, |at, n| match usize::try_from(*n) {
            Ok(n @ 1..) => Ok(n),
            _ => wrong(at, format!("channels {n}: it is 1 or more; off = true allows none")),
        })?,
    };
    if p.exe.is_none() && p.unit.is_none() && p.cgroup.is_none() {
        return wrong(at, "a program is named by exe, unit or cgroup");
    }
    if [raw.off, raw.zones, raw.spin, raw.stdio].iter().all(Option::is_none) && raw.channels.is_none() {
        return wrong(at, "nothing is set: off, zones, spin, stdio or channels");
    }
    Ok(p)
}

fn unit(at: usize, unit: &str) -> Result<String, Wrong> {
    if unit.is_empty() || unit.contains('/') {
        return wrong(at, format!("'{unit}' names no unit"));
    }
    Ok(if unit.contains('.') { unit.to_owned() } else { format!("{unit}.service") })
}

/// Reads `share` and the rules. `line` turns a position in the file into a line number.
///
/// # Errors
/// The first mistake.
pub fn rules(
    share: &[Spanned<RawShare>],
    rules: &[Spanned<RawRule>],
    line: &dyn Fn(usize) -> usize,
) -> Result<Rules, Wrong> {
    let share = share.iter().map(|s| members(s.span().start, &s.get_ref().0)).collect::<Result<_, _>>()?;
    let mut list: Vec<Rule> = Vec::new();
    for raw in rules {
        let at = raw.span().start;
        let next = rule(line(at), raw.get_ref())?;
        if let Some(before) = list.iter().find(|r| r.covers(&next)) {
            return wrong(at, format!("this rule never matches: the one in line {} comes first", before.line));
        }
        list.push(next);
    }
    Ok(Rules { share, rules: list })
}

fn members(at: usize, names: &[Name]) -> Result<Vec<Member>, Wrong> {
    let mut all: Vec<Member> = Vec::new();
    for name in names {
        let member = match name {
            Name::Text(t) if t.starts_with("unit:") => Member::Unit(unit(at, &t["unit:".len()..])?),
            Name::Text(t) if t.starts_with("cgroup:") => Member::Cgroup(cgroup(at, &t["cgroup:".len()..])?),
            name => Member::User(id(at, "user", name)?),
        };
        if all.contains(&member) {
            return wrong(at, format!("share: {} is named twice", show(name)));
        }
        all.push(member);
    }
    if all.len() < 2 {
        return wrong(at, "share: one line names at least two that share with each other");
    }
    Ok(all)
}

fn rule(line: usize, raw: &RawRule) -> Result<Rule, Wrong> {
    let action = match raw.action.get_ref().as_str() {
        "allow" => Action::Allow,
        "deny" => Action::Deny,
        "kernel-first" => Action::KernelFirst,
        other => return wrong(raw.action.span().start, format!("action '{other}': it is allow, deny or kernel-first")),
    };
    let end = |user: &Field<Name>, group: &Field<Name>, exe: &Field<String>, cg: &Field<String>| {
        Ok::<End, Wrong>(End {
            uid: given(user, |at, n| id(at, "user", n))?,
            gid: given(group, |at, n| id(at, "group", n))?,
            exe: given(exe, |at, p: &String| absolute(at, p).map(PathBuf::from))?,
            cgroup: given(cg, |at, p: &String| cgroup(at, p))?,
        })
    };
    Ok(Rule {
        line,
        action,
        client: end(&raw.client_user, &raw.client_group, &raw.client_exe, &raw.client_cgroup)?,
        server: end(&raw.server_user, &raw.server_group, &raw.server_exe, &raw.server_cgroup)?,
        netns: given(&raw.netns, |at, n| match n {
            Number::Number(inode) => Ok(Namespace::Inode(*inode)),
            Number::Text(path) => Ok(Namespace::Path(absolute(at, path)?.into())),
        })?,
        network: given(&raw.address, |at, a: &String| network(at, a))?,
        ports: given(&raw.port, ports)?,
        path: given(&raw.path, |at, p: &String| unix_name(at, p))?,
    })
}

fn given<T, U>(field: &Field<T>, f: impl Fn(usize, &T) -> Result<U, Wrong>) -> Result<Option<U>, Wrong> {
    field.as_ref().map(|s| f(s.span().start, s.get_ref())).transpose()
}

fn show(name: &Name) -> String {
    match name {
        Name::Number(n) => n.to_string(),
        Name::Text(t) => format!("'{t}'"),
    }
}

fn absolute(at: usize, path: &str) -> Result<&str, Wrong> {
    match path.starts_with('/') {
        true => Ok(path),
        false => wrong(at, format!("'{path}' is not an absolute path")),
    }
}

/// The name of a Unix socket: a path, or `@` and the rest of an abstract name.
fn unix_name(at: usize, name: &str) -> Result<String, Wrong> {
    match name.strip_prefix('@') {
        Some(rest) if !rest.is_empty() => Ok(name.to_owned()),
        _ => absolute(at, name).map(str::to_owned),
    }
}

fn cgroup(at: usize, path: &str) -> Result<String, Wrong> {
    let path = absolute(at, path)?;
    let path = path.strip_prefix("/sys/fs/cgroup/").map_or(path.to_owned(), |rest| format!("/{rest}"));
    Ok(if path.len() > 1 { path.trim_end_matches('/').to_owned() } else { path })
}

fn ports(at: usize, n: &Number) -> Result<(u16, u16), Wrong> {
    let one = |n: u64| u16::try_from(n).ok().filter(|p| *p != 0);
    let range = match n {
        Number::Number(n) => one(*n).map(|p| (p, p)),
        Number::Text(t) => {
            let (first, last) = t.split_once('-').unwrap_or((t, t));
            let parse = |s: &str| s.trim().parse().ok().and_then(one);
            parse(first).zip(parse(last)).filter(|(a, b)| a <= b)
        }
    };
    range.ok_or_else(|| Wrong { at, what: "a port is 1 to 65535, a range of them is written \"8000-8080\"".into() })
}

fn network(at: usize, text: &str) -> Result<Network, Wrong> {
    let bad = |why: &str| Wrong { at, what: format!("address '{text}': {why}") };
    let (ip, bits) = text.split_once('/').map_or((text, None), |(ip, bits)| (ip, Some(bits)));
    let ip: IpAddr = ip.parse().map_err(|_| bad("not an IP address"))?;
    let (mapped, extra, most) = match ip {
        IpAddr::V4(v4) => (v4.to_ipv6_mapped().octets(), 96u8, 32u8),
        IpAddr::V6(v6) => (v6.octets(), 0, 128),
    };
    let bits: u8 = match bits {
        None => most,
        Some(b) => b.parse().ok().filter(|b| *b <= most).ok_or_else(|| bad("the prefix is too long or no number"))?,
    };
    let bits = bits + extra;
    let host = u128::MAX.checked_shr(u32::from(bits)).unwrap_or(0);
    if u128::from_be_bytes(mapped) & host != 0 {
        return Err(bad("has bits set behind its prefix"));
    }
    Ok(Network { ip: mapped, bits })
}

fn id(at: usize, kind: &str, name: &Name) -> Result<u32, Wrong> {
    let text = match name {
        Name::Number(n) => return Ok(*n),
        Name::Text(text) => text,
    };
    if let Ok(n) = text.parse() {
        return Ok(n);
    }
    let found = CString::new(text.as_str()).ok().and_then(|c| look_up(kind, &c));
    found.ok_or_else(|| Wrong { at, what: format!("unknown {kind} '{text}'") })
}

fn look_up(kind: &str, name: &CString) -> Option<u32> {
    let mut buffer = vec![0 as libc::c_char; 64 * 1024];
    // SAFETY: zeroed `group` and `passwd` are valid plain C data. The buffer and all pointers live
    // during the calls, which write no more than the given length. The number is copied before the
    // buffer is freed.
    unsafe {
        if kind == "group" {
            let (mut entry, mut found) = (std::mem::zeroed::<libc::group>(), std::ptr::null_mut());
            let rc = libc::getgrnam_r(name.as_ptr(), &raw mut entry, buffer.as_mut_ptr(), buffer.len(), &raw mut found);
            (rc == 0 && !found.is_null()).then_some(entry.gr_gid)
        } else {
            let (mut entry, mut found) = (std::mem::zeroed::<libc::passwd>(), std::ptr::null_mut());
            let rc = libc::getpwnam_r(name.as_ptr(), &raw mut entry, buffer.as_mut_ptr(), buffer.len(), &raw mut found);
            (rc == 0 && !found.is_null()).then_some(entry.pw_uid)
        }
    }
}
