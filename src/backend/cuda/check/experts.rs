//! Checks of the mixture of experts.

use super::lab::{Lab, different, different_bits, distance, matrix};
use crate::backend::cpu::moe as cpu_moe;
use crate::backend::cpu::norm::store_bf16;
use crate::backend::cuda::memory::Buffer;
use crate::backend::cuda::ops::{
    self, ExpertFormat, Experts, Grouping, IDLE, Job, Output, Product, Route, Routing, Swiglu, Weight,
};
use crate::error::Result;
use crate::tensor::format::{bf16_value, e4m3_round_trip};
use crate::tensor::{MatrixFormat, MatrixRef, Scales};

pub(super) fn route(lab: &mut Lab<'_>) -> Result<()> {
    for (tokens, experts, top_k) in [(1, 8, 2), (7, 256, 6), (130, 384, 6), (5, 512, 16), (3, 33, 1)] {
        let mut logits = lab.normal(tokens * experts, 4.0);
        logits[0] = 30.0;
        if tokens > 2 {
            logits[experts..2 * experts].fill(f32::NAN);
            logits[2 * experts..3 * experts].fill(0.5);
        }
        let bias = lab.normal(experts, 0.5);
        let vocab = 50;
        let table: Vec<i64> = (0..vocab * top_k).map(|i| ((i / top_k * 7 + i % top_k * 3) % experts) as i64).collect();
        let mut token_ids: Vec<u32> = (0..tokens).map(|_| lab.below(vocab) as u32).collect();
        // rows that are there to fill a step up
        token_ids.iter_mut().skip(3).step_by(5).for_each(|id| *id = IDLE);
        let (d_logits, d_bias, d_table) = (lab.put(&logits)?, lab.put(&bias)?, lab.put(&table)?);
        let d_tokens = lab.put(&token_ids)?;
        for hash in [false, true] {
            let (ids, weights) = (lab.output(tokens * top_k)?, lab.output(tokens * top_k)?);
            let routing = if hash { Routing::Hash(&d_table) } else { Routing::Bias(&d_bias) };
            let a = {
                let (logits, tokens, ids, weights) = (&d_logits, &d_tokens, &ids, &weights);
                Route { logits, routing, tokens, ids, weights, experts, top_k, scale: 1.5 }
            };
            ops::route(&lab.stream, &a)?;
            let mut want_ids = vec![0; tokens * top_k];
            let mut want = vec![0.0; tokens * top_k];
            for t in 0..tokens {
                let a: Vec<f32> = logits[t * experts..][..experts].iter().map(|&z| cpu_moe::affinity(z)).collect();
                let ids = &mut want_ids[t * top_k..][..top_k];
                if token_ids[t] == IDLE {
                    ids.fill(experts as u32);
                    want[t * top_k..][..top_k].fill(f32::NAN);
                    continue;
                }
                if hash {
                    for (id, e) in ids.iter_mut().zip(&table[token_ids[t] as usize * top_k..]) {
                        *id = *e as u32;
                    }
                } else {
                    cpu_moe::choose(&a, &bias, ids);
                }
                cpu_moe::route_weights(&a, ids, 1.5, &mut want[t * top_k..][..top_k]);
            }
            let shape = format!("{tokens} tokens, {top_k} of {experts}{}", if hash { ", hash" } else { "" });
            let got = lab.get(&ids)?;
            // a near tie may go the other way where exp rounds differently
            lab.report("route, experts", &shape, different(&got, &want_ids) / want_ids.len() as f64, 5e-3);
            let keep: Vec<usize> = (0..want.len())
                .filter(|&i| {
                    !want[i].is_nan() && got[i / top_k * top_k..][..top_k] == want_ids[i / top_k * top_k..][..top_k]
                })
                .collect();
            let got = lab.get(&weights)?;
            let pick = |v: &[f32]| keep.iter().map(|&i| v[i]).collect::<Vec<_>>();
            lab.report("route, weights", &shape, distance(&pick(&got), &pick(&want)), 1e-6);
        }
    }
    Ok(())
}

/// Lets every third row do nothing.
fn rest(ids: &mut [u32], experts: usize, top_k: usize) {
    ids.chunks_exact_mut(top_k).skip(1).step_by(3).for_each(|ids| ids.fill(experts as u32));
}

pub(super) fn grouping(lab: &mut Lab<'_>, ids: &[u32], experts: usize) -> Result<Grouping> {
    let ids = lab.put(ids)?;
    Grouping::new(&mut lab.arena, ids, experts)
}

