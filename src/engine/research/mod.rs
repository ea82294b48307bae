//! Single layers on given inputs, with every intermediate recorded: for tests against golden vectors and for research.
//! Not part of the stable interface.

mod halves;
mod host;
mod timing;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::cache::{BLOCK_TOKENS, Block, CacheLayout, CacheManager, CacheOptions, KvFormat, SequenceCache};
use crate::error::{Result, bail};
use crate::model::Model;
use crate::model::config::LayerKind;
use crate::model::deepseek_v4::{LogitRows, Segment};

use super::{Engine, EngineOptions};

pub use self::halves::{HalfLayer, Halves, Spread, compare_halves};
pub use self::host::{HostFigures, device_bandwidth};
pub use self::timing::Timing;
pub use crate::model::Rounding;
pub use crate::model::deepseek_v4::{Probe, Record};

/// One sequence whose layers are run one at a time on inputs of the caller's choice. Each layer keeps its own position.
pub struct Lab {
    engine: Arc<Engine>,
    rounding: Rounding,
    format: KvFormat,
    layers: Vec<SequenceCache>,
    manager: Arc<CacheManager>,
}

impl Lab {
    /// A lab with the engine's numerics and cache format.
    pub fn new(engine: &Arc<Engine>) -> Result<Self> {
        Self::with(engine, Rounding::from(engine.options().numerics), engine.kv_format())
    }

    /// A lab with rounding points of the caller's choice, over an f32 cache, which adds none of its own.
    pub fn with_rounding(engine: &Arc<Engine>, rounding: Rounding) -> Result<Self> {
        Self::with(engine, rounding, KvFormat::F32)
    }

    fn with(engine: &Arc<Engine>, rounding: Rounding, format: KvFormat) -> Result<Self> {
        let manager = if engine.device.is_cpu() {
            CacheManager::new(CacheLayout::new(engine.model().config(), format), CacheOptions::PRIVATE, b"")
        } else {
            if rounding != Rounding::from(engine.options().numerics) {
                bail!(Unsupported, "the GPU kernels have the rounding points of the engine's numerics only");
            }
            Arc::clone(&engine.cache)
        };
        let format = manager.layout().format;
        let layers = (0..engine.model().config().num_hidden_layers).map(|_| SequenceCache::new(&manager, 0));
        Ok(Self { engine: Arc::clone(engine), rounding, format, layers: layers.collect::<Result<_>>()?, manager })
    }

    /// Storage of the lab's cache.
    pub fn kv_format(&self) -> KvFormat {
        self.format
    }

    /// Runs trunk layer `layer` on `streams` `[n, hc_mult, hidden_size]` of the tokens `ids`, at the positions that
    /// follow those the layer has seen, and returns the layer's output.
    pub fn run_layer(&mut self, layer: usize, streams: &[f32], ids: &[u32], probe: &mut Probe) -> Result<Vec<f32>> {
        self.check(layer, streams, ids)?;
        let cache = &mut self.layers[layer];
        let staged = cache.stage(ids.len())?;
        let mut segments = [Segment { cache, staged, tokens: ids, logits: LogitRows::All }];
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.engine.gpu() {
            let out = gpu.layer(layer, streams, &mut segments, probe)?;
            let [Segment { staged, .. }] = segments;
            self.layers[layer].commit(staged);
            return Ok(out);
        }
        let trunk = self.engine.trunk(self.rounding);
        let step = trunk.context(&segments)?;
        let out = trunk.layer(layer, streams, &step, &mut segments, probe)?;
        let [Segment { staged, .. }] = segments;
        self.layers[layer].commit_partial(&staged, layer);
        Ok(out)
    }

    /// Runs the feed-forward half of layer `layer` on `streams` `[n, hc_mult, hidden_size]`.
    pub fn run_ffn_half(&self, layer: usize, streams: &[f32], ids: &[u32], probe: &mut Probe) -> Result<Vec<f32>> {
        self.check(layer, streams, ids)?;
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.engine.gpu() {
            return self.on_nothing(ids, |segments| gpu.ffn_half(layer, streams, segments, probe));
        }
        self.engine.trunk(self.rounding).ffn_half(layer, streams, ids, probe)
    }

