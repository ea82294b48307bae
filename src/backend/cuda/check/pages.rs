//! Checks of the cache's pages in device memory.

use std::sync::Arc;

use super::lab::{Lab, different};
use crate::backend::cuda::pages::DevicePages;
use crate::cache::{
    BLOCK_TOKENS, Block, CacheLayout, CacheManager, CacheOptions, KvFormat, LayerLayout, PageMemory, PageMove, State,
};
use crate::error::Result;
use crate::model::config::LayerKind;

/// The layers of V4-Flash, the first `count` of them.
fn layout(count: usize) -> CacheLayout {
    let layer = |i| match i {
        0 | 1 => LayerLayout { kind: LayerKind::Window, main_state: 0, index_state: 0 },
        i if i % 2 == 0 => LayerLayout { kind: LayerKind::C4a, main_state: 24 * 512, index_state: 24 * 128 },
        _ => LayerLayout { kind: LayerKind::C128a, main_state: 3 * 512, index_state: 0 },
    };
    let layers = (0..count).map(layer).collect();
    CacheLayout { format: KvFormat::Fp8, head_dim: 512, rope_dim: 64, index_dim: 128, window: 128, layers }
}

fn manager(layers: usize, memory: Option<Arc<dyn PageMemory>>) -> Arc<CacheManager> {
    let options = CacheOptions { poison: true, ..CacheOptions::PRIVATE };
    CacheManager::with_memory(layout(layers), options, b"pages", None, memory)
}

/// Bytes in and out, moved and set.
pub(super) fn page_memory(lab: &mut Lab<'_>) -> Result<()> {
    let mut want = lab.bytes(1 << 20);
    let memory = DevicePages::new(lab.gpu, lab.put(&want)?)?;
    let mut wrong = u8::from(memory.len() != want.len() as u64);
    let bytes = lab.bytes(70_001);
    memory.write(1001, &bytes)?;
    want[1001..71_002].copy_from_slice(&bytes);
    let moves: Vec<PageMove> = (0..500).map(|i| PageMove { from: i * 700, to: 500_000 + i * 701, len: 700 }).collect();
    memory.copy(&moves)?;
    for m in &moves {
        want.copy_within(m.from as usize..(m.from + m.len) as usize, m.to as usize);
    }
    memory.fill(999_999, 17, 0xFF)?;
    want[999_999..1_000_016].fill(0xFF);
    let mut got = vec![0; want.len()];
    memory.read(0, &mut got)?;
    let seen = lab.get(memory.memory())?;
    lab.report("page memory", "500 moves in 1 MB", different(&got, &want) + different(&seen, &want), 0.0);
    let end = memory.len();
    wrong += u8::from(memory.read(end - 3, &mut [0; 4]).is_ok());
    wrong += u8::from(memory.write(u64::MAX, &[0]).is_ok());
    wrong += u8::from(memory.copy(&[PageMove { from: 0, to: end - 1, len: 2 }]).is_ok());
    lab.report("page memory, ranges outside", "refused", f64::from(wrong), 0.0);
    Ok(())
}

/// Blocks and states that go to the device, are copied there and come back.
pub(super) fn pages(lab: &mut Lab<'_>) -> Result<()> {
    let layers = if lab.small { 6 } else { 43 };
    let slabs = if lab.small { 12 } else { 60 };
    let memory = lab.output::<u8>((slabs * layout(layers).slab_bytes()) as usize)?;
    let memory: Arc<dyn PageMemory> = Arc::new(DevicePages::new(lab.gpu, memory)?);
    let (host, device) = (manager(layers, None), manager(layers, Some(memory)));

    let layout = layout(layers);
    let want = lab.bytes(layout.block_content(BLOCK_TOKENS) as usize);
    let mut left = want.as_slice();
    let block = Block::import(&device, BLOCK_TOKENS, &mut |out| take(&mut left, out))?;
    let copy = block.copy(&device)?;
    drop(block);
    let got = exported(|sink| copy.export(&layout, BLOCK_TOKENS, sink))?;
    lab.report("pages, a block", format!("{layers} layers"), different(&got, &want), 0.0);

    let want = lab.bytes(layout.state_content() as usize);
    let mut left = want.as_slice();
    let state = State::import(&device, 1000, &mut |out| take(&mut left, out))?;
    let copy = state.copy(&device)?;
    drop(state);
    let got = exported(|sink| copy.export(&layout, sink))?;
    lab.report("pages, a state", format!("{layers} layers"), different(&got, &want), 0.0);

    let want = exported(|sink| State::new(&host)?.export(&layout, sink))?;
    let got = exported(|sink| State::new(&device)?.export(&layout, sink))?;
    lab.report("pages, an empty state", format!("{layers} layers"), different(&got, &want), 0.0);
    Ok(())
}

/// Moves bytes from the front of `left` to `out`.
fn take(left: &mut &[u8], out: &mut [u8]) -> Result<()> {
    let (front, rest) = left.split_at(out.len());
    out.copy_from_slice(front);
    *left = rest;
    Ok(())
}

fn exported(export: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    export(&mut |part| {
        bytes.extend_from_slice(part);
        Ok(())
    })?;
    Ok(bytes)
}
