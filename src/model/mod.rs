//! A DeepSeek-V4 model: configuration, typed weights and the architecture that uses them.
#![forbid(unsafe_code)]

pub mod config;
pub mod deepseek_v4;
mod numerics;
mod reads;
pub mod weights;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use once_cell::sync::OnceCell;
use xxhash_rust::xxh3::Xxh3;

use crate::error::Result;
use crate::file;
use crate::tokenizer::Tokenizer;
use crate::weights::Checkpoint;

use config::Config;
use weights::Weights;

pub use numerics::{Numerics, Rounding};
pub use reads::DecodeReads;

/// An opened checkpoint folder: immutable, shared between engines and threads.
///
/// Opening reads the config and the headers of all shards and validates every tensor against the architecture; it
/// touches no page of the weights and copies none. The tokenizer is read at its first use.
///
/// ```
/// use dsv4::Model;
/// let model = Model::open("examples/models/tiny-v4")?;
/// let config = model.config();
/// println!("{} layers, {} tokens of context", config.num_hidden_layers, config.max_position_embeddings);
/// println!("{} bytes of weights in {} tensors", model.checkpoint().total_bytes(), model.checkpoint().len());
///
/// // whatever is wrong with a folder is an error that names it
/// let error = Model::open("no/such/folder").err().expect("there is none");
/// assert_eq!(error.kind(), dsv4::ErrorKind::NotFound);
/// assert!(error.message().contains("no/such/folder"));
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct Model {
    path: PathBuf,
    config: Config,
    weights: Weights,
    checkpoint: Checkpoint,
    tokenizer: OnceCell<Arc<Tokenizer>>,
    fingerprint: OnceCell<u128>,
}

impl Model {
    /// Opens the checkpoint folder at `path` (official layout: `config.json`, safetensors shards with their index or
    /// one `model.safetensors`, `tokenizer.json`).
    ///
    /// # Errors
    /// `InvalidArgument` if `path` is no folder; `NotFound` and `Io` for files; `Corrupt` for damaged, truncated or contradicting ones; `Config` and
    /// `UnsupportedModel` for the model itself. Messages name the file, key or tensor.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>> {
        let path = path.as_ref();
        // a folder that is not there shows by its config.json, as ever
        if path.is_file() {
            file::check_model_folder(path)?;
        }
        let config = Config::from_file(&path.join("config.json"))?;
        let checkpoint = Checkpoint::open(path)?;
        Self::from_parts(path.to_owned(), config, checkpoint)
    }

    /// A model from a parsed config and a checkpoint, which may lie in memory.
    #[doc(hidden)]
    pub fn from_parts(path: PathBuf, config: Config, checkpoint: Checkpoint) -> Result<Arc<Self>> {
        let config = config.with_checkpoint(&checkpoint)?;
        let weights = Weights::resolve(&config, &checkpoint)?;
        Ok(Arc::new(Self {
            path,
            config,
            weights,
            checkpoint,
            tokenizer: OnceCell::new(),
            fingerprint: OnceCell::new(),
        }))
    }

    /// Identity of the checkpoint as far as it can be had without reading weights: config, tensor names, types and
    /// shapes, and the shards' sizes and times of modification. Caches and session files of one model are refused by
    /// another, and so by a copy whose shards have other times: copy a model with its times (`cp -a`).
    pub fn fingerprint(&self) -> u128 {
        *self.fingerprint.get_or_init(|| fingerprint(&self.config, &self.checkpoint))
    }

    /// The folder it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Dimensions and constants.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Typed handles to the weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The shards behind the weights.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The tokenizer, read from `tokenizer.json` at the first call.
    ///
    /// # Errors
    /// `NotFound` if the folder has none, `Tokenizer` if it cannot be read or has more ids than the model; fewer are padded
    /// ([`Tokenizer::pad_to`]).
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        self.tokenizer.get_or_try_init(|| {
            let file = self.path.join("tokenizer.json");
            let tokenizer = Tokenizer::from_file(&file)?.pad_to(self.config.vocab_size);
            tokenizer.map(Arc::new).map_err(|e| e.context(file.display()))
        })
    }
}

fn fingerprint(config: &Config, checkpoint: &Checkpoint) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(format!("{config:?}").as_bytes());
    for shard in checkpoint.shards() {
        let modified = std::fs::metadata(shard.path()).and_then(|m| m.modified()).ok();
        let modified = modified.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok()).unwrap_or_default();
        hash.update(&shard.declared_bytes().to_le_bytes());
        hash.update(&modified.as_nanos().to_le_bytes());
    }
    for tensor in checkpoint.tensors() {
        hash.update(tensor.name().as_bytes());
        hash.update(tensor.dtype().name().as_bytes());
        tensor.shape().iter().for_each(|&n| hash.update(&(n as u64).to_le_bytes()));
    }
    hash.digest128()
}
