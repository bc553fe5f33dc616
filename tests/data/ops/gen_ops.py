#!/usr/bin/env python3
"""Writes ops.pt2, one graph in which every operator that the importer knows is called, and ops.safetensors, what torch
computes for it: `in.NAME` and `out.NAME`. Random operators are in random.pt2; their results are not compared.

Usage: gen_ops.py   (torch 2.11.0; writes beside itself)
"""
import os

import torch
import transformers.integrations.moe  # noqa: F401  (registers operators)
from safetensors.torch import save_file

aten = torch.ops.aten
HERE = os.path.dirname(os.path.abspath(__file__))
NEG = float("-inf")


def calls(x, p, i, b, img):
    """x f32[4,6]; p f32[4,6], positive; i i64[4,6] in 0..4; b bool[4,6]; img f32[2,4,5,5]"""
    v, w, r = x[0], p[1], x.reshape(2, 2, 6)
    h, d = x.to(torch.bfloat16), x.to(torch.float64)
    idx, near, zero = torch.tensor([2, 0, 2]), torch.tensor([0, 1, 0]), x.sum()
    dy = x * 0.5 + 1
    yield "neg abs sign exp tanh sigmoid sin cos erf relu silu square exp2 sgn", lambda f: getattr(aten, f)(x)
    yield "atan", lambda f: aten.atan(x * 3)
    yield "asin acos", lambda f: getattr(aten, f)(torch.cat([torch.sin(x), torch.full((1, 6), 1.0), -torch.ones(1, 6)]))
    yield "log sqrt rsqrt reciprocal log2 log10", lambda f: getattr(aten, f)(p)
    yield "log1p expm1", lambda f: getattr(aten, f)(torch.cat([p, x[:2] * 1e-4]))
    yield "log1p_ends", lambda f: aten.log1p(torch.tensor([0.0, -1.0, float("inf"), -2.0]) + 0 * x[0, :4])
    yield "expm1_ends", lambda f: aten.expm1(torch.tensor([0.0, NEG, float("inf"), 100.0]) + 0 * x[0, :4])
    yield "log1p_half expm1_half", lambda f: getattr(aten, f[:5])(h * 0.25)
    yield "exp sqrt sigmoid reciprocal", lambda f: getattr(aten, f)(i + 1)
    yield "isnan isinf isfinite logical_not", lambda f: getattr(aten, f)(x)
    yield "floor ceil trunc", lambda f: getattr(aten, f)(torch.where(b, x * 3, NEG))
    yield "floor_large", lambda f: aten.floor(x.double() * 1e300)
    yield "div_floor div_trunc", lambda f: getattr(aten, "div").Tensor_mode(i - 2, idx[:1] + 1, rounding_mode=f[4:])
    yield "floor_divide remainder", lambda f: getattr(aten, f)(i - 2, 3)
    yield "isinf2", lambda f: aten.isinf(torch.where(b, NEG, x))
    yield "gelu", lambda f: aten.gelu(x)
    yield "gelu_tanh", lambda f: aten.gelu(x, approximate="tanh")
    yield "gelu_backward", lambda f: aten.gelu_backward(dy, x)
    yield "gelu_backward_tanh", lambda f: aten.gelu_backward(dy, x, approximate="tanh")
    yield "silu_backward", lambda f: aten.silu_backward(dy, x)
    yield "tanh_backward sigmoid_backward", lambda f: getattr(aten, f)(dy, torch.sigmoid(x))
    yield "threshold_backward", lambda f: aten.threshold_backward(dy, x, 0)
    yield "hardtanh_backward", lambda f: aten.hardtanh_backward(dy, x, -0.5, 0.5)
    yield "leaky_relu", lambda f: aten.leaky_relu(x, 0.1)
    yield "leaky_relu_backward", lambda f: aten.leaky_relu_backward(dy, x, 0.1, False)
    yield "hardtanh", lambda f: aten.hardtanh(x)
    yield "relu6", lambda f: aten.relu6(x)
    yield "clamp", lambda f: aten.clamp(x, -0.5, 0.5)
    yield "clamp_low", lambda f: aten.clamp(x, min=0.25)
    yield "clamp_int", lambda f: aten.clamp(i, max=2)
    yield "clamp_mixed", lambda f: aten.clamp(i, 0.5, 2)
    yield "clamp_min", lambda f: aten.clamp_min(x, 0.1)
    yield "clamp_tensor", lambda f: aten.clamp.Tensor(x, v, w)
    yield "bitwise_not", lambda f: aten.bitwise_not(i)
    yield "bitwise_not_bool", lambda f: aten.bitwise_not(b)
    # Mixed element types, numbers on either side, factors.
    yield "add sub mul div pow maximum minimum eq ne lt le gt ge", lambda f: getattr(aten, f)(p, w)
    yield "add_int sub_int mul_int div_int", lambda f: getattr(aten, f[:3]).Tensor(i, i + 1)
    yield "add_mixed sub_mixed mul_mixed div_mixed", lambda f: getattr(aten, f[:3]).Tensor(i, x)
    yield "add_scalar sub_scalar mul_scalar div_scalar", lambda f: getattr(aten, f[:3])(x, 3)
    yield "add_iscalar sub_iscalar mul_iscalar div_iscalar", lambda f: getattr(aten, f[:3])(i, 1.5)
    yield "mul_ii", lambda f: aten.mul(i, 3)
    yield "add_alpha sub_alpha", lambda f: getattr(aten, f[:3]).Tensor(x, p, alpha=3)
    yield "sub_alpha_scalar", lambda f: aten.sub(x, 2, alpha=3)
    yield "rsub", lambda f: aten.rsub(x, p, alpha=2)
    yield "rsub_scalar", lambda f: aten.rsub(x, 2)
    yield "one_minus", lambda f: 1 - x
    yield "one_over", lambda f: 1 / p
    yield "two_to_the", lambda f: 2**x
    yield "zero_rank", lambda f: i + zero
    yield "zero_rank_wide", lambda f: x + zero.double()
    yield "half", lambda f: h + 1
    yield "half_mixed", lambda f: h * d
    yield "bool_add", lambda f: b + i
    yield "bool_mul", lambda f: b * b
    yield "bool_or", lambda f: b + b
    yield "pow_square", lambda f: aten.pow(x, 2)
    yield "pow_int", lambda f: aten.pow(i, 2)
    yield "pow_half", lambda f: aten.pow(i, 0.5)
    yield "eq_number ne_number lt_number le_number gt_number ge_number", lambda f: getattr(aten, f[:2])(i, 2)
    yield "lt_fraction", lambda f: aten.lt(i, 1.5)
    yield "lt_mixed", lambda f: aten.lt(i, x)
    yield "eq_bool", lambda f: aten.eq(b, 1)
    yield "max_other min_other", lambda f: getattr(aten, f[:3]).other(x, p)
    yield "bitwise_and bitwise_or bitwise_xor", lambda f: getattr(aten, f)(i, i + 1)
    yield "bitwise_and_number", lambda f: aten.bitwise_and(i, 1)
    yield "logical_and logical_or logical_xor", lambda f: getattr(aten, f)(i, b)
    yield "where", lambda f: aten.where(b, x, i)
    yield "where_number", lambda f: aten.where(b, x, 0.0)
    yield "masked_fill", lambda f: aten.masked_fill(x, b, NEG)
    yield "masked_fill_tensor", lambda f: aten.masked_fill(x, b, zero)
    yield "addcmul", lambda f: aten.addcmul(x, p, dy, value=2)
    yield "addcdiv", lambda f: aten.addcdiv(x, dy, p)
    yield "lerp", lambda f: aten.lerp(x, p, 0.25)
    # Reductions.
    yield "sum mean amax amin max min", lambda f: getattr(aten, f)(x)
    yield "sum_dim mean_dim amax_dim amin_dim", lambda f: getattr(aten, f[:-4])(r, [-1, 0], True)
    yield "sum_int", lambda f: aten.sum(i, [0])
    yield "sum_bool", lambda f: aten.sum(b)
    yield "sum_wide", lambda f: aten.sum(x, [1], dtype=torch.float64)
    yield "sum_nothing", lambda f: aten.sum(zero)
    yield "max_dim min_dim", lambda f: getattr(aten, f[:3]).dim(x, 1)
    yield "argmax argmin", lambda f: getattr(aten, f)(x, -1, True)
    yield "argmax_all", lambda f: aten.argmax(x)
    yield "any all", lambda f: getattr(aten, f)(b, 1)
    yield "any_all all_all", lambda f: getattr(aten, f[:3])(i)
    yield "cumsum", lambda f: aten.cumsum(b, 1)
    yield "topk", lambda f: aten.topk(x, 3)
    yield "topk_least", lambda f: aten.topk(x, 2, 0, False)
    yield "histc", lambda f: aten.histc(x, 7, -0.8, 1.1)
    yield "histc_ends", lambda f: aten.histc(i.float(), bins=4, min=0, max=3)
    yield "sort", lambda f: aten.sort(x, 0, True)
    yield "var", lambda f: aten.var.correction(x, [1], correction=1, keepdim=True)
    yield "var_all", lambda f: aten.var.correction(x)
    yield "std", lambda f: aten.std.correction(x, [0], correction=0)
    yield "var_mean", lambda f: aten.var_mean.correction(x, [1])
    yield "logsumexp", lambda f: aten.logsumexp(x, [1])
    yield "logsumexp_empty", lambda f: aten.logsumexp(torch.full_like(x, NEG), [1], True)
    yield "vector_norm", lambda f: aten.linalg_vector_norm(x, 2, [1])
    yield "vector_norm_inf", lambda f: aten.linalg_vector_norm(x, float("inf"))
    yield "_softmax _log_softmax", lambda f: getattr(aten, f)(x, -1, False)
    yield "_safe_softmax", lambda f: aten._safe_softmax(torch.where(i == 1, NEG, x.expand(4, 6)), 1)
    yield "_softmax_backward_data", lambda f: aten._softmax_backward_data(dy, torch.softmax(x, 1), 1, torch.float32)
    yield "_log_softmax_backward_data", lambda f: aten._log_softmax_backward_data(
        dy, torch.log_softmax(x, 1), 1, torch.float32)
    # Normalisation.
    ln = aten.native_layer_norm(x, [6], v, w, 1e-5)
    yield "native_layer_norm", lambda f: ln
    yield "layer_norm_plain", lambda f: aten.native_layer_norm(r, [2, 6], None, None, 1e-5)
    yield "layer_norm_bias", lambda f: aten.native_layer_norm(x, [6], None, w, 1e-5)
    yield "layer_norm_half", lambda f: aten.native_layer_norm(h, [6], v.to(torch.bfloat16), None, 1e-5)
    yield "native_layer_norm_backward", lambda f: aten.native_layer_norm_backward(
        dy, x, [6], ln[1], ln[2], v, w, [True, True, True])
    yield "layer_norm_backward_some", lambda f: aten.native_layer_norm_backward(
        dy, x, [6], ln[1], ln[2], None, None, [True, False, False])[0]
    yield "_fused_rms_norm", lambda f: aten._fused_rms_norm(x, [6], w, 1e-5)
    rms = aten._fused_rms_norm(x, [6], w, 1e-5)
    rms_back = aten._fused_rms_norm_backward.default
    if not torch.compiler.is_exporting():   # the CPU has no kernel for it
        rms_back = torch._decomp.decomposition_table[rms_back]
    yield "_fused_rms_norm_backward", lambda f: rms_back(dy, x, [6], rms[1], w, [True, True])
    g, gdy = img[0, :, 0, 0].contiguous(), img * 0.5 + 1
    gn = aten.native_group_norm(img, g, g + 1, 2, 4, 25, 2, 1e-5)
    yield "native_group_norm", lambda f: gn
    yield "native_group_norm_backward", lambda f: aten.native_group_norm_backward(
        gdy, img, gn[1], gn[2], g, 2, 4, 25, 2, [True, True, True])
    mean, var = g * 0.1, g.abs() + 1
    bn = aten._native_batch_norm_legit_functional(img, g, g + 1, mean, var, True, 0.1, 1e-5)
    yield "_native_batch_norm_legit_functional", lambda f: bn
    yield "batch_norm_eval", lambda f: aten._native_batch_norm_legit_no_training(img, g, g + 1, mean, var, 0.1, 1e-5)[0]
    yield "native_batch_norm_backward", lambda f: aten.native_batch_norm_backward(
        gdy, img, g, mean, var, bn[1], bn[2], True, 1e-5, [True, True, True])
    yield "batch_norm_backward_eval", lambda f: aten.native_batch_norm_backward(
        gdy, img, g, mean, var, None, None, False, 1e-5, [True, True, True])
    # Products.
    yield "mm", lambda f: aten.mm(x, p.t())
    yield "bmm", lambda f: aten.bmm(r, r.transpose(1, 2))
    yield "addmm", lambda f: aten.addmm(v, x[:, :4], p)
    yield "addmm_scaled", lambda f: aten.addmm(v, x[:, :4], p, beta=0.5, alpha=2)
    yield "baddbmm", lambda f: aten.baddbmm(r, r[:, :, :2], r, beta=0, alpha=0.5)
    # Of groups of rows: those behind the last group are left to chance by PyTorch.
    ends = torch.tensor([1, 1, 4], dtype=torch.int32)
    wide, other = torch.cat([h, h[:, :2]], 1), torch.cat([h[:, 2:], h[:, :4]], 1)
    experts = torch.stack([wide[:, None] * other] * 2, 2).reshape(4, 8, 8)[:3]
    yield "grouped_mm", lambda f: aten._grouped_mm(wide, experts, ends)
    yield "grouped_mm_turned", lambda f: aten._grouped_mm(wide, experts.transpose(1, 2), ends)
    yield "grouped_mm_terms", lambda f: aten._grouped_mm(
        torch.cat([wide, wide], 1).t(), torch.cat([other, wide], 0)[:4], ends)
    yield "grouped_mm_all", lambda f: aten._grouped_mm(experts, experts)
    for_any, weights = torch.ops.transformers, torch.stack([x[:, :4], p[:, :4], x[:, 2:]])
    yield "grouped_mm_fallback", lambda f: for_any.grouped_mm_fallback(x[:, 2:], weights, ends)
    yield "grouped_mm_fallback_backward", lambda f: for_any.grouped_mm_fallback_backward(
        x[:, 2:], weights, ends, p[:, 1:5])
    yield "mv", lambda f: aten.mv(x, v)
    yield "dot", lambda f: aten.dot(v, w)
    yield "matmul", lambda f: aten.matmul(r, p.t())
    yield "matmul_batch", lambda f: aten.matmul(r[:, None], r.transpose(1, 2))
    yield "matmul_vectors", lambda f: aten.matmul(v, r.transpose(1, 2))
    yield "linear", lambda f: aten.linear(r, p, x[:, 0])
    yield "linear_plain", lambda f: aten.linear(v, p)
    kernel = img[:, :2, :3, :3]
    yield "convolution", lambda f: aten.convolution(img, kernel, mean[:2], [2], [1], [1], False, [0], 2)
    yield "conv2d", lambda f: aten.conv2d(img, kernel, None, [1, 1], [0, 1], [2, 1], 2)
    yield "conv1d", lambda f: aten.convolution(r, r[:, :, :3], None, [1], [1], [1], False, [0], 1)
    conv = aten.convolution(img, kernel, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 2)
    yield "convolution_backward", lambda f: aten.convolution_backward(
        conv, img, kernel, [2], [2, 2], [1, 1], [1, 1], False, [0, 0], 2, [True, True, True])
    yield "convolution_backward_dw", lambda f: aten.convolution_backward(
        conv, img, kernel, [0], [2, 2], [1, 1], [1, 1], False, [0, 0], 2, [False, True, False])[1]
    pool = aten.max_pool2d_with_indices(img, [3, 3], [2, 2], [1, 1])
    yield "max_pool2d_with_indices", lambda f: pool
    yield "max_pool2d_plain", lambda f: aten.max_pool2d_with_indices(img[0], [2, 2])
    yield "max_pool2d_with_indices_backward", lambda f: aten.max_pool2d_with_indices_backward(
        pool[0], img, [3, 3], [2, 2], [1, 1], [1, 1], False, pool[1])
    up = img.reshape(2, 2, 2, 5, 5)[:, :, 0], kernel[:2]
    for name, options in (("transposed", ([2, 1], [1, 0], [1, 1], True, [1, 0])), ("transposed_dilated", ([1], [2], [2], True, [0]))):
        back = aten.convolution(*up, None, *options, 1)
        yield name, lambda f, options=options: aten.convolution(*up, mean[: back.shape[1]], *options, 1)
        yield name + "_backward", lambda f, back=back, options=options: aten.convolution_backward(
            back * 0.5, *up, [back.shape[1]], *options, 1, [True, True, True]
        )
    even = img[:, :, :4, :4]
    for name, (image, window) in {
        "avg_pool2d": (even, ([2, 2], [2, 2])),
        "avg_pool2d_rest": (img, ([2, 2], [])),
        "avg_pool2d_overlap": (img, ([3, 3], [2, 2], [1, 1])),
        "avg_pool2d_single": (img[0], ([3, 2], [1, 1])),
    }.items():
        dy = aten.avg_pool2d(image, *window) * 0.5
        yield name, lambda f, image=image, window=window: aten.avg_pool2d(image, *window)
        yield name + "_backward", lambda f, dy=dy, image=image, window=window: aten.avg_pool2d_backward(
            dy, image, *[*window, [0, 0]][:3], False, True, None
        )
    yield "_adaptive_avg_pool2d_tiles", lambda f: aten._adaptive_avg_pool2d(even, [2, 4])
    yield "_adaptive_avg_pool2d_tiles_backward", lambda f: aten._adaptive_avg_pool2d_backward(even[:, :, :2], even)
    yield "_adaptive_avg_pool2d", lambda f: aten._adaptive_avg_pool2d(img, [1, 1])
    yield "_adaptive_avg_pool2d_backward", lambda f: aten._adaptive_avg_pool2d_backward(img[:, :, :1, :1], img)
    # Attention.
    q = img[:, :, :, :4]
    name = aten._scaled_dot_product_flash_attention_for_cpu
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    for label, kw, causal in (("plain", {}, False), ("causal", {}, True), ("mask", {"attn_mask": img[:, :1]}, False),
                              ("scale", {"scale": 0.3}, False)):
        o = name(q, q + 1, q * 2, 0.0, causal, **kw)
        yield f"attention_{label}", lambda f, o=o: o
        yield f"attention_backward_{label}", lambda f, o=o, kw=kw, causal=causal: back(
            q - 1, q, q + 1, q * 2, o[0], o[1], 0.0, causal, **kw)
    # Operators that a forward has before it is decomposed.
    yield "diff", lambda f: aten.diff(x, 1, 0, w[None])
    yield "diff_bool", lambda f: aten.diff(b)
    yield "layer_norm", lambda f: aten.layer_norm(x, [6], v, w)
    yield "rms_norm", lambda f: aten.rms_norm(x, [6], v, 1e-6)
    channel, spread = img[0, :, 0, 0], img[1, :, 0, 0] ** 2
    yield "group_norm", lambda f: aten.group_norm(img, 2, channel, spread)
    yield "batch_norm", lambda f: aten.batch_norm(img, channel, None, None, None, True, 0.1, 1e-5, False)
    yield "batch_norm_eval", lambda f: aten.batch_norm(img, channel, None, channel, spread, False, 0.1, 1e-5, False)
    yield "max_pool2d", lambda f: aten.max_pool2d(img, [2, 2], [1, 2], [1, 0])
    whole = aten.scaled_dot_product_attention
    seen = torch.tensor([[1, 1, 0, 1, 1]] * 5) > 0
    yield "attention_whole", lambda f: whole(q, q + 1, q * 2, is_causal=True)
    yield "attention_whole_mask", lambda f: whole(q, q + 1, q * 2, seen, scale=0.3)
    yield "attention_whole_matrix", lambda f: whole(q[0, 0], q[0, 1], q[0, 2])
    yield "attention_whole_grouped", lambda f: whole(q, q[:, :2] + 1, q[:, 2:], enable_gqa=True)
    yield "attention_whole_f64", lambda f: whole(q.double(), q.double() + 1, q.double() * 2, seen)
    yield "attention_whole_f64_causal", lambda f: whole(q.double(), q.double() + 1, q.double() * 2, is_causal=True)
    for red in (0, 1, 2):
        yield f"cross_entropy_{red}", lambda f, red=red: aten.cross_entropy_loss(x, i[:, 0], None, red, 2)
    yield "cross_entropy_images", lambda f: aten.cross_entropy_loss(img[:, :, :2, :2], torch.tensor(
        [[[0, 1], [2, 3]], [[3, 3], [1, -100]]]))
    yield "nll_loss", lambda f: aten.nll_loss(torch.log_softmax(x, 1), i[:, 0])
    yield "nll_loss_nd", lambda f: aten.nll_loss_nd(torch.log_softmax(x, 1), i[:, 0])
    yield "add_in_place", lambda f: aten.add_.Tensor(x + 1, v)
    yield "relu_in_place", lambda f: aten.relu_(x + 0)
    yield "clamp_in_place", lambda f: aten.mul_.Tensor(aten.clamp_(x + 0, min=0.1), x)
    # Tables and losses.
    yield "embedding", lambda f: aten.embedding(x, i, 0)
    yield "embedding_dense_backward", lambda f: aten.embedding_dense_backward(
        p[:, None, :].expand(4, 6, 6), i, 5, 1, False)
    logp, t = torch.log_softmax(x, 1), i[:, 0]
    for red in (0, 1, 2):
        nll = aten.nll_loss_forward(logp, t, None, red, 2)
        # Without a reduction torch's total weight is 0 and unused.
        yield f"nll_loss_forward_{red}", lambda f, nll=nll, red=red: nll if red else nll[0]
        yield f"nll_loss_backward_{red}", lambda f, nll=nll, red=red: aten.nll_loss_backward(
            nll[0], logp, t, None, red, 2, nll[1])
    pixels = torch.tensor([[[0, 1], [2, 3]], [[3, 3], [1, 0]]])
    nll2 = aten.nll_loss2d_forward(img[:, :, :2, :2], pixels, None, 1, -100)
    yield "nll_loss2d_forward", lambda f: nll2
    yield "nll_loss2d_backward", lambda f: aten.nll_loss2d_backward(
        nll2[0], img[:, :, :2, :2], pixels, None, 1, -100, nll2[1])
    yield "mse_loss", lambda f: aten.mse_loss(x, p)
    yield "mse_loss_none", lambda f: aten.mse_loss(x, p, 0)
    yield "mse_loss_backward", lambda f: aten.mse_loss_backward(zero, x, p, 1)
    # Indices.
    yield "gather", lambda f: aten.gather(x, 1, i)
    yield "scatter_src", lambda f: aten.scatter(x, 0, i[:2, :3], p)
    yield "scatter_value", lambda f: aten.scatter(x, 1, i[:, :2], 7)
    yield "scatter_add", lambda f: aten.scatter_add(x, 1, i, p)
    yield "scatter_reduce", lambda f: aten.scatter_reduce(x, 1, i, p, "sum")
    yield "index", lambda f: aten.index(x, [idx])
    yield "index_two", lambda f: aten.index(x, [idx[:, None], idx])
    yield "index_later", lambda f: aten.index(x, [None, idx])
    yield "index_middle", lambda f: aten.index(img, [None, idx[:, None], idx])
    yield "index_apart", lambda f: aten.index(img, [near, None, idx])
    yield "index_put", lambda f: aten.index_put(x, [idx], v, True)
    yield "index_put_later", lambda f: aten.index_put(x, [None, idx], p[:, :3], True)
    yield "index_put_middle", lambda f: aten.index_put(img, [None, idx[:2, None], idx[:2]], img[0, 0, 0], True)
    yield "index_put_apart", lambda f: aten.index_put(img, [near, None, idx], zero, True)
    yield "index_put_mask", lambda f: aten.index_put(x, [b], zero)
    yield "index_select", lambda f: aten.index_select(x, 1, idx)
    yield "index_add", lambda f: aten.index_add(x, 1, idx, p[:, :3], alpha=2)
    # Shapes.
    yield "t", lambda f: aten.t(x)
    yield "view", lambda f: aten.view(x, [2, -1])
    yield "transpose", lambda f: aten.transpose(r, -1, 0)
    yield "permute", lambda f: aten.permute(r, [1, -1, 0])
    yield "unsqueeze", lambda f: aten.unsqueeze(x, -1)
    yield "squeeze", lambda f: aten.squeeze(x[None, :, :1])
    yield "squeeze_dims", lambda f: aten.squeeze.dims(x[None, :, :1], [0, -1])
    yield "flatten", lambda f: aten.flatten(img, 1)
    yield "expand", lambda f: aten.expand(v, [2, 3, -1])
    yield "repeat", lambda f: aten.repeat(x, [2, 1, 3])
    yield "flip", lambda f: aten.flip(r, [0, -1])
    yield "roll", lambda f: aten.roll(x, [1, -2], [0, 1])
    yield "roll_flat", lambda f: aten.roll(x, [5])
    yield "slice", lambda f: aten.slice(x, 1, -4, 100, 2)
    yield "narrow", lambda f: aten.narrow(x, 1, 2, 3)
    yield "select", lambda f: aten.select(x, 1, -2)
    yield "unbind", lambda f: aten.unbind(x, 1)
    yield "split", lambda f: aten.split.Tensor(x, 4, 1)
    yield "split_with_sizes", lambda f: aten.split_with_sizes(x, [1, 2, 3], -1)
    yield "chunk", lambda f: aten.chunk(x, 4, 1)
    yield "slice_scatter", lambda f: aten.slice_scatter(x, p[:, :2], 1, 1, 3)
    yield "select_scatter", lambda f: aten.select_scatter(x, v, 0, -1)
    yield "slice_backward", lambda f: aten.slice_backward(x, [4, 12], 1, 0, 12, 2)
    yield "select_backward", lambda f: aten.select_backward(v, [3, 6], 0, 1)
    yield "cat", lambda f: aten.cat([x, i], 1)
    yield "stack", lambda f: aten.stack([x, p], -1)
    yield "constant_pad_nd", lambda f: aten.constant_pad_nd(r, [1, -2, 0, 3], 2.5)
    yield "tril triu", lambda f: getattr(aten, f)(r, 1)
    yield "copy", lambda f: aten.copy(x, i[:1])
    yield "clone alias detach", lambda f: getattr(aten, f)(x)
    yield "_to_copy", lambda f: aten._to_copy(x, dtype=torch.float16)
    yield "to_bool", lambda f: aten._to_copy(i, dtype=torch.bool)
    yield "convert_element_type", lambda f: torch.ops.prims.convert_element_type(x, torch.float64)
    # Sources.
    yield "full", lambda f: aten.full([2, 3], 1.5)
    yield "full_like zeros_like ones_like", lambda f: getattr(aten, f)(*([i, 3] if f == "full_like" else [i]))
    yield "zeros ones", lambda f: getattr(aten, f)([2], dtype=torch.bool)
    yield "new_full new_zeros new_ones", lambda f: getattr(aten, f)(*([x, [2], 3] if f == "new_full" else [x, [2]]))
    yield "scalar_tensor", lambda f: aten.scalar_tensor(2, dtype=torch.float64)
    yield "fill", lambda f: aten.fill(x, 2)
    yield "arange", lambda f: aten.arange(5)
    yield "arange_step", lambda f: aten.arange(7, -1, -3)
    yield "arange_float", lambda f: aten.arange(0, 1, 0.3)
    yield "eye", lambda f: aten.eye(3)
    yield "eye_m", lambda f: aten.eye(3, 4)


