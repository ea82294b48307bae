//! Options that several subcommands share.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use dsv4::cache::BLOCK_TOKENS;
use dsv4::cache::tier::{Prefetch, TierOptions};
use dsv4::{
    CallOptions, CheckpointPolicy, DegradedMode, DeviceChoice, Engine, EngineOptions, Error, ErrorKind, KvFormat,
    Model, Numerics, SamplerOptions, SaveOptions, Session, SessionOptions, WhenFull, file,
};
use serde_json::Value;

use crate::failure::{Failure, Result};
use crate::number::{between, whole};
use crate::outfile::OutFile;
use crate::output::note;
use crate::progress;

/// Bounds of `--chunk`, the engine's own.
const CHUNKS: [u64; 2] = [0, EngineOptions::MAX_PREFILL_CHUNK as u64];
const THREADS: [u64; 2] = [0, EngineOptions::MAX_THREADS as u64];

/// How the model runs.
#[derive(Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Roundings: reference (as the official code), served (as production servers), kvquant (quantised caches only), exact
    /// (float32)
    #[arg(long, value_name = "MODE", default_value_t = Numerics::Reference)]
    pub(crate) numerics: Numerics,

    /// Cache storage: fp8, bf16 or f32 [default: fp8; f32 for exact]
    #[arg(long, value_name = "FORMAT")]
    kv: Option<KvFormat>,

    /// Where to run: cpu, cuda or cuda:N (`dsv4 info` lists the devices)
    #[arg(long, default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,

    /// Worker threads; 0 is one per core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = between(THREADS))]
    threads: u64,

    /// Most prompt tokens taken through the model at once; more is faster and takes more memory; 0 is the device's own (256
    /// on the CPU, 2048 on a GPU)
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = between(CHUNKS))]
    pub(crate) chunk: u64,

    /// Logits on a GPU do not depend on how tokens are cut into chunks, to the last bit; slower prefill
    #[arg(long)]
    batch_invariant: bool,

    /// Most of a GPU's memory to use, weights and cache together, such as 24G; 0 is all that is free
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    gpu_bytes: u64,

    /// Routed experts of each layer that the GPU holds; the CPU computes the others [default: as many as fit]
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    gpu_experts: Option<usize>,

    /// Most host memory for the weights of routed experts, such as 6G: what does not fit is read from the files when it is
    /// needed; 0 leaves it to the system what stays in memory
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    host_bytes: u64,

    #[command(flatten)]
    cache: CacheArgs,
}

/// What the cache may use and keeps.
#[derive(Args)]
#[command(next_help_heading = "Cache")]
struct CacheArgs {
    /// Most memory for the cache, sessions and reusable prompt beginnings together, such as 8G or 500M (powers of 1024, as
    /// 8GiB; 8GB is 8000000000); 0 is a quarter of the machine's
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    cache_bytes: u64,

    /// Most memory for checkpoints, at which later prompts can start, within --cache-bytes; 0 is a quarter of it
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    checkpoint_bytes: u64,

    /// Where checkpoints are kept: none (no reuse), boundary (ends of prompts and turns), or every N tokens (N a multiple
    /// of 256)
    #[arg(long, value_name = "POLICY", default_value = "boundary", value_parser = policy)]
    checkpoints: CheckpointPolicy,

    /// Prompt beginnings are shared only under the same salt
    #[arg(long, value_name = "TEXT", default_value = "")]
    salt: String,

    /// Fill freed cache memory with NaN, to find defects; slower
    #[arg(long)]
    poison: bool,

    /// Host memory for prompt beginnings that had to make room, beyond --cache-bytes
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    host_tier: u64,

    /// Folder for prompt beginnings that the host tier has no room for, kept for later runs
    #[arg(long, value_name = "FOLDER")]
    disk_tier: Option<PathBuf>,

    /// Most bytes of files in that folder; 0 is no limit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size, requires = "disk_tier")]
    disk_tier_bytes: u64,

