//! The engine under test, reduced to what the comparisons need.
#![forbid(unsafe_code)]

use dsv4::research::{Lab, Probe, Rounding};
use dsv4::{Engine, EngineOptions, Model, Numerics, Session, SessionOptions};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// An engine on `folder` with everything else at its default.
pub fn engine(folder: &Path, numerics: Numerics) -> Arc<Engine> {
    engine_with(
        folder,
        EngineOptions {
            numerics,
            threads: 2,
            ..EngineOptions::default()
        },
    )
}

pub fn engine_with(folder: &Path, options: EngineOptions) -> Arc<Engine> {
    let model = Model::open(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    Engine::new(&model, options).unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
}

/// A session with room for `context` tokens.
pub fn session(engine: &Arc<Engine>, context: usize) -> Session {
    Session::new(
        engine,
        SessionOptions {
            context,
            ..SessionOptions::default()
        },
    )
    .expect("a session")
}

/// Logits after every one of `tokens`, in a session of their own.
pub fn all_logits(engine: &Arc<Engine>, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = Vec::with_capacity(tokens.len());
    session(engine, tokens.len())
        .feed_all(tokens, &mut |position, logits| {
            assert_eq!(position, rows.len(), "positions come in order");
            rows.push(logits.to_vec());
            Ok(())
        })
        .expect("the tokens are fed");
    assert_eq!(rows.len(), tokens.len(), "one row of logits per token");
    rows
}

/// Logits after the last of `tokens`, in a session of their own.
pub fn last_logits(engine: &Arc<Engine>, tokens: &[u32]) -> Vec<f32> {
    let mut session = session(engine, tokens.len());
    session.feed(tokens).expect("the tokens are fed");
    logits(&session).to_vec()
}

/// The session's logits.
pub fn logits(session: &Session) -> &[f32] {
    session.logits().expect("logits behind the last token")
}

/// Runs layer `layer` alone on `streams` `[n, 4, D]` at positions from 0 and returns what it computed.
pub fn layer(
    engine: &Arc<Engine>,
    rounding: Rounding,
    layer: usize,
    streams: &[f32],
    ids: &[u32],
) -> Recorded {
    let mut lab = Lab::new(engine, ids.len()).expect("a lab");
    lab.set_rounding(rounding);
    let mut probe = Probe::on();
    lab.run_layer(layer, streams, ids, &mut probe)
        .expect("the layer runs");
    Recorded {
        layer,
        probe: Rc::new(probe),
    }
}

/// Runs the FFN half of layer `layer` alone on `streams` `[n, 4, D]`.
pub fn ffn_half(
    engine: &Arc<Engine>,
    rounding: Rounding,
    layer: usize,
    streams: &[f32],
    ids: &[u32],
) -> Recorded {
    let mut lab = Lab::new(engine, ids.len()).expect("a lab");
    lab.set_rounding(rounding);
    let mut probe = Probe::on();
    lab.run_ffn_half(layer, streams, ids, &mut probe)
        .expect("the half layer runs");
    Recorded {
        layer,
        probe: Rc::new(probe),
    }
}

/// Runs the whole trunk on `tokens` and returns what every layer computed.
pub fn trace(engine: &Arc<Engine>, tokens: &[u32]) -> Trace {
    let mut lab = Lab::new(engine, tokens.len()).expect("a lab");
    let mut probe = Probe::on();
    lab.run(tokens, &mut probe).expect("the trunk runs");
    Trace {
        probe: Rc::new(probe),
    }
}

/// What all layers computed.
pub struct Trace {
    probe: Rc<Probe>,
}

impl Trace {
    pub fn layer(&self, layer: usize) -> Recorded {
        Recorded {
            layer,
            probe: Rc::clone(&self.probe),
        }
    }
}

/// What one layer computed.
pub struct Recorded {
    layer: usize,
    probe: Rc<Probe>,
}

impl Recorded {
    pub fn has(&self, name: &str) -> bool {
        self.probe.get(self.layer, name).is_some()
    }

    /// The rows of a named intermediate.
    pub fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        let record = self
            .probe
            .get(self.layer, name)
            .unwrap_or_else(|| panic!("layer {} has no {name}", self.layer));
        assert!(!record.values.is_empty(), "{name} is empty");
        record
            .values
            .chunks(record.values.len() / record.shape[0])
            .map(<[f32]>::to_vec)
            .collect()
    }

    /// The rows of a named list of ids; -1 means none.
    pub fn ids(&self, name: &str) -> Vec<Vec<i64>> {
        self.rows(name)
            .into_iter()
            .map(|row| row.into_iter().map(|id| id as i64).collect())
            .collect()
    }
}
