//! Models of the ring and the SYN queue for loom, with small capacities (see `RING_CAP`,
//! `SYN_CAP`). `fsocket_sync::model` explains how fences are modelled.

mod dispatch;
mod pipe;
mod switch;
mod syn;
