"""More models for benches/coverage.py, which show how well the first ones stand for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from families import (
    CASES,
    CLASSES,
    ENCODER,
    GROUPED,
    LATENT,
    ROWS,
    SIZES,
    VOCABULARY,
    Case,
    add_families,
    case,
    causal,
    integers,
    library,
    masked,
    normal,
    pixels,
    tokens,
    transformer,
)
from families_media import PATCHES, WAVES, network
from families_plain import Classified, Recurrent, symbols
from torch import nn

# The cases of the other files, which are imported above.
FIRST = list(CASES)
LENGTH = 16

# Networks of torchvision ---------------------------------------------------------------------------------------------

NETWORKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "regnet": ("regnet_y_400mf", 64, {}),
    "efficientnet_v2": ("efficientnet_v2_s", 64, {"dropout": 0.0}),
    "convnext_tiny": ("convnext_tiny", 64, {}),
    "swin_t": ("swin_t", 64, {}),
    "mobilenet_v2": ("mobilenet_v2", 64, {"dropout": 0.0}),
    "shufflenet_v2": ("shufflenet_v2_x0_5", 64, {}),
    "squeezenet": ("squeezenet1_1", 64, {"dropout": 0.0}),
    "mnasnet": ("mnasnet0_5", 64, {"dropout": 0.0}),
    "alexnet": ("alexnet", 64, {"dropout": 0.0}),
    "resnext50": ("resnext50_32x4d", 64, {}),
    "vit_b_16": ("vit_b_16", 32, {"image_size": 32}),
}


def _network(name: str, size: int, options: dict[str, Any]) -> Callable[[], Case]:
    return lambda: network(name, size, **options)


for _name, (_network_name, _size, _options) in NETWORKS.items():
    case(_name)(_network(_network_name, _size, _options))


# Models of transformers ----------------------------------------------------------------------------------------------

MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta": ("Deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}),
    "mpnet": ("MPNet", {"pad_token_id": 1}),
    "layoutlm": ("LayoutLM", {}),
    "convbert": ("ConvBert", {"embedding_size": 32, "conv_kernel_size": 3}),
    "squeezebert": ("SqueezeBert", {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2}),
    "roformer": ("RoFormer", {"embedding_size": 32}),
    "fnet": ("FNet", {}),
    "nystromformer": ("Nystromformer", {"num_landmarks": 4, "segment_means_seq_len": 16, "conv_kernel_size": 3}),
    "longformer": ("Longformer", {"attention_window": [8, 8], "pad_token_id": 1}),
    "big_bird": ("BigBird", {"attention_type": "original_full", "pad_token_id": 0}),
    "xlm_roberta": ("XLMRoberta", {"pad_token_id": 1}),
    "megatron_bert": ("MegatronBert", {}),
}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", {**LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 32}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **GROUPED,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 0,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0, 1],
        },
    ),
    "nemotron": ("Nemotron", {**GROUPED, "head_dim": 8}),
    "helium": ("Helium", {**GROUPED, "head_dim": 8}),
    "ernie4_5": ("Ernie4_5", {**GROUPED, "head_dim": 8}),
    "falcon_h1": (
        "FalconH1",
        {**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8},
    ),
    "gpt_bigcode": (
        "GPTBigCode",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "codegen": (
        "CodeGen",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 8,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "beit": ("Beit", {**PATCHES, "use_relative_position_bias": True, "drop_path_rate": 0.0}, 16),
    "convnextv2": ("ConvNextV2", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, 32),
    "poolformer": (
        "PoolFormer",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
            "drop_path_rate": 0.0,
            "mlp_ratio": 2.0,
        },
        32,
    ),
    "resnet-hf": (
        "ResNet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        32,
    ),
    "mobilevit": (
        "MobileViT",
        {
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "num_attention_heads": 4,
            "hidden_dropout_prob": 0.0,
            "classifier_dropout_prob": 0.0,
            "image_size": 64,
        },
        64,
    ),
}


def _classifier(family: str, sizes: dict[str, Any], size: int) -> Callable[[], Case]:
    def build() -> Case:
        model = transformer(f"{family}ForImageClassification", f"{family}Config", **sizes, num_labels=CLASSES)
        return Case(model, pixels(size))

    return build


add_families(masked, MASKED)
add_families(causal, CAUSAL)
for _name, (_family, _sizes, _size) in CLASSIFIERS.items():
    case(_name)(_classifier(_family, _sizes, _size))


@case("xlm")
def _() -> Case:
    sizes = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
    return Case(transformer("XLMWithLMHeadModel", "XLMConfig", vocab_size=VOCABULARY, **sizes), tokens())


@case("siglip")
def _() -> Case:
    patches = {k: v for k, v in PATCHES.items() if "dropout" not in k}
    config = library("transformers").SiglipConfig(
        text_config={**SIZES, "projection_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=patches,
    )
    batch = {"input_ids": integers((ROWS, LENGTH)), "pixel_values": pixels()["pixel_values"]}

    def loss(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
        return model(**batch, return_loss=True).loss

    return Case(library("transformers").SiglipModel(config), batch, loss)


@case("vits")
def _() -> Case:
    # The text encoder: the rest of the model cannot be trained by transformers.
    sizes = {**SIZES, "flow_size": 32, "ffn_dim": 64, "window_size": 4, "ffn_kernel_size": 3}
    zeros = dict.fromkeys(["hidden_dropout", "attention_dropout", "activation_dropout", "layerdrop"], 0.0)
    model: Any = transformer("VitsModel", "VitsConfig", **sizes, **zeros)

    def loss(model: nn.Module, input_ids: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids, padding_mask).last_hidden_state.square().mean()

    return Case(
        model.text_encoder, {"input_ids": integers((ROWS, LENGTH)), "padding_mask": torch.ones(ROWS, LENGTH, 1)}, loss
    )


@case("pegasus")
def _() -> Case:
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "use_cache": False,
    }
    return Case(transformer("PegasusForConditionalGeneration", "PegasusConfig", **sizes), tokens((ROWS, 10)))


@case("hubert")
def _() -> Case:
    return _speech("HubertForSequenceClassification", "HubertConfig")


@case("bert-qa")
def _() -> Case:
    model = transformer("BertForQuestionAnswering", "BertConfig", **ENCODER)
    places = {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 9])}
    return Case(model, {"input_ids": integers((ROWS, LENGTH)), **places})


@case("bert-tokens")
def _() -> Case:
    model = transformer("BertForTokenClassification", "BertConfig", **ENCODER, num_labels=CLASSES)
    return Case(model, {"input_ids": integers((ROWS, LENGTH)), "labels": integers((ROWS, LENGTH), 0, CLASSES)})


@case("llama-cls")
def _() -> Case:
    sizes = {**SIZES, **GROUPED, "num_labels": 3, "pad_token_id": 0}
    model = transformer("LlamaForSequenceClassification", "LlamaConfig", **sizes)
    return Case(model, {"input_ids": integers((ROWS, LENGTH)), "labels": torch.tensor([0, 2])})


def _speech(model: str, config: str) -> Case:
    sizes = {**WAVES, "num_labels": 4, "classifier_proj_size": 16}
    batch = {"input_values": normal(ROWS, 1600), "labels": torch.tensor([1, 3])}
    return Case(transformer(model, config, **sizes), batch)


# PyTorch's own modules -----------------------------------------------------------------------------------------------

WIDTH = 32


@case("rnn")
def _() -> Case:
    return Case(Recurrent(nn.RNN(WIDTH, WIDTH, 2, batch_first=True)), symbols())


@case("bilstm")
def _() -> Case:
    return Case(Recurrent(nn.LSTM(WIDTH, WIDTH, 1, batch_first=True, bidirectional=True), 2 * WIDTH), symbols())


@case("lstm-dropout")
def _() -> Case:
    return Case(Recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)), symbols(), is_random=True)


class Causal(nn.Module):
    """A convolution that sees no later element, with a shortcut."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, width, length]."""
        return F.relu(self.conv(F.pad(x, (self.pad, 0))) + x)


