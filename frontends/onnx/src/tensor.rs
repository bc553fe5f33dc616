//! Tensors of a file: their types, their bytes, and small ones as numbers.

use crate::Error;
use crate::external::Files;
use crate::proto::TensorProto;
use half::{bf16, f16};
use ir::{DType, TensorType};

/// ONNX's numbers of element types, with the types that have a counterpart here.
const TYPES: [(i32, DType); 12] = [
    (1, DType::F32),
    (2, DType::U8),
    (3, DType::I8),
    (5, DType::I16),
    (6, DType::I32),
    (7, DType::I64),
    (9, DType::Bool),
    (10, DType::F16),
    (11, DType::F64),
    (16, DType::BF16),
    (17, DType::F8E4M3),
    (19, DType::F8E5M2),
];

/// Names of the other element types, for messages.
const OTHERS: [(i32, &str); 16] = [
    (0, "undefined"),
    (4, "uint16"),
    (8, "string"),
    (12, "uint32"),
    (13, "uint64"),
    (14, "complex64"),
    (15, "complex128"),
    (18, "float8e4m3fnuz"),
    (20, "float8e5m2fnuz"),
    (21, "uint4"),
    (22, "int4"),
    (23, "float4e2m1"),
    (24, "float8e8m0"),
    (25, "uint2"),
    (26, "int2"),
    (27, "float6"),
];

/// The element type of ONNX's number.
pub(crate) fn dtype(number: i64) -> Result<DType, String> {
    if let Some((_, dtype)) = TYPES.iter().find(|(n, _)| i64::from(*n) == number) {
        return Ok(*dtype);
    }
    let name = OTHERS.iter().find(|(n, _)| i64::from(*n) == number);
    let name = name.map_or_else(|| number.to_string(), |(_, name)| name.to_string());
    Err(format!("the element type {name} has no counterpart here"))
}

/// A tensor's type in the file.
pub(crate) fn tensor_type(proto: &TensorProto) -> Result<TensorType, Error> {
    let bad = |why: String| Error::new(name(proto), why);
    if proto.segment.is_some() {
        return Err(bad("is stored in segments, which no exporter writes".into()));
    }
    let dtype = dtype(proto.data_type.unwrap_or(0).into()).map_err(bad)?;
    let size = |&d: &i64| u64::try_from(d).map_err(|_| bad(format!("has the negative size {d}")));
    let shape: Vec<u64> = proto.dims.iter().map(size).collect::<Result<_, _>>()?;
    TensorType::new(dtype, shape).map_err(|e| bad(e.to_string()))
}

/// A tensor's name, for messages.
fn name(proto: &TensorProto) -> String {
    format!("tensor {}", proto.name())
}

/// True if a tensor's elements are in a file beside the model.
pub(crate) fn is_external(proto: &TensorProto) -> bool {
    const EXTERNAL: i32 = 1;
    proto.data_location() == EXTERNAL
}

/// A tensor's elements: row-major, little-endian. They are in the file, or in a file beside it.
pub(crate) fn bytes(
    proto: &TensorProto,
    ty: &TensorType,
    files: &mut Files,
) -> Result<Vec<u8>, Error> {
    let bad = |why: String| Error::new(name(proto), why);
    let data = if is_external(proto) {
        files.read(proto, ty.bytes()).map_err(bad)?
    } else if let Some(raw) = &proto.raw_data {
        raw.to_vec()
    } else {
        typed(proto, ty.dtype())
    };
    if data.len() as u64 != ty.bytes() {
        let why = format!(
            "is {ty} of {} bytes, but the file has {}",
            ty.bytes(),
            data.len()
        );
        return Err(bad(why));
    }
    if ty.dtype() == DType::Bool && data.iter().any(|&b| b > 1) {
        return Err(bad("has booleans that are neither 0 nor 1".into()));
    }
    Ok(data)
}

/// A tensor's elements, if they are in the file and complete.
pub(crate) fn inline(proto: &TensorProto, ty: &TensorType) -> Option<Vec<u8>> {
    bytes(proto, ty, &mut Files::beside(None)).ok()
}

