//! The forward pass of BERT, layer by layer, faulting each weight when its turn comes.
//!
//! Only shapes and order are decided here; what touches the card is in `compute`. Activations are let go
//! as soon as the next one stands.

use std::sync::Arc;

use vram_pager::pager::{ModelOptions, Pager, PagerStream};
use vram_pager::patcher::{Lora, PagedPatcher, Place, ResidentOptions, ResidentPatcher};
use vram_pager::weights::{Dtype, TensorId, TensorIndex, UnitId};

use super::compute::{Compute, Heads, Session};
use super::config::{Config, ModelFolder};
use super::error::RunnerError;
use super::weights::Weights;

/// A model, opened on a card.
#[derive(Clone, Debug)]
pub(crate) struct Bert {
    pager: Arc<Pager>,
    weights: Weights,
    config: Config,
    words: TensorId,
    positions: TensorId,
    types: TensorId,
    norm: UnitId,
    layers: Vec<Layer>,
}

/// The units of a layer.
#[derive(Clone, Debug)]
struct Layer {
    query: UnitId,
    key: UnitId,
    value: UnitId,
    attention_output: UnitId,
    attention_norm: UnitId,
    intermediate: UnitId,
    output: UnitId,
    norm: UnitId,
}

impl Bert {
    /// Opens the model of a folder on a card. Reads the file's header and no weight.
    pub(crate) fn open(pager: &Arc<Pager>, folder: &ModelFolder) -> Result<Self, RunnerError> {
        Self::with(pager, folder, |index| {
            let model = pager.open_model(index, &ModelOptions::default())?;
            Ok(Weights::Paged(PagedPatcher::new(&model, Place::Card(0))))
        })
    }

    /// As [`Self::open`], with weights that are loaded module by module. The pager serves activations only.
    pub(crate) fn open_resident(
        pager: &Arc<Pager>,
        folder: &ModelFolder,
        options: &ResidentOptions,
    ) -> Result<Self, RunnerError> {
        Self::with(pager, folder, |index| {
            Ok(Weights::Resident(ResidentPatcher::open(pager.device(), index, Place::Card(0), options)?))
        })
    }

    fn with(
        pager: &Arc<Pager>,
        folder: &ModelFolder,
        open: impl FnOnce(Arc<TensorIndex>) -> Result<Weights, RunnerError>,
    ) -> Result<Self, RunnerError> {
        let config = folder.config()?;
        let index = folder.weights()?;
        let find = Names { index: &index };
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let embeddings = "embeddings";
        let words = find.table(&format!("{embeddings}.word_embeddings.weight"), hidden)?;
        let positions = find.table(&format!("{embeddings}.position_embeddings.weight"), hidden)?;
        let types = find.table(&format!("{embeddings}.token_type_embeddings.weight"), hidden)?;
        let norm = find.norm(&format!("{embeddings}.LayerNorm"), hidden)?;
        let layers = (0..config.num_hidden_layers)
            .map(|number| {
                let at = |part: &str| format!("encoder.layer.{number}.{part}");
                Ok(Layer {
                    query: find.linear(&at("attention.self.query"), hidden, hidden)?,
                    key: find.linear(&at("attention.self.key"), hidden, hidden)?,
                    value: find.linear(&at("attention.self.value"), hidden, hidden)?,
                    attention_output: find.linear(&at("attention.output.dense"), hidden, hidden)?,
                    attention_norm: find.norm(&at("attention.output.LayerNorm"), hidden)?,
                    intermediate: find.linear(&at("intermediate.dense"), inner, hidden)?,
                    output: find.linear(&at("output.dense"), hidden, inner)?,
                    norm: find.norm(&at("output.LayerNorm"), hidden)?,
                })
            })
            .collect::<Result<_, RunnerError>>()?;
        let weights = open(index)?;
        Ok(Self { pager: Arc::clone(pager), weights, config, words, positions, types, norm, layers })
    }

