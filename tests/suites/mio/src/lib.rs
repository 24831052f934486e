//! Tests only: see tests/net.rs.
