"""Write the expense-note data set: free text in, one fixed JSON object out.

The output depends on the seed alone. ``--check`` compares the files that lie beside this
script with what it would write, and changes nothing.
"""

from __future__ import annotations

import argparse
import calendar
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

SYSTEM = (
    "Turn the expense note into JSON: date (MM-DD), amount (two decimals), "
    "currency (EUR, USD, GBP), category (travel, meals, lodging, office, software), "
    "refund (true if the writer paid)."
)
TRAIN_ROWS = 1000
HELDOUT_ROWS = 100
SEED = 20

MONTHS = list(calendar.month_name)[1:]
SHORT_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sept", "Oct", "Nov", "Dec"]
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINAL_ONES = (
    "_ first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth "
    "thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"
).split()
NAMED_DAYS = {
    "New Year's Day": (1, 1),
    "Valentine's Day": (2, 14),
    "St Patrick's Day": (3, 17),
    "May Day": (5, 1),
    "Halloween": (10, 31),
    "Christmas Eve": (12, 24),
    "Christmas Day": (12, 25),
    "Boxing Day": (12, 26),
    "New Year's Eve": (12, 31),
}

# Per category: objects that were paid for. The part after "//" occurs in held-out rows only.
ITEMS = {
    "travel": """taxi to the airport | train to Leeds | return flight to Oslo | ferry crossing |
        tram pass | petrol for the van | motorway toll | seat upgrade on the plane
        | ride to the station | coach to Dover | bike hire | mileage top-up
        | sleeper berth to Vienna | boarding fee | shuttle from the terminal | diesel refill
        | lift across town | rickshaw tour to the site
        | Eurostar to Lille | chauffeur for the visitors | tunnel charge | excess baggage | scooter
        rental | congestion charge | limousine transfer | Lyft to the fair | helicopter hop | van
        hire // gondola to the summit | Ryanair to Madrid | car hire""",
    "meals": """lunch with the client | team dinner | croissants | sandwiches for the workshop |
        pizza for the night shift | breakfast with a supplier | sushi with the auditors | cake for
        Mia's farewell | tapas with the partners | bagels for the stand-up | juice and fruit
        | burgers on the late shift | curry with the new hires | ice cream for the crew | biscuits
        | noodles between meetings | steak with the investors | catering for the board | ramen with
        the interns | champagne for the winners | salad at the trade fair | buffet for the guests |
        espresso round | tacos with the sales folks | fish and chips | beers with the press
        | barbecue for the warehouse | cheese platter // kebabs for the movers | soup
        | doughnuts""",
    "lodging": """hotel in Lyon | hostel bed | two nights at the Hilton | guest house by the venue |
        Airbnb in the old town | motel off the highway | inn by the river | bed and breakfast |
        stay at the Marriott | overnight stay in Turin | holiday flat | late check-out | extra night
        in Bonn | single with a view | serviced apartment | cabin for the retreat | double at the
        lodge | campsite pitch | suite for the speaker | boarding house | dorm bed in Porto |
        resort booking | short let in Ghent | villa for the workshop | bunk in the mountain hut |
        minibar-free twin | Holiday Inn | tourist tax at check-in // pension in Graz | night at
        the Ibis | chalet for the offsite""",
    "office": """printer paper | box of pens | desk lamp | toner | sticky notes | whiteboard markers
        | ergonomic chair | stapler | envelopes and stamps | filing cabinet | ring binders |
        extension lead | keyboard | monitor stand | scissors and tape | headset | USB cables |
        notebooks | label maker | shredder | wall calendar | mouse pad | fan heater | whiteboard |
        batteries | wastepaper basket | laminator | rubber bands // coat rack | hole punch
        | ink cartridges""",
    "software": """Figma licence | GitHub seats | antivirus renewal | cloud storage | Zoom
        subscription | domain name | Photoshop upgrade | password manager | API credits | web
        hosting | Excel add-in | Slack plan | VPN service | Windows key | backup tool | IDE
        renewal | spreadsheet plug-in | survey platform | server instance | Dropbox | speech-to-text
        minutes | Jira add-on | video editor | SSL certificate | ChatGPT Plus | code signing key
        | CRM accounts | Adobe fonts // bug tracker | database hosting | Notion plan""",
}
OWN = """out of my own pocket | paid it myself | my own card took the hit | I'd like that back |
    please pay me back | I covered it | I fronted the money | from my wallet | I am owed this |
    the company still owes me | I put up the cash | still waiting for my refund | came off my
    salary account | no company card at hand, so I paid | the firm has to refund me | my bank
    account is lighter now | the office was closed, so I advanced it | not billed to the firm, I
    settled it | cash, mine | corporate card refused, used my Visa | accounts should send me the
    money | the employer must return it to me"""