pub(super) fn random_ids(lab: &mut Lab<'_>, tokens: usize, experts: usize, top_k: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let mut all: Vec<u32> = (0..experts as u32).collect();
        for i in 0..top_k {
            let other = i + lab.below(experts - i);
            all.swap(i, other);
        }
        ids.extend(&all[..top_k]);
    }
    ids
}

pub(super) fn group(lab: &mut Lab<'_>) -> Result<()> {
    let shapes = [(1, 8, 2), (3, 256, 6), (500, 256, 6), (700, 5, 2), (9, 512, 16)];
    for ((tokens, experts, top_k), rests) in shapes.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        let mut ids = random_ids(lab, tokens, experts, top_k);
        if rests {
            rest(&mut ids, experts, top_k);
        }
        let groups = grouping(lab, &ids, experts)?;
        ops::group(&lab.stream, &groups)?;
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_by_key(|&a| (ids[a as usize], a));
        let mut places = vec![0; ids.len()];
        order.iter().enumerate().for_each(|(place, &a)| places[a as usize] = place as u32);
        let below = |e: usize| ids.iter().filter(|&&id| (id as usize) < e).count() as u32;
        let bounds: Vec<u32> = (0..=experts).map(below).collect();
        let active: Vec<u32> = (0..experts as u32).filter(|e| ids.contains(e)).collect();
        let mut active_first: Vec<u32> = active.iter().map(|&e| bounds[e as usize]).collect();
        active_first.push(bounds[experts]);
        let mut active_eights = vec![0];
        for pair in active_first.windows(2) {
            active_eights.push(active_eights[active_eights.len() - 1] + (pair[1] - pair[0]).div_ceil(8));
        }
        let tiles: Vec<(u32, u32)> = (0..experts)
            .flat_map(|e| (bounds[e]..bounds[e + 1]).step_by(64).map(move |first| (e as u32, first)))
            .collect();
        let totals = [active.len() as u32, tiles.len() as u32, active_eights[active.len()]];
        let most = groups.tiles.len() / 2;
        let got_tiles = lab.get(&groups.tiles)?;
        let got_tiles: Vec<(u32, u32)> = (0..tiles.len()).map(|i| (got_tiles[i], got_tiles[most + i])).collect();
        let wrong = different(&lab.get(&groups.order)?, &order)
            + different(&lab.get(&groups.places)?, &places)
            + different(&lab.get(&groups.bounds)?, &bounds)
            + different(&lab.get(&groups.active)?[..active.len()], &active)
            + different(&lab.get(&groups.active_first)?[..=active.len()], &active_first)
            + different(&lab.get(&groups.active_eights)?[..=active.len()], &active_eights)
            + different(&got_tiles, &tiles)
            + different(&lab.get(&groups.totals)?, &totals);
        let rests = if rests { ", some idle" } else { "" };
        lab.report("group", format!("{tokens} tokens, {top_k} of {experts}{rests}"), wrong, 0.0);
    }
    Ok(())
}

/// One matrix of every expert, on both sides.
pub(super) struct Bank {
    data: Vec<Vec<u8>>,
    scales: Vec<Vec<u8>>,
    addresses: [Buffer<u64>; 2],
    /// Holds the memory behind the addresses.
    _buffers: Vec<Buffer<u8>>,
    format: ExpertFormat,
    rows: usize,
    cols: usize,
}

impl Bank {
    pub(super) fn new(
        lab: &mut Lab<'_>,
        format: ExpertFormat,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        let (mut data, mut scales, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        let mut addresses = [Vec::new(), Vec::new()];
        for _ in 0..experts {
            let (weights, scale) = match format {
                ExpertFormat::E2m1 => (lab.bytes(rows * cols / 2), lab.e8m0(rows * cols / 32)),
                ExpertFormat::E4m3 => (lab.e4m3(rows * cols), lab.e8m0(rows.div_ceil(128) * cols / 128)),
                ExpertFormat::E4m3F32 => {
                    let tiles = rows.div_ceil(128) * cols / 128;
                    (lab.e4m3(rows * cols), (0..tiles).flat_map(|_| (0.01 * lab.uniform()).to_le_bytes()).collect())
                }
            };
            for (list, bytes) in addresses.iter_mut().zip([&weights, &scale]) {
                let buffer = lab.put(bytes)?;
                list.push(buffer.address());
                buffers.push(buffer);
            }
            data.push(weights);
            scales.push(scale);
        }
        let addresses = [lab.put(&addresses[0])?, lab.put(&addresses[1])?];
        Ok(Self { data, scales, addresses, _buffers: buffers, format, rows, cols })
    }

    pub(super) fn experts(&self) -> Experts<'_> {
        Experts { data: &self.addresses[0], scales: &self.addresses[1] }
    }

