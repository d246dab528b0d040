"""Training conversations, skill by skill: `sample(rng, held_out)` of each module gives (question, answer, facts)."""

from . import arithmetic, definitions, lists, smalltalk, stories

SKILLS = {
    "stories": stories.sample,
    "definitions": definitions.sample,
    "arithmetic": arithmetic.sample,
    "lists": lists.sample,
    "small talk": smalltalk.sample,
}
# Shares of the turns; a story is four times as long as a sum, so that tokens are shared more evenly.
SHARES = {"stories": 0.11, "definitions": 0.20, "arithmetic": 0.39, "lists": 0.22, "small talk": 0.08}
SYSTEM_SHARE = 0.2
MULTI_TURN_SHARE = 0.25
MAX_TURNS = 4
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are comoe-tiny, a small model.",
    "You are comoe-tiny.",
    "You are a kind and honest assistant.",
    "Answer briefly.",
    "Answer the question of the user.",
    "You are a helpful assistant. Answer in English.",
    "Be polite.",
    "You tell stories to children.",
    "You are a careful teacher.",
)


def turn(rng, held_out: bool = False) -> tuple[str, str, str]:
    """(skill, question, answer)"""
    skill = rng.choices(list(SHARES), list(SHARES.values()))[0]
    question, answer, _ = SKILLS[skill](rng, held_out)
    return skill, question, answer


def conversation(rng, held_out: bool = False) -> list[dict[str, str]]:
    """Chat messages: perhaps a system message, then one turn or a few on unrelated subjects."""
    messages = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
    turns = rng.randint(2, MAX_TURNS) if rng.random() < MULTI_TURN_SHARE else 1
    for _ in range(turns):
        _, question, answer = turn(rng, held_out)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages
