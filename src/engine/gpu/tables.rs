//! What the kernels of a step must know of its rows, sequences and pages: two lists of words, written by the host. The
//! small one is copied every step; the page tables of entries and keys only when they have changed.
//!
//! Behind the step's rows there may be *idle* ones, so that few numbers of rows occur: each a sequence of its own without
//! pages, whose token is [`IDLE`], at position 0, where it sees no entry.

use std::ops::Range;

use super::DECODE_ROWS;
use super::choices::Choices;
use super::scratch::SPLIT_ROWS;
use crate::alloc;
use crate::backend::cuda::memory::{Buffer, Plain};
use crate::backend::cuda::ops::{DrawWords, EditWords, GROUP_ROWS, Group, IDLE, Sequence};
use crate::cache::{BLOCK_TOKENS, SequenceCache};
use crate::error::{Error, ErrorKind, Result};
use crate::model::config::LayerKind;
use crate::model::deepseek_v4::Segment;

/// Words between which tables begin: the kernels read some of them 16 bytes at a time.
const ALIGNED: usize = 4;

/// Most pages of a compressor's state.
const UNDO_PAGES: usize = 8;

/// Fewest blocks of a page table; longer ones have powers of two, so that a table seldom changes its shape.
const FEWEST_BLOCKS: usize = 4;

/// Blocks of a page table for sequences of up to `blocks`.
pub(super) fn table_blocks(blocks: usize) -> usize {
    blocks.next_power_of_two().max(FEWEST_BLOCKS)
}

/// What the page tables of entries and keys are made from: they change only when this does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PagesKey {
    /// Version of each sequence's table, and its blocks.
    sequences: Vec<(u64, usize)>,
    /// Rows of no sequence behind them.
    idle: usize,
}

impl PagesKey {
    pub(super) fn new(segments: &[Segment<'_>], idle: usize) -> Self {
        Self { sequences: segments.iter().map(|s| (s.cache.version(), s.cache.table_len())).collect(), idle }
    }
}

/// Blocks of each row of the page tables of `segments`.
pub(super) fn pitch(segments: &[Segment<'_>]) -> usize {
    table_blocks(segments.iter().map(|s| s.cache.table_len()).max().unwrap_or(0))
}

/// The small words of a step and where each table lies.
pub(super) struct Tables {
    pub(super) words: Vec<u32>,
    /// With the idle ones.
    pub(super) sequences: usize,
    /// Most new tokens of a sequence.
    pub(super) most_rows: usize,
    /// Blocks of each row of the page tables of entries and keys.
    pitch: usize,
    /// Rows whose logits are computed: those that are wanted, and in a step with idle rows others behind them.
    heads: Range<usize>,
    /// How many are wanted.
    wanted: usize,
    /// `[rows]` each.
    ids: Range<usize>,
    positions: Range<usize>,
    sequence: Range<usize>,
    /// `[sequences]` of [`Sequence`].
    list: Range<usize>,
    /// The same with each sequence's first row counted from that of its launch of attention.
    within_launches: Range<usize>,
    launches: Vec<Launch>,
    /// [`Group`]s of rows, in order.
    groups: Range<usize>,
    group_list: Vec<Group>,
    /// `[layers, sequences, ring pages]`.
    rings: Range<usize>,
    layers: Vec<LayerTables>,
    undo: Vec<UndoTables>,
    first_rows: Vec<usize>,
    draws: Range<usize>,
    edits: Range<usize>,
}

/// Rows of whole, neighbouring sequences whose attention is one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub(super) rows: Range<usize>,
    /// Cuts a query's keys instead of giving each query one block: the order of sums for few rows.
    pub(super) splits: bool,
}

/// The launches of sequences with `counts` rows. How a sequence is treated depends on its own count alone; `invariant`
/// treats all as if they were short.
fn launches(counts: impl Iterator<Item = usize>, invariant: bool) -> Vec<Launch> {
    let mut launches: Vec<Launch> = Vec::new();
    let mut first = 0;
    for count in counts {
        let (rows, splits) = (first..first + count, count <= DECODE_ROWS || invariant);
        first = rows.end;
        match launches.last_mut() {
            Some(last) if last.splits == splits && !(splits && rows.end - last.rows.start > SPLIT_ROWS) => {
                last.rows.end = rows.end;
            }
            _ => launches.push(Launch { rows, splits }),
        }
    }
    launches
}

/// Rows of whole, neighbouring sequences whose products have one order of sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    /// Those of `kernels/chain.cu`, not of `kernels/product.cuh`.
    pub(super) is_prompt: bool,
}

