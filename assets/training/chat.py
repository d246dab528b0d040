"""comoe-tiny's tokenizer and chat format.

    python chat.py FOLDER      train the tokenizer on the generators' text, write it with its chat template
"""

import argparse
import json
import pathlib
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import data

PAD, START, END = range(3)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 4096
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TRAINING_SAMPLES = {"stories": 30000, "definitions": 12000, "arithmetic": 2000, "lists": 8000, "small talk": 8000}


def training_text():
    rng = random.Random(0)
    yield from ["user\nsystem\nassistant\n"] * 3000
    for skill, count in TRAINING_SAMPLES.items():
        for _ in range(count):
            question, answer, _ = data.SKILLS[skill](rng)
            yield f"{question}\n{answer}"


def train(folder: pathlib.Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[PAD],
        "unk_token": None,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Chat:
    """Encodes conversations as the chat template would render them."""

    def __init__(self, folder: pathlib.Path):
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.newline = self.encode("\n")
        self.answer_start = [START, *self.encode("assistant\n")]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def message(self, role: str, content: str) -> list[int]:
        return [START, *self.encode(f"{role}\n{content}"), END, *self.newline]

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The conversation so far, and the opening of the answer."""
        return [i for m in messages for i in self.message(m["role"], m["content"])] + self.answer_start

    def labelled(self, message: dict[str, str]) -> tuple[list[int], list[bool]]:
        """Ids of one message, and which of them are learned: an answer's words and its end."""
        ids = self.message(message["role"], message["content"])
        start, stop = len(self.answer_start), len(ids) - len(self.newline)
        learned = message["role"] == "assistant"
        return ids, [learned and start <= at < stop for at in range(len(ids))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    train(parser.parse_args().folder)
