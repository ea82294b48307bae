use super::*;
use crate::error::ErrorKind;

fn state(pieces: usize, of_group: usize, frames: usize) -> State {
    let memory = (0..frames).map(|_| Anonymous::new(1).unwrap()).collect();
    State::new(pieces, of_group, memory, PoolStats::default()).unwrap()
}

/// Does all reads; the pieces read, in order.
fn read_all(state: &mut State) -> Vec<usize> {
    let mut pieces = Vec::new();
    while let Some((frame, piece, memory)) = state.next_read() {
        state.finish(frame, memory, Ok((Vec::new(), 1)));
        pieces.push(piece);
    }
    pieces
}

/// Uses members of a group, however few frames there are.
fn use_all(state: &mut State, group: usize, members: &[usize]) {
    state.ask(group, members);
    let mut remaining = members.to_vec();
    while !remaining.is_empty() {
        read_all(state);
        let (ready, rest): (Vec<_>, _) = remaining.iter().partition(|&&m| state.loaded(group, m).is_some());
        assert!(!ready.is_empty(), "somebody waits although nothing is pinned by others");
        state.unpin(group, &ready);
        remaining = rest;
    }
}

/// Uniform in 0..1.
fn draw(seed: &mut u64) -> f64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as f64 / (1_u64 << 31) as f64
}

/// Share of hits of `uses` single uses of pieces whose popularity falls as 1 / rank, the most popular one being `first`.
fn zipf(state: &mut State, pieces: usize, first: usize, uses: usize, seed: &mut u64) -> f64 {
    let total: f64 = (1..=pieces).map(|rank| 1.0 / rank as f64).sum();
    let before = state.stats.hits;
    for _ in 0..uses {
        let (mut left, mut rank) = (draw(seed) * total, 0);
        while left > 1.0 / (rank + 1) as f64 && rank + 1 < pieces {
            left -= 1.0 / (rank + 1) as f64;
            rank += 1;
        }
        // neighbours in rank are far from each other
        let piece = (first + rank * 37) % pieces;
        use_all(state, piece / 10, &[piece % 10]);
    }
    (state.stats.hits - before) as f64 / uses as f64
}

#[test]
fn what_is_used_most_stays_and_a_change_is_followed() {
    let (pieces, frames) = (200, 20);
    let mut state = state(pieces, 10, frames);
    let mut seed = 1;
    let share = |n: usize| (1..=n).map(|rank| 1.0 / rank as f64).sum::<f64>();
    let best = share(frames) / share(pieces);
    zipf(&mut state, pieces, 0, 4000, &mut seed);
    let settled = zipf(&mut state, pieces, 0, 10_000, &mut seed);
    assert!(settled > 0.9 * best, "{settled} of {best}");
    zipf(&mut state, pieces, 100, 4000, &mut seed);
    let after_change = zipf(&mut state, pieces, 100, 10_000, &mut seed);
    assert!(after_change > 0.9 * best, "{after_change} of {best}");
}

#[test]
fn passes_over_all_pieces_find_as_many_as_there_are_frames() {
    // the least recently used first would find none
    let mut state = state(100, 10, 20);
    let pass = |state: &mut State| (0..10).for_each(|group| use_all(state, group, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]));
    pass(&mut state);
    let before = state.stats.hits;
    (0..10).for_each(|_| pass(&mut state));
    let hits = state.stats.hits - before;
    assert!((100..=200).contains(&hits), "{hits} of 200 possible ones");
}

#[test]
fn what_is_needed_stays_and_others_wait_for_it() {
    let mut state = state(8, 4, 2);
    state.ask(0, &[0, 1]);
    assert_eq!(read_all(&mut state), [0, 1]);
    let held = state.loaded(0, 0).unwrap();
    state.ask(1, &[0, 1]);
    state.expect(1, 2);
    assert_eq!(read_all(&mut state), [] as [usize; 0]);
    state.unpin(0, &[1]);
    assert_eq!(read_all(&mut state), [4]);
    assert!(state.loaded(0, 0).is_some() && state.loaded(0, 1).is_none());
    drop(held);
    state.unpin(0, &[0]);
    assert_eq!(read_all(&mut state), [5]);
    assert!(state.loaded(1, 0).is_some() && state.loaded(1, 1).is_some());
}

#[test]
fn what_is_expected_is_read_last_and_gives_way_only_to_what_is_needed() {
    let mut state = state(12, 4, 3);
    assert!((0..3).all(|member| state.expect(2, member)));
    assert!(!state.expect(2, 3), "there are three frames");
    assert_eq!(state.stats.read_ahead, 3);
    state.ask(0, &[0]);
    assert_eq!(read_all(&mut state), [0, 8, 9]);
    state.unpin(0, &[0]);
    state.expect(1, 0);
    assert_eq!(read_all(&mut state), [4], "only what is not expected makes room");
    state.ask(2, &[0]);
    assert_eq!((state.stats.hits, state.stats.misses), (1, 1));
    // what was expected of the group and is not needed may go
    state.expect(1, 1);
    assert_eq!(read_all(&mut state), [5]);
    assert!(state.loaded(2, 0).is_some() && state.loaded(2, 1).is_none());
}

#[test]
fn a_failure_is_told_to_those_who_need_the_piece_and_read_anew_later() {
    let mut state = state(4, 4, 1);
    state.ask(0, &[0, 1]);
    let (frame, piece, memory) = state.next_read().unwrap();
    assert_eq!(piece, 0);
    state.finish(frame, memory, Err(Error::new(ErrorKind::Io, "broken")));
    assert_eq!(state.failure(0, 0).unwrap().message(), "broken");
    assert!(state.failure(0, 1).is_none());
    // the frame goes to the next one
    assert_eq!(read_all(&mut state), [1]);
    state.unpin(0, &[0, 1]);
    state.ask(0, &[0]);
    assert!(state.failure(0, 0).is_none());
    assert_eq!(read_all(&mut state), [0]);
    // nobody needed it
    state.unpin(0, &[0]);
    state.expect(0, 2);
    let (frame, _, memory) = state.next_read().unwrap();
    state.finish(frame, memory, Err(Error::new(ErrorKind::Io, "broken")));
    state.ask(0, &[2]);
    assert!(state.failure(0, 2).is_none());
    assert_eq!(read_all(&mut state), [2]);
}
