//! What takes the last tokens of a step back: the window rows that they overwrite and the compressor states before each
//! of them, read back to the host.
//!
//! The state before a token is the one that a step without it and its successors would leave, so the compressor runs once
//! more for each: entries come out as before, and the state goes to pages of the step.

use super::step::Run;
use super::tables::Kind;
use crate::alloc;
use crate::backend::cuda::memory::Buffer;
use crate::backend::cuda::ops::{self, Compress, Compressor, Pages, ROW_BYTES};
use crate::error::Result;
use crate::model::config::LayerKind;
use crate::model::deepseek_v4::Segment;

/// Records the compressor states of `layer` before each of the segments' last tokens. Runs after the attention half.
pub(super) fn keep_states(run: &Run<'_>, segments: &mut [Segment<'_>], layer: usize) -> Result<()> {
    let (w, b) = (&run.weights.layers[layer].attn, &run.scratch.attention);
    for (s, segment) in segments.iter_mut().enumerate() {
        let kept = segment.staged.kept();
        for token in 0..kept {
            let before = segment.tokens.len() - kept + token;
            if let Some(compressor) = &w.compressor {
                let is_c4a = run.config.layers[layer] == LayerKind::C4a;
                let kind = if is_c4a { Compressor::Main4 } else { Compressor::Main128 };
                let state = State { layer, s, kind, weights: compressor, rows: &b.main, token, before };
                let out = &mut segment.staged.layers[layer].main_before;
                state.read(run, out)?;
            }
            if let Some(indexer) = &w.indexer {
                let (kind, weights) = (Compressor::Index4, &indexer.compressor);
                let state = State { layer, s, kind, weights, rows: &b.index, token, before };
                state.read(run, &mut segment.staged.layers[layer].index_before)?;
            }
        }
    }
    Ok(())
}

/// One state to be read.
struct State<'a> {
    layer: usize,
    /// Number of the segment.
    s: usize,
    kind: Compressor,
    weights: &'a super::weights::Compressor,
    /// The compressor's values and gates.
    rows: &'a [Buffer<f32>; 2],
    /// Number of the token among those that can be taken back.
    token: usize,
    /// Tokens of the step before it.
    before: usize,
}

impl State<'_> {
    /// Appends the state before the token to `out`.
    fn read(&self, run: &Run<'_>, out: &mut Vec<f32>) -> Result<()> {
        let [entries, state, _] = kinds(self.kind);
        let of_segment = |kind| {
            let all = run.tables.pages(self.layer, kind)?;
            let pitch = all.len() / run.tables.tables.sequences;
            all.slice(self.s * pitch..(self.s + 1) * pitch)
        };
        let (entry_ids, state_ids) = (of_segment(entries)?, of_segment(state)?);
        let page_bytes = self.kind.page_bytes();
        let pages = |ids, memory| Pages { memory, ids, pitch: ids.len(), page_bytes };
        let memory = &run.pages.memory;
        if self.before == 0 {
            let ids = run.stream.read(&state_ids)?;
            let parts = ids.iter().map(|&id| {
                let start = id as usize * page_bytes;
                run.stream.read(&memory.slice(start..start + page_bytes)?)
            });
            return append(self.kind, parts, out);
        }
        let undo = run.tables.undo(self.s)?;
        let len = self.kind.state_pages() * page_bytes;
        let fresh_ids = undo.pages.slice(0..self.kind.state_pages())?;
        let fresh = run.scratch.undo_state.slice(0..len)?;
        let first = run.tables.tables.first_row(self.s);
        let width = self.kind.width();
        let part = |rows: &Buffer<f32>| rows.slice(first * width..(first + self.before) * width);
        let turns = run.entry_turns(run.config.layers[self.layer])?;
        let compress = Compress {
            kind: self.kind,
            values: &part(&self.rows[0])?,
            gates: &part(&self.rows[1])?,
            ape: &self.weights.ape,
            norm: &self.weights.norm,
            turns: &turns.slice(first * 32..(first + self.before) * 32)?,
            sequence: &undo.zeros.slice(0..self.before)?,
            sequences: &undo.sequences.slice(self.token..self.token + 1)?,
            entries: pages(&entry_ids, memory),
            state: pages(&state_ids, memory),
            fresh: pages(&fresh_ids, &fresh),
            eps: run.config.rms_norm_eps,
        };
        ops::compress(run.stream, &compress)?;
        append(self.kind, std::iter::once(run.stream.read(&fresh)), out)
    }
}

/// Appends a state that runs over `parts`.
fn append(kind: Compressor, parts: impl Iterator<Item = Result<Vec<u8>>>, out: &mut Vec<f32>) -> Result<()> {
    alloc::reserve("rollback states", out, kind.state_len())?;
    let end = out.len() + kind.state_len();
    for part in parts {
        let values = part?;
        let values = values.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        out.extend(values.take(end - out.len()));
    }
    Ok(())
}

/// Where a compressor's entries, state and new state lie.
pub(super) fn kinds(kind: Compressor) -> [Kind; 3] {
    match kind {
        Compressor::Index4 => [Kind::Keys, Kind::Index, Kind::FreshIndex],
        _ => [Kind::Entries, Kind::Main, Kind::FreshMain],
    }
}

/// Hands each segment the window rows that its last tokens are about to overwrite: `[tokens, layers]` of them.
pub(super) fn keep_rows(run: &Run<'_>, segments: &mut [Segment<'_>]) -> Result<()> {
    let (layers, window) = (run.config.num_hidden_layers, run.config.sliding_window);
    for (s, segment) in segments.iter_mut().enumerate() {
        let (kept, start) = (segment.staged.kept(), segment.staged.start);
        if kept == 0 {
            continue;
        }
        let rows = run.scratch.undo_rows.slice(0..kept * layers * ROW_BYTES)?;
        let end = start + segment.tokens.len();
        for (i, position) in (end - kept..end).enumerate() {
            // before the window is full, what lies in the slot is never read, whatever it is
            let overwritten = position.saturating_sub(window);
            for layer in 0..layers {
                let at = (i * layers + layer) * ROW_BYTES;
                let from = match overwritten.checked_sub(start) {
                    Some(row) => {
                        let row = run.tables.tables.first_row(s) + row;
                        run.staged(layer)?.slice(row * ROW_BYTES..(row + 1) * ROW_BYTES)?
                    }
                    None => run.ring_row(segment.cache, layer, overwritten)?,
                };
                run.stream.copy(&from, &rows.slice(at..at + ROW_BYTES)?)?;
            }
        }
        segment.staged.keep_rows(&run.stream.read(&rows)?)?;
    }
    Ok(())
}
