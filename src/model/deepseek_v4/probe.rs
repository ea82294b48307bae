//! Recording of intermediate values, for research and for comparison with golden vectors.

/// A named intermediate of one layer.
pub struct Record {
    /// Trunk layer.
    pub layer: usize,
    /// `q`, `kv`, `o` (attention output before the inverse rotation), `attn_out`, `streams_mid`, `streams`,
    /// `router_ids`, `router_weights`, `selected` (-1 = none), `scores`, `ffn_out`, `hidden`.
    pub name: &'static str,
    /// Shape; the first dimension is rows (tokens).
    pub shape: Vec<usize>,
    /// Values, row-major; ids are exact in float32.
    pub values: Vec<f32>,
}

/// Collects [`Record`]s when on, and costs nothing when off.
pub struct Probe {
    on: bool,
    /// What was recorded, in order of computation.
    pub records: Vec<Record>,
}

impl Probe {
    /// A probe that records nothing.
    pub fn off() -> Self {
        Self { on: false, records: Vec::new() }
    }

    /// A probe that records everything.
    pub fn on() -> Self {
        Self { on: true, records: Vec::new() }
    }

    /// Whether anything is recorded: lets callers skip work that only a record needs.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Records a copy of `values`.
    pub fn record(&mut self, layer: usize, name: &'static str, shape: &[usize], values: &[f32]) {
        if self.on {
            self.records.push(Record { layer, name, shape: shape.to_vec(), values: values.to_vec() });
        }
    }

    /// The records of `name` in `layer`, joined along the rows.
    pub fn get(&self, layer: usize, name: &str) -> Option<Record> {
        let mut found = self.records.iter().filter(|r| r.layer == layer && r.name == name);
        let first = found.next()?;
        let mut joined = Record { layer, name: first.name, shape: first.shape.clone(), values: first.values.clone() };
        for r in found {
            joined.shape[0] += r.shape[0];
            joined.values.extend_from_slice(&r.values);
        }
        Some(joined)
    }
}
