//! Inputs of products, brought into the order in which weights decode: once, however many weights meet them.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::{ALIGNED, FEW, Job, Worker, reserve, storage};
use crate::backend::cpu::Pool;
use crate::backend::cpu::simd::{DIGIT_COLS, Digits, Few, Form, K_BLOCK, Simd, TOKEN_BLOCK, permutation};
use crate::error::Result;

/// An input in the order some storage wants it, at `offset` of the prepared inputs: for each block of `K_BLOCK` columns
/// the rows of all tokens, the last block narrower, zeros behind the last column up to a whole group. Or `interleaved`, for
/// [`Few`], each of its shares: vector by vector along the columns, of each the tokens'.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    values: &'a [f32],
    stride: usize,
    tokens: usize,
    cols: usize,
    pub(super) padded: usize,
    form: Form,
    pub(super) interleaved: bool,
    pub(super) offset: usize,
    /// How many [`Digits`] it takes as well, and where they start.
    pub(super) digits: usize,
    digits_offset: usize,
}

impl<'a> Input<'a> {
    /// The input of some tokens of a job, to be prepared at `offset` and, if it comes in digits, `digits_offset`.
    pub(super) fn new(job: &Job<'a>, tokens: Range<usize>, simd: Simd, offset: usize, digits_offset: usize) -> Self {
        let (values, tokens) = (&job.input[tokens.start * job.input_stride..], tokens.len());
        let form = storage(&job.weight).form();
        let cols = job.weight.cols;
        let padded = cols.next_multiple_of(form.group(simd.lanes()));
        let interleaved = (2..=FEW).contains(&tokens) && Few::takes(storage(&job.weight), cols, simd);
        let in_digits = form == Form::Nibbles && tokens == 1 && simd.takes_digits();
        let digits = if in_digits { cols.div_ceil(DIGIT_COLS) } else { 0 };
        Self {
            values,
            stride: job.input_stride,
            tokens,
            cols,
            padded,
            form,
            interleaved,
            offset,
            digits,
            digits_offset,
        }
    }

    /// Whether both would be prepared alike.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let shape = |i: &Self| (i.stride, i.tokens, i.cols, i.form, i.interleaved);
        self.values.as_ptr() == other.values.as_ptr() && shape(self) == shape(other)
    }

    /// Its part of all digits.
    pub(super) fn own_digits<'d>(&self, digits: &'d [Digits]) -> &'d [Digits] {
        &digits[self.digits_offset..][..self.digits]
    }

    /// Floats it takes prepared.
    pub(super) fn prepared_len(&self) -> usize {
        self.tokens * self.padded
    }

    /// Writes columns `first_col..` of the tokens from `first_token`, one row of `width` a token.
    fn write(&self, order: &[u8], first_col: usize, width: usize, first_token: usize, out: &mut [f32]) {
        for (t, row) in out.chunks_mut(width).enumerate() {
            let from = &self.values[(first_token + t) * self.stride..][..self.cols][first_col..];
            for (group, to) in row.chunks_mut(order.len()).enumerate() {
                let from = &from[(group * order.len()).min(from.len())..];
                for (to, &c) in to.iter_mut().zip(order) {
                    *to = from.get(usize::from(c)).copied().unwrap_or(0.0);
                }
            }
        }
    }

    /// Writes `width` columns from `first_col` of the tokens from `first_token`, vectors of `lanes` of each in turn.
    fn interleave(
        &self,
        order: &[u8],
        lanes: usize,
        first_col: usize,
        width: usize,
        first_token: usize,
        out: &mut [f32],
    ) {
        let tokens = out.len() / width;
        for t in 0..tokens {
            let row = &self.values[(first_token + t) * self.stride..][first_col..][..width];
            for (to, from) in out.chunks_mut(tokens * order.len()).zip(row.chunks(order.len())) {
                let vectors = to.chunks_mut(lanes).skip(t).step_by(tokens);
                for (to, order) in vectors.zip(order.chunks(lanes)) {
                    for (to, &c) in to.iter_mut().zip(order) {
                        *to = from[usize::from(c)];
                    }
                }
            }
        }
    }
}

/// Some columns of some tokens of an input to bring into order.
struct Piece<'u> {
    input: Input<'u>,
    first_col: usize,
    width: usize,
    first_token: usize,
    out: &'u mut [f32],
    digits: &'u mut [Digits],
}

/// Fills `prepared` with all inputs.
pub(super) fn prepare(
    pool: &Pool,
    simd: Simd,
    inputs: &[Input<'_>],
    prepared: &mut [f32],
    digits: &mut [Digits],
    workers: &mut [Worker],
) -> Result<()> {
    let mut pieces = Vec::new();
    let (mut rest, mut digits) = (prepared, digits);
    for input in inputs {
        let (mut own, after) = rest.split_at_mut(input.prepared_len().next_multiple_of(ALIGNED));
        rest = after;
        let columns = || (0..input.padded).step_by(K_BLOCK);
        let mut add = |first_col: usize, tokens: Range<usize>| -> Result<()> {
            let width = K_BLOCK.min(input.padded - first_col);
            let out = own.split_off_mut(..tokens.len() * width).expect("the input's own floats");
            let in_digits = if input.digits > 0 { width.div_ceil(DIGIT_COLS) } else { 0 };
            let own_digits = digits.split_off_mut(..in_digits).expect("the input's own digits");
            reserve(&mut pieces, 1, "the inputs of a step")?;
            let first_token = tokens.start;
            pieces.push(Piece { input: *input, first_col, width, first_token, out, digits: own_digits });
            Ok(())
        };
        if input.interleaved {
            for share in Few::shares(input.tokens) {
                columns().try_for_each(|first_col| add(first_col, share.clone()))?;
            }
            continue;
        }
        for first_col in columns() {
            for first in (0..input.tokens).step_by(TOKEN_BLOCK) {
                add(first_col, first..input.tokens.min(first + TOKEN_BLOCK))?;
            }
        }
    }
    let small = inputs.iter().map(Input::prepared_len).sum::<usize>() < pool.least_values();
    let workers = if small { &mut workers[..1] } else { workers };
    pool.share(workers, &mut pieces, |piece, _| {
        let Piece { input, first_col, width, first_token, out, digits } = piece;
        let group = input.form.group(simd.lanes());
        let order = permutation(input.form, simd.lanes());
        if input.interleaved {
            input.interleave(&order[..group], simd.lanes(), *first_col, *width, *first_token, out);
        } else {
            input.write(&order[..group], *first_col, *width, *first_token, out);
        }
        let columns = &input.values[..input.cols][*first_col..];
        for (columns, digits) in columns.chunks(DIGIT_COLS).zip(digits.iter_mut()) {
            digits.fill(simd, columns);
        }
    });
    Ok(())
}
