//! In which order the kernels take the columns of a row.
//!
//! Decoding a group of stored bytes yields its values in an order of the hardware's choosing; instead of shuffling
//! weights, which are many, the inputs are brought into the same order once per product.
#![forbid(unsafe_code)]

/// Columns per block of the blocked product, and of the prepared input that it reads; a multiple of every group.
pub(in crate::backend::cpu) const K_BLOCK: usize = 512;

/// An order of columns, named after the stored element that asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend::cpu) enum Form {
    /// As stored.
    Plain,
    /// Four to a dword: byte plane by byte plane.
    Bytes,
    /// Two to a dword: low halves, then high halves.
    Halves,
    /// Packed nibbles: each dword's eight one after another, whatever block of 32 it belongs to.
    Nibbles,
}

impl Form {
    /// Columns in a group, the unit of reordering, for vectors of `lanes` floats.
    pub(in crate::backend::cpu) fn group(self, lanes: usize) -> usize {
        lanes
            * match self {
                Self::Plain => 1,
                Self::Halves => 2,
                Self::Bytes => 4,
                Self::Nibbles => 8,
            }
    }

    /// The place among a group's decoded values of the group's column `c`.
    fn slot(self, lanes: usize, c: usize) -> usize {
        match self {
            Self::Plain => c,
            Self::Halves => c % 2 * lanes + c / 2,
            Self::Bytes => c % 4 * lanes + c / 4,
            Self::Nibbles => c % 8 * lanes + c / 8,
        }
    }
}

/// `order[slot]` = column of a group that belongs in `slot`; the first [`Form::group`] entries count.
pub(in crate::backend::cpu) fn permutation(form: Form, lanes: usize) -> [u8; 128] {
    let mut order = [0; 128];
    for c in 0..form.group(lanes) {
        order[form.slot(lanes, c)] = c as u8;
    }
    order
}
