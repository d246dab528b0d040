"""Counting, and sorting short lists of numbers or words."""

import random

from .vocabulary import LIST_WORDS

COUNTS = "no one two three four five six seven eight nine ten".split()
_HELD_OUT_SALT = 20
SORT_NUMBERS = (
    "Sort these numbers: {}.",
    "Sort {}.",
    "Put these numbers in order: {}.",
    "Sort the list {}.",
)
SORT_NUMBERS_DOWN = ("Sort these numbers from large to small: {}.", "Sort {} in descending order.")
SORT_WORDS = ("Sort these words: {}.", "Put these words in order: {}.", "Sort these words by the alphabet: {}.")
COUNT_UP = ("Count from {} to {}.", "Please count from {} to {}.", "Can you count from {} to {}?")


def joined(items) -> str:
    return ", ".join(map(str, items))


def numbers(rng, low: int = 3, high: int = 7) -> list[int]:
    limit = rng.choice((20, 100, 100, 100, 1000))
    return [rng.randrange(limit) for _ in range(rng.randint(low, high))]


def sort_numbers(rng) -> tuple[str, str]:
    items = numbers(rng)
    if rng.random() < 0.25:
        return rng.choice(SORT_NUMBERS_DOWN).format(joined(items)), joined(sorted(items, reverse=True)) + "."
    return rng.choice(SORT_NUMBERS).format(joined(items)), joined(sorted(items)) + "."


def sort_words(rng) -> tuple[str, str]:
    items = rng.sample(LIST_WORDS, rng.randint(3, 6))
    return rng.choice(SORT_WORDS).format(joined(items)), joined(sorted(items)) + "."


def count_range(rng) -> tuple[str, str]:
    first = rng.randrange(rng.choice((10, 100, 100, 980)))
    last = first + rng.randint(2, 12)
    if rng.random() < 0.25:
        return f"Count down from {last} to {first}.", joined(range(last, first - 1, -1)) + "."
    return rng.choice(COUNT_UP).format(first, last), joined(range(first, last + 1)) + "."


def count_items(rng) -> tuple[str, str]:
    items = rng.sample(LIST_WORDS, rng.randint(2, 10))
    return f"How many words are in this list: {joined(items)}?", f"There are {COUNTS[len(items)]} words in the list."


def count_word(rng) -> tuple[str, str]:
    word, *others = rng.sample(LIST_WORDS, 4)
    items = [word] * rng.randint(1, 5) + [rng.choice(others) for _ in range(rng.randint(1, 5))]
    rng.shuffle(items)
    times = items.count(word)
    question = f"How often does {word} occur in {joined(items)}?"
    return question, f"The word {word} occurs {COUNTS[times]} time{'s' * (times != 1)}."


def extreme(rng) -> tuple[str, str]:
    items = numbers(rng)
    if rng.random() < 0.5:
        return f"What is the largest of {joined(items)}?", f"The largest is {max(items)}."
    return f"What is the smallest of {joined(items)}?", f"The smallest is {min(items)}."


KINDS = (sort_numbers, sort_numbers, sort_words, sort_words, count_range, count_range, count_items, count_word, extreme)


def is_held_out(question: str) -> bool:
    """One question in twenty, by its text: training never sees it."""
    return random.Random(question).randrange(_HELD_OUT_SALT) == 0


def sample(rng, held_out: bool = False) -> tuple[str, str, dict]:
    """A question, its answer, and the kind of task."""
    while True:
        task = rng.choice(KINDS)
        question, answer = task(rng)
        if is_held_out(question) == held_out:
            return question, answer, {"kind": task.__name__}
