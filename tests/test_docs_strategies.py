"""The docs beside the code: cards match their classes, recipes and examples are valid, links lead somewhere."""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import lowmem
from lowmem.config import LoadConfig, TrainingConfig
from lowmem.errors import UserError
from lowmem.facts import explain, strategy_facts, variants
from lowmem.json_schema import plain
from lowmem.recipe import load_recipe
from lowmem.run import Run
from lowmem.strategies import STRATEGIES, with_defaults
from lowmem.strategy import PLAIN_RUN, ConflictError, Stage, Strategy, Trait, resolve, traits
from lowmem.yaml_lines import parse_yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CARDS = {name: DOCS / "strategies" / f"{name}.md" for name in STRATEGIES}
HEADINGS = [
    "What it does",
    "Saves",
    "Costs",
    "Exact?",
    "Fields",
    "Composes with / Refuses",
    "Example",
    "How it works here",
    "Reference",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GB = 1024**3


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(text(page)) if kind == language]


def section(page: Path, heading: str) -> str:
    found = re.split(rf"^## {re.escape(heading)}\n", text(page), flags=re.MULTILINE)
    assert len(found) == 2, f"{page.name}: {heading}"
    return re.split(r"^## ", found[1], flags=re.MULTILINE)[0]


def table(content: str) -> list[list[str]]:
    lines = [line for line in content.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in lines]
    return rows[2:]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def name_of(path: Path) -> str:
    return str(path.relative_to(DOCS))


cards = pytest.mark.parametrize("name", STRATEGIES)

# -- cards -------------------------------------------------------------------------------------------------------------


def test_every_strategy_has_a_card_and_every_card_a_strategy():
    found = {page.stem for page in (DOCS / "strategies").glob("*.md")} - {"README"}
    assert found == set(STRATEGIES)


@cards
def test_card_has_the_same_headings(name):
    content = FENCE.sub("", text(CARDS[name]))
    assert re.findall(r"^# (.+)$", content, re.MULTILINE) == [name]
    assert re.findall(r"^## (.+)$", content, re.MULTILINE) == HEADINGS
    assert f"\n`{STRATEGIES[name].__name__}`: " in content


@cards
def test_fields_are_those_of_the_class(name):
    rows = table(section(CARDS[name], "Fields"))
    documented = {words(key)[0]: parse_yaml(f"x: {words(default)[0]}", "card").value["x"] for key, default, _ in rows}
    declared = {field.name: plain(field.default) for field in fields(STRATEGIES[name]) if field.init}
    assert documented == declared
    assert list(documented) == list(declared)


@cards
def test_stage_slot_exactness_and_parts(name):
    cls, card = STRATEGIES[name], CARDS[name]
    here = " ".join(section(card, "How it works here").split())
    assert f"stage `{cls.stage.name}`, slot `{cls.slot}`" in here
    assert section(card, "Exact?").strip().startswith("Yes" if cls.exact else "No.")
    wrapped = {part for part in PARTS if re.search(rf"`{part}`", here)}
    assert wrapped == {part for part in PARTS if overrides(cls, part)}


PARTS = [name for name in vars(Strategy) if name.startswith("wrap_") or name == "configure"]


def overrides(cls: type[Strategy], method: str) -> bool:
    return getattr(cls, method) is not getattr(Strategy, method)


def refusals() -> list[tuple[str, str, str]]:
    return [(n, *row) for n in STRATEGIES for row in table(section(CARDS[n], "Composes with / Refuses"))]


def check(name: str, spec: dict) -> None:
    """Build and resolve the card's strategy with those of the table's cell, as a trainer would."""
    numbers = {"max_grad_norm": None} | {key: value for key, value in spec.items() if key not in STRATEGIES}
    chosen = {name: {}} | {key: value for key, value in spec.items() if key in STRATEGIES}
    training = TrainingConfig(**numbers)
    given = [cls(**chosen[key]) for key, cls in STRATEGIES.items() if key in chosen]
    ordered = resolve(with_defaults(given, training))
    run = Run(training, torch.device("cpu"), traits(ordered)[0])
    for strategy in ordered:
        strategy.configure(LoadConfig.of(None, run.device), run)


@pytest.mark.parametrize(("name", "cell", "message"), refusals())
def test_refusal_says_what_the_card_says(name, cell, message):
    spec = parse_yaml("{" + words(cell)[0] + "}", "card").value
    with pytest.raises(UserError) as caught:
        check(name, spec)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("fact", strategy_facts(), ids=lambda fact: fact["name"])
