//! Options of an engine.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use crate::cache::tier::TierOptions;
use crate::cache::{BLOCK_TOKENS, CacheOptions, CheckpointPolicy, KvFormat};
use crate::error::{Error, Result, bail, beginning};
use crate::model::Numerics;

/// Where an engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The host's processors.
    #[default]
    Cpu,
    /// A CUDA device by its number.
    Cuda(u32),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let number = s.strip_prefix("cuda").map(|rest| rest.strip_prefix(':').unwrap_or("0").parse());
        match (s, number) {
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(Ok(n))) => Ok(Self::Cuda(n)),
            _ => bail!(InvalidArgument, "unknown device {:?}; cpu, cuda or cuda:N", beginning(s, 100)),
        }
    }
}

/// What a call does for which the cache has no room. In any case what no session uses makes room first, and where sessions
/// have a place in host memory ([`TierOptions::session_bytes`]), those that are idle give their pages up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum WhenFull {
    /// It takes what there is and ends with `NoBlocks` when nothing is left; the chunks that were complete stay.
    #[default]
    Evict,
    /// A prompt is compared with the room before it begins, and refused whole with `NoBlocks` and the counts.
    Refuse,
    /// A prompt waits until there is room for all of it, and any call waits that needs more than there is: in order of
    /// priority and age, until room is made, or a cancel or the time limit ends it. Sessions that are idle may hold the
    /// room: a host whose only thread owns them should give a time limit. If all sessions with pages wait, or the call needs
    /// more than the whole cache, it is `NoBlocks` with the counts.
    Wait,
}

/// What new sessions must do with while the engine is under load.
///
/// ```
/// use dsv4::{DegradedMode, EngineOptions};
/// // from three quarters of the cache on, new sessions have 8,192 tokens at most and read prompts in small steps
/// let degraded = Some(DegradedMode { load_percent: 75, context: 8192, chunk: 64 });
/// let options = EngineOptions { degraded, ..EngineOptions::default() };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DegradedMode {
    /// Percent of the cache held by sessions from which on new ones are smaller, 1 to 100.
    pub load_percent: u32,
    /// Most tokens of their context, at least 1.
    pub context: usize,
    /// Most tokens that they have in a step, at least 1.
    pub chunk: usize,
}

/// How an engine runs its model.
///
/// ```
/// use dsv4::{DeviceChoice, EngineOptions, Numerics, WhenFull};
/// let options = EngineOptions {
///     device: "cpu".parse()?, // or DeviceChoice::Cuda(0)
///     numerics: Numerics::Kvquant,
///     cache_bytes: 1 << 30,
///     when_full: WhenFull::Wait,
///     ..EngineOptions::default()
/// };
/// assert_eq!(options.device, DeviceChoice::Cpu);
/// assert_eq!(options.cache_limit(), 1 << 30);
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Roundings and quantisations.
    pub numerics: Numerics,
    /// Storage of the cache; `None` takes the numerics' own (fp8, or f32 for `exact`).
    pub kv_format: Option<KvFormat>,
    /// Where to run.
    pub device: DeviceChoice,
    /// Worker threads; 0 means one per available core.
    pub threads: usize,
    /// Most tokens that go through the model at once, 1 to 65,536; 0 takes the device's own: 256 on the CPU, 2,048 on a
    /// GPU. More is faster and takes more memory.
    pub prefill_chunk: usize,
    /// Makes logits on a GPU independent of how tokens are cut into calls and chunks, to the last bit, as they always are
    /// on the CPU: attention and products then sum in the order of decoding throughout, at most 64 tokens at a time. Prefill
    /// is slower. Without it, up to 8 tokens of a sequence in a step are summed in that order, more in another; what other
    /// sequences are in the step does not matter.
    pub batch_invariant: bool,
    /// Most bytes of cache pages, sessions and reusable prefixes together; 0 takes a quarter of the machine's memory, or
    /// half of what weights and step leave of a GPU's. A GPU's pages are allocated when the engine is made.
    pub cache_bytes: u64,
    /// Most bytes of a GPU's memory, weights, steps and cache together; 0 takes what is free.
    pub gpu_bytes: u64,
    /// Routed experts of each layer whose weights are on the GPU; the CPU computes the others.
    /// `None` takes as many as fit.
    pub gpu_experts: Option<usize>,
    /// Most bytes of host memory for the weights of routed experts, those on a GPU aside. Where they do not all fit, the
    /// experts that a step needs are read from the files into this memory, and what is used most stays; at least the
    /// experts of one token must fit. 0, the default, uses all where they are mapped and leaves it to the system what stays
    /// in memory. Results are the same.
    pub host_bytes: u64,
    /// Most bytes of checkpoints kept for prefix reuse, within `cache_bytes`; 0 takes a quarter of those.
    pub checkpoint_bytes: u64,
    /// Where checkpoints are kept.
    pub checkpoints: CheckpointPolicy,
    /// Prefixes are shared only between engines' sessions of equal salt; any text.
    pub prefix_salt: String,
    /// Where reusable prefixes go that have to make room.
    pub tiers: TierOptions,
    /// Fill freed cache pages with NaN bytes, so that a stale read shows. For tests; slower.
    pub poison_cache: bool,
    /// What a call does for which the cache has no room; [`CallOptions`](crate::CallOptions) may say otherwise.
    pub when_full: WhenFull,
    /// Smaller new sessions under load; `None`, the default, makes all as they were asked for.
    pub degraded: Option<DegradedMode>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            numerics: Numerics::Reference,
            kv_format: None,
            device: DeviceChoice::Cpu,
            threads: 0,
            prefill_chunk: 0,
            batch_invariant: false,
            cache_bytes: 0,
            gpu_bytes: 0,
            gpu_experts: None,
            host_bytes: 0,
            checkpoint_bytes: 0,
            checkpoints: CheckpointPolicy::Boundary,
            prefix_salt: String::new(),
            tiers: TierOptions::default(),
            poison_cache: false,
            when_full: WhenFull::default(),
            degraded: None,
        }
    }
}

