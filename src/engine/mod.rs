//! An engine: one model on one device with its numerics, threads and cache format. Sessions run on it.
#![forbid(unsafe_code)]

mod options;
pub mod research;

use std::sync::Arc;

use crate::backend::cpu::Cpu;
use crate::cache::file::Identity;
use crate::cache::tier::Tiers;
use crate::cache::{CacheLayout, CacheManager, CacheStats, KvFormat, SequenceCache};
use crate::error::{Result, bail};
use crate::model::deepseek_v4::{LogitRows, Probe, Segment, Tables, Trunk};
use crate::model::{Model, Numerics, Rounding};

pub use options::{DeviceChoice, EngineOptions};

/// One model ready to run. Shared between sessions and threads.
///
/// ```no_run
/// use dsv4::{Engine, EngineOptions, Model};
/// let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct Engine {
    model: Arc<Model>,
    options: EngineOptions,
    kv_format: KvFormat,
    cpu: Cpu,
    tables: Tables,
    cache: Arc<CacheManager>,
}

impl Engine {
    /// Prepares `model` for running.
    ///
    /// # Errors
    /// `InvalidArgument` names the option that is out of range; `Unavailable` the device that is not there.
    pub fn new(model: &Arc<Model>, options: EngineOptions) -> Result<Arc<Self>> {
        options.validate()?;
        let kv_format = options.kv_format();
        if options.numerics == Numerics::Exact && kv_format == KvFormat::Fp8 {
            bail!(InvalidArgument, "numerics exact has no fp8 cache: use kvquant, or a bf16 or f32 cache");
        }
        let cpu = Cpu::new(options.threads)?;
        tracing::info!(
            numerics = %options.numerics, cache = %kv_format, threads = cpu.pool.threads(), simd = cpu.simd.level().name(),
            "engine ready on the CPU"
        );
        // the small vectors are widened now, so that a step meets no page of them for the first time
        model.weights().prepare()?;
        let tables = Tables::new(model.config());
        let context = format!("{:032x} {} {kv_format} {}", model.fingerprint(), options.numerics, options.prefix_salt);
        let layout = CacheLayout::new(model.config(), kv_format);
        let identity = identity(model, &options, &layout);
        let tiers = options.tiers.is_on().then(|| Tiers::new(options.tiers.clone(), identity)).transpose()?;
        let cache = CacheManager::with_tiers(layout, options.cache_options(), context.as_bytes(), tiers);
        Ok(Arc::new(Self { model: Arc::clone(model), options, kv_format, cpu, tables, cache }))
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

    /// Name of the CPU instruction set in use.
    pub fn simd(&self) -> &'static str {
        self.cpu.simd.level().name()
    }

    /// An empty cache for one sequence whose last `rollback` tokens can be taken back.
    pub(crate) fn new_cache(&self, rollback: usize) -> Result<SequenceCache> {
        SequenceCache::new(&self.cache, rollback)
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
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// What a file must have been written with to be of use here.
    pub(crate) fn identity(&self) -> Identity {
        identity(&self.model, &self.options, self.cache.layout())
    }

    /// Runs `tokens` behind what `cache` holds and commits them. On error, and when `between` ends the step with one,
    /// the cache is as before. Returns the logits of the rows asked for, `[rows, vocab]`.
    pub(crate) fn step(
        &self,
        cache: &mut SequenceCache,
        tokens: &[u32],
        rows: LogitRows,
        between: &mut (dyn FnMut(usize) -> Result<()> + Send),
    ) -> Result<Vec<f32>> {
        self.model.checkpoint().check_sizes()?;
        let staged = cache.stage(tokens.len())?;
        let mut segments = [Segment { cache, staged, tokens }];
        let trunk = self.trunk(Rounding::from(self.options.numerics));
        let logits = self.cpu.pool.enter(|| trunk.step(&mut segments, rows, between, &mut Probe::off()))?;
        let [Segment { staged, .. }] = segments;
        cache.commit(staged);
        self.cache.count_computed(tokens.len());
        Ok(logits)
    }

    fn trunk(&self, rounding: Rounding) -> Trunk<'_> {
        Trunk {
            config: self.model.config(),
            weights: self.model.weights(),
            rounding,
            cpu: &self.cpu,
            tables: &self.tables,
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
