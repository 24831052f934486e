//! The report as JSON, for other programs.

use super::done::Done;
use super::row::Row;
use fsocket_bench_args::Path;
use fsocket_measure::Machine;
use serde_json::{json, Value};
use std::collections::BTreeMap;

pub fn page(machine: &Machine, done: &[Done], notes: &[String], reps: usize, quick: bool) -> Value {
    let section = |d: &Done| {
        let s = &d.section;
        json!({
            "name": s.name,
            "paper": s.paper,
            "item": s.item,
            "title": s.title,
            "paper_says": s.says,
            "paper_machine": s.paper.machine(),
            "differs": s.differs,
            "listed": s.listed(),
            "skipped": d.skipped,
            "rows": d.rows.iter().map(row).collect::<Vec<_>>(),
        })
    };
    json!({
        "version": 1,
        "machine": machine,
        "notes": notes,
        "rounds": reps,
        "quick": quick,
        "sections": done.iter().map(section).collect::<Vec<_>>(),
    })
}

fn row(row: &Row) -> Value {
    let values = &row.values;
    let medians: BTreeMap<_, _> = Path::ALL.iter().filter_map(|p| Some((p.name(), values.median(*p)?))).collect();
    let compared = row.compared().into_iter().chain([Path::Control]);
    let beside: BTreeMap<_, _> = compared.filter_map(|p| Some((p.name(), values.beside_stock(p)?))).collect();
    let verdicts: BTreeMap<_, _> =
        row.compared().into_iter().map(|p| (p.name(), json!([row.verdict(p), row.sentence(p)]))).collect();
    json!({
        "row": values.measure,
        "layout": values.layout,
        "unit": values.unit,
        "better": values.better,
        "at": row.at,
        "paper": row.measure.claim,
        "paper_times": row.measure.claim.and_then(|c| c.times(values.better)),
        "values": values.values,
        "medians": medians,
        "times_better_than_stock": beside,
        "verdicts": verdicts,
        "known_limit": row.limit,
        "problems": values.problems.iter().map(|p| json!({"path": p.path, "text": p.text})).collect::<Vec<_>>(),
    })
}