impl EngineOptions {
    /// Most worker threads.
    pub const MAX_THREADS: usize = 1024;
    /// Tokens of a prefill chunk on the CPU where the options leave it open.
    pub(super) const CPU_PREFILL_CHUNK: usize = 256;
    /// Most tokens of a prefill chunk.
    pub const MAX_PREFILL_CHUNK: usize = 65_536;

    /// Most blocks that are read ahead.
    pub const MAX_PREFETCH_DEPTH: usize = 1024;

    /// Storage of the cache: the one that was asked for, else the numerics' own.
    pub fn kv_format(&self) -> KvFormat {
        self.kv_format.unwrap_or(match self.numerics {
            Numerics::Exact => KvFormat::F32,
            _ => KvFormat::Fp8,
        })
    }

    /// Most bytes of cache pages: those asked for, else a quarter of the machine's memory.
    pub fn cache_limit(&self) -> u64 {
        if self.cache_bytes == 0 { machine_memory() / 4 } else { self.cache_bytes }
    }

    pub(super) fn validate(&self) -> Result<()> {
        if self.threads > Self::MAX_THREADS {
            bail!(InvalidArgument, "threads is {}; at most {}", self.threads, Self::MAX_THREADS);
        }
        if self.prefill_chunk > Self::MAX_PREFILL_CHUNK {
            bail!(InvalidArgument, "prefill_chunk is {}; at most {}", self.prefill_chunk, Self::MAX_PREFILL_CHUNK);
        }
        if let CheckpointPolicy::Every(n) = self.checkpoints
            && (n == 0 || !n.is_multiple_of(BLOCK_TOKENS))
        {
            bail!(InvalidArgument, "checkpoints every {n} tokens; a multiple of {BLOCK_TOKENS} is needed");
        }
        if !(1..=Self::MAX_PREFETCH_DEPTH).contains(&self.tiers.prefetch_depth) {
            let depth = self.tiers.prefetch_depth;
            bail!(InvalidArgument, "prefetch_depth is {depth}; 1 to {}", Self::MAX_PREFETCH_DEPTH);
        }
        if let Some(DegradedMode { load_percent, context, chunk }) = self.degraded
            && (!(1..=100).contains(&load_percent) || context == 0 || chunk == 0)
        {
            bail!(
                InvalidArgument,
                "degraded mode from {load_percent} % load on with context {context} and {chunk} tokens a step; a load of 1 to \
                 100 % and at least 1 of both are needed"
            );
        }
        if let DeviceChoice::Cuda(n) = self.device {
            let devices = crate::backend::cuda_devices()?;
            if devices.len() <= n as usize {
                bail!(Unavailable, "device cuda:{n} does not exist; this machine has {} CUDA devices", devices.len());
            }
        }
        Ok(())
    }

    /// Limits and policies of a cache of at most `limit` bytes.
    pub(super) fn cache_options(&self, limit: u64) -> CacheOptions {
        let checkpoint_limit = if self.checkpoint_bytes == 0 { limit / 4 } else { self.checkpoint_bytes.min(limit) };
        CacheOptions { limit, checkpoint_limit, policy: self.checkpoints, poison: self.poison_cache }
    }
}

/// Physical memory in bytes; 16 GiB where the system does not tell.
fn machine_memory() -> u64 {
    memory_figure("MemTotal:").unwrap_or(16 << 30)
}

/// Bytes of memory that are free or hold what can be read again; `None` where the system does not tell.
pub(super) fn available_memory() -> Option<u64> {
    memory_figure("MemAvailable:")
}

fn memory_figure(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
    Some(kib << 10)
}
