//! `fastsocket stat --locks`: measures for which locks of the kernel CPUs wait.

use crate::measure;
use crate::text::{print, table};
use anyhow::Result;
use fsocket_bpf::locks::{Contention, Locks};

/// Number of rows in the text output; the JSON output has all.
const SHOWN: usize = 25;

pub fn run(seconds: f64, json: bool) -> Result<i32> {
    fsocket_bpf::quiet();
    let measuring = Locks::start()?;
    let seconds = measure::wait("--locks", seconds)?;
    let all = measuring.contention()?;
    let lost: Vec<_> = measuring.reasons()?.into_iter().filter(|c| c.name != "counted" && c.total() > 0).collect();
    drop(measuring);
    if json {
        let sites: Vec<_> = all.iter().map(as_json).collect();
        let lost: serde_json::Map<_, _> = lost.iter().map(|c| (c.name.to_owned(), c.total().into())).collect();
        let value = serde_json::json!({ "seconds": seconds, "contention": sites, "incomplete": lost });
        anstream::println!("{}", serde_json::to_string_pretty(&value)?);
        return Ok(0);
    }
    let mut text = text(&all);
    for count in lost {
        text += &format!("\nnot in these figures: {} {}", count.name, count.total());
    }
    print(text);
    Ok(0)
}

fn as_json(c: &Contention) -> serde_json::Value {
    serde_json::json!({
        "lock": c.lock, "class": c.class, "caller": c.caller,
        "contentions": c.times, "wait_ns": c.ns, "longest_ns": c.longest,
    })
}

fn text(all: &[Contention]) -> String {
    if all.is_empty() {
        return "no lock was waited for".to_owned();
    }
    let header = ["LOCK", "CLASS", "CONTENTIONS", "WAITED us", "AVERAGE us", "LONGEST us", "CALLER"];
    let mut sites = table(&header, &[2, 3, 4, 5]);
    let us = |ns: u64| format!("{:.1}", ns as f64 / 1000.0);
    for c in all.iter().take(SHOWN) {
        let or = |text: &str| if text.is_empty() { "?".to_owned() } else { text.to_owned() };
        sites.add_row([
            or(&c.lock),
            c.class.to_owned(),
            c.times.to_string(),
            us(c.ns),
            us(c.ns / c.times.max(1)),
            us(c.longest),
            or(&c.caller),
        ]);
    }
    let more = all.len().saturating_sub(SHOWN);
    format!("{sites}{}", if more > 0 { format!("\n... and {more} more (--json has all)") } else { String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_times_and_averages() {
        let lock = |lock: &str, times, ns| Contention {
            lock: lock.to_owned(),
            class: "spinlock",
            caller: "tcp_v4_rcv".to_owned(),
            times,
            ns,
            longest: ns,
        };
        let text = text(&[lock("slock", 4, 10_000), lock("", 1, 500)]);
        let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["slock", "spinlock", "4", "10.0", "2.5", "10.0", "tcp_v4_rcv"]);
        assert_eq!(rows[2][0], "?");
        assert!(super::text(&[]).contains("no lock"));
    }
}
