//! Attention, however a tracer or a model writes it, and its gradients.

use super::{HALVES, SUMS, always, near, other_permutation, product_of_scales, rule, scales};
use crate::graph::simplify::rule::Close::Exact;
use crate::graph::simplify::rule::{Rule, Scope};
use crate::graph::simplify::term::Literal;
use ir::DType;
use ir::op::OpKind;

/// The rules. They need those that recognise softmax and dropout.
pub(super) static PATTERNS: &[Rule] = &[
    // Scores of matrices that have no dimension of heads get one.
    rule(
        "heads-turned",
        &[(
            "(permute (reshape (permute ?x ?d) ?h) [0,1,3,2])",
            "(reshape (permute ?x ?e) ?t)",
        )],
        |s| {
            let &[batch, heads, rows, columns] = &s.ints("?h")?[..] else {
                return None;
            };
            s.bind("?t", Literal::Ints(vec![batch, heads, columns, rows]));
            other_permutation(s, "?x")
        },
        Exact,
        "x=f32[6,4,5] d=[0,2,1] other=(permute ?x [0,1,2]) h=[2,3,5,4]",
    ),
    rule(
        "softmax-of-matrices",
        &[("(softmax ?x 2)", "(reshape (softmax (reshape ?x ?h) 3) ?s)")],
        |s| heads_of_one(s, "?x"),
        Exact,
        "x=f32[6,4,5]",
    ),
    rule(
        "softmax-bwd-of-matrices",
        &[(
            "(softmax_bwd ?dy ?y 2)",
            "(reshape (softmax_bwd (reshape ?dy ?h) (reshape ?y ?h) 3) ?s)",
        )],
        |s| heads_of_one(s, "?y"),
        Exact,
        "dy=f32[6,4,5] y=f32[6,4,5]",
    ),
    rule(
        "dropout-of-reshape",
        &[
            (
                "(r0 (dropout (reshape ?x ?s) ?rng ?p ?stream))",
                "(reshape (r0 (dropout ?x ?rng ?p ?stream)) ?s)",
            ),
            (
                "(r1 (dropout (reshape ?x ?s) ?rng ?p ?stream))",
                "(reshape (r1 (dropout ?x ?rng ?p ?stream)) ?s)",
            ),
        ],
        |s| (s.ty("?x")?.rank() == 4).then_some(()),
        Exact,
        "rng=i64[2] x=f32[1,3,5,7] s=[3,5,7] stream=3 p=0.1",
    ),
    rule(
        "reshape-of-dropout-bwd",
        &[(
            "(reshape (dropout_bwd ?dy ?m ?c) ?s)",
            "(dropout_bwd (reshape ?dy ?s) (reshape ?m ?s) ?c)",
        )],
        |s| (s.ints("?s")?.len() == 4).then_some(()),
        Exact,
        "dy=f32[6,4,5] m=bool[6,4,5] c=1.25 s=[1,6,4,5]",
    ),
    rule(
        "masked-matrices",
        &[(
            "(reshape (add ?x ?m) ?h)",
            "(add (reshape ?x ?h) (reshape ?m ?u))",
        )],
        bias_of_heads,
        Exact,
        "a=f32[6,4,2] b=f32[6,2,5] x=(matmul ?a ?b false false) m=f32[4,5] h=[1,6,4,5] ;
         a=f32[6,4,2] b=f32[6,2,5] x=(matmul ?a ?b false false) m=f32[6,1,5] h=[2,3,4,5]",
    ),
    rule(
        "masked-product-of-matrices",
        &[(
            "(reshape (addmm ?m ?a ?b ?ta ?tb) ?h)",
            "(add (reshape (matmul ?a ?b ?ta ?tb) ?h) (reshape ?m ?u))",
        )],
        |s| mask_of_heads(s, "?a"),
        SUMS,
        "a=f32[6,4,2] b=f32[6,2,5] ta=false tb=false m=f32[1,4,5] h=[1,6,4,5]",
    ),
    rule(
        "chosen-matrices",
        &[(
            "(reshape (where ?m ?x (full ?t [] ?low)) ?h)",
            "(where (reshape ?m ?u) (reshape ?x ?h) (full ?t [] ?low))",
        )],
        |s| mask_of_heads(s, "?x"),
        Exact,
        "x=f32[6,4,5] m=bool[4,5] t=f32 low=-inf h=[1,6,4,5]",
    ),
    // Attention. Scores, probabilities and their gradients have their own names, because the
    // products are written in many ways; see `STEPS`. A row whose mask hides every position has
    // probabilities of 0 in `sdpa`. A plain softmax with a mask of -inf gives NaN there, so NaN
    // becomes 0.
    rule(
        "scores",
        &[(
            "(reshape (matmul ?a ?b false false) \
            ?s)",
            "(scores (reshape ?a ?q) (permute (reshape ?b ?kt) [0,1,3,2]) 1.0)",
        )],
        |s| {
            let [b, h, rows, keys, d] = heads(s)?;
            (s.shape("?b")?[1] == d).then_some(())?;
            s.bind_shape("?q", &[b, h, rows, d]);
            s.bind_shape("?kt", &[b, h, d, keys]);
            Some(())
        },
        SUMS,
        "a=f32[6,4,5] b=f32[6,5,3] s=[2,3,4,3]",
    ),
    rule(
        "scores-turned",
        &[(
            "(reshape (matmul ?a ?b false true) \
            ?s)",
            "(scores (reshape ?a ?q) (reshape ?b ?k) 1.0)",
        )],
        |s| {
            let [b, h, rows, keys, d] = heads(s)?;
            s.bind_shape("?q", &[b, h, rows, d]);
            s.bind_shape("?k", &[b, h, keys, d]);
            Some(())
        },
        SUMS,
        "a=f32[6,4,5] b=f32[6,3,5] s=[2,3,4,3]",
    ),
    rule(
        "scores-scaled",
        &[("(mul_scalar (scores ?q ?k ?a) ?b)", "(scores ?q ?k ?c)")],
        product_of_scales,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] a=1.0 b=0.3",
    ),
    rule(
        "scores-of-scaled-queries",
        &[("(scores (mul_scalar ?q ?a) ?k ?b)", "(scores ?q ?k ?c)")],
        product_of_scales,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] a=1.0 b=0.3",
    ),
    rule(
        "scores-of-scaled-keys",
        &[("(scores ?q (mul_scalar ?k ?a) ?b)", "(scores ?q ?k ?c)")],
        product_of_scales,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] a=1.0 b=0.3",
    ),
    rule(
        "probs",
        &[(
            "(softmax (scores ?q ?k ?c) 3)",
            "(probs ?q ?k none ?c false)",
        )],
        unscaled,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3",
    ),
    rule(
        "probs-masked",
        &[(
            "(softmax (add (scores ?q ?k ?c) ?m) 3)",
            "(probs ?q ?k ?m ?c false)",
        )],
        unscaled_with_bits,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 m=f32[4,6]",
    ),
    rule(
        "scores-masked-scaled",
        &[(
            "(mul_scalar (add (scores ?q ?k ?c) ?m) ?a)",
            "(add (mul_scalar (scores ?q ?k ?c) ?a) (mul_scalar ?m ?a))",
        )],
        scales,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 m=f32[4,6] a=0.5",
    ),
    // A bias, such as ALiBi's, and a mask are one mask.
    rule(
        "scores-biased",
        &[(
            "(reshape (add ?m ?x) ?h)",
            "(add (reshape ?m ?u) (reshape ?x ?h))",
        )],
        bias_of_heads,
        Exact,
        "q=f32[6,4,5] k=f32[6,3,5] x=(matmul ?q ?k false true) h=[2,3,4,3] m=f32[6,1,3] ;
         q=f32[6,4,5] k=f32[6,3,5] x=(matmul ?q ?k false true) h=[2,3,4,3] m=f32[6,4,3]",
    ),
    rule(
        "scores-masked-biased",
        &[(
            "(add (add ?b (scores ?q ?k ?c)) ?m)",
            "(add (scores ?q ?k ?c) (add ?b ?m))",
        )],
        always,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 b=f32[2,3,1,6] m=f32[4,6]",
    ),
    rule(
        "probs-safe",
        &[(
            "(where (any (logical_not (eq_scalar (scores ?q ?k ?c) -inf)) [3] true) (softmax \
             (scores ?q ?k ?c) 3) (full ?t ?s 0.0))",
            "(probs ?q ?k none ?c true)",
        )],
        unscaled,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 t=f32 s=[2,3,4,6]",
    ),
    rule(
        "probs-safe-masked",
        &[(
            "(where (any (logical_not (eq_scalar (add (scores ?q ?k ?c) ?m) -inf)) [3] true)
                    (softmax (add (scores ?q ?k ?c) ?m) 3) (full ?t ?s 0.0))",
            "(probs ?q ?k ?m ?c true)",
        )],
        unscaled_with_bits,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 m=f32[4,6] t=f32 s=[]",
    ),
    // As exporters to ONNX write it. They mean rows in which no key is seen. A row that is NaN
    // because an operand is stays NaN, as in the attention that was exported.
    rule(
        "probs-without-nan",
        &[(
            "(where (ne (probs ?q ?k ?m ?c false) (probs ?q ?k ?m ?c false)) (full ?t ?s 0.0)
                    (probs ?q ?k ?m ?c false))",
            "(probs ?q ?k ?m ?c true)",
        )],
        always,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 m=f32[4,6] t=f32 s=[]",
    ),
    // Rows without weights have no gradient, with a guard or without.
    rule(
        "guarded-softmax-bwd",
        &[(
            "(softmax_bwd (where (any (logical_not (eq_scalar ?x -inf)) [3] true) ?dp
                (full ?t ?s 0.0)) ?y 3)",
            "(softmax_bwd ?dp ?y 3)",
        )],
        |s| {
            let all = s.shape("?x")?.to_vec();
            s.bind_shape("?all", &all);
            let guarded = "(where (any (logical_not (eq_scalar ?x -inf)) [3] true) (softmax ?x 3)
                (full ?t ?all 0.0))";
            s.same(s.find(guarded), s.id("?y"))
        },
        SUMS,
        "x=f32[2,3,4,6] dp=f32[2,3,4,6] t=f32 s=[] \
         y=(where (any (logical_not (eq_scalar ?x -inf)) [3] true) (softmax ?x 3) (full ?t \
         [2,3,4,6] 0.0))",
    ),
    // A choice has what it computes first, so that each rule has one form for all.
    rule(
        "where-replaced",
        &[(
            "(where ?n (full ?t ?s ?v) ?x)",
            "(where (logical_not ?n) ?x (full ?t ?s ?v))",
        )],
        always,
        Exact,
        "n=bool[4,6] t=f32 s=[] v=-inf x=f32[2,3,4,6]",
    ),
    // Scores that are replaced take no part. Code that chooses a finite number means the same, and
    // it is the same if each row has a score that stays.
    rule(
        "probs-chosen",
        &[(
            "(softmax (where ?m (scores ?q ?k ?c) (full ?t ?s ?low)) 3)",
            "(probs ?q ?k ?m ?c false)",
        )],
        |s| {
            unscaled(s)?;
            hides(s)
        },
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 t=f32 s=[] low=-1e9 m=(le (reshape (arange i64 [6] 0 \
         1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1])) ;
         q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 t=f32 s=[2,3,4,6] low=-inf m=(ge (reshape (arange i64 \
         [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1]))",
    ),
    // In half precision the softmax may be of scores in f32, as autocast has it on GPUs.
    rule(
        "probs-widened",
        &[(
            "(softmax (cast (scores ?q ?k ?c) ?w) 3)",
            "(cast (probs ?q ?k none ?c false) ?w)",
        )],
        unscaled_halves,
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] c=0.3 w=f32",
    ),
    rule(
        "probs-masked-widened",
        &[(
            "(softmax (cast (add (scores ?q ?k ?c) ?m) ?w) 3)",
            "(cast (probs ?q ?k ?m ?c false) ?w)",
        )],
        |s| {
            unscaled_halves(s)?;
            unscaled_with_bits(s)
        },
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] c=0.3 w=f32 m=bf16[4,6]",
    ),
    rule(
        "probs-chosen-widened",
        &[(
            "(softmax (cast (where ?m (scores ?q ?k ?c) (full ?t ?s ?low)) ?w) 3)",
            "(cast (probs ?q ?k ?m ?c false) ?w)",
        )],
        |s| {
            unscaled_halves(s)?;
            hides(s)
        },
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] c=0.3 w=f32 t=bf16 s=[] low=-inf \
         m=(ge (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1]))",
    ),
    rule(
        "probs-widened-chosen",
        &[(
            "(softmax (where ?m (cast (scores ?q ?k ?c) ?w) (full ?t ?s ?low)) 3)",
            "(cast (probs ?q ?k ?m ?c false) ?w)",
        )],
        |s| {
            unscaled_halves(s)?;
            hides(s)
        },
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] c=0.3 w=f32 t=f32 s=[] low=-inf \
         m=(ge (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1]))",
    ),
    rule(
        "dropped-probs-widened",
        &[
            (
                "(r0 (dropout (cast (probs ?q ?k ?m ?c ?safe) ?w) ?rng ?p ?stream))",
                "(cast (r0 (dropout (probs ?q ?k ?m ?c ?safe) ?rng ?p ?stream)) ?w)",
            ),
            (
                "(r1 (dropout (cast (probs ?q ?k ?m ?c ?safe) ?w) ?rng ?p ?stream))",
                "(r1 (dropout (probs ?q ?k ?m ?c ?safe) ?rng ?p ?stream))",
            ),
        ],
        halves,
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] m=none c=0.3 safe=false w=f32 rng=i64[2] p=0.2 stream=3",
    ),
    rule(
        "probs-widened-bwd",
        &[(
            "(cast (softmax_bwd (cast ?dw ?w) (cast (probs ?q ?k ?m ?c ?safe) ?w) 3) ?h)",
            "(softmax_bwd ?dw (probs ?q ?k ?m ?c ?safe) 3)",
        )],
        narrow_again,
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] m=none c=0.3 safe=false w=f32 h=bf16 dw=bf16[2,3,4,6]",
    ),
    rule(
        "dropped-probs-widened-bwd",
        &[(
            "(cast (softmax_bwd (dropout_bwd (cast ?dw ?w) ?kept ?f)
                (cast (probs ?q ?k ?m ?c ?safe) ?w) 3) ?h)",
            "(softmax_bwd (dropout_bwd ?dw ?kept ?f) (probs ?q ?k ?m ?c ?safe) 3)",
        )],
        narrow_again,
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] m=none c=0.3 safe=false w=f32 h=bf16 dw=bf16[2,3,4,6] \
         kept=bool[2,3,4,6] f=1.25",
    ),
    rule(
        "chosen-gradients-narrowed",
        &[(
            "(cast (where ?m ?x (full ?t ?s 0.0)) ?h)",
            "(where ?m (cast ?x ?h) (full ?h ?s 0.0))",
        )],
        |s| s.is_a("?x", OpKind::SoftmaxBwd).then_some(()),
        Exact,
        "dy=f32[2,3,4,6] y=f32[2,3,4,6] x=(softmax_bwd ?dy ?y 3) m=bool[4,6] t=f32 s=[] h=bf16",
    ),
    rule(
        "attention",
        &[(
            "(matmul (reshape (probs ?q ?k ?m ?c ?safe) ?p3) ?v false false)",
            "(reshape (r0 (sdpa ?q ?k (reshape ?v ?v4) ?m none false ?c)) ?o)",
        )],
        result_shapes,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] m=none c=0.3 safe=true p3=[6,4,6] v=f32[6,6,7] ;
         q=f32[2,3,4,5] k=f32[2,3,6,5] m=f32[4,6] c=0.3 safe=false p3=[6,4,6] v=f32[6,6,7]",
    ),
    // The same with dropped weights.
    rule(
        "attention-dropped",
        &[(
            "(matmul (reshape (r0 (dropout (probs ?q ?k ?m ?c ?safe) ?rng ?p ?stream)) ?p3) ?v \
             false false)",
            "(reshape (r0 (sdpa ?q ?k (reshape ?v ?v4) ?m (dropout_key ?rng ?p ?stream) false ?c)) \
             ?o)",
        )],
        result_shapes,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] m=none c=0.3 safe=true p3=[6,4,6] v=f32[6,6,7] rng=i64[2] \
         p=0.1 stream=3 ;
         q=f32[2,3,4,5] k=f32[2,3,6,5] m=f32[4,6] c=0.3 safe=false p3=[6,4,6] v=f32[6,6,7] \
         rng=i64[2] p=0.5 stream=3",
    ),
    rule(
        "attention-bwd",
        &[
            (
                "(softmax_bwd (reshape (matmul ?do ?v false true) ?s) (probs ?q ?k ?m ?c ?safe) 3)",
                "(dscores (reshape ?do ?o4) ?q ?k (reshape ?v ?v4) ?m none ?c)",
            ),
            (
                "(matmul (reshape (probs ?q ?k ?m ?c ?safe) ?p3) ?do true false)",
                "(reshape (r2 (sdpa_bwd (reshape ?do ?o4) ?q ?k (reshape ?v ?v4)
                    (r0 (sdpa ?q ?k (reshape ?v ?v4) ?m none false ?c))
                    (r1 (sdpa ?q ?k (reshape ?v ?v4) ?m none false ?c)) ?m none false ?c)) ?v3)",
            ),
        ],
        attention_shapes,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] m=none c=0.3 safe=true s=[2,3,4,6] v=f32[6,6,7] \
         do=f32[6,4,7] ;
         q=f32[2,3,4,5] k=f32[2,3,6,5] m=f32[4,6] c=0.3 safe=true s=[2,3,4,6] v=f32[6,6,7] \
         do=f32[6,4,7]",
    ),
    rule(
        "attention-dropped-bwd",
        &[
            (
                "(softmax_bwd (dropout_bwd (reshape (matmul ?do ?v false true) ?s)
                    (r1 (dropout (probs ?q ?k ?m ?c ?safe) ?rng ?p ?stream)) ?f)
                    (probs ?q ?k ?m ?c ?safe) 3)",
                "(dscores (reshape ?do ?o4) ?q ?k (reshape ?v ?v4) ?m
                    (dropout_key ?rng ?p ?stream) ?c)",
            ),
            (
                "(matmul (reshape (r0 (dropout (probs ?q ?k ?m ?c ?safe) ?rng ?p ?stream)) ?p3) \
                 ?do true false)",
                "(reshape (r2 (sdpa_bwd (reshape ?do ?o4) ?q ?k (reshape ?v ?v4)
                    (r0 (sdpa ?q ?k (reshape ?v ?v4) ?m (dropout_key ?rng ?p ?stream) false ?c))
                    (r1 (sdpa ?q ?k (reshape ?v ?v4) ?m (dropout_key ?rng ?p ?stream) false ?c))
                    ?m (dropout_key ?rng ?p ?stream) false ?c)) ?v3)",
            ),
        ],
        |s| {
            attention_shapes(s)?;
            near(s, "?f", 1.0 / (1.0 - s.number("?p")?))
        },
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] m=none c=0.3 safe=true s=[2,3,4,6] v=f32[6,6,7] \
         do=f32[6,4,7] rng=i64[2] p=0.2 stream=3 f=1.25 ;
         q=f32[2,3,4,5] k=f32[2,3,6,5] m=f32[4,6] c=0.3 safe=true s=[2,3,4,6] v=f32[6,6,7] \
         do=f32[6,4,7] rng=i64[2] p=0.5 stream=3 f=2.0",
    ),
    // The gradients of hidden scores are 0 without a choice.
    rule(
        "scores-chosen-bwd",
        &[(
            "(where ?m (dscores ?do ?q ?k ?v ?m ?drop ?c) (full ?t ?s 0.0))",
            "(dscores ?do ?q ?k ?v ?m ?drop ?c)",
        )],
        |s| (s.ty("?m")?.dtype() == DType::Bool).then_some(()),
        SUMS,
        "do=f32[2,3,4,7] q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] c=0.3 drop=none t=f32 s=[] \
         m=(le (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1]))",
    ),
    rule(
        "matrices-chosen-bwd",
        &[(
            "(where ?n (reshape (dscores ?do ?q ?k ?v ?m ?drop ?c) ?s3) (full ?t ?s 0.0))",
            "(reshape (dscores ?do ?q ?k ?v ?m ?drop ?c) ?s3)",
        )],
        |s| {
            let heads = s.shape("?m")?.to_vec();
            s.bind_shape("?u", &heads);
            s.same(s.find("(reshape ?n ?u)"), s.id("?m"))
        },
        SUMS,
        "do=f32[1,6,4,7] q=f32[1,6,4,5] k=f32[1,6,6,5] v=f32[1,6,6,7] c=0.3 drop=none t=f32 s=[] \
         s3=[6,4,6] n=(le (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) \
         [4,1])) m=(reshape ?n [1,1,4,6])",
    ),
    rule(
        "attention-dq",
        &[(
            "(matmul (reshape (dscores ?do ?q ?k ?v ?m ?drop ?c) ?s3) ?b false \
            false)",
            "(reshape (dq ?do ?q ?k ?v ?m ?drop ?c) ?q3)",
        )],
        |s| {
            gradient_shapes(s)?;
            are_matrices(s, "?b", "?k", "?k3")
        },
        SUMS,
        "do=f32[2,3,4,7] q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] m=f32[4,6] c=0.3 rng=i64[2] \
         drop=(dropout_key ?rng 0.5 3) s3=[6,4,6] \
         b=(reshape ?k [6,6,5])",
    ),
    rule(
        "attention-dq-turned",
        &[(
            "(matmul (reshape (dscores ?do ?q ?k ?v ?m ?drop ?c) ?s3) ?b false \
            true)",
            "(reshape (dq ?do ?q ?k ?v ?m ?drop ?c) ?q3)",
        )],
        |s| {
            gradient_shapes(s)?;
            s.same(s.find("(permute (reshape ?b ?kt) [0,1,3,2])"), s.id("?k"))
        },
        SUMS,
        "do=f32[2,3,4,7] q=f32[2,3,4,5] b=f32[6,5,6] k=(permute (reshape ?b [2,3,5,6]) [0,1,3,2]) \
         v=f32[2,3,6,7] m=none c=0.3 drop=none
         s3=[6,4,6]",
    ),
    rule(
        "attention-dk",
        &[(
            "(matmul (reshape (dscores ?do ?q ?k ?v ?m ?drop ?c) ?s3) ?a true \
            false)",
            "(reshape (dk ?do ?q ?k ?v ?m ?drop ?c) ?k3)",
        )],
        |s| {
            gradient_shapes(s)?;
            are_matrices(s, "?a", "?q", "?q3")
        },
        SUMS,
        "do=f32[2,3,4,7] q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] m=none c=0.3 drop=none \
         s3=[6,4,6] \
         a=(reshape ?q [6,4,5])",
    ),
    rule(
        "attention-dk-turned",
        &[(
            "(matmul ?a (reshape (dscores ?do ?q ?k ?v ?m ?drop ?c) ?s3) true false)",
            "(reshape (permute (dk ?do ?q ?k ?v ?m ?drop ?c) [0,1,3,2]) ?kt3)",
        )],
        |s| {
            gradient_shapes(s)?;
            are_matrices(s, "?a", "?q", "?q3")
        },
        SUMS,
        "do=f32[2,3,4,7] q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] m=f32[4,6] c=0.3 rng=i64[2] \
         drop=(dropout_key ?rng 0.5 3) s3=[6,4,6] \
         a=(reshape ?q [6,4,5])",
    ),
    // `sdpa_bwd` multiplies by the scale. What follows does, too, and becomes one with this.
    rule(
        "attention-gradients-unscaled",
        &[
            (
                "(dq ?do ?q ?k ?v ?m ?drop ?c)",
                "(mul_scalar (r0 (sdpa_bwd ?do ?q ?k ?v (r0 (sdpa ?q ?k ?v ?m ?drop false ?c))
                    (r1 (sdpa ?q ?k ?v ?m ?drop false ?c)) ?m ?drop false ?c)) ?i)",
            ),
            (
                "(dk ?do ?q ?k ?v ?m ?drop ?c)",
                "(mul_scalar (r1 (sdpa_bwd ?do ?q ?k ?v (r0 (sdpa ?q ?k ?v ?m ?drop false ?c))
                    (r1 (sdpa ?q ?k ?v ?m ?drop false ?c)) ?m ?drop false ?c)) ?i)",
            ),
        ],
        inverse_scale,
        SUMS,
        "do=f32[2,3,4,7] q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] m=f32[4,6] c=0.3 rng=i64[2] \
         drop=(dropout_key ?rng 0.5 3)",
    ),
    // A mask of 0 and -inf becomes a mask of bits.
    rule(
        "mask-of-bits",
        &[(
            "(sdpa ?q ?k ?v (where ?m (full ?t [] 0.0) (full ?t [] -inf)) ?drop ?causal ?c)",
            "(sdpa ?q ?k ?v ?m ?drop ?causal ?c)",
        )],
        always,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] rng=i64[2] \
         drop=(dropout_key ?rng 0.5 3) m=bool[4,6] t=f32 causal=false c=0.3",
    ),
    rule(
        "mask-of-bits-bwd",
        &[(
            "(sdpa_bwd ?do ?q ?k ?v ?o ?l (where ?m (full ?t [] 0.0) (full ?t [] -inf)) ?drop \
             ?causal ?c)",
            "(sdpa_bwd ?do ?q ?k ?v ?o ?l ?m ?drop ?causal ?c)",
        )],
        always,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] drop=none o=f32[2,3,4,7] l=f32[2,3,4] \
         do=f32[2,3,4,7] m=bool[4,6] t=f32 causal=false c=0.3",
    ),
    // A mask that is proved to be causal, or to hide nothing, is removed.
    rule(
        "mask-causal",
        &[(
            "(sdpa ?q ?k ?v ?m ?drop false ?c)",
            "(sdpa ?q ?k ?v none ?drop true ?c)",
        )],
        causal,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] rng=i64[2] \
         drop=(dropout_key ?rng 0.5 3) c=0.3 m=(le (reshape (arange i64 [6] 0 1) \
         [1,6]) (reshape (arange i64 [4] 0 1) [4,1]))",
    ),
    rule(
        "mask-causal-bwd",
        &[(
            "(sdpa_bwd ?do ?q ?k ?v ?o ?l ?m ?drop false \
            ?c)",
            "(sdpa_bwd ?do ?q ?k ?v ?o ?l none ?drop true ?c)",
        )],
        causal,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] drop=none do=f32[2,3,4,7] c=0.3 \
         m=(le (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1])) \
         o=(r0 (sdpa ?q ?k ?v ?m ?drop false ?c)) l=(r1 (sdpa ?q ?k ?v ?m ?drop false ?c))",
    ),
    // A mask of two conditions of which one is causal.
    rule(
        "mask-causal-and",
        &[
            (
                "(sdpa ?q ?k ?v (bitwise_and ?a ?m) ?drop false ?c)",
                "(sdpa ?q ?k ?v ?a ?drop true ?c)",
            ),
            (
                "(sdpa ?q ?k ?v (bitwise_and ?m ?a) ?drop false ?c)",
                "(sdpa ?q ?k ?v ?a ?drop true ?c)",
            ),
        ],
        causal,
        SUMS,
        "q=f32[2,3,6,5] k=f32[2,3,6,5] v=f32[2,3,6,7] rng=i64[2] \
         drop=(dropout_key ?rng 0.5 3) c=0.3 a=bool[2,1,6,6] m=(le (reshape (arange \
         i64 [6] 0 1) [1,6]) (reshape (arange i64 [6] 0 1) [6,1]))",
    ),
    rule(
        "mask-causal-and-bwd",
        &[
            (
                "(sdpa_bwd ?do ?q ?k ?v ?o ?l (bitwise_and ?a ?m) ?drop false ?c)",
                "(sdpa_bwd ?do ?q ?k ?v ?o ?l ?a ?drop true ?c)",
            ),
            (
                "(sdpa_bwd ?do ?q ?k ?v ?o ?l (bitwise_and ?m ?a) ?drop false ?c)",
                "(sdpa_bwd ?do ?q ?k ?v ?o ?l ?a ?drop true ?c)",
            ),
        ],
        causal,
        SUMS,
        "q=f32[2,3,6,5] k=f32[2,3,6,5] v=f32[2,3,6,7] drop=none do=f32[2,3,6,7] c=0.3 \
         a=bool[2,1,6,6] \
         m=(le (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [6] 0 1) [6,1])) \
         o=(r0 (sdpa ?q ?k ?v (bitwise_and ?a ?m) ?drop false ?c)) \
         l=(r1 (sdpa ?q ?k ?v (bitwise_and ?a ?m) ?drop false ?c))",
    ),
    rule(
        "mask-of-nothing",
        &[(
            "(sdpa ?q ?k ?v ?m ?drop ?causal ?c)",
            "(sdpa ?q ?k ?v none ?drop ?causal ?c)",
        )],
        all_take_part,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] rng=i64[2] \
         drop=(dropout_key ?rng 0.5 3) causal=false c=0.3 m=(ge (reshape (arange \
         i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] -3 1) [4,1]))",
    ),
    rule(
        "mask-of-nothing-bwd",
        &[(
            "(sdpa_bwd ?do ?q ?k ?v ?o ?l ?m ?drop ?causal \
            ?c)",
            "(sdpa_bwd ?do ?q ?k ?v ?o ?l none ?drop ?causal ?c)",
        )],
        all_take_part,
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] drop=none o=f32[2,3,4,7] l=f32[2,3,4] \
         do=f32[2,3,4,7] \
         causal=false c=0.3 m=(ge (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] \
         -3 1) [4,1]))",
    ),
];

