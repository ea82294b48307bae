//! `dsv4 info`: what a checkpoint is, and what running it takes.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use dsv4::backend::cpu::simd::Simd;
use dsv4::backend::{cuda_devices, cuda_kernels};
use dsv4::cache::{BLOCK_TOKENS, CacheLayout, CachePlan};
use dsv4::model::config::{Config, Draft, ExpertDtype, LayerKind};
use dsv4::{Error, ErrorKind, KvFormat, Model, Numerics};
use serde_json::{Value, json};

use crate::failure::Result;
use crate::number::whole;
use crate::output::{self, line, size};

const EXAMPLES: &str = "\
Reads the config and the headers of the shards, no weights. Given a bare
config.json it tells what that file says.

Examples:
  dsv4 info examples/models/tiny-v4
  dsv4 info ~/models/DeepSeek-V4-Flash --context 1048576 --kv bf16 --cache-bytes 64G
  dsv4 info config.json --json | jq .memory.cache";

/// Show a model's dimensions, inventory and memory by category
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint folder, or a config.json alone
    model: PathBuf,

    /// Tell the cache's memory for this many tokens; 0 is the model's longest context
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>)]
    context: usize,

    /// Cache storage: fp8, bf16 or f32
    #[arg(long, value_name = "FORMAT", default_value_t = KvFormat::Fp8)]
    kv: KvFormat,

    /// Tell how many such sessions, and how long a single one, this much cache memory holds, such as 8G
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = crate::args::size)]
    cache_bytes: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let document = if args.model.is_file() {
        let config = Config::from_file(&args.model)?;
        Document { model: describe(&config), checkpoint: Value::Null, tokenizer: Value::Null, config }
    } else {
        let model = Model::open(&args.model)?;
        let config = model.config().clone();
        Document { model: describe(&config), checkpoint: inventory(&model), tokenizer: tokenizer(&model), config }
    };
    let longest = document.config.max_position_embeddings;
    if args.context > longest {
        let message = format!("context is {}; the model's max_position_embeddings is {longest}", args.context);
        return Err(Error::new(ErrorKind::InvalidArgument, message).into());
    }
    let memory = memory(&document.config, args);
    if args.json {
        return output::json(&json!({
            "model": document.model,
            "checkpoint": document.checkpoint,
            "tokenizer": document.tokenizer,
            "memory": memory,
            "numerics": Numerics::ALL.map(Numerics::name),
            "devices": devices(),
            "build": build(),
        }));
    }
    print_model(&document.model)?;
    print_checkpoint(&document.checkpoint)?;
    print_tokenizer(&document.tokenizer)?;
    print_memory(&memory)?;
    print_host()
}

struct Document {
    config: Config,
    model: Value,
    checkpoint: Value,
    tokenizer: Value,
}

fn describe(c: &Config) -> Value {
    let count = |kind| c.layers.iter().filter(|&&k| k == kind).count();
    let draft = match &c.draft {
        Draft::None => Value::Null,
        Draft::Mtp => json!({ "kind": "mtp" }),
        Draft::Dspark { stages, block_size, markov_rank, target_layer_ids, .. } => json!({
            "kind": "dspark",
            "stages": stages,
            "block_size": block_size,
            "markov_rank": markov_rank,
            "target_layer_ids": target_layer_ids,
        }),
    };
    let expert_dtype = c.expert_dtype.map(|dtype| match dtype {
        ExpertDtype::Fp4 => "fp4",
        ExpertDtype::Fp8 => "fp8",
    });
    json!({
        "model_type": "deepseek_v4",
        "num_hidden_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "num_attention_heads": c.num_attention_heads,
        "head_dim": c.head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "q_lora_rank": c.q_lora_rank,
        "o_groups": c.o_groups,
        "o_lora_rank": c.o_lora_rank,
        "sliding_window": c.sliding_window,
        "n_routed_experts": c.n_routed_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "num_hash_layers": c.num_hash_layers,
        "moe_intermediate_size": c.moe_intermediate_size,
        "expert_dtype": expert_dtype,
        "index_n_heads": c.index_n_heads,
        "index_head_dim": c.index_head_dim,
        "index_topk": c.index_topk,
        "hc_mult": c.hc_mult,
        "max_position_embeddings": c.max_position_embeddings,
        "layers": {
            "window": count(LayerKind::Window),
            "c4a": count(LayerKind::C4a),
            "c128a": count(LayerKind::C128a),
            "pattern": c.layers.iter().map(|kind| kind.ratio()).collect::<Vec<_>>(),
        },
        "draft": draft,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
    })
}

