"""What the blocks of Python in the documents take for granted: a model, a batch, a pipeline, by the names they use."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.integrations.loggers import StepLogger

WIDTH, ROWS = 6, 8


class MyModel(nn.Module):
    """As many blocks as the documents' examples name."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10)))

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        result: Tensor = self.blocks(x)
        return result if table is None else result + table


class Logits(nn.Module):
    """Of the batch in dimension 1, with a state, a table for all, and an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor], *, table: Tensor) -> dict[str, Tensor]:
        found, _ = self.inner(x, state[0] + state[1])
        return {"logits": self.outer(found) + table, "auxiliary": found.square().mean()}


class OwnLoss(nn.Module):
    """As the models of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.table(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Pooled(nn.Module):
    """Sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.two(self.one(ids).mean(1))
        return result


def mean_of_logits(output: Any, target: Tensor) -> Tensor:
    result: Tensor = output["logits"].square().mean() + output["auxiliary"]
    return result


def padded(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, WIDTH)


class World(dict[str, Any]):
    """Makes each thing when a block first names it."""

    def __init__(self, block: str, folder: Path) -> None:
        super().__init__(torch=torch, penstock=penstock, MyModel=MyModel)
        self.folder = folder
        own = next((things for phrase, things in OF_BLOCKS.items() if phrase in block), {})
        self._things = USUAL | own

    def __missing__(self, name: str) -> Any:
        made = self._things[name](self)
        self[name] = made
        return made

    def names_for(self, code: CodeType) -> dict[str, Any]:
        """The names that the code uses, of those that are known."""
        return {name: self[name] for name in _names(code) if name in self or name in self._things}

    def close(self) -> None:
        """Ends what threads would go on with in another test's folder."""
        for thing in list(self.values()):
            if isinstance(thing, penstock.Pipeline | StepLogger):
                thing.close()


Thing = Callable[[World], Any]


def _saved(world: World) -> str:
    penstock.schedule.write_csv(penstock.schedule.generate("1f1b", 2, 4), world.folder / "dumped_by_torch.csv")
    return "dumped_by_torch.csv"


def _weights(world: World) -> Any:
    (world.folder / "llama").mkdir()
    torch.manual_seed(0)
    save_file(MyModel().state_dict(), world.folder / "llama" / "model.safetensors")
    return penstock.checkpoint


def _language_model(world: World) -> Any:
    llama = import_module("transformers.models.llama")
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 24}
    return llama.LlamaForCausalLM(llama.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2))


def _exported(world: World) -> Any:
    (world.folder / "out").mkdir()
    model = MyModel()
    save_model(model, str(world.folder / "out" / "model.safetensors"))
    return model


def _read_csv(world: World) -> Any:
    _saved(world)
    return penstock.schedule.read_csv


def _llama() -> Any:
    size = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    transformers = import_module("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_hidden_layers=2))


def _on_meta(world: World) -> Any:
    _weights(world)
    with torch.device("meta"):
        model = MyModel()
    model._init_weights = lambda module: module.reset_parameters()  # type: ignore[assignment]
    return model


USUAL: dict[str, Thing] = {
    "model": lambda world: MyModel(),
    "x": lambda world: torch.randn(ROWS, WIDTH),
    "y": lambda world: torch.randn(ROWS, WIDTH),
    "loss_fn": lambda world: mse_loss,
    "loader": lambda world: [(world["x"], world["y"])] * 2,
    "config": lambda world: None,
    "pipe": lambda world: penstock.pipeline(world["model"], (world["x"],), loss=world["loss_fn"], ranks=2),
    "optimizer": lambda world: torch.optim.AdamW(world["pipe"].parameters()),
    "scheduler": lambda world: torch.optim.lr_scheduler.ConstantLR(world["optimizer"]),
    "rate_of": lambda world: lambda name: 1e-3,
    "result": lambda world: world["pipe"].step(world["x"], target=world["y"]),
    "norm": lambda world: 1.0,
    "checkpoint": lambda world: penstock.checkpoint,
    "read_csv": _read_csv,
    "Op": lambda world: penstock.schedule.Op,
    "check": lambda world: penstock.schedule.check,
    "lightning": lambda world: import_module("lightning"),
    "peft": lambda world: import_module("peft"),
    "Block": lambda world: nn.Linear,
}
"""By name."""

_PIECES = [(5, 17), (3, 40), (8, 9)]

OF_BLOCKS: dict[str, dict[str, Thing]] = {
    "output.logits[:, :-1]": {"model": lambda world: _llama(), "ids": lambda world: torch.randint(9, (ROWS, 4))},
    "init_missing=lambda name, module: model._init_weights": {"model": _on_meta},
    "Microbatches(": {
        "model": lambda world: Pooled(),
        "x": lambda world: padded(16, 4),
        "y": lambda world: torch.randn(16, WIDTH),
        **{f"ids_{rows}x{length}": lambda world, sizes=(rows, length): padded(*sizes) for rows, length in _PIECES},
        **{f"y_{rows}x{length}": lambda world, rows=rows: torch.randn(rows, WIDTH) for rows, length in _PIECES},
    },
    '{"input_ids": ids': {"model": lambda world: OwnLoss(), "ids": lambda world: torch.randint(9, (ROWS, 4))},
    "batch_dims=1)": {
        "model": lambda world: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        "x": lambda world: torch.randn(3, ROWS, WIDTH),
    },
    "(x, (h0, c0))": {
        "model": lambda world: Logits(),
        "x": lambda world: torch.randn(3, ROWS, WIDTH),
        "h0": lambda world: torch.randn(1, ROWS, WIDTH),
        "c0": lambda world: torch.randn(1, ROWS, WIDTH),
        "table": lambda world: torch.randn(WIDTH),
        "loss_fn": lambda world: mean_of_logits,
    },
    "def split(": {
        "graphs": lambda world: [torch.randn(WIDTH) for _ in range(ROWS)],
        "collate": lambda world: lambda graphs: (torch.stack(graphs),),
    },
    "load_model(": {"model": _exported},
    "checkpoint.init_from_weights(": {"checkpoint": _weights},
    "PipelineTrainer(": {
        "model": _language_model,
        "data": lambda world: [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 32,
        "held_out": lambda world: world["data"],
        "collate": lambda world: import_module("transformers").default_data_collator,
    },
}
"""Of blocks that want other things by the usual names, by words that the block has."""

ELSEWHERE = {
    '"cuda"': '"cpu"',  # no GPU is wanted,
    'devices=["cuda:0", "cuda:1"]': 'devices="cpu"',
    "torch.float16": "torch.bfloat16",
    "(2, 4)": "(1, 1)",  # and one process is enough
    "lightning.Trainer(": "lightning.Trainer(logger=False, enable_checkpointing=False, accelerator='cpu', ",
}
"""What is replaced in a block, so that it runs anywhere."""


def assert_runs(text: str, folder: Path) -> dict[str, Any]:
    """Runs a block, in `folder`, which raises what is wrong with it, and gives the names that it leaves."""
    for there, here in ELSEWHERE.items():
        text = text.replace(there, here)
    torch.manual_seed(0)
    code = compile(text, "a block", "exec")
    world = World(text, folder)
    names = world.names_for(code)
    try:
        exec(code, names)
    finally:
        world.update(names)
        world.close()
    return names


def _names(code: CodeType) -> Iterator[str]:
    """The global names that are looked up before they are set."""
    known = set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in known:
            yield step.argval
        elif step.opname == "STORE_NAME":
            known.add(step.argval)
        elif isinstance(step.argval, CodeType):
            yield from (name for name in _names(step.argval) if name not in known)
