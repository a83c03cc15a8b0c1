"""Small random pipelines, written to disk as diffusers writes them: no network, a megabyte or two."""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

COMPONENTS = ("text_encoder", "unet", "vae")
UNET_FILE = "unet/diffusion_pytorch_model.safetensors"
TEXT_FILE = "text_encoder/model.safetensors"


def tokenizer() -> CLIPTokenizer:
    """One token a letter."""
    from transformers import CLIPTokenizer

    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in string.ascii_lowercase:
        vocabulary[letter] = len(vocabulary)
        vocabulary[f"{letter}</w>"] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=32)


def text_encoder() -> CLIPTextModel:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
            vocab_size=64,
            hidden_size=32,
            projection_dim=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_hidden_layers=2,
            max_position_embeddings=32,
        )
    )


def autoencoder(blocks: int = 2) -> AutoencoderKL:
    """Doubles the size `blocks` - 1 times."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16,) * (blocks - 1) + (32,),
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=16,
    )


def unet(cross_attention_dim: int = 32) -> UNet2DConditionModel:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=cross_attention_dim,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def stable_diffusion(folder: Path, seed: int) -> Path:
    """A Stable Diffusion with random weights: text encoder, UNet, VAE; pictures of 16 × 16."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipe = StableDiffusionPipeline(
            vae=autoencoder(),
            text_encoder=text_encoder(),
            tokenizer=tokenizer(),
            unet=unet(),
            scheduler=DDIMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                clip_sample=False,
                set_alpha_to_one=False,
                steps_offset=1,
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder


def stable_diffusion_3(folder: Path, seed: int, **changes: object) -> Path:
    """A Stable Diffusion 3 with random weights, without its third text encoder; 4 heads, pictures of 16 × 16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    shape = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 64,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 256,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 16,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoders = [CLIPTextModelWithProjection(text_encoder().config) for _ in range(2)]
        vae = autoencoder()
        vae.register_to_config(shift_factor=0.1)
        pipe = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(**{**shape, **changes}),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae,
            text_encoder=encoders[0],
            tokenizer=tokenizer(),
            text_encoder_2=encoders[1],
            tokenizer_2=tokenizer(),
            text_encoder_3=None,
            tokenizer_3=None,
        )
    pipe.save_pretrained(folder, safe_serialization=True)
    nothing = [None, None]
    edit_json(folder / "model_index.json", text_encoder_3=nothing, tokenizer_3=nothing)
    return folder


def pixart(folder: Path, seed: int) -> Path:
    """A PixArt with random weights: a T5, a transformer, callbacks of the old kind only; pictures of 256 × 256."""
    from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = {word: place for place, word in enumerate(["<pad>", "</s>", "<unk>", "a", "red", "blue", "star", "circle"])}
    rules = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipe = PixArtSigmaPipeline(
            transformer=PixArtTransformer2DModel(
                sample_size=32,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                caption_channels=32,
                in_channels=4,
                out_channels=8,
                cross_attention_dim=32,
                use_additional_conditions=False,
            ),
            vae=autoencoder(blocks=4),
            scheduler=DPMSolverMultistepScheduler(),
            text_encoder=T5EncoderModel(encoder),
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=rules, model_max_length=32, **special),
        )
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder


def rename_tensors(file: Path, prefix: str) -> None:
    """Give a file's tensors names that only the library understands."""
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **changes: object) -> None:
    """Change keys of a JSON file; None takes one out."""
    data = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}), encoding="utf-8")


def lora(folder: Path, seed: int, *, rank: int = 4, alpha: float = 8.0) -> Path:
    """An adapter of the UNet's attention, as `save_lora_weights` writes it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in unet().named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(("to_q", "to_k", "to_v", "to_out.0")):
            a = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
            tensors[f"unet.{name}.lora_A.weight"] = a
            tensors[f"unet.{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    modules = ["to_q", "to_k", "to_v", "to_out.0"]
    config = {"unet.r": rank, "unet.lora_alpha": alpha, "unet.target_modules": modules}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(config)}
    save_file(tensors, folder / "pytorch_lora_weights.safetensors", metadata=metadata)
    return folder
