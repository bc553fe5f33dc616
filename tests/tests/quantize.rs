//! Numbers in blocks of codes, bit for bit as the library bitsandbytes has them:
//! `data/quantize/gen_quantize.py` writes its side.

use artifact::DType;
use codegen::Data;
use ir::op::OpKind;
use ir::text::parse_graph;
use ir::{Graph, StateKind};
use lighterage_tests::run::{self, Peaks};
use passes::cost::Roofline;
use passes::decide::Planner;
use passes::devices;
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::graph::quantize::{Base, STATES};
use passes::pipeline::{self, Budget, Compiled, Error, Kernels, Options};
use runtime::kernels::blocks::Nf4;
use runtime::kernels::owned::{OwnedTensor, run_op};
use safetensors::SafeTensors;
use std::path::Path;

struct Theirs(Vec<u8>);

impl Theirs {
    fn read() -> Theirs {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/quantize/quantize.safetensors");
        Theirs(std::fs::read(path).unwrap())
    }
    fn bytes(&self, name: &str) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap().data().to_vec()
    }
    fn floats(&self, name: &str) -> Vec<f32> {
        floats(&self.bytes(name))
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.as_chunks().0.iter();
    chunks.map(|b| f32::from_le_bytes(*b)).collect()
}

fn tensor(numbers: &[f32]) -> OwnedTensor {
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    OwnedTensor::from_bytes(DType::F32, &[numbers.len()], &bytes)
}

/// An update of zeros by `adamw_8bit` from moments in codes; `hyper` is the rate, the betas, eps
/// and the decay.
fn update(gradient: &[f32], moments: [&OwnedTensor; 4], hyper: [f64; 5]) -> Vec<OwnedTensor> {
    let n = gradient.len();
    let of = |t: &OwnedTensor| (t.dtype(), t.shape().to_vec());
    let p = OwnedTensor::zeros(DType::F32, &[n]);
    let mut outs = vec![of(&p)];
    outs.extend(moments.map(of));
    let step = OwnedTensor::from_i64s(DType::I64, &[], &[1]);
    let hyper = OwnedTensor::from_f64s(DType::F64, &[5], &hyper);
    let [m, v, lm, lv] = moments;
    let ins = [&p, &tensor(gradient), m, v, lm, lv, &step, &hyper];
    run_op("adamw_8bit", &[], &ins, &outs, 0).unwrap()
}

/// With betas of 0, the moments are the gradient and its square.
#[test]
fn moments_have_bitsandbytes_codes() {
    let theirs = Theirs::read();
    for (name, moment) in [("signed", 0), ("unsigned", 1)] {
        let of = |part: &str| format!("{name}.{part}");
        let x = theirs.floats(&of("x"));
        let (n, blocks) = (x.len(), x.len().div_ceil(256));
        let codes = OwnedTensor::zeros(DType::U8, &[n]);
        let largest = OwnedTensor::zeros(DType::F32, &[blocks]);
        let gradient: Vec<f32> = match moment {
            0 => x.clone(),
            _ => x.iter().map(|x| x.sqrt()).collect(),
        };
        // A second moment is the square of a root, which may be a neighbour of the number.
        let nothing = [&codes, &codes, &largest, &largest];
        let new = update(&gradient, nothing, [0.0, 0.0, 0.0, 1.0, 0.0]);
        let sizes = theirs.floats(&of("largest"));
        for (ours, size) in floats(&new[3 + moment].bytes()).into_iter().zip(&sizes) {
            assert!(
                (ours - size).abs() <= moment as f32 * 1e-7 * size,
                "{ours} is {size}"
            );
        }
        // Its code for processors takes -1 for the lowest number of a map, where that for GPUs
        // takes -0.993, or 0: numbers near the lowest one have another neighbour there.
        let lowest = [-0.986, 1.7e-7][moment];
        let pairs = new[1 + moment]
            .bytes()
            .into_iter()
            .zip(theirs.bytes(&of("codes")));
        let scaled = x.iter().enumerate().map(|(i, x)| x / sizes[i / 256]);
        let compared: Vec<_> = pairs.zip(scaled).filter(|(_, x)| *x > lowest).collect();
        assert!(
            compared.len() * 10 > n * 9,
            "{name}: only {} numbers",
            compared.len()
        );
        for ((ours, theirs), x) in compared {
            assert_eq!(ours, theirs, "{name}, {x:e}");
        }
    }
}

