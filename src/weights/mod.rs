//! Weight files: validated, indexed, and laid out in pages.
//!
//! A path becomes a [`TensorIndex`] (one `.safetensors` file, or the shards of a
//! `*.safetensors.index.json`), and an index becomes a [`PageLayout`]: which model address every tensor
//! has, where a unit may be cut, and which bytes of which file belong in a page. Everything that could be
//! wrong with a file is found when it is opened, before anything is allocated for its tensors; what can
//! only go wrong later (the file is truncated, replaced or overwritten) is found by each
//! [`WeightFile::read_exact_at`].
//!
//! | file | what it does |
//! |---|---|
//! | `dtype` | the element types and their sizes |
//! | `header` | the one validator of the format: bytes to tensors, or the reason why not |
//! | `file` | a file that stays what it was when opened, read with `pread` |
//! | `index` | tensors by name, over one or many files |
//! | `unit` | which tensors make a unit |
//! | `landmarks` | where to look in the layout's lists |
//! | `layout`, `cut` | units, spans and pages in the model's address space |
//!
//! Owns the open files; takes no lock: everything is immutable once built and may be shared between
//! threads. May import `units`; knows nothing of devices.

mod cut;
mod dtype;
mod error;
mod file;
mod header;
mod index;
mod landmarks;
mod layout;
mod unit;

pub use dtype::Dtype;
pub use error::{HeaderError, IoFailure, WeightsError};
pub(crate) use error::{dimensions, path, shown};
pub use file::{FileIdentity, FileSource, MappedFile, WeightFile};
pub use header::{Header, HeaderTensor, MAX_HEADER_BYTES, header_length, parse_header, validate};
pub use index::{Shard, TensorId, TensorIndex, TensorInfo, UnitId, UnitInfo, parse_shards};
pub(crate) use index::{read_part, zeroed};
pub use layout::{
    Extent, Extents, LayoutOptions, PageLayout, Span, TENSOR_ALIGNMENT, TensorPart, TensorPlace, UnitLayout,
};