    pub(super) fn view(&self, e: usize) -> MatrixRef<'_> {
        let (format, scales) = match self.format {
            ExpertFormat::E2m1 => (MatrixFormat::E2m1, Scales::E8m0(&self.scales[e])),
            ExpertFormat::E4m3 => (MatrixFormat::E4m3, Scales::E8m0(&self.scales[e])),
            ExpertFormat::E4m3F32 => (MatrixFormat::E4m3, Scales::F32(&self.scales[e])),
        };
        matrix(format, self.rows, self.cols, &self.data[e], scales)
    }
}

/// float32 sums in another order, rounded to bf16: a few results go to the neighbour.
pub(super) const NEIGHBOURS: f64 = 5e-4;

pub(super) fn experts(lab: &mut Lab<'_>) -> Result<()> {
    let (experts, top_k) = (8, 2);
    let (hidden, inter) = if lab.small { (256, 128) } else { (1280, 640) };
    for format in [ExpertFormat::E2m1, ExpertFormat::E4m3, ExpertFormat::E4m3F32] {
        lab.clear()?;
        let w1 = Bank::new(lab, format, experts, inter, hidden)?;
        let w3 = Bank::new(lab, format, experts, inter, hidden)?;
        let w2 = Bank::new(lab, format, experts, hidden, inter)?;
        let many: &[usize] = if lab.small { &[] } else { &[330, 700] };
        for &tokens in [1, 2, 40, 200].iter().chain(many) {
            let ids = random_ids(lab, tokens, experts, top_k);
            let groups = grouping(lab, &ids, experts)?;
            ops::group(&lab.stream, &groups)?;
            let x = lab.normal_bf16(tokens * hidden, 1.0);
            let d_x = lab.put_bf16(&x)?;
            let places = tokens * top_k;
            let order = lab.get(&groups.order)?;
            let bounds = lab.get(&groups.bounds)?;
            let halves = [w1.experts(), w3.experts()];
            let single = [w2.experts()];
            let middle = lab.normal_bf16(places * inter, 1.0);
            let d_middle = lab.put_bf16(&middle)?;
            let middle_weights = lab.normal_bf16(hidden * inter, 1.0);

            let mut want_up = vec![0.0; places * 2 * inter];
            let mut want_down = vec![0.0; places * hidden];
            for e in 0..experts {
                let range = bounds[e] as usize..bounds[e + 1] as usize;
                if range.is_empty() {
                    continue;
                }
                let input: Vec<f32> = order[range.clone()]
                    .iter()
                    .flat_map(|&a| &x[a as usize / top_k * hidden..][..hidden])
                    .copied()
                    .collect();
                let (gate, up) = (lab.cpu_product(w1.view(e), &input)?, lab.cpu_product(w3.view(e), &input)?);
                let down = lab.cpu_product(w2.view(e), &middle[range.start * inter..range.end * inter])?;
                for (i, place) in range.clone().enumerate() {
                    want_up[place * 2 * inter..][..inter].copy_from_slice(&gate[i * inter..][..inter]);
                    want_up[(place * 2 + 1) * inter..][..inter].copy_from_slice(&up[i * inter..][..inter]);
                }
                want_down[range.start * hidden..range.end * hidden].copy_from_slice(&down);
            }
            store_bf16(&mut want_up, true);
            store_bf16(&mut want_down, true);

            // a dense product that shares the launch of a single token has the bits that it has alone
            let dense = Weight::Bf16(lab.put_bf16(&middle_weights)?);
            let row = d_middle.slice(0..inter)?;
            let job = |y: &Buffer<u16>| {
                let y = Output::Bf16(y.clone());
                Job {
                    weight: &dense,
                    first_row: 0,
                    rows: hidden,
                    cols: inter,
                    x: &row,
                    x_stride: inter,
                    y,
                    y_stride: hidden,
                }
            };
            let alone = lab.output(hidden)?;
            ops::linear(&lab.stream, &[job(&alone)], 1, None)?;

            let mut first = None;
            let workspace = lab.output(groups.images_len(hidden.max(inter)))?;
            // the number of tokens and the workspace decide how the work is cut: all ways for the same data
            for (way, cut, workspace) in [
                ("", 1, None),
                (", by eight", 2, None),
                (", tiles", 1000, None),
                (", own kernel", 1000, Some(&workspace)),
            ] {
                let shared = lab.output(hidden)?;
                let beside = (cut == 1).then(|| (job(&shared), None));
                let (y, z) = (lab.output(places * 2 * inter)?, lab.output(places * hidden)?);
                let up = Product {
                    matrices: &halves,
                    rows: inter,
                    cols: hidden,
                    format,
                    x: &d_x,
                    top_k: Some(top_k),
                    y: &y,
                    tokens: cut,
                };
                ops::expert_product(&lab.stream, &groups, &up, workspace, None)?;
                let down = Product {
                    matrices: &single,
                    rows: hidden,
                    cols: inter,
                    format,
                    x: &d_middle,
                    top_k: None,
                    y: &z,
                    tokens: cut,
                };
                let is_beside = beside.is_some();
                ops::expert_product(&lab.stream, &groups, &down, workspace, beside)?;
                let shape = format!("{format:?}, {tokens} tokens{way}");
                if is_beside {
                    let wrong = different(&lab.get(&shared)?, &lab.get(&alone)?);
                    lab.report("experts, a product beside them", &shape, wrong, 0.0);
                }
                let (got_up, got_down) = (lab.get_bf16(&y)?, lab.get_bf16(&z)?);
                lab.report("experts, gate and up", &shape, distance(&got_up, &want_up), NEIGHBOURS);
                lab.report("experts, down", &shape, distance(&got_down, &want_down), NEIGHBOURS);
                let both = [got_up, got_down].concat();
                let reference = first.get_or_insert_with(|| both.clone());
                lab.report("experts, one way = another", &shape, different_bits(&both, reference), 0.0);
            }
        }
    }
    Ok(())
}

