"""Runs the blocks of a page: Python in one namespace, `lowmem` lines through the command line's own code.

What stands in for what a reader has:

- Every model name in the texts becomes `smollm2`, and that alias leads to a random Llama of two layers with a tokenizer
  of bytes (`$LOWMEM_CACHE` points into the sandbox). No weights are downloaded.
- Data files that pages speak of (`train.jsonl` and so on) lie in the sandbox, and so do the shipped recipes with their
  data, and a finished run at `out/run`, `out/solar`, `out/qlora`.
- `lowmem train` lines are shortened to two steps (three with `--resume`), saved at every step, and run in one process
  (tests/distributed/test_launch.py starts several). They predict no memory, which would take longer than they do
  themselves, and which test_memory_check.py has.
- `lowmem waterfall` of a large model shows a small recipe instead; answers have eight tokens.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from two_processes import once

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```([\w+-]*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELLS = ("", "sh", "bash", "shell", "console")
# blocks that show something and are not meant to be run
SHOWN = ("text", "json", "jsonl", "html", "jinja", "diff", "toml", "dockerfile")
MODELS = re.compile(r"upstage/SOLAR-10\.7B[\w.-]*|Qwen/[\w.-]+|meta-llama/[\w.-]+|HuggingFaceTB/[\w.-]+")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line it starts on."""

    language: str
    text: str
    line: int

    @property
    def start(self) -> str:
        """Its first line that says something, by which lists of blocks name it."""
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")


def blocks(page: Path) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(content):
        indent, language, code = match.groups()
        code = "\n".join(line.removeprefix(indent) for line in code.split("\n"))
        found.append(Block(language, MODELS.sub("smollm2", code), content[: match.start(3)].count("\n") + 1))
    return found


# -- the sandbox -------------------------------------------------------------------------------------------------------


def make_tokenizer(folder: Path) -> None:
    """Every byte is a token (and `th`: a GGUF file needs a merge); the marks of a turn are special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({char: index for index, char in enumerate([*alphabet, "th"])}, [("t", "h")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def fill(sandbox: Path) -> None:
    """Model, data, recipes and a finished run."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = sandbox / "cache" / "smollm2" / "hub"
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, max_position_embeddings=4096, **sizes)).save_pretrained(model)
    make_tokenizer(model)
    for name in ("model", "my-model", "base"):
        shutil.copytree(model, sandbox / name)
    _data(sandbox)
    shutil.copytree(ROOT / "recipes", sandbox / "recipes")
    recipe = (
        "model: {name_or_path: smollm2}\ndata: {train: train.jsonl, eval: heldout.jsonl}\n"
        "training: {batch_size: 4, max_steps: 2, max_length: 256, learning_rate: 1e-3, save_steps: 1, "
        "logging_steps: 1, eval_steps: 1, output_dir: out/run}\n"
        "strategies: {quantization: {}, lora: {r: 4}}\n"
    )
    for name in ("recipe.yaml", "small.yaml"):
        (sandbox / name).write_text(recipe, encoding="utf-8")
    with inside(sandbox):
        from lowmem import Trainer

        Trainer.from_recipe("recipe.yaml").train()
        for name in ("solar", "qlora", "lora", "quickstart"):
            shutil.copytree("out/run", f"out/{name}")


