//! The engine under test, reduced to what the comparisons need.
#![forbid(unsafe_code)]

use dsv4::research::{self, Lab, Probe, Rounding};
use dsv4::{DeviceChoice, Engine, EngineOptions, KvFormat, Model, Numerics, Session, SessionOptions};
use std::path::Path;
use std::sync::Arc;

/// An engine on `folder` with everything else at its default.
pub fn engine(folder: &Path, numerics: Numerics) -> Arc<Engine> {
    let options = EngineOptions { numerics, threads: 2, ..EngineOptions::default() };
    match device() {
        None => engine_with(folder, options),
        // as users have it, with steps that take a whole golden sequence
        Some(device) => {
            open(folder, EngineOptions { device, cache_bytes: DEVICE_CACHE, prefill_chunk: 1024, ..options })
        }
    }
}

fn open(folder: &Path, options: EngineOptions) -> Arc<Engine> {
    let model = Model::open(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    Engine::new(&model, options).unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
}

/// Cache of engines on a device where a test does not say: many of them are open at the same time.
const DEVICE_CACHE: u64 = 128 << 20;

/// The device that `DSV4_TEST_DEVICE` names, if it is not the CPU.
pub fn device() -> Option<DeviceChoice> {
    let name = std::env::var("DSV4_TEST_DEVICE").ok()?;
    let device = name.parse().expect("DSV4_TEST_DEVICE is cpu, cuda or cuda:N");
    (device != DeviceChoice::Cpu).then_some(device)
}

/// Those of `all` that the test device has: `exact` is the CPU's.
pub fn numerics(all: &[Numerics]) -> impl Iterator<Item = Numerics> {
    all.iter().copied().filter(|&numerics| device().is_none() || numerics != Numerics::Exact)
}

/// The options on the test device, with one order of all sums, so that results can be compared bit for bit as on the CPU.
pub fn on_device(mut options: EngineOptions) -> EngineOptions {
    if let Some(device) = device() {
        options.device = device;
        options.batch_invariant = true;
        if options.cache_bytes == 0 {
            options.cache_bytes = DEVICE_CACHE;
        }
    }
    options
}

pub fn engine_with(folder: &Path, options: EngineOptions) -> Arc<Engine> {
    open(folder, on_device(options))
}

/// The trained model with another `max_position_embeddings`.
pub fn with_context(positions: usize) -> tempfile::TempDir {
    let (folder, dir) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4"), tempfile::tempdir());
    let dir = dir.expect("a temporary folder");
    for entry in std::fs::read_dir(&folder).expect("the model").map(|entry| entry.expect("a file").path()) {
        if entry.is_file() {
            std::fs::copy(&entry, dir.path().join(entry.file_name().expect("a name"))).expect("it is copied");
        }
    }
    let (file, from) = (dir.path().join("config.json"), "\"max_position_embeddings\": 65536");
    let config = std::fs::read_to_string(&file).expect("a config");
    assert!(config.contains(from));
    let to = format!("\"max_position_embeddings\": {positions}");
    std::fs::write(&file, config.replace(from, &to)).expect("it is written");
    dir
}

/// A session with room for `context` tokens.
pub fn session(engine: &Arc<Engine>, context: usize) -> Session {
    Session::new(engine, SessionOptions { context, ..Default::default() }).expect("a session")
}

/// The session's logits.
pub fn logits(session: &Session) -> &[f32] {
    session.logits().expect("logits behind the last token")
}

/// Logits after every one of `tokens`, in a session of their own.
pub fn all_logits(engine: &Arc<Engine>, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = Vec::with_capacity(tokens.len());
    session(engine, tokens.len())
        .feed_all(tokens, &mut |position, logits| {
            assert_eq!(position, rows.len(), "positions come in order");
            rows.push(logits.to_vec());
            Ok(())
        })
        .expect("the tokens are fed");
    assert_eq!(rows.len(), tokens.len(), "one row of logits per token");
    rows
}

/// Logits after the last of `tokens`, in a session of their own.
pub fn last_logits(engine: &Arc<Engine>, tokens: &[u32]) -> Vec<f32> {
    let mut session = session(engine, tokens.len());
    session.feed(tokens).expect("the tokens are fed");
    logits(&session).to_vec()
}

/// A lab with the engine's own rounding points and cache, or with others.
fn lab(engine: &Arc<Engine>, rounding: Rounding) -> Lab {
    if rounding == Rounding::from(engine.options().numerics) {
        let lab = Lab::new(engine).expect("a lab");
        assert!(engine.options().numerics == Numerics::Exact || lab.kv_format() == KvFormat::Fp8, "the stored format");
        return lab;
    }
    Lab::with_rounding(engine, rounding).expect("a lab")
}

/// Runs layer `layer` alone on `streams` `[n, 4, D]` at positions from 0 and returns what it computed.
pub fn layer(engine: &Arc<Engine>, rounding: Rounding, layer: usize, streams: &[f32], ids: &[u32]) -> Recorded {
    let mut lab = lab(engine, rounding);
    let mut probe = Probe::on();
    lab.run_layer(layer, streams, ids, &mut probe).expect("the layer runs");
    let entries = lab.entries(layer).expect("the entries are read");
    let keys = lab.index_keys(layer).expect("the keys are read");
    Recorded { layer, probe, entries, keys, dims: dims(engine) }
}

/// Runs the FFN half of layer `layer` alone on `streams` `[n, 4, D]`.
pub fn ffn_half(engine: &Arc<Engine>, rounding: Rounding, layer: usize, streams: &[f32], ids: &[u32]) -> Recorded {
    let mut probe = Probe::on();
    let out = lab(engine, rounding).run_ffn_half(layer, streams, ids, &mut probe).expect("the half layer runs");
    probe.record(layer, "streams", &[ids.len(), out.len() / ids.len()], &out);
    Recorded { layer, probe, entries: Vec::new(), keys: Vec::new(), dims: dims(engine) }
}

/// Runs the trunk layer by layer on `tokens` and returns what every layer computed.
pub fn whole_run(engine: &Arc<Engine>, tokens: &[u32]) -> Vec<Recorded> {
    let rounding = Rounding::from(engine.options().numerics);
    let mut streams = lab(engine, rounding).embed(tokens).expect("the embedding");
    let layers = 0..engine.model().config().num_hidden_layers;
    let run = |at: usize| {
        let recorded = layer(engine, rounding, at, &streams, tokens);
        streams = recorded.rows("streams").concat();
        recorded
    };
    let layers: Vec<Recorded> = layers.map(run).collect();
    let trace = research::trace(engine, tokens, 50).expect("the trunk runs");
    assert!(trace.streams.last() == Some(&streams), "layers one by one end where the whole trunk does");
    layers
}

fn dims(engine: &Arc<Engine>) -> [usize; 2] {
    let config = engine.model().config();
    [config.head_dim, config.index_head_dim]
}

/// What one layer computed.
pub struct Recorded {
    layer: usize,
    probe: Probe,
    entries: Vec<f32>,
    keys: Vec<f32>,
    dims: [usize; 2],
}

impl Recorded {
    /// Whether the layer computed it.
    pub fn has(&self, name: &str) -> bool {
        self.probe.get(self.layer, name).is_some()
    }

    /// The rows of a named intermediate; `compressed` and `index_keys` are the contents of the cache.
    pub fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        match name {
            "compressed" => return self.entries.chunks(self.dims[0]).map(<[f32]>::to_vec).collect(),
            "index_keys" => return self.keys.chunks(self.dims[1]).map(<[f32]>::to_vec).collect(),
            _ => {}
        }
        let record = self.probe.get(self.layer, name).unwrap_or_else(|| panic!("layer {} has no {name}", self.layer));
        assert!(!record.values.is_empty(), "{name} is empty");
        record.values.chunks(record.values.len() / record.shape[0]).map(<[f32]>::to_vec).collect()
    }

    /// The rows of a named list of ids; -1 means none.
    pub fn ids(&self, name: &str) -> Vec<Vec<i64>> {
        self.rows(name).into_iter().map(|row| row.into_iter().map(|id| id as i64).collect()).collect()
    }
}
