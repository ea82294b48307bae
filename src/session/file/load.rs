//! Restoring: everything in a file is checked before cache memory is taken, and memory that was taken is private until
//! all is there.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use crate::alloc;
use crate::cache::file::{Container, Content, Identity, Section};
use crate::cache::{BLOCK_TOKENS, Block, CacheManager, SequenceCache, State};
use crate::error::Result;

use super::watch::{FileStage, Watch};
use super::{BLOCK_TOKEN_BYTES, block_tokens, kind, next_key};

/// Bytes of a root.
pub(super) const ROOT: u64 = 64;

/// The sections of a session file, with the lengths that its header and position demand.
pub(super) struct Frame {
    /// Where the state stands.
    pub(super) position: usize,
    /// Tokens of the session; those behind the position are pending.
    pub(super) total: usize,
    /// The tokens behind the last full block below the position.
    pub(super) tokens: Vec<u32>,
    pub(super) blocks: Vec<Section>,
    pub(super) tail: Option<Section>,
    pub(super) state: Section,
    pub(super) logits: Option<Section>,
}

impl Frame {
    /// Reads the table of `container`.
    pub(super) fn read(container: &Container) -> Result<Self> {
        container.check_kinds(&kind::ALL)?;
        let Identity { layout, vocab, .. } = &container.header().identity;
        let missing = |what| container.corrupt(format_args!("it has no {what}"));

        let section = container.find(kind::POSITION)?.ok_or_else(|| missing("position"))?;
        let mut reader = container.section(section)?;
        let position = reader.u64()?;
        reader.finish()?;
        let blocks = of_kind(container, kind::BLOCK)?;
        if blocks.len() as u64 != position / BLOCK_TOKENS as u64 {
            return Err(container.corrupt(format_args!("{} blocks for position {position}", blocks.len())));
        }
        // with the blocks counted, the position is known to be as small as the file
        let position = position as usize;
        let mut tokens = Vec::new();
        for section in of_kind(container, kind::TOKENS)? {
            let mut reader = container.section(&section)?;
            let part = reader.words("session tokens", (section.bytes / 4) as usize)?;
            reader.finish()?;
            alloc::reserve("session tokens", &mut tokens, part.len())?;
            tokens.extend(part);
        }
        let total = blocks.len() * BLOCK_TOKENS + tokens.len();
        if position > total {
            return Err(container.corrupt(format_args!("position {position} of {total} tokens")));
        }
        let frame = Self {
            position,
            total,
            tokens,
            blocks,
            tail: container.find(kind::TAIL)?.copied(),
            state: *container.find(kind::STATE)?.ok_or_else(|| missing("state"))?,
            logits: container.find(kind::LOGITS)?.copied(),
        };
        let tail = position % BLOCK_TOKENS;
        if frame.tail.is_some() != (tail > 0) {
            return Err(container.corrupt(format_args!("position {position} and the partial block contradict")));
        }
        let wanted = |section: &Section| match section.kind {
            kind::BLOCK => BLOCK_TOKEN_BYTES + layout.block_content(BLOCK_TOKENS),
            kind::TAIL => layout.block_content(tail),
            kind::STATE => layout.state_content(),
            kind::LOGITS => 4 * *vocab as u64,
            _ => section.bytes,
        };
        match container.sections().iter().find(|section| section.bytes != wanted(section)) {
            Some(wrong) => {
                let (kind, is, should) = (wrong.kind, wrong.bytes, wanted(wrong));
                Err(container.corrupt(format_args!("section {kind} has {is} bytes, not {should}")))
            }
            None => Ok(frame),
        }
    }
}

fn of_kind(container: &Container, kind: u32) -> Result<Vec<Section>> {
    let sections = || container.sections().iter().filter(|section| section.kind == kind);
    let mut found = alloc::with_capacity("file table", sections().count())?;
    found.extend(sections().copied());
    Ok(found)
}

/// A file that is to be restored, with every checksum compared.
pub(super) struct File {
    container: Container,
    frame: Frame,
}

