"""Write a random-weight image model: a pipeline of StableDiffusion or SDXL in diffusers' layout.

`python -m tests.checkpoints.image_generation --arch sd --out DIR` writes a model of some hundred
kilobytes, whose images of 64 x 64 pixels are noise. `--lcm` makes its unet read the guidance
scale, as those of latent consistency models do.
"""

import argparse
import json
from pathlib import Path
from typing import Any

ARCHS = ("sd", "sdxl")
WIDTH = 32  # hidden size of the text encoders
TOKENS = 77  # tokens of a prompt, with the first and the last one
START, END = "<|startoftext|>", "<|endoftext|>"
SCHEDULER = {  # as in published checkpoints
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "clip_sample": False,
}


def write_tokenizer(out: Path) -> None:
    """Write CLIP's kind of tokenizer over bytes: every letter is a token, and so is every letter
    that ends a word."""
    from transformers.models.clip.tokenization_clip import CLIPTokenizer

    letters = _letters()
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[], model_max_length=TOKENS)
    tokenizer.save_pretrained(out)


def _letters() -> list[str]:
    """Return the letters that stand for the 256 bytes in tokenizers of GPT-2's kind."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def text_encoder(seed: int, *, has_projection: bool, layers: int = 3) -> Any:
    """Return a small text encoder of CLIP."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    size = 2 * len(_letters()) + 2
    config = CLIPTextConfig(
        vocab_size=size,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        projection_dim=WIDTH,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
    )
    return (CLIPTextModelWithProjection if has_projection else CLIPTextModel)(config)


def unet(seed: int, *, is_xl: bool, reads_guidance: bool, size: int, width: int) -> Any:
    """Return a unet of two blocks for latents of ``size`` across, with ``width`` channels in the
    first block. As in published models, StableDiffusion's unet reads the prompt in its first block,
    SDXL's in its second."""
    import torch
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    down = ("CrossAttnDownBlock2D", "DownBlock2D")
    more: dict[str, Any] = {}
    if is_xl:
        down = ("DownBlock2D", "CrossAttnDownBlock2D")
        more = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": WIDTH + 6 * 8,
            "use_linear_projection": True,
        }
    return UNet2DConditionModel(
        sample_size=size,
        block_out_channels=(width, 2 * width),
        layers_per_block=1,
        down_block_types=down,
        up_block_types=tuple(name.replace("Down", "Up") for name in reversed(down)),
        cross_attention_dim=2 * WIDTH if is_xl else WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
        time_cond_proj_dim=32 if reads_guidance else None,
        **more,
    )


def autoencoder(seed: int, width: int) -> Any:
    """Return an autoencoder with ``width`` channels after its first block. A latent stands for 8 x
    8 pixels."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    return AutoencoderKL(
        block_out_channels=(width // 2, width, width, width),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=512,
        force_upcast=False,
    )


def make(
    out: Path, arch: str = "sd", *, scheduler: str = "PNDMScheduler", reads_guidance: bool = False,
    seed: int = 0, size: int = 8, width: int = 16,
) -> Path:  # fmt: skip
    """Write a pipeline whose images have ``size`` latents across; return its directory. ``width``
    is the number of channels of the unet's first block."""
    import diffusers

    is_xl = arch == "sdxl"
    parts = {
        "unet": unet(seed, is_xl=is_xl, reads_guidance=reads_guidance, size=size, width=width),
        "vae": autoencoder(seed + 1, width),
        "text_encoder": text_encoder(seed + 2, has_projection=False),
    }
    if is_xl:
        parts["text_encoder_2"] = text_encoder(seed + 3, has_projection=True)
    index: dict[str, Any] = {
        "_class_name": "StableDiffusionXLPipeline" if is_xl else "StableDiffusionPipeline",
        "_diffusers_version": diffusers.__version__,
    }
    for name, part in parts.items():
        part.save_pretrained(out / name)
        library = "transformers" if name.startswith("text_encoder") else "diffusers"
        index[name] = [library, type(part).__name__]
    for name in ("tokenizer", *(["tokenizer_2"] if is_xl else [])):
        write_tokenizer(out / name)
        index[name] = ["transformers", "CLIPTokenizer"]
    kind = getattr(diffusers, scheduler)
    known = kind().config
    kind(**{key: value for key, value in SCHEDULER.items() if key in known}).save_pretrained(
        out / "scheduler"
    )
    index["scheduler"] = ["diffusers", scheduler]
    if is_xl:
        index["force_zeros_for_empty_prompt"] = True
    else:
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None]}
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return out


def main() -> None:
    """Write the model that the arguments describe."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoints.image_generation",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--arch", choices=ARCHS, default="sd")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scheduler", default="PNDMScheduler", help="the class in diffusers")
    parser.add_argument("--lcm", action="store_true", help="the unet reads the guidance scale")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.out, args.arch, scheduler=args.scheduler, reads_guidance=args.lcm, seed=args.seed)


if __name__ == "__main__":
    main()
