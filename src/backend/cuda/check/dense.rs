//! Checks of what knows no sequences: embedding, norms, products, hyper-connections, selection.

use super::lab::{Lab, different, different_bits, distance, matrix};
use crate::backend::cpu::hyper::{self as cpu_hyper, HyperParams};
use crate::backend::cpu::norm as cpu_norm;
use crate::backend::cpu::rope::{Rotations, frequencies};
use crate::backend::cuda::device::Prefer;
use crate::backend::cuda::memory::Arena;
use crate::backend::cuda::ops::{self, Finish, IDLE, Job, Output, Project, RmsNorm, STREAMS, TopK, Weight};
use crate::backend::cuda::stream::{Event, Stream};
use crate::backend::cuda::upload::Uploader;
use crate::error::Result;
use crate::model::config::Yarn;
use crate::tensor::format::{bf16_bits, e4m3_round_trip, round_bf16};
use crate::tensor::{MatrixFormat, Scales};

const EPS: f32 = 1e-6;
/// Sums of squares are ordered differently, so a few bf16 results go to the neighbour: each is 2^-8 off at most.
const NEIGHBOURS: f64 = 3e-4;

/// Through pinned memory, in pieces that do not divide the length, into an arena of exactly the planned size.
pub(super) fn upload(lab: &mut Lab<'_>) -> Result<()> {
    let bytes = lab.bytes(3 << 20 | 77);
    let mut plan = Arena::counting();
    plan.take::<u8>("weights", bytes.len())?;
    let mut arena = Arena::new(lab.gpu, plan.used())?;
    let buffer = arena.take::<u8>("weights", bytes.len())?;
    let refused = arena.take::<u8>("more", 1).is_err();
    let mut uploader = Uploader::new(lab.gpu, 1_000_003)?;
    let mut told = Vec::new();
    uploader.upload(&buffer, &bytes, &mut |sent| {
        told.push(sent);
        Ok(())
    })?;
    uploader.finish()?;
    let wrong = different(&lab.get(&buffer)?, &bytes);
    lab.report("upload", "3 MB in 4 pieces", wrong, 0.0);
    let fine = refused && told == [1_000_003, 2_000_006, 3_000_009, bytes.len() as u64];
    lab.report("upload, progress and plan", "4 pieces", f64::from(u8::from(!fine)), 0.0);
    Ok(())
}

/// What waits for an event sees what the other stream wrote before it.
pub(super) fn streams(lab: &mut Lab<'_>) -> Result<()> {
    let (second, event) = (Stream::new(lab.gpu)?, Event::new(lab.gpu)?);
    let n = 32 << 20;
    let (a, b) = (lab.output::<u8>(n)?, lab.output::<u8>(n)?);
    let mut wrong = 0;
    for round in 0..8 {
        lab.stream.fill(&a, round)?;
        lab.stream.record(&event)?;
        second.wait(&event)?;
        second.copy(&a, &b)?;
        wrong += second.read(&b)?.iter().filter(|&&v| v != round).count();
    }
    lab.report("streams", "8 rounds of 32 MB", wrong as f64, 0.0);
    Ok(())
}

pub(super) fn embed(lab: &mut Lab<'_>) -> Result<()> {
    let (vocab, width) = (97, 384);
    let table = lab.normal_bf16(vocab * width, 1.0);
    let ids: Vec<u32> = [0, 96, 5, 5, IDLE, 31].to_vec();
    let (d_table, d_ids) = (lab.put_bf16(&table)?, lab.put(&ids)?);
    let out = lab.output(ids.len() * STREAMS * width)?;
    ops::embed(&lab.stream, &d_table, &d_ids, &out, width)?;
    let zeros = vec![0.0; width];
    let want: Vec<f32> = ids
        .iter()
        .flat_map(|&id| {
            let row = table.get(id as usize * width..).map_or(&zeros[..], |rows| &rows[..width]);
            std::iter::repeat_n(row, STREAMS).flatten().copied()
        })
        .collect();
    let got = lab.get_bf16(&out)?;
    lab.report("embed", "6 rows x 4 x 384, one idle", different_bits(&got, &want), 0.0);

    let outside = lab.put(&[97u32])?;
    let out = lab.output(STREAMS * width)?;
    ops::embed(&lab.stream, &d_table, &outside, &out, width)?;
    let finite = lab.get_bf16(&out)?.iter().filter(|v| !v.is_nan()).count();
    lab.report("embed, id outside", "is NaN", finite as f64, 0.0);
    Ok(())
}

