//! The expensive half of the asymmetric fence, and registration for it.

use fsocket_sync::atomic::{fence, Ordering};
use rustix::thread::{membarrier, MembarrierCommand};

/// Makes sleepers' `membarrier` reach this process, whose wake-ups rely on it.
pub fn register() {
    if let Err(err) = membarrier(MembarrierCommand::RegisterGlobalExpedited) {
        tracing::warn!(%err, "membarrier is not available; wake-ups rely on fences alone");
    }
}

/// Stores before this call are seen by every thread that runs the light fence and
/// then looks; what such threads stored before is seen by us afterwards.
pub fn heavy_fence() {
    fence(Ordering::SeqCst);
    let _ = membarrier(MembarrierCommand::GlobalExpedited);
}
