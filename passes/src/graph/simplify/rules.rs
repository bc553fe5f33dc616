//! The rules, by name. `Close` says how far the sides may differ. `tests/tests/simplify.rs`
//! evaluates both sides of each rule at its samples.
//!
//! These are not rules, because they are not exact: x + 0.0, which is +0.0 for x = -0.0; x - x; x *
//! 0.0. A rule that changes the order of roundings is not applied to f16, whose range is small: see
//! `scales`.

use super::rule::{Close, Rule, Scope};
use super::term::Literal;
use Close::{Exact, Within};
use ir::DType;
use ir::op::{OpKind, broadcast_shapes};

const fn rule(
    name: &'static str,
    pairs: &'static [(&'static str, &'static str)],
    when: fn(&mut Scope<'_>) -> Option<()>,
    close: Close,
    samples: &'static str,
) -> Rule {
    Rule {
        name,
        pairs,
        when,
        close,
        samples,
    }
}

/// The rule always holds: types are compared when it is applied.
fn always(_: &mut Scope<'_>) -> Option<()> {
    Some(())
}

/// A few roundings.
const ROUNDINGS: Close = Within(2e-6);
/// A different order of sums.
const SUMS: Close = Within(2e-5);
/// A few roundings to the eight bits of bf16.
const HALVES: Close = Within(2e-2);

/// Rules that bring formulas into one form: shapes, scales, constants. They run first, without the
/// others. Then scales are outside and chains of reshapes are gone.
pub static FORMS: &[Rule] = &[
    // Shapes.
    rule(
        "mul-swap",
        &[("(mul ?a ?b)", "(mul ?b ?a)")],
        always,
        Exact,
        "a=f32[2,3] b=f32[3]",
    ),
    rule(
        "add-swap",
        &[("(add ?a ?b)", "(add ?b ?a)")],
        always,
        Exact,
        "a=f32[2,3] b=f32[3]",
    ),
    rule(
        "reshape-of-reshape",
        &[("(reshape (reshape ?x ?a) ?b)", "(reshape ?x ?b)")],
        always,
        Exact,
        "x=f32[2,6] a=[3,4] b=[12]",
    ),
    rule(
        "reshape-to-itself",
        &[("(reshape ?x ?s)", "?x")],
        always,
        Exact,
        "x=f32[2,6] s=[2,6]",
    ),
    rule(
        "permute-of-permute",
        &[("(permute (permute ?x ?a) ?b)", "(permute ?x ?c)")],
        |s| {
            let (a, b) = (s.ints("?a")?, s.ints("?b")?);
            s.bind(
                "?c",
                Literal::Ints(b.iter().map(|&d| a[d as usize]).collect()),
            );
            Some(())
        },
        Exact,
        "x=f32[2,3,4] a=[1,2,0] b=[0,2,1]",
    ),
    rule(
        "permute-to-itself",
        &[("(permute ?x ?d)", "?x")],
        |s| s.ints("?d")?.is_sorted().then_some(()),
        Exact,
        "x=f32[2,2] d=[0,1]",
    ),
    // If only dimensions of size one move, no byte moves.
    rule(
        "permute-of-ones",
        &[("(permute ?x ?d)", "(reshape ?x ?s)")],
        |s| {
            let (d, shape) = (s.ints("?d")?, s.shape("?x")?.to_vec());
            d.iter()
                .filter(|&&d| shape[d as usize] != 1)
                .is_sorted()
                .then_some(())?;
            s.bind(
                "?s",
                Literal::Ints(d.iter().map(|&d| shape[d as usize] as i64).collect()),
            );
            Some(())
        },
        Exact,
        "x=f32[2,1,3] d=[1,0,2]",
    ),
    rule(
        "permuted-left-factor",
        &[(
            "(matmul (permute ?a ?d) ?b ?ta ?tb)",
            "(matmul ?a ?b ?nta ?tb)",
        )],
        |s| turned(s, "?ta", "?nta"),
        Exact,
        "a=f32[4,3] b=f32[4,5] d=[1,0] ta=false tb=false ; a=f32[2,3,4] b=f32[2,4,5] d=[0,2,1] \
         ta=true tb=false",
    ),
    rule(
        "permuted-right-factor",
        &[(
            "(matmul ?a (permute ?b ?d) ?ta ?tb)",
            "(matmul ?a ?b ?ta ?ntb)",
        )],
        |s| turned(s, "?tb", "?ntb"),
        Exact,
        "a=f32[3,4] b=f32[5,4] d=[1,0] ta=false tb=false",
    ),
    // An expansion is removed if its consumer broadcasts.
    // Of two permutations of one value, which only exchange rows and columns, one is enough.
    rule(
        "left-factor-turned",
        &[(
            "(matmul (permute ?a ?d) ?b ?ta ?tb)",
            "(matmul (permute ?a ?e) ?b ?nta ?tb)",
        )],
        |s| other_permutation(s, "?a", ["?ta", "?nta"]),
        Exact,
        "a=f32[3,2,4] b=f32[2,3,5] d=[1,2,0] ta=false tb=false other=(permute ?a [1,0,2])",
    ),
    rule(
        "right-factor-turned",
        &[(
            "(matmul ?a (permute ?b ?d) ?ta ?tb)",
            "(matmul ?a (permute ?b ?e) ?ta ?ntb)",
        )],
        |s| other_permutation(s, "?b", ["?tb", "?ntb"]),
        Exact,
        "a=f32[2,5,4] b=f32[3,2,4] d=[1,2,0] ta=false tb=false other=(permute ?b [1,0,2])",
    ),
    rule(
        "add-of-expand",
        &[("(add (expand ?x ?s) ?y)", "(add ?x ?y)")],
        always,
        Exact,
        "x=f32[3,1] s=[3,4] y=f32[3,4]",
    ),
    rule(
        "mul-of-expand",
        &[("(mul (expand ?x ?s) ?y)", "(mul ?x ?y)")],
        always,
        Exact,
        "x=f32[3,1] s=[3,4] y=f32[3,4]",
    ),
    rule(
        "sub-of-expand",
        &[("(sub (expand ?x ?s) ?y)", "(sub ?x ?y)")],
        always,
        Exact,
        "x=f32[3,1] s=[3,4] y=f32[3,4]",
    ),
    rule(
        "sub-expand",
        &[("(sub ?y (expand ?x ?s))", "(sub ?y ?x)")],
        always,
        Exact,
        "x=f32[3,1] s=[3,4] y=f32[3,4]",
    ),
    rule(
        "div-of-expand",
        &[("(div (expand ?x ?s) ?y)", "(div ?x ?y)")],
        always,
        Exact,
        "x=f32[3,1] s=[3,4] y=f32[3,4]",
    ),
    rule(
        "div-expand",
        &[("(div ?y (expand ?x ?s))", "(div ?y ?x)")],
        always,
        Exact,
        "x=f32[3,1] s=[3,4] y=f32[3,4]",
    ),
    rule(
        "expand-to-itself",
        &[("(expand ?x ?s)", "?x")],
        always,
        Exact,
        "x=f32[3,4] s=[3,4]",
    ),
    rule(
        "expand-of-expand",
        &[("(expand (expand ?x ?a) ?b)", "(expand ?x ?b)")],
        always,
        Exact,
        "x=f32[3,1] a=[3,4] b=[2,3,4]",
    ),
    rule(
        "mul-scalar-of-expand",
        &[(
            "(mul_scalar (expand ?x ?s) ?c)",
            "(expand (mul_scalar ?x ?c) ?s)",
        )],
        always,
        Exact,
        "x=f32[3,1] s=[3,4] c=0.3",
    ),
    rule(
        "div-scalar-of-expand",
        &[(
            "(div_scalar (expand ?x ?s) ?c)",
            "(expand (div_scalar ?x ?c) ?s)",
        )],
        always,
        Exact,
        "x=f32[3,1] s=[3,4] c=0.3",
    ),
    rule(
        "neg-of-expand",
        &[("(neg (expand ?x ?s))", "(expand (neg ?x) ?s)")],
        always,
        Exact,
        "x=f32[3,1] s=[3,4]",
    ),
    // Constants and functions that undo each other. The scalar op rounds its number as `full` does.
    rule(
        "one-times",
        &[("(mul_scalar ?x 1.0)", "?x")],
        always,
        Exact,
        "x=f32[3,4]",
    ),
    rule(
        "over-one",
        &[("(div_scalar ?x 1.0)", "?x")],
        always,
        Exact,
        "x=f32[3,4]",
    ),
    rule(
        "power-one",
        &[("(pow_scalar ?x 1.0)", "?x")],
        always,
        Exact,
        "x=f32[3,4]",
    ),
    rule(
        "root-in-denominator",
        &[("(reciprocal (sqrt ?x))", "(rsqrt ?x)")],
        scales,
        ROUNDINGS,
        "y=f32[3,4] x=(exp ?y)",
    ),
    rule(
        "one-over-root",
        &[("(div (full ?t ?s 1.0) (sqrt ?x))", "(rsqrt ?x)")],
        scales,
        ROUNDINGS,
        "t=f32 s=[] y=f32[3,4] x=(exp ?y)",
    ),
    rule(
        "power-two",
        &[("(pow_scalar ?x 2.0)", "(mul ?x ?x)")],
        scales,
        ROUNDINGS,
        "x=f32[3,4]",
    ),
    rule(
        "power-three",
        &[("(pow_scalar ?x 3.0)", "(mul (mul ?x ?x) ?x)")],
        scales,
        ROUNDINGS,
        "x=f32[3,4]",
    ),
    rule(
        "not-not",
        &[("(logical_not (logical_not ?x))", "?x")],
        always,
        Exact,
        "x=bool[3,4]",
    ),
    rule(
        "neg-neg",
        &[("(neg (neg ?x))", "?x")],
        always,
        Exact,
        "x=f32[3,4]",
    ),
    rule(
        "where-not",
        &[("(where (logical_not ?c) ?x ?y)", "(where ?c ?y ?x)")],
        always,
        Exact,
        "c=bool[3,4] x=f32[3,4] y=f32[4]",
    ),
    // Frontends add the size of a dimension to negative indices. Positions that an op computes are
    // not negative.
    rule(
        "where-never",
        &[("(where ?c ?x ?y)", "(expand ?y ?s)")],
        |s| {
            s.known("?c")?.is_false().then_some(())?;
            let (c, x, y) = (s.shape("?c")?, s.shape("?x")?, s.shape("?y")?);
            let shape = broadcast_shapes(&broadcast_shapes(c, x).ok()?, y).ok()?;
            s.bind_shape("?s", &shape);
            Some(())
        },
        Exact,
        "x=i64[2,3] y=i64[2,1] t=f32[2,4] c=(lt_scalar (r1 (topk ?t 1 3 true)) 0)",
    ),
    rule(
        "and-true",
        &[("(bitwise_and ?x (full bool ?s 1))", "?x")],
        always,
        Exact,
        "x=bool[3,4] s=[4]",
    ),
    rule(
        "true-and",
        &[("(bitwise_and (full bool ?s 1) ?x)", "?x")],
        always,
        Exact,
        "x=bool[3,4] s=[4]",
    ),
    rule(
        "logical-and-true",
        &[("(logical_and ?x (full bool ?s 1))", "?x")],
        always,
        Exact,
        "x=bool[3,4] s=[4]",
    ),
    rule(
        "true-logical-and",
        &[("(logical_and (full bool ?s 1) ?x)", "?x")],
        always,
        Exact,
        "x=bool[3,4] s=[4]",
    ),
    rule(
        "full-minus",
        &[("(sub (full ?t ?s ?c) ?x)", "(rsub_scalar ?x ?c)")],
        same_number,
        Exact,
        "t=f32 s=[4] c=1.0 x=f32[3,4]",
    ),
    rule(
        "full-times",
        &[("(mul (full ?t ?s ?c) ?x)", "(mul_scalar ?x ?c)")],
        same_number,
        Exact,
        "t=f32 s=[4] c=0.3 x=f32[3,4]",
    ),
    rule(
        "full-plus",
        &[("(add (full ?t ?s ?c) ?x)", "(add_scalar ?x ?c)")],
        same_number,
        Exact,
        "t=f32 s=[4] c=0.3 x=f32[3,4]",
    ),
    rule(
        "over-full",
        &[("(div ?x (full ?t ?s ?c))", "(div_scalar ?x ?c)")],
        same_number,
        Exact,
        "t=f32 s=[4] c=0.3 x=f32[3,4]",
    ),
    // A cast that loses nothing is skipped. f32 -> bf16 -> f32 rounds, and stays.
    rule(
        "cast-of-cast",
        &[("(cast (cast ?x ?a) ?b)", "(cast ?x ?b)")],
        |s| holds_all(s.ty("?x")?.dtype(), s.dtype("?a")?).then_some(()),
        Exact,
        "x=bf16[3,4] a=f32 b=bf16 ; x=bf16[3,4] a=f32 b=f64 ; x=i32[4] a=i64 b=f32 ; x=bool[3,4] \
         a=i64 b=f32",
    ),
    rule(
        "cast-to-itself",
        &[("(cast ?x ?t)", "?x")],
        always,
        Exact,
        "x=f32[3,4] t=f32",
    ),
    // Scales move outward and become one.
    rule(
        "scale-of-scale",
        &[("(mul_scalar (mul_scalar ?x ?a) ?b)", "(mul_scalar ?x ?c)")],
        |s| {
            scales(s)?;
            product_of_scales(s)
        },
        ROUNDINGS,
        "x=f32[3,4] a=0.3 b=7.0",
    ),
    rule(
        "scale-by-division",
        &[("(div_scalar ?x ?a)", "(mul_scalar ?x ?c)")],
        |s| {
            scales(s)?;
            let c = 1.0 / s.number("?a")?;
            (c.is_finite() && 1e-30 < c.abs() && c.abs() < 1e30).then_some(())?;
            s.bind_float("?c", c);
            Some(())
        },
        ROUNDINGS,
        "x=f32[3,4] a=3.0",
    ),
    rule(
        "scale-reshape",
        &[(
            "(reshape (mul_scalar ?x ?c) ?s)",
            "(mul_scalar (reshape ?x ?s) ?c)",
        )],
        always,
        Exact,
        "x=f32[3,4] c=0.3 s=[12]",
    ),
    rule(
        "scale-permute",
        &[(
            "(permute (mul_scalar ?x ?c) ?d)",
            "(mul_scalar (permute ?x ?d) ?c)",
        )],
        always,
        Exact,
        "x=f32[3,4] c=0.3 d=[1,0]",
    ),
    rule(
        "scale-left-factor",
        &[(
            "(matmul (mul_scalar ?x ?c) ?b ?ta ?tb)",
            "(mul_scalar (matmul ?x ?b ?ta ?tb) ?c)",
        )],
        scales,
        SUMS,
        "x=f32[3,4] c=0.3 b=f32[4,5] ta=false tb=false",
    ),
    rule(
        "scale-right-factor",
        &[(
            "(matmul ?a (mul_scalar ?x ?c) ?ta ?tb)",
            "(mul_scalar (matmul ?a ?x ?ta ?tb) ?c)",
        )],
        scales,
        SUMS,
        "a=f32[3,4] c=0.3 x=f32[5,4] ta=false tb=true",
    ),
    rule(
        "scale-mul",
        &[("(mul (mul_scalar ?x ?c) ?b)", "(mul_scalar (mul ?x ?b) ?c)")],
        scales,
        ROUNDINGS,
        "x=f32[3,4] c=0.3 b=f32[3,4] ; x=f32[3,1] c=0.3 b=f32[3,4]",
    ),
];

/// Rules that recognise ops that a tracer decomposed.
pub static PATTERNS: &[Rule] = &[
    rule(
        "bias",
        &[(
            "(add (matmul ?a ?b ?ta ?tb) ?c)",
            "(addmm ?c ?a ?b ?ta ?tb)",
        )],
        |s| (s.ty("?c")?.rank() == 1).then_some(()),
        SUMS,
        "a=f32[3,4] b=f32[4,5] c=f32[5] ta=false tb=false",
    ),
    rule(
        "bias-after-reshape",
        &[(
            "(add (reshape (matmul ?a ?b ?ta ?tb) ?s) \
            ?c)",
            "(reshape (addmm ?c ?a ?b ?ta ?tb) ?s)",
        )],
        |s| {
            let columns = *s
                .shape("?b")?
                .get(if s.literal("?tb")? == &Literal::Bool(true) {
                    0
                } else {
                    1
                })?;
            let last = *s.ints("?s")?.last()?;
            (s.shape("?c")? == [columns] && last as u64 == columns && s.ty("?a")?.rank() == 2)
                .then_some(())
        },
        SUMS,
        "a=f32[6,4] b=f32[4,5] c=f32[5] ta=false tb=false s=[2,3,5]",
    ),
    // Activations.
    rule(
        "silu",
        &[("(mul ?x (sigmoid ?x))", "(silu ?x)")],
        scales,
        ROUNDINGS,
        "x=f32[3,4]",
    ),
    rule(
        "silu-bwd",
        &[(
            "(mul ?dy (mul (sigmoid ?x) (add_scalar (mul ?x (rsub_scalar (sigmoid ?x) 1.0)) 1.0)))",
            "(silu_bwd ?dy ?x)",
        )],
        scales,
        ROUNDINGS,
        "x=f32[3,4] dy=f32[3,4]",
    ),
    rule(
        "silu-bwd-left",
        &[(
            "(mul (mul ?dy (sigmoid ?x)) (add_scalar (mul ?x (rsub_scalar (sigmoid ?x) 1.0)) 1.0))",
            "(silu_bwd ?dy ?x)",
        )],
        scales,
        ROUNDINGS,
        "x=f32[3,4] dy=f32[3,4]",
    ),
    rule(
        "tanh-bwd",
        &[(
            "(mul ?dy (rsub_scalar (mul ?y ?y) 1.0))",
            "(tanh_bwd ?dy ?y)",
        )],
        scales,
        ROUNDINGS,
        "y=f32[3,4] dy=f32[3,4]",
    ),
    // The other direction: a gelu that is written out has a traced tanh_bwd inside.
    rule(
        "tanh-bwd-opened",
        &[(
            "(tanh_bwd ?dy ?y)",
            "(mul ?dy (rsub_scalar (mul ?y ?y) 1.0))",
        )],
        scales,
        ROUNDINGS,
        "y=f32[3,4] dy=f32[3,4]",
    ),
    rule(
        "sigmoid-bwd",
        &[(
            "(mul ?dy (mul ?y (rsub_scalar ?y 1.0)))",
            "(sigmoid_bwd ?dy ?y)",
        )],
        scales,
        ROUNDINGS,
        "y=f32[3,4] dy=f32[3,4]",
    ),
    rule(
        "sigmoid-bwd-left",
        &[(
            "(mul (mul ?dy (rsub_scalar ?y 1.0)) ?y)",
            "(sigmoid_bwd ?dy ?y)",
        )],
        scales,
        ROUNDINGS,
        "y=f32[3,4] dy=f32[3,4]",
    ),
    rule(
        "threshold-bwd",
        &[(
            "(where (le_scalar ?y ?v) (full ?t ?s 0.0) ?dy)",
            "(threshold_bwd ?dy ?y ?v)",
        )],
        always,
        Exact,
        "y=f32[3,4] v=0.0 t=f32 s=[] dy=f32[3,4]",
    ),
    rule(
        "gelu-tanh-inner",
        &[(
            "(tanh (mul_scalar (add ?x (mul_scalar (mul (mul ?x ?x) ?x) ?a)) ?k))",
            "(gelu_t ?x)",
        )],
        |s| near(s, "?a", CUBE).and_then(|()| near(s, "?k", SQRT_2_PI)),
        ROUNDINGS,
        "x=f32[3,4] a=0.044715 k=0.7978845608028654",
    ),
    rule(
        "gelu-tanh",
        &[(
            "(mul_scalar (mul ?x (add_scalar (gelu_t ?x) 1.0)) 0.5)",
            "(gelu ?x true)",
        )],
        scales,
        ROUNDINGS,
        "x=f32[3,4]",
    ),
    rule(
        "gelu-tanh-bwd",
        &[(
            "(mul ?dy (add (mul_scalar (add_scalar (gelu_t ?x) 1.0) 0.5)
               (mul_scalar (mul (mul ?x (rsub_scalar (mul (gelu_t ?x) (gelu_t ?x)) 1.0))
                                (add_scalar (mul_scalar (mul ?x ?x) ?a) 1.0)) ?k)))",
            "(gelu_bwd ?dy ?x true)",
        )],
        |s| near(s, "?a", 3.0 * CUBE).and_then(|()| near(s, "?k", 0.5 * SQRT_2_PI)),
        ROUNDINGS,
        "x=f32[3,4] dy=f32[3,4] a=0.134145 k=0.3989422804014327",
    ),
    // From the gradient of a gelu that is written out: x^3 has the gradient 3 x^2.
    rule(
        "gelu-tanh-bwd-by-tape",
        &[(
            "(add (add (mul_scalar (mul (mul ?dy ?x) (rsub_scalar (mul (gelu_t ?x) (gelu_t ?x)) \
             1.0)) ?k)
                       (mul_scalar (mul (mul (mul ?dy ?x) (rsub_scalar (mul (gelu_t ?x) (gelu_t \
                       ?x)) 1.0))
                                        (mul ?x ?x)) ?a))
                  (mul_scalar (mul ?dy (add_scalar (gelu_t ?x) 1.0)) 0.5))",
            "(gelu_bwd ?dy ?x true)",
        )],
        |s| near(s, "?k", 0.5 * SQRT_2_PI).and_then(|()| near(s, "?a", 1.5 * CUBE * SQRT_2_PI)),
        ROUNDINGS,
        "x=f32[3,4] dy=f32[3,4] k=0.3989422804014327 a=0.05351611220927206",
    ),
    rule(
        "gelu-erf",
        &[(
            "(mul_scalar (mul ?x (add_scalar (erf (mul_scalar ?x ?r)) 1.0)) \
            0.5)",
            "(gelu ?x false)",
        )],
        |s| near(s, "?r", std::f64::consts::FRAC_1_SQRT_2),
        ROUNDINGS,
        "x=f32[3,4] r=0.7071067811865476",
    ),
    rule(
        "gelu-erf-bwd",
        &[(
            "(mul ?dy (add (mul_scalar (add_scalar (erf (mul_scalar ?x ?r)) 1.0) 0.5)
               (mul_scalar (mul ?x (exp (mul_scalar (mul ?x ?x) -0.5))) ?k)))",
            "(gelu_bwd ?dy ?x false)",
        )],
        |s| {
            near(s, "?r", std::f64::consts::FRAC_1_SQRT_2)
                .and_then(|()| near(s, "?k", 0.5 * SQRT_2_PI))
        },
        ROUNDINGS,
        "x=f32[3,4] dy=f32[3,4] r=0.7071067811865476 k=0.3989422804014327",
    ),
    // Random numbers: both sides use the same words of the generator. One of 2^24 elements may be
    // kept by one side and dropped by the other, because `rand` has 24 bits.
    rule(
        "dropout",
        &[
            (
                "(mul_scalar (mul (cast (gt_scalar (rand ?rng ?t ?s ?stream) ?p) ?t) ?x) ?c)",
                "(r0 (dropout ?x ?rng ?p ?stream))",
            ),
            (
                "(gt_scalar (rand ?rng ?t ?s ?stream) ?p)",
                "(r1 (dropout ?x ?rng ?p ?stream))",
            ),
        ],
        |s| {
            // The gradient may use this mask, but this mask may not come from the gradient.
            s.is_forward("?x").then_some(())?;
            let p = s.number("?p")?;
            (0.0 <= p
                && p < 1.0
                && s.dtype("?t")? == DType::F32
                && s.ty("?x")?.dtype() == DType::F32)
                .then_some(())?;
            near(s, "?c", 1.0 / (1.0 - p))
        },
        ROUNDINGS,
        "rng=i64[2] x=f32[5,7] t=f32 s=[5,7] stream=3 p=0.1 c=1.1111111111111112",
    ),
    rule(
        "dropout-bwd",
        &[(
            "(mul_scalar (mul (cast ?m ?t) ?dy) ?c)",
            "(dropout_bwd ?dy ?m ?c)",
        )],
        |s| (s.ty("?m")?.dtype() == DType::Bool).then_some(()),
        Exact,
        "m=bool[3,4] t=f32 dy=f32[3,4] c=1.25",
    ),
    // Normalisation.
    rule(
        "layer-norm-by-division",
        &[(
            "(div (sub ?x (mean ?x ?d true))
                  (sqrt (add_scalar (mean (mul (sub ?x (mean ?x ?d true)) (sub ?x (mean ?x ?d \
             true))) ?d true) ?eps)))",
            "(mul (sub ?x (mean ?x ?d true))
                  (rsqrt (add_scalar (mean (mul (sub ?x (mean ?x ?d true)) (sub ?x (mean ?x ?d \
             true))) ?d true) ?eps)))",
        )],
        scales,
        SUMS,
        "x=f32[2,3,8] d=[2] eps=0.00001",
    ),
    rule(
        "layer-norm",
        &[
            (
                "(mul (sub ?x (mean ?x ?d true))
                      (rsqrt (add_scalar (mean (mul (sub ?x (mean ?x ?d true)) (sub ?x (mean ?x \
                      ?d true))) ?d true) ?eps)))",
                "(r0 (layer_norm ?x ?n ?eps))",
            ),
            ("(mean ?x ?d true)", "(r1 (layer_norm ?x ?n ?eps))"),
            (
                "(rsqrt (add_scalar (mean (mul (sub ?x (mean ?x ?d true)) (sub ?x (mean ?x ?d \
                 true))) ?d true) ?eps))",
                "(r2 (layer_norm ?x ?n ?eps))",
            ),
        ],
        |s| {
            let n = last_dims(s, "?d", "?x")?;
            s.bind("?n", Literal::Int(n));
            Some(())
        },
        SUMS,
        "x=f32[2,3,8] d=[2] eps=0.00001 ; x=f32[2,3,8] d=[1,2] eps=0.1",
    ),
    rule(
        "layer-norm-affine",
        &[
            (
                "(add (mul (r0 (layer_norm ?x ?n ?eps)) ?w) \
                ?b)",
                "(r0 (layer_norm ?x ?w ?b ?n ?eps))",
            ),
            (
                "(r1 (layer_norm ?x ?n ?eps))",
                "(r1 (layer_norm ?x ?w ?b ?n ?eps))",
            ),
            (
                "(r2 (layer_norm ?x ?n ?eps))",
                "(r2 (layer_norm ?x ?w ?b ?n ?eps))",
            ),
        ],
        always,
        SUMS,
        "x=f32[2,3,8] w=f32[8] b=f32[8] n=1 eps=0.00001",
    ),
    rule(
        "layer-norm-bwd",
        &[
            (
                "(mul (div_scalar ?rstd ?N)
                   (sub (sub (mul_scalar (mul ?dy ?w) ?N) (sum (mul ?dy ?w) ?d true))
                        (mul (mul (sub ?x ?mean) ?rstd) (sum (mul (mul ?dy ?w) (mul (sub ?x \
                        ?mean) ?rstd)) ?d true))))",
                "(r0 (layer_norm_bwd ?dy ?x ?mean ?rstd ?w ?n ?mask))",
            ),
            (
                "(sum (mul ?dy (mul (sub ?x ?mean) ?rstd)) ?lead false)",
                "(r1 (layer_norm_bwd ?dy ?x ?mean ?rstd ?w ?n ?mask))",
            ),
            (
                "(sum ?dy ?lead false)",
                "(r2 (layer_norm_bwd ?dy ?x ?mean ?rstd ?w ?n ?mask))",
            ),
        ],
        |s| {
            layer_norm_bwd(s)?;
            let all = i64::from(s.has(1) && s.has(2));
            s.bind("?mask", Literal::Ints(vec![1, all, all]));
            Some(())
        },
        SUMS,
        "x=f32[2,3,8] dy=f32[2,3,8] mean=f32[2,3,1] rstd=f32[2,3,1] w=f32[8] N=8.0 d=[2]",
    ),
    rule(
        "layer-norm-bwd-plain",
        &[(
            "(mul (div_scalar ?rstd ?N)
               (sub (sub (mul_scalar ?dy ?N) (sum ?dy ?d true))
                    (mul (mul (sub ?x ?mean) ?rstd) (sum (mul ?dy (mul (sub ?x ?mean) ?rstd)) ?d \
                    true))))",
            "(r0 (layer_norm_bwd ?dy ?x ?mean ?rstd ?n [1,0,0]))",
        )],
        layer_norm_bwd,
        SUMS,
        "x=f32[2,3,8] dy=f32[2,3,8] mean=f32[2,3,1] rstd=f32[2,3,1] N=8.0 d=[2]",
    ),
    rule(
        "batch-norm-bwd",
        &[
            (
                "(mul (sub (sub ?dy (mul (sub ?x (reshape ?mean ?u))
                             (reshape (mul (mul_scalar (sum (mul ?dy (sub ?x (reshape ?mean ?u))) \
                             ?d false) ?i)
                                           (mul ?rstd ?rstd)) ?u)))
                           (reshape (mul_scalar (sum ?dy ?d false) ?i) ?u))
                      (reshape (mul ?rstd ?w) ?u))",
                "(r0 (batch_norm_bwd ?dy ?x ?w ?mean ?rstd [1,1,1]))",
            ),
            (
                "(mul (sum (mul ?dy (sub ?x (reshape ?mean ?u))) ?d false) ?rstd)",
                "(r1 (batch_norm_bwd ?dy ?x ?w ?mean ?rstd [1,1,1]))",
            ),
            (
                "(sum ?dy ?d false)",
                "(r2 (batch_norm_bwd ?dy ?x ?w ?mean ?rstd [1,1,1]))",
            ),
        ],
        |s| {
            let (shape, d, u) = (s.shape("?x")?.to_vec(), s.ints("?d")?, s.ints("?u")?);
            let others: Vec<i64> = (0..shape.len() as i64).filter(|&d| d != 1).collect();
            let ones: Vec<i64> = (0..shape.len())
                .map(|d| if d == 1 { shape[1] as i64 } else { 1 })
                .collect();
            let n: u64 = others.iter().map(|&d| shape[d as usize]).product();
            (d == others && u == ones && 0 < n).then_some(())?;
            near(s, "?i", 1.0 / n as f64)
        },
        SUMS,
        "x=f32[4,3,2,2] dy=f32[4,3,2,2] mean=f32[3] rstd=f32[3] w=f32[3] d=[0,2,3] u=[1,3,1,1] \
         i=0.0625",
    ),
    // Softmax and losses.
    rule(
        "softmax",
        &[(
            "(div (exp (sub ?x (amax ?x ?d true))) (sum (exp (sub ?x (amax ?x ?d true))) ?d true))",
            "(softmax ?x ?dim)",
        )],
        one_dim,
        ROUNDINGS,
        "x=f32[3,4] d=[1]",
    ),
    // A mask that hides nothing. The exponentials of -0.0 and 0.0 are equal.
    rule(
        "softmax-of-plus-zero",
        &[("(softmax (add_scalar ?x 0.0) ?dim)", "(softmax ?x ?dim)")],
        always,
        Exact,
        "x=f32[3,4] dim=1",
    ),
    rule(
        "log-softmax",
        &[(
            "(sub (sub ?x (amax ?x ?d true)) (log (sum (exp (sub ?x (amax ?x ?d true))) ?d true)))",
            "(log_softmax ?x ?dim)",
        )],
        one_dim,
        ROUNDINGS,
        "x=f32[3,4] d=[1]",
    ),
    rule(
        "softmax-bwd",
        &[(
            "(sub (mul ?dy ?y) (mul ?y (sum (mul ?dy ?y) ?d true)))",
            "(softmax_bwd ?dy ?y ?dim)",
        )],
        one_dim,
        SUMS,
        "dy=f32[3,4] y=f32[3,4] d=[1] ; dy=f32[3,4,2] y=f32[3,4,2] d=[0]",
    ),
    rule(
        "log-softmax-bwd",
        &[(
            "(sub ?dy (mul (exp ?y) (sum ?dy ?d true)))",
            "(log_softmax_bwd ?dy ?y ?dim)",
        )],
        one_dim,
        SUMS,
        "dy=f32[3,4] y=f32[3,4] d=[1]",
    ),
    rule(
        "nll-loss",
        &[
            (
                "(div (sum (where (ne_scalar ?t ?ignore)
                                  (neg (reshape (gather ?logp (reshape (where (ne_scalar ?t \
                                  ?ignore) ?t (full i64 [] 0)) ?s) 1) ?n))
                                  (full ?f [] 0.0)) [0] false)
                      (cast (sum (cast (ne_scalar ?t ?ignore) i64) [0] false) ?f))",
                "(r0 (nll_loss ?logp ?t ?ignore 1))",
            ),
            (
                "(cast (sum (cast (ne_scalar ?t ?ignore) i64) [0] false) \
                ?f)",
                "(r1 (nll_loss ?logp ?t ?ignore 1))",
            ),
        ],
        |s| s.int("?ignore").map(|_| ()),
        ROUNDINGS,
        "logp=f32[4,5] t=i64[4] ignore=-100 s=[4,1] n=[4] f=f32 ; logp=f32[4,5] t=i64[4] ignore=2 \
         s=[4,1] n=[4] f=f32",
    ),
    rule(
        "nll-loss-sum",
        &[(
            "(sum (where (ne_scalar ?t ?ignore)
                         (neg (reshape (gather ?logp (reshape (where (ne_scalar ?t ?ignore) ?t \
                         (full i64 [] 0)) ?s) 1) ?n))
                         (full ?f [] 0.0)) [0] false)",
            "(r0 (nll_loss ?logp ?t ?ignore 2))",
        )],
        |s| s.int("?ignore").map(|_| ()),
        ROUNDINGS,
        "logp=f32[4,5] t=i64[4] ignore=2 s=[4,1] n=[4] f=f32",
    ),
    rule(
        "nll-loss-bwd",
        &[(
            "(mul (scatter_value (full ?f ?shape 0.0)
                                 (where (ne_scalar (reshape ?t ?s) ?ignore) (reshape ?t ?s) (full \
                                 i64 [] 0)) 1 -1.0)
                  (where (ne_scalar (reshape ?t ?s) ?ignore) (div ?dloss ?weight) (full ?f [] \
                  0.0)))",
            "(nll_loss_bwd ?dloss (reshape ?t ?n) ?weight ?f ?ignore 1 ?shape)",
        )],
        |s| {
            s.int("?ignore")?;
            let rows = *s.ints("?shape")?.first()?;
            (s.ints("?s")? == [rows, 1]).then_some(())?;
            s.bind("?n", Literal::Ints(vec![rows]));
            Some(())
        },
        ROUNDINGS,
        "t=i64[4] s=[4,1] ignore=2 f=f32 shape=[4,5] dloss=f32[] weight=f32[]",
    ),
    rule(
        "embedding-bwd",
        &[(
            "(index_put (full ?f ?shape 0.0) (where (reshape (eq_scalar ?i ?padding) ?s) (full ?f \
             [] 0.0) ?dy) ?i true)",
            "(embedding_bwd ?dy ?i ?padding ?rows)",
        )],
        |s| {
            let (index, shape) = (s.shape("?i")?.to_vec(), s.ints("?shape")?);
            let s_: Vec<i64> = index.iter().map(|&d| d as i64).chain([1]).collect();
            (s.ints("?s")? == s_ && shape.len() == 2 && -1 <= s.int("?padding")?).then_some(())?;
            s.bind("?rows", Literal::Int(shape[0]));
            Some(())
        },
        SUMS,
        "f=f32 shape=[5,4] i=i64[2,3] padding=-1 s=[2,3,1] dy=f32[2,3,4] ;
         f=f32 shape=[5,4] i=i64[2,3] padding=2 s=[2,3,1] dy=f32[2,3,4]",
    ),
    // Scores of matrices that have no dimension of heads get one.
    rule(
        "heads-turned",
        &[(
            "(permute (reshape ?x ?h) [0,1,3,2])",
            "(reshape (permute ?x [0,2,1]) ?t)",
        )],
        |s| {
            let (&[n, ..], heads) = (s.shape("?x")?, s.ints("?h")?) else {
                return None;
            };
            let &[batch, each, rows, columns] = &heads[..] else {
                return None;
            };
            let fits = s.shape("?x")?.len() == 3 && i64::try_from(n) == Ok(batch * each);
            fits.then_some(())?;
            s.bind("?t", Literal::Ints(vec![batch, each, columns, rows]));
            Some(())
        },
        Exact,
        "x=f32[6,4,5] h=[2,3,4,5]",
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
    rule(
        "replaced-matrices",
        &[(
            "(reshape (where ?m (full ?t [] ?low) ?x) ?h)",
            "(where (reshape ?m ?u) (full ?t [] ?low) (reshape ?x ?h))",
        )],
        |s| mask_of_heads(s, "?x"),
        Exact,
        "x=f32[6,4,5] m=bool[1,4,5] t=f32 low=-inf h=[1,6,4,5]",
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
    rule(
        "probs-replaced",
        &[(
            "(softmax (where ?n (full ?t ?s ?low) (scores ?q ?k ?c)) 3)",
            "(probs ?q ?k ?m ?c false)",
        )],
        |s| {
            unscaled(s)?;
            hides_others(s)
        },
        SUMS,
        "q=f32[2,3,4,5] k=f32[2,3,6,5] c=0.3 t=f32 s=[] low=-inf n=(lt (reshape (arange i64 [6] 0 \
         1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1])) m=(logical_not ?n)",
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
        "probs-replaced-widened",
        &[(
            "(softmax (cast (where ?n (full ?t ?s ?low) (scores ?q ?k ?c)) ?w) 3)",
            "(cast (probs ?q ?k ?m ?c false) ?w)",
        )],
        |s| {
            unscaled_halves(s)?;
            hides_others(s)
        },
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] c=0.3 w=f32 t=bf16 s=[] low=-inf \
         n=(lt (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1])) \
         m=(logical_not ?n)",
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
        "probs-widened-replaced",
        &[(
            "(softmax (where ?n (full ?t ?s ?low) (cast (scores ?q ?k ?c) ?w)) 3)",
            "(cast (probs ?q ?k ?m ?c false) ?w)",
        )],
        |s| {
            unscaled_halves(s)?;
            hides_others(s)
        },
        HALVES,
        "q=bf16[2,3,4,5] k=bf16[2,3,6,5] c=0.3 w=f32 t=f32 s=[] low=-inf \
         n=(lt (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1])) \
         m=(logical_not ?n)",
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
        "replaced-gradients-narrowed",
        &[(
            "(cast (where ?m (full ?t ?s 0.0) ?x) ?h)",
            "(where ?m (full ?h ?s 0.0) (cast ?x ?h))",
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
        "scores-replaced-bwd",
        &[(
            "(where ?n (full ?t ?s 0.0) (dscores ?do ?q ?k ?v ?m ?drop ?c))",
            "(dscores ?do ?q ?k ?v ?m ?drop ?c)",
        )],
        |s| s.same(s.find("(logical_not ?n)"), s.id("?m")),
        SUMS,
        "do=f32[2,3,4,7] q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] c=0.3 drop=none t=f32 s=[] \
         n=(lt (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) [4,1])) \
         m=(logical_not ?n)",
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
        "matrices-replaced-bwd",
        &[(
            "(where ?n (full ?t ?s 0.0) (reshape (dscores ?do ?q ?k ?v ?m ?drop ?c) ?s3))",
            "(reshape (dscores ?do ?q ?k ?v ?m ?drop ?c) ?s3)",
        )],
        |s| {
            let heads = s.shape("?m")?.to_vec();
            s.bind_shape("?u", &heads);
            s.same(s.find("(logical_not (reshape ?n ?u))"), s.id("?m"))
        },
        SUMS,
        "do=f32[1,6,4,7] q=f32[1,6,4,5] k=f32[1,6,6,5] v=f32[1,6,6,7] c=0.3 drop=none t=f32 s=[] \
         s3=[6,4,6] n=(lt (reshape (arange i64 [6] 0 1) [1,6]) (reshape (arange i64 [4] 0 1) \
         [4,1])) m=(logical_not (reshape ?n [1,1,4,6]))",
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
        "attention-dq-unscaled",
        &[(
            "(dq ?do ?q ?k ?v ?m ?drop ?c)",
            "(mul_scalar (r0 (sdpa_bwd ?do ?q ?k ?v (r0 (sdpa ?q ?k ?v ?m ?drop false ?c))
                (r1 (sdpa ?q ?k ?v ?m ?drop false ?c)) ?m ?drop false ?c)) ?i)",
        )],
        inverse_scale,
        SUMS,
        "do=f32[2,3,4,7] q=f32[2,3,4,5] k=f32[2,3,6,5] v=f32[2,3,6,7] m=f32[4,6] c=0.3 rng=i64[2] \
         drop=(dropout_key ?rng 0.5 3)",
    ),
    rule(
        "attention-dk-unscaled",
        &[(
            "(dk ?do ?q ?k ?v ?m ?drop ?c)",
            "(mul_scalar (r1 (sdpa_bwd ?do ?q ?k ?v (r0 (sdpa ?q ?k ?v ?m ?drop false ?c))
                (r1 (sdpa ?q ?k ?v ?m ?drop false ?c)) ?m ?drop false ?c)) ?i)",
        )],
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

