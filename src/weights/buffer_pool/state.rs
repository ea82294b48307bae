//! Which piece is in which frame, what is read next, and what has to go.
//!
//! A piece that somebody needs is pinned and never goes. Of the others, one goes whose uses count least, where older ones
//! count less: in the same power of two the one that was used last. For in a pass over all pieces, as a long prompt is
//! one, what was used last is needed last; and what is read again and again has a higher power.
//!
//! Plain data under the pool's lock; nothing here waits or reads.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::{Loaded, PoolStats};
use crate::alloc;
use crate::error::{Error, Result};
use crate::weights::mmap::Anonymous;

/// A use counts half when so many uses of each piece, on average, have followed.
const HALF_LIFE: f64 = 8.0;
/// Scores are scaled down when one use counts so much.
const MOST: f64 = 1e200;

/// The frames and all that is wanted of them.
pub(super) struct State {
    pieces: Vec<Piece>,
    of_group: usize,
    frames: Vec<Frame>,
    /// Pieces that are needed and have no frame yet, in order.
    waiting: VecDeque<usize>,
    /// Frames to be read into, for those who wait; what is under way or done by now is passed over.
    needed: VecDeque<usize>,
    /// The same, for those who will ask.
    ahead: VecDeque<usize>,
    /// What a use counts now, and its growth from use to use.
    worth: f64,
    growth: f64,
    uses: u64,
    expectations: u64,
    stats: PoolStats,
    is_closing: bool,
}

#[derive(Clone, Default)]
struct Piece {
    frame: Option<usize>,
    /// How many need it.
    pins: usize,
    /// Why it could not be read, for those who needed it then.
    failure: Option<Box<Error>>,
    /// What its uses count.
    score: f64,
    /// The number of its last use.
    last: u64,
}

struct Frame {
    piece: Option<usize>,
    content: Content,
    /// Whether its piece will be asked for: when that was said.
    expected: Option<u64>,
}

enum Content {
    Empty(Anonymous),
    /// To be read.
    Queued(Anonymous),
    /// A reader has it.
    Reading,
    Loaded(Arc<Loaded>),
}

impl State {
    pub(super) fn new(pieces: usize, of_group: usize, memory: Vec<Anonymous>, stats: PoolStats) -> Result<Self> {
        let what = "the list of experts";
        let mut list = alloc::with_capacity(what, pieces)?;
        list.resize(pieces, Piece::default());
        let mut frames = alloc::with_capacity(what, memory.len())?;
        frames.extend(memory.into_iter().map(|memory| Frame {
            piece: None,
            content: Content::Empty(memory),
            expected: None,
        }));
        Ok(Self {
            pieces: list,
            of_group,
            frames,
            waiting: VecDeque::new(),
            needed: VecDeque::new(),
            ahead: VecDeque::new(),
            worth: 1.0,
            growth: (1.0 / (HALF_LIFE * pieces as f64)).exp2(),
            uses: 0,
            expectations: 0,
            stats,
            is_closing: false,
        })
    }

    /// Somebody needs `members` of `group`, until they are unpinned.
    pub(super) fn ask(&mut self, group: usize, members: &[usize]) {
        for &member in members {
            let piece = self.number(group, member);
            self.count_use(piece);
            let Piece { frame, pins, failure, .. } = &mut self.pieces[piece];
            *pins += 1;
            let is_first = *pins == 1;
            match frame.map(|frame| (frame, &self.frames[frame].content)) {
                Some((_, Content::Loaded(_))) => {
                    self.stats.hits += 1;
                    continue;
                }
                // it may be behind others in the other queue
                Some((frame, Content::Queued(_))) => self.needed.push_back(frame),
                None if is_first || failure.take().is_some() => self.waiting.push_back(piece),
                _ => {}
            }
            self.stats.misses += 1;
        }
        for frame in &mut self.frames {
            if frame.piece.is_some_and(|piece| piece / self.of_group == group) {
                frame.expected = None;
            }
        }
        self.assign();
    }

    /// Somebody will ask for a member of `group`; whether there may be room for more.
    pub(super) fn expect(&mut self, group: usize, member: usize) -> bool {
        let piece = self.number(group, member);
        self.expectations += 1;
        if let Some(frame) = self.pieces[piece].frame {
            self.frames[frame].expected.get_or_insert(self.expectations);
        } else if self.pieces[piece].pins == 0 {
            let Some(frame) = self.victim(false) else { return false };
            self.bind(frame, piece);
            self.frames[frame].expected = Some(self.expectations);
            self.ahead.push_back(frame);
            self.stats.read_ahead += 1;
        }
        true
    }

    /// A member of `group`, if it is in memory.
    pub(super) fn loaded(&self, group: usize, member: usize) -> Option<Arc<Loaded>> {
        let frame = self.pieces[self.number(group, member)].frame?;
        match &self.frames[frame].content {
            Content::Loaded(loaded) => Some(Arc::clone(loaded)),
            _ => None,
        }
    }

