//! A recorded device in a file, for tests with hardware that the test machine lacks.

use super::{ChannelCount, Channels, Coalesce, Driver, Feature, Nic, Rings, Rss, RssTable, Rule, NTUPLE};
use crate::root::Root;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

/// The contents of `ROOT/ethtool/DEV.json`: the answers of the device. A change of a setting
/// changes the file. The device does not support a member that is absent.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recording {
    pub driver: Driver,
    pub channels: Option<Channels>,
    pub coalesce: Option<Coalesce>,
    /// Whether the device accepts adaptive moderation.
    pub can_adapt: bool,
    pub rings: Option<Rings>,
    pub features: BTreeMap<String, Feature>,
    pub rss: Option<Rss>,
    /// Installed rules by location.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rules: BTreeMap<u32, Rule>,
}

/// A device that answers from a `Recording`.
pub struct Recorded {
    root: Root,
    name: String,
}

fn unsupported() -> io::Error {
    io::Error::from_raw_os_error(libc::EOPNOTSUPP)
}

impl Recorded {
    pub fn new(root: &Root, name: &str) -> Recorded {
        Recorded { root: root.clone(), name: name.to_owned() }
    }

    fn file(&self) -> PathBuf {
        self.root.path(format!("ethtool/{}.json", self.name))
    }

    /// A device without a recording supports nothing.
    pub fn load(&self) -> io::Result<Recording> {
        match fs::read(self.file()) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Recording::default()),
            Err(e) => Err(e),
        }
    }

    pub fn store(&self, recording: &Recording) -> io::Result<()> {
        fs::write(self.file(), serde_json::to_vec_pretty(recording)?)
    }

    /// Makes the directories that a kernel would show for these queues.
    fn resize(&self, kind: &str, files: &[&str], count: u32) -> io::Result<()> {
        let queues = self.root.path(format!("sys/class/net/{}/queues", self.name));
        for i in 0..count {
            let queue = queues.join(format!("{kind}-{i}"));
            if !queue.exists() {
                fs::create_dir_all(&queue)?;
                for file in files {
                    fs::write(queue.join(file), "0\n")?;
                }
            }
        }
        let mut i = count;
        while queues.join(format!("{kind}-{i}")).exists() {
            fs::remove_dir_all(queues.join(format!("{kind}-{i}")))?;
            i += 1;
        }
        Ok(())
    }
}

impl Nic for Recorded {
    fn identity(&self) -> io::Result<(u32, String)> {
        let net = format!("sys/class/net/{}", self.name);
        let index = self.root.number(format!("{net}/ifindex"));
        let index = index.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
        Ok((index as u32, self.root.get(format!("{net}/address")).unwrap_or_default()))
    }

    fn driver(&self) -> io::Result<Driver> {
        self.identity()?;
        Ok(self.load()?.driver)
    }

    fn channels(&self) -> io::Result<Channels> {
        self.load()?.channels.ok_or_else(unsupported)
    }

    fn set_channels(&self, count: ChannelCount) -> io::Result<()> {
        self.identity()?;
        let mut recording = self.load()?;
        let channels = recording.channels.as_mut().filter(|c| !c.fixed).ok_or_else(unsupported)?;
        if count.rx > channels.max_rx || count.tx > channels.max_tx || count.combined > channels.max_combined {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        channels.count = count;
        let rings = count.receiving();
        if let Some(rss) = &mut recording.rss {
            // As in the kernel, the count must not fall below a ring that a program's own table
            // names.
            if !rss.is_default() && rss.table.iter().any(|ring| *ring >= rings) {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            if rss.is_default() {
                rss.table = (0..rss.table.len() as u32).map(|i| i % rings.max(1)).collect();
            }
            rss.rings = rings;
        }
        self.resize("rx", &["rps_cpus", "rps_flow_cnt"], rings)?;
        self.resize("tx", &["xps_cpus"], count.tx + count.combined)?;
        self.store(&recording)
    }

    fn coalesce(&self) -> io::Result<Coalesce> {
        self.load()?.coalesce.ok_or_else(unsupported)
    }

    fn set_coalesce(&self, to: &Coalesce) -> io::Result<()> {
        let mut recording = self.load()?;
        if recording.coalesce.is_none() || (to.adaptive_rx || to.adaptive_tx) && !recording.can_adapt {
            return Err(unsupported());
        }
        recording.coalesce = Some(*to);
        self.store(&recording)
    }

    fn rings(&self) -> io::Result<Rings> {
        self.load()?.rings.ok_or_else(unsupported)
    }

    fn features(&self) -> io::Result<BTreeMap<String, Feature>> {
        Ok(self.load()?.features)
    }

    fn set_feature(&self, name: &str, on: bool) -> io::Result<()> {
        let mut recording = self.load()?;
        let feature = recording.features.get_mut(name).filter(|f| f.changeable).ok_or_else(unsupported)?;
        feature.on = on;
        self.store(&recording)
    }

    fn rss(&self) -> io::Result<Rss> {
        self.load()?.rss.ok_or_else(unsupported)
    }

    fn set_rss(&self, table: &RssTable) -> io::Result<()> {
        let mut recording = self.load()?;
        let rss = recording.rss.as_mut().ok_or_else(unsupported)?;
        rss.table = match table {
            RssTable::Default => (0..rss.table.len() as u32).map(|i| i % rss.rings.max(1)).collect(),
            RssTable::Explicit(entries)
                if entries.len() == rss.table.len() && entries.iter().all(|ring| *ring < rss.rings) =>
            {
                entries.clone()
            }
            RssTable::Explicit(_) => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        };
        self.store(&recording)
    }

    fn ntuple_rules(&self) -> io::Result<u32> {
        let recording = self.load()?;
        recording.features.get(NTUPLE).map(|_| recording.rules.len() as u32).ok_or_else(unsupported)
    }

    fn add_rule(&self, rule: &Rule) -> io::Result<u32> {
        let mut recording = self.load()?;
        recording.features.get(NTUPLE).filter(|f| f.on).ok_or_else(unsupported)?;
        if rule.queue >= recording.channels.map_or(1, |c| c.count.receiving()) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let location = recording.rules.keys().next_back().map_or(0, |last| last + 1);
        recording.rules.insert(location, *rule);
        self.store(&recording)?;
        Ok(location)
    }

    fn remove_rule(&self, location: u32) -> io::Result<()> {
        let mut recording = self.load()?;
        recording.rules.remove(&location).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        self.store(&recording)
    }
}
