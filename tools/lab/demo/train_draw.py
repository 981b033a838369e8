"""Trains a model that draws, with `tools/lab/demo/drawings.py`. None is shipped yet: D31 says why.

    python -m tools.lab.train_demo draw                                   the whole training
    python -m tools.lab.train_demo draw --kept FILE --minutes 4           four minutes of it; repeat
    python -m tools.lab.train_demo draw --steps 100 --autoencoder-steps 100 --out DIR    a quick one

The model has StableDiffusion's layout. First an autoencoder learns to turn drawings into latents
and back. Then a unet learns to remove noise from latents, and with it a text encoder, which tells
the unet what the drawing shows. Both trainings round their products to bfloat16.

Everything follows from `--seed`. A run is repeatable on one machine with the same number of
threads; elsewhere sums may be rounded differently.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # libgomp reads it when torch is imported

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextConfig, CLIPTextModel
from transformers.models.clip.tokenization_clip import CLIPTokenizer

from tests.checkpoints.image_generation import END, SCHEDULER, START
from tools.lab.demo.drawing_words import describe_plainly
from tools.lab.demo.drawings import SIDE, draw_scene, paint, place_plainly
from tools.lab.demo.encoder_parts import begin_training, save_facts
from tools.lab.demo.pieces import Pieces, Unfinished, add_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.lab.demo.drawings import Drawing

OUT = Path(__file__).parents[3] / "build" / "draw"

STEPS, AUTOENCODER_STEPS = 6000, 1000
ROWS, NOISES, AUTOENCODER_ROWS = 16, 2, 16
NO_PROMPT_SHARE = 0.1
"""The share of drawings that come without their description, so that guidance can compare."""

KL_WEIGHT = 1e-5
LOG_VARIANCE = -4.0  # of the latents before the training
# Tokens of a prompt, the text encoder's width, latents' channels, and pixels across a latent.
TOKENS = 24
WIDTH = 96
LATENTS = 4
SCALE = 4
DIFFUSION = SCHEDULER | {"prediction_type": "v_prediction"}


def example(seed: int, index: int, part: str) -> tuple[str, Drawing]:
    """Return a description that is not held out, and a drawing of it."""
    rng = random.Random(f"{part}/{seed}/{index}")
    scene = draw_scene(rng)
    while scene.is_held_out:
        scene = draw_scene(rng)
    return describe_plainly(rng, scene)[0], place_plainly(rng, scene)


def pixels_of(drawings: Sequence[Drawing]) -> torch.Tensor:
    """Return drawings as [drawings, 3, SIDE, SIDE] float32 of -1 to 1."""
    pixels = torch.from_numpy(np.stack([np.asarray(paint(one)) for one in drawings]))
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0


# ---- the autoencoder


def build_autoencoder() -> AutoencoderKL:
    """Return a small autoencoder, whose latents have a small variance from the start."""
    model = AutoencoderKL(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=LATENTS,
        norm_num_groups=4,
        sample_size=SIDE,
        scaling_factor=1.0,
        force_upcast=False,
    )
    torch.nn.init.constant_(model.quant_conv.bias.data[LATENTS:], LOG_VARIANCE)
    return model


def autoencoder_loss(model: AutoencoderKL, seed: int, step: int) -> torch.Tensor:
    """Return the loss of a step's batch: the difference between drawings and decoded latents, and
    that between three channels of the latents and the mean colours of their pixels. Without the
    latter, colours lie on a line in the latents, and the unet confuses yellow with white."""
    rows = range(step * AUTOENCODER_ROWS, (step + 1) * AUTOENCODER_ROWS)
    pixels = pixels_of([example(seed, row, "autoencoder")[1] for row in rows])
    with torch.autocast("cpu", torch.bfloat16):
        found = model.encode(pixels).latent_dist
        latents = found.mean + found.std * torch.randn(found.mean.shape, generator=_noise(step))
        back = model.decode(latents).sample
    off = back.float() - pixels
    kl = found.kl().mean() / latents[0].numel()
    means = functional.avg_pool2d(pixels, SCALE)
    off_means = found.mean[:, :3].float() - means
    return off.abs().mean() + off.square().mean() + off_means.square().mean() + KL_WEIGHT * kl


def _noise(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def whiten(model: AutoencoderKL, seed: int) -> None:
    """Change the convolutions before and after the latents so that the channels have a mean of 0
    and a deviation of 1, as the noise of the diffusion assumes, and are not correlated."""
    with torch.no_grad():
        found = model.encode(pixels_of([example(seed, at, "normal")[1] for at in range(256)]))
        latents = found.latent_dist.mean.transpose(0, 1).flatten(1)
        mean = latents.mean(1)
        values, vectors = torch.linalg.eigh(torch.cov(latents))
        whitening, colouring = vectors.T / values.sqrt()[:, None], vectors * values.sqrt()
        into, back = model.quant_conv, model.post_quant_conv
        into.weight[:LATENTS] = torch.einsum("ij,jkyx->ikyx", whitening, into.weight[:LATENTS])
        into.bias[:LATENTS] = whitening @ (into.bias[:LATENTS] - mean)
        back.bias += back.weight[:, :, 0, 0] @ mean
        back.weight[:] = torch.einsum("ijyx,jk->ikyx", back.weight, colouring)


# ---- the unet and the text encoder


def train_tokenizer(seed: int) -> CLIPTokenizer:
    """Return CLIP's kind of tokenizer, in which every word of the descriptions is one token."""
    raw = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=10_000, end_of_word_suffix="</w>", show_progress=False)
    raw.train_from_iterator((example(seed, at, "words")[0] for at in range(2000)), trainer)
    merges = [tuple(pair) for pair in json.loads(raw.to_str())["model"]["merges"]]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    tokens += [first + second for first, second in merges]
    vocab = {token: at for at, token in enumerate(dict.fromkeys([*tokens, START, END]))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=TOKENS)


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return a small text encoder of CLIP."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            projection_dim=WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_unet() -> UNet2DConditionModel:
    """Return a small unet, whose second block has cross-attention to the prompt."""
    return UNet2DConditionModel(
        sample_size=SIDE // SCALE,
        in_channels=LATENTS,
        out_channels=LATENTS,
        block_out_channels=(48, 96),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def loss_of(
    drawer: torch.nn.ModuleDict, vae: AutoencoderKL, tokenizer: CLIPTokenizer, seed: int, step: int
) -> torch.Tensor:
    """Return the loss of a step's batch: the error of the velocity that the unet predicts. Every
    drawing comes with several amounts of noise, which are spread evenly over the batch."""
    examples = [example(seed, row, "drawing") for row in range(step * ROWS, (step + 1) * ROWS)]
    chance = _noise(step)
    dropped = torch.rand(ROWS, generator=chance) < NO_PROMPT_SHARE
    texts = ["" if drop else text for drop, (text, _) in zip(dropped, examples, strict=True)]
    ids = tokenizer(texts, padding="max_length", max_length=TOKENS, return_tensors="pt").input_ids
    # At these sizes the plain attention is the faster one.
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        with torch.no_grad():
            encoded = vae.encode(pixels_of([one for _, one in examples])).latent_dist.mean.float()
        latents = encoded.repeat(NOISES, 1, 1, 1)
        noise = torch.randn(latents.shape, generator=chance)
        shares = torch.arange(len(latents)) + torch.rand(len(latents), generator=chance)
        times = (shares / len(latents) * DIFFUSION["num_train_timesteps"]).long()
        times = times[torch.randperm(len(latents), generator=chance)]
        noisy = _scheduler().add_noise(latents, noise, times)
        read = drawer["text_encoder"](ids)[0].repeat(NOISES, 1, 1)
        found = drawer["unet"](noisy, times, read).sample
    return functional.mse_loss(found.float(), _scheduler().get_velocity(latents, noise, times))


@cache
def _scheduler() -> Any:
    return DDIMScheduler(**{k: v for k, v in DIFFUSION.items() if k != "skip_prk_steps"})


# ---- the whole


def save(parts: dict[str, Any], tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Save a pipeline in diffusers' layout, with weights in half precision."""
    import diffusers

    index: dict[str, Any] = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": diffusers.__version__,
    }
    for name, part in parts.items():
        part.half().save_pretrained(folder / name)
        library = "transformers" if name.startswith("text_encoder") else "diffusers"
        index[name] = [library, type(part).__name__]
    tokenizer.save_pretrained(folder / "tokenizer")
    known = DPMSolverMultistepScheduler().config
    scheduler = DPMSolverMultistepScheduler(**{k: v for k, v in DIFFUSION.items() if k in known})
    scheduler.save_pretrained(folder / "scheduler")
    index |= {
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", type(scheduler).__name__],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors creates files of mode 0600


def main() -> int:
    """Train and save a model. The facts of the run go to training.json in its folder."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--autoencoder-steps", type=int, default=AUTOENCODER_STEPS)
    add_options(options)
    given = begin_training(options, OUT)

    kept = given.kept
    vae = build_autoencoder()
    tokenizer = train_tokenizer(given.seed)
    drawer = torch.nn.ModuleDict(
        {"unet": build_unet(), "text_encoder": build_text_encoder(tokenizer)}
    )
    try:
        first = Pieces(vae, torch.nn.Module(), kept and kept.with_suffix(".vae"), given.minutes)
        for step in first.steps(given.autoencoder_steps):
            first.learn(autoencoder_loss(vae, given.seed, step))
        first.keep()
        whiten(vae.eval().requires_grad_(False), given.seed)
        pieces = Pieces(drawer, torch.nn.Module(), kept, given.minutes)
        for step in pieces.steps(given.steps):
            pieces.learn(loss_of(drawer, vae, tokenizer, given.seed, step))
    except Unfinished as error:
        print(error)
        return 3
    save({**drawer.eval(), "vae": vae}, tokenizer, given.out)
    parameters = sum(p.numel() for part in (drawer, vae) for p in part.parameters())
    facts = {
        "seed": given.seed,
        "parameters": parameters,
        "threads": given.threads,
        **pieces.facts(),
    }
    save_facts(given.out, facts)
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