@case("tcn")
def _() -> Case:
    model = Classified(
        nn.Conv1d(4, 16, 1), Causal(16, 1), Causal(16, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, CLASSES)
    )
    return Case(model, {"x": normal(ROWS, 4, 32), "y": torch.tensor([0, 4])})


@case("conv1d")
def _() -> Case:
    model = Classified(
        nn.Conv1d(4, 16, 5, stride=2),
        nn.BatchNorm1d(16),
        nn.GELU(),
        nn.MaxPool1d(2),
        nn.AvgPool1d(2),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )
    model(normal(ROWS, 4, 32), torch.tensor([0, 4]))
    return Case(model, {"x": normal(ROWS, 4, 32), "y": torch.tensor([0, 4])})


class Autoencoder(nn.Module):
    """A code of an image, by convolutions, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ELU(), nn.Conv2d(8, 16, 3, 2, 1), nn.Softplus())
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 3, 2, 1, output_padding=1),
            nn.SELU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 3, 3, 1, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss. x: [batch, 3, size, size]."""
        return F.smooth_l1_loss(self.decoder(self.encoder(x)), x)


@case("autoencoder")
def _() -> Case:
    return Case(Autoencoder(), {"x": normal(ROWS, 3, 16, 16)})


class Attention(nn.Module):
    """A graph network: each node takes its neighbours' features by scores that sum to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.score, self.out = nn.Linear(8, 16), nn.Linear(32, 1), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. x: [nodes, features]; source, target: [edges]; y: [nodes]."""
        h = self.features(x)
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], 1))).squeeze(1)
        highest = torch.full_like(x[:, 0], -1e9).scatter_reduce(0, target, score, "amax")
        weight = torch.exp(score - highest.detach()[target])
        total = torch.zeros_like(x[:, 0]).index_add(0, target, weight)
        sent = h[source] * (weight / total[target])[:, None]
        return F.cross_entropy(self.out(torch.zeros_like(h).index_add(0, target, sent)), y)