/// Batch, heads, queries, keys and width of a product `?a` `?b` that is reshaped to `?s`:
/// [B,H,S,T].
fn heads(s: &Scope<'_>) -> Option<[u64; 5]> {
    let dims = s.ints("?s")?;
    let (a, b) = (s.shape("?a")?, s.shape("?b")?);
    s.ty("?a")?.dtype().is_float().then_some(())?;
    let (&[batch, heads, rows, keys], &[n, a_rows, d], 3) = (dims.as_slice(), a, b.len()) else {
        return None;
    };
    let fits = (batch * heads) as u64 == n
        && rows as u64 == a_rows
        && (keys as u64 == b[1] || keys as u64 == b[2]);
    fits.then_some([batch as u64, heads as u64, a_rows, keys as u64, d])
}

/// Binds the shapes of values and results of attention.
fn result_shapes(s: &mut Scope<'_>) -> Option<()> {
    let (q, k, v) = (s.shape("?q")?, s.shape("?k")?, s.shape("?v")?);
    let &[b, h, rows, _] = q else { return None };
    let (keys, width) = (k[2], *v.get(2)?);
    s.bind_shape("?v4", &[b, h, keys, width]);
    s.bind_shape("?o", &[b * h, rows, width]);
    Some(())
}

/// Binds the shapes of the matrices of attention and its backward.
fn attention_shapes(s: &mut Scope<'_>) -> Option<()> {
    let (q, k) = (s.shape("?q")?.to_vec(), s.shape("?k")?.to_vec());
    let width = *s.shape("?v")?.get(2)?;
    let &[b, h, rows, _] = q.as_slice() else {
        return None;
    };
    let keys = k[2];
    (s.shape("?v")? == [b * h, keys, width]).then_some(())?;
    s.bind_shape("?o4", &[b, h, rows, width]);
    s.bind_shape("?v4", &[b, h, keys, width]);
    s.bind_shape("?p3", &[b * h, rows, keys]);
    s.bind_shape("?v3", &[b * h, keys, width]);
    Some(())
}

