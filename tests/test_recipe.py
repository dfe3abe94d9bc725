from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from conftest import make_llama, make_rows

from lowmem.config import DataConfig, WeightedPath
from lowmem.recipe import RecipeError, find_recipe, json_schema, load_recipe
from lowmem.recipe_paths import shipped_recipes
from lowmem.strategies import STRATEGIES
from lowmem.yaml_lines import dump_yaml, parse_yaml

BASE = """\
# 한글 주석
model:
  name_or_path: owner/name
data:
  train: rows.jsonl
training:
  learning_rate: 1e-4
  batch_size: 4
strategies:
  lora: {r: 4}
  packing:
"""


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")

    def _write(text: str = BASE, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


# -- what is read -----------------------------------------------------------------------------------------------------


def test_blocks_become_the_dataclasses_python_users_fill(write, tmp_path):
    recipe = load_recipe(write())
    assert recipe.model.name_or_path == "owner/name"
    assert recipe.data == DataConfig(train=str(tmp_path / "rows.jsonl"))
    assert recipe.training.learning_rate == 1e-4
    assert [(s.name, s.settings().get("r")) for s in recipe.strategies] == [("lora", 4), ("packing", None)]


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "+1e-4"])
def test_exponents_are_numbers_in_file_and_override(write, text):
    path = write(BASE.replace("1e-4", text))
    assert load_recipe(path).training.learning_rate == 1e-4
    assert load_recipe(write(), [f"training.learning_rate={text}"]).training.learning_rate == 1e-4


def test_whole_number_is_fine_for_a_float(write):
    value = load_recipe(write(), ["training.learning_rate=1"]).training.learning_rate
    assert value == 1.0
    assert isinstance(value, float)


@pytest.mark.parametrize("value", ["{}", "", "null"])
def test_three_spellings_of_defaults(write, value):
    recipe = load_recipe(write(BASE.replace("{r: 4}", value)))
    assert recipe.strategies[0] == STRATEGIES["lora"]()


def test_dump_reads_back_to_the_same(write, tmp_path):
    recipe = load_recipe(write(), ["training.output_dir=out", 'model.attn_implementation="no"', "strategies.adamw={}"])
    recipe.dump(tmp_path / "dumped.yaml")
    assert load_recipe(tmp_path / "dumped.yaml").as_dict() == recipe.as_dict()
    assert recipe.as_dict()["training"]["output_dir"] == str(Path.cwd() / "out")
    assert recipe.as_dict()["strategies"]["adamw"]["betas"] == [0.9, 0.999]
    json.dumps(recipe.as_dict())


def test_yaml_values_survive_a_round_trip():
    value = {
        "a": "no",
        "b": "1e-4",
        "c": 1e-5,
        "d": None,
        "e": [1, "한", "null"],
        "f": {},
        "g": "a: b",
        "h": True,
        "i": "~",
    }
    assert parse_yaml(dump_yaml(value), "x").value == value


def test_weighted_paths(write, tmp_path):
    recipe = load_recipe(write(BASE.replace("rows.jsonl", "[rows.jsonl, {path: rows.jsonl, weight: 2}]")))
    rows = str(tmp_path / "rows.jsonl")
    assert recipe.data.train == [rows, WeightedPath(rows, 2.0)]


