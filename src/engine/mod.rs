//! An engine: one model on one device with its numerics, threads and cache format. Sessions run on it.
#![forbid(unsafe_code)]

mod agenda;
mod batch;
mod bell;
mod cancel;
mod experts;
#[cfg(feature = "cuda")]
mod gpu;
mod metrics;
mod options;
mod process;
pub mod research;
mod room;
mod step;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::backend::cpu::Cpu;
use crate::cache::file::Identity;
use crate::cache::tier::Tiers;
use crate::cache::{CacheLayout, CacheManager, CacheStats, KvFormat, PageMemory, SequenceCache};
use crate::error::{ErrorKind, Result, bail};
use crate::model::deepseek_v4::home::ExpertTier;
use crate::model::deepseek_v4::{Probe, Segment, Tables, Trunk};
use crate::model::{Model, Numerics, Rounding};

use agenda::Agenda;
use batch::Batcher;
use metrics::Meter;
use room::Room;
use step::{Job, Stepped};

pub(crate) use agenda::{Task, now};
pub(crate) use batch::LOOK;
pub use cancel::CancelToken;
pub(crate) use cancel::Stop;
pub use metrics::{EngineMetrics, Histogram, SessionMetrics};
pub use options::{DegradedMode, DeviceChoice, EngineOptions, WhenFull};
pub(crate) use process::Process;
pub(crate) use room::{Pin, Place, Plan, Slot};
pub(crate) use step::{Caller, Done, Last, Request, Stayed, Terms, Work};

/// One model ready to run. Shared between sessions and threads.
///
/// ```
/// use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// let model = Model::open("examples/models/tiny-v4")?;
/// let engine = Engine::new(&model, EngineOptions { threads: 2, ..EngineOptions::default() })?;
/// println!("on {} with {} threads", engine.device_name(), engine.threads());
///
/// // the sessions of two threads go through the model together
/// std::thread::scope(|scope| {
///     for start in [300, 400] {
///         let engine = &engine;
///         scope.spawn(move || {
///             let mut session = Session::new(engine, SessionOptions::default())?;
///             session.feed(&[0, start, start + 1])
///         });
///     }
/// });
/// assert_eq!(engine.metrics().prefill_tokens + engine.metrics().decode_tokens, 6);
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct Engine {
    model: Arc<Model>,
    options: EngineOptions,
    kv_format: KvFormat,
    cpu: Arc<Cpu>,
    tables: Tables,
    device: Device,
    cache: Arc<CacheManager>,
    batcher: Batcher<Job, Done>,
    agenda: Arc<Agenda>,
    /// Tokens that the device chose.
    choices: AtomicU64,
    room: Arc<Room>,
    meter: Meter,
    process: Process,
}

/// What runs the layers.
enum Device {
    /// The host's processors, with its experts if not all of them are used where they are mapped.
    Cpu(Option<Arc<ExpertTier>>),
    #[cfg(feature = "cuda")]
    Gpu(Box<gpu::GpuEngine>),
}

impl Engine {
    /// Prepares `model` for running. On a GPU this uploads the weights; see [`Self::with_progress`].
    ///
    /// # Errors
    /// `InvalidArgument` names the option that is out of range; `Unavailable` the device that is not there; `Unsupported`
    /// what the device cannot run; `OutOfMemory` has the bytes that do not fit.
    pub fn new(model: &Arc<Model>, options: EngineOptions) -> Result<Arc<Self>> {
        Self::with_progress(model, options, &mut |_, _| Ok(()))
    }

