//! The whole engine on a driver that is a stub (`gpu.c`, compiled here), so that every call of it can be refused: what fails
//! is an error that says where, nothing is left behind, and the host's own context is current again. The stub's kernels do
//! nothing, so no test looks at values. Without a C compiler the tests say so and pass.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a failed call is a failed test; a skipped one says so")]

#[path = "../common/mod.rs"]
mod common;
mod source;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use common::subject;
use dsv4::backend::cuda::{SelfTestOptions, self_test};
use dsv4::{DeviceChoice, Engine, EngineOptions, ErrorKind, GenerateOptions, Model, Result};
use dsv4::{Sampler, SamplerOptions, Session, SessionOptions};
use libloading::Library;

/// CUDA's numbers of the errors that are planted.
const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;
/// Set in the process that has the stub for a driver.
const INSIDE: &str = "DSV4_TEST_STUB";

/// The stub in this process.
struct Stub(Library);

impl Stub {
    fn call<T>(&self, name: &str) -> T
    where
        T: Copy,
    {
        // SAFETY: gpu.c has these functions, without arguments.
        unsafe { self.0.get::<unsafe extern "C" fn() -> T>(name).unwrap()() }
    }

    /// The `nth` call from now on fails with `status`; all later ones too, if it is a fault.
    fn fail(&self, nth: i64, status: i32) {
        // SAFETY: gpu.c has this function.
        unsafe {
            self.0.get::<unsafe extern "C" fn(i64, i32, i32)>("stub_fail").unwrap()(
                nth,
                status,
                i32::from(status == ILLEGAL_ADDRESS),
            );
        }
    }

    fn room(&self, bytes: usize) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(usize)>("stub_room").unwrap()(bytes) }
    }

    fn calls(&self) -> i64 {
        self.call("stub_calls")
    }

    fn allocations(&self) -> i64 {
        self.call("stub_allocations")
    }

    fn held(&self) -> usize {
        self.call("stub_held")
    }

    /// Everything was given back, and the host's own context is current.
    fn is_clean(&self) -> bool {
        self.call::<i64>("stub_live") == 0 && self.held() == 0 && self.is_hosts_own()
    }

    fn is_hosts_own(&self) -> bool {
        self.call::<i64>("stub_depth") == 0
    }
}

/// Runs `work` in a process of its own whose driver is the stub: the driver is looked for once a process.
fn on_stub(test: &str, work: impl FnOnce(&Stub)) {
    if std::env::var_os(INSIDE).is_some() {
        // SAFETY: the stub has no initialisers.
        return work(&Stub(unsafe { Library::new("libcuda.so.1") }.unwrap()));
    }
    let dir = tempfile::tempdir().unwrap();
    if !compile(dir.path()) {
        eprintln!("SKIPPED {test}: no C compiler");
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env("LD_LIBRARY_PATH", dir.path()).env(INSIDE, "1");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{}\n{text}", output.status);
}

fn compile(dir: &Path) -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    fs::write(dir.join("kernels.h"), source::sizes(&root.join("kernels"))).unwrap();
    let library = dir.join("libcuda.so.1");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I"])
        .arg(dir)
        .arg("-o")
        .arg(&library);
    let Ok(output) = cc.arg(root.join("tests/cuda_stub/gpu.c")).output() else { return false };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // one file under all names, so that there is one state
    for name in ["libcuda.so", "libnvrtc.so.13"] {
        std::os::unix::fs::symlink(&library, dir.join(name)).unwrap();
    }
    true
}

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4")
}

fn options() -> EngineOptions {
    let device = DeviceChoice::Cuda(0);
    EngineOptions { device, threads: 1, prefill_chunk: 256, cache_bytes: 16 << 20, ..EngineOptions::default() }
}

/// Two chunks of a prompt, long enough that entries are chosen, then steps of one token: plain, recorded and replayed; and
/// tokens that the device chooses, whose logits are asked for at the end.
fn use_it(engine: &Arc<Engine>) -> Result<()> {
    let mut session = Session::new(engine, SessionOptions::default())?;
    session.feed(&[5; 300])?;
    (0..3).try_for_each(|_| session.feed(&[7]))?;
    let mut sampler = Sampler::new(SamplerOptions { seed: 1, top_k: 5, ..SamplerOptions::default() })?;
    let options = GenerateOptions { max_tokens: Some(3), ignore_eos: true, ..GenerateOptions::default() };
    session.generate(&mut sampler, options)?.try_for_each(|piece| piece.map(|_| ()))?;
    // a refusal shows as their absence
    let _ = session.logits();
    Ok(())
}