# -- what is refused, and in which words ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "learning_rate:",
            "learning_rat:",
            "x.yaml:7: training.learning_rat: unknown key; did you mean learning_rate?",
        ),
        ("# 한글 주석", "learning_rat: 1", "x.yaml:1: learning_rat: unknown key; did you mean training.learning_rate?"),
        ("# 한글 주석", "lora: {}", "x.yaml:1: lora: unknown key; did you mean strategies.lora?"),
        ("r: 4", "lora_alpa: 4", "x.yaml:10: strategies.lora.lora_alpa: unknown key; did you mean lora_alpha?"),
        ("r: 4", "ranl: 4", "x.yaml:10: strategies.lora.ranl: unknown key; valid keys: r, lora_alpha,"),
        ("lora:", "loar:", "x.yaml:10: strategies.loar: unknown strategy; did you mean lora?"),
        ("lora:", "AdamW8bit:", "x.yaml:10: strategies.AdamW8bit: unknown strategy; did you mean adamw_8bit?"),
        (
            "packing:",
            "packing: no",
            "x.yaml:11: strategies.packing: must be a mapping of settings; got no: leave the key out",
        ),
        ("packing:", "packing: false", "got false: leave the key out to switch it off"),
        ("packing:", "packing: true", "got true: write `packing: {}` for the defaults"),
        ("learning_rate: 1e-4", "learning_rate: abc", "x.yaml:7: training.learning_rate: must be a number; got abc"),
        ("learning_rate: 1e-4", "learning_rate: '1e-4'", 'got "1e-4" (it stands in quotes; drop them)'),
        ("learning_rate: 1e-4", "learning_rate: true", "training.learning_rate: must be a number; got true"),
        ("learning_rate: 1e-4", "learning_rate: .inf", "must be a number; got Infinity (it must be finite)"),
        ("batch_size: 4", "batch_size: true", "training.batch_size: must be a whole number; got true"),
        ("batch_size: 4", "batch_size: 4.5", "training.batch_size: must be a whole number; got 4.5"),
        ("batch_size: 4", "max_steps: 1e3", "must be a whole number or null; got 1000.0 (write 1000)"),
        ("batch_size: 4", "save_steps: no", "x.yaml:8: training.save_steps: must be a whole number or null; got no"),
        ("batch_size: 4", "save_steps: no", "use null to switch it off"),
        ("batch_size: 4", "max_grad_norm: None", "None is text in YAML 1.2; use null to switch it off"),
        ("batch_size: 4", "shuffle: no", "must be true or false; got no (no is text in YAML 1.2; write false)"),
        ("batch_size: 4", "shuffle: 0", "training.shuffle: must be true or false; got 0"),
        ("batch_size: 4", "output_dir: off", 'use null to switch it off, or "off" for the text'),
        (
            "batch_size: 4",
            "lr_scheduler_type: off",
            "must be one of linear, cosine, constant, constant_with_warmup; got off",
        ),
        ("batch_size: 4", "batch_size: 0", "x.yaml:8: training.batch_size: must be above 0; got 0"),
        (
            "batch_size: 4",
            "batch_size: 4\n  batch_size: 5",
            "x.yaml:9: training.batch_size: given twice; first on line 8",
        ),
        ("r: 4", "r: 0", "x.yaml:10: strategies.lora.r: counts from 1"),
        ("rows.jsonl", "[{path: rows.jsonl, weigt: 2}]", "data.train.0.weigt: unknown key; did you mean weight?"),
        ("rows.jsonl", "3", "x.yaml:5: data.train: must be text, a list"),
        ("  name_or_path: owner/name", "  revision: main", "x.yaml:2: model: the key name_or_path is missing"),
        ("owner/name", "&a owner/name", "x.yaml:3: anchors and aliases"),
        ("owner/name", "!!str owner/name", "x.yaml:3: tags"),
        ("owner/name", "[", "not valid YAML"),
        ("owner/name", "[" * 50 + "]" * 50, "x.yaml:3: nested deeper than 20 levels"),
        ("# 한글 주석", "%YAML 1.1\n---", "recipes are YAML 1.2"),
        ("strategies:", "---\nstrategies:", "x.yaml:9: a recipe is one document"),
    ],
)
def test_refusals_name_file_line_key_and_remedy(write, old, new, expected):
    assert old in BASE
    text = message(write(BASE.replace(old, new)))
    assert expected in text


