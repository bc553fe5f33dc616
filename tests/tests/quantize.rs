//! Numbers in blocks of codes, bit for bit as the library bitsandbytes has them:
//! `data/quantize/gen_quantize.py` writes its side.

use artifact::DType;
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

/// An update of zeros by `adamw_8bit` from moments in codes; `hyper` is the rate, the betas, eps and
/// the decay.
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
            assert!((ours - size).abs() <= moment as f32 * 1e-7 * size, "{ours} is {size}");
        }
        // Its code for processors takes -1 for the lowest number of a map, where that for GPUs
        // takes -0.993, or 0: numbers near the lowest one have another neighbour there.
        let lowest = [-0.986, 1.7e-7][moment];
        let pairs = new[1 + moment].bytes().into_iter().zip(theirs.bytes(&of("codes")));
        let scaled = x.iter().enumerate().map(|(i, x)| x / sizes[i / 256]);
        let compared: Vec<_> = pairs.zip(scaled).filter(|(_, x)| *x > lowest).collect();
        assert!(compared.len() * 10 > n * 9, "{name}: only {} numbers", compared.len());
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
        assert!((ours.offset - offset).abs() <= 2e-7 * offset, "{name}: {} {offset}", ours.offset);
        let near = |a: u8, b: u8| a.abs_diff(b) <= 1;
        let sizes = ours.sizes.iter().zip(of("sizes"));
        assert!(sizes.clone().all(|(&a, b)| near(a, b)), "{name}: sizes");
        let others = sizes.filter(|(a, b)| **a != *b).count();
        assert!(others * 100 <= ours.sizes.len(), "{name}: {others} other sizes");
    }
}
