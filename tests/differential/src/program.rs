//! Programs, and their form as text.

use crate::call::{Call, Kind};
use crate::symbols as sym;
use anyhow::{bail, ensure, Context, Result};
use std::fmt;

/// Upper limits of a program's actors, variables and ports.
pub const ACTORS: usize = 12;
pub const VARS: usize = 64;
pub const PORTS: usize = 8;
/// Upper limit of a call's arguments, including lists.
pub const ARGS: usize = 32;

/// One call by one actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub actor: u8,
    /// First variable that gets what the call returns.
    pub out: u8,
    pub call: Call,
    /// Arguments as [`Kind`] describes them; a list is flattened into pairs.
    pub args: Vec<i64>,
}

/// A program: actor `i < processes` is the first thread of process `i`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Program {
    pub processes: u8,
    pub steps: Vec<Step>,
}

impl Step {
    /// May the step sleep? If so, does it consume the object for which it waits?
    pub fn sleeps(&self) -> Option<bool> {
        use Call::*;
        let flag = |i: usize| self.args[i] & i64::from(libc::MSG_DONTWAIT) != 0;
        match self.call {
            Accept | AcceptNull | Accept4 | Read | ReadV | PreadV2 | RecvFd | Any | Long | Child => Some(true),
            Ping | Echo => Some(true),
            Recv | RecvFrom => (!flag(2)).then_some(true),
            RecvMsg | RecvMmsg => (!flag(3)).then_some(true),
            EpollWait | EpollPwait | EpollPwait2 => (self.args[2] != 0).then_some(true),
            Poll | PPoll | Select | PSelect => (self.args[0] != 0).then_some(false),
            _ => None,
        }
    }

    /// Does the step send in several calls, one after the other?
    fn sends_in_pieces(&self) -> bool {
        matches!(self.call, Call::SendMore | Call::SendMmsg | Call::Any | Call::Long)
    }

    /// Does the step hold back sent bytes, or release them?
    fn corks(&self) -> bool {
        let more = |i: usize| self.args[i] & i64::from(libc::MSG_MORE) != 0;
        match self.call {
            Call::Send | Call::SendTo => more(2),
            Call::SendMsg | Call::SendMmsg => more(3),
            Call::SetOpt => Some(self.args[1]) == sym::option("CORK"),
            _ => false,
        }
    }

    /// Does the step receive the bytes that are there?
    fn receives(&self) -> bool {
        use Call::*;
        matches!(self.call, Read | ReadV | PreadV2 | Recv | RecvFrom | RecvMsg | RecvMmsg)
    }

    /// The variables that the step uses as descriptors.
    fn vars(&self) -> Vec<usize> {
        let mut vars = Vec::new();
        for (i, kind) in self.call.spec().args.iter().enumerate() {
            match kind {
                Kind::Var => vars.push(self.args[i] as usize),
                Kind::List(_) => vars.extend(self.args[i..].iter().step_by(2).map(|v| *v as usize)),
                _ => {}
            }
        }
        vars
    }
}

impl Program {
    /// Gives each variable a number. Variables that may refer to the same open file get the same
    /// number, and so do an epoll instance and what it watches.
    fn groups(&self) -> [usize; VARS] {
        let mut group: [usize; VARS] = std::array::from_fn(|v| v);
        for step in &self.steps {
            let vars = step.vars();
            let (a, b) = match step.call {
                Call::Dup | Call::DupFd | Call::DupFdCloexec | Call::DupOnto => (step.out as usize, vars[0]),
                Call::Dup2 | Call::Dup3 | Call::EpollAdd => (vars[0], vars[1]),
                _ => continue,
            };
            let (from, to) = (group[a], group[b]);
            group.iter_mut().filter(|g| **g == from).for_each(|g| *g = to);
        }
        group
    }

    /// The port at which a descriptor listens, if a step says so.
    pub fn port_of(&self, var: usize) -> Option<usize> {
        let group = self.groups();
        let listens = |s: &&Step| s.call == Call::Listen && s.args[2] >= 0 && group[s.args[0] as usize] == group[var];
        self.steps.iter().find(listens).map(|s| s.args[2] as usize)
    }

    /// Has the variable been bound? Then it connects over kernel TCP.
    pub fn is_bound(&self, var: usize) -> bool {
        self.steps.iter().any(|s| s.call == Call::Bind && s.args[0] as usize == var)
    }