def test_not_a_recipe_at_all(write, tmp_path):
    assert "a recipe is a mapping of model, data" in message(write("- 1\n"))
    assert "model: this block is missing" in message(write(""))
    korean = tmp_path / "cp949.yaml"
    korean.write_bytes(BASE.encode("cp949"))
    assert "not UTF-8" in message(korean)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.learning_rat=1", "did you mean learning_rate?"),
        ("training.learning_rate=abc", "training.learning_rate: must be a number; got abc"),
        ("training.batch_size=0", "must be above 0; got 0"),
        ("trainin.batch_size=1", "unknown section trainin; did you mean training?"),
        ("training.batch_size", "must be section.key=value"),
        ("training.batch_size=", "the value is missing"),
        ("training.batch_size=[", "not valid YAML"),
        ("training.batch_size.x=1", "training.batch_size holds 4, which has no keys"),
        ("strategies.lora.ranks=[1]", "strategies.lora.ranks: unknown key"),
        ("strategies.lorra.r=8", "strategies.lorra: unknown strategy; did you mean lora?"),
        ("strategies.ema=null", "the recipe has no strategy ema"),
        ("strategies.lora=no", "leave the key out"),
        ("data.train=missing.jsonl", "no such file"),
    ],
)
def test_errors_of_overrides_name_the_override(write, override, expected):
    text = message(write(), override)
    assert text.startswith(f"override '{override}': ")
    assert expected in text


def test_overrides_change_add_and_take_out(write):
    recipe = load_recipe(
        write(),
        [
            "strategies.lora.r=16",
            "strategies.ema={decay: 0.9}",
            "strategies.packing=null",
            "training.max_grad_norm=null",
        ],
    )
    assert [(s.name, s.settings()) for s in recipe.strategies if s.name != "lora"] == [("ema", {"decay": 0.9})]
    assert recipe.strategies[0].settings()["r"] == 16
    assert recipe.training.max_grad_norm is None


# -- paths ------------------------------------------------------------------------------------------------------------


def test_paths_start_from_the_recipe_wherever_one_stands(write, tmp_path, monkeypatch):
    path = write()
    seen = []
    for folder in (tmp_path, Path("/")):
        monkeypatch.chdir(folder)
        seen.append(load_recipe(path.relative_to(tmp_path) if folder == tmp_path else path).data.train)
    assert seen == [str(tmp_path / "rows.jsonl")] * 2


def test_paths_of_overrides_start_from_the_current_directory(write, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    mine = tmp_path / "elsewhere" / "mine.jsonl"
    mine.write_text("{}", encoding="utf-8")
    monkeypatch.chdir(mine.parent)
    assert load_recipe(write(), ["data.train=mine.jsonl"]).data.train == str(mine)


def test_a_missing_file_is_named_by_the_absolute_path_tried(write, tmp_path):
    text = message(write(BASE.replace("rows.jsonl", "no/such.jsonl")))
    assert f"x.yaml:5: data.train: no such file: {tmp_path / 'no' / 'such.jsonl'}" in text
    assert str(tmp_path / "gone") in message(write(BASE.replace("owner/name", "./gone")))
    unchecked = load_recipe(write(BASE.replace("rows.jsonl", "no/such.jsonl")), check_files=False)
    assert unchecked.data.train == str(tmp_path / "no" / "such.jsonl")


def test_hub_ids_and_aliases_are_left_alone(write, tmp_path):
    (tmp_path / "smollm2").mkdir()
    recipe = load_recipe(write(BASE.replace("owner/name", "smollm2").replace("rows.jsonl", "owner/rows")))
    assert (recipe.model.name_or_path, recipe.data.train) == ("smollm2", "owner/rows")


def test_a_folder_of_the_current_directory_is_no_silent_stand_in(write, tmp_path, monkeypatch):
    (tmp_path / "cwd" / "owner" / "name").mkdir(parents=True)
    path = write()
    monkeypatch.chdir(tmp_path / "cwd")
    assert "there is one in the current directory; paths start from the recipe" in message(path)


# -- classes of the user's own ----------------------------------------------------------------------------------------

PLUGIN = """\
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar
from lowmem import Stage, Strategy
if TYPE_CHECKING:
    from nowhere import Nothing

@dataclass
class Mine(Strategy):
    stage: ClassVar[Stage] = Stage.KERNEL
    size: int = 3
    def __post_init__(self):
        if self.size < 0:
            raise ValueError("size: not negative")

class Bare(Strategy):
    stage = Stage.KERNEL
"""


@pytest.fixture
def plugin(tmp_path: Path):
    (tmp_path / "my_plugin.py").write_text(PLUGIN, encoding="utf-8")
    yield
    sys.modules.pop("my_plugin", None)


@pytest.mark.usefixtures("plugin")
def test_a_dotted_key_imports_a_class_from_beside_the_recipe(write):
    before = list(sys.path)
    path = write(BASE.replace("packing:", "my_plugin.Mine: {size: 5}"))
    recipe = load_recipe(path)
    assert recipe.strategies[1].settings() == {"size": 5}
    assert load_recipe(path, ["strategies.my_plugin.Mine.size=6"]).strategies[1].settings() == {"size": 6}
    assert load_recipe(write(), ["strategies.my_plugin.Mine.size=7"]).strategies[2].settings() == {"size": 7}
    assert list(recipe.as_dict()["strategies"]) == ["lora", "my_plugin.Mine"]
    assert sys.path == before


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("my_plugin.Mine: {sise: 5}", "strategies.my_plugin.Mine.sise: unknown key; did you mean size?"),
        ("my_plugin.Mine: {size: -1}", "x.yaml:11: strategies.my_plugin.Mine.size: size: not negative"),
        ("my_plugin.Gone: {}", "cannot be imported"),
        ("nowhere.Gone: {}", "cannot be imported: No module named 'nowhere'"),
        ("my_plugin.Bare: {}", "is no dataclass"),
        ("os.path: {}", "is no subclass of lowmem.Strategy"),
    ],
)
def test_what_a_dotted_key_cannot_be(write, line, expected):
    assert expected in message(write(BASE.replace("packing:", line)))


