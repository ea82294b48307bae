//! Single layers on given inputs, with every intermediate recorded: for tests against golden vectors and for research.
//! Not part of the stable interface.

use std::sync::Arc;

use crate::cache::{CacheLayout, CacheManager, CacheOptions, KvFormat, SequenceCache};
use crate::error::{Result, bail};
use crate::model::config::LayerKind;
use crate::model::deepseek_v4::{LogitRows, Segment};

use super::Engine;

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
        let layout = CacheLayout::new(engine.model().config(), format);
        let manager = CacheManager::new(layout, CacheOptions::PRIVATE, b"");
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
        let trunk = self.engine.trunk(self.rounding);
        let cache = &mut self.layers[layer];
        let staged = cache.stage(ids.len())?;
        let mut segments = [Segment { cache, staged, tokens: ids }];
        let step = trunk.context(&segments)?;
        let out = trunk.layer(layer, streams, &step, &mut segments, probe)?;
        let [Segment { staged, .. }] = segments;
        self.layers[layer].commit_partial(&staged, layer);
        Ok(out)
    }

    /// Runs the feed-forward half of layer `layer` on `streams` `[n, hc_mult, hidden_size]`.
    pub fn run_ffn_half(&self, layer: usize, streams: &[f32], ids: &[u32], probe: &mut Probe) -> Result<Vec<f32>> {
        self.check(layer, streams, ids)?;
        self.engine.trunk(self.rounding).ffn_half(layer, streams, ids, probe)
    }

    /// Embedding of `ids`, repeated for each stream: the input of layer 0.
    pub fn embed(&self, ids: &[u32]) -> Result<Vec<f32>> {
        self.engine.trunk(self.rounding).embed(ids)
    }

    /// Final streams to logits of every row.
    pub fn head(&self, streams: &[f32], ids: &[u32], probe: &mut Probe) -> Result<Vec<f32>> {
        let trunk = self.engine.trunk(self.rounding);
        let cache = SequenceCache::new(&self.manager, 0)?;
        let mut empty = SequenceCache::new(&self.manager, 0)?;
        let segments = [Segment { cache: &cache, staged: empty.stage(ids.len())?, tokens: ids }];
        let step = trunk.context(&segments)?;
        trunk.head(streams, &step, LogitRows::All, probe)
    }

    /// Decoded compressed entries `[count, head_dim]` of `layer`; none in a layer that keeps none.
    pub fn entries(&mut self, layer: usize) -> Result<Vec<f32>> {
        self.decoded(layer, false)
    }

    /// Decoded index keys `[count, index_head_dim]` of `layer`; none in a layer without an indexer.
    pub fn index_keys(&mut self, layer: usize) -> Result<Vec<f32>> {
        self.decoded(layer, true)
    }

    fn decoded(&mut self, layer: usize, keys: bool) -> Result<Vec<f32>> {
        let Some(cache) = self.layers.get(layer) else {
            bail!(InvalidArgument, "layer is {layer}; the model has {}", self.layers.len());
        };
        let kind = cache.layout().layers[layer].kind;
        if kind == LayerKind::Window || keys && kind != LayerKind::C4a {
            return Ok(Vec::new());
        }
        let staged = self.layers[layer].stage(0)?;
        let cache = &self.layers[layer];
        let layout = cache.layout();
        let view = cache.view(layer, &staged);
        let (ratio, dim) = (layout.layers[layer].kind.ratio(), if keys { layout.index_dim } else { layout.head_dim });
        let count = cache.len().checked_div(ratio).unwrap_or(0);
        let mut out = vec![0.0; count * dim];
        for (j, out) in out.chunks_exact_mut(dim).enumerate() {
            if keys { layout.decode_key(view.key(j), out) } else { layout.decode_row(view.entry(j), out) }
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
    let trunk = engine.trunk(Rounding::from(engine.options().numerics));
    let mut cache = engine.new_cache(0)?;
    let mut trace = Trace { streams: vec![Vec::new(); c.num_hidden_layers], logits: Vec::new() };
    for tokens in ids.chunks(chunk) {
        let staged = cache.stage(tokens.len())?;
        let mut segments = [Segment { cache: &cache, staged, tokens }];
        let step = trunk.context(&segments)?;
        let mut x = trunk.embed(tokens)?;
        for (layer, kept) in trace.streams.iter_mut().enumerate() {
            x = trunk.layer(layer, &x, &step, &mut segments, &mut Probe::off())?;
            kept.extend_from_slice(&x);
        }
        trace.logits.extend(trunk.head(&x, &step, LogitRows::All, &mut Probe::off())?);
        let [Segment { staged, .. }] = segments;
        cache.commit(staged);
    }
    Ok(trace)
}
