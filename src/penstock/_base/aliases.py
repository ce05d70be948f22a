"""Second names for arguments: another library's name, or an old one."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from penstock._base.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")

PIPELINE_ALIASES = {
    "loss": "loss_fn",
    "n_microbatches": "microbatches",
    "example_args": "args",
    "example_kwargs": "kwargs",
    # The names before 0.1, until 0.2.
    "chunks": "stages_per_rank",
    "gradient_dtype": "grad_dtype",
    "group_timeout": "pg_timeout",
    "leaves": "leaf_modules",
    "link": "link_cost",
    "lost_after": "heartbeat_timeout",
    "merge": "merge_fn",
    "opens": "split_inside",
    "run": "run_dir",
    "share_loss": "broadcast_loss",
    "split": "split_fn",
    "whole_batch": "full_batch",
}
"""The second names of arguments of `pipeline`, `inspect` and `verify`."""

_PEERS = {
    "pass args=, a whole batch": "mb_args input_args example_inputs sample_input",
    "pass balance='parameters', 'layers' or 'type:Block'": "partition_method",
    "pass batch_dims={'args': ...}": "args_chunk_spec",
    "pass batch_dims={'kwargs': ...}": "kwargs_chunk_spec",
    "pass batch_dims={'output': ...}, or merge_fn=": "output_merge_spec",
    "pass stages_per_rank=": "num_model_chunks virtual_pipeline_model_parallel_size vp_size vpp num_virtual_stages "
    "interleave",
    "pass stages_per_rank=, layers / (ranks * layers per stage)": "num_layers_per_virtual_pipeline_stage",
    "pass cuts=['blocks.5'], the modules at which stages begin": "split_spec split_points split_policy split_rule "
    "pipeline_parallel_split_points module_fqns_per_model_part pp_split_points",
    "pass kwargs=, a whole batch": "mb_kwargs",
    "pass loss_fn=": "criterion loss_function loss_func objective",
    "pass microbatches=": "gradient_accumulation_steps accumulate_grad_batches accumulation_steps num_chunks "
    "pipeline_nmicros number_of_microbatches",
    "pass microbatches=, samples per batch / samples per microbatch": "micro_batch_size train_micro_batch_size_per_gpu "
    "mbs pipeline_parallel_microbatch_size",
    "pass outputs= to step()": "return_outputs gather_output",
    "pass ranks=": "pp pp_size pp_degree pipeline_parallel_size pipeline_model_parallel_size world_size nproc_per_node "
    "pipeline_parallel_degree num_gpus",
    "pass ranks=, and stages_per_rank= for several stages per rank": "num_stages n_stages stages pipeline_nstages",
    "pass schedule='zb-h1' or 'zb-v'": "enable_zero_bubble use_zbv",
    "omit it: call step() under torch.autocast": "precision fp16 amp mixed_precision",
    "pass mesh=, a DeviceMesh with a dimension 'pp'": "group process_group pp_group topology tp_size",
    "pass mesh=, a DeviceMesh with dimensions 'dp' and 'pp'": "replicas num_replicas dp dp_size dp_degree "
    "data_parallel data_parallel_size data_parallel_degree",
    "omit it: messages travel while stages compute, and what was sent is freed": "overlap_p2p_comm batch_p2p_comm "
    "overlap_p2p deallocate_pipeline_outputs",
    "pass seed=": "base_seed random_seed",
    "run `torchrun --nnodes ...` on each machine, see 'Several machines' in the guide": "nnodes",
    "omit it: the schedule has its own warm-up": "num_warmup_microbatches",
    "omit it: shapes may change from step to step": "variable_seq_lengths",
    "pass recompute=": "activation_checkpoint_interval activation_checkpointing gradient_checkpointing "
    "recompute_granularity recompute_method enable_gradient_checkpointing",
    "pass recompute='always', 'except_last' or 'never'": "checkpoint",
    "pass schedule=": "pp_style pipeline_schedule pipeline_parallel_schedule scheduler pp_engine "
    "pipeline_scheduler strategy",
    "pass target= to step()": "labels label y target",
    "read result.losses, the microbatches' own": "losses",
    "omit it: gradients are those of the whole batch's loss": "scale_grads",
    "omit it: batches have their size; pass microbatches=, the number of their pieces": "batch_size global_batch_size "
    "train_batch_size local_batch_size per_device_train_batch_size gbs",
    "omit it: optimizers are yours, made from pipe.parameters()": "optimizer",
    "make a penstock.GradScaler(pipe), and pass loss_scale= to step()": "grad_scaler",
    "call clip_grad_norm_ after step()": "gradient_clipping gradient_clip_val max_grad_norm clip_grad clip_grad_norm",
    "call evaluate(*inputs) or predict(*inputs)": "forward_only eval_batch inference_batch validation_step",
    "call step(*inputs, target=...), forward and backward of a whole batch": "train_batch forward_backward "
    "forward_backward_func forward_backward_no_pipelining forward_step execute_pipeline run_schedule backward "
    "training_step data_iter fit",
    "call step(*inputs, target=...) to train, predict(*inputs) for outputs": "forward __call__",
    "call penstock.checkpoint.save and penstock.checkpoint.load": "save_checkpoint load_checkpoint save load",
    "call the optimizer's zero_grad()": "zero_grad",
    "pass model= to pipeline(), and use pipe.model later": "module submod get_stage_module split_gm modules "
    "named_modules children",
    "use pipe.stages": "is_first_stage is_last_stage stage_index stage_id",
    "call penstock.cut() in the forward, or pass cuts=": "pipe_split",
    "call penstock.pipeline(model, args, ...), which takes the model as it is": "PipelineModule PipelineStage "
    "LayerSpec TiedLayerSpec build_stage Pipe GPipe initialize PipelineEngine",
    "set it before you call penstock.pipeline": "cuda to half bfloat16 double float requires_grad_ apply compile",
}
"""Remedies for options and methods of other libraries: torch.distributed.pipelining, torchgpipe,
FairScale, DeepSpeed, Megatron-LM, NeMo, Lightning, Accelerate, ColossalAI, torchtitan and nnScaler."""

_SCHEDULES = {
    "'1f1b'": "1f1b one_forward_one_backward train pipedream_flush dapple "
    "forward_backward_pipelining_without_interleaving",
    "'1f1b', which has no stale weights": "pipedream pipedream_2bw",
    "'dualpipe-v'": "dualpipe_v",
    "'gpipe'": "gpipe fill_drain f_then_b all_forward_all_backward",
    "'interleaved-1f1b'": "interleaved interleaved_1f1b 1f1b_interleaved vpp "
    "forward_backward_pipelining_with_interleaving",
    "'looped-bfs'": "looped_bfs breadth_first",
    "'naive'": "sequential",
    "'zb-h1'": "zero_bubble zb1p zbpp",
    "'zb-v'": "zbv_zero_bubble zero_bubble_v_pipe_scheduler zbv zbvpp",
    "penstock.schedule.read_csv('order.csv')": "interleaved_zero_bubble",
}
"""Arguments for schedules of other libraries and papers, without "schedule" around their names."""


def _normalize(name: str) -> str:
    """Normalize a name: drop case, hyphens and underscores."""
    return re.sub("[^a-z0-9]", "", name.lower())


def _index_by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {_normalize(name): remedy for remedy, names in table.items() for name in names.split()}


_PEER_REMEDIES, _PEER_SCHEDULES = _index_by_name(_PEERS), _index_by_name(_SCHEDULES)


def peer_remedy(name: str) -> str:
    """Return the remedy for an option or a method of another library; empty if it is unknown."""
    return _PEER_REMEDIES.get(_normalize(name), "")


def schedule_of_peer(name: str) -> str | None:
    """Return the argument for a schedule of another library, as code; None if it is unknown."""
    return _PEER_SCHEDULES.get(_normalize(name).removeprefix("schedule").removesuffix("schedule"))


def suggest_argument(name: str, names: Iterable[str], aliases: Mapping[str, str] = {}) -> str:
    """Return the end of a message about an unknown argument: the remedy, or which of `names` it resembles."""
    if remedy := peer_remedy(name):
        return f"; {remedy}"
    close = difflib.get_close_matches(name, [*names], n=1, cutoff=0.7)
    return f"; did you mean {aliases.get(close[0], close[0])}=?" if close else ""


def accept_aliases(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function accept arguments by a second name: `accept_aliases(loss="loss_fn")` makes `loss=` mean `loss_fn=`.

    The function raises ArgumentError if both are passed, and TypeError for an unknown name, with the
    nearest known one.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        aliases = {alias: name for alias, name in names.items() if takes_any or name in parameters}
        accepted = [*parameters, *aliases]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            arguments: dict[str, Any] = kwargs
            for name in () if takes_any else arguments.keys() - set(accepted):
                raise TypeError(
                    f"{function.__name__}() has no argument {name}={suggest_argument(name, accepted, aliases)}"
                )
            for alias in aliases.keys() & arguments.keys():
                name = aliases[alias]
                if name in arguments:
                    raise ArgumentError(f"{alias}= and {name}= are one argument by two names: pass one of them")
                arguments[name] = arguments.pop(alias)
            return function(*args, **kwargs)

        return call

    return decorate


def accept_old_names(**names: str) -> Callable[[type[T]], type[T]]:
    """Let a class have attributes, and arguments of its constructor, by their old names, too (until 0.2)."""

    def decorate(cls: type[T]) -> type[T]:
        for old, name in names.items():
            setattr(cls, old, property(attrgetter(name), doc=f"Former name of `{name}`, until 0.2."))
        original = cls.__init__

        @wraps(original)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            for old in names.keys() & kwargs.keys():
                kwargs[names[old]] = kwargs.pop(old)  # `dataclasses.replace` passes the new name, too
            original(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[method-assign, assignment]
        return cls

    return decorate
