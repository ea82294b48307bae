//! Engine
//!
//! A model on a device: numerics, threads, format of the cache. Any number of sessions run on one engine, from any
//! threads.

use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::args::{
    Options, Out, OutStruct, SizedStruct, c_text, choice, copy_text, count, flag, free_own, init_options, object,
    options, path,
};
use super::call::{WHEN_FULL, dsv4_when_full};
use super::guard::{guard, guard_value};
use super::handle::{Shared, SharedUse};
use super::model::dsv4_model;
use super::status::{dsv4_error, dsv4_status};
use crate::cache::tier::{Prefetch, TierOptions};
use crate::cache::{CheckpointPolicy, KvFormat};
use crate::engine::{DegradedMode, DeviceChoice, Engine, EngineOptions};
use crate::error::{Result, bail};
use crate::model::Numerics;

/// An engine. Functions that take it as `const` may run on several threads at once.
pub struct dsv4_engine {
    shared: Shared<Arc<Engine>>,
}

/// How closely an engine follows the roundings of the official inference code.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_numerics {
    /// Every quantisation point of the official code. The default.
    Reference = 0,
    /// As `REFERENCE`, and the attention output is cast to FP8, as production servers do.
    Served = 1,
    /// Exactly dequantised weights, quantised caches, unquantised activations.
    Kvquant = 2,
    /// float32 arithmetic and nothing else rounded: for research.
    Exact = 3,
}

const NUMERICS: [(dsv4_numerics, Numerics); 4] = [
    (dsv4_numerics::Reference, Numerics::Reference),
    (dsv4_numerics::Served, Numerics::Served),
    (dsv4_numerics::Kvquant, Numerics::Kvquant),
    (dsv4_numerics::Exact, Numerics::Exact),
];

/// Storage of the cache.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_kv_format {
    /// The numerics' own: fp8, or f32 for `EXACT`. The default.
    Auto = 0,
    /// FP8 entries and FP4 index keys; not for `EXACT`.
    Fp8 = 1,
    /// bfloat16 for both.
    Bf16 = 2,
    /// float32 for both.
    F32 = 3,
}

const KV_FORMATS: [(dsv4_kv_format, Option<KvFormat>); 4] = [
    (dsv4_kv_format::Auto, None),
    (dsv4_kv_format::Fp8, Some(KvFormat::Fp8)),
    (dsv4_kv_format::Bf16, Some(KvFormat::Bf16)),
    (dsv4_kv_format::F32, Some(KvFormat::F32)),
];

/// Where checkpoints are kept, at which later prompts with the same beginning can start.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_checkpoints {
    /// At the last multiple of 256 tokens at or below the end of each prompt, and at each multiple that decoding reaches.
    /// The default.
    Boundary = 0,
    /// Nowhere: every prompt is computed from its beginning.
    None = 1,
    /// At every multiple of `checkpoint_every` tokens.
    Every = 2,
}

/// How far ahead of their use blocks are read from the disk tier.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_prefetch {
    /// While one is taken over, the next ones are read, `prefetch_depth` of them. The default.
    Next = 0,
    /// Not at all: each is read when it is waited for.
    Off = 1,
    /// As soon as a prompt is known, all that it can reuse is read, up to 16 times `prefetch_depth` ahead.
    Aggressive = 2,
}

const PREFETCH: [(dsv4_prefetch, Prefetch); 3] = [
    (dsv4_prefetch::Next, Prefetch::Next),
    (dsv4_prefetch::Off, Prefetch::Off),
    (dsv4_prefetch::Aggressive, Prefetch::Aggressive),
];