def test_every_declared_refusal_is_on_the_card(fact):
    cells = [cell for name, cell, _ in refusals() if name == fact["name"]]
    named = [[key for key in re.findall(r"(\w+): \{", cell) if key != fact["name"]] for cell in cells]
    assert {keys[0] for keys in named if keys} == set(
        fact["refuses"]
    )  # what stands behind it only completes the recipe


def test_overview_has_every_strategy_and_its_exactness():
    listed = {}
    for cell, _, _, exact, refuses in table(text(DOCS / "strategies" / "README.md")):
        name, link = re.fullmatch(r"\[(\w+)\]\((.+)\)", cell).groups()
        assert link == f"{name}.md"
        listed[name] = (exact == "yes", set(words(refuses)))
    assert list(listed) == list(STRATEGIES)
    for fact in strategy_facts():
        exact, refuses = listed[fact["name"]]
        assert exact == fact["exact"]
        partners = {partner for names in fact["needs"].values() for partner in names}
        assert refuses - partners == set(fact["refuses"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_arithmetic_is_right(page):
    prose = " ".join(FENCE.sub("", text(page)).split())
    for product, result in re.findall(r"(\d[\d,.]*(?: [x+/] \(?\d[\d,.]*\)?)+) = (\d[\d,]*\d)", prose):
        plain_product = product.replace(",", "").replace(" x ", " * ")
        assert re.fullmatch(r"[\d .+*/()]+", plain_product)
        assert eval(plain_product) == int(result.replace(",", "")), product
    for size, shown in re.findall(r"(\d{1,3}(?:,\d{3})+) bytes \((\d+\.\d\d) GB\)", prose):
        assert f"{int(size.replace(',', '')) / GB:.2f}" == shown
    for row in table(FENCE.sub("", text(page))):
        for left, right in pairwise(row):
            if re.fullmatch(r"[\d,]+( [x+/] [\d,]+)+", left) and re.fullmatch(r"[\d,]+", right):
                assert eval(left.replace(",", "").replace(" x ", " * ")) == int(right.replace(",", "")), left


def test_sums_in_the_cards_are_right():
    weights, quantized, rows_of_all_layers = 10_731_524_096, 10_468_982_784, 48 * 43_008
    assert weights == 48 * 218_112_000 + 2 * 32_000 * 4096 + 4096
    assert quantized == 48 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096 == 43_008  # outputs of a layer's linear layers
    others = 2 * (weights - quantized)
    shown = {
        "quantization": [
            2 * weights,
            quantized + 4 * rows_of_all_layers + others,
            quantized // 2 + 4 * quantized // 64 + others,
            quantized // 2 + quantized // 64 + 4 * quantized // 16_384 + others,
        ],
        "lora": [4 * weights, 8 * weights, 12 * weights, 12 * 62_914_560, rows_of_all_layers],
        "adamw_8bit": [21_532_168_320 + 8 * 131_072_000, weights - 131_072_000],
        "README": [12 * weights, 12 * 62_914_560],
    }
    for name, numbers in shown.items():
        for number in numbers:
            assert f"{number:,}" in text(DOCS / "strategies" / f"{name}.md"), (name, number)


def test_bytes_of_the_quantised_layers_are_those_of_the_library():
    from lowmem.strategies import Quantization

    torch.manual_seed(0)
    found = {}
    for key, strategy in {"int8": Quantization(format="int8"), "nf4": Quantization()}.items():
        layer = strategy._quantised(torch.nn.Linear(512, 256, bias=False), torch.device("cpu"))
        state = getattr(layer.weight, "quant_state", None)
        if state is None:
            found[key] = layer.weight.nbytes + layer.weight.SCB.nbytes
        else:
            found[key] = layer.weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    size = 512 * 256
    assert found == {"int8": size + 4 * 256, "nf4": size // 2 + size // 64 + 4 * size // 16_384}


# -- examples ----------------------------------------------------------------------------------------------------------


def recipes() -> list[tuple[Path, int, str]]:
    return [
        (page, number, code)
        for page in PAGES
        for number, code in enumerate(blocks(page, "yaml"))
        if "strategies" in (parse_yaml(code, name_of(page)).value or {})
    ]


@pytest.mark.parametrize(("page", "number", "code"), recipes(), ids=lambda v: name_of(v) if isinstance(v, Path) else "")
def test_recipes_are_valid(page, number, code, tmp_path):
    if not re.search(r"^model:", code, re.MULTILINE):
        code = f"model: {{name_or_path: smollm2}}\n{code}"
    (tmp_path / "recipe.yaml").write_text(code, encoding="utf-8")
    for other in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", other):
            (tmp_path / name[1]).write_text(other, encoding="utf-8")
    try:
        recipe = load_recipe(tmp_path / "recipe.yaml", check_files=False)
    finally:
        sys.modules.pop("my_strategies", None)
    assert recipe.strategies
    resolve(with_defaults(recipe.strategies, recipe.training))


@cards
def test_card_shows_yaml_and_python(name):
    example = section(CARDS[name], "Example")
    assert [kind for kind, _ in FENCE.findall(example)] == ["yaml", "python"]
    assert STRATEGIES[name].__name__ in example or name == "gradient_clipping"
    assert f"{name}:" in example or name == "gradient_clipping"


class _Calls(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[ast.Call] = []

    def visit_Call(self, node: ast.Call) -> None:
        self.found.append(node)
        self.generic_visit(node)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_python_blocks_compile(page):
    for code in blocks(page, "python"):
        if "return total" in code and "def " not in code:
            code = f"def part():\n{re.sub('^', '    ', code, flags=re.MULTILINE)}"
        compile(code, str(page), "exec")


@pytest.mark.parametrize("page", [*CARDS.values(), DOCS / "coming-from-transformers-and-trl.md"], ids=name_of)
def test_constructors_in_python_blocks_run(page):
    """Imports and every constructor run; the strategies of a Trainer get along with its training numbers."""
    for code in blocks(page, "python"):
        if "from lowmem" not in code:
            continue
        tree, space = ast.parse(code), {}
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(compile(ast.Module([node], []), str(page), "exec"), space)
        calls = _Calls()
        calls.visit(tree)
        made = 0
        for call in calls.found:
            callee = ast.unparse(call.func)
            if callee == "Trainer":
                given = {word.arg: word.value for word in call.keywords}
                strategies = eval(ast.unparse(given["strategies"]), space)
                training = eval(ast.unparse(given["training"]), space) if "training" in given else TrainingConfig()
                resolve(with_defaults(strategies, training))
                made += 1
            elif callee in lowmem.__all__:
                eval(ast.unparse(call), space)
        assert made


def test_report_example_prints_what_the_page_shows(capsys):
    content = text(DOCS / "data.md")
    (code,) = blocks(DOCS / "data.md", "python")
    exec(compile(code, "data.md", "exec"), {})
    assert f"```text\n{capsys.readouterr().out}```" in content


# -- write-a-strategy.md -----------------------------------------------------------------------------------------------


@pytest.fixture
def own_strategy(tmp_path):
    """The page's files in a folder, beside a tiny model with a tokenizer."""
    page = DOCS / "write-a-strategy.md"
    for language in ("python", "yaml"):
        for code in blocks(page, language):
            (tmp_path / re.match(r"# (\S+)\n", code)[1]).write_text(code, encoding="utf-8")
    save_tiny_model(tmp_path / "model")
    with (tmp_path / "train.jsonl").open("w", encoding="utf-8") as file:
        for line in ("b c d", "c d e f", "d e", "e f g h i"):
            file.write(json.dumps({"text": line}) + "\n")
    return tmp_path


def save_tiny_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "<unk>", *"abcdefghi"])}
    plain_tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain_tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, num_hidden_layers=3)).save_pretrained(folder)