pub(super) fn rms_norm(lab: &mut Lab<'_>) -> Result<()> {
    for (rows, width, stride) in
        [(1, 128, 128), (5, 512, 512), (3, 1024, 1600), (2, 1536, 1536), (7, 4096, 4096), (2, 7168, 7168)]
    {
        let x = lab.normal_bf16(rows * stride, 3.0);
        let weight = lab.around_one(width);
        let (d_x, d_w) = (lab.put_bf16(&x)?, lab.put(&weight)?);
        let (out, quantised) = (lab.output(rows * width)?, lab.output(rows * width)?);
        let a = RmsNorm { x: &d_x, stride, weight: &d_w, out: &out, quantised: Some(&quantised), eps: EPS };
        ops::rms_norm(&lab.stream, &a)?;
        let mut want = vec![0.0; rows * width];
        for (x, want) in x.chunks_exact(stride).zip(want.chunks_exact_mut(width)) {
            cpu_norm::rms_norm(&x[..width], &weight, EPS, true, want);
        }
        let got = lab.get_bf16(&out)?;
        let shape = format!("{rows} x {width} of {stride}");
        lab.report("rms_norm", &shape, distance(&got, &want), NEIGHBOURS);
        let mut want = got;
        e4m3_round_trip(&mut want, 128);
        let got = lab.get_bf16(&quantised)?;
        lab.report("rms_norm, E4M3 copy", &shape, different_bits(&got, &want), 0.0);
    }
    Ok(())
}

pub(super) fn quantise(lab: &mut Lab<'_>) -> Result<()> {
    let mut x: Vec<f32> = Vec::new();
    for size in [1e-9, 1e-3, 1.0, 440.0, 448.0, 1e6] {
        x.extend(lab.normal_bf16(1280, size));
    }
    x.extend([0.0; 128]);
    x.extend([448.0; 127]);
    x.push(450.0);
    let (d_x, out) = (lab.put_bf16(&x)?, lab.output(x.len())?);
    ops::quantise(&lab.stream, &d_x, &out)?;
    let mut want = x.clone();
    e4m3_round_trip(&mut want, 128);
    let got = lab.get_bf16(&out)?;
    lab.report("quantise", format!("{}", x.len()), different_bits(&got, &want), 0.0);

    let mut x = lab.normal_bf16(384, 1.0);
    x[200] = f32::NAN;
    let (d_x, out) = (lab.put_bf16(&x)?, lab.output(x.len())?);
    ops::quantise(&lab.stream, &d_x, &out)?;
    let got = lab.get_bf16(&out)?;
    let wrong = got.iter().enumerate().filter(|(i, v)| v.is_nan() != (128..256).contains(i)).count();
    lab.report("quantise, NaN", "poisons its block alone", wrong as f64, 0.0);
    Ok(())
}

pub(super) const YARN: Yarn =
    Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_max_position_embeddings: 65536 };

/// Pitfall 51: positions to the last of a million.
pub(super) fn rotations(lab: &mut Lab<'_>) -> Result<()> {
    let positions: Vec<u32> = vec![0, 1, 3, 126, 127, 128, 4095, 65_535, 65_536, 1_048_575];
    let (plain, yarn) = (frequencies(64, 10_000.0, None), frequencies(64, 160_000.0, Some(&YARN)));
    let (d_positions, d_plain, d_yarn) = (lab.put(&positions)?, lab.put(&plain)?, lab.put(&yarn)?);
    let turns = lab.output::<[f32; 2]>(4 * positions.len() * 32)?;
    ops::rotations(&lab.stream, &d_positions, &d_plain, &d_yarn, &turns)?;
    let got: Vec<f32> = lab.get(&turns)?.into_iter().flatten().collect();
    let mut want = Vec::new();
    for (frequencies, back) in [(&plain, 0u32), (&yarn, 0), (&yarn, 3), (&yarn, 127)] {
        let at = positions.iter().map(|p| p.saturating_sub(back) as usize);
        let table = Rotations::new(frequencies, at)?;
        for row in 0..positions.len() {
            let mut x: Vec<f32> = [1.0, 0.0].repeat(32);
            table.rotate(row, &mut x, false);
            want.extend(x);
        }
    }
    // the two float64 libraries may round a cosine to either neighbour
    lab.report("rotations", "10 positions to 1048575", distance(&got, &want), 1e-7);
    Ok(())
}

