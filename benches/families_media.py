"""Models of images, sound and noise for benches/coverage.py, of transformers, torchvision and diffusers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from families import (
    CLASSES,
    ROWS,
    SIZES,
    Case,
    autocast,
    case,
    integers,
    library,
    normal,
    pixels,
    transformer,
)
from torch import nn

# Classification of images by transformers: the name of the family, its sizes and those of the images.
PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
WINDOWS: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit": ("ViT", PATCHES, 16),
    "deit": ("DeiT", PATCHES, 16),
    "dinov2": ("Dinov2", {**PATCHES, "mlp_ratio": 2}, 16),
    "swin": ("Swin", WINDOWS, 16),
    "convnext": ("ConvNext", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, 32),
}


def classifier(family: str, sizes: dict[str, Any], size: int) -> Case:
    """A model of transformers that gives an image its class."""
    model = transformer(f"{family}ForImageClassification", f"{family}Config", **sizes, num_labels=CLASSES)
    return Case(model, pixels(size))


def _classifier(family: str, sizes: dict[str, Any], size: int) -> Callable[[], Case]:
    return lambda: classifier(family, sizes, size)


for _name, (_family, _sizes, _size) in CLASSIFIERS.items():
    case(_name)(_classifier(_family, _sizes, _size))


@case("segformer")
def _() -> Case:
    sizes = {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "sr_ratios": [2, 1],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
        "drop_path_rate": 0.0,
        "classifier_dropout_prob": 0.0,
        "num_labels": CLASSES,
    }
    model = transformer("SegformerForSemanticSegmentation", "SegformerConfig", **sizes)
    return Case(model, {**pixels(32), "labels": integers((ROWS, 32, 32), 0, CLASSES)})


def class_loss(model: nn.Module, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a network that gives an image scores."""
    return F.cross_entropy(model(pixel_values), labels)


def network(name: str, size: int, *, is_random: bool = False, **options: Any) -> Case:
    """A network of torchvision."""
    model = getattr(library("torchvision").models, name)(weights=None, num_classes=CLASSES, **options)
    if not is_random:
        for module in model.modules():
            if type(module).__name__ == "StochasticDepth":
                module.p = 0.0
    return Case(model, pixels(size), class_loss, is_random)


NETWORKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resnet18": ("resnet18", 64, {}),
    "resnet50": ("resnet50", 64, {}),
    "mobilenet_v3": ("mobilenet_v3_small", 64, {"dropout": 0.0}),
    "efficientnet_b0": ("efficientnet_b0", 64, {"dropout": 0.0}),
    "efficientnet-sd": ("efficientnet_b0", 64, {"is_random": True}),
    "densenet121": ("densenet121", 64, {}),
    "vgg11_bn": ("vgg11_bn", 32, {"dropout": 0.0}),
    "swin_v2_t": ("swin_v2_t", 64, {}),
}


def _network(name: str, size: int, options: dict[str, Any]) -> Callable[[], Case]:
    return lambda: network(name, size, **options)


for _name, (_network_name, _size, _options) in NETWORKS.items():
    case(_name)(_network(_network_name, _size, _options))


@case("resnet18-ac")
def _() -> Case:
    # Batch norm over the few values of two images would amplify bfloat16's rounding to most of the gradient.
    batch = {"pixel_values": normal(16, 3, 64, 64), "labels": integers((16,), 0, CLASSES)}
    return autocast(dataclasses.replace(network("resnet18", 64), batch=batch))


@case("clip")
def _() -> Case:
    text = {**SIZES, "max_position_embeddings": 32, "projection_dim": 16, "eos_token_id": 2, "bos_token_id": 1}
    images = {k: v for k, v in PATCHES.items() if "dropout" not in k}
    config = library("transformers").CLIPConfig(
        text_config={**text, "pad_token_id": 0}, vision_config={**images, "projection_dim": 16}, projection_dim=16
    )
    batch = {"input_ids": integers((ROWS, 16)), "pixel_values": pixels()["pixel_values"]}
    batch["input_ids"][:, -1] = 2
    return Case(library("transformers").CLIPModel(config), batch, pair_loss)


def pair_loss(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    """The loss of a model that compares all images with all texts."""
    return model(**batch, return_loss=True).loss


# Sound ---------------------------------------------------------------------------------------------------------------

WAVES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (8, 8, 8),
    "conv_stride": (4, 4, 2),
    "conv_kernel": (8, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    **dict.fromkeys(
        ["hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "activation_dropout"], 0.0
    ),
}


@case("wav2vec2-ctc")
def _() -> Case:
    model = transformer("Wav2Vec2ForCTC", "Wav2Vec2Config", **WAVES, pad_token_id=0)
    return Case(model, {"input_values": normal(ROWS, 1600), "labels": integers((ROWS, 6), 1, 32)})


@case("wav2vec2-cls")
def _() -> Case:
    sizes = {**WAVES, "num_labels": 4, "classifier_proj_size": 16}
    model = transformer("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **sizes)
    return Case(model, {"input_values": normal(ROWS, 1600), "labels": torch.tensor([1, 3])})


# Noise ---------------------------------------------------------------------------------------------------------------


def noise_loss(model: nn.Module, noise: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
    """The loss of a model that finds the noise in an image."""
    return F.mse_loss(model(**batch).sample, noise)


TIMES = torch.tensor([3, 700])
BLOCKS: dict[str, Any] = {
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "sample_size": 16,
}


def noisy(channels: int, size: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Noisy images, the noise and what the model knows besides."""
    images = normal(ROWS, channels, size, size)
    return {"noise": normal(ROWS, channels, size, size, seed=9), "timestep": TIMES, **more, "sample": images}


@case("unet2d")
def _() -> Case:
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    channels = {"in_channels": 3, "out_channels": 3}
    model = library("diffusers").UNet2DModel(**BLOCKS, **channels, down_block_types=down, up_block_types=up)
    return Case(model, noisy(3, 16), noise_loss)


@case("unet2d-cond")
def _() -> Case:
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    channels = {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 24}
    model = library("diffusers").UNet2DConditionModel(**BLOCKS, **channels, down_block_types=down, up_block_types=up)
    return Case(model, noisy(4, 16, encoder_hidden_states=normal(ROWS, 7, 24, seed=7)), noise_loss)


def latent(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same for models that name the images otherwise."""
    batch = noisy(4, 8, **more)
    return {"hidden_states": batch.pop("sample"), **batch}


@case("dit")
def _() -> Case:
    model = library("diffusers").DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=8,
    )
    return Case(model, latent(class_labels=torch.tensor([1, 5])), noise_loss, is_random=True)


@case("sd3")
def _() -> Case:
    model = library("diffusers").SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    known = {"encoder_hidden_states": normal(ROWS, 5, 24, seed=4), "pooled_projections": normal(ROWS, 16, seed=6)}
    return Case(model, {**latent(**known), "timestep": torch.tensor([3.0, 700.0])}, noise_loss)


@case("vae")
def _() -> Case:
    model = library("diffusers").AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 16),
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    return Case(Coded(model), {"images": normal(ROWS, 3, 16, 16)})


class Coded(nn.Module):
    """An autoencoder with its loss: what it makes of an image, and how far its code is from noise."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the loss. images: [batch, channels, height, width]."""
        code = self.model.encode(images).latent_dist
        return F.mse_loss(self.model.decode(code.mode()).sample, images) + 1e-3 * code.kl().mean()
