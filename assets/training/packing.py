"""Packs conversations into rows of equal length. Runs in worker processes, without torch."""

import pathlib
import random

import numpy

import chat
import data

ROW = 512
SHARD_ROWS = 256
MAX_POSITION = 1024
GAP_SHARE = 0.5
FILLER = ("arithmetic", "lists", "definitions")


class Packer:
    """Packs conversations into rows of `ROW + 1` tokens, each with its own positions from 0."""

    def __init__(self, folder: pathlib.Path, seed: int):
        self.chat = chat.Chat(folder)
        self.rng = random.Random(seed)
        self.pending: list[tuple[int, int, bool]] | None = None

    def tokens(self, messages) -> list[tuple[int, int, bool]]:
        """(token, position, learned) of a conversation.

        Between messages the positions may jump, so that distances up to the whole context are learned from rows
        that are half as long.
        """
        encoded = [self.chat.labelled(message) for message in messages]
        spare = MAX_POSITION - sum(len(ids) for ids, _ in encoded)
        out, position = [], 0
        for (ids, learned), message in zip(encoded, messages):
            if out and message["role"] == "user" and self.rng.random() < GAP_SHARE:
                gap = self.rng.randint(0, max(0, spare // 2))
                position, spare = position + gap, spare - gap
            out += zip(ids, range(position, position + len(ids)), learned)
            position += len(ids)
        return out

    def filler(self) -> list[tuple[int, int, bool]]:
        question, answer, _ = data.SKILLS[self.rng.choice(FILLER)](self.rng)
        return self.tokens([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])

    def row(self) -> list[tuple[int, int, bool]]:
        row: list[tuple[int, int, bool]] = []
        while len(row) <= ROW:
            item = self.pending or self.tokens(data.conversation(self.rng))
            self.pending = None
            if row and len(row) + len(item) > ROW + 1:
                # Too long for what is left: it opens the next row, and short samples fill this one.
                self.pending = item
                while len(row) <= ROW:
                    row += self.filler()
            else:
                row += item
        return row[: ROW + 1]


def shard(job: tuple[pathlib.Path, int]) -> numpy.ndarray:
    """`[SHARD_ROWS, 3, ROW + 1]`: tokens, positions, learned."""
    packer = Packer(*job)
    rows = numpy.array([packer.row() for _ in range(SHARD_ROWS)], dtype=numpy.int16)
    return rows.transpose(0, 2, 1).copy()
