"""Weights that lie quantised in their files, in the layout of transformers and bitsandbytes."""

from __future__ import annotations

from typing import Any

from lowmem.errors import UserError


def stored_settings(config: Any) -> dict[str, Any] | None:
    """What a model's configuration says of bitsandbytes' quantised weights in its files; None: they are plain.

    Args:
        config: of transformers.
    """
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if found is None:
        return None
    settings: dict[str, Any] = dict(found) if isinstance(found, dict) else found.to_dict()
    eight, four = settings.get("load_in_8bit"), settings.get("load_in_4bit")
    return settings if eight or four or settings.get("quant_method") == "bitsandbytes" else None


def prepare(config: Any, wanted: Any, name: str) -> Any:
    """What `from_pretrained` must still be asked for, once it is clear that what is stored is what is wanted.

    Where the files hold quantised weights, their settings in `config` get the parts that are free: the dtype of
    products, the threshold of outliers.

    Args:
        config: of the stored model; changed.
        wanted: transformers' `BitsAndBytesConfig`, or None.
        name: of the model, for messages.

    Raises:
        UserError: the two differ; or one is quantised, and the other not.
    """
    stored = stored_settings(config)
    if stored is None:
        return wanted
    have = _in_words(stored)
    if wanted is None:
        raise UserError(
            f"model.name_or_path: {name}: its weights are quantised ({have}); add `quantization: {{{have}}}` to "
            "strategies, or take the model that it was made of"
        )
    asked = wanted.to_dict()
    want = _in_words(asked)
    if have != want:
        raise UserError(
            f"quantization: {{{want}}}: the weights of {name} are stored as {{{have}}}; write that, or take the model "
            "that it was made of"
        )
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            part.quantization_config = {
                **stored,
                **{key: asked[key] for key in ("bnb_4bit_compute_dtype", "llm_int8_threshold")},
            }
    return None


def _in_words(settings: dict[str, Any]) -> str:
    """Transformers' settings in those of the strategy."""
    if settings.get("load_in_8bit"):
        return "format: int8"
    double = str(bool(settings.get("bnb_4bit_use_double_quant"))).lower()
    return f"format: {settings.get('bnb_4bit_quant_type', 'fp4')}, double_quant: {double}"
