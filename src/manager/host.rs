//! Where the manager reads the machine's memory from.
//!
//! The seam only: the figures and their Linux reader are [`staging`](crate::staging)'s, which needs them
//! too. Takes no lock.

#![deny(unsafe_code)]

use super::ManagerError;
pub use crate::staging::{HostFigures, LinuxHost};

/// Where the machine's figures come from.
pub trait HostMemoryFigures: Send + Sync {
    /// The figures now.
    fn read(&self) -> Result<HostFigures, ManagerError>;
}

impl HostMemoryFigures for LinuxHost {
    fn read(&self) -> Result<HostFigures, ManagerError> {
        self.figures().map_err(|error| ManagerError::Host { why: error.why })
    }
}
