//! The configuration file of the monitor: TOML, everything optional.
//!
//! ```toml
//! [balance]
//! enabled = true      # stealing and migration
//! busy = 75           # a queue is busy above this share of its limit, percent
//! idle = 10           # and no longer when its average is below this
//! ratio = 5           # local connections for one stolen from a busy zone
//! patience_us = 1000  # how long a connection is left to a worker that is not busy; tenfold while it keeps up
//! interval_ms = 100   # how often queues are measured and flow groups move
//! migrate = true      # flow groups
//! groups = 0          # flow groups that one zone takes at a time; 0: a CPU's share in 8.5 s
//! ```

use crate::zones::balance::Knobs;
use serde::Deserialize;
use std::path::Path;
use std::time::Duration;

/// Read if no other is named.
pub const FILE: &str = "/etc/fastsocket/fastsocketd.toml";

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("{file}: {source}")]
    Read { file: String, source: std::io::Error },
    /// Says line and column.
    #[error("{file}: {source}")]
    Parse { file: String, source: toml::de::Error },
    #[error("balance: {0}")]
    Value(&'static str),
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub balance: Balance,
}

/// `[balance]`; see the top of this file.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Balance {
    enabled: Option<bool>,
    busy: Option<u32>,
    idle: Option<u32>,
    ratio: Option<u32>,
    patience_us: Option<u64>,
    interval_ms: Option<u64>,
    migrate: Option<bool>,
    groups: Option<u32>,
}

/// Reads the file named, or the usual one if there is one.
///
/// # Errors
/// [`SettingsError`]; that the usual file does not exist is none.
pub fn read(named: Option<&Path>) -> Result<Settings, SettingsError> {
    let path = named.unwrap_or(Path::new(FILE));
    let file = path.display().to_string();
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if named.is_none() && e.kind() == std::io::ErrorKind::NotFound => return Ok(Settings::default()),
        Err(source) => return Err(SettingsError::Read { file, source }),
    };
    toml::from_str(&text).map_err(|source| SettingsError::Parse { file, source })
}

impl Balance {
    /// What is not given is as in the paper.
    ///
    /// # Errors
    /// [`SettingsError::Value`].
    pub fn knobs(&self) -> Result<Knobs, SettingsError> {
        let usual = Knobs::default();
        let knobs = Knobs {
            off: !self.enabled.unwrap_or(true),
            busy: self.busy.unwrap_or(usual.busy),
            idle: self.idle.unwrap_or(usual.idle),
            ratio: self.ratio.unwrap_or(usual.ratio),
            patience: self.patience_us.map_or(usual.patience, Duration::from_micros),
            interval: self.interval_ms.map_or(usual.interval, Duration::from_millis),
            migrate: self.migrate.unwrap_or(usual.migrate),
            groups: self.groups.unwrap_or(usual.groups),
        };
        if knobs.busy > 100 || knobs.idle >= knobs.busy {
            return Err(SettingsError::Value("idle < busy <= 100 (percent)"));
        }
        if knobs.ratio == 0 || knobs.groups > 4096 {
            return Err(SettingsError::Value("ratio is 1 or more, groups at most 4096"));
        }
        if !(Duration::from_micros(10)..=Duration::from_secs(10)).contains(&knobs.patience) {
            return Err(SettingsError::Value("patience_us is 10 to 10000000"));
        }
        if !(Duration::from_millis(10)..=Duration::from_secs(60)).contains(&knobs.interval) {
            return Err(SettingsError::Value("interval_ms is 10 to 60000"));
        }
        Ok(knobs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knobs(text: &str) -> Result<Knobs, String> {
        let s: Settings = toml::from_str(text).map_err(|e| e.to_string())?;
        s.balance.knobs().map_err(|e| e.to_string())
    }

    #[test]
    fn the_papers_values_are_the_usual_ones() {
        let k = knobs("").unwrap();
        assert_eq!((k.off, k.busy, k.idle, k.ratio, k.migrate), (false, 75, 10, 5, true));
        assert_eq!(k.interval, Duration::from_millis(100));
        assert_eq!(read(None).unwrap(), Settings::default());
    }

    #[test]
    fn what_is_given_counts() {
        let k = knobs("[balance]\nenabled = false\nbusy = 50\npatience_us = 20000\ngroups = 7").unwrap();
        assert_eq!((k.off, k.busy, k.idle, k.groups), (true, 50, 10, 7));
        assert_eq!(k.patience, Duration::from_millis(20));
    }

    #[test]
    fn bad_input_is_told() {
        for (text, why) in [
            ("[balance]\nbusy = 5", "idle < busy"),
            ("[balance]\nratio = 0", "ratio"),
            ("[balance]\npatience_us = 0", "patience_us"),
            ("[balance]\ninterval_ms = 1", "interval_ms"),
            ("[balance]\nbusi = 5", "busi"),
            ("[balance]\nbusy = \"x\"", "busy"),
        ] {
            let e = knobs(text).unwrap_err();
            assert!(e.contains(why), "{text}: {e}");
        }
        let e = read(Some(Path::new("/nonexistent/file"))).unwrap_err().to_string();
        assert!(e.contains("/nonexistent/file"), "{e}");
    }
}
