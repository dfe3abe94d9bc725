"""Every command and every Python block of README and docs runs, or stands here with the reason why not.

`docs_runner.py` says what a block is run on. Pages under `docs/tutorial` are run by `test_docs_code.py`, where their
numbers are checked as well.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from docs_runner import (
    ROOT,
    SHELLS,
    SHOWN,
    Block,
    blocks,
    check_launcher,
    check_make,
    check_pip,
    check_python,
    commands,
    fill,
    inside,
    keep,
    run_lowmem,
    run_python,
    share_work,
)

PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "tutorial" not in page.parts
]

# page -> first line of a block -> why it is not run
NOT_RUN = {
    "docs/several-gpus.md": {"#!/bin/bash": "it needs Slurm"},
    "docs/coming-from-transformers-and-trl.md": {"from peft import LoraConfig": "TRL's own code; TRL is not required"},
    "docs/how-it-works.md": {
        "while self.run.global_step < self.total_steps and not self.run.stopped:": "the trainer's own lines, compared "
        "with them in test_docs_strategies.py",
        "total = torch.zeros((), device=self.device)": "the same",
        "require_finite(self.run)": "the same",
    },
}

# page -> names that its text takes for granted
GIVEN = {
    "docs/coming-from-transformers-and-trl.md": {
        "dataset": [{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}]
    },
}

# commands that only their check looks at, and the reason
CHECKED = {
    "make": (check_make, "it would make an environment of its own"),
    "torchrun": (check_launcher, "its processes are those of `lowmem train --nproc`, which test_launch.py starts"),
    "accelerate": (check_launcher, "the same"),
    "pip": (check_pip, "it would install"),
    "python": (check_python, "scripts have tests of their own, or take an hour"),
}
# commands that are not looked at
OTHERS = {
    "git": "needs the network",
    "cd": "every block starts in the sandbox",
    "jq": "not part of lowmem",
    "lm_eval": "an optional package; its own test runs a task",
    "tensorboard": "an optional package, and a server",
    "hf": "needs the network",
    "kill": "there is no process to stop",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "sandbox"
    folder.mkdir()
    fill(folder)
    return folder


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(block: Block, page: str, space: dict) -> None:
    keep(block)
    if block.language == "python":
        run_python(block, page, space)
        return
    if block.language not in SHELLS:
        assert block.language == "yaml" or block.language in SHOWN, f"{page}:{block.line}: unknown {block.language}"
        return
    for command in commands(block):
        name = command.words[0]
        if name == "lowmem":
            if "--nproc" in command.words:
                place = command.words.index("--nproc")
                del command.words[place : place + 2]
            run_lowmem(command)
        elif name in CHECKED:
            CHECKED[name][0](command.words)
        else:
            assert name in OTHERS, f"{page}:{block.line}: {name}: no command this test knows"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_every_block_of_a_page_runs(page, template, tmp_path):
    name = name_of(page)
    sandbox = tmp_path / "sandbox"
    shutil.copytree(template, sandbox)
    space = {"__name__": "page", **GIVEN.get(name, {})}
    with inside(sandbox):
        share_work(blocks(page))
        for block in blocks(page):
            if block.start not in NOT_RUN.get(name, {}):
                try:
                    run(block, name, space)
                except Exception as error:
                    error.add_note(f"{name}, line {block.line}: {block.start}")
                    raise


def test_blocks_that_are_not_run_are_still_there():
    for name, listed in NOT_RUN.items():
        assert set(listed) <= {block.start for block in blocks(ROOT / name)}, name


def test_a_wrong_command_is_found(template, tmp_path):
    shutil.copytree(template, tmp_path / "sandbox")
    with inside(tmp_path / "sandbox"):
        for text in (
            "lowmem trian recipe.yaml",
            "lowmem train recipe.yaml training.learning_rat=1",
            "make nothing",
            "pip install 'lowmem[nothing]'",
            "python benchmarks/nothing.py",
            "frobnicate out/run",
        ):
            with pytest.raises(Exception, match=r"trian|learning_rat|nothing|frobnicate"):
                run(Block("sh", text, 1), "page", {})
        with pytest.raises(NameError):
            run(Block("python", "nothing_of_that_name", 1), "page", {})
