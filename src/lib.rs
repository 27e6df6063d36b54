//! A demand-faulting pager for model weights on a GPU, with the memory manager that admits and evicts
//! models.

pub mod device;
pub mod manager;
pub mod pager;
pub mod patcher;
pub mod staging;
mod sync;
pub mod transfer;
pub mod units;
pub mod weights;
