"""One table of dsv4's speed on a GPU beside its yardsticks, and the same as JSON.

    python3 benches/gpu/table.py DSV4 [--slice FOLDER] [--flashmla LIBRARY] [--portable DSV4] [--only NAME] [--json FILE]

DSV4 is the command, built with CUDA kernels. Its times are those of `dsv4 selftest --speed` and, for whole steps,
`dsv4 bench FOLDER --layers`: graph replays over rotating inputs larger than the L2 cache, medians. Yardsticks are timed
in the same run, the same way, a group after ours: cuBLAS and torch.topk through torch, what torch.compile makes
(compiled.py), and FlashMLA's sparse attention if LIBRARY, its torch extension, is given. `--portable` is the command built
with DSV4_CUDA_ARCHS=80, whose kernels the driver translates: what cards without Hopper's instructions run.

FOLDER is a slice of V4-Flash's true dimensions with at least a layer of each kind. Goals are microseconds (or tokens/s,
TFLOP/s, a share of 4,384 GB/s), for an H200.
"""

import argparse
import json
import re
import subprocess
import sys

import compiled
import torch

READ = 4384.0  # GB/s of a plain read stream on an H200

# what, ours (added up), yardstick, goal, its unit
DENSE = [("wq_b", 32768, 1024), ("wo_b", 4096, 8192), ("shared gate+up", 4096, 4096), ("wq_a", 1024, 4096)]
GOALS = {  # attention: (goal at B = 1, 8, 64, 128)
    (64, "c4a 512"): (9, 10, 16, 20),
    (128, "c4a 1024"): (11, 14, 45, 85),
    (64, "c128a 1M"): (16, 30, 170, None),
    (128, "c128a 1M"): (18, 50, 300, None),
}


def rows():
    """(group, what, [ops of ours], yardstick's name, goal, unit)"""
    for (heads, keys), goals in GOALS.items():
        for batch, goal in zip((1, 8, 64, 128), goals):
            if goal:
                name = f"attend {heads} heads, {keys}, {batch} rows of {batch}"
                yield "attend", name, [name], f"FlashMLA {heads} {keys} {batch}", goal, "us"
    for heads, width, goal in ((64, 512, 600), (128, 1024, 2100)):
        name = f"attend {heads} heads, c4a {width}, prefill, 4096 rows of 1"
        yield "attend", name, [name], f"FlashMLA prefill {heads}", goal, "us"
    for batch, per, entries, goal in ((1, 1, 16384, 7), (1, 1, 65536, 9), (1, 1, 262144, 14), (8, 1, 262144, 60)):
        ops = [f"index_scores and top_k 512, {batch} x {entries}"]
        yard = [f"index scores, {batch} x {per} x {entries}", f"top-512, {batch} x {per} x {entries}"]
        yield "indexer", f"index scores and top-512, {batch} x {entries}", ops, yard, goal, "us"
    ops = ["index_scores and top_k 512, 512 rows x 16384"]
    yard = ["index scores, 1 x 512 x 16384", "top-512, 1 x 512 x 16384"]
    yield "indexer", "index scores and top-512, 512 queries x 16384", ops, yard, 0.25, "of the yardstick"
    for kind, sizes, goals in (("c4a", (1, 64, 1024), (5, 6, 16)), ("c128a", (1, 64, 32), (6, 10, 12))):
        for windows, goal in zip(sizes, goals):
            name, op = f"F1 {kind}, {windows} windows", f"compress Main{kind[1:-1]} (F1), {windows} windows"
            yield "compress", name, [op], [name], goal, "us"
    for tokens, goal in ((1, 2.0), (64, 4.5), (4096, 140)):
        name = f"F3, {tokens} tokens"
        yield "insert", name, [f"insert (F3), {tokens} tokens"], [name], goal, "us"
    for tokens, goal in ((1, 6), (64, 9), (4096, 160)):
        yield "hyper", f"seam, {tokens} tokens", [f"hyper seam (2 launches), {tokens} tokens"], [f"seam, {tokens} tokens"], goal, "us"
    for name, n, k in DENSE:
        for tokens in (1, 8):
            share = 0.8 if n * k >= 8 << 20 else 0.65
            yield "linear", f"E4M3 {name}, {tokens} tokens", [f"linear {name} {n}x{k}, {tokens} tokens"], f"bf16 {n} {k} {tokens}", share, "of the read stream"
    for name, n, k in DENSE:
        yield "linear", f"E4M3 {name}, 4096 tokens", [f"linear {name} {n}x{k}, 4096 tokens"], f"fp8 {n} {k} 4096", 900, "TFLOP/s"
    for tokens, goal in ((1, None), (8, 0.75), (64, 0.65)):
        name, unit = f"experts of {tokens} tokens, without the shared one", "us" if tokens == 1 else "of the read stream"
        yield "experts", name, [f"experts all 5 launches, {tokens} tokens"], None, goal or 32, unit
    yield "experts", "experts of 4096 tokens", ["experts all 5 launches, 4096 tokens"], None, 600, "TFLOP/s"


# ---- ours ----


