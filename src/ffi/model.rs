//! Model
//!
//! An opened checkpoint folder: configuration, tokenizer and memory-mapped weights. Immutable; one model serves any
//! number of engines and threads.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use super::args::{Options, Out, OutStruct, SizedStruct, flag, free, init_options, object, options, path};
use super::guard::{guard, guard_value};
use super::handle::Shared;
use super::status::{Fault, dsv4_error, dsv4_status};
use crate::error::{ErrorKind, Result, bail};
use crate::model::Model;
use crate::model::config::Draft;

/// An opened checkpoint. Functions that take it as `const` may run on several threads at once.
pub struct dsv4_model {
    shared: Shared<OpenModel>,
}

pub(super) struct OpenModel {
    pub(super) model: Arc<Model>,
    path: CString,
}

/// How to open a model. Fill with `dsv4_model_options_init`, then change what you like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_model_options {
    /// `sizeof(dsv4_model_options)`.
    pub size: usize,
    /// 1 reads `tokenizer.json` while opening, so that a folder without a usable tokenizer is refused at once; 0, the
    /// default, reads it at its first use.
    pub preload_tokenizer: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_model_options {
    const NAME: &'static str = "dsv4_model_options";
}

impl Options for dsv4_model_options {
    fn defaults() -> Self {
        Self { size: size_of::<Self>(), preload_tokenizer: 0, reserved: 0 }
    }
}

/// The draft module of a checkpoint.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_draft {
    /// None.
    None = 0,
    /// One MTP block, as in the releases of April 2026.
    Mtp = 1,
    /// DSpark stages, as in the releases of July and August 2026.
    Dspark = 2,
}

/// Dimensions of a model; names are the keys of `config.json`. Set `size` to `sizeof(dsv4_model_info)` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_model_info {
    /// `sizeof(dsv4_model_info)`.
    pub size: usize,
    /// Bytes of all weights in the checkpoint.
    pub weight_bytes: u64,
    /// Number of tensors in the checkpoint.
    pub tensors: u64,
    /// Longest context, in tokens.
    pub max_position_embeddings: u64,
    /// Number of token ids, and length of a row of logits.
    pub vocab_size: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Layers of the trunk.
    pub num_hidden_layers: u32,
    /// Attention heads.
    pub num_attention_heads: u32,
    /// Values per head.
    pub head_dim: u32,
    /// Tokens that every layer attends to directly.
    pub sliding_window: u32,
    /// Routed experts per layer.
    pub n_routed_experts: u32,
    /// Routed experts that a token uses per layer.
    pub num_experts_per_tok: u32,
    /// The token that begins a prompt.
    pub bos_token_id: u32,
    /// The token with which the model ends its output.
    pub eos_token_id: u32,
    /// A `dsv4_draft`.
    pub draft: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_model_info {
    const NAME: &'static str = "dsv4_model_info";
}

/// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_model_options_init`, which passes the size as
/// your header has it. `options` may be NULL; then nothing happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_model_options_init_sized(options: *mut dsv4_model_options, size: usize) {
    guard_value("dsv4_model_options_init_sized", (), || {
        // SAFETY: NULL or `size` bytes by the header's contract.
        unsafe { init_options(options, size) }
    });
}

/// Opens the checkpoint folder at `path`: `config.json`, safetensors shards with their index (or one
/// `model.safetensors`) and `tokenizer.json`, as published. The path ends with a NUL; UTF-8 on Windows, the file system's
/// own bytes elsewhere. `options` may be NULL.
///
/// Opening reads the headers of all shards and checks every tensor; it touches no page of the weights and copies none.
/// `*out` receives the model, to be freed with `dsv4_model_free`.
///
/// Errors: `NOT_FOUND` and `IO` for files; `CORRUPT` for damaged, truncated or contradicting ones, `CONFIG` and
/// `UNSUPPORTED_MODEL` for the model itself, `TOKENIZER` if it is preloaded; `OUT_OF_MEMORY`. Messages name the file, key
/// or tensor.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_model_open(
    path: *const c_char,
    options: *const dsv4_model_options,
    out: *mut *mut dsv4_model,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_model_open", err, || {
        // SAFETY: as above.
        let path = unsafe { self::path(path, "path") }?;
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        out.check()?;
        let preload = flag(options.preload_tokenizer, "preload_tokenizer")?;
        reserved(options.reserved)?;
        let model = Model::open(path)?;
        if preload {
            model.tokenizer()?;
        }
        out.give(dsv4_model::new(model)?);
        Ok(())
    })
}

