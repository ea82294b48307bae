//! Full-size checkpoints of the releases as sparse files, from a list of their tensors.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

/// A tensor's name, dtype and shape.
pub(crate) type Spec = (String, &'static str, Vec<usize>);

/// All tensors of an inventory file, with the layers and experts of its patterns written out.
pub(crate) fn read(path: &Path) -> Vec<Spec> {
    let text = std::fs::read_to_string(path).expect("the inventory can be read");
    let inventory: Value = serde_json::from_str(&text).expect("the inventory is JSON");
    let experts = inventory["experts"].as_u64().expect("`experts` is a number");
    let mut all = Vec::new();
    for row in inventory["rows"].as_array().expect("`rows` is a list") {
        let pattern = row["name"].as_str().expect("`name` is a text");
        let dtype = ["F8_E4M3", "F8_E8M0", "I8", "BF16", "F32", "I64"];
        let dtype = *dtype.iter().find(|d| row["dtype"] == **d).expect("`dtype` is one of the releases'");
        let shape: Vec<usize> = serde_json::from_value(row["shape"].clone()).expect("`shape` is a list of numbers");
        let layers: Option<Vec<u64>> = serde_json::from_value(row["layers"].clone()).expect("`layers` is a list");
        for layer in layers.unwrap_or(vec![0]) {
            let name = pattern.replace("{l}", &layer.to_string());
            if name.contains("{e}") {
                all.extend((0..experts).map(|e| (name.replace("{e}", &e.to_string()), dtype, shape.clone())));
            } else {
                all.push((name, dtype, shape.clone()));
            }
        }
    }
    assert_eq!(all.len() as u64, inventory["tensors"].as_u64().expect("`tensors` is a number"));
    all
}

/// Writes `tensors` as sparse shards and an index into `dir`, in the layout of the releases: the embedding, one shard a
/// layer, the head, then the draft blocks. Returns the number of shards.
pub(crate) fn write_checkpoint(dir: &Path, tensors: Vec<Spec>) -> usize {
    let mut shards: BTreeMap<usize, Vec<Spec>> = BTreeMap::new();
    for tensor in tensors {
        shards.entry(position(&tensor.0)).or_default().push(tensor);
    }
    let count = shards.len();
    let (mut map, mut total) = (Map::new(), 0);
    for (i, tensors) in shards.into_values().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        write_sparse(&dir.join(&file), &tensors);
        for (name, dtype, shape) in tensors {
            total += shape.iter().product::<usize>() * dtype_size(dtype);
            map.insert(name, Value::from(file.clone()));
        }
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("the test folder is writable");
    count
}

/// Orders shards: embedding, layers, head, draft blocks.
fn position(name: &str) -> usize {
    let number = || name.split('.').nth(1).and_then(|n| n.parse::<usize>().ok()).expect("a block has a number");
    match name {
        "embed.weight" => 0,
        _ if name.starts_with("layers.") => 1 + number(),
        _ if name.starts_with("mtp.") => 2_000_000 + number(),
        _ => 1_000_000,
    }
}

/// Writes one file whose data section is a hole of the right size.
fn write_sparse(path: &Path, tensors: &[Spec]) {
    let mut header = Map::new();
    let mut position = 0;
    for (name, dtype, shape) in tensors {
        let end = position + shape.iter().product::<usize>() * dtype_size(dtype);
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [position, end]}));
        position = end;
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path).expect("the test folder is writable");
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("the test folder has room for headers");
    file.write_all(header.as_bytes()).expect("the test folder has room for headers");
    file.set_len((8 + header.len() + position) as u64).expect("the file system has sparse files");
}

/// Bytes of one element.
fn dtype_size(dtype: &str) -> usize {
    match dtype {
        "F8_E4M3" | "F8_E8M0" | "I8" => 1,
        "BF16" => 2,
        "F32" => 4,
        _ => 8,
    }
}
