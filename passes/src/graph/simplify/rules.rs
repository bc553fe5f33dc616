//! The rules, by name. `Close` says how far the sides may differ. `tests/tests/simplify.rs`
//! evaluates both sides of each rule at its samples.
//!
//! These are not rules, because they are not exact: x + 0.0, which is +0.0 for x = -0.0; x - x; x *
//! 0.0. A rule that changes the order of roundings is not applied to f16, whose range is small: see
//! `scales`.

mod attention;

use super::rule::{Close, Rule, Scope};
use super::term::Literal;
use Close::{Exact, Within};
use ir::DType;
use ir::op::broadcast_shapes;

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
        |s| {
            other_permutation(s, "?a")?;
            negated(s, "?ta", "?nta")
        },
        Exact,
        "a=f32[3,2,4] b=f32[2,3,5] d=[1,2,0] ta=false tb=false other=(permute ?a [1,0,2])",
    ),
    rule(
        "right-factor-turned",
        &[(
            "(matmul ?a (permute ?b ?d) ?ta ?tb)",
            "(matmul ?a (permute ?b ?e) ?ta ?ntb)",
        )],
        |s| {
            other_permutation(s, "?b")?;
            negated(s, "?tb", "?ntb")
        },
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
    // In f16, too: what stays cannot overflow.
    rule(
        "scale-and-back",
        &[("(mul_scalar (mul_scalar ?x ?a) ?b)", "?x")],
        |s| ((s.number("?a")? * s.number("?b")? - 1.0).abs() < 1e-12).then_some(()),
        ROUNDINGS,
        "x=f32[3,4] a=0.3 b=3.3333333333333335",
    ),
    rule(
        "scale-by-division",
        &[("(div_scalar ?x ?a)", "(mul_scalar ?x ?c)")],
        |s| {
            scales(s)?;
            let c = 1.0 / s.number("?a")?;
            bind_scale(s, c)
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
];

/// Every rule.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    FORMS.iter().chain(PATTERNS).chain(attention::PATTERNS)
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
    negated(s, from, to)
}

/// Binds `?e`, the permutation of `x` that exchanges the rows and columns of permutation `?d`, if
/// the graph has it.
fn other_permutation(s: &mut Scope<'_>, x: &str) -> Option<()> {
    let mut dims = s.ints("?d")?;
    let n = dims.len();
    (n == 3).then(|| dims.swap(n - 2, n - 1))?;
    s.bind("?e", Literal::Ints(dims));
    s.find(&format!("(permute {x} ?e)")).map(|_| ())
}

/// Binds the other flag.
fn negated(s: &mut Scope<'_>, from: &str, to: &str) -> Option<()> {
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

/// Binds the product of two scales.
fn product_of_scales(s: &mut Scope<'_>) -> Option<()> {
    let c = s.number("?a")? * s.number("?b")?;
    bind_scale(s, c)
}

/// Binds `?c` to a scale. One that is infinity in f32 would make NaN of zeros.
fn bind_scale(s: &mut Scope<'_>, c: f64) -> Option<()> {
    (1e-30 < c.abs() && c.abs() < 1e30).then_some(())?;
    s.bind_float("?c", c);
    Some(())
}
