"""comoe-tiny in PyTorch: the function of Hugging Face's Qwen3MoeForCausalLM, written to be trained fast.

All experts are computed and the ones that were not chosen are masked out, which for experts this small beats
gathering. `save` and `load` speak the hub's tensor names, so that transformers and CoMoE read the export.
"""

import dataclasses
import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

SHARDS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def hub(self) -> dict:
        """config.json, spelled as on the hub before transformers 5."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **dataclasses.asdict(self),
            "intermediate_size": 2 * self.moe_intermediate_size,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in the half style; x `[batch, tokens, heads, head_dim]`, cos and sin `[batch, tokens, 1, head_dim / 2]`."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        d, hd = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        experts, f = config.num_experts, config.moe_intermediate_size
        out_std = 0.02 / (2 * config.num_hidden_layers) ** 0.5

        def matrix(*shape: int, std: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * std)

        self.input_norm = nn.Parameter(torch.ones(d))
        self.q = matrix(heads * hd, d)
        self.k = matrix(kv_heads * hd, d)
        self.v = matrix(kv_heads * hd, d)
        self.q_norm = nn.Parameter(torch.ones(hd))
        self.k_norm = nn.Parameter(torch.ones(hd))
        self.o = matrix(d, heads * hd, std=out_std)
        self.moe_norm = nn.Parameter(torch.ones(d))
        self.router = matrix(experts, d)
        self.gate = matrix(experts, f, d)
        self.up = matrix(experts, f, d)
        self.down = matrix(experts, d, f, std=out_std)

    def attention(self, x, rope, bias):
        c = self.config
        b, n, _ = x.shape
        x = rms_norm(x, self.input_norm, c.rms_norm_eps)
        q = F.linear(x, self.q).view(b, n, c.num_attention_heads, c.head_dim)
        k = F.linear(x, self.k).view(b, n, c.num_key_value_heads, c.head_dim)
        v = F.linear(x, self.v).view(b, n, c.num_key_value_heads, c.head_dim)
        q = rotate(rms_norm(q, self.q_norm, c.rms_norm_eps), *rope).to(v.dtype)
        k = rotate(rms_norm(k, self.k_norm, c.rms_norm_eps), *rope).to(v.dtype)
        groups = c.num_attention_heads // c.num_key_value_heads
        q, k, v = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        return F.linear(out.transpose(1, 2).reshape(b, n, -1), self.o)

    def moe(self, x):
        """Output, router probabilities `[batch, tokens, experts]` and the chosen experts `[batch, tokens, top-k]`."""
        c = self.config
        b, n, _ = x.shape
        experts, f = c.num_experts, c.moe_intermediate_size
        x = rms_norm(x, self.moe_norm, c.rms_norm_eps)
        with torch.autocast(x.device.type, enabled=False):
            probs = F.linear(x, self.router).softmax(-1)
        top, chosen = probs.topk(c.num_experts_per_tok, -1)
        weights = torch.zeros_like(probs).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        gate = F.linear(x, self.gate.reshape(experts * f, -1))
        up = F.linear(x, self.up.reshape(experts * f, -1))
        h = (F.silu(gate) * up).view(b, n, experts, f)
        h = (h * weights.to(h.dtype).unsqueeze(-1)).reshape(b, n, experts * f)
        return F.linear(h, self.down.permute(1, 0, 2).reshape(-1, experts * f)), probs, chosen

    def forward(self, x, rope, bias):
        x = x + self.attention(x, rope, bias)
        y, probs, chosen = self.moe(x)
        return x + y, probs, chosen


class Model(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        half = config.head_dim // 2
        inverse = config.rope_theta ** -(torch.arange(half).float() / half)
        angles = torch.arange(config.max_position_embeddings)[:, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, tokens, positions=None, bias=None):
        """Normed last hidden states, and per layer what `Layer.moe` says of the routing: (probabilities, chosen experts).

        tokens, positions `[batch, tokens]`; bias is added to the attention scores `[batch, 1, tokens, tokens]`,
        and without one the mask is plainly causal.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        rope = (self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2))
        x = F.embedding(tokens, self.embed)
        routes = []
        for layer in self.layers:
            x, *route = layer(x, rope, bias)
            routes.append(route)
        return rms_norm(x, self.norm, self.config.rms_norm_eps), routes

    def forward(self, tokens, positions=None, bias=None):
        """Logits `[batch, tokens, vocab]` and the routing of each layer."""
        x, routes = self.hidden(tokens, positions, bias)
        return F.linear(x, self.embed), routes


def hub_tensors(model: Model) -> dict[str, torch.Tensor]:
    """The weights under the hub's names. Views: writing to one writes to the model."""
    tensors = {"model.embed_tokens.weight": model.embed.data, "model.norm.weight": model.norm.data}
    for n, layer in enumerate(model.layers):
        at = f"model.layers.{n}"
        tensors |= {
            f"{at}.input_layernorm.weight": layer.input_norm.data,
            f"{at}.post_attention_layernorm.weight": layer.moe_norm.data,
            f"{at}.self_attn.q_norm.weight": layer.q_norm.data,
            f"{at}.self_attn.k_norm.weight": layer.k_norm.data,
            f"{at}.mlp.gate.weight": layer.router.data,
        }
        for name in "qkvo":
            tensors[f"{at}.self_attn.{name}_proj.weight"] = getattr(layer, name).data
        for e in range(model.config.num_experts):
            for name in ("gate", "up", "down"):
                tensors[f"{at}.mlp.experts.{e}.{name}_proj.weight"] = getattr(layer, name).data[e]
    return tensors


def save(model: Model, folder: pathlib.Path) -> None:
    """Write config, generation config and BF16 shards in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.to("cpu", torch.bfloat16).contiguous() for name, t in hub_tensors(model).items()}
    total = sum(t.numel() * 2 for t in tensors.values())
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(t.numel() * 2 for t in shards[-1].values()) > total / SHARDS:
            shards.append({})
        shards[-1][name] = tensor
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    generation = {
        "bos_token_id": None,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    files = {"config": model.config.hub(), "generation_config": generation, "model.safetensors.index": index}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def load(folder: pathlib.Path, device: str = "cpu") -> Model:
    """The exported model, its BF16 weights widened to F32."""
    config = json.loads((folder / "config.json").read_text())
    model = Model(Config(**{field.name: config[field.name] for field in dataclasses.fields(Config)}))
    targets = hub_tensors(model)
    for file in sorted(folder.glob("model-*.safetensors")):
        for name, tensor in load_file(file).items():
            targets.pop(name).copy_(tensor)
    if targets:
        raise ValueError(f"missing from {folder}: {sorted(targets)[:3]} and others, {len(targets)} in all")
    return model.to(device).eval()
