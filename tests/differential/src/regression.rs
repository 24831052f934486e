//! Programs that differed once, kept as files.

use crate::judge::Difference;
use crate::lane::{Lane, Mode, LIBRARY, STOCK};
use crate::program::Program;
use anyhow::{ensure, Context, Result};
use std::path::{Path, PathBuf};

/// A program, and the settings in the comments at its head.
pub struct Regression {
    pub name: String,
    pub program: Program,
    /// `# modes 255 1`: which processes have the library, as bit masks.
    pub modes: Vec<Mode>,
    /// `# shm 2`: the number of connections over shared memory if all processes have the library.
    pub shm: u64,
}

impl Regression {
    pub fn read(path: &Path) -> Result<Regression> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let head = |word: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix("# ")?.strip_prefix(word)?.strip_prefix(' '));
            line.map(|l| l.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()).transpose()
        };
        let name = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        let program = text.parse().with_context(|| name.clone())?;
        let modes = head("modes")?.map_or(vec![LIBRARY], |m| m.iter().map(|m| *m as Mode).collect());
        let shm = head("shm")?.and_then(|n| n.first().copied()).unwrap_or(0);
        Ok(Regression { name, program, modes, shm })
    }

    /// Reads all programs of a directory, sorted by name.
    pub fn all(dir: &Path) -> Result<Vec<Regression>> {
        let mut files: Vec<PathBuf> = std::fs::read_dir(dir)?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
        files.retain(|p| p.extension().is_some_and(|e| e == "txt"));
        files.sort();
        files.iter().map(|p| Regression::read(p)).collect()
    }

    /// Runs the program. The error names the difference, or the wrong path.
    pub fn check(&self, lane: &mut Lane) -> Result<()> {
        lane.quiet_us = 3_000;
        let kernel = lane.run(&self.program, STOCK)?;
        for mode in &self.modes {
            let before = lane.snapshot();
            let ours = lane.run(&self.program, *mode)?;
            let delta = lane.snapshot().since(&before);
            if kernel != ours {
                let d = Difference { program: self.program.clone(), mode: *mode, kernel, ours };
                anyhow::bail!("{}:\n{d}", self.name);
            }
            if *mode == LIBRARY && !fsocket_testkit::stock_mode() {
                let shm = delta.get("connect_shm");
                ensure!(
                    shm >= self.shm.into(),
                    "{}: {shm} connections over shared memory, not {}",
                    self.name,
                    self.shm
                );
                ensure!(delta.get("hostile_peer") == 0, "{}: a peer was called hostile", self.name);
            }
        }
        Ok(())
    }
}