/// All kernels of the mixture in a row, many times, overlapping as they do in use: the bits of the run that waits for each.
pub(super) fn chain(lab: &mut Lab<'_>) -> Result<()> {
    let (experts, top_k, hidden, inter) = (8, 2, 512, 256);
    lab.clear()?;
    let (w1, w3) = (
        Bank::new(lab, ExpertFormat::E2m1, experts, inter, hidden)?,
        Bank::new(lab, ExpertFormat::E2m1, experts, inter, hidden)?,
    );
    let w2 = Bank::new(lab, ExpertFormat::E2m1, experts, hidden, inter)?;
    let bias = lab.normal(experts, 0.5);
    let bias = lab.put(&bias)?;
    for tokens in [1, 7, 100] {
        let (x, logits) = (lab.normal_bf16(tokens * hidden, 1.0), lab.normal(tokens * experts, 2.0));
        let (x, logits) = (lab.put_bf16(&x)?, lab.put(&logits)?);
        let ids = vec![0; tokens * top_k];
        let groups = grouping(lab, &ids, experts)?;
        let token_ids: Vec<u32> = (0..tokens as u32).map(|t| if t % 4 == 1 { IDLE } else { t }).collect();
        let token_ids = lab.put(&token_ids)?;
        let (weights, places) = (lab.output::<f32>(tokens * top_k)?, tokens * top_k);
        let (up, act, down) =
            (lab.output(places * 2 * inter)?, lab.output(places * inter)?, lab.output(places * hidden)?);
        let y = lab.output::<u16>(tokens * hidden)?;
        let workspace = lab.output(groups.images_len(hidden.max(inter)))?;
        let once = |lab: &Lab<'_>| -> Result<()> {
            let (s, g) = (&lab.stream, &groups);
            let routing = Routing::Bias(&bias);
            let a = {
                let (logits, tokens, ids, weights) = (&logits, &token_ids, &g.ids, &weights);
                Route { logits, routing, tokens, ids, weights, experts, top_k, scale: 1.5 }
            };
            ops::route(s, &a)?;
            ops::group(s, g)?;
            let (matrices, format) = ([w1.experts(), w3.experts()], ExpertFormat::E2m1);
            let (rows, cols) = (inter, hidden);
            let a = Product { matrices: &matrices, rows, cols, format, x: &x, top_k: Some(top_k), y: &up, tokens };
            ops::expert_product(s, g, &a, Some(&workspace), None)?;
            let (routed, routes) = (Some((&up, &act)), (&weights, &groups.order));
            let swiglu = Swiglu { routed, routes, shared: None, width: inter, limit: 10.0, quantise: true };
            ops::swiglu(s, &swiglu)?;
            let (matrices, rows, cols) = ([w2.experts()], hidden, inter);
            let a = Product { matrices: &matrices, rows, cols, format, x: &act, top_k: None, y: &down, tokens };
            ops::expert_product(s, g, &a, Some(&workspace), None)?;
            ops::combine(s, &down, &x, (&groups.places, &groups.used()?), &y, hidden)
        };
        let was_careful = lab.gpu.is_careful();
        lab.gpu.set_careful(true);
        once(lab)?;
        lab.gpu.set_careful(was_careful);
        let want = lab.get(&y)?;
        let mut wrong = 0.0;
        for _ in 0..30 {
            for buffer in [&up, &act, &down, &y] {
                lab.stream.fill(buffer, 0xFF)?;
            }
            once(lab)?;
            wrong += different(&lab.get(&y)?, &want);
        }
        lab.report("chain, 30 runs = one step by step", format!("{tokens} tokens"), wrong, 0.0);
    }
    Ok(())
}

