//! Where library, command line and monitor meet.

/// Environment variable with the path of the monitor's socket; set by
/// `fastsocket run`.
pub const ENV_SOCKET: &str = "FASTSOCKET_SOCKET";
/// Environment variable that switches parts off: a comma-separated list of
/// `shm`, `zones`.
pub const ENV_DISABLE: &str = "FASTSOCKET_DISABLE";
/// Environment variable: whether workers are pinned to the CPU of their zone:
/// `auto`, `never`, `require`.
pub const ENV_PIN: &str = "FASTSOCKET_PIN";
/// The system monitor.
pub const SYSTEM_SOCKET: &str = "/run/fastsocket/monitor.sock";

/// Path of the private monitor of a user: in a directory of mode 0700 that
/// belongs to him.
pub fn private_socket(uid: u32) -> String {
    if uid == 0 {
        "/run/fastsocket-private/monitor.sock".to_owned()
    } else {
        format!("/tmp/fastsocket-{uid}/monitor.sock")
    }
}