def _data(sandbox: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n} 한글 🦊."}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(16)
    ]
    answers = [{"prompt": f"{n} and one are ", "completion": str(n + 1)} for n in range(16)]
    texts = [{"text": f"The number {n} is followed by {n + 1}."} for n in range(16)]
    kinds: dict[str, list[dict[str, Any]]] = {
        **dict.fromkeys(("train.jsonl", "chats.jsonl", "rows.jsonl", "my_rows.jsonl", "data/train.jsonl"), chats),
        **dict.fromkeys(("heldout.jsonl", "eval.jsonl", "test.jsonl", "data/eval.jsonl"), chats[:6]),
        **dict.fromkeys(("rare.jsonl", "common.jsonl", "prompts.jsonl"), answers),
        "texts.jsonl": texts,
    }
    for name, rows in kinds.items():
        (sandbox / name).parent.mkdir(exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (sandbox / name).write_text("".join(lines), encoding="utf-8")
    (sandbox / "prompts.txt").write_text("Say 1.\nSay 2.\n", encoding="utf-8")


@contextlib.contextmanager
def inside(sandbox: Path) -> Iterator[None]:
    """In the sandbox, with its models, and as it was afterwards."""
    before, known = Path.cwd(), {key: os.environ.get(key) for key in ("LOWMEM_CACHE", "COLUMNS")}
    modules, places = set(sys.modules), list(sys.path)
    os.chdir(sandbox)
    sys.path.insert(0, str(sandbox))
    os.environ.update(LOWMEM_CACHE=str(sandbox / "cache"), COLUMNS="120")
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = places
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(sandbox)):
                del sys.modules[name]
        for key, value in known.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


# -- Python and YAML ---------------------------------------------------------------------------------------------------


def keep(block: Block) -> None:
    """A block that names its file in its first line, and a recipe, become files of the sandbox."""
    named = re.match(r"# ([\w/.-]+\.(?:ya?ml|py))\b", block.text)
    if named:
        Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(named[1]).write_text(block.text, encoding="utf-8")
    elif block.language == "yaml" and re.search(r"^model:", block.text, re.MULTILINE):
        Path("recipe.yaml").write_text(block.text, encoding="utf-8")


def share_work(page: list[Block]) -> None:
    """On a page that starts several processes, the recipe has the strategies of its example, by which they share."""
    from lowmem.yaml_lines import parse_yaml

    if not any("--nproc" in block.text for block in page):
        return
    example = next(block for block in page if block.language == "yaml" and "strategies:" in block.text)
    recipe, shown = (parse_yaml(text, "page").value for text in (Path("recipe.yaml").read_text("utf-8"), example.text))
    recipe["training"] |= shown.get("training", {})
    Path("recipe.yaml").write_text(json.dumps({**recipe, "strategies": shown["strategies"]}), encoding="utf-8")


def run_python(block: Block, page: str, space: dict[str, Any]) -> str:
    """Run a block; a traceback shows the page's own line numbers. Returns what it printed."""
    # without this module's own `from __future__`, which would change what the page means
    code = compile("\n" * (block.line - 1) + block.text, page, "exec", dont_inherit=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, space)
    return out.getvalue()


# -- shell -------------------------------------------------------------------------------------------------------------


@dataclass
class Command:
    """One command of a shell block: its words, what is piped into it, and where its output goes."""

    words: list[str]
    stdin: str | None = None
    output: str | None = None


