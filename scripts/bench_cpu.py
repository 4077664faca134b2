#!/usr/bin/env python3
"""Time and memory of PyTorch's scaled_dot_product_attention on the CPU, for the record of `compare`.

    python3 -m venv .venv && .venv/bin/pip install torch
    .venv/bin/python scripts/bench_cpu.py --seq 64,2048,8192 --pass forward,training

Prints the columns of `compare` (package flash-attention-benches), measured alike: inputs uniform
with variance 1, three sets in turn, one process for each line, a first call, a warm-up, samples.
PyTorch chooses its own kernel, which for these shapes is its blockwise one.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

SETS = 3
WARM_UP_SECONDS = 0.3
WIDTHS = (7, 8, 10, 11, 11, 11, 11, 11, 9, 9, 9)
COLUMNS = (
    "seq", "pass", "by", "first", "median", "min", "max", "issue", "GFLOP/s", "start", "peak"
)  # fmt: skip


def line(cells):
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS)).rstrip()


def status_mebibytes(field):
    """A size from /proc/self/status, which Linux has."""
    try:
        with open("/proc/self/status") as status:
            for entry in status:
                if entry.startswith(field + ":"):
                    return int(entry.split()[1]) / 1024
    except OSError:
        pass
    return None


def operations(args, seq, direction):
    """Of the matrix products, a multiply-add being two: two forward, five more backward."""
    pairs = seq * (seq + 1) / 2 if args.causal else seq * seq
    products = 2 if direction == "forward" else 7
    return 2 * products * args.batch * args.heads * args.head_dim * pairs


def measure(args, seq, direction):
    """The times of one workload in seconds, and memory in MiB. Runs in a process of its own."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(args.threads)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
    training = direction == "training"

    def tensor(heads):
        bound = math.sqrt(3)
        values = torch.empty(args.batch, heads, seq, args.head_dim).uniform_(-bound, bound)
        return values.to(dtype)

    sets = [
        [tensor(heads) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
        for _ in range(SETS)
    ]
    calls = 0

    def call():
        nonlocal calls
        *operands, output_gradient = sets[calls % SETS]
        calls += 1
        leaves = [operand.detach().requires_grad_(training) for operand in operands]
        start = time.perf_counter()
        output = scaled_dot_product_attention(
            *leaves, is_causal=args.causal, enable_gqa=args.kv_heads != args.heads
        )
        if training:
            output.backward(output_gradient)
        # The work is done when the call returns: there is no queue on the CPU.
        elapsed = time.perf_counter() - start
        results = [output.detach()] + [leaf.grad for leaf in leaves if training]
        return elapsed, results

    start = status_mebibytes("VmRSS")
    first, _ = call()
    warm_up = time.perf_counter()
    call()
    while time.perf_counter() - warm_up < WARM_UP_SECONDS:
        call()
    samples = []
    for _ in range(args.samples):
        elapsed, results = call()
        samples.append(elapsed)
        if len(samples) < args.samples:
            del results
    peak = status_mebibytes("VmHWM")
    if not all(bool(result.isfinite().all()) for result in results):
        raise SystemExit("error: PyTorch computed infinities or NaN")
    return {"first": first, "samples": samples, "start": start, "peak": peak}


def in_new_process(args, seq, direction):
    command = [sys.executable, __file__, *sys.argv[1:], "--child", f"{seq},{direction}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        reason = said[-1] if said else f"exit status {done.returncode}"
        raise SystemExit(f"error: torch at seq {seq}: {reason.removeprefix('error: ')}")
    return json.loads(done.stdout.splitlines()[-1])


def report(args, seq, direction, found):
    median = statistics.median(found["samples"])
    rate = operations(args, seq, direction) / median / 1e9
    times = [found["first"], median, min(found["samples"]), max(found["samples"]), median]
    memory = ["-" if size is None else f"{size:.1f}" for size in (found["start"], found["peak"])]
    milliseconds = [f"{seconds * 1e3:.3f}" for seconds in times]
    return line([seq, direction, "torch", *milliseconds, f"{rate:.2f}", *memory])


def commit():
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run([*command, "--exclude", "*"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def host():
    name = ""
    try:
        with open("/proc/cpuinfo") as entries:
            names = [entry.split(":", 1)[1].strip() for entry in entries if "model name" in entry]
            name = f"{names[0]}, " if names else ""
    except OSError:
        pass
    return f"{name}{os.cpu_count()} threads, {platform.system().lower()} {platform.machine()}"


def heading(args):
    import torch

    causal = "causal" if args.causal else "not causal"
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return "\n".join(
        [
            f"# command: {command}",
            f"# commit: {commit()}",
            f"# build: PyTorch {torch.__version__}, {args.threads} threads",
            f"# host: {host()}",
            f"# shape: batch {args.batch}, heads {args.heads}, kv heads {args.kv_heads}, "
            f"head dim {args.head_dim}, {args.dtype}, {causal}",
            f"# samples: {args.samples}, over {SETS} sets of inputs, one process for each line; "
            "times in ms, host memory in MiB",
            "# first: the first call; issue: as the median, a call returns when it is done;",
            "# start: resident before the first call; peak: most resident",
            line(COLUMNS),
        ]
    )


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--kv-heads", type=positive, help="default: as many as the query has")
    parser.add_argument("--seq", default="2048", help="separated by commas")
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--dtype", choices=["f32", "f16", "bf16"], default="f32")
    parser.add_argument("--causal", choices=["true", "false"], default="true")
    parser.add_argument("--pass", dest="passes", default="training", help="forward,training")
    parser.add_argument("--samples", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    if args.heads % args.kv_heads:
        parser.error(f"{args.heads} heads are no multiple of {args.kv_heads} kv heads")
    args.causal = args.causal == "true"
    args.passes = args.passes.split(",")
    if not set(args.passes) <= {"forward", "training"}:
        parser.error("--pass takes forward and training")
    try:
        args.seq = [positive(seq) for seq in args.seq.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        parser.error("--seq takes positive numbers")
    return args


def main():
    args = arguments()
    if args.child:
        seq, direction = args.child.split(",")
        print(json.dumps(measure(args, int(seq), direction)))
        return
    try:
        print(heading(args), flush=True)
    except (ImportError, ValueError) as error:
        # PyTorch says ValueError where a CUDA library that its wheel is linked to is missing.
        reason = str(error).splitlines()[0]
        raise SystemExit(f"error: PyTorch cannot be imported: {reason}") from None
    for seq in args.seq:
        for direction in args.passes:
            print(report(args, seq, direction, in_new_process(args, seq, direction)), flush=True)


if __name__ == "__main__":
    main()