@case("gat")
def _() -> Case:
    edges = {"source": integers((30,), 0, 10, seed=5), "target": torch.arange(30) % 10}
    return Case(Attention(), {"x": normal(10, 8), **edges, "y": integers((10,), 0, 4)})


class Mixed(nn.Module):
    """Losses that few models have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.PReLU(), nn.LayerNorm(32), nn.Mish(), nn.Linear(32, 8), nn.Softsign()
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        """Return the loss. x, y: [batch, 16]; sign: [batch]."""
        a, b = self.layers(x), self.layers(y)
        triplet = F.triplet_margin_loss(a, b, a.flip(0))
        near = F.cosine_embedding_loss(a, b, sign)
        apart = F.kl_div(F.log_softmax(a, 1), F.softmax(b, 1), reduction="batchmean")
        return triplet + near + apart + F.huber_loss(a, b) + F.margin_ranking_loss(a[:, 0], b[:, 0], sign)


@case("losses")
def _() -> Case:
    return Case(Mixed(), {"x": normal(4, 16), "y": normal(4, 16, seed=4), "sign": torch.tensor([1.0, -1.0, 1.0, 1.0])})


@case("encoder-layers")
def _() -> Case:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
    model = Classified(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(128, CLASSES)
    )
    return Case(model, {"x": normal(ROWS, 8, 16), "y": torch.tensor([0, 4])})


# Complex numbers -----------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """Attention whose queries and keys are turned by a complex buffer, as in LLaMA's own code and in torchtitan."""

    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 96), nn.Linear(32, VOCABULARY)
        angles = torch.outer(torch.arange(float(LENGTH)), 1 / 1e4 ** torch.linspace(0, 1, 4))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, tokens, heads, width]."""
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[None, : x.shape[1], None]).flatten(3).type_as(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss. ids: [batch, tokens]."""
        q, k, v = self.qkv(self.words(ids)).unflatten(2, (3, 4, 8)).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (self.turned(q), self.turned(k), v))
        y = self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@case("rotary-complex")
def _() -> Case:
    return Case(Turned(), {"ids": integers((ROWS, LENGTH))})


class Fourier(nn.Module):
    """A Fourier neural operator: complex parameters filter the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 8), nn.Linear(8, 1)
        self.low, self.high = (nn.Parameter(torch.randn(8, 8, 4, 4, dtype=torch.cfloat) / 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss. x: [batch, height, width, 1]."""
        h = self.up(x).movedim(3, 1)
        spectrum = torch.fft.rfft2(h)
        kept = torch.zeros_like(spectrum)
        kept[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :4], self.low)
        kept[:, :, -4:, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -4:, :4], self.high)
        h = F.gelu(torch.fft.irfft2(kept, s=h.shape[2:]) + h)
        return (self.down(h.movedim(1, 3)) - x.roll(1, 1)).square().mean()


@case("fourier-operator")
def _() -> Case:
    return Case(Fourier(), {"x": normal(ROWS, 16, 20, 1)})


class StateSpace(nn.Module):
    """S4D: a convolution, by Fourier transforms, with powers of complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.complex(-torch.full((6, 4), 0.5), torch.arange(4.0).expand(6, 4) * torch.pi))
        self.out, self.step = nn.Parameter(torch.randn(6, 4, dtype=torch.cfloat)), nn.Parameter(torch.full((6,), 0.1))
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss. x: [batch, tokens, 6]."""
        n, scaled = x.shape[1], self.decay * self.step[:, None]
        powers = torch.exp(scaled[..., None] * torch.arange(n))
        kernel = 2 * torch.einsum("dn,dnl->dl", self.out * (torch.exp(scaled) - 1) / self.decay, powers).real
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * n) * torch.fft.rfft(kernel, n=2 * n)
        y = torch.fft.irfft(spectrum, n=2 * n)[..., :n].transpose(1, 2)
        return (self.last(F.gelu(y)) - x.roll(1, 1)).square().mean()


@case("state-space")
def _() -> Case:
    return Case(StateSpace(), {"x": normal(ROWS, LENGTH, 6)})