/// Binds the shapes of matrices, and of the same as heads of one sequence.
fn heads_of_one(s: &mut Scope<'_>, matrices: &str) -> Option<()> {
    let &[n, rows, columns] = s.shape(matrices)? else {
        return None;
    };
    s.bind_shape("?s", &[n, rows, columns]);
    s.bind_shape("?h", &[1, n, rows, columns]);
    Some(())
}

/// Binds the shape with which a mask `?m` of matrices is one of heads `?h`, of which the matrices
/// have all elements.
fn mask_of_heads(s: &mut Scope<'_>, matrices: &str) -> Option<()> {
    let heads = s.ints("?h")?;
    let (&[batch, heads, _, _], &[n, _, _]) = (&heads[..], s.shape(matrices)?) else {
        return None;
    };
    let (batch, heads) = (u64::try_from(batch).ok()?, u64::try_from(heads).ok()?);
    (batch * heads == n).then_some(())?;
    let mask = match *s.shape("?m")? {
        [rows, columns] | [1, rows, columns] => vec![1, 1, rows, columns],
        [all, rows, columns] if all == n => vec![batch, heads, rows, columns],
        _ => return None,
    };
    s.bind_shape("?u", &mask);
    Some(())
}

/// The same for what is added to scores.
fn bias_of_heads(s: &mut Scope<'_>) -> Option<()> {
    let scores = [OpKind::Matmul, OpKind::MulScalar, OpKind::Add];
    scores.iter().any(|&op| s.is_a("?x", op)).then_some(())?;
    mask_of_heads(s, "?x")
}

