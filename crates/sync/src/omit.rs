//! Lets a model leave out a step of a protocol, to show that the step is needed.

#[cfg(loom)]
use crate::model;
use crate::step::Step;

/// Does the running model leave out this step? Outside models: false.
#[inline(always)]
pub fn leaves_out(step: Step) -> bool {
    #[cfg(loom)]
    return model::leaves_out(step);
    #[cfg(not(loom))]
    {
        let _ = step;
        false
    }
}
