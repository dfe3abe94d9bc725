"""Commands that use a result: evaluate, generate, chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem.cli.common import JsonOption, OverridesArgument, print_json, quiet_bars
from lowmem.errors import UserError

if TYPE_CHECKING:
    from lowmem.answers import Prompt
    from lowmem.loaded import LoadedRun

RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run folder, a checkpoint, an adapter, or a model (folder, GGUF, hub id)."),
]
CheckpointOption = Annotated[
    str | None, typer.Option(metavar="STEP|best|PATH", help="A checkpoint of the run instead of its result.")
]
BaseOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="The base model, where it has moved or was given in memory.")
]
SystemOption = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")]
TemperatureOption = Annotated[float | None, typer.Option(min=0, help="Draw tokens; greedy without it, or at 0.")]
TopPOption = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")]
SeedOption = Annotated[int | None, typer.Option(help="Makes the draw repeatable.")]


def evaluate(
    run: RunArgument,
    overrides: OverridesArgument = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Rows for the loss; else data.eval.")] = None,
    exact_match: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts with reference answers; else data.exact_match.")
    ] = None,
    checkpoint: CheckpointOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Loss, perplexity, token accuracy and exact match on held-out rows."""
    quiet_bars()
    loaded = _load(run, checkpoint, base, overrides or ())
    result = loaded.evaluate(data, exact_match)
    told = _tell(loaded)
    if as_json:
        print_json({"run": run, "weights": loaded.weights, **result, "notices": told})
        return
    perplexity = "beyond 1e300" if result["perplexity"] is None else f"{result['perplexity']:.4g}"
    print(f"weights         {loaded.weights}")
    print(f"data            {result['eval_data']}: {result['eval_rows']:,} rows, {result['eval_tokens']:,} targets")
    print(f"loss            {result['eval_loss']:.4f}")
    print(f"perplexity      {perplexity}")
    print(f"token accuracy  {result['token_accuracy']:.2%}")
    if "exact_match" in result:
        right = round(result["exact_match"] * result["exact_match_rows"])
        print(f"exact match     {right} of {result['exact_match_rows']} ({result['exact_match_data']})")
    print(f"seconds         {result['eval_seconds']:.1f}, exact match apart")


def generate(
    run: RunArgument,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What to answer.")] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts: rows of any known format, or a .txt, one a line.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens after which an answer is cut.", show_default="256")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 8,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    system: SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="The text as it is, without the chat template.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write prompts and answers as JSONL.")] = None,
    checkpoint: CheckpointOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answers to one prompt or to a file of prompts; greedy unless a temperature is given."""
    if (prompt is None) == (file is None):
        raise UserError("generate: there is no prompt; give --prompt TEXT or --file FILE" if file is None else
                        "generate: give --prompt or --file, not both")  # fmt: skip
    if prompt is not None and not prompt.strip():
        raise UserError("generate: the prompt is empty")
    if output is not None and not output.absolute().parent.is_dir():
        raise UserError(f"{output.absolute().parent}: there is no such folder to write to")
    quiet_bars()
    from lowmem.answers import Sampling, shown

    sampling = Sampling.of(temperature, top_p, seed)
    loaded = _load(run, checkpoint, base)
    loaded.require_tokenizer()
    prompts = _prompts(loaded, prompt, file, system, raw)
    answers = loaded.generate(prompts, max_new_tokens, batch_size, sampling)
    _tell(loaded)
    pairs = [{"prompt": shown(p), "answer": answer} for p, answer in zip(prompts, answers, strict=True)]
    if output is not None:
        from lowmem.durable import write_text

        write_text(output, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))
    if as_json:
        print_json(pairs)
    elif output is not None:
        print(output)
    elif file is None:
        print(answers[0])
    else:
        for number, pair in enumerate(pairs, 1):
            print(f"[{number}] {pair['prompt']}\n{pair['answer']}\n")


def chat(
    run: RunArgument,
    system: SystemOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens after which an answer is cut (512; half of a small context).")
    ] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    checkpoint: CheckpointOption = None,
    base: BaseOption = None,
) -> None:
    """Talk to a model; its answers appear as they come. Reads lines from a terminal or from a pipe."""
    quiet_bars()
    from lowmem.answers import Sampling

    sampling = Sampling.of(temperature, top_p, seed)
    loaded = _load(run, checkpoint, base)
    from lowmem.conversation import COMMANDS, Conversation, talk, typed_lines

    conversation = Conversation(loaded, system, max_new_tokens, sampling, _notice)
    _tell(loaded)
    if getattr(loaded.tokenizer, "chat_template", None) is None:
        _notice("the tokenizer has no chat template; messages go in as '### Instruction:' and '### Response:'")
    if sys.stdin.isatty():
        _notice(COMMANDS)
    talk(conversation, typed_lines(sys.stdin), sys.stdout, _notice)


def _load(run: str, checkpoint: str | None, base: str | None, overrides: Any = ()) -> LoadedRun:
    from lowmem.loaded import load_run

    return load_run(run, checkpoint, base, overrides)


def _prompts(loaded: LoadedRun, prompt: str | None, file: str | None, system: str | None, raw: bool) -> list[Prompt]:
    from lowmem.prompts import read_prompts, typed, with_system

    chat = not raw and getattr(loaded.tokenizer, "chat_template", None) is not None
    if raw and file is not None and not file.lower().endswith(".txt"):
        raise UserError("--raw: has no effect on rows of a data file; it is for --prompt and .txt files")
    prompts = [typed(prompt, chat)] if prompt is not None else read_prompts(str(file), loaded.recipe.data, chat)
    return prompts if system is None else [with_system(one, system) for one in prompts]


def _tell(loaded: LoadedRun) -> list[str]:
    """Notices go where they do not mix with results."""
    for text in loaded.notices:
        _notice(text)
    return loaded.notices


def _notice(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