    /// As [`Self::new`], telling `progress` how many bytes of how many are on their way to a GPU; its error ends the call.
    /// On the CPU, where weights are used in place, it is not called.
    ///
    /// ```no_run
    /// use dsv4::{DeviceChoice, Engine, EngineOptions, Model};
    /// let model = Model::open("DeepSeek-V4-Flash")?;
    /// let options = EngineOptions { device: DeviceChoice::Cuda(0), ..EngineOptions::default() };
    /// let engine = Engine::with_progress(&model, options, &mut |done, total| {
    ///     eprint!("\r{done} of {total} bytes");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::new`], and those of `progress`.
    pub fn with_progress(
        model: &Arc<Model>,
        mut options: EngineOptions,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Arc<Self>> {
        options.validate()?;
        let kv_format = options.kv_format();
        if options.numerics == Numerics::Exact && kv_format == KvFormat::Fp8 {
            bail!(InvalidArgument, "numerics exact has no fp8 cache: use kvquant, or a bf16 or f32 cache");
        }
        // beside a GPU, the thread that leads a step waits for the device anyway
        let make = if options.device == DeviceChoice::Cpu { Cpu::new } else { Cpu::beside_caller };
        let cpu = Arc::new(make(options.threads)?);
        // the small vectors are widened now, so that a step meets no page of them for the first time
        model.weights().prepare()?;
        let tables = Tables::new(model.config());
        let context = format!("{:032x} {} {kv_format} {}", model.fingerprint(), options.numerics, options.prefix_salt);
        let layout = CacheLayout::new(model.config(), kv_format);
        let identity = identity(model, &options, &layout);
        let tiers = options.tiers.is_on().then(|| Tiers::new(options.tiers.clone(), identity)).transpose()?;
        let device = Device::open(&cpu, model, &options, &layout, progress)?;
        let memory = device.memory();
        let limit = memory.as_ref().map_or(options.cache_limit(), |memory| memory.len());
        options.prefill_chunk = device.rows(options.prefill_chunk);
        tracing::info!(
            device = device.name(), numerics = %options.numerics, cache = %kv_format, threads = cpu.pool.threads(),
            simd = cpu.simd.level().name(), "engine ready"
        );
        let cache = CacheManager::with_memory(layout, options.cache_options(limit), context.as_bytes(), tiers, memory);
        let batcher = Batcher::new(options.prefill_chunk, device.sequences());
        let (room, meter) = (Room::new(&cache, options.tiers.session_bytes), Meter::new());
        let (model, choices) = (Arc::clone(model), AtomicU64::new(0));
        let (agenda, process) = (Arc::default(), Process::current());
        Ok(Arc::new(Self {
            model,
            options,
            kv_format,
            cpu,
            tables,
            device,
            cache,
            batcher,
            agenda,
            choices,
            room,
            meter,
            process,
        }))
    }

    /// The model it runs.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The options it was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Storage of the cache.
    pub fn kv_format(&self) -> KvFormat {
        self.kv_format
    }

    /// Number of worker threads.
    pub fn threads(&self) -> usize {
        self.cpu.pool.threads()
    }

    /// Name of the device for people: `cpu`, or that of a GPU.
    pub fn device_name(&self) -> &str {
        self.device.name()
    }

    /// Name of the CPU instruction set in use.
    pub fn simd(&self) -> &'static str {
        self.cpu.simd.level().name()
    }

    /// An empty cache for one sequence whose last `rollback` tokens can be taken back.
    pub(crate) fn new_cache(&self, rollback: usize) -> Result<SequenceCache> {
        self.find_room(|| SequenceCache::new(&self.cache, rollback))
    }

    /// Calls `work` until it finds room, as long as somebody idle can be asked for theirs. Not for steps.
    pub(crate) fn find_room<T>(&self, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        self.check_process()?;
        loop {
            match self.with_room(&mut work) {
                Err(error) if error.kind() == ErrorKind::NoBlocks && self.room.make_way(None, false) => {}
                result => return result,
            }
        }
    }