    /// Why a member of `group` could not be read.
    pub(super) fn failure(&self, group: usize, member: usize) -> Option<Error> {
        self.pieces[self.number(group, member)].failure.as_deref().cloned()
    }

    /// `members` of `group` are needed by one less, who has given the memory back.
    pub(super) fn unpin(&mut self, group: usize, members: &[usize]) {
        for &member in members {
            let piece = self.number(group, member);
            let piece = &mut self.pieces[piece];
            piece.pins -= 1;
            if piece.pins == 0 {
                piece.failure = None;
            }
        }
        self.assign();
    }

    /// A frame to read into, and its piece; it is with the reader then.
    pub(super) fn next_read(&mut self) -> Option<(usize, usize, Anonymous)> {
        while let Some(number) = self.needed.pop_front().or_else(|| self.ahead.pop_front()) {
            let frame = &mut self.frames[number];
            match (std::mem::replace(&mut frame.content, Content::Reading), frame.piece) {
                (Content::Queued(memory), Some(piece)) if !self.is_closing => return Some((number, piece, memory)),
                (content, _) => frame.content = content,
            }
        }
        None
    }

    /// A reader is done with a frame: the places of tensors in it and the bytes read, or why not.
    pub(super) fn finish(&mut self, number: usize, memory: Anonymous, read: Result<(Vec<Range<usize>>, u64)>) {
        let frame = &mut self.frames[number];
        match read {
            Ok((places, bytes)) => {
                self.stats.read_bytes += bytes;
                frame.content = Content::Loaded(Arc::new(Loaded { memory, places }));
            }
            Err(error) => {
                frame.content = Content::Empty(memory);
                frame.expected = None;
                if let Some(piece) = frame.piece.take().map(|piece| &mut self.pieces[piece]) {
                    piece.frame = None;
                    piece.failure = (piece.pins > 0).then(|| Box::new(error));
                }
            }
        }
        self.assign();
    }

    pub(super) fn count_wait(&mut self, time: Duration) {
        self.stats.wait_nanos += u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    }

    pub(super) fn stats(&self) -> PoolStats {
        PoolStats { used_frames: self.frames.iter().filter(|frame| frame.piece.is_some()).count() as u64, ..self.stats }
    }

    /// Nothing more is read.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing
    }

    fn number(&self, group: usize, member: usize) -> usize {
        group * self.of_group + member
    }

    /// Gives frames to those that wait for one, as far as some may go.
    fn assign(&mut self) {
        while let Some(&piece) = self.waiting.front() {
            let Piece { frame, pins, .. } = self.pieces[piece];
            if pins > 0 && frame.is_none() {
                let Some(victim) = self.victim(true) else { return };
                self.bind(victim, piece);
                self.needed.push_back(victim);
            }
            self.waiting.pop_front();
        }
    }

    /// The frame whose piece is to go; one that is expected only if there is no other and it may, the last one first.
    fn victim(&self, may_be_expected: bool) -> Option<usize> {
        let candidates = (0..self.frames.len()).filter_map(|number| {
            let frame = &self.frames[number];
            let Some(piece) = frame.piece.map(|piece| &self.pieces[piece]) else {
                return Some((false, None, Reverse(u64::MAX), number));
            };
            let may_go = piece.pins == 0
                && (may_be_expected || frame.expected.is_none())
                && matches!(frame.content, Content::Loaded(_) | Content::Queued(_));
            // without any use it is the least of all
            let score = frame.expected.is_none().then(|| piece.score.log2().floor() as i32);
            may_go.then(|| (frame.expected.is_some(), score, Reverse(frame.expected.unwrap_or(piece.last)), number))
        });
        candidates.min().map(|(.., number)| number)
    }

    /// Has a frame that may go hold `piece`, which is to be read.
    fn bind(&mut self, number: usize, piece: usize) {
        let frame = &mut self.frames[number];
        frame.content = match std::mem::replace(&mut frame.content, Content::Reading) {
            Content::Empty(memory) | Content::Queued(memory) => Content::Queued(memory),
            Content::Loaded(loaded) => {
                let loaded = Arc::into_inner(loaded).expect("whoever uses a piece has it pinned");
                Content::Queued(loaded.memory)
            }
            Content::Reading => unreachable!("what is being read may not go"),
        };
        if let Some(before) = frame.piece.replace(piece) {
            self.pieces[before].frame = None;
        }
        frame.expected = None;
        self.pieces[piece].frame = Some(number);
    }

    fn count_use(&mut self, piece: usize) {
        self.uses += 1;
        self.worth *= self.growth;
        if self.worth > MOST {
            let worth = self.worth;
            self.pieces.iter_mut().for_each(|piece| piece.score /= worth);
            self.worth = 1.0;
        }
        let piece = &mut self.pieces[piece];
        piece.score += self.worth;
        piece.last = self.uses;
    }
}

#[cfg(test)]
mod tests;
