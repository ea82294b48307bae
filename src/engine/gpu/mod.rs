//! A model on one GPU: its weights, its pages and the memory of a step, all allocated when the engine is made.
//!
//! A step is queued layer by layer and waited for once; what it adds becomes part of the cache only when nothing went
//! wrong. Steps of several sessions take turns.

mod attention;
mod ffn;
mod plan;
mod probe;
mod rollback;
mod scratch;
mod step;
mod tables;
mod weights;

use std::sync::{Arc, Mutex, PoisonError};

use crate::alloc;
use crate::backend::cpu::rope::frequencies;
use crate::backend::cuda::device::Gpu;
use crate::backend::cuda::memory::{Arena, Buffer};
use crate::backend::cuda::pages::DevicePages;
use crate::backend::cuda::stream::{Event, Stream};
use crate::backend::cuda::upload::Uploader;
use crate::cache::{CacheLayout, PageMemory};
use crate::error::{Error, ErrorKind, Result, bail};
use crate::model::deepseek_v4::{LogitRows, Segment, finite_logits, finite_streams};
use crate::model::{Model, Rounding};
use crate::tensor::format::bf16_value;

use self::plan::Plan;
use self::scratch::{LOGIT_ROWS, SPLIT_ROWS, Scratch, Size};
use self::step::{PageBuffer, Run, Side};
use self::tables::Tables;
use self::weights::{DeviceWeights, Placer};
use super::EngineOptions;

/// Bytes of each half of the upload buffer.
const UPLOAD_BYTES: usize = 32 << 20;
/// New rows of a sequence up to which a step counts as decoding: attention then cuts each query's keys.
const DECODE_ROWS: usize = 8;

/// A model on a GPU.
pub(super) struct GpuEngine {
    model: Arc<Model>,
    gpu: Gpu,
    rounding: Rounding,
    /// Every step takes attention's order of sums for few rows.
    batch_invariant: bool,
    weights: DeviceWeights,
    frequencies: [Buffer<f32>; 2],
    pages: PageBuffer,
    memory: Arc<DevicePages>,
    plan: Plan,
    queue: Mutex<Queue>,
}

/// What one step at a time uses.
struct Queue {
    stream: Stream,
    side: Option<Side>,
    scratch: Arena,
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
        model: &Arc<Model>,
        options: &EngineOptions,
        layout: &CacheLayout,
        progress: UploadProgress<'_>,
    ) -> Result<Self> {
        plan::check_model(model.config(), options, layout.format)?;
        let gpu = Gpu::open(ordinal)?;
        let plan = Plan::new(&gpu, model, options, layout)?;
        tracing::info!(device = %gpu.limits().name, ?plan, "memory planned");
        let mut arena = Arena::new(&gpu, plan.weights)?;
        let mut uploader = Uploader::new(&gpu, UPLOAD_BYTES)?;
        let mut report = |done| progress(done, plan.weights);
        let upload = Some((&mut uploader, &mut report as &mut dyn FnMut(u64) -> Result<()>));
        let weights = DeviceWeights::place(model.weights(), &mut Placer { arena: &mut arena, upload, done: 0 })?;
        uploader.finish()?;
        drop(uploader);
        progress(plan.weights, plan.weights)?;

        let config = model.config();
        let stream = Stream::new(&gpu)?;
        let mut tables = Arena::new(&gpu, plan::FREQUENCY_BYTES)?;
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
        let queue = Queue { stream, side: Some(side), scratch: Arena::new(&gpu, plan.step)? };
        Ok(Self {
            model: Arc::clone(model),
            rounding: Rounding::from(options.numerics),
            batch_invariant: options.batch_invariant,
            weights,
            frequencies: [plain, yarn],
            pages,
            memory: Arc::new(DevicePages::new(&gpu, memory)?),
            plan,
            queue: Mutex::new(Queue { ..queue }),
            gpu,
        })
    }

    /// The memory of the cache.
    pub(super) fn memory(&self) -> Arc<dyn PageMemory> {
        Arc::clone(&self.memory) as Arc<dyn PageMemory>
    }

    /// Most tokens of a step.
    pub(super) fn rows(&self) -> usize {
        self.plan.rows
    }

    /// Name of the device.
    pub(super) fn name(&self) -> &str {
        &self.gpu.limits().name
    }

    /// Takes the segments' tokens through the model; as [`Trunk::step`](crate::model::deepseek_v4::Trunk::step). On success
    /// the segments may be committed, on error their sequences are as before.
    pub(super) fn step(
        &self,
        segments: &mut [Segment<'_>],
        rows: LogitRows,
        between: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Vec<f32>> {
        self.with_run(segments, |run, segments| {
            run.begin()?;
            for layer in 0..run.config.num_hidden_layers {
                between(layer)?;
                run.attention_half(layer, layer > 0)?;
                rollback::keep_states(run, segments, layer)?;
                run.ffn_half(layer, true)?;
            }
            run.leave()?;
            run.watch()?;
            let wanted: Vec<u32> = match rows {
                LogitRows::None => Vec::new(),
                LogitRows::All => (0..run.rows as u32).collect(),
                LogitRows::Last => run.tables.tables.ends().map(|end| end as u32 - 1).collect(),
            };
            let logits = logits(run, &wanted)?;
            if run.stream.read(&run.scratch.bad)?[0] != 0 {
                return Err(find_not_finite(run, segments));
            }
            finite_logits(&logits, run.config.vocab_size, wanted.iter().map(|&row| row as usize))?;
            rollback::keep_rows(run, segments)?;
            run.commit()?;
            Ok(logits)
        })
    }

    /// Queues work for the rows of `segments` and waits for it, however it ends: pages may go to others then.
    fn with_run<T>(
        &self,
        segments: &mut [Segment<'_>],
        work: impl FnOnce(&mut Run<'_>, &mut [Segment<'_>]) -> Result<T>,
    ) -> Result<T> {
        let tables = Tables::new(segments)?;
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Queue { stream, side, scratch } = &mut *queue;
        let config = self.model.config();
        let size = Size { rows: tables.rows, words: tables.words.len(), visible: tables.visible().max(1) };
        let scratch = Scratch::new(scratch, config, size)?;
        stream.write(&scratch.words, &tables.words)?;
        let few = segments.iter().all(|s| s.tokens.len() <= DECODE_ROWS) || self.batch_invariant;
        let mut run = Run {
            stream,
            side: side.as_ref(),
            config,
            weights: &self.weights,
            rounding: self.rounding,
            frequencies: &self.frequencies,
            pages: &self.pages,
            scratch: &scratch,
            tables: tables.on(&scratch.words),
            rows: tables.rows,
            split: few && tables.rows <= SPLIT_ROWS,
            at: 0,
        };
        let result = work(&mut run, segments);
        let ended = stream.synchronize().and_then(|()| side.as_ref().map_or(Ok(()), |side| side.stream.synchronize()));
        let value = result?;
        ended?;
        Ok(value)
    }
}

/// Logits of `wanted` rows on the host.
fn logits(run: &Run<'_>, wanted: &[u32]) -> Result<Vec<f32>> {
    let mut logits = alloc::with_capacity("logits", wanted.len() * run.config.vocab_size)?;
    for rows in wanted.chunks(LOGIT_ROWS) {
        logits.extend_from_slice(&run.stream.read(&run.head(rows)?)?);
    }
    Ok(logits)
}

/// Runs the layers once more, looking at each one's streams, for the error that names the first bad one.
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
        }
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