/// Five of eight experts are the host's.
fn shared_out() -> EngineOptions {
    EngineOptions { gpu_experts: Some(3), ..options() }
}

/// Pitfall 67: memory is refused at every call of the driver, one after another.
#[test]
fn memory_refused_by_the_driver_at_any_call_is_that_error_and_nothing_is_left() {
    on_stub("memory_refused_by_the_driver_at_any_call_is_that_error_and_nothing_is_left", |stub| {
        let model = Model::open(folder()).unwrap();
        for (options, stride) in [(options(), 7), (shared_out(), 29)] {
            let all = || Engine::new(&model, options.clone()).and_then(|engine| use_it(&engine));
            stub.fail(0, 0);
            let before = stub.calls();
            all().unwrap();
            let calls = stub.calls() - before;
            assert!(calls > 1000 && stub.is_clean(), "{calls} calls");
            let mut stages = BTreeSet::new();
            // those that make things are few and come first or between many alike
            for nth in (1..150).chain((150..=calls).step_by(stride)) {
                stub.fail(nth, OUT_OF_MEMORY);
                // an object that is freed when its context cannot be entered is freed all the same
                let result = all();
                assert!(stub.is_clean(), "call {nth} left something behind: {result:?}");
                if let Err(error) = result {
                    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "call {nth}: {error}");
                    stages.insert(error.message().split([':', '(']).next().unwrap().to_owned());
                }
            }
            stub.fail(0, 0);
            all().unwrap();
            eprintln!("{calls} calls, stages: {stages:#?}");
            assert!(stages.len() > 20, "{stages:#?}");
        }
    });
}

/// Pitfall 53: an asynchronous fault that shows at a later call. Whichever call that is, the engine is poisoned with the
/// stage, stays so, and can be freed.
#[test]
fn a_fault_at_any_call_of_a_step_poisons_the_engine_with_its_stage() {
    on_stub("a_fault_at_any_call_of_a_step_poisons_the_engine_with_its_stage", |stub| {
        let model = Model::open(folder()).unwrap();
        for (options, stride, kernels) in [
            (options(), 2, ["attend", "linear", "expert", "window_commit"]),
            (shared_out(), 7, ["attend", "linear", "divide", "combine_all"]),
        ] {
            let opened = || {
                stub.fail(0, 0);
                Engine::new(&model, options.clone()).unwrap()
            };
            let engine = opened();
            let before = stub.calls();
            use_it(&engine).unwrap();
            let calls = stub.calls() - before;
            drop(engine);
            let mut stages = BTreeSet::new();
            for nth in (1..=calls).step_by(stride) {
                let engine = opened();
                stub.fail(nth, ILLEGAL_ADDRESS);
                let first = use_it(&engine);
                let Err(error) = first else { continue };
                let again = use_it(&engine).unwrap_err();
                assert!(stub.is_hosts_own(), "call {nth}");
                // entering the context is no stage of the device's: the next that is poisons it
                if error.kind() == ErrorKind::Poisoned {
                    stages.insert(error.message().split(':').next().unwrap().to_owned());
                    assert_eq!(again.kind(), ErrorKind::Poisoned, "call {nth}: {again}");
                    assert!(again.message().contains(error.message()), "call {nth}: {again}, not {error}");
                }
                drop(engine);
                assert!(stub.is_clean(), "call {nth} left something behind");
            }
            eprintln!("{calls} calls, stages: {stages:#?}");
            for kernel in kernels {
                assert!(stages.iter().any(|stage| stage.starts_with(kernel)), "{kernel} in {stages:#?}");
            }
            stub.fail(0, 0);
            let engine = opened();
            use_it(&engine).unwrap();
        }
    });
}