/// Every rule.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    FORMS.iter().chain(PATTERNS)
}

/// The factor of x^3 in gelu's approximation.
const CUBE: f64 = 0.044715;
/// sqrt(2 / pi)
const SQRT_2_PI: f64 = 0.797_884_560_802_865_4;

/// Holds only if the product of the scales cannot overflow or vanish when the separate scales do
/// not.
fn scales(s: &mut Scope<'_>) -> Option<()> {
    let wide = |name: &str| {
        s.ty(name)
            .is_none_or(|ty| matches!(ty.dtype(), DType::F32 | DType::F64 | DType::BF16))
    };
    (wide("?x") && wide("?y")).then_some(())
}

/// A number is the same in a tensor of constants and in an op: smaller floats would round it.
fn same_number(s: &mut Scope<'_>) -> Option<()> {
    use DType::{BF16, F8E4M3, F8E5M2, F16};
    (!matches!(s.ty("?x")?.dtype(), BF16 | F8E4M3 | F8E5M2 | F16)).then_some(())
}

fn near(s: &Scope<'_>, name: &str, value: f64) -> Option<()> {
    ((s.number(name)? / value - 1.0).abs() <= 1e-6).then_some(())
}

/// Whether `b` can represent every value of `a`.
fn holds_all(a: DType, b: DType) -> bool {
    use DType::{BF16, Bool, F8E4M3, F8E5M2, F16, F32, F64, I8, I16, I32, I64, U8};
    match a {
        Bool => true,
        U8 => matches!(b, U8 | I16 | I32 | I64 | F16 | F32 | F64),
        I8 => matches!(b, I8 | I16 | I32 | I64 | F16 | F32 | F64),
        I16 => matches!(b, I16 | I32 | I64 | F32 | F64),
        I32 => matches!(b, I32 | I64 | F64),
        I64 => b == I64,
        F8E4M3 => matches!(b, F8E4M3 | BF16 | F16 | F32 | F64),
        F8E5M2 => matches!(b, F8E5M2 | BF16 | F16 | F32 | F64),
        F16 => matches!(b, F16 | F32 | F64),
        BF16 => matches!(b, BF16 | F32 | F64),
        F32 => matches!(b, F32 | F64),
        F64 => b == F64,
    }
}

