"""Ten thousand broken recipes: each is refused in one line, or taken with every key in it.

Texts come from the shipped recipes by mutation. What is accepted is compared, key by key, with what ruamel's own safe
loader makes of the same text, and with the defaults of the dataclasses for every key the text does not hold.
"""

from __future__ import annotations

import os
import re
import struct
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor

from lowmem.config import DataConfig, ModelConfig, TrainingConfig
from lowmem.errors import UserError
from lowmem.json_schema import plain
from lowmem.recipe import load_recipe
from lowmem.recipe_paths import shipped_recipes
from lowmem.strategies import STRATEGIES

BLOCKS = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig}
PATHS = {("model", "name_or_path"), ("data", "train"), ("data", "eval"), ("data", "exact_match")}

# every kind of scalar and collection that a value may be replaced by
VALUES = [
    *("1e-4", "1E-4", "1e4", "+1e-4", "-1", "0", "-0.0"),
    *("007", "0o17", "0x1F", "0b11", "1_000", "12:30:45", "1.", ".5"),
    *("no", "yes", "on", "off", "y", "n", "~", "null", "Null", "None", "true", "True", "false", "FALSE", ""),
    *(".inf", "-.inf", ".nan", ".NaN", "inf", "nan"),
    *("1e400", "-1e400", "9" * 30, "9" * 400, "9" * 5000, "0x" + "f" * 5000),
    *("2024-01-01", "2024-01-01T10:00:00Z", "2024-13-45", "a b", "한글"),
    *("🦊", "é", "\u202e", "'1e-4'", '"no"', '"\\e[31m"'),
    *('"a\\nb"', '"\\0"', '"\\x00"', '"\\ud800"', '"\\UFFFFFFFF"'),
    *("'it''s'", '"unclosed', "'unclosed", "|\n  block", ">-\n  folded"),
    *("{}", "[]", "[1, 2]", "{a: 1}", "[[]]"),
    *("{a: {b: {c: 1}}}", "[1, [2, {x: 3}]]", "{? x : y}", "{[1]: 2}", "{<<: {a: 1}}"),
    *("&a 1", "*a", "!!str 1", "!!python/object:os.system x", "! x", "@x"),
    *("`x`", "%x", "a: b", "a:b", "- a", "? a", "# a"),
    *("rows.jsonl", "missing.jsonl", "data/tickets_train.jsonl", "./gone", "~"),
    *("owner/name", "a/b/c", "/", "..", "~root/x"),
    *("[rows.jsonl, {path: rows.jsonl, weight: 2}]", "{path: rows.jsonl}", "bfloat16", "nf4", "cosine", "all-linear"),
    *("[q_proj, v_proj]", "2", "8", "0.5", "1000000", "[0.9, 0.95]", "[0.9]", "everything", "eval_loss", "x" * 5000),
]  # fmt: skip
KEYS = [
    *("model", "data", "training", "strategies", "learning_rat"),
    *("learning_rate", "batch_size", "r", "ranl", "lora", "adapter"),
    *("packing", "ema", "os.system", "lowmem.strategies.lora.LoRA", "lowmem", "a..b"),
    *(".", "..", "a.", ".a", "1.5", "<<"),
    *("~", "null", "true", "1", "1e-4", '""', "한글", "🦊"),
    *('"a\\nb"', '"\\e[0m"', '"\\0"', "a b", "[1]", "{a: 1}", "? x", "x" * 3000),
    *("max_steps", "name_or_path", "train", "eval"),
    *("format", "weight_decay", "LoRA", "gradient-checkpointing", "paged"),
]  # fmt: skip
# valid in most places: what is taken must be tested as much as what is refused
SETTINGS = [
    *(("model", text) for text in ("revision: main", "trust_remote_code: true", "attn_implementation: eager")),
    *(("data", text) for text in ("on_bad_row: skip",)),
    *(("data", text) for text in ("format: text", "eval: [rows.jsonl, {path: rows.jsonl, weight: 2}]")),
    *(("training", text) for text in ("weight_decay: 1e-2", "seed: 0x1F")),
    *(("training", text) for text in ("shuffle: false", "max_steps: 7", "eval_steps: null")),
    *(("training", text) for text in ("save_steps: 5", "eval_batch_size: 1")),
    *(("training", text) for text in ("max_grad_norm: ~", "output_dir: null", "warmup_steps: 0")),
    *(("strategies", text) for text in ("packing:", "ema: {decay: .5}")),
    *(("strategies", text) for text in ("adamw: {betas: [0.9, 0.95], eps: 1E-6}", "compile: {}")),
]  # fmt: skip
NOISE = [
    "\t",
    "\0",
    "\ufeff",
    "\u2028",
    "\x85",
    "\x7f",
    "\x1b[2J",
    "\r",
    "\r\n",
    "\n",
    " ",
    ":",
    "-",
    "#",
    "{",
    "}",
    "[",
    "]",
]
NOISE += ["&", "*", "!", "|", ">", "'", '"', "%", "@", "`", ",", "?", "---\n", "...\n", "\ud800", "한", "🦊", "\xa0"]
BYTES = [b"\x80", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\xfe\xff", b"\xf0\x9f"]


def spoil(text: str, kind: str, place: int, choice: int) -> str:
    """One mutation."""
    lines = text.split("\n")
    at = place % len(lines)
    line = lines[at]
    indent, key, colon, value = re.fullmatch(r"( *)([^:]*)(:? ?)(.*)", line, re.DOTALL).groups()
    other, new_value, new_key = choice % len(lines), VALUES[choice % len(VALUES)], KEYS[choice % len(KEYS)]
    if kind == "delete":
        del lines[at]
    elif kind == "repeat":
        lines.insert(other, line)
    elif kind == "move":
        lines.insert(other, lines.pop(at))
    elif kind == "value":
        lines[at] = f"{indent}{key}: {new_value}"
    elif kind == "key":
        lines[at] = f"{indent}{new_key}{colon or ': '}{value}"
    elif kind == "typo":
        cut = choice % max(len(key), 1)
        lines[at] = indent + key[:cut] + key[cut + 1 :] + colon + value
    elif kind == "case":
        lines[at] = indent + key.swapcase() + colon + value
    elif kind == "indent":
        lines[at] = " " * (choice % 7) + line.lstrip(" ")
    elif kind == "insert":
        lines.insert(at, f"{indent}{new_key}: {VALUES[place % len(VALUES)]}")
    elif kind == "setting":
        block, setting = SETTINGS[choice % len(SETTINGS)]
        lines[lines.index(f"{block}:") + 1 if f"{block}:" in lines else at : 0] = [f"  {setting}"]
    elif kind == "nest":
        lines[at] = f"{indent}{key}: {'{x: [' if choice % 2 else '['}{value}{']}' if choice % 2 else ']'}"
    elif kind == "quote":
        lines[at] = f"{indent}{key}: {chr(34) if choice % 2 else chr(39)}{value}{chr(34) if choice % 2 else chr(39)}"
    elif kind == "deep":
        lines[at] = f"{indent}{key}: {'[' * (choice % 40)}{']' * (choice % 39)}"
    elif kind == "noise":
        cut = place % (len(text) + 1)
        return text[:cut] + NOISE[choice % len(NOISE)] + text[cut:]
    elif kind == "cut":
        return text[: place % (len(text) + 1)]
    return "\n".join(lines)


KINDS = [
    "delete",
    "repeat",
    "move",
    "value",
    "value",
    "value",
    "key",
    "key",
    "typo",
    "case",
    "indent",
    "insert",
    "insert",
]
KINDS += 12 * ["setting"]
KINDS += ["nest", "quote", "deep", "noise", "noise", "cut", "bytes"]


def changes_from(raw: bytes) -> list[tuple[str, int, int]]:
    """One to three mutations."""
    return [(KINDS[kind % len(KINDS)], place, choice) for kind, place, choice in struct.iter_unpack("<BHH", raw)]


# drawn as one value each: to draw their parts takes longer than to read a recipe
mutations = st.one_of(*(st.binary(min_size=5 * n, max_size=5 * n) for n in (1, 2, 3))).map(changes_from)


def without_comments(text: str) -> str:
    return "\n".join(re.sub(r"\s*#.*", "", line) for line in text.splitlines() if not re.match(r"\s*(#|$)", line))


SHIPPED = [path.read_text(encoding="utf-8") for path in shipped_recipes().values()]
TEXTS = [*SHIPPED, *7 * [without_comments(text) for text in SHIPPED]]


class _WithoutDates(SafeConstructor):
    """YAML 1.2 knows no dates: they are text."""


_WithoutDates.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def independently(text: str) -> Any:
    """What ruamel's own safe loader makes of a text."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _WithoutDates
    return yaml.load(text)


def many(number: int) -> Any:
    """Always the same examples; the first one that fails is shown as it is (to shrink a recipe takes minutes)."""
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("recipes")
    for name in ("rows.jsonl", "train.jsonl", "data/tickets_train.jsonl", "data/tickets_heldout.jsonl"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("{}\n", encoding="utf-8")
    (place / "base.yaml").write_text(without_comments(shipped_recipes()["lora"].read_text(encoding="utf-8")))
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)


def check_message(error: Exception, start: str) -> None:
    message = str(error)
    assert message.startswith(start), message
    assert not any(unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs") for char in message), repr(message)
    assert len(message) < 1000, message
    assert message.rstrip() != start.rstrip(), message


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield path, value
    for key, item in items:
        yield from leaves(item, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def same(path: tuple[Any, ...], written: Any, taken: Any, folder: Path) -> bool:
    """What was taken means what was written."""
    if isinstance(written, bool) or written is None or isinstance(taken, bool):
        return taken is written
    if isinstance(written, str):
        place = os.path.normpath(folder / os.path.expanduser(written))
        resolved = path[:2] in PATHS or path == ("training", "output_dir")
        return isinstance(taken, str) and (taken == written or (resolved and os.path.normpath(taken) == place))
    return isinstance(taken, int | float) and float(taken) == float(written)


def check_taken(written: Any, taken: dict[str, Any], folder: Path) -> None:
    """Every leaf of the text is in the recipe, and everything else in the recipe is a default."""
    for path, value in leaves(written):
        strategy = path[0] == "strategies" and len(path) == 2
        if value in (None, {}) and (strategy or len(path) == 1):  # a block or a strategy with its defaults
            assert path[-1] in at(taken, path[:-1]), path
            continue
        if isinstance(value, str) and path[:2] in {("data", "train"), ("data", "eval")} and len(path) > 2:
            item = at(taken, path[:3])
            taken_value = item if isinstance(item, str) else item["path"]
        else:
            taken_value = at(taken, path)
        if value is None and len(path) == 3 and path[1] in STRATEGIES:
            assert taken_value == plain(STRATEGIES[path[1]]().settings())[path[2]], path  # null is the default
        elif value in ([], {}):
            assert taken_value == value, path
        else:
            assert same(path, value, taken_value, folder), (path, value, taken_value)
    for name, cls in BLOCKS.items():
        given = written.get(name) or {}
        defaults = plain(cls(name_or_path="x")) if cls is ModelConfig else plain(cls())
        for key, value in taken[name].items():
            assert key in given or value == defaults[key], (name, key)
    for name, held in taken["strategies"].items():
        given = written["strategies"][name] or {}
        defaults = plain(STRATEGIES[name](**given).settings()) if name in STRATEGIES else {}
        assert {key: held[key] for key in held if key not in given} == {k: defaults[k] for k in held if k not in given}
    assert set(taken["strategies"]) == set(written.get("strategies") or {})


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_a_mutated_recipe_is_refused_in_one_line_or_taken_whole(folder, part):
    file, counts = folder / f"part{part}.yaml", {"taken": 0, "refused": 0}

    @many(2500)
    @given(st.sampled_from(TEXTS), mutations)
    def check(text, changes):
        raw, noise, cut = text, b"", 0
        for kind, place, choice in changes:
            if kind == "bytes":
                noise = BYTES[choice % len(BYTES)]
                cut = place % (len(raw) + 1)
            else:
                raw = spoil(raw, kind, place, choice)
        encoded = raw.encode("utf-8", "surrogatepass")
        file.write_bytes(encoded[:cut] + noise + encoded[cut:] if noise else encoded)
        try:
            recipe = load_recipe(file)
        except UserError as error:
            counts["refused"] += 1
            check_message(error, f"{file}:")
        else:
            counts["taken"] += 1
            written = independently(file.read_bytes().decode("utf-8-sig"))
            check_taken(written, recipe.as_dict(), folder)

    check()
    assert min(counts.values()) > 250, counts  # both kinds are tried often


@many(200)
@given(st.sampled_from(sorted(shipped_recipes())), st.lists(st.sampled_from(SETTINGS), max_size=4))
def test_what_is_dumped_reads_back_the_same(folder, name, extra):
    file = folder / "dumped.yaml"
    overrides = [f"{block}.{text.replace(': ', '=', 1)}" for block, text in extra if ": " in text]
    try:
        recipe = load_recipe(name, overrides, check_files=False)
    except UserError as error:
        check_message(error, "")
        return
    recipe.dump(file)
    again = load_recipe(file, check_files=False)
    assert again.as_dict() == recipe.as_dict()


KEY_PATHS = [
    *("training.learning_rate", "training.batch_size"),
    *("training.max_grad_norm", "training.output_dir", "training.seed"),
    *("model.dtype", "model.revision", "data.train"),
    *("data.eval", "data.format", "strategies.lora.r", "strategies.lora"),
    *("strategies.packing", "strategies.ema.decay"),
    *("strategies.gradient_accumulation.micro_batch_size", "training", "data"),
    *("strategies", "model", "strategies.mixed_precision", "strategies.adamw.betas", "training.lr_scheduler_type"),
]  # fmt: skip
dotted_keys = st.one_of(
    st.sampled_from(KEY_PATHS),
    st.builds(lambda path, key: f"{path}.{key}", st.sampled_from(KEY_PATHS), st.sampled_from(KEYS)),
    st.builds(lambda path, place: path[:place] + path[place + 1 :], st.sampled_from(KEY_PATHS), st.integers(0, 20)),
    st.builds(lambda path, key: f"{path.partition('.')[0]}.{key}", st.sampled_from(KEY_PATHS), st.sampled_from(KEYS)),
    st.text(max_size=12),
)
overrides = st.builds(
    lambda path, sign, value: path + sign + value,
    dotted_keys,
    st.sampled_from(["=", "=", "=", "=", " = ", "", ":", "=="]),
    st.one_of(st.sampled_from(VALUES), st.text(max_size=12)),
)


@many(1500)
@given(overrides)
def test_a_mutated_override_is_refused_in_one_line_or_taken(folder, override):
    try:
        after = load_recipe(folder / "base.yaml", [override]).as_dict()
    except UserError as error:
        check_message(error, "override '")
        return
    path, _, text = override.partition("=")
    written = independently((folder / "base.yaml").read_text(encoding="utf-8"))
    value = independently(text)
    keys = split(path.strip(), value)
    if keys[0] == "strategies" and len(keys) == 2 and value is None:
        del written["strategies"][keys[1]]
    else:
        node = written
        for key in keys[:-1]:
            if node.get(key) is None:
                node[key] = {}
            node = node[key]
        node[keys[-1]] = value
    check_taken(written, after, folder)


def split(path: str, value: Any) -> list[str]:
    """The keys of a dotted path; an import path under `strategies` is one key."""
    keys = path.split(".")
    if keys[0] == "strategies" and len(keys) > 2 and keys[1] not in STRATEGIES:
        return [keys[0], ".".join(keys[1:])] if isinstance(value, dict) else [keys[0], ".".join(keys[1:-1]), keys[-1]]
    return keys
