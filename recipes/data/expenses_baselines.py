"""Score two baselines on the held-out expense notes: regular expressions and nearest neighbour.

The regular expressions are what a person writes in some twenty minutes with the training rows
at hand. The nearest neighbour returns the answer of the most similar training note (cosine over
weighted character n-grams).
"""

from __future__ import annotations

import argparse
import calendar
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
MONTH = {name[:3].lower(): number for number, name in enumerate(calendar.month_name) if name}
MONTH_PATTERN = "(" + "|".join(MONTH) + ")[a-z]*"
NAMED_DAYS = {
    "christmas eve": "12-24",
    "christmas": "12-25",
    "new year's eve": "12-31",
    "new year": "01-01",
    "halloween": "10-31",
    "valentine": "02-14",
}
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth "
    "thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
).split()
NUMBERS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
CURRENCY = {
    "EUR": r"€|eur|euros?",
    "USD": r"\$|usd|dollars?|bucks",
    "GBP": r"£|gbp|pounds?|quid",
}
UNIT = "(?:" + "|".join(CURRENCY.values()) + ")"
CATEGORY = {
    "travel": r"taxi|cab|uber|lyft|train|flight|plane|bus|tram|ferry|car|van|coach|bike|parking"
    r"|toll|petrol|diesel|airport|station|rental|baggage|boarding fee|ride",
    "meals": r"lunch|dinner|breakfast|coffee|tea|pizza|sandwich(?:es)?|sushi|drinks|cake|catering"
    r"|wine|beers|burgers?|curry|steak|salad|buffet|croissants|fruit",
    "lodging": r"hotel|hostel|motel|inn|airbnb|rooms?|nights?|guest house|apartment|stay|flat"
    r"|bed|bed and breakfast|suite|cabin|villa|resort|lodge|check-out",
    "office": r"paper|pens?|lamp|toner|notes|markers|chair|stapler|envelopes|stamps|keyboard"
    r"|monitor|headset|cables?|notebooks?|batteries|mouse|whiteboard|cabinet",
    "software": r"licen[cs]e|subscription|app|cloud storage|hosting|domain|github|slack|zoom|vpn"
    r"|windows|photoshop|plug-in|add-on|api|antivirus|password|server|seats",
}
OWN = (
    r"\b(my own|mine|from my|used my|my bank|my salary|out of my|pa(id|y) (it|me)|like that back)\b"
    r"|\bi (paid|covered|fronted|advanced|settled|put|am owed)\b|\bowes? me|to me\b"
)
COMPANY = (
    r"(company|business|work) card|billed to|firm|corporate|office (paid|covered)|employer picked"
    r"|boss|manager|budget,|team budget|accounts|accounting|finance|nothing|no refund|not out of"
)


def word_number(text: str) -> int | None:
    """Read a number word below 1000, such as "two hundred and twelve"."""
    total = 0
    for word in re.findall("[a-z]+", text.lower()):
        if word == "hundred":
            total = (total or 1) * 100
        elif word in NUMBERS:
            total += NUMBERS.index(word) + 1
        elif word in TENS:
            total += (TENS.index(word) + 2) * 10
        elif word not in ("a", "and"):
            return None
    return total or None


