//! A model on one GPU: its weights, its pages and the memory of a step, all allocated when the engine is made.
//!
//! A step is queued layer by layer and waited for once; what it adds becomes part of the cache only when nothing went
//! wrong. Steps of several sessions take turns.

mod attention;
mod choices;
mod ffn;
mod host;
mod plan;
mod probe;
mod rollback;
mod scratch;
mod step;
mod tables;
mod warm;
mod weights;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::alloc;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::rope::frequencies;
use crate::backend::cuda::device::Gpu;
use crate::backend::cuda::memory::{Arena, Buffer, Pinned};
use crate::backend::cuda::ops;
use crate::backend::cuda::pages::DevicePages;
use crate::backend::cuda::stream::{Event, Graph, Stream};
use crate::backend::cuda::upload::Uploader;
use crate::cache::{CacheLayout, CacheManager, PageMemory};
use crate::error::{Error, ErrorKind, Result, bail};
use crate::model::deepseek_v4::home::ExpertTier;
use crate::model::deepseek_v4::{Segment, finite_logits, finite_streams, wanted_rows};
use crate::model::{Model, Rounding};
use crate::tensor::format::bf16_value;

use self::choices::{Choices, deliver};
use self::host::HostExperts;
use self::plan::Plan;
use self::scratch::{LOGIT_ROWS, Scratch, Size};
use self::step::{PageBuffer, Run, Side};
use self::tables::{PagesKey, Tables, parts, pitch};
use self::warm::Warming;
use self::weights::{DeviceWeights, Placer, Upload};
use super::EngineOptions;
use super::experts::tier;
use super::research::HostFigures;
use super::step::{Last, Stepped};

/// Bytes of each half of the upload buffer.
const UPLOAD_BYTES: usize = 32 << 20;
/// Rows of logits that reach the host through pinned memory; hidden states all do.
const HOST_ROWS: usize = 8;
/// New rows of a sequence up to which it counts as decoding: attention then cuts each query's keys, and products have the
/// order of sums of few tokens.
const DECODE_ROWS: usize = 8;

/// Most bytes of a copy that measures memory, and how often it is done.
const COPY_BYTES: u64 = 512 << 20;
const COPIES: usize = 8;

/// A model on a GPU.
pub(super) struct GpuEngine {
    model: Arc<Model>,
    gpu: Gpu,
    rounding: Rounding,
    /// Every step takes attention's order of sums for few rows.
    batch_invariant: bool,
    /// Products of prompts have kernels and an order of sums of their own.
    chains: bool,
    /// Steps of few rows become graphs.
    captures: bool,
    weights: DeviceWeights,
    frequencies: [Buffer<f32>; 2],
    pages: PageBuffer,
    memory: Arc<DevicePages>,
    plan: Plan,
    /// The host's experts, if they are not used where they are mapped.
    tier: Option<Arc<ExpertTier>>,
    /// Where they are.
    warming: Option<Warming>,
    queue: Mutex<Queue>,
}

/// What one step at a time uses.
struct Queue {
    stream: Stream,
    side: Side,
    /// For measurements: everything on the first stream.
    one_stream: bool,
    scratch: Arena,
    /// Tables of the step: the small ones, then the page tables, which stay from step to step.
    words: Buffer<u32>,
    /// The same on their way.
    on_the_way: Pinned,
    /// What the page tables on the device were made from.
    resident: Option<PagesKey>,
    graphs: Graphs,
    /// What computes the experts that are not on the device.
    experts: Option<HostExperts>,
    /// Where a step leaves its flag and tokens, and what the host wants of a few rows: logits, or hidden states.
    host: [Pinned; 2],
}

/// Captured steps by rows, visible entries, whether there are logits and whether there are two streams; `None` where a
/// shape was seen once. Rows are rounded up to powers of two, so there are few, and all of them come back.
type Graphs = HashMap<(usize, usize, bool, bool), Option<Captured>>;

/// A captured step.
struct Captured {
    graph: Graph,
    /// Where its logits are.
    logits: Option<Buffer<f32>>,
    /// Which of the two buffers has the streams at its end.
    at: usize,
}

/// How many bytes of how many weights are on their way.
pub(super) type UploadProgress<'a> = &'a mut dyn FnMut(u64, u64) -> Result<()>;