    /// Most bytes written to the folder per second; 0 is no limit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size, requires = "disk_tier")]
    disk_write_rate: u64,

    /// Most bytes written to the folder in all; 0 is no limit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size, requires = "disk_tier")]
    disk_write_total: u64,

    /// Reading ahead from the folder: off, next (--prefetch-depth blocks) or aggressive (16 times as many, at once)
    #[arg(long, value_name = "MODE", default_value = "next", value_parser = prefetch, requires = "disk_tier")]
    prefetch: Prefetch,

    /// Blocks that are read ahead
    #[arg(long, value_name = "N", default_value_t = TierOptions::default().prefetch_depth as u64,
          value_parser = clap::value_parser!(u64).range(1..=EngineOptions::MAX_PREFETCH_DEPTH as u64),
          requires = "disk_tier")]
    prefetch_depth: u64,

    /// Most milliseconds that a prompt waits for the tiers before it computes instead
    #[arg(long, value_name = "MS", default_value_t = TierOptions::default().timeout.as_millis() as u32)]
    tier_timeout: u32,

    /// What a prompt does for which the cache has no room: evict (take what there is), refuse (compare before it begins) or
    /// wait
    #[arg(long, value_name = "POLICY", default_value = "evict", value_parser = when_full)]
    when_full: WhenFull,

    /// Host memory for the pages of idle sessions, which give them up for others
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    session_tier: u64,

    /// From LOAD percent of the cache in use on, new sessions have a CONTEXT and a CHUNK of so many tokens at most, such as
    /// 80:8192:64
    #[arg(long, value_name = "LOAD:CONTEXT:CHUNK", value_parser = degraded)]
    degraded: Option<DegradedMode>,
}

impl CacheArgs {
    fn tiers(&self) -> TierOptions {
        TierOptions {
            host_bytes: self.host_tier,
            directory: self.disk_tier.clone(),
            disk_bytes: self.disk_tier_bytes,
            disk_write_rate: self.disk_write_rate,
            disk_write_total: self.disk_write_total,
            prefetch: self.prefetch,
            prefetch_depth: self.prefetch_depth as usize,
            timeout: Duration::from_millis(self.tier_timeout.into()),
            session_bytes: self.session_tier,
        }
    }
}

fn when_full(text: &str) -> Result<WhenFull, String> {
    match text {
        "evict" => Ok(WhenFull::Evict),
        "refuse" => Ok(WhenFull::Refuse),
        "wait" => Ok(WhenFull::Wait),
        _ => Err("evict, refuse or wait".to_owned()),
    }
}

fn degraded(text: &str) -> Result<DegradedMode, String> {
    let numbers: Option<Vec<usize>> = text.split(':').map(|number| number.parse().ok().filter(|&n| n > 0)).collect();
    match numbers.as_deref() {
        Some(&[load @ 1..=100, context, chunk]) => Ok(DegradedMode { load_percent: load as u32, context, chunk }),
        _ => Err("three numbers, such as 80:8192:64, the first at most 100".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| !time.is_zero()).ok_or_else(|| "a number of seconds above 0, such as 30 or 0.5".to_owned())
}

fn prefetch(text: &str) -> Result<Prefetch, String> {
    match text {
        "off" => Ok(Prefetch::Off),
        "next" => Ok(Prefetch::Next),
        "aggressive" => Ok(Prefetch::Aggressive),
        _ => Err("off, next or aggressive".to_owned()),
    }
}

/// A number of bytes: plain, or with a unit: K, M, G and T or KiB to TiB are powers of 1024, kB to TB powers of 1000.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let fault = || "not a size; examples: 500000000, 500M, 8G, 8GiB (8G), 8GB (8000000000)".to_owned();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| fault())?;
    let unit = text[digits.len()..].to_ascii_lowercase();
    let (letter, base) = match unit.strip_suffix("ib") {
        Some(letter) => (letter, 1024_u64),
        None => {
            unit.strip_suffix('b').filter(|letter| !letter.is_empty()).map_or((&*unit, 1024), |letter| (letter, 1000))
        }
    };
    let power = match letter {
        "" if unit.is_empty() => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(fault()),
    };
    number.checked_mul(base.pow(power)).ok_or_else(|| "larger than 64 bits can hold".to_owned())
}

