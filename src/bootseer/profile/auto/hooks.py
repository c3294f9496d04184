# ruff: noqa: SIM105  # contextlib would be an import that the program may not have
"""Spans around what training code does before its first step has ended; then everything is put back that could cost.

A finder first on ``sys.meta_path`` times the import of `HEAVY` packages and, when a module of `CALLS` has been
imported, wraps the functions named there. Optimizers and the compiler have callbacks for this. What a program can see
stays as it was: no error, no output and no frame in a traceback (from Python 3.11 on) is ours, warnings name the same
lines, and nothing is imported that the program does not import.

Python 3.8 or later; loaded by ``sitecustomize`` as a file, so it imports only what every interpreter has.

Concurrency: calls in any thread. Each method is safe to run in several at once; a lost race records a span too many,
or one too few, and nothing else."""

from __future__ import annotations

import os
import sys
from _thread import get_ident, start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

    Emitters = dict[str, Any]
    Token = tuple[int, str, bool]

HEAVY = frozenset(
    (
        "torch",
        "tensorflow",
        "jax",
        "flax",
        "orbax",
        "transformers",
        "deepspeed",
        "megatron",
        "lightning",
        "pytorch_lightning",
        "nemo",
    )
)
"""Packages whose import is a span, and that of a module of theirs which they import late; what is imported meanwhile
belongs to it."""

CALLS = {
    "torch.serialization": (("load", "checkpoint_load", ""),),
    "torch.distributed.checkpoint.state_dict_loader": (
        ("load", "checkpoint_load", ""),
        ("load_state_dict", "checkpoint_load", ""),
    ),
    # It steps the optimizer once, to make its state; that is no training.
    "torch.distributed.checkpoint.state_dict": (("_init_optim_state", "", ""),),
    "safetensors.torch": (("load_file", "checkpoint_load", ""), ("load_model", "checkpoint_load", "")),
    "torch.distributed.distributed_c10d": (("init_process_group", "dist_init", "torch.distributed"),),
    "torch.utils.data.dataloader": (("DataLoader.__iter__", "data_loader_init", ""),),
    "torch.autograd": (("backward", "first_step", ""),),
    "jax._src.distributed": (("State.initialize", "dist_init", ""),),
    "jax._src.compiler": (("compile_or_get_cached", "compile", ""),),
    "orbax.checkpoint._src.checkpointers.checkpointer": (("Checkpointer.restore", "checkpoint_load", ""),),
    "orbax.checkpoint.checkpoint_manager": (("CheckpointManager.restore", "checkpoint_load", ""),),
    "orbax.checkpoint.experimental.v1._src.loading.loading": (
        ("load", "checkpoint_load", ""),
        ("load_pytree", "checkpoint_load", ""),
    ),
}
"""module -> (function, its stage, a module that has the function under the same name, too)."""

_PACKAGES = HEAVY.union(name.partition(".")[0] for name in CALLS)
_CHANGED = frozenset(CALLS).union(
    ("torch.optim.optimizer", "torch._dynamo.callback", "jax._src.api", "jax._src.pjit", "jax._src.stages")
)
"""Modules in which something is put."""
_MOST_SPANS = 64
"""Of each stage, and as many again in the first step."""
_FILE, _NAME = "<frozen importlib._bootstrap>", "_call_with_frames_removed"
"""What the wrappers' code calls itself: `warnings` does not count such frames for ``stacklevel``, and an import takes
them out of the traceback of its error, before Python 3.11 too."""


def install(load_emitters: Callable[[], Emitters]) -> None:
    """Begin to watch imports. ``load_emitters`` returns the names of ``bootseer.profile.emit``, when one is needed."""
    sys.meta_path.insert(0, Hooks(load_emitters))


