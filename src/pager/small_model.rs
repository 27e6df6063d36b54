//! A model of many small units, for unit tests that look inside.

#![expect(clippy::unwrap_used, reason = "a failure here is a failed test")]

use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};

use crate::weights::TensorIndex;

/// A model of `units` units of 4 KiB, and the folder that holds its file.
pub(super) fn open(units: usize) -> (tempfile::TempDir, Arc<TensorIndex>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let bytes = vec![7; 4096];
    let tensors = (0..units).map(|unit| {
        (format!("blocks.{unit:02}.weight"), TensorView::new(Dtype::U8, vec![4096], &bytes).unwrap())
    });
    serialize_to_file(tensors, None, &path).unwrap();
    let index = Arc::new(TensorIndex::open(&path).unwrap());
    (folder, index)
}
