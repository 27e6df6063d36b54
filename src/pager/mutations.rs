//! Mistakes that this crate's own tests build into a pager, to show that each is caught.
//!
//! A point where a mistake could be made asks [`Mutated::by`]; outside of unit tests the answer is a constant
//! no. The mistake is a pager's own, so that tests run beside each other. The tests below run one script on
//! the emulated card and on the stand-in driver: without a mistake nothing is told, and with each the watch
//! over memory in use or a checksum tells.

#![deny(unsafe_code)]

/// A mistake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mutation {
    /// A page is unmapped without waiting for the work that uses it.
    UnmapWithoutWait,
    /// A guard gives up its pin and does not say which stream used the span.
    ReleaseWithoutStream,
    /// A guard of a streamed span is released before the stream has passed its work: no fence is kept.
    ReleaseWithoutFence,
    /// A ring slot is used again without waiting for those who read it.
    SlotWithoutWait,
    /// A staging buffer is used again while a copy reads it.
    StagingWithoutWait,
    /// A buffer is copied while its reader still writes it.
    CopyWhileRead,
    /// What is on the card stays when the patches change.
    StalePatches,
    /// A page is written anew for other patches while a kernel reads the old bytes.
    RewriteWithoutFence,
    /// The runner's stream does not wait for the copies.
    KernelWithoutArrival,
    /// A span is called ready before its copies were seen done.
    ReadyTooEarly,
    /// A page is taken though a guard holds it.
    TakePinned,
    /// A model is closed without waiting for the work that uses it.
    CloseWithoutWait,
}

/// Which mistake a pager has; none but in unit tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Mutated(#[cfg(test)] pub(crate) Option<Mutation>);

impl Mutated {
    /// Whether the pager makes this mistake.
    #[inline]
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "asked in tests alone"))]
    pub(crate) fn by(self, mutation: Mutation) -> bool {
        #[cfg(test)]
        return self.0 == Some(mutation);
        #[cfg(not(test))]
        {
            let _ = mutation;
            false
        }
    }
}

#[cfg(test)]
#[path = "mutations_tests.rs"]
mod tests;