fn inventory(model: &Arc<Model>) -> Value {
    let checkpoint = model.checkpoint();
    let inventory = checkpoint.inventory();
    let share = |name: String, tensors: usize, bytes: u64| json!({ "name": name, "tensors": tensors, "bytes": bytes });
    let shards = checkpoint.shards().iter().map(|shard| {
        let file = shard.path().file_name().unwrap_or_default().to_string_lossy();
        share(file.into_owned(), shard.tensor_count(), shard.declared_bytes())
    });
    let dtypes = inventory.by_dtype.iter().filter(|(_, s)| s.tensors > 0);
    let categories = inventory.by_category.iter().filter(|(_, s)| s.tensors > 0);
    json!({
        "tensors": inventory.total.tensors,
        "bytes": inventory.total.bytes,
        "by_dtype": dtypes.map(|(d, s)| share(d.to_string(), s.tensors, s.bytes)).collect::<Vec<_>>(),
        "by_category": categories.map(|(c, s)| share(c.to_string(), s.tensors, s.bytes)).collect::<Vec<_>>(),
        "decode_bytes_per_token": model.decode_reads(0).bytes(),
        "shards": shards.collect::<Vec<_>>(),
    })
}

fn tokenizer(model: &Model) -> Value {
    match model.tokenizer() {
        Ok(tokenizer) => json!({
            "vocab_size": tokenizer.vocab_size(),
            "added_tokens": tokenizer.added_tokens().count(),
        }),
        Err(e) => json!({ "error": e.message() }),
    }
}

fn memory(config: &Config, args: &Args) -> Value {
    let context = if args.context == 0 { config.max_position_embeddings } else { args.context };
    let layout = CacheLayout::new(config, args.kv);
    let plan = CachePlan::new(config, args.kv, context, args.cache_bytes);
    let (entries, keys) = layout.block_bytes();
    json!({
        "context": context,
        "kv_format": args.kv.name(),
        "cache": {
            "window": plan.bytes.window,
            "pages": plan.bytes.pages,
            "window_and_pages": plan.bytes.window + plan.bytes.pages,
            "states": plan.bytes.state,
            "draft_windows": plan.draft_windows,
            "total": plan.bytes.window + plan.bytes.state + plan.bytes.pages,
        },
        "block": {
            "tokens": BLOCK_TOKENS,
            "entries": entries,
            "index_keys": keys,
            "bytes_per_token": plan.block as f64 / BLOCK_TOKENS as f64,
        },
        "limit": { "bytes": plan.limit, "sessions": plan.sequences, "longest_context": plan.longest_context },
        "session_bytes": plan.sequence,
        "rollback_token_bytes": plan.rollback_token,
        "row_bytes": layout.row_bytes(),
        "index_key_bytes": layout.key_bytes(),
    })
}

fn devices() -> Value {
    match cuda_devices() {
        Ok(list) => {
            let device =
                |d: &dsv4::backend::Device| json!({ "id": d.id, "name": d.name, "memory_bytes": d.memory_bytes });
            json!({ "cuda": list.iter().map(device).collect::<Vec<_>>() })
        }
        Err(e) => json!({ "cuda": [], "reason": e.message() }),
    }
}

fn build() -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "arch": std::env::consts::ARCH,
        "os": std::env::consts::OS,
        "simd": Simd::available().into_iter().map(|simd| simd.level().name()).collect::<Vec<_>>(),
        "cuda_kernels": cuda_kernels().files,
        "cuda_architectures": cuda_kernels().architectures,
    })
}

fn print_model(m: &Value) -> Result {
    let n = |key: &str| m[key].as_u64().unwrap_or(0);
    line("model")?;
    line(format_args!("  type           {}", m["model_type"].as_str().unwrap_or_default()))?;
    line(format_args!(
        "  layers         {}: {} window only, {} c4a, {} c128a; the first {} routed by token id",
        n("num_hidden_layers"),
        m["layers"]["window"],
        m["layers"]["c4a"],
        m["layers"]["c128a"],
        n("num_hash_layers")
    ))?;
    line(format_args!("  pattern        {}", pattern(&m["layers"]["pattern"])))?;
    line(format_args!(
        "  hidden         {} in {} streams, vocabulary {}",
        n("hidden_size"),
        n("hc_mult"),
        n("vocab_size")
    ))?;
    line(format_args!(
        "  attention      {} heads of {} ({} rotary), window {}, query rank {}, output {} groups of rank {}",
        n("num_attention_heads"),
        n("head_dim"),
        n("qk_rope_head_dim"),
        n("sliding_window"),
        n("q_lora_rank"),
        n("o_groups"),
        n("o_lora_rank")
    ))?;
    line(format_args!(
        "  indexer        {} heads of {}, top {}",
        n("index_n_heads"),
        n("index_head_dim"),
        n("index_topk")
    ))?;
    line(format_args!(
        "  experts        {} of {} and 1 shared, width {}, {}",
        n("num_experts_per_tok"),
        n("n_routed_experts"),
        n("moe_intermediate_size"),
        m["expert_dtype"].as_str().unwrap_or("dtype not in the config")
    ))?;
    line(format_args!("  context        {} tokens", n("max_position_embeddings")))?;
    let draft = &m["draft"];
    match draft["kind"].as_str() {
        None => line("  draft          none"),
        Some("mtp") => line("  draft          one MTP block"),
        Some(kind) => line(format_args!(
            "  draft          {kind}: {} stages, blocks of {}, from layers {}",
            draft["stages"], draft["block_size"], draft["target_layer_ids"]
        )),
    }
}