fn policy(text: &str) -> Result<CheckpointPolicy, String> {
    match text {
        "none" => Ok(CheckpointPolicy::None),
        "boundary" => Ok(CheckpointPolicy::Boundary),
        n => match n.parse::<usize>() {
            Ok(n) if n > 0 && n.is_multiple_of(BLOCK_TOKENS) => Ok(CheckpointPolicy::Every(n)),
            _ => Err(format!("none, boundary, or a multiple of {BLOCK_TOKENS}")),
        },
    }
}

impl EngineArgs {
    pub(crate) fn options(&self) -> EngineOptions {
        EngineOptions {
            numerics: self.numerics,
            kv_format: self.kv,
            device: self.device,
            threads: self.threads as usize,
            prefill_chunk: self.chunk as usize,
            batch_invariant: self.batch_invariant,
            cache_bytes: self.cache.cache_bytes,
            gpu_bytes: self.gpu_bytes,
            gpu_experts: self.gpu_experts,
            host_bytes: self.host_bytes,
            checkpoint_bytes: self.cache.checkpoint_bytes,
            checkpoints: self.cache.checkpoints,
            prefix_salt: self.cache.salt.clone(),
            tiers: self.cache.tiers(),
            poison_cache: self.cache.poison,
            when_full: self.cache.when_full,
            degraded: self.cache.degraded,
        }
    }

    /// Opens the model and makes an engine on it.
    pub(crate) fn open(&self, model: &Path) -> Result<Arc<Engine>> {
        let model = Model::open(model)?;
        let bar = progress::byte_bar("uploading", 0);
        let engine = Engine::with_progress(&model, self.options(), &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
            Ok(())
        });
        bar.finish_and_clear();
        Ok(engine?)
    }
}

/// How many tokens a session holds.
#[derive(Args)]
pub(crate) struct ContextArgs {
    /// Most tokens of prompt and output together; 0 is the model's longest. Memory is taken as it fills
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>, help_heading = "Engine")]
    context: usize,
}

impl ContextArgs {
    pub(crate) fn session(&self, engine: &Arc<Engine>) -> Result<Session> {
        Ok(Session::new(engine, self.options())?)
    }

    fn options(&self) -> SessionOptions {
        SessionOptions { context: self.context, ..SessionOptions::default() }
    }
}

/// How long calls may take.
#[derive(Args)]
pub(crate) struct CallArgs {
    /// Most seconds for a prompt, and for each token behind it; what takes longer is an error, and what was complete stays
    /// in the session
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Engine")]
    time_limit: Option<Duration>,
}

impl CallArgs {
    pub(crate) fn apply(&self, session: &mut Session) {
        session.set_call_options(CallOptions { time_limit: self.time_limit, ..CallOptions::default() });
    }
}

/// Where figures go.
#[derive(Args)]
pub(crate) struct MetricsArgs {
    /// Write the engine's figures at the end, as text for Prometheus
    #[arg(long, value_name = "FILE", help_heading = "Engine")]
    metrics: Option<PathBuf>,
}

impl MetricsArgs {
    /// Refuses a file that could not be written, before the work begins.
    pub(crate) fn check(&self, model: &Path) -> Result<Option<OutFile>> {
        self.metrics.as_deref().map(|file| OutFile::check(file, &[], model)).transpose()
    }

    /// Writes the figures to what [`Self::check`] gave.
    pub(crate) fn write(file: Option<&OutFile>, engine: &Engine) -> Result {
        let text = engine.metrics().to_prometheus();
        file.map_or(Ok(()), |file| file.write(|out| out.write_all(text.as_bytes())))
    }
}