def ours(binary, group):
    """Times of a group by operation: [us, bytes, flops]."""
    out = subprocess.run([binary, "selftest", "--speed", "--json", "--only", group], capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"{binary} selftest --speed --only {group}: {out.stderr.strip()}")
    times = [json.loads(line) for line in out.stdout.splitlines()]
    return {t["op"]: (t["us"], t["bytes"], t["flops"]) for t in times}


def whole_steps(binary, folder, context, batch=(1,), prefill=0, chunk=None):
    command = [binary, "bench", folder, "--layers", "--device", "cuda", "--json", "--repetitions", "9", "--cache-bytes", "8G"]
    command += ["--context", str(context), "--batch", ",".join(map(str, batch)), "--prefill", str(prefill)]
    command += ["--chunk", str(chunk)] if chunk else []
    command += ["--decode", "0"] if prefill else []
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        print(f"{' '.join(command)}: {out.stderr.strip()}", file=sys.stderr)
        return []
    return [(r["sequences"], r["tokens"], r["flash_us"]) for r in json.loads(out.stdout)]


# ---- yardsticks ----


def rotating(make, size):
    """Enough copies to exceed the L2 cache several times."""
    return [make() for _ in range(min(16, max(2, -(-6 * compiled.L2_BYTES // size))))]


def replay(calls):
    """Median microseconds of a call, of all of them in one graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2] * 2:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return compiled.median(graph, len(calls))


def dense(found):
    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    for _, n, k in DENSE:
        for tokens in (1, 8):
            x, weights = normal(tokens, k), rotating(lambda n=n, k=k: normal(n, k), 2 * n * k)
            found[f"bf16 {n} {k} {tokens}"] = replay([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights])
        e4m3, one = torch.float8_e4m3fn, torch.ones((), device="cuda")
        x, weights = normal(4096, k).to(e4m3), rotating(lambda n=n, k=k: normal(n, k).to(e4m3), n * k)
        scaled = torch._scaled_mm
        calls = [lambda w=w, x=x: scaled(x, w.t(), one, one, out_dtype=torch.bfloat16) for w in weights]
        found[f"fp8 {n} {k} 4096"] = replay(calls)


def flashmla(found, library):
    """FlashMLA's sparse kernels on V4's 584-byte rows, without its scheduling kernel, which a step needs once a kind."""
    torch.ops.load_library(library)
    ops, scale = torch.ops._flashmla_C, 512**-0.5
    ints = dict(device="cuda", dtype=torch.int32)

    def cache(pages):
        k = torch.randint(0, 256, (pages, 64 * 584), dtype=torch.uint8, device="cuda") & 0xF7
        k[:, 64 * 576 :] = torch.randint(117, 121, (pages, 64 * 8), dtype=torch.uint8, device="cuda")
        rows = k[:, : 64 * 576].view(pages, 64, 576)
        rows[:, :, 448:] = torch.randn(pages, 64, 64, device="cuda").bfloat16().view(torch.uint8)
        return k.view(pages, 64, 1, 584)

    def decode(heads, batch, width, entries):
        first = torch.arange(batch, **ints)[:, None]
        window = (torch.arange(128, **ints)[None] + 128 * first).view(batch, 1, 128)
        lengths = [torch.full((batch,), n, **ints) for n in (128, width)]
        per = -(-entries // 64) * 64
        if width < entries:
            picks = [torch.rand(batch, entries, device="cuda").argsort(1)[:, :width].int() for _ in range(8)]
        else:
            picks = [torch.arange(entries, **ints)[None].repeat(batch, 1)] * 8
        picks = [(pick + per * first).int().view(batch, 1, width).contiguous() for pick in picks]
        queries = [torch.randn(batch, 1, heads, 512, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        rings, pages, sink = cache(2 * batch), cache(batch * per // 64), torch.randn(heads, device="cuda")
        plan = [None, None]

        def call(q, pick):
            out = ops.sparse_decode_fwd(
                q, rings, window, lengths[0], sink, *plan, pages, pick, lengths[1], 512, scale, None, False
            )
            plan[:] = out[2:]

        call(queries[0], picks[0])
        return replay([lambda q=q, pick=pick: call(q, pick) for q, pick in zip(queries, picks)])

    for heads, keys in GOALS:
        width, entries = (8192, 8192) if keys == "c128a 1M" else (int(keys.split()[1]), 20480)
        for batch in (1, 8, 64, 128):
            if GOALS[heads, keys][(1, 8, 64, 128).index(batch)]:
                found[f"FlashMLA {heads} {keys} {batch}"] = decode(heads, batch, width, entries)
    for heads, width in ((64, 640), (128, 1152)):
        kv = torch.randn(20480 + 4096, 1, 512, device="cuda", dtype=torch.bfloat16)
        queries = [torch.randn(4096, heads, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        picks = [torch.randint(0, 20480, (4096, 1, width), **ints) for _ in range(2)]
        sink = torch.randn(heads, device="cuda")

        def call(q, pick, kv=kv, sink=sink):
            ops.sparse_prefill_fwd(q, kv, pick, scale, 512, sink, None, None)

        found[f"FlashMLA prefill {heads}"] = replay([lambda q=q, p=p, f=call: f(q, p) for q, p in zip(queries, picks)])


class Compiled:
    """compiled.py beside us: it compiles while other groups are timed, and times its functions when told to."""

    def __init__(self):
        command = [sys.executable, compiled.__file__, "--wait"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def times(self, found):
        out, _ = self.process.communicate("\n")
        for name, micros in re.findall(r"^torch\.compile: (.*?) +([\d.]+) us$", out, re.M):
            found[name] = float(micros)


# ---- the table ----


def measure(args):
    """Rows of the table: what, ours, yardstick's name and microseconds, goal, its unit, and how far ours is from it."""
    asked = [row for row in rows() if not args.only or args.only in row[0] or args.only in row[1]]
    groups = list(dict.fromkeys(row[0] for row in asked))
    other, yards, mine, portable = Compiled(), {}, {}, {}
    for group in groups:
        mine |= ours(args.dsv4, group)
        if args.portable:
            portable |= ours(args.portable, group)
        if group == "linear":
            dense(yards)
        if group == "attend" and args.flashmla:
            flashmla(yards, args.flashmla)
    other.times(yards)
    table = []
    for _, what, ops, yard, goal, unit in asked:
        found = [next((v for op, v in mine.items() if op.startswith(name)), None) for name in ops]
        if None in found:
            print(f"no time of {ops} for {what}", file=sys.stderr)
            continue
        micros, size, flops = (sum(column) for column in zip(*found))
        names = [yard] if isinstance(yard, str) else yard or []
        against = sum(yards[name] for name in names) if names and all(name in yards for name in names) else None
        value = {
            "us": micros,
            "of the yardstick": micros / against if against else None,
            "of the read stream": size / micros / 1e3 / READ,
            "TFLOP/s": flops / micros / 1e6,
        }[unit]
        slow = [next((v for op, v in portable.items() if op.startswith(name)), None) for name in ops]
        slow = sum(v[0] for v in slow) if slow and None not in slow else None
        row = dict(what=what, us=micros, yardstick_us=against, value=value, unit=unit, goal=goal, portable_us=slow)
        table.append(row)
    return table


def step_rows(args):
    """Whole steps of a model with V4-Flash's 2 window, 21 c4a and 20 c128a layers and the head."""
    goals = {(8192, 1): 200, (999_936, 1): 170, (8192, 8): 550, (8192, 64): 1200}
    for context, batch in ((8192, (1, 8, 64)), (999_936, (1,))):
        for sequences, tokens, micros in whole_steps(args.dsv4, args.slice, context, batch):
            name, goal = f"decode step, {sequences} sequences behind {context}", goals[context, sequences]
            yield dict(what=name, us=micros, yardstick_us=None, value=tokens / micros * 1e6, unit="tokens/s", goal=goal)
    for length, goal in ((8192, 20_000), (65_536, 17_000)):
        total, chunk = 0.0, args.chunk
        # a step takes longer the more lies before it: the one in the middle stands for the steps of an eighth of the prompt
        stretch = max(chunk, length // 8)
        for first in range(0, length, stretch):
            steps = whole_steps(args.dsv4, args.slice, first + (stretch - chunk) // 2, prefill=chunk, chunk=chunk)
            if not steps:
                return
            total += steps[0][2] * stretch / chunk
        row = dict(what=f"prefill of {length}, chunks of {chunk}", us=total, yardstick_us=None)
        yield row | dict(value=length / total * 1e6, unit="tokens/s", goal=goal)


def is_met(row):
    if row["goal"] is None or row["value"] is None:
        return None
    more = row["unit"] in ("TFLOP/s", "of the read stream", "tokens/s")
    return row["value"] >= row["goal"] if more else row["value"] <= row["goal"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dsv4")
    for option in ("--slice", "--flashmla", "--portable", "--only", "--json"):
        parser.add_argument(option)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a step while a prompt is read")
    args = parser.parse_args()
    table = measure(args) + (list(step_rows(args)) if args.slice else [])
    print(f"{'what':52} {'us':>10} {'yardstick':>10} {'ratio':>6} {'portable':>9} {'value':>9}  unit, goal")
    for row in table:
        yard, slow = row["yardstick_us"], row.get("portable_us")
        columns = [f"{yard:10.2f} {row['us'] / yard:6.2f}" if yard else " " * 17, f"{slow:9.2f}" if slow else " " * 9]
        value = "" if row["value"] is None else f"{row['value']:9.2f}"
        goal = "" if row["goal"] is None else f"{row['goal']}: {'met' if is_met(row) else 'not met'}"
        print(f"{row['what']:52} {row['us']:10.2f} {' '.join(columns)} {value:>9}  {row['unit']}, {goal}")
    if args.json:
        device = torch.cuda.get_device_name()
        with open(args.json, "w") as file:
            json.dump(dict(device=device, torch=torch.__version__, rows=table), file, indent=1)


if __name__ == "__main__":
    main()
