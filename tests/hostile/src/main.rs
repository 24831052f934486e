use clap::{Parser, Subcommand};
use fsocket_hostile::{attack, honest, kills, party, rows, run};
use std::process::ExitCode;

/// A hostile peer beside honest programs
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Servers, honest clients, and hostile processes beside them in turns
    Run(run::Run),
    /// Each attack that was found once, its variants, and the same by kernel TCP
    Rows(rows::line::Rows),
    /// An attack of `rows`
    #[command(hide = true)]
    Assault(rows::assault::Assault),
    /// An honest program of `rows`
    #[command(hide = true)]
    Probe(rows::probe::Probe),
    /// Hostile processes, one after the other
    Attack(attack::Attack),
    /// Processes killed at random
    Kills(kills::Kills),
    /// A server or client of `kills`
    #[command(hide = true)]
    Party(party::Party),
    /// An honest client
    Honest(honest::Honest),
}

fn main() -> anyhow::Result<ExitCode> {
    let good = match Options::parse().what {
        What::Run(r) => run::run(&r)?,
        What::Rows(r) => rows::run(&r)?,
        What::Assault(a) => {
            rows::assault::run(&a);
            true
        }
        What::Probe(p) => {
            rows::probe::run(&p);
            true
        }
        What::Attack(a) => {
            attack::run(&a);
            true
        }
        What::Kills(k) => kills::run(&k)?,
        What::Party(p) => {
            party::run(&p)?;
            true
        }
        What::Honest(h) => {
            honest::run(&h);
            true
        }
    };
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