# -- shipped recipes and the schema -----------------------------------------------------------------------------------


def test_names_of_strategies_are_their_keys():
    assert {key: cls().name for key, cls in STRATEGIES.items()} == {key: key for key in STRATEGIES}


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_fit_the_schema(name):
    recipe = load_recipe(name, check_files=not name.startswith(("solar", "llama")))
    assert recipe.strategies
    text = find_recipe(name).read_text(encoding="utf-8")
    jsonschema.validate(parse_yaml(text, name).value, json_schema(), jsonschema.Draft202012Validator)
    assert text.startswith(f"# {name}.yaml: ")


def test_the_promised_recipes_are_there():
    promised = {"lora", "qlora", "dora", "full_8bit_adam", "optimizer_in_backward", "solar-10.7b-qlora-24gb"}
    promised |= {"solar-10.7b-qlora-24gb-long", "solar-10.7b-lora-24gb"}
    promised |= {f"llama-3.1-8b-qlora-{size}gb" for size in (8, 12, 16, 24)}
    assert promised <= set(shipped_recipes())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("learning_rate: 1e-4", "learning_rat: 1e-4"),
        ("learning_rate: 1e-4", "learning_rate: abc"),
        ("r: 4", "ranl: 4"),
        ("lora:", "loar:"),
        ("strategies:", "strategy:"),
        ("  name_or_path: owner/name", "  revision: main"),
        ("packing:", "packing: no"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(write, old, new):
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(parse_yaml(BASE, "x").value, schema)
    broken = parse_yaml(BASE.replace(old, new), "x").value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)
    message(write(BASE.replace(old, new)))


def test_the_schema_describes_fields_in_the_words_of_the_docstrings():
    training = json_schema()["properties"]["training"]["anyOf"][0]["properties"]
    assert training["batch_size"] == {"type": "integer", "default": 8, "description": "rows per optimizer step."}
    assert all("description" in field for field in training.values())


def test_an_unknown_recipe_name_suggests_a_shipped_one(tmp_path):
    assert "did you mean qlora?" in message(Path("qlra"))
    assert str(tmp_path / "gone.yaml") in message(tmp_path / "gone.yaml")


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_train_a_small_model(name, tmp_path, monkeypatch):
    from lowmem import Trainer

    make_llama().save_pretrained(tmp_path / "model")
    rows = "\n".join(json.dumps(row) for row in make_rows(24))
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    small = [
        "model.name_or_path=./model",
        "data={train: rows.jsonl}",
        "training.max_steps=2",
        "training.output_dir=null",
    ]
    small += ["training.save_steps=null", "training.save_total_limit=null"]
    result = Trainer.from_recipe(name, small).train()
    assert result["steps"] == 2
    assert 0 < result["train_loss"] < 20
