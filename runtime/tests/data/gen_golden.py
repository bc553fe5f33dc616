"""Writes golden.json: operands, attributes and results of every kernel, computed by PyTorch (made with 2.11.0, CPU).

One case a line: {"name", "op", "attrs", "in": [tensor, ..], "out": [tensor, ..]}, where a tensor is [dtype, shape,
base64 of the little-endian bytes]. `python gen_golden.py` writes the cases that golden.json lacks and keeps the lines
of all others: PyTorch computes other last bits on another processor. A case has a line if the file has one of the same
name, op, attributes, types and shapes. `python gen_golden.py NAME ..` also computes the cases of these names or ops
again. Lines of cases that no longer exist are removed.

The cases of a name draw their numbers from a generator that the name seeds, so a new case changes no other. Half
precision and f64 are here where the formula could differ; the tests' own reference covers the rest.
"""

import base64
import json
import math
import sys
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

NAMES = {
    torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
FLOATS = ["f32", "f64", "bf16", "f16"]
SOME = ["f32", "bf16"]
aten = torch.ops.aten
names = set()
current = None
cases = []  # of this run


def seed(*name):
    """Begins the cases of a name, with their own random numbers."""
    global current
    current = " ".join(str(part).replace("torch.", "") for part in name)
    assert current not in names, current
    names.add(current)
    torch.manual_seed(zlib.crc32(current.encode()))


def tensor(t):
    t = t.detach().contiguous()
    data = t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
    return [NAMES[t.dtype], list(t.shape), base64.b64encode(data).decode()]


def case(op, ins, outs, **attrs):
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    attrs = {k: "Infinity" if v == math.inf else "-Infinity" if v == -math.inf else v for k, v in attrs.items()}
    line = {"name": current, "op": op, "attrs": attrs, "in": [tensor(t) for t in ins], "out": [tensor(t) for t in outs]}
    cases.append(line)


def x(*shape, dtype="f32", scale=1.0):
    dtype = DTYPES[dtype]
    if dtype.is_floating_point:
        return (torch.randn(shape) * scale).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    low = 0 if dtype == torch.uint8 else -9
    return torch.randint(low, 10, shape, dtype=dtype)


def positive(*shape, dtype="f32"):
    return (torch.rand(shape) + 0.1).to(DTYPES[dtype])


def maps():
    """The maps of block-wise quantisation."""
    lines = (Path(__file__).parents[3] / "ops/src/maps.txt").read_text().splitlines()
    bits = ([int(bits, 16) for bits in line.split()[1:]] for line in lines if line[0] != "#")
    return [torch.tensor(row, dtype=torch.int64).to(torch.int32).view(torch.float32) for row in bits]


MAPS = maps()


def decoded(map_, codes, largest):
    return map_[codes.long()] * largest.repeat_interleave(256)[: len(codes)]


def encoded(map_, numbers):
    """The codes of numbers, and the largest magnitude of each block of 256."""
    largest = torch.stack([block.abs().max() for block in numbers.split(256)])
    middles = (map_[:-1] + map_[1:]) / 2
    scaled = numbers / largest.repeat_interleave(256)[: len(numbers)]
    return torch.bucketize(scaled, middles).to(torch.uint8), largest


def grads(y, ins, dy):
    return torch.autograd.grad(y, ins, dy)


def leaf(t):
    return t.detach().clone().requires_grad_()


SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -1e30, 0.5, 100.0, -100.0, 88.0, -3.5])


