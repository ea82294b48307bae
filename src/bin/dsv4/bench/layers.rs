//! Times of single layers on a GPU, by kind, and what they add up to.

use std::sync::Arc;
use std::time::Instant;

use dsv4::model::config::LayerKind;
use dsv4::research::Timing;
use dsv4::{Engine, Error, TokenId};
use serde_json::{Value, json};

use super::{Args, spread};
use crate::failure::Result;
use crate::output::{self, line};

/// Tokens of a block.
const BLOCK: usize = 256;

/// Times of one shape of step, microseconds.
struct Row {
    context: usize,
    tokens: usize,
    /// Medians over the layers of a kind: window-only, c4a, c128a; and of the head.
    kinds: [Option<f64>; 3],
    head: f64,
    /// c4a without the second stream.
    one_stream: Option<f64>,
    /// The whole step as the engine runs it, from the call to the logits on the host.
    step: f64,
    /// The same without the second stream, for one token.
    step_one_stream: Option<f64>,
    /// Layers of each kind.
    counts: [usize; 3],
}

impl Row {
    /// The layers' times and the head's, added up for a model with so many layers of each kind.
    fn sum(&self, counts: [usize; 3]) -> Option<f64> {
        let mut sum = self.head;
        for (kind, count) in self.kinds.iter().zip(counts) {
            sum += if count == 0 { 0.0 } else { (*kind)? * count as f64 };
        }
        Some(sum)
    }
}

/// Layers of each kind of V4-Flash.
const FLASH: [usize; 3] = [2, 21, 20];

pub(super) fn run(
    args: &Args,
    engine: &Arc<Engine>,
    prefills: &[usize],
    ids: &mut dyn FnMut(usize) -> std::result::Result<Vec<TokenId>, Error>,
) -> Result {
    let mut rows = Vec::new();
    let decode = (args.decode > 0).then_some(1);
    for &context in &args.context {
        for tokens in decode.into_iter().chain(prefills.iter().copied()) {
            let context = context / BLOCK * BLOCK;
            let tokens = tokens.min(engine.options().prefill_chunk);
            rows.push(measure(args, engine, context, &ids(BLOCK)?, &ids(tokens)?)?);
        }
    }
    if args.json {
        return output::json(&Value::Array(rows.iter().map(as_json).collect()));
    }
    line(
        "context  tokens    window      c4a    c128a     head  c4a, one stream      step  step, one stream  sum of Flash  tokens/s",
    )?;
    for r in &rows {
        let us = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.1}"));
        let [window, c4a, c128a] = r.kinds.map(us);
        let flash = r.sum(FLASH);
        line(format_args!(
            "{:>7} {:>7} {window:>9} {c4a:>8} {c128a:>8} {:>8.1} {:>16} {:>9.1} {:>17} {:>13} {:>9}",
            r.context,
            r.tokens,
            r.head,
            us(r.one_stream),
            r.step,
            us(r.step_one_stream),
            us(flash),
            us(flash.map(|sum| r.tokens as f64 / sum * 1e6))
        ))?;
    }
    Ok(())
}

fn measure(args: &Args, engine: &Arc<Engine>, context: usize, first: &[TokenId], ids: &[TokenId]) -> Result<Row> {
    let mut timing = Timing::behind(engine, context, first)?;
    let layers = &engine.model().config().layers;
    // with the second stream, and without, in turns
    let (mut times, mut steps) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..=args.repetitions {
        for (times, second) in times.iter_mut().zip([true, false]) {
            timing.use_second_stream(second);
            times.extend(Some(timing.layers(ids)?).filter(|_| round > 0));
        }
    }
    for round in 0..args.repetitions + 3 {
        for (times, second) in steps.iter_mut().zip([true, false]) {
            // many tokens would only move the context further
            if !second && ids.len() > 1 {
                continue;
            }
            timing.use_second_stream(second);
            let start = Instant::now();
            timing.step(ids)?;
            let micros = start.elapsed().as_secs_f64() * 1e6;
            // the first steps are not captured yet
            times.extend(Some(micros).filter(|_| round > 2));
        }
    }
    timing.use_second_stream(true);
    let [all, one_stream] = times;
    let of_kind = |runs: &[Vec<f64>], kind: LayerKind| {
        let times: Vec<f64> = runs
            .iter()
            .flat_map(|times| layers.iter().zip(times).filter(|(k, _)| **k == kind).map(|(_, t)| *t))
            .collect();
        (!times.is_empty()).then(|| spread(&times).0)
    };
    let kinds = [LayerKind::Window, LayerKind::C4a, LayerKind::C128a];
    let heads: Vec<f64> = all.iter().filter_map(|times| times.last().copied()).collect();
    Ok(Row {
        context,
        tokens: ids.len(),
        kinds: kinds.map(|kind| of_kind(&all, kind)),
        head: spread(&heads).0,
        one_stream: of_kind(&one_stream, LayerKind::C4a),
        step: spread(&steps[0]).0,
        step_one_stream: (!steps[1].is_empty()).then(|| spread(&steps[1]).0),
        counts: kinds.map(|kind| layers.iter().filter(|k| **k == kind).count()),
    })
}

fn as_json(r: &Row) -> Value {
    let [window, c4a, c128a] = r.kinds;
    json!({
        "context": r.context,
        "tokens": r.tokens,
        "us": {
            "window": window,
            "c4a": c4a,
            "c128a": c128a,
            "head": r.head,
            "c4a_one_stream": r.one_stream,
            "step": r.step,
            "step_one_stream": r.step_one_stream,
            "sum_of_layers": r.sum(r.counts),
            "sum_of_flash": r.sum(FLASH),
        },
    })
}
