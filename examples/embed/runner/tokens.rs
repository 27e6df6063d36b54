//! Sentences to token ids, by the model's own `tokenizer.json`.

use tokenizers::Tokenizer;

use super::config::ModelFolder;
use super::error::RunnerError;

/// The tokeniser of a model.
pub(crate) struct Tokens(Tokenizer);

impl Tokens {
    /// Reads `tokenizer.json`.
    pub(crate) fn open(folder: &ModelFolder) -> Result<Self, RunnerError> {
        let file = folder.file("tokenizer.json")?;
        let refuse = |why: String| RunnerError::BadFile { file: file.clone(), why };
        let mut tokenizer = Tokenizer::from_file(&file).map_err(|error| refuse(error.to_string()))?;
        // The file asks for 128 tokens, cut or padded; here a sentence has as many as it has.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| refuse(error.to_string()))?;
        Ok(Self(tokenizer))
    }

    /// The ids of a sentence, with those that begin and end it.
    pub(crate) fn ids(&self, sentence: &str) -> Result<Vec<u32>, RunnerError> {
        let encoding = self.0.encode(sentence, true).map_err(|error| RunnerError::WrongModel {
            model: "tokenizer.json".to_owned(),
            what: format!("cannot take the sentence apart: {error}"),
        })?;
        Ok(encoding.get_ids().to_vec())
    }
}