/// Weights of one kind, on both sides.
pub(super) struct Weights {
    pub(super) data: Vec<u8>,
    scales: Vec<u8>,
    pub(super) format: MatrixFormat,
    f32_scales: bool,
}

impl Weights {
    pub(super) fn new(lab: &mut Lab<'_>, kind: usize, rows: usize, cols: usize) -> Self {
        let tiles = rows.div_ceil(128) * (cols / 128);
        match kind {
            0 => {
                let (data, scales) = (lab.e4m3(rows * cols), lab.e8m0(tiles));
                Self { data, scales, format: MatrixFormat::E4m3, f32_scales: false }
            }
            1 => {
                let data = lab.e4m3(rows * cols);
                let scales = (0..tiles).flat_map(|_| (0.001 + 0.01 * lab.uniform()).to_le_bytes()).collect();
                Self { data, scales, format: MatrixFormat::E4m3, f32_scales: true }
            }
            _ => {
                let values = lab.normal_bf16(rows * cols, 0.05);
                let data = values.iter().flat_map(|&v| bf16_bits(v).to_le_bytes()).collect();
                Self { data, scales: Vec::new(), format: MatrixFormat::Bf16, f32_scales: false }
            }
        }
    }

    pub(super) fn scales(&self) -> Scales<'_> {
        match (self.format, self.f32_scales) {
            (MatrixFormat::E4m3, false) => Scales::E8m0(&self.scales),
            (MatrixFormat::E4m3, true) => Scales::F32(&self.scales),
            _ => Scales::None,
        }
    }

    pub(super) fn put(&self, lab: &mut Lab<'_>) -> Result<Weight> {
        Ok(match (self.format, self.f32_scales) {
            (MatrixFormat::E4m3, false) => Weight::E4m3 { data: lab.put(&self.data)?, scales: lab.put(&self.scales)? },
            (MatrixFormat::E4m3, true) => {
                let scales: Vec<f32> =
                    self.scales.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
                Weight::E4m3F32 { data: lab.put(&self.data)?, scales: lab.put(&scales)? }
            }
            _ => {
                let words: Vec<u16> = self.data.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
                Weight::Bf16(lab.put(&words)?)
            }
        })
    }
}

/// float32 sums of up to 16384 products in another order.
const SUMS: f64 = 1e-5;

