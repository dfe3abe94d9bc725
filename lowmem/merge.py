"""Adds an adapter to its base model, one layer at a time, and writes a plain model in transformers' format."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowmem.adapter_layers import AdapterLayers
from lowmem.base_weights import Weights, open_weights
from lowmem.config import LoadConfig
from lowmem.embeddings import embedding_names, extend_rows
from lowmem.errors import UserError
from lowmem.loading import load_model_config, model_without_data, weights_place
from lowmem.model import blocks, linears
from lowmem.probe import probe_merge
from lowmem.run import Run, pick_device
from lowmem.run_folder import RunFolder, load_tokenizer_of
from lowmem.shards import ShardWriter, require_space, whole_or_nothing
from lowmem.strategy import Stage, Strategy, resolve, traits
from lowmem.weights import vocabulary_rows

Base = Literal["dequantised", "original"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def merge(
    run: str | Path | RunFolder,
    out: str | Path,
    *,
    base: Base | None = None,
    dtype: Dtype = "auto",
    checkpoint: str | Path | None = None,
    probe: bool = True,
    shard_bytes: int = 5_000_000_000,
) -> dict[str, Any]:
    """Write base + adapter as a model that transformers loads without peft.

    In memory at once: one decoder layer (where the base was quantised) or one weight, in float32 while the adapter is
    added; then, for the probe, the model it looks at.

    Args:
        run: a run folder that holds an adapter.
        out: the folder to be made; it appears whole or not at all.
        base: the weights the adapter is added to. `dequantised`: as training saw them, each quantised weight rounded as
            it was then. `original`: as they lie on disk. By default what training saw.
        dtype: of the weights written; `auto` is the dtype in which the base was loaded.
        checkpoint: a step, `best`, or a checkpoint's name or folder, in place of the result.
        probe: load what was trained and what was written, one after the other, and compare their logits.
        shard_bytes: largest file of weights.

    Returns:
        out, base, dtype, bytes, tied_embeddings, notices, seconds; and of the probe, or null:
        probe.largest_logit_difference, probe.largest_logit, probe.same_top_token (share of positions).

    Raises:
        UserError: nothing to merge, `out` exists, the disk is too small, or the adapter belongs to another model.
    """
    start = time.perf_counter()
    job = _Job(run if isinstance(run, RunFolder) else RunFolder.open(run), base, dtype, checkpoint)
    place = Path(out).expanduser()
    with whole_or_nothing(place) as folder:
        require_space(place, job.num_bytes)
        folder.mkdir()
        writer = ShardWriter(folder, job.output_keys, shard_bytes)
        for name, tensor in job.tensors():
            writer.add(name, tensor)
        writer.close()
        job.save_beside(folder)
        result = probe_merge(job.run_folder, job.adapter, folder, job.notices) if probe else None
    return {
        "out": str(place),
        "base": job.base,
        "dtype": str(job.dtype).removeprefix("torch."),
        "bytes": writer.total_bytes,
        "tied_embeddings": bool(job.config.tie_word_embeddings),
        "probe": result,
        "notices": job.notices,
        "seconds": time.perf_counter() - start,
    }


class _Job:
    """What one merge needs to know."""

    def __init__(self, run_folder: RunFolder, base: Base | None, dtype: Dtype, checkpoint: str | Path | None) -> None:
        self.run_folder = run_folder
        self.adapter, self.notices = trained_weights(run_folder, checkpoint)
        if not (self.adapter / "adapter_config.json").is_file():
            raise UserError(
                f"merge: {self.adapter.absolute()} is a whole model, there is no adapter to merge; `lowmem export "
                f"{run_folder.path} OUT --format transformers` (or gguf) writes it elsewhere"
            )
        recipe = run_folder.recipe
        strategies = resolve(recipe.strategies)
        # the base is made on the device it was trained on: quantisation rounds a little differently elsewhere
        self.run = Run(recipe.training, pick_device(0), traits(strategies)[0])
        self.load = LoadConfig.of(recipe.model, self.run.device)
        for strategy in strategies:
            if strategy.stage is not Stage.ADAPT:  # the adapter is read; one that training began with may have gone
                self.load = strategy.configure(self.load, self.run)
        self.below = [s for s in strategies if s.stage < Stage.ADAPT]
        if base == "dequantised" and not self.below:
            raise UserError("merge: --base dequantised: the base of this run was not quantised; leave it out")
        self.base: Base = base or ("dequantised" if self.below else "original")
        if self.base == "original" and self.below:
            names = " and ".join(s.name for s in self.below)
            self.notices.append(f"merged into the original weights; the adapter was trained on those of {names}")
        self._open_model(recipe.model.trust_remote_code)
        loaded = self.weights.dtype if self.load.dtype == "auto" else getattr(torch, self.load.dtype)
        self.load_dtype: torch.dtype = loaded
        self.dtype: torch.dtype = loaded if dtype == "auto" else getattr(torch, dtype)
        self._block: tuple[int, dict[str, Tensor]] = (-1, {})

    def _open_model(self, trust_remote_code: bool) -> None:
        assert self.load.model is not None
        self.config = base_config(self.run_folder)
        plain = model_without_data(self.config, trust_remote_code)
        self.rows = vocabulary_rows(plain, self.adapter)
        self.config.get_text_config().vocab_size = self.rows
        self.model = model_without_data(self.config, trust_remote_code)
        named = self.model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self.tied = {name: first[id(t)] for name, t in named.items() if first.setdefault(id(t), name) != name}
        self.ends = {f"{end}.{kind}" for end in embedding_names(self.model) for kind in ("weight", "bias")}
        paths = {id(module): path for path, module in self.model.named_modules()}
        self.blocks = [f"{paths[id(block)]}." for block in blocks(self.model)]
        self.layers = AdapterLayers(model_without_data(self.config, trust_remote_code), self.adapter)
        self.rounded = {f"{name}.weight" for name in linears(self.model)} if self.base == "dequantised" else set()
        needed = {self.tied.get(name, name) for name in self.layers.changed | self.rounded}
        self.weights: Weights
        self.weights, notice = open_weights(self.load, plain, needed, self.tied)
        self.notices += [notice] if notice else []
        if self.weights.as_trained and self.base == "original":
            raise UserError(
                "merge: --base original: the base model was quantised before the run; it has no other weights"
            )
        self.names = list(named)

    @property
    def num_bytes(self) -> int:
        """Bytes the output will have at most."""
        size = (
            torch.empty((), dtype=self.dtype).element_size() / torch.empty((), dtype=self.weights.dtype).element_size()
        )
        return int(self.weights.num_bytes * size) + 2 * self.rows * int(self.config.get_text_config().hidden_size) * 4

    @property
    def output_keys(self) -> list[str]:
        """All keys that may be written."""
        return [*map(self.weights.output_key, self.names), *self.weights.extra]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Keys and tensors of the output, block by block."""
        for name in sorted(self.names, key=self._block_of):
            if name in self.tied:
                yield from self._untied(name)
            elif name in self.layers.changed or name in self.weights.keys:
                yield self.weights.output_key(name), self._final(name)
        for key in self.weights.extra:
            yield key, self._cast(self.weights.read(key))

    def _untied(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """A weight that was one with another in the base model, where training has made it differ."""
        if name not in self.weights.keys and not {name, self.tied[name]} & self.layers.changed:
            return
        own = self._final(name)
        if torch.equal(own, self._final(self.tied[name])):
            return
        self.config.tie_word_embeddings = self.config.get_text_config().tie_word_embeddings = False
        self.notices.append(
            f"{name} and {self.tied[name]} shared one tensor and differ now; tie_word_embeddings: false"
        )
        yield self.weights.output_key(name), own

    def _final(self, name: str) -> Tensor:
        return self._cast(self.layers.merged(name, self._base) if name in self.layers.changed else self._base(name))

    def _base(self, name: str) -> Tensor:
        """A weight as the adapter meets it."""
        if name in self.rounded and self.weights.as_trained:
            return self.weights.read(self.weights.keys[name])
        if name in self.rounded:
            number = self._block_of(name)
            if self._block[0] != number:
                self._block = (-1, {})  # the last one goes before the next one comes
                self._block = (number, self._as_trained(number))
            if name in self._block[1]:
                return self._block[1][name]
        return self._as_loaded(name)

    def _as_loaded(self, name: str) -> Tensor:
        tensor = self.weights.read(self.weights.keys.get(name) or self.weights.keys[self.tied[name]])
        tensor = tensor.to(self.load_dtype) if tensor.is_floating_point() else tensor
        return extend_rows(tensor, self.rows) if name in self.ends else tensor

    def _as_trained(self, number: int) -> dict[str, Tensor]:
        """The weights of one block's linear layers after what the strategies below the adapter did to them."""
        prefix, block = self.blocks[number], blocks(self.model)[number]
        found = _through(self.below, self.run, block, self.config, lambda name: self._as_loaded(prefix + name))
        return {prefix + name: weight for name, weight in found.items()}

    def _block_of(self, name: str) -> int:
        return next((i for i, prefix in enumerate(self.blocks) if name.startswith(prefix)), -1)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def save_beside(self, folder: Path) -> None:
        """Configuration, generation configuration, tokenizer and its chat template."""
        save_configuration(self.config, self.model, self.dtype, weights_place(self.load.model), folder)  # type: ignore[arg-type]
        tokenizer = load_tokenizer_of(self.run_folder.path / "model", self.run_folder.recipe)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def trained_weights(run_folder: RunFolder, checkpoint: str | int | Path | None) -> tuple[Path, list[str]]:
    """The folder of a run's weights (a whole model's, or an adapter's), and what the user should know of them.

    Raises:
        UserError: as `RunFolder.weights`.
    """
    folder, notice = run_folder.weights(checkpoint)
    notices = [notice] if notice else []
    averages = [s.name for s in run_folder.recipe.strategies if s.stage is Stage.AVERAGE]
    if averages and (folder / "trainer.json").is_file():
        notices.append(f"{folder.name} is a checkpoint: its weights are those in training, without {averages[0]}")
    return folder, notices


def base_config(run_folder: RunFolder) -> Any:
    """The configuration of a run's base model.

    Raises:
        UserError: it cannot be had; the message says where another place is written.
    """
    try:
        return load_model_config(run_folder.recipe.model)
    except UserError as error:
        raise UserError(
            f"{error}; where the base model has moved, or was given in memory, write its place into "
            f"model.name_or_path of {(run_folder.path / 'recipe.yaml').absolute()}"
        ) from error


def save_configuration(config: Any, model: Any, dtype: torch.dtype, base: Path, folder: Path) -> None:
    """`config.json` and `generation_config.json` of a model without quantised weights."""
    from transformers import GenerationConfig

    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if (base / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(base).save_pretrained(folder)
    elif getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _through(
    strategies: list[Strategy], run: Run, block: nn.Module, config: Any, read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Let strategies change the linear layers of a decoder layer, and take the weights that they compute with.

    Args:
        strategies: those below the adapter.
        run: what they are told of the run.
        block: the layer, on the meta device.
        config: of its model.
        read: gives a weight by its name in the layer.

    Returns:
        Name in the layer -> weight, on the CPU, in the layout of the layer.
    """
    from peft.utils.integrations import dequantize_module_weight

    names = {name: type(module).__name__ for name, module in linears(_holder(block, config)).items()}
    inner = {name.removeprefix("layers.0."): kind for name, kind in names.items()}
    filled = copy.deepcopy(block)
    for path, module in filled.named_modules():
        for key, value in module._parameters.items():
            if value is not None:  # what is no linear layer stays empty
                full = read(f"{path}.{key}") if path in inner else torch.empty(0)
                module._parameters[key] = nn.Parameter(full, requires_grad=False)
    holder: nn.Module = _holder(filled, config)
    for strategy in strategies:
        holder = strategy.wrap_model(holder, run)
    found = {}
    for path, kind in inner.items():
        weight = dequantize_module_weight(filled.get_submodule(path)).detach()
        found[f"{path}.weight"] = (weight.T if kind == "Conv1D" else weight).cpu()
    return found


def _holder(block: nn.Module, config: Any) -> nn.Module:
    """A model of one decoder layer."""
    holder = nn.Module()
    holder.config = config
    holder.layers = nn.ModuleList([block])
    return holder
