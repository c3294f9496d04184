"""Training code that nobody changed: what the hooks record, and that nobody can see them."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bootseer.profile import auto, events
from bootseer.profile.analysis import analyse
from bootseer.profile.auto.__main__ import arguments

AUTO = [sys.executable, "-m", "bootseer.profile.auto"]
PACKAGE = Path(auto.__file__).parents[2]

TORCH = {  # what the hooks know of torch, without its weight
    "torch/__init__.py": """
        import os
        if "BROKEN" in os.environ:
            1 / 0
        from torch.serialization import load
    """,
    "torch/late.py": "from torch import later",
    "torch/later.py": "",
    "torch/serialization.py": """
        import warnings
        def load(path, *, kind="x"):
            "Loads."
            warnings.warn("old", FutureWarning, stacklevel=2)
            if path == "missing":
                raise FileNotFoundError(path)
            return path
    """,
    "torch/optim/__init__.py": "",
    # as of torch 2.2, which has no `torch.compiler.is_compiling`
    "torch/optim/optimizer.py": """
        from collections import OrderedDict
        _global_optimizer_pre_hooks, _global_optimizer_post_hooks = OrderedDict(), OrderedDict()
        class Handle:
            def __init__(self, hooks, hook):
                self.hooks, self.id = hooks, len(hooks)
                hooks[self.id] = hook
            def remove(self):
                self.hooks.pop(self.id, None)
        def register_optimizer_step_pre_hook(hook):
            return Handle(_global_optimizer_pre_hooks, hook)
        def register_optimizer_step_post_hook(hook):
            return Handle(_global_optimizer_post_hooks, hook)
        def step():
            for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
                for hook in hooks.values():
                    hook(None, (), {})
    """,
    "torch/_dynamo/__init__.py": "",
    # as of torch 2.3, whose callbacks get no argument
    "torch/_dynamo/callback.py": """
        class Handler:
            def __init__(self):
                self.start, self.end = [], []
                self.register_start_callback, self.remove_start_callback = self.start.append, self.start.remove
                self.register_end_callback, self.remove_end_callback = self.end.append, self.end.remove
            def run(self):
                for callback in self.start + self.end:
                    callback()
        callback_handler = Handler()
    """,
}
PROGRAMS = {
    "error": "import torch\ndef main():\n    torch.load('missing')\nmain()",
    "arguments": "import torch\ntorch.load()",
    "warning": "import torch\nfrom torch.serialization import load\nprint(torch.load('a'), load('b', kind='y'))",
    "broken": "import os\nos.environ['BROKEN'] = '1'\nimport torch",
    "absent": "import torch.nothing",
    "exit": "import sys, torch\nprint('out'); print('err', file=sys.stderr); sys.exit(7)",
    "signal": "import os, torch\nos.kill(os.getpid(), 9)",
    "modules": "import sys\nprint(sorted(sys.modules), sys.path, sys.argv, sys.flags, len(sys.path_importer_cache))",
    "main": "import sys\nprint(__name__, __file__, sys.modules['__main__'].__spec__)",
    "look": """
        import importlib.util, inspect, pickle, torch, torch.serialization
        print(importlib.util.find_spec("torch").origin, torch.__loader__.__dict__)
        print(torch.__loader__ is torch.__spec__.loader, pickle.dumps(torch.load))
        print(inspect.signature(torch.load), torch.load.__doc__, inspect.getsource(torch.load))
    """,
    "step": "import torch.optim.optimizer as o\no.step()\no.step()\nprint('stepped')",
    "compile": "import torch._dynamo.callback as c\nc.callback_handler.run()\nprint('compiled')",
    "hook": """
        import torch.optim.optimizer as o
        o.register_optimizer_step_post_hook(lambda *args: print("stepped"))
        o.step()
        o.step()
    """,
    "held": """
        import pickle, torch, torch.optim.optimizer as o
        kept = torch.load
        print(pickle.dumps(kept))
        o.step()
        o.step()
        print(pickle.dumps(kept))
    """,
    "site": "import sys\nprint(sys.modules['sitecustomize'].MINE)",
}


def environ(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BOOTSEER_", "TORCHELASTIC_")) or "TEST" in k}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run(argv, **kwargs):
    return subprocess.run(argv, capture_output=True, timeout=240, check=False, **kwargs)


def seen(path):
    return [(span.stage, span.state.value) for span in events.read(path).spans]


@pytest.fixture
def program(tmp_path):
    """A folder with a small ``torch`` and ``train.py``."""

    def write(text):
        for name, source in {**TORCH, "train.py": text}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(source).lstrip("\n"))
        return tmp_path

    return write


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("file", ["e.jsonl", "/dev/full"])
def test_nothing_that_a_program_does_or_shows_changes(program, name, file):
    folder = program(PROGRAMS[name])
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("MINE = 1\n")
    more = {"BOOTSEER_EVENTS": str(folder / file)} | ({"PYTHONPATH": str(site)} if name == "site" else {})
    plain = run([sys.executable, "train.py", "-x", "y"], cwd=folder, env=environ(**more))
    shutil.rmtree(folder / "torch/__pycache__", ignore_errors=True)
    hooked = run([*AUTO, "train.py", "-x", "y"], cwd=folder, env=environ(**more))
    assert (hooked.returncode, hooked.stdout, hooked.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert plain.stdout or plain.returncode
    if file == "e.jsonl" and "import torch" in PROGRAMS[name]:
        stages = seen(folder / file)
        assert stages[0] == ("import", "DONE" if name != "signal" else stages[0][1])
        assert ("checkpoint_load", "DONE") in stages or name not in ("error", "arguments", "warning")
        assert ("first_step", "DONE") in stages or name not in ("step", "hook", "held")
        assert ("compile", "DONE") in stages or name != "compile"


def test_a_sitecustomize_that_fails_is_told_as_python_tells_it(program):
    folder = program("print('goes on')")
    (folder / "sitecustomize.py").write_text("raise ValueError('of the site')\n")
    env = environ(PYTHONPATH=str(folder), BOOTSEER_EVENTS=str(folder / "e.jsonl"))
    plain = run([sys.executable, "train.py"], cwd=folder, env=env)
    hooked = run([sys.executable, "train.py"], cwd=folder, env={**env, **auto.variables(str(folder))})
    assert b"of the site" in plain.stderr
    assert (hooked.stdout, hooked.stderr) == (plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["py", "-m", "bootseer.profile.auto"], []),
        (["py", "-u", "-X", "dev", "-mbootseer.profile.auto"], ["-u", "-X", "dev"]),
        (["py", "-OOum", "bootseer.profile.auto"], ["-OOu"]),
        (["py", "-Wm", "-umbootseer.profile.auto"], ["-Wm", "-u"]),
    ],
)
def test_options_of_the_interpreter_stay(given, options):
    for program in (["train.py", "-m", "x"], ["-m", "bootseer.profile.auto"]):
        assert arguments([*given, *program], program) == [sys.executable, *options, *program]


def test_the_command_line(program):
    folder = program(
        "import sys, torch\nprint(sys.flags.optimize, sys.argv)\ntorch.load(sys.argv[0])\nimport torch.late"
    )
    cli = [sys.executable, "-m", "bootseer.cli.main", "profile", "wrap", "--auto"]
    done = run([*cli, "--events", "e.jsonl", sys.executable, "-O", "-W", "ignore", "train.py", "--events", "x"],
               cwd=folder, env=environ())  # fmt: skip
    assert (done.stdout, done.stderr) == (b"1 ['train.py', '--events', 'x']\n", b"")
    assert seen(folder / "e.jsonl") == [("import", "DONE"), ("checkpoint_load", "DONE"), ("import", "DONE")]
    assert events.read(folder / "e.jsonl").spans[-1].attrs == {"package": "torch.late"}
    for command, code in ((["/nothing"], 127), ([str(folder)], 126)):
        done = run([*cli, "--events", "e.jsonl", *command], cwd=folder, env=environ())
        assert (done.returncode, done.stderr.count(b"\n")) == (code, 1)
    done = run([*cli, "sh", "-c", "kill -s PIPE $$"], env=environ())
    assert done.returncode == -13
    assert b"nothing is recorded" in done.stderr
    assert run(AUTO, env=environ()).returncode == 2


def test_the_files_are_for_python_3_8():
    import ast

    for path in (PACKAGE / "profile/auto").rglob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 8))


TRAIN = """
import json, os, sys, tempfile, time
import torch
from torch import distributed
from torch.optim import optimizer as optimizers


