//! A card behind the CUDA driver.
//!
//! The driver is a table of function pointers ([`driver`]) that answer plain codes; [`code`] says what a
//! code means, [`card`] turns it into a [`DeviceError`](super::DeviceError) and latches the ones that a
//! card does not recover from. One file a trait does the calls: [`memory`], [`pool`], [`stream`],
//! [`launch`]. [`probe`] says which cards are here and what each can do; [`spare`] makes do without
//! calls that a library does not export.
//!
//! Building this needs no toolkit. Running it needs a driver library of CUDA 12.0 or newer; without one
//! every entry point answers a typed error.
//!
//! Locks: each of the card's tables has its own lock, held only to look up or note something, never
//! while another is taken; the driver is called outside them, but for the two tables whose calls must
//! not overtake their notes (mappings and page locks). May import `units` and this module's traits.

mod card;
mod code;
mod context;
mod driver;
mod launch;
mod memory;
mod pool;
mod probe;
mod spare;
mod stream;

pub use card::{CudaDevice, CudaOptions};
pub use probe::{CardAbilities, CardProbe, devices};