/// A file to go on from and to save to.
#[derive(Args)]
pub(crate) struct SessionArgs {
    /// Go on behind what this session file holds, if it exists, and save to it at the end. Ctrl-C saves too: while the
    /// prompt is read, its complete chunks
    #[arg(long, value_name = "FILE", help_heading = "Cache")]
    session: Option<PathBuf>,
}

impl SessionArgs {
    /// Refuses a file that could not be saved to, before the work begins.
    pub(crate) fn check(&self) -> Result {
        let Some(file) = &self.session else { return Ok(()) };
        let fault = |e| Error::io(file, &e);
        let refuse =
            |why: &str| Err(Error::new(ErrorKind::InvalidArgument, format!("{}: {why}", file.display())).into());
        if file.exists() {
            if !file.is_file() {
                return refuse("not a regular file");
            }
            return Ok(OpenOptions::new().append(true).open(file).map(drop).map_err(fault)?);
        }
        let Some(name) = file.file_name() else { return refuse("not a file name") };
        // a name as long as that of a save under way, which a later save removes if this process is killed here
        let mut probe = OsString::from(".");
        probe.push(name);
        probe.push(format!(".dsv4-{}-probe.tmp", std::process::id()));
        let probe = file.with_file_name(probe);
        File::create_new(&probe).map_err(fault)?;
        Ok(fs::remove_file(&probe).map_err(fault)?)
    }

    /// Saves what a prompt of `total` tokens behind the first `known` of the session left when it was interrupted.
    pub(crate) fn save_interrupted(&self, session: &Session, known: usize, total: usize) -> Result {
        if let (Some(file), true) = (&self.session, session.position() > known) {
            self.save(session)?;
            let fed = session.position() - known;
            note(format_args!("(interrupted: {fed} of the prompt's {total} tokens are in {})", file.display()));
        }
        Ok(())
    }

    /// The session in the file, or an empty one.
    pub(crate) fn open(&self, engine: &Arc<Engine>, context: &ContextArgs) -> Result<Session> {
        match self.session.as_deref().filter(|file| file.exists()) {
            Some(file) => Ok(Session::restore(engine, file, context.options())?),
            None => context.session(engine),
        }
    }

    /// Whether there is a file.
    pub(crate) fn is_given(&self) -> bool {
        self.session.is_some()
    }

    /// An error that is about the file.
    pub(crate) fn blame(&self, error: Error) -> Error {
        match &self.session {
            Some(file) => error.context(file.display()),
            None => error,
        }
    }

    /// Saves to the file, if there is one.
    pub(crate) fn save(&self, session: &Session) -> Result {
        if let Some(file) = &self.session {
            session.save_with(file, SaveOptions { complete: true })?;
        }
        Ok(())
    }
}

/// How tokens are chosen.
#[derive(Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Take the likeliest token each time
    #[arg(long, conflicts_with_all = ["temperature", "top_p", "top_k", "min_p", "seed"])]
    greedy: bool,

    /// Divides the logits: below 1 is more predictable [default: the model's own, else 1]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,

    /// Draw from the likeliest tokens that reach this probability [default: the model's own, else 1]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,

    /// Draw from the K likeliest tokens; 0 is all
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = whole::<u32>)]
    top_k: u32,

    /// Draw from tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,

    /// Divides the logits of tokens that occurred; 1 is none
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    repetition_penalty: f32,

    /// Subtracted from the logits of tokens that occurred
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,

    /// Subtracted from a token's logit once per occurrence
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,

    /// The penalties look at the last N tokens; 0 is all
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>)]
    penalty_window: usize,

    /// Start of the random numbers: the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    seed: u64,
}

impl SamplingArgs {
    /// The sampler's options; what was not given comes from the model's `generation_config.json`.
    pub(crate) fn options(&self, model: &Path) -> Result<SamplerOptions> {
        if self.temperature == Some(0.0) {
            return Err(Failure::Usage("--temperature 0: take --greedy for the likeliest token each time".to_owned()));
        }
        // values given by the user are judged before the model is touched, so that the two cannot be confused
        self.with(&Defaults::default()).validate().map_err(|e| Failure::Usage(e.message().to_owned()))?;
        file::check_model_folder(model)?;
        Ok(self.with(&Defaults::of_model(model)?))
    }

