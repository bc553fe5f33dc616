//! Compares each family of instructions with plain Rust, and tests the errors of kernels.

use lighterage_ptx::{Access, Error, Launch, Memory, Param, Stats, parse, run};

/// A kernel of a body; its parameters are `in`, `out` (addresses) and `n` (32 bits).
fn text(body: &str, shared: &str) -> String {
    format!(
        "//\n// A comment; with a semicolon\n.version 8.0\n.target sm_80\n.address_size \
         64\n{shared}\n\
         .visible .entry k(\n\t.param .u64 .ptr .global .align 64 k_param_0,\n\t.param .u64 \
         k_param_1,\n\
         \t.param .u32 k_param_2\n)\n.maxntid 128, 1, 1\n{{\n\t.reg .pred %p<9>;\n\t.reg .b32 \
         %r<99>;\n\
             \t.reg .b64 %rd<99>;\n\
         \tld.param.b64 %rd1, [k_param_0];\n\tld.param.b64 %rd2, [k_param_1];\n\tld.param.b32 \
         %r2, [k_param_2];\n\
         \tmov.u32 %r1, %tid.x;\n{body}\n\tret;\n}}\n"
    )
}
struct Outcome {
    bytes: Vec<u8>,
    stats: Stats,
}
fn launch(
    body: &str,
    shared: &str,
    input: &[u8],
    room: usize,
    launch: Launch,
) -> Result<Outcome, Error> {
    let mut memory = Memory::new();
    let (a, b) = (memory.add(input.to_vec()), memory.room(room));
    let params = [Param::U64(a), Param::U64(b), Param::U32(room as u32)];
    let stats = run(&text(body, shared), "k", &launch, &params, &mut memory)?;
    Ok(Outcome {
        bytes: memory.bytes(b).to_vec(),
        stats,
    })
}
fn of_warp(body: &str, shared: &str, input: &[u8], room: usize) -> Result<Outcome, Error> {
    launch(
        body,
        shared,
        input,
        room,
        Launch {
            shared_bytes: 4096,
            ..Launch::new(1, 32)
        },
    )
}
fn words(bytes: &[u8]) -> Vec<u32> {
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&b| u32::from_le_bytes(b))
        .collect()
}
fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
/// Runs `op %r6, %r3, %r4, %r5` (with the op's number of operands) on one thread.
fn one(op: &str, operands: &[u32]) -> u32 {
    let loads: String = (0..operands.len())
        .map(|i| format!("ld.global.b32 %r{}, [%rd1+{}];\n", 3 + i, 4 * i))
        .collect();
    let args: String = (0..operands.len())
        .map(|i| format!(", %r{}", 3 + i))
        .collect();
    let body = format!("{loads}{op} %r6{args};\nst.global.b32 [%rd2], %r6;");
    let outcome = launch(&body, "", &bytes_of(operands), 4, Launch::new(1, 1));
    words(&outcome.unwrap_or_else(|e| panic!("{op}: {e}")).bytes)[0]
}
fn float(op: &str, operands: &[f32]) -> f32 {
    f32::from_bits(one(
        op,
        &operands.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
    ))
}
fn refused(body: &str, what: &str) {
    refused_with(
        body,
        "",
        Launch {
            shared_bytes: 4096,
            ..Launch::new(1, 64)
        },
        what,
    );
}
fn refused_with(body: &str, shared: &str, how: Launch, what: &str) {
    match launch(body, shared, &[0; 512], 512, how) {
        Ok(_) => panic!("{what}: should be refused"),
        Err(e) => assert!(e.to_string().contains(what), "{e}, not: {what}"),
    }
}
const NUMBERS: [u32; 9] = [
    0,
    1,
    2,
    7,
    31,
    0x7fff_ffff,
    0x8000_0000,
    0xdead_beef,
    u32::MAX,
];