COMPANY = """on the company card | billed to the firm | the company already settled it | nothing
    owed to me | the office paid | invoice went to accounts | finance took care of it | my boss put
    it on her work card | no refund needed | straight from the team budget | the employer picked up
    the tab | I used the business card | accounting wired it | I paid nothing | head office covered
    it | not out of my pocket | it cost me nothing | petty cash box covered it | my manager paid |
    I never had to pay | on my work card | I need nothing back | I only signed, they paid"""
SYMBOLS = {"EUR": "€", "USD": "$", "GBP": "£"}
WORDS = {"EUR": ["euros"], "USD": ["dollars", "bucks"], "GBP": ["pounds", "quid"]}
ASIDES = [
    "for {n} people",
    "there were {n} of us",
    "ref {r}",
    "quoted at {a} at first",
    "down from {a}",
    "up from {a}",
    "the budget was {a}",
    "not {a} as planned",
]
CONTEXTS = """before the client lunch | near the airport | for the hotel project | during the train
    strike | for the new app | while the printer was broken | after the flight | for the cloud team
    | ahead of the team dinner | for the room upstairs"""
FRAMES = [
    "{item} {on}, {amount}, {payer}",
    "{amount} for the {item} {on}; {payer}",
    "{on} the {item} came to {amount}, {payer}",
    "Spent {amount} {on}: {item}. {Payer}",
    "{item}: {amount}. {Payer}. That was {on}",
    "{Payer}: {item}, {amount}, {on}",
    "{on}, {item} for {amount} - {payer}",
    "The {item} {on} cost {amount}. {Payer}",
    "{item}, {payer}, {amount} {on}",
    "Please file {amount}, {item}, {on}. {Payer}",
]


@dataclass(frozen=True)
class Row:
    """One note and the object it stands for."""

    note: str
    answer: str


def split(text: str) -> list[str]:
    """Return the entries of a list written with bars."""
    return [" ".join(entry.split()) for entry in text.split("|")]


