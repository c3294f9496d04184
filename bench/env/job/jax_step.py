"""The first training step of a small transformer under jax.jit; prints its seconds and those of processors."""

import contextlib
import json
import os
import time

import jax
import jax.numpy as jnp

try:
    from bootseer.profile.emit import span
except ImportError:  # not under `bootseer run`
    span = contextlib.nullcontext

LAYERS, DIM, HEADS = 8, 64, 4


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def block(weights, x):
    b, t, d = x.shape
    q, k, v = jnp.moveaxis((norm(x) @ weights["qkv"]).reshape(b, t, 3, HEADS, d // HEADS), 2, 0)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (d // HEADS) ** 0.5
    scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9))
    x = x + jnp.einsum("bhts,bshd->bthd", scores, v).reshape(b, t, d) @ weights["out"]
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]


def weights(number):
    shapes = {"qkv": (DIM, 3 * DIM), "out": (DIM, DIM), "up": (DIM, 2 * DIM), "down": (2 * DIM, DIM)}
    keys = jax.random.split(jax.random.key(number), len(shapes))
    return {name: jax.random.normal(key, shape) * 0.02 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss(model, x, y):
    for layer in model["layers"]:
        x = block(layer, x)
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ model["head"]), y[..., None], -1).mean()


@jax.jit
def step(model, momentum, x, y):
    value, gradient = jax.value_and_grad(loss)(model, x, y)
    momentum = jax.tree.map(lambda old, new: 0.9 * old + new, momentum, gradient)
    return jax.tree.map(lambda old, change: old - 1e-3 * change, model, momentum), momentum, value


began, cpu = time.perf_counter(), sum(os.times()[:4])
with span("first_step"):
    model = {"layers": [weights(number) for number in range(LAYERS)], "head": jnp.zeros((DIM, 256))}
    x, y = jnp.ones((2, 32, DIM)), jnp.zeros((2, 32), int)
    jax.block_until_ready(step(model, jax.tree.map(jnp.zeros_like, model), x, y))
print(json.dumps({"seconds": time.perf_counter() - began, "cpu": sum(os.times()[:4]) - cpu}))
