//! Passes over a whole row of logits, written in lanes so that the compiler vectorises them.

use crate::TokenId;
use crate::error::{Result, bail};

/// Independent running maxima per pass.
const LANES: usize = 16;

/// Largest logit of a row that can be sampled from.
///
/// # Errors
/// `InvalidArgument` for an empty row, `Numeric` for NaN, plus infinity, or minus infinity only.
pub(super) fn checked_max(logits: &[f32]) -> Result<f32> {
    if logits.is_empty() {
        bail!(InvalidArgument, "there are no logits to sample from");
    }
    // NaN and plus infinity are the two values that are not below infinity.
    let healthy = logits.iter().fold(true, |healthy, &logit| healthy & (logit < f32::INFINITY));
    if !healthy {
        for (id, logit) in (0 as TokenId..).zip(logits) {
            if logit.is_nan() || *logit == f32::INFINITY {
                bail!(Numeric, "logit of token id {id} is {logit}");
            }
        }
    }
    let max = max(logits);
    if max == f32::NEG_INFINITY {
        bail!(Numeric, "all {} logits are minus infinity: no token is allowed", logits.len());
    }
    Ok(max)
}

/// Largest of values without NaN; minus infinity for none.
pub(super) fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}
