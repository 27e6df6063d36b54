//! Where the manager reads a card's memory from.
//!
//! [`CardFigures`] is the seam: one implementation asks a device of this crate, one the books of a replay,
//! and a caller may bring its own. Takes no lock; no ledger lock is held while a source is read.

#![deny(unsafe_code)]

use std::sync::{Arc, Weak};

use super::platform::{Backend, RawFigures};
use crate::device::{DeviceError, DeviceKind, SharedDevice};
use crate::patcher::{IdleCache, SizedCard};

/// One card's memory figures, and the way to hand its idle cache back.
pub trait CardFigures: Send + Sync {
    /// The card's name, for messages and reports.
    fn label(&self) -> String;

    /// Which rule its free memory follows.
    fn backend(&self) -> Backend;

    /// The figures now. Idle frames of registered caches and the machine's memory are the manager's to
    /// add.
    fn read(&self) -> Result<RawFigures, DeviceError>;

    /// Hands the pool's idle memory back to the driver.
    fn empty_cache(&self) -> Result<(), DeviceError>;

    /// Bytes of host memory that are page-locked for this card, by anyone in this process.
    fn page_locked_bytes(&self) -> u64 {
        0
    }
}

/// The figures of a device of this crate.
#[derive(Clone, Debug)]
pub struct DeviceFigures(pub SharedDevice);

impl CardFigures for DeviceFigures {
    fn label(&self) -> String {
        self.0.info().name.clone()
    }

    fn backend(&self) -> Backend {
        match self.0.info().kind {
            DeviceKind::Emulated => Backend::Emulated,
            DeviceKind::Cuda => Backend::Cuda,
        }
    }

    fn read(&self) -> Result<RawFigures, DeviceError> {
        let memory = self.0.memory()?;
        let pool = self.0.pool_figures()?;
        Ok(RawFigures {
            driver_total: memory.total,
            driver_free: i64::try_from(memory.free).unwrap_or(i64::MAX),
            pool_reserved: pool.reserved,
            pool_used: pool.used,
            ..RawFigures::default()
        })
    }

    fn empty_cache(&self) -> Result<(), DeviceError> {
        self.0.pool_trim(0)
    }

    fn page_locked_bytes(&self) -> u64 {
        self.0.live().page_locked_bytes
    }
}

impl CardFigures for SizedCard {
    fn label(&self) -> String {
        SizedCard::label(self).to_owned()
    }

    fn backend(&self) -> Backend {
        Backend::Emulated
    }

    fn read(&self) -> Result<RawFigures, DeviceError> {
        Ok(RawFigures {
            driver_total: self.total(),
            driver_free: self.driver_free(),
            pool_reserved: self.pool_reserved(),
            pool_used: self.pool_used(),
            ..RawFigures::default()
        })
    }

    fn empty_cache(&self) -> Result<(), DeviceError> {
        SizedCard::empty_cache(self);
        Ok(())
    }
}

/// The idle caches registered for one card. Held weakly: a pager that is gone has nothing idle.
#[derive(Default)]
pub(super) struct IdleCaches(Vec<Weak<dyn IdleCache>>);

impl IdleCaches {
    pub(super) fn register(&mut self, cache: &Arc<dyn IdleCache>) {
        self.0.retain(|known| known.strong_count() > 0);
        self.0.push(Arc::downgrade(cache));
    }

    pub(super) fn live(&self) -> Vec<Arc<dyn IdleCache>> {
        self.0.iter().filter_map(Weak::upgrade).collect()
    }
}
