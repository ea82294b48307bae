//! Choices of tokens against the CPU's sampler: the same token every time, whatever the settings, the vocabulary and the
//! number of rows.

use super::lab::{Lab, different, different_bits};
use crate::backend::cuda::ops::{self, Sample};
use crate::error::Result;
use crate::sampler::{Sampler, SamplerOptions};

/// Vocabularies: of the releases, of small checkpoints, and sizes that are no multiple of anything.
const VOCABS: [usize; 6] = [129_280, 1, 31, 256, 1000, 4099];

fn vocabs(lab: &Lab<'_>) -> &'static [usize] {
    if lab.small { &VOCABS[1..] } else { &VOCABS }
}

/// Ties for the highest, zeros of both signs, NaN and infinity in one row each.
pub(super) fn argmax(lab: &mut Lab<'_>) -> Result<()> {
    let (rows, vocab) = (5, if lab.small { 3000 } else { 129_280 });
    let mut logits = lab.normal(rows * vocab, 3.0);
    logits[vocab + 2000] = 50.0;
    logits[vocab + 1999] = 50.0;
    logits[2 * vocab..3 * vocab].fill(-0.0);
    logits[2 * vocab + 17] = 0.0;
    logits[3 * vocab + 5] = f32::NAN;
    logits[4 * vocab + 6] = f32::NEG_INFINITY;
    let d_logits = lab.put(&logits)?;
    let (ids, values) = (lab.output(rows)?, lab.output(rows)?);
    ops::argmax(&lab.stream, &d_logits, &ids, &values)?;
    let first = (0..vocab as u32).rev().max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize])).unwrap_or(0);
    let got = lab.get(&ids)?;
    lab.report("argmax", "ties, zeros, NaN, infinite", different(&got, &[first, 1999, 0, u32::MAX, u32::MAX]), 0.0);
    Ok(())
}

/// Logits of one kind: plain, with many ties, all alike, zeros of both signs, one that stands out, hardly different, far
/// apart, and a few that are banned.
fn row(lab: &mut Lab<'_>, kind: usize, vocab: usize) -> Vec<f32> {
    match kind % 8 {
        0 => lab.normal(vocab, 3.0),
        1 => lab.normal_bf16(vocab, 1.0),
        2 => vec![-2.5; vocab],
        3 => (0..vocab).map(|i| if i % 3 == 0 { 0.0 } else { -0.0 }).collect(),
        4 => {
            let mut row = lab.normal(vocab, 2.0);
            row[lab.below(vocab)] = 25.0;
            row
        }
        5 => lab.normal(vocab, 1e-3),
        6 => lab.normal(vocab, 40.0),
        _ => {
            let mut row = lab.normal(vocab, 4.0);
            for _ in 0..vocab / 4 {
                row[lab.below(vocab)] = f32::NEG_INFINITY;
            }
            row[0] = row[0].max(-1.0);
            row
        }
    }
}

/// The k highest in order, with every kind of row, and rows that are refused.
pub(super) fn top_logits(lab: &mut Lab<'_>) -> Result<()> {
    for &vocab in vocabs(lab) {
        for k in [1, 2, 50, 1023, 1024] {
            lab.clear()?;
            // the last kind is infinite in places: refused here
            let mut rows: Vec<Vec<f32>> = (0..8).map(|kind| row(lab, kind, vocab)).collect();
            for special in [f32::NAN, f32::INFINITY] {
                let mut row = lab.normal(vocab, 1.0);
                row[lab.below(vocab)] = special;
                rows.push(row);
            }
            let (mut want_ids, mut want) = (Vec::new(), Vec::new());
            for row in &rows {
                let mut order: Vec<u32> = (0..vocab as u32).collect();
                order.sort_by(|&a, &b| (row[b as usize] + 0.0).total_cmp(&(row[a as usize] + 0.0)).then(a.cmp(&b)));
                if row.iter().any(|v| !v.is_finite()) {
                    order.clear();
                }
                order.resize(k.max(order.len()), u32::MAX);
                order.truncate(k);
                want.extend(order.iter().filter_map(|&id| row.get(id as usize)));
                want_ids.extend(order);
            }
            let logits = lab.put(&rows.concat())?;
            let (ids, values) = (lab.output(rows.len() * k)?, lab.output(rows.len() * k)?);
            ops::top_logits(&lab.stream, &logits, vocab, k, &ids, &values)?;
            let (got_ids, got) = (lab.get(&ids)?, lab.get(&values)?);
            let got: Vec<f32> =
                got.into_iter().zip(&got_ids).filter(|&(_, &id)| id != u32::MAX).map(|(v, _)| v).collect();
            let wrong = different(&got_ids, &want_ids) + different_bits(&got, &want);
            lab.report("top_logits", format!("{k} of {vocab}, {} rows", rows.len()), wrong, 0.0);
        }
    }
    Ok(())
}