def elementwise():
    unary = {
        "exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos,
        "atan": torch.atan, "erf": torch.erf, "silu": F.silu, "reciprocal": torch.reciprocal,
    }
    for op, f in unary.items():
        for dtype in FLOATS:
            seed(op, dtype)
            a = x(3, 5, dtype=dtype)
            case(op, [a], f(a))
        seed(op, "special")
        case(op, [SPECIAL], f(SPECIAL))
    for op, f in {"log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt}.items():
        for dtype in FLOATS:
            seed(op, dtype)
            a = positive(3, 5, dtype=dtype)
            case(op, [a], f(a))
        seed(op, "special")
        case(op, [SPECIAL], f(SPECIAL))
    for op, f in {"neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "relu": torch.relu}.items():
        for dtype in ["f32", "bf16", "i64", "i8"]:
            seed(op, dtype)
            a = x(3, 5, dtype=dtype)
            case(op, [a], f(a))
        seed(op, "special")
        case(op, [SPECIAL], f(SPECIAL))
    for tanh, name in [(False, "none"), (True, "tanh")]:
        for dtype in FLOATS:
            seed("gelu", name, dtype)
            a, dy = leaf(x(3, 7, dtype=dtype, scale=2.0)), x(3, 7, dtype=dtype)
            case("gelu", [a], F.gelu(a, approximate=name), tanh=tanh)
            case("gelu_bwd", [dy, a], aten.gelu_backward(dy, a.detach(), approximate=name), tanh=tanh)
    for dtype in ["bool", "u8", "i32"]:
        seed("bitwise", dtype)
        a, b = x(2, 9, dtype=dtype), x(2, 9, dtype=dtype)
        case("bitwise_not", [a], torch.bitwise_not(a))
        case("bitwise_and", [a, b], torch.bitwise_and(a, b))
        case("bitwise_or", [a, b], torch.bitwise_or(a, b))
        case("bitwise_xor", [a, b], torch.bitwise_xor(a, b))
    for dtype in ["bool", "f32", "i64", "f16"]:
        seed("logical", dtype)
        a, b = x(2, 9, dtype=dtype), x(2, 9, dtype=dtype)
        a[0, 0] = 0
        case("logical_not", [a], torch.logical_not(a))
        case("logical_and", [a, b], torch.logical_and(a, b))
        case("logical_or", [a, b], torch.logical_or(a, b))
    seed("cast")
    a = torch.tensor([0.0, 1e-40, -2.7, 3.999, math.nan, 100.0])
    for to in ["bool", "f16", "bf16", "f64"]:
        case("cast", [a], a.to(DTYPES[to]), dtype=to)
    a = torch.tensor([-2.7, 3.999, 0.5, 100.0], dtype=torch.float64)
    for to in ["u8", "i8", "i16", "i32", "i64", "f32", "bf16"]:
        source = a.abs() if to == "u8" else a
        case("cast", [source], source.to(DTYPES[to]), dtype=to)
    a = torch.tensor([0, 1, -1, 300, 2**40 + 1, 16777217], dtype=torch.int64)
    for to in ["bool", "u8", "i8", "i32", "f32", "f64", "bf16"]:
        case("cast", [a], a.to(DTYPES[to]), dtype=to)
    a = torch.tensor([True, False, True])
    for to in ["f32", "i64", "bf16"]:
        case("cast", [a], a.to(DTYPES[to]), dtype=to)
    seed("clamp f32")
    a = x(3, 5)
    case("clamp", [a], a.clamp(-0.5, 0.5), min=-0.5, max=0.5)
    case("clamp", [SPECIAL], SPECIAL.clamp(-1.0), min=-1.0, max=math.inf)
    seed("clamp i64")
    a = x(3, 5, dtype="i64")
    case("clamp", [a], a.clamp(-2, 3), min=-2, max=3)
    case("clamp", [a], a.clamp(min=0), min=0, max=math.inf)
    for dtype, v in [("f32", 0.3), ("bf16", 0.3), ("f64", -1.7), ("i64", 3), ("i8", 120)]:
        seed("number", dtype)
        a = x(3, 5, dtype=dtype)
        case("add_scalar", [a], a + v, value=v)
        case("mul_scalar", [a], a * v, value=v)
        case("rsub_scalar", [a], torch.rsub(a, v), value=v)
    for dtype in FLOATS:
        seed("quotient and power", dtype)
        a = positive(3, 5, dtype=dtype)
        case("div_scalar", [a], a / 3.0, value=3.0)
        for v in [2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 1.7, 4]:
            case("pow_scalar", [a], a**v, value=v)
    seed("power i64")
    a = x(3, 5, dtype="i64")
    case("pow_scalar", [a], a**3, value=3)
    for dtype, v in [("f32", 0.0), ("i64", 2), ("bool", 1), ("bf16", 0.5)]:
        seed("comparison with a number", dtype)
        a = x(3, 5, dtype=dtype)
        for op in ["eq", "ne", "lt", "le", "gt", "ge"]:
            case(op + "_scalar", [a], getattr(torch, op)(a, v), value=v)
    seed("comparison special")
    case("ne_scalar", [SPECIAL], SPECIAL != 0.0, value=0.0)
    shapes = [((3, 5), (3, 5)), ((4, 1, 3), (2, 1)), ((1,), (2, 3)), ((2, 0, 3), (1, 3)), ((), (2, 2))]
    for p, q in shapes:
        seed("two operands", *p, "and", *q)
        a, b = x(*p), x(*q)
        for op in ["add", "sub", "mul", "div", "maximum", "minimum", "eq", "lt"]:
            case(op, [a, b], getattr(torch, op)(a, b))
    for dtype in ["bf16", "f64", "i32", "u8"]:
        seed("two operands", dtype)
        a, b = x(4, 3, dtype=dtype), x(3, dtype=dtype)
        for op in ["add", "sub", "mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"]:
            case(op, [a, b], getattr(torch, op)(a, b))
    seed("two operands bool")
    a, b = x(9, dtype="bool"), x(9, dtype="bool")
    for op in ["add", "mul", "eq", "ne", "maximum", "minimum"]:
        case(op, [a, b], getattr(torch, op)(a, b))
    seed("two operands nan")
    nan = torch.tensor([math.nan, 1.0, 2.0, math.nan])
    other = torch.tensor([1.0, math.nan, 3.0, math.nan])
    for op in ["maximum", "minimum", "lt", "ne", "eq"]:
        case(op, [nan, other], getattr(torch, op)(nan, other))
    for dtype in ["f32", "f64", "bf16"]:
        seed("power", dtype)
        a, b = positive(3, 4, dtype=dtype), x(4, dtype=dtype)
        case("pow", [a, b], torch.pow(a, b))
    for dtype in ["f32", "bf16", "i64", "bool"]:
        seed("where", dtype)
        c, a, b = x(2, 3, dtype="bool"), x(3, dtype=dtype), x(2, 1, dtype=dtype)
        case("where", [c, a, b], torch.where(c, a, b))
    for dtype in FLOATS:
        seed("derivatives", dtype)
        a, dy = x(3, 5, dtype=dtype), x(3, 5, dtype=dtype)
        case("tanh_bwd", [dy, torch.tanh(a)], aten.tanh_backward(dy, torch.tanh(a)))
        case("sigmoid_bwd", [dy, torch.sigmoid(a)], aten.sigmoid_backward(dy, torch.sigmoid(a)))
        case("silu_bwd", [dy, a], aten.silu_backward(dy, a))
        case("threshold_bwd", [dy, a], aten.threshold_backward(dy, a, 0), value=0)


def reductions():
    for dtype in ["f32", "bf16", "i32"]:
        seed("reductions", dtype)
        a = x(3, 2, 5, dtype=dtype)
        for dims, keep in [([0], False), ([1], True), ([2], False), ([0, 2], True), ([0, 1, 2], False), ([1, 2], False)]:
            case("sum", [a], a.sum(dims, keepdim=keep, dtype=a.dtype), dims=dims, keepdim=keep)
            if dtype in FLOATS:
                case("mean", [a], a.mean(dims, keepdim=keep), dims=dims, keepdim=keep)
            case("amax", [a], a.amax(dims, keepdim=keep), dims=dims, keepdim=keep)
            case("amin", [a], a.amin(dims, keepdim=keep), dims=dims, keepdim=keep)
    seed("reductions of nothing")
    a = x(3, 0, 2)
    case("sum", [a], a.sum([1]), dims=[1], keepdim=False)
    case("mean", [a], a.mean([1]), dims=[1], keepdim=False)
    case("sum", [a], a.sum([2]), dims=[2], keepdim=False)
    seed("reductions special")
    a = SPECIAL.reshape(3, 4)
    case("amax", [a], a.amax([1]), dims=[1], keepdim=False)
    case("amin", [a], a.amin([0]), dims=[0], keepdim=False)
    seed("any")
    a = x(3, 4, dtype="bool") & x(3, 4, dtype="bool")
    case("any", [a], a.any(1), dims=[1], keepdim=False)
    case("any", [a], a.any(0, keepdim=True), dims=[0], keepdim=True)
    case("any", [SPECIAL], SPECIAL.any(0), dims=[0], keepdim=False)
    for dtype in ["f32", "f64", "i64", "i32"]:
        seed("cumsum", dtype)
        a = x(2, 4, 3, dtype=dtype)
        for dim in range(3):
            case("cumsum", [a], a.cumsum(dim, dtype=a.dtype), dim=dim)
    for dtype in ["f32", "bf16", "i64"]:
        seed("topk", dtype)
        a = torch.randperm(24).reshape(2, 4, 3).to(DTYPES[dtype])
        for dim, k, largest in [(1, 2, True), (2, 3, False), (1, 4, True), (1, 0, True)]:
            case("topk", [a], torch.topk(a, k, dim, largest), dim=dim, k=k, largest=largest)
    seed("topk special")
    a = torch.tensor([1.0, math.nan, 3.0, -math.inf])
    case("topk", [a], torch.topk(a, 3), dim=0, k=3, largest=True)
    case("topk", [a], torch.topk(a, 3, largest=False), dim=0, k=3, largest=False)


def norms():
    for dtype in SOME:
        seed("softmax", dtype)
        a, dy = x(2, 3, 2, dtype=dtype, scale=3.0), x(2, 3, 2, dtype=dtype)
        for dim in range(3):
            y, ly = torch.softmax(a, dim), torch.log_softmax(a, dim)
            case("softmax", [a], y, dim=dim)
            case("log_softmax", [a], ly, dim=dim)
            case("softmax_bwd", [dy, y], aten._softmax_backward_data(dy, y, dim, a.dtype), dim=dim)
            case("log_softmax_bwd", [dy, ly], aten._log_softmax_backward_data(dy, ly, dim, a.dtype), dim=dim)
    seed("softmax special")
    a = torch.full((2, 3), -math.inf)
    a[1, 0] = 0.0
    case("softmax", [a], torch.softmax(a, 1), dim=1)
    case("log_softmax", [a], torch.log_softmax(a, 1), dim=1)
    for dtype in SOME:
        for dims, affine in [(1, 2), (2, 2), (1, 0), (1, 1)]:
            seed("layer_norm", dtype, dims, affine)
            a, dy = x(2, 2, 5, dtype=dtype, scale=2.0) + 1, x(2, 2, 5, dtype=dtype)
            shape = a.shape[-dims:]
            w = x(*shape, dtype=dtype) if affine > 0 else None
            b = x(*shape, dtype=dtype) if affine > 1 else None
            y, mean, rstd = torch.native_layer_norm(a, shape, w, b, 1e-5)
            # PyTorch rounds the statistics of half precision to half precision on the CPU; here they are f32.
            _, mean, rstd = torch.native_layer_norm(a.float(), shape, None, None, 1e-5)
            case("layer_norm", [t for t in (a, w, b) if t is not None], [y, mean, rstd], dims=dims, eps=1e-5)
            # In f64, then rounded: the CPU kernel of half precision needs its statistics in half precision.
            masks = [[1, 1, 1], [1, 0, 0], [0, 1, 1]] if dtype == "f32" and affine == 2 else [[1, 1, 1]]
            for mask in masks if affine else [[1, 0, 0]]:
                up = lambda t: None if t is None else t.double()
                want = [m == 1 for m in mask]
                bias = b if b is not None else w
                g = aten.native_layer_norm_backward(up(dy), up(a), shape, up(mean), up(rstd), up(w), up(bias), want)
                outs = [t.to(a.dtype) for t, m in zip(g, mask) if m]
                case("layer_norm_bwd", [t for t in (dy, a, mean, rstd, w) if t is not None], outs, dims=dims, mask=mask)
    for dtype in ["f32"]:
        for shape in [(4, 3), (2, 3, 5), (2, 3, 2, 3)]:
            seed("batch_norm", *shape)
            a, dy = x(*shape, dtype=dtype) * 2 + 1, x(*shape, dtype=dtype)
            w, b, rm, rv = x(3, dtype=dtype), x(3, dtype=dtype), x(3, dtype=dtype), positive(3, dtype=dtype)
            y, mean, rstd, *_ = aten._native_batch_norm_legit_functional(a, w, b, rm, rv, True, 0.1, 1e-5)
            var = a.transpose(0, 1).flatten(1).var(1)
            case("batch_norm", [a, w, b], [y, mean, rstd, var], eps=1e-5)
            for mask in [[1, 1, 1], [0, 1, 1], [1, 0, 0]]:
                g = aten.native_batch_norm_backward(dy, a, w, rm, rv, mean, rstd, True, 1e-5, [True] * 3)
                case("batch_norm_bwd", [dy, a, w, mean, rstd], [t for t, m in zip(g, mask) if m], mask=mask)


def products():
    for dtype in ["f32", "bf16", "i32"]:
        for ta in [False, True]:
            for tb in [False, True]:
                seed("matmul", dtype, ta, tb)
                a, b = x(3, 5, dtype=dtype), x(5, 4, dtype=dtype)
                stored = (a.t().contiguous() if ta else a, b.t().contiguous() if tb else b)
                case("matmul", stored, a @ b, ta=ta, tb=tb)
                c = x(4, dtype=dtype)
                case("addmm", [c, *stored], torch.addmm(c, a, b), ta=ta, tb=tb)
        seed("matmul batch", dtype)
        a, b = x(2, 3, 5, dtype=dtype), x(2, 4, 5, dtype=dtype)
        case("matmul", [a, b], a @ b.transpose(1, 2), ta=False, tb=True)
    seed("matmul of nothing")
    a, b = x(3, 0), x(0, 4)
    case("matmul", [a, b], a @ b, ta=False, tb=False)
    for shape in [(3, 4), (3, 1), ()]:
        seed("addmm", *shape)
        c, a, b = x(*shape), x(3, 5), x(5, 4)
        case("addmm", [c, a, b], c + a @ b, ta=False, tb=False)


def sums_of_products():
    for dtype in ["bf16", "f16"]:
        for ta in [False, True]:
            for tb in [False, True]:
                seed("matmul_sum", dtype, ta, tb)
                a, b, before = x(3, 5, dtype=dtype), x(5, 4, dtype=dtype), x(3, 4)
                stored = [a.t().contiguous() if ta else a, b.t().contiguous() if tb else b]
                product = a.double() @ b.double()
                case("matmul_sum", stored, product.float(), ta=ta, tb=tb)
                case("matmul_sum", [*stored, before], (before.double() + product).float(), ta=ta, tb=tb)


def grouped_products():
    for dtype in ["f32", "f64", "bf16", "f16"]:
        for ends in [[2, 2, 5, 6], [0, 9, 9, 9], [7, 3, 8, 8], [0, 0, 0, 0]]:
            seed("grouped", dtype, *ends)
            rows, w, dy = x(9, 5, dtype=dtype), x(4, 5, 3, dtype=dtype), x(9, 3, dtype=dtype)
            y, dw = torch.zeros(9, 3, dtype=torch.float64), torch.zeros(4, 5, 3, dtype=torch.float64)
            start = 0
            for g, end in enumerate(ends):
                end = max(start, end)
                y[start:end] = rows[start:end].double() @ w[g].double()
                dw[g] = rows[start:end].double().t() @ dy[start:end].double()
                start = end
            y, dw = y.to(rows.dtype), dw.to(rows.dtype)
            for of in [torch.int64, torch.int32]:
                at = torch.tensor(ends, dtype=of)
                case("grouped_matmul", [rows, w, at], y, tb=False)
                case("grouped_outer", [rows, dy, at], dw)
            case("grouped_matmul", [rows, w.transpose(1, 2).contiguous(), at], y, tb=True)
    seed("grouped, nothing")
    for rows, inner in [(0, 3), (4, 0)]:
        a, w, dy = x(rows, inner), x(2, inner, 5), x(rows, 5)
        at = torch.tensor([0, rows])
        case("grouped_matmul", [a, w, at], torch.zeros(rows, 5), tb=False)
        case("grouped_outer", [a, dy, at], torch.zeros(2, inner, 5))


def convolutions():
    settings = [
        # image, weight, stride, padding, dilation, groups
        ((2, 2, 4, 5), (2, 2, 3, 3), [1, 1], [1, 1], [1, 1], 1),
        ((2, 2, 5, 4), (3, 2, 3, 2), [2, 2], [1, 0], [1, 1], 1),
        ((1, 4, 4, 4), (4, 2, 3, 3), [2, 1], [2, 2], [2, 1], 2),
        ((1, 3, 3, 3), (3, 1, 1, 1), [1, 1], [0, 0], [1, 1], 3),
        ((1, 2, 7, 7), (2, 2, 3, 3), [3, 3], [0, 1], [1, 1], 1),
        ((2, 3, 6), (2, 3, 3), [2], [1], [1], 1),
    ]
    for image, weight, stride, padding, dilation, groups in settings:
        for dtype in SOME if image == (2, 2, 4, 5) else ["f32"]:
            seed("convolution", *image, "by", *weight, dtype)
            a, w, b = leaf(x(*image, dtype=dtype)), leaf(x(*weight, dtype=dtype)), leaf(x(weight[0], dtype=dtype))
            conv = F.conv2d if len(image) == 4 else F.conv1d
            attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
            # In f64, then rounded: PyTorch's convolution sometimes sums half precision in half precision.
            case("convolution", [a, w], conv(a.double(), w.double(), None, **attrs).to(a.dtype), **attrs)
            y = conv(a.double(), w.double(), b.double(), **attrs)
            case("convolution", [a, w, b], y.to(a.dtype), **attrs)
            dy = x(*y.shape, dtype=dtype)
            g = grads(y, [a, w, b], dy.double())
            for mask in [[1, 1, 1], [0, 1, 0]]:
                case("convolution_bwd", [dy, a, w], [t for t, m in zip(g, mask) if m], mask=mask, **attrs)
    pools = [
        ([2, 2], [2, 2], [0, 0], [1, 1], False),
        ([3, 3], [2, 2], [1, 1], [1, 1], False),
        ([3, 2], [2, 3], [1, 1], [2, 1], False),
        ([2, 2], [2, 2], [0, 0], [1, 1], True),
    ]
    for kernel, stride, padding, dilation, ceil in pools:
        for dtype in ["f32", "bf16"]:
            seed("max_pool2d", *kernel, dtype, "ceil" if ceil else "floor")
            a = leaf(x(1, 2, 7, 5, dtype=dtype))
            y, index = F.max_pool2d(a, kernel, stride, padding, dilation, ceil, return_indices=True)
            attrs = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil": ceil}
            case("max_pool2d", [a], [y, index], **attrs)
            dy = x(*y.shape, dtype=dtype)
            case("max_pool2d_bwd", [dy, index], grads(y, [a], dy), shape=list(a.shape), **attrs)
    seed("max_pool2d special")
    a = torch.tensor([1.0, 1.0, math.nan, 2.0, -math.inf, -math.inf, -math.inf, -math.inf]).reshape(1, 1, 2, 4)
    case("max_pool2d", [a], F.max_pool2d(a, 2, return_indices=True), kernel=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1], ceil=False)


def attention():
    def run(dtype, q_shape, k_shape, v_shape, causal, scale, mask_of=None):
        """mask_of: type and shape of a mask."""
        seed("sdpa", dtype, *q_shape, "on", *k_shape, "causal" if causal else "", mask_of[0] if mask_of else "")
        mask = mask_of and x(*mask_of[1], dtype=mask_of[0])
        if mask is not None and mask.dtype == torch.bool:
            mask[..., 2, :] = False
        q, k, v = (leaf(x(*s, dtype=dtype)) for s in (q_shape, k_shape, v_shape))
        repeat = q_shape[1] // k_shape[1]
        qd, kd, vd = q.double(), k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1)
        scores = qd @ kd.transpose(-1, -2) * scale
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask.double()
        dead = (scores == -math.inf).all(-1, keepdim=True)
        p = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
        out = (p @ vd).to(q.dtype)
        lse = torch.logsumexp(scores, -1).masked_fill(dead.squeeze(-1), 0.0).float()
        # Compare the formula above with PyTorch's own, where both take the same operands.
        if dtype == "f32":
            own = F.scaled_dot_product_attention(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), mask, is_causal=causal, scale=scale)
            torch.testing.assert_close(own, out, atol=1e-5, rtol=1e-5)
        extra = [] if mask is None else [mask]
        case("sdpa", [q, k, v, *extra], [out, lse], causal=causal, scale=scale)
        dout = x(*out.shape, dtype=dtype)
        case("sdpa_bwd", [dout, q, k, v, out, lse, *extra], grads(out, [q, k, v], dout), causal=causal, scale=scale)

    for dtype in SOME:
        run(dtype, (2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4), True, 0.5)
    run("f32", (1, 2, 3, 20), (1, 2, 6, 20), (1, 2, 6, 3), False, 0.3)
    run("f32", (1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), False, 0.5)
    run("bf16", (1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), True, 0.5)
    run("f32", (2, 2, 4, 4), (2, 2, 5, 4), (2, 2, 5, 4), False, 0.5, ("bool", (1, 1, 4, 5)))
    run("f32", (2, 2, 4, 4), (2, 2, 5, 4), (2, 2, 5, 4), False, 0.5, ("f32", (2, 1, 1, 5)))

    def rows(dtype, heads, groups, queries, keys, width, first, n_heads):
        """Heads inside rows of n_heads: q, k and v, first is -1 where heads contain rows; one tensor if they fill it."""
        seed("sdpa rows", dtype, *first, "of", *n_heads)
        joint = len(set(n_heads)) == 1 and n_heads[0] == heads + 2 * groups
        shared = leaf(x(2, queries, n_heads[0], width, dtype=dtype)) if joint else None
        ins, qkv = [], []
        for n, length, at, all_heads in zip((heads, groups, groups), (queries, keys, keys), first, n_heads):
            shape = (2, n, length, width) if at < 0 else (2, length, all_heads, width)
            own = shared if joint else leaf(x(*shape, dtype=dtype))
            ins.append(own)
            qkv.append(own if at < 0 else own[:, :, at : at + n].transpose(1, 2))
        q, k, v = (t.double() for t in qkv)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -math.inf)
        out = (torch.softmax(scores, -1) @ v).transpose(1, 2).to(ins[0].dtype)
        lse = torch.logsumexp(scores, -1).float()
        attrs = {"causal": True, "first": first, "heads": [heads, groups], "scale": 0.5}
        case("sdpa_rows", ins, [out, lse], **attrs)
        dout = x(*out.shape, dtype=dtype)
        if joint:
            gradients = list(grads(out, [shared], dout))
        else:
            all_gradients = grads(out, ins, dout)
            parts = zip(all_gradients, first, (heads, groups, groups))
            gradients = [g if at < 0 else g[:, :, at : at + n] for g, at, n in parts]
        case("sdpa_rows_bwd", [dout, *ins, out, lse], gradients, **attrs)

    for dtype in SOME:
        rows(dtype, 2, 2, 5, 5, 4, [0, 2, 4], [6, 6, 6])
    rows("f32", 4, 2, 3, 5, 4, [1, -1, 0], [5, 0, 3])


