"""All knowledge of how a Hugging Face model and its tokenizer are loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from lowmem.config import LoadConfig, ModelConfig
from lowmem.embeddings import add_rows_for
from lowmem.errors import UserError
from lowmem.sharded import is_part
from lowmem.stored_quantization import prepare

# what a tokenizer leaves in a folder
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt")


def load_model(load: LoadConfig) -> nn.Module:
    """The model a `LoadConfig` describes, on its device.

    Raises:
        UserError: it is neither a folder, nor a GGUF file, nor to be had from the hub; or its weights are stored
            quantised, and not as `load` asks for.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    assert load.model is not None
    options: dict[str, Any] = dict(load.from_pretrained)
    if load.attn_implementation:
        options["attn_implementation"] = load.attn_implementation
    if load.one_by_one is not None:
        from lowmem.one_by_one import NotOneByOneError, load_one_by_one

        try:
            with loading_errors(load.model.name_or_path, load.attn_implementation):
                return _grown(load, load_one_by_one(load))
        except NotOneByOneError as error:
            load.one_by_one(f"{load.model.name_or_path}: loaded by transformers alone, from mapped files ({error})")
    name, gguf = place_of_model(load.model)
    if gguf and hasattr(transformers, "GgufConfig"):
        # From 5.24 on transformers keeps the file's blocks packed, in layers that can be neither trained nor saved.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if not gguf:
        prepare(load_model_config(load.model), options.get("quantization_config"), load.model.name_or_path)
    with loading_errors(load.model.name_or_path, load.attn_implementation):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=load.dtype,
            revision=load.model.revision or "main",
            trust_remote_code=load.model.trust_remote_code,
            device_map={"": load.device},
            **gguf,
            **options,
        )
    if gguf:
        _forget_gguf(model)
    return _grown(load, model)


def _grown(load: LoadConfig, model: Any) -> nn.Module:
    """The model with rows for the tokens that are added."""
    assert load.model is not None
    if load.model.add_tokens:
        add_rows_for(model, load_tokenizer(load.model), load.model.add_tokens)
    return model  # type: ignore[no-any-return]


def _forget_gguf(model: Any) -> None:
    """The weights were unpacked; what is left of the file's format would keep transformers from saving the model."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer that lies beside the weights; none where a folder has none (rows of token ids need none)."""
    from transformers import AutoTokenizer

    name, gguf = place_of_model(config)
    if not gguf and Path(name).is_dir() and not any(any(Path(name).glob(p)) for p in _TOKENIZER_FILES):
        for key in ("add_tokens", "chat_template"):
            if getattr(config, key):
                raise UserError(f"model.{key}: {name} has no tokenizer that could take it")
        return None
    with loading_errors(config.name_or_path):
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=config.revision or "main", trust_remote_code=config.trust_remote_code, **gguf
        )
    if config.chat_template is not None:
        tokenizer.chat_template = _template(config.chat_template)
    if config.add_tokens:
        _add_tokens(tokenizer, config.add_tokens)
    return tokenizer


def _add_tokens(tokenizer: Any, tokens: list[str]) -> None:
    known = tokenizer.get_vocab()
    if there := [token for token in tokens if token in known]:
        raise UserError(f"model.add_tokens: {', '.join(there)}: in the tokenizer already; leave out what is there")
    tokenizer.add_tokens(list(tokens), special_tokens=True)


def _template(path_or_text: str) -> str:
    """The text of a chat template, which may lie in a file."""
    if "{" in path_or_text:  # no template goes without, and hardly a path has one
        return path_or_text
    try:
        return Path(path_or_text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        place = Path(path_or_text).absolute()
        raise UserError(f"model.chat_template: neither a Jinja template nor a readable file: {place}") from error


def load_model_config(config: ModelConfig) -> Any:
    """The architecture alone (no weights are read)."""
    from transformers import AutoConfig

    name, gguf = place_of_model(config)
    with loading_errors(config.name_or_path):
        return AutoConfig.from_pretrained(
            name, revision=config.revision or "main", trust_remote_code=config.trust_remote_code, **gguf
        )


def weights_place(config: ModelConfig) -> Path:
    """The folder, or the GGUF file, in which a model's weights lie on this machine; from the hub where they must be.

    Raises:
        UserError: there is no such model.
    """
    name, gguf = place_of_model(config)
    if gguf:
        return Path(name, gguf["gguf_file"])
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    with loading_errors(name):
        return Path(snapshot_download(name, revision=config.revision, allow_patterns=["*.json", "*.safetensors"]))


def model_without_data(config: Any, trust_remote_code: bool = False) -> Any:
    """A causal language model of a configuration, on the meta device."""
    from transformers import AutoModelForCausalLM

    kernel = str(config._attn_implementation)
    if (stand_in := kernel_without_data(kernel)) != kernel:
        config = copy.deepcopy(config)
        config._attn_implementation = stand_in
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if stand_in != kernel:
        model.config._attn_implementation = kernel
    return model


def kernel_without_data(kernel: str) -> str:
    """The attention kernel to build a model with: flash kernels need a package to run, and none without data."""
    return "sdpa" if "flash" in kernel else kernel


def is_gguf(config: ModelConfig) -> bool:
    """Whether the name leads to a GGUF file."""
    return "gguf_file" in place_of_model(config)[1]


def place_of_model(config: ModelConfig) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` wants: a name, and for a GGUF file its folder and file name."""
    from lowmem.fetch import resolve_model

    path = Path(resolve_model(config.name_or_path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"model.name_or_path: there is no file {path.absolute()}")
        return str(path.parent), {"gguf_file": path.name}
    return str(path) if path.exists() else config.name_or_path, {}


@contextmanager
def loading_errors(name: str, attention: str | None = None) -> Iterator[None]:
    """The long errors of loading as one line."""
    try:
        yield
    except (ImportError, ValueError) as error:
        text = str(error).splitlines()[0]
        if attention and "att" in text.lower():  # a kernel that is unknown, or not there on this machine
            raise UserError(
                f"model.attn_implementation: {attention}: {text}; use sdpa or eager, or leave it out"
            ) from error
        raise UserError(f"model.name_or_path: {name}: {text}") from error
    except SafetensorError as error:
        raise UserError(f"model.name_or_path: {name}: a file of weights is damaged ({error})") from error
    except OSError as error:
        if Path(name).exists():
            raise UserError(f"model.name_or_path: {name}: {str(error).splitlines()[0]}") from error
        raise UserError(
            f"model.name_or_path: {name} is no local folder or file ({Path(name).absolute()}), and the hub does not "
            "give it: check the spelling and the connection, and for a gated model log in with `hf auth login`"
        ) from error


def raise_trainable_dtype(model: nn.Module, dtype: str | None) -> None:
    """Raise 16-bit trainable weights to `dtype`, so that small updates are not rounded away.

    Args:
        model: changed in place; frozen weights keep their dtype.
        dtype: `float32`, or null to leave all weights alone.
    """
    if dtype is None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            raised = parameter.detach().to(getattr(torch, dtype))
            if is_part(parameter):  # its data cannot be replaced
                torch.utils.swap_tensors(parameter, nn.Parameter(raised))  # type: ignore[no-untyped-call]
            else:
                parameter.data = raised
