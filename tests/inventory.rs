//! Opening the full inventories of the releases: time, memory, counts.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

#[path = "common/inventory.rs"]
mod inventory;
#[path = "common/shared.rs"]
mod shared;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use dsv4::model::config::Config;
use dsv4::model::weights::Weights;
use dsv4::weights::Checkpoint;

/// Names the folder that the child process opens.
const CHILD: &str = "DSV4_TEST_INVENTORY_DIR";

/// A sparse copy of one release, or `None` with a visible message.
fn release(test: &str, inventory: &str, config: &str) -> Option<tempfile::TempDir> {
    let inventory = shared::shared(test, &format!("data/inventory_{inventory}.json"))?;
    let config: PathBuf = shared::shared(test, &format!("data/config/DeepSeek-V4-{config}.config.json"))?;
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    inventory::write_checkpoint(dir.path(), inventory::read(&inventory));
    std::fs::copy(config, dir.path().join("config.json")).expect("the configuration can be copied");
    Some(dir)
}

/// Opens `dir` in a process of its own; returns seconds and the peak of resident memory in MiB.
fn measure(dir: &Path) -> (f64, f64) {
    let exe = std::env::current_exe().expect("a test knows its executable");
    let mut command = Command::new(exe);
    command.args(["--exact", "child_opens_and_reports", "--ignored", "--nocapture"]).env(CHILD, dir);
    let output = command.output().expect("the test can start itself");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let line = text.lines().find_map(|line| line.split_once("MEASURED ")).unwrap_or_else(|| panic!("{text}")).1;
    let mut numbers = line.split(' ').map(|n| n.parse::<f64>().expect("the child prints numbers"));
    (numbers.next().expect("seconds"), numbers.next().expect("MiB"))
}

#[test]
#[ignore = "run by the other tests, in a process of its own"]
fn child_opens_and_reports() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let start = Instant::now();
    let checkpoint = Checkpoint::open(Path::new(&dir)).unwrap();
    let config = Config::from_file(&Path::new(&dir).join("config.json")).unwrap();
    let weights = Weights::resolve(&config, &checkpoint).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let opened = start.elapsed();
    checkpoint.check_sizes().unwrap();
    let checked = start.elapsed() - opened;
    shared::say(&format!("check_sizes: {checked:?}"));
    shared::say(&format!("MEASURED {seconds} {}", peak_mib()));
    drop(weights);
}

/// Peak resident memory of this process; 0 where the system does not tell.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

/// Limits are those of an optimised build; a debug build gets twice the time.
fn check(test: &str, release_dir: &Path, seconds_limit: f64, mib_limit: f64) {
    let (seconds, mib) = measure(release_dir);
    shared::say(&format!("{test}: {seconds:.3} s, {mib:.1} MiB"));
    let slack = if cfg!(debug_assertions) { 2.0 } else { 1.0 };
    assert!(seconds < seconds_limit * slack, "{test}: opening took {seconds:.3} s");
    assert!(mib < mib_limit, "{test}: opening took {mib:.1} MiB of resident memory");
}

#[test]
fn flash_opens_within_1_5_s_and_150_mb() {
    let name = "flash_opens_within_1_5_s_and_150_mb";
    let Some(dir) = release(name, "flash_mtp", "Flash") else { return };
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((checkpoint.len(), checkpoint.shards().len()), (69_187, 46));
    assert_eq!(checkpoint.total_bytes(), 159_609_485_896);
    check(name, dir.path(), 1.5, 150e6 / 1_048_576.0);
}

#[test]
fn pro_opens_within_3_s() {
    let name = "pro_opens_within_3_s";
    let Some(dir) = release(name, "pro_mtp", "Pro") else { return };
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((checkpoint.len(), checkpoint.shards().len()), (145_116, 64));
    check(name, dir.path(), 3.0, 300e6 / 1_048_576.0);
}

#[test]
fn flash_0731_has_three_dspark_stages() {
    use dsv4::model::weights::DraftWeights;
    let name = "flash_0731_has_three_dspark_stages";
    let Some(dir) = release(name, "flash_dspark", "Flash-0731") else { return };
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let config = Config::from_file(&dir.path().join("config.json")).unwrap();
    let weights = Weights::resolve(&config, &checkpoint).unwrap();
    let DraftWeights::Dspark(dspark) = &weights.draft else { panic!("{:?}", config.draft) };
    assert_eq!(dspark.stages.len(), 3);
    assert_eq!((dspark.main_proj.rows(), dspark.main_proj.cols()), (4096, 3 * 4096));
}

#[test]
fn pro_0813_resolves() {
    let name = "pro_0813_resolves";
    let Some(dir) = release(name, "pro_dspark", "Pro-0813") else { return };
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((checkpoint.len(), checkpoint.shards().len()), (149_782, 66));
    let config = Config::from_file(&dir.path().join("config.json")).unwrap();
    Weights::resolve(&config, &checkpoint).unwrap();
}
