//! A snapshot of everything the manager knows, for a `/system_stats` page.
//!
//! Plain values that serialise; taking one changes nothing and waits for nobody.

#![deny(unsafe_code)]

use serde::Serialize;

use super::platform::{free_memory_rule, total_memory_rule};
use super::state::Manager;

/// What the manager knows, at one moment. Sizes are bytes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SystemStats {
    /// The cards, the default device first.
    pub devices: Vec<DeviceStats>,
    /// The ledger, newest first.
    pub models: Vec<ModelStats>,
    /// The bytes left to others on every card.
    pub extra_reserved_memory: u64,
    /// What stays free below any load.
    pub minimum_inference_memory: u64,
    /// The host memory that may be page-locked.
    pub page_locked_budget: u64,
    /// The machine's memory; 0 if it cannot be read.
    pub ram_total: u64,
    /// The part of it that is available; 0 if it cannot be read.
    pub ram_available: u64,
}

/// One card.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DeviceStats {
    /// Its name.
    pub name: String,
    /// Its size, or the cap set on it; 0 if it does not answer.
    pub total: u64,
    /// What can be had: free bytes and idle cache. Negative only on overdrawn books; 0 if it does not
    /// answer.
    pub free: i64,
    /// What the activation pool took from it.
    pub reserved: u64,
    /// The part of that which is in use.
    pub active: u64,
    /// Idle cache: the pool's, and frames that back no page.
    pub cache: u64,
    /// Host memory that is page-locked for it.
    pub page_locked: u64,
    /// Why it does not answer.
    pub error: Option<String>,
}

/// One entry of the ledger.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ModelStats {
    /// The model's label.
    pub label: String,
    /// Where it was loaded to.
    pub device: String,
    /// All of its weights.
    pub size: u64,
    /// Those on the card.
    pub loaded: u64,
    /// Those off the card.
    pub offloaded: u64,
    /// Page-locked host memory that they hold.
    pub page_locked: u64,
    /// Whether it is paged.
    pub dynamic: bool,
    /// Whether the last load named it.
    pub currently_used: bool,
    /// Requests for weights that found them on the card.
    pub hits: u64,
    /// Requests that had to bring something.
    pub misses: u64,
    /// Bytes copied to the card.
    pub bytes_to_device: u64,
}

impl Manager {
    /// A snapshot for a report. A card that does not answer is listed with the reason.
    pub fn stats(&self) -> SystemStats {
        let host = self.host.read().unwrap_or_default();
        let devices = self.devices().zip(&self.cards).map(|(place, card)| {
            let named = DeviceStats {
                name: card.figures.label(),
                page_locked: card.figures.page_locked_bytes(),
                ..DeviceStats::default()
            };
            match self.raw_figures(place) {
                Err(error) => DeviceStats { error: Some(error.to_string()), ..named },
                Ok((backend, raw)) => {
                    let free = free_memory_rule(backend, &raw);
                    DeviceStats {
                        total: total_memory_rule(backend, &raw),
                        free: free.total,
                        reserved: raw.pool_reserved,
                        active: raw.pool_used,
                        cache: free.cache,
                        ..named
                    }
                }
            }
        });
        let entries = self.ledger.snapshot();
        let models = entries.iter().filter_map(|entry| {
            let model = entry.model()?;
            let (size, loaded, counters) = (model.model_size(), model.loaded_size(), model.counters());
            Some(ModelStats {
                label: model.label(),
                device: entry.device().to_string(),
                size,
                loaded,
                offloaded: size.saturating_sub(loaded),
                page_locked: model.pinned_size(),
                dynamic: model.is_dynamic(),
                currently_used: entry.currently_used(),
                hits: counters.hits,
                misses: counters.misses,
                bytes_to_device: counters.bytes_to_device,
            })
        });
        SystemStats {
            devices: devices.collect(),
            models: models.collect(),
            extra_reserved_memory: self.extra_reserved_memory(),
            minimum_inference_memory: self.minimum_inference_memory(),
            page_locked_budget: self.page_locked_budget(),
            ram_total: host.ram_total,
            ram_available: host.ram_available,
        }
    }
}
