"""The demo's training job: a small transformer in JAX that resumes from a checkpoint and goes on training. Nothing in
it is special to bootseer but the spans around its initialisation, and it runs without them too. It prints one JSON line
a step. With ``--save FILE`` it trains from scratch and writes the checkpoint that other starts resume."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from typing import Any

try:
    from bootseer.profile import emit

    span: Callable[[str], contextlib.AbstractContextManager[object]] = emit.span
except ImportError:  # started without bootseer: the job runs just the same

    def span(stage: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


parser = argparse.ArgumentParser()
parser.add_argument("--resume", metavar="FILE", help="checkpoint to go on from")
parser.add_argument("--save", metavar="FILE", help="write it there, after --steps from scratch")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

with span("import"):
    import einops
    import jax
    import jax.numpy as jnp
    import optax
    from safetensors.flax import load_file, save_file

VOCABULARY, WIDTH, LAYERS, HEADS, BATCH, LENGTH = 512, 192, 6, 6, 2, 64
optimizer = optax.adamw(3e-4)


def new_model() -> Any:
    """Weights of a decoder; those of all layers are stacked: [LAYERS, ...]."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(7), len(shapes) + 1))
    layers = {name: 0.02 * jax.random.normal(next(keys), (LAYERS, *shape)) for name, shape in shapes.items()}
    return {"embed": 0.02 * jax.random.normal(next(keys), (VOCABULARY, WIDTH)), "layers": layers}


def norm(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer(x: Any, weights: Any) -> Any:
    """One block: [BATCH, LENGTH, WIDTH] to the same."""
    q, k, v = einops.rearrange(norm(x) @ weights["qkv"], "b t (three h d) -> three b t h d", three=3, h=HEADS)
    seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + einops.rearrange(seen, "b t h d -> b t (h d)") @ weights["out"]
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"], None


def loss_of(model: Any, tokens: Any) -> Any:
    """Mean cross entropy of the next token; ``tokens``: [BATCH, LENGTH]."""
    x, _ = jax.lax.scan(layer, model["embed"][tokens[:, :-1]], model["layers"])
    logits = norm(x) @ model["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state: Any, step: Any) -> Any:
    """One step on arithmetic progressions, so that there is something to learn. Returns (state, loss)."""
    first = jax.random.randint(jax.random.fold_in(jax.random.key(1), step), (BATCH, 1), 0, 512)
    loss, gradients = jax.value_and_grad(loss_of)(state["model"], (first + 3 * jnp.arange(LENGTH)) % 509)
    updates, moments = optimizer.update(gradients, state["moments"], state["model"])
    return {"model": optax.apply_updates(state["model"], updates), "moments": moments}, loss


compiled = jax.jit(train_step)
with span("model_init"):
    model = jax.eval_shape(new_model) if args.resume else new_model()
    state = {
        "model": model,
        "moments": (jax.eval_shape(optimizer.init, model) if args.resume else optimizer.init(model)),
    }
    leaves, shape_of_state = jax.tree.flatten(state)
step = 0
if args.resume:
    with span("checkpoint_load"):
        saved = load_file(args.resume)
        step = int(saved["step"])
        state = jax.tree.unflatten(shape_of_state, [saved[str(n)] for n in range(len(leaves))])


def advance() -> None:
    global state
    state, loss = compiled(state, step)
    print(json.dumps({"step": step, "loss": round(float(loss), 6)}), flush=True)


with span("first_step"):
    advance()
for _ in range(args.steps - 1):
    step += 1
    advance()

if args.save:
    save_file(
        {**{str(n): leaf for n, leaf in enumerate(jax.tree.leaves(state))}, "step": jnp.array(step + 1)}, args.save
    )
