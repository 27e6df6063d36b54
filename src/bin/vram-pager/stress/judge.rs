//! Which errors a stress run expects: pure.
//!
//! A fault may be refused for a lack of memory, since the run makes one; and a call that was told to fail
//! surfaces as what it was told. Everything else is a failure of the run, misuse of the device above all.

use std::error::Error;

use vram_pager::device::DeviceError;
use vram_pager::manager::ManagerError;
use vram_pager::pager::PagerError;
use vram_pager::patcher::{PatcherError, ResidentError};
use vram_pager::staging::StagingError;

use super::card::INJECTED;

/// What an error means for the run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Judgement {
    /// Guards or others hold the memory.
    Shortage,
    /// It was injected.
    Injected,
    /// It should not be.
    Wrong,
}

pub(super) fn device(error: &DeviceError) -> Judgement {
    match error {
        DeviceError::OutOfMemory { .. } => Judgement::Shortage,
        DeviceError::Driver { code: INJECTED, .. } => Judgement::Injected,
        _ => Judgement::Wrong,
    }
}

pub(super) fn pager(error: &PagerError) -> Judgement {
    match error {
        PagerError::Device(error)
        | PagerError::Staging(StagingError::Device(error) | StagingError::NoMemory { source: error, .. }) => {
            device(error)
        }
        PagerError::Held { held, .. } if !held.is_empty() => Judgement::Shortage,
        PagerError::OldVersionHeld { .. } => Judgement::Shortage,
        PagerError::NeverFits { need, limit, .. } if need > limit => Judgement::Shortage,
        _ => Judgement::Wrong,
    }
}

pub(super) fn resident(error: &ResidentError) -> Judgement {
    match error {
        ResidentError::Device(error)
        | ResidentError::Staging(
            StagingError::Device(error) | StagingError::NoMemory { source: error, .. },
        ) => device(error),
        ResidentError::Pager(error) => pager(error),
        ResidentError::Held { held, .. } if !held.is_empty() => Judgement::Shortage,
        _ => Judgement::Wrong,
    }
}

pub(super) fn patcher(error: &PatcherError) -> Judgement {
    match error {
        PatcherError::Device(error) => device(error),
        PatcherError::Failed { source, .. } => {
            let source: &(dyn Error + 'static) = source.as_ref();
            let paged = source.downcast_ref::<PagerError>().map(pager);
            let modules = || source.downcast_ref::<ResidentError>().map(resident);
            paged.or_else(modules).unwrap_or(Judgement::Wrong)
        }
        _ => Judgement::Wrong,
    }
}

pub(super) fn manager(error: &ManagerError) -> Judgement {
    match error {
        ManagerError::Device { source, .. } => device(source),
        ManagerError::Load { source, .. } => patcher(source),
        _ => Judgement::Wrong,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misuse_and_a_refusal_that_would_fit_are_wrong() {
        let misuse = DeviceError::Misuse { call: "unmap", why: "a copy is in flight".to_owned() };
        assert_eq!(pager(&misuse.into()), Judgement::Wrong);
        let never_fits = |need, limit| PagerError::NeverFits {
            model: String::new(),
            what: String::new(),
            device: String::new(),
            need,
            limit,
            holders: Vec::new(),
        };
        assert_eq!(pager(&never_fits(2, 1)), Judgement::Shortage);
        assert_eq!(pager(&never_fits(1, 1)), Judgement::Wrong);
    }

    #[test]
    fn only_the_code_that_is_injected_is_an_injected_one() {
        let driver = |code| DeviceError::Driver { call: "map", code, name: String::new() };
        assert_eq!(device(&driver(INJECTED)), Judgement::Injected);
        assert_eq!(device(&driver(999)), Judgement::Wrong);
    }
}