def complex_calls(x, p, i, img):
    """As for `calls`. Complex results are given as pairs of real numbers."""
    z, w = torch.view_as_complex(x.reshape(4, 3, 2)), torch.complex(p[:, :3], x[:, 3:])
    r, idx = x[:, :3], torch.tensor([2, 0, 2])
    holed = torch.where(r > 0, z, torch.zeros(1, dtype=torch.complex64))
    yield "polar complex", lambda f: getattr(torch, f)(p, x)
    yield "real imag abs angle sgn", lambda f: getattr(torch, f)(holed)
    yield "conj conj_physical neg exp log square reciprocal", lambda f: getattr(torch, f)(w)
    yield "cadd csub cmul cdiv", lambda f: getattr(aten, f[1:])(z, w)
    yield "cadd_real csub_real cmul_real cdiv_real", lambda f: getattr(aten, f[1:4])(z, r)
    yield "real_cadd real_csub real_cmul real_cdiv", lambda f: getattr(aten, f[6:])(p[:, :3], w)
    yield "cadd_number csub_number cmul_number cdiv_number", lambda f: getattr(aten, f[1:4])(z, 1.5)
    yield "csub_alpha", lambda f: aten.sub(r, z, alpha=2)
    yield "times_i", lambda f: 1j * r + z * (0.5 - 2j)
    yield "to_complex", lambda f: r.to(torch.complex64) * z
    yield "to_wide", lambda f: torch.view_as_real(z.to(torch.complex128))
    yield "cpow", lambda f: z**2
    yield "cmatmul cmm", lambda f: getattr(aten, f[1:])(z, w.t())
    yield "cmatmul_real", lambda f: aten.matmul(z, r.t().to(torch.complex64))
    yield "ceinsum", lambda f: torch.einsum("ij,kj->ik", z, w)
    yield "csum cmean", lambda f: getattr(torch, f[1:])(z, 1)
    yield "ccat", lambda f: torch.cat([z, w], 1)[:, 1::2].transpose(0, 1).flatten()
    yield "cindex", lambda f: z[:, idx]
    yield "cwhere", lambda f: torch.where(r > 0, z, w.conj())
    yield "cslice_scatter", lambda f: aten.slice_scatter(torch.zeros_like(w), z[:, :2], 1, 1, 3)
    yield "cfull", lambda f: torch.full((4, 3), 1.5, dtype=torch.complex64) * z + torch.ones_like(z)
    yield "cunbind", lambda f: [part.clone() for part in torch.unbind(z, 1)]
    # Fourier transforms.
    yield "fft ifft rfft fft2 ifft2 rfft2 fftn ifftn rfftn", lambda f: getattr(torch.fft, f)(x)
    yield "cfft cifft cirfft cfft2 cifft2 cirfft2 cirfftn", lambda f: getattr(torch.fft, f[1:])(w)
    yield "fft_ortho ifft_ortho rfft_ortho irfft_ortho", lambda f: getattr(torch.fft, f[:-6])(x, norm="ortho")
    yield "fft_forward ifft_forward irfft_forward", lambda f: getattr(torch.fft, f[:-8])(w, norm="forward")
    yield "rfft_longer irfft_longer", lambda f: getattr(torch.fft, f[:-7])(x, n=9, dim=0)
    yield "rfft_shorter irfft_shorter", lambda f: getattr(torch.fft, f[:-8])(x, n=5)
    yield "rfft2_sizes irfft2_sizes", lambda f: getattr(torch.fft, f[:-6])(x, s=(3, 7))
    yield "fft_r2c", lambda f: aten._fft_r2c(x, [0, 1], 1, True)
    yield "fft_r2c_whole", lambda f: aten._fft_r2c(x, [0, 1], 2, False)
    yield "fft_c2r", lambda f: aten._fft_c2r(w, [0, 1], 2, 5)
    yield "fft_c2c", lambda f: aten._fft_c2c(w, [0, 1], 0, False)
    long = torch.cat([x.flatten() * (1 - k) for k in range(22)])[:520]
    yield "fft_long ifft_long", lambda f: getattr(torch.fft, f[:-5])(long.view(2, 130, 2), dim=1)
    yield "rfft_long irfft_long", lambda f: getattr(torch.fft, f[:-5])(long, n=520)
    yield "irfft_odd", lambda f: torch.fft.irfft(long.view(2, 260)[:, :194], n=387)
    yield "rfft2_long", lambda f: torch.fft.rfft2(long.view(2, 260).expand(3, 2, 260))
    yield "fftshift ifftshift", lambda f: getattr(torch.fft, f)(z, dim=1)
    yield "fftshift_real", lambda f: torch.fft.fftshift(x)
    yield "remainder_number fmod_number", lambda f: getattr(torch, f[:-7])(torch.tensor([1.0, 0.3, 2, -1, -6.2831855]), 0.1)
    yield "remainder_bf16", lambda f: torch.remainder(torch.tensor([1.0, 0.3, 2, -1], dtype=torch.bfloat16), 0.1)
    yield "remainder_inf fmod_inf", lambda f: getattr(torch, f[:-4])(torch.tensor([1.0, -1, 0]), float("inf"))
    yield "div_number", lambda f: torch.div(torch.tensor([1.0, 0.3, 2, -1]), 0.1, rounding_mode="floor")
    yield "hypot_large", lambda f: torch.hypot(torch.tensor([1e30, 1e-30]), torch.tensor([2e30, 1e-30])) * 1e-30
    yield "bucketize_nan", lambda f: torch.bucketize(torch.tensor([float("nan"), 0.5]), torch.tensor([0.0, 1.0]))
    yield "xlogy_ends", lambda f: torch.xlogy(torch.tensor([0.0, 0, 0, 1]), torch.tensor([float("inf"), 0, -1, 2]))
    yield "cat_empty", lambda f: aten.cat([x[:0, :1], x[:0, :1]], 1)
    yield "one_minus_complex", lambda f: 1 - z
    yield "complex_large", lambda f: (w * 1e30).abs() * 1e-30 + (z / (w * 1e-25)).abs() * 1e-25
    yield "diagonal_scatter_3d", lambda f: aten.diagonal_scatter(img, img[:, :, 0, :4], 1, 2, 3)
    yield "atan2", lambda f: torch.atan2(torch.tensor([[1.0], [-2], [0], [-0.0]]), torch.tensor([1.5, -3, 0, -0.0, -1e9]))


