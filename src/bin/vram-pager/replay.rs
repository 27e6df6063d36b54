//! `vram-pager replay`: plays a scenario of memory calls against the real manager and prints what it did.
//!
//! The models are sizes and the cards are books, so that a scenario runs anywhere and its answer is exact;
//! every decision is the manager's. All sizes in a scenario are MiB.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vram_pager::manager::{
    FreeOptions, LinuxHost, LoadOptions, LoadedModel, Manager, ManagerError, UNLIMITED, UnloadOptions,
};
use vram_pager::patcher::{ModelPatcher, Place, SizedCard, SizedModel, SizedSpec};

use crate::Outcome;
use crate::output::{self, Failure};
use scenario::{Answer, ModelSpec, Op, Row, Scenario, Step};

mod scenario;

const MIB: u64 = 1 << 20;

/// Play a scenario of memory calls against the manager, and print the ledger after each
///
/// Models are sizes and cards are books, so that a scenario runs anywhere. The answer is one JSON object, with
/// --json or without: a step for each op, with the ledger, the free memory and what was unloaded.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A scenario, all sizes in MiB:
  {\"name\": \"two models\",
   \"config\": {\"vram_state\": \"normal\", \"reserve_vram_mib\": 400},
   \"cards\": [{\"id\": \"gpu0\", \"total_mib\": 8192}],
   \"models\": [{\"id\": \"A\", \"card\": \"gpu0\", \"size_mib\": 4096},
              {\"id\": \"B\", \"card\": \"gpu0\", \"size_mib\": 12288, \"dynamic\": true}],
   \"ops\": [{\"op\": \"load\", \"models\": [\"A\"]},
           {\"op\": \"load\", \"models\": [\"B\"], \"memory_required_mib\": 1024},
           {\"op\": \"unload_all\"}]}

Ops: load, free, unload_all, unload_model_and_clones, touch, activations, other, soft_empty_cache, set_reserve,
drop. `dynamic` is a paged model. `expected`, for --check, is the list of steps that an answer has.")]
pub(crate) struct ReplayArgs {
    /// The scenario, a JSON file
    scenario: PathBuf,
    /// Compare with the file's `expected` and fail (exit code 1) at the first step that differs
    #[arg(long)]
    check: bool,
}

/// Why a replay failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    /// The scenario cannot be played; nothing is wrong with the program. Exit code 2.
    #[error("{}: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        why: String,
    },
    /// The manager refused a call. Exit code 1.
    #[error("{}: op {index}: {source}", path.display())]
    Manager {
        /// The file.
        path: PathBuf,
        /// Which op, from 0.
        index: usize,
        /// The manager's answer.
        source: Box<ManagerError>,
    },
    /// A step is not what the file expects. Exit code 1.
    #[error("{}: op {index} differs\n expected {expected}\n answered {answered}", path.display())]
    Differs {
        /// The file.
        path: PathBuf,
        /// Which op, from 0.
        index: usize,
        /// What the file says.
        expected: String,
        /// What the manager did.
        answered: String,
    },
}

/// Plays the scenario and prints the answer as one line of JSON on stdout.
pub(crate) fn run(args: &ReplayArgs) -> Outcome {
    let path = &args.scenario;
    let malformed = |why: String| ReplayError::Malformed { path: path.clone(), why };
    let text = fs::read_to_string(path).map_err(|error| malformed(format!("cannot be read: {error}")))?;
    let scenario: Scenario = serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
    let expected = scenario.expected.clone();
    let answer = play(scenario, path)?;
    match output::print_json(&answer) {
        // A reader that went away is no failure of the replay.
        Ok(()) | Err(Failure::ClosedPipe) => {}
        Err(failure) => return Err(failure),
    }
    if args.check {
        let Some(expected) = expected else {
            return Err(malformed("it has no `expected` to check against".to_owned()).into());
        };
        check(&answer.steps, &expected, path)?;
    }
    Ok(())
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Self {
        match error {
            ReplayError::Malformed { .. } => Self::BadInput(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

fn check(steps: &[Step], expected: &[serde_json::Value], path: &Path) -> Result<(), ReplayError> {
    for index in 0..steps.len().max(expected.len()) {
        let answered = steps.get(index).and_then(|step| serde_json::to_value(step).ok());
        if answered.as_ref() != expected.get(index) {
            let show =
                |value: Option<&serde_json::Value>| value.map_or("nothing".to_owned(), ToString::to_string);
            return Err(ReplayError::Differs {
                path: path.to_path_buf(),
                index,
                expected: show(expected.get(index)),
                answered: show(answered.as_ref()),
            });
        }
    }
    Ok(())
}

/// Why an op could not be played.
enum OpError {
    Malformed(String),
    Manager(ManagerError),
}

impl From<String> for OpError {
    fn from(why: String) -> Self {
        Self::Malformed(why)
    }
}

impl From<ManagerError> for OpError {
    fn from(error: ManagerError) -> Self {
        Self::Manager(error)
    }
}

fn play(scenario: Scenario, path: &Path) -> Result<Answer, ReplayError> {
    let malformed = |why: String| ReplayError::Malformed { path: path.to_path_buf(), why };
    let mut stage = Stage::set(&scenario).map_err(malformed)?;
    let mut steps = Vec::with_capacity(scenario.ops.len());
    for (index, op) in scenario.ops.iter().enumerate() {
        let step = stage.step(op).map_err(|error| match error {
            OpError::Malformed(why) => malformed(format!("op {index} ({}): {why}", op.name())),
            OpError::Manager(source) => {
                ReplayError::Manager { path: path.to_path_buf(), index, source: Box::new(source) }
            }
        })?;
        steps.push(step);
    }
    Ok(Answer { name: scenario.name, steps })
}

/// A scenario set up: the manager, its cards' books, and who holds which model.
struct Stage {
    manager: Manager,
    cards: Vec<(String, Arc<SizedCard>)>,
    models: BTreeMap<String, Held>,
}

/// A model with the references that the scenario holds to it.
struct Held {
    model: Arc<SizedModel>,
    _extra: Vec<Arc<SizedModel>>,
}

impl Stage {
    fn set(scenario: &Scenario) -> Result<Self, String> {
        let mut cards: Vec<(String, Arc<SizedCard>)> = Vec::new();
        for spec in &scenario.cards {
            if cards.iter().any(|(id, _)| *id == spec.id) {
                return Err(format!("two cards are called `{}`", spec.id));
            }
            let card = SizedCard::new(&*spec.id, bytes(spec.total_mib)?);
            card.set_other(bytes(spec.other_mib)?);
            cards.push((spec.id.clone(), card));
        }
        if cards.is_empty() {
            return Err("it has no cards".to_owned());
        }
        let ratio = scenario.config.min_weight_memory_ratio;
        if !(0.0..=1.0).contains(&ratio) {
            return Err(format!("min_weight_memory_ratio is {ratio}, it must lie between 0 and 1"));
        }
        let figures = cards.iter().map(|(_, card)| Arc::clone(card) as _).collect();
        let manager = Manager::over(figures, Arc::new(LinuxHost::default()));
        let reserve = bytes(scenario.config.reserve_vram_mib)?;
        manager.set_knobs(|knobs| {
            knobs.reserve = reserve;
            knobs.vram_state = scenario.config.vram_state.into();
            knobs.smart_memory = !scenario.config.disable_smart_memory;
            knobs.min_weight_ratio = Some(ratio);
        });
        let mut stage = Self { manager, cards, models: BTreeMap::new() };
        stage.make_models(&scenario.models)?;
        Ok(stage)
    }

    fn make_models(&mut self, specs: &[ModelSpec]) -> Result<(), String> {
        for (index, spec) in specs.iter().enumerate() {
            if specs[..index].iter().any(|other| other.id == spec.id) {
                return Err(format!("two models are called `{}`", spec.id));
            }
            if spec.granule_mib == 0 {
                return Err(format!("model `{}` has a granule of 0", spec.id));
            }
        }
        // A clone may be written before the model that it is a clone of.
        while self.models.len() < specs.len() {
            let before = self.models.len();
            for spec in specs.iter().filter(|spec| !self.models.contains_key(&spec.id)).collect::<Vec<_>>() {
                if let Some(model) = self.make_model(spec)? {
                    let extra = (0..spec.extra_refs).map(|_| Arc::clone(&model)).collect();
                    self.models.insert(spec.id.clone(), Held { model, _extra: extra });
                }
            }
            if self.models.len() == before {
                let left = specs.iter().find(|spec| !self.models.contains_key(&spec.id));
                let (id, of) =
                    left.map_or(("", ""), |spec| (&*spec.id, spec.clone_of.as_deref().unwrap_or("")));
                return Err(format!("model `{id}` is a clone of `{of}`, which is not there"));
            }
        }
        for spec in specs {
            let model = Arc::clone(&self.model(&spec.id)?.model);
            model.set_patches_models(self.patchers(&spec.patches_models)?);
            model.set_additional_models(self.patchers(&spec.additional)?);
        }
        Ok(())
    }

    /// `None` if it is a clone of a model that is not made yet.
    fn make_model(&self, spec: &ModelSpec) -> Result<Option<Arc<SizedModel>>, String> {
        let (place, card) = self.card(&spec.card)?;
        let sizes = SizedSpec {
            label: spec.id.clone(),
            size: bytes(spec.size_mib)?,
            granule: bytes(spec.granule_mib)?,
            dynamic: spec.dynamic,
            place,
            ..SizedSpec::default()
        };
        let Some(of) = &spec.clone_of else { return Ok(Some(SizedModel::new(sizes, card))) };
        let Some(original) = self.models.get(of) else { return Ok(None) };
        let original = &original.model;
        if original.load_device() != place {
            // Another card cannot share the bytes: the same family, but weights of its own.
            return Ok(Some(original.copy_for(sizes, card)));
        }
        if original.model_size() != sizes.size || original.is_dynamic() != sizes.dynamic {
            return Err(format!("model `{}` shares the weights of `{of}` but differs from it", spec.id));
        }
        Ok(Some(original.clone_model(&*spec.id)))
    }

    fn card(&self, id: &str) -> Result<(Place, &Arc<SizedCard>), String> {
        let index = self.cards.iter().position(|(known, _)| known == id);
        let index = index.ok_or_else(|| format!("there is no card `{id}`"))?;
        let number = u32::try_from(index).map_err(|_| "there are too many cards".to_owned())?;
        Ok((Place::Card(number), &self.cards[index].1))
    }

    fn model(&self, id: &str) -> Result<&Held, String> {
        self.models.get(id).ok_or_else(|| format!("there is no model `{id}`, or it was dropped before"))
    }

    fn patchers(&self, ids: &[String]) -> Result<Vec<Arc<dyn ModelPatcher>>, String> {
        ids.iter().map(|id| Ok(Arc::clone(&self.model(id)?.model) as Arc<dyn ModelPatcher>)).collect()
    }

    fn step(&mut self, op: &Op) -> Result<Step, OpError> {
        let emptied = self.times_emptied();
        let unloaded = self.call(op)?;
        self.manager.cleanup_models_gc();
        let entries = self.manager.current_loaded_models();
        let ledger = entries.iter().map(|entry| Row {
            id: label_of(entry),
            loaded_mib: entry.model_loaded_memory() / MIB,
            currently_used: entry.currently_used(),
        });
        let mut free_mib = BTreeMap::new();
        for (place, (id, _)) in self.manager.devices().zip(&self.cards) {
            let free = self.manager.get_free_memory_and_cache(Some(place))?.total;
            free_mib.insert(id.clone(), free.div_euclid(1 << 20));
        }
        Ok(Step {
            op: op.name(),
            ledger: ledger.collect(),
            free_mib,
            unloaded,
            cache_emptied: self.times_emptied() > emptied,
        })
    }

    /// Makes the call and answers the ids that it unloaded.
    fn call(&mut self, op: &Op) -> Result<Vec<String>, OpError> {
        let unloaded = match op {
            Op::Load { models, memory_required_mib, minimum_memory_required_mib, force_full_load } => {
                let options = LoadOptions {
                    memory_required: bytes(*memory_required_mib)?,
                    minimum_memory_required: minimum_memory_required_mib.map(bytes).transpose()?,
                    force_full_load: *force_full_load,
                    ..LoadOptions::default()
                };
                self.manager.load_models_gpu(&self.patchers(models)?, options)?;
                Vec::new()
            }
            Op::Free { card, mib, for_dynamic, keep_loaded } => {
                let device = card.as_ref().map(|card| self.card(card)).transpose()?.map(|(place, _)| place);
                let keep = keep_loaded.iter().map(|id| self.entry_of(id));
                let options = FreeOptions {
                    keep_loaded: keep.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect(),
                    for_dynamic: *for_dynamic,
                    ..FreeOptions::default()
                };
                self.manager.free_memory(bytes(*mib)?, device, &options)?
            }
            Op::UnloadAll {} => self.manager.unload_all_models()?,
            Op::UnloadModelAndClones { model, unload_additional_models, all_devices } => {
                let model = Arc::clone(&self.model(model)?.model) as Arc<dyn ModelPatcher>;
                let options = UnloadOptions {
                    unload_additional_models: *unload_additional_models,
                    all_devices: *all_devices,
                };
                self.manager.unload_model_and_clones(&model, options)?
            }
            Op::Touch { model: id, loaded_mib } => {
                let model = &self.model(id)?.model;
                let loaded = bytes(*loaded_mib)?;
                if !model.is_dynamic() {
                    return Err(format!("model `{id}` is not paged; only a load moves its bytes").into());
                }
                if loaded > model.model_size() {
                    return Err(format!("model `{id}` has less than {loaded_mib} MiB").into());
                }
                model.touch(loaded);
                Vec::new()
            }
            Op::Activations { card, active_mib, cached_mib } => {
                self.card(card)?.1.set_pool(bytes(*active_mib)?, bytes(*cached_mib)?);
                Vec::new()
            }
            Op::Other { card, mib } => {
                self.card(card)?.1.set_other(bytes(*mib)?);
                Vec::new()
            }
            Op::SoftEmptyCache {} => {
                self.manager.soft_empty_cache(false)?;
                Vec::new()
            }
            Op::SetReserve { mib } => {
                self.manager.set_extra_reserved_memory(bytes(*mib)?);
                Vec::new()
            }
            Op::Drop { model } => {
                self.model(model)?;
                self.models.remove(model);
                Vec::new()
            }
        };
        Ok(unloaded.iter().map(label_of).collect())
    }

    /// The ledger's entry of a model, if it is listed.
    fn entry_of(&self, id: &str) -> Result<Option<LoadedModel>, String> {
        let model = Arc::as_ptr(&self.model(id)?.model).cast::<()>();
        let entries = self.manager.current_loaded_models();
        Ok(entries
            .into_iter()
            .find(|entry| entry.model().is_some_and(|listed| Arc::as_ptr(&listed).cast::<()>() == model)))
    }

    fn times_emptied(&self) -> u64 {
        self.cards.iter().map(|(_, card)| card.times_emptied()).sum()
    }
}

fn label_of(entry: &LoadedModel) -> String {
    entry.model().map_or_else(|| "dead".to_owned(), |model| model.label())
}

/// MiB as bytes. A number that no byte count can hold stands for more than any card has.
fn bytes(mib: u64) -> Result<u64, String> {
    mib.checked_mul(MIB)
        .filter(|bytes| *bytes < UNLIMITED)
        .ok_or_else(|| format!("{mib} MiB are more than 2^64 bytes"))
}