/// The parts of sequences with `counts` rows. What a sequence is depends on its own count alone; without `chains` none is a
/// prompt.
pub(super) fn parts(counts: impl Iterator<Item = usize>, chains: bool) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut first = 0;
    for count in counts {
        let (rows, is_prompt) = (first..first + count, chains && count > DECODE_ROWS);
        first = rows.end;
        match parts.last_mut() {
            Some(last) if last.is_prompt == is_prompt => last.rows.end = rows.end,
            _ => parts.push(Part { rows, is_prompt }),
        }
    }
    parts
}

/// What a segment needs whose last tokens can be taken back: zeros `[tokens]`, the sequence as it is before each of
/// those tokens, and the numbers of a few pages.
#[derive(Default)]
struct UndoTables {
    zeros: Range<usize>,
    sequences: Range<usize>,
    pages: Range<usize>,
}

/// The same on the device.
pub(super) struct Undo {
    pub(super) zeros: Buffer<u32>,
    pub(super) sequences: Buffer<Sequence>,
    pub(super) pages: Buffer<u32>,
}

/// Page tables `[sequences, pitch]` of one layer; empty where a layer has none.
#[derive(Default)]
struct LayerTables {
    entries: Range<usize>,
    keys: Range<usize>,
    main: Range<usize>,
    fresh_main: Range<usize>,
    index: Range<usize>,
    fresh_index: Range<usize>,
}

/// Which pages of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Entries,
    Keys,
    Main,
    FreshMain,
    Index,
    FreshIndex,
}