class Ops(torch.nn.Module):
    def forward(self, x, p, i, b, img):
        out = {}
        for names, call in calls(x, p, i, b, img):
            for name in names.split():
                made = call(name)
                key = name if f"{name}.0" not in out else f"{name}_again"
                assert f"{key}.0" not in out, name
                for k, y in enumerate(made if isinstance(made, (tuple, list)) else [made]):
                    out[f"{key}.{k}"] = y.clone()
        for names, call in complex_calls(x, p, i, img):
            for name in names.split():
                made = call(name)
                key = name if f"{name}.0" not in out else f"{name}_again"
                for k, y in enumerate(made if isinstance(made, (tuple, list)) else [made]):
                    out[f"{key}.{k}"] = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y.clone()
        out["complex_result.0"] = torch.complex(x, p)
        return out


class Random(torch.nn.Module):
    def forward(self, x, p):
        dropped = aten.native_dropout(x, 0.25, True)
        return {
            "rand": aten.rand([64, 6]), "randn_like": aten.randn_like(x), "bernoulli": aten.bernoulli(p.sigmoid()),
            "bernoulli_p": aten.bernoulli.p(x, 0.25), "uniform": aten.uniform(x, 2, 3),
            "randint": aten.randint.low(-2, 5, [64, 6]), "exponential": aten.exponential(x, 2),
            "dropped": dropped[0], "mask": dropped[1],
            "dropout_backward": aten.native_dropout_backward(x, dropped[1], 4 / 3),
            "dropout_eval": aten.native_dropout(x, 0.25, False)[0],
            # The weights of a row have the sum 1, and so has its result, on average.
            "attention": aten.scaled_dot_product_attention(x[None, None], x[None, None], p[None, None], None, 0.25),
            "alpha_dropout": aten.alpha_dropout(x, 0.25, True),
            "feature_dropout": aten.feature_dropout(torch.ones(64, 6, 4), 0.25, True),
            "feature_alpha_dropout": aten.feature_alpha_dropout(torch.zeros(64, 6, 4), 0.25, True),
            "normal": aten.normal.Tensor_Tensor(x, p + 1) - x,
            "randperm": aten.randperm(64),
        }


