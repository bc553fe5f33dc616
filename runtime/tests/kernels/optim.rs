//! Optimizers bit for bit: compared with one number at a time, and on any number of threads.

use super::generate::{Rng, statistics};
use artifact::DType;
use half::bf16;
use lighterage_runtime::Team;
use lighterage_runtime::kernels::owned::{OwnedTensor, Run, run_op};

/// More than two parts, and not a multiple of anything.
const LONG: usize = 150_001;
const HYPER: [f64; 5] = [0.01, 0.9, 0.95, 1e-6, 0.1];

fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = Rng(seed);
    // Numbers of every magnitude, including subnormal numbers, infinities and NaNs.
    let number = |_| match rng.below(50) {
        0 => rng.pick(&[
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.0,
            -0.0,
            f32::MAX,
            f32::MIN_POSITIVE,
        ]),
        1 => f32::from_bits(rng.below(1 << 32) as u32),
        _ => (rng.below(2001) as f32 - 1000.0) * 2f32.powi(rng.below(24) as i32 - 16),
    };
    (0..n).map(number).collect()
}

fn tensor(x: &[f32]) -> OwnedTensor {
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    OwnedTensor::from_bytes(DType::F32, &[x.len()], &bytes)
}

fn floats(x: &OwnedTensor) -> Vec<f32> {
    x.bytes()
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

/// Bits; all NaNs are equal, because the bits of an operation's NaN depend on the machine.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter()
        .map(|x| {
            if x.is_nan() {
                f32::NAN.to_bits()
            } else {
                x.to_bits()
            }
        })
        .collect()
}

fn hyper(values: &[f64]) -> OwnedTensor {
    OwnedTensor::from_f64s(DType::F64, &[values.len()], values)
}

fn step(k: i64) -> OwnedTensor {
    OwnedTensor::from_i64s(DType::I64, &[], &[k])
}

/// AdamW as in PyTorch's `_single_tensor_adamw`, one number at a time.
fn adamw(p: f32, g: f32, m: f32, v: f32, k: i32) -> [f32; 3] {
    let [lr, beta1, beta2, eps, decay] = HYPER;
    let step_size = lr / (1.0 - beta1.powf(k.into()));
    let correction2 = (1.0 - beta2.powf(k.into())).sqrt();
    let m = ((1.0 - beta1) as f32).mul_add(g - m, m);
    let v = ((1.0 - beta2) as f32 * g).mul_add(g, v * beta2 as f32);
    let denominator = v.sqrt() / correction2 as f32 + eps as f32;
    [
        p * (1.0 - lr * decay) as f32 + -step_size as f32 * m / denominator,
        m,
        v,
    ]
}

#[test]
fn adamw_is_one_number_at_a_time() {
    for n in [1, 7, 8, 255, 4097, LONG] {
        let [p, g, m, v] = [1, 2, 3, 4].map(|seed| numbers(seed, n));
        let ins = [&p, &g, &m, &v].map(|x| tensor(x));
        let results = run_op(
            "adamw",
            &[],
            &[&ins[0], &ins[1], &ins[2], &ins[3], &step(3), &hyper(&HYPER)],
            &vec![(DType::F32, vec![n]); 3],
            0,
        )
        .unwrap();
        for (j, result) in results.iter().enumerate() {
            let expected: Vec<f32> = (0..n)
                .map(|i| adamw(p[i], g[i], m[i], v[i], 3)[j])
                .collect();
            assert!(
                bits(&floats(result)) == bits(&expected),
                "result {j} of {n}"
            );
        }
    }
}