impl Tables {
    /// Tables of a step whose `wanted` rows get logits, filled up to `captured` rows if that is given: such a step computes
    /// logits for as many rows or none. Those of entries and keys begin at word `pages_at`. All sequences are treated as
    /// short ones if `invariant`.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn new(
        segments: &[Segment<'_>],
        (wanted, choices): (&[u32], &Choices),
        captured: Option<usize>,
        pages_at: usize,
        invariant: bool,
    ) -> Result<Self> {
        let count = segments.iter().map(|s| s.tokens.len()).sum();
        let rows = captured.unwrap_or(count);
        let idle = rows - count;
        let caches: Vec<&SequenceCache> = segments.iter().map(|s| s.cache).collect();
        let all = segments.len() + idle;
        let mut w = Writer { words: Vec::new(), idle };
        let computed = if wanted.is_empty() { 0 } else { captured.unwrap_or(wanted.len()) };
        let heads = w.table(computed, wanted.iter().copied().chain(std::iter::repeat(0)).take(computed))?;
        let idle_of = |value: u32| std::iter::repeat_n(value, idle);
        let ids = w.table(rows, segments.iter().flat_map(|s| s.tokens.iter().copied()).chain(idle_of(IDLE)))?;
        let of_rows = |segment: &Segment<'_>| segment.staged.start..segment.staged.start + segment.tokens.len();
        let positions = w.table(rows, segments.iter().flat_map(of_rows).map(|p| p as u32).chain(idle_of(0)))?;
        let numbers = segments.iter().enumerate().flat_map(|(i, s)| s.tokens.iter().map(move |_| i as u32));
        let sequence = w.table(rows, numbers.chain(segments.len() as u32..all as u32))?;

        let mut sequences = alloc::with_capacity("sequences of a step", all)?;
        let mut group_list = alloc::with_capacity("row groups of a step", rows.div_ceil(GROUP_ROWS) + all)?;
        let mut first_row = 0;
        for (i, s) in segments.iter().enumerate() {
            let (start, count) = (s.staged.start as u32, s.tokens.len() as u32);
            sequences.push(Sequence { start, first_row, rows: count, unused: 0 });
            for first in (0..count).step_by(GROUP_ROWS) {
                let rows = (count - first).min(GROUP_ROWS as u32);
                let (first_row, position) = (first_row + first, start + first);
                group_list.push(Group { sequence: i as u32, first_row, rows, position });
            }
            first_row += count;
        }
        for i in segments.len()..all {
            sequences.push(Sequence { start: 0, first_row, rows: 0, unused: 0 });
            group_list.push(Group { sequence: i as u32, first_row, rows: 1, position: 0 });
            first_row += 1;
        }
        let flat = sequences.iter().flat_map(|s: &Sequence| [s.start, s.first_row, s.rows, s.unused]);
        let list = w.table(4 * sequences.len(), flat)?;
        let counts = segments.iter().map(|s| s.tokens.len());
        let most_rows = counts.clone().max().unwrap_or(0);
        let launches = launches(counts.chain(std::iter::repeat_n(1, idle)), invariant);
        let flat = sequences.iter().flat_map(|s: &Sequence| {
            let row = s.first_row as usize;
            let launch =
                launches.iter().find(|launch| launch.rows.contains(&row)).map_or(0, |launch| launch.rows.start);
            [s.start, s.first_row - launch as u32, s.rows, s.unused]
        });
        let within_launches = w.table(4 * sequences.len(), flat)?;
        let flat = group_list.iter().flat_map(|g: &Group| [g.sequence, g.first_row, g.rows, g.position]);
        let groups = w.table(4 * group_list.len(), flat)?;

        let Some(layout) = caches.first().map(|cache| cache.layout()) else {
            return Err(Error::new(ErrorKind::InvalidArgument, "a step without sequences"));
        };
        let ring_pages = layout.ring_pages();
        let of_layer = |layer| {
            let ids = caches.iter().flat_map(move |c| c.ring_ids(layer));
            ids.chain(std::iter::repeat_n(0, idle * ring_pages))
        };
        let of_layers = (0..layout.layers.len()).flat_map(of_layer);
        let rings = w.table(layout.layers.len() * all * ring_pages, of_layers)?;
        let pitch = pitch(segments);
        let mut layers = alloc::with_capacity("layer tables", layout.layers.len())?;
        let mut pages = pages_at;
        let mut next = |tables: usize| {
            let start = pages;
            pages += tables * pitch * all;
            start..pages
        };
        for (i, layer) in layout.layers.iter().enumerate() {
            let mut t = LayerTables::default();
            if layer.kind != LayerKind::Window {
                t.entries = next(1);
                t.main = w.equal(&caches, |c| c.main_state_ids(i))?;
                t.fresh_main = w.equal(&caches, |c| c.fresh_main_ids(i))?;
            }
            if layer.kind == LayerKind::C4a {
                t.keys = next(1);
                t.index = w.equal(&caches, |c| c.index_state_ids(i))?;
                t.fresh_index = w.equal(&caches, |c| c.fresh_index_ids(i))?;
            }
            layers.push(t);
        }
        let mut undo = alloc::with_capacity("rollback tables", segments.len())?;
        for s in segments {
            undo.push(w.undo(s)?);
        }
        // last, so that they move nothing that a captured step reads
        let draws = w.table(choices.draws.as_flattened().len(), choices.draws.as_flattened().iter().copied())?;
        let edits = w.table(choices.edits.as_flattened().len(), choices.edits.as_flattened().iter().copied())?;
        let words = w.words;
        let first_rows = sequences.iter().map(|s| s.first_row as usize).collect();
        let (sequences, wanted) = (all, wanted.len());
        Ok(Self {
            words,
            sequences,
            most_rows,
            pitch,
            heads,
            wanted,
            ids,
            positions,
            sequence,
            list,
            within_launches,
            launches,
            groups,
            group_list,
            rings,
            layers,
            undo,
            first_rows,
            draws,
            edits,
        })
    }

    /// Launches of attention, in order.
    pub(super) fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// Number of rows whose logits are wanted.
    pub(super) fn wanted(&self) -> usize {
        self.wanted
    }

    /// Number of rows whose logits a step computes that goes through all rows alike.
    pub(super) fn heads(&self) -> usize {
        self.heads.len()
    }