def save(module, args, name):
    ep = torch.export.export(module, args, strict=False)
    for node in ep.graph.nodes:         # the position of a call in this file does not help readers of the graph
        for key in ("stack_trace", "from_node", "torch_fn", "nn_module_stack", "source_fn_stack"):
            node.meta.pop(key, None)
    torch.export.save(ep, os.path.join(HERE, name))


def main():
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    args = (x, torch.rand(4, 6) + 0.5, torch.randint(0, 4, (4, 6)), torch.rand(4, 6) < 0.5, torch.randn(2, 4, 5, 5))
    names = ["x", "p", "i", "b", "img"]
    save(Ops(), args, "ops.pt2")
    out = Ops()(*args)
    # User outputs have the names of nodes: here they are in the order of the file.
    pairs = {k: torch.view_as_real(t) if t.is_complex() else t for k, t in out.items()}
    tensors = {f"in.{n}": t for n, t in zip(names, args)}
    tensors |= {f"out.{k}": t.contiguous().clone() for k, t in pairs.items()}
    order = {"order": " ".join(out)}
    save_file(tensors, os.path.join(HERE, "ops.safetensors"), metadata=order)
    big = torch.randn(64, 6)
    save(Random(), (big, big.abs()), "random.pt2")
    print(len(out), "results")


if __name__ == "__main__":
    main()
