//! The figures and tables of the three papers, each measured here or listed with a reason.

use super::section::Section;
use super::{affinity, fastsocket, socksdirect};

/// Every section, in the order of the report.
pub fn all() -> Vec<Section> {
    [socksdirect::sections(), fastsocket::sections(), affinity::sections()].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::experiment::Experiment;
    use crate::paper::section::{Kind, Paper};
    use fsocket_bench_args::Paper as Args;
    use std::collections::BTreeSet;

    /// Names of all figures and tables of a paper.
    fn items(paper: Paper) -> Vec<String> {
        let (figures, tables) = match paper {
            Paper::SocksDirect => (12, 4),
            Paper::Fastsocket => (5, 1),
            Paper::AffinityAccept => (10, 5),
        };
        let figures = (1..=figures).map(|n| format!("figure {n}"));
        figures.chain((1..=tables).map(|n| format!("table {n}"))).collect()
    }

    fn args() -> Args {
        #[derive(clap::Parser)]
        struct Program {
            #[command(flatten)]
            args: Args,
        }
        <Program as clap::Parser>::parse_from(["paper"]).args
    }

    #[test]
    fn every_figure_and_table_appears_once() {
        let all = all();
        for paper in Paper::ALL {
            for item in items(paper) {
                let found = all.iter().filter(|s| s.paper == paper && s.item == item).count();
                assert_eq!(found, 1, "{paper:?} {item}");
            }
        }
        // All other items are sections of a paper's text, or a README.
        let known: BTreeSet<String> = Paper::ALL.into_iter().flat_map(items).collect();
        let text = all.iter().filter(|s| !known.contains(s.item));
        text.for_each(|s| assert!(s.item.starts_with("section ") || s.item == "README", "{}", s.item));
    }

    #[test]
    fn sections_say_what_they_are() {
        let all = all();
        let names: BTreeSet<&str> = all.iter().map(|s| s.name).collect();
        assert_eq!(names.len(), all.len());
        for section in &all {
            assert!(!section.title.is_empty() && !section.says.is_empty(), "{}", section.name);
            match &section.kind {
                Kind::Listed(listed) => assert!(!listed.text.is_empty(), "{}", section.name),
                Kind::Measured(experiments, _) => {
                    assert!(!section.differs.is_empty(), "{}", section.name);
                    check(section.name, &experiments(&args()));
                }
            }
        }
    }

    /// Checks that each experiment measures both sides and the control, or the bare machine alone, and that the
    /// names of the rows are different.
    fn check(section: &str, experiments: &[Experiment]) {
        use fsocket_bench_args::Path;
        assert!(!experiments.is_empty(), "{section}");
        let mut names = BTreeSet::new();
        for e in experiments {
            assert!(e.ways.contains(&Path::Stock), "{section} {}", e.name);
            if e.ways != [Path::Stock] {
                assert!(e.ways.contains(&Path::Control), "{section} {}", e.name);
                assert!(e.ways.contains(&Path::Ours) || e.ways.iter().any(|p| p.is_kernel()), "{section} {}", e.name);
            }
            for m in &e.measures {
                assert!(names.insert(format!("{} {}", e.name, m.label)), "{section} {}", e.name);
            }
        }
    }
}