/// With these options and no gradient the new parameter is the first moment, negative.
#[test]
fn codes_are_bitsandbytes_numbers() {
    let theirs = Theirs::read();
    let codes = theirs.bytes("signed.codes");
    let (n, blocks) = (codes.len(), codes.len().div_ceil(256));
    let codes = OwnedTensor::from_bytes(DType::U8, &[n], &codes);
    let largest = tensor(&theirs.floats("signed.largest"));
    let nothing = OwnedTensor::zeros(DType::U8, &[n]);
    let no_size = OwnedTensor::zeros(DType::F32, &[blocks]);
    let moments = [&codes, &nothing, &largest, &no_size];
    let new = update(&vec![0.0; n], moments, [1.0, 0.5, 0.0, 1.0, 0.0]);
    let expected: Vec<f32> = theirs.floats("signed.again").iter().map(|x| -x).collect();
    assert_eq!(floats(&new[0].bytes()), expected);
}

#[test]
fn nf4_is_bitsandbytes() {
    let theirs = Theirs::read();
    for (name, dtype, shape) in [
        ("nf4.f32", DType::F32, [124, 154]),
        ("nf4.bf16", DType::BF16, [40, 50]),
    ] {
        let of = |part: &str| theirs.bytes(&format!("{name}.{part}"));
        let part = |name: &str, dtype: DType, is_scalar: bool| {
            let bytes = of(name);
            let n = bytes.len() / dtype.bytes() as usize;
            let shape = if is_scalar { vec![] } else { vec![n] };
            OwnedTensor::from_bytes(dtype, &shape, &bytes)
        };
        let ins = [
            part("codes", DType::U8, false),
            part("sizes", DType::U8, false),
            part("largest", DType::F32, false),
            part("offset", DType::F32, true),
        ];
        let attrs = [
            ("dtype".to_string(), artifact::Attr::Type(dtype)),
            ("shape".to_string(), artifact::Attr::Ints(shape.to_vec())),
        ];
        let outs = [(dtype, shape.map(|d| d as usize).to_vec())];
        let ours = run_op("nf4", &attrs, &ins.each_ref(), &outs, 0).unwrap();
        assert_eq!(ours[0].bytes(), of("again"), "{name}: the numbers again");

        let x = OwnedTensor::from_bytes(dtype, &outs[0].1, &of("x")).to_f64s();
        let x: Vec<f32> = x.into_iter().map(|x| x as f32).collect();
        let ours = Nf4::of(&x);
        assert_eq!(ours.codes, of("codes"), "{name}: codes");
        // PyTorch adds the blocks' sizes in another order, so its mean may be a neighbour of ours.
        let offset = floats(&of("offset"))[0];
        assert!(
            (ours.offset - offset).abs() <= 2e-7 * offset,
            "{name}: {} {offset}",
            ours.offset
        );
        let near = |a: u8, b: u8| a.abs_diff(b) <= 1;
        let sizes = ours.sizes.iter().zip(of("sizes"));
        assert!(sizes.clone().all(|(&a, b)| near(a, b)), "{name}: sizes");
        let others = sizes.filter(|(a, b)| **a != *b).count();
        assert!(
            others * 100 <= ours.sizes.len(),
            "{name}: {others} other sizes"
        );
    }
}

/// Adapters of a frozen layer, and a frozen head. The number of elements is no multiple of 64.
const LORA: &str = r#"graph lora {
  input  %x : f32[8,33]
  state  buffer %w -> %w : f32[71,33] "fc.base_layer.weight"
  state  buffer %u -> %u : f32[5,71] "out.weight"
  state  param  %a -> %a : f32[2,33] "fc.lora_A.default.weight"
  state  param  %b -> %b : f32[71,2] "fc.lora_B.default.weight"
  fwd fc  %h = matmul %x, %w ta=false tb=true : f32[8,71]
  fwd fc  %l = matmul %x, %a ta=false tb=true : f32[8,2]
  fwd fc  %m = matmul %l, %b ta=false tb=true : f32[8,71]
  fwd fc  %s = add %h, %m : f32[8,71]
  fwd act %t = tanh %s : f32[8,71]
  fwd out %y = matmul %t, %u ta=false tb=true : f32[8,5]
  fwd out %q = mul %y, %y : f32[8,5]
  fwd out %loss = sum %q dims=[0,1] keepdim=false : f32[]
  output loss = %loss
}"#;

