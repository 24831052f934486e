//! What `fastsocket stat --zones` shows of groups.

use super::group::Group;
use super::state::Zones;
use fsocket_proto::report;

impl Zones {
    /// Sets the counters of selections of the groups that a user sees to zero.
    pub fn reset(&mut self, sees: &dyn Fn(u32) -> bool) {
        for g in self.all.values().filter(|g| sees(g.uid)) {
            if let Err(e) = g.select.reset() {
                tracing::warn!(group = g.id, "counters: {e}");
            }
        }
    }

    /// For the report: flow groups of listeners.
    pub fn report_flow_groups<'a>(
        &'a self,
        sees: &'a dyn Fn(u32) -> bool,
    ) -> impl Iterator<Item = report::FlowGroups> + 'a {
        self.all.values().filter(|g| sees(g.uid)).filter_map(Group::report_flows)
    }

    /// For the report.
    pub fn report(&self, sees: &dyn Fn(u32) -> bool) -> Vec<report::Group> {
        let groups = self.all.values().filter(|g| sees(g.uid));
        groups
            .map(|g| report::Group {
                id: g.id,
                local: g.local.clone(),
                balance: g.report_balance(),
                workers: g
                    .members
                    .iter()
                    .map(|(place, m)| report::ZoneWorker { pid: m.pid, cpu: m.cpu, place: *place })
                    .collect(),
                selections: g
                    .select
                    .counts()
                    .unwrap_or_default()
                    .into_iter()
                    .map(|c| (c.name.to_owned(), c.by_cpu))
                    .collect(),
            })
            .collect()
    }
}
