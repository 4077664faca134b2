#!/usr/bin/env python3
"""Time and memory of PyTorch's attention on an NVIDIA GPU, at the points that `attn bench` measures.

    attn bench --list --grid paper --dtype bf16 --csv points.csv
    python scripts/bench_nvidia.py --points points.csv --csv peers.csv
    attn bench --grid paper --dtype bf16 --peers peers.csv --plot attn.svg

Writes the columns of `attn bench --csv`, measured alike: inputs uniform with variance 1, sets of
inputs in turn that are larger than the cache, a warm-up, samples of as many calls as fill 10 ms,
CUDA events around each sample, the same count of operations. forward is a call without autograd;
backward is torch.autograd.grad of a kept output alone; training is host time of both.

Kernels: flash (FlashAttention-2), cudnn, efficient (memory-efficient; the one for f32, without
TF32) and flex (FlexAttention, compiled; from --flex-from on, as each shape takes a while to
compile). One that declines a point gets a row without a time and with its reason.
"""

import argparse
import contextlib
import csv
import gc
import math
import sys
import time

POINT = ("grid", "variant", "pass", "dtype", "batch", "heads", "kv_heads", "seq", "head_dim", "causal")
RESULT = (
    "kernel", "clock", "samples", "calls", "sets", "median_ms", "min_ms", "max_ms", "p10_ms", "p90_ms",
    "tflops", "peak_share", "memory_bytes", "relative_error", "declined", "device", "hardware",
)  # fmt: skip
KERNELS = ("flash", "cudnn", "efficient", "flex")

WARM_UP_SECONDS = 0.2
SAMPLE_SECONDS = 0.01
MOST_CALLS = 64
ROTATED_BYTES = 512 << 20
MOST_SETS = 8
DECILES = 20  # Samples that they are taken of at least.
WINDOW = 1024
SOFTCAP = 50.0


class Point:
    """A row of `attn bench --list`."""

    def __init__(self, row):
        self.row = {name: row[name] for name in POINT}
        self.variant, self.direction, self.dtype = row["variant"], row["pass"], row["dtype"]
        self.batch, self.heads, self.kv_heads = (int(row[n]) for n in ("batch", "heads", "kv_heads"))
        self.seq, self.head_dim = int(row["seq"]), int(row["head_dim"])
        self.causal = row["causal"] == "true"

    def __str__(self):
        return f"{self.variant} {self.direction}, {self.dtype}, seq {self.seq}, head dim {self.head_dim}"

    def operations(self):
        """Of the matrix products, a multiply-add being two, counted as `attn bench` does."""
        if self.variant == "window":
            pairs = sum(min(n, WINDOW + 1) for n in range(1, self.seq + 1))
        else:
            pairs = self.seq**2 / (2 if self.causal else 1)
        forward = 4 * self.batch * self.heads * self.head_dim * pairs
        return forward * {"forward": 1, "backward": 2.5, "training": 3.5}[self.direction]

    def sets(self):
        queries = 2 if self.direction == "backward" else 1
        elements = self.batch * self.seq * self.head_dim * (queries * self.heads + 2 * self.kv_heads)
        size = elements * (4 if self.dtype == "f32" else 2)
        return min(max(math.ceil(ROTATED_BYTES / size), 1), MOST_SETS)


