"""Choose the words that comoe-tiny learns to define, from the WordNet 3.0 database files.

    python make_words.py DICT words.json

DICT is the folder with `index.*`, `data.*` and `cntlist.rev` (Debian package `wordnet-base`).
The result is committed, so that training needs no package. It holds

* `taught`: word -> [part of speech, gloss], the words the model defines;
* `unknown`: words it is taught to decline, so that it does not make definitions up.

A word is common when the texts that WordNet's authors tagged by hand use it often. Its gloss is the first
clause of the gloss of its most frequent sense.
"""

import argparse
import json
import pathlib
import re

from data import vocabulary

TAUGHT = 2000
UNKNOWN = 800
GLOSS_WORDS = range(3, 16)
POS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
SENSE_TYPES = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
ANIMAL_FILE = b"05"  # the number of WordNet's file of animals
# Function words, whose glosses are of no use, and glosses that do not belong in a toy model.
SKIPPED_WORDS = frozenset(
    "the and but for not with from into onto over under than that this these those who what when where why how "
    "have has had was were been being are does did will would can could may might must shall should more most "
    "very such other another each every some any all both few many much own same his her its their our your "
    "negro darky bastard christ jewish slave corpse cop tsh gay".split()
)
SKIPPED_GLOSS = re.compile(
    r"sex|genital|copulat|rape|prostitut|offensive|derogat|slur|nazi|genus|slang|obscene|vulgar|murder|suicide"
    r"|excrement|urin|feces|breast|penis|vagina|god\b|jesus|christ|negro|race\b",
    re.IGNORECASE,
)


def tagged_counts(folder: pathlib.Path) -> dict[tuple[str, str], int]:
    """How often each (word, part of speech) was tagged, all senses together."""
    counts: dict[tuple[str, str], int] = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        sense_key, _, count = line.split()
        word, rest = sense_key.split("%")
        key = (word, SENSE_TYPES[rest[0]])
        counts[key] = counts.get(key, 0) + int(count)
    return counts


def senses_of(folder: pathlib.Path, pos: str) -> dict[str, list[int]]:
    """Word -> byte offsets of its senses in `data.<pos>`, most frequent first."""
    senses = {}
    for line in (folder / f"index.{pos}").read_text().splitlines():
        if line.startswith(" "):
            continue
        fields = line.split()
        pointers = int(fields[3])
        senses[fields[0]] = [int(offset) for offset in fields[6 + pointers :]]
    return senses


def short_gloss(data: bytes, offset: int) -> str | None:
    """The first clause of the gloss at `offset`, or None where it is too short, too long or unsuitable."""
    line = data[offset : data.index(b"\n", offset)].decode()
    gloss = re.sub(r"\([^)]*\)", "", line.split("|", 1)[1])
    gloss = gloss.split(";")[0].split(":")[0].split('"')[0]
    gloss = re.sub(r"\s+", " ", gloss).strip(" ,.")
    plain = re.fullmatch(r"[a-zA-Z ,'-]+", gloss)
    if not plain or len(gloss.split()) not in GLOSS_WORDS or SKIPPED_GLOSS.search(gloss):
        return None
    return gloss.replace(" ,", ",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dict", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()

    counts = tagged_counts(args.dict)
    senses = {pos: senses_of(args.dict, pos) for pos in POS}
    data = {pos: (args.dict / f"data.{pos}").read_bytes() for pos in POS}

    def entry(word: str) -> tuple[int, str, str] | None:
        """(count, part of speech, gloss) of a word, by its most used part of speech."""
        known = [(counts.get((word, pos), 0), pos) for pos in POS if word in senses[pos]]
        if not known or not re.fullmatch(r"[a-z]{3,12}", word) or word in SKIPPED_WORDS:
            return None
        count, pos = max(known, key=lambda item: item[0])
        offsets = senses[pos][word]
        if word in vocabulary.ANIMALS and pos == "noun":
            # The animal itself, not the person who is called after it.
            offsets = [at for at in offsets if data[pos][at : at + 12].split()[1] == ANIMAL_FILE] or offsets
        gloss = short_gloss(data[pos], offsets[0])
        if gloss is None or word in gloss.lower().split():
            return None
        return count, POS[pos], gloss

    ranked = []
    for word in sorted({word for pos in POS for word in senses[pos]}):
        found = entry(word)
        if found:
            ranked.append((found[0], word, found[1], found[2]))
    ranked.sort(key=lambda item: (-item[0], item[1]))
    told = set(vocabulary.STORY_NOUNS)
    nouns_first = sorted(ranked, key=lambda item: not (item[1] in told and item[2] == "noun"))
    taught = {word: [pos, gloss] for _, word, pos, gloss in nouns_first[:TAUGHT]}
    rare = [word for count, word, pos, _ in ranked if count == 1 and pos == "noun" and word not in taught]
    unknown = rare[:: max(1, len(rare) // UNKNOWN)][:UNKNOWN]
    words = {"taught": dict(sorted(taught.items())), "unknown": sorted(unknown)}
    args.out.write_text(json.dumps(words, indent=0, ensure_ascii=False) + "\n")
    print(f"{len(taught)} taught, {len(unknown)} unknown, to {args.out}")


if __name__ == "__main__":
    main()
