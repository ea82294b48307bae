use super::*;
use crate::error::ErrorKind;
use crate::tensor::format::{E2M1, E4M3, bf16_value, e4m3_round_trip, round_bf16};

/// A generator of test data: xorshift, fixed seeds.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// Roughly normal, variance about 1.
    fn normal(&mut self) -> f32 {
        (0..4).map(|_| (self.bits() & 0xFFFF) as f32 / 32768.0 - 1.0).sum::<f32>() * 0.87
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    fn bytes(&mut self, n: usize, allowed: impl Fn(u8) -> bool) -> Vec<u8> {
        (0..n)
            .map(|_| {
                loop {
                    let byte = self.bits() as u8;
                    if allowed(byte) {
                        return byte;
                    }
                }
            })
            .collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    E4m3,
    E4m3F32,
    E4m3Rounded,
    E2m1,
    Bf16,
    F32,
}

const KINDS: [Kind; 6] = [Kind::E4m3, Kind::E4m3F32, Kind::E4m3Rounded, Kind::E2m1, Kind::Bf16, Kind::F32];

struct Matrix {
    kind: Kind,
    rows: usize,
    cols: usize,
    first_row: usize,
    data: Vec<u8>,
    scales: Vec<u8>,
}

impl Matrix {
    fn random(kind: Kind, rows: usize, cols: usize, first_row: usize, random: &mut Random) -> Self {
        let tiles = (first_row + rows).div_ceil(128) * (cols / 128);
        let f32s = |values: Vec<f32>| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let (data, scales) = match kind {
            Kind::E4m3 => {
                (random.bytes(rows * cols, |b| b & 0x7F != 0x7F), random.bytes(tiles, |e| (110..125).contains(&e)))
            }
            Kind::E4m3F32 | Kind::E4m3Rounded => {
                let scales = (0..tiles).map(|_| 0.001 + random.normal().abs() * 0.01).collect();
                (random.bytes(rows * cols, |b| b & 0x7F != 0x7F), f32s(scales))
            }
            Kind::E2m1 => {
                (random.bytes(rows * cols / 2, |_| true), random.bytes(rows * cols / 32, |e| (110..125).contains(&e)))
            }
            Kind::Bf16 => (
                random
                    .floats(rows * cols)
                    .iter()
                    .flat_map(|v| ((round_bf16(*v).to_bits() >> 16) as u16).to_le_bytes())
                    .collect(),
                Vec::new(),
            ),
            Kind::F32 => (f32s(random.floats(rows * cols)), Vec::new()),
        };
        Self { kind, rows, cols, first_row, data, scales }
    }

    fn view(&self) -> MatrixRef<'_> {
        let (format, scales) = match self.kind {
            Kind::E4m3 => (MatrixFormat::E4m3, Scales::E8m0(&self.scales)),
            Kind::E4m3F32 | Kind::E4m3Rounded => (MatrixFormat::E4m3, Scales::F32(&self.scales)),
            Kind::E2m1 => (MatrixFormat::E2m1, Scales::E8m0(&self.scales)),
            Kind::Bf16 => (MatrixFormat::Bf16, Scales::None),
            Kind::F32 => (MatrixFormat::F32, Scales::None),
        };
        MatrixRef {
            format,
            rows: self.rows,
            cols: self.cols,
            data: &self.data,
            scales,
            first_row: self.first_row,
            round_to_bf16: self.kind == Kind::E4m3Rounded,
        }
    }

    /// The weight as the format defines it.
    fn value(&self, row: usize, col: usize) -> f64 {
        let at = row * self.cols + col;
        let tile = (self.first_row + row) / 128 * (self.cols / 128) + col / 128;
        let f32_at = |b: &[u8], i: usize| f32::from_le_bytes(b[4 * i..4 * i + 4].try_into().unwrap());
        match self.kind {
            Kind::E4m3 => f64::from(E4M3[usize::from(self.data[at])]) * f64::from(e8m0_value(self.scales[tile])),
            Kind::E4m3F32 => f64::from(E4M3[usize::from(self.data[at])]) * f64::from(f32_at(&self.scales, tile)),
            Kind::E4m3Rounded => f64::from(round_bf16(E4M3[usize::from(self.data[at])] * f32_at(&self.scales, tile))),
            Kind::E2m1 => {
                let code = self.data[at / 2] >> (at % 2 * 4) & 15;
                let scale = self.scales[row * (self.cols / 32) + col / 32];
                f64::from(E2M1[usize::from(code)]) * f64::from(e8m0_value(scale))
            }
            Kind::Bf16 => f64::from(bf16_value(u16::from_le_bytes([self.data[2 * at], self.data[2 * at + 1]]))),
            Kind::F32 => f64::from(f32_at(&self.data, at)),
        }
    }

    /// Checks `output` against float64 sums: each of the `n` roundings of a chain errs by at most `2^-24` of the sum of
    /// magnitudes (twice that when products are rounded too), and inputs times F32 scales by one more.
    #[track_caller]
    fn assert_close(&self, input: &[f32], output: &[f32], what: &str) {
        for (x, y) in input.chunks(self.cols).zip(output.chunks(self.rows)) {
            for (row, &y) in y.iter().enumerate() {
                let products = (0..self.cols).map(|c| self.value(row, c) * f64::from(x[c]));
                let (sum, size) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
                let bound = (self.cols as f64 / 4.0 + 8.0) * 2f64.powi(-24) * size + 1e-30;
                assert!((f64::from(y) - sum).abs() <= bound, "{what} {:?} row {row}: {y} for {sum}", self.kind);
            }
        }
    }
}

