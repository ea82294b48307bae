//! Checks of the products of prompts, whose sums have an order of their own.

use super::dense::Weights;
use super::experts::{Bank, NEIGHBOURS, grouping, random_ids};
use super::lab::{Lab, different_bits, distance, matrix};
use crate::backend::cuda::ops::{self, ExpertFormat, Job, Output, Product};
use crate::error::Result;
use crate::tensor::format::{bf16_bits, bf16_value};

/// One float32 sum of up to 16384 products, which the unit cuts off after each 16.
const SUMS: f64 = 3e-5;

pub(super) fn linear(lab: &mut Lab<'_>) -> Result<()> {
    if !ops::has_chains(lab.gpu) {
        return Ok(());
    }
    let shapes: &[(usize, usize)] =
        if lab.small { &[(144, 640)] } else { &[(129, 384), (512, 1024), (384, 7168), (64, 16384), (4104, 640)] };
    let names = ["prompts, E4M3/E8M0", "prompts, E4M3/F32", "prompts, bf16"];
    for (kind, name) in names.into_iter().enumerate() {
        for &(rows, cols) in shapes {
            lab.clear()?;
            let most = if lab.small { 140 } else { 300 };
            let weights = Weights::new(lab, kind, rows, cols);
            let weight = weights.put(lab)?;
            let x = lab.normal_bf16(most * cols, 1.0);
            let d_x = lab.put_bf16(&x)?;
            let want = lab.cpu_product(matrix(weights.format, rows, cols, &weights.data, weights.scales()), &x)?;
            let mut all: Option<Vec<f32>> = None;
            for tokens in [most, 129, 100, 70, 20] {
                let workspace = lab.output(ops::images_len(cols, tokens))?;
                let small = workspace.slice(0..ops::images_len(cols, 128))?;
                let (y, z) = (lab.output::<f32>(tokens * rows)?, lab.output::<u16>(tokens * rows)?);
                for (workspace, y) in [(&workspace, Output::F32(y.clone())), (&small, Output::Bf16(z.clone()))] {
                    let job =
                        Job { weight: &weight, first_row: 0, rows, cols, x: &d_x, x_stride: cols, y, y_stride: rows };
                    ops::linear_chain(&lab.stream, &[job], tokens, workspace)?;
                }
                let (got, narrow) = (lab.get(&y)?, lab.get_bf16(&z)?);
                let shape = format!("{rows} x {cols}, {tokens} tokens");
                lab.report(name, &shape, distance(&got, &want[..tokens * rows]), SUMS);
                let rounded: Vec<f32> = got.iter().map(|&v| bf16_value(bf16_bits(v))).collect();
                lab.report("prompts, bf16 outputs, small workspace", &shape, different_bits(&narrow, &rounded), 0.0);
                let all = all.get_or_insert_with(|| got.clone());
                lab.report("prompts, few = among many", &shape, different_bits(&got, &all[..tokens * rows]), 0.0);
            }
        }
    }
    Ok(())
}

pub(super) fn experts(lab: &mut Lab<'_>) -> Result<()> {
    if !ops::has_chains(lab.gpu) {
        return Ok(());
    }
    let (experts, top_k) = (4, 2);
    let (hidden, inter) = if lab.small { (256, 128) } else { (1280, 640) };
    let most = if lab.small { 150 } else { 700 };
    lab.clear()?;
    let bank = Bank::new(lab, ExpertFormat::E2m1, experts, inter, hidden)?;
    let ids = random_ids(lab, most, experts, top_k);
    let x = lab.normal_bf16(most * hidden, 1.0);
    let d_x = lab.put_bf16(&x)?;
    let mut all: Option<Vec<f32>> = None;
    for tokens in [most, 130, 33] {
        let assignments = tokens * top_k;
        let groups = grouping(lab, &ids[..assignments], experts)?.part(0..assignments, true)?;
        ops::group(&lab.stream, &groups)?;
        let places = lab.get(&groups.places)?;
        let workspace = lab.output(groups.images_len(hidden))?;
        let y = lab.output(assignments * 2 * inter)?;
        let a = Product {
            matrices: &[bank.experts(), bank.experts()],
            rows: inter,
            cols: hidden,
            format: ExpertFormat::E2m1,
            x: &d_x.slice(0..tokens * hidden)?,
            top_k: Some(top_k),
            y: &y,
            tokens,
        };
        ops::expert_product(&lab.stream, &groups, &a, Some(&workspace), None)?;
        let got = lab.get_bf16(&y)?;
        // by assignment, whose place depends on the others, and is none where nothing was computed
        let none = vec![f32::NAN; inter];
        let of = |half: usize| -> Vec<f32> {
            let row = |&place: &u32| got.chunks_exact(inter).nth(place as usize * 2 + half).unwrap_or(&none);
            places.iter().flat_map(row).copied().collect()
        };
        let (first, second) = (of(0), of(1));
        let shape = format!("{tokens} tokens");
        lab.report("prompts, both halves", &shape, different_bits(&first, &second), 0.0);
        let mut want = Vec::new();
        for (a, &id) in ids[..assignments].iter().enumerate() {
            want.extend(lab.cpu_product(bank.view(id as usize), &x[a / top_k * hidden..][..hidden])?);
        }
        want.iter_mut().for_each(|v| *v = bf16_value(bf16_bits(*v)));
        lab.report("prompts, experts", &shape, distance(&first, &want), NEIGHBOURS);
        let all = all.get_or_insert_with(|| first.clone());
        lab.report("prompts, few = among many", &shape, different_bits(&first, &all[..first.len()]), 0.0);
    }
    Ok(())
}
