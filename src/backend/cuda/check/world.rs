//! Sequences, pages and steps with random content, the same on both sides.

use std::sync::Arc;

use super::dense::YARN;
use super::lab::Lab;
use crate::backend::cpu::rope::{Rotations, frequencies};
use crate::backend::cuda::memory::Buffer;
use crate::backend::cuda::ops::{self, Compressor, HEAD_DIM, INDEX_DIM, KEY_BYTES, Pages, ROW_BYTES, Sequence};
use crate::cache::{CacheLayout, CacheManager, CacheOptions, KvFormat, LayerLayout, SequenceCache, Staged};
use crate::error::Result;
use crate::model::config::LayerKind;

pub(super) const WIDE: usize = 64 * ROW_BYTES;
pub(super) const INDEX: usize = 64 * KEY_BYTES;
pub(super) const NARROW: usize = 2 * ROW_BYTES;

pub(super) fn layout(kind: LayerKind, window: usize) -> CacheLayout {
    let state = |c: Compressor| c.state_len();
    let (main_state, index_state) = match kind {
        LayerKind::Window => (0, 0),
        LayerKind::C4a => (state(Compressor::Main4), state(Compressor::Index4)),
        LayerKind::C128a => (state(Compressor::Main128), 0),
    };
    CacheLayout {
        format: KvFormat::Fp8,
        head_dim: HEAD_DIM,
        rope_dim: 64,
        index_dim: INDEX_DIM,
        window,
        layers: vec![LayerLayout { kind, main_state, index_state }],
    }
}

/// Pages of several sequences at scattered places of one bucket; unused memory is poison.
pub(super) struct Table {
    pub(super) memory: Vec<u8>,
    pub(super) ids: Vec<u32>,
    pub(super) pitch: usize,
    pub(super) page_bytes: usize,
}

impl Table {
    pub(super) fn new(lab: &mut Lab<'_>, sequences: usize, pitch: usize, page_bytes: usize) -> Self {
        let count = 2 * sequences * pitch + 3;
        let mut all: Vec<u32> = (0..count as u32).collect();
        for i in 0..sequences * pitch {
            let other = i + lab.below(count - i);
            all.swap(i, other);
        }
        Self { memory: vec![0xFF; count * page_bytes], ids: all[..sequences * pitch].to_vec(), pitch, page_bytes }
    }

    pub(super) fn at(&self, sequence: usize, page: usize) -> usize {
        self.ids[sequence * self.pitch + page] as usize * self.page_bytes
    }

    pub(super) fn set(&mut self, sequence: usize, j: usize, per_page: usize, bytes: &[u8]) {
        let at = self.at(sequence, j / per_page) + j % per_page * bytes.len();
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn get(&self, sequence: usize, j: usize, per_page: usize, len: usize) -> &[u8] {
        &self.memory[self.at(sequence, j / per_page) + j % per_page * len..][..len]
    }

    pub(super) fn set_floats(&mut self, sequence: usize, values: &[f32]) {
        for (page, part) in values.chunks(self.page_bytes / 4).enumerate() {
            let at = self.at(sequence, page);
            for (bytes, v) in self.memory[at..].chunks_exact_mut(4).zip(part) {
                bytes.copy_from_slice(&v.to_le_bytes());
            }
        }
    }

    pub(super) fn floats(&self, sequence: usize, len: usize) -> Vec<f32> {
        let per_page = self.page_bytes / 4;
        (0..len)
            .map(|i| {
                let at = self.at(sequence, i / per_page) + i % per_page * 4;
                f32::from_le_bytes(std::array::from_fn(|b| self.memory[at + b]))
            })
            .collect()
    }

    pub(super) fn put(&self, lab: &mut Lab<'_>) -> Result<(Buffer<u8>, Buffer<u32>)> {
        Ok((lab.put(&self.memory)?, lab.put(&self.ids)?))
    }

    pub(super) fn pages<'a>(&self, on_device: &'a (Buffer<u8>, Buffer<u32>)) -> Pages<'a> {
        Pages { memory: &on_device.0, ids: &on_device.1, pitch: self.pitch, page_bytes: self.page_bytes }
    }
}

/// Rows of several sequences.
pub(super) struct Step {
    pub(super) sequences: Vec<Sequence>,
    /// Sequence and position of each row.
    pub(super) rows: Vec<(usize, usize)>,
    pub(super) d_sequence: Buffer<u32>,
    pub(super) d_sequences: Buffer<Sequence>,
    pub(super) d_positions: Buffer<u32>,
    pub(super) turns: Buffer<[f32; 2]>,
}

