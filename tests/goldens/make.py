#!/usr/bin/env python3
"""Make the committed goldens with the oracle (float64 sums): python make.py ORACLE_DIR TINY_V4_DIR [MODEL ...]

Writes one folder per model beside this file; README.md says what the files hold. The checkpoints are not kept:
tests/common/checkpoint.rs makes the same bytes from the recipe and checks them against the manifest's sha256."""
import hashlib, json, pathlib, sys, tempfile

oracle_dir, tiny_dir = map(pathlib.Path, sys.argv[1:3])
sys.path.insert(0, str(oracle_dir))
import numpy as np, torch                                                                         # noqa: E402
import make_checkpoint                                                                            # noqa: E402
from build_goldens import collect, margins, recorder, save, stats, summarise, token_errors       # noqa: E402
from oracle import Oracle                                                                         # noqa: E402
from v4io import fp8_sim                                                                          # noqa: E402

HOME = pathlib.Path(__file__).resolve().parent
ROWS = [0, 1, 3, 4, 7, 8, 15, 16, 17, 63, 64, 100, 127, 128, 129, 131, 143, 149]
LENGTHS = [1, 2, 3, 4, 5, 8, 16, 17, 127, 128, 129, 150]
SMALL = dict(hidden_size=128, num_attention_heads=4, head_dim=128, num_hash_layers=1, index_topk=8, vocab_size=320)
YARN = dict(beta_fast=32, beta_slow=1, factor=16, original_max_position_embeddings=64, type="yarn")
NANO = {
    "nano-flash": dict(preset="flash-mini", seed=11, layers=[0, 1, 2, 3], set=dict(
        SMALL, o_groups=2, sliding_window=16, compress_ratios=[0, 4, 128, 4, 0], rope_scaling=YARN)),
    "nano-pro": dict(preset="pro-mini", seed=12, layers=[0, 1], set=dict(
        SMALL, num_attention_heads=2, head_dim=512, num_experts_per_tok=3, compress_ratios=[128, 4, 0])),
    "nano-dspark": dict(preset="dspark-mini", seed=18, layers=[1], set=dict(SMALL, sliding_window=32, compress_ratios=[0, 4, 0, 0, 0, 0])),
    "nano-base": dict(preset="base-mini", seed=14, layers=[0, 1], set=dict(SMALL, sliding_window=32, compress_ratios=[128, 4, 0])),
}
SINGLE = dict(bf16="bf16", act_fp8="act_fp8", kv_fp8="kv_fp8", index_rotate="idx_rot", index_query_fp4="idx_q_fp4",
              index_key_fp4="idx_k_fp4", attention_bf16="p_bf16")


def short(x):
    """Four significant digits are plenty for tolerances."""
    if isinstance(x, dict):
        return {k: short(v) for k, v in x.items()}
    return float(f"{x:.4g}") if isinstance(x, float) else x


def drawn_streams(seed, layer, n, hidden):
    """Input of one layer [n,4,D]: normal values of the checkpoint maker's stream, as bf16."""
    count = n * 4 * hidden
    code = make_checkpoint.to_bf16(make_checkpoint.Z16)[make_checkpoint.stream(seed, f"input.layers.{layer}")(count)]
    return torch.from_numpy(code.view("<i2").copy()).view(torch.bfloat16).view(n, 4, hidden)


def halves(m, layer, X, ids, mid=None):
    """Attention half on X, FFN half on `mid` (default: the attention half's own result)."""
    p, dump = f"layers.{layer}.", {}
    rec, pos, st = recorder(dump, ""), torch.arange(len(ids)), m.new_state().layers[layer]
    X, ids = X.to(m.ct), torch.tensor(ids)
    dump["streams_mid"] = [m.attn_half(p, X, lambda x: m.attention(p + "attn.", x, pos, st, m.c.ratios[layer], rec))]
    dump["streams"] = [m.ffn_half(p, dump["streams_mid"][0] if mid is None else mid.to(m.ct), ids, rec)]
    for name, c in (("compressed", st.main), ("index_keys", st.index)):
        if c.count():
            dump[name] = [c.entries]
    return collect(dump)


class OtherSums(Oracle):
    """float32 with last-bit noise before everything that is stored as bf16, as other orders of summation have it."""

    def __init__(self, path, seed, **flags):
        super().__init__(path, "reference", torch.float32, **flags)
        self.random = torch.Generator().manual_seed(seed)

    def noise(self, x, size):
        return x + 4e-8 * size * torch.randn(x.shape, generator=self.random, dtype=x.dtype)

    def B(self, x):
        return super().B(self.noise(x, x.abs()))

    def linear(self, base, x):
        if self.n.act_fp8 and self.ck.is_quantised(base):
            x = fp8_sim(x, 128)
        y = x @ self.mat(base).T
        return super().B(self.noise(y, y.square().mean(-1, keepdim=True).sqrt()))

    def hc_mix(self, X, p):
        m = super().hc_mix(X, p)
        return self.noise(m, m.square().mean(-1, keepdim=True).sqrt())


def worst(rows):
    """The largest of every figure (the smallest share of equal things) over several runs."""
    if isinstance(rows[0], dict):
        low = ("tokens_bit_equal", "router_sets_equal", "index_sets_equal")
        return {k: min(r[k] for r in rows) if k in low else worst([r[k] for r in rows]) for k in rows[0]}
    return max(rows)


def half_figures(m, layer, X, ids, golden):
    """Per-token relative errors at ROWS of a run in other arithmetic, and the shares of equal routes and selections."""
    d = halves(m, layer, X, ids, golden["streams_mid"])
    row = {k: token_errors(d[k][ROWS], golden[k][ROWS]) for k in ("o", "streams_mid")}
    row["streams_from_golden_mid"] = token_errors(d["streams"][ROWS], golden["streams"][ROWS])
    sets = lambda t: [set(r) - {-1} for r in t.tolist()]
    for k, name in (("router_ids", "router_sets_equal"), ("selected", "index_sets_equal")):
        if k in d:
            row[name] = float(np.mean([a == b for a, b in zip(sets(d[k]), sets(golden[k]))]))
    return row


