//! Output of `fastsocket tune`: plan, results and state, as text and as JSON.

use super::args::Tune;
use comfy_table::{presets, Table};
use fsocket_tune::{Device, Fate, Group, Kind, Machine, Outcome, Plan, Reverted, Setting, Store, Undone};
use serde_json::{json, Value};

/// Without --verbose, at most this many similar lines (such as the interrupts of 64 queues) are
/// shown.
const FEW: usize = 4;

pub fn plan(args: &Tune, machine: &Machine, device: &Device, plan: &Plan, store: &Store) {
    let recorded = matches!(store.load(), Ok(Some(_)));
    if args.json {
        return print_json(json!({
            "device": device, "machine": machine, "plan": plan,
            "state": recorded.then(|| store.path()),
        }));
    }
    notes(plan, Kind::Found, &format!("{}: found", device.name));
    notes(plan, Kind::Lacks, "lacks");
    notes(plan, Kind::Warning, "warnings");
    if plan.changes.is_empty() {
        anstream::println!("nothing to change");
    } else {
        anstream::println!("would change (with --apply)");
        let rows = plan.changes.iter().map(|c| {
            let then = c.or.iter().fold(c.new.to_string(), |text, or| format!("{text}; or {or}"));
            (&c.setting, vec![c.old.to_string(), "->".to_owned(), then, c.why.clone()])
        });
        table(args, rows);
    }
    if recorded {
        anstream::println!("tuned before: {} holds the values to go back to (--revert)", store.path().display());
    }
}

pub fn outcome(args: &Tune, outcome: &Outcome, store: &Store) {
    if args.json {
        return print_json(json!({ "outcome": outcome, "complete": outcome.is_complete(), "state": store.path() }));
    }
    for note in &outcome.notes {
        anstream::println!("warning: {}: {}", note.topic, note.text);
    }
    if outcome.gone {
        eprintln!(
            "fastsocket tune: {} went away; what was done so far is recorded, --revert undoes what is left of it",
            args.device
        );
    }
    if outcome.done.is_empty() {
        if !outcome.gone {
            anstream::println!("{}: nothing to change", args.device);
        }
        return;
    }
    let rows = outcome.done.iter().map(|done| {
        let text = match &done.fate {
            Fate::Set { value } => format!("set to {value}"),
            Fate::Adjusted { value } => format!("became {value}: as near as the device comes"),
            Fate::Failed { why } => format!("FAILED: {why}"),
        };
        (&done.setting, vec![text])
    });
    table(args, rows);
    let failed = outcome.failed();
    anstream::println!(
        "{} changed, {failed} failed; undo with: fastsocket tune {} --revert",
        outcome.done.len() - failed,
        args.device
    );
}

pub fn reverted(args: &Tune, reverted: &Reverted, store: &Store) {
    if args.json {
        return print_json(json!({ "reverted": reverted, "complete": reverted.is_complete() }));
    }
    if !reverted.recorded {
        anstream::println!("{}: nothing recorded in {}, nothing to undo", args.device, store.path().display());
        return;
    }
    if reverted.restarted {
        anstream::println!("the machine was restarted since: that has undone everything");
    }
    if reverted.replaced {
        anstream::println!("{}: the device is gone, or was made again; its settings went with it", args.device);
    }
    if let Some(name) = &reverted.renamed {
        anstream::println!("{} is called {name} now", args.device);
    }
    let rows = reverted.undone.iter().map(|(setting, undone)| {
        let text = match undone {
            Undone::Restored { value } => format!("back to {value}"),
            Undone::AsBefore => "as before".to_owned(),
            Undone::Gone => "gone".to_owned(),
            Undone::Restarted { now, old } => format!("{now} since the restart (was {old} when recorded), left"),
            Undone::Left { now, old: Some(old) } => {
                format!("LEFT: it was changed to {now} since (was {old}); --force undoes that, too")
            }
            Undone::Left { now, old: None } => format!("LEFT at {now}: a queue that was not there before"),
            Undone::Failed { why } => format!("FAILED: {why}"),
        };
        (setting, vec![text])
    });
    table(args, rows);
    if !reverted.is_complete() {
        anstream::println!("what was left is still recorded in {}", store.path().display());
    }
}

fn notes(plan: &Plan, kind: Kind, title: &str) {
    let mut table = plain();
    for note in plan.notes(kind) {
        table.add_row(vec![format!("  {}", note.topic), note.text.clone()]);
    }
    if table.row_count() > 0 {
        anstream::println!("{title}");
        print(table);
        anstream::println!();
    }
}

/// A table with one row for each setting. Without --verbose, similar rows are cut short; failures
/// are always shown.
fn table<'a>(args: &Tune, rows: impl Iterator<Item = (&'a Setting, Vec<String>)>) {
    let mut table = plain();
    let mut last: Option<(Group, &str)> = None;
    let (mut run, mut hidden) = (0, 0);
    let more = |table: &mut Table, hidden: usize| {
        if hidden > 0 {
            table.add_row(vec![format!("  … {hidden} more alike (-v)")]);
        }
    };
    let rows: Vec<_> = rows.collect();
    for (setting, cells) in &rows {
        let bad = cells[0].starts_with("FAILED") || cells[0].starts_with("LEFT");
        let kind = (setting.group(), if bad { "bad" } else { "" });
        run = if last == Some(kind) { run + 1 } else { 0 };
        last = Some(kind);
        if run >= FEW && setting.is_queues() && !bad && !args.verbose {
            hidden += 1;
            continue;
        }
        more(&mut table, std::mem::take(&mut hidden));
        table.add_row([vec![format!("  {setting}")], cells.clone()].concat());
    }
    more(&mut table, hidden);
    print(table);
}

/// No colours, no frames and no wrapping: a pipe and a terminal get the same text.
fn plain() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).force_no_tty();
    table
}

fn print(mut table: Table) {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for line in table.to_string().lines() {
        anstream::println!("{}", line.trim_end());
    }
}

fn print_json(value: Value) {
    anstream::println!("{value:#}");
}