/// Queries and keys have no more scale to pull out. So only one of the equal forms of scores
/// continues.
fn unscaled(s: &mut Scope<'_>) -> Option<()> {
    (!s.is_a("?q", OpKind::MulScalar) && !s.is_a("?k", OpKind::MulScalar)).then_some(())
}

/// Queries are in half precision, and `?w` is f32.
fn halves(s: &mut Scope<'_>) -> Option<()> {
    let is_half = matches!(s.ty("?q")?.dtype(), DType::BF16 | DType::F16);
    (is_half && s.dtype("?w")? == DType::F32).then_some(())
}

fn unscaled_halves(s: &mut Scope<'_>) -> Option<()> {
    halves(s)?;
    unscaled(s)
}

/// What is widened and narrow again has the type of queries.
fn narrow_again(s: &mut Scope<'_>) -> Option<()> {
    halves(s)?;
    let dtype = s.ty("?q")?.dtype();
    (s.dtype("?h")? == dtype && s.ty("?dw")?.dtype() == dtype).then_some(())
}

/// The same as [`unscaled`], and a mask of 0 and -inf continues as a mask of bits.
fn unscaled_with_bits(s: &mut Scope<'_>) -> Option<()> {
    unscaled(s)?;
    s.replace_by_operand("?m", OpKind::Where, |s, [bits, zero, lowest]| {
        (s.constant(zero)? == 0.0 && s.constant(lowest)? == f64::NEG_INFINITY).then_some(bits)
    });
    Some(())
}

