//! docs/network.md says of kernel settings what the table in the code says.

use fsocket_tune::{sysctl, Group};

#[test]
fn the_manual_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/network.md");
    let text = std::fs::read_to_string(path).unwrap();
    for s in sysctl::ALL {
        let page = s.source.rsplit('/').next().unwrap().trim_end_matches(".rst");
        let row = format!("| `{}` | {} | {} | [{page}] |", s.name, s.target(), s.why);
        assert!(text.contains(&row), "docs/network.md lacks: {row}");
    }
    let rows = text.lines().filter(|l| l.starts_with("| `net.")).count();
    assert_eq!(rows, sysctl::ALL.len(), "docs/network.md has rows that the code does not");
    for group in Group::ALL {
        assert!(text.contains(&format!("`{}`", group.name())), "{}", group.name());
    }
}
