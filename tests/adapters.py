"""LoRA adapters for tests, written as peft writes them: seeded random values, large enough to change what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_notebook.models.lora import CONFIG_FILE, TENSORS_FILE

RANK, ALPHA = 4, 8.0


def matrices(shapes, *, rank=RANK, seed=1, size=1.0, name=""):
    """peft's tensors for layers of these shapes (out, in); `size`: of the change of a weight, about 1 / √in."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (out, into) in shapes.items():
        a = torch.randn(rank, into, generator=generator) / into**0.5
        b = torch.randn(out, rank, generator=generator) * size / rank
        key = f"base_model.model.{path}.lora_"
        tensors[f"{key}A{name}.weight"], tensors[f"{key}B{name}.weight"] = a, b
    return tensors


def config(**changes):
    """peft's adapter_config.json; a value of None leaves the key out."""
    known = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": ["q_proj"],
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return {key: value for key, value in {**known, **changes}.items() if value is not None}


def write(folder, tensors, **changes):
    """An adapter's folder with these tensors; `changes` of its config."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config(**changes)), encoding="utf-8")
    return folder


def merged(weights, tensors, scale):
    """The weights with an adapter added to them, W + scale · B · A."""
    changed = dict(weights)
    for key, a in tensors.items():
        if ".lora_A." in key:
            path = key.removeprefix("base_model.model.").partition(".lora_A.")[0]
            delta = tensors[key.replace(".lora_A.", ".lora_B.")].float() @ a.float()
            changed[f"{path}.weight"] = weights[f"{path}.weight"] + scale * delta
    return changed