def tables():
    index = torch.tensor([[1, 4, 1], [0, 1, 6]])
    for dtype in SOME:
        seed("embedding", dtype)
        w, dy = x(7, 5, dtype=dtype), x(2, 3, 5, dtype=dtype)
        case("embedding", [w, index], F.embedding(index, w))
        for padding in [-1, 1]:
            want = aten.embedding_dense_backward(dy.double(), index, 7, padding, False).to(w.dtype)
            case("embedding_bwd", [dy, index], want, rows=7, padding=padding)
    case("embedding", [w, index.int()], F.embedding(index.int(), w))
    target = torch.tensor([2, 0, -100, 3])
    for dtype in ["f32", "f64", "bf16"]:
        seed("nll_loss", dtype)
        logp = torch.log_softmax(x(4, 5, dtype=dtype), 1)
        for reduction in range(3):
            a = leaf(logp)
            loss = aten.nll_loss_forward(a, target, None, reduction, -100)[0]
            # PyTorch's weight is 0 without a reduction; ours is the number of targets in any case.
            weight = torch.tensor(3.0, dtype=a.dtype)
            case("nll_loss", [a, target], [loss, weight], reduction=reduction, ignore=-100)
            dloss = x(*loss.shape, dtype=dtype)
            case("nll_loss_bwd", [dloss, target, weight], grads(loss, [a], dloss),
                 dtype=dtype, reduction=reduction, ignore=-100, shape=[4, 5])
    seed("nll_loss of nothing")
    a, none = x(2, 5), torch.tensor([9, 9])
    case("nll_loss", [a, none], [F.nll_loss(a, none, ignore_index=9), torch.tensor(0.0)], reduction=1, ignore=9)
    for dtype in ["f32", "bf16", "i64", "bool"]:
        seed("gather", dtype)
        a = x(3, 4, dtype=dtype)
        index = torch.tensor([[2, 0], [1, 1]])
        source = x(2, 3, dtype=dtype)
        for dim in range(2):
            case("gather", [a, index], torch.gather(a, dim, index), dim=dim)
            first = torch.tensor([[2, 0], [1, 2]])  # No place twice: the order of scatter is unspecified in PyTorch.
            case("scatter", [a, first, source], torch.scatter(a, dim, first, source), dim=dim)
            value = 1
            case("scatter_value", [a, index], torch.scatter(a, dim, index, value), dim=dim, value=value)
            if dtype != "bool":
                case("scatter_add", [a, index, source], torch.scatter_add(a, dim, index, source), dim=dim)
        seed("index", dtype)
        a = x(3, 4, 2, dtype=dtype)
        i, j = torch.tensor([[0], [2]]), torch.tensor([3, -1, 0])
        case("index", [a, i], a[i])
        case("index", [a, i, j], a[i, j])
        values = x(2, 1, 2, dtype=dtype)
        k = torch.tensor([3, 1, 0])
        case("index_put", [a, values, i, k], a.index_put((i, k), values), accumulate=False)
        if dtype != "bool":
            case("index_put", [a, values, i, j], a.index_put((i, j), values, accumulate=True), accumulate=True)
    for dtype in ["bf16", "f16"]:
        seed("index_put, half to f32", dtype)
        a, values, i = x(4, 3), x(5, 3, dtype=dtype), torch.tensor([2, 0, 2, 2, -1])
        case("index_put", [a, values, i], a.index_put((i,), values.float(), accumulate=True), accumulate=True)