/// A session's parts.
pub(super) struct Loaded {
    /// All tokens, pending ones too.
    pub(super) tokens: Vec<u32>,
    pub(super) cache: SequenceCache,
    pub(super) logits: Vec<f32>,
}

impl File {
    /// Opens and checks the file at `path` for an engine of `identity`.
    pub(super) fn open(path: &Path, identity: &Identity, watch: &mut Watch<'_>) -> Result<Self> {
        let container = Container::open(path, Content::Session)?;
        container.header().identity.check(identity, path)?;
        let frame = Frame::read(&container)?;
        let total = container.sections().iter().map(|section| section.bytes).sum();
        watch.report(FileStage::Check, 0, total)?;
        container.verify_with(&mut |done| watch.report(FileStage::Check, done, total))?;
        if container.has_damaged_root() {
            tracing::warn!(file = %path.display(), "the last save is damaged; the one before it is used");
        }
        Ok(Self { container, frame })
    }

    /// Tokens of the session.
    pub(super) fn total(&self) -> usize {
        self.frame.total
    }

    /// Reads the session into pages of `manager`.
    pub(super) fn load(&self, manager: &Arc<CacheManager>, rollback: usize, watch: &mut Watch<'_>) -> Result<Loaded> {
        let Self { container, frame } = self;
        let rows = frame.blocks.iter().chain(&frame.tail).chain([&frame.state]);
        let (mut done, total) = (0, rows.map(|section| section.bytes).sum());
        watch.report(FileStage::Read, 0, total)?;
        let tokens = self.tokens()?;
        let logits = match &frame.logits {
            Some(section) => {
                let mut reader = container.section(section)?;
                let bits = reader.words("logits", section.bytes as usize / 4)?;
                reader.finish()?;
                bits.into_iter().map(f32::from_bits).collect()
            }
            None => Vec::new(),
        };
        let mut blocks = alloc::with_capacity("block table", frame.blocks.len() + 1)?;
        let mut key = None;
        for (i, section) in frame.blocks.iter().enumerate() {
            let own = block_tokens(&tokens, i);
            let next = next_key(manager.root(), key, own);
            key = Some(next);
            blocks.push(match manager.block(next, own) {
                Some(block) => block,
                None => Arc::new(self.block(manager, section, own)?),
            });
            done += section.bytes;
            watch.report(FileStage::Read, done, total)?;
        }
        if let Some(section) = &frame.tail {
            let mut reader = container.section(section)?;
            let tail = Block::import(manager, frame.position % BLOCK_TOKENS, &mut |bytes| reader.fill(bytes))?;
            reader.finish()?;
            blocks.push(Arc::new(tail));
        }
        let mut reader = container.section(&frame.state)?;
        let state = State::import(manager, frame.position, &mut |bytes| reader.fill(bytes))?;
        reader.finish()?;
        watch.report(FileStage::Read, total, total)?;
        Ok(Loaded { tokens, cache: SequenceCache::from_parts(manager, blocks, Arc::new(state), rollback), logits })
    }

    fn block(&self, manager: &CacheManager, section: &Section, tokens: &[u32]) -> Result<Block> {
        let mut reader = self.container.section(section)?;
        if reader.words("block tokens", BLOCK_TOKENS)? != tokens {
            return Err(self.container.corrupt("somebody else is writing into it"));
        }
        let block = Block::import(manager, BLOCK_TOKENS, &mut |bytes| reader.fill(bytes))?;
        reader.finish()?;
        Ok(block)
    }

    /// All tokens of the session, each one within the vocabulary.
    fn tokens(&self) -> Result<Vec<u32>> {
        let Self { container, frame } = self;
        let mut tokens = alloc::with_capacity("session tokens", frame.total)?;
        for section in &frame.blocks {
            tokens.extend(container.section(section)?.words("block tokens", BLOCK_TOKENS)?);
        }
        tokens.extend_from_slice(&frame.tokens);
        let vocab = container.header().identity.vocab;
        match tokens.iter().position(|&id| id as usize >= vocab) {
            Some(i) => Err(container.corrupt(format_args!("token {i} is {}; the model has {vocab} ids", tokens[i]))),
            None => Ok(tokens),
        }
    }
}
