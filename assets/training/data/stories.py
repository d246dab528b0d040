"""Short stories on request.

A story is a plot (see `plots`) told with a scene: hero, friend, place, objects, moods. What a scene picks leans on
the thing that was asked for: about half of the picks are the same for every story about a fox and differ from those
about a lamp. So also greedy decoding, which always takes the likeliest word, tells another story for another thing.
"""

import collections
import re
import zlib

from . import plots, vocabulary
from .vocabulary import with_article

LEANING = 0.5
MAX_TRIGRAM = 2
SIGHTS = frozenset(
    "bridge carpet cart cloud door fence fountain garden gate lighthouse mountain oven piano puddle rainbow river "
    "rocket snowman star statue stone storm table tent tower train tree tunnel wagon wall windmill window loom moon ship "
    "castle cave farm forest island lake palace school temple village waterfall well".split()
)
ON = frozenset("beach bridge cliff coast dock farm glacier hill island moor path pier prairie reef road shore".split())
AT = frozenset("bakery harbour hotel lighthouse market mill mine museum port school station theatre well zoo".split())
BY = frozenset("canyon lake lagoon pond quarry river stream waterfall".split())
MUSIC = "banjo drum fiddle flute guitar harp horn piano trumpet violin whistle".split()
NUMBERS = "two three four five six seven eight nine ten eleven twelve twenty thirty forty ninety".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SEASONS = "spring summer autumn winter".split()
WEATHER = "bright chilly clear cloudy cold cool dark dry foggy frosty grey hot icy mild misty rainy stormy sunny warm windy".split()
LOW = (
    "afraid angry ashamed bored confused gloomy homesick jealous lonely nervous puzzled sad scared shy sorry tired upset "
    "worried"
).split()
GLAD = "brave calm cheerful delighted glad grateful happy hopeful merry pleased proud relieved rich thankful".split()
SOUNDS = (
    "bang beep boom buzz clang clatter click crack crash creak crunch drip gurgle hiss howl jingle knock plop pop rattle "
    "roar rumble rustle scratch splash squeak squeal thud thump tinkle whirr whistle whoosh"
).split()
MANNERS = (
    "at once|all day long|as best as possible|boldly|bravely|calmly|carefully|cheerfully|eagerly|firmly|gently|gladly|happily|"
    "in a low voice|kindly|loudly|merrily|neatly|on tiptoe|patiently|politely|proudly|quickly|quietly|seriously|shyly|"
    "silently|slowly|softly|steadily|warmly|wisely|with a big smile|with a sigh|with bright eyes|without fear"
).split("|")
MOVES = (
    "climbed crept danced dashed flew galloped hobbled hopped hurried jumped limped marched paraded raced rolled ran rushed "
    "sailed skipped slid slipped sneaked stamped stomped strolled stumbled swam tiptoed trotted tumbled walked wandered"
).split()
TIMES = (
    "one {weather} morning",
    "one {weather} evening in {month}",
    "early on a {weather} {day}",
    "on the first day of {season}",
    "late one {day} evening",
    "on a {weather} afternoon",
    "in the middle of {season}",
    "before sunrise one {day}",
    "the day after the {month} fair",
    "at the end of a {weather} week",
    "on the longest night of {month}",
    "one {day}, just after breakfast",
)
INTROS = (
    "{N} lived {in_q} with {a_lw} and {num} {x}s.",
    "{N} was the {look} child of {a_lw}.",
    "{N} was {num} years old and never without {his} {o}.",
    "In a {look} house {in_q} lived {N}, who loved {food}.",
    "{N} collected everything that was {look}.",
    "Every {day}, {N} helped the {w} {in_q}.",
)
REQUESTS = (
    "Tell me a story about {}.",
    "Tell me a short story about {}.",
    "Tell me a tale about {}.",
    "Write a story about {}.",
    "Write a short story about {}.",
    "Can you tell me a story about {}?",
    "Please tell a story about {}.",
    "I want to hear a story about {}.",
    "A story about {}, please.",
)
OPEN_REQUESTS = ("Tell me a story.", "Tell me another story.", "Can you tell me a story?", "I want to hear a story.")


def in_place(place: str) -> str:
    preposition = "on" if place in ON else "at" if place in AT else "by" if place in BY else "in"
    return f"{preposition} the {place}"


