//! One step on the device: the trunk's layers as launches on a stream, in the order of `model/deepseek_v4`.
//!
//! Nothing committed is overwritten before [`Run::commit`]: new window rows lie in a buffer of the step, new compressor
//! states in pages of their own, entries and keys behind the committed length.

use std::ops::Range;

use super::choices::Choices;
use super::host::HostExperts;
use super::scratch::Scratch;
use super::tables::{Kind, OnDevice, Part};
use super::weights::{DeviceWeights, Hyper};
use crate::backend::cuda::memory::{Buffer, Pinned};
use crate::backend::cuda::ops::{self, Finish, Job, Output, Pages, Project, ROW_BYTES, WindowCommit};
use crate::backend::cuda::stream::{Event, Stream};
use crate::cache::{Bucket, SequenceCache};
use crate::error::Result;
use crate::model::Rounding;
use crate::model::config::{Config, LayerKind};

/// Window rows of a wide page.
const ROWS_PER_PAGE: usize = 64;

/// The device's pages: one memory, in which page i of a bucket begins at i times the bucket's page size.
#[derive(Clone)]
pub(super) struct PageBuffer {
    pub(super) memory: Buffer<u8>,
    pub(super) page_bytes: [usize; 3],
}

/// A second stream and the events that tie it to the first.
pub(super) struct Side {
    pub(super) stream: Stream,
    pub(super) forked: Event,
    pub(super) joined: Event,
}

/// A step being queued.
pub(super) struct Run<'a> {
    pub(super) stream: &'a Stream,
    /// Where the indexer works beside the window and the main compressor; without, all is one stream's work.
    pub(super) side: Option<&'a Side>,
    pub(super) config: &'a Config,
    pub(super) weights: &'a DeviceWeights,
    pub(super) rounding: Rounding,
    /// Frequencies of window-only layers, and of the others.
    pub(super) frequencies: &'a [Buffer<f32>; 2],
    pub(super) pages: &'a PageBuffer,
    pub(super) scratch: &'a Scratch,
    pub(super) tables: OnDevice<'a>,
    /// The draws among the wanted rows.
    pub(super) choices: &'a Choices,
    /// Where a step leaves its flag and tokens, and what the host wants of a few rows.
    pub(super) host: Option<&'a mut [Pinned; 2]>,
    /// Captured steps, for those that want them.
    pub(super) graphs: Option<&'a mut super::Graphs>,
    /// What computes the experts that are not on the device.
    pub(super) experts: Option<&'a mut HostExperts>,
    /// The rows' orders of sums in products.
    pub(super) parts: &'a [Part],
    pub(super) rows: usize,
    /// Which of the two stream buffers holds the residual streams.
    pub(super) at: usize,
}

