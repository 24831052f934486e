//! Compares what the library did with what the kernel does.

use crate::lane::{Lane, Mode, Transcript, STOCK};
use crate::program::Program;
use anyhow::Result;

#[derive(Debug)]
pub enum Verdict {
    Equal,
    /// The kernel itself does not answer the same every time.
    Varies,
    /// The answers differed at first, but are equal when the scheduler waits longer. A step took
    /// longer than the scheduler assumed, or something is late.
    Late(Box<Difference>),
    Different(Box<Difference>),
}

#[derive(Debug)]
pub struct Difference {
    pub program: Program,
    pub mode: Mode,
    pub kernel: Transcript,
    pub ours: Transcript,
}

/// The scheduler's patience in the runs that decide, in microseconds.
const PATIENT: [u64; 2] = [4_000, 20_000];
/// This many further runs decide whether the kernel itself varies, perhaps because the machine is
/// busy.
const MORE: usize = 4;

/// Runs a program on kernel TCP and in `modes`, and compares the transcripts.
pub fn judge(lane: &mut Lane, program: &Program, modes: &[Mode]) -> Result<Verdict> {
    let kernel = lane.run(program, STOCK)?;
    let mut verdict = Verdict::Equal;
    for mode in modes {
        let ours = lane.run(program, *mode)?;
        if ours == kernel {
            continue;
        }
        let first = Difference { program: program.clone(), mode: *mode, kernel: kernel.clone(), ours };
        match closer(lane, first)? {
            Verdict::Equal => {}
            Verdict::Varies => verdict = Verdict::Varies,
            other => return Ok(other),
        }
    }
    Ok(verdict)
}

/// Does a difference remain if every step gets more time?
fn closer(lane: &mut Lane, first: Difference) -> Result<Verdict> {
    let mut kernel = vec![first.kernel.clone()];
    let mut again = Vec::new();
    for us in PATIENT {
        kernel.push(patiently(lane, us, |lane| lane.run(&first.program, STOCK))?);
        again.push(patiently(lane, us, |lane| lane.run(&first.program, first.mode))?);
    }
    if kernel.contains(&first.ours) || kernel[1] != kernel[2] {
        return Ok(Verdict::Varies);
    }
    if kernel[0] != kernel[1] && again.iter().all(|t| *t == kernel[1]) {
        // The kernel's first run was cut short by an impatient scheduler.
        return Ok(Verdict::Varies);
    }
    let settled = &kernel[1];
    match again.iter().find(|t| *t != settled) {
        Some(ours) => {
            for _ in 0..MORE {
                if patiently(lane, PATIENT[1], |lane| lane.run(&first.program, STOCK))? != *settled {
                    return Ok(Verdict::Varies);
                }
            }
            let d = Difference { kernel: settled.clone(), ours: ours.clone(), ..first };
            Ok(Verdict::Different(Box::new(d)))
        }
        None => Ok(Verdict::Late(Box::new(first))),
    }
}

fn patiently<T>(lane: &mut Lane, us: u64, f: impl FnOnce(&mut Lane) -> T) -> T {
    let usual = std::mem::replace(&mut lane.quiet_us, us);
    let r = f(lane);
    lane.quiet_us = usual;
    r
}

/// Does a program differ reliably? (Used to shrink programs.)
pub fn differs(lane: &mut Lane, program: &Program, mode: Mode) -> Result<Option<Difference>> {
    patiently(lane, 3_000, |lane| {
        let kernel = lane.run(program, STOCK)?;
        let ours = lane.run(program, mode)?;
        if kernel == ours || lane.run(program, STOCK)? != kernel || lane.run(program, mode)? == kernel {
            return Ok(None);
        }
        Ok(Some(Difference { program: program.clone(), mode, kernel, ours }))
    })
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let library: Vec<String> =
            (0..self.program.processes).filter(|i| self.mode >> i & 1 != 0).map(|i| format!("a{i}")).collect();
        writeln!(f, "--- program (the library in {})\n{}", library.join(", "), self.program)?;
        writeln!(f, "--- transcripts")?;
        let (a, b) = (&self.kernel.lines, &self.ours.lines);
        // After the first difference the lines may be shifted. The step numbers show which lines
        // belong together.
        for i in 0..a.len().max(b.len()) {
            match (a.get(i), b.get(i)) {
                (Some(x), Some(y)) if x == y => writeln!(f, "    {x}")?,
                (x, y) => {
                    writeln!(f, "  K {}", x.map_or("(nothing)", |x| x))?;
                    writeln!(f, "  L {}", y.map_or("(nothing)", |y| y))?;
                }
            }
        }
        Ok(())
    }
}