#[test]
fn integers() {
    for a in NUMBERS {
        for b in NUMBERS {
            let (x, y) = (a as i32, b as i32);
            assert_eq!(one("add.s32", &[a, b]), a.wrapping_add(b));
            assert_eq!(one("sub.s32", &[a, b]), a.wrapping_sub(b));
            assert_eq!(one("mul.lo.s32", &[a, b]), a.wrapping_mul(b));
            assert_eq!(
                one("mul.hi.u32", &[a, b]),
                ((u64::from(a) * u64::from(b)) >> 32) as u32
            );
            assert_eq!(
                one("mul.hi.s32", &[a, b]),
                ((i64::from(x) * i64::from(y)) >> 32) as u32
            );
            assert_eq!(one("min.s32", &[a, b]) as i32, x.min(y));
            assert_eq!(one("max.u32", &[a, b]), a.max(b));
            assert_eq!(one("and.b32", &[a, b]), a & b);
            assert_eq!(one("or.b32", &[a, b]), a | b);
            assert_eq!(one("xor.b32", &[a, b]), a ^ b);
            assert_eq!(one("shl.b32", &[a, b]), if b < 32 { a << b } else { 0 });
            assert_eq!(one("shr.u32", &[a, b]), if b < 32 { a >> b } else { 0 });
            assert_eq!(one("shr.s32", &[a, b]) as i32, x >> b.min(31));
            assert_eq!(
                one("mad.lo.s32", &[a, b, 5]),
                a.wrapping_mul(b).wrapping_add(5)
            );
            if b != 0 {
                assert_eq!(one("div.u32", &[a, b]), a / b);
                assert_eq!(one("rem.s32", &[a, b]) as i32, x.wrapping_rem(y));
                assert_eq!(one("div.s32", &[a, b]) as i32, x.wrapping_div(y));
            }
            assert_eq!(one("shf.l.wrap.b32", &[a, b, 8]), b << 8 | a >> 24);
            assert_eq!(one("shf.r.clamp.b32", &[a, b, 40]), b);
            assert_eq!(one("prmt.b32", &[a, b, 0x5410]), (a & 0xffff) | b << 16);
            assert_eq!(
                words(
                    &launch(
                        &format!("prmt.b32 %r6, {a}, {b}, 0x7632U;\nst.global.b32 [%rd2], %r6;"),
                        "",
                        &[0; 4],
                        4,
                        Launch::new(1, 1)
                    )
                    .unwrap()
                    .bytes
                )[0],
                a >> 16 | (b & 0xffff_0000)
            );
        }
        assert_eq!(one("not.b32", &[a]), !a);
        assert_eq!(one("neg.s32", &[a]), a.wrapping_neg());
        assert_eq!(one("abs.s32", &[a]), (a as i32).wrapping_abs() as u32);
        assert_eq!(one("popc.b32", &[a]), a.count_ones());
        assert_eq!(one("clz.b32", &[a]), a.leading_zeros());
        assert_eq!(one("brev.b32", &[a]), a.reverse_bits());
        assert_eq!(one("bfe.u32", &[a, 4, 9]), a >> 4 & 511);
        assert_eq!(one("bfe.s32", &[a, 4, 9]) as i32, (a as i32) << 19 >> 23);
        assert_eq!(one("cvt.s32.s8", &[a]) as i32, i32::from(a as i8));
        assert_eq!(one("cvt.u32.u16", &[a]), a & 0xffff);
    }
    let wide = "mul.wide.s32 %rd3, %r2, -3;\nmad.wide.u32 %rd3, %r2, 4, %rd3;\ncvt.u64.u32 %rd4, \
        %r2;\n\
        add.s64 %rd3, %rd3, %rd4;\n\
                lop3.b32 %r3, %r2, 12, 10, 0xCA;\nbfi.b32 %r3, 3, %r3, 8, 2;\nst.global.b64 \
                [%rd2], %rd3;\n\
                st.global.b32 [%rd2+8], %r3;";
    let outcome = launch(wide, "", &[0; 4], 12, Launch::new(1, 1)).unwrap();
    assert_eq!(words(&outcome.bytes), [24, 0, 14 | 3 << 8]);
}