/// What the plan says is what is allocated, for any number of experts on the device.
#[test]
fn as_many_experts_as_a_budget_has_room_for_are_placed_and_no_byte_more_is_allocated() {
    on_stub("as_many_experts_as_a_budget_has_room_for_are_placed_and_no_byte_more_is_allocated", |stub| {
        const RESERVE: u64 = 512 << 20;
        let model = Model::open(folder()).unwrap();
        let held = |options: EngineOptions| {
            let engine = Engine::new(&model, options).unwrap();
            let opened = stub.held();
            use_it(&engine).unwrap();
            assert_eq!(stub.held(), opened, "steps allocate nothing");
            drop(engine);
            assert!(stub.is_clean());
            opened as u64
        };
        let bytes = [0, 1, 4, 7, 8].map(|experts| held(EngineOptions { gpu_experts: Some(experts), ..options() }));
        eprintln!("device memory with 0, 1, 4, 7 and 8 experts: {bytes:?}");
        let one = bytes[1] - bytes[0];
        assert!(one > 0 && bytes[2] - bytes[0] == 4 * one && bytes[3] - bytes[0] == 7 * one, "{bytes:?}");
        assert_eq!(held(options()), bytes[4], "all fit");
        for (budget, expected) in [(bytes[2] + one / 2, bytes[2]), (bytes[3], bytes[3]), (bytes[0], bytes[0])] {
            let got = held(EngineOptions { gpu_bytes: budget + RESERVE, ..options() });
            assert_eq!(got, expected, "a budget of {budget} bytes and the reserve");
        }
        let refused = |options| Engine::new(&model, options).err().unwrap();
        let small = refused(EngineOptions { gpu_bytes: RESERVE + 4096, ..options() });
        assert_eq!(small.kind(), ErrorKind::OutOfMemory);
        assert!(small.message().contains(&(RESERVE + 4096).to_string()), "{small}");
        let many = refused(EngineOptions { gpu_experts: Some(9), ..options() });
        assert_eq!(many.kind(), ErrorKind::InvalidArgument);
        assert!(many.message().contains("gpu_experts is 9") && many.message().contains("8 experts"), "{many}");
        assert!(stub.is_clean());
    });
}

/// Of experts shared out, the host's may have less memory than they need; those on the device have none of it.
#[test]
fn the_hosts_experts_may_be_read_when_they_are_needed() {
    on_stub("the_hosts_experts_may_be_read_when_they_are_needed", |stub| {
        let model = Model::open(folder()).unwrap();
        let engine = |gpu_experts, host_bytes| {
            Engine::new(&model, EngineOptions { gpu_experts: Some(gpu_experts), host_bytes, ..options() })
        };
        let tight = engine(0, 200_000).unwrap();
        use_it(&tight).unwrap();
        let stats = tight.metrics().host_experts;
        assert!(stats.misses > 0 && stats.read_bytes > 0 && stats.frame_bytes <= 200_000, "{stats:?}");
        let refused = engine(7, 1).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        assert!(refused.message().contains("host_bytes is 1"), "{refused}");
        drop(tight);
        assert!(stub.is_clean());
        let all = engine(8, 1).unwrap();
        assert_eq!(all.metrics().host_experts, Default::default(), "all are on the device");
    });
}

/// Pitfall 65: a context of a million tokens takes pages as it fills, not scratch, and what does not fit is refused with its
/// bytes before anything is allocated.
#[test]
fn a_longer_context_takes_no_scratch_and_what_does_not_fit_is_refused_before_allocating() {
    on_stub("a_longer_context_takes_no_scratch_and_what_does_not_fit_is_refused_before_allocating", |stub| {
        let held = |positions: usize| {
            let copy = subject::with_context(positions);
            let engine = Engine::new(&Model::open(copy.path()).unwrap(), options()).unwrap();
            let held = stub.held();
            drop(engine);
            held
        };
        let (short, long) = (held(65_536), held(1 << 20));
        eprintln!("device memory: {short} bytes for 65,536 tokens of context, {long} for 1,048,576");
        // page tables, and a row's candidates of the choice among 262,144 entries
        assert!(long >= short && long - short < 4 << 20, "{short} and {long} bytes");

        let copy = subject::with_context(1 << 20);
        let model = Model::open(copy.path()).unwrap();
        let before = stub.allocations();
        stub.room(400 << 20);
        let error = Engine::new(&model, options()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        for part in ["Stub", "bytes do not fit", &(400 << 20).to_string(), "prefill_chunk"] {
            assert!(error.message().contains(part), "{part} in {error}");
        }
        assert_eq!(stub.allocations(), before, "refused before anything was allocated");
        assert!(stub.is_clean());
    });
}

/// A device that computes nothing fails every operation of the self-test, so each of them can fail, and nothing panics.
#[test]
fn the_self_test_fails_on_a_device_that_computes_nothing() {
    on_stub("the_self_test_fails_on_a_device_that_computes_nothing", |_| {
        let groups = [
            "embed",
            "rms_norm",
            "quantise",
            "rotations",
            "linear",
            "hyper",
            "argmax",
            "top_logits",
            "sample",
            "top_k",
            "route",
            "group",
            "experts",
            "swiglu",
            "combine",
            "watch",
            "insert",
            "compress",
            "indexer",
            "attend",
        ];
        for group in groups {
            let options = SelfTestOptions { only: Some(group.into()), small: true, ..SelfTestOptions::default() };
            let mut failed = 0;
            let passed = self_test(&options, &mut |check| failed += usize::from(!check.passed())).unwrap();
            assert!(!passed && failed > 0, "{group} passes though nothing was computed");
        }
    });
}
