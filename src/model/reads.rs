//! Which weights one decoded token reads: the yardstick of decoding speed, which memory bandwidth decides.

#![forbid(unsafe_code)]

use super::Model;
use crate::weights::{Category, Tensor};

/// The weights that the trunk reads to decode one token with some choice of experts.
#[derive(Clone, Debug)]
pub struct DecodeReads {
    /// Tensors that are read whole, sorted by name.
    pub tensors: Vec<Tensor>,
    /// Bytes of the rows picked out of tables by the token: its embedding and its rows of the hash-routing tables.
    pub row_bytes: u64,
}

impl DecodeReads {
    /// All bytes read.
    pub fn bytes(&self) -> u64 {
        self.row_bytes + self.tensors.iter().map(|tensor| tensor.byte_len() as u64).sum::<u64>()
    }

    /// Bytes read of one kind of tensors; table rows count for none.
    pub fn bytes_of(&self, category: Category) -> u64 {
        let of_kind = self.tensors.iter().filter(|tensor| Category::of(tensor.name()) == category);
        of_kind.map(|tensor| tensor.byte_len() as u64).sum()
    }
}

impl Model {
    /// What decoding one token reads if every layer routes it to the `num_experts_per_tok` experts from number
    /// `first_expert` on (wrapping around); reads no weights. The draft module is not part of it.
    pub fn decode_reads(&self, first_expert: usize) -> DecodeReads {
        let config = self.config();
        let (experts, chosen) = (config.n_routed_experts, config.num_experts_per_tok);
        let is_chosen = |expert: usize| (expert + experts - first_expert % experts) % experts < chosen;
        let mut reads = DecodeReads { tensors: Vec::new(), row_bytes: 0 };
        for tensor in self.checkpoint().tensors() {
            let name = tensor.name();
            let is_read = match Category::of(name) {
                Category::Draft | Category::Other => false,
                Category::RoutedExperts => expert_of(name).is_some_and(is_chosen),
                Category::Embedding => {
                    reads.row_bytes += row_bytes(&tensor);
                    false
                }
                Category::Router if name.ends_with(".tid2eid") => {
                    reads.row_bytes += row_bytes(&tensor);
                    false
                }
                _ => true,
            };
            if is_read {
                reads.tensors.push(tensor);
            }
        }
        reads
    }
}

/// Number of the routed expert that the tensor called `name` belongs to.
fn expert_of(name: &str) -> Option<usize> {
    let (_, rest) = name.split_once(".ffn.experts.")?;
    rest.split('.').next()?.parse().ok()
}

/// Bytes of one row of a table.
fn row_bytes(tensor: &Tensor) -> u64 {
    let rows = tensor.shape().first().copied().unwrap_or(1).max(1);
    (tensor.byte_len() / rows) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_token_of_tiny_v4_reads_two_of_eight_experts_and_one_row_of_each_table() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-v4");
        let model = Model::open(folder).unwrap();
        let config = model.config();
        let all: u64 = model.checkpoint().tensors().map(|t| t.byte_len() as u64).sum();
        // experts 7 and 0: the choice wraps around
        let reads = model.decode_reads(7);
        let experts: Vec<_> = reads.tensors.iter().filter_map(|t| expert_of(t.name())).collect();
        // w1, w2, w3 with their scales, two experts, six layers
        assert_eq!(experts.len(), 6 * 2 * config.num_hidden_layers);
        assert!(experts.iter().all(|e| [7, 0].contains(e)), "{experts:?}");
        let rows = config.hidden_size * 2 + config.num_hash_layers * config.num_experts_per_tok * 8;
        assert_eq!(reads.row_bytes, rows as u64);
        assert!(reads.bytes() < all);
        assert_eq!(reads.bytes_of(Category::Head), (config.vocab_size * config.hidden_size * 2) as u64);
        assert!(reads.tensors.iter().all(|t| !t.name().starts_with("mtp.")));
        assert_eq!(reads.bytes(), model.decode_reads(3).bytes(), "experts are alike");
    }
}
