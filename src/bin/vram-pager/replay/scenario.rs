//! The format of a scenario file, and of the answer to it. All sizes are MiB.
//!
//! A name that is not part of the format is refused, so that a misspelt one is not silently ignored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use vram_pager::manager::VramState;

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Scenario {
    pub(super) name: String,
    #[serde(default)]
    pub(super) config: Config,
    pub(super) cards: Vec<CardSpec>,
    #[serde(default)]
    pub(super) models: Vec<ModelSpec>,
    pub(super) ops: Vec<Op>,
    #[serde(default)]
    pub(super) expected: Option<Vec<serde_json::Value>>,
}

#[derive(Deserialize, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Config {
    pub(super) vram_state: StateName,
    pub(super) reserve_vram_mib: u64,
    pub(super) min_weight_memory_ratio: f64,
    pub(super) disable_smart_memory: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            vram_state: StateName::Normal,
            reserve_vram_mib: 400,
            min_weight_memory_ratio: 0.0,
            disable_smart_memory: false,
        }
    }
}

#[derive(Deserialize, Debug, Clone, Copy)]
#[serde(rename_all = "lowercase")]
pub(super) enum StateName {
    Disabled,
    No,
    Low,
    Normal,
    High,
    Shared,
}

impl From<StateName> for VramState {
    fn from(name: StateName) -> Self {
        match name {
            StateName::Disabled => Self::Disabled,
            StateName::No => Self::No,
            StateName::Low => Self::Low,
            StateName::Normal => Self::Normal,
            StateName::High => Self::High,
            StateName::Shared => Self::Shared,
        }
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct CardSpec {
    pub(super) id: String,
    pub(super) total_mib: u64,
    #[serde(default)]
    pub(super) other_mib: u64,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelSpec {
    pub(super) id: String,
    pub(super) card: String,
    pub(super) size_mib: u64,
    #[serde(default = "default_granule")]
    pub(super) granule_mib: u64,
    #[serde(default)]
    pub(super) dynamic: bool,
    #[serde(default)]
    pub(super) extra_refs: usize,
    #[serde(default)]
    pub(super) clone_of: Option<String>,
    #[serde(default)]
    pub(super) patches_models: Vec<String>,
    #[serde(default)]
    pub(super) additional: Vec<String>,
}

fn default_granule() -> u64 {
    64
}

#[derive(Deserialize, Debug)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Op {
    Load {
        models: Vec<String>,
        #[serde(default)]
        memory_required_mib: u64,
        #[serde(default)]
        minimum_memory_required_mib: Option<u64>,
        #[serde(default)]
        force_full_load: bool,
    },
    Free {
        #[serde(default)]
        card: Option<String>,
        mib: u64,
        #[serde(default)]
        for_dynamic: bool,
        #[serde(default)]
        keep_loaded: Vec<String>,
    },
    UnloadAll {},
    UnloadModelAndClones {
        model: String,
        #[serde(default = "yes")]
        unload_additional_models: bool,
        #[serde(default)]
        all_devices: bool,
    },
    Touch {
        model: String,
        loaded_mib: u64,
    },
    Activations {
        card: String,
        active_mib: u64,
        cached_mib: u64,
    },
    Other {
        card: String,
        mib: u64,
    },
    SoftEmptyCache {},
    SetReserve {
        mib: u64,
    },
    Drop {
        model: String,
    },
}

fn yes() -> bool {
    true
}

impl Op {
    /// The op's name in the file.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Load { .. } => "load",
            Self::Free { .. } => "free",
            Self::UnloadAll {} => "unload_all",
            Self::UnloadModelAndClones { .. } => "unload_model_and_clones",
            Self::Touch { .. } => "touch",
            Self::Activations { .. } => "activations",
            Self::Other { .. } => "other",
            Self::SoftEmptyCache {} => "soft_empty_cache",
            Self::SetReserve { .. } => "set_reserve",
            Self::Drop { .. } => "drop",
        }
    }
}

/// What the replay prints.
#[derive(Serialize, Debug)]
pub(super) struct Answer {
    pub(super) name: String,
    pub(super) steps: Vec<Step>,
}

#[derive(Serialize, Debug)]
pub(super) struct Step {
    pub(super) op: &'static str,
    pub(super) ledger: Vec<Row>,
    pub(super) free_mib: BTreeMap<String, i64>,
    pub(super) unloaded: Vec<String>,
    pub(super) cache_emptied: bool,
}

#[derive(Serialize, Debug)]
pub(super) struct Row {
    pub(super) id: String,
    pub(super) loaded_mib: u64,
    pub(super) currently_used: bool,
}