def find_date(note: str) -> str:
    """Find the date with a few patterns."""
    for name, date in NAMED_DAYS.items():
        if name in note:
            return date
    found = re.search(r"\b(\d\d)\.(\d\d)\.", note)
    if found:
        return f"{found[2]}-{found[1]}"
    found = re.search(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? {MONTH_PATTERN}\b", note)
    if found:
        return f"{MONTH[found[2]]:02d}-{int(found[1]):02d}"
    found = re.search(rf"\b{MONTH_PATTERN} (\d{{1,2}})(?:st|nd|rd|th)?\b", note)
    if found:
        return f"{MONTH[found[1]]:02d}-{int(found[2]):02d}"
    found = re.search(rf"\b((?:twenty-|thirty-)?)(\w+) of {MONTH_PATTERN}\b", note)
    if found and found[2] in ORDINALS:
        day = ORDINALS.index(found[2]) + 1 + {"twenty-": 20, "thirty-": 30}.get(found[1], 0)
        return f"{MONTH[found[3]]:02d}-{day:02d}"
    return ""


def find_amount(note: str) -> str:
    """Find the first amount that stands beside a currency."""
    note = re.sub(r"(\d)(?:\.(\d))?k\b", lambda m: f"{m[1]}{m[2] or 0}00", note)
    figure = r"(\d[\d,]*(?:\.\d\d)?)"
    found = re.search(rf"{UNIT} ?{figure}", note) or re.search(rf"{figure} ?{UNIT}", note)
    if found:
        text = re.sub(r",(\d\d)$", r".\1", found[1].rstrip(","))
        cents = re.match(r" (\d\d)\b(?!\.)", note[found.end() :])
        if cents and "." not in text:
            text += f".{cents[1]}"
        return f"{float(text.replace(',', '')):.2f}"
    words = "|".join(["a", "and", "hundred", *NUMBERS, *TENS])
    found = re.search(rf"\b((?:(?:{words})[ -])+){UNIT}((?: (?:{words})\b)?)", note)
    if found:
        whole, cent = word_number(found[1]), word_number(found[2])
        return f"{whole or 0}.{cent or 0:02d}"
    return ""


def by_patterns(note: str) -> str:
    """Answer with regular expressions and key words."""
    note = note.lower()
    currency = next(
        (c for c, unit in CURRENCY.items() if re.search(rf"(?<![a-z]){unit}", note)), ""
    )
    hits = {c: re.search(rf"\b({words})\b", note) for c, words in CATEGORY.items()}
    starts = {c: hit.start() for c, hit in hits.items() if hit}
    category = min(starts, key=lambda c: starts[c], default="office")
    own = not re.search(COMPANY, note) and bool(re.search(OWN, note))
    return (
        f'{{"date":"{find_date(note)}","amount":{find_amount(note)},"currency":"{currency}",'
        f'"category":"{category}","refund":{"true" if own else "false"}}}'
    )


def grams(note: str) -> Counter[str]:
    """Count the words and the character n-grams (3 to 5) of a note."""
    text = f" {note.lower()} "
    counts = Counter(re.findall(r"\w+", text))
    for size in (3, 4, 5):
        counts.update(text[i : i + size] for i in range(len(text) - size + 1))
    return counts


def neighbour_of(train: list[tuple[str, str]]) -> Callable[[str], str]:
    """Return a function that answers as the most similar training note does."""
    counts = [grams(note) for note, _ in train]
    seen_in = Counter(gram for count in counts for gram in count)
    weight = {gram: math.log(len(train) / n) for gram, n in seen_in.items()}
    index: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row, count in enumerate(counts):
        vector = {gram: (1 + math.log(n)) * weight[gram] for gram, n in count.items()}
        length = math.sqrt(sum(v * v for v in vector.values()))
        for gram, value in vector.items():
            index[gram].append((row, value / length))

    def answer(note: str) -> str:
        score: dict[int, float] = defaultdict(float)
        for gram, n in grams(note).items():
            for row, value in index.get(gram, ()):
                score[row] += (1 + math.log(n)) * weight[gram] * value
        return train[max(score, key=lambda row: score[row])][1]

    return answer


def read(name: str) -> list[tuple[str, str]]:
    """Read (note, answer) pairs."""
    pairs = []
    for line in (HERE / f"expenses_{name}.jsonl").read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        pairs.append((messages[-2]["content"], messages[-1]["content"]))
    return pairs


def score(answer: Callable[[str], str], rows: list[tuple[str, str]]) -> dict[str, float]:
    """Return exact match over the answers and over each of their fields."""
    result: Counter[str] = Counter()
    field = re.compile(r'"(\w+)":([^,}]*)')
    for note, wanted in rows:
        got = answer(note)
        result["exact_match"] += got == wanted
        fields = dict(field.findall(got))
        result.update(name for name, value in field.findall(wanted) if fields.get(name) == value)
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
        print(f"{name}: exact match {values.pop('exact_match'):.1%} of {len(heldout)} rows")
        print("  by field: " + ", ".join(f"{k} {v:.0%}" for k, v in sorted(values.items())))


if __name__ == "__main__":
    main()
