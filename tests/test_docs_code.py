"""The tutorial pages: every Python block runs, in order, in one namespace; every table's arithmetic is right."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from types import CodeType

import pytest
import torch

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial"
PAGES = sorted(TUTORIAL.glob("*.md"))
ENGLISH = [page for page in PAGES if len(page.suffixes) == 1]
TRANSLATED = [page for page in PAGES if len(page.suffixes) == 2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GB = 1024**3


def names(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[CodeType]:
    """The page's Python blocks, compiled so that a traceback shows the page's own line numbers."""
    content = text(page)
    found = [("\n" * content[: match.start(1)].count("\n") + match[1]) for match in BLOCK.finditer(content)]
    return [compile(code, str(page), "exec") for code in found]


def original(page: Path) -> Path:
    return page.with_name(page.name.split(".")[0] + ".md")


def test_there_are_pages():
    assert "single-card.md" in names(ENGLISH)
    assert "single-card.ko.md" in names(TRANSLATED)


@pytest.fixture
def one_thread():
    """Matrices this small only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for code in blocks(page):
        exec(code, namespace)


@pytest.mark.parametrize("page", TRANSLATED, ids=names(TRANSLATED))
def test_translation_has_the_same_code(page):
    codes, theirs = ([ast.dump(ast.parse(code)) for code in BLOCK.findall(text(p))] for p in (page, original(page)))
    assert codes == theirs


@pytest.mark.parametrize("page", TRANSLATED, ids=names(TRANSLATED))
def test_translation_has_the_same_sections_and_figures(page):
    def headings(content: str) -> list[int]:
        return [len(line.split()[0]) for line in BLOCK.sub("", content).splitlines() if line.startswith("#")]

    def large(content: str) -> set[str]:
        return set(re.findall(r"\d{1,3}(?:,\d{3})+|\d+\.\d+", BLOCK.sub("", content)))

    assert large(text(page)) == large(text(original(page)))
    assert headings(text(page)) == headings(text(original(page)))


def rows(page: Path) -> list[list[str]]:
    lines = [line for line in text(page).splitlines() if line.startswith("|")]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


def value(arithmetic: str) -> float:
    plain = arithmetic.replace(",", "").replace(" x ", " * ")
    assert re.fullmatch(r"[\d +*/()]+", plain), arithmetic
    return eval(plain)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_tables_are_right(page):
    checked = 0
    for row in rows(page):
        for left, right in itertools.pairwise(row):
            product = re.search(r"(?:^|: )(\d[\d,]* [x/] [\d,x/+() ]+)$", left)
            if product and re.fullmatch(r"[\d,]+", right):
                assert value(product[1]) == value(right), row
                checked += 1
            if re.fullmatch(r"[\d,]+", left) and re.fullmatch(r"\d+\.\d\d", right):
                assert f"{value(left) / GB:.2f}" == right, row
                checked += 1
    assert checked >= 40


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_products_in_the_text_are_right(page):
    prose = " ".join(BLOCK.sub("", text(page)).split())
    products = re.findall(r"(\d[\d,]* x [\d,x/+() ]*\d) = (\d{1,3}(?:,\d{3})+)", prose)
    assert len(products) >= 4
    for product, result in products:
        assert value(product) == value(result)
    sizes = re.findall(r"(\d{1,3}(?:,\d{3})+) ?(?:bytes|바이트) ?\((\d+\.\d\d) GB\)", prose)
    assert len(sizes) >= 3
    for size, shown in sizes:
        assert f"{value(size) / GB:.2f}" == shown


def test_sums_of_the_tables():
    parameters, activations, adapters = 10_731_524_096, 402_653_184, 251_658_240
    quantized = 5_234_491_392 + 163_577_856 + 2_555_904 + 525_082_624
    shown = {
        8 * parameters + activations,
        16 * parameters,
        2 * parameters + 4 * adapters + activations,
        quantized,
        quantized + 4 * adapters + activations,
        4 * activations,
    }
    totals = {
        8 * parameters + activations: "80.33",
        16 * parameters + 2 * activations: "160.66",
        2 * parameters + 4 * adapters + activations: "21.30",
        quantized + 4 * adapters + activations: "6.83",
        quantized + 2 * adapters + 127_795_200 + activations: "6.48",
    }
    for page in PAGES:
        if page.name.startswith("single-card"):
            assert all(f"{number:,}" in text(page) for number in shown)
            summary = [row[-1] for row in rows(page)[-5:]]
            assert summary == list(totals.values()) == [f"{total / GB:.2f}" for total in totals]


def test_eight_bit_moments_take_what_the_page_says():
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.nn.Parameter(torch.randn(16, 4096))
    optimizer = bnb.optim.AdamW8bit([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    moments = sum(state[name].nbytes for name in ("state1", "state2", "absmax1", "absmax2"))
    assert moments == 2 * weight.numel() + 2 * 4 * weight.numel() // 256