def shapes():
    for dtype in ["f32", "bf16", "i64", "bool"]:
        seed("permute and slice", dtype)
        a = x(2, 3, 4, dtype=dtype)
        for dims in [[2, 0, 1], [0, 2, 1], [1, 0, 2], [0, 1, 2]]:
            case("permute", [a], a.permute(dims), dims=dims)
        case("flip", [a], a.flip([0, 2]), dims=[0, 2])
        case("flip", [a], a.flip([1]), dims=[1])
        for dim, start, end, step in [(1, 1, 3, 1), (2, 0, 4, 3), (0, 1, 1, 1), (2, 1, 4, 2)]:
            part = (slice(None),) * dim + (slice(start, end, step),)
            attrs = {"dim": dim, "start": start, "end": end, "step": step}
            case("slice", [a], a[part], **attrs)
            source = x(*a[part].shape, dtype=dtype)
            case("slice_scatter", [a, source], torch.slice_scatter(a, source, dim, start, end, step), **attrs)
        seed("expand", dtype)
        b = x(3, 1, dtype=dtype)
        case("expand", [b], b.expand(2, 3, 4), shape=[2, 3, 4])
        case("expand", [b], b.expand(3, 5), shape=[3, 5])
        seed("cat", dtype)
        parts = [x(2, n, 2, dtype=dtype) for n in (3, 0, 1)]
        case("cat", parts, torch.cat(parts, 1), dim=1)
        parts = [x(n, 2, dtype=dtype) for n in (3, 1)]
        case("cat", parts, torch.cat(parts, 0), dim=0)
        seed("pad", dtype)
        case("pad", [a], F.pad(a, (1, 2, 0, -1, -1, 3), value=1), pad=[-1, 3, 0, -1, 1, 2], value=1)
        case("pad", [a], F.pad(a, (0, 0, 2, 0)), pad=[0, 0, 2, 0, 0, 0], value=0)
        seed("full", dtype)
        case("full", [], torch.full((2, 3), 1, dtype=a.dtype), dtype=dtype, shape=[2, 3], value=1)
    seed("full")
    case("full", [], torch.full((), -0.3), dtype="f32", shape=[], value=-0.3)
    case("full", [], torch.full((3,), -math.inf), dtype="f32", shape=[3], value=-math.inf)
    case("full", [], torch.full((3,), -7, dtype=torch.int8), dtype="i8", shape=[3], value=-7)
    seed("arange")
    case("arange", [], torch.arange(2, 14, 3), dtype="i64", shape=[4], start=2, step=3)
    case("arange", [], torch.arange(0.5, 3.0, 0.3), dtype="f32", shape=[9], start=0.5, step=0.3)
    case("arange", [], torch.arange(5, 0, -1, dtype=torch.int32), dtype="i32", shape=[5], start=5, step=-1)


