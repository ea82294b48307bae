"""Fusions, hyper-connections and the indexer as torch.compile makes them: a yardstick beside `dsv4 selftest --speed`.

Needs torch and an NVIDIA GPU, nothing else. V4-Flash's shapes; the mathematics is that of DeepSeek-V4's attention,
with the inputs, states and outputs of dsv4's kernels, except that codes, rotary values and scales of a cache row lie
in three tensors, which spares torch copies. Each shape is compiled for itself, its calls over rotating inputs are
captured in one graph, and the median of nine replays counts. Functions are compiled side by side, in processes of
their own, then timed in turn.

    python3 benches/gpu/compiled.py            times, a line a shape
    python3 benches/gpu/compiled.py --eager    the same uncompiled
    python3 benches/gpu/compiled.py --wait     wait for a line on standard input between compiling and timing
    python3 benches/gpu/compiled.py --check    compiled against uncompiled on the CPU, on few rows
"""

import multiprocessing
import os
import sys

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
import torch

HEADS, DIM, NOPE, INDEX, EPS = 64, 512, 448, 128, 1e-6
L2_BYTES = 60 << 20
PAGE_ROWS = 64


# ---- mathematics ----


def rope(x, turns, back=False):
    """Rotates the last 64 values in pairs; `turns` [rows, 32, 2] are cosines and sines."""
    pairs = x[..., -64:].float().unflatten(-1, (32, 2))
    c, s = turns[..., 0], turns[..., 1]
    if x.dim() == 3:
        c, s = c[:, None], s[:, None]
    s = -s if back else s
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2).to(x.dtype)
    return torch.cat([x[..., :-64], turned], -1)


def rms_norm(x, weight):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight).bfloat16()


def ceil_pow2(x):
    """Smallest power of two not below x, and its E8M0 code."""
    code = (x.view(torch.int32) + 0x7FFFFF) >> 23
    return (code << 23).view(torch.float32), code.to(torch.uint8)


