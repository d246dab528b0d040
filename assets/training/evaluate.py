"""The held-out bars of comoe-tiny, decoded greedily from the exported BF16 weights in F32 arithmetic.

    python evaluate.py FOLDER [--report report.json] [--scale 1.0]

Prints one table of the bars and one of the routing. Exits with 1 where a bar is missed.
"""

import argparse
import collections
import json
import pathlib
import random
import re
import sys

import torch

import chat
import data
import model as tiny
from data import arithmetic, definitions, lists, smalltalk, stories

SEED = 20_000_003
CHUNK = 256
MAX_SAME_SENTENCE = 10
MAX_SAME_TRIGRAM = 3
STORIES = 200
SLOTS = (4, 6, 8, 12)


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@torch.no_grad()
def greedy(model: tiny.Model, talk: chat.Chat, conversations, limit: int = 256) -> list[tuple[str, bool]]:
    """(answer, whether it ended by itself) for each conversation. Recomputes the context at every step."""
    device = model.embed.device
    prompts = [talk.prompt(messages) for messages in conversations]
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for first in range(0, len(prompts), CHUNK):
        active = list(range(first, min(first + CHUNK, len(prompts))))
        for _ in range(limit):
            rows = [prompts[i] + answers[i] for i in active]
            longest = max(map(len, rows))
            tokens = torch.tensor([row + [chat.PAD] * (longest - len(row)) for row in rows], device=device)
            x, _ = model.hidden(tokens)
            last = torch.tensor([len(row) - 1 for row in rows], device=device)
            best = (x[torch.arange(len(rows), device=device), last] @ model.embed.T).argmax(-1).tolist()
            for i, token in zip(active, best):
                if token in (chat.END, chat.PAD):
                    ended[i] = True
                else:
                    answers[i].append(token)
            active = [i for i in active if not ended[i]]
            if not active:
                break
    return [(talk.decode(ids), end) for ids, end in zip(answers, ended)]


