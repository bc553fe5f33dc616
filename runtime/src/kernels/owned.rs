//! Kernels on tensors outside a pool: for tests and for evaluating graphs op by op. Memory is
//! allocated for each run.

use super::{Kernel, KernelError, Signature, find};
use crate::Team;
use crate::kernel::Tensor;
use crate::launch::Launch;
use artifact::{Attr, DType, Operand, Place};
use std::sync::Arc;

/// Bytes at an address that is a multiple of 64, as kernels expect them.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([u8; 64]);

/// A tensor with its memory.
#[derive(Clone, Debug)]
pub struct OwnedTensor {
    dtype: DType,
    shape: Vec<usize>,
    lines: Vec<Line>,
}

impl OwnedTensor {
    /// A tensor of zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> OwnedTensor {
        let bytes = shape.iter().product::<usize>() * dtype.bytes() as usize;
        // At least one line: an empty tensor has an address too.
        OwnedTensor {
            dtype,
            shape: shape.to_vec(),
            lines: vec![Line([0; 64]); bytes.div_ceil(64).max(1)],
        }
    }
    /// A tensor from its bytes, little-endian. Panics if the number of bytes is wrong.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> OwnedTensor {
        let mut tensor = OwnedTensor::zeros(dtype, shape);
        assert_eq!(
            bytes.len(),
            tensor.n_bytes(),
            "a {dtype:?}{shape:?} should have its bytes"
        );
        for (line, part) in tensor.lines.iter_mut().zip(bytes.chunks(64)) {
            line.0[..part.len()].copy_from_slice(part);
        }
        tensor
    }
    /// A tensor from numbers, rounded to the element type. Panics if the count is not the shape's.
    pub fn from_f64s(dtype: DType, shape: &[usize], numbers: &[f64]) -> OwnedTensor {
        let bytes: Vec<u8> = numbers
            .iter()
            .flat_map(|&x| encode(dtype, x, x as i64))
            .collect();
        OwnedTensor::from_bytes(dtype, shape, &bytes)
    }
    /// A tensor from integers, wrapped or rounded to the element type. Panics if the count is not
    /// the shape's.
    pub fn from_i64s(dtype: DType, shape: &[usize], numbers: &[i64]) -> OwnedTensor {
        let bytes: Vec<u8> = numbers
            .iter()
            .flat_map(|&x| encode(dtype, x as f64, x))
            .collect();
        OwnedTensor::from_bytes(dtype, shape, &bytes)
    }
    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }
    /// The bytes, little-endian.
    pub fn bytes(&self) -> Vec<u8> {
        self.lines
            .iter()
            .flat_map(|line| line.0)
            .take(self.n_bytes())
            .collect()
    }
    /// The elements as floating-point numbers.
    pub fn to_f64s(&self) -> Vec<f64> {
        self.bytes()
            .chunks(self.dtype.bytes() as usize)
            .map(|bytes| decode(self.dtype, bytes))
            .collect()
    }
    /// The elements of a tensor of integers or bools.
    pub fn to_i64s(&self) -> Vec<i64> {
        self.bytes()
            .chunks(self.dtype.bytes() as usize)
            .map(|bytes| decode_int(self.dtype, bytes))
            .collect()
    }
    /// The same bytes in another shape. Panics if the number of elements differs.
    pub fn reshape(&self, shape: &[usize]) -> OwnedTensor {
        OwnedTensor::from_bytes(self.dtype, shape, &self.bytes())
    }
    /// Sets every byte.
    pub fn fill(&mut self, byte: u8) {
        self.lines.fill(Line([byte; 64]));
    }
    /// The address of the bytes: a multiple of 64.
    pub fn as_ptr(&self) -> *const u8 {
        self.lines.as_ptr().cast()
    }
    /// The same address, for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.lines.as_mut_ptr().cast()
    }
    fn n_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bytes() as usize
    }
    fn operand(&self) -> Operand {
        let shape = self.shape.iter().map(|&d| d as u64).collect();
        Operand {
            place: Place { pool: 0, offset: 0 },
            dtype: self.dtype,
            shape,
        }
    }
    fn tensor(&self, data: *mut u8) -> Tensor {
        Tensor {
            dtype: self.dtype,
            shape: self.shape.clone().into(),
            data,
            bytes: self.n_bytes(),
        }
    }
}

fn encode(dtype: DType, float: f64, int: i64) -> Vec<u8> {
    match dtype {
        DType::F64 => float.to_le_bytes().to_vec(),
        DType::F32 => (float as f32).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(float).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f64(float).to_le_bytes().to_vec(),
        DType::Bool => vec![u8::from(float != 0.0)],
        _ => int.to_le_bytes()[..dtype.bytes() as usize].to_vec(),
    }
}
fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    let word = word(bytes);
    match dtype {
        DType::F64 => f64::from_bits(word),
        DType::F32 => f32::from_bits(word as u32).into(),
        DType::F16 => half::f16::from_bits(word as u16).to_f64(),
        DType::BF16 => half::bf16::from_bits(word as u16).to_f64(),
        _ => decode_int(dtype, bytes) as f64,
    }
}
fn decode_int(dtype: DType, bytes: &[u8]) -> i64 {
    let word = word(bytes);
    match dtype {
        DType::I8 => (word as i8).into(),
        DType::I16 => (word as i16).into(),
        DType::I32 => (word as i32).into(),
        DType::Bool => i64::from(word != 0),
        _ => word as i64,
    }
}
/// Up to eight bytes, little-endian.
fn word(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |word, &byte| word << 8 | u64::from(byte))
}

