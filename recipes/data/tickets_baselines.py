"""Score two baselines on the held-out tickets: regular expressions and the nearest neighbour.

The regular expressions are what a person writes in some twenty minutes with the training rows at hand. The nearest
neighbour returns the answer of the most similar training message (cosine over weighted words and letter sequences).
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
    "twentieth",
]
NAMED_DAYS = {
    "christmas eve": "24 Dec",
    "new year's day": "1 Jan",
    "new year's eve": "31 Dec",
    "valentine": "14 Feb",
    "halloween": "31 Oct",
}
TEAM = {
    "billing": r"charg|invoice|bill|debit|discount|money|vat|fee|paid|voucher|receipt|amount|price",
    "delivery": r"parcel|courier|box|address|tracking|driver|deliver|shipment|package|arrived|order",
    "account": r"log ?in|password|account|profile|e-?mail|user ?name|signed? ?(in|up)|locked",
    "technical": r"screen|crash|battery|sound|restart|freez|wifi|button|heat|camera|update|broken",
}
WANTS = {
    "refund": r"money back|refund|reimburse|return what|full price|credit me",
    "exchange": r"new one|replace|swap|exchange|another one",
    "repair": r"fix|repair|mend|workshop|engineer|technician",
    "cancel": r"cancel|contract|close|terminate|stop",
    "answer": r"why|what|how|explain|know|tell me",
}
MOOD = {
    "angry": r"disgrace|angry|worst|furious|shame|patience|useless|terrible|unacceptable|awful|fed up|dare",
    "happy": r"love|great|fan|five stars|thanks|happy|glad|pleasure|wonderful|best|kind|delighted",
}


def first_match(table: dict[str, str], message: str, default: str) -> str:
    """The first entry of the table whose pattern occurs."""
    return next((label for label, pattern in table.items() if re.search(rf"\b({pattern})", message)), default)


def find_date(message: str) -> str:
    """The date, by a few patterns."""
    for name, date in NAMED_DAYS.items():
        if name in message:
            return date
    if found := re.search(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? {MONTH}", message):
        return f"{int(found[1])} {found[2].capitalize()}"
    if found := re.search(rf"\b{MONTH} (\d{{1,2}})", message):
        return f"{int(found[2])} {found[1].capitalize()}"
    if found := re.search(rf"\b((?:twenty-|thirty-)?)(\w+) of {MONTH}", message):
        tens = {"twenty-": 20, "thirty-": 30}.get(found[1], 0)
        if found[2] in ORDINALS:
            return f"{tens + ORDINALS.index(found[2]) + 1} {found[3].capitalize()}"
    return ""


def by_patterns(message: str) -> str:
    """Answer with regular expressions and key words."""
    message = message.lower()
    answer = {
        "team": first_match(TEAM, message, "technical"),
        "wants": first_match(WANTS, message, "answer"),
        "mood": first_match(MOOD, message, "calm"),
        "since": find_date(message),
    }
    return json.dumps(answer, separators=(",", ":"))


def grams(message: str) -> Counter[str]:
    """Words and letter sequences (3 to 5) of a message."""
    text = f" {message.lower()} "
    counts = Counter(re.findall(r"\w+", text))
    for size in (3, 4, 5):
        counts.update(text[i : i + size] for i in range(len(text) - size + 1))
    return counts


def neighbour_of(train: list[tuple[str, str]]) -> Callable[[str], str]:
    """A function that answers as the most similar training message does."""
    counts = [grams(message) for message, _ in train]
    seen_in = Counter(gram for count in counts for gram in count)
    weight = {gram: math.log(len(train) / n) for gram, n in seen_in.items()}
    index: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row, count in enumerate(counts):
        vector = {gram: (1 + math.log(n)) * weight[gram] for gram, n in count.items()}
        length = math.sqrt(sum(v * v for v in vector.values()))
        for gram, value in vector.items():
            index[gram].append((row, value / length))

    def answer(message: str) -> str:
        score: dict[int, float] = defaultdict(float)
        for gram, n in grams(message).items():
            for row, value in index.get(gram, ()):
                score[row] += (1 + math.log(n)) * weight[gram] * value
        return train[max(score, key=lambda row: score[row])][1]

    return answer


def read(name: str) -> list[tuple[str, str]]:
    """(message, answer) pairs."""
    pairs = []
    for line in (HERE / f"tickets_{name}.jsonl").read_text(encoding="utf-8").splitlines():
        contents = [message["content"] for message in json.loads(line)["messages"][1:]]
        pairs += list(zip(contents[::2], contents[1::2], strict=True))
    return pairs


def score(answer: Callable[[str], str], rows: list[tuple[str, str]]) -> dict[str, float]:
    """Exact match over the answers and over each of their fields."""
    result: Counter[str] = Counter()
    for message, wanted in rows:
        got = answer(message)
        result["exact_match"] += got == wanted
        fields = json.loads(got)
        result.update(name for name, value in json.loads(wanted).items() if fields.get(name) == value)
    return {name: count / len(rows) for name, count in result.items()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    train, heldout = read("train"), read("heldout")
    scores = {
        "regular_expressions": score(by_patterns, heldout),
        "nearest_neighbour": score(neighbour_of(train), heldout),
    }
    if args.json:
        print(json.dumps({"rows": len(heldout), **scores}))
        return
    for name, values in scores.items():
        print(f"{name}: exact match {values.pop('exact_match', 0.0):.1%} of {len(heldout)} rows")
        print("  by field: " + ", ".join(f"{k} {v:.0%}" for k, v in sorted(values.items())))


if __name__ == "__main__":
    main()