/// Settings of one kind; `at` varies them.
fn options(kind: usize, vocab: usize, at: usize) -> SamplerOptions {
    let plain = SamplerOptions { seed: at as u64, ..SamplerOptions::default() };
    let ids = |n: usize| (0..n.min(vocab)).map(move |i| (i * (vocab / n.min(vocab)).max(1)) as u32);
    let bias = |n| ids(n).map(|id| (id, if id % 5 == 1 { f32::NEG_INFINITY } else { id as f32 % 7.0 - 3.0 })).collect();
    match kind % 14 {
        0 => SamplerOptions::greedy(),
        1 => plain,
        2 => SamplerOptions { temperature: 0.6, ..plain },
        3 => SamplerOptions { top_p: 0.95, ..plain },
        4 => SamplerOptions { top_k: 40, ..plain },
        5 => SamplerOptions { min_p: 0.05, temperature: 1.5, ..plain },
        6 => SamplerOptions { top_k: 1 + (at * 37 % 1024) as u32, top_p: 0.8, temperature: 0.9, ..plain },
        7 => SamplerOptions { top_p: 0.999, temperature: 30.0, ..plain },
        8 => SamplerOptions { top_k: 5000, top_p: 0.5, min_p: 1e-3, temperature: 4.0, ..plain },
        9 => SamplerOptions { repetition_penalty: 1.4, presence_penalty: 0.3, frequency_penalty: 0.2, ..plain },
        10 => SamplerOptions { greedy: true, repetition_penalty: 1.4, logit_bias: bias(20), ..plain },
        11 => SamplerOptions { logit_bias: bias(3000), top_p: 0.9, ..plain },
        12 => SamplerOptions { temperature: 1e-3, top_k: 100, top_p: 1e-6, ..plain },
        _ => SamplerOptions {
            repetition_penalty: 0.7,
            presence_penalty: -0.5,
            penalty_window: 16,
            logit_bias: bias(7),
            top_k: 64,
            top_p: 0.7,
            min_p: 0.02,
            temperature: 1.2,
            ..plain
        },
    }
}

/// The whole chain, every setting on every kind of row; what the CPU refuses, the device must not choose.
pub(super) fn sample(lab: &mut Lab<'_>) -> Result<()> {
    for &vocab in vocabs(lab) {
        for rows in [1, 7, 64] {
            // all pairs of settings and kinds of rows, as rows go by
            let rounds = (14 * 8 / rows).clamp(2, if lab.small { 4 } else { 16 });
            let (mut wrong, mut refused) = (0.0, 0);
            for round in 0..rounds {
                lab.clear()?;
                let (mut all, mut draws, mut edits, mut want) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
                for at in (0..rows).map(|row| round * rows + row) {
                    let mut logits = row(lab, at / 14, vocab);
                    if at % 29 == 11 {
                        logits[lab.below(vocab)] = [f32::NAN, f32::INFINITY][at % 2];
                    } else if at % 29 == 23 {
                        logits.fill(f32::NEG_INFINITY);
                    }
                    let mut sampler = Sampler::new(options(at, vocab, at + lab.below(1000)))?;
                    for _ in 0..lab.below(60) {
                        sampler.accept(lab.below(vocab) as u32)?;
                    }
                    let draw = sampler.draw(vocab);
                    let Some(draw) = draw else { continue };
                    draws.push(ops::draw_words(&draw, all.len() / vocab, edits.len())?);
                    edits.extend(draw.edits.iter().map(ops::edit_words));
                    let token = sampler.sample(&logits);
                    refused += usize::from(token.is_err());
                    want.push(token.unwrap_or(u32::MAX));
                    all.extend(logits);
                }
                // draws need not be in the order of their rows
                draws.reverse();
                want.reverse();
                let (logits, tokens) = (lab.put(&all)?, lab.output(want.len())?);
                edits.push([0; 4]); // never an empty list
                let (draws, edits) = (lab.put(&draws)?, lab.put(&edits)?);
                let a = Sample { logits: &logits, vocab, draws: &draws, edits: &edits, tokens: &tokens };
                ops::sample(&lab.stream, &a)?;
                wrong += different(&lab.get(&tokens)?, &want);
            }
            let shape = format!("{rounds} times {rows} of {vocab}, {refused} refused");
            lab.report("sample: other tokens than the CPU's", shape, wrong, 0.0);
        }
    }
    Ok(())
}