    /// Page tables of entries and keys, in the order of the layers: `[tables, sequences, pitch]`. Behind a sequence's last
    /// block they are padded with what is never read.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn page_words(&self, segments: &[Segment<'_>]) -> Result<Vec<u32>> {
        let tables = self.layers.iter().flat_map(|t| [&t.entries, &t.keys]).map(Range::len);
        let mut words = alloc::with_capacity("page tables of a step", tables.sum())?;
        for (i, t) in self.layers.iter().enumerate() {
            let first = words.len();
            for segment in segments.iter().filter(|_| !t.entries.is_empty()) {
                words.extend(segment.cache.entry_ids(i).chain(std::iter::repeat(0)).take(self.pitch));
            }
            words.resize(first + t.entries.len(), 0);
            for segment in segments.iter().filter(|_| !t.keys.is_empty()) {
                words.extend(segment.cache.key_ids(i).chain(std::iter::repeat(0)).take(self.pitch));
            }
            words.resize(first + t.entries.len() + t.keys.len(), 0);
        }
        Ok(words)
    }

    /// Bound of the entries of ratio 4 that a row sees: those of the page tables' blocks.
    pub(super) fn visible(&self) -> usize {
        self.pitch * BLOCK_TOKENS / LayerKind::C4a.ratio()
    }

    /// Most keys that a row's attention meets: the window and entries of either ratio, `top_k` of ratio 4 at most.
    pub(super) fn most_keys(&self, kind: LayerKind, window: usize, top_k: usize) -> usize {
        let entries = match kind {
            LayerKind::Window => 0,
            LayerKind::C4a => self.visible().min(top_k),
            LayerKind::C128a => self.visible() / 32,
        };
        window + entries
    }

    /// Runs of groups with at most `most` rows, at least one group each.
    pub(super) fn slices(&self, most: usize) -> Vec<Range<usize>> {
        let mut slices: Vec<Range<usize>> = Vec::new();
        let mut rows = 0;
        for (i, group) in self.group_list.iter().enumerate() {
            let count = group.rows as usize;
            match slices.last_mut() {
                Some(slice) if rows + count <= most => {
                    slice.end = i + 1;
                    rows += count;
                }
                _ => {
                    slices.push(i..i + 1);
                    rows = count;
                }
            }
        }
        slices
    }

    /// The step's first row of segment `s`.
    pub(super) fn first_row(&self, s: usize) -> usize {
        self.first_rows[s]
    }

    /// Rows of a run of groups.
    pub(super) fn rows_of(&self, groups: &Range<usize>) -> Range<usize> {
        let (first, last) = (&self.group_list[groups.start], &self.group_list[groups.end - 1]);
        first.first_row as usize..(last.first_row + last.rows) as usize
    }

    /// The tables within `words` on the device.
    pub(super) fn on<'a>(&'a self, words: &'a Buffer<u32>) -> OnDevice<'a> {
        OnDevice { tables: self, words, ids: self.ids.clone() }
    }
}

/// Tables on the device.
#[derive(Clone)]
pub(super) struct OnDevice<'a> {
    pub(super) tables: &'a Tables,
    words: &'a Buffer<u32>,
    ids: Range<usize>,
}

impl OnDevice<'_> {
    /// The same with the token ids of some rows.
    pub(super) fn with_ids_of(&self, rows: &Range<usize>) -> Self {
        Self { ids: self.ids.start + rows.start..self.ids.start + rows.end, ..self.clone() }
    }

    /// Rows `part` of those whose logits are computed, the wanted ones first.
    pub(super) fn wanted(&self, part: Range<usize>) -> Result<Buffer<u32>> {
        let first = self.tables.heads.start;
        self.words.slice(first + part.start..first + part.end)
    }

    pub(super) fn ids(&self) -> Result<Buffer<u32>> {
        self.words.slice(self.ids.clone())
    }

    pub(super) fn positions(&self) -> Result<Buffer<u32>> {
        self.words.slice(self.tables.positions.clone())
    }

    pub(super) fn sequence(&self) -> Result<Buffer<u32>> {
        self.words.slice(self.tables.sequence.clone())
    }

    pub(super) fn sequences(&self) -> Result<Buffer<Sequence>> {
        self.structs(&self.tables.list, 0..self.tables.sequences)
    }

    /// The sequences as a launch of attention takes them.
    pub(super) fn sequences_within_launches(&self) -> Result<Buffer<Sequence>> {
        self.structs(&self.tables.within_launches, 0..self.tables.sequences)
    }

    /// Draws `which` of the step.
    pub(super) fn draws(&self, which: Range<usize>) -> Result<Buffer<DrawWords>> {
        self.structs(&self.tables.draws, which)
    }

    /// Edits of all draws.
    pub(super) fn edits(&self) -> Result<Buffer<EditWords>> {
        let count = self.tables.edits.len() * size_of::<u32>() / size_of::<EditWords>();
        self.structs(&self.tables.edits, 0..count)
    }

    pub(super) fn groups(&self, which: Range<usize>) -> Result<Buffer<Group>> {
        self.structs(&self.tables.groups, which)
    }

    /// Ring pages of all layers `[layers, sequences, ring pages]`.
    pub(super) fn rings(&self) -> Result<Buffer<u32>> {
        self.words.slice(self.tables.rings.clone())
    }

    /// Ring pages of one layer `[sequences, ring pages]`.
    pub(super) fn ring(&self, layer: usize) -> Result<Buffer<u32>> {
        let all = &self.tables.rings;
        let len = all.len() / self.tables.layers.len();
        self.words.slice(all.start + layer * len..all.start + (layer + 1) * len)
    }

    /// Pages of one layer `[sequences, pitch]`.
    pub(super) fn pages(&self, layer: usize, kind: Kind) -> Result<Buffer<u32>> {
        let t = &self.tables.layers[layer];
        let range = match kind {
            Kind::Entries => &t.entries,
            Kind::Keys => &t.keys,
            Kind::Main => &t.main,
            Kind::FreshMain => &t.fresh_main,
            Kind::Index => &t.index,
            Kind::FreshIndex => &t.fresh_index,
        };
        self.words.slice(range.clone())
    }

    pub(super) fn undo(&self, s: usize) -> Result<Undo> {
        let t = &self.tables.undo[s];
        let count = t.sequences.len() * size_of::<u32>() / size_of::<Sequence>();
        Ok(Undo {
            zeros: self.words.slice(t.zeros.clone())?,
            sequences: self.structs(&t.sequences, 0..count)?,
            pages: self.words.slice(t.pages.clone())?,
        })
    }

    fn structs<T: Plain>(&self, table: &Range<usize>, which: Range<usize>) -> Result<Buffer<T>> {
        let words = size_of::<T>() / size_of::<u32>();
        self.words.slice(table.start + which.start * words..table.start + which.end * words)?.cast()
    }
}