/// Compression ratios with repeated stretches counted: `0 0 (4 128)x20 4`.
fn pattern(ratios: &Value) -> String {
    let ratios: Vec<String> = ratios.as_array().into_iter().flatten().map(Value::to_string).collect();
    let mut parts = Vec::new();
    let mut i = 0;
    while i < ratios.len() {
        let best = (1..=2)
            .map(|width| {
                let unit = &ratios[i..(i + width).min(ratios.len())];
                (ratios[i..].chunks(width).take_while(|&chunk| chunk == unit).count(), width)
            })
            .max_by_key(|&(count, width)| if count > 1 { count * width } else { 0 })
            .filter(|&(count, width)| count * width > 2);
        match best {
            Some((count, width)) => {
                let unit = ratios[i..i + width].join(" ");
                parts.push(if width == 1 { format!("{unit}x{count}") } else { format!("({unit})x{count}") });
                i += count * width;
            }
            None => {
                parts.push(ratios[i].clone());
                i += 1;
            }
        }
    }
    parts.join(" ")
}

fn print_checkpoint(c: &Value) -> Result {
    if c.is_null() {
        return line("\ncheckpoint\n  none: only a config.json was given");
    }
    let bytes = |v: &Value| size(v.as_u64().unwrap_or(0));
    let shards = c["shards"].as_array().map_or(0, Vec::len);
    line(format_args!("\ncheckpoint: {} tensors, {}, in {shards} shards", c["tensors"], bytes(&c["bytes"])))?;
    for key in ["by_category", "by_dtype"] {
        for share in c[key].as_array().into_iter().flatten() {
            let name = share["name"].as_str().unwrap_or_default();
            line(format_args!("  {name:<22} {:>9} tensors {:>9}", share["tensors"], bytes(&share["bytes"])))?;
        }
    }
    line(format_args!("  one decoded token reads {}", bytes(&c["decode_bytes_per_token"])))
}

fn print_tokenizer(t: &Value) -> Result {
    match (t["vocab_size"].as_u64(), t["error"].as_str()) {
        (Some(ids), _) => line(format_args!("\ntokenizer: {ids} ids, {} of them added tokens", t["added_tokens"])),
        (None, Some(reason)) => line(format_args!("\ntokenizer: none ({})", crate::failure::one_line(reason))),
        (None, None) => Ok(()),
    }
}

fn print_memory(m: &Value) -> Result {
    let bytes = |v: &Value| size(v.as_u64().unwrap_or(0));
    let cache = &m["cache"];
    line(format_args!(
        "\ncache of one session with {} tokens, {}",
        m["context"],
        m["kv_format"].as_str().unwrap_or_default()
    ))?;
    line(format_args!("  window rings           {:>9}", bytes(&cache["window"])))?;
    line(format_args!("  compressor states      {:>9}", bytes(&cache["states"])))?;
    line(format_args!(
        "  pages                  {:>9}   {} a block of {} tokens: entries {}, index keys {}",
        bytes(&cache["pages"]),
        size(m["block"]["entries"].as_u64().unwrap_or(0) + m["block"]["index_keys"].as_u64().unwrap_or(0)),
        m["block"]["tokens"],
        bytes(&m["block"]["entries"]),
        bytes(&m["block"]["index_keys"])
    ))?;
    line(format_args!("  total                  {:>9}", bytes(&cache["total"])))?;
    line(format_args!(
        "  an empty session takes {} (padding included), a draft module's windows {} more",
        bytes(&m["session_bytes"]),
        bytes(&cache["draft_windows"])
    ))?;
    let limit = &m["limit"];
    if limit["bytes"] == 0 {
        return Ok(());
    }
    line(format_args!(
        "  {} hold {} such sessions, or one of {} tokens",
        bytes(&limit["bytes"]),
        limit["sessions"],
        limit["longest_context"]
    ))
}

fn print_host() -> Result {
    line(format_args!("\nnumerics: {}", Numerics::ALL.map(Numerics::name).join(", ")))?;
    match cuda_devices() {
        Ok(list) => {
            for device in list {
                line(format_args!("device {}: {}, {}", device.id, device.name, size(device.memory_bytes)))?;
            }
        }
        Err(e) => line(format_args!("CUDA devices: none ({})", crate::failure::one_line(e.message())))?,
    }
    line(format_args!(
        "dsv4 {} for {} on {}, SIMD {}, {}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        std::env::consts::OS,
        Simd::detect().level(),
        kernels()
    ))
}

fn kernels() -> String {
    let held = cuda_kernels();
    match (held.files.len(), held.architectures.as_slice()) {
        (0, _) => "no CUDA kernels in this build".into(),
        (_, []) => "CUDA kernels as sources (NVRTC compiles them when a device is opened)".into(),
        (_, archs) => format!("CUDA kernels for {}", archs.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_count_repeated_stretches() {
        assert_eq!(pattern(&json!([0, 0, 4, 128, 4, 128, 4])), "0 0 (4 128)x2 4");
        assert_eq!(pattern(&json!([0, 0, 0])), "0x3");
        assert_eq!(pattern(&json!([0, 4])), "0 4");
        assert_eq!(pattern(&json!([])), "");
    }
}