    /// Do step `i` and the sleeping step `j` contend? They do if one takes what the other waits
    /// for, because the order of wake-ups is then open. They also do if `i` sends in pieces and `j`
    /// receives, because the number of pieces is open that the receiver finds after the first one
    /// has woken it.
    pub fn contend(&self, i: usize, j: usize) -> bool {
        let (a, b) = (&self.steps[i], &self.steps[j]);
        if a.sends_in_pieces() && b.receives() {
            return true;
        }
        // The kernel wakes a sleeper for held-back bytes later than the library does.
        if a.corks() && b.sleeps().is_some() {
            return true;
        }
        let (Some(takes), Some(other)) = (a.sleeps(), b.sleeps()) else { return false };
        let group = self.groups();
        (takes || other) && a.vars().iter().any(|v| b.vars().iter().any(|w| group[*v] == group[*w]))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = self.call.spec();
        if !self.call.is_external() {
            write!(f, "a{} ", self.actor)?;
        }
        match spec.outs {
            0 => {}
            1 => write!(f, "v{} = ", self.out)?,
            _ => write!(f, "v{},v{} = ", self.out, self.out + 1)?,
        }
        write!(f, "{}", spec.name)?;
        for (i, kind) in spec.args.iter().enumerate() {
            let v = self.args.get(i).copied().unwrap_or(0);
            match kind {
                Kind::Var => write!(f, " v{v}")?,
                Kind::Port if v < 0 => write!(f, " -")?,
                Kind::Port => write!(f, " p{v}")?,
                Kind::Actor => write!(f, " a{v}")?,
                Kind::Int => write!(f, " {v}")?,
                Kind::Bits(names) => write!(f, " {}", sym::bits(names, v))?,
                Kind::One(names) => write!(f, " {}", sym::one(names, v))?,
                Kind::Opt => write!(f, " {}", sym::OPTIONS.get(v as usize).map_or("?", |o| o.0))?,
                Kind::List(names) => {
                    for pair in self.args[i..].chunks_exact(2) {
                        write!(f, " v{}:{}", pair[0], sym::bits(names, pair[1]))?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "processes {}", self.processes)?;
        for step in &self.steps {
            writeln!(f, "{step}")?;
        }
        Ok(())
    }
}

fn index(word: &str, prefix: char, limit: usize) -> Result<u8> {
    let n: u8 = word.strip_prefix(prefix).with_context(|| format!("{word:?}: expected {prefix}N"))?.parse()?;
    ensure!((n as usize) < limit, "{word}: below {limit}, please");
    Ok(n)
}

fn parse_step(line: &str) -> Result<Step> {
    let mut words = line.split_whitespace().peekable();
    let mut actor = 0;
    if let Some(word) = words.next_if(|w| w.starts_with('a') && index(w, 'a', ACTORS).is_ok()) {
        actor = index(word, 'a', ACTORS)?;
    }
    let mut out = 0;
    let first = words.next().context("an empty step")?;
    let name = if first.starts_with('v') && words.peek() == Some(&"=") {
        out = index(first.split(',').next().unwrap_or(first), 'v', VARS)?;
        words.next();
        words.next().context("a call is missing")?
    } else {
        first
    };
    let call = Call::by_name(name).with_context(|| format!("no such call: {name}"))?;
    let mut args = Vec::new();
    for kind in call.spec().args {
        if let Kind::List(names) = kind {
            for word in words.by_ref() {
                let (var, events) = word.split_once(':').context("expected vN:EVENTS")?;
                args.push(index(var, 'v', VARS)?.into());
                args.push(sym::parse_bits(names, events).with_context(|| format!("flags {events:?}"))?);
            }
            break;
        }
        let word = words.next().with_context(|| format!("{name}: an argument is missing"))?;
        args.push(match kind {
            Kind::Var => index(word, 'v', VARS)?.into(),
            Kind::Port if word == "-" => -1,
            Kind::Port => index(word, 'p', PORTS)?.into(),
            Kind::Actor => index(word, 'a', ACTORS)?.into(),
            Kind::Int => word.parse().with_context(|| format!("number {word:?}"))?,
            Kind::Bits(names) => sym::parse_bits(names, word).with_context(|| format!("flags {word:?}"))?,
            Kind::One(names) => sym::parse_one(names, word).with_context(|| format!("word {word:?}"))?,
            Kind::Opt => sym::option(word).with_context(|| format!("option {word:?}"))?,
            Kind::List(_) => bail!("a list is last"),
        });
    }
    ensure!(words.next().is_none(), "{name}: too many arguments");
    ensure!(args.len() <= ARGS, "{name}: more than {ARGS} arguments");
    ensure!(out as usize + call.spec().outs <= VARS, "variables end at v{}", VARS - 1);
    Ok(Step { actor, out, call, args })
}

impl std::str::FromStr for Program {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Program> {
        let mut program = Program::default();
        for (n, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or("").trim();
            if line.is_empty() {
                continue;
            }
            match line.strip_prefix("processes ") {
                Some(count) => program.processes = count.trim().parse().context("processes")?,
                None => program.steps.push(parse_step(line).with_context(|| format!("line {}: {line}", n + 1))?),
            }
        }
        ensure!((1..=4).contains(&program.processes), "processes: 1 to 4");
        Ok(program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let text = "processes 2\na0 v0 = socket inet NONBLOCK|CLOEXEC\na0 listen v0 16 p0\na1 v2,v3 = pipe 0\n\
                    a1 connect v1 lo4 p0\na0 poll -1 v0:IN v2:IN|RDHUP\na1 setsockopt v1 NODELAY 1\n\
                    signal a1 USR1\na1 shutdown v1 WR\na0 bind v0 any6 -\n";
        let program: Program = text.parse().expect("parses");
        assert_eq!(program.to_string(), text);
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in ["a0 jump v0", "a0 close", "a0 close v99", "a0 close v1 v2", "a0 send v0 10 LOUD", "processes 9"] {
            assert!(format!("processes 1\n{bad}\n").parse::<Program>().is_err(), "{bad}");
        }
    }
}