class Scene(dict):
    """The fields of one story, picked when they are first used."""

    def __init__(self, rng, thing: str, place: str | None = None, hero: str | None = None):
        super().__init__()
        self.rng = rng
        self.thing = thing
        self.uses = collections.Counter()
        names = vocabulary.GIRLS + vocabulary.BOYS
        hero = hero or self.pick(names)
        girl = hero in vocabulary.GIRLS
        friend = self.pick(names)
        while friend == hero:
            friend = rng.choice(names)
        self.update(N=hero, M=friend, t=thing)
        self.update(zip(("he", "him", "his"), ("she", "her", "her") if girl else ("he", "him", "his")))
        if place:
            self["p"] = place

    def pick(self, options):
        """One of `options`: by the thing's leaning in about half of the cases, else any."""
        turn = self.uses[options[0]]
        self.uses[options[0]] += 1
        if self.rng.random() < LEANING:
            return options[zlib.crc32(f"{self.thing}/{options[0]}/{turn}".encode()) % len(options)]
        return options[int(self.rng.random() * len(options))]

    def fresh(self, options):
        """A pick that the story does not have yet."""
        told = set(self.values())
        while (word := self.pick(options)) in told:
            pass
        return word

    def __missing__(self, field: str) -> str:
        value = self.fill(field)
        if not field.startswith(("when", "When", "a_", "A_")):
            self[field] = value
        return value

    def fill(self, field: str) -> str:
        name, second = field.rstrip("2"), "2" if field.endswith("2") else ""
        if name[0].isupper():
            return (text := self[name[0].lower() + name[1:] + second])[0].upper() + text[1:]
        if name.startswith("in_"):
            return in_place(self[name[3:] + second])
        if name.startswith("a_l"):
            return self.described(name[3:] + second)
        if name.startswith("a_"):
            return with_article(self[name[2:] + second])
        if name in ("p", "q"):
            return self.fresh(vocabulary.PLACES)
        if name == "when":
            return self.pick(TIMES).format_map(_Fresh(self))
        if name == "name_intro":
            return self.pick(INTROS).format_map(self)
        if name == "look":
            return self.fresh(vocabulary.LOOKS)
        return self.fresh(FIELDS[name])

    def described(self, noun: str) -> str:
        """The noun with an article and, mostly, an adjective."""
        if noun in ("o", "o2"):
            self[noun] = self.fresh(SMALL_OBJECTS)
            looks = vocabulary.OBJECT_LOOKS
        elif noun == "t" and (self.thing in SIGHTS or self.thing in vocabulary.OBJECTS):
            looks = vocabulary.OBJECT_LOOKS
        else:
            looks = vocabulary.LOOKS
        if self.rng.random() < 0.2:
            return with_article(self[noun])
        return with_article(f"{self.pick(looks)} {self[noun]}")


class _Fresh:
    """Moods of time, picked anew at every use."""

    def __init__(self, scene: Scene):
        self.scene = scene

    def __getitem__(self, field: str) -> str:
        return self.scene.pick(FIELDS[field])


SMALL_OBJECTS = [thing for thing in vocabulary.OBJECTS if thing not in SIGHTS]
FIELDS = {
    "o": SMALL_OBJECTS,
    "x": vocabulary.ANIMALS,
    "w": vocabulary.PEOPLE,
    "food": vocabulary.FOODS,
    "feel": vocabulary.FEELINGS,
    "sound": SOUNDS,
    "num": NUMBERS,
    "day": DAYS,
    "month": MONTHS,
    "season": SEASONS,
    "weather": WEATHER,
    "manner": MANNERS,
    "moved": MOVES,
    "music": MUSIC,
    "fine": vocabulary.OBJECT_LOOKS,
    "low": LOW,
    "glad": GLAD,
}
THINGS = vocabulary.ANIMALS + vocabulary.PEOPLE + sorted(SIGHTS.union(vocabulary.OBJECTS))


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def most_repeated_trigram(text: str) -> int:
    """How often the commonest run of three words occurs."""
    words = words_of(text)
    return max(collections.Counter(zip(words, words[1:], words[2:])).values(), default=0)


def tell(rng, thing: str, place: str | None = None, hero: str | None = None) -> str:
    """A story about `thing`, perhaps with a given place or hero."""
    if thing in SIGHTS:
        choices = plots.SIGHT_PLOTS
    else:
        choices = plots.OBJECT_PLOTS if thing in vocabulary.OBJECTS else plots.CREATURE_PLOTS
    while True:
        scene = Scene(rng, thing, place, hero)
        sentences = []
        for beat in choices[scene.pick(list(choices))]:
            if beat[0] == plots.MAYBE:
                if scene.pick(("told", "told ", "left out")) == "left out":
                    continue
                beat = beat[1:]
            sentence = scene.pick(beat).format_map(scene)
            sentences.append(sentence[0].upper() + sentence[1:])
        text = " ".join(sentences)
        named = words_of(text).count(thing) >= 2
        wanted = all(word is None or word in text for word in (place, hero))
        if named and wanted and most_repeated_trigram(text) <= MAX_TRIGRAM:
            return text


def is_held_out(thing: str, partner: str) -> bool:
    """Pairs of a thing and a place or hero that training never asks for."""
    return zlib.crc32(f"{thing}+{partner}".encode()) % 10 == 0


def request(rng, thing: str, place: str | None = None, hero: str | None = None) -> str:
    subject = with_article(thing)
    if hero:
        child = "girl" if hero in vocabulary.GIRLS else "boy"
        subject += f" and a {child} called {hero}"
    if place:
        subject += f" {in_place(place)}"
    return rng.choice(REQUESTS).format(subject)


def sample(rng, held_out: bool = False) -> tuple[str, str, dict]:
    """A request, its story, and what was asked for."""
    kind = rng.random()
    thing = rng.choice(THINGS)
    if kind < 0.05 and not held_out:
        return rng.choice(OPEN_REQUESTS), tell(rng, thing), {"thing": thing}
    place = hero = None
    if kind >= 0.6:
        while True:
            thing = rng.choice(THINGS)
            place = rng.choice(vocabulary.PLACES) if kind < 0.8 else None
            hero = rng.choice(vocabulary.GIRLS + vocabulary.BOYS) if kind >= 0.8 else None
            if thing != place and is_held_out(thing, place or hero) == held_out:
                break
    return request(rng, thing, place, hero), tell(rng, thing, place, hero), {"thing": thing}