@pytest.fixture
def importable(own_strategy, monkeypatch):
    monkeypatch.chdir(own_strategy)
    monkeypatch.syspath_prepend(str(own_strategy))
    yield own_strategy
    sys.modules.pop("my_strategies", None)


def test_own_strategy_trains_from_a_recipe(own_strategy, monkeypatch):
    from lowmem import Trainer

    monkeypatch.chdir(own_strategy)
    path = sys.path.copy()
    try:
        trainer = Trainer.from_recipe("train_last.yaml", [f"model.name_or_path={own_strategy / 'model'}"])
    finally:
        sys.modules.pop("my_strategies", None)
    assert sys.path == path
    assert trainer.train()["steps"] == 2
    assert (own_strategy / "out" / "last" / "result.json").is_file()
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("model.layers.2.") for name in trained)
    chains = explain(trainer.given, trainer.training)["chains"]
    assert chains["model"] == ["pretrained model", "my_strategies.TrainLastLayers"]


def test_own_test_passes(importable):
    code = compile(text(importable / "test_my_strategies.py"), "test_my_strategies.py", "exec")
    space: dict = {"__name__": "test_my_strategies"}
    exec(code, space)
    (mark,) = space["test_only_the_last_layers_move"].pytestmark
    assert mark.name == "parametrize"
    for others in mark.args[1]:
        space["test_only_the_last_layers_move"](others)
    space["test_not_with_lora"]()