/// How an engine runs its model. Fill with `dsv4_engine_options_init`, then change what you like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_engine_options {
    /// `sizeof(dsv4_engine_options)`.
    pub size: usize,
    /// Where to run, ending with a NUL: `"cpu"`, `"cuda"` or `"cuda:N"`; NULL is `"cpu"`, the default. Read during the
    /// call only.
    pub device: *const c_char,
    /// A `dsv4_numerics`.
    pub numerics: i32,
    /// A `dsv4_kv_format`.
    pub kv_format: i32,
    /// Worker threads, at most 1024; 0, the default, is one per available core. They belong to the engine and end with
    /// it; 1 starts none and works on the calling thread.
    pub threads: u32,
    /// Most tokens that go through the model at once, at most 65536; 0, the default, is 256 on the CPU and 2048 on a GPU.
    /// More is faster and takes more memory, and a call is cancelled within one such chunk, on the CPU within one layer
    /// of it.
    pub prefill_chunk: u32,
    /// Most bytes of the cache, for sessions and reusable prompt beginnings together; 0, the default, is a quarter of the
    /// machine's memory, or half of what weights and steps leave of a GPU's. Memory is taken as it fills, on a GPU when
    /// the engine is made; at the limit, beginnings that no session uses are dropped, the
    /// longest unused first, and when all is in use calls do as `when_full` says.
    pub cache_bytes: u64,
    /// Most bytes of checkpoints, within `cache_bytes`; 0, the default, is a quarter of those.
    pub checkpoint_bytes: u64,
    /// A `dsv4_checkpoints`.
    pub checkpoints: i32,
    /// For `EVERY`: a multiple of 256. Otherwise it means nothing.
    pub checkpoint_every: u32,
    /// Prompt beginnings are shared only between sessions under the same salt: a text that ends with a NUL, different for
    /// users who must not learn from response times what others asked. NULL, the default, is the empty text. Read during
    /// the call only.
    pub prefix_salt: *const c_char,
    /// Bytes of host memory, beyond `cache_bytes`, for reusable beginnings that had to make room: the host tier. 0, the
    /// default, is none.
    pub host_tier_bytes: u64,
    /// Folder of the disk tier, where what the host tier has no room for is kept, also for later runs and other processes:
    /// a path that ends with a NUL. It is made if it is not there. NULL, the default, is none. Read during the call only.
    pub disk_tier_path: *const c_char,
    /// Most bytes of files in that folder; 0, the default, is no limit. The longest unused are deleted first.
    pub disk_tier_bytes: u64,
    /// Most bytes that are written to the folder per second, on average; what would exceed it is dropped. 0, the default,
    /// is no limit.
    pub disk_tier_write_rate: u64,
    /// Most bytes that this engine writes to the folder in all; 0, the default, is no limit.
    pub disk_tier_write_total: u64,
    /// A `dsv4_prefetch`.
    pub prefetch: i32,
    /// Blocks that are read ahead, 1 to 1024; 4 by default.
    pub prefetch_depth: u32,
    /// Most milliseconds that a prompt waits for the tiers, before it computes what is missing; 2000 by default.
    pub tier_timeout_ms: u32,
    /// 1 fills freed cache memory with NaN, so that a defect shows as `NUMERIC`; slower. 0 is the default.
    pub poison_cache: i32,
    /// 1 makes logits on a GPU independent of how tokens are cut into calls, chunks and batches, to the last bit, as they
    /// always are on the CPU; prefill is slower. 0 is the default.
    pub batch_invariant: i32,
    /// 0.
    pub reserved: i32,
    /// Most bytes of host memory, beyond the limits above, for sessions that give their pages up for others: idle ones, and
    /// waiting ones that rank behind. They have them back before their next step, with the same results; one that finds no
    /// place there is computed again from its tokens. 0, the default, is no such place: sessions keep their pages.
    pub session_tier_bytes: u64,
    /// A `dsv4_when_full`: what calls do for which the cache has no room. `dsv4_session_set_call_options` may say otherwise.
    pub when_full: i32,
    /// Percent of the cache held by sessions, 1 to 100, from which on new sessions are made smaller, as the next two fields
    /// say; 0, the default, is never.
    pub degraded_load_percent: u32,
    /// Most tokens of such a session's context, at least 1. Without `degraded_load_percent` it means nothing.
    pub degraded_context: u64,
    /// Most tokens that such a session has in a step, at least 1. Without `degraded_load_percent` it means nothing.
    pub degraded_chunk: u64,
    /// Most bytes of a GPU's memory, weights, steps and cache together; 0, the default, is what is free.
    pub gpu_bytes: u64,
    /// Routed experts of each layer whose weights the GPU holds; the CPU computes the others while
    /// the GPU does its share. 0, the default, is as many as fit, -1 is none.
    pub gpu_experts: i64,
    /// Most bytes of host memory for the weights of routed experts, those on a GPU aside. Where they do not all fit, the
    /// experts that a step needs are read from the files into this memory, and what is used most stays; at least the
    /// experts of one token must fit. Results are the same. 0, the default, uses all where they are mapped and leaves it to
    /// the system what stays in memory.
    pub host_bytes: u64,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_engine_options {
    const NAME: &'static str = "dsv4_engine_options";
}