/// Frees a model. Engines and other objects made from it keep what they need and live on. `model` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_model_free(model: *mut dsv4_model) {
    guard_value("dsv4_model_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free(model) }
    });
}

/// Dimensions and constants of the model.
///
/// Errors: only `INVALID_ARGUMENT` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_model_get_info(
    model: *const dsv4_model,
    info: *mut dsv4_model_info,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let info = unsafe { OutStruct::new(info, "info") };
    guard("dsv4_model_get_info", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        info.check()?;
        info.set(describe(&model.model)?);
        Ok(())
    })
}

/// The folder that the model was opened from, as it was given to `dsv4_model_open`; ends with a NUL. It lives as long as
/// the model.
///
/// Errors: only `INVALID_ARGUMENT` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_model_path(
    model: *const dsv4_model,
    path: *mut *const c_char,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let path = unsafe { Out::new(path, "path") };
    guard("dsv4_model_path", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        path.check()?;
        path.set(model.path.as_ptr());
        Ok(())
    })
}

impl dsv4_model {
    /// A handle on an open model; also the way in for tests whose model lies in memory.
    #[doc(hidden)]
    pub fn new(model: Arc<Model>) -> Result<Self> {
        let bytes = model.path().as_os_str().as_encoded_bytes().to_vec();
        let Ok(path) = CString::new(bytes) else { bail!(InvalidArgument, "the path has a NUL byte") };
        Ok(Self { shared: Shared::new("the model", OpenModel { model, path }) })
    }

    pub(super) fn get(&self) -> Result<super::handle::SharedUse<'_, OpenModel>> {
        self.shared.get()
    }
}

/// Fields that have no meaning yet must be 0, so that they can get one.
pub(super) fn reserved(value: i32) -> Result<()> {
    if value != 0 {
        bail!(InvalidArgument, "reserved is {value}; it must be 0");
    }
    Ok(())
}

fn describe(model: &Model) -> Result<dsv4_model_info, Fault> {
    let c = model.config();
    Ok(dsv4_model_info {
        size: size_of::<dsv4_model_info>(),
        weight_bytes: model.checkpoint().total_bytes(),
        tensors: model.checkpoint().len() as u64,
        max_position_embeddings: c.max_position_embeddings as u64,
        vocab_size: narrow(c.vocab_size)?,
        hidden_size: narrow(c.hidden_size)?,
        num_hidden_layers: narrow(c.num_hidden_layers)?,
        num_attention_heads: narrow(c.num_attention_heads)?,
        head_dim: narrow(c.head_dim)?,
        sliding_window: narrow(c.sliding_window)?,
        n_routed_experts: narrow(c.n_routed_experts)?,
        num_experts_per_tok: narrow(c.num_experts_per_tok)?,
        bos_token_id: c.bos_token_id,
        eos_token_id: c.eos_token_id,
        draft: match c.draft {
            Draft::None => dsv4_draft::None,
            Draft::Mtp => dsv4_draft::Mtp,
            Draft::Dspark { .. } => dsv4_draft::Dspark,
        } as i32,
        reserved: 0,
    })
}

/// The config reader admits no dimension near this limit.
fn narrow(value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| crate::Error::new(ErrorKind::Config, format!("dimension {value} is too large")))
}
