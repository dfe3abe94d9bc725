"""lm-evaluation-harness on a run folder: `python -m lowmem.lm_eval --model_args run=out/quickstart --tasks ...`.

The harness's own loader knows neither a quantised base under an adapter nor the precision of training. This model is
its `hf` model around the one that `lowmem.load_run` gives.
"""

from __future__ import annotations

import sys
from typing import Any

from lowmem.answers import stop_tokens
from lowmem.errors import UserError
from lowmem.loaded import load_run

try:
    from lm_eval.api.registry import register_model  # type: ignore[import-untyped, import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped, import-not-found]
except ImportError as error:
    raise UserError(f"lm-evaluation-harness is not installed ({error}); pip install 'lowmem[eval]'") from error
except AttributeError as error:  # an old one asks transformers 5 for classes that it no longer has
    raise UserError(f"this lm-evaluation-harness is too old ({error}); pip install -U 'lowmem[eval]'") from error


@register_model("lowmem")  # type: ignore[untyped-decorator]
class LowmemLM(HFLM):  # type: ignore[misc]
    """The model of a run, as lm-evaluation-harness wants it.

    Args:
        run: whatever `lowmem.load_run` takes.
        checkpoint: of a run folder: the step, `best`, or a folder.
        base: the base model, where it has moved or was given in memory.
        options: those of the harness's `hf` model that do not say how a model is loaded (`batch_size`, `max_length`,
            `add_bos_token`, ...).
    """

    def __init__(self, run: str, checkpoint: str | int | None = None, base: str | None = None, **options: Any) -> None:
        without_effect = {"pretrained", "peft", "dtype", "revision", "tokenizer", "gguf_file", "mixed_precision_dtype"}
        if wrong := sorted(without_effect & options.keys()):
            raise UserError(f"model_args: {wrong[0]} has no effect beside run; the run says it")
        self.loaded = load_run(run, checkpoint, base)
        self.loaded.require_tokenizer()
        for notice in self.loaded.notices:
            print(f"note: {notice}", file=sys.stderr)
        super().__init__(pretrained=self.loaded.model, tokenizer=self.loaded.tokenizer, **options)

    def _model_call(self, *arguments: Any, **options: Any) -> Any:
        with self.loaded.inference():
            return super()._model_call(*arguments, **options)

    def _model_generate(self, *arguments: Any, **options: Any) -> Any:
        # The harness would go by the model's config alone, where a tokenizer may name another end of an answer.
        options.setdefault("eos_token_id", stop_tokens(self.loaded.model, self.loaded.tokenizer))
        with self.loaded.inference():
            return super()._model_generate(*arguments, **options)


def main() -> None:
    """The harness's own command line, with `lowmem` as its model where none is named."""
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-untyped, import-not-found]

    named = any(argument.partition("=")[0] in ("--model", "-M") for argument in sys.argv)
    if not named and any(argument.startswith("--model_args") or argument == "-a" for argument in sys.argv):
        sys.argv += ["--model", "lowmem"]
    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
