//! `fastsocket steer`: asks the monitor to steer packets of a device (ADR 18).

use crate::cmdline::Steer;
use crate::text::{print, table};
use anyhow::{bail, Context, Result};
use fsocket_client::control;
use fsocket_proto::steer::{Answer, Attach, Device, Request, POLICIES};

pub fn steer(args: Steer) -> Result<i32> {
    let request = match args.device {
        None => Request::Status,
        Some(device) if args.off => Request::Detach { device },
        Some(device) => Request::Attach(Attach {
            device,
            policy: absolute(args.policy)?,
            precise: args.precise,
            cpus: args.cpus.filter(|cpus| !cpus.is_empty()).map(|cpus| cpus.iter().collect()),
            mode: args.mode,
        }),
    };
    let monitor = control::find().context("steering is the monitor's work; start one (fastsocketd)")?;
    let answer = control::steer(&monitor, &request)?;
    if args.json {
        anstream::println!("{}", serde_json::to_string_pretty(&answer)?);
        return Ok(i32::from(answer.error.is_some()));
    }
    if let Some(error) = answer.error {
        bail!("{error}");
    }
    print(text(&answer));
    Ok(0)
}

/// Makes a file name absolute, because the monitor has another working directory.
fn absolute(policy: String) -> Result<String> {
    if POLICIES.contains(&policy.as_str()) {
        return Ok(policy);
    }
    let path = std::path::Path::new(&policy)
        .canonicalize()
        .with_context(|| format!("policy {policy}: not {}, and no file", POLICIES.join(", ")))?;
    path.into_os_string().into_string().map_err(|name| anyhow::anyhow!("policy {name:?}: not UTF-8"))
}

fn text(answer: &Answer) -> String {
    if answer.devices.is_empty() {
        return "no device of this network namespace is steered".to_owned();
    }
    answer.devices.iter().map(device_text).collect::<Vec<_>>().join("\n\n")
}

fn device_text(d: &Device) -> String {
    let mut text = format!("{}: {} by {}", d.device, d.policy, d.by);
    if d.precise {
        text += ", precise";
    }
    if !d.alive {
        text += ": THE DEVICE IS GONE; nothing is steered any more";
    }
    if let Some(because) = &d.because {
        text += &format!("\n  not better because: {because}");
    }
    if !d.slices.is_empty() {
        let mut slices = table(&["CPU", "SOURCE PORTS", "IN USE"], &[0, 2]);
        for slice in &d.slices {
            let range = format!("{}-{}", slice.first, slice.last);
            slices.add_row([slice.cpu.to_string(), range, slice.in_use.to_string()]);
        }
        text += &format!("\n\n{slices}");
    }
    let cpus = d.packets.values().map(Vec::len).max().unwrap_or(0);
    // The order must be that of the verdicts in the BPF program.
    let names = [
        "to_self",
        "to_other",
        "passed_active",
        "passed_passive",
        "no_cpu",
        "queue_full",
        "not_tcp",
        "fragment",
        "short",
    ];
    let header = [
        "CPU",
        "SELF",
        "OTHER",
        "PASSED ACTIVE",
        "PASSED PASSIVE",
        "NO CPU",
        "QUEUE FULL",
        "NOT TCP",
        "FRAGMENT",
        "SHORT",
    ];
    let mut packets = table(&header, &(0..header.len()).collect::<Vec<_>>());
    for cpu in 0..cpus {
        let count = |name: &str| d.packets.get(name).and_then(|by| by.get(cpu)).copied().unwrap_or(0);
        if d.cpus.contains(&(cpu as u32)) || names.iter().any(|name| count(name) > 0) {
            packets.add_row(std::iter::once(cpu.to_string()).chain(names.iter().map(|name| count(name).to_string())));
        }
    }
    text + &format!("\n\n{packets}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_proto::steer::Slice;

    #[test]
    fn says_what_is_steered() {
        let device = Device {
            device: "eth7".to_owned(),
            policy: "rfd".to_owned(),
            by: "XDP generic".to_owned(),
            because: Some("native XDP: Operation not supported".to_owned()),
            alive: true,
            cpus: vec![0, 1],
            slices: vec![Slice { cpu: 1, first: 40960, last: 49151, in_use: 17 }],
            packets: [("to_other".to_owned(), vec![5, 6])].into(),
            ..Default::default()
        };
        let text = device_text(&device);
        assert!(text.starts_with("eth7: rfd by XDP generic"), "{text}");
        for part in ["40960-49151", "17", "Operation not supported"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("GONE"));
        assert!(device_text(&Device { alive: false, ..device }).contains("GONE"));
    }
}