impl Step {
    /// `(start, rows)` of each sequence.
    pub(super) fn new(lab: &mut Lab<'_>, parts: &[(usize, usize)]) -> Result<Self> {
        let (mut sequences, mut rows) = (Vec::new(), Vec::new());
        for (s, &(start, count)) in parts.iter().enumerate() {
            let first_row = rows.len() as u32;
            sequences.push(Sequence { start: start as u32, first_row, rows: count as u32, unused: 0 });
            rows.extend((start..start + count).map(|p| (s, p)));
        }
        let d_sequence = lab.put(&rows.iter().map(|r| r.0 as u32).collect::<Vec<_>>())?;
        let d_sequences = lab.put(&sequences)?;
        let d_positions = lab.put(&rows.iter().map(|r| r.1 as u32).collect::<Vec<_>>())?;
        let turns = lab.output(4 * rows.len() * 32)?;
        let (plain, yarn) =
            (lab.put(&frequencies(64, 10_000.0, None))?, lab.put(&frequencies(64, 160_000.0, Some(&YARN)))?);
        ops::rotations(&lab.stream, &d_positions, &plain, &yarn, &turns)?;
        Ok(Self { sequences, rows, d_sequence, d_sequences, d_positions, turns })
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Table 0 to 3 of [`ops::rotations`].
    pub(super) fn turns(&self, table: usize) -> Result<Buffer<[f32; 2]>> {
        let n = self.len() * 32;
        self.turns.slice(table * n..(table + 1) * n)
    }
}

pub(super) fn yarn_rotations(positions: &[usize]) -> Result<Rotations> {
    Rotations::new(&frequencies(64, 160_000.0, Some(&YARN)), positions.iter().copied())
}

/// A sequence with random rows, entries and keys, in the CPU's cache.
pub(super) struct Scene {
    pub(super) cache: SequenceCache,
    pub(super) staged: Staged,
}

/// Builds the same random cache on both sides: CPU sequences, and pages of ring, entries and keys, and the staged rows.
pub(super) struct World {
    pub(super) scenes: Vec<Scene>,
    pub(super) ring: Table,
    pub(super) entries: Table,
    pub(super) keys: Table,
    pub(super) staged: Vec<u8>,
}

impl World {
    pub(super) fn new(lab: &mut Lab<'_>, kind: LayerKind, window: usize, parts: &[(usize, usize)]) -> Result<Self> {
        let layout = layout(kind, window);
        let manager: Arc<CacheManager> =
            CacheManager::new(layout.clone(), CacheOptions { poison: true, ..CacheOptions::PRIVATE }, b"");
        let most = parts.iter().map(|p| p.0 + p.1).max().unwrap_or(0);
        let (per_page, page_bytes) = if kind == LayerKind::C128a { (2, NARROW) } else { (64, WIDE) };
        let ratio = kind.ratio().max(1);
        let mut world = Self {
            scenes: Vec::new(),
            ring: Table::new(lab, parts.len(), window.div_ceil(64), WIDE),
            entries: Table::new(lab, parts.len(), (most / ratio + 1).div_ceil(per_page), page_bytes),
            keys: Table::new(lab, parts.len(), (most / ratio + 1).div_ceil(64), INDEX),
            staged: Vec::new(),
        };
        for (s, &(start, rows)) in parts.iter().enumerate() {
            let mut cache = SequenceCache::new(&manager, 0)?;
            let mut staged = None;
            for (first, count) in [(0, start), (start, rows)] {
                if let Some(staged) = staged.take() {
                    cache.commit(staged);
                }
                let mut part = cache.stage(count)?;
                let layer = &mut part.layers[0];
                for (i, out) in layer.rows.chunks_exact_mut(ROW_BYTES).enumerate() {
                    layout.encode_row(&lab.normal(HEAD_DIM, 1.0), out);
                    let position = first + i;
                    if position < start {
                        world.ring.set(s, position % window, 64, out);
                    } else {
                        world.staged.extend_from_slice(out);
                    }
                }
                if kind != LayerKind::Window {
                    for j in first / ratio..(first + count) / ratio {
                        let mut row = vec![0; ROW_BYTES];
                        layout.encode_row(&lab.normal(HEAD_DIM, 1.0), &mut row);
                        world.entries.set(s, j, per_page, &row);
                        layer.entries.extend(row);
                        if kind == LayerKind::C4a {
                            let mut key = vec![0; KEY_BYTES];
                            layout.encode_key(&lab.normal(INDEX_DIM, 1.0), &mut key);
                            world.keys.set(s, j, 64, &key);
                            layer.keys.extend(key);
                        }
                    }
                }
                staged = Some(part);
            }
            let staged = staged.expect("the loop ran");
            world.scenes.push(Scene { cache, staged });
        }
        Ok(world)
    }
}
