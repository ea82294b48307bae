//! Long contexts of the trained model, made of copies of few blocks.
#![forbid(unsafe_code)]

use dsv4::Engine;
use dsv4::research::Timing;
use std::sync::Arc;

/// Tokens that a context goes up to: 2^16 tokens, 2^16 entries of 4 tokens, the longest context.
pub const ENDS: [usize; 3] = [1 << 16, 1 << 18, 1 << 20];
/// Of the trained model.
pub const VOCAB: u32 = 3712;

/// `n` tokens that look like chance.
pub fn tokens(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (seed + i).wrapping_mul(2_654_435_761) >> 7).map(|x| 2 + x % (VOCAB - 2)).collect()
}

/// `end - 256` tokens: two blocks again and again, one up to the middle and one from there on.
pub fn behind(engine: &Arc<Engine>, end: usize) -> Timing {
    let mut timing = Timing::behind(engine, 256, &tokens(1, 256)).expect("a block");
    timing.repeat(end / 512 - 2).expect("copies of it");
    tokens(2000, 256).chunks(64).for_each(|ids| drop(timing.step(ids).expect("another block")));
    timing.repeat(end / 512 - 1).expect("copies of that");
    assert_eq!(timing.position(), end - 256);
    timing
}