struct Writer {
    words: Vec<u32>,
    idle: usize,
}

impl Writer {
    /// Appends `len` words.
    fn table(&mut self, len: usize, values: impl Iterator<Item = u32>) -> Result<Range<usize>> {
        let start = self.words.len().next_multiple_of(ALIGNED);
        let more = start - self.words.len() + len;
        alloc::reserve("tables of a step", &mut self.words, more)?;
        self.words.resize(start, 0);
        self.words.extend(values);
        debug_assert_eq!(self.words.len(), start + len, "a table has the length that was said");
        Ok(start..start + len)
    }

    fn undo(&mut self, s: &Segment<'_>) -> Result<UndoTables> {
        let (kept, count) = (s.staged.kept(), s.tokens.len());
        if kept == 0 {
            return Ok(UndoTables::default());
        }
        let start = s.staged.start as u32;
        let before = (count - kept..count).flat_map(|rows| [start, 0, rows as u32, 0]);
        Ok(UndoTables {
            zeros: self.table(count, std::iter::repeat_n(0, count))?,
            sequences: self.table(4 * kept, before)?,
            pages: self.table(UNDO_PAGES, 0..UNDO_PAGES as u32)?,
        })
    }

    /// Appends the lists of all sequences, which have one length, and zeros for the idle ones.
    fn equal<'a, I: Iterator<Item = u32>>(
        &mut self,
        caches: &[&'a SequenceCache],
        list: impl Fn(&'a SequenceCache) -> I,
    ) -> Result<Range<usize>> {
        let idle = self.idle * caches.first().map_or(0, |c| list(c).count());
        let len = caches.iter().map(|c| list(c).count()).sum::<usize>() + idle;
        self.table(len, caches.iter().flat_map(|c| list(c)).chain(std::iter::repeat_n(0, idle)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_is_treated_alike_whatever_is_beside_it() {
        let of = |counts: &[usize], invariant| launches(counts.iter().copied(), invariant);
        let launch = |rows, splits| Launch { rows, splits };
        assert_eq!(of(&[1; 64], false), [launch(0..64, true)]);
        assert_eq!(of(&[1; 80], false), [launch(0..64, true), launch(64..80, true)]);
        assert_eq!(of(&[1, 8, 9, 500], false), [launch(0..9, true), launch(9..518, false)]);
        assert_eq!(
            of(&[500, 1, 500], false),
            [launch(0..500, false), launch(500..501, true), launch(501..1001, false)]
        );
        assert_eq!(of(&[60, 3, 2], true), [launch(0..63, true), launch(63..65, true)], "whole sequences");
    }

    #[test]
    fn a_sequence_is_a_prompt_whatever_is_beside_it() {
        let part = |rows, is_prompt| Part { rows, is_prompt };
        let (counts, chains) = ([1, DECODE_ROWS, DECODE_ROWS + 1, 500, 1], true);
        let (short, end) = (1 + DECODE_ROWS, 502 + 2 * DECODE_ROWS);
        let want = [part(0..short, false), part(short..end, true), part(end..end + 1, false)];
        assert_eq!(parts(counts.into_iter(), chains), want);
        assert_eq!(parts(counts.into_iter(), false), [part(0..end + 1, false)]);
        assert_eq!(parts(std::iter::empty(), chains), []);
    }
}
