//! What sessions must give, computed by one alone.
#![forbid(unsafe_code)]

use super::subject;
use dsv4::{EngineOptions, Session};
use std::path::Path;

/// Numbers that only look random.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below
    }
}

/// Timelines with common beginnings and the logits behind each of their tokens, computed alone.
pub struct Truth {
    pub timelines: Vec<Vec<u32>>,
    pub rows: Vec<Vec<Vec<f32>>>,
}

impl Truth {
    pub fn new(folder: &Path, length: usize) -> Self {
        let options = EngineOptions { threads: 2, prefill_chunk: 256, poison_cache: true, ..EngineOptions::default() };
        let engine = subject::engine_with(folder, options);
        let vocab = engine.model().config().vocab_size;
        let mut rng = Rng(11);
        let trunk: Vec<u32> = (0..length).map(|_| rng.next(vocab) as u32).collect();
        let timelines: Vec<Vec<u32>> = [length, 256, 300, 130, 1]
            .iter()
            .map(|&at| {
                let mut tokens = trunk.clone();
                tokens.iter_mut().skip(at).for_each(|t| *t = rng.next(vocab) as u32);
                tokens
            })
            .collect();
        let rows = timelines.iter().map(|tokens| subject::all_logits(&engine, tokens)).collect();
        Self { timelines, rows }
    }

    pub fn check(&self, session: &Session, timeline: usize, what: &str) {
        let at = session.position();
        assert_eq!(session.tokens(), &self.timelines[timeline][..at], "{what}");
        if let Some(logits) = session.logits() {
            let want = &self.rows[timeline][at - 1];
            let differ = logits.iter().zip(want).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert!(differ == 0, "{what}: {differ} logits at {at} of timeline {timeline} differ from a run alone");
        }
    }
}