#[test]
fn floats() {
    let numbers = [
        0.0,
        -0.0,
        1.0,
        -2.5,
        3.7e-39,
        1e-30,
        65504.0,
        3e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    for a in numbers {
        for b in numbers {
            assert!(same(float("add.rn.f32", &[a, b]), a + b));
            assert!(same(float("sub.f32", &[a, b]), a - b));
            assert!(same(float("mul.rn.f32", &[a, b]), a * b));
            assert!(same(float("div.approx.f32", &[a, b]), a / b));
            assert!(same(float("fma.rn.f32", &[a, b, 1.0]), a.mul_add(b, 1.0)));
            assert_eq!(
                float("max.NaN.f32", &[a, b]).is_nan(),
                a.is_nan() || b.is_nan()
            );
            if !a.is_nan() || !b.is_nan() {
                assert!(a == 0.0 && b == 0.0 || same(float("max.f32", &[a, b]), a.max(b)));
                assert!(a == 0.0 && b == 0.0 || same(float("min.f32", &[a, b]), a.min(b)));
            }
        }
        assert!(same(float("neg.f32", &[a]), -a));
        assert!(same(float("abs.f32", &[a]), a.abs()));
        assert!(same(float("cvt.rmi.f32.f32", &[a]), a.floor()));
        assert!(same(float("cvt.rni.f32.f32", &[a]), a.round_ties_even()));
        assert_eq!(
            one("cvt.rzi.s32.f32", &[a.to_bits()]) as i32,
            a as i32,
            "{a}"
        );
        assert_eq!(one("cvt.rzi.u32.f32", &[a.to_bits()]), a as u32);
        assert_eq!(
            float("mul.ftz.f32", &[a, 1.0]).to_bits(),
            if a.is_subnormal() {
                0
            } else {
                (a * 1.0).to_bits()
            }
        );
    }
    assert!(
        same(float("max.f32", &[-0.0, 0.0]), 0.0) && same(float("min.f32", &[0.0, -0.0]), -0.0)
    );
    assert_eq!(one("cvt.rn.f32.s32", &[-7i32 as u32]), (-7f32).to_bits());
    assert_eq!(
        one("cvt.rn.f32.u32", &[u32::MAX]),
        (u32::MAX as f32).to_bits()
    );
    for x in [0.25f32, 1.0, 1.7, 9.0, 100.3] {
        let near = |op: &str, y: f64| {
            let z = float(op, &[x]);
            assert!(
                (f64::from(z) - y).abs() <= y.abs() * 6e-8,
                "{op} {x} = {z}, not {y}"
            );
        };
        let y = f64::from(x);
        near("ex2.approx.ftz.f32", y.exp2());
        near("lg2.approx.f32", y.log2());
        near("rsqrt.approx.f32", 1.0 / y.sqrt());
        near("sqrt.rn.f32", y.sqrt());
        near("rcp.approx.ftz.f32", 1.0 / y);
        near("tanh.approx.f32", y.tanh());
        near("sin.approx.f32", y.sin());
    }
    assert_eq!(
        one("copysign.f32", &[(-1f32).to_bits(), 3f32.to_bits()]),
        (-3f32).to_bits()
    );
    let double = "mov.b64 %rd3, 0d3FF8000000000000;\nfma.rn.f64 %rd3, %rd3, %rd3, %rd3;\n\
        cvt.rn.f32.f64 %r3, %rd3;\nst.global.b32 [%rd2], %r3;";
    assert_eq!(
        words(
            &launch(double, "", &[0; 4], 4, Launch::new(1, 1))
                .unwrap()
                .bytes
        ),
        [3.75f32.to_bits()]
    );
}

#[test]
fn halves() {
    let bf16 = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
    let f16 = |x: f32| u32::from(half::f16::from_f32(x).to_bits());
    let pair = |low: f32, high: f32| bf16(low) | bf16(high) << 16;
    // The first operand is the upper half.
    let x = 1.0 + 1.0 / 256.0;
    assert_eq!(
        one("cvt.rn.bf16x2.f32", &[3.3f32.to_bits(), f32::to_bits(x)]),
        bf16(x) | bf16(3.3) << 16
    );
    assert_eq!(
        one("cvt.rn.f16x2.f32", &[1e6f32.to_bits(), 0.1f32.to_bits()]),
        f16(0.1) | f16(1e6) << 16
    );
    assert_eq!(
        one(
            "cvt.rn.relu.bf16x2.f32",
            &[(-1f32).to_bits(), 2f32.to_bits()]
        ),
        pair(2.0, 0.0)
    );
    assert_eq!(one("cvt.f32.bf16", &[bf16(-3.25)]), (-3.25f32).to_bits());
    assert_eq!(one("cvt.f32.f16", &[f16(0.125)]), 0.125f32.to_bits());
    assert_eq!(one("cvt.rn.bf16.f32", &[0.7f32.to_bits()]), bf16(0.7));
    assert_eq!(
        one("add.rn.bf16x2", &[pair(1.0, 2.0), pair(3.0, 4.5)]),
        pair(4.0, 6.5)
    );
    assert_eq!(
        one("mul.rn.bf16x2", &[pair(1.5, 2.0), pair(3.0, -4.5)]),
        pair(4.5, -9.0)
    );
    assert_eq!(
        one("max.bf16x2", &[pair(1.5, -2.0), pair(3.0, -4.5)]),
        pair(3.0, -2.0)
    );
    assert_eq!(one("neg.bf16x2", &[pair(1.5, -2.0)]), pair(-1.5, 2.0));
    // For sm_100: halves times halves plus f32, halves plus f32, and pairs of f32.
    assert_eq!(
        one(
            "fma.rn.f32.bf16",
            &[bf16(1.5), bf16(-3.0), 0.1f32.to_bits()]
        ),
        (1.5f32.mul_add(-3.0, 0.1)).to_bits()
    );
    assert_eq!(
        one("sub.rn.f32.f16", &[f16(1.5), 0.1f32.to_bits()]),
        (1.5f32 - 0.1).to_bits()
    );
    let pairs = "mov.b64 %rd3, {%r1, %r2};\nmov.b32 %r3, 0f40000000;\nmov.b64 %rd4, {0f3F800000, \
        %r3};\n\
        add.rn.f32x2 %rd5, %rd4, %rd4;\n\
                 fma.rn.f32x2 %rd5, %rd5, %rd4, %rd4;\nst.global.b64 [%rd2], %rd5;";
    let outcome = launch(pairs, "", &[0; 4], 8, Launch::new(1, 1)).unwrap();
    assert_eq!(words(&outcome.bytes), [3f32.to_bits(), 10f32.to_bits()]);
    // Rounded once: 1.0078125² is halfway between two numbers of bf16, and a small number decides.
    let y = 1.0 + 1.0 / 128.0;
    for tiny in [2f32.powi(-60), -(2f32.powi(-60))] {
        let near = f64::from(y) * f64::from(y);
        let up = bf16((near as f32) * (1.0 + tiny.signum() * 2f32.powi(-20)));
        assert_eq!(
            one(
                "fma.rn.bf16x2",
                &[pair(y, 1.0), pair(y, 1.0), pair(tiny, 0.5)]
            ),
            up | bf16(1.5) << 16
        );
    }
}

#[test]
fn predicates_and_branches() {
    // Every thread sums the odd numbers below its own number, so loops have different lengths.
    let body = "mov.b32 %r3, 0;\nmov.b32 %r4, 0;\n$L__BB0_1:\nsetp.ge.u32 %p1, %r3, %r1;\n@%p1 \
        bra $L__BB0_3;\n\
        and.b32 %r5, %r3, 1;\n\
                setp.eq.b32 %p2, %r5, 1;\n@!%p2 bra $L__BB0_2;\nadd.s32 %r4, %r4, \
                %r3;\n$L__BB0_2:\n\
                add.s32 %r3, %r3, 1;\n\
                bra.uni $L__BB0_1;\n$L__BB0_3:\nsetp.lt.and.s32 %p3, %r1, 9, %p1;\nselp.b32 %r4, \
                %r4, 77, %p3;\n\
                mul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd2, %rd3;\nst.global.b32 [%rd4], %r4;";
    let outcome = of_warp(body, "", &[0; 4], 128).unwrap();
    let sum = |n: u32| {
        if n < 9 {
            (0..n).filter(|i| i % 2 == 1).sum()
        } else {
            77
        }
    };
    assert_eq!(
        words(&outcome.bytes),
        (0..32).map(sum).collect::<Vec<u32>>()
    );
    // A table of places to jump to: by the thread's number modulo 4.
    let table = "and.b32 %r3, %r1, 3;\n$L_brx_0: .branchtargets\n$L_a,\n$L_b,\n$L_a,\n$L_c;\n\
                 brx.idx %r3, $L_brx_0;\n\
                 $L_a:\nmov.b32 %r4, 10;\nbra.uni $L_end;\n\
                 $L_b:\nmov.b32 %r4, 11;\nbra.uni $L_end;\n\
                 $L_c:\nmov.b32 %r4, 12;\n$L_end:\n\
                 mul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd2, %rd3;\nst.global.b32 [%rd4], %r4;";
    let outcome = of_warp(table, "", &[0; 4], 128).unwrap();
    let jumped = (0..32).map(|n| [10, 11, 10, 12][n % 4]);
    assert_eq!(words(&outcome.bytes), jumped.collect::<Vec<u32>>());
    let beyond = table.replace("and.b32 %r3, %r1, 3", "add.s32 %r3, %r1, 1");
    refused(&beyond, "jumps behind its last target");
    // A comparison with NaN is false, unless it is an unordered one (`ltu`).
    let nan = |op: &str| {
        let body = format!(
            "setp.{op}.f32 %p1, 0f7FC00000, 0f3F800000;\nselp.b32 %r3, 1, 0, %p1;\nst.global.b32 \
             [%rd2], %r3;"
        );
        words(
            &launch(&body, "", &[0; 4], 4, Launch::new(1, 1))
                .unwrap()
                .bytes,
        )[0]
    };
    assert_eq!(
        ["lt", "ge", "ne", "eq", "ltu", "neu", "nan", "num"].map(nan),
        [0, 0, 0, 0, 1, 1, 1, 0]
    );
}

#[test]
fn a_grid_adds_tensors() {
    let body = "mov.u32 %r3, %ctaid.x;\nmov.u32 %r4, %ntid.x;\nmad.lo.s32 %r5, %r3, %r4, %r1;\n\
        mul.wide.u32 %rd3, %r5, 16;\n\
                add.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n\
                ld.global.nc.v4.b32 {%r6, %r7, %r8, %r9}, [%rd4];\n\
                add.rn.f32 %r6, %r6, 0f3F800000;\nadd.rn.f32 %r7, %r7, %r7;\n\
                st.global.v4.b32 [%rd5], {%r6, %r7, %r8, _};";
    let body = body.replace(", _}", ", %r9}");
    let input: Vec<f32> = (0..256).map(|i| i as f32).collect();
    let bytes: Vec<u8> = input.iter().flat_map(|x| x.to_le_bytes()).collect();
    let outcome = launch(&body, "", &bytes, 1024, Launch::new(2, 32)).unwrap();
    let expected = input
        .iter()
        .enumerate()
        .map(|(i, x)| [x + 1.0, x + x, *x, *x][i % 4].to_bits());
    assert_eq!(words(&outcome.bytes), expected.collect::<Vec<_>>());
    assert_eq!(
        (outcome.stats.wide_loads, outcome.stats.wide_stores),
        (64, 64)
    );
    assert_eq!(
        (outcome.stats.narrow_loads, outcome.stats.narrow_stores),
        (0, 0)
    );
}

#[test]
fn shuffles_and_votes() {
    let store = "mul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd2, %rd3;\nst.global.b32 [%rd4], %r6;";
    let of = |op: &str| {
        words(
            &of_warp(&format!("{op}\n{store}"), "", &[0; 4], 128)
                .unwrap()
                .bytes,
        )
    };
    let lanes = |f: fn(u32) -> u32| (0..32).map(f).collect::<Vec<_>>();
    assert_eq!(
        of("shfl.sync.bfly.b32 %r6, %r1, 5, 31, -1;"),
        lanes(|i| i ^ 5)
    );
    assert_eq!(
        of("shfl.sync.up.b32 %r6, %r1, 3, 0, -1;"),
        lanes(|i| if i < 3 { i } else { i - 3 })
    );
    assert_eq!(
        of("shfl.sync.down.b32 %r6, %r1, 3, 31, -1;"),
        lanes(|i| if i < 29 { i + 3 } else { i })
    );
    assert_eq!(of("shfl.sync.idx.b32 %r6, %r1, 9, 31, -1;"), lanes(|_| 9));
    // Segments of 8 lanes: the mask is in bits 8 to 12.
    assert_eq!(
        of("shfl.sync.idx.b32 %r6, %r1, 1, 0x181f, -1;"),
        lanes(|i| i / 8 * 8 + 1)
    );
    assert_eq!(
        of("shfl.sync.down.b32 %r6, %r1, 1, 0x181f, -1;"),
        lanes(|i| if i % 8 < 7 { i + 1 } else { i })
    );
    assert_eq!(
        of("setp.lt.u32 %p1, %r1, 5;\nvote.sync.ballot.b32 %r6, %p1, -1;"),
        lanes(|_| 31)
    );
    assert_eq!(
        of("setp.lt.u32 %p1, %r1, 5;\nvote.sync.any.pred %p2, %p1, -1;\nselp.b32 %r6, 1, 0, %p2;"),
        lanes(|_| 1)
    );
    // One half of a warp diverges from the other.
    let apart = "setp.lt.u32 %p1, %r1, 16;\nmov.b32 %r6, 99;\n@!%p1 bra $L;\nshfl.sync.bfly.b32 \
        %r6, %r1, 1, 31, 0xffff;\n$L:";
    assert_eq!(of(apart), lanes(|i| if i < 16 { i ^ 1 } else { 99 }));
}

#[test]
fn atomics() {
    let body = "setp.eq.u32 %p1, %r1, 0;\n@%p1 st.global.b32 [%rd2], 0;\n@%p1 st.global.b32 \
        [%rd2+4], 0;\n\
        bar.warp.sync -1;\n\
                red.global.add.u32 [%rd2], %r1;\natom.global.max.u32 %r3, [%rd2+4], %r1;";
    assert_eq!(
        words(&of_warp(body, "", &[0; 4], 8).unwrap().bytes),
        [496, 31]
    );
}

/// Numbers of 16 bits in memory.
fn small(i: usize) -> f32 {
    ((i * 37 + 11) % 17) as f32 - 8.0
}

/// Fragments by the formulas of the PTX ISA, 9.7.14.5.8; products by plain loops.
#[test]
fn products_of_matrices() {
    let (a, b, c) = (
        |m: usize, k: usize| small(m * 16 + k),
        |k: usize, n: usize| small(500 + k * 8 + n),
        |m: usize, n: usize| small(900 + m * 8 + n),
    );
    let bits = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
    let mut input = vec![];
    for lane in 0..32 {
        let (group, place) = (lane >> 2, lane % 4);
        for j in 0..4 {
            // a_i: row = group for i in 0, 1, 4, 5, else group + 8; column = 2·place + (i & 1), and
            // 8 more from i = 4.
            let at = |i: usize| {
                let row = if i < 2 || 4 <= i && i < 6 {
                    group
                } else {
                    group + 8
                };
                bits(a(row, place * 2 + (i & 1) + if 4 <= i { 8 } else { 0 }))
            };
            input.push(at(2 * j) | at(2 * j + 1) << 16);
        }
        for j in 0..2 {
            let at = |i: usize| bits(b(place * 2 + (i & 1) + if 2 <= i { 8 } else { 0 }, group));
            input.push(at(2 * j) | at(2 * j + 1) << 16);
        }
        for i in 0..4 {
            input.push(c(if i < 2 { group } else { group + 8 }, place * 2 + (i & 1)).to_bits());
        }
        input.extend([0, 0]);
    }
    let body = "mul.wide.u32 %rd3, %r1, 48;\nadd.s64 %rd4, %rd1, %rd3;\n\
        ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd4];\n\
                ld.global.v4.b32 {%r14, %r15, %r16, %r17}, [%rd4+16];\nld.global.v2.b32 {%r18, \
                %r19}, [%rd4+32];\n\
                mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32\n\t{%r20, %r21, %r22, %r23},\n\
                \t{%r10, %r11, %r12, %r13},\n\
                \t{%r14, %r15},\n\t{%r16, %r17, %r18, %r19};\nmul.wide.u32 %rd5, %r1, \
                16;\nadd.s64 %rd6, %rd2, %rd5;\n\
                st.global.v4.b32 [%rd6], {%r20, %r21, %r22, %r23};";
    let outcome = of_warp(body, "", &bytes_of(&input), 512).unwrap();
    let found = words(&outcome.bytes);
    for lane in 0..32 {
        for i in 0..4 {
            let (row, column) = (
                if i < 2 { lane >> 2 } else { (lane >> 2) + 8 },
                lane % 4 * 2 + (i & 1),
            );
            let expected: f32 =
                (0..16).map(|k| a(row, k) * b(k, column)).sum::<f32>() + c(row, column);
            assert_eq!(
                f32::from_bits(found[4 * lane + i]),
                expected,
                "row {row}, column {column}"
            );
        }
    }
    assert_eq!(outcome.stats.mmas, 1);
}

const DYNAMIC: &str = ".extern .shared .align 16 .b8 sm[];";

/// Each thread copies 16 bytes by `cp.async`; then matrices are loaded.
fn matrices(n: usize, transposed: bool) -> Vec<u32> {
    let registers = ["%r10", "%r11", "%r12", "%r13"][..n].join(", ");
    let trans = if transposed { ".trans" } else { "" };
    let stores: String = (0..n)
        .map(|i| format!("st.global.b32 [%rd6+{}], %r{};\n", 4 * i, 10 + i))
        .collect();
    let body = format!(
        "mov.b64 %rd3, sm;\nmul.wide.u32 %rd4, %r1, 16;\nadd.s64 %rd5, %rd3, %rd4;\nadd.s64 %rd7, \
         %rd1, %rd4;\n\
         cp.async.cg.shared.global [%rd5+16], [%rd7], \
         16;\ncp.async.commit_group;\ncp.async.wait_group 0;\n\
             bar.sync 0;\n\
         ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{registers}}}, [%rd5+16];\n\
         add.s64 %rd6, %rd2, %rd4;\n{stores}"
    );
    let input: Vec<u8> = (0..256u16).flat_map(|i| i.to_le_bytes()).collect();
    let outcome = of_warp(&body, DYNAMIC, &input, 512).unwrap();
    assert_eq!(
        (outcome.stats.matrices, outcome.stats.bank_conflicts),
        (n as u64, 0)
    );
    assert_eq!(outcome.stats.wide_loads, 32);
    words(&outcome.bytes)
}

#[test]
fn matrices_from_shared_memory() {
    for n in [1, 2, 4] {
        for transposed in [false, true] {
            let found = matrices(n, transposed);
            for lane in 0..32 {
                for j in 0..n {
                    // Matrix j has row r in chunk 8j + r; number (r, c) is 64j + 8r + c.
                    let at = |i: usize| {
                        let (row, column) = (lane / 4, 2 * (lane % 4) + i);
                        (64 * j
                            + if transposed {
                                8 * column + row
                            } else {
                                8 * row + column
                            }) as u32
                    };
                    assert_eq!(
                        found[4 * lane + j],
                        at(0) | at(1) << 16,
                        "x{n}, lane {lane}, matrix {j}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_in_one_bank_are_counted() {
    let body = "mov.b64 %rd3, sm;\nmul.wide.u32 %rd4, %r1, 128;\nadd.s64 %rd5, %rd3, %rd4;\n\
        st.shared.v4.b32 [%rd5], {%r1, %r1, %r1, %r1};\n\
                bar.warp.sync -1;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, \
                %r13}, [%rd5];";
    assert_eq!(
        of_warp(body, DYNAMIC, &[0; 4], 4)
            .unwrap()
            .stats
            .bank_conflicts,
        4 * 7
    );
}

#[test]
fn a_short_copy_fills_with_zeros() {
    let body = "mov.b64 %rd3, sm;\ncp.async.ca.shared.global [%rd3], [%rd1], 16, \
        8;\ncp.async.wait_all;\n\
                ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%rd3];\nst.global.v4.b32 [%rd2], {%r3, \
                %r4, %r5, %r6};";
    let outcome = launch(
        body,
        DYNAMIC,
        &bytes_of(&[1, 2, 3, 4]),
        16,
        Launch {
            shared_bytes: 64,
            ..Launch::new(1, 1)
        },
    );
    assert_eq!(words(&outcome.unwrap().bytes), [1, 2, 0, 0]);
}

#[test]
fn static_shared_and_local_memory() {
    let body = ".local .align 8 .b8 depot[16];\nmov.b64 %rd8, depot;\ncvta.local.u64 %rd7, %rd8;\n\
        st.local.b32 [%rd8+4], %r1;\n\
                ld.b32 %r3, [%rd7+4];\nmov.b64 %rd3, buffer;\nmul.wide.u32 %rd4, %r1, 4;\nadd.s64 \
                %rd5, %rd3, %rd4;\n\
                st.shared.b32 [%rd5], %r3;\nbar.sync 0;\nld.shared.b32 %r4, [buffer+12];\nadd.s64 \
                %rd6, %rd2, %rd4;\n\
                st.global.b32 [%rd6], %r4;";
    let shared = ".shared .align 16 .b8 first[4];\n.shared .align 4 .b8 buffer[128];";
    assert_eq!(
        words(&of_warp(body, shared, &[0; 4], 128).unwrap().bytes),
        [3; 32]
    );
}

#[test]
fn what_is_not_known_is_named() {
    refused(
        "wgmma.fence.sync.aligned;",
        "the instruction wgmma.fence.sync.aligned is not known",
    );
    refused(
        "add.rz.f32 %r3, %r3, %r3;",
        "the modifier .rz of add is not known",
    );
    refused("mov.u32 %r3, %clock;", "the operand %clock is not known");
    refused("bra $L;", "no label $L");
    refused("brx.idx %r1, $L;", "no targets $L");
    refused("add.s32 %r3, %r3;", "2 operands");
    let e = run(
        &text("", ""),
        "other",
        &Launch::new(1, 1),
        &[],
        &mut Memory::new(),
    )
    .unwrap_err();
    assert_eq!(e.to_string(), "there is no such kernel (other)");
    refused_with(
        "",
        "",
        Launch::new(1, 256),
        "256 threads where .maxntid is Some(128)",
    );
}

#[test]
fn accesses_stay_inside_and_aligned() {
    refused(
        "ld.global.b32 %r3, [%rd1+512];",
        "out of bounds: byte 512 of tensor 0",
    );
    refused(
        "ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd1+8];",
        "no multiple of 16",
    );
    refused("ld.global.b32 %r3, [%rd1+-4];", "in no tensor");
    refused(
        "st.global.v2.b32 [%rd2+508], {%r3, %r4};",
        "no multiple of 8",
    );
    let shared = "mov.b64 %rd3, sm;\nst.shared.b32 [%rd3+4096], %r1;";
    refused_with(
        shared,
        DYNAMIC,
        Launch {
            shared_bytes: 4096,
            ..Launch::new(1, 1)
        },
        "byte 4096 of shared memory",
    );
}

#[test]
fn races_are_reported() {
    let how = Launch {
        shared_bytes: 4096,
        ..Launch::new(1, 64)
    };
    let base = "mov.b64 %rd3, sm;\nmul.wide.u32 %rd4, %r1, 4;\nadd.s64 %rd5, %rd3, %rd4;\n";
    let neighbour =
        "xor.b32 %r3, %r1, LANE;\nmul.wide.u32 %rd6, %r3, 4;\nadd.s64 %rd7, %rd3, %rd6;\n";
    let body = |barrier: &str, lane: &str| {
        let neighbour = neighbour.replace("LANE", lane);
        format!(
            "{base}{neighbour}st.shared.b32 [%rd5], %r1;\n{barrier}\nld.shared.b32 %r4, [%rd7];"
        )
    };
    assert!(launch(&body("bar.sync 0;", "32"), DYNAMIC, &[0; 4], 4, how).is_ok());
    assert!(launch(&body("bar.warp.sync -1;", "1"), DYNAMIC, &[0; 4], 4, how).is_ok());
    refused_with(
        &body("bar.warp.sync -1;", "32"),
        DYNAMIC,
        how,
        "reads shared memory that nobody wrote",
    );
    // Here, warp 1 runs after warp 0, and reads its bytes.
    refused_with(
        &body("", "1"),
        DYNAMIC,
        how,
        "reads shared memory that nobody wrote",
    );
    refused_with(
        &format!("{base}st.shared.b32 [%rd3], %r1;"),
        DYNAMIC,
        how,
        "a race: writes what thread 0",
    );
    let after = format!(
        "{base}st.shared.b32 [%rd5], %r1;\nbar.sync 0;\nld.shared.b32 %r4, [%rd3];\nst.shared.b32 \
         [%rd5], %r1;"
    );
    refused_with(&after, DYNAMIC, how, "a race");
    refused("st.global.b32 [%rd2], %r1;", "a race: writes what thread 0");
    refused_with(
        "st.global.b32 [%rd2], %r1;",
        "",
        Launch::new(2, 1),
        "a race: writes what thread 0 of block 0 writes",
    );
    let early = format!(
        "{base}mul.wide.u32 %rd8, %r1, 4;\nadd.s64 %rd9, %rd1, %rd8;\ncp.async.ca.shared.global \
         [%rd5], [%rd9], 4;\n\
                         cp.async.commit_group;\nWAIT\nld.shared.b32 %r4, \
                         [%rd5];\ncp.async.wait_all;"
    );
    refused_with(
        &early.replace("WAIT", ""),
        DYNAMIC,
        how,
        "reads what cp.async of thread 0 may still write",
    );
    refused_with(
        &early.replace("WAIT", "cp.async.wait_group 1;"),
        DYNAMIC,
        how,
        "may still write",
    );
    assert!(
        launch(
            &early.replace("WAIT", "cp.async.wait_group 0;"),
            DYNAMIC,
            &[0; 512],
            4,
            how
        )
        .is_ok()
    );
}

#[test]
fn warps_and_blocks_stay_together() {
    refused(
        "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $L;\nbar.sync 0;\n$L:",
        "bar.sync",
    );
    refused(
        "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $L;\nshfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;\nbra \
         $M;\n$L:\n\
            bar.warp.sync -1;\n$M:",
        "wait for each other",
    );
    refused(
        "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $L;\n\
            mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r3, %r4, %r5, %r6}, \
             {%r3, %r4, %r5, %r6}, {%r3, %r4}, {%r3, %r4, %r5, %r6};\n$L:",
        "27 threads",
    );
}

#[test]
fn a_parsed_kernel_runs_often_and_says_what_it_touched() {
    // Thread i copies the i-th number of `in` to `out`: two threads, tensors of four numbers.
    let body = "mul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n\
                ld.global.b32 %r4, [%rd4];\nst.global.b32 [%rd5], %r4;";
    let kernels = parse(&text(body, "")).unwrap();
    let [kernel] = &kernels[..] else {
        panic!("the text has one kernel");
    };
    assert_eq!(kernel.name(), "k");
    assert_eq!(kernel.parameter_bytes().collect::<Vec<_>>(), [8, 8, 4]);
    let (from, to) = (1 << 40, (1 << 40) + 512);
    let mut memory = Memory::new();
    memory.place(to, vec![0; 16]);
    memory.place(from, bytes_of(&[3, 4, 5, 6]));
    for _ in 0..2 {
        let params = [Param::U64(from), Param::U64(to), Param::U32(0)];
        let ran = kernel.run(&Launch::new(1, 2), &params, &mut memory);
        let access = |address, writes: bool| Access {
            address,
            bytes: 8,
            reads: !writes,
            writes,
        };
        assert_eq!(ran.unwrap().1, [access(from, false), access(to, true)]);
    }
    assert_eq!(memory.slice(to + 4, 8).unwrap(), bytes_of(&[4, 0]));
    assert!(memory.slice(to + 12, 8).is_none(), "behind the last byte");
    assert_eq!(memory.remove(to).unwrap(), bytes_of(&[3, 4, 0, 0]));
    assert!(memory.slice(to, 4).is_none());
}

#[test]
fn every_kernel_of_a_text_is_parsed_or_refused() {
    let twice = text("", "") + &text("", "").replace("entry k(", "entry k2(");
    let names = |text: &str| -> Result<Vec<String>, Error> {
        let kernels = parse(text)?;
        Ok(kernels.iter().map(|k| k.name().to_string()).collect())
    };
    assert_eq!(names(&twice).unwrap(), ["k", "k2"]);
    let unknown = twice.clone() + &text("frobnicate.b32 %r3;", "");
    assert!(names(&unknown).unwrap_err().what.contains("frobnicate"));
}
