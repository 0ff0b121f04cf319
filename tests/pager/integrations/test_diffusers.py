"""A pipeline of diffusers: plain's images, with half of the weights on the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tensorpager as tp

from .tiny import PAGE_BYTES

pytest.importorskip("diffusers")

from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

STEPS, WIDTH = 6, 32
DENSE_BYTES = 3 << 20


def pipeline() -> Any:
    """A latent diffusion of 8 × 8, without its text encoder: prompts are given as tensors."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        unet=unet,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any, seed: int, steps: int = STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    prompt, other = torch.randn(2, 1, 7, WIDTH, generator=generator)
    made: torch.Tensor = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=other,
        num_inference_steps=steps,
        generator=generator,
        output_type="pt",
    ).images
    return made


@pytest.mark.parametrize("inside", [True, False])
def test_images(inside: bool, one_thread: None) -> None:
    """In ``pager.inference()``, and as the pipeline runs by itself, which is without gradients."""
    expected = [image(pipeline(), seed) for seed in range(2)]
    pipe = pipeline()
    parameters = [p for m in (pipe.unet, pipe.vae) for p in m.parameters()]
    weights = sum(p.nbytes for p in parameters)
    with tp.Pager(
        device_budget=weights // 2 + DENSE_BYTES,
        host_budget=2 * weights,
        page_size=PAGE_BYTES,
        device="cpu",
    ) as pager:
        for model in (pipe.unet, pipe.vae):
            pager.page_module(model)
        written = []
        for seed, images in enumerate(expected):
            with pager.inference() if inside else nullcontext():
                assert torch.equal(image(pipe, seed), images)
            written.append(pager.stats()["channel_bytes"]["host-out"])
        stats = pager.stats()
        assert stats["channel_bytes"]["host-in"] > 0
        assert written[0] == written[1], "what is below already was written once more"
        if inside:
            assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