impl Options for dsv4_engine_options {
    fn defaults() -> Self {
        let rust = EngineOptions::default();
        Self {
            size: size_of::<Self>(),
            device: ptr::null(),
            numerics: dsv4_numerics::Reference as i32,
            kv_format: dsv4_kv_format::Auto as i32,
            threads: rust.threads as u32,
            prefill_chunk: rust.prefill_chunk as u32,
            cache_bytes: rust.cache_bytes,
            checkpoint_bytes: rust.checkpoint_bytes,
            checkpoints: dsv4_checkpoints::Boundary as i32,
            checkpoint_every: 0,
            prefix_salt: ptr::null(),
            host_tier_bytes: rust.tiers.host_bytes,
            disk_tier_path: ptr::null(),
            disk_tier_bytes: rust.tiers.disk_bytes,
            disk_tier_write_rate: rust.tiers.disk_write_rate,
            disk_tier_write_total: rust.tiers.disk_write_total,
            prefetch: dsv4_prefetch::Next as i32,
            prefetch_depth: rust.tiers.prefetch_depth as u32,
            tier_timeout_ms: rust.tiers.timeout.as_millis() as u32,
            poison_cache: 0,
            batch_invariant: 0,
            reserved: 0,
            session_tier_bytes: rust.tiers.session_bytes,
            when_full: dsv4_when_full::Default as i32,
            degraded_load_percent: 0,
            degraded_context: 0,
            degraded_chunk: 0,
            gpu_bytes: rust.gpu_bytes,
            gpu_experts: 0,
            host_bytes: rust.host_bytes,
        }
    }
}

/// What an engine was made with and found. Set `size` to `sizeof(dsv4_engine_info)` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_engine_info {
    /// `sizeof(dsv4_engine_info)`.
    pub size: usize,
    /// Instruction set of the CPU kernels, for example `"avx2"`; ends with a NUL.
    pub simd: [c_char; 16],
    /// A `dsv4_numerics`.
    pub numerics: i32,
    /// A `dsv4_kv_format`, never `AUTO`.
    pub kv_format: i32,
    /// Threads that work at once.
    pub threads: u32,
    /// Most tokens that go through the model at once.
    pub prefill_chunk: u32,
    /// Name of the device for people: `"cpu"`, or that of a GPU, for example `"NVIDIA H200"`; ends with a NUL, cut if it is
    /// longer.
    pub device: [c_char; 64],
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_engine_info {
    const NAME: &'static str = "dsv4_engine_info";
}

/// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_engine_options_init`, which passes the size as
/// your header has it. `options` may be NULL; then nothing happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_engine_options_init_sized(options: *mut dsv4_engine_options, size: usize) {
    guard_value("dsv4_engine_options_init_sized", (), || {
        // SAFETY: NULL or `size` bytes by the header's contract.
        unsafe { init_options(options, size) }
    });
}

/// Makes an engine on `model`. `options` may be NULL. `*out` receives the engine, to be freed with `dsv4_engine_free`.
///
/// On a GPU the weights are uploaded during the call, as the checkpoint stores them.
///
/// Errors: `INVALID_ARGUMENT` for an option out of range; `UNAVAILABLE` for a device that is not there and
/// `UNSUPPORTED` for what it cannot run (too old a device, numerics `EXACT`, another cache than FP8); `IO` for a folder of the disk tier that cannot be made or read;
/// `OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_engine_new(
    model: *const dsv4_model,
    options: *const dsv4_engine_options,
    out: *mut *mut dsv4_engine,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_engine_new", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        out.check()?;
        // SAFETY: as above; the text is read during this call only.
        let options = unsafe { read(&options) }?;
        let engine = Engine::new(&model.model, options)?;
        out.give(dsv4_engine { shared: Shared::new("the engine", engine).bound() });
        Ok(())
    })
}

/// Frees an engine. Sessions made on it keep what they need and live on. `engine` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_engine_free(engine: *mut dsv4_engine) {
    guard_value("dsv4_engine_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free_own(engine, |engine| engine.shared.is_inherited()) }
    });
}

/// What the engine was made with and found.
///
/// Errors: only `INVALID_ARGUMENT` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_engine_get_info(
    engine: *const dsv4_engine,
    info: *mut dsv4_engine_info,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let info = unsafe { OutStruct::new(info, "info") };
    guard("dsv4_engine_get_info", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        info.check()?;
        info.set(describe(&engine));
        Ok(())
    })
}

impl dsv4_engine {
    pub(super) fn get(&self) -> Result<SharedUse<'_, Arc<Engine>>> {
        self.shared.get()
    }
}

