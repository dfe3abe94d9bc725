"""The result of a run in the format that another program reads: peft, transformers, or GGUF."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import torch

from lowmem.base_weights import SafetensorsWeights
from lowmem.config import LoadConfig, ModelConfig
from lowmem.errors import UserError
from lowmem.fetch import WEIGHTS
from lowmem.gguf_layout import Layout
from lowmem.gguf_writer import Quantization, write_gguf
from lowmem.loading import is_gguf, load_model, load_model_config, load_tokenizer, weights_place
from lowmem.merge import Base, Dtype, base_config, merge, trained_weights
from lowmem.probe import compare, fits, logits, plain_model, probe_ids, release
from lowmem.rebuild import given_in_memory
from lowmem.run_folder import RunFolder, load_tokenizer_of
from lowmem.shards import ShardWriter, require_space, whole_or_nothing
from lowmem.strategy import Stage

Format = Literal["peft", "transformers", "gguf"]
_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
_TEXTS = ("Hello, world!", "  1234 + 5.6 = ?\n\n\tif x:", "Grüße, 世界 🙂", "<|im_start|>user\nWhy?")
_EXACT = 1e-4  # share of the largest logit that float32 files may differ by


def export(
    run: str | Path | RunFolder,
    out: str | Path,
    format: Format,
    *,
    dtype: Dtype = "auto",
    quantization: Quantization = "f16",
    base: Base | None = None,
    checkpoint: str | Path | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Write the result of a run for another program.

    Args:
        run: a run folder.
        out: a folder to be made, or for gguf a file (`.gguf`); it appears whole or not at all.
        format: `peft` (an adapter with its tokenizer), `transformers` (a whole model, merged where there is an
            adapter), `gguf` (the same in one file, for llama.cpp and its kin).
        dtype: of a transformers model; `auto` keeps what is there.
        quantization: of a GGUF file's matrices.
        base: as in `merge`.
        checkpoint: a step, `best`, or a checkpoint's name or folder, in place of the result.
        check: load what was written, and compare its logits (and a GGUF file's tokens).

    Returns:
        out, format, bytes, check (numbers, or null), notices, seconds.

    Raises:
        UserError: `out` exists, the format does not fit the run or the model, the disk is too small.
    """
    start = time.perf_counter()
    run_folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
    place = Path(out).expanduser()
    if format == "peft":
        result = _export_adapter(run_folder, place, checkpoint)
    elif format == "transformers":
        result = _export_model(run_folder, place, dtype, base, checkpoint, check)
    else:
        result = _export_gguf(run_folder, place, quantization, base, checkpoint, check)
    return {"out": str(place), "format": format, **result, "seconds": time.perf_counter() - start}


