//! Where a connection is. Only this file combines this process's descriptors, the fork group's
//! word and the peer's status.

use super::Desc;
use fsocket_abi::path_switch::{self, PathState, PeerStatus};

impl Desc {
    /// Where the connection is, as far as this process has looked.
    #[inline]
    pub fn path_state(&self) -> PathState {
        // The kind is read first: the thread that moves the connection stores the kernel
        // descriptor before it changes the kind.
        match self.is_conn() {
            true => self.path_state_in_release(),
            false => self.path.went_to().map_or(PathState::Closed, PathState::Kernel),
        }
    }
    /// The same for the thread that releases the connection. (For other threads it is not a
    /// connection any more.)
    #[inline]
    pub fn path_state_in_release(&self) -> PathState {
        PathState::of(self.path.kernel_end(), self.sock().flags.look(), self.peer_status())
    }
    /// [`PathState::in_rings`], with as few loads as possible.
    #[inline]
    pub fn is_in_rings(&self) -> bool {
        self.is_conn() && path_switch::in_rings(self.path.kernel_end(), self.sock().flags.get(), self.peer_status())
    }
    /// What the peer has published.
    #[inline]
    pub fn peer_status(&self) -> PeerStatus {
        PeerStatus::look(&self.rx_dir().prod)
    }
}