def commands(block: Block) -> list[Command]:
    """The commands of a block; in a `console` block only what follows a `$` is one."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console" or any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    for line in lines:
        line = re.sub(r"<[\w -]+>", "PLACEHOLDER", line)  # <this repository>: a word for the reader to fill in
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = list(lexer)
        for part in _split(words, ("&&", ";", "&")):
            found += _pipeline(part)
    return found


def _split(words: list[str], separators: tuple[str, ...]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in separators:
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def _pipeline(words: list[str]) -> list[Command]:
    """`echo text | lowmem ...` gives it the text; what comes after a pipe from lowmem is a command of its own."""
    found: list[Command] = []
    stdin = None
    for part in _split(words, ("|",)):
        command = Command([], stdin)
        words_left = iter(part)
        for word in words_left:
            if word in (">", ">>"):
                command.output = next(words_left)
            elif word == "<":
                command.stdin = Path(next(words_left)).read_text(encoding="utf-8")
            elif not (re.fullmatch(r"[A-Z_]+=.*", word) and not command.words):  # a variable set for one command
                command.words.append(word)
        if command.words and command.words[0] in ("echo", "printf"):
            stdin = " ".join(command.words[1:]).replace("\\n", "\n") + "\n"
            continue
        stdin = None
        if command.words:
            found.append(command)
    return found


def run_lowmem(command: Command) -> str:
    """Run a `lowmem` line in this process, as `main` would; returns what it printed.

    Raises:
        AssertionError: it did not end with 0.
    """
    arguments = shortened(command.words[1:])
    if arguments[:1] in (["estimate"], ["waterfall"]) and is_large(command.words) and "--plot" not in arguments:
        said: str = once(shlex.join(arguments), lambda: _invoked(command, arguments))  # the same on several pages
    else:
        said = _invoked(command, arguments)
    if command.output:
        Path(command.output).write_text(said, encoding="utf-8")
    return said


def _invoked(command: Command, arguments: list[str]) -> str:
    from typer.testing import CliRunner

    from lowmem.cli import app
    from lowmem.cli.train import with_resume_value

    with without_predictions() if arguments[:1] == ["train"] else contextlib.nullcontext():
        result = CliRunner().invoke(app, with_resume_value(arguments), input=command.stdin or "")
    said = f"lowmem {shlex.join(arguments)}: exit code {result.exit_code}\n{result.output}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(said) from result.exception
    # without a command of the group: its help, which click ends with 2
    assert result.exit_code == 0 or not arguments, said
    return str(result.output)


@contextlib.contextmanager
def without_predictions() -> Iterator[None]:
    """Inside, a run neither checks its memory nor compares it with a prediction."""
    from lowmem.memory.comparison import MemoryComparison
    from lowmem.memory.guard import MemoryGuard

    with (
        patch.object(MemoryGuard, "check", lambda self, wanted: None),
        patch.object(MemoryComparison, "__call__", lambda self, event: None),
    ):
        yield


def is_large(arguments: list[str]) -> bool:
    """Whether it is about a recipe that comes with lowmem, of a large model."""
    return any(word.startswith("solar-10.7b") for word in arguments)


def shortened(arguments: list[str]) -> list[str]:
    """Two steps instead of a whole training, and a small model in the recipes that come with a large one."""
    result = list(arguments)
    if arguments[:1] == ["train"]:
        steps = 3 if "--resume" in arguments else 2
        result += [f"training.max_steps={steps}", "training.save_steps=1"]
        if "quickstart" in arguments:
            result.append("data.exact_match=heldout.jsonl")  # six answers instead of two hundred
    if arguments[:1] in (["generate"], ["chat"]) and "--max-new-tokens" not in arguments:
        result += ["--max-new-tokens", "8"]
    if arguments[:1] == ["waterfall"] and is_large(arguments):
        result[1] = "small.yaml"
    elif arguments[:1] in (["train"], ["data"], ["estimate"]) and is_large(arguments):
        result.append("model.name_or_path=smollm2")
        if "solar-10.7b-qlora-24gb-long" in arguments:
            result.append("training.max_length=8192")
    if arguments[:1] == ["plan"] and "--gpus" in arguments:
        result += ["--method", "qlora"]  # one of three searches
    return result


def check_make(words: list[str]) -> None:
    """Every target is there."""
    targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def check_pip(words: list[str]) -> None:
    """Extras that are installed are extras of the package."""
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for word in words:
        extras = re.fullmatch(r"(?:lowmem|\.)\[([\w,-]+)\]", word)
        assert not extras or set(extras[1].split(",")) <= set(known), f"{word}: no such extra"
    assert words[1] == "install", words


def check_launcher(words: list[str]) -> None:
    """torchrun and accelerate know these options, and what they start is lowmem."""
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(words[1:])
    else:
        from accelerate.commands.launch import launch_command_parser

        assert words[1] == "launch", words
        given = launch_command_parser().parse_args(words[2:])
    assert given.module, words
    assert given.training_script == "lowmem", words


def check_python(words: list[str]) -> None:
    """The script is there."""
    scripts = [word for word in words[1:] if word.endswith(".py")]
    assert scripts or "-m" in words, words
    for script in scripts:
        assert (ROOT / script).is_file() or Path(script).is_file(), f"{script}: no such file"