    /// `Unavailable` in a fork of the process that the engine was made in: its threads are not there.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.process.check("the engine")
    }

    /// What a session that is made now must do with, if the engine is under load.
    pub(crate) fn degraded(&self) -> Option<DegradedMode> {
        self.options.degraded.filter(|mode| self.room.pressure().load() >= u64::from(mode.load_percent))
    }

    /// As [`Self::degraded`], after a look at the cache; counts the session.
    pub(crate) fn degrade(&self) -> Option<DegradedMode> {
        self.options.degraded?;
        self.room.pressure().look_now(&self.cache);
        let mode = self.degraded()?;
        self.meter.lock().degraded_sessions += 1;
        Some(mode)
    }

    /// How many times farther apart than wanted checkpoints are kept, for want of room.
    pub(crate) fn checkpoint_spacing(&self) -> usize {
        1 << self.room.pressure().level()
    }

    /// Calls `work`, a second time if it found no room and pages could be moved together to make some.
    fn with_room<T>(&self, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        match &self.device {
            Device::Cpu(_) => work(),
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => gpu.with_room(&self.cache, work),
        }
    }

    /// The pages and prefixes that the engine's sessions share.
    pub(crate) fn cache(&self) -> &Arc<CacheManager> {
        &self.cache
    }

    /// Moves every reusable prefix that no session uses to the tiers, and what is in host memory to the directory, within
    /// the write limits. Returns when all is written: for an orderly end, after which another process finds the prefixes.
    pub fn flush_cache(&self) {
        self.cache.flush();
    }

    /// Figures of the cache.
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// // two sessions with the same beginning: the second one computes only what follows it
    /// let prompt: Vec<u32> = (0..600).map(|i| 300 + i % 64).collect();
    /// for _ in 0..2 {
    ///     Session::new(&engine, SessionOptions::default())?.feed(&prompt)?;
    /// }
    /// let stats = engine.cache_stats();
    /// assert_eq!(stats.lookup_tokens, 1200);
    /// assert!(stats.hit_tokens >= 512);
    /// println!("{} of {} bytes are in use", stats.pool.used_bytes, stats.limit_bytes);
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// What a file must have been written with to be of use here.
    pub(crate) fn identity(&self) -> Identity {
        identity(&self.model, &self.options, self.cache.layout())
    }

    /// Takes the segments' tokens through the layers, on whichever device; they may be committed then. `lasts`, one for each
    /// segment or no list, say what becomes of the last tokens' logits; the host's stay in its memory anyway.
    fn forward(
        &self,
        segments: &mut [Segment<'_>],
        lasts: &[&Last],
        between: &mut (dyn FnMut(usize) -> Result<()> + Send),
    ) -> Result<Stepped> {
        match &self.device {
            Device::Cpu(_) => {
                // the logits are where the sampler is
                let _ = lasts;
                let trunk = self.trunk(Rounding::from(self.options.numerics));
                let logits = self.cpu.pool.enter(|| trunk.step(segments, between, &mut Probe::off()))?;
                Ok(Stepped { logits, stayed: Vec::new() })
            }
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => gpu.step(segments, lasts, between),
        }
    }

    /// Whether the device can choose tokens. On the CPU the logits are where the sampler is.
    pub(crate) fn chooses(&self) -> bool {
        !self.device.is_cpu()
    }

    /// Logits `[vocab]` of a hidden state that the device left of a token it chose: the same bits as then.
    pub(crate) fn logits_of(&self, hidden: &[u16]) -> Result<Vec<f32>> {
        match &self.device {
            Device::Cpu(_) => bail!(InvalidArgument, "{} values of a hidden state on the CPU", hidden.len()),
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => gpu.logits_of(hidden),
        }
    }

    #[cfg(feature = "cuda")]
    fn gpu(&self) -> Option<&gpu::GpuEngine> {
        match &self.device {
            Device::Cpu(_) => None,
            Device::Gpu(gpu) => Some(gpu),
        }
    }

    fn trunk(&self, rounding: Rounding) -> Trunk<'_> {
        Trunk {
            config: self.model.config(),
            weights: self.model.weights(),
            rounding,
            cpu: &self.cpu,
            tables: &self.tables,
            tier: self.device.tier().map(Arc::as_ref),
        }
    }
}

impl Device {
    #[cfg(feature = "cuda")]
    fn open(
        cpu: &Arc<Cpu>,
        model: &Arc<Model>,
        options: &EngineOptions,
        layout: &CacheLayout,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Self> {
        match options.device {
            DeviceChoice::Cpu => Ok(Self::Cpu(experts::tier(model, options, 0)?)),
            DeviceChoice::Cuda(n) => {
                Ok(Self::Gpu(Box::new(gpu::GpuEngine::open(n, cpu, model, options, layout, progress)?)))
            }
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn open(
        _: &Arc<Cpu>,
        model: &Arc<Model>,
        options: &EngineOptions,
        _: &CacheLayout,
        _: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Self> {
        // validation has refused every other device
        Ok(Self::Cpu(experts::tier(model, options, 0)?))
    }

    /// Whether the host's processors run the layers.
    fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu(_))
    }

    /// The experts in host memory, if not all of them are used where they are mapped.
    fn tier(&self) -> Option<&Arc<ExpertTier>> {
        match self {
            Self::Cpu(tier) => tier.as_ref(),
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.tier(),
        }
    }

    /// Memory for pages; the host's if there is none.
    fn memory(&self) -> Option<Arc<dyn PageMemory>> {
        match self {
            Self::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => Some(gpu.memory()),
        }
    }

    /// Most tokens of a step where `wanted` were asked for, 0 for the device's own.
    fn rows(&self, wanted: usize) -> usize {
        match self {
            Self::Cpu(_) if wanted == 0 => EngineOptions::CPU_PREFILL_CHUNK,
            Self::Cpu(_) => wanted,
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.rows(),
        }
    }

    /// Most sequences of a step.
    fn sequences(&self) -> usize {
        match self {
            Self::Cpu(_) => usize::MAX,
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.sequences(),
        }
    }

    /// Name for people.
    fn name(&self) -> &str {
        match self {
            Self::Cpu(_) => "cpu",
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.name(),
        }
    }
}

fn identity(model: &Model, options: &EngineOptions, layout: &CacheLayout) -> Identity {
    Identity {
        fingerprint: model.fingerprint(),
        numerics: options.numerics.name().to_owned(),
        vocab: model.config().vocab_size,
        layout: layout.clone(),
    }
}