/// Binds `to` to the inverse of the flag `from`, if `?d` swaps the last two dimensions.
fn turned(s: &mut Scope<'_>, from: &str, to: &str) -> Option<()> {
    match s.ints("?d")?.as_slice() {
        [1, 0] | [0, 2, 1] => {}
        _ => return None,
    }
    let Literal::Bool(flag) = *s.literal(from)? else {
        return None;
    };
    s.bind(to, Literal::Bool(!flag));
    Some(())
}

/// Binds `?e`, the permutation of `x` that exchanges the rows and columns of permutation `?d`, if
/// the graph has it; and the flag of a product that takes it back.
fn other_permutation(s: &mut Scope<'_>, x: &str, [from, to]: [&str; 2]) -> Option<()> {
    let mut dims = s.ints("?d")?;
    let n = dims.len();
    (n == 3).then(|| dims.swap(n - 2, n - 1))?;
    s.bind("?e", Literal::Ints(dims));
    s.find(&format!("(permute {x} ?e)"))?;
    let Literal::Bool(flag) = *s.literal(from)? else {
        return None;
    };
    s.bind(to, Literal::Bool(!flag));
    Some(())
}

/// The number of dims `d`, if they are the last dimensions of `x`.
fn last_dims(s: &Scope<'_>, d: &str, x: &str) -> Option<i64> {
    let (dims, rank) = (s.ints(d)?, s.ty(x)?.rank() as i64);
    let n = dims.len() as i64;
    (0 < n && dims.iter().copied().eq(rank - n..rank)).then_some(n)
}

