//! Has the pages of the host's experts mapped before a step needs them: a step that met them for the first time would wait
//! for the kernel, and perhaps for the disk.
//!
//! Where they are more than the memory that is available, nothing is read ahead: what comes later would push out what came
//! first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::engine::options::available_memory;
use crate::model::Model;
use crate::model::weights::Matrix;

/// A thread that maps pages, until it has them all or this is dropped.
pub(super) struct Warming {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    /// Bytes that are mapped by now, and those that will be.
    done: AtomicU64,
    all: u64,
}

impl Warming {
    /// Begins with the experts from number `first` on of each layer.
    pub(super) fn start(model: &Arc<Model>, first: usize) -> Self {
        let all = matrices(model, first).map(|matrix| matrix.byte_len() as u64).sum();
        let fits = available_memory().is_none_or(|available| all <= available);
        tracing::info!(bytes = all, fits, "pages of the host's experts are mapped ahead");
        let shared =
            Arc::new(Shared { stop: AtomicBool::new(false), done: AtomicU64::new(0), all: if fits { all } else { 0 } });
        let (own, model) = (Arc::clone(&shared), Arc::clone(model));
        let work = move || {
            for matrix in matrices(&model, first) {
                // an error is that of the step that needs the matrix
                if own.stop.load(Ordering::Relaxed) || matrix.ready().is_err() {
                    return;
                }
                own.done.fetch_add(matrix.byte_len() as u64, Ordering::Relaxed);
            }
        };
        // without the thread a step maps what it needs
        let spawn = || std::thread::Builder::new().name("dsv4-pages".to_owned()).spawn(work).ok();
        let thread = if fits { spawn() } else { None };
        Self { shared, thread }
    }

    /// Bytes that are mapped, and those that will be.
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.shared.done.load(Ordering::Relaxed), self.shared.all)
    }
}

impl Drop for Warming {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // what it did does not matter any more
            drop(thread.join());
        }
    }
}

/// The matrices of all layers' experts from number `first` on.
fn matrices(model: &Model, first: usize) -> impl Iterator<Item = &Matrix> {
    let experts = model.weights().layers.iter().flat_map(move |layer| layer.ffn.experts.iter().skip(first));
    experts.flat_map(|expert| [&expert.w1, &expert.w3, &expert.w2])
}
