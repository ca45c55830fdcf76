"""Makes qwen_golden.pt and qwen_golden_config.json: what transformers' Qwen2 computes for a small random model.

  python make_qwen_golden.py          needs torch and transformers; made with torch 2.15.0, transformers 5.24.0

The file holds input, targets, logits and loss, and each parameter with its gradient. Biases and norms are moved off
their initial values (0 and 1), so that an error in them shows.
"""
import pathlib

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

HERE = pathlib.Path(__file__).parent


def main():
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=272, max_position_embeddings=64, tie_word_embeddings=True, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, initializer_range=0.08)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.1 * torch.randn_like(parameter)

    tokens, targets = torch.randint(272, (2, 33)), torch.randint(272, (2, 33))
    logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.view(-1, 272), targets.view(-1))
    loss.backward()

    torch.save(dict(
        tokens=tokens, targets=targets, logits=logits.detach(), loss=loss.detach(),
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        gradients={name: p.grad.clone() for name, p in model.named_parameters()}), HERE / "qwen_golden.pt")
    config.to_json_file(HERE / "qwen_golden_config.json", use_diff=True)


main()
