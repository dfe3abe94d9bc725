"""Write the ticket data set: a customer's message in, one fixed JSON object out.

The output depends on the seed alone. `--check` compares the files beside this script with what it would write.
"""

from __future__ import annotations

import argparse
import calendar
import json
import random
import sys
from pathlib import Path

SYSTEM = (
    "Reply in JSON: team (billing, technical, delivery, account), wants (refund, exchange, repair, answer, cancel), "
    "mood (angry, calm, happy), since (day and month: 7 Mar)."
)
TRAIN_ROWS, MESSAGES_PER_ROW, HELDOUT_ROWS, SEED = 400, 5, 100, 7

# Every list is what people write; the key is what the help desk files it under.
PROBLEMS = {
    "billing": """I was charged twice | the invoice shows the wrong total | my card got debited again
        | the discount was never applied | you took more money than agreed | the VAT on my bill is off
        | my voucher was ignored at the till | the receipt lists things I never bought""",
    "technical": """the screen stays black | it crashes on start-up | the battery dies within an hour
        | there is no sound at all | it keeps restarting | the hinge came loose
        | the buttons stopped reacting | it overheats on my lap""",
    "delivery": """the parcel never came | the courier left it with a stranger | half of the box was missing
        | it went to my old address | the van drove past my house | it arrived soaked
        | I got somebody else's order | the shipment is stuck at customs""",
    "account": """I cannot log in | the password link leads nowhere | my profile shows another person
        | the code by text message never comes | the site says I do not exist | my login is blocked
        | somebody signed in from abroad | my name is spelled wrong everywhere""",
}
WISHES = {
    "refund": """I want my money back | please return what I paid | send the sum to my card
        | I should not have to pay for this | undo the payment""",
    "exchange": """send me a new one | I would like a fresh unit | swap it, please | ship another one
        | let me trade it for a working one""",
    "repair": """can somebody mend it | please fix it | let your workshop look at it
        | put it right | make it work again""",
    "answer": """what is going on | could you tell me why | I wonder what happened
        | please explain | how can that be""",
    "cancel": """I am done, end my contract | close it for good | stop everything from now on
        | take me off your books | I am leaving you""",
}
MOODS = {
    "angry": """This is a disgrace | I have had it with you | Worst shop ever | Who runs this circus | I am furious
        | What a bad joke | Shame on you | My patience is over""",
    "calm": """Hello there | Good morning | To whom it may concern | Dear team | Hi, a quick note
        | For your information | Regarding my purchase | Greetings""",
    "happy": """I adore your shop | Five stars from me | Hats off to your staff | Always a pleasure
        | Simply brilliant service | You guys rock | So glad I found you | Keep up the lovely work""",
}
FRAMES = [
    "{Mood}. {Since} {problem}. {Wish}.",
    "{Mood}! {Problem} {since}. {Wish}.",
    "{Problem} {since}, {wish}. {Mood}.",
    "{Since}, {problem}; {wish}. {Mood}!",
    "{Mood}. {Wish}: {problem} {since}.",
    "{Wish}. {Problem} {since}. {Mood}.",
    "{Mood}, {wish}, because {since} {problem}.",
    "{Problem}. {Wish}. It has been so {since}. {Mood}.",
]
ORDINALS = [
    "_",
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
    "Christmas Eve": "24 Dec",
    "Boxing Day": "26 Dec",
    "New Year's Day": "1 Jan",
    "New Year's Eve": "31 Dec",
    "Valentine's Day": "14 Feb",
    "Halloween": "31 Oct",
}


def split(text: str) -> list[str]:
    """The entries of a list written with bars."""
    return [" ".join(entry.split()) for entry in text.split("|")]


def ordinal(day: int) -> str:
    """21 -> 21st."""
    return f"{day}{'th' if 10 < day < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"


def ordinal_word(day: int) -> str:
    """21 -> twenty-first."""
    if day <= 20:
        return ORDINALS[day]
    return "thirtieth" if day == 30 else f"{'twenty' if day < 30 else 'thirty'}-{ORDINALS[day % 10]}"


def draw_date(rng: random.Random) -> tuple[str, str]:
    """A date as people write it, and as day and month."""
    if rng.random() < 0.25:
        name = rng.choice(sorted(NAMED_DAYS))
        return f"since {name}", NAMED_DAYS[name]
    month = rng.randint(1, 12)
    day = rng.randint(1, calendar.monthrange(2025, month)[1])
    name = calendar.month_name[month]
    wording = rng.choice(
        [
            f"{day} {name}",
            f"{name} {day}",
            f"{name} {ordinal(day)}",
            f"the {ordinal(day)} of {name}",
            f"the {ordinal_word(day)} of {name}",
        ]
    )
    return f"since {wording}", f"{day} {name[:3]}"


def draw_row(rng: random.Random) -> tuple[str, str]:
    """One message with its answer."""
    picked = {}
    words = {}
    for field, word, table in (("team", "problem", PROBLEMS), ("wants", "wish", WISHES), ("mood", "mood", MOODS)):
        picked[field] = rng.choice(sorted(table))
        words[word] = rng.choice(split(table[picked[field]]))
    words["since"], picked["since"] = draw_date(rng)
    words |= {word.capitalize(): text[0].upper() + text[1:] for word, text in words.items()}
    return rng.choice(FRAMES).format(**words), json.dumps(picked, separators=(",", ":"))


def draw_rows(seed: int) -> tuple[list[list[tuple[str, str]]], list[list[tuple[str, str]]]]:
    """Training rows of several messages, held-out rows of one; no message and no answer is in both."""
    rng = random.Random(seed)
    messages: dict[str, str] = {}
    answers: set[str] = set()
    while len(messages) < TRAIN_ROWS * MESSAGES_PER_ROW + HELDOUT_ROWS:
        message, answer = draw_row(rng)
        # Answers are few enough to recur in training, and held-out ones must not be among them.
        held_out = len(messages) >= TRAIN_ROWS * MESSAGES_PER_ROW
        if message not in messages and not (held_out and answer in answers):
            messages[message] = answer
            answers.add(answer)
    pairs = list(messages.items())
    cut = TRAIN_ROWS * MESSAGES_PER_ROW
    train = [pairs[i : i + MESSAGES_PER_ROW] for i in range(0, cut, MESSAGES_PER_ROW)]
    return train, [[pair] for pair in pairs[cut:]]


def as_jsonl(rows: list[list[tuple[str, str]]]) -> str:
    """Rows as JSON lines in chat form: one after another, an agent files the messages of a session."""
    lines = []
    for row in rows:
        turns = [{"role": "system", "content": SYSTEM}]
        for message, answer in row:
            turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    args = parser.parse_args()
    status = 0
    for name, rows in zip(("train", "heldout"), draw_rows(args.seed), strict=True):
        path: Path = args.out / f"tickets_{name}.jsonl"
        wanted = as_jsonl(rows).encode()
        if not args.check:
            path.write_bytes(wanted)
            print(f"wrote {path.name}: {len(rows)} rows")
        elif not path.is_file() or path.read_bytes() != wanted:
            print(f"{path.name} differs from what the generator writes", file=sys.stderr)
            status = 1
        else:
            print(f"{path.name}: as generated")
    return status


if __name__ == "__main__":
    sys.exit(main())