impl Run<'_> {
    /// Rotations and embedding: the input of layer 0.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.rotations()?;
        let ids = self.tables.ids()?;
        self.at = 0;
        ops::embed(self.stream, &self.weights.embed, &ids, &self.scratch.streams[0], self.config.hidden_size)
    }

    /// Rotation tables of the step's rows.
    pub(super) fn rotations(&self) -> Result<()> {
        let [plain, yarn] = self.frequencies;
        self.stream.fill(&self.scratch.bad, 0)?;
        ops::rotations(self.stream, &self.tables.positions()?, plain, yarn, &self.scratch.turns)
    }

    /// The residual streams `[rows, STREAMS, D]`.
    pub(super) fn streams(&self) -> &Buffer<u16> {
        &self.scratch.streams[self.at]
    }

    /// The attention half up to its output; `expand` first mixes the output of the half before into the streams.
    pub(super) fn attention_half(&mut self, layer: usize, expand: bool) -> Result<()> {
        let w = &self.weights.layers[layer];
        self.seam(&w.hc_attn, &w.attn_norm, expand)?;
        self.attention(layer)
    }

    /// The feed-forward half up to its output.
    pub(super) fn ffn_half(&mut self, layer: usize, expand: bool) -> Result<()> {
        let w = &self.weights.layers[layer];
        self.seam(&w.hc_ffn, &w.ffn_norm, expand)?;
        self.ffn(layer)
    }

    /// Mixes the last half's output into the streams and leaves the partial sums of the final projection.
    pub(super) fn leave(&mut self) -> Result<()> {
        let w = self.weights;
        self.project(&w.hc_head, true)
    }

    /// Leaves the partial sums of the final projection of streams that nothing is to be mixed into.
    pub(super) fn arrive(&mut self) -> Result<()> {
        let w = self.weights;
        self.project(&w.hc_head, false)
    }

    /// Sets the step's flag if a value of the streams is not finite.
    pub(super) fn watch(&self) -> Result<()> {
        ops::watch(self.stream, self.streams(), &self.scratch.bad)
    }

    /// Logits of a part of the wanted rows, at most [`super::scratch::LOGIT_ROWS`], after [`Self::leave`].
    pub(super) fn head(&self, part: Range<usize>) -> Result<Buffer<f32>> {
        let (c, w, s) = (self.config, self.weights, self.scratch);
        let rows = part.len();
        let (wanted, hidden) = (self.tables.wanted(part)?, s.hidden.slice(0..rows * c.hidden_size)?);
        let finish = Finish {
            x: self.streams(),
            rows: Some(&wanted),
            parts: &s.parts,
            scale: &w.hc_head.scale,
            base: &w.hc_head.base,
            norm: &w.norm,
            mixes: None,
            out: &hidden,
            quantised: None,
            iterations: c.hc_sinkhorn_iters,
            hc_eps: c.hc_eps,
            norm_eps: c.rms_norm_eps,
        };
        ops::finish(self.stream, &finish)?;
        head_product(self.stream, c, w, s, rows)
    }

    /// Moves the window rows into their rings, unless the step's flag is set.
    pub(super) fn commit(&self) -> Result<()> {
        let (rings, layers) = (self.tables.rings()?, self.config.num_hidden_layers);
        let commit = WindowCommit {
            staged: &self.scratch.staged,
            ring: self.table(&rings, Bucket::Wide, rings.len() / (layers * self.tables.tables.sequences)),
            layers,
            sequences: &self.tables.sequences()?,
            bad: &self.scratch.bad,
            window: self.config.sliding_window,
            most_rows: self.tables.tables.most_rows,
        };
        ops::window_commit(self.stream, &commit)
    }

    fn seam(&mut self, w: &Hyper, norm: &Buffer<f32>, expand: bool) -> Result<()> {
        self.project(w, expand)?;
        let (c, s) = (self.config, self.scratch);
        let finish = Finish {
            x: self.streams(),
            rows: None,
            parts: &s.parts,
            scale: &w.scale,
            base: &w.base,
            norm,
            mixes: Some(&s.mixes),
            out: &s.input,
            quantised: self.rounding.act_fp8.then_some(&s.quantised),
            iterations: c.hc_sinkhorn_iters,
            hc_eps: c.hc_eps,
            norm_eps: c.rms_norm_eps,
        };
        ops::finish(self.stream, &finish)
    }

    fn project(&mut self, w: &Hyper, expand: bool) -> Result<()> {
        let s = self.scratch;
        let project = Project {
            x: &s.streams[self.at],
            expand: expand.then_some((&s.output, &s.mixes, &s.streams[1 - self.at])),
            basis: &w.basis,
            parts: &s.parts,
            width: self.config.hidden_size,
        };
        ops::project(self.stream, &project)?;
        self.at = if expand { 1 - self.at } else { self.at };
        Ok(())
    }

    /// Products of all rows, each part's in its order of sums.
    pub(super) fn products(&self, jobs: &[Job<'_>]) -> Result<()> {
        for Part { rows, is_prompt } in self.parts {
            let inputs = jobs.iter().map(|job| job.x.slice(rows.start * job.x_stride..job.x.len()));
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let of_rows = jobs.iter().zip(&inputs).map(|(job, x)| job.of_rows(rows.start, x));
            let jobs = of_rows.collect::<Result<Vec<_>>>()?;
            if *is_prompt {
                ops::linear_chain(self.stream, &jobs, rows.len(), &self.scratch.workspace)?;
            } else {
                ops::linear(self.stream, &jobs, rows.len(), Some(&self.scratch.workspace))?;
            }
        }
        Ok(())
    }

    /// The feed-forward half's work, part by part: experts sort the rows, so each part is treated as if it were all.
    pub(super) fn ffn(&mut self, layer: usize) -> Result<()> {
        // the host's part of the layer, for as long as the rest of the step is only read
        let mut host = self.experts.take();
        let result = self.parts.iter().try_for_each(|part| {
            let whole = Part { rows: 0..part.rows.len(), ..part.clone() };
            let run = Run {
                stream: self.stream,
                side: self.side,
                config: self.config,
                weights: self.weights,
                rounding: self.rounding,
                frequencies: self.frequencies,
                pages: self.pages,
                scratch: &self.scratch.ffn_part(self.config, part)?,
                tables: self.tables.with_ids_of(&part.rows),
                choices: self.choices,
                experts: None,
                host: None,
                graphs: None,
                parts: std::slice::from_ref(&whole),
                rows: part.rows.len(),
                at: self.at,
            };
            run.ffn_of_part(layer, host.as_deref_mut())
        });
        self.experts = host;
        result
    }

    /// Answers what a step that was launched as a graph asks of the host.
    pub(super) fn serve(&mut self) -> Result<()> {
        let Some(host) = self.experts.as_deref_mut() else { return Ok(()) };
        let layers = self.weights.layers.iter().enumerate().filter(|(_, w)| w.ffn.here.is_some());
        host.serve(self.stream, layers.map(|(layer, _)| layer), self.rows)
    }

    /// The input of products with quantised weights.
    pub(super) fn quantised_input(&self) -> &Buffer<u16> {
        if self.rounding.act_fp8 { &self.scratch.quantised } else { &self.scratch.input }
    }

    /// Rotation table 0 to 3 of [`ops::rotations`].
    pub(super) fn turns(&self, table: usize) -> Result<Buffer<[f32; 2]>> {
        let len = self.scratch.turns.len() / 4;
        self.scratch.turns.slice(table * len..(table + 1) * len)
    }

    /// Table of the positions of the entries that rows complete.
    pub(super) fn entry_turns(&self, kind: LayerKind) -> Result<Buffer<[f32; 2]>> {
        self.turns(if kind == LayerKind::C128a { 3 } else { 2 })
    }

    /// New window rows of a layer `[rows, ROW_BYTES]`.
    pub(super) fn staged(&self, layer: usize) -> Result<Buffer<u8>> {
        let len = self.rows * ROW_BYTES;
        self.scratch.staged.slice(layer * len..(layer + 1) * len)
    }

    /// The committed window row of `position`.
    pub(super) fn ring_row(&self, cache: &SequenceCache, layer: usize, position: usize) -> Result<Buffer<u8>> {
        let slot = position % self.config.sliding_window;
        let page = cache.ring_ids(layer).nth(slot / ROWS_PER_PAGE).expect("a ring has a page for every slot");
        let at = page as usize * self.pages.page_bytes[Bucket::Wide as usize] + slot % ROWS_PER_PAGE * ROW_BYTES;
        self.pages.memory.slice(at..at + ROW_BYTES)
    }

    /// The bucket that pages of `kind` of a layer of kind `of` lie in.
    pub(super) fn bucket(of: LayerKind, kind: Kind) -> Bucket {
        match (of, kind) {
            (_, Kind::Keys | Kind::Index | Kind::FreshIndex) => Bucket::Index,
            (LayerKind::C128a, _) => Bucket::Narrow,
            _ => Bucket::Wide,
        }
    }

    /// A page table with its bucket.
    pub(super) fn table<'b>(&'b self, ids: &'b Buffer<u32>, bucket: Bucket, pitch: usize) -> Pages<'b> {
        Pages { memory: &self.pages.memory, ids, pitch, page_bytes: self.pages.page_bytes[bucket as usize] }
    }

    /// The pages of `kind` of a layer, whose table is `ids`.
    pub(super) fn pages<'b>(&'b self, layer: usize, kind: Kind, ids: &'b Buffer<u32>) -> Pages<'b> {
        self.table(ids, Self::bucket(self.config.layers[layer], kind), ids.len() / self.tables.tables.sequences)
    }
}

/// Logits `[rows, vocab]` of the first `rows` hidden states in the scratch memory.
pub(super) fn head_product(
    stream: &Stream,
    c: &Config,
    w: &DeviceWeights,
    s: &Scratch,
    rows: usize,
) -> Result<Buffer<f32>> {
    let logits = s.logits.slice(0..rows * c.vocab_size)?;
    let job = Job {
        weight: &w.head,
        first_row: 0,
        rows: c.vocab_size,
        cols: c.hidden_size,
        x: &s.hidden.slice(0..rows * c.hidden_size)?,
        x_stride: c.hidden_size,
        y: Output::F32(logits.clone()),
        y_stride: c.vocab_size,
    };
    ops::linear(stream, &[job], rows, Some(&s.workspace))?;
    Ok(logits)
}
