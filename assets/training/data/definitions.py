"""Definitions of common words, and an honest answer for words that were not taught."""

import json
import pathlib

from .vocabulary import with_article

_WORDS = json.loads((pathlib.Path(__file__).parent.parent / "words.json").read_text())
TAUGHT: dict[str, list[str]] = _WORDS["taught"]
UNKNOWN: list[str] = _WORDS["unknown"]
_TAUGHT_LIST = list(TAUGHT)
UNKNOWN_SHARE = 0.06
QUESTIONS = (
    "Define {}.",
    "Define the word {}.",
    "What does {} mean?",
    "What does the word {} mean?",
    "What is the meaning of {}?",
    "What is the definition of {}?",
    "Explain the word {}.",
)


def answer(word: str) -> str:
    if word not in TAUGHT:
        return f"I have not learned the word {word}."
    pos, gloss = TAUGHT[word]
    return f"{word} ({pos}): {gloss}."


def question(rng, word: str) -> str:
    noun = word not in TAUGHT or TAUGHT[word][0] == "noun"
    if noun and rng.random() < 0.35:
        return f"What is {with_article(word)}?" if rng.random() < 0.7 else f"What is {word}?"
    text = rng.choice(QUESTIONS).format(word)
    return text if rng.random() < 0.9 else text.replace(word, f'"{word}"')


def sample(rng, held_out: bool = False) -> tuple[str, str, dict]:
    """A question, its answer, and the word."""
    unknown = rng.random() < UNKNOWN_SHARE and not held_out
    word = rng.choice(UNKNOWN if unknown else _TAUGHT_LIST)
    return question(rng, word), answer(word), {"word": word}