def optimizers():
    hyper = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for dtype in ["f32"]:
        seed("adamw", dtype)
        p = leaf(x(3, 5, dtype=dtype))
        optimizer = torch.optim.AdamW([p], foreach=False, **hyper)
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for step in range(1, 4):
            before, g = p.detach().clone(), x(3, 5, dtype=dtype)
            p.grad = g
            optimizer.step()
            state = optimizer.state[p]
            hyper_parameters = torch.tensor([1e-2, 0.9, 0.95, 1e-8, 0.1], dtype=torch.float64)
            new = [p.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
            case("adamw", [before, g, m, v, torch.tensor(step), hyper_parameters], new)
            m, v = new[1:]
        for momentum in [0.0, 0.9]:
            seed("sgd", dtype, momentum)
            p = leaf(x(3, 5, dtype=dtype))
            optimizer = torch.optim.SGD([p], lr=0.05, momentum=momentum, weight_decay=0.01, foreach=False)
            hyper_parameters = torch.tensor([0.05, momentum, 0.01], dtype=torch.float64)
            buffer = torch.zeros_like(p)
            for _ in range(2):
                before, g = p.detach().clone(), x(3, 5, dtype=dtype)
                p.grad = g
                optimizer.step()
                if momentum == 0.0:
                    case("sgd", [before, g, hyper_parameters], p.detach().clone())
                    continue
                new = optimizer.state[p]["momentum_buffer"].clone()
                case("sgd_momentum", [before, g, buffer, hyper_parameters], [p.detach().clone(), new])
                buffer = new
    # Masters in halves: the nearest bf16, ties away from zero, and the lower 16 bits.
    def halves(master):
        bits = master.view(torch.int32)
        return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)

    seed("adamw_split")
    master = leaf(x(3, 5))
    optimizer = torch.optim.AdamW([master], foreach=False, **hyper)
    m, v = torch.zeros_like(master), torch.zeros_like(master)
    for step in range(1, 4):
        before, g, scale = halves(master.detach().clone()), x(3, 5, dtype="bf16"), torch.tensor(0.3)
        master.grad = g.float() * scale
        optimizer.step()
        state = optimizer.state[master]
        hyper_parameters = torch.tensor([1e-2, 0.9, 0.95, 1e-8, 0.1], dtype=torch.float64)
        new = [*halves(master.detach().clone()), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
        ins = [before[0], g, before[1], m, v, torch.tensor(step), hyper_parameters, scale]
        case("adamw_split", ins, new)
        m, v = new[2:]
    # Moments in blocks of 256: decoded, updated by PyTorch, encoded again.
    for dtype in ["f32", "bf16"]:
        seed("adamw_8bit", dtype)
        p = leaf(x(300))
        optimizer = torch.optim.AdamW([p], foreach=False, **hyper)
        new = [p.detach().to(DTYPES[dtype]), *[torch.zeros(300, dtype=torch.uint8)] * 2, *[torch.zeros(2)] * 2]
        for step in range(1, 4):
            before, g = new, x(300, dtype=dtype)
            p.data = before[0].float().clone()
            p.grad = g.float()
            moments = [decoded(MAPS[i], before[1 + i], before[3 + i]) for i in (0, 1)]
            optimizer.state[p] = {
                "step": torch.tensor(step - 1.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]
            }
            optimizer.step()
            state = optimizer.state[p]
            codes, largest = zip(*(encoded(MAPS[i], state[key]) for i, key in enumerate(("exp_avg", "exp_avg_sq"))))
            new = [p.detach().to(DTYPES[dtype]), *codes, *largest]
            hyper_parameters = torch.tensor([1e-2, 0.9, 0.95, 1e-8, 0.1], dtype=torch.float64)
            case("adamw_8bit", [before[0], g, *before[1:], torch.tensor(step), hyper_parameters], new)
    for dtype in ["f32", "bf16"]:
        seed("nf4", dtype)
        codes, sizes = (torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (75, 3))
        largest, offset = positive(1), positive(1)[0]
        scales = MAPS[0][sizes.long()] * largest + offset
        numbers = MAPS[2][torch.stack([codes >> 4, codes & 15], 1).flatten()[:149].long()]
        numbers = numbers * scales.repeat_interleave(64)[:149]
        case("nf4", [codes, sizes, largest, offset], numbers.to(DTYPES[dtype]), dtype=dtype, shape=[149])
    # A norm over gradients, above and below the bound.
    for dtype in ["f32", "f64", "bf16"]:
        seed("sum_squares", dtype)
        g = x(3, 5, dtype=dtype)
        case("sum_squares", [g], (g.double() ** 2).sum())
    for dtype in ["f32", "f64"]:
        seed("clip_scale", dtype)
        gradients = [leaf(x(3, 5, dtype=dtype)), leaf(x(70, dtype=dtype))]
        for bound in [1.5, 40.0]:
            for g in gradients:
                g.grad = g.detach().clone()
            squares = [(g.grad.double() ** 2).sum() for g in gradients]
            torch.nn.utils.clip_grad_norm_(gradients, bound)
            factor = (gradients[0].grad / gradients[0].detach())[0, 0]
            case("clip_scale", squares, factor, dtype=dtype, max_norm=bound)
    for dtype in ["f32", "bf16"]:
        seed("dropout_bwd", dtype)
        dy, mask = x(3, 5, dtype=dtype), x(3, 5, dtype="bool")
        case("dropout_bwd", [dy, mask], aten.native_dropout_backward(dy, mask, 1.25), scale=1.25)
    seed("dropout_key")
    rng, bits = torch.tensor([7, 41]), torch.tensor(0.25, dtype=torch.float64).view(torch.int64)
    case("dropout_key", [rng], torch.stack([rng[0], rng[1], torch.tensor(3), bits]), p=0.25, stream=3)
    seed("rng_next")
    case("rng_next", [torch.tensor([7, 41])], torch.tensor([7, 42]))


def sums_of_losses():
    target = torch.tensor([2, 0, -100, 3])
    for dtype in ["f32", "f64", "bf16"]:
        seed("nll_sum", dtype)
        logp = torch.log_softmax(x(4, 5, dtype=dtype), 1)
        total = aten.nll_loss_forward(logp.double(), target, None, 2, -100)[0]
        case("nll_sum", [logp, target], total, ignore=-100)
        case("nll_sum", [logp, target, torch.tensor(0.5).double()], total + 0.5, ignore=-100)


def keyed(lines):
    """Cases by what tells them apart: everything but the elements of their tensors."""
    count = Counter()
    keys = {}
    for line in lines:
        forms = [[tensor[:2] for tensor in line[side]] for side in ("in", "out")]
        key = json.dumps([line["name"], line["op"], line["attrs"], *forms], sort_keys=True)
        count[key] += 1
        keys[key, count[key]] = line
    return keys


def merged(old, new, again):
    """The new cases in order; where an old line has the same key, that line, unless `again` has its name or op."""
    lines = []
    for key, line in new.items():
        kept = old.get(key)
        if kept is None or {line["name"], line["op"]} & again:
            print(f"computed: {line['name']}, {line['op']}", file=sys.stderr)
            lines.append(line)
            continue
        if kept["in"] != line["in"]:
            # Torch draws other numbers today; what was computed from the old ones is as good.
            print(f"kept as it is: {line['name']}, {line['op']}; name it to compute it again", file=sys.stderr)
        lines.append(kept)
    return lines


def main():
    torch.set_num_threads(1)
    for part in [elementwise, reductions, norms, products, convolutions, attention, tables, shapes, optimizers,
                 sums_of_losses, sums_of_products, grouped_products]:
        part()
    again = set(sys.argv[1:])
    unknown = again - {line[field] for line in cases for field in ("name", "op")}
    if unknown:
        sys.exit(f"gen_golden.py: no case has the name or op {', '.join(sorted(unknown))}")
    file = Path(__file__).with_name("golden.json")
    old = keyed(json.loads(line) for line in file.read_text().splitlines())
    lines = merged(old, keyed(cases), again)
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
    file.write_text(text)


if __name__ == "__main__":
    main()
