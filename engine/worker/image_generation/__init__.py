"""Draws images: pipelines of StableDiffusion and SDXL, by diffusers' modules.

`pipelines` reads a checkpoint's small files and refuses what is not served; it imports no torch.
`noise` has the table of noise schedulers. `prompts` turns texts into embeddings, `tiles` decodes
latents piece by piece, `state` is what is kept of a drawing between steps, and `model` has
the four verbs over them: encode, denoise, decode, end. `runner` is the worker around the model.

Rule 1: a pipeline of diffusers is never called, and no class is imported because a checkpoint names
it. Rule 2: only safetensors are read. Rule 3: each drawing has a noise scheduler and a random
generator of its own, so that drawings whose steps alternate do not change each other.
"""