    fn with(&self, defaults: &Defaults) -> SamplerOptions {
        let chosen = self.temperature.is_some() || self.top_p.is_some();
        SamplerOptions {
            greedy: self.greedy || (defaults.greedy && !chosen),
            temperature: self.temperature.or(defaults.temperature).unwrap_or(1.0),
            top_k: self.top_k,
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_window: self.penalty_window,
            logit_bias: Vec::new(),
            seed: self.seed,
        }
    }
}

/// What a model recommends.
#[derive(Default)]
pub(crate) struct Defaults {
    greedy: bool,
    temperature: Option<f32>,
    top_p: Option<f32>,
}

impl Defaults {
    /// Reads the `generation_config.json` in the folder `model`, which need not have one.
    pub(crate) fn of_model(model: &Path) -> Result<Self, Error> {
        let path = model.join("generation_config.json");
        match file::read(&path, file::GENERATION_CONFIG) {
            Ok(text) => Self::from_json(&text).map_err(|e| e.context(path.display())),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e),
        }
    }

    fn from_json(text: &[u8]) -> Result<Self, Error> {
        let fault = |what: String| Error::new(ErrorKind::Config, what);
        let json: Value = serde_json::from_slice(text).map_err(|e| fault(format!("not valid JSON: {e}")))?;
        if !json.is_object() {
            return Err(fault(format!("{json} is not a JSON object")));
        }
        let number = |key: &str| match &json[key] {
            Value::Null => Ok(None),
            Value::Number(n) => Ok(n.as_f64().map(|n| n as f32)),
            other => Err(fault(format!("{key} is {other}; it must be a number"))),
        };
        let does_sample = match &json["do_sample"] {
            Value::Null => true,
            Value::Bool(flag) => *flag,
            other => return Err(fault(format!("do_sample is {other}; it must be true or false"))),
        };
        let temperature = number("temperature")?;
        let defaults = Self { greedy: !does_sample || temperature == Some(0.0), temperature, top_p: number("top_p")? };
        let plain = SamplerOptions::default();
        let options = SamplerOptions {
            greedy: defaults.greedy,
            temperature: temperature.unwrap_or(plain.temperature),
            top_p: defaults.top_p.unwrap_or(plain.top_p),
            ..plain
        };
        options.validate()?;
        Ok(defaults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_degraded_mode_is_three_numbers_and_a_time_limit_some_seconds() {
        assert_eq!(degraded("80:8192:64"), Ok(DegradedMode { load_percent: 80, context: 8192, chunk: 64 }));
        for text in ["", "80", "80:1", "101:1:1", "0:1:1", "80:0:1", "80:1:0", "80:1:1:1", "a:b:c", "-1:1:1"] {
            assert!(degraded(text).unwrap_err().contains("80:8192:64"), "{text}");
        }
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["", "0", "-1", "x", "inf", "nan", "1e300"] {
            assert!(seconds(text).unwrap_err().contains("above 0"), "{text}");
        }
    }

    #[test]
    fn sizes_have_units_of_1024_or_where_they_end_with_a_plain_b_of_1000() {
        for (text, bytes) in
            [("0", 0), ("500000000", 500_000_000), ("3k", 3 << 10), ("500M", 500 << 20), ("8G", 8 << 30)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for (text, bytes) in
            [("8GiB", 8 << 30), ("8gib", 8 << 30), ("8GB", 8_000_000_000), ("2kB", 2000), ("1T", 1 << 40)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "GB", "8B", "8iB", "8GG", "8 G", "8.5G", "-1", "8Gi", "8Q", "8QB"] {
            assert!(size(text).unwrap_err().contains("not a size"), "{text}");
        }
        assert_eq!(size("16777216TiB").unwrap_err(), "larger than 64 bits can hold");
    }
}