/// The same with DoRA's norms of the rows of the layer with its adapters.
fn dora() -> String {
    let norms = r#"
  fwd fc  %ba = matmul %b, %a ta=false tb=false : f32[71,33]
  fwd fc  %v = add %w, %ba : f32[71,33]
  fwd fc  %v2 = mul %v, %v : f32[71,33]
  fwd fc  %n2 = sum %v2 dims=[1] keepdim=false : f32[71]
  fwd fc  %n = sqrt %n2 : f32[71]
  fwd fc  %s = add %h, %m : f32[8,71]
  fwd fc  %d = div %s, %n : f32[8,71]"#;
    let [before, after] = ["\n  fwd fc  %s = add %h, %m : f32[8,71]", "tanh %s"];
    LORA.replace(before, norms).replace(after, "tanh %d")
}

/// The same with the matrices of two experts in the place of the head.
fn experts() -> String {
    let [head, product] = [
        r#"buffer %u -> %u : f32[5,71] "out.weight""#,
        "fwd out %y = matmul %t, %u ta=false tb=true : f32[8,5]",
    ];
    let products = r#"fwd out %n = arange dtype=i64 shape=[2] start=3 step=4 : i64[2]
  fwd out %y = grouped_matmul %t, %u, %n tb=true : f32[8,5]"#;
    LORA.replace(head, r#"buffer %u -> %u : f32[2,5,71] "experts.weight""#)
        .replace(product, products)
}

fn compile(graph: &Graph, options: &Options) -> Result<Compiled, Error> {
    let device = devices::named("cpu").unwrap();
    let cost = Roofline::new(&device);
    pipeline::compile(graph.clone(), options, &device, &cost, &mut |_| ())
}

/// The four states of a matrix in NF4.
fn stored(path: &str, numbers: &[f32]) -> [(String, Vec<u8>); 4] {
    let nf4 = Nf4::of(numbers);
    let bytes = [
        nf4.codes,
        nf4.sizes,
        nf4.largest.iter().flat_map(|x| x.to_le_bytes()).collect(),
        nf4.offset.to_le_bytes().to_vec(),
    ];
    let mut bytes = bytes.into_iter();
    STATES.map(|state| (format!("{state}.{path}"), bytes.next().unwrap()))
}

/// A step on matrices in NF4 has the bits of the step on the numbers that they are decoded to, with
/// kernels of both kinds, at any budget, over micro-batches. The plan has no bytes for moments and
/// gradients of frozen matrices, and none for their numbers beyond one product.
#[test]
fn a_step_on_nf4_is_the_step_on_its_numbers() {
    is_the_step_on_its_numbers(LORA, 3);
}

/// So does one that adds adapters to a matrix.
#[test]
fn a_step_of_dora_on_nf4_is_the_step_on_its_numbers() {
    is_the_step_on_its_numbers(&dora(), 4);
}

/// And one whose frozen matrices are those of experts.
#[test]
fn a_step_of_experts_in_nf4_is_the_step_on_their_numbers() {
    is_the_step_on_its_numbers(&experts(), 3);
}

/// `decoded`: how often a step decodes matrices.
fn is_the_step_on_its_numbers(graph: &str, decoded: usize) {
    let graph = parse_graph(graph).unwrap();
    let (mut whole, mut in_nf4) = (Data::new(), Data::new());
    let mut parameters = 0;
    for (i, state) in graph.states.values().enumerate() {
        let ty = &graph.values[state.before].ty;
        let n = ty.numel() as usize;
        let number = |k: usize| ((k * 37 + 11 * i) as f32 * 0.618).sin() * 0.3;
        let numbers: Vec<f32> = (0..n).map(number).collect();
        if state.kind == StateKind::Param {
            parameters += n;
            whole.insert(state.path.clone(), tensor(&numbers).bytes());
            in_nf4.insert(state.path.clone(), tensor(&numbers).bytes());
            continue;
        }
        let states = stored(&state.path, &numbers);
        let blocks = n.div_ceil(64);
        let lengths = states.each_ref().map(|(_, bytes)| bytes.len());
        assert_eq!(
            lengths,
            [n.div_ceil(2), blocks, 4 * blocks.div_ceil(256), 4]
        );
        let ins: Vec<OwnedTensor> = states
            .iter()
            .zip([DType::U8, DType::U8, DType::F32, DType::F32])
            .enumerate()
            .map(|(i, ((_, bytes), dtype))| {
                let n = bytes.len() / dtype.bytes() as usize;
                let shape = if i == 3 { vec![] } else { vec![n] };
                OwnedTensor::from_bytes(dtype, &shape, bytes)
            })
            .collect();
        let attrs = [
            ("dtype".to_string(), artifact::Attr::Type(DType::F32)),
            ("shape".to_string(), artifact::Attr::Ints(vec![n as i64])),
        ];
        let ins: Vec<&OwnedTensor> = ins.iter().collect();
        let decoded = run_op("nf4", &attrs, &ins, &[(DType::F32, vec![n])], 0).unwrap();
        whole.insert(state.path.clone(), decoded[0].bytes());
        in_nf4.extend(states);
    }

    for (kernels, micro_batches) in [(Kernels::Plain, 1), (Kernels::Generated, 2)] {
        let of = |base| Options {
            base,
            kernels,
            micro_batches: Some(micro_batches),
            differentiate: true,
            optimizer: Optimizer::AdamW,
            ..Options::default()
        };
        let feeds: Vec<_> = (0..3)
            .map(|step: usize| {
                let hyper = Optimizer::AdamW.options().iter();
                let hyper = hyper.flat_map(|(_, x)| x.to_le_bytes()).collect();
                let x = |k: usize| tensor(&[(k * (step + 2)) as f32 * 0.01; 8 * 33]).bytes();
                let mut feed = std::collections::BTreeMap::from([(HYPER.to_string(), hyper)]);
                match micro_batches {
                    1 => drop(feed.insert("x".into(), x(1))),
                    n => feed.extend((0..n).map(|k| (format!("x.{k}"), x(k + 1)))),
                }
                feed
            })
            .collect();
        let train = |compiled: &Compiled, start: &Data| {
            let artifact = codegen::emit(compiled, start, codegen::Target::host()).unwrap();
            let options = runtime::Options::default();
            let (outcome, peaks) = run::compiled(&artifact, options, &feeds).unwrap();
            assert_eq!(peaks.device, compiled.planned_peak);
            assert_eq!(peaks, Peaks::planned(&artifact));
            outcome
        };
        let keep = Options {
            planner: Planner::Keep,
            ..of(Base::Nf4)
        };
        let keep = compile(&graph, &keep).unwrap();
        let tight = |bytes| Options {
            budget: Budget::Bytes(bytes),
            ..of(Base::Nf4)
        };
        let Err(Error::Infeasible(infeasible)) = compile(&graph, &tight(1)) else {
            panic!("a step should not fit a byte");
        };
        let least = compile(&graph, &tight(infeasible.smallest)).unwrap();
        let expected = train(&compile(&graph, &of(Base::Whole)).unwrap(), &whole);
        for compiled in [&keep, &least] {
            let outcome = train(compiled, &in_nf4);
            assert!(
                outcome.outputs == expected.outputs,
                "{kernels:?}: other losses"
            );
            for path in ["fc.lora_A.default.weight", "fc.lora_B.default.weight"] {
                assert!(outcome.states[path] == expected.states[path], "{path}");
            }
        }
        let states = keep.program.graph.states.values();
        let moments = states.filter(|state| state.kind == StateKind::Moment);
        let bytes = moments.map(|state| keep.program.graph.values[state.before].ty.bytes());
        assert_eq!(bytes.sum::<u64>(), 8 * parameters as u64 + 8);
        // The numbers of a matrix are kept for one product alone.
        let graph = &keep.program.graph;
        let (readers, mut n_decoded) = (graph.readers(), 0);
        for data in graph
            .nodes
            .values()
            .filter(|data| data.op.kind() == OpKind::Nf4)
        {
            assert_eq!(readers[data.outputs[0]].len(), 1);
            n_decoded += 1;
        }
        assert_eq!(n_decoded, decoded * micro_batches);
    }
}

/// A step without a frozen matrix says so.
#[test]
fn nothing_frozen_is_an_error() {
    let graph = parse_graph(&LORA.replace("buffer", "param ")).unwrap();
    let options = Options {
        base: Base::Nf4,
        differentiate: true,
        optimizer: Optimizer::AdamW,
        ..Options::default()
    };
    let error = compile(&graph, &options).unwrap_err().to_string();
    assert!(error.contains("none is frozen"), "{error}");
}
