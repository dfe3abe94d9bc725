"""From rows to token ids and labels."""

from lowmem.data.dataset import TokenizedDataset, tokenize
from lowmem.data.exact_match import prompts_and_answers
from lowmem.data.report import DataReport

__all__ = ["DataReport", "TokenizedDataset", "prompts_and_answers", "tokenize"]