def main():
    rank, restart = int(os.environ.get("RANK", 0)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if os.environ.get("FAIL") and restart == 0:
        if rank == 1:
            sys.exit(3)
        time.sleep(200)  # torchrun kills it; what it had left in the store would be taken for this restart's
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    model = torch.nn.Linear(4, 4)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), folder + "/m.pt")
        model.load_state_dict(torch.load(folder + "/m.pt"))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # once without gradients, to make its state
    optimizer.zero_grad()
    load = torch.load
    if CTX:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
        get_optimizer_state_dict(model, optimizer)  # steps once, to make the state
        with torch.no_grad():
            list(loader(None))  # an evaluation
        step = torch.compile(model, backend="eager")
    else:
        step = model
    torch.load = mine = lambda path: load(path)  # someone's own patch stays
    for (x,) in loader(CTX):
        step(x).sum().backward()
        optimizer.step()
    finders = {type(finder).__name__ for finder in sys.meta_path} - {"type", "DistutilsMetaFinder"}
    left = list(optimizers._global_optimizer_post_hooks), list(finders)
    from torch.utils.data.dataloader import DataLoader
    places = DataLoader.__iter__, torch.autograd.backward, torch.serialization.load, distributed.init_process_group
    files = [os.path.basename(place.__code__.co_filename) for place in places]
    print(json.dumps({"left": left, "files": files, "patched": torch.load is mine}))
    distributed.destroy_process_group()