pub(super) fn swiglu(lab: &mut Lab<'_>) -> Result<()> {
    for (rows, width, limit) in [(3, 128, 10.0), (5, 2048, 10.0), (2, 3072, 0.5), (4, 640, 0.0)] {
        let gate_up = lab.normal_bf16(rows * 2 * width, 6.0);
        let weights: Vec<f32> = (0..rows).map(|_| lab.uniform()).collect();
        let order: Vec<u32> = (0..rows as u32).rev().collect();
        let (d_in, d_weights, d_order) = (lab.put_bf16(&gate_up)?, lab.put(&weights)?, lab.put(&order)?);
        for routed in [false, true] {
            let (plain, rounded) = (lab.output(rows * width)?, lab.output(rows * width)?);
            // the other kind of rows beside it, where both are taken
            let beside = lab.output(rows * width)?;
            for (out, quantise) in [(&plain, false), (&rounded, true)] {
                let (one, other) = (Some((&d_in, out)), quantise.then_some((&d_in, &beside)));
                let (routed, shared) = if routed { (one, other) } else { (other, one) };
                let routes = (&d_weights, &d_order);
                ops::swiglu(&lab.stream, &Swiglu { routed, routes, shared, width, limit, quantise })?;
            }
            let mut want = Vec::new();
            for r in 0..rows {
                let mut gate = gate_up[2 * r * width..][..width].to_vec();
                let weight = if routed { weights[order[r] as usize] } else { 1.0 };
                cpu_moe::swiglu(&mut gate, &gate_up[(2 * r + 1) * width..][..width], limit, weight, true);
                want.extend(gate);
            }
            let shape = format!("{rows} x {width}, limit {limit}{}", if routed { ", weighted" } else { "" });
            let got = lab.get_bf16(&plain)?;
            lab.report("swiglu", &shape, distance(&got, &want), NEIGHBOURS);
            let mut want = got;
            e4m3_round_trip(&mut want, 128);
            let got = lab.get_bf16(&rounded)?;
            lab.report("swiglu, E4M3", &shape, different_bits(&got, &want), 0.0);
        }
    }
    Ok(())
}

pub(super) fn combine(lab: &mut Lab<'_>) -> Result<()> {
    for (tokens, top_k, width) in [(1, 6, 4096), (9, 2, 128), (33, 6, 7168)] {
        let routed = lab.normal_bf16(tokens * top_k * width, 1.0);
        let shared = lab.normal_bf16(tokens * width, 1.0);
        let mut places: Vec<u32> = (0..(tokens * top_k) as u32).collect();
        for i in (1..places.len()).rev() {
            let other = lab.below(i + 1);
            places.swap(i, other);
        }
        // the last row is idle: its places are behind the others', and nobody has written there
        let used = if tokens > 1 { (tokens - 1) * top_k } else { top_k };
        places.sort_by_key(|&place| place as usize >= used);
        let mut routed = routed;
        routed[used * width..].fill(f32::NAN);
        let (d_routed, d_shared, d_places) = (lab.put_bf16(&routed)?, lab.put_bf16(&shared)?, lab.put(&places)?);
        let (out, d_used) = (lab.output(tokens * width)?, lab.put(&[used as u32])?);
        ops::combine(&lab.stream, &d_routed, &d_shared, (&d_places, &d_used), &out, width)?;
        let mut want = vec![0.0f32; tokens * width];
        for (t, want) in want.chunks_exact_mut(width).enumerate() {
            let mut sorted = places[t * top_k..][..top_k].to_vec();
            sorted.sort_unstable();
            for place in sorted.into_iter().filter(|&place| (place as usize) < used) {
                let row = &routed[place as usize * width..][..width];
                want.iter_mut().zip(row).for_each(|(w, r)| *w += r);
            }
            want.iter_mut().zip(&shared[t * width..]).for_each(|(w, s)| *w += s);
        }
        store_bf16(&mut want, true);
        let got = lab.get(&out)?.into_iter().map(bf16_value).collect::<Vec<_>>();
        lab.report("combine", format!("{tokens} x {top_k} x {width}"), different_bits(&got, &want), 0.0);
    }
    Ok(())
}
