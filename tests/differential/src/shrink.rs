//! Makes programs with a difference smaller.

use crate::call::{Call, Kind};
use crate::judge::{differs, Difference};
use crate::lane::Lane;
use anyhow::Result;

/// Upper limit of the runs of candidates.
const BUDGET: usize = 400;

/// The smallest program found that still differs.
pub fn shrink(lane: &mut Lane, from: Difference) -> Result<Difference> {
    let mut best = match differs(lane, &from.program, from.mode)? {
        Some(d) => d,
        None => return Ok(from),
    };
    let mut budget = BUDGET;
    // Steps after the first difference are rarely needed.
    let same = best.kernel.lines.iter().zip(&best.ours.lines).take_while(|(a, b)| a == b).count();
    let steps = best.kernel.lines.iter().take(same + 1).filter(|l| !l.starts_with("     ")).count();
    let mut cut = best.program.clone();
    cut.steps.truncate(steps);
    attempt(lane, &mut best, cut, &mut budget)?;
    let mut chunk = (best.program.steps.len() / 2).max(1);
    loop {
        let mut i = 0;
        let mut any = false;
        while i < best.program.steps.len() && budget > 0 {
            let mut fewer = best.program.clone();
            let end = (i + chunk).min(fewer.steps.len());
            fewer.steps.drain(i..end);
            if attempt(lane, &mut best, fewer, &mut budget)? {
                any = true;
            } else {
                i += chunk;
            }
        }
        if chunk > 1 {
            chunk /= 2;
        } else if !any || budget == 0 {
            break;
        }
    }
    simpler_arguments(lane, &mut best, &mut budget)?;
    Ok(best)
}

fn attempt(
    lane: &mut Lane,
    best: &mut Difference,
    candidate: crate::program::Program,
    budget: &mut usize,
) -> Result<bool> {
    if *budget == 0 || candidate == best.program {
        return Ok(false);
    }
    *budget -= 1;
    match differs(lane, &candidate, best.mode)? {
        // Only the same difference counts. Smaller programs may run into another one.
        Some(d) if what(&d) == what(best) => {
            *best = d;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// The kind of a difference: the first calls whose answers differ, and whether they block.
fn what(d: &Difference) -> Option<[String; 2]> {
    let (a, b) = d.kernel.lines.iter().zip(&d.ours.lines).find(|(a, b)| a != b)?;
    let call = |line: &str| {
        let words: Vec<&str> = line.split("  ").filter(|w| !w.is_empty()).collect();
        let name = words.iter().flat_map(|w| w.split_whitespace()).find(|w| Call::by_name(w).is_some());
        format!("{} {}", name.unwrap_or(""), if line.contains("blocks") { "blocks" } else { "" })
    };
    Some([call(a), call(b)])
}

fn simpler_arguments(lane: &mut Lane, best: &mut Difference, budget: &mut usize) -> Result<()> {
    for i in 0..best.program.steps.len() {
        for (k, kind) in best.program.steps[i].call.spec().args.iter().enumerate() {
            let mut simple = best.program.clone();
            let call = simple.steps[i].call;
            match kind {
                Kind::Bits(_) => simple.steps[i].args[k] = 0,
                Kind::Int if call.sends() || matches!(call, Call::Recv | Call::Read) => {
                    simple.steps[i].args[k] = simple.steps[i].args[k].clamp(-1, 10);
                }
                Kind::List(_) => {
                    while simple.steps[i].args.len() > k + 2 {
                        let fewer = simple.steps[i].args.len() - 2;
                        simple.steps[i].args.truncate(fewer);
                        attempt(lane, best, simple.clone(), budget)?;
                    }
                    continue;
                }
                _ => continue,
            }
            attempt(lane, best, simple, budget)?;
        }
    }
    Ok(())
}
