"""A Stable Diffusion 3 of any size with random weights, made where that is fast, written as diffusers writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.diffusers.pipelines import edit_json, tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import AutoencoderKL
    from torch import nn
    from transformers import CLIPTextModelWithProjection


class Size(NamedTuple):
    """How large it is; `encoders`: (width, layers) each, heads are 64 wide."""

    layers: int
    heads: int
    encoders: tuple[tuple[int, int], ...]
    joint: int
    latent: int
    vae: tuple[int, ...]
    sample: int


LARGE = Size(
    layers=24, heads=38, encoders=((768, 12), (1280, 32)), joint=4096, latent=16, vae=(128, 256, 512, 512), sample=64
)
"""A transformer of 5.2 billion parameters between the published ones' encoders and VAE; 12 GB in bfloat16."""
SMALL = Size(layers=3, heads=4, encoders=((64, 2), (64, 2)), joint=128, latent=4, vae=(32, 32), sample=16)
COMPONENTS = ("text_encoder", "text_encoder_2", "transformer", "vae")


def write_pipeline(folder: Path, size: Size, device: str) -> int:
    """Write one; its parameters' bytes, bfloat16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(1)
            parts = modules(size)
    finally:
        torch.set_default_dtype(before)
    pipe = StableDiffusion3Pipeline(
        **{name: module.to(torch.bfloat16) for name, module in parts.items()},
        scheduler=FlowMatchEulerDiscreteScheduler(),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.save_pretrained(folder, safe_serialization=True, max_shard_size="6GB")
    edit_json(folder / "model_index.json", text_encoder_3=[None, None], tokenizer_3=[None, None])
    return sum(parameter.nbytes for module in parts.values() for parameter in module.parameters())


def modules(size: Size) -> dict[str, nn.Module]:
    from diffusers import SD3Transformer2DModel

    first, second = (_encoder(*shape) for shape in size.encoders)
    transformer = SD3Transformer2DModel(
        sample_size=size.sample,
        in_channels=size.latent,
        out_channels=size.latent,
        num_layers=size.layers,
        attention_head_dim=64,
        num_attention_heads=size.heads,
        joint_attention_dim=size.joint,
        caption_projection_dim=64 * size.heads,
        pooled_projection_dim=sum(width for width, _ in size.encoders),
        pos_embed_max_size=size.sample,
        qk_norm="rms_norm",
    )
    return {"text_encoder": first, "text_encoder_2": second, "transformer": transformer, "vae": _autoencoder(size)}


def _encoder(width: int, layers: int) -> CLIPTextModelWithProjection:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
            vocab_size=64,
            hidden_size=width,
            projection_dim=width,
            intermediate_size=4 * width,
            num_attention_heads=width // 64,
            num_hidden_layers=layers,
            max_position_embeddings=32,
        )
    )


def _autoencoder(size: Size) -> AutoencoderKL:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=size.vae,
        down_block_types=("DownEncoderBlock2D",) * len(size.vae),
        up_block_types=("UpDecoderBlock2D",) * len(size.vae),
        layers_per_block=2,
        latent_channels=size.latent,
        norm_num_groups=32,
        shift_factor=0.1,
    )
