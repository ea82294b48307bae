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
    /// Sequences, each behind a context of its own.
    sequences: usize,
    tokens: usize,
    /// Of one sequence.
    parts: Option<Parts>,
    /// A step through as many layers of each kind as V4-Flash has.
    flash: Option<f64>,
}

/// What a step takes in parts, one after the other, and as a whole.
struct Parts {
    /// Medians over the layers of a kind: window-only, c4a, c128a; and of the head.
    kinds: [Option<f64>; 3],
    head: f64,
    /// c4a without the second stream.
    one_stream: Option<f64>,
    /// The whole step as the engine runs it, from the call to the logits on the host.
    step: f64,
    /// The same without the second stream, for one token.
    step_one_stream: Option<f64>,
}

/// Layers of each kind of V4-Flash.
const FLASH: [usize; 3] = [2, 21, 20];

/// V4-Flash's layers in order, each the one of its kind among `kinds`; `None` if a kind has none. Where there are several,
/// they take turns.
fn flash_layers(kinds: &[LayerKind]) -> Option<Vec<usize>> {
    let of = |kind| (0..kinds.len()).filter(|&i| kinds[i] == kind).collect::<Vec<_>>();
    let [windows, c4a, c128a] = [LayerKind::Window, LayerKind::C4a, LayerKind::C128a].map(of);
    if windows.is_empty() || c4a.is_empty() || c128a.is_empty() {
        return None;
    }
    let at = |list: &[usize], i: usize| list[i % list.len()];
    let windows = (0..FLASH[0]).map(|i| at(&windows, i));
    Some(windows.chain((0..FLASH[1] + FLASH[2]).map(|i| at(if i % 2 == 0 { &c4a } else { &c128a }, i / 2))).collect())
}

pub(super) fn run(
    args: &Args,
    engine: &Arc<Engine>,
    prefills: &[usize],
    ids: &mut dyn FnMut(usize) -> std::result::Result<Vec<TokenId>, Error>,
) -> Result {
    let mut rows = Vec::new();
    let decodes = args.batch.iter().filter(|_| args.decode > 0).map(|&batch| (batch as usize, 1));
    let prefills = prefills.iter().map(|&tokens| (1, tokens.min(engine.options().prefill_chunk)));
    let shapes: Vec<_> = decodes.chain(prefills).collect();
    for &context in &args.context {
        let context = context / BLOCK * BLOCK;
        for &(sequences, each) in &shapes {
            let mut timings = Vec::new();
            for _ in 0..sequences {
                timings.push(Timing::behind(engine, context, &ids(BLOCK)?)?);
            }
            let ids = ids(sequences * each)?;
            let layers = flash_layers(&engine.model().config().layers);
            let deep = |layers: Vec<usize>| Timing::deep(&mut timings, &ids, &layers, args.repetitions as usize + 2);
            let flash = layers.map(deep).transpose()?.map(|micros| spread(&micros[2..]).0);
            let parts = if sequences == 1 { Some(measure(args, &mut timings[0], engine, &ids)?) } else { None };
            rows.push(Row { context, sequences, tokens: ids.len(), parts, flash });
        }
    }
    if args.json {
        return output::json(&Value::Array(rows.iter().map(as_json).collect()));
    }
    line(
        "context  sequences  tokens    window      c4a    c128a     head  c4a, one stream      step  step, one stream  all of Flash  tokens/s",
    )?;
    for r in &rows {
        let us = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.1}"));
        let part = |part: fn(&Parts) -> Option<f64>| us(r.parts.as_ref().and_then(part));
        line(format_args!(
            "{:>7} {:>10} {:>7} {:>9} {:>8} {:>8} {:>8} {:>16} {:>9} {:>17} {:>13} {:>9}",
            r.context,
            r.sequences,
            r.tokens,
            part(|p| p.kinds[0]),
            part(|p| p.kinds[1]),
            part(|p| p.kinds[2]),
            part(|p| Some(p.head)),
            part(|p| p.one_stream),
            part(|p| Some(p.step)),
            part(|p| p.step_one_stream),
            us(r.flash),
            us(r.flash.map(|micros| r.tokens as f64 / micros * 1e6))
        ))?;
    }
    Ok(())
}

fn measure(args: &Args, timing: &mut Timing, engine: &Engine, ids: &[TokenId]) -> std::result::Result<Parts, Error> {
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
    Ok(Parts {
        kinds: kinds.map(|kind| of_kind(&all, kind)),
        head: spread(&heads).0,
        one_stream: of_kind(&one_stream, LayerKind::C4a),
        step: spread(&steps[0]).0,
        step_one_stream: (!steps[1].is_empty()).then(|| spread(&steps[1]).0),
    })
}

fn as_json(r: &Row) -> Value {
    let parts = r.parts.as_ref().map(|parts| {
        let [window, c4a, c128a] = parts.kinds;
        json!({
            "window": window,
            "c4a": c4a,
            "c128a": c128a,
            "head": parts.head,
            "c4a_one_stream": parts.one_stream,
            "step": parts.step,
            "step_one_stream": parts.step_one_stream,
        })
    });
    json!({ "context": r.context, "sequences": r.sequences, "tokens": r.tokens, "us": parts, "flash_us": r.flash })
}