class Attention:
    """One kernel on the shapes of one point; the tables of mask and bias are shared by all calls."""

    def __init__(self, torch, point, kernel):
        self.torch, self.point, self.kernel = torch, point, kernel
        self.dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[point.dtype]
        table = (1, 1, point.seq, point.seq)
        # Hides a third of the keys.
        self.hidden = torch.rand(table, device="cuda") < 1 / 3 if point.variant == "mask" else None
        self.bias = self.random(table) if point.variant == "bias" else None
        self.call = self.flex() if kernel == "flex" else self.fused()

    def random(self, shape):
        values = self.torch.empty(shape, device="cuda", dtype=self.dtype)
        return values.uniform_(-math.sqrt(3), math.sqrt(3))

    def fused(self):
        if self.point.variant in ("window", "softcap"):
            raise RuntimeError(f"scaled_dot_product_attention has no {self.point.variant}")
        attend = self.torch.nn.functional.scaled_dot_product_attention
        # PyTorch's mask is true where a key is kept.
        mask = self.bias if self.hidden is None else ~self.hidden
        grouped = self.point.heads != self.point.kv_heads
        causal = self.point.causal
        return lambda q, k, v: attend(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    def flex(self):
        import torch._functorch.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Each point has shapes of its own, and gets code of its own. What a backward pass reads must
        # outlast it, since it is timed again and again.
        self.torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False
        point, bias, hidden = self.point, self.bias, self.hidden

        def visible(b, h, q, k):
            if hidden is not None:
                return ~hidden[0, 0, q, k]
            if point.variant == "window":
                return (k <= q) & (q - k <= WINDOW)
            return k <= q

        def score(score, b, h, q, k):
            if bias is not None:
                return score + bias[0, 0, q, k]
            return SOFTCAP * self.torch.tanh(score / SOFTCAP)

        blocks = None
        if point.causal or hidden is not None:
            blocks = create_block_mask(visible, None, None, point.seq, point.seq, device="cuda")
        modifier = score if point.variant in ("bias", "softcap") else None
        grouped = point.heads != point.kv_heads
        compiled = self.torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v: compiled(
            q, k, v, score_mod=modifier, block_mask=blocks, enable_gqa=grouped
        )

    def only(self):
        """Within it no other kernel may serve."""
        if self.kernel == "flex":
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        name = {
            "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"
        }[self.kernel]  # fmt: skip
        return sdpa_kernel(getattr(SDPBackend, name))

    def draw(self):
        """Operands of one call, and of a backward pass the kept output and its gradient."""
        point = self.point
        shape = (point.batch, point.heads, point.seq, point.head_dim)
        key_shape = (point.batch, point.kv_heads, point.seq, point.head_dim)
        operands = [self.random(shape), self.random(key_shape), self.random(key_shape)]
        if point.direction != "backward":
            return operands, None, None
        operands = [operand.requires_grad_() for operand in operands]
        return operands, self.call(*operands), self.random(shape)

    def run(self, drawn):
        operands, output, output_gradient = drawn
        grad = self.torch.autograd.grad
        if self.point.direction == "backward":
            return grad(output, operands, output_gradient, retain_graph=True)
        if self.point.direction == "forward":
            with self.torch.no_grad():
                return (self.call(*operands),)
        leaves = [operand.detach().requires_grad_() for operand in operands]
        output = self.call(*leaves)
        return (output.detach(), *grad(output, leaves, self.torch.ones_like(output)))


def measure(torch, point, kernel, samples, deadline):
    """The columns of RESULT from `clock` to `memory_bytes`, and the seconds of a call."""
    attention = Attention(torch, point, kernel)
    with attention.only():
        drawn = [attention.draw()]
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        results = attention.run(drawn[0])
        torch.cuda.synchronize()
        memory = torch.cuda.max_memory_reserved()
        if not all(bool(result.isfinite().all()) for result in results):
            raise RuntimeError("infinities or NaN in the result")
        del results
        drawn += [attention.draw() for _ in range(point.sets() - 1)]

        turn, start = 0, time.perf_counter()
        while turn == 0 or time.perf_counter() - start < WARM_UP_SECONDS:
            attention.run(drawn[turn % len(drawn)])
            torch.cuda.synchronize()
            turn += 1
        call = (time.perf_counter() - start) / turn
        calls = min(max(math.ceil(SAMPLE_SECONDS / call), 1), MOST_CALLS)

        clock = "host" if point.direction == "training" else "device"
        seconds = []
        while not seconds or (len(seconds) < samples and time.monotonic() < deadline):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if clock == "device":
                # So that those of the sample find the device at work, and not idle until a first launch.
                attention.run(drawn[turn % len(drawn)])
            start = time.perf_counter()
            begin.record()
            for _ in range(calls):
                attention.run(drawn[turn % len(drawn)])
                turn += 1
            end.record()
            torch.cuda.synchronize()
            host = time.perf_counter() - start
            seconds.append((host if clock == "host" else begin.elapsed_time(end) / 1e3) / calls)
    seconds.sort()
    median = quantile(seconds, 0.5)
    times = [f"{1e3 * t:.6f}" for t in (median, seconds[0], seconds[-1])]
    enough = len(seconds) >= DECILES
    times += [f"{1e3 * quantile(seconds, share):.6f}" if enough else "" for share in (0.1, 0.9)]
    tflops = point.operations() / median / 1e12
    columns = [clock, len(seconds), calls, len(drawn), *times]
    return [*columns, f"{tflops:.6f}", "", memory], median


def quantile(ordered, share):
    at = share * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def kernels_for(args, point):
    """Those that are worth asking: f32 has one fused kernel, which 16-bit types need for tables only."""
    if args.kernels:
        chosen = args.kernels
    elif point.dtype == "f32":
        chosen = ["efficient"]
    elif point.variant in ("mask", "bias"):
        chosen = ["cudnn", "efficient", "flex"]
    else:
        chosen = ["flash", "cudnn", "flex"]
    return [kernel for kernel in chosen if kernel != "flex" or point.seq >= args.flex_from]


def positive(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--points", required=True, metavar="FILE", help="of attn bench --list --csv")
    parser.add_argument("--csv", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--kernels", metavar="K,K", help="of " + ", ".join(KERNELS) + "; default: by point")
    parser.add_argument("--flex-from", type=int, default=4096, metavar="SEQ", help="default: 4096")
    parser.add_argument("--allow-tf32", action="store_true", help="let f32 products round to TF32")
    parser.add_argument("--samples", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--time-limit", type=positive, default=math.inf, metavar="SECONDS")
    args = parser.parse_args()
    args.kernels = args.kernels.split(",") if args.kernels else []
    unknown = [kernel for kernel in args.kernels if kernel not in KERNELS]
    if unknown:
        parser.error(f"--kernels: {unknown[0]} is none of {', '.join(KERNELS)}")
    if args.samples < 1:
        parser.error("--samples takes a positive number")
    return args


def read_points(path):
    try:
        with open(path, newline="") as file:
            return [Point(row) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"error: points {path}: {error}") from None


def main():
    args = arguments()
    deadline = time.monotonic() + args.time_limit
    points = read_points(args.points)
    try:
        import torch
    except (ImportError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"error: PyTorch cannot be imported: {reason}") from None
    if not torch.cuda.is_available():
        raise SystemExit("error: PyTorch finds no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = args.allow_tf32
    hardware = torch.cuda.get_device_name()
    print(f"PyTorch {torch.__version__}, {hardware}", flush=True)
    rates, late = {}, 0
    with open(args.csv, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(POINT + RESULT)
        for point in points:
            for kernel in kernels_for(args, point):
                key = (kernel, point.direction)
                if time.monotonic() + 3 * rates.get(key, 0) * point.operations() > deadline:
                    late += 1
                    continue
                try:
                    columns, median = measure(torch, point, kernel, args.samples, deadline)
                    rates[key] = median / point.operations()
                    said = f"{float(columns[4]):.4f} ms, {float(columns[9]):.1f} TFLOP/s"
                    declined = ""
                # Kernels decline in many ways, and one that does must not end the others.
                except Exception as reason:
                    columns = [""] * 12
                    text = str(reason).strip() or type(reason).__name__
                    declined = text.splitlines()[0][:160]
                    said = f"declined: {declined}"
                row = [f"torch-{kernel}", *columns, "", declined, "cuda", hardware]
                out.writerow([*point.row.values(), *row])
                file.flush()
                print(f"{point}: {kernel} {said}", flush=True)
                gc.collect()
                torch.cuda.empty_cache()
    if late:
        sys.exit(f"error: {late} measurements were not reached within the time limit")


if __name__ == "__main__":
    main()
