//! The ring and the SYN queue under loom, with small capacities (see
//! `RING_CAP`, `SYN_CAP`). What the models of the fences mean is said in
//! `fsocket_sync::model`.

mod dispatch;
mod pipe;
mod switch;
mod syn;