    /// Embedding of `ids`, repeated for each stream: the input of layer 0.
    pub fn embed(&self, ids: &[u32]) -> Result<Vec<f32>> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.engine.gpu() {
            return self.on_nothing(ids, |segments| gpu.embed(segments));
        }
        self.engine.trunk(self.rounding).embed(ids)
    }

    /// Final streams to logits of every row.
    pub fn head(&self, streams: &[f32], ids: &[u32], probe: &mut Probe) -> Result<Vec<f32>> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.engine.gpu() {
            return self.on_nothing(ids, |segments| gpu.head(streams, segments, probe));
        }
        let trunk = self.engine.trunk(self.rounding);
        self.on_nothing(ids, |segments| {
            let step = trunk.context(segments)?;
            trunk.head(streams, &step, probe)
        })
    }

    /// Calls `work` with a step of `ids` on an empty sequence.
    fn on_nothing<T>(&self, ids: &[u32], work: impl FnOnce(&mut [Segment<'_>]) -> Result<T>) -> Result<T> {
        let mut cache = SequenceCache::new(&self.manager, 0)?;
        let staged = cache.stage(ids.len())?;
        work(&mut [Segment { cache: &cache, staged, tokens: ids, logits: LogitRows::All }])
    }

    /// Decoded compressed entries `[count, head_dim]` of `layer`; none in a layer that keeps none.
    pub fn entries(&self, layer: usize) -> Result<Vec<f32>> {
        self.decoded(layer, false)
    }

    /// Decoded index keys `[count, index_head_dim]` of `layer`; none in a layer without an indexer.
    pub fn index_keys(&self, layer: usize) -> Result<Vec<f32>> {
        self.decoded(layer, true)
    }

    fn decoded(&self, layer: usize, keys: bool) -> Result<Vec<f32>> {
        let Some(cache) = self.layers.get(layer) else {
            bail!(InvalidArgument, "layer is {layer}; the model has {}", self.layers.len());
        };
        let kind = cache.layout().layers[layer].kind;
        if kind == LayerKind::Window || keys && kind != LayerKind::C4a {
            return Ok(Vec::new());
        }
        let layout = cache.layout();
        let (ratio, dim) = (kind.ratio(), if keys { layout.index_dim } else { layout.head_dim });
        let bytes = if keys { layout.key_bytes() } else { layout.row_bytes() };
        let mut out = vec![0.0; cache.len() / ratio * dim];
        let mut rows = out.chunks_exact_mut(dim);
        let tail = cache.tail().map(|tail| (tail, cache.len() % BLOCK_TOKENS));
        let full = cache.full_blocks().iter().map(|block| (&**block, BLOCK_TOKENS));
        for (block, tokens) in full.chain(tail) {
            for stored in layer_bytes(block, layout, layer, tokens, keys)?.chunks_exact(bytes) {
                let Some(out) = rows.next() else { break };
                if keys { layout.decode_key(stored, out) } else { layout.decode_row(stored, out) }
            }
        }
        Ok(out)
    }

    fn check(&self, layer: usize, streams: &[f32], ids: &[u32]) -> Result<()> {
        let c = self.engine.model().config();
        if layer >= c.num_hidden_layers {
            bail!(InvalidArgument, "layer is {layer}; the model has {}", c.num_hidden_layers);
        }
        if ids.is_empty() || streams.len() != ids.len() * c.hc_mult * c.hidden_size {
            bail!(
                InvalidArgument,
                "{} values for {} tokens of {}x{}",
                streams.len(),
                ids.len(),
                c.hc_mult,
                c.hidden_size
            );
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= c.vocab_size) {
            bail!(InvalidArgument, "token id {id}; the vocabulary has {}", c.vocab_size);
        }
        Ok(())
    }
}

/// Stored entries or index keys of one layer of a block.
fn layer_bytes(block: &Block, layout: &CacheLayout, layer: usize, tokens: usize, keys: bool) -> Result<Vec<u8>> {
    // an export hands over what each layer has: entries, then keys
    let mut parts = Vec::new();
    for (i, l) in layout.layers.iter().enumerate() {
        if l.kind != LayerKind::Window {
            parts.push((i, false));
        }
        if l.kind == LayerKind::C4a {
            parts.push((i, true));
        }
    }
    let (mut parts, mut found) = (parts.into_iter(), Vec::new());
    block.export(layout, tokens, &mut |bytes| {
        if parts.next() == Some((layer, keys)) {
            found = bytes.to_vec();
        }
        Ok(())
    })?;
    Ok(found)
}

/// Streams after each layer and the logits of all positions.
pub struct Trace {
    /// `[layers][n, hc_mult, hidden_size]`.
    pub streams: Vec<Vec<f32>>,
    /// `[n, vocab]`.
    pub logits: Vec<f32>,
}

/// Runs `ids` from an empty sequence in chunks of `chunk` tokens, keeping the streams after each layer.
pub fn trace(engine: &Arc<Engine>, ids: &[u32], chunk: usize) -> Result<Trace> {
    let c = engine.model().config();
    if chunk == 0 {
        bail!(InvalidArgument, "chunk is 0");
    }
    if let Some(i) = ids.iter().position(|&id| id as usize >= c.vocab_size) {
        bail!(InvalidArgument, "token {i} has id {}; the vocabulary has {} ids", ids[i], c.vocab_size);
    }
    let mut cache = engine.new_cache(0)?;
    let mut trace = Trace { streams: vec![Vec::new(); c.num_hidden_layers], logits: Vec::new() };
    for tokens in ids.chunks(chunk) {
        let staged = cache.stage(tokens.len())?;
        let mut segments = [Segment { cache: &cache, staged, tokens, logits: LogitRows::All }];
        trace_chunk(engine, &mut segments, &mut trace)?;
        let [Segment { staged, .. }] = segments;
        cache.commit(staged);
    }
    Ok(trace)
}

fn trace_chunk(engine: &Engine, segments: &mut [Segment<'_>], trace: &mut Trace) -> Result<()> {
    let Trace { streams, logits } = trace;
    #[cfg(feature = "cuda")]
    if let Some(gpu) = engine.gpu() {
        logits.extend(gpu.trace(segments, &mut |layer, x| streams[layer].extend_from_slice(x))?);
        return Ok(());
    }
    let trunk = engine.trunk(Rounding::from(engine.options().numerics));
    let step = trunk.context(segments)?;
    let mut x = trunk.embed(segments[0].tokens)?;
    for (layer, kept) in streams.iter_mut().enumerate() {
        x = trunk.layer(layer, &x, &step, segments, &mut Probe::off())?;
        kept.extend_from_slice(&x);
    }
    logits.extend(trunk.head(&x, &step, &mut Probe::off())?);
    Ok(())
}

/// A CPU engine whose products have the noise of other orders of summation: the yardstick of what is no difference.
pub fn engine_with_noise(model: &Arc<Model>, options: EngineOptions) -> Result<Arc<Engine>> {
    let Some(mut engine) = Arc::into_inner(Engine::new(model, options)?) else {
        bail!(InvalidArgument, "a new engine is used already")
    };
    let Some(cpu) = Arc::get_mut(&mut engine.cpu) else {
        bail!(InvalidArgument, "a new engine's threads are used already")
    };
    cpu.add_noise();
    Ok(Arc::new(engine))
}

/// Tokens that the engine's device chose so far, instead of handing their logits to the host.
pub fn choices(engine: &Engine) -> u64 {
    engine.choices.load(Ordering::Relaxed)
}

/// Takes the prompts through the model as one step, each a sequence of its own, and then one token more of each, the
/// likeliest: the logits `[prompts, vocab]` behind that.
pub fn batch(engine: &Arc<Engine>, prompts: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
    let vocab = engine.model().config().vocab_size;
    let mut caches = (0..prompts.len()).map(|_| engine.new_cache(0)).collect::<Result<Vec<_>>>()?;
    let mut step = |tokens: &[&[u32]]| {
        let mut segments = Vec::new();
        for (cache, tokens) in caches.iter_mut().zip(tokens) {
            let staged = cache.stage(tokens.len())?;
            segments.push(Segment { cache, staged, tokens, logits: LogitRows::Last });
        }
        let logits = engine.forward(&mut segments, &[], &mut |_| Ok(()))?.logits;
        let staged: Vec<_> = segments.into_iter().map(|s| s.staged).collect();
        caches.iter_mut().zip(staged).for_each(|(cache, staged)| cache.commit(staged));
        Ok::<_, crate::error::Error>(logits)
    };
    let first = step(prompts)?;
    let best = |row: &[f32]| [(0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0) as u32];
    let tokens: Vec<[u32; 1]> = first.chunks_exact(vocab).map(best).collect();
    let tokens: Vec<&[u32]> = tokens.iter().map(|t| &t[..]).collect();
    Ok(step(&tokens)?.chunks_exact(vocab).map(<[f32]>::to_vec).collect())
}

/// Computes each of `texts` but its last token, alone; then the last tokens of all in one step, half of them in front of
/// `prompt`, which is a sequence of its own, and half behind it. The logits behind each text, and behind the prompt if it
/// is not empty.
pub fn beside(engine: &Arc<Engine>, texts: &[&[u32]], prompt: &[u32]) -> Result<Vec<Vec<f32>>> {
    let mut caches = Vec::new();
    for text in texts {
        let (mut cache, tokens) = (engine.new_cache(0)?, text.split_last().map_or(&[][..], |(_, before)| before));
        if !tokens.is_empty() {
            let staged = cache.stage(tokens.len())?;
            let mut segments = [Segment { cache: &cache, staged, tokens, logits: LogitRows::None }];
            engine.forward(&mut segments, &[], &mut |_| Ok(()))?;
            let [Segment { staged, .. }] = segments;
            cache.commit(staged);
        }
        caches.push((cache, text.split_last().map_or(&[][..], |_| &text[text.len() - 1..])));
    }
    let middle = texts.len() / 2;
    if !prompt.is_empty() {
        caches.insert(middle, (engine.new_cache(0)?, prompt));
    }
    let mut segments = Vec::new();
    for (cache, tokens) in &mut caches {
        let staged = cache.stage(tokens.len())?;
        segments.push(Segment { cache, staged, tokens, logits: LogitRows::Last });
    }
    let logits = engine.forward(&mut segments, &[], &mut |_| Ok(()))?.logits;
    let mut rows: Vec<Vec<f32>> =
        logits.chunks_exact(engine.model().config().vocab_size).map(<[f32]>::to_vec).collect();
    if !prompt.is_empty() {
        let row = rows.remove(middle);
        rows.push(row);
    }
    Ok(rows)
}