/// Binds `?n`, the number of dimensions, and `?lead`, the dimensions before them.
fn layer_norm_bwd(s: &mut Scope<'_>) -> Option<()> {
    let n = last_dims(s, "?d", "?x")?;
    let shape = s.shape("?x")?.to_vec();
    let lead = shape.len() - n as usize;
    let numel: u64 = shape[lead..].iter().product();
    near(s, "?N", numel as f64)?;
    s.bind("?n", Literal::Int(n));
    s.bind("?lead", Literal::Ints((0..lead as i64).collect()));
    Some(())
}

/// Binds `?dim` to the one dimension of `?d`.
fn one_dim(s: &mut Scope<'_>) -> Option<()> {
    let d = s.ints("?d")?;
    let &[dim] = d.as_slice() else { return None };
    s.bind("?dim", Literal::Int(dim));
    Some(())
}

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

fn product_of_scales(s: &mut Scope<'_>) -> Option<()> {
    let c = s.number("?a")? * s.number("?b")?;
    (c.is_finite() && 1e-30 < c.abs()).then_some(())?;
    // A factor and its inverse.
    let is_one = (c - 1.0).abs() < 1e-12;
    s.bind_float("?c", if is_one { 1.0 } else { c });
    Some(())
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

/// The same of scores where `?n` holds; binds the mask.
fn hides_others(s: &mut Scope<'_>) -> Option<()> {
    (s.ty("?n")?.dtype() == DType::Bool).then_some(())?;
    s.bind_term("?m", "(logical_not ?n)")?;
    hides(s)
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