def nano(name, spec):
    home = HOME / name
    home.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as ck:
        sets = [f"{k}={json.dumps(v)}" for k, v in spec["set"].items()]
        cfg = make_checkpoint.make_config(spec["preset"], overrides=sets)
        make_checkpoint.build(cfg, ck, spec["seed"])
        sha = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(pathlib.Path(ck).iterdir())}
        n, V = LENGTHS[-1], cfg["vocab_size"]
        ids = [0] + [int(t) for t in np.random.RandomState(spec["seed"]).randint(3, V, n - 1)]
        ids[75:105] = ids[20:50]                                       # one repetition
        man = dict(model=name, preset=spec["preset"], seed=spec["seed"], overrides=spec["set"], sha256=sha, tolerance={})
        for numerics in ("exact", "reference", "kvquant")[:3 if name in ("nano-flash", "nano-pro") else 2]:
            m, dump = Oracle(ck, numerics, torch.float64), {}
            logits = m.forward(ids, m.new_state(), dump)[0]
            t = summarise("A.", logits, [k - 1 for k in LENGTHS], 16)
            t.update(margins(m, collect(dump)))
            save(home / f"logits.{numerics}.safetensors", t, dict(numerics=numerics, accumulate="fp64", sequence="A"))
            other = Oracle(ck, numerics, torch.float32).forward
            man["tolerance"][f"logits {numerics}, fp32"] = stats(other(ids, m.new_state())[0], logits)
        m, out = Oracle(ck, "reference", torch.float64), {}
        runs = {"half layers on golden input: fp32 reference": ("reference", {}),
                "half layers on golden input: fp32 reference, attention weights not rounded": ("reference", dict(p_bf16=False)),
                "half layers on golden input: exact numerics (what skipping the quantisation costs)": ("exact", {})}
        runs.update({f"half layers on golden input: fp32 reference without {ours}": ("reference", {theirs: False})
                     for ours, theirs in SINGLE.items()})
        for l in spec["layers"]:
            X, p = drawn_streams(spec["seed"], l, n, cfg["hidden_size"]), f"layers.{l}."
            d = halves(m, l, X, ids)
            for k in ("q", "o", "kv", "streams_mid", "streams")[l > spec["layers"][0]:]:
                out[p + k] = d[k][ROWS].to(torch.bfloat16)
            for k in ("compressed", "index_keys"):
                if k in d:
                    out[p + k] = d[k].to(torch.bfloat16)
            for k in ("router_ids", "selected"):
                if k in d:
                    out[p + k] = d[k].to(torch.int16)
            out[p + "router_weights"] = d["router_weights"][ROWS].float()
            if f"{p}ffn.gate.bias" in m.ck and m.c.topk < m.c.E:
                s = torch.sort(d["router_scores"] + m.w(f"{p}ffn.gate.bias"), dim=1, descending=True)[0]
                out[p + "router_margin"] = (s[:, m.c.topk - 1] - s[:, m.c.topk]).float()
            if "scores" in d:
                out[p + "scores"] = d["scores"][ROWS].float()
            for label, (numerics, flags) in runs.items():
                figures = [half_figures(Oracle(ck, numerics, torch.float32, **flags), l, X, ids, d)]
                if numerics == "reference" and "without" not in label:
                    figures += [half_figures(OtherSums(ck, s, **flags), l, X, ids, d) for s in range(6)]
                man["tolerance"].setdefault(label, {})[f"layer {l}"] = worst(figures)
        out["rows"] = torch.tensor(ROWS, dtype=torch.int32)
        save(home / "halves.reference.safetensors", out, dict(numerics="reference", accumulate="fp64", length=n))
    (home / "tokens.json").write_text(json.dumps(dict(lengths=LENGTHS, sequences=dict(A=ids))))
    (home / "manifest.json").write_text(json.dumps(short(man), indent=1))


def tiny(name, n=384):
    from tokenizers import Tokenizer
    home = HOME / name
    home.mkdir(exist_ok=True)
    text = (tiny_dir / "eval.txt").read_text()
    ids = [0] + Tokenizer.from_file(str(tiny_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids[:n - 1]
    man = dict(model=name, tolerance={})
    for numerics in ("exact", "reference"):
        m, dump = Oracle(str(tiny_dir), numerics, torch.float64), {}
        logits = m.forward(ids, m.new_state(), dump)[0]
        t = summarise("A.", logits, [0, 127, 128, n - 1], 16)
        t.update(margins(m, collect(dump)))
        save(home / f"logits.{numerics}.safetensors", t, dict(numerics=numerics, accumulate="fp64", sequence="A"))
        other = Oracle(str(tiny_dir), numerics, torch.float32).forward(ids, m.new_state())[0]
        p = torch.log_softmax(logits, 1)
        kl = (p.exp() * (p - torch.log_softmax(other.double(), 1))).sum(1)
        man["tolerance"][f"logits {numerics}, fp32"] = dict(stats(other, logits), mean_kl=float(kl.mean()))
    (home / "tokens.json").write_text(json.dumps(dict(lengths=[n], sequences=dict(A=ids))))
    (home / "manifest.json").write_text(json.dumps(short(man), indent=1))


torch.set_num_threads(2)
for model in sys.argv[3:] or [*NANO, "tiny-v4"]:
    nano(model, NANO[model]) if model in NANO else tiny(model)
    print(model, "made", flush=True)