/// Every update, in place or not, gives the same result on a team as on one thread.
#[test]
fn threads_change_no_bit() {
    let teams = [2, 3, 7].map(|threads| Team::new(threads).unwrap());
    for kernel in lighterage_runtime::kernels::KERNELS
        .iter()
        .filter(|kernel| kernel.name.starts_with("adamw") || kernel.name.starts_with("sgd"))
    {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let halves = kernel.name == "adamw_split";
            if halves && dtype != DType::BF16 {
                continue;
            }
            let numbers = |seed: u64, (dtype, n): (DType, usize)| {
                let x: Vec<f64> = numbers(seed, n).into_iter().map(f64::from).collect();
                OwnedTensor::from_f64s(dtype, &[n], &x)
            };
            let blocks = (DType::F32, LONG.div_ceil(256));
            let of = |types: &[DType]| types.iter().map(|&t| (t, LONG)).collect::<Vec<_>>();
            let types = match kernel.name {
                "adamw" => of(&[dtype; 4]),
                "adamw_split" => {
                    of(&[DType::BF16, DType::BF16, DType::I16, DType::F32, DType::F32])
                }
                "adamw_8bit" => {
                    [of(&[dtype, dtype, DType::U8, DType::U8]), vec![blocks; 2]].concat()
                }
                "sgd" => of(&[dtype; 2]),
                "sgd_momentum" => of(&[dtype; 3]),
                other => panic!("{other} needs operands here"),
            };
            let mut ins: Vec<OwnedTensor> = types
                .iter()
                .enumerate()
                .map(|(i, &ty)| numbers(i as u64, ty))
                .collect();
            let outs: Vec<_> = types
                .iter()
                .enumerate()
                .filter(|(i, _)| *i != 1)
                .map(|(_, &(t, n))| (t, vec![n]))
                .collect();
            if kernel.name.starts_with("adamw") {
                ins.extend([step(2), hyper(&HYPER)]);
            } else {
                ins.push(hyper(&[0.1, 0.9, 0.01]));
            }
            ins.push(OwnedTensor::from_f64s(statistics(dtype), &[], &[0.7]));
            let ins: Vec<&OwnedTensor> = ins.iter().collect();
            for pairs in [&[][..], kernel.inplace] {
                let run = |team| {
                    let mut run = Run::new(kernel.name, &[], &ins, &outs, 0, pairs).unwrap();
                    (0..2).for_each(|_| run.run_on(team, || {}).unwrap());
                    run.results
                        .iter()
                        .map(OwnedTensor::bytes)
                        .collect::<Vec<_>>()
                };
                let alone = run(None);
                for team in &teams {
                    assert!(
                        run(Some(team)) == alone,
                        "{} of {dtype:?}, {} threads",
                        kernel.name,
                        team.threads()
                    );
                }
            }
        }
    }
}

/// Masters in halves behave like an f32 master: after 40 steps of both, the bits are equal, and the
/// parameter is the nearest bf16 of the master.
#[test]
fn halves_follow_an_f32_master() {
    let n = 3000;
    let start: Vec<f32> = numbers(9, n)
        .iter()
        .map(|&x| bf16::from_f32(x).to_f32())
        .filter(|x| x.is_finite())
        .collect();
    let n = n.min(start.len());
    let (mut master, mut m, mut v) = (
        tensor(&start),
        OwnedTensor::zeros(DType::F32, &[n]),
        OwnedTensor::zeros(DType::F32, &[n]),
    );
    let wide: Vec<f64> = start.iter().map(|&x| x.into()).collect();
    let mut state = vec![
        OwnedTensor::from_f64s(DType::BF16, &[n], &wide),
        OwnedTensor::zeros(DType::I16, &[n]),
        OwnedTensor::zeros(DType::F32, &[n]),
        OwnedTensor::zeros(DType::F32, &[n]),
    ];
    let types = [DType::BF16, DType::I16, DType::F32, DType::F32].map(|t| (t, vec![n]));
    for k in 1..=40 {
        let g: Vec<f64> = numbers(100 + k, n)
            .iter()
            .map(|&x| if x.is_finite() { x.into() } else { 0.5 })
            .collect();
        let g = OwnedTensor::from_f64s(DType::BF16, &[n], &g);
        let wide = OwnedTensor::from_f64s(DType::F32, &[n], &g.to_f64s());
        let (step, hyper) = (step(k as i64), hyper(&HYPER));
        let plain = run_op(
            "adamw",
            &[],
            &[&master, &wide, &m, &v, &step, &hyper],
            &vec![(DType::F32, vec![n]); 3],
            0,
        );
        [master, m, v] = plain.unwrap().try_into().unwrap();
        let ins = [
            &state[0], &g, &state[1], &state[2], &state[3], &step, &hyper,
        ];
        state = run_op("adamw_split", &[], &ins, &types, 0).unwrap();
        assert!(
            state[2].bytes() == m.bytes() && state[3].bytes() == v.bytes(),
            "moments, step {k}"
        );
        let halves = state[0]
            .bytes()
            .into_iter()
            .zip(state[1].bytes())
            .collect::<Vec<_>>();
        for (i, master) in floats(&master).into_iter().enumerate() {
            let [(h0, l0), (h1, l1)] = [halves[2 * i], halves[2 * i + 1]];
            let (high, low) = (u16::from_le_bytes([h0, h1]), u16::from_le_bytes([l0, l1]));
            let joined = (u32::from(high) << 16).wrapping_add_signed(i32::from(low as i16));
            assert_eq!(
                joined,
                master.to_bits(),
                "step {k}: {master} is {high:#x} and {low:#x}"
            );
            let nearest = bf16::from_f32(master);
            let tie = master.to_bits() & 0xFFFF == 0x8000;
            assert!(high == nearest.to_bits() || tie, "step {k}: {master}");
        }
    }
}