/// Scores where the mask does not hold have no weight.
fn hides(s: &mut Scope<'_>) -> Option<()> {
    let (low, m) = (s.number("?low")?, s.ty("?m")?);
    (m.dtype() == DType::Bool).then_some(())?;
    (low == f64::NEG_INFINITY).then_some(()).or_else(|| {
        (low <= FINITE).then_some(())?;
        causal(s)
    })
}

/// A number that code chooses for scores that shall have no weight; others are lower.
const FINITE: f64 = -1e4;

fn all_take_part(s: &mut Scope<'_>) -> Option<()> {
    (s.ty("?m")?.dtype() == DType::Bool && s.known("?m")?.is_true()).then_some(())
}

/// The mask holds where the key is not after the query, for every query and key.
fn causal(s: &mut Scope<'_>) -> Option<()> {
    let (q, k, m) = (s.shape("?q")?, s.shape("?k")?, s.shape("?m")?);
    (s.ty("?m")?.dtype() == DType::Bool && m.ends_with(&[q[2], k[2]])).then_some(())?;
    s.known("?m")?.is_causal().then_some(())
}

/// Whether `matrices`, of shape `shape`, are those of `heads`: a reshape of one is the other.
fn are_matrices(s: &mut Scope<'_>, matrices: &str, heads: &str, shape: &str) -> Option<()> {
    let flat = s.find(&format!("(reshape {heads} {shape})"));
    s.same(flat, s.id(matrices)).or_else(|| {
        let apart = s.shape(heads)?.to_vec();
        s.bind_shape("?apart", &apart);
        let apart = s.find(&format!("(reshape {matrices} ?apart)"));
        s.same(apart, s.id(heads))
    })
}

/// Binds the factor that takes a scale back.
fn inverse_scale(s: &mut Scope<'_>) -> Option<()> {
    let i = 1.0 / s.number("?c")?;
    i.is_finite().then(|| s.bind_float("?i", i))
}

/// Binds the shapes of the reshaped gradients.
fn gradient_shapes(s: &mut Scope<'_>) -> Option<()> {
    let (q, k) = (s.shape("?q")?.to_vec(), s.shape("?k")?.to_vec());
    let (&[b, h, rows, d], keys) = (q.as_slice(), k[2]) else {
        return None;
    };
    s.bind_shape("?q3", &[b * h, rows, d]);
    s.bind_shape("?k3", &[b * h, keys, d]);
    s.bind_shape("?kt", &[b, h, d, keys]);
    s.bind_shape("?kt3", &[b * h, d, keys]);
    Some(())
}