pub(super) fn linear(lab: &mut Lab<'_>) -> Result<()> {
    let shapes: &[(usize, usize)] = if lab.small {
        &[(8, 128), (144, 640)]
    } else {
        &[(8, 128), (129, 384), (512, 1024), (256, 4096), (384, 7168), (64, 16384), (4104, 640)]
    };
    let names = ["linear E4M3/E8M0", "linear E4M3/F32", "linear bf16"];
    for (kind, name) in names.into_iter().enumerate() {
        for &(rows, cols) in shapes {
            // the last shape has more tiles than a device has multiprocessors
            let most = if lab.small { 70 } else { 150 + rows / 4000 * 600 };
            lab.clear()?;
            let weights = Weights::new(lab, kind, rows, cols);
            let weight = weights.put(lab)?;
            let stride = cols + 8;
            let mut x = lab.normal_bf16(most * stride, 1.0);
            // one shape has values beside each other that no half-precision format spans
            if cols == 1024 || lab.small {
                x.iter_mut().step_by(97).for_each(|v| *v *= 2.0f32.powi(-90));
            }
            let dense: Vec<f32> = x.chunks_exact(stride).flat_map(|r| &r[..cols]).copied().collect();
            let d_x = lab.put_bf16(&x)?;
            let want = lab.cpu_product(matrix(weights.format, rows, cols, &weights.data, weights.scales()), &dense)?;
            let mut alone = Vec::new();
            for tokens in [1, 3, 8, 13, 16, 17, 64, most] {
                let workspace = lab.output(ops::workspace_len(rows, cols, tokens))?;
                let mut first = None;
                // a small workspace: many tokens in several launches
                let small = workspace.slice(0..ops::images_len(cols, tokens.min(512)))?;
                for (way, workspace, prefer) in [
                    ("", None, Prefer::Portable),
                    (", cut", Some(&workspace), Prefer::Portable),
                    (", own kernel", Some(&workspace), Prefer::Own),
                    (", small workspace", Some(&small), Prefer::Own),
                ] {
                    lab.gpu.prefer(prefer);
                    let y = lab.output::<f32>(tokens * rows)?;
                    let (x, y_out) = (&d_x, Output::F32(y.clone()));
                    let job = Job {
                        weight: &weight,
                        first_row: 0,
                        rows,
                        cols,
                        x,
                        x_stride: stride,
                        y: y_out,
                        y_stride: rows,
                    };
                    ops::linear(&lab.stream, &[job], tokens, workspace)?;
                    let got = lab.get(&y)?;
                    let shape = format!("{rows} x {cols}, {tokens} tokens{way}");
                    lab.report(name, &shape, distance(&got, &want[..tokens * rows]), SUMS);
                    if tokens == 1 {
                        alone.clone_from(&got);
                    }
                    lab.report("linear, alone = in a batch", &shape, different_bits(&got[..rows], &alone), 0.0);
                    let reference = first.get_or_insert_with(|| got.clone());
                    lab.report("linear, one way = another", &shape, different_bits(&got, reference), 0.0);
                }
            }
        }
    }
    bands(lab)?;
    lab.gpu.prefer(Prefer::Fastest);
    Ok(())
}

/// Bands of one matrix in one launch, as the grouped output projection has, next to a matrix of another kind.
fn bands(lab: &mut Lab<'_>) -> Result<()> {
    lab.clear()?;
    let (groups, rank, cols, others) = (4, 128, 512, 40);
    let (weights, plain) = (Weights::new(lab, 0, groups * rank, cols), Weights::new(lab, 2, others, cols));
    let (weight, other) = (weights.put(lab)?, plain.put(lab)?);
    for (tokens, aligned) in [(1, true), (16, true), (90, true), (90, false), (200, true)] {
        let x = lab.normal_bf16(tokens * groups * cols, 1.0);
        let d_x = lab.put_bf16(&x)?;
        // a row of outputs that is no multiple of 16 bytes is stored value by value
        let y_stride = groups * rank + if aligned { 0 } else { 1 };
        let (y, z) = (lab.output::<u16>(tokens * y_stride)?, lab.output::<f32>(tokens * others)?);
        let workspace = lab.output::<f32>((groups + 1) * ops::images_len(cols, tokens))?;
        let mut inputs = Vec::new();
        for g in 0..groups {
            inputs.push((d_x.slice(g * cols..d_x.len())?, y.slice(g * rank..y.len())?));
        }
        let mut jobs: Vec<Job<'_>> = inputs
            .iter()
            .enumerate()
            .map(|(g, (x, y))| Job {
                weight: &weight,
                first_row: g * rank,
                rows: rank,
                cols,
                x,
                x_stride: groups * cols,
                y: Output::Bf16(y.clone()),
                y_stride,
            })
            .collect();
        let (y_out, x_stride) = (Output::F32(z.clone()), groups * cols);
        jobs.push(Job {
            weight: &other,
            first_row: 0,
            rows: others,
            cols,
            x: &d_x,
            x_stride,
            y: y_out,
            y_stride: others,
        });
        ops::linear(&lab.stream, &jobs, tokens, Some(&workspace))?;
        let (got, got_other) = (lab.get_bf16(&y)?, lab.get(&z)?);
        let got: Vec<f32> = got.chunks_exact(y_stride).flat_map(|row| &row[..groups * rank]).copied().collect();
        let all = matrix(weights.format, groups * rank, cols, &weights.data, weights.scales());
        let part = |g: usize| -> Vec<f32> {
            x.chunks_exact(groups * cols).flat_map(|row| &row[g * cols..(g + 1) * cols]).copied().collect()
        };
        let mut want = vec![0.0; tokens * groups * rank];
        for g in 0..groups {
            let product = lab.cpu_product(all.band(g * rank, rank), &part(g))?;
            for (row, values) in product.chunks_exact(rank).enumerate() {
                want[(row * groups + g) * rank..][..rank].copy_from_slice(values);
            }
        }
        cpu_norm::store_bf16(&mut want, true);
        lab.report("linear, bands", format!("4 x 128 x 512, {tokens} tokens"), distance(&got, &want), NEIGHBOURS);
        let want = lab.cpu_product(matrix(plain.format, others, cols, &plain.data, plain.scales()), &part(0))?;
        lab.report("linear, second matrix", format!("40 x 512, {tokens} tokens"), distance(&got_other, &want), SUMS);
    }
    Ok(())
}

