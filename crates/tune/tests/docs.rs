//! Compares the list of kernel settings in docs/network.md with the table in the code.

use fsocket_tune::{sysctl, Group};

#[test]
fn the_manual_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/network.md");
    let text = std::fs::read_to_string(path).unwrap();
    let changed = sysctl::ALL.iter().filter(|s| s.want != sysctl::Want::Shown);
    for s in changed.clone() {
        let row = format!("| `{}` | {} |", s.name, s.target());
        assert!(text.contains(&row), "docs/network.md lacks: {row}");
    }
    let rows = text.lines().filter(|l| l.starts_with("| `net.")).count();
    assert_eq!(rows, changed.count(), "docs/network.md has rows that the code does not");
    for group in Group::ALL {
        assert!(text.contains(&format!("`{}`", group.name())), "{}", group.name());
    }
}
