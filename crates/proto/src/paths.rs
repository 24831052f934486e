//! Where library, command line and monitor meet.

/// Environment variable with the path of the monitor's socket; set by
/// `fastsocket run`.
pub const ENV_SOCKET: &str = "FASTSOCKET_SOCKET";
/// Environment variable that switches parts off: a comma-separated list of
/// `shm`, `zones`.
pub const ENV_DISABLE: &str = "FASTSOCKET_DISABLE";
/// Environment variable: milliseconds that a program waits for a busy monitor before it uses the kernel. Commands wait at
/// least as long for an answer.
pub const ENV_PATIENCE: &str = "FASTSOCKET_PATIENCE";
/// Environment variable: whether workers are pinned to the CPU of their zone:
/// `auto`, `never`, `require`.
pub const ENV_PIN: &str = "FASTSOCKET_PIN";
/// Environment variable: the number of a process that prints, as its children do, one line at its end; set by
/// `fastsocket run --summary`.
pub const ENV_SUMMARY: &str = "FASTSOCKET_SUMMARY";
/// The system monitor.
pub const SYSTEM_SOCKET: &str = "/run/fastsocket/monitor.sock";

/// Directory of root's private monitor where root has no runtime directory.
pub const ROOT_DIRECTORY: &str = "/run/fastsocket-private";
/// The same of another user, whose number follows.
pub const USER_DIRECTORY: &str = "/tmp/fastsocket-";