pub(super) fn hyper(lab: &mut Lab<'_>) -> Result<()> {
    let shapes: &[(usize, usize)] =
        if lab.small { &[(1, 128), (9, 256)] } else { &[(1, 128), (3, 4096), (8, 256), (9, 4096), (33, 7168)] };
    for &(tokens, width) in shapes {
        lab.clear()?;
        seam(lab, tokens, width)?;
    }
    Ok(())
}

fn seam(lab: &mut Lab<'_>, tokens: usize, width: usize) -> Result<()> {
    let params = HyperParams { streams: STREAMS, iterations: 20, eps: EPS };
    let row = STREAMS * width;
    let x = lab.normal_bf16(tokens * row, 1.0);
    let y = lab.normal_bf16(tokens * width, 2.0);
    let basis = lab.normal(24 * row, 1.0 / (row as f32).sqrt());
    let head_basis = lab.normal(4 * row, 1.0 / (row as f32).sqrt());
    let (scale, base) = (lab.normal(3, 1.0), lab.normal(24, 1.0));
    let norm = lab.around_one(width);
    let raw_mixes = lab.normal(tokens * 24, 1.0);
    let before: Vec<_> = raw_mixes.chunks_exact(24).map(|m| cpu_hyper::mix(params, m, &scale, &base)).collect();
    let flat: Vec<f32> = before
        .iter()
        .flat_map(|m| m.pre[..4].iter().chain(&m.post[..4]).chain(m.comb[..4].iter().flat_map(|r| &r[..4])).copied())
        .collect();

    let (d_x, d_y, d_mixes, d_basis) = (lab.put_bf16(&x)?, lab.put_bf16(&y)?, lab.put(&flat)?, lab.put(&basis)?);
    let (d_scale, d_base, d_norm) = (lab.put(&scale)?, lab.put(&base)?, lab.put(&norm)?);
    let streams = lab.output(tokens * row)?;
    let parts = lab.output(ops::parts_len(tokens, width))?;
    let expand = Some((&d_y, &d_mixes, &streams));
    ops::project(&lab.stream, &Project { x: &d_x, expand, basis: &d_basis, parts: &parts, width })?;
    let new_mixes = lab.output(tokens * ops::MIX_FLOATS)?;
    let (out, quantised) = (lab.output(tokens * width)?, lab.output(tokens * width)?);
    let finish = Finish {
        x: &streams,
        rows: None,
        parts: &parts,
        scale: &d_scale,
        base: &d_base,
        norm: &d_norm,
        mixes: Some(&new_mixes),
        out: &out,
        quantised: Some(&quantised),
        iterations: 20,
        hc_eps: EPS,
        norm_eps: EPS,
    };
    ops::finish(&lab.stream, &finish)?;
    let shape = format!("{tokens} x 4 x {width}");

    let mut want = vec![0.0; tokens * row];
    for (t, want) in want.chunks_exact_mut(row).enumerate() {
        cpu_hyper::expand(&before[t], &y[t * width..][..width], &x[t * row..][..row], true, want);
    }
    let fresh = lab.get_bf16(&streams)?;
    lab.report("hyper, streams", &shape, distance(&fresh, &want), NEIGHBOURS);

    // from here on against the CPU on the device's own streams
    let mixes: Vec<_> = project_streams(lab, &fresh, &basis, 24)?
        .chunks_exact(24)
        .map(|m| cpu_hyper::mix(params, m, &scale, &base))
        .collect();
    let want: Vec<f32> = mixes
        .iter()
        .flat_map(|m| m.pre[..4].iter().chain(&m.post[..4]).chain(m.comb[..4].iter().flat_map(|r| &r[..4])).copied())
        .collect();
    let got = lab.get(&new_mixes)?;
    // projections of 4 x width float32 products in another order, then 40 normalisations
    lab.report("hyper, mixing coefficients", &shape, distance(&got, &want), 2e-5);
    let mut want = vec![0.0; tokens * width];
    let mut collapsed = vec![0.0; width];
    for (t, want) in want.chunks_exact_mut(width).enumerate() {
        cpu_hyper::collapse(&mixes[t].pre, &fresh[t * row..][..row], true, &mut collapsed);
        cpu_norm::rms_norm(&collapsed, &norm, EPS, true, want);
    }
    let got = lab.get_bf16(&out)?;
    // two roundings to bf16 in a row
    lab.report("hyper, sub-layer input", &shape, distance(&got, &want), 2.0 * NEIGHBOURS);
    let mut want = got;
    e4m3_round_trip(&mut want, 128);
    let got = lab.get_bf16(&quantised)?;
    lab.report("hyper, E4M3 copy", &shape, different_bits(&got, &want), 0.0);

    let last = tokens - 1;
    let (d_basis, d_rows) = (lab.put(&head_basis)?, lab.put(&[last as u32])?);
    ops::project(&lab.stream, &Project { x: &streams, expand: None, basis: &d_basis, parts: &parts, width })?;
    let (scale1, base4) = (d_scale.slice(0..1)?, d_base.slice(0..4)?);
    let out = lab.output(width)?;
    let head =
        Finish { rows: Some(&d_rows), scale: &scale1, base: &base4, mixes: None, out: &out, quantised: None, ..finish };
    ops::finish(&lab.stream, &head)?;
    let m = project_streams(lab, &fresh, &head_basis, 4)?;
    let pre = cpu_hyper::head_weights(params, &m[last * 4..][..4], scale[0], &base[..4]);
    cpu_hyper::collapse(&pre, &fresh[last * row..][..row], true, &mut collapsed);
    let mut want = vec![0.0; width];
    cpu_norm::rms_norm(&collapsed, &norm, EPS, true, &mut want);
    let got = lab.get_bf16(&out)?;
    lab.report("hyper, final collapse", &shape, distance(&got, &want), 2.0 * NEIGHBOURS);
    Ok(())
}

