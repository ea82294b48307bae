//! What a process takes of memory whose experts are read when they are needed: a child's, since peaks are a process's.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed call is a failed test; figures are printed")]

mod common;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::{env, fs};

use common::checkpoint::{self, Recipe};
use dsv4::weights::Category;
use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
use serde_json::json;

/// Name of the variable that makes this program the child; it has the model's folder.
const CHILD: &str = "DSV4_HOST_MEMORY_MODEL";
const MIB: u64 = 1 << 20;
/// Threads' stacks, the products' scratch, a step's activations, the program's own pages.
const BESIDE: u64 = 24 * MIB;
/// What the system maps around the tensors that are touched, up to a folio of 2 MB each, if it is in its page cache.
const AROUND: u64 = 16 * MIB;

/// A line of `/proc/self/status`, in bytes.
fn status(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// 96 experts of 0.8 MB in two layers.
fn write(dir: &Path) {
    let set = json!({
        "moe_intermediate_size": 2048, "n_routed_experts": 48, "num_hash_layers": 1, "compress_ratios": [0, 4, 0]
    });
    let set = set.as_object().unwrap().clone();
    checkpoint::write(&Recipe { preset: "flash-mini".to_owned(), seed: 1, set }, dir);
}

fn use_it(model: &Arc<Model>, host_bytes: u64) -> u64 {
    let options = EngineOptions { host_bytes, threads: 2, prefill_chunk: 64, ..EngineOptions::default() };
    let engine = Engine::new(model, options).unwrap();
    let mut session = Session::new(&engine, SessionOptions::default()).unwrap();
    session.feed(&(0..192).map(|i| i * 5 % 380).collect::<Vec<_>>()).unwrap();
    (0..16).for_each(|i| session.feed(&[i * 11]).unwrap());
    engine.metrics().host_experts.frame_bytes
}

#[test]
fn peak_resident_memory_stays_within_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let mut child = Command::new(env::current_exe().unwrap());
    let child = child.args(["--exact", "in_a_child", "--nocapture"]).env(CHILD, dir.path()).output().unwrap();
    let said = [child.stdout, child.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(child.status.success(), "{}\n{said}", child.status);
    println!("{said}");
}

#[test]
fn in_a_child() {
    let Some(folder) = env::var_os(CHILD) else { return };
    // the program's own pages first
    use_it(&Model::open("examples/models/tiny-v4").unwrap(), 80_000);
    let model = Model::open(folder).unwrap();
    let inventory = model.checkpoint().inventory();
    let of = |wanted| inventory.by_category.iter().find(|(category, _)| *category == wanted).unwrap().1.bytes;
    let experts = of(Category::RoutedExperts);
    let dense = inventory.total.bytes - experts - of(Category::Draft);
    let [before, anonymous, mapped] = ["VmHWM", "RssAnon", "RssFile"].map(status);

    let taken = use_it(&model, 10 * MIB);
    let [peak, anonymous_peak, mapped_now] = ["VmHWM", "RssAnon", "RssFile"].map(status);
    println!(
        "experts {experts}, dense {dense}, frames {taken}; peak +{}, anonymous +{}, mapped +{}",
        peak - before,
        anonymous_peak.saturating_sub(anonymous),
        mapped_now.saturating_sub(mapped)
    );
    assert!((8 * MIB..=10 * MIB).contains(&taken), "{taken}");
    let plan = taken + dense + BESIDE;
    assert!(plan < experts, "otherwise this would show nothing");
    assert!(peak - before <= plan, "{} bytes more at the peak, {plan} were planned", peak - before);
    assert!(mapped_now - mapped <= dense + AROUND, "experts were read through the mapping");

    // the same without a limit, to see that the figures can tell
    use_it(&model, 0);
    assert!(status("RssFile") - mapped > experts / 2);
}
