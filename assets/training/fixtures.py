"""Golden files from Hugging Face transformers, for the tests of other implementations.

    python fixtures.py MODEL FIXTURES

`comoe_tiny_logits.safetensors`: for prompt i of ten `ids_i` I32 `[tokens]`, `last_i` F32 `[vocab]` (logits of the last
position) and `all_i` F32 `[tokens, vocab / 64]` (every 64th logit of every position). Weights BF16, arithmetic F32:
another implementation must agree to 1e-3. `comoe_tiny_logits.json` has the prompts as text and ids.
`chat_template.json`: conversations and what `apply_chat_template` makes of them.
`heldout.jsonl`, beside the model's folder: conversations of all skills that training never saw.
"""

import argparse
import json
import pathlib
import random

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
import model as tiny

STRIDE = 64
TOLERANCE = 1e-3
HELD_OUT = 300
PROMPTS = (
    "What is 17 plus 25?",
    "What is 804 minus 357?",
    "Tell me a story about a fox.",
    "Define castle.",
    "Sort these numbers: 42, 7, 19, 3.",
    "Count from 3 to 9.",
    "What is CoMoE?",
    "Schöne Grüße, 東京! 🦊",
)
CONVERSATIONS = (
    [{"role": "user", "content": "What is 17 plus 25?"}],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Hello!"}],
    [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "I am comoe-tiny."},
        {"role": "user", "content": "Sort the list 3, 1, 2."},
    ],
    [
        {"role": "system", "content": "You are comoe-tiny.\nYou are small."},
        {"role": "user", "content": "  spaces, \"quotes\" & <tags>  "},
        {"role": "assistant", "content": "Ünïcode 🦊"},
    ],
)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("fixtures", type=pathlib.Path)
    args = parser.parse_args()
    args.fixtures.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    own = tiny.load(args.model)

    def rendered(messages, generate: bool = True) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)

    # Eight chat prompts, a longer conversation and plain text without the chat format.
    texts = [rendered([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    texts += [rendered(CONVERSATIONS[2]), "Once there was a small fox"]
    tensors, prompts, worst = {}, [], 0.0
    for i, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        logits = reference(ids).logits[0]
        worst = max(worst, float((own(ids)[0][0] - logits).abs().max()))
        tensors[f"ids_{i}"] = ids[0].int()
        tensors[f"last_{i}"] = logits[-1].clone()
        tensors[f"all_{i}"] = logits[:, ::STRIDE].clone()
        prompts.append({"text": text, "ids": ids[0].tolist()})
    print(f"training model against transformers: largest difference of a logit {worst:.1e}")
    if worst > TOLERANCE:
        raise SystemExit("the export and the training model are not the same function")
    save_file(tensors, args.fixtures / "comoe_tiny_logits.safetensors")

    def write(name: str, content) -> None:
        (args.fixtures / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    write("comoe_tiny_logits.json", {"stride": STRIDE, "tolerance": TOLERANCE, "prompts": prompts})
    renderings = []
    for messages in CONVERSATIONS:
        generate = messages[-1]["role"] == "user"
        text = rendered(messages, generate)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        renderings.append({"messages": messages, "add_generation_prompt": generate, "text": text, "ids": ids})
    write("chat_template.json", renderings)

    rng = random.Random(30_000_001)
    with open(args.model.parent / "heldout.jsonl", "w") as out:
        for _ in range(HELD_OUT):
            out.write(json.dumps({"messages": data.conversation(rng, held_out=True)}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