/// The CPU's `(v . basis^T) / rms(v)` of each token's streams `v`.
fn project_streams(lab: &Lab<'_>, v: &[f32], basis: &[f32], rows: usize) -> Result<Vec<f32>> {
    let width = basis.len() / rows;
    let bytes: Vec<u8> = basis.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut m = lab.cpu_product(matrix(MatrixFormat::F32, rows, width, &bytes, Scales::None), v)?;
    for (m, v) in m.chunks_exact_mut(rows).zip(v.chunks_exact(width)) {
        let inverse = cpu_norm::inverse_rms(v, EPS);
        m.iter_mut().for_each(|m| *m *= inverse);
    }
    Ok(m)
}

/// Pitfalls 54, 58, 59: NaN, infinities, equal and nearly equal values, and k of either release, among 262,144.
pub(super) fn top_k(lab: &mut Lab<'_>) -> Result<()> {
    for k in [1, 16, 512, 1024] {
        // 262144 entries are a context of a million tokens
        let pitch = if lab.small {
            5000
        } else if k < 512 {
            70_000
        } else {
            262_144
        };
        lab.clear()?;
        let mut rows: Vec<Vec<f32>> = vec![
            lab.normal(pitch, 1.0),
            lab.normal_bf16(pitch, 1.0), // many ties
            vec![0.25; pitch],
            (0..pitch).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect(),
            vec![f32::NEG_INFINITY; pitch],
            vec![f32::NAN; pitch],
            lab.normal(pitch, 1e-38),
        ];
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = lab.normal_bf16(pitch, 1.0);
            for _ in 0..40 {
                let at = lab.below(pitch);
                row[at] = special;
            }
            rows.push(row);
        }
        let counts: Vec<usize> = (0..rows.len())
            .map(|i| {
                if i == 1 {
                    k
                } else if i == 6 {
                    k / 2 + 1
                } else {
                    pitch - i * 3
                }
            })
            .collect();
        let positions: Vec<u32> = counts.iter().map(|&n| (n * 4 + 2) as u32).collect();
        let flat: Vec<f32> = rows.concat();
        let (d_scores, d_positions) = (lab.put(&flat)?, lab.put(&positions)?);
        let (ids, taken) = (lab.output(rows.len() * k)?, lab.output(rows.len())?);
        let candidates = rows.len() * ops::top_k_parts(pitch, k);
        let (values, places) = (lab.output(candidates)?, lab.output(candidates)?);
        let parts = Some((&values, &places));
        let positions = Some((&d_positions, 4));
        let a = TopK { scores: &d_scores, pitch, positions, ids: &ids, counts: &taken, k, parts, highest: None };
        ops::top_k(&lab.stream, &a)?;
        let wrong = wrong_choices(&rows, &counts, k, &lab.get(&ids)?, &lab.get(&taken)?);
        lab.report("top_k", format!("{k} of {pitch}, 10 kinds of rows"), wrong, 0.0);
        if !ops::hopper_index(lab.gpu, true, k) {
            continue;
        }
        // scores that are stored as bfloat16, with the highest of every 16
        for v in rows.iter_mut().flatten() {
            *v = round_bf16(*v);
        }
        let mut highest = vec![0u16; rows.len() * ops::highest_len(pitch)];
        for ((row, highest), &n) in rows.iter().zip(highest.chunks_exact_mut(ops::highest_len(pitch))).zip(&counts) {
            for (highest, part) in highest.iter_mut().zip(row[..n].chunks(16)) {
                *highest = part.iter().map(|&v| rank16(v)).max().unwrap_or(0);
            }
        }
        let (d_scores, highest) = (lab.put(&rows.concat())?, lab.put(&highest)?);
        let (ids, taken) = (lab.output(ids.len())?, lab.output(taken.len())?);
        let a = TopK { scores: &d_scores, ids: &ids, counts: &taken, highest: Some(&highest), ..a };
        ops::top_k(&lab.stream, &a)?;
        let wrong = wrong_choices(&rows, &counts, k, &lab.get(&ids)?, &lab.get(&taken)?);
        lab.report("top_k by Hopper", format!("{k} of {pitch}, 10 kinds of rows"), wrong, 0.0);
    }
    Ok(())
}

/// The order of values that are bfloat16, NaN as low as minus infinity, above 0.
fn rank16(v: f32) -> u16 {
    let v = if v.is_nan() { f32::NEG_INFINITY } else { v + 0.0 };
    let bits = v.to_bits();
    ((if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }) >> 16) as u16
}

/// Entries that are not those of a sort, of rows of which `counts` values are there.
fn wrong_choices(rows: &[Vec<f32>], counts: &[usize], k: usize, got: &[u32], got_counts: &[u32]) -> f64 {
    let mut wrong = 0.0;
    for (r, row) in rows.iter().enumerate() {
        let value = |i: u32| if row[i as usize].is_nan() { f32::NEG_INFINITY } else { row[i as usize] };
        let mut order: Vec<u32> = (0..counts[r] as u32).collect();
        order.sort_by(|a, b| value(*b).partial_cmp(&value(*a)).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b)));
        order.truncate(k);
        order.sort_unstable();
        wrong += different(&got[r * k..][..order.len()], &order);
        wrong += f64::from(u8::from(got_counts[r] as usize != order.len()));
    }
    wrong
}
