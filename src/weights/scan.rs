//! Looks for weights that were damaged without changing any size: blocks of zeros, scales and values that are no numbers.
//!
//! Nothing here is needed to run a model: it reads every byte, so it is for `dsv4 verify`.

#![forbid(unsafe_code)]

use std::fmt;

use super::{Checkpoint, Tensor};
use crate::error::{Result, bail, plural};
use crate::tensor::DType;

/// Bytes read between two calls of the progress callback; a multiple of every element size.
const CHUNK: usize = 16 << 20;

/// A tensor that a trained model would not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspicion {
    /// Name of the tensor.
    pub tensor: String,
    /// What is odd about it.
    pub finding: Finding,
}

/// What is odd about a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Every element of a norm, an embedding, a head or a matrix is zero.
    AllZero,
    /// So many elements are NaN or infinite (scale bytes of 255 included).
    NotFinite(u64),
}

impl fmt::Display for Suspicion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.finding {
            Finding::AllZero => write!(f, "tensor {} is all zeros", self.tensor),
            Finding::NotFinite(count) => {
                let elements = plural(count, "element");
                write!(f, "tensor {} has {elements} not finite", self.tensor)
            }
        }
    }
}

impl Checkpoint {
    /// Reads every byte of the checkpoint and lists the tensors that a trained model would not have.
    ///
    /// `progress` is called with the bytes read and [`Self::total_bytes`] at least every 16 MiB; returning `false` stops.
    ///
    /// # Errors
    /// `Cancelled` if stopped; `Io` or `Corrupt` if a shard can no longer be read.
    pub fn suspicious(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Vec<Suspicion>> {
        let mut found = Vec::new();
        let mut done = 0;
        for tensor in self.tensors() {
            tensor.shard.check_size()?;
            let mut tally = Tally { not_finite: 0, is_zero: true };
            let mut start = 0;
            while start < tensor.byte_len() {
                let end = tensor.byte_len().min(start + CHUNK);
                tensor.populate(start..end)?;
                tally.add(tensor.dtype(), &tensor.bytes()[start..end]);
                done += (end - start) as u64;
                start = end;
                if !progress(done, self.total_bytes()) {
                    bail!(Cancelled, "the scan of {} was stopped", self.dir().display());
                }
            }
            found.extend(tally.finding(&tensor).map(|finding| Suspicion { tensor: tensor.name().to_owned(), finding }));
        }
        Ok(found)
    }
}

/// What has been seen of one tensor.
struct Tally {
    not_finite: u64,
    is_zero: bool,
}

impl Tally {
    fn add(&mut self, dtype: DType, bytes: &[u8]) {
        // negative zeros of the float formats count as numbers: a writer that lost data leaves zero bytes
        self.is_zero &= bytes.iter().all(|&b| b == 0);
        self.not_finite += match dtype {
            DType::F8E4M3 => bytes.iter().filter(|&&b| b & 0x7F == 0x7F).count(),
            DType::F8E8M0 => bytes.iter().filter(|&&b| b == 0xFF).count(),
            DType::Bf16 => bytes.chunks_exact(2).filter(|b| b[1] & 0x7F == 0x7F && b[0] & 0x80 != 0).count(),
            DType::F32 => bytes.chunks_exact(4).filter(|b| b[3] & 0x7F == 0x7F && b[2] & 0x80 != 0).count(),
            DType::I8 | DType::I64 => 0,
        } as u64;
    }

    fn finding(&self, tensor: &Tensor) -> Option<Finding> {
        if self.not_finite > 0 {
            return Some(Finding::NotFinite(self.not_finite));
        }
        // biases, sinks and tables of one dimension may be zero; a scale byte of zero is 2^-127, far below any weight
        let name = tensor.name();
        let is_weight = name.ends_with(".weight") || name.ends_with(".scale") || name.ends_with("_fn");
        (self.is_zero && is_weight && tensor.byte_len() > 0).then_some(Finding::AllZero)
    }
}