fn pool(threads: usize) -> Pool {
    Pool::new(threads).unwrap()
}

fn product(pool: &Pool, simd: Simd, weight: MatrixRef<'_>, input: &[f32]) -> Vec<f32> {
    let mut output = vec![7.0; input.len() / weight.cols * weight.rows];
    run(pool, simd, &mut Scratch::default(), &mut [Job::new(weight, input, &mut output)]).unwrap();
    output
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn every_storage_and_level_matches_float64_sums() {
    let pool = pool(2);
    let mut random = Random(1);
    for simd in Simd::available() {
        for kind in KINDS {
            for (rows, cols, first_row) in [(24, 128, 0), (129, 640, 0), (1, 1024, 300), (70, 2176, 100)] {
                let matrix =
                    Matrix::random(kind, rows, cols, if kind == Kind::E2m1 { 0 } else { first_row }, &mut random);
                for tokens in [1, 5] {
                    let input = random.floats(tokens * cols);
                    let output = product(&pool, simd, matrix.view(), &input);
                    matrix.assert_close(&input, &output, simd.level().name());
                }
            }
        }
    }
}

#[test]
fn columns_that_fill_no_whole_group_are_summed_too() {
    let pool = pool(1);
    let mut random = Random(2);
    for simd in Simd::available() {
        for (kind, columns) in [
            (Kind::F32, [1, 3, 7, 9, 16, 48, 515, 528, 1021].as_slice()),
            (Kind::Bf16, &[1, 2, 15, 17, 32, 33, 96, 513, 544, 1030]),
            (Kind::E2m1, &[32, 96, 544, 1056]),
        ] {
            for &cols in columns {
                let matrix = Matrix::random(kind, 7, cols, 0, &mut random);
                let input = random.floats(13 * cols);
                let many = product(&pool, simd, matrix.view(), &input);
                matrix.assert_close(&input, &many, simd.level().name());
                for tokens in [1, 3, 8] {
                    let few = product(&pool, simd, matrix.view(), &input[..tokens * cols]);
                    assert_eq!(bits(&few), bits(&many[..tokens * 7]), "{} {kind:?} {cols}", simd.level());
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_tokens_threads_bands_or_other_jobs() {
    let pools = [pool(1), pool(2), pool(3)];
    let mut random = Random(3);
    for simd in Simd::available() {
        for kind in KINDS {
            for rows in [24, 129, 1] {
                let cols = 1152;
                let matrix = Matrix::random(kind, rows, cols, 0, &mut random);
                let other = Matrix::random(Kind::Bf16, 37, cols, 0, &mut random);
                let input = random.floats(130 * cols);
                let whole = bits(&product(&pools[1], simd, matrix.view(), &input));
                for (i, tokens) in (1..=16).chain([64, 130]).enumerate() {
                    let first = [0, 130 - tokens, (130 - tokens) / 2][i % 3];
                    let input = &input[first * cols..][..tokens * cols];
                    let expected = &whole[first * rows..][..tokens * rows];
                    let mut scratch = Scratch::default();
                    for pool in &pools {
                        let (mut alone, mut beside) = (vec![0.0; tokens * rows], vec![0.0; tokens * 37]);
                        let mut jobs =
                            [Job::new(other.view(), input, &mut beside), Job::new(matrix.view(), input, &mut alone)];
                        run(pool, simd, &mut scratch, &mut jobs).unwrap();
                        let what = format!("{} {kind:?} rows {rows} tokens {tokens}", simd.level());
                        assert_eq!(bits(&alone), expected, "{what}");
                    }
                }
                let (first, count) = (rows / 3, rows.div_ceil(2));
                let band = product(&pools[0], simd, matrix.view().band(first, count), &input[..5 * cols]);
                for (t, row) in band.chunks(count).enumerate() {
                    assert_eq!(bits(row), whole[t * rows + first..][..count], "{} {kind:?} band", simd.level());
                }
            }
        }
    }
}

#[test]
fn each_e4m3_code_counts_with_its_value() {
    let pool = pool(1);
    for simd in Simd::available() {
        // row c has code c in column 5 and zeros elsewhere
        let mut matrix = Matrix {
            kind: Kind::E4m3,
            rows: 256,
            cols: 128,
            first_row: 0,
            data: vec![0; 256 * 128],
            scales: vec![124, 130],
        };
        for code in 0..256 {
            matrix.data[code * 128 + 5] = code as u8;
        }
        let mut input = vec![0.0; 128];
        input[5] = 3.0;
        let one = product(&pool, simd, matrix.view(), &input);
        let few = [2, 3, 8, 13].map(|n| product(&pool, simd, matrix.view(), &input.repeat(n))).concat();
        for code in 0..256 {
            let scale = if code < 128 { 0.125 } else { 8.0 };
            let expected = E4M3[code] * 3.0 * scale;
            if expected.is_nan() {
                assert!(one[code].is_nan(), "{} code {code:#x}", simd.level());
            } else {
                assert_eq!(one[code], expected, "{} code {code:#x}", simd.level());
            }
        }
        for (t, few) in few.chunks(256).enumerate() {
            assert_eq!(bits(&one), bits(few), "{} token {t}", simd.level());
        }
    }
}

#[test]
fn a_nan_code_spoils_its_row_even_against_a_zero_and_no_other() {
    let pool = pool(1);
    let mut random = Random(4);
    for simd in Simd::available() {
        let mut matrix = Matrix::random(Kind::E4m3, 12, 1280, 0, &mut random);
        matrix.data[3 * 1280 + 777] = 0xFF;
        matrix.data[9 * 1280 + 1279] = 0x7F;
        for tokens in [1, 2, 4, 5, 7, 8, 12, 13] {
            let output = product(&pool, simd, matrix.view(), &vec![0.0; tokens * 1280]);
            for (i, y) in output.iter().enumerate() {
                assert_eq!(y.is_nan(), [3, 9].contains(&(i % 12)), "{} output {i}", simd.level());
            }
        }
    }
}

#[test]
fn each_e2m1_code_counts_with_its_value_under_each_scale() {
    let pool = pool(1);
    for simd in Simd::available() {
        // row e has scale e; block b of 32 columns has code b in one column, which moves from block to block
        let (rows, cols) = (256, 16 * 32);
        let mut matrix = Matrix {
            kind: Kind::E2m1,
            rows,
            cols,
            first_row: 0,
            data: vec![0; rows * cols / 2],
            scales: vec![0; rows * 16],
        };
        let column = |code: usize| code * 32 + (code * 11 + 3) % 32;
        for e in 0..rows {
            matrix.scales[e * 16..][..16].fill(e as u8);
            for code in 0..16 {
                matrix.data[(e * cols + column(code)) / 2] |= (code as u8) << (column(code) % 2 * 4);
            }
        }
        let mut input = vec![0.0; 16 * cols];
        for code in 0..16 {
            input[code * cols + column(code)] = 1.0;
        }
        let many = product(&pool, simd, matrix.view(), &input);
        for code in 0..16 {
            let one = product(&pool, simd, matrix.view(), &input[code * cols..][..cols]);
            assert_eq!(bits(&one), bits(&many[code * rows..][..rows]), "{} code {code}", simd.level());
            for (e, &got) in one[..255].iter().enumerate() {
                // a product that overflows is infinite in its own column, and spoils the sums of the others with NaN
                let largest = E2M1[7] * e8m0_value(e as u8);
                let expected = E2M1[code] * e8m0_value(e as u8);
                if largest.is_finite() {
                    assert_eq!(got, expected, "{} code {code} scale {e}", simd.level());
                } else {
                    assert!(got.is_nan() || got == expected, "{} code {code} scale {e}", simd.level());
                }
            }
            assert!(one[255].is_nan(), "{} code {code}", simd.level());
        }
    }
}

#[test]
fn each_e8m0_tile_scale_works_beside_any_other() {
    let pool = pool(1);
    for simd in Simd::available() {
        for (other, tokens) in [(127, 1), (0, 2), (254, 1), (60, 2)] {
            for e in 0..=255 {
                let mut matrix = Matrix {
                    kind: Kind::E4m3,
                    rows: 1,
                    cols: 256,
                    first_row: 0,
                    data: vec![0; 256],
                    scales: vec![e, other],
                };
                matrix.data[17] = 0x38; // 1.0
                let mut input = vec![0.0; 256];
                input[17] = 0.75;
                let y = product(&pool, simd, matrix.view(), &input.repeat(tokens));
                let expected = 0.75 * e8m0_value(e);
                // less than 2^-100 of what the neighbouring tile counts with: may lose bits
                let far = i32::from(other) - i32::from(e) > 100;
                let bound = if far { f64::from(e8m0_value(other)) * 2f64.powi(-109) } else { 0.0 };
                if e == 255 {
                    assert!(y[0].is_nan(), "{} scales {e} {other}", simd.level());
                } else {
                    let error = (f64::from(y[0]) - f64::from(expected)).abs();
                    assert!(error <= bound, "{} scales {e} {other}: {} for {expected}", simd.level(), y[0]);
                }
            }
        }
    }
}

#[test]
fn inputs_may_be_strided() {
    let pool = pool(2);
    let mut random = Random(5);
    let matrix = Matrix::random(Kind::E4m3, 40, 256, 0, &mut random);
    let input = random.floats(3 * 256);
    let mut spread = vec![9.0; 2 * 300 + 256];
    for t in 0..3 {
        spread[t * 300..][..256].copy_from_slice(&input[t * 256..][..256]);
    }
    let mut output = vec![0.0; 3 * 40];
    let job = Job { input_stride: 300, ..Job::new(matrix.view(), &spread, &mut output) };
    run(&pool, Simd::detect(), &mut Scratch::default(), &mut [job]).unwrap();
    assert_eq!(output, product(&pool, Simd::detect(), matrix.view(), &input));
}

#[test]
fn slices_that_do_not_fit_are_refused_with_their_sizes() {
    let pool = pool(1);
    let mut random = Random(6);
    let matrix = Matrix::random(Kind::E4m3, 4, 128, 0, &mut random);
    let input = random.floats(256);
    let refuse = |weight: MatrixRef<'_>, input: &[f32], outputs: usize, needle: &str| {
        let mut output = vec![7.0; outputs];
        let jobs = &mut [Job::new(weight, input, &mut output)];
        let error = run(&pool, Simd::detect(), &mut Scratch::default(), jobs).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(needle), "{error}");
        assert!(output.iter().all(|&y| y == 7.0));
    };
    refuse(matrix.view(), &input[..255], 8, "255 values");
    refuse(matrix.view(), &input, 7, "7 values for 4 rows");
    refuse(MatrixRef { rows: 5, ..matrix.view() }, &input, 10, "512 bytes");
    refuse(MatrixRef { first_row: 125, ..matrix.view() }, &input, 8, "from row 125");
    refuse(MatrixRef { scales: Scales::None, ..matrix.view() }, &input, 8, "wrong kind");
    refuse(MatrixRef { cols: 64, rows: 8, ..matrix.view() }, &input, 8, "multiple of 128");
}

#[test]
fn no_job_and_no_token_are_nothing_to_do() {
    let pool = pool(2);
    let matrix = Matrix::random(Kind::F32, 4, 8, 0, &mut Random(7));
    run(&pool, Simd::detect(), &mut Scratch::default(), &mut []).unwrap();
    run(&pool, Simd::detect(), &mut Scratch::default(), &mut [Job::new(matrix.view(), &[], &mut [])]).unwrap();
}

/// One token after the other, and all of them, give the same bits, close to float64 sums.
#[track_caller]
fn assert_alone_as_together(pool: &Pool, simd: Simd, matrix: &Matrix, input: &[f32], what: &str) {
    let many = product(pool, simd, matrix.view(), input);
    matrix.assert_close(input, &many, what);
    for (t, (input, many)) in input.chunks(matrix.cols).zip(many.chunks(matrix.rows)).enumerate() {
        let one = product(pool, simd, matrix.view(), input);
        assert_eq!(bits(&one), bits(many), "{} {what}, token {t}", simd.level());
    }
}

/// Pitfall 69: one token's integer kernel and many tokens' float32 kernel.
#[test]
fn quantised_tokens_give_the_same_bits_alone_as_among_others() {
    let pool = pool(2);
    let mut random = Random(8);
    for simd in Simd::available() {
        for (rows, cols) in [(37, 32), (7, 96), (130, 256), (5, 544), (16, 1056), (9, 2048), (33, 4096)] {
            let mut matrix = Matrix::random(Kind::E2m1, rows, cols, 0, &mut random);
            matrix.scales[rows / 2 * (cols / 32)] = 3; // a row that integers do not take
            let mut input = random.floats(6 * cols);
            for (t, x) in input.chunks_mut(cols).enumerate() {
                // token 2 stays as it is, token 3 has magnitudes of all sizes, token 4 few that are not zero, token 5 has
                // sums that float32 rounds
                match t {
                    2 => continue,
                    3 => x.iter_mut().for_each(|x| *x = x.powi(9)),
                    5 => {
                        x.fill(448.0);
                        x.iter_mut().skip(3).step_by(8).for_each(|x| *x = 2f32.powi(-9));
                    }
                    4 => x.iter_mut().enumerate().for_each(|(i, x)| *x *= f32::from(u8::from(i % 71 == 3))),
                    _ => {}
                }
                x.chunks_mut(128).for_each(|x| e4m3_round_trip(x, x.len()));
            }
            assert_alone_as_together(&pool, simd, &matrix, &input, "quantised");
            // without the one that is not rounded, few enough to be taken one by one
            assert_alone_as_together(&pool, simd, &matrix, &input[3 * cols..], "a few quantised");
            assert_alone_as_together(&pool, simd, &matrix, &input[3 * cols..].repeat(5), "many quantised");
        }
    }
}

#[test]
fn quantised_tokens_that_meet_a_weight_together_have_the_bits_of_one_alone() {
    let pools = [pool(1), pool(2)];
    let mut random = Random(9);
    for simd in Simd::available() {
        // widths of one and of several blocks of columns, of an incomplete last one, and one that is no whole number of digits
        for (rows, cols) in [(1, 256), (37, 1280), (130, 2048), (5, 4096), (16, 1056)] {
            let matrix = Matrix::random(Kind::E2m1, rows, cols, 0, &mut random);
            let mut input = random.floats(13 * cols);
            input.chunks_mut(128.min(cols)).for_each(|x| e4m3_round_trip(x, x.len()));
            let alone: Vec<f32> = input.chunks(cols).flat_map(|x| product(&pools[0], simd, matrix.view(), x)).collect();
            matrix.assert_close(&input, &alone, "alone");
            for (i, tokens) in (2..=13).enumerate() {
                let first = i % (14 - tokens);
                let few = product(&pools[i % 2], simd, matrix.view(), &input[first * cols..][..tokens * cols]);
                let expected = &alone[first * rows..][..tokens * rows];
                assert_eq!(bits(&few), bits(expected), "{} {rows} x {cols}, {tokens} tokens", simd.level());
            }
        }
    }
}
