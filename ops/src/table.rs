//! The table of ops. One line:
//!
//! ```text
//! Gelu(Gelu) "gelu": unary().real().function() => same, gelu_work;
//! │    │     │        │                            │     └ its work, if it is not elementwise
//! │    │     │        │                            └ its shape rule
//! │    │     │        └ its facts: see `Facts`
//! │    │     └ its name in text
//! │    └ its attributes, if it has any: a struct in `ir/src/op/attrs.rs`
//! └ its variant of `OpKind` and of `ir::Op`
//! ```
//!
//! Shape rules are functions in `ir/src/op/shape.rs`, work is in `ir/src/op/work.rs`. This crate
//! does not use them or the attributes.

/// Calls a macro with the table.
#[macro_export]
macro_rules! ops {
    ($then:ident) => {
        $then! {
            // One operand, element by element. y = f(x)
            Neg "neg": unary() => same;
            Abs "abs": unary() => same;
            Sign "sign": unary() => same;
            Exp "exp": unary().real().function() => same;
            Log "log": unary().real().function() => same;
            Sqrt "sqrt": unary().real() => same;
            Rsqrt "rsqrt": unary().real() => same;
            Reciprocal "reciprocal": unary().real() => same;
            Tanh "tanh": unary().real().function() => same;
            Sigmoid "sigmoid": unary().real().function() => same;
            Sin "sin": unary().access(Whole).real() => same;
            Cos "cos": unary().access(Whole).real() => same;
            Atan "atan": unary().access(Whole).real() => same;
            Erf "erf": unary().real().function() => same;
            Relu "relu": unary() => same;
            Silu "silu": unary().real().function() => same;
            // tanh=true is the tanh approximation.
            Gelu(Gelu) "gelu": unary().real().function() => same;
            BitwiseNot "bitwise_not": unary().on(Bits) => same;
            LogicalNot "logical_not": converts() => predicate;
            Cast(Cast) "cast": converts() => cast;
            Clamp(Clamp) "clamp": unary() => same;
            // One operand and a number. rsub: value - x. pow: x^value.
            AddScalar(Scalar) "add_scalar": unary() => scalar;
            MulScalar(Scalar) "mul_scalar": unary() => scalar;
            DivScalar(Scalar) "div_scalar": unary().real() => scalar;
            RsubScalar(Scalar) "rsub_scalar": unary() => scalar;
            PowScalar(Scalar) "pow_scalar": unary() => pow_scalar;
            EqScalar(Scalar) "eq_scalar": converts() => compare_scalar;
            NeScalar(Scalar) "ne_scalar": converts() => compare_scalar;
            LtScalar(Scalar) "lt_scalar": converts() => compare_scalar;
            LeScalar(Scalar) "le_scalar": converts() => compare_scalar;
            GtScalar(Scalar) "gt_scalar": converts() => compare_scalar;
            GeScalar(Scalar) "ge_scalar": converts() => compare_scalar;
            // Two operands of one element type, broadcast against each other.
            Add "add": binary() => broadcast;
            Sub "sub": binary().on(Numbers) => broadcast;
            Mul "mul": binary() => broadcast;
            Div "div": binary().real() => broadcast;
            Pow "pow": binary().access(Whole).real() => broadcast;
            Maximum "maximum": binary() => broadcast;
            Minimum "minimum": binary() => broadcast;
            BitwiseAnd "bitwise_and": binary().on(Bits) => broadcast;
            BitwiseOr "bitwise_or": binary().on(Bits) => broadcast;
            BitwiseXor "bitwise_xor": binary().on(Bits) => broadcast;
            Eq "eq": compare() => broadcast_predicate;
            Ne "ne": compare() => broadcast_predicate;
            Lt "lt": compare() => broadcast_predicate;
            Le "le": compare() => broadcast_predicate;
            Gt "gt": compare() => broadcast_predicate;
            Ge "ge": compare() => broadcast_predicate;
            LogicalAnd "logical_and": compare() => broadcast_predicate;
            LogicalOr "logical_or": compare() => broadcast_predicate;
            // where(condition: bool, x, y)
            Where "where": takes(3, 3).inplace(&[(1, 0), (2, 0)]).access(Element).broadcasts()
                => select;
            // Derivatives of elementwise functions; no broadcast. (dy, y) for tanh and sigmoid,
            // (dy, x) for the others.
            TanhBwd "tanh_bwd": derivative() => same2;
            SigmoidBwd "sigmoid_bwd": derivative() => same2;
            SiluBwd "silu_bwd": derivative().function() => same2;
            GeluBwd(Gelu) "gelu_bwd": derivative().function() => same2;
            // dx = x > value ? dy : 0
            ThresholdBwd(Scalar) "threshold_bwd": derivative() => same2;
            // Reductions over `dims` (sorted, distinct, never empty: all dimensions are listed).
            Sum(Reduction) "sum": reduction() => reduce;
            Mean(Reduction) "mean": reduction().real() => reduce;
            Amax(Reduction) "amax": reduction().on(Computed) => extreme;
            Amin(Reduction) "amin": reduction().on(Computed) => extreme;
            Any(Reduction) "any": reduction().on(Computed) => reduce_bool;
            Cumsum(Along) "cumsum": takes(1, 1).on(Numbers) => same_along;
            // topk(x) -> values, indices: i64, sorted
            TopK(TopK) "topk": takes(1, 1).on(Numbers) => topk, topk_work;
            // Softmax along `dim`; the derivatives take (dy, y).
            Softmax(Along) "softmax": softmax() => same_along;
            LogSoftmax(Along) "log_softmax": softmax() => same_along;
            SoftmaxBwd(Along) "softmax_bwd": softmax_bwd() => same2_along;
            LogSoftmaxBwd(Along) "log_softmax_bwd": softmax_bwd() => same2_along;
            // Normalisation over the last `dims` dimensions: layer_norm(x[, w[, b]]) -> y, mean,
            // rstd (shape: leading dimensions, then ones). layer_norm_bwd(dy, x, mean, rstd[, w])
            // -> dx[, dw[, db]] where `mask` is 1.
            LayerNorm(LayerNorm) "layer_norm": takes(1, 3).inplace(&[(0, 0)]).access(Row).real()
                => layer_norm;
            LayerNormBwd(LayerNormBwd) "layer_norm_bwd": takes(4, 5)
                .inplace(&[(0, 0)])
                .access(Row)
                .real()
                => layer_norm_bwd, layer_norm_bwd_work;
            // Over all dimensions but 1, in training: batch_norm(x, w, b) -> y, mean, rstd, and the
            // variance of a sample (divided by n - 1), of which running statistics are averages.
            // batch_norm_bwd(dy, x, w, mean, rstd) -> dx, dw, db.
            BatchNorm(BatchNorm) "batch_norm": takes(3, 3).real() => batch_norm;
            BatchNormBwd(BatchNormBwd) "batch_norm_bwd": takes(5, 5).real() => batch_norm_bwd;
            // Products. matmul(a, b): rank 2, or 3 with equal batch; ta, tb: the last two
            // dimensions are read transposed. addmm(c, a, b) = c + a b, where c broadcasts to the
            // result.
            Matmul(Product) "matmul": takes(2, 2).on(Numbers) => matmul, matmul_work;
            Addmm(Product) "addmm": takes(3, 3).on(Numbers).inplace(&[(0, 0)])
                => addmm, matmul_work;
            // matmul_sum(a, b[, before: f32]) = a b, added to before: factors in half precision,
            // the result in f32, so that a sum over several products is rounded once, at its end.
            MatmulSum(Product) "matmul_sum": takes(2, 3).real().inplace(&[(2, 0)])
                => matmul_sum, matmul_sum_work;
            // Products of groups of rows. Group g ends before row ends[g] and begins where the
            // largest end before it is, so that it may be empty. grouped_matmul(x[S,K], w[G,K,N],
            // ends[G]) -> [S,N]: each row times the matrix of its group, and zeros behind the last
            // group; tb: w[G,N,K]. grouped_outer(x[S,M], y[S,N], ends[G]) -> [G,M,N]: the sum of
            // x[s,m] y[s,n] over each group's rows.
            GroupedMatmul(GroupedProduct) "grouped_matmul": takes(3, 3).real()
                => grouped_matmul, grouped_matmul_work;
            GroupedOuter "grouped_outer": takes(3, 3).real()
                => grouped_outer, grouped_outer_work;
            // convolution(x[N,C,..], w[O,C/groups,..][, b[O]]), one or two spatial dimensions.
            // convolution_bwd(dy, x, w) -> dx, dw, db where `mask` is 1.
            Convolution(Convolution) "convolution": takes(2, 3).real()
                => convolution, convolution_work;
            ConvolutionBwd(ConvolutionBwd) "convolution_bwd": takes(3, 3).real()
                => convolution_bwd, convolution_bwd_work;
            // max_pool2d(x[N,C,H,W]) -> y, index into H*W of each window's maximum: i64.
            // max_pool2d_bwd(dy, index) -> dx[shape]. Each index lies in its window.
            MaxPool2d(Pool) "max_pool2d": takes(1, 1).on(Numbers) => max_pool2d;
            MaxPool2dBwd(PoolBwd) "max_pool2d_bwd": takes(2, 2).real() => max_pool2d_bwd;
            // Attention: sdpa(q[B,H,S,D], k[B,H,T,D], v[B,H,T,E][, mask: added, or bool true = take
            // part; broadcasts to [B,H,S,T]; or i64[B or 1,S], with T = S: a query sees keys with
            // its own number, so that documents in a row stay apart][, key: i64[4] of dropout_key:
            // weights are dropped as dropout drops elements of [B,H,S,T]]) -> out[B,H,S,E],
            // logsumexp: f32[B,H,S], of all weights.
            // sdpa_bwd(dout, q, k, v, out, logsumexp[, mask][, key]) -> dq, dk, dv. H of k and v
            // may divide that of q: grouped queries.
            Sdpa(Attention) "sdpa": takes(3, 5).real() => sdpa, sdpa_work;
            SdpaBwd(Attention) "sdpa_bwd": takes(6, 8).real() => sdpa_bwd, sdpa_bwd_work;
            // The same with heads inside rows, so that tensors around it need no permutation:
            // sdpa_rows(q[B,S,N,D], k[B,T,N,D], v[B,T,N,E][, mask][, key]) -> out[B,S,H,E],
            // logsumexp. Each N may differ: `heads` are H and the number of heads of k and v, and
            // `first` are the places of q's, k's and v's first heads in their rows; -1: the operand
            // is as in sdpa. sdpa_rows_bwd(dout, q, k, v, out, logsumexp[, mask][, key]) -> dq, dk,
            // dv, in the forms of q, k, v with these heads alone; or one tensor [B,S,N,D], if q, k,
            // v share such rows and fill them.
            SdpaRows(AttentionRows) "sdpa_rows": takes(3, 5).real() => sdpa_rows, sdpa_rows_work;
            SdpaRowsBwd(AttentionRows) "sdpa_rows_bwd": takes(6, 8).real()
                => sdpa_rows_bwd, sdpa_rows_bwd_work;
            // Tables. embedding(w[V,D], index) -> [index.., D]. embedding_bwd(dy, index) ->
            // dw[rows, D]; the row `padding` gets 0 (-1: none). The forward has the number only for
            // its derivative.
            Embedding(Embedding) "embedding": takes(2, 2) => embedding;
            EmbeddingBwd(EmbeddingBwd) "embedding_bwd": takes(2, 2).real()
                => embedding_bwd, embedding_bwd_work;
            // nll_loss(logp[N,C], target[N]) -> loss, weight; reduction 0 none, 1 mean, 2 sum;
            // targets equal to `ignore` do not count, and weight is the number of those that do.
            // nll_loss_bwd(dloss, target, weight) -> dlogp[shape]. The forward reports a target
            // that is no class; here its row may be zeros.
            NllLoss(NllLoss) "nll_loss": takes(2, 2).real() => nll_loss;
            // nll_sum(logp, target[, before: f64[]]) -> the rows' losses, added one after the other
            // to `before`, or to 0: f64[].
            NllSum(NllSum) "nll_sum": takes(2, 3).real().inplace(&[(2, 0)]) => nll_sum;
            NllLossBwd(NllLossBwd) "nll_loss_bwd": takes(3, 3).access(Row).real()
                => nll_loss_bwd;
            // gather(x, index), scatter(x, index, source), scatter_value(x, index); scatter_add
            // adds.
            Gather(Along) "gather": takes(2, 2) => gather;
            Scatter(Along) "scatter": takes(3, 3).inplace(&[(0, 0)]) => scatter;
            ScatterAdd(Along) "scatter_add": takes(3, 3).on(Numbers).inplace(&[(0, 0)]) => scatter;
            ScatterValue(ScatterValue) "scatter_value": takes(2, 2).on(Computed)
                .inplace(&[(0, 0)]) => scatter_value;
            // index(x, i0, i1, ..): x[i0, i1, ..] over the leading dimensions; the indices (i64)
            // broadcast against each other. index_put(x, values, i0, i1, ..): values broadcast to
            // x[i0, i1, ..]'s shape. Values that are added to f32 may be in half precision.
            Index "index": takes(2, 9) => index;
            IndexPut(IndexPut) "index_put": takes(3, 10).inplace(&[(0, 0)])
                => index_put, index_put_work;
            // Shapes. reshape shares its operand's bytes; the others copy. So does detach, which
            // stops a gradient and is removed when there is no more to stop.
            Reshape(Sizes) "reshape": takes(1, 1).no_kernel() => reshape, no_work;
            Detach "detach": takes(1, 1).no_kernel() => same, no_work;
            Permute(Dims) "permute": takes(1, 1) => permute, no_work;
            Expand(Sizes) "expand": takes(1, 1).access(Element) => expand, no_work;
            Flip(Dims) "flip": takes(1, 1) => flip, no_work;
            Slice(Slice) "slice": takes(1, 1) => slice, no_work;
            // slice_scatter(x, source): x with x[.., start:end:step, ..] replaced.
            SliceScatter(Slice) "slice_scatter": takes(2, 2).inplace(&[(0, 0)])
                => slice_scatter, no_work;
            Cat(Along) "cat": takes(1, 4096) => cat, no_work;
            // pad: [before, after] for each dimension, outermost first; negative cuts.
            Pad(Pad) "pad": takes(1, 1).on(Computed) => pad, no_work;
            // Numbers in NF4 (see maps.rs). nf4(codes: u8, two to a byte, the first in the upper
            // half; sizes: u8, a code for each block of 64 numbers; largest: f32, for each 256 of
            // these; offset: f32[]) -> map[code] * (dynamic map[size] * largest + offset)
            Nf4(Decoded) "nf4": takes(4, 4) => nf4, nf4_work;
            // Sources. arange: start + step * i.
            Full(Full) "full": takes(0, 0).access(Element) => full, no_work;
            Arange(Arange) "arange": takes(0, 0) => arange, no_work;
            // Random numbers: Philox4x32-10 of (seed, step, stream, element); rng: i64[2] = seed,
            // step. `stream` distinguishes the random ops of a graph. The same operands give the
            // same bits, so a rerun reproduces them. uniform in [0, 1)
            Rand(Random) "rand": takes(1, 1).random() => random;
            // normal
            Randn(Random) "randn": takes(1, 1).random() => random;
            // dropout(x, rng) -> y = x * mask / (1 - p), mask: bool
            Dropout(Dropout) "dropout": takes(2, 2)
                .inplace(&[(0, 0)])
                .real()
                .random()
                .options_from(1)
                .generated()
                => dropout;
            // dropout_bwd(dy, mask) -> dy * mask * scale
            DropoutBwd(DropoutBwd) "dropout_bwd": takes(2, 2)
                .inplace(&[(0, 0)])
                .access(Element)
                .real()
                => dropout_bwd;
            // dropout_key(rng) -> i64[4] = seed, step, stream, the bits of p: by these numbers
            // attention drops the elements that dropout(weights, rng) drops.
            DropoutKey(Dropout) "dropout_key": takes(1, 1).random() => dropout_key;
            // round_random(x: f32, rng) -> bf16: a neighbour of x, at random, so that the mean is
            // x. 16 random bits are added below the last bit that stays.
            RoundRandom(Stream) "round_random": takes(2, 2)
                .real()
                .random()
                .options_from(1)
                .generated()
                => round_random;
            // step + 1
            RngNext "rng_next": takes(1, 1).inplace(&[(0, 0)]) => rng_next;
            // The norm over all gradients, for clipping: sum_squares(g) -> f64[]; clip_scale(sum,
            // sum, ..) -> dtype[], the factor min(1, max_norm / (sqrt of the sums + 1e-6)).
            SumSquares "sum_squares": takes(1, 1).real() => sum_squares, sum_squares_work;
            ClipScale(ClipScale) "clip_scale": takes(1, 4096) => clip_scale;
            // Optimizers. hyper: f64[5] = lr, beta1, beta2, eps, weight decay; step: i64[] counts
            // from 1; scale: f32[], f64[] for f64, is a factor that the gradient is multiplied with
            // first. adamw(p, g, m, v, step, hyper[, scale]) -> p', m', v'
            Adamw "adamw": takes(6, 7)
                .inplace(&[(0, 0), (2, 1), (3, 2)])
                .access(Element)
                .real()
                .options_from(4)
                => adamw, adamw_work;
            // The same on f32 numbers whose nearest bf16 is p and whose lower 16 bits are low; m
            // and v are f32: adamw_split(p: bf16, g: bf16 or f32, low: i16, m, v, step, hyper[,
            // scale]) -> p', low', m', v'
            AdamwSplit "adamw_split": takes(7, 8)
                .inplace(&[(0, 0), (2, 1), (3, 2), (4, 3)])
                .access(Element)
                .options_from(5)
                => adamw_split, adamw_work;
            // The same with moments in blocks of 256 (see maps.rs): codes m and v, u8 in the
            // parameter's shape, and the largest magnitude of each block, f32. adamw_8bit(p, g, m,
            // v, largest m, largest v, step, hyper[, scale]) -> p', m', v', and both largest
            Adamw8bit "adamw_8bit": takes(8, 9)
                .inplace(&[(0, 0), (2, 1), (3, 2), (4, 3), (5, 4)])
                .real()
                .options_from(6)
                => adamw_8bit, adamw_8bit_work;
            // sgd(p, g, hyper: f64[3] = lr, momentum, weight decay[, scale]) -> p'
            Sgd "sgd": takes(3, 4).inplace(&[(0, 0)]).access(Element).real().options_from(2) => sgd;
            // sgd_momentum(p, g, buf, hyper[, scale]) -> p', buf'
            SgdMomentum "sgd_momentum": takes(4, 5)
                .inplace(&[(0, 0), (2, 1)])
                .access(Element)
                .real()
                .options_from(3)
                => sgd_momentum;
            // Several ops as one kernel, which a backend generates: see body.rs.
            Fused(Fused) "fused": takes(0, 4096).no_kernel() => fused, fused_work;
            // Any other op: `name` as it was traced, `node` the call there. The program that runs
            // the step computes it, so its cost is estimated from its bytes. `types` are the types
            // of the results: "f32[4,4] i64[4]". A call with pure=true may run again.
            Extern(Extern) "extern": takes(0, 4096).no_kernel().opaque() => external;
        }
    };
}