    /// Its weights.
    pub(crate) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The same model with LoRAs, over the same weights.
    pub(crate) fn with_loras(&self, loras: &[Lora<'_>]) -> Result<Self, RunnerError> {
        Ok(Self { weights: self.weights.with_loras(loras)?, ..self.clone() })
    }

    /// The embedding of a sentence's token ids: the mean of the last layer's tokens, to length 1. Any
    /// number of threads may call it, each with a stream of its own.
    pub(crate) fn embed(
        &self,
        compute: &Compute,
        stream: &PagerStream,
        ids: &[u32],
    ) -> Result<Vec<f32>, RunnerError> {
        let limit = self.config.max_position_embeddings;
        if ids.is_empty() {
            return Err(RunnerError::NoTokens);
        }
        if ids.len() > limit as usize {
            return Err(RunnerError::TooLong { tokens: ids.len(), limit });
        }
        let hidden = self.config.hidden_size;
        let heads =
            Heads { count: self.config.num_attention_heads, width: hidden / self.config.num_attention_heads };
        let epsilon = self.config.layer_norm_eps;
        let on = Session::new(compute, &self.weights, &self.pager, stream);

        let words: Vec<u64> = ids.iter().map(|id| u64::from(*id)).collect();
        let positions: Vec<u64> = (0..ids.len() as u64).collect();
        // One sentence: every token is of the first kind.
        let types = vec![0_u64; ids.len()];
        let tables = [(self.words, &words[..]), (self.positions, &positions[..]), (self.types, &types[..])];
        let mut x = on.embed(tables, hidden)?;
        on.layer_norm(self.norm, &mut x, epsilon)?;
        for layer in &self.layers {
            let q = on.linear(layer.query, &x, hidden)?;
            let k = on.linear(layer.key, &x, hidden)?;
            let v = on.linear(layer.value, &x, hidden)?;
            let mixed = on.attention(&q, &k, &v, heads)?;
            drop((q, k, v));
            let mut attended = on.linear(layer.attention_output, &mixed, hidden)?;
            drop(mixed);
            on.add(&mut attended, &x)?;
            drop(x);
            on.layer_norm(layer.attention_norm, &mut attended, epsilon)?;
            let mut inner = on.linear(layer.intermediate, &attended, self.config.intermediate_size)?;
            on.gelu(&mut inner)?;
            x = on.linear(layer.output, &inner, hidden)?;
            drop(inner);
            on.add(&mut x, &attended)?;
            on.layer_norm(layer.norm, &mut x, epsilon)?;
        }
        on.download(&on.pool(&x)?)
    }
}

/// Finds tensors and units, and checks that they are what the configuration says.
struct Names<'a> {
    index: &'a TensorIndex,
}

impl Names<'_> {
    /// A weight of `outputs` x `inputs` and its bias.
    fn linear(&self, unit: &str, outputs: u32, inputs: u32) -> Result<UnitId, RunnerError> {
        self.tensor(&format!("{unit}.weight"), &[Some(outputs), Some(inputs)])?;
        self.norm_part(unit, "bias", outputs)
    }

    /// A weight and a bias of `width` each.
    fn norm(&self, unit: &str, width: u32) -> Result<UnitId, RunnerError> {
        self.norm_part(unit, "weight", width)?;
        self.norm_part(unit, "bias", width)
    }

    fn norm_part(&self, unit: &str, part: &str, width: u32) -> Result<UnitId, RunnerError> {
        self.tensor(&format!("{unit}.{part}"), &[Some(width)])?;
        self.index.unit(unit).ok_or_else(|| self.wrong(format!("there is no unit `{unit}`")))
    }

    /// A table of rows of `width`.
    fn table(&self, name: &str, width: u32) -> Result<TensorId, RunnerError> {
        self.tensor(name, &[None, Some(width)])
    }

    fn tensor(&self, name: &str, shape: &[Option<u32>]) -> Result<TensorId, RunnerError> {
        let id = self.index.tensor(name).ok_or_else(|| self.wrong(format!("there is no tensor `{name}`")))?;
        let info = self.index.tensor_info(id);
        let same = info.shape.len() == shape.len()
            && info
                .shape
                .iter()
                .zip(shape)
                .all(|(found, wanted)| wanted.is_none_or(|wanted| u64::from(wanted) == *found));
        if info.dtype != Dtype::F32 || !same {
            let wanted: Vec<String> = shape
                .iter()
                .map(|side| side.map_or_else(|| "any".to_owned(), |side| side.to_string()))
                .collect();
            return Err(self.wrong(format!(
                "tensor `{name}` is {} {:?}, config.json asks for F32 [{}]",
                info.dtype.name(),
                info.shape,
                wanted.join(", ")
            )));
        }
        Ok(id)
    }

    fn wrong(&self, what: String) -> RunnerError {
        let model =
            self.index.files().first().map_or_else(String::new, |file| file.path().display().to_string());
        RunnerError::WrongModel { model, what }
    }
}