def test_own_strategy_is_refused_beside_quantization(importable):
    from my_strategies import TrainLastLayers

    with pytest.raises(ConflictError, match="quantization"):
        resolve([TrainLastLayers(), STRATEGIES["quantization"]()])


# -- how-it-works.md ---------------------------------------------------------------------------------------------------

HOW = DOCS / "how-it-works.md"


def test_parts_are_wrapped_by_whom_the_page_says():
    for _, method, _, wrapped_by in table(section(HOW, "Seven parts")):
        part = words(method)[0]
        assert set(words(wrapped_by)) == {name for name, cls in STRATEGIES.items() if overrides(cls, part)}
    assert [words(row[1])[0] for row in table(section(HOW, "Seven parts"))] == PARTS


def test_stages_are_those_of_the_enum():
    found = {words(stage)[0]: set(words(members)) for stage, _, members in table(section(HOW, "Stages"))}
    assert list(found) == [stage.name for stage in Stage]
    for stage in Stage:
        assert found[stage.name] == {name for name, cls in STRATEGIES.items() if cls.stage is stage}


def test_slots_and_traits_are_those_of_the_classes():
    content = section(HOW, "Slots and traits")
    paragraph = re.search(r"A \*\*slot\*\*(.+?)\. A ", " ".join(content.split()))[1]
    assert set(words(paragraph)) == {cls.slot for cls in STRATEGIES.values()}
    made = {name: list(variants(cls).values()) for name, cls in STRATEGIES.items()}
    made["gradient_checkpointing"].append(STRATEGIES["gradient_checkpointing"](layers_per_checkpoint=2))
    for trait, words_of_it, plain_run, provided, broken, needed in table(content):
        member = Trait[words(trait)[0]]
        assert words_of_it == member.value
        assert (plain_run == "holds") == (member in PLAIN_RUN)
        for cell, attribute in ((provided, "provides"), (broken, "breaks"), (needed, "needs")):
            holders = {name for name, items in made.items() if any(member in getattr(i, attribute) for i in items)}
            assert set(words(cell)) == holders
    assert len(table(content)) == len(Trait)


def test_the_printed_loop_is_the_loop():
    source = [line.split("  #")[0].strip() for line in text(ROOT / "lowmem" / "trainer.py").splitlines()]
    for code in blocks(HOW, "python")[:3]:
        position = 0
        for line in code.splitlines():
            if line.strip() != "...":
                position = source.index(line.strip(), position) + 1


def test_run_folder_holds_what_the_page_says(own_strategy):
    from lowmem import LoRA, Trainer

    def files(heading: str, *skip: str) -> set[str]:
        named = (words(row[0]) for row in table(section(HOW, heading)))
        return {name.rstrip("/") for names in named for name in names} - set(skip)

    numbers = {"batch_size": 4, "max_steps": 1, "learning_rate": 1e-3, "save_steps": 1, "logging_steps": 1}
    for name, strategies in {"full": [], "adapter": [LoRA()]}.items():
        training = TrainingConfig(output_dir=str(own_strategy / name), **numbers)
        Trainer(own_strategy / "model", own_strategy / "train.jsonl", training=training, strategies=strategies).train()
    found = {path.name for path in (own_strategy / "full").iterdir()}
    assert {re.sub(r"\d{6}", "000120", name) for name in found} == files(
        "The run folder", "answers_before.json", "memory_timeline.json"
    )
    saved = {p.name for name in ("full", "adapter") for p in (own_strategy / name / "checkpoint-000001").iterdir()}
    assert saved - {"README.md", "generation_config.json"} == files("Checkpoints and resume", "lora")


# -- links -------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        if anchor:
            assert anchor in anchors(place), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_of_the_repository_are_there(page):
    for path in re.findall(r"`((?:tests|lowmem|recipes|benchmarks)/[\w./]+\.\w+)`", text(page)):
        assert (ROOT / path).is_file(), path