def loader(context):
    data = torch.utils.data.TensorDataset(torch.randn(4, 4))
    return torch.utils.data.DataLoader(data, 2, num_workers=bool(context), multiprocessing_context=context)


CTX = os.environ.get("CTX")
if __name__ == "__main__":
    main()
"""


@pytest.mark.torch
def test_a_training_program_until_its_first_step(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    # workers of the loader are new interpreters, which import the program again: they are no ranks
    more = {"BOOTSEER_EVENTS": str(tmp_path / "e.jsonl"), "CTX": "spawn"}
    done = run([*AUTO, "train.py"], cwd=tmp_path, env=environ(**more))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "left": [[], []],
        "files": ["dataloader.py", "__init__.py", "<frozen importlib._bootstrap>", "c10d_logger.py"],
        "patched": True,
    }
    stages = ["dist_init", "checkpoint_load", "data_loader_init", "data_loader_init", "first_step", "compile"]
    found = seen(tmp_path / "e.jsonl")
    assert found[0] == ("import", "DONE")
    assert [span for span in found if span[0] != "import"] == [(stage, "DONE") for stage in stages]
    log = events.read(tmp_path / "e.jsonl")
    assert {span.rank for span in log.spans if span.stage != "import"} == {None, 0}
    assert [span.rank for span in log.spans if span.stage == "first_step"] == [0]


@pytest.mark.torch
def test_ranks_that_torchrun_starts_again_are_a_cycle(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    more = {"BOOTSEER_EVENTS": str(tmp_path / "e.jsonl"), "FAIL": "1", **auto.variables()}
    done = run([*torchrun, "--standalone", "train.py"], cwd=tmp_path, env=environ(**more))
    assert done.returncode == 0, done.stderr
    log = events.read(tmp_path / "e.jsonl")
    assert [cycle for _, _, cycle in log.identities()] == [0, 1]
    first, again = (analyse(log, identity) for identity in log.identities())
    assert first.startup_seconds is None
    assert again.hot
    assert again.startup_seconds is not None