impl GpuEngine {
    /// Opens device `ordinal`, plans its memory, and uploads the weights.
    ///
    /// # Errors
    /// `Unavailable` and `Unsupported` name what the device, the model or the options lack; `OutOfMemory` has the bytes of
    /// weights, step and cache beside the free ones; those of the checkpoint; that of `progress`, which ends the upload.
    pub(super) fn open(
        ordinal: u32,
        cpu: &Arc<Cpu>,
        model: &Arc<Model>,
        options: &EngineOptions,
        layout: &CacheLayout,
        progress: UploadProgress<'_>,
    ) -> Result<Self> {
        plan::check_model(model.config(), options, layout.format)?;
        let gpu = Gpu::open(ordinal)?;
        let plan = Plan::new(&gpu, model, options, layout)?;
        tracing::info!(device = %gpu.limits().name, ?plan, "memory planned");
        let tier = tier(model, options, plan.experts * model.config().num_hidden_layers)?;
        let mut arena = Arena::new(&gpu, plan.weights)?;
        let mut uploader = Uploader::new(&gpu, UPLOAD_BYTES)?;
        let mut report = |done| progress(done, plan.weights);
        let upload = Some(Upload { uploader: &mut uploader, progress: &mut report });
        let experts = plan.experts;
        let weights =
            DeviceWeights::place(model.weights(), &mut Placer { arena: &mut arena, experts, upload, done: 0 })?;
        uploader.finish()?;
        drop(uploader);
        progress(plan.weights, plan.weights)?;

        let config = model.config();
        let stream = Stream::new(&gpu)?;
        let mut tables = Arena::new(&gpu, plan.tables)?;
        let mut table = |values: Vec<f32>| {
            let buffer = tables.take("rotation frequencies", values.len())?;
            stream.write(&buffer, &values)?;
            Ok::<_, Error>(buffer)
        };
        let dim = config.qk_rope_head_dim;
        let plain = table(frequencies(dim, config.rope_theta, None))?;
        let yarn = table(frequencies(dim, config.compress_rope_theta, Some(&config.rope_scaling)))?;

        let page_bytes = layout.page_bytes();
        let memory = Arena::new(&gpu, plan.cache)?.take("cache pages", plan.cache as usize)?;
        let pages = PageBuffer { memory: memory.clone(), page_bytes };
        let side = Side { stream: Stream::new(&gpu)?, forked: Event::new(&gpu)?, joined: Event::new(&gpu)? };
        let words = tables.take("tables of a step", plan.words())?;
        let (scratch, graphs) = (Arena::new(&gpu, plan.step)?, HashMap::new());
        let values = HOST_ROWS * config.vocab_size * size_of::<f32>();
        let values = values.max(LOGIT_ROWS * config.hidden_size * size_of::<u16>());
        let outcome = (1 + LOGIT_ROWS) * size_of::<u32>();
        let host = [Pinned::new(&gpu, outcome)?, Pinned::new(&gpu, values)?];
        let on_the_way = Pinned::new(&gpu, words.bytes())?;
        let (one_stream, resident) = (false, None);
        let rounding = Rounding::from(options.numerics);
        let is_whole = plan.experts == config.n_routed_experts;
        let experts = (!is_whole)
            .then(|| HostExperts::new(&gpu, cpu, model, tier.clone(), plan.experts, rounding, plan.rows))
            .transpose()?;
        let warms = !is_whole && tier.is_none();
        let queue = Queue { stream, side, one_stream, scratch, words, on_the_way, resident, graphs, experts, host };
        Ok(Self {
            model: Arc::clone(model),
            rounding,
            batch_invariant: options.batch_invariant,
            chains: !options.batch_invariant && ops::has_chains(&gpu),
            captures: is_whole || !launches_wait(),
            weights,
            frequencies: [plain, yarn],
            pages,
            memory: Arc::new(DevicePages::new(&gpu, memory)?),
            plan,
            tier,
            warming: warms.then(|| Warming::start(model, plan.experts)),
            queue: Mutex::new(queue),
            gpu,
        })
    }