def _export_adapter(run_folder: RunFolder, place: Path, checkpoint: str | Path | None) -> dict[str, Any]:
    source, notices = trained_weights(run_folder, checkpoint)
    if not (source / "adapter_config.json").is_file():
        raise UserError(f"export: {source.absolute()} is a whole model, no adapter; use --format transformers or gguf")
    model = run_folder.recipe.model
    with whole_or_nothing(place) as folder:
        folder.mkdir()
        shutil.copyfile(source / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        config = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
        if given_in_memory(model):
            notices.append("base model: it was given in memory; write its name into adapter_config.json")
        else:
            known = WEIGHTS.get(model.name_or_path)
            config["base_model_name_or_path"] = known.hub_id if known else model.name_or_path
            config["revision"] = model.revision
            notices.append(f"base model: {config['base_model_name_or_path']}")
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
        tokenizer = load_tokenizer_of(run_folder.path / "model", run_folder.recipe)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        size = (folder / "adapter_model.safetensors").stat().st_size
    if below := [s.name for s in run_folder.recipe.strategies if s.stage < Stage.ADAPT]:
        notices.append(f"the adapter was trained on a base changed by {' and '.join(below)}: load the base in that way")
    return {"bytes": size, "check": None, "notices": notices}


def _export_model(
    run_folder: RunFolder, place: Path, dtype: Dtype, base: Base | None, checkpoint: str | Path | None, check: bool
) -> dict[str, Any]:
    source, notices = trained_weights(run_folder, checkpoint)
    if (source / "adapter_config.json").is_file():
        report = merge(run_folder, place, base=base, dtype=dtype, checkpoint=checkpoint, probe=check)
        return {"bytes": report["bytes"], "check": report["probe"], "notices": report["notices"]}
    _refuse_base(base)
    with whole_or_nothing(place) as folder:
        require_space(place, sum(file.stat().st_size for file in source.glob("*.safetensors")) * 2)
        folder.mkdir()
        size = _copy_model(source, folder, None if dtype == "auto" else getattr(torch, dtype))
        _save_tokenizer(run_folder, folder)
        result = None
        if check and fits(source, notices):
            model = plain_model(source)
            ids = probe_ids(model)
            expected = logits(model, ids)
            del model
            release()
            result = compare(expected, logits(plain_model(folder), ids))
    return {"bytes": size, "check": result, "notices": notices}


def _copy_model(source: Path, folder: Path, dtype: torch.dtype | None) -> int:
    """A whole model, tensor by tensor, in another dtype where one is given."""
    from transformers import AutoConfig

    weights = SafetensorsWeights(source, [], "", None)
    writer = ShardWriter(folder, weights.extra)
    for key in weights.extra:
        tensor = weights.read(key)
        writer.add(key, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
    writer.close()
    config = AutoConfig.from_pretrained(source)
    config.dtype = dtype or config.dtype
    config.save_pretrained(folder)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    return writer.total_bytes


def _export_gguf(
    run_folder: RunFolder,
    place: Path,
    quantization: Quantization,
    base: Base | None,
    checkpoint: str | Path | None,
    check: bool,
) -> dict[str, Any]:
    if place.suffix != ".gguf":
        raise UserError(f"export: {place}: a GGUF model is one file; give a name that ends with .gguf")
    (source, notices), recipe = trained_weights(run_folder, checkpoint), run_folder.recipe
    is_adapter = (source / "adapter_config.json").is_file()
    config = base_config(run_folder) if is_adapter else load_model_config(ModelConfig(str(source)))
    Layout(config)  # refuses before any work
    tokenizer = load_tokenizer_of(run_folder.path / "model", recipe)
    if tokenizer is None:
        raise UserError(f"export: {run_folder.path} has no tokenizer, and a GGUF file needs one")
    origin = weights_place(recipe.model) if is_gguf(recipe.model) else None
    with whole_or_nothing(place) as partial:
        work = partial.with_name(f"{partial.name}.merged")
        try:
            if is_adapter:
                report = merge(run_folder, work, base=base, dtype="float32", checkpoint=checkpoint, probe=False)
                notices = report["notices"]
                source = work
            else:
                _refuse_base(base)
            require_space(
                place, int(sum(f.stat().st_size for f in source.glob("*.safetensors")) * _BYTES[quantization] / 2)
            )
            notices += write_gguf(source, partial, quantization, tokenizer, run_folder.path.name, origin)
            result = _check_gguf(source, partial, tokenizer, quantization, notices) if check else None
        finally:
            shutil.rmtree(work, ignore_errors=True)
        size = partial.stat().st_size
    return {"bytes": size, "check": result, "notices": notices}


def _check_gguf(
    source: Path, written: Path, tokenizer: Any, quantization: Quantization, notices: list[str]
) -> dict[str, Any] | None:
    """Read a GGUF file back with transformers: logits beside those of its source, tokens of a few texts."""
    if not fits(source, notices, factor=2):  # read back in float32
        return None
    named = written.with_name(f"{written.name}.check.gguf")  # transformers goes by the suffix
    named.hardlink_to(written)
    try:
        back = _tokenizer_back(named, notices)
        model = load_model(LoadConfig(ModelConfig(str(named)), dtype="float32")).eval()
        ids = probe_ids(model)
        found = logits(model, ids)
        del model
        release()
    finally:
        named.unlink()
    plain = load_model(LoadConfig(ModelConfig(str(source)), dtype="float32")).eval()
    result: dict[str, Any] = {**compare(logits(plain, ids), found)}
    if back is not None:
        result["same_tokens"] = all(
            back(text, add_special_tokens=False)["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in _TEXTS
        )
    if not result.get("same_tokens", True):
        notices.append("gguf: read back by transformers, the tokenizer cuts some texts in another way than before")
    if quantization == "f32" and result["largest_logit_difference"] > _EXACT * result["largest_logit"]:
        raise UserError(
            f"export: read back, the logits differ by {result['largest_logit_difference']:.2g}; nothing was written"
        )
    return result


def _tokenizer_back(written: Path, notices: list[str]) -> Any:
    """The tokenizer of a GGUF file; null, with a notice, where transformers cannot read it (5.13, without BOS)."""
    try:
        return load_tokenizer(ModelConfig(str(written)))
    except AttributeError as error:
        notices.append(f"gguf: these transformers cannot read the tokenizer back ({error}), so it was not compared")
        return None


def _refuse_base(base: Base | None) -> None:
    if base is not None:
        raise UserError("export: --base has no effect: the run trained a whole model, there is no adapter")


def _save_tokenizer(run_folder: RunFolder, folder: Path) -> None:
    tokenizer = load_tokenizer_of(run_folder.path / "model", run_folder.recipe)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
