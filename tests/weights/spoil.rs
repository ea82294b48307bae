//! Changing the tiny checkpoint before it is written, and its index after.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::tiny_checkpoint::{HIDDEN, Owned, Tiny, VOCAB, size};

impl Tiny {
    /// Turns the MTP block into a DSpark drafter of three stages that reads layers 0, 1 and 2.
    pub(crate) fn into_dspark(mut self) -> Self {
        self.tensors.retain(|t| !t.0.starts_with("mtp."));
        for stage in 0..3 {
            self.block(&format!("mtp.{stage}."), 0, false);
        }
        self.fp8("mtp.0.main_proj", HIDDEN, 3 * HIDDEN);
        self.add("mtp.0.main_norm.weight", "BF16", &[HIDDEN]);
        self.add("mtp.2.norm.weight", "BF16", &[HIDDEN]);
        self.hyper("mtp.2.hc_head", 4, 1);
        for name in ["markov_w1", "markov_w2"] {
            self.add(&format!("mtp.2.markov_head.{name}.weight"), "BF16", &[VOCAB, 16]);
        }
        self.add("mtp.2.confidence_head.proj.weight", "BF16", &[1, HIDDEN + 16]);
        self.config["compress_ratios"] = json!([0, 4, 128, 0, 0, 0]);
        self.config["dspark_block_size"] = json!(5);
        self.config["dspark_markov_rank"] = json!(16);
        self.config["dspark_noise_token_id"] = json!(7);
        self.config["dspark_target_layer_ids"] = json!([0, 1, 2]);
        self
    }

    /// Takes the tensor called `name` out.
    pub(crate) fn remove(&mut self, name: &str) -> Owned {
        let i = self.tensors.iter().position(|t| t.0 == name).unwrap_or_else(|| panic!("no tensor {name}"));
        self.tensors.remove(i)
    }

    /// Gives the tensor called `name` another dtype and shape, with ones for bytes.
    pub(crate) fn reshape(&mut self, name: &str, dtype: &'static str, shape: &[usize]) {
        let bytes = vec![1; shape.iter().product::<usize>() * size(dtype)];
        *self.get(name) = (name.to_owned(), dtype, shape.to_vec(), bytes);
    }
}

/// Reads the index of `dir`.
pub(crate) fn read_index(dir: &Path) -> Value {
    let text = fs::read_to_string(dir.join("model.safetensors.index.json")).expect("the index was written");
    serde_json::from_str(&text).expect("the index is JSON")
}