    /// Calls `work`; if that found no room in the cache, moves its pages together, for which no step may be under way, and
    /// calls it once more.
    pub(super) fn with_room<T>(&self, cache: &CacheManager, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        match work() {
            Err(error) if error.kind() == ErrorKind::NoBlocks => {
                let queue = self.queue();
                let moved = cache.compact()?;
                drop(queue);
                if moved == 0 { Err(error) } else { work() }
            }
            result => result,
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The experts in host memory, if not all are on the device or used where they are mapped.
    pub(super) fn tier(&self) -> Option<&Arc<ExpertTier>> {
        self.tier.as_ref()
    }

    /// The memory of the cache.
    pub(super) fn memory(&self) -> Arc<dyn PageMemory> {
        Arc::clone(&self.memory) as Arc<dyn PageMemory>
    }

    /// Most tokens of a step.
    pub(super) fn rows(&self) -> usize {
        self.plan.rows
    }

    /// Most sequences of a step.
    pub(super) fn sequences(&self) -> usize {
        plan::SEQUENCES
    }

    /// What the host did for the steps, if it has experts.
    pub(super) fn host_figures(&self) -> Option<HostFigures> {
        let mapped = self.warming.as_ref().map_or((0, 0), Warming::progress);
        let figures = self.queue().experts.as_ref()?.figures;
        Some(HostFigures { mapped, ..figures })
    }

    /// Bytes a second that a copy within the device's memory reads and writes together.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn bandwidth(&self) -> Result<f64> {
        let mut queue = self.queue();
        let Queue { stream, scratch, .. } = &mut *queue;
        // what steps leave in their memory is nobody's when the next one begins
        scratch.restart();
        let half = (self.plan.step / 2).min(COPY_BYTES) as usize / 256 * 256;
        let [from, to] = [scratch.take::<u8>("a copy's source", half)?, scratch.take::<u8>("a copy's target", half)?];
        let [began, ended] = [Event::new(&self.gpu)?, Event::new(&self.gpu)?];
        stream.copy(&from, &to)?;
        stream.record(&began)?;
        (0..COPIES).try_for_each(|_| stream.copy(&from, &to))?;
        stream.record(&ended)?;
        stream.synchronize()?;
        Ok((2 * half * COPIES) as f64 / (ended.micros_since(&began)? / 1e6))
    }

    /// Name of the device.
    pub(super) fn name(&self) -> &str {
        &self.gpu.limits().name
    }

    /// Takes the segments' tokens through the model; as [`Trunk::step`](crate::model::deepseek_v4::Trunk::step), but for
    /// segments whose last row's logits stay here, perhaps with a token chosen from them. On success the segments may be committed, on error
    /// their sequences are as before.
    pub(super) fn step(
        &self,
        segments: &mut [Segment<'_>],
        lasts: &[&Last],
        between: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Stepped> {
        let choices = Choices::new(segments, lasts, LOGIT_ROWS)?;
        let captured = self.captured_rows(segments);
        self.with_choices(segments, &choices, captured, |run, segments| {
            let graphs = run.graphs.take();
            if let Some(graphs) = graphs.filter(|_| captured.is_some()) {
                between(0)?;
                return decode(run, graphs)?.ok_or_else(|| find_not_finite(run, segments));
            }
            layers(run, segments, between)?;
            let (mut stepped, wanted) = (Stepped::default(), run.tables.tables.wanted());
            for first in (0..wanted).step_by(LOGIT_ROWS) {
                let part = first..(first + LOGIT_ROWS).min(wanted);
                let logits = run.head(part.clone())?;
                ops::watch_f32(run.stream, &logits, &run.scratch.bad)?;
                deliver(run, &logits, part, &mut stepped)?;
            }
            if run.stream.read(&run.scratch.bad)?[0] != 0 {
                return Err(find_not_finite(run, segments));
            }
            rollback::keep_rows(run, segments)?;
            run.commit()?;
            Ok(stepped)
        })
    }

    /// Queues work for the rows of `segments` and waits for it; nothing is chosen.
    fn with_run<T>(
        &self,
        segments: &mut [Segment<'_>],
        work: impl FnOnce(&mut Run<'_>, &mut [Segment<'_>]) -> Result<T>,
    ) -> Result<T> {
        self.with_choices(segments, &Choices::default(), None, work)
    }

    /// Rows of the captured step that takes `segments`, if there can be one: the next power of two, where the last ones are
    /// idle. Each sequence has one new token then, which need not be taken back.
    fn captured_rows(&self, segments: &[Segment<'_>]) -> Option<usize> {
        let decodes = segments.iter().all(|s| s.tokens.len() == 1 && s.staged.kept() == 0);
        let rows = segments.len().next_power_of_two().min(self.plan.rows);
        let fits = segments.len() <= rows && rows <= LOGIT_ROWS && rows * pitch(segments) <= self.plan.table_blocks;
        (decodes && fits && self.captures && !self.gpu.is_careful()).then_some(rows)
    }

    /// Queues work for the rows of `segments`, filled up to `captured` ones if that is given, and waits for it, however it
    /// ends: pages may go to others then.
    fn with_choices<T>(
        &self,
        segments: &mut [Segment<'_>],
        choices: &Choices,
        captured: Option<usize>,
        work: impl FnOnce(&mut Run<'_>, &mut [Segment<'_>]) -> Result<T>,
    ) -> Result<T> {
        let tokens = segments.iter().map(|s| s.tokens.len()).sum();
        let count: usize = captured.unwrap_or(tokens);
        if count > self.plan.rows {
            bail!(InvalidArgument, "a step of {count} tokens on an engine for {} (prefill_chunk)", self.plan.rows);
        }
        // from here on no page changes its number
        let mut queue = self.queue();
        let key = PagesKey::new(segments, count - tokens);
        let wanted: Vec<u32> = wanted_rows(segments).into_iter().map(|row| row as u32).collect();
        let tables = Tables::new(segments, (&wanted, choices), captured, self.plan.small_words, self.batch_invariant)?;
        if tables.words.len() > self.plan.small_words {
            bail!(InvalidArgument, "a step of {} sequences: too many for its tables", segments.len());
        }
        let Queue { stream, side, one_stream, scratch, words, on_the_way, resident, graphs, experts, host } =
            &mut *queue;
        if let Some(host) = experts {
            host.begin(segments.iter().flat_map(|s| s.tokens).copied())?;
        }
        stream.write_later(&words.slice(0..tables.words.len())?, &tables.words, on_the_way, 0)?;
        if resident.as_ref() != Some(&key) {
            *resident = None;
            let pages = tables.page_words(segments)?;
            let first = self.plan.small_words;
            let to = words.slice(first..first + pages.len())?;
            stream.write_later(&to, &pages, on_the_way, first * size_of::<u32>())?;
            *resident = Some(key);
        }
        let config = self.model.config();
        let size = Size { rows: count, visible: tables.visible(), is_shared_out: experts.is_some() };
        let scratch = Scratch::new(scratch, config, size)?;
        let counts = segments.iter().map(|s| s.tokens.len()).chain(std::iter::repeat_n(1, count - tokens));
        let parts = parts(counts, self.chains);
        let mut run = Run {
            stream,
            side: (!*one_stream).then_some(side),
            config,
            weights: &self.weights,
            rounding: self.rounding,
            frequencies: &self.frequencies,
            pages: &self.pages,
            scratch: &scratch,
            tables: tables.on(words),
            choices,
            graphs: Some(graphs),
            experts: experts.as_mut(),
            host: Some(host),
            parts: &parts,
            rows: count,
            at: 0,
        };
        let result = work(&mut run, segments);
        let ended = stream.synchronize().and_then(|()| side.stream.synchronize());
        let value = result?;
        ended?;
        Ok(value)
    }
}

/// Whether the driver was asked to wait for everything that it launches: a graph could not ask the host for anything then.
fn launches_wait() -> bool {
    std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value != "0")
}

/// Everything up to the head.
fn layers(run: &mut Run<'_>, segments: &mut [Segment<'_>], between: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
    run.begin()?;
    for layer in 0..run.config.num_hidden_layers {
        between(layer)?;
        run.attention_half(layer, layer > 0)?;
        rollback::keep_states(run, segments, layer)?;
        run.ffn_half(layer, true)?;
    }
    run.leave()?;
    run.watch()
}

/// A step of one token a sequence, and idle rows, committed, as a graph from the second time on that one of its shape is
/// wanted. `None` if a value was not finite; nothing is committed then. What is chosen is chosen behind the graph.
fn decode(run: &mut Run<'_>, graphs: &mut Graphs) -> Result<Option<Stepped>> {
    let (wanted, heads) = (run.tables.tables.wanted(), run.tables.tables.heads());
    let shape = (run.rows, run.tables.tables.visible(), heads > 0, run.side.is_some());
    let queue = |run: &mut Run<'_>| {
        layers(run, &mut [], &mut |_| Ok(()))?;
        let logits = if heads == 0 { None } else { Some(run.head(0..heads)?) };
        logits.iter().try_for_each(|logits| ops::watch_f32(run.stream, logits, &run.scratch.bad))?;
        // what the last row overwrites is no row that the token's successor sees, so that the host's refusal may come late
        run.commit()?;
        Ok::<_, Error>(logits)
    };
    let logits = match graphs.get(&shape) {
        None => {
            graphs.insert(shape, None);
            queue(run)?
        }
        Some(Some(captured)) => captured.replay(run)?,
        Some(None) => {
            let (stream, mut logits) = (run.stream, None);
            run.experts.iter_mut().for_each(|host| host.set_captured(true));
            let graph = stream.capture(|| {
                logits = queue(run)?;
                Ok(())
            });
            run.experts.iter_mut().for_each(|host| host.set_captured(false));
            let captured = Captured { graph: graph?, logits, at: run.at };
            let logits = captured.replay(run)?;
            graphs.insert(shape, Some(captured));
            logits
        }
    };
    let mut stepped = Stepped::default();
    if let Some(logits) = &logits {
        deliver(run, logits, 0..wanted, &mut stepped)?;
    }
    let bad = match run.host.as_deref_mut() {
        // it came with the rest
        Some([outcome, _]) if logits.is_some() => outcome.values::<u32>(1)?[0],
        _ => run.stream.read(&run.scratch.bad)?[0],
    };
    Ok((bad == 0).then_some(stepped))
}

impl Captured {
    /// Queues the step, and does the host's share of it; its logits.
    fn replay(&self, run: &mut Run<'_>) -> Result<Option<Buffer<f32>>> {
        run.experts.iter_mut().try_for_each(|host| host.prepare(run.stream))?;
        run.stream.replay(&self.graph)?;
        run.at = self.at;
        run.serve()?;
        Ok(self.logits.clone())
    }
}

/// Logits of the wanted rows on the host.
fn logits(run: &Run<'_>, wanted: usize) -> Result<Vec<f32>> {
    let mut logits = alloc::with_capacity("logits", wanted * run.config.vocab_size)?;
    for first in (0..wanted).step_by(LOGIT_ROWS) {
        logits.extend_from_slice(&run.stream.read(&run.head(first..(first + LOGIT_ROWS).min(wanted))?)?);
    }
    Ok(logits)
}

/// Runs the layers once more, looking at each one's streams and then at the logits, for the error that names the first
/// value that is bad.
fn find_not_finite(run: &mut Run<'_>, segments: &[Segment<'_>]) -> Error {
    let mut find = || -> Result<()> {
        run.begin()?;
        for layer in 0..run.config.num_hidden_layers {
            run.attention_half(layer, layer > 0)?;
            run.ffn_half(layer, true)?;
            let at = run.at;
            run.leave()?;
            let x = read_bf16(run, run.streams())?;
            run.at = at;
            finite_streams(layer, &x, run.config, segments)?;
            if run.stream.read(&run.scratch.bad)?[0] != 0 {
                bail!(
                    Numeric,
                    "layer {layer}: an index score is not finite; `dsv4 verify --scan` tells whether weights are not finite"
                );
            }
        }
        run.leave()?;
        let logits = logits(run, run.tables.tables.wanted())?;
        finite_logits(&logits, run.config.vocab_size, wanted_rows(segments).into_iter())?;
        bail!(Numeric, "activations are not finite, but were when computed again")
    };
    find().err().unwrap_or_else(|| Error::new(ErrorKind::Numeric, "activations are not finite"))
}

/// A bf16 buffer as float32.
fn read_bf16(run: &Run<'_>, buffer: &Buffer<u16>) -> Result<Vec<f32>> {
    let bits = run.stream.read(buffer)?;
    let mut values = alloc::with_capacity("values from the device", bits.len())?;
    values.extend(bits.into_iter().map(bf16_value));
    Ok(values)
}
