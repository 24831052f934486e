//! Data of `fastsocket stat --zones` about groups.

use super::group::Group;
use super::state::Zones;
use fsocket_proto::report;

impl Zones {
    /// Sets to zero the counters of selections of all groups that this user may see.
    pub fn reset(&mut self, sees: &dyn Fn(u32) -> bool) {
        for g in self.all.values().filter(|g| sees(g.uid)) {
            if let Err(e) = g.select.reset() {
                tracing::warn!(group = g.id, "counters: {e}");
            }
        }
    }

    /// Flow groups of listeners, for the report.
    pub fn report_flow_groups<'a>(
        &'a self,
        sees: &'a dyn Fn(u32) -> bool,
    ) -> impl Iterator<Item = report::FlowGroups> + 'a {
        self.all.values().filter(|g| sees(g.uid)).filter_map(Group::report_flows)
    }

    /// The groups that this user may see, for the report.
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
