//! Saving: what a file gets, and whether as a new file or as an addition.
#![forbid(unsafe_code)]

use std::path::Path;

use crate::alloc;
use crate::cache::file::{Container, Content, Header, Identity, SectionWriter, Writer, check_replaceable, resolve};
use crate::cache::{BLOCK_TOKENS, SequenceCache};
use crate::error::{ErrorKind, Result};

use super::load::{self, Frame};
use super::watch::{FileStage, Watch};
use super::{BLOCK_TOKEN_BYTES, Saved, block_tokens, kind};

/// Bytes of a section's entry in the table.
const ENTRY: u64 = 32;
/// Most sections of pending tokens; after these, one is written for all of them.
const MOST_PARTS: usize = 64;

/// Everything of a session that is saved.
pub(super) struct Image<'a> {
    pub(super) identity: &'a Identity,
    pub(super) tokens: &'a [u32],
    pub(super) cache: &'a SequenceCache,
    pub(super) logits: &'a [f32],
}

/// A file that may be added to, compared with a session.
struct Stored {
    container: Container,
    frame: Frame,
    /// Full blocks that are the session's, from the beginning.
    shared: usize,
    /// The file's state stands behind a beginning of the session.
    is_beginning: bool,
    /// All its tokens are a beginning of the session's.
    is_prefix: bool,
    /// The file has exactly the session's tokens.
    is_same: bool,
}

impl Stored {
    /// Bytes that were written to the file since it was made, and the next root.
    fn spent(&self) -> u64 {
        self.container.end() + self.container.generation() * load::ROOT
    }

    /// Tokens in the file that an addition of tokens alone leaves where they are.
    fn kept(&self) -> usize {
        let is_whole = self.is_prefix && self.container.added().len() < MOST_PARTS;
        if is_whole { self.frame.total } else { self.frame.position }
    }
}

