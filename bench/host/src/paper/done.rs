//! A section with its results.

use super::row::Row;
use super::section::Section;

/// A section's results.
pub struct Done {
    pub section: Section,
    pub rows: Vec<Row>,
    /// Experiments that were not run, with the reason.
    pub skipped: Vec<String>,
}
