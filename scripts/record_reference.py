#!/usr/bin/env python3
"""Records attention and its gradients in float64 with JAX, for the Rust reference to meet.

    python3 -m venv .venv && .venv/bin/pip install jax safetensors
    .venv/bin/python scripts/record_reference.py

Writes crates/flash-attention-spec/tests/data/recorded.safetensors. Every tensor is named
`case/operand`; the metadata entry `recorded` is JSON that gives the name and options of each case.

Gradients come from automatic differentiation of whole-array code, so nothing here repeats a
gradient formula of the Rust side. Visibility is spelled out per pair of positions.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

jax.config.update("jax_enable_x64", True)

TARGET = (
    Path(__file__).parent.parent / "crates/flash-attention-spec/tests/data/recorded.safetensors"
)


def visible(seq_q, seq_kv, causal, alignment, window):
    """The pairs that causal and window leave visible, as a boolean matrix."""
    offset = seq_kv - seq_q if alignment == "bottom-right" else 0
    left, right = window
    table = np.ones((seq_q, seq_kv), dtype=bool)
    for i in range(seq_q):
        for j in range(seq_kv):
            if causal and j > i + offset:
                table[i, j] = False
            if left is not None and j < i + offset - left:
                table[i, j] = False
            if right is not None and j > i + offset + right:
                table[i, j] = False
    return table


def attention(query, key, value, bias, mask, options):
    """Output and log-sum-exp of float64 arrays."""
    group = query.shape[1] // key.shape[1]
    key = jnp.repeat(key, group, axis=1)
    value = jnp.repeat(value, group, axis=1)
    scale = options["scale"]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = scale * jnp.einsum("bhid,bhjd->bhij", query, key)
    if options["softcap"] is not None:
        scores = options["softcap"] * jnp.tanh(scores / options["softcap"])
    if bias is not None:
        scores = scores + bias
    seen = visible(
        query.shape[2], key.shape[2], options["causal"], options["alignment"], options["window"]
    )
    if mask is not None:
        seen = seen & ~mask
    seen = jnp.broadcast_to(seen, scores.shape) & (scores > -jnp.inf)
    some = jnp.any(seen, axis=-1, keepdims=True)
    largest = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
    largest = jax.lax.stop_gradient(jnp.where(some, largest, 0.0))
    # Selected before and after the exponential, so that no infinity meets a derivative.
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0) - largest), 0.0)
    total = jnp.where(some, jnp.sum(weights, axis=-1, keepdims=True), 1.0)
    output = jnp.einsum("bhij,bhje->bhie", weights / total, value)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0]
    return output, lse


def case(
    name,
    sizes,
    scale=None,
    softcap=None,
    causal=False,
    alignment="bottom-right",
    window=(None, None),
    mask=None,
    bias=None,
    lse_gradient=False,
    spread=1.0,
    given=None,
):
    """Description and tensors of one case; `sizes` as (batch, heads, kv_heads, seq_q, seq_kv,
    head_dim, value_dim), `mask` and `bias` as arrays, `given` replaces the drawn operands."""
    batch, heads, kv_heads, seq_q, seq_kv, head_dim, value_dim = sizes
    draw = np.random.default_rng(list(name.encode()))
    tensors = {
        "query": spread * draw.standard_normal((batch, heads, seq_q, head_dim)),
        "key": draw.standard_normal((batch, kv_heads, seq_kv, head_dim)),
        "value": draw.standard_normal((batch, kv_heads, seq_kv, value_dim)),
        "output_gradient": draw.standard_normal((batch, heads, seq_q, value_dim)),
    }
    if lse_gradient:
        tensors["lse_gradient"] = draw.standard_normal((batch, heads, seq_q))
    tensors |= given or {}
    options = {
        "scale": scale,
        "softcap": softcap,
        "causal": causal,
        "alignment": alignment,
        "window": window,
    }

    def of(query, key, value, bias):
        return attention(query, key, value, bias, mask, options)

    inputs = (tensors["query"], tensors["key"], tensors["value"], bias)
    (output, lse), gradients_of = jax.vjp(of, *jax.tree.map(jnp.asarray, inputs))
    lse_cotangent = tensors.get("lse_gradient", np.zeros(lse.shape))
    gradients = gradients_of(jax.tree.map(jnp.asarray, (tensors["output_gradient"], lse_cotangent)))
    names = ("query_gradient", "key_gradient", "value_gradient", "bias_gradient")
    tensors |= {"output": output, "lse": lse} | dict(zip(names, gradients, strict=True))
    tensors |= {"mask": mask, "bias": bias}
    stored = {f"{name}/{k}": np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}
    return {"name": name} | options, stored


def five_positions():
    def one_head(rows):
        return np.array([[rows]], dtype=np.float64)

    return {
        "query": one_head([[0.2, -0.3], [0.5, 0.1], [-0.4, 0.7], [0.6, -0.2], [0.1, 0.8]]),
        "key": one_head([[0.3, 0.5], [-0.2, 0.4], [0.7, -0.1], [0.1, -0.6], [-0.5, 0.2]]),
        "value": one_head([[1, 0], [0, 2], [-1, 1], [2, -1], [0.5, 0.3]]),
        "output_gradient": one_head(
            [[0.2, -0.1], [0.3, 0.5], [-0.4, 0.2], [0.1, -0.3], [0.6, 0.4]]
        ),
    }


def cases():
    draw = np.random.default_rng(7)

    def normal(*shape):
        return draw.standard_normal(shape)

    def hide(*shape):
        return draw.random(shape) < 0.4

    some_infinite = normal(2, 2, 5, 4)
    some_infinite[draw.random(some_infinite.shape) < 0.3] = -np.inf
    some_infinite[1, 0, 3] = -np.inf
    hidden_rows = hide(2, 2, 5, 4)
    hidden_rows[0, 1, 2] = True
    top_left = {"alignment": "top-left"}
    return [
        case("five positions", (1, 1, 1, 5, 5, 2, 2), causal=True, given=five_positions()),
        case("plain", (2, 2, 2, 3, 4, 5, 3)),
        case("scale and lse gradient", (1, 2, 2, 4, 3, 3, 4), scale=-0.7, lse_gradient=True),
        case("softcap", (1, 2, 1, 4, 5, 4, 2), softcap=1.5, lse_gradient=True, spread=3.0),
        case("causal bottom-right, wide", (1, 2, 2, 2, 5, 3, 3), causal=True, lse_gradient=True),
        case("causal bottom-right, tall", (1, 2, 2, 5, 2, 3, 2), causal=True, lse_gradient=True),
        case("causal top-left, wide", (1, 2, 2, 2, 5, 3, 3), causal=True, **top_left),
        case("causal top-left, tall", (1, 2, 2, 5, 2, 3, 2), causal=True, **top_left),
        case("window", (1, 1, 1, 6, 8, 4, 4), window=(1, 2)),
        case("window, left only, top-left", (1, 1, 1, 7, 4, 4, 4), window=(1, None), **top_left),
        case("window, right only", (1, 1, 1, 4, 7, 3, 2), window=(None, 1)),
        case("window and causal", (1, 2, 1, 7, 7, 3, 5), window=(2, 3), causal=True),
        case("grouped heads", (2, 6, 2, 3, 5, 4, 6), lse_gradient=True),
        case("mask over keys", (2, 2, 2, 3, 6, 3, 3), mask=hide(2, 1, 1, 6)),
        case("bias over heads", (2, 4, 2, 3, 4, 3, 3), bias=normal(1, 4, 3, 4)),
        case(
            "bias over batch and query",
            (2, 2, 2, 3, 4, 3, 3),
            bias=normal(2, 1, 3, 1),
            lse_gradient=True,
        ),
        case("bias, one number", (2, 2, 2, 3, 4, 3, 3), bias=normal(1, 1, 1, 1), lse_gradient=True),
        case(
            "hidden rows",
            (2, 2, 1, 5, 4, 3, 2),
            mask=hidden_rows,
            bias=some_infinite,
            lse_gradient=True,
        ),
        case("large scores", (1, 1, 1, 4, 6, 4, 4), spread=100.0, lse_gradient=True),
        case(
            "everything",
            (2, 4, 2, 6, 7, 5, 3),
            scale=0.6,
            softcap=2.5,
            causal=True,
            window=(3, None),
            mask=hide(2, 1, 6, 7),
            bias=normal(1, 4, 1, 7),
            lse_gradient=True,
        ),
    ]


def main():
    described, stored = [], {}
    for description, tensors in cases():
        described.append(description)
        stored |= tensors
    made_by = f"scripts/record_reference.py with JAX {jax.__version__} in float64"
    # One entry: several would be written in any order, and the file would not be reproducible.
    recorded = json.dumps({"made_by": made_by, "cases": described})
    save_file(stored, TARGET, {"recorded": recorded})
    print(f"{len(described)} cases, {TARGET.stat().st_size} bytes in {TARGET}")


if __name__ == "__main__":
    main()