def e4m3(x, block):
    """Codes, and a power-of-two scale of each block."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale, code = ceil_pow2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / 448))
    values = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.flatten(-2), code.flatten(-2)


def insert_row(x, turns, slots, codes, rotary, scales):
    x = rope(x, turns)
    values, scale = e4m3(x[:, :NOPE], 64)
    codes[slots] = values.view(torch.uint8)
    rotary[slots] = x[:, NOPE:]
    scales[slots] = scale


def insert_key(x, turns, slots, hadamard, codes, scales):
    x = rope(x, turns) @ hadamard
    blocks = x.float().unflatten(-1, (-1, 32))
    scale, code = ceil_pow2(blocks.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) * (1 / 6))
    y = (blocks / scale).clamp(-6, 6).flatten(-2)
    m = y.abs()
    e2m1 = (m > 0.25).int() + (m >= 0.75) + (m > 1.25) + (m >= 1.75) + (m > 2.5) + (m >= 3.5) + (m > 5)
    e2m1 = (e2m1 | (y < 0).int() << 3).unflatten(-1, (-1, 2))
    codes[slots] = (e2m1[..., 0] | e2m1[..., 1] << 4).to(torch.uint8)
    scales[slots] = code.flatten(-2)


def f3(q, kv, weight, turns, slots, codes, rotary, scales):
    insert_row(rms_norm(kv, weight), turns, slots, codes, rotary, scales)
    return rope(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS), turns)


def f2(o, turns):
    return e4m3(rope(o, turns, back=True), 128)


def pool(u, g):
    """Weighted sums over the tokens of a window, which are dimension 1."""
    return (torch.softmax(g, 1) * u).sum(1).bfloat16()


def c4a_decode(u, g, ape, previous_u, previous_g, current_u, current_g, weight, *finish):
    """One token a sequence completes an entry: previous [S, 4, d], current [S, 3, 2d]; also the new `previous`."""
    dim = previous_u.shape[-1]
    u, g = torch.cat([current_u, u[:, None]], 1), torch.cat([current_g, (g + ape[3])[:, None]], 1)
    pooled = pool(torch.cat([previous_u, u[..., dim:]], 1), torch.cat([previous_g, g[..., dim:]], 1))
    store(rms_norm(pooled, weight), *finish)
    return u[..., :dim].contiguous(), g[..., :dim].contiguous()


def c4a_prefill(u, g, ape, weight, *finish):
    """One sequence from its start; also the state of its last group."""
    u, g = u.unflatten(0, (-1, 4)), g.unflatten(0, (-1, 4)) + ape
    dim = weight.shape[0]
    before_u = torch.cat([torch.zeros_like(u[:1, :, :dim]), u[:-1, :, :dim]])
    before_g = torch.cat([torch.full_like(g[:1, :, :dim], -torch.inf), g[:-1, :, :dim]])
    pooled = pool(torch.cat([before_u, u[..., dim:]], 1), torch.cat([before_g, g[..., dim:]], 1))
    store(rms_norm(pooled, weight), *finish)
    return u[-1, :, :dim].contiguous(), g[-1, :, :dim].contiguous()


def c128a_decode(u, g, ape, top, total, acc, weight, *finish):
    """One token a sequence completes an entry, whose running maximum and sums are the state."""
    g = g + ape[127]
    highest = torch.maximum(top, g)
    old, new = torch.exp(top - highest), torch.exp(g - highest)
    store(rms_norm(((acc * old + new * u) / (total * old + new)).bfloat16(), weight), *finish)


def c128a_prefill(u, g, ape, weight, *finish):
    store(rms_norm(pool(u.unflatten(0, (-1, 128)), g.unflatten(0, (-1, 128)) + ape), weight), *finish)


def seam(x, y, post, comb, basis, scale, base, norm):
    """Half's output `y` [T, 4096] into the streams `x` [T, 4, 4096]; the next half's input from them, and its E4M3 copy."""
    x = torch.einsum("tij,tid->tjd", comb, x.float()) + post[..., None] * y.float()[:, None]
    x = x.bfloat16()
    flat = x.flatten(1).float()
    m = flat @ basis.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + EPS
    new_post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    c = torch.softmax((m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4)), 2) + EPS
    c = c / (c.sum(1, keepdim=True) + EPS)
    for _ in range(19):
        c = c / (c.sum(2, keepdim=True) + EPS)
        c = c / (c.sum(1, keepdim=True) + EPS)
    out = rms_norm((pre[..., None] * x.float()).sum(1).bfloat16(), norm)
    return x, new_post, c, out, *e4m3(out, 128)


def scores(q, keys, weights):
    """Index scores [B, rows, n] of bf16 keys [B, n, 128]: relu(q k) of 64 heads, weighted and summed."""
    dots = torch.einsum("brhd,bnd->brhn", q, keys)
    return torch.einsum("brhn,brh->brn", torch.relu(dots).float(), weights)


def best(scores):
    return torch.topk(scores, min(512, scores.shape[-1]), -1, sorted=False)


def store(x, *finish):
    if x.shape[-1] == INDEX:
        insert_key(x, *finish)
    else:
        insert_row(x, *finish)


# ---- inputs ----


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def turns_of(rows):
    angle = torch.rand(rows, 32) * 6.28
    return torch.stack([angle.cos(), angle.sin()], -1)


def places(rows, key=False):
    """Slots of the rows, and the pages they lie in."""
    count = (rows + PAGE_ROWS) // PAGE_ROWS * PAGE_ROWS * 2
    slots = torch.randperm(count)[:rows]
    if key:
        bits = torch.tensor([[bin(i & j).count("1") % 2 for i in range(INDEX)] for j in range(INDEX)])
        hadamard = ((1 - 2 * bits) * INDEX**-0.5).bfloat16()
        return slots, hadamard, torch.zeros(count, 64, dtype=torch.uint8), torch.zeros(count, 4, dtype=torch.uint8)
    codes, scales = torch.zeros(count, NOPE, dtype=torch.uint8), torch.zeros(count, 7, dtype=torch.uint8)
    return slots, codes, torch.zeros(count, 64, dtype=torch.bfloat16), scales


def f3_inputs(rows):
    bf16 = torch.bfloat16
    q, kv = normal(rows, HEADS, DIM, dtype=bf16), normal(rows, DIM, dtype=bf16)
    return q, kv, normal(DIM), turns_of(rows), *places(rows)


def f2_inputs(rows):
    return normal(rows, HEADS, DIM, dtype=torch.bfloat16), turns_of(rows)


def c4a_inputs(windows, prefill, dim):
    tokens = windows * (4 if prefill else 1)
    state = () if prefill else [normal(windows, 4 - i // 2, (1 + i // 2) * dim) for i in range(4)]
    finish = (normal(dim), turns_of(windows), *places(windows, dim == INDEX))
    return normal(tokens, 2 * dim), normal(tokens, 2 * dim), normal(4, 2 * dim), *state, *finish


def c128a_inputs(windows, prefill):
    tokens = windows * (128 if prefill else 1)
    state = () if prefill else (normal(windows, DIM), normal(windows, DIM).abs() + 1, normal(windows, DIM))
    finish = (normal(DIM), turns_of(windows), *places(windows))
    return normal(tokens, DIM), normal(tokens, DIM), normal(128, DIM), *state, *finish


def seam_inputs(rows):
    x, y = normal(rows, 4, 4096, dtype=torch.bfloat16), normal(rows, 4096, dtype=torch.bfloat16)
    return x, y, normal(rows, 4), normal(rows, 4, 4).abs(), normal(24, 16384) / 128, normal(3), normal(24), normal(4096)


def index_inputs(batch, rows, entries):
    q, keys = normal(batch, rows, 64, INDEX, dtype=torch.bfloat16), normal(batch, entries, INDEX, dtype=torch.bfloat16)
    return q, keys, normal(batch, rows, 64)


def compressor(name, decode, prefill, inputs, most):
    def case(windows, whole):
        return f"{name}, {windows} windows", prefill if whole else decode, lambda: inputs(windows, whole)

    return [case(1, False), case(64, False), case(most, True)]


INDEXES = [(1, 1, 16384), (1, 1, 65536), (1, 1, 262144), (8, 1, 262144), (1, 512, 16384)]
GROUPS = [
    [(f"F3, {rows} tokens", f3, lambda rows=rows: f3_inputs(rows)) for rows in (1, 64, 4096)],
    [(f"F2, {rows} tokens", f2, lambda rows=rows: f2_inputs(rows)) for rows in (1, 64, 4096)],
    compressor("F1 c4a", c4a_decode, c4a_prefill, lambda windows, whole: c4a_inputs(windows, whole, DIM), 1024),
    compressor("F1 index", c4a_decode, c4a_prefill, lambda windows, whole: c4a_inputs(windows, whole, INDEX), 1024),
    compressor("F1 c128a", c128a_decode, c128a_prefill, c128a_inputs, 32),
    [(f"seam, {rows} tokens", seam, lambda rows=rows: seam_inputs(rows)) for rows in (1, 64, 4096)],
    [(f"index scores, {b} x {r} x {n}", scores, lambda b=b, r=r, n=n: index_inputs(b, r, n)) for b, r, n in INDEXES],
    [(f"top-512, {b} x {r} x {n}", best, lambda b=b, r=r, n=n: (normal(b, r, n),)) for b, r, n in INDEXES],
]


# ---- times ----


def capture(function, inputs):
    """A graph of calls over rotating inputs, and their number; `function` is compiled by its first call."""
    with torch.device("cuda"):
        first = inputs()
    size = sum(x.numel() * x.element_size() for x in first)
    sets = [first] + [[x.clone() for x in first] for _ in range(min(64, max(2, -(-6 * L2_BYTES // size))) - 1)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in sets:
            function(*each)
    return graph, sets


def median(graph, calls):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(11):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times[2:])[4]


def work(group, pipe, eager):
    ready = []
    for name, function, inputs in GROUPS[group]:
        try:
            compiled = function if eager else torch.compile(function, dynamic=False, fullgraph=True)
            ready.append((name, *capture(compiled, inputs)))
        except Exception as error:  # one shape that cannot be compiled must not take the others along
            ready.append((name, None, f"{type(error).__name__}: {error}"))
    pipe.send(None)
    pipe.recv()
    for name, graph, sets in ready:
        result = f"{median(graph, len(sets)):9.2f} us" if graph else "failed: " + " ".join(sets.split())[:300]
        print(f"{'torch, eager' if eager else 'torch.compile'}: {name:26} {result}", flush=True)
    pipe.send(None)


def check():
    for name, function, inputs in (case for group in GROUPS for case in group):
        if any(f" {many}" in name for many in (1024, 4096, 262144, 512)):
            continue
        torch.manual_seed(1)
        first = inputs()
        second = [x.clone() for x in first]
        want, got = function(*first), torch.compile(function, dynamic=False, fullgraph=True)(*second)
        results = [*first, *(want if isinstance(want, tuple) else [want] if want is not None else [])]
        others = [*second, *(got if isinstance(got, tuple) else [got] if got is not None else [])]
        worst = 0.0
        for a, b in zip(results, others):
            a, b = a.float(), b.float()
            worst = max(worst, ((a - b).norm() / a.norm().clamp(min=1e-30)).item())
        print(f"{name:26} largest relative difference {worst:.1e}", flush=True)


def main():
    if "--check" in sys.argv:
        return check()
    context = multiprocessing.get_context("spawn")
    pipes = []
    for group in range(len(GROUPS)):
        mine, theirs = context.Pipe()
        context.Process(target=work, args=(group, theirs, "--eager" in sys.argv), daemon=True).start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    if "--wait" in sys.argv:
        sys.stdin.readline()
    for pipe in pipes:
        pipe.send(None)
        pipe.recv()


if __name__ == "__main__":
    main()