class Hooks:
    """The finder, and all that it has put somewhere. Of its methods, none raises an `Exception`."""

    def __init__(self, load_emitters: Callable[[], Emitters]) -> None:
        self._load_emitters = load_emitters
        self._emitters: Emitters = {}
        self._undo: list[Callable[[], object]] = []
        self._inside: set[int] = set()
        """Threads inside of a call that is timed."""
        self._helpers: set[int] = set()
        """Those of them whose new processes only help: workers of a data loader, of a compiler."""
        self._auto = ""
        self._left: dict[str, int] = {}
        self._pid = os.getpid()
        self._is_rank = False
        self._step = ""
        self._trains = False
        """Whether gradients were made, or the optimizer has stepped: many step it once without, to make its state."""
        self._gradients = 0
        """How often JAX has begun to make code for gradients."""
        self._calls: set[int] = set()
        """Threads in which JAX makes the code of a function that is called."""
        self._steps: list[object] = []
        """Functions whose code by JAX has gradients."""
        self._ahead = False
        """Whether one of them was made into code without a call."""
        self._over = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """What the other finders find; its loader tells us when it loads a module of the packages that are watched."""
        if self._over or name.partition(".")[0] not in _PACKAGES:
            return None
        if name not in _CHANGED and get_ident() in self._inside:
            return None
        try:
            mine = sys.meta_path.index(self)
            for finder in sys.meta_path[mine + 1 :]:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._watch(name, spec.loader)
                    return spec
        except Exception:
            pass
        return None  # the other finders are asked again, and say whatever they have to say

    def _watch(self, name: str, loader: Any) -> None:
        run = loader.exec_module
        stage = "import" if name.partition(".")[0] in HEAVY else ""

        def before(args: Any) -> Token | None:
            if loader.__dict__.pop("exec_module", None) is None or not stage:
                return None
            return self._enter(stage, package=name)

        def after(token: Token | None, args: Any, done: bool, result: Any) -> None:
            self._leave(token)
            if done:
                self._imported(name, args[0])

        loader.exec_module = _around(run, before, after)  # only this one loader's; goes when it is called

    def _imported(self, name: str, module: Any) -> None:
        """Wrap what is to be timed in ``module``."""
        for function, stage, elsewhere in CALLS.get(name, ()):
            self._wrap(module, function, stage, elsewhere)
        if name == "torch.optim.optimizer":
            self._on_steps(module)
        elif name == "torch._dynamo.callback":
            self._on_compilations(module.callback_handler)
        elif name.startswith("jax."):
            self._on_jax(name, module)

    def _wrap(self, module: Any, function: str, stage: str, elsewhere: str) -> None:
        owner, _, attribute = function.rpartition(".")
        holder = vars(module).get(owner) if owner else module
        call = getattr(holder, attribute, None)
        if holder is None or call is None:
            return  # another version has it not
        if stage == "first_step":

            def before(args: Any) -> Token | None:
                self._step_begins()
                self._trains = self._trains or get_ident() not in self._inside
                return None

            def after(token: Token | None, args: Any, done: bool, result: Any) -> None:
                pass
        else:

            def before(args: Any) -> Token | None:
                return self._enter(stage)

            def after(token: Token | None, args: Any, done: bool, result: Any) -> None:
                self._leave(token, self._group(module, args) if stage == "dist_init" and done else None)
                if token and stage == "data_loader_init" and done and sys.modules["torch"].is_grad_enabled():
                    self._step_begins()  # an iterator made without gradients is for an evaluation

        # That of `checkpoint_load` stays: a data set may keep it, and be pickled for its workers later, under its name
        self._put(holder, attribute, _around(call, before, after), elsewhere, stays=stage == "checkpoint_load")

    @staticmethod
    def _group(module: Any, args: Any) -> tuple[int, int] | None:
        """Rank and number of ranks that ``module`` has made."""
        if hasattr(module, "State"):  # JAX's
            return args[0].process_id, args[0].num_processes
        return (module.get_rank(), module.get_world_size()) if module.is_initialized() else None

    def _put(self, holder: Any, attribute: str, wrapper: Any, elsewhere: str = "", *, stays: bool = False) -> None:
        setattr(holder, attribute, wrapper)
        call = wrapper.__wrapped__

        def undo() -> None:
            for place in (holder, sys.modules.get(elsewhere)):
                if place is not None and vars(place).get(attribute) is wrapper:
                    setattr(place, attribute, call)

        if not stays:
            self._undo.append(undo)

    def _on_steps(self, module: Any) -> None:
        torch = sys.modules["torch"]

        def compiles() -> bool:
            try:
                answer: bool = torch.compiler.is_compiling()
            except AttributeError:  # before torch 2.3
                return False
            return answer

        # The compiler traces both; there they do nothing, so that the code that it makes is the same.
        def before(optimizer: object, args: object, kwargs: object) -> None:
            if not compiles() and self._trains:
                self._step_begins()

        def after(optimizer: object, args: object, kwargs: object) -> None:
            if not compiles():
                if self._trains:
                    self._step_ended()
                elif not _all_zero(optimizer):
                    self._trains = get_ident() not in self._inside

        def undo() -> None:
            """Inside `after`: torch goes through these hooks, and none may go while another one is to come."""
            if next(reversed(module._global_optimizer_post_hooks)) == last.id:
                last.remove()

        self._undo.append(module.register_optimizer_step_pre_hook(before).remove)
        last = module.register_optimizer_step_post_hook(after)
        self._undo.append(undo)

    def _on_compilations(self, handler: Any) -> None:
        tokens: list[Token | None] = []

        def start(*args: object) -> None:  # of older versions none
            tokens.append(self._enter("compile"))

        def end(*args: object) -> None:
            if tokens:
                self._leave(tokens.pop())

        handler.register_start_callback(start)
        self._undo.append(lambda: handler.remove_start_callback(start))
        handler.register_end_callback(end)
        self._undo.append(lambda: handler.remove_end_callback(end))

    def _on_jax(self, name: str, module: Any) -> None:
        """The first step of JAX is the first call of a function whose code has gradients."""

        def call(function: str, before: Callable[[Any], Any], after: Callable[[Any, Any, bool, Any], None]) -> None:
            owner, _, attribute = function.rpartition(".")
            holder = getattr(module, owner) if owner else module
            if hasattr(holder, attribute):  # versions differ
                elsewhere = "jax" if attribute == "vjp" else ""
                self._put(holder, attribute, _around(getattr(holder, attribute), before, after), elsewhere)

        def gradients(args: Any) -> None:
            self._gradients += 1
            if get_ident() in self._calls:
                self._step_begins()

        def traced(args: Any) -> Any:
            fun, clean = args[0], sys.modules["jax._src.core"].trace_state_clean()
            known = any(fun is one for one in self._steps)
            if not clean:
                self._gradients += known
                return None
            called = sys._getframe(2).f_code.co_name in ("cache_miss", "_python_pjit_helper")
            if called:
                self._calls.add(get_ident())
                if known:
                    self._step_begins()
            return fun, called, self._gradients, known

        def code_made(token: Any, args: Any, done: bool, result: Any) -> None:
            if token is not None:
                fun, called, before, known = token
                self._calls.discard(get_ident())
                if self._gradients > before and not known:
                    self._steps.append(fun)
                    self._ahead = self._ahead or not called

        def ran(place: int) -> Callable[[Any, Any, bool, Any], None]:
            def after(token: Any, args: Any, done: bool, result: Any) -> None:
                ours = place < 0 or any(args[place] is one for one in self._steps)
                if done and ours and sys.modules["jax._src.core"].trace_state_clean():
                    self._step_ends_with(result if place < 0 else result[0])

            return after

        def ahead(args: Any) -> None:
            if self._ahead:
                self._step_begins()

        def nothing(*args: Any) -> None:
            pass

        if name == "jax._src.api":
            call("vjp", gradients, nothing)
            call("_vjp", gradients, nothing)
        elif name == "jax._src.pjit":
            call("_infer_params", traced, code_made)
            call("_run_python_pjit", nothing, ran(2))
            call("_python_pjit_helper", nothing, ran(0))
        elif name == "jax._src.stages":
            call("Compiled.__call__", ahead, ran(-1))

    def _step_ends_with(self, result: Any) -> None:
        """The step ends when its smallest result is there: JAX returns before. The program does not wait for it."""
        if not self._step or self._over:
            return
        arrays: list[Any] = [
            one for one in sys.modules["jax"].tree_util.tree_leaves(result) if hasattr(one, "block_until_ready")
        ]
        smallest: Any = min(arrays, key=lambda one: one.size, default=None)  # held alone: the others may be large

        def wait() -> None:
            try:
                smallest.block_until_ready()
            except Exception:  # there is none, or it was given away to the next step
                pass
            self._step_ended(finder=False)

        start_new_thread(wait, ())

    def _enter(self, stage: str, **attrs: object) -> Token | None:
        """The begin of a timed call, unless this thread is inside of one already; ``""`` is one without a span."""
        thread = get_ident()
        left = self._left.get(stage, _MOST_SPANS)
        if left <= (-_MOST_SPANS if self._step else 0):
            return None
        if self._over or thread in self._inside or not self._records():
            return None
        self._inside.add(thread)
        span = ""
        try:
            if stage:
                self._left[stage] = left - 1
                span = self._begin(stage, attrs)
            if stage not in ("", "import"):
                if not self._helpers:
                    self._auto = os.environ.get("BOOTSEER_AUTO", "")
                    os.environ["BOOTSEER_AUTO"] = "0"
                self._helpers.add(thread)
        except Exception:
            pass
        return thread, span, thread in self._helpers

    def _leave(self, token: Token | None, group: tuple[int, int] | None = None) -> None:
        if not token:
            return
        thread, span, helped = token
        self._inside.discard(thread)
        try:
            if helped:
                self._helpers.discard(thread)
                if not self._helpers and not self._over:
                    os.environ["BOOTSEER_AUTO"] = self._auto
            attrs: dict[str, object] = {}
            if group is not None:
                self._is_rank = True
                attrs["ranks"] = group[1]
                self._emitters["_rank"] = str(group[0])
            if span:
                self._emitters["end"](span, **attrs)
        except Exception:
            pass

    def _begin(self, stage: str, attrs: dict[str, object]) -> str:
        if not self._emitters:
            self._emitters = self._load_emitters()
        for name, variable in (("ranks", "WORLD_SIZE"), ("node_ranks", "LOCAL_WORLD_SIZE")):
            number = os.environ.get(variable, "")
            if number.isdigit():
                attrs[name] = int(number)
        span: str = self._emitters["begin"](stage, **attrs)
        return span

    def _records(self) -> bool:
        """Whether this process records. A fork of a rank, or one made inside a timed call, is none; another may be."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._over = self._over or self._is_rank or bool(self._step)
        return not self._over

    def _step_begins(self) -> None:
        try:
            if not self._over and get_ident() not in self._inside and self._records() and not self._step:
                self._step = self._begin("first_step", {})
        except Exception:
            pass

    def _step_ended(self, *, finder: bool = True) -> None:
        try:
            if not self._over and get_ident() not in self._inside and self._records() and self._step:
                self._emitters["end"](self._step)
                self._remove(finder)
        except Exception:
            pass

    def _remove(self, finder: bool) -> None:
        """Put everything back. Our finder, which does nothing from now on, stays where this thread is not the
        program's: an import that goes over the finders at the same time would pass over the one behind it."""
        self._over = True
        os.environ["BOOTSEER_AUTO"] = "0"  # a new value for an old name, which is safe beside threads that read
        for undo in self._undo:
            try:
                undo()
            except Exception:
                pass
        self._undo.clear()
        self._steps.clear()
        if finder:
            sys.meta_path[:] = [one for one in sys.meta_path if one is not self]