/// The elements in the fields for numbers. Types of fewer than 32 bits are in `int32_data`.
fn typed(proto: &TensorProto, dtype: DType) -> Vec<u8> {
    let ints = proto.int32_data.iter();
    match dtype {
        DType::F32 => proto
            .float_data
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        DType::F64 => proto
            .double_data
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        DType::I64 => proto
            .int64_data
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        DType::I32 => ints.flat_map(|x| x.to_le_bytes()).collect(),
        DType::I16 | DType::F16 | DType::BF16 => {
            ints.flat_map(|&x| (x as u16).to_le_bytes()).collect()
        }
        DType::Bool | DType::U8 | DType::I8 | DType::F8E4M3 | DType::F8E5M2 => {
            ints.map(|&x| x as u8).collect()
        }
    }
}

/// Elements as numbers.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Elements {
    /// Integers, and booleans as 0 and 1.
    Ints(Vec<i64>),
    /// Floats of any size.
    Floats(Vec<f64>),
}

/// A small tensor whose elements are known while the file is read.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Numbers {
    /// Its type. Invariant: it has as many elements as `elements`, each of which it can hold.
    pub(crate) ty: TensorType,
    pub(crate) elements: Elements,
}

impl Numbers {
    /// Integers or booleans; they wrap like integers of the type. `None` if they do not fit the
    /// shape.
    pub(crate) fn ints(dtype: DType, shape: &[u64], ints: Vec<i64>) -> Option<Numbers> {
        let wrapped = |x: i64| match dtype {
            DType::Bool => i64::from(x != 0),
            DType::U8 => i64::from(x as u8),
            DType::I8 => i64::from(x as i8),
            DType::I16 => i64::from(x as i16),
            DType::I32 => i64::from(x as i32),
            _ => x,
        };
        let elements = Elements::Ints(ints.into_iter().map(wrapped).collect());
        Numbers::new(dtype, shape, elements)
    }
    /// Floats, rounded to the type. `None` if they do not fit the shape.
    pub(crate) fn floats(dtype: DType, shape: &[u64], floats: Vec<f64>) -> Option<Numbers> {
        let rounded = |x: f64| match dtype {
            DType::F16 => f16::from_f64(x).to_f64(),
            DType::BF16 => bf16::from_f64(x).to_f64(),
            DType::F32 => f64::from(x as f32),
            _ => x,
        };
        let elements = Elements::Floats(floats.into_iter().map(rounded).collect());
        Numbers::new(dtype, shape, elements)
    }
    /// Elements of either kind, converted to the type.
    pub(crate) fn of(dtype: DType, shape: &[u64], elements: Elements) -> Option<Numbers> {
        match elements {
            Elements::Ints(ints) if dtype.is_float() => {
                Numbers::floats(dtype, shape, ints.into_iter().map(|x| x as f64).collect())
            }
            Elements::Ints(ints) => Numbers::ints(dtype, shape, ints),
            Elements::Floats(floats) if dtype.is_float() => Numbers::floats(dtype, shape, floats),
            Elements::Floats(floats) if dtype == DType::Bool => Numbers::ints(
                dtype,
                shape,
                floats.into_iter().map(|x| (x != 0.0).into()).collect(),
            ),
            Elements::Floats(floats) => {
                Numbers::ints(dtype, shape, floats.into_iter().map(|x| x as i64).collect())
            }
        }
    }
    fn new(dtype: DType, shape: &[u64], elements: Elements) -> Option<Numbers> {
        let ty = TensorType::new(dtype, shape).ok()?;
        let n = match &elements {
            Elements::Ints(list) => list.len(),
            Elements::Floats(list) => list.len(),
        };
        (ty.numel() == n as u64 && !dtype.is_eight_bit_float()).then_some(Numbers { ty, elements })
    }
    /// The elements of a tensor's bytes. `None` for types without arithmetic.
    pub(crate) fn from_bytes(ty: &TensorType, data: &[u8]) -> Option<Numbers> {
        let dtype = ty.dtype();
        let ints = |ints: Vec<i64>| Numbers::ints(dtype, ty.shape(), ints);
        let floats = |floats: Vec<f64>| Numbers::floats(dtype, ty.shape(), floats);
        match dtype {
            DType::Bool | DType::U8 => ints(data.iter().map(|&b| b.into()).collect()),
            DType::I8 => ints(data.iter().map(|&b| i64::from(b as i8)).collect()),
            DType::I16 => ints(chunks(data, |b| i16::from_le_bytes(b).into())),
            DType::I32 => ints(chunks(data, |b| i32::from_le_bytes(b).into())),
            DType::I64 => ints(chunks(data, i64::from_le_bytes)),
            DType::F16 => floats(chunks(data, |b| f16::from_le_bytes(b).to_f64())),
            DType::BF16 => floats(chunks(data, |b| bf16::from_le_bytes(b).to_f64())),
            DType::F32 => floats(chunks(data, |b| f32::from_le_bytes(b).into())),
            DType::F64 => floats(chunks(data, f64::from_le_bytes)),
            DType::F8E4M3 | DType::F8E5M2 => None,
        }
    }
    /// The elements as bytes: row-major, little-endian.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        match &self.elements {
            Elements::Ints(list) => {
                let n = self.ty.dtype().bytes() as usize;
                list.iter()
                    .flat_map(|x| x.to_le_bytes().into_iter().take(n))
                    .collect()
            }
            Elements::Floats(list) => {
                let list = list.iter();
                match self.ty.dtype() {
                    DType::F16 => list.flat_map(|&x| f16::from_f64(x).to_le_bytes()).collect(),
                    DType::BF16 => list
                        .flat_map(|&x| bf16::from_f64(x).to_le_bytes())
                        .collect(),
                    DType::F32 => list.flat_map(|&x| (x as f32).to_le_bytes()).collect(),
                    _ => list.flat_map(|x| x.to_le_bytes()).collect(),
                }
            }
        }
    }
    /// The elements as integers, if they are.
    pub(crate) fn as_ints(&self) -> Option<&[i64]> {
        match &self.elements {
            Elements::Ints(list) => Some(list),
            Elements::Floats(_) => None,
        }
    }
    /// The elements as floats; large integers are rounded.
    pub(crate) fn to_floats(&self) -> Vec<f64> {
        match &self.elements {
            Elements::Ints(list) => list.iter().map(|&x| x as f64).collect(),
            Elements::Floats(list) => list.clone(),
        }
    }
    /// A number without dimensions.
    pub(crate) fn int(value: i64) -> Option<Numbers> {
        Numbers::ints(DType::I64, &[], vec![value])
    }
    /// A boolean without dimensions.
    pub(crate) fn boolean(value: bool) -> Option<Numbers> {
        Numbers::ints(DType::Bool, &[], vec![value.into()])
    }
    /// The only element.
    pub(crate) fn scalar(&self) -> Option<lower::Scalar> {
        if self.ty.numel() == 1 {
            self.uniform()
        } else {
            None
        }
    }
    /// The number that all elements are; `None` if they differ. Without elements it is 0.
    pub(crate) fn uniform(&self) -> Option<lower::Scalar> {
        use lower::Scalar;
        match &self.elements {
            Elements::Ints(list) => {
                let first = list.first().copied().unwrap_or(0);
                list.iter()
                    .all(|&x| x == first)
                    .then_some(Scalar::Int(first))
            }
            Elements::Floats(list) => {
                let first = list.first().copied().unwrap_or(0.0);
                let same = |x: &f64| x.to_bits() == first.to_bits();
                list.iter().all(same).then_some(Scalar::Float(first))
            }
        }
    }
}

fn chunks<const N: usize, T>(data: &[u8], convert: fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, _) = data.as_chunks::<N>();
    chunks.iter().map(|&chunk| convert(chunk)).collect()
}
