//! What a checkpoint consists of, by element type and by purpose.

#![forbid(unsafe_code)]

use std::fmt;

use super::Checkpoint;
use crate::tensor::DType;

/// What a tensor is for, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// `embed`.
    Embedding,
    /// `attn.*` without norms, compressor and indexer.
    Attention,
    /// `attn.compressor.*` and `attn.indexer.*` without norms.
    Compressor,
    /// `ffn.gate.*`.
    Router,
    /// `ffn.experts.*`.
    RoutedExperts,
    /// `ffn.shared_experts.*`.
    SharedExperts,
    /// `hc_*` of the trunk.
    HyperConnections,
    /// Every norm of the trunk.
    Norms,
    /// `head`.
    Head,
    /// Everything of `mtp.*`.
    Draft,
    /// Anything else.
    Other,
}

impl Category {
    /// All, in the order of [`Inventory::by_category`].
    pub const ALL: [Self; 11] = [
        Self::Embedding,
        Self::Attention,
        Self::Compressor,
        Self::Router,
        Self::RoutedExperts,
        Self::SharedExperts,
        Self::HyperConnections,
        Self::Norms,
        Self::Head,
        Self::Draft,
        Self::Other,
    ];

    /// The category of the tensor called `name`.
    pub fn of(name: &str) -> Self {
        if name.starts_with("mtp.") {
            return Self::Draft;
        }
        let local = match name.strip_prefix("layers.") {
            Some(rest) => rest.split_once('.').map_or(rest, |(_, local)| local),
            None => name,
        };
        match local {
            "embed.weight" => Self::Embedding,
            "head.weight" => Self::Head,
            _ if local.ends_with("norm.weight") => Self::Norms,
            _ if local.starts_with("hc_") => Self::HyperConnections,
            _ if local.starts_with("attn.compressor.") || local.starts_with("attn.indexer.") => Self::Compressor,
            _ if local.starts_with("attn.") => Self::Attention,
            _ if local.starts_with("ffn.gate.") => Self::Router,
            _ if local.starts_with("ffn.experts.") => Self::RoutedExperts,
            _ if local.starts_with("ffn.shared_experts.") => Self::SharedExperts,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::Compressor => "compressor and indexer",
            Self::Router => "router",
            Self::RoutedExperts => "routed experts",
            Self::SharedExperts => "shared experts",
            Self::HyperConnections => "hyper-connections",
            Self::Norms => "norms",
            Self::Head => "head",
            Self::Draft => "draft",
            Self::Other => "other",
        })
    }
}

/// Number and size of some tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Number of tensors.
    pub tensors: usize,
    /// Sum of their bytes.
    pub bytes: u64,
}

impl Share {
    fn add(&mut self, bytes: u64) {
        self.tensors += 1;
        self.bytes += bytes;
    }
}

/// Summary of a checkpoint's tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inventory {
    /// All of them.
    pub total: Share,
    /// By element type, in the order of [`DType::ALL`].
    pub by_dtype: [(DType, Share); 6],
    /// By purpose, in the order of [`Category::ALL`].
    pub by_category: [(Category, Share); 11],
}

impl Checkpoint {
    /// Counts the tensors by element type and purpose; reads no weights.
    pub fn inventory(&self) -> Inventory {
        let mut inventory = Inventory {
            total: Share::default(),
            by_dtype: DType::ALL.map(|dtype| (dtype, Share::default())),
            by_category: Category::ALL.map(|category| (category, Share::default())),
        };
        for tensor in self.tensors() {
            let bytes = tensor.byte_len() as u64;
            let category = Category::of(tensor.name());
            inventory.total.add(bytes);
            inventory.by_dtype.iter_mut().filter(|(d, _)| *d == tensor.dtype()).for_each(|(_, share)| share.add(bytes));
            inventory.by_category.iter_mut().filter(|(c, _)| *c == category).for_each(|(_, share)| share.add(bytes));
        }
        inventory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_name_has_its_category() {
        let expected = [
            ("embed.weight", Category::Embedding),
            ("head.weight", Category::Head),
            ("norm.weight", Category::Norms),
            ("hc_head_fn", Category::HyperConnections),
            ("layers.10.hc_attn_base", Category::HyperConnections),
            ("layers.10.attn.q_norm.weight", Category::Norms),
            ("layers.10.attn_norm.weight", Category::Norms),
            ("layers.10.attn.attn_sink", Category::Attention),
            ("layers.10.attn.wo_a.scale", Category::Attention),
            ("layers.10.attn.compressor.ape", Category::Compressor),
            ("layers.10.attn.compressor.norm.weight", Category::Norms),
            ("layers.10.attn.indexer.compressor.wkv.weight", Category::Compressor),
            ("layers.0.ffn.gate.tid2eid", Category::Router),
            ("layers.0.ffn.experts.3.w1.weight", Category::RoutedExperts),
            ("layers.0.ffn.shared_experts.w1.scale", Category::SharedExperts),
            ("mtp.0.ffn.experts.3.w1.weight", Category::Draft),
            ("vision.patch", Category::Other),
        ];
        for (name, category) in expected {
            assert_eq!(Category::of(name), category, "{name}");
        }
    }
}
