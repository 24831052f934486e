//! The expensive half of the asymmetric fence, and the registration for it.

use fsocket_sync::atomic::{fence, Ordering};
use rustix::thread::{membarrier, MembarrierCommand};

/// Registers this process, so that the `membarrier` of a thread that goes to sleep reaches it. The
/// monitor's wake-ups rely on that.
pub fn register() {
    if let Err(err) = membarrier(MembarrierCommand::RegisterGlobalExpedited) {
        tracing::warn!(%err, "membarrier is not available; wake-ups rely on fences alone");
    }
}

/// After this call, every other thread that runs the light fence and then reads sees the stores
/// that this thread made before. Conversely, this thread sees stores that such threads made before
/// their light fence.
pub fn heavy_fence() {
    fence(Ordering::SeqCst);
    let _ = membarrier(MembarrierCommand::GlobalExpedited);
}