/// Runs an op on tensors; the results have the types `outs`. An error says what the kernel refused.
pub fn run_op(
    op: &str,
    attrs: &[(String, Attr)],
    inputs: &[&OwnedTensor],
    outs: &[(DType, Vec<usize>)],
    scratch_bytes: u64,
) -> Result<Vec<OwnedTensor>, KernelError> {
    run_op_inplace(op, attrs, inputs, outs, scratch_bytes, &[])
}

/// The same; each pair's operand lies on its result.
pub fn run_op_inplace(
    op: &str,
    attrs: &[(String, Attr)],
    inputs: &[&OwnedTensor],
    outs: &[(DType, Vec<usize>)],
    scratch_bytes: u64,
    pairs: &[(usize, usize)],
) -> Result<Vec<OwnedTensor>, KernelError> {
    let mut run = Run::new(op, attrs, inputs, outs, scratch_bytes, pairs)?;
    run.run()?;
    Ok(run.results)
}

/// A checked run of a kernel with its memory. It can be run many times.
pub struct Run<'a> {
    kernel: &'static Kernel,
    attrs: &'a [(String, Attr)],
    inputs: Vec<&'a OwnedTensor>,
    /// The results; unspecified before the first run.
    pub results: Vec<OwnedTensor>,
    scratch: OwnedTensor,
    pairs: Vec<(usize, usize)>,
}

impl<'a> Run<'a> {
    /// Makes a run; an error says what the kernel refused.
    pub fn new(
        op: &str,
        attrs: &'a [(String, Attr)],
        inputs: &[&'a OwnedTensor],
        outs: &[(DType, Vec<usize>)],
        scratch_bytes: u64,
        pairs: &[(usize, usize)],
    ) -> Result<Run<'a>, KernelError> {
        let kernel = find(op).ok_or_else(|| KernelError::NoKernel(op.into()))?;
        let operand = |(dtype, shape): &(DType, Vec<usize>)| {
            let shape = shape.iter().map(|&d| d as u64).collect();
            Operand {
                place: Place { pool: 0, offset: 0 },
                dtype: *dtype,
                shape,
            }
        };
        let ins: Vec<Operand> = inputs.iter().map(|t| t.operand()).collect();
        let types: Vec<Operand> = outs.iter().map(operand).collect();
        kernel.check(&Signature {
            attrs,
            ins: &ins,
            outs: &types,
            scratch: scratch_bytes,
        })?;

        // Not zeros, so that tests notice an element that a kernel did not write.
        let rubbish = Line([0xA5; 64]);
        let mut results: Vec<OwnedTensor> = outs
            .iter()
            .map(|(d, shape)| OwnedTensor::zeros(*d, shape))
            .collect();
        results.iter_mut().for_each(|t| t.lines.fill(rubbish));
        for &(i, j) in pairs {
            let declared = kernel.inplace.contains(&(i, j)) && ins.get(i) == types.get(j);
            if !declared {
                return Err(KernelError::NotInPlace {
                    op: kernel.name,
                    result: j,
                    operand: i,
                });
            }
            results[j].lines.clone_from(&inputs[i].lines);
        }
        let n = usize::try_from(scratch_bytes.div_ceil(64)).map_err(|_| KernelError::Scratch)?;
        let scratch = OwnedTensor {
            dtype: DType::U8,
            shape: vec![n * 64],
            lines: vec![rubbish; n],
        };
        Ok(Run {
            kernel,
            attrs,
            inputs: inputs.to_vec(),
            results,
            scratch,
            pairs: pairs.to_vec(),
        })
    }
    /// Runs it. In-place operands are the results of the previous run.
    pub fn run(&mut self) -> Result<(), KernelError> {
        self.run_between(|| {})
    }
    /// Runs it and calls `mark` right before and right after the kernel, to measure only the
    /// kernel.
    pub fn run_between(&mut self, mark: impl FnMut()) -> Result<(), KernelError> {
        self.run_on(None, mark)
    }
    /// The same on a team's threads, if the kernel can be split.
    pub fn run_on(
        &mut self,
        team: Option<&Team>,
        mut mark: impl FnMut(),
    ) -> Result<(), KernelError> {
        let launch = self.launch();
        mark();
        let ran = launch.run(team);
        mark();
        ran
    }
    /// The same in parts on this thread, the last part first. Parts have the sizes `lengths` in
    /// turn, as multiples of [`super::Cut::align`]. Returns the number of parts.
    pub fn run_in_parts(&mut self, lengths: &[usize]) -> Result<usize, KernelError> {
        self.launch().run_in_parts(lengths)
    }
    fn launch(&mut self) -> Arc<Launch> {
        let pointers: Vec<*mut u8> = self
            .results
            .iter_mut()
            .map(|t| t.lines.as_mut_ptr().cast())
            .collect();
        let outs: Vec<Tensor> = self
            .results
            .iter()
            .zip(&pointers)
            .map(|(t, &data)| t.tensor(data))
            .collect();
        let on = |i: usize| {
            self.pairs
                .iter()
                .find(|pair| pair.0 == i)
                .map(|pair| pointers[pair.1])
        };
        let place = |(i, t): (usize, &&OwnedTensor)| {
            t.tensor(on(i).unwrap_or_else(|| t.lines.as_ptr().cast_mut().cast()))
        };
        let ins: Vec<Tensor> = self.inputs.iter().enumerate().map(place).collect();
        let data = self.scratch.lines.as_mut_ptr().cast();
        let scratch = (0 < self.scratch.n_bytes()).then(|| self.scratch.tensor(data));
        // `Call` requires that results are separate tensors and that operands lie on them only in
        // declared pairs. The caller drops the launch; a team's threads that still hold it do not
        // use its tensors any more.
        Arc::new(Launch::new(
            self.kernel,
            self.attrs.into(),
            ins.into(),
            outs.into(),
            scratch,
        ))
    }
}