impl Image<'_> {
    /// Saves to `path`; see [`super::Session::save`].
    pub(super) fn save(&self, path: &Path, complete: bool, watch: &mut Watch<'_>) -> Result<Saved> {
        let path = resolve(path)?;
        let Some(stored) = self.stored(&path)? else { return self.replace(&path, watch) };
        let has_state = stored.frame.position == self.tokens.len();
        let has_logits = stored.frame.logits.is_some() || self.logits.is_empty();
        let pending = self.tokens.len().saturating_sub(stored.frame.position);
        if stored.is_same && if has_state { has_logits } else { !complete } {
            return Ok(Saved { written: 0, file_bytes: stored.container.file_bytes(), pending });
        }
        let (limit, spent) = (2 * self.bytes(), stored.spent());
        if spent + self.addition(&stored) <= limit {
            return self.append(stored, watch);
        }
        if !complete && stored.is_beginning && stored.container.folded().is_some() && pending > 0 {
            let tokens = 4 * (self.tokens.len() - stored.kept()) + ENTRY as usize * (MOST_PARTS + 2);
            if spent + tokens as u64 <= limit {
                return self.append_tokens(stored, watch);
            }
        }
        drop(stored);
        self.replace(&path, watch)
    }

    /// The file at `path`, if it is one that could be added to; `None` if a new one may take its place.
    fn stored(&self, path: &Path) -> Result<Option<Stored>> {
        let opened = Container::open_to_append(path, Content::Session).and_then(|container| {
            container.header().identity.check(self.identity, path)?;
            let frame = Frame::read(&container)?;
            self.compare(container, frame)
        });
        match opened {
            Ok(stored) => Ok(Some(stored)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Mismatch) => {
                check_replaceable(path)?;
                tracing::info!("a session file is replaced: {e}");
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    fn compare(&self, container: Container, frame: Frame) -> Result<Stored> {
        let mut shared = 0;
        for section in frame.blocks.iter().take(self.tokens.len() / BLOCK_TOKENS) {
            // what equals our tokens needs no checksum
            let stored = container.section(section)?.words("block tokens", BLOCK_TOKENS)?;
            if stored != block_tokens(self.tokens, shared) {
                break;
            }
            shared += 1;
        }
        let base = frame.position / BLOCK_TOKENS * BLOCK_TOKENS;
        let behind = |end: usize| self.tokens.get(base..end) == frame.tokens.get(..end - base);
        let is_beginning = shared == frame.blocks.len() && behind(frame.position);
        let is_prefix = is_beginning && behind(frame.total);
        let is_same = is_prefix && frame.total == self.tokens.len();
        Ok(Stored { container, frame, shared, is_beginning, is_prefix, is_same })
    }

    /// Bytes of a new file.
    fn bytes(&self) -> u64 {
        self.header().data_start() + self.content(0) + self.entries()
    }

    /// Bytes that adding to `stored` takes.
    fn addition(&self, stored: &Stored) -> u64 {
        self.content(stored.shared) + self.entries()
    }

    /// Bytes of the sections for full blocks from `from` on and the state.
    fn content(&self, from: usize) -> u64 {
        let (layout, tail) = (&self.identity.layout, self.tokens.len() % BLOCK_TOKENS);
        let blocks = (self.cache.full_blocks().len() - from) as u64;
        let state = layout.block_content(tail) + layout.state_content() + 4 * self.logits.len() as u64;
        blocks * (BLOCK_TOKEN_BYTES + layout.block_content(BLOCK_TOKENS)) + state + 8 + 4 * tail as u64
    }

    /// Bytes of the table.
    fn entries(&self) -> u64 {
        (self.cache.full_blocks().len() as u64 + 6) * ENTRY
    }

    fn header(&self) -> Header {
        Header::new(Content::Session, self.identity.clone())
    }

    fn replace(&self, path: &Path, watch: &mut Watch<'_>) -> Result<Saved> {
        let mut writer = Writer::create(path, &self.header())?;
        let mut told = Told { watch, start: writer.written(), total: self.content(0) };
        self.write_blocks(&mut writer, 0, &mut told)?;
        self.write_state(&mut writer, &mut told)?;
        let written = writer.commit()?;
        Ok(Saved { written, file_bytes: written, pending: 0 })
    }

    fn append(&self, stored: Stored, watch: &mut Watch<'_>) -> Result<Saved> {
        let (start, kept) = (stored.container.end(), stored.shared);
        let mut writer = Writer::append(stored.container)?;
        stored.frame.blocks[..kept].iter().try_for_each(|section| writer.keep(section))?;
        let mut told = Told { watch, start: writer.written(), total: self.content(kept) };
        self.write_blocks(&mut writer, kept, &mut told)?;
        self.write_state(&mut writer, &mut told)?;
        Ok(appended(start, writer.commit()?, 0))
    }

    /// Appends the tokens alone.
    fn append_tokens(&self, stored: Stored, watch: &mut Watch<'_>) -> Result<Saved> {
        let (start, position, kept) = (stored.container.end(), stored.frame.position, stored.kept());
        let mut sections = alloc::with_capacity("file table", MOST_PARTS + 1)?;
        sections.extend(stored.container.folded());
        if kept > position {
            sections.extend_from_slice(stored.container.added());
        }
        let mut writer = Writer::append(stored.container)?;
        sections.iter().try_for_each(|section| writer.keep(section))?;
        let mut told = Told { watch, start: writer.written(), total: 4 * (self.tokens.len() - kept) as u64 };
        told.tell(&writer)?;
        self.write_tokens(&mut writer, kept)?;
        told.tell(&writer)?;
        Ok(appended(start, writer.commit()?, self.tokens.len() - position))
    }

    fn write_blocks(&self, writer: &mut Writer, from: usize, told: &mut Told<'_, '_>) -> Result<()> {
        let layout = &self.identity.layout;
        told.tell(writer)?;
        for (i, block) in self.cache.full_blocks().iter().enumerate().skip(from) {
            writer.section(kind::BLOCK, true, |section| {
                section.put_words(block_tokens(self.tokens, i).iter().copied())?;
                block.export(layout, BLOCK_TOKENS, &mut |bytes| section.put(bytes))
            })?;
            told.tell(writer)?;
        }
        Ok(())
    }

    fn write_state(&self, writer: &mut Writer, told: &mut Told<'_, '_>) -> Result<()> {
        let layout = &self.identity.layout;
        if let Some(tail) = self.cache.tail() {
            let tokens = self.tokens.len() % BLOCK_TOKENS;
            writer.section(kind::TAIL, true, |section| tail.export(layout, tokens, &mut |bytes| section.put(bytes)))?;
        }
        let state = self.cache.checkpoint();
        writer.section(kind::STATE, true, |section| state.export(layout, &mut |bytes| section.put(bytes)))?;
        told.tell(writer)?;
        if !self.logits.is_empty() {
            let bits = self.logits.iter().map(|logit| logit.to_bits());
            writer.section(kind::LOGITS, true, |section| section.put_words(bits))?;
        }
        let position = self.tokens.len() as u64;
        writer.section(kind::POSITION, true, |section| section.put(&position.to_le_bytes()))?;
        self.write_tokens(writer, self.cache.full_blocks().len() * BLOCK_TOKENS)?;
        told.tell(writer)?;
        writer.fold()
    }

    fn write_tokens(&self, writer: &mut Writer, from: usize) -> Result<()> {
        let tokens = self.tokens[from..].iter().copied();
        writer.section(kind::TOKENS, true, |section: &mut SectionWriter<'_>| section.put_words(tokens))
    }
}

/// Tells of the bytes that are written to sections.
struct Told<'a, 'b> {
    watch: &'a mut Watch<'b>,
    start: u64,
    total: u64,
}

impl Told<'_, '_> {
    fn tell(&mut self, writer: &Writer) -> Result<()> {
        self.watch.report(FileStage::Write, writer.written() - self.start, self.total)
    }
}

fn appended(start: u64, written: u64, pending: usize) -> Saved {
    // the last bytes of an addition are those of a root, which lies in front
    Saved { written, file_bytes: start + written - load::ROOT, pending }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheLayout, CacheManager, CacheOptions, KvFormat, LayerLayout};
    use crate::model::config::LayerKind;

    /// One layer of each kind with the dimensions of V4-Flash: a state part weighs as much as the blocks of 1,760 tokens,
    /// against 1,460 in the whole model.
    fn layout() -> CacheLayout {
        let layer = |(kind, main_state, index_state)| LayerLayout { kind, main_state, index_state };
        let kinds = [(LayerKind::Window, 0, 0), (LayerKind::C4a, 24 * 512, 24 * 128), (LayerKind::C128a, 3 * 512, 0)];
        let layers = kinds.map(layer).to_vec();
        CacheLayout { format: KvFormat::Fp8, head_dim: 512, rope_dim: 64, index_dim: 128, window: 128, layers }
    }

    /// Pitfall 44.
    #[test]
    fn all_bytes_ever_written_for_100k_tokens_are_at_most_twice_the_size() {
        let folder = tempfile::tempdir().unwrap();
        let manager = CacheManager::new(layout(), CacheOptions::PRIVATE, b"");
        let mut ignored = |_| std::ops::ControlFlow::Continue(());
        let mut watch = Watch { progress: &mut ignored, stop: crate::engine::Stop::default() };
        let identity = Identity { fingerprint: 1, numerics: "reference".to_owned(), vocab: 1024, layout: layout() };
        let tokens: Vec<u32> = (0..100_000).map(|i| i % 1021).collect();
        let logits = vec![0.5; 1024];
        for every in [100, 1000, 1250, 4000] {
            let path = folder.path().join(format!("{every}"));
            let mut cache = SequenceCache::new(&manager, 0).unwrap();
            let (mut written, mut most_pending) = (0, 0);
            for end in (every..=tokens.len()).step_by(every) {
                // rows of no meaning in place of computed ones
                let staged = cache.stage(every).unwrap();
                cache.commit(staged);
                let image = Image { identity: &identity, tokens: &tokens[..end], cache: &cache, logits: &logits };
                let saved = image.save(&path, false, &mut watch).unwrap();
                assert_eq!(saved.file_bytes, std::fs::metadata(&path).unwrap().len());
                assert!(saved.written <= saved.file_bytes);
                written += saved.written;
                most_pending = most_pending.max(saved.pending);
            }
            let image = Image { identity: &identity, tokens: &tokens, cache: &cache, logits: &logits };
            let fresh = image.save(&folder.path().join("fresh"), true, &mut watch).unwrap().written;
            assert!(written <= 2 * fresh, "every {every}: {written} bytes for a session of {fresh}");
            assert!(most_pending < 2000 + every, "every {every}: {most_pending} tokens to compute again");
            assert!(every < 4000 || most_pending == 0, "every {every}: {most_pending} tokens to compute again");
            let file = load::File::open(&path, &identity, &mut watch).unwrap();
            let other = CacheManager::new(layout(), CacheOptions::PRIVATE, b"");
            assert!(file.load(&other, 0, &mut watch).unwrap().tokens == tokens);
            drop(std::fs::remove_file(folder.path().join("fresh")));
        }
    }
}
