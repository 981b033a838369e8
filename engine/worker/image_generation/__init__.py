"""Draws images: pipelines of StableDiffusion and SDXL, by diffusers' modules.

`pipelines` reads a checkpoint's small files and refuses models that are not served; it imports no
torch. `noise` makes noise schedulers. `prompts` turns texts into embeddings, `tiles` decodes
latents tile by tile, `state` has a drawing's state between steps, and `model` has the verbs:
encode, denoise and decode. `runner` is the worker around the model.

Rule 1: a pipeline of diffusers is never called, and only classes in this folder's tables are
imported, whatever a checkpoint names. Rule 2: only safetensors are read. Rule 3: each drawing has a
noise scheduler and a random generator of its own, so that drawings whose steps alternate do not
change each other.
"""