def _all_zero(optimizer: Any) -> bool:
    """Whether there are gradients and all are zero: a step that makes the optimizer's state, and no training. Asked
    before there was any backward only, as it waits for the device."""
    try:
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        # of a tensor that is divided over ranks the part that is here, so that no rank waits for others
        return bool(parameters) and not any(getattr(one.grad, "_local_tensor", one.grad).any() for one in parameters)
    except Exception:
        return False


def _around(
    call: Callable[..., Any],
    before: Callable[[Any], Any],
    after: Callable[[Any, Any, bool, Any], None],
) -> Callable[..., Any]:
    """``call`` with ``before`` and ``after``, which get its positional arguments, and the second one what ``before``
    returned, whether it raised nothing, and its result; it looks like ``call``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        token = result = None
        done = False
        try:
            token = before(args)
        except Exception:
            pass
        try:
            result = call(*args, **kwargs)
            done = True
            return result
        except BaseException as exc:
            if exc.__traceback__ is not None:
                exc.__traceback__ = exc.__traceback__.tb_next  # without this frame, which `raise` does not add again
            raise
        finally:
            try:
                after(token, args, done, result)
            except Exception:
                pass

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        try:
            setattr(run, name, getattr(call, name))
        except AttributeError:
            pass
    run.__dict__.update(getattr(call, "__dict__", {}))
    run.__wrapped__ = call  # type: ignore[attr-defined]
    run.__code__ = run.__code__.replace(co_filename=_FILE, co_name=_NAME)
    return run