def number_words(value: int) -> str:
    """Spell a number below 1000."""
    if value < 20:
        return ONES[value]
    if value < 100:
        return TENS[value // 10] + (f"-{ONES[value % 10]}" if value % 10 else "")
    hundreds = "a hundred" if value < 200 else f"{ONES[value // 100]} hundred"
    return hundreds + (f" and {number_words(value % 100)}" if value % 100 else "")


def thousand_words(value: int) -> str:
    """Spell a multiple of 100 from 1000 up as people say it: "fourteen hundred"."""
    if value % 1000 == 0:
        return f"{ONES[value // 1000]} thousand"
    return f"{number_words(value // 100)} hundred"


def ordinal_words(day: int) -> str:
    """Spell a day of the month: 21 is "twenty-first"."""
    if day < 20:
        return ORDINAL_ONES[day]
    if day % 10 == 0:
        return {20: "twentieth", 30: "thirtieth"}[day]
    return f"{TENS[day // 10]}-{ORDINAL_ONES[day % 10]}"


def ordinal(day: int) -> str:
    """Write a day with its ending: 21 is "21st"."""
    ending = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def date_phrase(rng: random.Random) -> tuple[str, str]:
    """Draw a date; return its wording and MM-DD."""
    if rng.random() < 0.2:
        name = rng.choice(sorted(NAMED_DAYS))
        month, day = NAMED_DAYS[name]
        if rng.random() < 0.4 and day < 31:
            return f"the day after {name}", f"{month:02d}-{day + 1:02d}"
        return f"on {name}", f"{month:02d}-{day:02d}"
    month = rng.randint(1, 12)
    last = calendar.monthrange(2025, month)[1]
    name = rng.choice([MONTHS[month - 1], SHORT_MONTHS[month - 1]])
    if rng.random() < 0.1:
        return f"on the last day of {MONTHS[month - 1]}", f"{month:02d}-{last:02d}"
    day = rng.randint(1, last)
    wording = rng.choice(
        [
            f"{day} {name}",
            f"{name} {day}",
            f"the {ordinal(day)} of {name}",
            f"{name} {ordinal(day)}",
            f"the {ordinal_words(day)} of {MONTHS[month - 1]}",
            f"{day:02d}.{month:02d}.",
        ]
    )
    return f"on {wording}", f"{month:02d}-{day:02d}"


def money(whole: int, cents: int, currency: str, rng: random.Random) -> str:
    """Word an amount in one of the ways people write it."""
    word = rng.choice(WORDS[currency])
    symbol = SYMBOLS[currency]
    if cents == 0:
        figure = f"{whole:,}" if rng.random() < 0.5 else str(whole)
        forms = [f"{symbol}{figure}", f"{figure} {word}", f"{figure} {currency}"]
        if whole >= 1000:
            forms += [f"{whole / 1000:g}k {word}", f"{thousand_words(whole)} {word}"] * 2
        else:
            forms += [f"{number_words(whole)} {word}"] * 2
        return rng.choice(forms)
    dotted = f"{whole}.{cents:02d}"
    forms = [
        f"{symbol}{dotted}",
        f"{dotted} {word}",
        f"{currency} {dotted}",
        f"{whole},{cents:02d} {symbol}",
        f"{whole} {word} {cents:02d}",
    ]
    if cents % 10 == 0:
        forms += [f"{number_words(whole)} {word} {number_words(cents)}"] * 2
    return rng.choice(forms)


def draw_amount(rng: random.Random) -> tuple[int, int]:
    """Draw whole units and cents; large amounts are round."""
    kind = rng.random()
    if kind < 0.2:
        return rng.randrange(1000, 3100, 100), 0
    if kind < 0.45:
        return rng.randint(3, 480), 0
    cents = rng.choice([10, 20, 30, 40, 50, 50, 60, 70, 80, 90, rng.randint(1, 99)])
    return rng.randint(3, 180), cents


def draw_row(rng: random.Random, items: dict[str, list[str]]) -> Row:
    """Draw one note with its answer."""
    on, date = date_phrase(rng)
    whole, cents = draw_amount(rng)
    currency = rng.choice(sorted(SYMBOLS))
    category = rng.choice(sorted(items))
    own = rng.random() < 0.5
    payer = rng.choice(split(OWN if own else COMPANY))
    item = rng.choice(items[category])
    if rng.random() < 0.25:
        item += f" {rng.choice(split(CONTEXTS))}"
    if rng.random() < 0.5:
        other = money(*draw_amount(rng), currency, rng)
        aside = rng.choice(ASIDES)
        reference = rng.randint(100, 999)
        item += f" ({aside.format(n=rng.randint(2, 12), a=other, r=reference)})"
    note = rng.choice(FRAMES).format(
        item=item,
        on=on,
        amount=money(whole, cents, currency, rng),
        payer=payer,
        Payer=payer[0].upper() + payer[1:],
    )
    answer = (
        f'{{"date":"{date}","amount":{whole}.{cents:02d},"currency":"{currency}",'
        f'"category":"{category}","refund":{"true" if own else "false"}}}'
    )
    return Row(note[0].upper() + note[1:] + ("" if note.endswith(".") else "."), answer)


def draw_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Draw the training and the held-out rows; no note and no answer is in both."""
    seen: dict[str, list[str]] = {}
    every: dict[str, list[str]] = {}
    for category, text in ITEMS.items():
        first, second = text.split("//")
        seen[category] = split(first)
        every[category] = split(first) + split(second)
    rng = random.Random(seed)
    rows: list[Row] = []
    notes: set[str] = set()
    answers: set[str] = set()
    while len(rows) < TRAIN_ROWS + HELDOUT_ROWS:
        row = draw_row(rng, seen if len(rows) < TRAIN_ROWS else every)
        if row.note not in notes and row.answer not in answers:
            notes.add(row.note)
            answers.add(row.answer)
            rows.append(row)
    return rows[:TRAIN_ROWS], rows[TRAIN_ROWS:]


def as_jsonl(rows: list[Row]) -> str:
    """Return rows as JSON lines in chat form."""
    lines = []
    for row in rows:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row.note},
            {"role": "assistant", "content": row.answer},
        ]
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False))
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
        path: Path = args.out / f"expenses_{name}.jsonl"
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
