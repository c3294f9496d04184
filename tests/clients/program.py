"""A job of one client library: ``program.py CLIENT WAY PLACE STORE STEPS`` goes on from its newest checkpoint.

PLACE is a folder on a mount (WAY ``mount``) or a URL for fsspec (``url``); STORE is the same folder for bootseer, which
alone is used by WAY ``ours``. Says ``saving N`` and ``saved N`` around each save, and at the end one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import fsspec
import numpy as np

from bootseer.errors import NotFoundError
from bootseer.stripefs import open_fs

KEPT = 2


class Place:
    def __init__(self, way: str, path: str, store: str) -> None:
        self.way, self.path, self.store = way, path, store
        self.url = way == "url"
        self.striped = open_fs(store)

    def at(self, name: str) -> str:
        return f"{self.store if self.way == 'ours' else self.path}/{name}"

    def open(self, name: str, mode: str):
        return fsspec.open(self.at(name), mode).open() if self.url else open(self.at(name), mode)

    def newest_file(self) -> int:
        """The number of the newest file ``step-N``: one that has its name is whole."""
        try:
            if self.way == "mount":
                names = os.listdir(self.path)
            else:
                fs, root = fsspec.core.url_to_fs(
                    f"bsx+{self.store}" if "://" in self.store else f"bsx+file://{self.store}"
                )
                names = [path.rpartition("/")[2] for path in fs.ls(root, detail=False)]
        except FileNotFoundError:
            return 0
        return max((int(name[5:]) for name in names if name.startswith("step-")), default=0)

    def newest_folder(self) -> int:
        """The number of the newest folder with a COMMIT."""
        try:
            return int(self.striped.latest("").rpartition("-")[2].rpartition("_")[2])
        except NotFoundError:
            return 0

    def commit(self, name: str) -> None:
        """Finish a checkpoint, and remove the oldest as its owner."""
        self.striped.commit(name)
        number = int(name[5:]) - KEPT
        if number > 0:
            if self.url:
                fs, path = fsspec.core.url_to_fs(self.at(f"step-{number}"))
                fs.rm(path, recursive=True)
            elif self.way == "mount":
                shutil.rmtree(self.at(f"step-{number}"))
            else:
                self.striped.remove_tree(f"step-{number}")


# -- clients that keep an array: save(place, step, array), load(place) -> (step, array) --------------------------------
class TorchSave:
    def save(self, place, step, w):
        import torch

        state = {"w": torch.from_numpy(w)}
        if place.way == "ours":
            import bootseer.torch

            bootseer.torch.save(state, place.at(f"step-{step}"))
        elif place.url:
            with place.open(f"step-{step}", "wb") as out:
                torch.save(state, out)
        else:
            torch.save(state, place.at(f"step-{step}"))

    def load(self, place):
        import torch

        if not (step := place.newest_file()):
            return None
        if place.way == "ours":
            import bootseer.torch

            return step, bootseer.torch.load(place.at(f"step-{step}"))["w"].numpy()
        if place.url:
            with place.open(f"step-{step}", "rb") as file:
                return step, torch.load(file, weights_only=True)["w"].numpy()
        return step, torch.load(place.at(f"step-{step}"), weights_only=True, mmap=True)["w"].numpy().copy()


class Dcp:
    def _ends(self, place, step):
        import torch.distributed.checkpoint as dcp

        try:
            from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
        except ModuleNotFoundError:  # its name up to torch 2.7
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        from bootseer.torch import StorageReader, StorageWriter

        if place.way == "ours":
            return StorageWriter(place.at(f"step-{step}")), StorageReader(place.at(f"step-{step}"))
        kinds = (FsspecWriter, FsspecReader) if place.url else (dcp.FileSystemWriter, dcp.FileSystemReader)
        return kinds[0](place.at(f"step-{step}"), sync_files=not place.url), kinds[1](place.at(f"step-{step}"))

    def save(self, place, step, w):
        import torch
        import torch.distributed.checkpoint as dcp

        dcp.save({"w": torch.from_numpy(w)}, storage_writer=self._ends(place, step)[0])
        if place.way != "ours":
            place.commit(f"step-{step}")

    def load(self, place):
        import torch
        import torch.distributed.checkpoint as dcp

        if not (step := place.newest_folder()):
            return None
        state = {"w": torch.zeros(SHAPE)}
        dcp.load(state, storage_reader=self._ends(place, step)[1])
        return step, state["w"].numpy()


class Safetensors:
    def save(self, place, step, w):
        import torch
        from safetensors.torch import save, save_file

        state = {"w": torch.from_numpy(w)}
        if place.way == "ours":
            from bootseer.torch import save_safetensors

            save_safetensors(state, place.at(f"step-{step}"))
        elif place.url:
            with place.open(f"step-{step}", "wb") as out:
                out.write(save(state))
        else:
            save_file(state, place.at(f"step-{step}"))

    def load(self, place):
        from safetensors import safe_open
        from safetensors.torch import load

        if not (step := place.newest_file()):
            return None
        if place.way == "ours":
            from bootseer.torch import load_safetensors

            return step, load_safetensors(place.at(f"step-{step}"))["w"].numpy()
        if place.url:
            with place.open(f"step-{step}", "rb") as file:
                return step, load(file.read())["w"].numpy()
        with safe_open(place.at(f"step-{step}"), "pt") as file:
            return step, file.get_slice("w")[:].numpy().copy()


class Pretrained:
    def save(self, place, step, w):
        import torch
        import transformers

        config = transformers.GPT2Config(n_layer=1, n_embd=250, n_head=2, n_positions=8, vocab_size=6000)
        model = transformers.GPT2LMHeadModel(config)
        model.transformer.wte.weight.data = torch.from_numpy(w)
        model.save_pretrained(place.at(f"step-{step}"))
        place.commit(f"step-{step}")

    def load(self, place):
        import transformers

        if not (step := place.newest_folder()):
            return None
        model = transformers.GPT2LMHeadModel.from_pretrained(place.at(f"step-{step}"))
        return step, model.transformer.wte.weight.detach().numpy().copy()


class Orbax:
    def _manager(self, place):
        import orbax.checkpoint as ocp

        return ocp, ocp.CheckpointManager(place.path, options=ocp.CheckpointManagerOptions(max_to_keep=KEPT))

    def save(self, place, step, w):
        ocp, manager = self._manager(place)
        with manager:
            manager.save(step, args=ocp.args.StandardSave({"w": w}))
            manager.wait_until_finished()

    def load(self, place):
        ocp, manager = self._manager(place)
        with manager:
            if not (step := manager.latest_step()):
                return None
            like = {"w": np.zeros(SHAPE, np.float32)}
            return step, np.array(manager.restore(step, args=ocp.args.StandardRestore(like))["w"])


class Tensorizer:
    def save(self, place, step, w):
        import tensorizer
        import torch

        with tempfile.TemporaryDirectory() as local:
            path = f"{local}/f" if place.url else place.at(f"step-{step}")
            serializer = tensorizer.TensorSerializer(path)
            serializer.write_state_dict({"w": torch.from_numpy(w)})
            serializer.close()
            if place.url:
                fs, to = fsspec.core.url_to_fs(place.at(f"step-{step}"))
                fs.put(path, to)

    def load(self, place):
        import tensorizer

        if not (step := place.newest_file()):
            return None
        source = place.open(f"step-{step}", "rb")
        with tensorizer.TensorDeserializer(source, device="cpu", verify_hash=True) as found:
            return step, found["w"].detach().numpy().copy()


class Pyarrow:
    def _where(self, place):
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        if not place.url:
            return None, place.path
        fs, root = fsspec.core.url_to_fs(place.path)
        return PyFileSystem(FSSpecHandler(fs)), root

    def save(self, place, step, w):
        import pyarrow
        import pyarrow.parquet

        filesystem, root = self._where(place)
        table = pyarrow.table({"w": w.reshape(-1)})
        pyarrow.parquet.write_table(table, f"{root}/step-{step}", filesystem=filesystem)

    def load(self, place):
        import pyarrow.dataset

        if not (step := place.newest_file()):
            return None
        filesystem, root = self._where(place)
        found = pyarrow.dataset.dataset(f"{root}/step-{step}", filesystem=filesystem, format="parquet")
        return step, found.to_table()["w"].to_numpy().reshape(SHAPE)


class Pandas:
    def save(self, place, step, w):
        import pandas

        pandas.DataFrame({"w": w.reshape(-1)}).to_parquet(place.at(f"step-{step}"))
        pandas.DataFrame({"step": [step]}).to_csv(place.at("last.csv"))

    def load(self, place):
        import pandas

        if not (step := place.newest_file()):
            return None
        if step > 1:
            assert pandas.read_csv(place.at("last.csv"))["step"][0] in (step - 1, step)
        return step, pandas.read_parquet(place.at(f"step-{step}"))["w"].to_numpy().reshape(SHAPE).copy()


class Zarr:
    def save(self, place, step, w):
        import zarr

        zarr.save_group(place.at(f"step-{step}"), w=w)
        place.commit(f"step-{step}")

    def load(self, place):
        import zarr

        if not (step := place.newest_folder()):
            return None
        return step, zarr.open_group(place.at(f"step-{step}"), mode="r")["w"][:]


class Datasets:
    def save(self, place, step, w):
        import datasets
        import pyarrow

        datasets.Dataset(pyarrow.table({"w": w.reshape(-1)})).save_to_disk(place.at(f"step-{step}"))
        place.commit(f"step-{step}")

    def load(self, place):
        import datasets

        if not (step := place.newest_folder()):
            return None
        found = datasets.load_from_disk(place.at(f"step-{step}"))
        return step, found.data.table["w"].to_numpy().reshape(SHAPE)


SHAPE = (6000, 250)


def keeps_an_array(client, place: Place, steps: int) -> tuple[int, list[np.ndarray]]:
    began, w = client.load(place) or (0, np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE))
    for step in range(began + 1, steps + 1):
        w = w * np.float32(0.999) + np.float32(step)
        print("saving", step, flush=True)
        client.save(place, step, w)
        print("saved", step, flush=True)
    return began, [client.load(place)[1]]


# -- frameworks with a loop of their own -------------------------------------------------------------------------------
def trainer(place: Place, steps: int) -> tuple[int, list[np.ndarray]]:
    import torch
    import transformers

    class Says(transformers.TrainerCallback):
        def on_step_end(self, arguments, state, control, **more):
            print("saving", state.global_step, flush=True)

        def on_save(self, arguments, state, control, **more):
            place.striped.commit(f"checkpoint-{state.global_step}")
            print("saved", state.global_step, flush=True)

    transformers.set_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=128, n_head=2, n_positions=64, vocab_size=9000)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 9000, (16, 32), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        output_dir=place.path, max_steps=steps, save_steps=1, save_total_limit=KEPT, per_device_train_batch_size=2,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    made = transformers.Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Says()],
    )  # fmt: skip
    newest = place.newest_folder()
    made.train(resume_from_checkpoint=place.at(f"checkpoint-{newest}") if newest else None)
    left = sorted(name for name in os.listdir(place.path) if name.startswith("checkpoint-"))
    assert left == [f"checkpoint-{number}" for number in range(steps - KEPT + 1, steps + 1)], left
    return newest, [value.numpy() for _, value in sorted(model.state_dict().items())]


def lightning(place: Place, steps: int) -> tuple[int, list[np.ndarray]]:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    seed_everything(0, verbose=False)
    began = []

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1500, 1000)

        def training_step(self, batch, index):
            self.log("number", float(self.global_step))
            noise = torch.randn(4, 1500, generator=torch.Generator().manual_seed(self.global_step))
            return self.layer(noise).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class Says(Callback):
        def on_train_start(self, trainer, net):
            began.append(trainer.global_step)

        def on_train_batch_start(self, trainer, net, *more):
            if trainer.global_step > began[0]:
                print("saved", trainer.global_step, flush=True)

        def on_train_batch_end(self, trainer, net, *more):
            print("saving", trainer.global_step, flush=True)

    keep = ModelCheckpoint(
        dirpath=place.path, filename="{step}", every_n_train_steps=1, save_top_k=KEPT, monitor="number", mode="max",
        save_last=True,
    )  # fmt: skip
    net = Net()
    made = Trainer(
        max_steps=steps, callbacks=[Says(), keep], logger=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, default_root_dir=tempfile.gettempdir(),
    )  # fmt: skip
    last = "last"
    if place.url:  # lightning looks for "last" among names without their protocol: on no remote store does it find one
        fs, path = fsspec.core.url_to_fs(place.at("last.ckpt"))
        last = place.at("last.ckpt") if fs.exists(path) else None
    made.fit(net, torch.utils.data.DataLoader(torch.zeros(64, 1)), ckpt_path=last)
    whole = [f"step={number}.ckpt" for number in range(steps - KEPT + 1, steps + 1)]
    assert set(whole) <= {file.path for file in place.striped.ls("")}, [file.path for file in place.striped.ls("")]
    return began[0], [value.numpy() for _, value in sorted(net.state_dict().items())]


def accelerate(place: Place, steps: int) -> tuple[int, list[np.ndarray]]:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    torch.manual_seed(0)
    config = ProjectConfiguration(project_dir=place.path, automatic_checkpoint_naming=True, total_limit=KEPT)
    runs = Accelerator(cpu=True, project_config=config)
    net = torch.nn.Linear(1500, 1000)
    net, optimizer = runs.prepare(net, torch.optim.AdamW(net.parameters()))
    folder = Path(place.path, "checkpoints")
    began = Place("mount", str(folder), f"{place.store}/checkpoints").newest_folder()
    if began:
        runs.load_state(str(folder / f"checkpoint_{began}"))
    for step in range(began + 1, steps + 1):
        runs.backward(net(torch.randn(4, 1500, generator=torch.Generator().manual_seed(step))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        print("saving", step, flush=True)
        config.iteration = step
        shutil.rmtree(folder / f"checkpoint_{step}", ignore_errors=True)  # that of a try that was killed
        runs.save_state()
        place.striped.commit(f"checkpoints/checkpoint_{step}")
        print("saved", step, flush=True)
    left = sorted(os.listdir(folder))
    assert left == [f"checkpoint_{number}" for number in range(steps - KEPT + 1, steps + 1)], left
    return began, [value.numpy() for _, value in sorted(net.state_dict().items())]


def main(client: str, way: str, path: str, store: str, steps: int) -> None:
    place = Place(way, path, store)
    if client in ("trainer", "lightning", "accelerate"):
        began, arrays = globals()[client](place, steps)
    else:
        began, arrays = keeps_an_array(globals()[client](), place, steps)
    digest = hashlib.blake2b()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    print(json.dumps({"began": began, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