class Bars:
    """Runs each skill and collects (name, measured, bar, unit, passed)."""

    def __init__(self, model: tiny.Model, talk: chat.Chat, scale: float):
        self.model, self.talk, self.scale = model, talk, scale
        self.rng = random.Random(SEED)
        self.rows: list[dict] = []
        self.failures: dict[str, list] = {}
        self.examples: dict[str, list] = {}

    def count(self, full: int) -> int:
        return max(4, int(full * self.scale))

    def record(self, name: str, value: float, bar: float | None, text: str, low_is_good: bool = False) -> None:
        passed = bar is None or (value <= bar if low_is_good else value >= bar)
        self.rows.append({"name": name, "value": value, "bar": bar, "text": text, "passed": passed})

    def exact(self, name: str, bar: float | None, cases: list[tuple[list, tuple[str, ...]]]) -> None:
        """Share of the conversations whose answer is one of those allowed, to the letter."""
        answers = greedy(self.model, self.talk, [messages for messages, _ in cases])
        right = [answer in allowed and ended for (answer, ended), (_, allowed) in zip(answers, cases)]
        triples = [(m[-1]["content"], answer, allowed[0]) for (m, allowed), (answer, _) in zip(cases, answers)]
        self.failures[name] = [t for t, ok in zip(triples, right) if not ok][:8]
        self.examples[name] = triples[:3]
        share = 100 * sum(right) / len(right)
        self.record(name, share, bar, f"{share:.1f} % of {len(cases)}")

    def arithmetic(self) -> None:
        for name, sign in (("sums below 1,000", "plus"), ("differences below 1,000", "minus")):
            cases = []
            while len(cases) < self.count(1000):
                question, answer, _ = arithmetic.sample(self.rng, held_out=True)
                if f" {sign} " in answer:
                    cases.append((asked(question), (answer,)))
            self.exact(name, 98, cases)

    def lists(self) -> None:
        cases = []
        for _ in range(self.count(1000)):
            question, answer, _ = lists.sample(self.rng, held_out=True)
            cases.append((asked(question), (answer,)))
        self.exact("counting and sorting lists", 95, cases)

    def definitions(self) -> None:
        words = list(definitions.TAUGHT)[: self.count(len(definitions.TAUGHT))]
        cases = [(asked(definitions.question(self.rng, w)), (definitions.answer(w),)) for w in words]
        self.exact("taught definitions, word for word", 95, cases)

    def small_talk(self) -> None:
        cases = []
        for _ in range(self.count(200)):
            question, _, facts = smalltalk.sample(self.rng, held_out=True)
            cases.append((asked(question), facts["answers"]))
        self.exact("small talk", None, cases)

    def later_turns(self) -> None:
        """A question after a system message, a story and small talk."""
        cases = []
        for _ in range(self.count(200)):
            skill = self.rng.choice((arithmetic, definitions, lists))
            messages = [{"role": "system", "content": self.rng.choice(data.SYSTEM_MESSAGES)}]
            for past in (stories, smalltalk, stories):
                question, answer, _ = past.sample(self.rng, held_out=True)
                messages += [*asked(question), {"role": "assistant", "content": answer}]
            question, answer, _ = skill.sample(self.rng, held_out=True)
            cases.append((messages + asked(question), (answer,)))
        self.exact("sums, words and lists as the fourth turn", None, cases)

    def stories(self) -> None:
        """200 requests: plain ones for distinct things, and pairs of a thing and a place or child never asked for."""
        things = self.rng.sample(stories.THINGS, self.count(STORIES * 3 // 5))
        requests = [(stories.request(self.rng, thing), thing) for thing in things]
        while len(requests) < self.count(STORIES):
            request, _, facts = stories.sample(self.rng, held_out=True)
            if request not in (known for known, _ in requests) and (" called " in request or " the " in request):
                requests.append((request, facts["thing"]))
        told = greedy(self.model, self.talk, [asked(request) for request, _ in requests])
        good, trigrams, sentences = 0, 0, collections.Counter()
        for (_, thing), (text, ended) in zip(requests, told):
            repeats = stories.most_repeated_trigram(text)
            trigrams = max(trigrams, repeats)
            good += thing in stories.words_of(text) and ended and repeats <= MAX_SAME_TRIGRAM
            sentences.update(sentences_of(text))
        share = 100 * good / len(told)
        self.examples["stories"] = [(r, t) for (r, _), (t, _) in zip(requests, told)]
        self.record("stories that name the thing, end, repeat no trigram over 3 times", share, 95, f"{share:.1f} % of {len(told)}")
        sentence, most = max(sentences.items(), key=lambda item: item[1], default=("", 0))
        self.examples["commonest sentence"] = [(sentence, most)]
        self.record("one sentence shared by the stories, at most", most, MAX_SAME_SENTENCE, f"{most} times", low_is_good=True)
        distinct = 100 * len(sentences) / max(1, sentences.total())
        self.record("distinct sentences in the stories", distinct, None, f"{distinct:.1f} % of {sentences.total()}")

    def run(self) -> None:
        for part in (self.arithmetic, self.lists, self.definitions, self.stories, self.small_talk, self.later_turns):
            part()


def sentences_of(text: str) -> list[str]:
    return [s.strip('" ') for s in re.split(r'(?<=[.!?])["]?\s+', text) if s.strip('" ')]


@torch.no_grad()
def routing(model: tiny.Model, talk: chat.Chat, samples: int) -> dict:
    """How the experts are used: per skill and layer the entropy over its maximum, per skill the hit rate of an LRU
    cache of each layer, per layer the smallest share of an expert (all skills weighing the same)."""
    rng = random.Random(SEED + 1)
    config = model.config
    use, hits = {}, {}
    for skill, sample in data.SKILLS.items():
        counts = torch.zeros(config.num_hidden_layers, config.num_experts)
        chosen_in_order = [[] for _ in range(config.num_hidden_layers)]
        for _ in range(samples):
            question, answer, _ = sample(rng, held_out=True)
            messages = [*asked(question), {"role": "assistant", "content": answer}]
            ids = [i for m in messages for i in talk.message(m["role"], m["content"])]
            _, routes = model.hidden(torch.tensor([ids], device=model.embed.device))
            for n, (_, chosen) in enumerate(routes):
                counts[n] += torch.bincount(chosen.flatten().cpu(), minlength=config.num_experts)
                chosen_in_order[n] += chosen[0].tolist()
        hits[skill] = {
            slots: round(sum(lru_hit_rate(steps, slots) for steps in chosen_in_order) / len(chosen_in_order), 3)
            for slots in SLOTS
        }
        use[skill] = counts / counts.sum(-1, keepdim=True)
    maximum = torch.tensor(float(config.num_experts)).log()
    entropy = {skill: [round(float(-(p.clamp_min(1e-12).log() * p).sum() / maximum), 3) for p in u] for skill, u in use.items()}
    mean = torch.stack(list(use.values())).mean(0)
    smallest = [round(100 * float(p.min()), 2) for p in mean]
    return {"entropy": entropy, "LRU hit rate": hits, "smallest share of an expert, %": smallest}


def lru_hit_rate(steps: list[list[int]], slots: int) -> float:
    """Share of the accesses that find their expert among the `slots` last used ones; one layer, one token a step."""
    cache: dict[int, None] = {}
    hits = total = 0
    for step in steps:
        for expert in step:
            total += 1
            hits += expert in cache
            cache.pop(expert, None)
            cache[expert] = None
            if len(cache) > slots:
                del cache[next(iter(cache))]
    return hits / total


class Probe:
    """A cheap look at held-out answers while training: teacher-forced, the share with every token right."""

    def __init__(self, talk: chat.Chat, samples: int = 128):
        rng = random.Random(SEED + 2)
        self.batches = {}
        for skill, sample in data.SKILLS.items():
            tokens, learned = [], []
            for _ in range(samples):
                question, answer, _ = sample(rng, held_out=True)
                ids, marks = talk.labelled({"role": "assistant", "content": answer})
                past = talk.message("user", question)
                tokens.append(torch.tensor(past + ids))
                learned.append(torch.tensor([False] * len(past) + marks))
            pad = torch.nn.utils.rnn.pad_sequence
            self.batches[skill] = (pad(tokens, batch_first=True), pad(learned, batch_first=True))

    @torch.no_grad()
    def table(self, model: tiny.Model) -> str:
        parts = []
        for skill, (tokens, learned) in self.batches.items():
            tokens, learned = tokens.to(model.embed.device), learned.to(model.embed.device)
            logits, _ = model(tokens[:, :-1])
            right = (logits.argmax(-1) == tokens[:, 1:]) | ~learned[:, 1:]
            parts.append(f"{skill} {100 * right.all(-1).float().mean():.0f} %")
        return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases to run, for a quick look")
    args = parser.parse_args()

    talk = chat.Chat(args.folder)
    model = tiny.load(args.folder, "cuda" if torch.cuda.is_available() else "cpu")
    bars = Bars(model, talk, args.scale)
    bars.run()
    routes = routing(model, talk, bars.count(100))

    print("| held out, greedy | measured | bar | |\n|---|---|---|---|")
    for row in bars.rows:
        bar = "–" if row["bar"] is None else row["bar"]
        print(f"| {row['name']} | {row['text']} | {bar} | {'passed' if row['passed'] else 'MISSED'} |")
    layers = range(model.config.num_hidden_layers)
    print("\n| routing entropy, 1 = even | " + " | ".join(f"layer {n}" for n in layers) + " |")
    print("|---" * (len(layers) + 1) + "|")
    for skill, values in routes["entropy"].items():
        print(f"| {skill} | " + " | ".join(f"{v:.2f}" for v in values) + " |")
    smallest = routes["smallest share of an expert, %"]
    print("| smallest share of an expert, % | " + " | ".join(f"{v:.1f}" for v in smallest) + " |")
    print("\n| LRU hit rate, slots a layer of 16 | " + " | ".join(map(str, SLOTS)) + " |\n" + "|---" * (len(SLOTS) + 1) + "|")
    for skill, rates in routes["LRU hit rate"].items():
        print(f"| {skill} | " + " | ".join(f"{100 * rates[slots]:.0f} %" for slots in SLOTS) + " |")
    if args.report:
        report = {"bars": bars.rows, "routing": routes, "failures": bars.failures, "examples": bars.examples}
        args.report.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if not all(row["passed"] for row in bars.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
