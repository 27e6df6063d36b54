//! The model folder: `model.safetensors`, `config.json`, `tokenizer.json`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use vram_pager::weights::TensorIndex;

use super::error::RunnerError;

/// The command that fetches the model.
pub(crate) const FETCH: &str = "tests/fetch-models.sh";

/// The part of `config.json` that decides the arithmetic.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Config {
    pub(super) hidden_size: u32,
    pub(super) intermediate_size: u32,
    pub(super) num_attention_heads: u32,
    pub(super) num_hidden_layers: u32,
    pub(super) max_position_embeddings: u32,
    pub(super) layer_norm_eps: f32,
    hidden_act: String,
    #[serde(default = "absolute")]
    position_embedding_type: String,
}

fn absolute() -> String {
    "absolute".to_owned()
}

/// A folder that holds a model.
#[derive(Clone, Debug)]
pub(crate) struct ModelFolder(PathBuf);

impl ModelFolder {
    /// The folder at `path`; nothing is read yet.
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// A file of the folder, which must be there.
    pub(super) fn file(&self, name: &str) -> Result<PathBuf, RunnerError> {
        let file = self.0.join(name);
        if file.is_file() { Ok(file) } else { Err(RunnerError::Missing { file }) }
    }

    /// The weights, validated.
    pub(crate) fn weights(&self) -> Result<Arc<TensorIndex>, RunnerError> {
        Ok(Arc::new(TensorIndex::open(self.file("model.safetensors")?)?))
    }

    /// The configuration; one that this runner cannot compute is refused.
    pub(crate) fn config(&self) -> Result<Config, RunnerError> {
        let file = self.file("config.json")?;
        let refuse = |why: String| RunnerError::BadFile { file: file.clone(), why };
        let text = read(&file)?;
        let config: Config = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
        if config.hidden_act != "gelu" {
            return Err(refuse(format!("hidden_act is `{}`, this runner has `gelu`", config.hidden_act)));
        }
        if config.position_embedding_type != "absolute" {
            let kind = &config.position_embedding_type;
            return Err(refuse(format!("position_embedding_type is `{kind}`, this runner has `absolute`")));
        }
        let heads = config.num_attention_heads;
        if heads == 0 || config.hidden_size == 0 || !config.hidden_size.is_multiple_of(heads) {
            return Err(refuse(format!("{} values cannot be {heads} heads", config.hidden_size)));
        }
        Ok(config)
    }
}

fn read(file: &Path) -> Result<Vec<u8>, RunnerError> {
    std::fs::read(file)
        .map_err(|error| RunnerError::BadFile { file: file.to_owned(), why: error.to_string() })
}
