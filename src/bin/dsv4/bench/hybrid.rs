//! What decoding reaches of the time that memory alone would take, where a GPU and the host have experts.

#![forbid(unsafe_code)]

use std::fmt;
use std::hint::black_box;
use std::time::{Duration, Instant};

use dsv4::research::{HostFigures, device_bandwidth};
use dsv4::weights::Category;
use dsv4::{Engine, Model};
use serde_json::{Value, json};

use super::bandwidth::sum_bytes;
use super::{Comparison, spread};
use crate::failure::Result;
use crate::output;

/// How long the pages of the host's experts may take to be mapped.
const PATIENCE: Duration = Duration::from_secs(600);
/// Choices of experts whose bytes are summed at a time.
const CHOICES: usize = 4;

/// Sums, copies and decoding, measured in turns.
pub(super) struct Hybrid {
    /// Bytes of weights that a token reads: in the feed-forward halves, of the routed experts, everything else.
    shared: u64,
    routed: u64,
    rest: u64,
    layers: usize,
    chosen: usize,
    tokens: usize,
    threads: usize,
    /// GB/s of each sum over experts, and of each copy within the device's memory.
    host: Vec<f64>,
    device: Vec<f64>,
    /// What the host did in each repetition.
    done: Vec<HostFigures>,
    /// Seconds of each repetition of decoding.
    pub(super) decode_seconds: Vec<f64>,
}

impl Hybrid {
    /// Waits until the host's experts are mapped.
    pub(super) fn new(engine: &Engine, tokens: usize) -> Result<Self> {
        let since = Instant::now();
        while HostFigures::of(engine).is_some_and(|figures| figures.mapped.0 < figures.mapped.1) {
            if since.elapsed() > PATIENCE {
                output::note("the pages of the host's experts are not all mapped yet");
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let (reads, config) = (engine.model().decode_reads(0), engine.model().config());
        let routed = reads.bytes_of(Category::RoutedExperts);
        let shared = reads.bytes_of(Category::SharedExperts) + reads.bytes_of(Category::Router);
        Ok(Self {
            shared,
            routed,
            rest: reads.bytes() - routed - shared,
            layers: config.num_hidden_layers,
            chosen: config.num_experts_per_tok,
            tokens,
            threads: engine.threads(),
            host: Vec::new(),
            device: Vec::new(),
            done: Vec::new(),
            decode_seconds: Vec::new(),
        })
    }

    /// GB/s of a sum over experts as some tokens would choose them; each round takes others.
    pub(super) fn sum(&self, model: &Model, round: usize) -> f64 {
        let reads = (0..CHOICES).flat_map(|i| model.decode_reads((round * CHOICES + i) * self.chosen).tensors);
        let experts: Vec<_> = reads.filter(|t| Category::of(t.name()) == Category::RoutedExperts).collect();
        let bytes: usize = experts.iter().map(dsv4::weights::Tensor::byte_len).sum();
        let start = Instant::now();
        black_box(sum_bytes(&experts, self.threads));
        bytes as f64 / start.elapsed().as_secs_f64().max(1e-9) / 1e9
    }

    pub(super) fn figures(&self, engine: &Engine) -> HostFigures {
        HostFigures::of(engine).unwrap_or_default()
    }

    /// Keeps what one repetition gave.
    pub(super) fn note(&mut self, sum: f64, before: HostFigures, after: HostFigures) {
        self.host.push(sum);
        self.done.push(HostFigures {
            layers: after.layers - before.layers,
            experts: after.experts - before.experts,
            waited: after.waited - before.waited,
            computed: after.computed - before.computed,
            ..after
        });
    }

    pub(super) fn note_device(&mut self, engine: &Engine) -> Result {
        self.device.push(device_bandwidth(engine)? / 1e9);
        Ok(())
    }

    /// Bytes of an expert.
    fn expert(&self) -> f64 {
        self.routed as f64 / (self.layers * self.chosen) as f64
    }

    /// Experts of a layer and token that the host computed.
    fn missed(&self) -> f64 {
        let experts: u64 = self.done.iter().map(|done| done.experts).sum();
        experts as f64 / (self.done.len() * self.tokens * self.layers) as f64
    }

    /// The fastest of each, GB/s: what the machine can do.
    fn rates(&self) -> [f64; 2] {
        [&self.device, &self.host].map(|rates| spread(rates).2)
    }

    /// Seconds of a token if both sides did nothing but read, the other's share of a layer's experts meanwhile.
    fn floor(&self) -> f64 {
        let [device, host] = self.rates().map(|rate| rate * 1e9);
        let missed = self.missed() * self.expert() * self.layers as f64;
        let own = self.shared as f64 + self.routed as f64 - missed;
        self.rest as f64 / device + (own / device).max(missed / host)
    }

    /// Seconds of a token in the median repetition.
    fn token(&self) -> f64 {
        spread(&self.decode_seconds).0 / self.tokens as f64
    }

    /// Seconds a token and layer in which the host waited for the device's question, and computed.
    fn parts(&self) -> [f64; 2] {
        let sum = |of: fn(&HostFigures) -> Duration| self.done.iter().map(of).sum::<Duration>().as_secs_f64();
        let all = (self.done.len() * self.tokens * self.layers) as f64;
        [sum(|done| done.waited) / all, sum(|done| done.computed) / all]
    }
}

impl Comparison for Hybrid {
    fn as_json(&self) -> Value {
        let ([device, host], [waited, computed]) = (self.rates(), self.parts());
        json!({
            "tokens_per_second": 1.0 / self.token(),
            "layers_per_second": self.layers as f64 / self.token(),
            "floor_tokens_per_second": 1.0 / self.floor(),
            "ratio": self.floor() / self.token(),
            "device_copy_gb_per_second": device,
            "host_sum_gb_per_second": host,
            "host_experts_per_layer": self.missed(),
            "expert_bytes": self.expert(),
            "shared_bytes": self.shared,
            "other_bytes": self.rest,
            "host_gb_per_second": self.missed() * self.expert() / computed.max(1e-9) / 1e9,
            "host_waited_seconds_per_layer": waited,
            "host_computed_seconds_per_layer": computed,
            "decode_seconds": self.decode_seconds,
        })
    }
}

impl fmt::Display for Hybrid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([device, host], [waited, computed]) = (self.rates(), self.parts());
        writeln!(
            f,
            "both: {} tokens/s ({} layers/s) of {} that memory allows: {:.0} %",
            output::rate(1.0 / self.token()),
            output::rate(self.layers as f64 / self.token()),
            output::rate(1.0 / self.floor()),
            100.0 * self.floor() / self.token()
        )?;
        writeln!(
            f,
            "  a token and layer: {:.2} of {} experts on the host, {} each; waited {:.0} us, computed {:.0} us, {} GB/s",
            self.missed(),
            self.chosen,
            output::size(self.expert() as u64),
            1e6 * waited,
            1e6 * computed,
            output::rate(self.missed() * self.expert() / computed.max(1e-9) / 1e9)
        )?;
        write!(
            f,
            "  device copy {} GB/s, host sum {} GB/s; {} of shared experts and routers, {} of everything else",
            output::rate(device),
            output::rate(host),
            output::size(self.shared),
            output::size(self.rest)
        )
    }
}
