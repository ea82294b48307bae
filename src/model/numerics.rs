//! The four numerics modes and the rounding points each of them has (ARCHITECTURE.md, "Numerics").

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};

/// How closely a run follows the roundings of the official inference code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Numerics {
    /// Every quantisation point of the official code: FP8 activations, FP8 KV, Hadamard and FP4 index vectors, bf16
    /// between operations.
    #[default]
    Reference,
    /// As `Reference`, and the attention output is cast to FP8 (blocks of 128) before `wo_a`, as production servers do.
    Served,
    /// Exactly dequantised weights, quantised caches, unquantised activations in float32.
    Kvquant,
    /// float32 arithmetic and nothing else rounded: the yardstick.
    Exact,
}

impl Numerics {
    /// All modes, in the order of their numbers in the C API.
    pub const ALL: [Self; 4] = [Self::Reference, Self::Served, Self::Kvquant, Self::Exact];

    /// The mode's name as users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Served => "served",
            Self::Kvquant => "kvquant",
            Self::Exact => "exact",
        }
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Numerics {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|n| n.name() == s).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("unknown numerics mode {s:?}; one of reference, served, kvquant, exact"),
            )
        })
    }
}

/// The rounding points one by one. Engines use the set of a [`Numerics`] mode; tests switch single points to prove
/// that the comparison with the goldens notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// Results of operations are stored as bf16.
    pub bf16: bool,
    /// Inputs of FP8 and FP4 linears: E4M3, blocks of 128.
    pub act_fp8: bool,
    /// Window and compressed KV rows: E4M3, blocks of 64, on the non-rotary dimensions.
    pub kv_fp8: bool,
    /// Hadamard rotation of index queries and keys.
    pub index_rotate: bool,
    /// Index queries: E2M1, blocks of 32.
    pub index_query_fp4: bool,
    /// Index keys: E2M1, blocks of 32.
    pub index_key_fp4: bool,
    /// Attention weights rounded to bf16 before they meet the values.
    pub attention_bf16: bool,
    /// Attention output (after the inverse rotation): E4M3, blocks of 128.
    pub output_fp8: bool,
}

impl From<Numerics> for Rounding {
    fn from(numerics: Numerics) -> Self {
        let none = Self {
            bf16: false,
            act_fp8: false,
            kv_fp8: false,
            index_rotate: false,
            index_query_fp4: false,
            index_key_fp4: false,
            attention_bf16: false,
            output_fp8: false,
        };
        match numerics {
            Numerics::Exact => none,
            Numerics::Kvquant => Self { kv_fp8: true, index_rotate: true, index_key_fp4: true, ..none },
            Numerics::Reference | Numerics::Served => Self {
                bf16: true,
                act_fp8: true,
                kv_fp8: true,
                index_rotate: true,
                index_query_fp4: true,
                index_key_fp4: true,
                attention_bf16: true,
                output_fp8: numerics == Numerics::Served,
            },
        }
    }
}