/// The Rust options behind those of C.
///
/// # Safety
/// `device`, `prefix_salt` and `disk_tier_path` are NULL or text that ends with a NUL.
pub(super) unsafe fn read(options: &dsv4_engine_options) -> Result<EngineOptions> {
    let device = if options.device.is_null() {
        DeviceChoice::Cpu
    } else {
        // SAFETY: by the contract above.
        unsafe { c_text(options.device, "device") }?.parse()?
    };
    let salt = if options.prefix_salt.is_null() {
        ""
    } else {
        // SAFETY: by the contract above.
        unsafe { c_text(options.prefix_salt, "prefix_salt") }?
    };
    if options.reserved != 0 {
        bail!(InvalidArgument, "reserved is {}; it must be 0", options.reserved);
    }
    let policies = [
        (dsv4_checkpoints::Boundary, CheckpointPolicy::Boundary),
        (dsv4_checkpoints::None, CheckpointPolicy::None),
        (dsv4_checkpoints::Every, CheckpointPolicy::Every(options.checkpoint_every as usize)),
    ];
    Ok(EngineOptions {
        numerics: choice(options.numerics, "numerics", &NUMERICS, |n| n as i32)?,
        kv_format: choice(options.kv_format, "kv_format", &KV_FORMATS, |f| f as i32)?,
        device,
        threads: options.threads as usize,
        prefill_chunk: options.prefill_chunk as usize,
        cache_bytes: options.cache_bytes,
        checkpoint_bytes: options.checkpoint_bytes,
        checkpoints: choice(options.checkpoints, "checkpoints", &policies, |p| p as i32)?,
        prefix_salt: salt.to_owned(),
        // SAFETY: by the contract above.
        tiers: unsafe { tiers(options) }?,
        poison_cache: flag(options.poison_cache, "poison_cache")?,
        batch_invariant: flag(options.batch_invariant, "batch_invariant")?,
        when_full: choice(options.when_full, "when_full", &WHEN_FULL, |w| w as i32)?.unwrap_or_default(),
        degraded: degraded(options)?,
        gpu_bytes: options.gpu_bytes,
        host_bytes: options.host_bytes,
        gpu_experts: match options.gpu_experts {
            0 => None,
            -1 => Some(0),
            n => match usize::try_from(n) {
                Ok(n) => Some(n),
                Err(_) => bail!(
                    InvalidArgument,
                    "gpu_experts is {n}; a number of experts, 0 for as many as fit, or -1 for none"
                ),
            },
        },
    })
}

fn degraded(options: &dsv4_engine_options) -> Result<Option<DegradedMode>> {
    if options.degraded_load_percent == 0 {
        return Ok(None);
    }
    Ok(Some(DegradedMode {
        load_percent: options.degraded_load_percent,
        context: count(options.degraded_context, "degraded_context")?,
        chunk: count(options.degraded_chunk, "degraded_chunk")?,
    }))
}

/// # Safety
/// As for [`read`].
unsafe fn tiers(options: &dsv4_engine_options) -> Result<TierOptions> {
    let directory = if options.disk_tier_path.is_null() {
        None
    } else {
        // SAFETY: by the contract above.
        Some(unsafe { path(options.disk_tier_path, "disk_tier_path") }?.to_owned())
    };
    Ok(TierOptions {
        host_bytes: options.host_tier_bytes,
        directory,
        disk_bytes: options.disk_tier_bytes,
        disk_write_rate: options.disk_tier_write_rate,
        disk_write_total: options.disk_tier_write_total,
        prefetch: choice(options.prefetch, "prefetch", &PREFETCH, |p| p as i32)?,
        prefetch_depth: options.prefetch_depth as usize,
        timeout: Duration::from_millis(options.tier_timeout_ms.into()),
        session_bytes: options.session_tier_bytes,
    })
}

/// The number of a format in the C API.
pub(super) fn kv_format_number(format: KvFormat) -> i32 {
    let format = match format {
        KvFormat::Fp8 => dsv4_kv_format::Fp8,
        KvFormat::Bf16 => dsv4_kv_format::Bf16,
        KvFormat::F32 => dsv4_kv_format::F32,
    };
    format as i32
}

fn describe(engine: &Engine) -> dsv4_engine_info {
    let options = engine.options();
    let numerics = match options.numerics {
        Numerics::Reference => dsv4_numerics::Reference,
        Numerics::Served => dsv4_numerics::Served,
        Numerics::Kvquant => dsv4_numerics::Kvquant,
        Numerics::Exact => dsv4_numerics::Exact,
    };
    let mut info = dsv4_engine_info {
        size: size_of::<dsv4_engine_info>(),
        simd: [0; 16],
        numerics: numerics as i32,
        kv_format: kv_format_number(engine.kv_format()),
        threads: engine.threads() as u32,
        prefill_chunk: options.prefill_chunk as u32,
        device: [0; 64],
    };
    copy_text(engine.simd(), &mut info.simd);
    copy_text(engine.device_name(), &mut info.device);
    info
}
