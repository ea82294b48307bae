//! A borrowed weight matrix in any of the checkpoint's storage forms.

/// How the elements of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixFormat {
    /// One E4M3 byte an element, one scale per 128x128 tile.
    E4m3,
    /// Two E2M1 values a byte along the columns, even column in the low nibble; one E8M0 scale per row and 32 columns.
    E2m1,
    /// bfloat16, no scale.
    Bf16,
    /// float32, no scale.
    F32,
}

/// Block scales of a quantised matrix.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// The format has none.
    None,
    /// One byte `e` a block, meaning `2^(e-127)` (255 is NaN).
    E8m0(&'a [u8]),
    /// Little-endian float32 a block (the `-Base` releases); not aligned.
    F32(&'a [u8]),
}

/// A weight matrix `[rows, cols]` in checkpoint storage, row-major; `y = W x` takes `cols` inputs to `rows` outputs.
///
/// It may be a band of rows of a larger stored matrix: `first_row` is the stored row of row 0, which decides the
/// 128-row scale tile an E4M3 row belongs to. `data` starts at row 0 of the band; `scales` is the whole stored table.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<'a> {
    /// Storage form of `data`.
    pub format: MatrixFormat,
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs; a multiple of 128 for E4M3 and of 32 for E2M1.
    pub cols: usize,
    /// Row-major elements: `rows * cols` of them (`rows * cols / 2` bytes for E2M1). Not aligned.
    pub data: &'a [u8],
    /// `[ceil(stored rows / 128), ceil(cols / 128)]` for E4M3, `[rows, cols / 32]` for E2M1.
    pub scales: Scales<'a>,
    /// Stored row of row 0 (E4M3 only; 0 otherwise).
    pub first_row: usize,
    /// Round each dequantised weight to bf16 before use (the reference does so to `wo_a`; only visible with F32 scales).
    pub round_to_bf16: bool,
}

impl<'a> MatrixRef<'a> {
    /// Bytes of one stored row.
    pub fn row_bytes(&self) -> usize {
        match self.format {
            MatrixFormat::E4m3 => self.cols,
            MatrixFormat::E2m1 => self.cols / 2,
            MatrixFormat::Bf16 => self.cols * 2,
            MatrixFormat::F32 => self.cols * 4,
        }
    }

    /// The band of `count` rows from `first`.
    ///
    /// # Panics
    /// If the band does not lie inside the matrix.
    #[must_use]
    pub fn band(&self, first: usize, count: usize) -> MatrixRef<'a> {
        let bytes = self.row_bytes();
        let scales = match (self.format, self.scales) {
            (MatrixFormat::E2m1, Scales::E8m0(s)) => {
                let per_row = self.cols / 32;
                Scales::E8m0(&s[first * per_row..(first + count) * per_row])
            }
            (_, s) => s,
        };
        let first_row = if self.format == MatrixFormat::E4m3 { self.first_row + first } else { 0 };
        MatrixRef { rows: count, data: &self.data[first * bytes..(first + count) * bytes], scales, first_row, ..*self }
    }

    /// Whether the reference quantises the input of a product with this matrix (FP8 and FP4 weights).
    pub fn is_quantised(&self) -> bool {
        matches!(self.format, MatrixFormat::E4m3 | MatrixFormat::E2m1)
    }
}
