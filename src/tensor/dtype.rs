//! Element types that occur in DeepSeek-V4 checkpoints.

use std::fmt;

/// Storage type of a checkpoint tensor. The names are those of the safetensors format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities (weights).
    F8E4M3,
    /// 8-bit power of two, `2^(e-127)` (block scales).
    F8E8M0,
    /// Signed byte; in V4 checkpoints always two packed E2M1 values.
    I8,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
    /// 64-bit signed integer (hash-routing tables).
    I64,
}

impl DType {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::F8E4M3, Self::F8E8M0, Self::I8, Self::Bf16, Self::F32, Self::I64];

    /// Bytes of one stored element.
    pub const fn size(self) -> usize {
        match self {
            Self::F8E4M3 | Self::F8E8M0 | Self::I8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
            Self::I64 => 8,
        }
    }

    /// The safetensors name, such as `F8_E4M3`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::I8 => "I8",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::I64 => "I64",
        }
    }

    /// The type of a safetensors name, or `None` for one that no V4 checkpoint uses.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|d| d.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
