"""Train comoe-tiny and export it.

    python train.py --out FOLDER --seconds 360      on the GPU machine
    python train.py --out FOLDER --steps 11955      the same number of steps on any machine

FOLDER holds the tokenizer (`chat.py` makes it) and receives the weights. Data and initial weights are seeded, and the
batches come in the same order every time.
"""

import argparse
import multiprocessing
import os
import pathlib
import time

import torch
import torch.nn.functional as F

import chat
import evaluate
import model as tiny
from packing import ROW, SHARD_ROWS, shard

WARM_UP_STEPS = 300
BALANCE_WEIGHT = 0.01
IGNORED = -100


class Stream:
    """Rows from worker processes, in order, in a window on the device that is renewed as training goes on."""

    def __init__(self, folder: pathlib.Path, seed: int, workers: int, window: int):
        # Forked before CUDA starts; the workers never import it.
        self.pool = multiprocessing.get_context("fork").Pool(workers)
        self.shards = self.pool.imap(shard, ((folder, seed * 1_000_000 + i) for i in range(100_000)))
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = torch.cat([self.next_shard() for _ in range(window)])
        self.oldest = 0

    def to(self, device: str) -> None:
        self.rows = self.rows.to(device)

    def next_shard(self) -> torch.Tensor:
        return torch.from_numpy(next(self.shards))

    def renew(self) -> None:
        at = self.oldest * SHARD_ROWS
        self.rows[at : at + SHARD_ROWS] = self.next_shard().to(self.rows.device, non_blocking=True)
        self.oldest = (self.oldest + 1) % (len(self.rows) // SHARD_ROWS)

    def batch(self, rows: int) -> torch.Tensor:
        picked = torch.randint(len(self.rows), (rows,), generator=self.generator)
        return self.rows[picked.to(self.rows.device)].long()

    def close(self) -> None:
        self.pool.terminate()


def balance_loss(probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """1 where all experts are used alike, more where they are not (Switch Transformer, section 2.2)."""
    experts = probs.shape[-1]
    share = F.one_hot(chosen, experts).float().sum(-2).mean((0, 1)) / chosen.shape[-1]
    return experts * (share * probs.mean((0, 1))).sum()


def losses(model: tiny.Model, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the learned tokens and balance of the routing; batch `[rows, 3, ROW + 1]`."""
    tokens, positions, learned = batch.unbind(1)
    targets = torch.where(learned > 0, tokens, IGNORED)[:, 1:]
    tokens, positions = tokens[:, :-1], positions[:, :-1]
    conversation = (positions == 0).cumsum(-1)
    visible = (conversation[:, :, None] == conversation[:, None, :]).tril()
    with torch.autocast(tokens.device.type, torch.bfloat16):
        bias = torch.zeros_like(visible, dtype=torch.bfloat16).masked_fill(~visible, float("-inf")).unsqueeze(1)
        logits, routes = model(tokens, positions, bias)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    balance = torch.stack([balance_loss(probs, chosen) for probs, chosen in routes]).mean()
    return loss, balance


def optimizer_for(model: tiny.Model, rate: float, device: str) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, help="train this long; the learning rate follows the clock")
    length.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, default=128, help="rows of %d tokens a step" % ROW)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--window", type=int, default=64, help="shards of %d rows in the window" % SHARD_ROWS)
    parser.add_argument("--renew", type=int, default=3, help="steps between two new shards")
    parser.add_argument("--report", type=int, default=500, help="steps between two reports")
    args = parser.parse_args()

    stream = Stream(args.out, args.seed, args.workers, args.window)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stream.to(device)
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = tiny.Model(tiny.Config()).to(device)
    optimizer = optimizer_for(model, args.rate, device)
    compiled = torch.compile(losses) if device == "cuda" else losses
    probe = evaluate.Probe(chat.Chat(args.out))
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, window of {len(stream.rows)} rows", flush=True)

    start = reported = time.monotonic()
    step, done = 0, 0.0
    while done < 1.0:
        rate = args.rate * min(1.0, (step + 1) / WARM_UP_STEPS) * (1.0 - 0.99 * done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, balance = compiled(model, stream.batch(args.rows))
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % args.renew == 0:
            stream.renew()
        if step == 1 or step % args.report == 0:
            loss.item()  # waits for the device, so that the clock is right
            now = time.monotonic()
            speed = (1 if step == 1 else args.report) * args.rows * ROW / (now - reported) / 1e6
            reported = now
            print(
                f"{now - start:5.0f} s  step {step:6}  loss {loss.item():.4f}  balance {balance.item():.3f}  "
                f"{speed:.2f} M tokens/s"
            )
            if step % (4 * args.report) == 0:
                print("        held out, teacher-forced:", probe.table(model), flush=True)
        done = (time.monotonic() - start) / args.seconds if args.seconds else step / args.steps
    stream.close()
    tiny.save(model, args.out)
    seen = step * args.rows * ROW
    print(f"{step} steps, {seen / 1e6:.0f} M tokens, {time.monotonic() - start:.0f} s, saved to {args.out}", flush=True)


if __name__ == "__main__":
    main()
